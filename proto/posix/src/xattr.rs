//! Names of extended attributes, as Linux has them (xattr(7)).

/// The label that SELinux gives a file.
pub const SELINUX: &[u8] = b"security.selinux";
/// What lets a program run with more rights than its caller has.
pub const CAPABILITY: &[u8] = b"security.capability";

/// Bytes of a name, at most.
pub const NAME_BYTES_MAX: usize = 255;
/// What names begin with that anybody may choose the rest of; those of `system.` are the kernel's.
const PREFIXES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// Whether a name has one of the prefixes that are kept.
pub fn has_kept_prefix(name: &[u8]) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether a name is a prefix and nothing behind it, which is `EINVAL` for local file systems.
pub fn is_bare_prefix(name: &[u8]) -> bool {
    PREFIXES.contains(&name)
}

/// The bit, in `Mount.probed_xattrs`, of a mount whose inodes may have whatever they like: the bucket has not said yet
/// what they have.
pub const UNLISTED: u32 = 4;

/// The bit, in `Mount.probed_xattrs`, of an attribute that programs such as `ls -l` ask each file for, and most have
/// not; 0 for others, and for access lists, of which the kernel itself keeps for each inode that it has none.
pub fn probed(name: &[u8]) -> u32 {
    match name {
        SELINUX => 1,
        CAPABILITY => 2,
        _ => 0,
    }
}

/// Whether it can be a name at all: 1 to [`NAME_BYTES_MAX`] bytes without a NUL. Others are `ERANGE`.
pub fn has_length(name: &[u8]) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acl::{ACCESS, DEFAULT};

    #[test]
    fn what_programs_ask_each_file_for_has_a_bit_of_its_own() {
        assert_eq!([SELINUX, CAPABILITY].map(probed), [1, 2]);
        assert!([SELINUX, CAPABILITY].iter().all(|name| probed(name) & UNLISTED == 0));
        for other in [&b"security.ima"[..], b"security.", b"user.selinux", ACCESS, DEFAULT, b""] {
            assert_eq!(probed(other), 0);
        }
    }
}

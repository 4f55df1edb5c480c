//! Names of extended attributes, as Linux has them (xattr(7)).

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

/// Whether it can be a name at all: 1 to [`NAME_BYTES_MAX`] bytes without a NUL. Others are `ERANGE`.
pub fn has_length(name: &[u8]) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(&0)
}

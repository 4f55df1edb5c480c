//! Extended attributes as they follow an inode: a head of 12 bytes, then entries of a number for the prefix, the rest
//! of the name, and the value, each a multiple of four bytes.

use crate::error::EntryFault;
use crate::tree::Xattr;

pub(crate) const HEAD: usize = 12;
pub(crate) const ENTRY: usize = 4;
/// An inode counts them in units of four bytes, the head as one.
const BYTES_MAX: usize = HEAD + 4 * (u16::MAX as usize - 1);

/// Names that are what they begin with are those of access lists.
const PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

pub(crate) fn prefix(number: u8) -> Option<&'static [u8]> {
    PREFIXES.into_iter().find(|&(known, _)| known == number).map(|(_, prefix)| prefix)
}

/// What an inode counts of so many bytes.
pub(crate) fn count(bytes: usize) -> u16 {
    if bytes == 0 { 0 } else { ((bytes - HEAD) / 4 + 1) as u16 }
}

/// The inverse of `count`.
pub(crate) fn bytes(count: u16) -> usize {
    if count == 0 { 0 } else { HEAD + 4 * (usize::from(count) - 1) }
}

/// In order of their names; nothing where there are none.
pub(crate) fn encode(xattrs: &[Xattr<'_>]) -> Result<Vec<u8>, EntryFault> {
    if xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut sorted: Vec<_> = xattrs.iter().collect();
    sorted.sort_unstable_by_key(|xattr| xattr.name);
    if sorted.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(EntryFault::Xattr);
    }
    let mut encoded = vec![0; HEAD];
    for Xattr { name, value } in sorted {
        let (number, rest) = split(name).ok_or(EntryFault::Xattr)?;
        let length = u8::try_from(rest.len()).map_err(|_| EntryFault::Xattr)?;
        let value_length = u16::try_from(value.len()).map_err(|_| EntryFault::Xattr)?;
        encoded.extend_from_slice(&[length, number]);
        encoded.extend_from_slice(&value_length.to_le_bytes());
        encoded.extend_from_slice(rest);
        encoded.extend_from_slice(value);
        encoded.resize(encoded.len().next_multiple_of(4), 0);
    }
    if encoded.len() > BYTES_MAX { Err(EntryFault::Xattr) } else { Ok(encoded) }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    let (number, prefix) = PREFIXES.into_iter().find(|(_, prefix)| name.starts_with(prefix))?;
    let rest = &name[prefix.len()..];
    (rest.is_empty() != prefix.ends_with(b".") && !rest.contains(&0)).then_some((number, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(names: &[&[u8]]) -> Result<Vec<u8>, EntryFault> {
        let xattrs: Vec<_> = names.iter().map(|name| Xattr { name, value: b"v" }).collect();
        encode(&xattrs)
    }

    #[test]
    fn names_that_have_no_place_are_refused() {
        let long = [b"user.", &[b'a'; 256][..]].concat();
        let refused: [&[u8]; 6] =
            [b"user.", b"system.nfs4_acl", b"system.posix_acl_access2", b"lustre.lov", b"user.a\0b", &long];
        for name in refused {
            assert_eq!(encoded(&[name]), Err(EntryFault::Xattr), "{}", name.escape_ascii());
        }
        assert_eq!(encoded(&[b"user.a", b"user.a"]), Err(EntryFault::Xattr));
        assert!(encoded(&[b"user.a", b"system.posix_acl_access", b"security.capability", b"trusted.x"]).is_ok());
    }

    #[test]
    fn the_order_in_which_they_are_given_does_not_matter() {
        assert_eq!(encoded(&[b"user.b", b"user.a"]), encoded(&[b"user.a", b"user.b"]));
    }

    #[test]
    fn counts_and_bytes_agree() {
        for length in [0, HEAD, HEAD + 4, HEAD + 400, BYTES_MAX] {
            assert_eq!(bytes(count(length)), length);
        }
    }
}

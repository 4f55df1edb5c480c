//! A page of directory entries, as READDIR and READDIRPLUS answer them: built entry by entry until the kernel's
//! buffer is full.

use zerocopy::IntoBytes;

use super::abi::{Dirent, EntryOut};

/// Entries begin at multiples of this many bytes.
const ALIGNMENT: usize = 8;

/// One answer being built, never longer than the kernel asked for.
#[derive(Debug)]
pub struct DirectoryPage {
    bytes: Vec<u8>,
    capacity: usize,
}

/// One entry.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryEntry<'a> {
    pub ino: u64,
    /// What the kernel passes to read on behind this entry; not 0.
    pub next_offset: u64,
    /// File type bits of the mode, as `S_IFDIR`.
    pub mode: u32,
    pub name: &'a [u8],
}

/// Whether an entry went in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Added {
    Yes,
    /// It did not fit: it is the first of the next page.
    Full,
}

impl DirectoryPage {
    /// A page of at most `capacity` bytes.
    pub fn new(capacity: usize) -> Self {
        Self { bytes: Vec::with_capacity(capacity), capacity }
    }

    /// An entry of READDIR.
    pub fn add(&mut self, entry: DirectoryEntry<'_>) -> Added {
        self.push(None, entry)
    }

    /// An entry of READDIRPLUS: the answer of a LOOKUP goes along. `.` and `..` carry one with `nodeid` 0.
    pub fn add_plus(&mut self, lookup: &EntryOut, entry: DirectoryEntry<'_>) -> Added {
        self.push(Some(lookup), entry)
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn push(&mut self, lookup: Option<&EntryOut>, entry: DirectoryEntry<'_>) -> Added {
        let lookup = lookup.map_or(&[][..], IntoBytes::as_bytes);
        let length = (lookup.len() + size_of::<Dirent>() + entry.name.len()).next_multiple_of(ALIGNMENT);
        if self.bytes.len() + length > self.capacity {
            return Added::Full;
        }
        let end = self.bytes.len() + length;
        let head = Dirent {
            ino: entry.ino,
            off: entry.next_offset,
            // Names are at most NAME_MAX bytes long; a longer one would not have fitted a page.
            namelen: entry.name.len() as u32,
            kind: (entry.mode & libc::S_IFMT) >> 12,
        };
        self.bytes.extend_from_slice(lookup);
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(entry.name);
        self.bytes.resize(end, 0);
        Added::Yes
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes;

    use super::*;

    #[test]
    fn entries_are_padded_and_the_page_never_overflows() {
        let mut page = DirectoryPage::new(80);
        let entry = |name| DirectoryEntry { ino: 5, next_offset: 9, mode: libc::S_IFREG | 0o644, name };
        assert_eq!(page.add(entry(b"abc")), Added::Yes);
        assert_eq!(page.as_bytes().len(), 32);
        assert_eq!(page.add(entry(b"12345678")), Added::Yes);
        assert_eq!(page.as_bytes().len(), 64);
        assert_eq!(page.add(entry(b"x")), Added::Full);
        assert_eq!(page.as_bytes().len(), 64);
        let (head, rest) = Dirent::read_from_prefix(page.as_bytes()).unwrap();
        assert_eq!(head, Dirent { ino: 5, off: 9, namelen: 3, kind: 8 });
        assert_eq!(&rest[..8], b"abc\0\0\0\0\0");
    }
}

//! Listings of what a mount has of its own: short ones, that are made for each answer.

use super::directory::ReaddirKind;
use crate::kernel::abi::EntryOut;
use crate::kernel::directory::{Added, DirectoryEntry};
use crate::kernel::{DirectoryPage, READ_MAX, Reply};

/// The place of an entry, its name, number and type.
pub(super) type VirtualEntry<'n> = (u64, &'n [u8], u64, u32);

/// Answers with entries whose places are behind `offset`. Places ascend.
pub(super) fn list<'n>(
    entries: impl Iterator<Item = VirtualEntry<'n>>,
    offset: u64,
    size: u32,
    kind: ReaddirKind,
    reply: Reply,
) {
    let mut page = DirectoryPage::new(READ_MAX.min(size as usize));
    for (place, name, ino, mode) in entries.filter(|(place, ..)| *place > offset) {
        let entry = DirectoryEntry { ino, next_offset: place, mode, name };
        let added = match kind {
            ReaddirKind::Names => page.add(entry),
            // Without a node id: the kernel takes no reference.
            ReaddirKind::Entries => page.add_plus(&EntryOut::default(), entry),
        };
        if added == Added::Full {
            break;
        }
    }
    reply.bytes(page.as_bytes());
}

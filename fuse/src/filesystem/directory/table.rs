//! Directories that are open, and the cookies by which their readers name places.

use cavern_client::OpenInode;
use cavern_client::journal::Slot;
use parking_lot::Mutex;

use super::cookies::CookieTable;
use super::cursor::Cursor;
use crate::filesystem::handles::Handles;
use crate::invalidation::ListingStart;

/// Open directories by the number of the handle.
#[derive(Default)]
pub struct DirectoryTable {
    pub handles: Handles<DirectoryHandle>,
    pub(super) cookies: CookieTable,
}

/// An open directory.
#[derive(Debug)]
pub struct DirectoryHandle {
    pub(super) inode: u64,
    pub(super) parent: u64,
    /// In fs-mode mounts.
    pub(super) kept: Option<OpenInode>,
    /// For the kernel's own cache of the listing.
    pub(super) begun: ListingStart,
    pub(super) cursor: Mutex<Cursor>,
    /// What a process after this one finds of it, and of what its reader was given last.
    pub(super) _noted: Option<Slot>,
    pub(super) position: Mutex<Option<Slot>>,
}

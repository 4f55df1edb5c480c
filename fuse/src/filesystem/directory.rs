//! OPENDIR, READDIR, READDIRPLUS and RELEASEDIR.
//!
//! A directory may have a million entries, so a handle holds a window of its listing, and the [`Cursor`] knows where to
//! read on. What is in the client's cache is answered on the event loop; a page that must be asked of the master makes
//! the request a task.

mod cookies;
mod cursor;
pub(super) mod table;

use std::sync::Arc;

use cavern_client::journal::Slot;
use cavern_client::{ClientError, Node, OpenInode};
use cavern_posix::mode::type_bits;
use cavern_proto::journal::{HandleRecord, PositionRecord};
use parking_lot::Mutex;

use super::parts::Inner;
use crate::invalidation::Listing;
use crate::kernel::abi::fopen;
use crate::kernel::directory::{Added, DirectoryEntry};
use crate::kernel::{Delivery, DirectoryPage, READ_MAX, Reply};
use crate::mount_journal;
use cookies::BEGINNING;
use cursor::{Cursor, Fetch, Position};
use table::DirectoryHandle;

/// Entries asked for at a time. A READDIRPLUS of 128 KiB holds about 700.
const PAGE_ENTRIES: usize = 1024;

/// What an entry is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaddirKind {
    /// READDIR: name, inode and type.
    Names,
    /// READDIRPLUS: what a LOOKUP would answer too.
    Entries,
}

/// How far an answer got with what is in memory.
enum Progress {
    Answer(Answer),
    /// This must be read first.
    Needs(Fetch),
}

/// A page with what it took from the listing.
struct Answer {
    page: DirectoryPage,
    /// The cookie that it begins behind, and how many entries of the listing it has.
    offset: u64,
    entries: usize,
    /// Changes of the namespace before it was built.
    changes: u64,
}

impl Inner {
    pub(super) fn opendir(self: &Arc<Self>, kernel_node: u64, reply: Reply) {
        if let Some(node) = self.known_node(kernel_node)
            && !node.limits_users()
            && let Some(kept) = self.client.metadata().keep_directory_cached(&node)
        {
            return self.opened_directory(&node, kept, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let opened = async {
                let node = this.node(kernel_node).await?;
                this.check_readable(&node, reply.caller()).await?;
                let kept = this.client.metadata().keep_directory(&node).await?;
                Ok::<_, ClientError>((node, kept))
            };
            let opened = opened.await;
            this.answer_with("opendir", opened, reply, |(node, kept), reply| this.opened_directory(&node, kept, reply));
        });
    }

    fn opened_directory(&self, node: &Arc<Node>, kept: Option<OpenInode>, reply: Reply) {
        if !node.is_directory() {
            return reply.error(libc::ENOTDIR);
        }
        // First, so that what the kernel has kept of the listing has a meaning.
        let names = self.directories.cookies.opened(node.inode, 0);
        let (begun, listing) = self.invalidations.listings().begin(node.inode);
        let mut flags = 0;
        if self.attr_defaults.kernel_cache && !node.is_strict() {
            flags |= fopen::CACHE_DIR;
            if listing == Listing::Current && self.client.metadata().trusts_listing(node.inode) {
                flags |= fopen::KEEP_CACHE;
            }
        }
        if kept.is_some() {
            self.files.inodes.opened(node, || None);
        }
        if let Some(earlier) = self.mount_journal.superseded(&reply) {
            self.closed_directory(earlier.number);
        }
        let number = self.directories.handles.reserve();
        let noted = self.mount_journal.note_handle(&HandleRecord {
            number,
            inode: node.inode,
            unique: reply.unique(),
            is_directory: true,
            is_kept: kept.is_some(),
            parent: node.parent,
            ..HandleRecord::default()
        });
        let cursor = Mutex::new(Cursor::new(names));
        let position = Mutex::default();
        let (inode, parent) = (node.inode, node.parent);
        let handle = DirectoryHandle { inode, parent, kept, begun, cursor, _noted: noted, position };
        self.directories.handles.insert(number, Arc::new(handle));
        if reply.opened(number, flags) == Delivery::Refused {
            self.closed_directory(number);
        }
    }

    pub(super) fn readdir(self: &Arc<Self>, fh: u64, offset: u64, size: u32, form: ReaddirKind, reply: Reply) {
        let Some(handle) = self.directories.handles.get(fh) else { return reply.error(self.files.lost.errno(fh)) };
        let size = READ_MAX.min(size as usize);
        if offset == 0 {
            // rewinddir(3) must show the directory anew.
            handle.cursor.lock().rewind();
        }
        let metadata = self.client.metadata();
        loop {
            let fetch = match self.progress(&handle, offset, size, form) {
                Progress::Answer(answer) => return self.give(&handle, fh, &answer, form, reply),
                Progress::Needs(fetch) => fetch,
            };
            match metadata.cached_dir_page(handle.inode, &fetch.after, PAGE_ENTRIES) {
                Some(page) => handle.cursor.lock().accept(fetch, page.entries, page.end),
                None => break,
            }
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let answer = this.readdir_waiting(&handle, offset, size, form).await;
            this.answer_with("readdir", answer, reply, |answer, reply| this.give(&handle, fh, &answer, form, reply));
        });
    }

    async fn readdir_waiting(
        &self,
        handle: &DirectoryHandle,
        offset: u64,
        size: usize,
        form: ReaddirKind,
    ) -> Result<Answer, ClientError> {
        loop {
            let fetch = match self.progress(handle, offset, size, form) {
                Progress::Answer(answer) => return Ok(answer),
                Progress::Needs(fetch) => fetch,
            };
            let page = self.client.metadata().read_dir(handle.inode, &fetch.after, PAGE_ENTRIES).await?;
            handle.cursor.lock().accept(fetch, page.entries, page.end);
        }
    }

    /// Answers, and has the kernel forget what may have changed before it received the answer.
    fn give(&self, handle: &DirectoryHandle, number: u64, answer: &Answer, form: ReaddirKind, reply: Reply) {
        self.note_position(handle, number, answer);
        reply.bytes(answer.page.as_bytes());
        if form == ReaddirKind::Names || self.invalidations.listings().changes() == answer.changes {
            return;
        }
        let directory = self.root.to_kernel(handle.inode);
        for (_, node) in handle.cursor.lock().window_after(answer.offset, answer.entries) {
            self.invalidations.repeat_entry(directory, &node.name);
        }
    }

    /// Enters what the reader is about to be given: it may go on after any of these names.
    fn note_position(&self, handle: &DirectoryHandle, number: u64, answer: &Answer) {
        let mut slot = handle.position.lock();
        self.mount_journal.note_position(&mut slot, || {
            let cursor = handle.cursor.lock();
            let before = cursor.names().lock().name(answer.offset).map(|name| (answer.offset, name.to_vec()));
            let given = cursor.window_after(answer.offset, answer.entries);
            let given = given.map(|(cookie, node)| (*cookie, node.name.to_vec()));
            let (cookies, names) = before.into_iter().chain(given).unzip();
            mount_journal::position_record(number, cookies, names)
        });
    }

    /// A directory that a process before this one opened.
    pub(super) fn restore_directory(
        &self,
        record: &HandleRecord,
        node: &Arc<Node>,
        kept: Option<OpenInode>,
        (noted, position): (Slot, Option<(Slot, PositionRecord)>),
    ) {
        if kept.is_some() {
            self.files.inodes.opened(node, || None);
        }
        let epoch = self.mount_journal.journal().map_or(0, |journal| journal.epoch());
        let names = self.directories.cookies.opened(node.inode, epoch);
        let (begun, _) = self.invalidations.listings().begin(node.inode);
        let slot = position.map(|(slot, position)| {
            let mut names = names.lock();
            mount_journal::given(&position).for_each(|(cookie, name)| names.given_before(cookie, name));
            slot
        });
        let handle = DirectoryHandle {
            inode: record.inode,
            parent: record.parent,
            kept,
            begun,
            cursor: Mutex::new(Cursor::new(names)),
            _noted: Some(noted),
            position: Mutex::new(slot),
        };
        self.directories.handles.insert(record.number, Arc::new(handle));
    }

    /// Builds the answer from the window. An answer that has entries is given even when more would fit, because a
    /// partial answer is right and a wait is not needed.
    fn progress(&self, handle: &DirectoryHandle, offset: u64, size: usize, form: ReaddirKind) -> Progress {
        let changes = self.invalidations.listings().changes();
        let mut page = DirectoryPage::new(size);
        let mut cursor = handle.cursor.lock();
        let (mut place, mut entries) = (offset, 0);
        let ended = loop {
            if place < BEGINNING {
                let (name, inode) = if place == 0 { (&b"."[..], handle.inode) } else { (&b".."[..], handle.parent) };
                if self.add_dot(&mut page, name, inode, place + 1, form) == Added::Full {
                    break false;
                }
                place += 1;
                continue;
            }
            match cursor.after(place) {
                Position::Entry(cookie, node) => {
                    if self.add(&mut page, node, cookie, form) == Added::Full {
                        break false;
                    }
                    (place, entries) = (cookie, entries + 1);
                }
                Position::End => break page.is_empty(),
                // Only the dots do not count: a directory is worth waiting for its first page.
                Position::Fetch(_) if entries > 0 => break false,
                Position::Fetch(fetch) => return Progress::Needs(fetch),
            }
        };
        if ended && cursor.read_through() {
            self.invalidations.listings().complete(handle.inode, handle.begun);
        }
        Progress::Answer(Answer { page, offset: offset.max(BEGINNING), entries, changes })
    }

    fn add(&self, page: &mut DirectoryPage, node: &Node, next_offset: u64, form: ReaddirKind) -> Added {
        let mode = type_bits(node.kind);
        let entry = DirectoryEntry { ino: self.root.shown_number(node.inode), next_offset, mode, name: &node.name };
        match form {
            ReaddirKind::Names => page.add(entry),
            // Without a node id: the kernel asks for the attributes when somebody wants them, and takes no reference to
            // an inode whose name it would not believe anyway.
            ReaddirKind::Entries if node.lacks_attributes() || node.is_strict() || !self.attr_defaults.kernel_cache => {
                page.add_plus(&Default::default(), entry)
            }
            ReaddirKind::Entries => page.add_plus(&self.entry_of(node), entry),
        }
    }

    fn add_dot(&self, page: &mut DirectoryPage, name: &[u8], inode: u64, next_offset: u64, form: ReaddirKind) -> Added {
        let entry = DirectoryEntry { ino: self.root.shown_number(inode), next_offset, mode: libc::S_IFDIR, name };
        match form {
            ReaddirKind::Names => page.add(entry),
            // Node id 0: the kernel takes no reference.
            ReaddirKind::Entries => page.add_plus(&Default::default(), entry),
        }
    }

    pub(super) fn releasedir(&self, fh: u64, reply: Reply) {
        self.closed_directory(fh);
        reply.done();
    }

    fn closed_directory(&self, number: u64) {
        let Some(handle) = self.directories.handles.remove(number) else { return };
        if handle.kept.is_some() {
            self.files.inodes.closed(handle.inode);
        }
        self.directories.cookies.closed(handle.inode, |inode| self.invalidations.listings().forget(inode));
    }
}

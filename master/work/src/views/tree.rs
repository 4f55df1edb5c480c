//! What is frozen, read from one snapshot of the tables: directories breadth-first and names in their order, which is
//! that of [`cavern_erofs::Tree`]. Its memory is that of some pages of names, eight bytes for each directory that waits
//! for its turn, and eight for each inode of several names.

use std::cmp::Ordering;
use std::collections::{HashSet, VecDeque};
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use bytes::Bytes;
use cavern_erofs::{Attributes, Timestamp};
use cavern_posix::acl::is_acl;
use cavern_posix::mode::MODE_BITS;
use cavern_posix::xattr::{has_kept_prefix, is_bare_prefix};
use cavern_proto::master::{CreateViewRequest, Extent, Kind, OwnAttributes};
use cavern_proto::record::{InodeRecord, ViewFile};
use cavern_proto::view_file::RUN_BYTES_MAX;
use cavern_state::records::{attributes, is_truncated};
use cavern_state::tables::{Row, Rows};
use cavern_state::{StateError, Tables, clean_object, schema};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::MakingProgress;
use crate::error::WorkError;

/// Names of a page at most, blocks of their files from which on it gets no more, and pages that are read before they
/// are written.
const PAGE_NAMES: usize = 1024;
const PAGE_BLOCKS: usize = 1 << 18;
pub(super) const PAGES_AHEAD: usize = 4;
/// Inodes that are passed over for what a look-up of one costs.
const NEAR: u64 = 64;
const SECOND_NS: i64 = 1_000_000_000;

/// What is frozen.
pub(super) struct TreeSource {
    /// The directory, its mount, and the root of that.
    pub top: u64,
    pub mount_id: u32,
    pub root_inode: u64,
    pub is_fs_mode: bool,
    /// Of the blocks of fs-mode files, in bytes.
    pub block_size: u64,
    /// What the keys of the mount begin with.
    pub prefix: String,
    /// Owner and permissions of what has none of its own.
    pub looks: CreateViewRequest,
}

/// Names of one directory, in their order.
pub(super) struct TreePage {
    /// What the keys of what is in the directory begin with; empty where they cannot be keys.
    pub key: Arc<str>,
    pub entries: Vec<TreeEntry>,
    /// The directory has no more.
    pub is_last: bool,
}

/// A name, and what it leads to.
pub(super) struct TreeEntry {
    pub name: Bytes,
    pub id: u64,
    pub kind: Kind,
    pub attributes: Attributes,
    pub xattrs: Vec<(Bytes, Bytes)>,
    /// Of a symlink.
    pub target: Bytes,
    /// The number of a device.
    pub device: u32,
    /// Of a file, but not of its further names.
    pub runs: Vec<FileRun>,
}

/// Bytes of a file that follow those of the run before, and where they are; `None` for a hole.
pub(super) type FileRun = (u64, Option<ViewFile>);

impl TreeEntry {
    /// Of which it is said where they are.
    fn blocks(&self) -> usize {
        self.runs.iter().flat_map(|(_, file)| file).map(|file| file.generations.len()).sum()
    }
}

/// How reading has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadEnd {
    All,
    /// A directory was never listed: its names are not known.
    Unlisted,
    /// Nobody takes the pages any more.
    GivenUp,
}

/// Reads, for one that writes meanwhile.
pub(super) struct TreeReader<'a> {
    tables: Tables<'a>,
    source: &'a TreeSource,
    pages: SyncSender<TreePage>,
    progress: &'a MakingProgress,
    given_up: CancellationToken,
    /// How it ends, where that is early.
    end: ReadEnd,
    inodes: NearInodes<'a>,
    /// Directories, in the order of their names.
    waiting: VecDeque<u64>,
    /// A directory, and what the keys of what is in it begin with: that above the one that was asked about last.
    above: (u64, Option<String>),
    /// Inodes of several names that were come across.
    linked: HashSet<u64>,
}

impl<'a> TreeReader<'a> {
    /// All that the tables say is to be of one moment.
    pub fn new(
        tables: Tables<'a>,
        source: &'a TreeSource,
        pages: SyncSender<TreePage>,
        progress: &'a MakingProgress,
        given_up: CancellationToken,
    ) -> Self {
        let inodes = NearInodes { tables, rows: tables.rows(schema::Inodes, ()), next: None, last: 0 };
        let (end, waiting, above, linked) = (ReadEnd::All, VecDeque::new(), (0, None), HashSet::new());
        Self { tables, source, pages, progress, given_up, end, inodes, waiting, above, linked }
    }

    /// Sends the directory itself, as a page of one entry, and then all that is below it. Says so when it has begun:
    /// when an fs-mode mount is known to be listed, and may be frozen.
    pub fn run(mut self, begun: oneshot::Sender<()>) -> Result<ReadEnd, WorkError> {
        match self.read(begun) {
            Err(error) if self.end == ReadEnd::All => Err(error),
            _ => Ok(self.end),
        }
    }

    fn ends<T>(&mut self, end: ReadEnd) -> Result<T, WorkError> {
        self.end = end;
        Err(WorkError::stopping())
    }

    fn read(&mut self, begun: oneshot::Sender<()>) -> Result<(), WorkError> {
        let TreeSource { top, mount_id, root_inode, is_fs_mode, .. } = *self.source;
        let record = self.tables.inode(top)?.ok_or(WorkError::Gone(top))?;
        if is_fs_mode {
            let path = self.tables.path_below(top, root_inode)?.ok_or(WorkError::Gone(top))?;
            if self.tables.has_unlisted(mount_id, &path)? {
                return self.ends(ReadEnd::Unlisted);
            }
        }
        // Nobody waits for it where nothing is frozen.
        let _ = begun.send(());
        let key: Arc<str> = "".into();
        let entries = vec![self.entry(&key, Bytes::new(), top, &record)?];
        self.send(TreePage { key, entries, is_last: true })?;
        while let Some(directory) = self.waiting.pop_front() {
            self.directory(directory)?;
        }
        Ok(())
    }

    fn directory(&mut self, inode: u64) -> Result<(), WorkError> {
        let key: Arc<str> = self.key_below(inode)?.into();
        let mut names = Vec::new();
        for row in self.tables.rows(schema::Dentries, inode) {
            let row = row?;
            let ((_, name), dentry) = row.entry()?;
            names.push((Bytes::copy_from_slice(name), dentry.inode));
            if names.len() == PAGE_NAMES {
                self.page(&key, std::mem::take(&mut names), false)?;
            }
        }
        self.page(&key, names, true)
    }

    fn page(&mut self, key: &Arc<str>, names: Vec<(Bytes, u64)>, is_last: bool) -> Result<(), WorkError> {
        let (mut entries, mut blocks) = (Vec::new(), 0);
        for (name, inode) in names {
            let Some(record) = self.inodes.find(inode)? else { continue };
            let entry = self.entry(key, name, inode, &record)?;
            blocks += entry.blocks();
            entries.push(entry);
            if blocks >= PAGE_BLOCKS {
                self.send_entries(key, std::mem::take(&mut entries), false)?;
                blocks = 0;
            }
        }
        self.send_entries(key, entries, is_last)
    }

    fn send_entries(&mut self, key: &Arc<str>, entries: Vec<TreeEntry>, is_last: bool) -> Result<(), WorkError> {
        self.progress.lock().names += entries.len() as u64;
        self.send(TreePage { key: key.clone(), entries, is_last })
    }

    fn send(&mut self, page: TreePage) -> Result<(), WorkError> {
        match !self.given_up.is_cancelled() && self.pages.send(page).is_ok() {
            true => Ok(()),
            false => self.ends(ReadEnd::GivenUp),
        }
    }

    /// What the keys of what is in a directory begin with; empty where a name on the way cannot be in a key.
    fn key_below(&mut self, directory: u64) -> Result<String, WorkError> {
        let prefix = &self.source.prefix;
        if directory == self.source.root_inode {
            return Ok(prefix.clone());
        }
        let InodeRecord { parent, name, .. } = self.tables.inode(directory)?.ok_or(WorkError::Gone(directory))?;
        if self.above.0 != parent {
            let above = self.tables.directory(parent)?;
            self.above = (parent, above.and_then(|above| above.key_prefix(prefix)));
        }
        Ok(match (&self.above.1, std::str::from_utf8(&name)) {
            (Some(above), Ok(name)) => format!("{above}{name}/"),
            _ => String::new(),
        })
    }

    /// As the mount shows it.
    fn entry(&mut self, key: &str, name: Bytes, id: u64, record: &InodeRecord) -> Result<TreeEntry, WorkError> {
        let TreeSource { is_fs_mode, ref looks, .. } = *self.source;
        let attr = attributes(id, record);
        let kind = attr.kind();
        let (mode, uid, gid) = match kind {
            _ if is_fs_mode || attr.own() == OwnAttributes::Stored => (attr.mode, attr.uid, attr.gid),
            Kind::Directory => (looks.directory_mode, looks.uid, looks.gid),
            _ => (looks.file_mode, looks.uid, looks.gid),
        };
        let (links, is_first) = match kind {
            Kind::Directory => (if is_fs_mode { attr.nlink } else { 2 }, true),
            _ if !is_fs_mode || attr.nlink < 2 => (1, true),
            _ => self.links(id, record)?,
        };
        if kind == Kind::Directory {
            if !is_fs_mode && record.listed_ns == 0 {
                return self.ends(ReadEnd::Unlisted);
            }
            self.waiting.push_back(id);
        }
        let has_runs = is_first && matches!(kind, Kind::File | Kind::Unspecified);
        let runs = if has_runs { self.runs(key, &name, id, record)? } else { Vec::new() };
        let mut xattrs = if record.xattr_bytes > 0 { self.tables.xattrs(id)? } else { Vec::new() };
        xattrs.retain(|(name, _)| is_acl(name) || has_kept_prefix(name) && !is_bare_prefix(name));
        // Less than a second.
        let nanoseconds = attr.mtime_ns.rem_euclid(SECOND_NS) as u32;
        let mtime = Timestamp { seconds: attr.mtime_ns.div_euclid(SECOND_NS), nanoseconds };
        // Twelve bits.
        let permissions = (mode & MODE_BITS) as u16;
        let attributes = Attributes { permissions, uid, gid, links, mtime };
        Ok(TreeEntry { name, id, kind, attributes, xattrs, target: record.target.clone(), device: attr.rdev, runs })
    }

    /// How many of the names of an inode are in the view; and whether the one at hand is the first of them.
    fn links(&mut self, id: u64, record: &InodeRecord) -> Result<(u32, bool), WorkError> {
        if self.linked.contains(&id) {
            return Ok((2, false));
        }
        let TreeSource { top, root_inode, .. } = *self.source;
        let mut links = 0;
        for item in self.tables.names(id, record) {
            links += u32::from(top == root_inode || self.tables.is_below(item?.0, top)?);
        }
        if links > 1 {
            self.linked.insert(id);
        }
        Ok((links.max(1), true))
    }

    /// Where the bytes of a file are.
    fn runs(&self, key: &str, name: &Bytes, id: u64, record: &InodeRecord) -> Result<Vec<FileRun>, WorkError> {
        let size = record.size;
        let file_size = (size > RUN_BYTES_MAX).then_some(size);
        let mut whole = ViewFile { name: name.clone(), file_size, ..ViewFile::default() };
        let (mut blocks, mut in_object) = (None, size);
        if self.source.is_fs_mode && size > 0 {
            whole.inode = id;
            in_object = self.note_object(key, id, record, &mut whole)?;
            let is_there = |block: &Extent| !is_truncated(&record.cuts, block.index, block.generation);
            let recorded = self.tables.recorded_extents(id, 0);
            blocks = Some(recorded.filter(move |block| block.as_ref().map_or(true, &is_there)).peekable());
        } else {
            (whole.md5, whole.etag) = (record.etag_md5.clone(), record.etag_text.clone());
        }
        let (mut runs, mut offset) = (Vec::new(), 0);
        while offset < size {
            let length = RUN_BYTES_MAX.min(size - offset);
            let mut file = ViewFile { size: length, offset, ..whole.clone() };
            if let Some(blocks) = &mut blocks {
                file.generations = generations(blocks, (offset, offset + length), self.source.block_size.max(1))?;
            }
            let has_bytes = !file.generations.is_empty() || offset < in_object;
            runs.push((length, has_bytes.then_some(file)));
            offset += length;
        }
        Ok(runs)
    }

    /// Notes the object of an fs-mode file that has what no block has, or all of it. Gives how many bytes it has.
    fn note_object(&self, key: &str, id: u64, record: &InodeRecord, file: &mut ViewFile) -> Result<u64, WorkError> {
        let (object, etag, length, valid) = match (clean_object(self.tables, id)?, &record.origin) {
            (Some((object, etag)), _) => {
                file.is_whole = true;
                (object, etag, record.size, record.size)
            }
            (None, Some(origin)) => (origin.key.clone(), origin.etag.clone(), origin.length, origin.valid),
            (None, None) => return Ok(0),
        };
        file.set_object_etag(&etag);
        file.object_size = (length != record.size).then_some(length);
        file.valid = (valid != length).then_some(valid);
        if object.as_bytes().strip_prefix(key.as_bytes()) != Some(&file.name[..]) {
            file.key = object;
        }
        Ok(valid)
    }
}

/// Of the blocks of a part of a file, as [`ViewFile::generations`] has them. Those before the part are behind; one that
/// does not end with it is left for the next part, which begins within it.
fn generations(
    blocks: &mut Peekable<impl Iterator<Item = Result<Extent, StateError>>>,
    (start, end): (u64, u64),
    block_size: u64,
) -> Result<Vec<u32>, StateError> {
    let (first, last) = (start / block_size, (end - 1) / block_size);
    let mut generations = Vec::new();
    // A part has no more than 8 TiB, in blocks of a MiB and more.
    let mut add = |block: &Extent| {
        generations.resize((u64::from(block.index) - first) as usize, 0);
        generations.push(block.generation.saturating_add(1));
    };
    while let Some(block) = blocks.next_if(|block| block.as_ref().map_or(true, |block| u64::from(block.index) < last)) {
        add(&block?);
    }
    if let Some(Ok(block)) = blocks.peek()
        && u64::from(block.index) == last
    {
        add(block);
        if end % block_size == 0 {
            blocks.next();
        }
    }
    Ok(generations)
}

/// Reads inodes that are near each other as a rule, and in order, as those of a directory are: it goes on from the last
/// one, and looks up what is farther away.
struct NearInodes<'a> {
    tables: Tables<'a>,
    rows: Rows<'a, schema::Inodes>,
    /// Taken off `rows`, and not passed yet.
    next: Option<Row<schema::Inodes>>,
    /// Asked for last.
    last: u64,
}

impl NearInodes<'_> {
    fn find(&mut self, inode: u64) -> Result<Option<InodeRecord>, StateError> {
        if inode <= self.last || inode - self.last > NEAR {
            (self.rows, self.next) = (self.tables.rows_after(schema::Inodes, (), inode.checked_sub(1)), None);
        }
        self.last = inode;
        loop {
            if self.next.is_none() {
                self.next = self.rows.next().transpose()?;
            }
            let Some(row) = &self.next else { return Ok(None) };
            match row.key()?.cmp(&inode) {
                Ordering::Less => self.next = None,
                Ordering::Equal => return row.value().map(Some),
                Ordering::Greater => return Ok(None),
            }
        }
    }
}

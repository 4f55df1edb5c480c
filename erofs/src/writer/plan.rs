//! The first pass: asks the tree, decides where everything goes, and notes it for the second one.

use std::collections::HashMap;

use super::chunks::Chunks;
use super::directory::Directory;
use super::slots::{Fit, Slots};
use super::{Options, Summary, Times};
use crate::error::{EntryFault, Error};
use crate::format::{
    BLOCK, CHUNK_INDEXES, Form, InodeHead, Layout, NAME_MAX, ROOT, SLOT, TARGET_MAX, u16_at, u32_at, u64_at,
};
use crate::spill::{Cursor, Sequence};
use crate::tree::{Attributes, BLOCK_BYTES, Content, Kind, Node, Timestamp, Tree};
use crate::xattr;

/// What the second pass copies.
pub(super) struct Plan {
    /// Of each directory its entries and then itself, as `Record`s.
    pub(super) records: Sequence,
    /// `DirectoryPlace`s, in the same order, which is that in which names lead to them.
    pub(super) places: Sequence,
    pub(super) directories: u64,
    /// Of all inodes, with the gaps between them.
    pub(super) inode_bytes: u64,
    /// Behind the inodes.
    pub(super) blocks: u64,
    pub(super) summary: Summary,
}

/// A name and what it leads to, or the directory that has come to its end. The bytes of name, inode and data follow.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Record {
    /// Of a name.
    pub(super) kind: Option<Kind>,
    /// Not of names of directories, whose `DirectoryPlace`s have it.
    pub(super) nid: u64,
    /// Of the inode, where it begins: nothing where another record has it.
    pub(super) inode: usize,
    /// What goes to the blocks behind the inodes: of directories nothing.
    pub(super) data: usize,
    pub(super) name: usize,
    /// The first of the inode's blocks, among those behind the inodes.
    pub(super) block: Option<u64>,
}

/// Where a directory is.
#[derive(Clone, Copy, Debug)]
pub(super) struct DirectoryPlace {
    pub(super) nid: u64,
    pub(super) parent: u64,
    /// The first of its blocks, among those behind the inodes.
    pub(super) block: u64,
}

pub(super) struct Planner<'a> {
    options: &'a Options<'a>,
    plan: Plan,
    slots: Slots,
    /// Directories that a name was seen of: `Queued`, and extended attributes.
    queue: Sequence,
    /// Of inodes with several links, the number of each.
    linked: HashMap<u64, u64>,
    /// The directory whose entries come.
    group: Group,
    /// An inode that is being made.
    inode: Vec<u8>,
}

struct Group {
    /// Among the directories.
    index: u64,
    id: u64,
    parent: u64,
    attributes: Attributes,
    xattrs: Vec<u8>,
    listing: Directory,
    last: Vec<u8>,
}

/// The numbers of `DirectoryPlace`s, read in order.
#[derive(Default)]
struct Parents {
    cursor: Cursor,
    read: u64,
    nid: u64,
}

impl<'a> Planner<'a> {
    pub(super) fn new(options: &'a Options<'a>) -> Self {
        let sequence = || Sequence::new(options.spill);
        let plan = Plan {
            records: sequence(),
            places: sequence(),
            directories: 0,
            inode_bytes: 0,
            blocks: 0,
            summary: Summary::default(),
        };
        Self {
            options,
            plan,
            slots: Slots::new(0),
            queue: sequence(),
            linked: HashMap::new(),
            group: Group::new(0, 0, ROOT, Attributes::default(), Vec::new()),
            inode: Vec::new(),
        }
    }

    pub(super) fn plan<T: Tree>(mut self, root: &Node<'_>, tree: &mut T) -> Result<Plan, T::Error> {
        if root.content != Content::Directory {
            return Err(Error::Options("a root that is no directory").into());
        }
        let fault = |fault| Error::Entry { directory: root.id, name: "/".to_owned(), fault };
        check_attributes(&root.attributes).map_err(fault)?;
        let xattrs = xattr::encode(root.xattrs).map_err(fault)?;
        // Its number has 16 bits: it comes first, in the form that always has room.
        self.slots.place(Form::Extended.bytes() + xattrs.len(), Fit::Anywhere);
        self.enqueue(root, &xattrs)?;
        let (mut queued, mut parents) = (Cursor::default(), Parents::default());
        for index in 0.. {
            if index == self.plan.directories {
                break;
            }
            self.group = self.dequeue(index, &mut queued, &mut parents)?;
            tree.entries(self.group.id, &mut |name, node| self.add(name, node))?;
            self.finish_group()?;
        }
        self.plan.inode_bytes = self.slots.end;
        Ok(self.plan)
    }

    fn enqueue(&mut self, node: &Node<'_>, xattrs: &[u8]) -> Result<(), Error> {
        let Attributes { permissions, uid, gid, links, mtime } = node.attributes;
        let mut record = Vec::with_capacity(QUEUED + xattrs.len());
        record.extend_from_slice(&node.id.to_le_bytes());
        record.extend_from_slice(&self.group.index.to_le_bytes());
        record.extend_from_slice(&mtime.seconds.to_le_bytes());
        for word in [mtime.nanoseconds, u32::from(permissions), uid, gid, links, xattrs.len() as u32] {
            record.extend_from_slice(&word.to_le_bytes());
        }
        record.extend_from_slice(xattrs);
        self.plan.directories += 1;
        self.plan.summary.inodes += 1;
        self.queue.append(&record)
    }

    fn dequeue(&self, index: u64, queued: &mut Cursor, parents: &mut Parents) -> Result<Group, Error> {
        let head = queued.read(&self.queue, QUEUED)?;
        let (id, parent_index) = (u64_at(head, 0), u64_at(head, 8));
        let mtime = Timestamp { seconds: u64_at(head, 16).cast_signed(), nanoseconds: u32_at(head, 24) };
        let attributes = Attributes {
            permissions: u16_at(head, 28),
            uid: u32_at(head, 32),
            gid: u32_at(head, 36),
            links: u32_at(head, 40),
            mtime,
        };
        let xattr_bytes = u32_at(head, 44) as usize;
        let xattrs = queued.read(&self.queue, xattr_bytes)?.to_vec();
        let parent = if index == 0 { ROOT } else { parents.nid_of(parent_index, &self.plan.places)? };
        Ok(Group::new(index, id, parent, attributes, xattrs))
    }

    fn add(&mut self, name: &[u8], node: &Node<'_>) -> Result<(), Error> {
        let mut record = Record { kind: Some(node.content.kind()), name: name.len(), ..Record::default() };
        let inode = self.check(name, node).and_then(|()| self.make_inode(node, &mut record));
        let xattrs = inode.map_err(|fault| Error::Entry {
            directory: self.group.id,
            name: String::from_utf8_lossy(name).into_owned(),
            fault,
        })?;
        if node.content == Content::Directory {
            self.enqueue(node, &xattrs)?;
        }
        self.plan.summary.names += 1;
        // The length is what counts here: numbers come with the second pass.
        self.group.listing.add(name, 0, node.content.kind(), &mut |_| Ok(()))?;
        self.group.last.clear();
        self.group.last.extend_from_slice(name);
        self.plan.records.append(&record.encode())?;
        self.plan.records.append(name)?;
        self.plan.records.append(&self.inode)?;
        let data = if record.data > 0 { target(node) } else { &[] };
        self.plan.records.append(data)
    }

    fn check(&self, name: &[u8], node: &Node<'_>) -> Result<(), EntryFault> {
        let dots = name == b"." || name == b"..";
        if name.is_empty() || name.len() > NAME_MAX || dots || name.contains(&b'/') || name.contains(&0) {
            return Err(EntryFault::Name);
        }
        if name <= &self.group.last[..] {
            return Err(EntryFault::Order);
        }
        check_attributes(&node.attributes)
    }

    /// Fills `inode`, but of directories, whose turn comes later, and of further names of an inode. Returns the
    /// extended attributes.
    fn make_inode(&mut self, node: &Node<'_>, record: &mut Record) -> Result<Vec<u8>, EntryFault> {
        self.inode.clear();
        let xattrs = xattr::encode(node.xattrs)?;
        if node.content == Content::Directory {
            return Ok(xattrs);
        }
        let has_links = node.attributes.links > 1;
        if has_links && let Some(&nid) = self.linked.get(&node.id) {
            record.nid = nid;
            return Ok(xattrs);
        }
        let (mut size, mut place, mut layout, mut chunks) = (0, 0, Layout::Plain, None);
        match node.content {
            Content::File(extents) => {
                let of = Chunks::of(extents, self.options.devices)?;
                size = of.size;
                self.plan.summary.content_bytes = self.plan.summary.content_bytes.saturating_add(size);
                if size > 0 {
                    (layout, place) = (Layout::Chunks, CHUNK_INDEXES | of.bits);
                    chunks = Some(of);
                }
            }
            Content::Symlink(target) => {
                if target.is_empty() || target.len() > TARGET_MAX || target.contains(&0) {
                    return Err(EntryFault::Target);
                }
                size = target.len() as u64;
            }
            Content::CharacterDevice(number) | Content::BlockDevice(number) => place = number,
            Content::Directory | Content::Fifo | Content::Socket => (),
        }
        let attributes = &self.shown(node.attributes);
        let form = Form::of(attributes, size, self.options.time);
        let head = form.bytes() + xattrs.len();
        let target = target(node);
        if !target.is_empty() && head + target.len() <= BLOCK {
            layout = Layout::Inline;
        } else if !target.is_empty() {
            record.data = target.len();
            record.block = Some(self.take_blocks(1));
        }
        record.nid = match (layout, &chunks) {
            (Layout::Inline, _) => self.place(head + target.len(), Fit::Whole),
            (_, Some(chunks)) => self.place(head.next_multiple_of(8) + chunks.bytes(), Fit::Anywhere),
            (_, None) => self.place(head, Fit::Anywhere),
        };
        let (kind, nid) = (node.content.kind(), record.nid);
        let head = InodeHead { form, layout, kind, attributes, xattr_bytes: xattrs.len(), size, place, nid };
        head.encode(&mut self.inode);
        self.inode.extend_from_slice(&xattrs);
        if layout == Layout::Inline {
            self.inode.extend_from_slice(target);
        }
        if let Some(chunks) = &chunks {
            self.inode.resize(self.inode.len().next_multiple_of(8), 0);
            chunks.encode(&mut self.inode);
        }
        record.inode = self.inode.len();
        if has_links {
            self.linked.insert(node.id, nid);
        }
        self.plan.summary.inodes += 1;
        Ok(xattrs)
    }

    /// What is left of a directory is itself.
    fn finish_group(&mut self) -> Result<(), Error> {
        let group = &mut self.group;
        let tail = group.listing.finish(&mut |_| Ok(()))?.len();
        let (full, index, parent) = (group.listing.full, group.index, group.parent);
        let size = full * BLOCK_BYTES + tail as u64;
        let (attributes, xattrs) = (group.attributes, std::mem::take(&mut group.xattrs));
        let attributes = &self.shown(attributes);
        let form = if index == 0 { Form::Extended } else { Form::of(attributes, size, self.options.time) };
        let head = form.bytes() + xattrs.len();
        let is_inline = index > 0 && head + tail <= BLOCK;
        let nid = match (index, is_inline) {
            (0, _) => ROOT,
            (_, true) => self.place(head + tail, Fit::Whole),
            (_, false) => self.place(head, Fit::Anywhere),
        };
        let blocks = full + u64::from(!is_inline);
        let block = self.take_blocks(blocks);
        let layout = if is_inline { Layout::Inline } else { Layout::Plain };
        self.inode.clear();
        let inode = InodeHead {
            form,
            layout,
            kind: Kind::Directory,
            attributes,
            xattr_bytes: xattrs.len(),
            size,
            place: 0,
            nid,
        };
        inode.encode(&mut self.inode);
        self.inode.extend_from_slice(&xattrs);
        let block_used = (blocks > 0).then_some(block);
        let record = Record { nid, inode: self.inode.len(), block: block_used, ..Record::default() };
        self.plan.records.append(&record.encode())?;
        self.plan.records.append(&self.inode)?;
        self.plan.places.append(&DirectoryPlace { nid, parent, block }.encode())
    }

    fn shown(&self, attributes: Attributes) -> Attributes {
        match self.options.times {
            Times::Own => attributes,
            Times::Shared => Attributes { mtime: self.options.time, ..attributes },
        }
    }

    /// The number of an inode of so many bytes, with what follows it.
    fn place(&mut self, bytes: usize, fit: Fit) -> u64 {
        ROOT + self.slots.place(bytes, fit) / SLOT
    }

    fn take_blocks(&mut self, count: u64) -> u64 {
        self.plan.blocks += count;
        self.plan.blocks - count
    }
}

impl Group {
    fn new(index: u64, id: u64, parent: u64, attributes: Attributes, xattrs: Vec<u8>) -> Self {
        Self { index, id, parent, attributes, xattrs, listing: Directory::new(0, 0), last: Vec::new() }
    }
}

impl Parents {
    /// `index` never becomes less.
    fn nid_of(&mut self, index: u64, places: &Sequence) -> Result<u64, Error> {
        while self.read <= index {
            self.nid = DirectoryPlace::read(&mut self.cursor, places)?.nid;
            self.read += 1;
        }
        Ok(self.nid)
    }
}

/// Bytes of a directory in the queue, before its extended attributes.
const QUEUED: usize = 48;

fn check_attributes(attributes: &Attributes) -> Result<(), EntryFault> {
    if attributes.permissions > 0o7777 {
        return Err(EntryFault::Permissions);
    }
    if attributes.mtime.nanoseconds >= 1_000_000_000 { Err(EntryFault::Time) } else { Ok(()) }
}

fn target<'a>(node: &Node<'a>) -> &'a [u8] {
    if let Content::Symlink(target) = node.content { target } else { &[] }
}

impl Record {
    const BYTES: usize = 32;
    const NO_BLOCK: u64 = u64::MAX;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = self.kind.map_or(0, |kind| kind as u8);
        bytes[1] = self.name as u8;
        bytes[2..4].copy_from_slice(&(self.data as u16).to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.inode as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.nid.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.block.unwrap_or(Self::NO_BLOCK).to_le_bytes());
        bytes
    }

    pub(super) fn read(cursor: &mut Cursor, records: &Sequence) -> Result<Self, Error> {
        let bytes = cursor.read(records, Self::BYTES)?;
        Ok(Self {
            kind: Kind::of_number(bytes[0]),
            nid: u64_at(bytes, 8),
            inode: u32_at(bytes, 4) as usize,
            data: usize::from(u16_at(bytes, 2)),
            name: usize::from(bytes[1]),
            block: Some(u64_at(bytes, 16)).filter(|&block| block != Self::NO_BLOCK),
        })
    }
}

impl DirectoryPlace {
    fn encode(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.nid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.parent.to_le_bytes());
        bytes[16..].copy_from_slice(&self.block.to_le_bytes());
        bytes
    }

    pub(super) fn read(cursor: &mut Cursor, places: &Sequence) -> Result<Self, Error> {
        let bytes = cursor.read(places, 24)?;
        Ok(Self { nid: u64_at(bytes, 0), parent: u64_at(bytes, 8), block: u64_at(bytes, 16) })
    }
}

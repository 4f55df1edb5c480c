//! Answers from an image what a file system is asked. Nothing in an image is believed: what is read lies within it,
//! what a number says is checked before it is used, and a directory is entered only by the name that its own `..` leads
//! back to, so that no path is endless. Only the superblock and the device table are kept in memory.

mod directory;
mod inode;

use std::ops::{ControlFlow, Range};

pub use directory::DirectoryEntry;
pub use inode::Inode;

use crate::error::Error;
use crate::format::{self, BLOCK, DEVICE_BYTES, HOLE, Layout, SLOT, Superblock};
use crate::read_at::ReadAt;
use crate::tree::{BLOCK_BYTES, Device, Extent, Kind, Place};
use crate::xattr;

/// Addresses of chunks that are read together.
const CHUNKS_READ: u64 = 512;

/// Names with their prefixes, and values.
pub type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// An image that is open. Questions can be asked by several threads at once.
pub struct Image<R> {
    source: R,
    superblock: Superblock,
    devices: Vec<Device>,
}

impl<R: ReadAt> Image<R> {
    /// Reads superblock and device table, and refuses what is shorter than it says.
    pub fn open(source: R) -> Result<Self, Error> {
        let failed = |offset| move |source| Error::Read { offset, source };
        let size = source.size().map_err(failed(0))?;
        if size < BLOCK_BYTES {
            return Err(Error::Superblock("it is shorter than a block"));
        }
        let mut block = [0; BLOCK];
        source.read_exact_at(&mut block, 0).map_err(failed(0))?;
        let superblock = Superblock::decode(&block)?;
        let bytes = u64::from(superblock.blocks) * BLOCK_BYTES;
        if size < bytes {
            return Err(Error::Superblock("it is shorter than it says"));
        }
        if superblock.time.nanoseconds >= 1_000_000_000 {
            return Err(Error::Superblock("its time is none"));
        }
        let table = superblock.device_table;
        let mut slots = vec![0; usize::from(superblock.devices) * DEVICE_BYTES as usize];
        if table + slots.len() as u64 > bytes {
            return Err(Error::Superblock("its device table is behind its end"));
        }
        source.read_exact_at(&mut slots, table).map_err(failed(table))?;
        let devices = slots.chunks_exact(DEVICE_BYTES as usize).map(format::decode_device).collect();
        Ok(Self { source, superblock, devices })
    }

    /// The same image by way of another source, which has the same bytes. Reads nothing.
    pub fn by_way_of<S>(&self, source: S) -> Image<S> {
        Image { source, superblock: self.superblock.clone(), devices: self.devices.clone() }
    }

    /// Devices that contents are in; the first is number 1.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Bytes up to its end; a source may have more.
    pub fn size(&self) -> u64 {
        u64::from(self.superblock.blocks) * BLOCK_BYTES
    }

    /// How many the superblock says there are.
    pub fn inodes(&self) -> u64 {
        self.superblock.inodes
    }

    pub fn root(&self) -> Result<Inode, Error> {
        let root = self.inode(u64::from(self.superblock.root))?;
        if root.kind == Kind::Directory { Ok(root) } else { Err(root.corrupt("the root is no directory")) }
    }

    /// By its number, which `stat` shows.
    pub fn inode(&self, nid: u64) -> Result<Inode, Error> {
        let zero = u64::from(self.superblock.inode_block) * BLOCK_BYTES;
        let start = nid.checked_mul(SLOT).and_then(|bytes| bytes.checked_add(zero));
        let start = start.filter(|start| start.checked_add(SLOT).is_some_and(|end| end <= self.size()));
        let start = start.ok_or(Error::Corrupt { nid, what: "it is outside of the image" })?;
        let length = (self.size() - start).min(2 * SLOT);
        Inode::decode(&self.read(nid, start, length)?, nid, start, self.superblock.time)
    }

    /// What a name of a directory leads to.
    pub fn lookup(&self, directory: &Inode, name: &[u8]) -> Result<Option<Inode>, Error> {
        let Some((nid, kind)) = self.find(directory, name)? else {
            return Ok(None);
        };
        let inode = self.inode(nid)?;
        if inode.kind != kind {
            return Err(inode.corrupt("it is not of the kind that its name says"));
        }
        let is_step_down = kind == Kind::Directory && name != b"." && name != b"..";
        if is_step_down && self.find(&inode, b"..")?.is_none_or(|(parent, _)| parent != directory.nid) {
            return Err(inode.corrupt("it is a directory that does not lead back to where it is"));
        }
        Ok(Some(inode))
    }

    /// Passes on entries, `.` and `..` among them, in order, until `each` breaks off. `from` is 0, or the `next` of the
    /// last entry that was taken.
    pub fn read_directory(
        &self,
        directory: &Inode,
        from: u64,
        each: &mut dyn FnMut(&DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let blocks = self.directory_blocks(directory)?;
        let (mut block, mut index) = (from / BLOCK_BYTES, from % BLOCK_BYTES);
        while block < blocks {
            let entries = self.directory_block(directory, block)?;
            for at in index as usize..entries.count() {
                let (name, nid, kind) = entries.entry(at)?;
                let is_last = at + 1 == entries.count();
                let next = if is_last { (block + 1) * BLOCK_BYTES } else { block * BLOCK_BYTES + at as u64 + 1 };
                if each(&DirectoryEntry { name, nid, kind, next }).is_break() {
                    return Ok(());
                }
            }
            (block, index) = (block + 1, 0);
        }
        Ok(())
    }

    /// Of a symlink.
    pub fn target(&self, link: &Inode) -> Result<Vec<u8>, Error> {
        if link.kind != Kind::Symlink {
            return Err(link.corrupt("it is no symlink"));
        }
        let target = self.read_flat(link, 0..link.size)?;
        if target.contains(&0) { Err(link.corrupt("its target has a NUL")) } else { Ok(target) }
    }

    /// Names with their prefixes, and values.
    pub fn xattrs(&self, inode: &Inode) -> Result<Xattrs, Error> {
        let mut found = Vec::new();
        if inode.xattr_bytes == 0 {
            return Ok(found);
        }
        let body = self.read(inode.nid, inode.xattr_start(), inode.xattr_bytes)?;
        let outside = || inode.corrupt("an extended attribute is outside of where they are");
        let shared = body.get(xattr::HEAD..xattr::HEAD + 4 * usize::from(body[4])).ok_or_else(outside)?;
        let mut rest = &body[xattr::HEAD + shared.len()..];
        while !rest.is_empty() {
            let length = rest.get(..xattr::ENTRY).map(xattr_length).ok_or_else(outside)?;
            push_xattr(rest.get(..length).ok_or_else(outside)?, inode, &mut found)?;
            rest = rest.get(length.next_multiple_of(4)..).ok_or_else(outside)?;
        }
        for id in shared.chunks_exact(4) {
            let start = u64::from(self.superblock.xattr_block) * BLOCK_BYTES + 4 * u64::from(format::u32_at(id, 0));
            let length = xattr_length(&self.read(inode.nid, start, xattr::ENTRY as u64)?);
            push_xattr(&self.read(inode.nid, start, length as u64)?, inode, &mut found)?;
        }
        Ok(found)
    }

    /// Where the bytes of a file are, from the beginning of `range` on, up to its end or the file's: in order, without
    /// gaps. Up to one extent for each block of the range.
    pub fn extents(&self, file: &Inode, range: Range<u64>) -> Result<Vec<Extent>, Error> {
        let range = range.start..range.end.min(file.size);
        let mut extents = Vec::new();
        if file.kind != Kind::File || range.is_empty() {
            return Ok(extents);
        }
        if file.layout == Layout::Chunks {
            self.chunk_extents(file, range, &mut extents)?;
            return Ok(extents);
        }
        for part in self.flat_parts(file, range)? {
            push_extent(&mut extents, part.end - part.start, Place::Device { device: 0, offset: part.start });
        }
        Ok(extents)
    }

    fn chunk_extents(&self, file: &Inode, range: Range<u64>, extents: &mut Vec<Extent>) -> Result<(), Error> {
        let (bits, unit) = file.chunk_format()?;
        let table = file.data_start().next_multiple_of(unit);
        let end = ((file.size - 1) >> bits).checked_add(1).and_then(|count| count.checked_mul(unit));
        if end.and_then(|bytes| bytes.checked_add(table)).is_none_or(|end| end > self.size()) {
            return Err(file.corrupt("its chunks are outside of the image"));
        }
        let (mut chunk, last) = (range.start >> bits, (range.end - 1) >> bits);
        while chunk <= last {
            let count = (last - chunk + 1).min(CHUNKS_READ);
            let read = self.read(file.nid, table + chunk * unit, count * unit)?;
            for entry in read.chunks_exact(unit as usize) {
                let start = chunk << bits;
                // Less than 2^63 + 2^43.
                let part = range.start.max(start)..range.end.min(start + (1 << bits));
                let (device, block) = match unit {
                    8 => (format::u16_at(entry, 2), format::u32_at(entry, 4)),
                    _ => (0, format::u32_at(entry, 0)),
                };
                let offset = u64::from(block) * BLOCK_BYTES + (part.start - start);
                let length = part.end - part.start;
                let place = if block == HOLE { Place::Hole } else { Place::Device { device, offset } };
                if block != HOLE && self.device_bytes(device).is_none_or(|bytes| offset + length > bytes) {
                    return Err(file.corrupt("a chunk is outside of the devices"));
                }
                push_extent(extents, length, place);
                chunk += 1;
            }
        }
        Ok(())
    }

    /// Number 0 is the image. A content may end within the last block, never behind it.
    fn device_bytes(&self, device: u16) -> Option<u64> {
        let Some(index) = usize::from(device).checked_sub(1) else {
            return Some(self.size());
        };
        self.devices.get(index).map(|device| u64::from(device.blocks) * BLOCK_BYTES)
    }

    /// A part of what is in consecutive blocks, and maybe behind the inode.
    fn read_flat(&self, inode: &Inode, range: Range<u64>) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        for part in self.flat_parts(inode, range)? {
            bytes.extend_from_slice(&self.read(inode.nid, part.start, part.end - part.start)?);
        }
        Ok(bytes)
    }

    /// Bytes of the image that are so many bytes of the content: those in blocks, and those behind the inode. `range`
    /// is within the size.
    fn flat_parts(&self, inode: &Inode, range: Range<u64>) -> Result<Vec<Range<u64>>, Error> {
        let in_blocks = match inode.layout {
            Layout::Plain => inode.size,
            Layout::Inline => inode.size.saturating_sub(1) / BLOCK_BYTES * BLOCK_BYTES,
            Layout::Chunks => return Err(Error::Unsupported { nid: inode.nid, what: "names in chunks" }),
        };
        let tail = inode.size - in_blocks;
        let tail_start = inode.data_start();
        if tail > 0 && tail_start % BLOCK_BYTES + tail > BLOCK_BYTES {
            return Err(inode.corrupt("what is behind it crosses the end of a block"));
        }
        let areas = [(0..in_blocks, u64::from(inode.place) * BLOCK_BYTES), (in_blocks..inode.size, tail_start)];
        let mut parts = Vec::new();
        for (area, place) in areas {
            let (start, end) = (range.start.max(area.start), range.end.min(area.end));
            if start < end {
                let first = place + (start - area.start);
                let part = first..first + (end - start);
                if part.end > self.size() {
                    return Err(inode.corrupt("its content is outside of the image"));
                }
                parts.push(part);
            }
        }
        Ok(parts)
    }

    /// On behalf of an inode: `length` bytes, which no image makes many.
    fn read(&self, nid: u64, start: u64, length: u64) -> Result<Vec<u8>, Error> {
        if start.checked_add(length).is_none_or(|end| end > self.size()) {
            return Err(Error::Corrupt { nid, what: "what belongs to it is outside of the image" });
        }
        let mut bytes = vec![0; length as usize];
        self.source.read_exact_at(&mut bytes, start).map_err(|source| Error::Read { offset: start, source })?;
        Ok(bytes)
    }
}

/// Adds to the last extent what continues it.
fn push_extent(extents: &mut Vec<Extent>, length: u64, place: Place) {
    if let Some(last) = extents.last_mut() {
        let continues = match (last.place, place) {
            (Place::Hole, Place::Hole) => true,
            (Place::Device { device, offset }, Place::Device { device: other, offset: next }) => {
                device == other && offset + last.length == next
            }
            _ => false,
        };
        if continues {
            last.length += length;
            return;
        }
    }
    extents.push(Extent { length, place });
}

/// Of an entry, by its head.
fn xattr_length(head: &[u8]) -> usize {
    xattr::ENTRY + usize::from(head[0]) + usize::from(format::u16_at(head, 2))
}

/// Passes over what has a prefix that is not known, as the kernel does.
fn push_xattr(entry: &[u8], inode: &Inode, found: &mut Xattrs) -> Result<(), Error> {
    let Some(prefix) = xattr::prefix(entry[1]) else {
        return Ok(());
    };
    let (rest, value) = entry[xattr::ENTRY..].split_at(usize::from(entry[0]));
    if rest.contains(&0) {
        return Err(inode.corrupt("the name of an extended attribute has a NUL"));
    }
    found.push(([prefix, rest].concat(), value.to_vec()));
    Ok(())
}

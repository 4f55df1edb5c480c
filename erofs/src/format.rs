//! The fixed parts of an image as bytes: superblock, device table, inodes, directory entries, chunks.

use crate::error::Error;
use crate::tree::{Attributes, BLOCK_BYTES, Device, Kind, Timestamp};
use crate::xattr;

pub(crate) const BLOCK: usize = BLOCK_BYTES as usize;
/// Inodes begin at multiples of it; a number counts them.
pub(crate) const SLOT: u64 = 32;
/// What an inode number 0 would be is a block before the inodes, so that none has it: programs skip such names.
pub(crate) const ROOT: u64 = BLOCK_BYTES / SLOT;
pub(crate) const DIRENT: usize = 12;
pub(crate) const CHUNK: usize = 8;
pub(crate) const NAME_MAX: usize = 255;
pub(crate) const TARGET_MAX: usize = 4095;
/// The address of a chunk that is a hole.
pub(crate) const HOLE: u32 = u32::MAX;
/// A chunk is a block times two to the power of this at most.
pub(crate) const CHUNK_BITS_MAX: u32 = 31;
/// Of the format of a chunk-based inode: chunks have a device each.
pub(crate) const CHUNK_INDEXES: u32 = 0x20;

const SUPERBLOCK: usize = 1024;
const SUPERBLOCK_BYTES: usize = 128;
pub(crate) const DEVICES: u64 = (SUPERBLOCK + SUPERBLOCK_BYTES) as u64;
pub(crate) const DEVICE_BYTES: u64 = 128;

const MAGIC: u32 = 0xE0F5_E1E2;
const BLOCK_BITS: u8 = 12;
const CHECKSUM: u32 = 1;
/// Extended inodes have a time of change of contents.
const MTIME: u32 = 2;
/// Says that an image may be compressed; without a compressed inode it changes nothing.
const ZERO_PADDING: u32 = 1;
const CHUNKED_FILE: u32 = 4;
const DEVICE_TABLE: u32 = 8;

/// What is said once of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) root: u16,
    pub(crate) inodes: u64,
    /// Of compact inodes.
    pub(crate) time: Timestamp,
    /// Of the image, devices apart.
    pub(crate) blocks: u32,
    /// Where inode number 0 would be.
    pub(crate) inode_block: u32,
    pub(crate) xattr_block: u32,
    pub(crate) uuid: [u8; 16],
    /// Ends with a NUL.
    pub(crate) label: [u8; 16],
    pub(crate) devices: u16,
    /// In bytes.
    pub(crate) device_table: u64,
}

impl Superblock {
    /// The first block, with as many devices as fit into it.
    pub(crate) fn encode(&self, devices: &[Device]) -> Vec<u8> {
        let mut block = vec![0; SUPERBLOCK];
        let features = CHUNKED_FILE | if self.devices == 0 { 0 } else { DEVICE_TABLE };
        for word in [MAGIC, 0, CHECKSUM | MTIME] {
            block.extend_from_slice(&word.to_le_bytes());
        }
        block.extend_from_slice(&[BLOCK_BITS, 0]);
        block.extend_from_slice(&self.root.to_le_bytes());
        block.extend_from_slice(&self.inodes.to_le_bytes());
        block.extend_from_slice(&self.time.seconds.to_le_bytes());
        for word in [self.time.nanoseconds, self.blocks, self.inode_block, self.xattr_block] {
            block.extend_from_slice(&word.to_le_bytes());
        }
        block.extend_from_slice(&self.uuid);
        block.extend_from_slice(&self.label);
        block.extend_from_slice(&features.to_le_bytes());
        for half in [0, self.devices, (self.device_table / DEVICE_BYTES) as u16] {
            block.extend_from_slice(&half.to_le_bytes());
        }
        block.resize(SUPERBLOCK + SUPERBLOCK_BYTES, 0);
        for device in devices {
            block.extend_from_slice(&encode_device(device));
        }
        block.resize(BLOCK, 0);
        let checksum = checksum(&block);
        block[SUPERBLOCK + 4..SUPERBLOCK + 8].copy_from_slice(&checksum.to_le_bytes());
        block
    }

    /// Of the first block.
    pub(crate) fn decode(block: &[u8; BLOCK]) -> Result<Self, Error> {
        let head = &block[SUPERBLOCK..];
        let features = (u32_at(head, 8), u32_at(head, 80));
        if u32_at(head, 0) != MAGIC {
            return Err(Error::Superblock("it does not begin as one"));
        }
        if head[12] != BLOCK_BITS || head[90] != 0 {
            return Err(Error::Superblock("its blocks are not of 4 KiB"));
        }
        let mut unsummed = *block;
        unsummed[SUPERBLOCK + 4..SUPERBLOCK + 8].fill(0);
        if features.0 & CHECKSUM == 0 || u32_at(head, 4) != checksum(&unsummed) {
            return Err(Error::Superblock("the checksum of its first block is wrong"));
        }
        if features.1 & !(ZERO_PADDING | CHUNKED_FILE | DEVICE_TABLE) != 0 {
            return Err(Error::Superblock("it has features that views do without"));
        }
        let devices = if features.1 & DEVICE_TABLE == 0 { 0 } else { u16_at(head, 86) };
        let mut superblock = Self {
            root: u16_at(head, 14),
            inodes: u64_at(head, 16),
            time: Timestamp { seconds: u64_at(head, 24).cast_signed(), nanoseconds: u32_at(head, 32) },
            blocks: u32_at(head, 36),
            inode_block: u32_at(head, 40),
            xattr_block: u32_at(head, 44),
            uuid: [0; 16],
            label: [0; 16],
            devices,
            device_table: u64::from(u16_at(head, 88)) * DEVICE_BYTES,
        };
        superblock.uuid.copy_from_slice(&head[48..64]);
        superblock.label.copy_from_slice(&head[64..80]);
        Ok(superblock)
    }
}

/// As the kernel makes it: not inverted at the end.
fn checksum(block: &[u8]) -> u32 {
    !crc32c::crc32c(&block[SUPERBLOCK..])
}

pub(crate) fn encode_device(device: &Device) -> [u8; DEVICE_BYTES as usize] {
    let mut slot = [0; DEVICE_BYTES as usize];
    slot[..64].copy_from_slice(&device.tag);
    slot[64..68].copy_from_slice(&device.blocks.to_le_bytes());
    slot
}

pub(crate) fn decode_device(slot: &[u8]) -> Device {
    let mut tag = [0; 64];
    tag.copy_from_slice(&slot[..64]);
    Device { blocks: u32_at(slot, 64), tag }
}

/// How an inode says where its contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// In consecutive blocks.
    Plain = 0,
    /// All but the end, which is behind the inode.
    Inline = 2,
    /// In chunks, whose addresses are behind the inode.
    Chunks = 4,
}

/// Of 32 or of 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Compact,
    Extended,
}

impl Form {
    /// The shorter one, where that has room. `time` is what compact inodes show.
    pub(crate) fn of(attributes: &Attributes, size: u64, time: Timestamp) -> Self {
        let Attributes { uid, gid, links, mtime, permissions: _ } = *attributes;
        let fits = [uid, gid, links].into_iter().all(|number| u16::try_from(number).is_ok());
        if fits && u32::try_from(size).is_ok() && mtime == time { Self::Compact } else { Self::Extended }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Compact => 32,
            Self::Extended => 64,
        }
    }
}

/// An inode without what follows it.
pub(crate) struct InodeHead<'a> {
    pub(crate) form: Form,
    pub(crate) layout: Layout,
    pub(crate) kind: Kind,
    pub(crate) attributes: &'a Attributes,
    pub(crate) xattr_bytes: usize,
    pub(crate) size: u64,
    /// First block, format of chunks, or number of a device.
    pub(crate) place: u32,
    pub(crate) nid: u64,
}

/// Where `InodeHead::place` is in both forms.
pub(crate) const PLACE: usize = 16;

impl InodeHead<'_> {
    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        let Attributes { permissions, uid, gid, links, mtime } = *self.attributes;
        let extended = self.form == Form::Extended;
        let head = [u16::from(extended) | ((self.layout as u16) << 1), xattr::count(self.xattr_bytes)];
        for half in [head[0], head[1], self.kind.mode() | permissions, if extended { 0 } else { links as u16 }] {
            bytes.extend_from_slice(&half.to_le_bytes());
        }
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&self.place.to_le_bytes());
        bytes.extend_from_slice(&(self.nid as u32).to_le_bytes());
        if extended {
            bytes.extend_from_slice(&uid.to_le_bytes());
            bytes.extend_from_slice(&gid.to_le_bytes());
            bytes.extend_from_slice(&mtime.seconds.to_le_bytes());
            bytes.extend_from_slice(&mtime.nanoseconds.to_le_bytes());
            bytes.extend_from_slice(&links.to_le_bytes());
            bytes.extend_from_slice(&[0; 16]);
        } else {
            bytes.extend_from_slice(&(uid as u16).to_le_bytes());
            bytes.extend_from_slice(&(gid as u16).to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
        }
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | (u32::from(u16_at(bytes, at + 2)) << 16)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

//! An inode, and where what belongs to it is.

use crate::error::Error;
use crate::format::{CHUNK_BITS_MAX, CHUNK_INDEXES, Form, Layout, PLACE, TARGET_MAX, u16_at, u32_at, u64_at};
use crate::tree::{Attributes, BLOCK_BYTES, Kind, Timestamp};
use crate::xattr;

/// What `stat` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Its number.
    pub nid: u64,
    pub kind: Kind,
    pub attributes: Attributes,
    /// In bytes, below 2^63.
    pub size: u64,
    pub(super) layout: Layout,
    /// First block, format of chunks, or number of a device.
    pub(super) place: u32,
    /// Of the image, behind the fixed part.
    end: u64,
    pub(super) xattr_bytes: u64,
}

impl Inode {
    /// `bytes` are the image's from `start` on: 64, or what there is.
    pub(super) fn decode(bytes: &[u8], nid: u64, start: u64, time: Timestamp) -> Result<Self, Error> {
        let corrupt = |what| Error::Corrupt { nid, what };
        let unsupported = |what| Error::Unsupported { nid, what };
        let format = u16_at(bytes, 0);
        let layout = match format >> 1 {
            0 => Layout::Plain,
            2 => Layout::Inline,
            4 => Layout::Chunks,
            _ => return Err(unsupported("a layout that is not known")),
        };
        let form = if format & 1 == 0 { Form::Compact } else { Form::Extended };
        if bytes.len() < form.bytes() {
            return Err(corrupt("it is outside of the image"));
        }
        let mode = u16_at(bytes, 4);
        let kind = Kind::of_mode(mode).ok_or(corrupt("its mode has no kind"))?;
        let permissions = mode & 0o7777;
        let (size, attributes) = match form {
            Form::Compact => {
                let (uid, gid) = (u16_at(bytes, 24).into(), u16_at(bytes, 26).into());
                let links = u16_at(bytes, 6).into();
                (u32_at(bytes, 8).into(), Attributes { permissions, uid, gid, links, mtime: time })
            }
            Form::Extended => {
                let mtime = Timestamp { seconds: u64_at(bytes, 32).cast_signed(), nanoseconds: u32_at(bytes, 40) };
                let (uid, gid, links) = (u32_at(bytes, 24), u32_at(bytes, 28), u32_at(bytes, 44));
                (u64_at(bytes, 8), Attributes { permissions, uid, gid, links, mtime })
            }
        };
        if attributes.mtime.nanoseconds >= 1_000_000_000 {
            return Err(corrupt("its time is none"));
        }
        if size > i64::MAX as u64 || kind == Kind::Symlink && !(1..=TARGET_MAX as u64).contains(&size) {
            return Err(corrupt("it has an impossible size"));
        }
        if layout == Layout::Chunks && kind != Kind::File {
            return Err(unsupported("chunks, and is no file"));
        }
        Ok(Self {
            nid,
            kind,
            attributes,
            size,
            layout,
            place: u32_at(bytes, PLACE),
            end: start + form.bytes() as u64,
            xattr_bytes: xattr::bytes(u16_at(bytes, 2)) as u64,
        })
    }

    /// Of a character or block device, as FUSE has it; 0 of others.
    pub fn device_number(&self) -> u32 {
        if matches!(self.kind, Kind::CharacterDevice | Kind::BlockDevice) { self.place } else { 0 }
    }

    pub(super) fn xattr_start(&self) -> u64 {
        self.end
    }

    /// Of targets and ends of directories; chunks begin at the next multiple of their size.
    pub(super) fn data_start(&self) -> u64 {
        self.end + self.xattr_bytes
    }

    /// The size of a chunk as a power of two, and the bytes that say where one is.
    pub(super) fn chunk_format(&self) -> Result<(u32, u64), Error> {
        if self.place & 0xffff & !(CHUNK_BITS_MAX | CHUNK_INDEXES) != 0 {
            return Err(Error::Unsupported { nid: self.nid, what: "chunks of a format that is not known" });
        }
        let unit = if self.place & CHUNK_INDEXES == 0 { 4 } else { 8 };
        Ok((BLOCK_BYTES.trailing_zeros() + (self.place & CHUNK_BITS_MAX), unit))
    }

    pub(super) fn corrupt(&self, what: &'static str) -> Error {
        Error::Corrupt { nid: self.nid, what }
    }
}

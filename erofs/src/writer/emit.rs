//! The second pass: copies what the first one noted to its places, and numbers to the names.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::directory::Directory;
use super::plan::{DirectoryPlace, Plan, Record};
use super::window::Window;
use super::{Options, Summary};
use crate::error::Error;
use crate::format::{self, DEVICE_BYTES, DEVICES, PLACE, ROOT, SLOT, Superblock};
use crate::spill::Cursor;
use crate::tree::{BLOCK_BYTES, Kind};

struct Emitter<'a> {
    plan: &'a Plan,
    records: Cursor,
    /// Of the directories that names lead to.
    led_to: Cursor,
    inodes: Window<'a>,
    blocks: Window<'a>,
    /// Where inode number 0 would be, in bytes.
    inode_zero: u64,
    /// The first block behind the inodes.
    first_block: u64,
}

pub(super) fn emit(plan: &Plan, image: &File, options: &Options<'_>) -> Result<Summary, Error> {
    let first_inode_block = options.first_inode_block();
    let first_block = first_inode_block + plan.inode_bytes.div_ceil(BLOCK_BYTES);
    let blocks = u32::try_from(first_block + plan.blocks).map_err(|_| Error::TooLarge)?;
    let image_bytes = u64::from(blocks) * BLOCK_BYTES;
    image.set_len(0).and_then(|()| image.set_len(image_bytes)).map_err(Error::Write)?;
    let mut emitter = Emitter {
        plan,
        records: Cursor::default(),
        led_to: Cursor::default(),
        inodes: Window::new(image, first_inode_block * BLOCK_BYTES),
        blocks: Window::new(image, first_block * BLOCK_BYTES),
        inode_zero: (first_inode_block - 1) * BLOCK_BYTES,
        first_block,
    };
    // No name leads to the root.
    DirectoryPlace::read(&mut emitter.led_to, &plan.places)?;
    let mut places = Cursor::default();
    for _ in 0..plan.directories {
        emitter.directory(DirectoryPlace::read(&mut places, &plan.places)?)?;
    }
    emitter.inodes.flush()?;
    emitter.blocks.flush()?;
    for (index, device) in options.devices.iter().enumerate() {
        let place = DEVICES + DEVICE_BYTES * index as u64;
        image.write_all_at(&format::encode_device(device), place).map_err(Error::Write)?;
    }
    let mut label = [0; 16];
    label[..options.label.len()].copy_from_slice(options.label.as_bytes());
    let superblock = Superblock {
        root: ROOT as u16,
        inodes: plan.summary.inodes,
        time: options.time,
        blocks,
        inode_block: (first_inode_block - 1) as u32,
        xattr_block: 0,
        uuid: options.uuid,
        label,
        devices: options.devices.len() as u16,
        device_table: DEVICES,
    };
    let within = ((BLOCK_BYTES - DEVICES) / DEVICE_BYTES) as usize;
    let block = superblock.encode(&options.devices[..options.devices.len().min(within)]);
    image.write_all_at(&block, 0).map_err(Error::Write)?;
    Ok(Summary { image_bytes, ..plan.summary })
}

impl Emitter<'_> {
    /// The entries of a directory, what they lead to but for directories, and then itself.
    fn directory(&mut self, place: DirectoryPlace) -> Result<(), Error> {
        let mut listing = Directory::new(place.nid, place.parent);
        let mut next_block = self.first_block + place.block;
        loop {
            let record = Record::read(&mut self.records, &self.plan.records)?;
            let bytes = self.records.read(&self.plan.records, record.name + record.inode + record.data)?;
            let (name, rest) = bytes.split_at(record.name);
            let (inode, data) = rest.split_at(record.inode);
            let mut inode = inode.to_vec();
            if let Some(block) = record.block {
                let block = (self.first_block + block) as u32;
                inode[PLACE..PLACE + 4].copy_from_slice(&block.to_le_bytes());
            }
            let blocks = &mut self.blocks;
            let mut full = |bytes: &[u8]| {
                next_block += 1;
                blocks.write((next_block - 1) * BLOCK_BYTES, bytes)
            };
            let inode_place = self.inode_zero + record.nid * SLOT;
            let Some(kind) = record.kind else {
                let tail = listing.finish(&mut full)?;
                let is_inline = format::u16_at(&inode, 0) >> 1 == format::Layout::Inline as u16;
                if is_inline {
                    inode.extend_from_slice(&tail);
                } else {
                    full(&tail)?;
                }
                return self.inodes.write(inode_place, &inode);
            };
            let nid = match kind {
                Kind::Directory => DirectoryPlace::read(&mut self.led_to, &self.plan.places)?.nid,
                _ => record.nid,
            };
            listing.add(name, nid, kind, &mut full)?;
            if let Some(block) = record.block {
                self.blocks.write((self.first_block + block) * BLOCK_BYTES, data)?;
            }
            if !inode.is_empty() {
                self.inodes.write(inode_place, &inode)?;
            }
        }
    }
}

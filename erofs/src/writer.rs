//! Writes an image in two passes and in bounded memory, some 600 KiB whatever the tree.
//!
//! The first pass asks the tree for each directory once, breadth-first, and decides where everything goes; it notes
//! finished inodes and names in temporary files (`spill.rs`), which the second pass reads from the beginning and copies
//! to their places. Both only append and read on. In memory is what the directory at hand has in its last block, and of
//! files with several links, where each is. Equal trees and options give equal bytes.
//!
//! Inodes follow each other in the order of the first pass: files, symlinks and others of a directory, then the
//! directory itself, of which only then is known how long it is, and whether its end fits behind its inode. What must
//! not cross the end of a block may leave a gap before it, which inodes that come soon after take.

mod chunks;
mod directory;
mod emit;
mod plan;
mod slots;
mod window;

use std::fs::File;
use std::path::Path;

use crate::error::Error;
use crate::format::{DEVICE_BYTES, DEVICES};
use crate::tree::{BLOCK_BYTES, Device, Node, Timestamp, Tree};

/// What an image says of itself, and where it is made.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    /// The directory of temporary files, which have no names there.
    pub spill: &'a Path,
    pub uuid: [u8; 16],
    /// Up to 15 bytes, without NUL.
    pub label: &'a str,
    /// What compact inodes show.
    pub time: Timestamp,
    pub times: Times,
    /// Up to 65,535; all of them are named when the image is mounted, in this order. Where the tree says in the end
    /// which ones there are ([`Tree::devices`]), these are the most that there may be.
    pub devices: &'a [Device],
}

/// Which times of change an image shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// Those of the nodes. What differs from [`Options::time`] takes 32 bytes more.
    Own,
    /// [`Options::time`], of all.
    Shared,
}

/// What became of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Without the root.
    pub names: u64,
    pub inodes: u64,
    pub content_bytes: u64,
    pub image_bytes: u64,
}

/// Writes the image of `tree` below `root`, a directory, to `image`, whose earlier content is lost. The superblock
/// comes last: what was not finished is not mounted. Nothing is synced.
pub fn write_image<T: Tree>(
    image: &File,
    root: &Node<'_>,
    tree: &mut T,
    options: &Options<'_>,
) -> Result<Summary, T::Error> {
    options.check()?;
    let plan = plan::Planner::new(options).plan(root, tree)?;
    let devices = tree.devices();
    let options = Options { devices: devices.as_deref().unwrap_or(options.devices), ..options.clone() };
    emit::emit(&plan, image, &options).map_err(T::Error::from)
}

impl Options<'_> {
    fn check(&self) -> Result<(), Error> {
        let wrong = if self.label.len() > 15 || self.label.contains('\0') {
            "a label of more than 15 bytes, or with a NUL"
        } else if u16::try_from(self.devices.len()).is_err() {
            "more than 65,535 devices"
        } else if self.time.nanoseconds >= 1_000_000_000 {
            "nanoseconds of a second or more"
        } else {
            return Ok(());
        };
        Err(Error::Options(wrong))
    }

    /// Behind superblock and device table.
    fn first_inode_block(&self) -> u64 {
        (DEVICES + DEVICE_BYTES * self.devices.len() as u64).div_ceil(BLOCK_BYTES)
    }
}

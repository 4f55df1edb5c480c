//! Images of EROFS, the kernel's read-only file system, for views: names, attributes, targets of symlinks and extended
//! attributes are in the image, contents are ranges of other devices that it refers to. The kernel mounts an image with
//! those devices (`device=`), from Linux 5.15 on; where it cannot, [`Image`] answers the same questions from the same
//! bytes.
//!
//! An image, in blocks of 4 KiB and little-endian:
//!
//! ```text
//! block 0        superblock (at 1024, with a CRC-32C of the rest of its block), device table (at 1152)
//! inodes         from inode number 128 on, which is the root; in slots of 32 bytes. Behind the 32 or 64 bytes of an
//!                inode: its extended attributes, then the chunks of a file, the target of a symlink, or the end of a
//!                directory where it fits into the same block
//! blocks         entries of directories, sorted by the bytes of names; targets that are too long for the above
//! ```
//!
//! Files are chunk-based: a file that lies in one piece is one chunk, whatever its size, and takes 64 bytes (96 with a
//! time of its own) and its directory entry, 12 bytes and the name.
//!
//! The format is that of `fs/erofs/erofs_fs.h` and `Documentation/filesystems/erofs.rst` of Linux, without
//! compression, 48-bit addresses, long prefixes of attributes, and whatever else came after 5.15.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod error;
mod format;
mod read_at;
mod reader;
mod spill;
mod tree;
mod writer;
mod xattr;

pub use error::{EntryFault, Error};
pub use read_at::ReadAt;
pub use reader::{DirectoryEntry, Image, Inode, Xattrs};
pub use tree::{
    Attributes, BLOCK_BYTES, Content, DEVICE_BLOCKS_MAX, Device, EachEntry, Extent, Kind, Node, Place, Timestamp, Tree,
    Xattr,
};
pub use writer::{Options, Summary, Times, write_image};

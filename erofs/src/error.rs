//! Why an image cannot be written or read.

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Name and id of its directory are as the tree gave them.
    #[error("{name:?} in directory {directory} cannot be in an image: {fault}")]
    Entry { directory: u64, name: String, fault: EntryFault },
    #[error("an image cannot have {0}")]
    Options(&'static str),
    #[error("an image has at most 16 TiB of names and attributes: split the view")]
    TooLarge,
    #[error(
        "temporary data in {}: {source} (an image takes some 150 bytes a name there while it is written)",
        .directory.display()
    )]
    Spill { directory: PathBuf, source: io::Error },
    #[error("the image cannot be written: {0}")]
    Write(#[source] io::Error),
    #[error("the image cannot be read at byte {offset}: {source}")]
    Read { offset: u64, source: io::Error },
    /// Not an image, or one whose head is damaged.
    #[error("this is no image of a view that can be read: {0}; make it anew")]
    Superblock(&'static str),
    #[error("the image is damaged at inode {nid}: {what}; make it anew")]
    Corrupt { nid: u64, what: &'static str },
    #[error("inode {nid} of the image has {what}, which is only for the kernel to read")]
    Unsupported { nid: u64, what: &'static str },
}

/// Why a name, or what it leads to, has no place in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    #[error("a name has 1 to 255 bytes, no slash and no NUL, and is neither `.` nor `..`")]
    Name,
    #[error("names must come once each, in ascending order of their bytes")]
    Order,
    #[error("permissions are 12 bits (07777)")]
    Permissions,
    #[error("nanoseconds are below 1,000,000,000")]
    Time,
    #[error("a target has 1 to 4095 bytes and no NUL")]
    Target,
    #[error("all but its last extent must be multiples of 4096 bytes, at multiples of 4096 bytes")]
    Alignment,
    #[error("an extent lies outside of the devices of the image")]
    Device,
    #[error("a file has at most 2^63 - 1 bytes")]
    Size,
    #[error("its extents need more than 65,536 chunks: begin them at multiples of a higher power of two")]
    Chunks,
    #[error(
        "extended attributes are of user, trusted, security and access lists, once each, with names of up to 255 \
         bytes, values of up to 65535, 262 kB together"
    )]
    Xattr,
}

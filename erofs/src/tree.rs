//! What an image is made of: nodes with attributes and contents, and where they come from.

use crate::error::Error;

/// Bytes of a block. Contents begin at multiples of it.
pub const BLOCK_BYTES: u64 = 4096;

/// Blocks that a device can have: addresses are 32 bits, and the highest one means a hole. 4 KiB less than 16 TiB.
pub const DEVICE_BLOCKS_MAX: u32 = u32::MAX;

/// What is behind a name; the number is that of directory entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File = 1,
    Directory = 2,
    CharacterDevice = 3,
    BlockDevice = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
}

/// Since 1970, in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timestamp {
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanoseconds: u32,
}

/// What `stat` shows beside kind, size and number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// 07777: without the bits of the kind.
    pub permissions: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub mtime: Timestamp,
}

/// Name with its prefix (`user.`), and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xattr<'a> {
    pub name: &'a [u8],
    pub value: &'a [u8],
}

/// Where bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Zeros.
    Hole,
    /// Device 0 is the image itself, the others count from 1 in the order of the device table. In bytes.
    Device { device: u16, offset: u64 },
}

/// Bytes of a file that lie in one piece; where a file has several, they follow each other without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// In bytes.
    pub length: u64,
    pub place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    Directory,
    /// Their lengths are the size. All but the last have whole blocks, and all begin at a block of a device other than
    /// the image.
    File(&'a [Extent]),
    /// Up to 4095 bytes.
    Symlink(&'a [u8]),
    /// The number as FUSE has it: major in bits 8 to 19, minor in bits 0 to 7 and 20 to 31.
    CharacterDevice(u32),
    BlockDevice(u32),
    Fifo,
    Socket,
}

/// An inode as a tree gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node<'a> {
    /// Names its inode: a directory in [`Tree::entries`]; of others with several links it shows which names are one.
    pub id: u64,
    pub attributes: Attributes,
    /// In any order.
    pub xattrs: &'a [Xattr<'a>],
    pub content: Content<'a>,
}

/// A device that contents lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Of 4 KiB, up to [`DEVICE_BLOCKS_MAX`].
    pub blocks: u32,
    /// What the kernel opens where it is mounted without `device=`; else free: a digest, or a name.
    pub tag: [u8; 64],
}

/// What is called with each name of a directory.
pub type EachEntry<'e> = &'e mut dyn FnMut(&[u8], &Node<'_>) -> Result<(), Error>;

/// Gives the entries of directories, each directory once. It must not change meanwhile, and no directory may have two
/// names: an image of a tree with a loop never ends.
pub trait Tree {
    type Error: From<Error>;

    /// Calls `each` with names, without `.` and `..`, in ascending order of their bytes, and ends with its first error.
    fn entries(&mut self, directory: u64, each: EachEntry<'_>) -> Result<(), Self::Error>;

    /// The devices that contents turned out to lie in, once all directories have been asked for: the first ones of
    /// those that the image was begun with, each with as many blocks as it has become. `None` where they are as they
    /// were.
    fn devices(&self) -> Option<Vec<Device>> {
        None
    }
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::File,
        Self::Directory,
        Self::CharacterDevice,
        Self::BlockDevice,
        Self::Fifo,
        Self::Socket,
        Self::Symlink,
    ];

    /// The bits of `st_mode`.
    pub fn mode(self) -> u16 {
        match self {
            Self::File => 0o100_000,
            Self::Directory => 0o40_000,
            Self::CharacterDevice => 0o20_000,
            Self::BlockDevice => 0o60_000,
            Self::Fifo => 0o10_000,
            Self::Socket => 0o140_000,
            Self::Symlink => 0o120_000,
        }
    }

    pub(crate) fn of_mode(mode: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.mode() == mode & 0o170_000)
    }

    pub(crate) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == number)
    }
}

impl Content<'_> {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Directory => Kind::Directory,
            Self::File(_) => Kind::File,
            Self::Symlink(_) => Kind::Symlink,
            Self::CharacterDevice(_) => Kind::CharacterDevice,
            Self::BlockDevice(_) => Kind::BlockDevice,
            Self::Fifo => Kind::Fifo,
            Self::Socket => Kind::Socket,
        }
    }
}

//! What a file takes on its disk.

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxFlags, statx};

const THE_FILE_ITSELF: &CStr = c"";
const STAT_BLOCK_BYTES: u64 = 512;

/// See [`FileUsage::of`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileUsage {
    /// Names that lead to the file.
    pub links: u32,
    /// Bytes that the file system has given to it.
    pub allocated: u64,
}

impl FileUsage {
    /// Looks at an open file, and not at its times: where they were looked at, the kernel gives the next write times of
    /// its own, and the next sync has to write these as well.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let wanted = StatxFlags::NLINK | StatxFlags::BLOCKS;
        let found = statx(file, THE_FILE_ITSELF, AtFlags::EMPTY_PATH, wanted)?;
        Ok(Self { links: found.stx_nlink, allocated: found.stx_blocks * STAT_BLOCK_BYTES })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn it_is_what_the_file_system_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&[1; 10_000]).unwrap();
        file.sync_all().unwrap();
        let used = FileUsage::of(&file).unwrap();
        assert_eq!(used, FileUsage { links: 1, allocated: file.metadata().unwrap().blocks() * 512 });
        assert!(used.allocated >= 10_000);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(FileUsage::of(&file).unwrap().links, 0);
    }
}

//! Drafts: files under `tmp` that grow until they are given their final name.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DevS3Error;

/// The directory of drafts. Cheap to clone.
#[derive(Clone)]
pub(super) struct Tmp {
    dir: Arc<Path>,
    next: Arc<AtomicU64>,
}

impl Tmp {
    /// `dir` is empty.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.into(), next: Arc::default() }
    }

    /// A path that nothing else uses.
    pub fn path(&self) -> PathBuf {
        self.dir.join(format!("{:016x}", self.next.fetch_add(1, Ordering::Relaxed)))
    }
}

/// A file that is being written. Dropped without being placed, it is removed.
pub struct Draft {
    file: File,
    path: PathBuf,
    size: u64,
    placed: bool,
}

impl Draft {
    pub(super) fn create(path: PathBuf) -> Result<Self, DevS3Error> {
        let file =
            OpenOptions::new().write(true).create_new(true).open(&path).map_err(DevS3Error::io("create", &path))?;
        Ok(Self { file, path, size: 0, placed: false })
    }

    /// Bytes so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Appends `data`.
    ///
    /// # Errors
    /// [`DevS3Error::Io`].
    pub fn write(&mut self, data: &[u8]) -> Result<(), DevS3Error> {
        self.file.write_all(data).map_err(DevS3Error::io("write", &self.path))?;
        self.size += data.len() as u64;
        Ok(())
    }

    /// Appends the bytes `from..from + len` of `source`; the kernel copies them.
    ///
    /// # Errors
    /// [`DevS3Error::Io`], also where `source` is shorter.
    pub fn append(&mut self, mut source: &File, from: u64, len: u64) -> Result<(), DevS3Error> {
        let copied = source
            .seek(SeekFrom::Start(from))
            .and_then(|_| io::copy(&mut source.take(len), &mut self.file))
            .map_err(DevS3Error::io("copy to", &self.path))?;
        if copied != len {
            return Err(DevS3Error::io("copy to", &self.path)(io::ErrorKind::UnexpectedEof.into()));
        }
        self.size += len;
        Ok(())
    }

    /// Appends `len` zero bytes that take no room.
    pub(super) fn extend_with_hole(&mut self, len: u64) -> Result<(), DevS3Error> {
        self.size += len;
        self.file
            .set_len(self.size)
            .and_then(|()| self.file.seek(SeekFrom::Start(self.size)))
            .map_err(DevS3Error::io("extend", &self.path))?;
        Ok(())
    }

    /// Ends the file with a sealed record; it counts not as data.
    pub(super) fn finish(&mut self, sealed: &[u8]) -> Result<(), DevS3Error> {
        self.file.write_all(sealed).map_err(DevS3Error::io("write", &self.path))
    }

    /// Gives the file its final name.
    pub(super) fn place(mut self, path: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, path)?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.placed {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

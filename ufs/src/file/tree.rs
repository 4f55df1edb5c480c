//! A directory tree that no path leads out of, and in which nothing can be waited for.
//!
//! The kernel resolves each path beneath the tree's directory (openat2(2)): a symbolic link is followed while it stays
//! within the tree, so one that is absolute never is, and neither are the magic links of `/proc`. A race with somebody
//! who moves directories about cannot lead out either. The way to the tree's own directory is the administrator's, and
//! may have any links; where it leads is looked at in the open directory
//! ([`Tree::path`]).
//!
//! Only regular files are objects. What else there is, is looked at without opening it: to open a FIFO waits for its
//! other end, and to open a device may do anything.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat, openat2, statat};
use rustix::io::Errno;

/// The kernel asks for another attempt when something was renamed while it went up (`..`).
const ATTEMPTS: u32 = 64;

pub(super) struct Tree {
    root: OwnedFd,
}

impl Tree {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: openat(CWD, root, flags, Mode::empty())? })
    }

    /// Where it is: the path that the kernel has for it, without links.
    pub(super) fn path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.root.as_raw_fd()))
    }

    fn beneath(&self, path: &str, flags: OFlags) -> io::Result<File> {
        let path = if path.is_empty() { "." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut attempt = 1;
        loop {
            match openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) if attempt < ATTEMPTS => attempt += 1,
                Err(Errno::NOSYS) => {
                    let reason = "a directory tree needs the system call openat2, which Linux has since 5.6";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
                }
                opened => return Ok(opened?.into()),
            }
        }
    }

    /// What a path leads to; nothing of it is opened.
    pub(super) fn look(&self, path: &str) -> io::Result<Metadata> {
        self.beneath(path, OFlags::PATH)?.metadata()
    }

    /// A regular file, to be read.
    pub(super) fn file(&self, path: &str) -> io::Result<(File, Metadata)> {
        let no_file = || io::Error::from(io::ErrorKind::NotFound);
        if !self.look(path)?.is_file() {
            return Err(no_file());
        }
        // It may be another by now.
        let file = self.beneath(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata)) } else { Err(no_file()) }
    }

    /// A directory, to be listed.
    pub(super) fn directory(&self, path: &str) -> io::Result<Directory<'_>> {
        let directory = self.beneath(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        Ok(Directory { tree: self, path: path.to_owned(), directory })
    }
}

/// What a name in a directory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Object,
    Directory,
    /// A link to one.
    LinkedDirectory,
    /// Nothing that could be an object: a FIFO, a socket, a device, a link that leads out of the tree.
    Other,
    /// It is gone, or a link that leads nowhere.
    Nothing,
}

/// An open directory of a tree.
pub(super) struct Directory<'t> {
    tree: &'t Tree,
    path: String,
    directory: File,
}

impl Directory<'_> {
    /// All names but `.` and `..`, each with what it is; `None` for one that is not UTF-8.
    pub(super) fn names(&self) -> io::Result<impl Iterator<Item = io::Result<(Option<String>, Found)>>> {
        let entries = Dir::read_from(&self.directory)?;
        Ok(entries.filter_map(|entry| {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => return Some(Err(error.into())),
            };
            match entry.file_name().to_str() {
                Ok("." | "..") => None,
                Ok(name) => Some(Ok((Some(name.to_owned()), self.kind(name, entry.file_type())))),
                Err(_) => Some(Ok((None, Found::Other))),
            }
        }))
    }

    fn kind(&self, name: &str, entry_type: FileType) -> Found {
        let entry_type = match entry_type {
            FileType::Unknown => match statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(_) => return Found::Nothing,
            },
            entry_type => entry_type,
        };
        match entry_type {
            FileType::RegularFile => Found::Object,
            FileType::Directory => Found::Directory,
            FileType::Symlink => match self.look(name) {
                Ok(metadata) if metadata.is_file() => Found::Object,
                Ok(metadata) if metadata.is_dir() => Found::LinkedDirectory,
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    Found::Nothing
                }
                _ => Found::Other,
            },
            _ => Found::Other,
        }
    }

    /// What a name in it leads to.
    pub(super) fn look(&self, name: &str) -> io::Result<Metadata> {
        if self.path.is_empty() { self.tree.look(name) } else { self.tree.look(&format!("{}/{name}", self.path)) }
    }
}

//! Files that are replaced while they are read, as a bucket's objects are beneath a cache, and opened by the kernel
//! itself: `tests/bench_no_open.py` asks whether it is led to the newest version.
//!
//! Names and lengths are those of the source's files; the directory is not listed. A version is an inode of its own, to
//! which the name leads. Its bytes are its number, from 0, as eight of them over and over.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use clap::ValueEnum;
use fuser::{
    Errno, FileAttr, FileHandle, Filesystem, Generation, INodeNo, KernelConfig, LockOwner, Notifier, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};

use crate::answer::{TIMEOUT, answer_read, attributes, greet};

/// An inode's number is that of the version times this, and the place of the file behind the root.
const FILES_MAX: u64 = 1 << 16;
const FIRST_FILE: u64 = INodeNo::ROOT.0 + 1;

/// What becomes of a version when there is a next one.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OldVersion {
    /// The kernel is not told: its entry leads there as before.
    Cached,
    /// The kernel has dropped its entry; who has the version open reads on.
    Readable,
    /// Then the version is given up, too: the kernel's pages are all that is left of it.
    Gone,
}

/// A directory with files that [`Replaced::follow`] replaces.
#[derive(Clone)]
pub struct Replaced {
    root: FileAttr,
    files: Arc<Vec<File>>,
    old: OldVersion,
}

struct File {
    name: OsString,
    /// Of each version, but for the inode's number.
    attr: FileAttr,
    newest: AtomicU64,
    /// Versions before it are given up.
    oldest: AtomicU64,
}

impl Replaced {
    /// Shows the first version of each file of `source`.
    pub fn new(source: &Path, old: OldVersion) -> io::Result<Self> {
        let mut files = Vec::new();
        for entry in source.read_dir()? {
            let (entry, newest, oldest) = (entry?, AtomicU64::new(0), AtomicU64::new(0));
            files.push(File { name: entry.file_name(), attr: attributes(&entry.metadata()?), newest, oldest });
        }
        Ok(Self { root: attributes(&source.metadata()?), files: Arc::new(files), old })
    }

    /// Replaces the files that standard input names, one a line. For each, standard output has the number of the
    /// version that openers are led to from then on, or why there is none.
    pub fn follow(&self, notifier: &Notifier) -> io::Result<()> {
        io::stdin().lines().try_for_each(|name| match self.replace(name?.as_ref(), notifier) {
            Ok(number) => writeln!(io::stdout(), "{number}"),
            Err(error) => writeln!(io::stdout(), "not replaced: {error}"),
        })
    }

    fn replace(&self, name: &OsStr, notifier: &Notifier) -> io::Result<u64> {
        let (_, file) = self.named(name).ok_or(io::ErrorKind::NotFound)?;
        // Lookups find the next version before the kernel drops what earlier ones have found.
        let number = file.newest.fetch_add(1, SeqCst) + 1;
        if self.old != OldVersion::Cached {
            notifier.inval_entry(INodeNo::ROOT, name)?;
        }
        if self.old == OldVersion::Gone {
            file.oldest.store(number, SeqCst);
        }
        Ok(number)
    }

    fn named(&self, name: &OsStr) -> Option<(u64, &File)> {
        (FIRST_FILE..).zip(self.files.iter()).find(|(_, file)| file.name == name)
    }

    fn file(&self, ino: INodeNo) -> Option<&File> {
        self.files.get(usize::try_from((ino.0 % FILES_MAX).checked_sub(FIRST_FILE)?).ok()?)
    }
}

impl Filesystem for Replaced {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        greet(config);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some((place, file)) = self.named(name) else { return reply.error(Errno::ENOENT) };
        let ino = INodeNo(file.newest.load(SeqCst) * FILES_MAX + place);
        reply.entry(&TIMEOUT, &FileAttr { ino, ..file.attr }, Generation(0));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let attr = self.file(ino).map_or(self.root, |file| file.attr);
        reply.attr(&TIMEOUT, &FileAttr { ino, ..attr });
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let number = ino.0 / FILES_MAX;
        let Some(file) = self.file(ino).filter(|file| number >= file.oldest.load(SeqCst)) else {
            return reply.error(Errno::ESTALE);
        };
        answer_read(reply, size, |buffer| {
            let rest = file.attr.size.saturating_sub(offset).min(buffer.len() as u64) as usize;
            let digits = number.to_le_bytes().into_iter().cycle().skip((offset % 8) as usize);
            buffer[..rest].iter_mut().zip(digits).for_each(|(byte, digit)| *byte = digit);
            Ok(rest)
        });
    }
}

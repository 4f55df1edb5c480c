//! `cv fs put`: files of this host, or what comes from stdin, into a mount that can be written to.
//!
//! Whoever looks sees the old file or the new one, whole. What an interrupted command leaves behind is named
//! `.NAME.PID.partial`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use cavern_client::{Client, NewFile};
use cavern_proto::master::Kind;
use clap::Args;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2, readlinkat};

use super::change::{NameInDirectory, make, own_ids, own_umask, refused};
use super::names::{ensure_directory, symlink};
use super::walk::Copied;
use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::{CliError, Context as _};

/// Read and written at a time.
const PIECE_BYTES: usize = 4 << 20;

#[derive(Args)]
pub struct PutArgs {
    /// File or directory of this host; - for stdin.
    source: PathBuf,
    /// Absolute path in a mount that can be written to: a name, or a directory to put it into.
    path: String,
}

/// What is read, and the permissions that a new file of it gets.
struct Source {
    what: String,
    bytes: Box<dyn Read + Send>,
    mode: u32,
}

impl PutArgs {
    pub async fn run(&self, client: &Client, result: &ResultArgs) -> Result<(), CliError> {
        let is_stdin = self.source.as_os_str() == "-";
        let name = self.source.file_name().filter(|_| !is_stdin);
        let target = NameInDirectory::target(client, &self.path, name.map(OsStr::as_bytes)).await?;
        if is_stdin {
            let source = Source { what: "stdin".to_owned(), bytes: Box::new(io::stdin()), mode: 0o666 };
            return Copied { files: 1, bytes: put_file(client, source, &target).await? }.show(result);
        }
        self.put(client, target).await?.show(result)
    }

    async fn put(&self, client: &Client, target: NameInDirectory) -> Result<Copied, CliError> {
        let mut copied = Copied::default();
        // Without waiting for somebody at the other end of a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let root = openat(CWD, &self.source, flags, Mode::empty());
        let root = File::from(root.context(format_args!("cannot read {}", self.source.display()))?);
        // What is still to be copied: below the source, and there.
        let mut pending = vec![(PathBuf::new(), target)];
        while let Some((below, place)) = pending.pop() {
            let local = self.source.join(&below);
            let cannot_read = || format!("cannot read {}", local.display());
            let kind = open_below(&root, &below, OFlags::PATH).context(cannot_read())?;
            let kind = kind.metadata().context(cannot_read())?;
            if kind.is_file() {
                let file = open_below(&root, &below, OFlags::NONBLOCK).context(cannot_read())?;
                copied.bytes += put_file(client, Source::of(file, &local)?, &place).await?;
                copied.files += 1;
                continue;
            }
            if kind.is_symlink() {
                let link = open_below(&root, &below, OFlags::PATH).context(cannot_read())?;
                let target = readlinkat(&link, "", Vec::new()).context(cannot_read())?;
                put_link(client, Bytes::from(target.into_bytes()), &place).await?;
                continue;
            }
            if !kind.is_dir() {
                return Err(CliError::Failed(format!("{} is neither a file nor a directory", local.display())));
            }
            let directory = ensure_directory(client, &place).await?;
            let opened = open_below(&root, &below, OFlags::DIRECTORY).context(cannot_read())?;
            let entries = fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd())).context(cannot_read())?;
            for entry in entries {
                let name = entry.context(cannot_read())?.file_name();
                pending.push((below.join(&name), NameInDirectory::below(&place.path, &directory, name.as_bytes())));
            }
        }
        Ok(copied)
    }
}

/// Opens what is below a directory that is open, or that itself. Symbolic links below it lead nowhere: whoever may
/// write there would have others hand out what he may not read.
fn open_below(root: &File, below: &Path, flags: OFlags) -> io::Result<File> {
    if below.as_os_str().is_empty() {
        return root.try_clone();
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat2(root, below, flags, Mode::empty(), resolve)?.into())
}

impl Source {
    fn of(file: File, path: &Path) -> Result<Self, CliError> {
        let what = path.display().to_string();
        let mode = file.metadata().context(format_args!("cannot read {what}"))?.permissions().mode() & 0o777;
        Ok(Self { what, bytes: Box::new(file), mode })
    }
}

/// Puts a symbolic link, as it is.
async fn put_link(client: &Client, target: Bytes, place: &NameInDirectory) -> Result<(), CliError> {
    if !place.directory.is_fs_mode() {
        console::remark(format_args!("left out, since a bucket has no symbolic links: {}", place.path));
        return Ok(());
    }
    if let Some(node) = place.node(client).await?
        && node.posix().is_some_and(|posix| posix.target[..] == target[..])
    {
        return Ok(());
    }
    make(client, &place.path, symlink(place, target)).await.map(drop)
}

/// Puts one file; its bytes.
async fn put_file(client: &Client, source: Source, place: &NameInDirectory) -> Result<u64, CliError> {
    let replaced = place.node(client).await?;
    // As `cp`: a file that is replaced keeps its owner and its permissions.
    let (owner, mode, umask) = match &replaced {
        Some(node) if node.kind == Kind::File => ((node.uid, node.gid), node.mode, 0),
        Some(node) if node.is_directory() => {
            return Err(CliError::Failed(format!("{} is a directory, and {} is a file", place.path, source.what)));
        }
        _ => (own_ids(), source.mode, own_umask()),
    };
    let (uid, gid) = owner;
    let new =
        NewFile { name: &place.name, mode: mode & 0o7777, umask, uid, gid, is_exclusive: false, thread: 0, user: None };
    let refused = |error| refused(&place.path, error);
    let replacement = client.replace(&place.directory, new).await.map_err(refused)?;
    let file = replacement.file();
    match copy(source, async |offset, piece| file.write(offset, piece, None).await.map_err(refused)).await {
        Ok(bytes) => replacement.finish().await.map_err(refused).map(|_| bytes),
        Err(error) => {
            replacement.abandon().await;
            Err(error)
        }
    }
}

/// Gives all bytes of a source to a writer, with where each piece belongs; how many they were.
async fn copy(source: Source, write: impl AsyncFn(u64, Bytes) -> Result<(), CliError>) -> Result<u64, CliError> {
    let Source { what, mut bytes, .. } = source;
    let mut offset = 0;
    loop {
        // The session lives on meanwhile, however slow stdin is.
        let reading = tokio::task::spawn_blocking(move || {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            let read = bytes.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
            (bytes, read.map(|_| piece))
        });
        let (rest, piece) = reading.await.context(format_args!("cannot read {what}"))?;
        bytes = rest;
        let piece = piece.context(format_args!("cannot read {what}"))?;
        if piece.is_empty() {
            return Ok(offset);
        }
        let length = piece.len() as u64;
        write(offset, piece.into()).await?;
        offset += length;
    }
}

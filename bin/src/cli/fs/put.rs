//! `cv fs put`: files of this host, or what comes from stdin, into a mount that can be written to.
//!
//! Whoever looks sees the old file or the new one, whole. What an interrupted command leaves behind is named
//! `.NAME.PID.partial`.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use cavern_client::{Client, NewFile};
use cavern_conf::counted;
use cavern_proto::master::Kind;
use clap::Args;
use serde::Serialize;

use super::change::{NameInDirectory, own_ids, own_umask, refused};
use super::list::join;
use super::make::ensure_directory;
use super::walk::with_client;
use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::{CliError, Context as _};

/// Read and written at a time.
const PIECE_BYTES: usize = 4 << 20;

#[derive(Args)]
pub struct PutArgs {
    /// File or directory of this host; - for stdin.
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// Absolute path in a mount that can be written to: a name, or a directory to put it into.
    #[arg(value_name = "PATH")]
    path: String,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Default, Serialize)]
struct Copied {
    files: u64,
    bytes: u64,
}

/// What is read, and the permissions that a new file of it gets.
struct Source {
    what: String,
    bytes: Box<dyn Read + Send>,
    mode: u32,
}

impl PutArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let copied = with_client(&self.cluster, async |client| self.put(client).await).await?;
        if self.json {
            return console::json(&copied);
        }
        console::line(format_args!("{}, {}", counted(copied.files, "file"), console::size(copied.bytes)))
    }

    async fn put(&self, client: &Client) -> Result<Copied, CliError> {
        let is_stdin = self.source.as_os_str() == "-";
        let name = self.source.file_name().filter(|_| !is_stdin);
        let target = match client.metadata().resolve(&self.path).await {
            // The root of a mount is a directory to put something into, though its own name cannot be changed.
            Ok(directory) if directory.is_directory() && directory.can_be_changed() => {
                let name = name.ok_or_else(|| {
                    CliError::Usage(format!("{} is a directory: say which name the file shall have in it", self.path))
                })?;
                let name = Bytes::copy_from_slice(name.as_bytes());
                NameInDirectory { path: join(&self.path, &name), directory, name }
            }
            _ => NameInDirectory::find(client, &self.path).await?,
        };
        let mut copied = Copied::default();
        if is_stdin {
            let source = Source { what: "stdin".to_owned(), bytes: Box::new(io::stdin()), mode: 0o666 };
            copied.bytes = put_file(client, source, &target).await?;
            copied.files = 1;
            return Ok(copied);
        }
        // Directories that are still to be copied: here and there.
        let mut pending = vec![(self.source.clone(), target)];
        while let Some((local, place)) = pending.pop() {
            let kind = fs::metadata(&local).context(format_args!("cannot read {}", local.display()))?;
            if kind.is_file() {
                copied.bytes += put_file(client, Source::open(&local)?, &place).await?;
                copied.files += 1;
                continue;
            }
            if !kind.is_dir() {
                return Err(CliError::Failed(format!("{} is neither a file nor a directory", local.display())));
            }
            let above = place.path.rsplit_once('/').map_or("", |(above, _)| above);
            let directory = ensure_directory(client, &place.directory, above, &place.name).await?;
            for entry in fs::read_dir(&local).context(format_args!("cannot read {}", local.display()))? {
                let name = entry.context(format_args!("cannot read {}", local.display()))?.file_name();
                let path = join(&place.path, name.as_bytes());
                let below = NameInDirectory {
                    path,
                    directory: directory.clone(),
                    name: Bytes::copy_from_slice(name.as_bytes()),
                };
                pending.push((local.join(&name), below));
            }
        }
        Ok(copied)
    }
}

impl Source {
    fn open(path: &Path) -> Result<Self, CliError> {
        let what = path.display().to_string();
        let file = File::open(path).context(format_args!("cannot read {what}"))?;
        let mode = file.metadata().context(format_args!("cannot read {what}"))?.permissions().mode() & 0o777;
        Ok(Self { what, bytes: Box::new(file), mode })
    }
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

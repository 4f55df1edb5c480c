//! Bytes of files, through the cache as a mount reads them: `cv fs cat`, `head`, `tail` and `get`.

use std::fs;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{Client, File, Node};
use cavern_proto::master::Kind;
use clap::Args;
use futures::{StreamExt as _, stream};

use super::target::Target;
use super::walk::{Copied, path_below, walk};
use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::{CliError, Context as _};

/// Reads of this size, so many at a time.
const READ_BYTES: usize = 1 << 20;
const READS: usize = 8;
/// Read at a time when lines are looked for from the end.
const BACKWARD_BYTES: u64 = 128 << 10;

#[derive(Args)]
pub struct EndArgs {
    /// Absolute paths in the namespace.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// So many lines.
    #[arg(short = 'n', long, value_name = "LINES", default_value_t = 10, conflicts_with = "bytes")]
    lines: u64,
    /// So many bytes instead of lines.
    #[arg(short = 'c', long, value_name = "BYTES")]
    bytes: Option<u64>,
}

#[derive(Args)]
pub struct GetArgs {
    /// Absolute path in the namespace.
    path: String,
    /// Where to [default: the same name in the current directory].
    target: Option<PathBuf>,
}

/// # Errors
/// What has no bytes to be read is refused: directories, for which there is something else to do, links, FIFOs, sockets
/// and devices.
pub fn check_kind(path: &str, node: &Node, instead: &str) -> Result<(), CliError> {
    let what = match node.kind {
        Kind::File | Kind::Unspecified => return Ok(()),
        Kind::Directory => format!("{path} is a directory: {instead}"),
        Kind::Symlink => {
            let target = node.posix().map(|posix| String::from_utf8_lossy(&posix.target)).unwrap_or_default();
            format!("{path} is a symbolic link to {target}, which is not followed: name the file itself")
        }
        _ => format!("{path} is no regular file: it has no content"),
    };
    Err(CliError::Usage(what))
}

/// A file that is open for reading.
struct Reader {
    path: String,
    file: File,
    /// Bytes of the file when it was opened.
    size: u64,
}

impl Reader {
    /// # Errors
    /// As [`check_kind`].
    async fn open(client: &Client, path: &str, node: &Arc<Node>) -> Result<Self, CliError> {
        check_kind(path, node, "name a file, or use `cv fs get`")?;
        let file = client.open_to_read(node).await?;
        let size = file.size().await?;
        Ok(Self { path: path.to_owned(), file, size })
    }

    async fn at(client: &Client, path: &str) -> Result<Self, CliError> {
        let node = client.metadata().resolve(path).await?;
        Self::open(client, path, &node).await
    }

    /// Bytes at an offset; fewer than asked only at the end.
    async fn read(&self, offset: u64, length: usize) -> Result<Bytes, CliError> {
        self.file.read(offset, length).await.map_err(|error| CliError::from(error).of(&self.path))
    }

    /// Hands the bytes from `start` on to `sink`, in order, with several reads in flight, until it has enough.
    async fn read_from(
        &self,
        start: u64,
        mut sink: impl FnMut(&[u8]) -> Result<ControlFlow<()>, CliError>,
    ) -> Result<(), CliError> {
        let pieces = (start..self.size).step_by(READ_BYTES).map(|offset| self.piece(offset));
        let mut pieces = stream::iter(pieces).buffered(READS);
        while let Some(piece) = pieces.next().await {
            if sink(&piece?)?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// One piece, which is as long as it must be: a file that is shorter by now is not handed out as if it were whole.
    async fn piece(&self, offset: u64) -> Result<Bytes, CliError> {
        let wanted = usize::try_from(self.size - offset).unwrap_or(READ_BYTES).min(READ_BYTES);
        let piece = self.read(offset, wanted).await?;
        if piece.len() == wanted {
            return Ok(piece);
        }
        let end = offset + piece.len() as u64;
        Err(CliError::Failed(format!(
            "{}: it has only {end} bytes, and had {} when it was opened",
            self.path, self.size
        )))
    }

    /// Where the last lines begin.
    async fn start_of_lines(&self, lines: u64) -> Result<u64, CliError> {
        let mut end = self.size;
        if lines == 0 {
            return Ok(end);
        }
        // A newline at the very end ends the last line and begins none.
        let mut left = lines;
        let mut is_last = true;
        while end > 0 {
            let start = end.saturating_sub(BACKWARD_BYTES);
            let piece = self.read(start, (end - start) as usize).await?;
            for (at, byte) in piece.iter().enumerate().rev() {
                if *byte == b'\n' && !is_last {
                    left -= 1;
                    if left == 0 {
                        return Ok(start + at as u64 + 1);
                    }
                }
                is_last = false;
            }
            end = start;
        }
        Ok(0)
    }
}

/// `cv fs cat`.
pub async fn cat(client: &Client, paths: &[String]) -> Result<(), CliError> {
    for path in paths {
        let reader = Reader::at(client, path).await?;
        reader.read_from(0, |piece| console::raw(piece).map(ControlFlow::Continue)).await?;
    }
    Ok(())
}

impl EndArgs {
    /// `cv fs head`.
    pub async fn head(&self, client: &Client) -> Result<(), CliError> {
        let show = async |reader: &Reader| {
            let (mut lines, mut bytes) = match self.bytes {
                Some(bytes) => (u64::MAX, bytes),
                None => (self.lines, u64::MAX),
            };
            if lines == 0 || bytes == 0 {
                return Ok(());
            }
            let sink = |piece: &[u8]| {
                let within = usize::try_from(bytes).map_or(piece.len(), |bytes| bytes.min(piece.len()));
                let end = end_of_lines(&piece[..within], &mut lines);
                console::raw(&piece[..end])?;
                bytes -= end as u64;
                Ok(if lines == 0 || bytes == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            };
            reader.read_from(0, sink).await
        };
        self.each(client, show).await
    }

    /// `cv fs tail`.
    pub async fn tail(&self, client: &Client) -> Result<(), CliError> {
        let show = async |reader: &Reader| {
            let start = match self.bytes {
                Some(bytes) => reader.size.saturating_sub(bytes),
                None => reader.start_of_lines(self.lines).await?,
            };
            reader.read_from(start, |piece| console::raw(piece).map(ControlFlow::Continue)).await
        };
        self.each(client, show).await
    }

    /// Shows a part of every file, with headings if there are several.
    async fn each(&self, client: &Client, show: impl AsyncFn(&Reader) -> Result<(), CliError>) -> Result<(), CliError> {
        for (number, path) in self.paths.iter().enumerate() {
            let reader = Reader::at(client, path).await?;
            if self.paths.len() > 1 {
                let space = if number > 0 { "\n" } else { "" };
                console::line(format_args!("{space}==> {path} <=="))?;
            }
            show(&reader).await?;
        }
        Ok(())
    }
}

/// Where the lines that are left end in a piece; counts them down.
fn end_of_lines(piece: &[u8], left: &mut u64) -> usize {
    for (at, _) in piece.iter().enumerate().filter(|(_, byte)| **byte == b'\n') {
        *left -= 1;
        if *left == 0 {
            return at + 1;
        }
    }
    piece.len()
}

impl GetArgs {
    pub async fn run(&self, client: &Client, result: &ResultArgs) -> Result<(), CliError> {
        let last = self.path.rsplit('/').find(|part| !part.is_empty());
        let usage = || CliError::Usage("say where to put the whole namespace: cv fs get / TARGET".to_owned());
        let target = self.target.clone().or_else(|| last.map(PathBuf::from)).ok_or_else(usage)?;
        let root = client.metadata().resolve(&self.path).await?;
        // As `cp`: a file goes into an existing directory.
        let target = match self.path.rsplit_once('/') {
            Some((_, name)) if root.kind != Kind::Directory && target.is_dir() => target.join(name),
            _ => target,
        };
        // What lies below is found beneath it, whatever symbolic links there are.
        let (target, top) = if root.kind == Kind::Directory {
            fs::create_dir_all(&target).context(format_args!("cannot create {}", target.display()))?;
            (Target::open(&target)?, String::new())
        } else {
            Target::of_file(&target)?
        };
        let mut copied = Copied::default();
        walk(client, root, async |found| {
            let local = if found.below.is_empty() { top.as_str() } else { found.below };
            let path = path_below(&self.path, found.below);
            match found.node.kind {
                Kind::Directory if local.is_empty() => Ok(()),
                Kind::Directory => target.make_directory(local),
                Kind::Symlink => target.make_link(local, found.node.posix().map_or(&b""[..], |posix| &posix.target)),
                Kind::File | Kind::Unspecified => {
                    copied.files += 1;
                    copied.bytes += copy(client, &path, found.node, &target, local).await?;
                    Ok(())
                }
                _ => {
                    console::remark(format_args!("left out, since it is no file: {path}"));
                    Ok(())
                }
            }
        })
        .await?;
        copied.show(result)
    }
}

/// Copies one file under a temporary name first, so that an interrupted copy is not taken for a whole one.
async fn copy(client: &Client, path: &str, node: &Arc<Node>, target: &Target, local: &str) -> Result<u64, CliError> {
    let reader = Reader::open(client, path, node).await?;
    let mut draft = target.draft(local)?;
    let what = format!("cannot write {}", target.shown(local));
    let sink = |piece: &[u8]| draft.file().write_all(piece).context(&what).map(ControlFlow::Continue);
    reader.read_from(0, sink).await?;
    draft.keep()?;
    Ok(reader.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_across_pieces() {
        let mut left = 3;
        assert_eq!(end_of_lines(b"a\nb\nc", &mut left), 5);
        assert_eq!((left, end_of_lines(b"c\nd\n", &mut left)), (1, 2));
        assert_eq!(left, 0);
    }
}

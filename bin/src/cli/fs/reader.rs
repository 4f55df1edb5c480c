//! The bytes of a file, several reads at a time.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{Client, File, Node};
use cavern_proto::master::Kind;
use futures::StreamExt as _;
use futures::stream;

use crate::error::CliError;

/// Reads of this size, so many at a time.
const READ_BYTES: usize = 1 << 20;
const READS: usize = 8;

/// A file that is open for reading.
pub struct Reader {
    path: String,
    file: File,
    size: u64,
}

/// Whether whoever takes the bytes wants more of them.
pub enum More {
    Yes,
    No,
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

impl Reader {
    /// # Errors
    /// As [`check_kind`].
    pub async fn open(client: &Client, path: &str, node: &Arc<Node>) -> Result<Self, CliError> {
        check_kind(path, node, "name a file, or use `cv fs get`")?;
        let path = path.to_owned();
        let file = client.open_to_read(node).await?;
        let size = file.size().await?;
        Ok(Self { path, file, size })
    }

    /// Bytes of the file when it was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes at an offset; fewer than asked only at the end.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, CliError> {
        self.file.read(offset, length).await.map_err(|error| CliError::from(error).of(&self.path))
    }

    /// Hands the bytes from `start` on to `sink`, in order, with several reads in flight, until it has enough.
    pub async fn read_from(
        &self,
        start: u64,
        mut sink: impl FnMut(&[u8]) -> Result<More, CliError>,
    ) -> Result<(), CliError> {
        let pieces = (start..self.size).step_by(READ_BYTES).map(|offset| self.piece(offset));
        let mut pieces = stream::iter(pieces).buffered(READS);
        while let Some(piece) = pieces.next().await {
            if let More::No = sink(&piece?)? {
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

    /// All bytes from the beginning.
    pub async fn read_all(&self, mut sink: impl FnMut(&[u8]) -> Result<(), CliError>) -> Result<(), CliError> {
        self.read_from(0, |bytes| sink(bytes).map(|()| More::Yes)).await
    }
}

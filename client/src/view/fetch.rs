//! The object of a view, read as any object is, and compared with its hash.

use std::fs::File;
use std::io::{self, Write as _};
use std::sync::Arc;

use cavern_proto::master::{Attr, View};
use cavern_proto::record::ViewManifest;
use cavern_proto::view_file::{MANIFEST_BYTES_MAX, TRAILER_BYTES, manifest_bytes};
use prost::Message as _;

use super::copies::copied_bytes;
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::{MountView, ObjectVersion};
use crate::read::Files;

/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 4 << 20;

/// What is done with bytes that have come.
struct CopySink {
    file: File,
    hasher: blake3::Hasher,
    /// Bytes that are still to be hashed: what is behind them tells nothing but where they end.
    hashed_left: u64,
    end: Vec<u8>,
}

impl CopySink {
    fn accept(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (hashed, end) = bytes.split_at(usize::try_from(self.hashed_left).unwrap_or(usize::MAX).min(bytes.len()));
        self.hasher.update(hashed);
        self.hashed_left -= hashed.len() as u64;
        self.end.extend_from_slice(end);
        self.file.write_all(bytes)
    }
}

/// Writes the first `bytes` bytes of a view's object to a file: those that are kept on a host, or all of them. `mount`
/// is the one whose bucket has it; `progress` is told how many there are so far.
///
/// # Errors
/// It cannot be read, or written, or is not what its hash says: then what was written is to be thrown away.
pub(super) async fn fetch(
    files: &Files,
    mount: Arc<MountView>,
    view: &View,
    bytes: u64,
    to: File,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<(), ClientError> {
    let failed = |cause: String| {
        let cause = format!("its object {} in the bucket of {} {cause}", view.key, mount.path());
        ClientError::View { view: view.name.clone(), cause }
    };
    let hashed_left = copied_bytes(view);
    let behind = view.object_bytes.checked_sub(hashed_left);
    if behind.is_none_or(|behind| behind > MANIFEST_BYTES_MAX + TRAILER_BYTES as u64) {
        return Err(failed("is not as long as what it has: delete the view, and make it anew".to_owned()));
    }
    let object = ObjectVersion::new(mount.clone(), &view.key, &view.etag, view.object_bytes)?;
    let file = files.open_object(Arc::new(Node::nameless(&Attr::default(), Some(mount.clone()))), object);
    let mut sink = Box::new(CopySink { file: to, hasher: blake3::Hasher::new(), hashed_left, end: Vec::new() });
    let mut at = 0;
    while at < bytes {
        let wanted = PIECE_BYTES.min(bytes - at);
        // At most PIECE_BYTES.
        let piece = file.read_object(at, wanted as usize).await;
        let piece = piece.map_err(|error| failed(format!("cannot be read: {error}")))?;
        if piece.len() as u64 != wanted {
            return Err(failed(format!("ends before byte {}", at + wanted)));
        }
        let written = tokio::task::spawn_blocking(move || sink.accept(&piece).map(|()| sink)).await;
        let written = written.map_err(|_stopped| ClientError::Shutdown)?;
        sink = written.map_err(|error| failed(format!("cannot be written to this host: {error}")))?;
        at += wanted;
        progress(at);
    }
    let has_end = bytes == hashed_left || is_end_of(view, &sink.end);
    if !has_end || sink.hasher.finalize().as_bytes()[..] != view.hash[..] {
        return Err(failed(
            "is not what was stored: its hash is another; delete the view, and make it anew".to_owned(),
        ));
    }
    Ok(())
}

/// Whether that is what comes behind image, pages and index.
fn is_end_of(view: &View, end: &[u8]) -> bool {
    let Some((manifest, trailer)) = end.split_last_chunk::<TRAILER_BYTES>() else { return false };
    let is_of_view = |manifest: ViewManifest| manifest.view.is_some_and(|of| of.hash == view.hash);
    manifest_bytes(trailer) == Some(manifest.len() as u64) && ViewManifest::decode(manifest).is_ok_and(is_of_view)
}

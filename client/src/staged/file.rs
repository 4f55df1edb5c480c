//! One file that is being written: what it reads as, and how that changes.
//!
//! Its bytes are those that were staged; where none were, those of the object that it was opened from; else zeros. Writes share
//! the gate, and what must find the bytes at rest has it alone: an upload, or giving staged bytes back to the file system.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use cavern_proto::master::{Attr, Entry, Kind};
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::sync::RwLock;
use tokio::time::Instant;

use super::Shared;
use super::parts::{OBJECT_BYTES_MAX, Parts};
use super::place::{nameless_file, punch};
use super::ranges::RangeSet;
use super::upload::{Ahead, Attempt};
use super::writers::Writers;
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::{MountView, ObjectVersion};
use crate::read::OpenFile;

/// What is read of the object that a file was opened from at a time.
const BASE_PIECE: u64 = 4 << 20;
/// Staged ranges of one file at most, each some 50 bytes of memory; beyond that what lies between them is fetched.
const RANGES_MAX: usize = 16_384;

/// A file of a cache-mode mount that is being written. Its inode is this process's own: the namespace has none for it until the
/// bucket has its bytes, and then another.
pub struct StagedFile {
    pub(super) shared: Arc<Shared>,
    pub(super) inode: u64,
    pub(super) mount: Arc<MountView>,
    pub(super) state: Mutex<State>,
    /// Writes share it.
    pub(super) gate: RwLock<()>,
    /// Held for reading by whoever sends a part ahead.
    pub(super) sending: Arc<RwLock<()>>,
    /// Made for the first byte.
    file: Mutex<Option<Arc<File>>>,
    pub(super) handles: AtomicU32,
}

pub(super) struct State {
    pub place: Place,
    /// Bytes.
    pub size: u64,
    /// When it was written last, in nanoseconds since the epoch.
    pub written_ns: i64,
    pub staged: RangeSet,
    /// What was staged, and is in no place but the parts of an upload.
    pub sent_away: RangeSet,
    pub base: Option<Base>,
    /// Nothing may be under the key: it was made so (`O_EXCL`).
    pub is_exclusive: bool,
    pub changes: u64,
    /// So many changes the bucket has.
    pub committed: u64,
    /// The bucket did not take it as it is after so many changes.
    pub failed: Option<u64>,
    pub writers: Writers,
    /// Its name was removed: nothing of it reaches the bucket any more.
    pub is_removed: bool,
    pub parts: Parts,
    pub ahead: Ahead,
    pub attempt: Option<Arc<Attempt>>,
}

/// Where it will be.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub parent: u64,
    pub name: Box<[u8]>,
    /// Key prefix of the directory.
    pub location: Arc<str>,
}

impl Place {
    pub fn key(&self) -> String {
        format!("{}{}", self.location, String::from_utf8_lossy(&self.name))
    }
}

/// The object that a file was opened from, or has last been written as.
#[derive(Clone)]
pub(super) struct Base {
    pub file: Arc<OpenFile>,
    pub etag: String,
    /// So many bytes of it, from the first on, are still the file's.
    pub valid: u64,
}

/// Where a piece of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Staged,
    Base,
    Zeros,
}

impl StagedFile {
    pub(super) fn new(
        shared: Arc<Shared>,
        inode: u64,
        mount: Arc<MountView>,
        place: Place,
        base: Option<Base>,
    ) -> Self {
        let size = base.as_ref().map_or(0, |base| base.valid);
        let written_ns = base.as_ref().map_or_else(now_ns, |base| base.file.node().mtime_ns);
        // A new file is one to be written, even without a byte.
        let changes = u64::from(base.is_none());
        let state = State {
            place,
            size,
            written_ns,
            staged: RangeSet::default(),
            sent_away: RangeSet::default(),
            base,
            is_exclusive: false,
            changes,
            committed: 0,
            failed: None,
            writers: Writers::default(),
            is_removed: false,
            parts: Parts::default(),
            ahead: Ahead::default(),
            attempt: None,
        };
        Self {
            shared,
            inode,
            mount,
            state: Mutex::new(state),
            gate: RwLock::new(()),
            sending: Arc::default(),
            file: Mutex::new(None),
            handles: AtomicU32::new(0),
        }
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// Whether the bucket lacks something of it.
    pub fn is_dirty(&self) -> bool {
        let state = self.state.lock();
        !state.is_removed && state.changes != state.committed
    }

    /// Whether a close by somebody is to have the bucket take it.
    pub fn is_flushed_by(&self, closer: u64) -> bool {
        self.is_dirty() && self.state.lock().writers.may_be(closer)
    }

    /// Whether the bucket was asked to take it as it is, and did not.
    pub fn has_failed(&self) -> bool {
        let state = self.state.lock();
        state.failed == Some(state.changes)
    }

    /// Whether anybody here has it open.
    pub fn is_open(&self) -> bool {
        self.handles.load(Ordering::Acquire) > 0
    }

    /// It as programs see it now.
    pub fn node(&self) -> Arc<Node> {
        let state = self.state.lock();
        let attr = Attr {
            inode: self.inode,
            kind: Kind::File.into(),
            size: state.size,
            mtime_ns: state.written_ns,
            ctime_ns: state.written_ns,
            atime_ns: state.written_ns,
            nlink: 1,
            ..Attr::default()
        };
        let Place { parent, name, location } = &state.place;
        let entry = Entry { name: Bytes::copy_from_slice(name), parent: *parent, ..Entry::default() };
        Arc::new(Node::new(&entry, &attr, Some(self.mount.clone()), location.clone()))
    }

    /// Writes without waiting, for event loops; `None`: use `write`.
    pub fn write_now(self: &Arc<Self>, offset: u64, bytes: &[u8], writer: Option<u64>) -> Option<()> {
        let _writing = self.gate.try_read().ok()?;
        let range = range_of(offset, bytes.len()).ok()?;
        let file = self.file.lock().clone()?;
        if self.check_write(&range).is_err() || self.state.lock().staged.count() >= RANGES_MAX {
            return None;
        }
        let room = bytes.len() as u64;
        if !self.shared.room.try_take(room) {
            return None;
        }
        if file.write_all_at(bytes, offset).is_err() {
            self.shared.room.give(room);
            return None;
        }
        self.wrote(range, writer);
        self.send_ahead();
        Some(())
    }

    /// Writes all of `bytes` at `offset`. Bounded by `client.read_timeout`, but for an upload of the file that is under way. The
    /// writer is named as whoever flushes the file is.
    pub async fn write(self: &Arc<Self>, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        let range = range_of(offset, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        if self.state.lock().staged.count() >= RANGES_MAX {
            self.join_ranges().await?;
        }
        let room = bytes.len() as u64;
        if !self.shared.room.take(room, Instant::now() + self.shared.timeout).await {
            let reason = format!(
                "{}: what may be staged on this host (client.staging_size) is used up, and the bucket takes nothing off it",
                self.node()
            );
            return Err(ClientError::Refused { errno: Errno::NOSPC.raw_os_error(), reason });
        }
        let _writing = self.gate.read().await;
        let written = match self.check_write(&range) {
            Ok(()) => self.with_file(move |file| file.write_all_at(&bytes, offset)).await,
            Err(error) => Err(error),
        };
        match written {
            Ok(()) => self.wrote(range, writer),
            Err(error) => {
                self.shared.room.give(room);
                return Err(error);
            }
        }
        self.send_ahead();
        Ok(())
    }

    /// Whether a range may be written to.
    fn check_write(&self, range: &Range<u64>) -> Result<(), ClientError> {
        if !self.state.lock().sent_away.touches(range) {
            return Ok(());
        }
        let reason = format!(
            "{}: bytes {}..{} have been sent to the bucket, and can be changed when the file has been closed; a larger \
             client.staging_size keeps them here",
            self.node(),
            range.start,
            range.end
        );
        Err(ClientError::Refused { errno: Errno::NOSPC.raw_os_error(), reason })
    }

    /// A range has been written; its room was taken for all of it.
    fn wrote(&self, range: Range<u64>, writer: Option<u64>) {
        let mut state = self.state.lock();
        state.writers.add(writer);
        let new = state.staged.insert(range.clone());
        self.shared.room.give((range.end - range.start) - new);
        state.size = state.size.max(range.end);
        state.parts.touch(range);
        state.changed();
    }

    /// Cuts the file, or lengthens it with zeros. The writer is named as for `write`.
    pub async fn set_size(&self, size: u64, writer: Option<u64>) -> Result<(), ClientError> {
        if size > OBJECT_BYTES_MAX {
            return Err(too_large());
        }
        let _alone = self.gate.write().await;
        let removed = {
            let mut state = self.state.lock();
            let old = state.size;
            if size == old && size > 0 {
                return Ok(());
            }
            if let Some(base) = &mut state.base {
                base.valid = base.valid.min(size);
            }
            // What is written from here on has nothing to do with any earlier version.
            if size == 0 {
                state.base = None;
            }
            state.sent_away.remove(size..u64::MAX);
            let removed = state.staged.remove(size..u64::MAX);
            state.parts.touch(old.min(size)..old.max(size));
            state.size = size;
            state.writers.add(writer);
            state.changed();
            removed
        };
        self.shared.room.give(removed);
        // What is not staged any more is read no more; its room on the disk is another matter.
        let file = self.file.lock().clone();
        match file {
            Some(file) => self.blocking(move || file.set_len(size)).await,
            None => Ok(()),
        }
    }

    /// The time of the last change becomes now: the object is written anew with the next flush.
    pub fn touch(&self) {
        let mut state = self.state.lock();
        state.writers.add(None);
        state.changed();
    }

    /// Its name is gone.
    pub(super) fn remove(&self) {
        self.state.lock().is_removed = true;
    }

    /// It has another name, under which the bucket has what it had under the old one.
    pub(super) fn move_to(&self, place: Place, object: ObjectVersion) {
        let mut state = self.state.lock();
        // Parts that were sent ahead are on their way to the old one.
        state.forget_parts();
        state.place = place;
        if let Some(base) = &mut state.base {
            base.etag = object.etag.to_string();
            base.file = self.shared.files.open_object(base.file.node().clone(), object);
        }
    }

    /// Nothing may come to be under its key before it.
    pub(super) fn set_exclusive(&self) {
        self.state.lock().is_exclusive = true;
    }

    /// Reads `length` bytes at `offset`, fewer only at the end of the file.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let size = self.state.lock().size;
        let end = offset.saturating_add(length as u64).min(size);
        if offset >= end {
            return Ok(Bytes::new());
        }
        self.collect(offset..end).await
    }

    /// The bytes of a range.
    pub(super) async fn collect(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        // At most a part, or what one request asks for.
        let mut bytes = BytesMut::with_capacity((range.end - range.start) as usize);
        while bytes.len() as u64 != range.end - range.start {
            let at = range.start + bytes.len() as u64;
            let (piece, source) = self.first_piece(at..range.end)?;
            match source {
                Source::Zeros => bytes.resize(bytes.len() + (piece.end - piece.start) as usize, 0),
                Source::Base => bytes.extend_from_slice(&self.read_base(piece).await?),
                Source::Staged => {
                    let read = self.read_staged(piece.clone()).await?;
                    // What was given back to the file system meanwhile read as zeros.
                    if self.state.lock().staged.contains(&piece) {
                        bytes.extend_from_slice(&read);
                    }
                }
            }
        }
        Ok(bytes.freeze())
    }

    /// The beginning of a range that lies in one place.
    fn first_piece(&self, range: Range<u64>) -> Result<(Range<u64>, Source), ClientError> {
        let state = self.state.lock();
        let first = |set: &RangeSet| set.pieces(range.clone()).into_iter().next().unwrap_or((range.clone(), false));
        let (piece, is_staged) = first(&state.staged);
        if is_staged {
            return Ok((piece, Source::Staged));
        }
        if state.sent_away.touches(&(piece.start..piece.start + 1)) {
            let reason =
                format!("bytes that are on their way to {} cannot be read before it is closed", state.place.key());
            return Err(ClientError::Refused { errno: Errno::IO.raw_os_error(), reason });
        }
        let valid = state.base.as_ref().map_or(0, |base| base.valid);
        if piece.start >= valid {
            return Ok((piece, Source::Zeros));
        }
        let end = piece.end.min(valid).min(piece.start + BASE_PIECE);
        Ok((piece.start..end, Source::Base))
    }

    async fn read_base(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        let base = self.state.lock().base.as_ref().map(|base| base.file.clone());
        let key = || self.state.lock().place.key();
        let file = base.ok_or_else(|| ClientError::Stale(key()))?;
        let length = (range.end - range.start) as usize;
        let bytes = match file.read_object(range.start, length).await {
            Ok(bytes) => bytes,
            // Whoever has it open cannot look it up again.
            Err(error) if error.is_version_gone() => {
                let reason = format!("{}: the object was replaced while it was being changed here: {error}", key());
                return Err(ClientError::Refused { errno: Errno::IO.raw_os_error(), reason });
            }
            Err(error) => return Err(error),
        };
        if bytes.len() == length {
            return Ok(bytes);
        }
        Err(ClientError::Invalid(format!("{}: {} bytes instead of {length} of the old content", key(), bytes.len())))
    }

    async fn read_staged(&self, range: Range<u64>) -> Result<Vec<u8>, ClientError> {
        self.with_file(move |file| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        })
        .await
    }

    /// Fetches what lies between staged ranges, so that they become few.
    async fn join_ranges(&self) -> Result<(), ClientError> {
        let _alone = self.gate.write().await;
        let gaps: Vec<Range<u64>> = {
            let state = self.state.lock();
            let pieces = state.staged.pieces(0..state.size).into_iter();
            pieces
                .filter(|(piece, is_staged)| !is_staged && !state.sent_away.touches(piece))
                .map(|(piece, _)| piece)
                .collect()
        };
        for gap in gaps {
            let mut at = gap.start;
            while at < gap.end {
                let piece = at..gap.end.min(at + BASE_PIECE);
                at = piece.end;
                let bytes = self.collect(piece.clone()).await?;
                if !self.shared.room.try_take(piece.end - piece.start) {
                    let reason = format!("{}: too many places of it were changed for client.staging_size", self.node());
                    return Err(ClientError::Refused { errno: Errno::NOSPC.raw_os_error(), reason });
                }
                let (start, room) = (piece.start, piece.end - piece.start);
                let written = self.with_file(move |file| file.write_all_at(&bytes, start)).await;
                written.inspect_err(|_| self.shared.room.give(room))?;
                self.state.lock().staged.insert(piece);
            }
        }
        Ok(())
    }

    /// Gives the staged bytes of a part that was sent back to the file system.
    pub(super) async fn send_away(&self, index: u64, range: Range<u64>) {
        let _alone = self.gate.write().await;
        {
            let mut state = self.state.lock();
            // It may have been written to, or the upload may be over.
            if state.parts.etag(index, range.end - range.start).is_none() || !state.staged.contains(&range) {
                return;
            }
            state.staged.remove(range.clone());
            state.sent_away.insert(range.clone());
        }
        let room = range.end - range.start;
        let punched = self.with_file(move |file| punch(file, &range)).await;
        if let Err(error) = punched {
            tracing::debug!(file = %self.node(), "staged bytes stay on the disk: {error}");
        }
        self.shared.room.give(room);
    }

    /// Works with the staged bytes, on a thread that may block.
    async fn with_file<T: Send + 'static>(
        &self,
        work: impl FnOnce(&File) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ClientError> {
        let file = self.file()?;
        self.blocking(move || work(&file)).await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, ClientError> {
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => done.map_err(|error| self.not_staged(error)),
            Err(_) => Err(ClientError::Shutdown),
        }
    }

    fn file(&self) -> Result<Arc<File>, ClientError> {
        let mut file = self.file.lock();
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let made = Arc::new(nameless_file(&self.shared.directory).map_err(|error| self.not_staged(error))?);
        *file = Some(made.clone());
        Ok(made)
    }

    fn not_staged(&self, error: io::Error) -> ClientError {
        let errno = if error.kind() == io::ErrorKind::StorageFull { Errno::NOSPC } else { Errno::IO };
        let directory = self.shared.directory.display();
        let reason = format!("{}: cannot be staged in {directory} (client.staging_directory): {error}", self.node());
        ClientError::Refused { errno: errno.raw_os_error(), reason }
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        self.shared.room.give(self.state.get_mut().staged.remove(0..u64::MAX));
    }
}

impl State {
    fn changed(&mut self) {
        self.changes += 1;
        self.written_ns = now_ns();
    }
}

fn range_of(offset: u64, length: usize) -> Result<Range<u64>, ClientError> {
    match offset.checked_add(length as u64) {
        Some(end) if end <= OBJECT_BYTES_MAX => Ok(offset..end),
        _ => Err(too_large()),
    }
}

fn too_large() -> ClientError {
    let reason = "an object has at most 5 TiB".to_owned();
    ClientError::Refused { errno: Errno::FBIG.raw_os_error(), reason }
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

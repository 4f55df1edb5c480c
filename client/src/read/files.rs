//! Opening objects, and what becomes of what they leave behind.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_net::{NetError, WorkerPool};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::buffers::BufferKey;
use super::descriptors::{BlockFile, CONFIRM_EVERY, Descriptors, RetainedFile};
use super::file::{EAGER_BYTES, OpenFile};
use super::local_file::{PastEnd, read_now};
use super::location::{BlockLocation, ReplicatedBlock};
use super::readahead::Readahead;
use super::reader::{BlockReader, copy_chunk};
use super::resources::{Background, Core, Limits};
use super::span::{Span, spans};
use crate::error::ClientError;
use crate::memory::{Charge, MemoryBudget};
use crate::metadata::{Metadata, Node};
use crate::mounts::ObjectVersion;
use crate::stats::Stats;

/// Files that a worker is asked about at a time.
const CONFIRM_BATCH: usize = 4096;
/// How often idle descriptors and buffers are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Whose the file of a block on this host must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TrustedFile {
    /// Of a version of an object, which is the same in all of them. It has its end where it should.
    OfObject,
    /// Of a block of an fs-mode file that a view has, if it is this one. Behind its end are zeros.
    Frozen(Option<BlockFile>),
}

/// Opens files. Cheap to clone.
#[derive(Clone)]
pub struct Files {
    core: Arc<Core>,
}

impl Files {
    /// Inside a tokio runtime, where read-ahead will run.
    pub(crate) fn new(metadata: Metadata, pool: Arc<WorkerPool>, stats: Arc<Stats>, config: &Config) -> Self {
        Self { core: Core::new(metadata, pool, stats, config) }
    }

    /// The memory budget of the process, for what is read and for all else.
    pub(crate) fn memory(&self) -> &Arc<MemoryBudget> {
        &self.core.memory
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.core.limits
    }

    /// A reader of a file that may change, for all who have it open.
    pub(crate) fn reader(&self) -> BlockReader {
        BlockReader::new(self.core.clone(), Readahead::of_many(self.core.limits.readahead_max))
    }

    /// Where files of blocks stay that are opened otherwise than here.
    pub(crate) fn descriptors(&self) -> &Arc<Descriptors> {
        &self.core.descriptors
    }

    /// Opens a file for reading. A small file (up to 1 MiB) is made present at once, so that a version that is gone
    /// shows here as `Stale`; a larger one needs no I/O. When it is `Stale`, the name leads to the new version by then.
    /// Bounded as [`OpenFile::read`], and each question whether the version is current by `client.metadata_timeout`.
    pub async fn open(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>, ClientError> {
        check_file(node)?;
        if node.is_always_checked() {
            let current = match self.core.metadata.current(node).await {
                // An answer, not a failure: the object is gone.
                Err(error @ ClientError::NotFound(_)) => return Err(error),
                current => current.map_err(|error| self.core.failed(node, error))?,
            };
            if current.inode != node.inode {
                return Err(ClientError::Stale(node.to_string()));
            }
        }
        let opened = async {
            let file = OpenFile::new(self.core.clone(), node.clone())?;
            if node.size <= EAGER_BYTES {
                file.make_present().await?;
            }
            Ok::<_, ClientError>(Arc::new(file))
        };
        match opened.await {
            Ok(file) => Ok(file),
            Err(error) => Err(self.core.failed_read(node, error).await),
        }
    }

    /// Opens without I/O where nothing has to be asked: an empty file, a small one that is present, a large one.
    /// `None`: use `open`.
    pub fn open_cached(&self, node: &Arc<Node>) -> Option<Arc<OpenFile>> {
        if check_file(node).is_err() || node.is_always_checked() {
            return None;
        }
        let file = OpenFile::new(self.core.clone(), node.clone()).ok()?;
        (node.size > EAGER_BYTES || file.is_present()).then(|| Arc::new(file))
    }

    /// A handle without any I/O: nothing is made present, and whether the version is still there shows at a read. Never
    /// checks a file with `consistency = always`.
    pub fn handle(&self, node: &Arc<Node>) -> Result<Arc<OpenFile>, ClientError> {
        check_file(node)?;
        OpenFile::new(self.core.clone(), node.clone()).map(Arc::new)
    }

    /// A handle on an object that is (a part of) the content of a file, without any I/O.
    pub(crate) fn open_object(&self, node: Arc<Node>, object: ObjectVersion) -> Arc<OpenFile> {
        Arc::new(OpenFile::of(self.core.clone(), node, Some(object)))
    }

    /// All bytes of a span of a block, without waiting: from its file on this host, as far as that is in the page
    /// cache, or from buffers.
    pub(crate) fn read_block_now(&self, key: BufferKey, span: &Span, local: TrustedFile, buffer: &mut [u8]) -> bool {
        let core = &self.core;
        let known = core.descriptors.get(&key.block).filter(|known| match local {
            TrustedFile::OfObject => known.contains_all(span.chunks()),
            TrustedFile::Frozen(file) => file.is_some_and(|file| known.is(&file)),
        });
        if let Some(known) = known {
            known.used.touch();
            let past_end = if local == TrustedFile::OfObject { PastEnd::Missing } else { PastEnd::Zeros };
            let is_read = read_now(known.as_fd(), u64::from(span.bytes.start), buffer, past_end);
            if is_read {
                core.stats.read_by_descriptor(buffer.len());
            }
            return is_read;
        }
        let is_here = core.buffers.peek(key, span.chunks(), |chunk, bytes| {
            copy_chunk(span, chunk, key.length, bytes, buffer);
        });
        if is_here {
            core.given(key, span);
        }
        is_here
    }

    /// Whether a file of a block is open here.
    pub(crate) fn has_file(&self, file: &BlockFile) -> bool {
        self.core.descriptors.get(&file.block).is_some_and(|known| known.is(file))
    }

    /// Makes a version of an object present before it is read, as far as memory is free.
    pub(crate) async fn make_object_ready(&self, object: &ObjectVersion) -> Result<(), ClientError> {
        for span in spans(0..object.length, object.mount.block_size(), u64::MAX) {
            let at = BlockLocation::of_object(object, span.index);
            let known = self.core.descriptors.get(&at.id());
            if known.is_none_or(|known| !known.contains_all(span.chunks())) {
                self.core.make_ready(&at, &span).await?;
            }
        }
        Ok(())
    }

    /// Brings a block of an fs-mode file into buffers, as far as memory is free, while its version counts.
    pub(crate) async fn make_block_ready(&self, block: Arc<ReplicatedBlock>) -> Result<(), ClientError> {
        let span = Span { index: block.id.index, bytes: 0..block.length };
        self.core.make_ready(&BlockLocation::Replicas(block), &span).await
    }

    /// Runs a piece of read-ahead that its caller does not wait for, until the client is shut down.
    pub(crate) fn in_background(&self, work: impl Future<Output = Result<(), ClientError>> + Send + 'static) {
        self.core.in_background(self.core.background.stop.clone(), work);
    }

    /// Memory for what is put together from several reads, each of which may wait for its own.
    pub(crate) async fn charge_joined(&self, bytes: u64, deadline: Instant) -> Result<Charge, ClientError> {
        self.core.charge_joined(bytes, deadline).await
    }

    /// Closes what is idle, and lets go of what workers do not have any more, now and then, until `stop`.
    pub(crate) async fn sweep(&self, stop: CancellationToken) {
        let mut confirmed = Instant::now();
        while stop.run_until_cancelled(tokio::time::sleep(SWEEP_EVERY)).await.is_some() {
            self.core.descriptors.sweep().await;
            self.core.buffers.sweep();
            self.core.pool.trim_buffers();
            if confirmed.elapsed() >= CONFIRM_EVERY {
                stop.run_until_cancelled(self.confirm()).await;
                confirmed = Instant::now();
            }
        }
    }

    /// Asks workers about the files of theirs that are held, tells them which were read, and lets go of those that are
    /// not of their blocks any more: all of a worker that has left the table. One that does not answer evicts nothing
    /// either, or is asked the next time.
    pub(crate) async fn confirm(&self) {
        for (worker, held) in self.core.descriptors.retained() {
            for batch in held.chunks(CONFIRM_BATCH) {
                let files: Vec<_> = batch.iter().map(|held| (held.file.block, held.is_read)).collect();
                let answer = self.core.pool.confirm(worker, &files).await;
                self.core.descriptors.release(gone(batch, &answer));
                match answer {
                    Ok(_) | Err(NetError::UnknownWorker(_)) => {}
                    Err(error) => {
                        tracing::debug!(worker, "files of its blocks could not be confirmed: {error}");
                        break;
                    }
                }
            }
        }
    }

    /// Ends what runs in the background, and lets go of descriptors and buffers.
    pub(crate) async fn shutdown(&self) {
        let Background { stop, tasks, .. } = &self.core.background;
        stop.cancel();
        tasks.close();
        tasks.wait().await;
        self.core.descriptors.clear();
        self.core.buffers.clear();
    }
}

fn check_file(node: &Node) -> Result<(), ClientError> {
    if node.is_directory() { Err(ClientError::IsADirectory(node.to_string())) } else { Ok(()) }
}

/// Those of these files that are not of their worker's blocks any more, by its answer to [`WorkerPool::confirm`]: all,
/// if it has left the table, since nobody would ever say that its blocks are gone.
fn gone(held: &[RetainedFile], answer: &Result<Vec<Option<u64>>, NetError>) -> impl Iterator<Item = BlockFile> {
    let is_gone = move |number: usize, file: &BlockFile| match answer {
        Ok(now) => now.get(number) != Some(&Some(file.incarnation)),
        Err(NetError::UnknownWorker(_)) => true,
        Err(_) => false,
    };
    held.iter().enumerate().filter(move |(number, held)| is_gone(*number, &held.file)).map(|(_, held)| held.file)
}

#[cfg(test)]
mod tests {
    use cavern_proto::{BlockId, ContentId};

    use super::*;

    #[test]
    fn files_of_a_worker_that_has_left_the_table_are_let_go() {
        let file = |index| {
            let block = BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index };
            BlockFile { block, worker: 3, incarnation: u64::from(index) + 7 }
        };
        let held = [0, 1, 2].map(|index| RetainedFile { file: file(index), is_read: false });
        let gone = |answer: Result<_, NetError>| gone(&held, &answer).collect::<Vec<_>>();
        // There, not there, and there anew.
        assert_eq!(gone(Ok(vec![Some(7), None, Some(99)])), [file(1), file(2)]);
        let address = "192.0.2.1:1".to_owned();
        assert!(gone(Err(NetError::WorkerDeadline { worker: 3, address, waited_ms: 1 })).is_empty());
        assert_eq!(gone(Err(NetError::UnknownWorker(3))), [file(0), file(1), file(2)]);
    }
}

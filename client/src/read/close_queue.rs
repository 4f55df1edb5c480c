//! Closes descriptors of evicted blocks on a thread that may wait: the last descriptor of an unlinked file gives its
//! space back, which can take as long as the file system's journal does, for thousands of blocks at once when a cache
//! is freed. Until its turn comes a descriptor stays in the cache, where it can be read as before and counts against
//! the limit.

use std::sync::Arc;

use cavern_proto::BlockId;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::descriptor_cache::DescriptorCache;

#[derive(Debug)]
pub(super) struct CloseQueue {
    descriptors: Arc<DescriptorCache>,
    queue: Mutex<Queue>,
    tasks: TaskTracker,
    runtime: Handle,
}

/// About as many as there are descriptors: notices of others are not kept.
#[derive(Debug, Default)]
struct Queue {
    evicted: Vec<(BlockId, u64)>,
    draining: bool,
}

impl CloseQueue {
    pub(super) fn new(descriptors: Arc<DescriptorCache>, tasks: TaskTracker, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { descriptors, queue: Mutex::default(), tasks, runtime })
    }

    /// Takes note of evicted incarnations of blocks; their descriptors are closed soon.
    pub(super) fn evicted(self: &Arc<Self>, blocks: impl Iterator<Item = (BlockId, u64)>) {
        let held: Vec<_> = blocks.filter(|(block, incarnation)| self.descriptors.holds(block, *incarnation)).collect();
        if held.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        queue.evicted.extend(held);
        if !std::mem::replace(&mut queue.draining, true) {
            let closing = self.clone();
            self.tasks.spawn_blocking_on(move || closing.drain(), &self.runtime);
        }
    }

    fn drain(&self) {
        loop {
            let evicted = {
                let mut queue = self.queue.lock();
                queue.draining = !queue.evicted.is_empty();
                std::mem::take(&mut queue.evicted)
            };
            if evicted.is_empty() {
                return;
            }
            evicted.iter().for_each(|(block, incarnation)| self.descriptors.close(block, *incarnation));
        }
    }

    /// Closes what is idle. Returns when that is done.
    pub(super) async fn sweep(&self) {
        let descriptors = self.descriptors.clone();
        let swept = self.tasks.spawn_blocking_on(move || descriptors.sweep(), &self.runtime).await;
        if let Err(error) = swept {
            tracing::warn!("idle descriptors could not be closed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use cavern_proto::{ChunkMap, ContentId};

    use super::super::descriptor_cache::Descriptor;
    use super::super::kept_files::KeptFiles;
    use super::*;

    #[tokio::test]
    async fn only_the_incarnation_that_was_evicted_is_closed() {
        let cache = Arc::new(DescriptorCache::new(1000, KeptFiles::new(0, Arc::default()), Arc::default()));
        let tasks = TaskTracker::new();
        let closing = CloseQueue::new(cache.clone(), tasks.clone(), Handle::current());
        let mut readers = Vec::new();
        for index in 0..100 {
            let (reader, writer) = std::io::pipe().unwrap();
            let block = BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index };
            let descriptor = Descriptor::new(OwnedFd::from(writer), 1, 7, 10, &ChunkMap::new());
            cache.insert(block, Arc::new(descriptor));
            readers.push((block, reader));
        }
        let (first, rest) = readers.split_first_mut().unwrap();
        closing.evicted([(first.0, 6)].into_iter());
        for (block, _) in rest.iter() {
            closing.evicted([(*block, 7)].into_iter());
        }
        closing.sweep().await;
        tasks.close();
        tasks.wait().await;
        for (_, reader) in rest {
            // The end of a pipe shows once its writer is closed.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
        assert!(cache.get(&first.0).is_some());
        assert!(!closing.queue.lock().draining);
    }
}

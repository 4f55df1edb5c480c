//! Closes descriptors of evicted blocks on a thread that may wait: the last descriptor of an unlinked file gives its space
//! back, which can take as long as the file system's journal does, for thousands of blocks at once when a cache is freed.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::descriptor_cache::Descriptor;

/// Descriptors that wait to be closed at most: they count against the limit of the process as those in the cache do.
const WAITING_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Closing {
    queue: Mutex<Queue>,
    tasks: TaskTracker,
    runtime: Handle,
}

#[derive(Debug, Default)]
struct Queue {
    descriptors: Vec<Arc<Descriptor>>,
    /// Taken off the queue and not yet closed.
    closing: usize,
}

impl Closing {
    pub(super) fn new(tasks: TaskTracker, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { queue: Mutex::default(), tasks, runtime })
    }

    /// How many descriptors it takes now; what it does not take must stay where it is.
    pub(super) fn room(&self) -> usize {
        let queue = self.queue.lock();
        WAITING_MAX.saturating_sub(queue.descriptors.len() + queue.closing)
    }

    /// Lets go of descriptors soon; returns at once.
    pub(super) fn close(self: &Arc<Self>, descriptors: Vec<Arc<Descriptor>>) {
        if descriptors.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        queue.descriptors.extend(descriptors);
        if queue.closing == 0 {
            queue.closing = queue.descriptors.len();
            let (closing, first) = (self.clone(), std::mem::take(&mut queue.descriptors));
            self.tasks.spawn_blocking_on(move || closing.drain(first), &self.runtime);
        }
    }

    fn drain(&self, mut batch: Vec<Arc<Descriptor>>) {
        while !batch.is_empty() {
            drop(batch);
            let mut queue = self.queue.lock();
            batch = std::mem::take(&mut queue.descriptors);
            queue.closing = batch.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use cavern_proto::ChunkMap;

    use super::*;

    #[tokio::test]
    async fn all_descriptors_are_closed_and_the_last_batch_ends_the_task() {
        let tasks = TaskTracker::new();
        let closing = Closing::new(tasks.clone(), Handle::current());
        let mut readers = Vec::new();
        for _ in 0..100 {
            let (reader, writer) = std::io::pipe().unwrap();
            let descriptor = Descriptor::new(OwnedFd::from(writer), 1, 1, 10, &ChunkMap::new());
            closing.close(vec![Arc::new(descriptor)]);
            readers.push(reader);
        }
        closing.close(vec![]);
        tasks.close();
        tasks.wait().await;
        assert_eq!(closing.room(), WAITING_MAX);
        for mut reader in readers {
            // The end of a pipe shows once its writer is closed.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }
}

//! Closes descriptors of evicted blocks on a thread that may wait: the last descriptor of an unlinked file gives its space
//! back, which can take as long as the file system's journal does, for thousands of blocks at once when a cache is freed.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::descriptor_cache::Descriptor;

#[derive(Debug)]
pub(super) struct Closing {
    queue: Mutex<Queue>,
    tasks: TaskTracker,
    runtime: Handle,
}

/// Bounded by the descriptors that the cache held.
#[derive(Debug, Default)]
struct Queue {
    descriptors: Vec<Arc<Descriptor>>,
    draining: bool,
}

impl Closing {
    pub(super) fn new(tasks: TaskTracker, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { queue: Mutex::default(), tasks, runtime })
    }

    /// Lets go of descriptors soon; returns at once.
    pub(super) fn close(self: &Arc<Self>, descriptors: Vec<Arc<Descriptor>>) {
        if descriptors.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        queue.descriptors.extend(descriptors);
        if !std::mem::replace(&mut queue.draining, true) {
            let closing = self.clone();
            self.tasks.spawn_blocking_on(move || closing.drain(), &self.runtime);
        }
    }

    fn drain(&self) {
        loop {
            let mut queue = self.queue.lock();
            let batch = std::mem::take(&mut queue.descriptors);
            queue.draining = !batch.is_empty();
            drop(queue);
            if batch.is_empty() {
                return;
            }
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
        for mut reader in readers {
            // The end of a pipe shows once its writer is closed.
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }
}

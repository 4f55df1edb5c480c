//! The threads of the consensus. Its core, its timers, and its connections to other masters have a runtime of their
//! own: a heartbeat never waits for a call of a client, however many there are. Everything else of the process is on
//! the other runtime, and speaks to this one through channels.

use std::future::Future;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::error::{ConsensusError, Result};

/// One may be applying an entry, or reading the log for another master: the other answers and sends meanwhile.
const THREADS: usize = 2;
/// For snapshots that are made, sent or installed.
const BLOCKING_THREADS: usize = 4;

/// The runtime of the consensus. What runs on them ends with them.
pub struct RaftThreads(Mutex<Option<Threads>>);

enum Threads {
    Own(Runtime),
    /// Tasks of a simulation, which has one thread.
    #[cfg(test)]
    Simulated(std::sync::Arc<super::simulation::Host>),
}

impl RaftThreads {
    pub fn start() -> Result<Self> {
        #[cfg(test)]
        if let Some(host) = super::simulation::Host::current() {
            return Ok(Self(Mutex::new(Some(Threads::Simulated(host)))));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("raft")
            .enable_all()
            .build()
            .map_err(ConsensusError::io("the threads of the consensus"))?;
        Ok(Self(Mutex::new(Some(Threads::Own(runtime)))))
    }

    /// Begins a task on them; its owner waits for it.
    ///
    /// # Errors
    /// [`ConsensusError::Unavailable`] when they have been stopped.
    pub fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> Result<JoinHandle<T>> {
        let running = self.0.lock();
        match running.as_ref() {
            Some(Threads::Own(runtime)) => Ok(runtime.spawn(task)),
            #[cfg(test)]
            Some(Threads::Simulated(host)) => Ok(host.spawn(task)),
            None => Err(ConsensusError::Unavailable("the consensus has been stopped".into())),
        }
    }

    /// Ends whatever still runs. Waits for blocking work, but no longer than this.
    pub async fn stop(&self, within: Duration) {
        let Some(Threads::Own(runtime)) = self.0.lock().take() else { return };
        if spawn_blocking(move || runtime.shutdown_timeout(within)).await.is_err() {
            tracing::warn!("the threads of the consensus ended by a panic");
        }
    }
}

impl Drop for RaftThreads {
    fn drop(&mut self) {
        // Who drops it may be a task, which must not wait.
        if let Some(Threads::Own(runtime)) = self.0.get_mut().take() {
            runtime.shutdown_background();
        }
    }
}

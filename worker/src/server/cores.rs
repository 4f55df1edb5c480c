//! Threads that serve connections, one for each core, with a runtime of its own each. A connection stays with the
//! thread that it was given at first, so that requests and their answers change no threads: nobody is woken for them,
//! and no thread looks for what others have to do. A request that has to wait for a bucket or a disk stays with one
//! thread, too, with its GET and all it writes: with that of its connection, unless another one has less to do. A
//! client of this host has one connection, whose fills are to use all cores.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;
use tracing::error;

/// What still waits for a disk when the worker stops is waited for so long.
const BLOCKING_END: Duration = Duration::from_secs(1);

/// The threads. Dropping this ends them, and the tasks that they have still got; not on one of them.
#[derive(Debug)]
pub struct Cores {
    cores: Arc<[Core]>,
    threads: Vec<JoinHandle<()>>,
    ended: CancellationToken,
}

/// What is known of a thread.
#[derive(Debug)]
struct Core {
    runtime: Handle,
    /// Cloned for each of its connections.
    connections: Counted,
    /// Cloned for each request that waits.
    requests: Counted,
}

/// One of those that a thread has; until this is dropped.
pub(super) type Counted = Arc<()>;

/// The place of a connection at one of the threads.
#[derive(Debug)]
pub(super) struct CoreSlot {
    cores: Arc<[Core]>,
    number: usize,
    _counted: Counted,
}

impl CoreSlot {
    /// Where the connection is served.
    pub(super) fn runtime(&self) -> Handle {
        self.cores[self.number].runtime.clone()
    }

    /// Where a request of the connection is to wait: not elsewhere, as long as no other thread has fewer of them.
    pub(super) fn for_request(&self) -> (Handle, Counted) {
        let load = |core: &Core| Arc::strong_count(&core.requests);
        let own = &self.cores[self.number];
        let least = self.cores.iter().min_by_key(|core| load(core)).filter(|core| load(core) < load(own));
        let core = least.unwrap_or(own);
        (core.runtime.clone(), core.requests.clone())
    }
}

impl Cores {
    /// Starts `count` threads, at least one. Each has up to `blocking_threads` others for what waits for the disk: as
    /// many as have something to do. A client has turns for half of them (`limits`), which may all be at one core.
    ///
    /// # Errors
    /// The system has no more threads, or descriptors.
    pub fn start(count: usize, blocking_threads: usize) -> io::Result<Self> {
        let count = count.max(1);
        let (mut cores, mut threads, ended) = (Vec::new(), Vec::new(), CancellationToken::new());
        for number in 0..count {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(blocking_threads)
                .thread_name(format!("data-{number}-disk"))
                .build()?;
            cores.push(Core {
                runtime: runtime.handle().clone(),
                connections: Arc::default(),
                requests: Arc::default(),
            });
            let ended = ended.clone();
            let thread = std::thread::Builder::new().name(format!("data-{number}")).spawn(move || {
                runtime.block_on(ended.cancelled());
                runtime.shutdown_timeout(BLOCKING_END);
            })?;
            threads.push(thread);
        }
        Ok(Self { cores: cores.into(), threads, ended })
    }

    /// A place at the thread that has the fewest connections.
    pub(super) fn slot(&self) -> CoreSlot {
        let load = |number: &usize| Arc::strong_count(&self.cores[*number].connections);
        let number = (0..self.cores.len()).min_by_key(load).unwrap_or_default();
        CoreSlot { cores: self.cores.clone(), number, _counted: self.cores[number].connections.clone() }
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        self.ended.cancel();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                error!("a thread that serves connections has panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_and_requests_that_wait_are_spread_over_the_threads() {
        let cores = Cores::start(2, 64).unwrap();
        let slots: Vec<CoreSlot> = (0..4).map(|_| cores.slot()).collect();
        let of = |number: usize| slots.iter().filter(|slot| slot.number == number).count();
        assert_eq!((of(0), of(1)), (2, 2));
        let own = slots[1].runtime().id();
        let (first, counted) = slots[1].for_request();
        assert_eq!(first.id(), own);
        let (second, _counted) = slots[1].for_request();
        assert_ne!(second.id(), own, "the own thread has one already");
        drop(counted);
        let (third, _counted) = slots[1].for_request();
        assert_eq!(third.id(), own);
    }

    #[test]
    fn the_end_takes_along_what_still_runs() {
        let cores = Cores::start(1, 64).unwrap();
        let slot = cores.slot();
        let (runtime, counted) = slot.for_request();
        let requests = cores.cores[0].requests.clone();
        let waits = runtime.spawn(async move {
            let _counted = counted;
            std::future::pending::<()>().await;
        });
        drop(cores);
        assert_eq!(Arc::strong_count(&requests), 2, "the thread's own, and this one");
        assert!(waits.is_finished());
        drop(slot);
    }
}

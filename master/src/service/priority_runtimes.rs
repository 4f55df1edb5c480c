//! Two runtimes for what is done for clients: who has much under way while others have little is served on threads of
//! their own, to which the kernel gives what is left.
//!
//! A runtime works on what is ready in the order in which it came to be so. A client with hundreds of calls under way
//! would have all of them before the only one of another, and the TLS and HTTP/2 of its connections as well. Nobody can
//! put that in another order within a runtime; the scheduler of the kernel can, between threads, at each wake-up.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::process::{getpriority_process, setpriority_process};
use tokio::runtime::{Builder, Handle, Runtime};

use super::peer::Peer;

/// How much more willing than the others to let others go first the threads of the slow runtime are: they get a tenth
/// of the time of a processor that others want, too. It is not less, since what they have locked others wait for.
const NICE: i32 = 10;

/// The runtimes. Cheap to clone.
#[derive(Clone)]
pub struct PriorityRuntimes {
    fast: Handle,
    slow: Handle,
}

/// The threads of the slow runtime. What they have not done when this is dropped is given up.
pub struct LowPriorityThreads(Option<Runtime>);

impl PriorityRuntimes {
    /// The runtime that this is called on, and as many slow threads as that has, with so many for what waits on disks.
    ///
    /// # Errors
    /// Threads cannot be started.
    pub fn start(blocking_threads: usize) -> io::Result<(Self, LowPriorityThreads)> {
        let fast = Handle::current();
        let slow = Builder::new_multi_thread()
            .worker_threads(fast.metrics().num_workers())
            .max_blocking_threads(blocking_threads)
            .thread_name("slow")
            .on_thread_start(|| {
                // Of the thread, and of those that it starts. Everybody may.
                let nice = getpriority_process(None).and_then(|nice| setpriority_process(None, nice + NICE));
                if let Err(error) = nice {
                    tracing::warn!("threads for clients with much under way are as all others: {error}");
                }
            })
            .enable_all()
            .build()?;
        Ok((Self { fast, slow: slow.handle().clone() }, LowPriorityThreads(Some(slow))))
    }

    /// What is done for this peer.
    pub fn of_peer(&self, peer: Peer) -> PeerRuntime {
        PeerRuntime { runtimes: self.clone(), peer }
    }
}

impl Drop for LowPriorityThreads {
    fn drop(&mut self) {
        // Who drops it may be a task, which must not wait.
        if let Some(threads) = self.0.take() {
            threads.shutdown_background();
        }
    }
}

/// What is done for one peer, on the runtime that it deserves at each time. It is among the extensions of its calls.
#[derive(Clone)]
pub struct PeerRuntime {
    runtimes: PriorityRuntimes,
    peer: Peer,
}

impl PeerRuntime {
    /// That of the connection by which a call has come, if it has come by one.
    pub fn of<T>(request: &tonic::Request<T>) -> Option<Self> {
        request.extensions().get().cloned()
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.clone().send(self.peer.is_noisy_neighbour(), Box::pin(work));
    }

    fn send<W: Future<Output = ()> + Send + 'static>(self, is_slow: bool, work: Pin<Box<W>>) {
        let threads = if is_slow { self.runtimes.slow.clone() } else { self.runtimes.fast.clone() };
        threads.spawn(PrioritizedTask { work: Some(work), is_slow, runtime: self });
    }
}

/// Calls of a connection are made where it is served.
impl<W: Future<Output = ()> + Send + 'static> hyper::rt::Executor<W> for PeerRuntime {
    fn execute(&self, call: W) {
        self.spawn(call);
    }
}

/// Something that goes to the other runtime when its time has come.
struct PrioritizedTask<W> {
    work: Option<Pin<Box<W>>>,
    is_slow: bool,
    runtime: PeerRuntime,
}

impl<W: Future<Output = ()> + Send + 'static> Future for PrioritizedTask<W> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let is_slow = self.runtime.peer.is_noisy_neighbour();
        if is_slow == self.is_slow {
            return self.work.as_mut().map_or(Poll::Ready(()), |work| work.as_mut().poll(cx));
        }
        if let Some(work) = self.work.take() {
            self.runtime.clone().send(is_slow, work);
        }
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use cavern_conf::schema;
    use cavern_security::{Identity, Role, Tenants};

    use super::*;
    use crate::service::tenants;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn peer(tenants: &Tenants, name: &str) -> Peer {
        let peer = Peer { secured: true, ..Peer::default() };
        let tenant = tenants.admit(&Identity::new("c", Role::Client, name).unwrap()).unwrap();
        assert!(peer.tenant.set(tenant).is_ok());
        peer
    }

    /// Something that is never done, and says how nice the thread is that works on it, whenever another one does.
    async fn works_on(say: mpsc::Sender<(bool, i32)>) {
        let mut last = None;
        loop {
            let is_slow = std::thread::current().name() == Some("slow");
            if last.replace(is_slow) != Some(is_slow) {
                // Who has heard enough has gone.
                let _said = say.send((is_slow, getpriority_process(None).unwrap()));
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn who_has_much_is_served_beside_others_on_threads_that_let_them_go_first() {
        let tenants = tenants(&schema::Master::default());
        let (flood, quiet) = (peer(&tenants, "flood"), peer(&tenants, "quiet"));
        let (runtimes, _threads) = PriorityRuntimes::start(64).unwrap();
        let begin = |peer: &Peer| {
            let (say, hear) = mpsc::channel();
            runtimes.of_peer(peer.clone()).spawn(works_on(say));
            hear
        };
        let nice = getpriority_process(None).unwrap();
        let (fast, slow) = ((false, nice), (true, (nice + NICE).min(19)));
        let (of_flood, of_quiet) = (begin(&flood), begin(&quiet));
        let next =
            |hear: &mpsc::Receiver<(bool, i32)>| tokio::task::block_in_place(|| hear.recv_timeout(PATIENCE).unwrap());
        assert_eq!((next(&of_flood), next(&of_quiet)), (fast, fast));
        let flooding = flood.tenant().unwrap().unwrap();
        flooding.record_call();
        flooding.record_backlog();
        let alone = begin(&flood);
        assert_eq!(next(&alone), fast, "nobody is kept waiting by it");
        flooding.record_backlog();
        quiet.tenant().unwrap().unwrap().record_call();
        assert_eq!((next(&of_flood), next(&alone)), (slow, slow), "also what had begun before");
        // Nobody has said more since.
        assert_eq!((next(&of_flood), next(&alone)), (fast, fast));
        assert!(of_quiet.try_recv().is_err(), "it has not moved");
    }

    #[tokio::test]
    async fn what_is_under_way_at_the_end_is_given_up() {
        let tenants = tenants(&schema::Master::default());
        let (flood, quiet) = (peer(&tenants, "flood"), peer(&tenants, "quiet"));
        quiet.tenant().unwrap().unwrap().record_call();
        flood.tenant().unwrap().unwrap().record_backlog();
        assert!(flood.is_noisy_neighbour() && !quiet.is_noisy_neighbour());
        let (runtimes, threads) = PriorityRuntimes::start(64).unwrap();
        let (began, begins) = tokio::sync::oneshot::channel();
        let (until_it_ends, ends) = tokio::sync::oneshot::channel::<()>();
        runtimes.of_peer(flood).spawn(async move {
            let _held = until_it_ends;
            began.send(()).unwrap();
            std::future::pending().await
        });
        begins.await.unwrap();
        drop(threads);
        assert!(tokio::time::timeout(PATIENCE, ends).await.unwrap().is_err());
    }
}

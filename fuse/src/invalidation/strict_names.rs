//! Names of strict mounts: the kernel trusts them for no time, but a directory that it knows by an old one it refuses
//! to show under another while that is being renamed (`ESTALE`). So it is notified of them as well.
//!
//! To forget a name it waits for the lock of the directory, which whoever is changing the directory has; and that one
//! may wait, by way of the master, until we have let go of something. Hence a thread of its own, which is waited for a
//! moment only.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::debug;

/// Names that wait at most. One that finds no place is forgotten with the next lookup.
const WAITING_MAX: usize = 4096;
/// For names to be forgotten, if nobody has their directories locked.
const FORGOTTEN_WITHIN: Duration = Duration::from_millis(5);

/// A name of one of the kernel's directories.
type Name = (u64, Box<[u8]>);

#[derive(Debug)]
enum Message {
    Forget(Name),
    /// Everything before this has been forgotten.
    Barrier(oneshot::Sender<()>),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct StrictNames(Mutex<Pending>);

#[derive(Debug, Default)]
struct Pending {
    /// While there is a kernel to notify.
    thread: Option<SyncSender<Message>>,
    /// Some were sent since the last barrier.
    any: bool,
}

impl StrictNames {
    /// Starts the thread, which ends after [`stop`](Self::stop).
    pub(super) fn start(&self, forget: impl Fn(u64, &[u8]) + Send + 'static) -> io::Result<JoinHandle<()>> {
        let (thread, messages) = sync_channel(WAITING_MAX);
        self.0.lock().thread = Some(thread);
        std::thread::Builder::new().name("fuse-names".to_owned()).spawn(move || serve(&messages, forget))
    }

    pub(super) fn stop(&self) {
        self.0.lock().thread = None;
    }

    pub(super) fn forget(&self, kernel_parent: u64, name: &[u8]) {
        let mut pending = self.0.lock();
        let Some(thread) = &pending.thread else { return };
        match thread.try_send(Message::Forget((kernel_parent, name.into()))) {
            Ok(()) => pending.any = true,
            Err(TrySendError::Full(_)) => debug!("too many names wait to be forgotten by the kernel"),
            Err(TrySendError::Disconnected(_)) => {}
        }
    }

    /// Completes when all earlier names are forgotten, or after a moment.
    pub(super) fn barrier(&self) -> impl Future<Output = ()> + Send + use<> {
        let waits = {
            let mut pending = self.0.lock();
            let any = std::mem::take(&mut pending.any);
            let thread = pending.thread.as_ref().filter(|_| any);
            thread.and_then(|thread| {
                let (passed, waits) = oneshot::channel();
                thread.try_send(Message::Barrier(passed)).is_ok().then_some(waits)
            })
        };
        async move {
            if let Some(waits) = waits {
                let _late = timeout(FORGOTTEN_WITHIN, waits).await;
            }
        }
    }
}

fn serve(messages: &Receiver<Message>, forget: impl Fn(u64, &[u8])) {
    for message in messages {
        match message {
            Message::Forget((parent, name)) => forget(parent, &name),
            Message::Barrier(passed) => {
                // Who waited may have done so for long enough.
                let _gone = passed.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn names_are_forgotten_before_a_barrier_passes_unless_that_takes_long() {
        let (names, forgotten) = (StrictNames::default(), Arc::new(Mutex::new(Vec::new())));
        names.forget(1, b"before there is a kernel");
        let (unlock, unlocked) = std::sync::mpsc::channel::<()>();
        let thread = names.start({
            let forgotten = forgotten.clone();
            move |parent, name| {
                // Its end lets everything pass.
                let _unlocked = unlocked.recv();
                forgotten.lock().push((parent, name.to_vec()));
            }
        });
        names.barrier().await;
        names.forget(7, b"a");
        let begun = Instant::now();
        names.barrier().await;
        assert!(begun.elapsed() >= FORGOTTEN_WITHIN && forgotten.lock().is_empty());
        drop(unlock);
        names.forget(8, b"b");
        while forgotten.lock().len() < 2 {
            names.forget(9, b"c");
            names.barrier().await;
        }
        assert_eq!(forgotten.lock()[..2], [(7, b"a".to_vec()), (8, b"b".to_vec())]);
        names.stop();
        thread.unwrap().join().unwrap();
        names.barrier().await;
    }
}

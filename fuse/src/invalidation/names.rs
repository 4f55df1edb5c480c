//! Names that the kernel is to forget, sent by a thread of their own.
//!
//! To forget a name the kernel takes the lock of its directory (`FUSE_NOTIFY_INVAL_ENTRY`), as nothing else does that
//! it is notified of. Whoever makes, removes, renames or looks up a name in that directory has the lock while `cv fuse`
//! is asked, and `cv fuse` may have to ask the master, which may have to wait for clients:
//!
//! | who | waits for |
//! |---|---|
//! | a name that is to be forgotten | the lock of the directory |
//! | who has the lock, here | the answer of the master |
//! | the master, where the directory is delegated to another client | that this client returns it, when it is told to |
//! | the master, where the mount is strict | that each client has let go of what it has cached |
//! | a client that is told to let go, or lets go | its stream of events, which one task follows |
//!
//! If that task waited for names, two clients that change one directory would wait for each other until a deadline
//! ends it. So nothing that a change may wait for waits for a name: events are taken in and signs of life sent
//! meanwhile, and what was let go of is reported when attributes and pages are forgotten
//! ([`invalidated`](cavern_client::InvalidationSink::let_go)). Kernels trust names of strict mounts for no time.
//! Whoever waits for names has no directory locked: `cv refresh`, the deletion of what has no name. If that takes long,
//! the kernel is told to look every name up anew, which takes no lock.
//!
//! That is the last resort: it costs the pages of all files that nobody has open, and what is mounted on directories of
//! the mount.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;

/// A name of one of the kernel's directories.
type Name = (u64, Box<[u8]>);

#[derive(Debug)]
enum Message {
    Forget(Name),
    Everything,
    /// Everything before this has been forgotten.
    Barrier(oneshot::Sender<()>),
}

/// The names that wait, and the thread that sends them.
#[derive(Debug)]
pub(super) struct NameQueue {
    most: usize,
    pending: Mutex<Pending>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Pending {
    messages: VecDeque<Message>,
    /// One that was taken out is being forgotten.
    sending: bool,
    /// There is a kernel to notify.
    attached: bool,
}

impl Pending {
    /// What waits is replaced by "everything", in the place of the first of it.
    fn replace_names(&mut self) {
        self.messages.retain(|message| matches!(message, Message::Barrier(_)));
        if self.attached {
            self.messages.push_front(Message::Everything);
        }
    }
}

impl NameQueue {
    /// For `most` names: when there are more, every name is to be forgotten instead.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, pending: Mutex::default(), filled: Condvar::new() })
    }

    /// Starts the thread, which ends after [`stop`](Self::stop). It calls `forget` with each name, and with none when
    /// every name is to be forgotten.
    pub(super) fn start(
        self: &Arc<Self>,
        thread: &str,
        forget: impl Fn(Option<(u64, &[u8])>) + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        self.pending.lock().attached = true;
        let this = Arc::clone(self);
        std::thread::Builder::new().name(thread.to_owned()).spawn(move || this.serve(forget))
    }

    /// Barriers that wait are released.
    pub(super) fn stop(&self) {
        let mut pending = self.pending.lock();
        pending.attached = false;
        pending.messages.clear();
        drop(pending);
        self.filled.notify_all();
    }

    pub(super) fn forget(&self, kernel_parent: u64, name: &[u8]) {
        let mut pending = self.pending.lock();
        if pending.messages.len() >= self.most {
            pending.replace_names();
        }
        if pending.attached {
            pending.messages.push_back(Message::Forget((kernel_parent, name.into())));
        }
        drop(pending);
        self.filled.notify_one();
    }

    pub(super) fn forget_everything(&self) {
        self.pending.lock().replace_names();
        self.filled.notify_one();
    }

    /// Says when all earlier names are forgotten, or there is no kernel any more to notify; `None` if that is so
    /// already.
    pub(super) fn barrier(&self) -> Option<oneshot::Receiver<()>> {
        let mut pending = self.pending.lock();
        if !pending.sending && pending.messages.is_empty() {
            return None;
        }
        let (passed, waits) = oneshot::channel();
        pending.messages.push_back(Message::Barrier(passed));
        Some(waits)
    }

    pub(super) fn len(&self) -> usize {
        self.pending.lock().messages.len()
    }

    fn serve(&self, forget: impl Fn(Option<(u64, &[u8])>)) {
        let mut pending = self.pending.lock();
        while pending.attached {
            let name = match pending.messages.pop_front() {
                Some(Message::Forget(name)) => Some(name),
                Some(Message::Everything) => None,
                Some(Message::Barrier(passed)) => {
                    // Who waited may have done so for long enough.
                    let _gone = passed.send(());
                    continue;
                }
                None => {
                    self.filled.wait(&mut pending);
                    continue;
                }
            };
            pending.sending = true;
            MutexGuard::unlocked(&mut pending, || forget(name.as_ref().map(|(parent, name)| (*parent, &**name))));
            pending.sending = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn names_are_forgotten_in_order_and_before_a_barrier_passes() {
        let (names, forgotten) = (NameQueue::new(3), Arc::new(Mutex::new(Vec::new())));
        names.forget(1, b"before there is a kernel");
        let (unlock, unlocked) = mpsc::channel::<()>();
        let (taken_out, taken) = mpsc::channel();
        let thread = names.start("names", {
            let forgotten = forgotten.clone();
            move |name: Option<(u64, &[u8])>| {
                taken_out.send(()).unwrap();
                // Its end lets everything pass.
                let _unlocked = unlocked.recv();
                forgotten.lock().push(name.map(|(parent, name)| (parent, name.to_vec())));
            }
        });
        assert!(names.barrier().is_none());
        names.forget(7, b"a");
        taken.recv().unwrap();
        let mut first = names.barrier().unwrap();
        assert!((&mut first).now_or_never().is_none(), "it is being forgotten");
        names.forget(7, b"b");
        names.forget(7, b"c");
        names.forget(8, b"d");
        assert_eq!(names.len(), 3, "everything, the barrier, and the last one");
        let second = names.barrier().unwrap();
        drop(unlock);
        first.await.unwrap();
        second.await.unwrap();
        assert_eq!(*forgotten.lock(), [Some((7, b"a".to_vec())), None, Some((8, b"d".to_vec()))]);
        names.stop();
        thread.unwrap().join().unwrap();
        assert!(names.barrier().is_none());
    }
}

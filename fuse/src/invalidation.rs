//! From the master's invalidations to the kernel's caches.
//!
//! The client's watch task passes on what has changed; threads of their own notify the kernel, since a notification
//! may wait for locks that system calls hold while they wait for us. Between them are bounded queues: when one
//! overflows, all that was in it is replaced by "everything". Names wait for whoever changes their directory, hence
//! apart from the rest: see [`names`].
//!
//! Writes that passed the kernel's pages by are answered from here, once the pages are gone. A page that is being read
//! is waited for; its read may wait in the kernel for a place among the requests under way, which such writes may have
//! taken all: see [`Invalidations::answer_stuck`].

mod listings;
mod names;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use cavern_client::InvalidationSink;
use futures::future::{BoxFuture, join_all};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

pub use listings::{KernelListings, Listing, ListingStart};
use names::NameQueue;

use crate::aliases::inode_of;
use crate::kernel::{Notifier, Reply};
use crate::root::Root;

/// Invalidations waiting at most, and names, of at most 255 bytes each.
const QUEUE_MAX: usize = 65_536;
/// Names of strict mounts that wait at most. What finds no place is forgotten with the next lookup.
const STRICT_NAMES_MAX: usize = 4096;
/// For names of strict mounts to be forgotten, if nobody has their directories locked.
const STRICT_NAMES_WAIT: Duration = Duration::from_millis(5);
/// For names of other mounts to be forgotten, before a lock is granted.
const NAMES_WAIT: Duration = Duration::from_millis(50);

/// One invalidation that takes longer may wait for what waits for it.
const STUCK: Duration = Duration::from_secs(1);

/// Names whose directory is locked for longer are not waited for: the kernel is to look every name up anew.
const LOCKED_FOR_LONG: Duration = Duration::from_secs(2);

/// What the kernel is to forget. Inodes are the kernel's.
#[derive(Debug)]
enum Notification {
    Inode(u64),
    /// The pages of a write that is answered after that.
    Written {
        inode: u64,
        offset: u64,
        length: u32,
        reply: Option<Reply>,
    },
    /// All nodes of an inode but this one, by which it was changed.
    Others(u64),
    Everything,
    /// The kernel has given up a reference to an inode of the namespace: perhaps the last one.
    ReferenceDropped(u64),
    /// Which of these the kernel still refers to.
    Referred(Vec<u64>, oneshot::Sender<Vec<u64>>),
    /// Everything before this has been passed on.
    Barrier(oneshot::Sender<()>),
}

/// What became of notifications.
#[derive(Debug, Default)]
pub struct InvalidationCounts {
    /// Passed on to the kernel.
    pub sent: AtomicU64,
    /// Passed on, and the kernel had nothing of the kind.
    pub unknown: AtomicU64,
    pub failed: AtomicU64,
    /// Times that everything was invalidated.
    pub resets: AtomicU64,
}

/// What the file system knows of the namespace's inodes.
pub struct Inodes {
    /// Those that are open.
    pub open: Box<dyn Fn() -> Vec<u64> + Send>,
    /// Takes one that the kernel refers to no longer.
    pub forgotten: Box<dyn Fn(u64) + Send>,
}

impl InvalidationCounts {
    fn count(&self, outcome: Result<bool, Errno>) {
        let counter = match outcome {
            Ok(true) => &self.sent,
            Ok(false) => &self.unknown,
            Err(cause) => {
                debug!(%cause, "a notification was not taken");
                &self.failed
            }
        };
        counter.fetch_add(1, Relaxed);
    }
}

/// The sink of the client's invalidations.
#[derive(Debug)]
pub struct Invalidations {
    queue: Mutex<Queue>,
    filled: Condvar,
    root: Mutex<Option<Arc<Root>>>,
    /// While there is a kernel to notify.
    notifier: Mutex<Option<Notifier>>,
    listings: KernelListings,
    names: Arc<NameQueue>,
    /// The kernel trusts them for no time, but a directory that it knows by an old one it refuses to show under another
    /// while that is being renamed (`ESTALE`).
    strict_names: Arc<NameQueue>,
    counts: Arc<InvalidationCounts>,
}

impl Notification {
    /// What it makes the kernel forget attributes and pages of that others have changed, or somebody by another node.
    fn target(&self) -> Target {
        match self {
            Self::Inode(inode) => Target::Inode(*inode),
            Self::Others(node) => Target::Inode(inode_of(*node)),
            Self::Everything => Target::Everything,
            _ => Target::Nothing,
        }
    }

    /// Whether somebody waits for it.
    fn is_waited_for(&self) -> bool {
        matches!(self, Self::Written { .. } | Self::ReferenceDropped(_) | Self::Referred(..) | Self::Barrier(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Nothing,
    Inode(u64),
    Everything,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Notification>,
    /// Since when the one that was taken out last is being sent to the kernel, and what it is about.
    sending: Option<(Instant, Target)>,
    /// There is a kernel to notify.
    attached: bool,
    stopped: bool,
}

impl Queue {
    /// Whether the kernel has yet to forget something of an inode.
    fn concerns(&self, inode: u64) -> bool {
        let is_it = |target| target == Target::Inode(inode) || target == Target::Everything;
        let waiting = self.messages.iter().map(Notification::target);
        self.sending.map(|(_, target)| target).into_iter().chain(waiting).any(is_it)
    }
}

/// The threads that notify the kernel.
#[derive(Debug)]
pub struct NotifierThread {
    sink: Arc<Invalidations>,
    threads: Vec<JoinHandle<()>>,
}

impl Invalidations {
    /// Passes nothing on until it is attached.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            filled: Condvar::new(),
            root: Mutex::default(),
            notifier: Mutex::default(),
            listings: KernelListings::default(),
            names: NameQueue::new(QUEUE_MAX),
            strict_names: NameQueue::new(STRICT_NAMES_MAX),
            counts: Arc::default(),
        })
    }

    /// Begins to pass invalidations on. Until now the kernel knew nothing, so there was nothing to forget.
    pub fn attach(
        self: &Arc<Self>,
        notifier: Notifier,
        root: Arc<Root>,
        inodes: Inodes,
    ) -> std::io::Result<NotifierThread> {
        *self.root.lock() = Some(Arc::clone(&root));
        *self.notifier.lock() = Some(notifier.clone());
        self.queue.lock().attached = true;
        let kernel = KernelCaches::new(notifier, root, Arc::clone(&self.counts));
        let of_names = kernel.clone();
        let mut threads = vec![self.names.start("fuse-names", move |name| match name {
            Some((parent, name)) => of_names.forget_entry(parent, name),
            None => of_names.forget_every_entry(),
        })?];
        let of_names = kernel.clone();
        threads.push(self.strict_names.start("fuse-strict", move |name| {
            if let Some((parent, name)) = name {
                of_names.forget_entry(parent, name);
            }
        })?);
        let sink = Arc::clone(self);
        let notify = std::thread::Builder::new().name("fuse-notify".to_owned());
        threads.push(notify.spawn(move || sink.pass_on(&kernel, &inodes))?);
        Ok(NotifierThread { sink: Arc::clone(self), threads })
    }

    /// Directories whose listing the kernel may keep.
    pub fn listings(&self) -> &KernelListings {
        &self.listings
    }

    /// For an answer that named `name` (of the kernel's `parent`) while the namespace changed: the kernel may have
    /// received it after the invalidation that it should have come before.
    pub fn repeat_entry(&self, parent: u64, name: &[u8]) {
        self.names.forget(parent, name);
    }

    /// Has the kernel forget the pages of bytes that were written, and answers the write. Inodes are the kernel's.
    pub fn written(&self, inode: u64, offset: u64, length: u32, reply: Reply) {
        let message = Notification::Written { inode, offset, length, reply: Some(reply) };
        if let Err(Notification::Written { reply: Some(reply), .. }) = self.try_push(message) {
            // Without a kernel to notify there are no pages.
            reply.written(length);
        }
    }

    /// For what was changed by way of one of the kernel's nodes of an inode: the kernel has forgotten attributes when
    /// this returns, and soon forgets the pages of the others. Those of the node itself it knows of, and may have
    /// locked until it has the answer.
    pub fn changed_by(&self, node: u64) {
        self.forget_attributes(node);
        self.push(Notification::Others(node));
    }

    /// The kernel has given up a reference to an inode of the namespace: has it looked whether that was the last.
    pub fn given_up(&self, inode: u64) {
        self.push(Notification::ReferenceDropped(inode));
    }

    /// Answers the writes that wait while an invalidation is stuck, if there are `many` of them: together they may be
    /// what it waits for. Their pages are forgotten after it. To be called about once a second.
    fn answer_stuck(&self, many: usize) {
        let stuck: Vec<(Reply, u32)> = {
            let mut queue = self.queue.lock();
            let is_stuck = queue.sending.is_some_and(|(since, _)| since.elapsed() >= STUCK);
            let writes = || queue.messages.iter().filter(|message| matches!(message, Notification::Written { .. }));
            if !is_stuck || writes().count() < many {
                return;
            }
            let take = |message: &mut Notification| match message {
                Notification::Written { reply, length, .. } => Some((reply.take()?, *length)),
                _ => None,
            };
            queue.messages.iter_mut().filter_map(take).collect()
        };
        if !stuck.is_empty() {
            warn!(writes = stuck.len(), "writes are answered before the kernel has forgotten their pages");
        }
        stuck.into_iter().for_each(|(reply, length)| reply.written(length));
    }

    /// Calls [`answer_stuck`](Self::answer_stuck) until `stop`.
    pub fn keep_moving(self: &Arc<Self>, many: usize, stop: CancellationToken) -> impl Future<Output = ()> + use<> {
        let this = Arc::clone(self);
        async move {
            while stop.run_until_cancelled(tokio::time::sleep(STUCK)).await.is_some() {
                this.answer_stuck(many);
            }
        }
    }

    pub fn counts(&self) -> &InvalidationCounts {
        &self.counts
    }

    /// For changes whose answer carries no attributes: the kernel has forgotten those of the inode, of all its nodes,
    /// when this returns. Other than what waits in the queue, that takes no lock which a system call holds.
    pub fn forget_attributes(&self, kernel_inode: u64) {
        let notifier = self.notifier.lock().clone();
        if let Some(notifier) = notifier {
            self.nodes_of(kernel_inode).into_iter().for_each(|node| self.counts.count(notifier.attributes(node)));
        }
    }

    /// Invalidations that wait.
    pub fn queued(&self) -> usize {
        self.queue.lock().messages.len() + self.names.len() + self.strict_names.len()
    }

    /// Completes when the kernel has forgotten what others have changed of a file: attributes and pages. What else it
    /// is to forget may wait for somebody else's reads. Names are waited for too, but not for whoever has their
    /// directories locked.
    pub fn forgotten(&self, inode: u64) -> impl Future<Output = ()> + Send + use<> {
        let kernel_inode = self.to_kernel(inode);
        let notifier = self.notifier.lock().clone().filter(|_| self.queue.lock().concerns(kernel_inode));
        let names = [self.names.barrier(), self.strict_names.barrier()];
        let nodes = self.nodes_of(kernel_inode);
        async move {
            if let Some(notifier) = notifier {
                // It is forgotten twice then. The kernel may wait for reads of the file.
                let forget = move || nodes.into_iter().map(|node| notifier.inode(node)).filter(Result::is_err).count();
                let forgotten = tokio::task::spawn_blocking(forget);
                // An error means that the process ends.
                let _ended = forgotten.await;
            }
            let _late = timeout(NAMES_WAIT, join_all(names.into_iter().flatten())).await;
        }
    }

    /// The first node of an inode: what is sent to the kernel goes to the others, too.
    fn to_kernel(&self, inode: u64) -> u64 {
        self.root.lock().as_ref().and_then(|root| root.kernel_nodes_of(inode).next()).unwrap_or(inode)
    }

    /// All nodes of the inode that one of them belongs to.
    fn nodes_of(&self, kernel_node: u64) -> Vec<u64> {
        let root = self.root.lock();
        let nodes = root.as_ref().map(|root| root.kernel_nodes_of(root.to_namespace(kernel_node)).collect());
        nodes.unwrap_or_else(|| vec![kernel_node])
    }

    fn kernel_root(&self) -> Option<u64> {
        self.root.lock().as_ref().map(|root| root.kernel_node())
    }

    fn push(&self, message: Notification) {
        // A barrier dropped here is a barrier passed: there is no kernel to notify.
        let _nobody = self.try_push(message);
    }

    /// Gives the message back when there is no kernel to notify.
    fn try_push(&self, message: Notification) -> Result<(), Notification> {
        let mut queue = self.queue.lock();
        if !queue.attached || queue.stopped {
            return Err(message);
        }
        if queue.messages.len() >= QUEUE_MAX && !message.is_waited_for() {
            warn!(waiting = QUEUE_MAX, "the kernel takes invalidations too slowly: everything is invalidated instead");
            queue.messages.retain(Notification::is_waited_for);
            // Before those that are left: what was dropped came before them.
            queue.messages.push_front(Notification::Everything);
        }
        queue.messages.push_back(message);
        drop(queue);
        self.filled.notify_one();
        Ok(())
    }

    fn pass_on(&self, kernel: &KernelCaches, inodes: &Inodes) {
        loop {
            let message = {
                let mut queue = self.queue.lock();
                queue.sending = None;
                loop {
                    if queue.stopped {
                        let rest = std::mem::take(&mut queue.messages);
                        drop(queue);
                        drop(rest);
                        return;
                    }
                    if let Some(message) = queue.messages.pop_front() {
                        queue.sending = Some((Instant::now(), message.target()));
                        break message;
                    }
                    self.filled.wait(&mut queue);
                }
            };
            match message {
                Notification::Inode(inode) => kernel.forget_inode(inode),
                Notification::Written { inode, offset, length, reply } => {
                    kernel.forget_pages(inode, offset, length);
                    if let Some(reply) = reply {
                        reply.written(length);
                    }
                }
                Notification::Others(changed) => {
                    let others = kernel.nodes_of(changed).filter(|node| *node != changed);
                    others.for_each(|node| kernel.counts.count(kernel.notifier.inode(node)));
                }
                Notification::Everything => self.forget_everything(kernel, inodes),
                Notification::ReferenceDropped(inode) => {
                    if kernel.referred(vec![inode]).is_empty() {
                        kernel.root.aliases().forget(inode);
                        (inodes.forgotten)(inode);
                    }
                }
                Notification::Referred(inodes, answer) => {
                    // Who asked may be gone.
                    let _ = answer.send(kernel.referred(inodes));
                }
                Notification::Barrier(passed) => {
                    // The watch task may be gone.
                    let _ = passed.send(());
                }
            }
        }
    }

    fn forget_everything(&self, kernel: &KernelCaches, inodes: &Inodes) {
        self.counts.resets.fetch_add(1, Relaxed);
        debug!(epochs = ?kernel.epochs, "everything in the kernel's caches is invalidated");
        match kernel.epochs {
            EpochSupport::Known => kernel.forget_every_entry(),
            // Which takes the lock of a directory.
            EpochSupport::Unknown => self.names.forget_everything(),
        }
        kernel.forget_inode(kernel.root.kernel_node());
        // A name that is looked up anew says nothing of the pages of a file that is open; of others an open decides.
        for inode in (inodes.open)() {
            kernel.forget_inode(kernel.root.to_kernel(inode));
        }
    }
}

impl InvalidationSink for Invalidations {
    fn entry(&self, parent: u64, name: &[u8], old: u64, _new: u64, kept: bool) {
        self.listings.changed(parent);
        if old != 0 {
            self.listings.changed(old);
        }
        let moved_root = self.kernel_root().filter(|root| self.to_kernel(old) == *root);
        let kernel_parent = self.to_kernel(parent);
        let names = if kept { &self.names } else { &self.strict_names };
        names.forget(kernel_parent, name);
        if let Some(root) = moved_root {
            // The root of the mount has no name in the kernel.
            self.push(Notification::Inode(root));
        }
    }

    fn inode(&self, inode: u64) {
        self.listings.changed(inode);
        self.push(Notification::Inode(self.to_kernel(inode)));
    }

    fn reset(&self) {
        self.listings.reset();
        self.push(Notification::Everything);
    }

    fn resumed(&self) {
        self.listings.reset();
    }

    fn referred(&self, inodes: Vec<u64>) -> BoxFuture<'static, Vec<u64>> {
        let (answer, answered) = oneshot::channel();
        self.push(Notification::Referred(inodes, answer));
        // An error means that there is no kernel (any more) to ask.
        Box::pin(async move { answered.await.unwrap_or_default() })
    }

    fn invalidated(&self) -> BoxFuture<'static, ()> {
        let (passed, waits) = oneshot::channel();
        self.push(Notification::Barrier(passed));
        let names = self.strict_names.barrier();
        Box::pin(async move {
            // An error means that there is no kernel (any more) to notify.
            let _ = waits.await;
            if let Some(names) = names {
                let _late = timeout(STRICT_NAMES_WAIT, names).await;
            }
        })
    }

    fn barrier(&self) -> BoxFuture<'static, ()> {
        let (invalidated, names) = (self.invalidated(), self.names.barrier());
        let (notifier, counts) = (self.notifier.lock().clone(), Arc::clone(&self.counts));
        Box::pin(async move {
            invalidated.await;
            let (Some(mut names), Some(notifier)) = (names, notifier) else { return };
            if timeout(LOCKED_FOR_LONG, &mut names).await.is_ok() {
                return;
            }
            if notifier.every_entry().is_ok() {
                counts.resets.fetch_add(1, Relaxed);
                warn!("a directory is being changed for long: the kernel is to look every name up anew");
                return;
            }
            let _ = names.await;
        })
    }
}

impl Drop for NotifierThread {
    /// Stops the threads; barriers that wait are released. Blocks.
    fn drop(&mut self) {
        self.sink.queue.lock().stopped = true;
        self.sink.notifier.lock().take();
        self.sink.filled.notify_all();
        self.sink.names.stop();
        self.sink.strict_names.stop();
        for thread in self.threads.drain(..) {
            // A panic has been reported by its hook.
            let _ = thread.join();
        }
    }
}

/// What the kernel can be notified of.
#[derive(Clone, Debug)]
struct KernelCaches {
    notifier: Notifier,
    root: Arc<Root>,
    counts: Arc<InvalidationCounts>,
    epochs: EpochSupport,
}

/// Whether the kernel has a word for "every name".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EpochSupport {
    Known,
    /// Before Linux 6.16. Invalidating a directory's name drops what is below it as well, so invalidating every name in
    /// the root does the same; the root remembers which the kernel was given.
    Unknown,
}

impl KernelCaches {
    fn new(notifier: Notifier, root: Arc<Root>, counts: Arc<InvalidationCounts>) -> Self {
        // Asking is harmless: the kernel knows next to nothing yet.
        let epochs = if notifier.every_entry().is_ok() { EpochSupport::Known } else { EpochSupport::Unknown };
        if epochs == EpochSupport::Known {
            root.names.need_not_be_remembered();
        }
        Self { notifier, root, counts, epochs }
    }

    fn forget_entry(&self, parent: u64, name: &[u8]) {
        let outcome = self.notifier.entry(parent, name);
        self.counts.count(outcome);
    }

    fn forget_every_entry(&self) {
        match self.epochs {
            EpochSupport::Known => {
                let outcome = self.notifier.every_entry().map(|()| true);
                self.counts.count(outcome);
            }
            EpochSupport::Unknown => {
                for name in self.root.names.take() {
                    self.forget_entry(self.root.kernel_node(), &name);
                }
            }
        }
    }

    fn nodes_of(&self, inode: u64) -> impl Iterator<Item = u64> + use<> {
        self.root.kernel_nodes_of(self.root.to_namespace(inode))
    }

    fn forget_inode(&self, inode: u64) {
        self.nodes_of(inode).for_each(|node| self.counts.count(self.notifier.inode(node)));
    }

    fn forget_pages(&self, inode: u64, offset: u64, length: u32) {
        self.nodes_of(inode).for_each(|node| self.counts.count(self.notifier.pages(node, offset, length)));
    }

    /// Those of the namespace's inodes that the kernel has.
    fn referred(&self, mut inodes: Vec<u64>) -> Vec<u64> {
        let is_known = |node| self.notifier.attributes(node) == Ok(true);
        inodes.retain(|inode| self.root.kernel_nodes_of(*inode).any(is_known));
        inodes
    }
}

//! Inodes of fs-mode mounts that are open here.
//!
//! An inode whose last name is removed stays while a client has it open. Opening is not reported to the master. A
//! client that is notified of the removal has the inode *held*, if it is open there, before it acknowledges the
//! removal. What is closed for the last time is released, if it was held: by an operation in the log that nobody waits
//! for.
//!
//! Holds are a part of the master's state and outlive it. A stream that begins anew may have missed removals: then the
//! master is asked which of all that is open must be held and is not, and mostly that is nothing.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_conf::backoff;
use cavern_net::master::RetryPolicy;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, CheckOpenRefsReply, CheckOpenRefsRequest, OpenToWrite, SetOpenRefs, User};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::log::Operation;
use super::node::Node;
use super::parts::{Inner, Metadata};
use crate::error::ClientError;

/// Inodes that are held, or let go of, by one change; other changes go in between.
const BATCH: usize = 500;
/// Inodes that the master is asked about at a time.
const CHECKED: usize = 4096;

/// What is open, and what was. Bounded by the open files and directories of the host.
#[derive(Debug, Default)]
pub(super) struct OpenInodes {
    state: Mutex<State>,
    /// Something is to be let go of.
    pub left: Notify,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<u64, Open>,
    /// Held by the session and not open here any more, and not in the log yet.
    releasing: BTreeSet<u64>,
}

#[derive(Debug, Default)]
struct Open {
    handles: u32,
    /// The master has been asked to keep it.
    has_ref: bool,
    counters: Arc<ChangeCounters>,
}

/// What events have reported of an inode since it was opened.
#[derive(Debug, Default)]
struct ChangeCounters {
    /// How often somebody else has changed it.
    changes: AtomicU64,
    /// How often something may have been missed.
    gaps: AtomicU64,
}

impl OpenInodes {
    fn opened(&self, inode: u64) -> Arc<ChangeCounters> {
        let mut state = self.state.lock();
        let open = state.open.entry(inode).or_default();
        open.handles += 1;
        open.counters.clone()
    }

    /// Somebody else has changed the inode.
    pub(super) fn changed(&self, inode: u64) {
        if let Some(open) = self.state.lock().open.get(&inode) {
            open.counters.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// A stream of events begins: whatever is open may have been changed.
    pub(super) fn all_changed(&self) {
        for open in self.state.lock().open.values() {
            open.counters.gaps.fetch_add(1, Ordering::Release);
            open.counters.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Nobody writes to an inode that is open here: the session need not hold it if it has a name, as it says itself.
    fn drop_ref(&self, inode: u64, has_name: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        // With this locked: who takes the name from it has it held after this, or it has none here.
        if !has_name() {
            return false;
        }
        if state.open.get_mut(&inode).is_some_and(|open| std::mem::take(&mut open.has_ref)) {
            state.releasing.insert(inode);
            self.left.notify_one();
        }
        true
    }

    /// Something refers to an inode without having it open; whether it is not held yet.
    pub(super) fn refer(&self, inode: u64) -> bool {
        let mut state = self.state.lock();
        let open = state.open.entry(inode).or_default();
        open.handles += 1;
        !open.has_ref
    }

    pub(super) fn closed(&self, inode: u64) {
        let mut state = self.state.lock();
        let Some(open) = state.open.get_mut(&inode) else { return };
        open.handles -= 1;
        if open.handles == 0 && state.open.remove(&inode).is_some_and(|open| open.has_ref) {
            state.releasing.insert(inode);
            self.left.notify_one();
        }
    }

    /// The session holds an inode that is not open here.
    pub(super) fn never_opened(&self, inode: u64) {
        self.state.lock().releasing.insert(inode);
        self.left.notify_one();
    }

    /// What is open, in an order, and whether it is to be held in any case.
    pub(super) fn all(&self) -> Vec<(u64, bool)> {
        let mut all: Vec<_> = self.state.lock().open.iter().map(|(inode, open)| (*inode, open.has_ref)).collect();
        all.sort_unstable();
        all
    }
}

impl State {
    /// Notes that those of the inodes that are open will be held, and gives these.
    fn add_ref(&mut self, inodes: &[u64]) -> Vec<u64> {
        let mut added = Vec::with_capacity(inodes.len());
        for inode in inodes {
            if let Some(open) = self.open.get_mut(inode) {
                open.has_ref = true;
                self.releasing.remove(inode);
                added.push(*inode);
            }
        }
        added
    }
}

/// Keeps an inode of an fs-mode mount while it is open, whatever becomes of its names.
pub struct OpenInode {
    inner: Arc<Inner>,
    inode: u64,
    counters: Arc<ChangeCounters>,
    changes_before: u64,
}

impl OpenInode {
    /// [`Self::changes`] when it was opened.
    pub(crate) fn changes_before(&self) -> u64 {
        self.changes_before
    }

    /// A number that grows whenever somebody else changes the inode: what was asked for before may be outdated then.
    pub fn changes(&self) -> u64 {
        self.counters.changes.load(Ordering::Acquire)
    }

    /// A number that grows whenever changes by others may have been missed; `None` while that cannot be said.
    pub fn gaps(&self) -> Option<u64> {
        let gaps = self.counters.gaps.load(Ordering::Acquire);
        self.inner.lease.is_live().then_some(gaps)
    }

    /// Whether every change by others shows in [`Self::changes`] in time.
    pub(crate) fn is_watched(&self) -> bool {
        self.inner.lease.is_live()
    }

    /// The session holds it since it has made it: it is let go of when it is closed here for the last time.
    pub(crate) fn note_ref(&self) {
        self.inner.open.inodes.state.lock().add_ref(&[self.inode]);
    }

    /// As [`Self::add_ref`], if a user may write to the file: what the session commits to it is checked no more then.
    pub(crate) async fn take_write_ref(&self, read: bool, user: User) -> Result<(), ClientError> {
        // What is refused is let go of in vain.
        self.note_ref();
        let open = OpenToWrite { inode: self.inode, read };
        let metadata = Metadata { inner: self.inner.clone() };
        metadata.change_by(Change::OpenToWrite(open), (0, 0), Some(user)).await.map(drop)
    }

    /// The master need not keep its blocks any more, if the inode has a name: who removes that has it held again.
    /// False where it has none, and stays held.
    pub(crate) fn drop_ref(&self) -> bool {
        let inner = &self.inner;
        inner.open.inodes.drop_ref(self.inode, || inner.names.has_name(self.inode))
    }

    /// Has the master keep the inode's blocks where they are, until it is closed here for the last time.
    pub(crate) async fn add_ref(&self) -> Result<(), ClientError> {
        self.inner.add_ref(&[self.inode]).await
    }
}

impl std::fmt::Debug for OpenInode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenInode").field("inode", &self.inode).finish_non_exhaustive()
    }
}

impl Drop for OpenInode {
    fn drop(&mut self) {
        self.inner.open.inodes.closed(self.inode);
    }
}

impl Metadata {
    /// Keeps an inode that has a name, without I/O. `None` when that is not certain: use `keep_open`.
    pub fn keep_open_cached(&self, node: &Node) -> Option<OpenInode> {
        let kept = self.register_open(node.inode);
        // After it was registered: a removal event that arrives from now on finds it open.
        self.inner.names.has_name(node.inode).then_some(kept)
    }

    /// Keeps an inode. `Stale` when it is gone.
    pub async fn keep_open(&self, node: &Node) -> Result<OpenInode, ClientError> {
        let kept = self.register_open(node.inode);
        self.ask_kept(node.inode).await.map(|_as_it_is| kept)
    }

    /// Keeps an inode that has just been made here with these attributes; and whether nobody has written to it before
    /// it was kept. `Stale` when it is gone.
    pub(crate) async fn keep_made(&self, made: &Attr) -> Result<(OpenInode, bool), ClientError> {
        let kept = self.register_open(made.inode);
        // After it was registered: what others change from now on is counted.
        let current = match self.inner.names.cache.node(made.inode).filter(|known| !known.is_removed()) {
            Some(known) => known,
            None => self.ask_kept(made.inode).await?,
        };
        let is_as_made = current.posix().is_some_and(|posix| posix.version == made.version);
        Ok((kept, is_as_made))
    }

    /// Asks the master about an inode that was registered, and has it held if it has lost its name.
    async fn ask_kept(&self, inode: u64) -> Result<Arc<Node>, ClientError> {
        let node = self.ask_node(inode, RetryPolicy::UntilDeadline).await?;
        if node.is_removed() {
            self.inner.add_ref(&[inode]).await?;
        }
        Ok(node)
    }

    /// Keeps a directory that is being opened, if it can go meanwhile: those of buckets are names, and nothing to keep.
    /// Without a question; `None`: use `keep_directory`.
    pub fn keep_directory_cached(&self, node: &Node) -> Option<Option<OpenInode>> {
        if node.is_fs_mode() { self.keep_open_cached(node).map(Some) } else { Some(None) }
    }

    /// Keeps a directory that is being opened, asking the master. `Stale` when it is gone.
    pub async fn keep_directory(&self, node: &Node) -> Result<Option<OpenInode>, ClientError> {
        if node.is_fs_mode() { self.keep_open(node).await.map(Some) } else { Ok(None) }
    }

    /// Keeps an inode that the session may hold already, since it has just made it without a name, or since it was
    /// open in the process before this one: it is let go of with the last close.
    pub(crate) fn keep_held(&self, inode: u64) -> OpenInode {
        let kept = self.register_open(inode);
        kept.note_ref();
        kept
    }

    /// The inodes that are open here.
    pub fn open_inodes(&self) -> Vec<u64> {
        self.inner.open.inodes.all().into_iter().map(|(inode, _)| inode).collect()
    }

    fn register_open(&self, inode: u64) -> OpenInode {
        let counters = self.inner.open.inodes.opened(inode);
        let changes_before = counters.changes.load(Ordering::Acquire);
        OpenInode { inner: self.inner.clone(), inode, counters, changes_before }
    }
}

impl Inner {
    /// Has the session hold those of the inodes that are open, at most [`BATCH`]. Bounded by `client.metadata_timeout`.
    async fn add_ref(&self, inodes: &[u64]) -> Result<(), ClientError> {
        let answer = {
            let mut state = self.open.inodes.state.lock();
            let opened = state.add_ref(inodes);
            if opened.is_empty() {
                return Ok(());
            }
            // In the log before anybody can close one of them: what is let go of comes after it.
            let set = Change::SetOpenRefs(SetOpenRefs { opened, closed: Vec::new() });
            self.push_and_wait(Operation::new(set, (0, 0)), Instant::now() + self.master.timeout())
        };
        let made = answer.await.unwrap_or(Err(ClientError::Shutdown))?;
        // There is nothing to be kept.
        log_lost_refs(&made.result.gone);
        Ok(())
    }

    /// Has the session hold any number of inodes that are open, tried until the master has answered: bounded by the
    /// session, which whoever calls this must follow.
    pub(super) async fn add_refs(&self, inodes: Vec<u64>) {
        for batch in inodes.chunks(BATCH) {
            let mut backoff = backoff::MASTER.begin();
            while let Err(error) = self.add_ref(batch).await {
                match error {
                    ClientError::Shutdown => return,
                    ClientError::Refused { reason, .. } => {
                        tracing::warn!("what is open here could not be held: {reason}");
                        break;
                    }
                    error => tracing::debug!("what is open here is not held yet: {error}"),
                }
                backoff.wait().await;
            }
        }
    }

    /// Finds out what must be held of all that is open, and has it held; bounded as `add_refs`.
    pub(super) async fn reclaim_refs(&self) {
        // What is not there then is lost, and the session with it. Nor is there yet what a process before has made.
        let _late = self.all_settled().await;
        self.log.replayed.answered().await;
        for asked in self.open.inodes.all().chunks(CHECKED) {
            let of = |in_any_case: bool| {
                asked.iter().filter(move |(_, has_ref)| *has_ref == in_any_case).map(|(inode, _)| *inode).collect()
            };
            let request = CheckOpenRefsRequest { session: self.lease.session(), open: of(false), referenced: of(true) };
            let CheckOpenRefsReply { missing, gone } = self.check_open_refs(&request).await;
            log_lost_refs(&gone);
            self.add_refs(missing).await;
        }
    }

    async fn check_open_refs(&self, request: &CheckOpenRefsRequest) -> CheckOpenRefsReply {
        let mut backoff = backoff::MASTER.begin();
        loop {
            match ask!(self, "CheckOpenRefs", check_open_refs, request.clone()).await {
                Ok(reply) => return reply,
                Err(error) if error.is_transient() => tracing::debug!("what must be held is not known yet: {error}"),
                Err(error) => {
                    tracing::warn!("what must be held is not known, so everything that is open is: {error}");
                    let missing = request.open.iter().chain(&request.referenced).copied().collect();
                    return CheckOpenRefsReply { missing, gone: Vec::new() };
                }
            }
            backoff.wait().await;
        }
    }

    /// Has the master let go of what left, unless it is being asked for that already: what leaves meanwhile gathers.
    pub(super) fn release_gathered(&self) {
        if !self.log.lock().is_releasing() {
            self.release_closed();
        }
    }

    /// Has the master let go of what left, before any change that comes later. That is sent until it is made, or the
    /// session is over.
    pub(super) fn release_closed(&self) {
        // In the log before any of them can be opened and held again.
        let mut state = self.open.inodes.state.lock();
        let releasing: Vec<u64> = std::mem::take(&mut state.releasing).into_iter().collect();
        for batch in releasing.chunks(BATCH) {
            let set = SetOpenRefs { opened: Vec::new(), closed: batch.to_vec() };
            self.push(Operation::must_deliver(Change::SetOpenRefs(set)));
        }
    }
}

fn log_lost_refs(gone: &[u64]) {
    if let Some(first) = gone.first() {
        tracing::warn!("{} open inodes were deleted, inode {first} among them", gone.len());
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{MutateReply, MutationResult};

    use super::super::cache::tests::node;
    use super::super::parts::tests::metadata;
    use super::*;

    fn releasing(open: &OpenInodes) -> Vec<u64> {
        open.state.lock().releasing.iter().copied().collect()
    }

    #[test]
    fn what_was_held_is_let_go_of_with_the_last_handle() {
        let open = OpenInodes::default();
        let counters = open.opened(5);
        open.opened(5);
        open.changed(5);
        open.changed(6);
        open.all_changed();
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        assert_eq!((count(&counters.changes), count(&counters.gaps)), (2, 1));
        assert_eq!(open.all(), [(5, false)]);
        assert_eq!(open.state.lock().add_ref(&[5, 6]), [5]);
        assert_eq!(open.all(), [(5, true)]);
        open.closed(5);
        assert!(releasing(&open).is_empty());
        open.closed(5);
        open.closed(5);
        assert_eq!(releasing(&open), [5]);
        open.opened(5);
        assert_eq!(open.all(), [(5, false)], "it has not been held since it was opened");
        open.closed(5);
        assert_eq!(releasing(&open), [5], "still to be sent");
    }

    #[test]
    fn what_nobody_writes_to_is_let_go_of_while_it_is_open() {
        let open = OpenInodes::default();
        open.opened(5);
        let drop_ref = |inode| open.drop_ref(inode, || true);
        assert!(drop_ref(5) && drop_ref(6) && releasing(&open).is_empty(), "it is not held");
        open.state.lock().add_ref(&[5]);
        assert!(drop_ref(5));
        assert_eq!((open.all(), releasing(&open)), (vec![(5, false)], vec![5]));
        open.state.lock().add_ref(&[5]);
        assert!(releasing(&open).is_empty());
    }

    #[tokio::test]
    async fn what_has_lost_its_name_stays_held_while_it_is_open() {
        let metadata = metadata(None);
        let inner = &metadata.inner;
        inner.names.keep(&[node(5, 1, "a")]);
        let kept = metadata.keep_held(5);
        inner.names.forget_inode(5);
        assert!(!kept.drop_ref());
        assert_eq!((inner.open.inodes.all(), releasing(&inner.open.inodes)), (vec![(5, true)], vec![]));
        inner.names.keep(&[node(5, 1, "b")]);
        assert!(kept.drop_ref());
        assert_eq!(releasing(&inner.open.inodes), [5]);
        let is_locked = || inner.open.inodes.state.try_lock().is_none();
        assert!(inner.open.inodes.drop_ref(5, is_locked), "nobody is told of a removal between the look and that");
    }

    #[test]
    fn what_is_held_again_is_not_let_go_of() {
        let open = OpenInodes::default();
        for _ in 0..2 {
            open.opened(5);
            open.state.lock().add_ref(&[5]);
            assert!(releasing(&open).is_empty());
            open.closed(5);
            assert_eq!(releasing(&open), [5]);
        }
        open.never_opened(6);
        assert_eq!(releasing(&open), [5, 6]);
    }

    #[tokio::test]
    async fn what_is_closed_gathers_while_the_master_lets_go_of_others() {
        let metadata = metadata(None);
        let inner = &metadata.inner;
        let released = || {
            inner.release_gathered();
            let request = inner.log.next_request(inner.names.recent.mark())?.request;
            let drop_ref = request.mutations.into_iter().map(|mutation| match mutation.change {
                Some(Change::SetOpenRefs(set)) => set.closed,
                other => panic!("not asked for: {other:?}"),
            });
            Some(drop_ref.collect::<Vec<_>>())
        };
        assert_eq!(released(), None);
        inner.open.inodes.never_opened(5);
        assert_eq!(released(), Some(vec![vec![5]]));
        [6, 7].into_iter().for_each(|inode| inner.open.inodes.never_opened(inode));
        assert_eq!(released(), None);
        let call = inner.log.lock().take_answered().unwrap();
        let reply = MutateReply { results: vec![MutationResult::default()], ..MutateReply::default() };
        inner.apply_results(call, reply, 1);
        assert_eq!(released(), Some(vec![vec![6, 7]]));
    }
}

//! GETLK, SETLK and SETLKW, and what a FLUSH or a RELEASE unlocks.
//!
//! Locks of files of fs-mode mounts are the master's. Those of objects, which only change as a whole and never by us,
//! stay on this host: flock(2) excludes the processes of this mount from each other, and the shared locks of fcntl(2),
//! which are the only ones that a file that cannot be written has, are in nobody's way.
//!
//! A process loses its fcntl(2) locks of a file when it closes any descriptor of it: FLUSH waits for that. An open file
//! description loses its locks when it is released: the kernel sends RELEASE without waiting, see [`descriptions`].
//!
//! Locks order what hosts do: what was written under one is committed before it ends, and a client that gets the next
//! has been notified of it.

mod descriptions;
pub(super) mod handle_locks;
mod local;

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{AnsweredBy, ClientError, LOCK_TO_END};
use cavern_proto::journal::LockRecord;
use cavern_proto::master::{Lock, LockKind, LockType};
use rustix::io::Errno;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::parts::Inner;
use crate::kernel::abi::FileLock;
use crate::kernel::{LockRequest, Reply};
use descriptions::Unlock;

/// A file that seems to be locked by what was closed before is looked at again for so long: the RELEASE may be read by
/// another event loop after the request.
const RELEASE_LAG: Duration = Duration::from_millis(200);

/// What ends with an open file description. It is unlocked when this is dropped: after what was written under it is
/// committed.
pub(super) struct ReleasedLocks {
    inner: Arc<Inner>,
    inode: u64,
    handle: u64,
    has_flock: bool,
}

impl Drop for ReleasedLocks {
    fn drop(&mut self) {
        let (locks, metadata) = (&self.inner.locks, self.inner.client.metadata());
        if self.has_flock {
            locks.objects.unlock(self.inode, self.handle);
            metadata.unlock_closed_soon(self.inode, LockKind::Flock, self.handle, None);
        }
        locks.descriptions.released(self.handle, |unlock| self.inner.unlock_soon(self.inode, unlock));
        self.inner.mount_journal.forget_locks_through(self.handle);
    }
}

/// What the kernel asks for, as the master has it; `None` for what makes no sense.
fn wanted(request: &LockRequest) -> Option<Lock> {
    let FileLock { start, end, kind, pid } = request.lock;
    let r#type = match kind.cast_signed() {
        libc::F_UNLCK => LockType::Unlocked,
        libc::F_RDLCK => LockType::Shared,
        libc::F_WRLCK => LockType::Exclusive,
        _ => return None,
    };
    // The kernel's numbers of descriptions are used again while their RELEASE is on its way; those of handles are not.
    let (owner, start, end) = if request.is_flock { (request.fh, 0, LOCK_TO_END) } else { (request.owner, start, end) };
    Some(Lock { session: 0, owner, pid, r#type: r#type.into(), start, end })
}

/// What stands in the way, as the kernel has it.
fn found(lock: Option<&Lock>, asked: FileLock) -> FileLock {
    let kind = |kind: i32| kind.cast_unsigned();
    match lock {
        None => FileLock { kind: kind(libc::F_UNLCK), ..asked },
        Some(lock) => FileLock {
            start: lock.start,
            end: lock.end,
            kind: kind(if lock.r#type() == LockType::Exclusive { libc::F_WRLCK } else { libc::F_RDLCK }),
            pid: lock.pid,
        },
    }
}

fn kind_of(request: &LockRequest) -> LockKind {
    if request.is_flock { LockKind::Flock } else { LockKind::Posix }
}

impl Inner {
    pub(super) fn getlk(self: &Arc<Self>, kernel_node: u64, request: LockRequest, reply: Reply) {
        let Some(lock) = wanted(&request) else { return reply.error(libc::EINVAL) };
        self.with_node(kernel_node, "getlk", reply, move |this, node, reply| {
            if !node.has_cluster_locks() {
                return reply.lock(found(None, request.lock));
            }
            let (this, inode) = (Arc::clone(this), node.inode);
            let known = this.client.metadata().find_known_lock(inode, kind_of(&request), &lock);
            if known == Some(None) {
                return reply.lock(found(None, request.lock));
            }
            // It may be of what is closed already.
            reply.defer(move |reply| async move {
                let lock = this.find_lock(inode, &request, lock).await;
                this.answer_with("getlk", lock, reply, |lock, reply| reply.lock(found(lock.as_ref(), request.lock)));
            });
        });
    }

    /// The first lock in the way that does not belong to what is closed already.
    async fn find_lock(&self, inode: u64, request: &LockRequest, lock: Lock) -> Result<Option<Lock>, ClientError> {
        let (kind, metadata) = (kind_of(request), self.client.metadata());
        let (mut look, deadline) = (self.locks.descriptions.look(), Instant::now() + RELEASE_LAG);
        loop {
            let found = metadata.find_lock(inode, kind, lock).await?;
            if found.is_none() || !look.is_outdated(inode, request.fh, deadline).await {
                return Ok(found);
            }
        }
    }

    pub(super) fn setlk(self: &Arc<Self>, kernel_node: u64, request: LockRequest, wait: bool, reply: Reply) {
        let Some(lock) = wanted(&request) else { return reply.error(libc::EINVAL) };
        self.with_node(kernel_node, "lock", reply, move |this, node, reply| {
            let inode = node.inode;
            this.files.passthrough.note_locked(node.inode);
            if request.is_flock {
                this.locks.descriptions.ask_flock(inode, request.fh);
            }
            if lock.r#type() != LockType::Unlocked {
                let (handle, owner, is_flock) = (request.fh, lock.owner, request.is_flock);
                this.mount_journal.note_lock(LockRecord { inode, handle, owner, is_flock, kind: lock.r#type });
            }
            if !node.has_cluster_locks() {
                return this.lock_object(inode, &request, &lock, wait, reply);
            }
            let this = Arc::clone(this);
            reply.run_until_interrupted(move |reply, interrupted| async move {
                let made = match lock.r#type() {
                    LockType::Unlocked => this.unlock(inode, &request, lock).await,
                    _ => this.lock(inode, &request, lock, wait.then_some(&interrupted)).await,
                };
                this.answer_done("lock", made, reply);
            });
        });
    }

    /// Waits until `interrupted`, or not at all.
    async fn lock(
        &self,
        inode: u64,
        request: &LockRequest,
        lock: Lock,
        wait: Option<&CancellationToken>,
    ) -> Result<(), ClientError> {
        let (kind, descriptions, metadata) = (kind_of(request), &self.locks.descriptions, self.client.metadata());
        let bytes = (lock.start, lock.end);
        let before = metadata.has_locked(inode, kind, lock.owner);
        let asked = (!request.is_flock).then(|| descriptions.ask(inode, request.fh, request.owner, bytes));
        let made = match wait {
            Some(interrupted) => metadata.wait_for_lock(inode, kind, lock, interrupted).await,
            None => self.lock_at_once(inode, request.fh, kind, lock).await,
        };
        let made = match made {
            Ok(answered) => {
                let seen = async {
                    // What it had before must not be lost to a signal.
                    if let AnsweredBy::Master { event_seq } = answered {
                        self.forget_what_changed(inode, event_seq, wait.filter(|_| !before)).await?;
                    }
                    self.check_read(inode, request.fh).await
                };
                seen.await.map_err(|error| {
                    metadata.give_up_lock(inode, kind, &lock, before);
                    if before { ClientError::LocksLost { inode } } else { error }
                })
            }
            Err(error) => Err(error),
        };
        if let Some(asked) = asked {
            asked.answered(made.is_ok(), |unlock| self.unlock_soon(inode, unlock));
        }
        made
    }

    /// Who has a file locked sees what others have written to it. A handle whose file the kernel reads by itself does
    /// not, when that has got other blocks since it was opened.
    async fn check_read(&self, inode: u64, handle: u64) -> Result<(), ClientError> {
        let Some(handle) = self.files.handles.get(handle) else { return Ok(()) };
        let Some((block, _)) = &handle.how.block else { return Ok(()) };
        if handle.file.reads_current(block).await? {
            return Ok(());
        }
        let reason = format!("inode {inode} has other blocks than when it was opened: open it again to lock it");
        Err(ClientError::Refused { errno: Errno::IO.raw_os_error(), reason })
    }

    async fn lock_at_once(
        &self,
        inode: u64,
        handle: u64,
        kind: LockKind,
        lock: Lock,
    ) -> Result<AnsweredBy, ClientError> {
        let (mut look, deadline) = (self.locks.descriptions.look(), Instant::now() + RELEASE_LAG);
        loop {
            match self.client.metadata().set_lock(inode, kind, lock).await {
                Err(ClientError::Refused { errno, .. })
                    if errno == Errno::AGAIN.raw_os_error() && look.is_outdated(inode, handle, deadline).await => {}
                made => return made,
            }
        }
    }

    fn unlock_soon(&self, inode: u64, Unlock { owner, bytes }: Unlock) {
        self.client.metadata().unlock_closed_soon(inode, LockKind::Posix, owner, bytes);
    }

    /// What was written under a lock is committed before it ends, so that the next to have it sees that.
    async fn unlock(&self, inode: u64, request: &LockRequest, lock: Lock) -> Result<(), ClientError> {
        let committed = match self.files.handles.get(request.fh).filter(|handle| handle.file.is_dirty()) {
            Some(handle) => self.flush_file(&handle.file).await,
            None => Ok(()),
        };
        self.client.metadata().set_lock(inode, kind_of(request), lock).await?;
        if !request.is_flock {
            self.locks.descriptions.unlocked(inode, request.owner, (lock.start, lock.end));
        }
        committed
    }

    /// What others changed before they unlocked a file must be out of all caches, the kernel's included, before
    /// somebody here has it locked. The kernel forgets at once, unless it is reading what it is to forget. That is
    /// waited for until `interrupted`, or for as long as the master would be.
    async fn forget_what_changed(
        &self,
        inode: u64,
        event_seq: u64,
        interrupted: Option<&CancellationToken>,
    ) -> Result<(), ClientError> {
        let forgotten = async {
            self.client.metadata().wait_applied(event_seq).await;
            self.invalidations.forgotten(inode).await;
        };
        let given_up = async {
            match interrupted {
                Some(interrupted) => interrupted.cancelled().await,
                None => tokio::time::sleep(self.client.master().timeout()).await,
            }
        };
        let errno = if interrupted.is_some() { Errno::INTR } else { Errno::AGAIN };
        tokio::select! {
            biased;
            () = forgotten => Ok(()),
            () = given_up => {
                let reason = "a lock was given up before the kernel had forgotten what others changed".to_owned();
                Err(ClientError::Refused { errno: errno.raw_os_error(), reason })
            }
        }
    }

    fn lock_object(self: &Arc<Self>, inode: u64, request: &LockRequest, lock: &Lock, wait: bool, reply: Reply) {
        let (owner, kind) = (lock.owner, lock.r#type());
        if !request.is_flock {
            return if kind == LockType::Exclusive { reply.error(libc::EBADF) } else { reply.done() };
        }
        if self.locks.objects.try_lock(inode, owner, kind) {
            return reply.done();
        }
        let this = Arc::clone(self);
        reply.run_until_interrupted(move |reply, interrupted| async move {
            let lag =
                async { if wait { interrupted.cancelled().await } else { tokio::time::sleep(RELEASE_LAG).await } };
            tokio::select! {
                biased;
                () = this.locks.objects.lock(inode, owner, kind) => reply.done(),
                () = lag => reply.error(if wait { libc::EINTR } else { libc::EAGAIN }),
            }
        });
    }

    /// FLUSH: whether the process that closes a descriptor may have locks of fcntl(2) on the inode, which end with
    /// that.
    pub(super) fn ends_locks(&self, inode: u64, fh: u64, lock_owner: u64) -> bool {
        self.locks.descriptions.flushed(inode, fh, lock_owner);
        self.mount_journal.forget_locks_of(inode, lock_owner);
        self.client.metadata().may_have_locked(inode, LockKind::Posix, lock_owner)
    }

    pub(super) async fn unlock_closed(&self, inode: u64, lock_owner: u64) {
        self.client.metadata().unlock_closed(inode, LockKind::Posix, lock_owner).await;
    }

    /// A lock that somebody had when the process before died, of the session that had it.
    pub(super) fn restore_lock(&self, record: &LockRecord, session: u64, has_cluster_locks: bool) {
        let LockRecord { inode, handle, owner, is_flock, .. } = *record;
        self.files.passthrough.note_locked(inode);
        let descriptions = &self.locks.descriptions;
        if is_flock {
            descriptions.ask_flock(inode, handle);
        }
        if !has_cluster_locks {
            let kind = LockType::try_from(record.kind).unwrap_or(LockType::Shared);
            self.locks.objects.try_lock(inode, owner, kind);
            return;
        }
        let kind = if is_flock { LockKind::Flock } else { LockKind::Posix };
        self.client.metadata().restore_lock(inode, kind, owner, session);
        if !is_flock {
            // Whichever bytes: the description is gone with all of them.
            descriptions.ask(inode, handle, owner, (0, LOCK_TO_END)).answered(true, |_| {});
        }
    }

    /// RELEASE: an open file description is gone, and with it what it had locked.
    pub(super) fn ending(self: &Arc<Self>, kernel_node: u64, handle: u64) -> ReleasedLocks {
        let inode = self.root.to_namespace(kernel_node);
        let has_flock = self.locks.descriptions.closing(handle);
        ReleasedLocks { inner: Arc::clone(self), inode, handle, has_flock }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_told_as_the_kernel_has_them() {
        let asked = FileLock { start: 5, end: 9, kind: libc::F_WRLCK.cast_unsigned(), pid: 7 };
        let request = LockRequest { fh: 1, owner: 2, lock: asked, is_flock: false };
        let lock = wanted(&request).unwrap();
        assert_eq!((lock.start, lock.end, lock.pid, lock.owner, lock.r#type()), (5, 9, 7, 2, LockType::Exclusive));
        assert_eq!(found(Some(&lock), FileLock::default()), asked);
        assert_eq!(found(None, asked), FileLock { kind: libc::F_UNLCK.cast_unsigned(), ..asked });
        let whole = wanted(&LockRequest { is_flock: true, ..request }).unwrap();
        assert_eq!((whole.start, whole.end, whole.owner), (0, LOCK_TO_END, 1));
        assert!(wanted(&LockRequest { lock: FileLock { kind: 9, ..asked }, ..request }).is_none());
    }
}

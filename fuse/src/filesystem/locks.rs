//! GETLK, SETLK and SETLKW, and what a FLUSH or a RELEASE unlocks.
//!
//! Locks of files of fs-mode mounts are the master's. Those of objects, which only change as a whole and never by us, stay on
//! this host: flock(2) excludes the processes of this mount from each other, and the shared locks of fcntl(2), which are
//! the only ones that a file that cannot be written has, are in nobody's way.
//!
//! A process loses its fcntl(2) locks of a file when it closes any descriptor of it: FLUSH waits for that. An open file
//! description loses its locks when it is released, of which the kernel tells without waiting.
//!
//! Locks order what hosts do: what was written under one is committed before it ends, and who gets the next has heard of it.

mod local;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{ClientError, InvalidationSink, LOCK_TO_END};
use cavern_proto::master::{Lock, LockKind, LockType};
use parking_lot::Mutex;

use super::Inner;
use crate::kernel::abi::FileLock;
use crate::kernel::{LockRequest, Reply};
use local::LocalFlocks;

/// For so long an object that seems to be locked is tried again: the RELEASE of a descriptor that was closed before may be read
/// by another event loop after the request.
const RELEASE_LAG: Duration = Duration::from_millis(20);

/// The kernel is waited for so long: it forgets at once, unless it is reading what it is to forget.
const CATCH_UP: Duration = Duration::from_secs(1);

/// Who has locked something.
#[derive(Default)]
pub struct HandleLocks {
    objects: LocalFlocks,
    /// Owners of fcntl(2) locks by the handle by which they got them: open file descriptions are such owners, too, and only
    /// their RELEASE tells of their end.
    owners: Mutex<HashMap<u64, Vec<u64>>>,
}

impl HandleLocks {
    fn locking(&self, fh: u64, owner: u64) {
        let mut owners = self.owners.lock();
        let known = owners.entry(fh).or_default();
        if !known.contains(&owner) {
            known.push(owner);
        }
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
    let (start, end) = if request.is_flock { (0, LOCK_TO_END) } else { (start, end) };
    Some(Lock { session: 0, owner: request.owner, pid, r#type: r#type.into(), start, end })
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
            if !node.is_fs_mode() {
                return reply.lock(found(None, request.lock));
            }
            let (this, inode) = (Arc::clone(this), node.inode);
            reply.defer(move |reply| async move {
                match this.client.metadata().find_lock(inode, kind_of(&request), lock).await {
                    Ok(lock) => reply.lock(found(lock.as_ref(), request.lock)),
                    Err(error) => this.failures.answer(reply, "getlk", &error),
                }
            });
        });
    }

    pub(super) fn setlk(self: &Arc<Self>, kernel_node: u64, request: LockRequest, wait: bool, reply: Reply) {
        let Some(lock) = wanted(&request) else { return reply.error(libc::EINVAL) };
        self.with_node(kernel_node, "lock", reply, move |this, node, reply| {
            let inode = node.inode;
            if !node.is_fs_mode() {
                return this.lock_object(inode, &request, &lock, wait, reply);
            }
            if !request.is_flock {
                this.locks.locking(request.fh, request.owner);
            }
            let (this, kind) = (Arc::clone(this), kind_of(&request));
            reply.carry_out_until_interrupted(move |reply, interrupted| async move {
                let metadata = this.client.metadata();
                let made = match lock.r#type() {
                    LockType::Unlocked => this.unlock(request.fh, inode, kind, lock).await,
                    _ if wait => metadata.wait_for_lock(inode, kind, lock, &interrupted).await,
                    _ => metadata.set_lock(inode, kind, lock).await,
                };
                if made.is_ok() && lock.r#type() != LockType::Unlocked {
                    this.forget_what_changed().await;
                }
                this.answer_lock(made, reply);
            });
        });
    }

    /// What was written under a lock is committed before it ends, so that the next to have it sees that.
    async fn unlock(&self, fh: u64, inode: u64, kind: LockKind, lock: Lock) -> Result<(), ClientError> {
        let committed = match self.content_of(fh).filter(|content| !content.is_committed()) {
            Some(content) => self.commit(&content).await,
            None => Ok(()),
        };
        self.client.metadata().set_lock(inode, kind, lock).await?;
        committed
    }

    /// What others changed before they unlocked a file must be out of the kernel's caches before somebody here has it locked.
    async fn forget_what_changed(&self) {
        if tokio::time::timeout(CATCH_UP, self.invalidations.barrier()).await.is_err() {
            tracing::warn!("a lock was got before the kernel had forgotten what others changed");
        }
    }

    fn answer_lock(&self, made: Result<(), ClientError>, reply: Reply) {
        match made {
            Ok(()) => reply.done(),
            Err(error) => self.failures.answer(reply, "lock", &error),
        }
    }

    fn lock_object(self: &Arc<Self>, inode: u64, request: &LockRequest, lock: &Lock, wait: bool, reply: Reply) {
        let (owner, kind) = (request.owner, lock.r#type());
        if !request.is_flock {
            return if kind == LockType::Exclusive { reply.error(libc::EBADF) } else { reply.done() };
        }
        if self.locks.objects.try_lock(inode, owner, kind) {
            return reply.done();
        }
        let this = Arc::clone(self);
        reply.carry_out_until_interrupted(move |reply, interrupted| async move {
            let lag =
                async { if wait { interrupted.cancelled().await } else { tokio::time::sleep(RELEASE_LAG).await } };
            tokio::select! {
                biased;
                () = this.locks.objects.lock(inode, owner, kind) => reply.done(),
                () = lag => reply.error(if wait { libc::EINTR } else { libc::EAGAIN }),
            }
        });
    }

    /// Whether the owner may have locks of fcntl(2) on an inode of the namespace, which end with the close of any descriptor.
    pub(super) fn may_have_locked(&self, inode: u64, lock_owner: u64) -> bool {
        self.client.metadata().may_have_locked(inode, LockKind::Posix, lock_owner)
    }

    pub(super) async fn unlock_closed(&self, inode: u64, lock_owner: u64) {
        self.client.metadata().unlock_closed(inode, LockKind::Posix, lock_owner).await;
    }

    /// An open file description is gone, and with it what it had locked.
    pub(super) fn released(&self, kernel_node: u64, fh: u64, flock_owner: Option<u64>) {
        let inode = self.root.to_namespace(kernel_node);
        if let Some(owner) = flock_owner {
            self.locks.objects.unlock(inode, owner);
            self.client.metadata().unlock_closed_soon(inode, LockKind::Flock, owner);
        }
        let owners = self.locks.owners.lock().remove(&fh).unwrap_or_default();
        for owner in owners {
            self.client.metadata().unlock_closed_soon(inode, LockKind::Posix, owner);
        }
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
        assert_eq!((whole.start, whole.end), (0, LOCK_TO_END));
        assert!(wanted(&LockRequest { lock: FileLock { kind: 9, ..asked }, ..request }).is_none());
    }
}

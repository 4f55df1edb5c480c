//! flock(2) of objects: locks of whole files among the processes of one mount.

use std::collections::HashMap;

use cavern_proto::master::LockType;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// By inode: who has locked it. Bounded by the open files of the host.
#[derive(Default)]
pub struct LocalFlocks {
    files: Mutex<HashMap<u64, Vec<(u64, LockType)>>>,
    freed: Notify,
}

impl LocalFlocks {
    /// Locks or unlocks a file, unless somebody is in the way. What the owner had stays if it is of that kind, and is
    /// gone otherwise, in any case.
    pub fn try_lock(&self, inode: u64, owner: u64, kind: LockType) -> bool {
        let had = |held: &Vec<(u64, LockType)>| held.contains(&(owner, kind));
        if self.files.lock().get(&inode).is_some_and(had) {
            return true;
        }
        self.unlock(inode, owner);
        if kind == LockType::Unlocked {
            return true;
        }
        let mut files = self.files.lock();
        let held = files.entry(inode).or_default();
        let is_free = match kind {
            LockType::Exclusive => held.is_empty(),
            _ => held.iter().all(|(_, held)| *held != LockType::Exclusive),
        };
        if is_free {
            held.push((owner, kind));
        }
        is_free
    }

    /// Locks a file as soon as nobody is in the way.
    pub async fn lock(&self, inode: u64, owner: u64, kind: LockType) {
        loop {
            // From before the look, so that no unlock in between is missed.
            let freed = self.freed.notified();
            if self.try_lock(inode, owner, kind) {
                return;
            }
            freed.await;
        }
    }

    pub fn unlock(&self, inode: u64, owner: u64) {
        let mut files = self.files.lock();
        let Some(held) = files.get_mut(&inode) else { return };
        let before = held.len();
        held.retain(|(known, _)| *known != owner);
        let is_freed = held.len() != before;
        if held.is_empty() {
            files.remove(&inode);
        }
        drop(files);
        if is_freed {
            self.freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn shared_locks_exclude_exclusive_ones_until_they_are_gone() {
        let flocks = LocalFlocks::default();
        assert!(flocks.try_lock(1, 10, LockType::Shared) && flocks.try_lock(1, 11, LockType::Shared));
        assert!(!flocks.try_lock(1, 12, LockType::Exclusive) && flocks.try_lock(2, 12, LockType::Exclusive));
        assert!(flocks.try_lock(1, 10, LockType::Shared) && flocks.try_lock(2, 12, LockType::Exclusive));
        assert_eq!(flocks.files.lock()[&1].len(), 2);
        // One that wants more gives up what it has.
        assert!(!flocks.try_lock(1, 10, LockType::Exclusive));
        let waiting = async {
            flocks.lock(1, 12, LockType::Exclusive).await;
            assert!(!flocks.try_lock(1, 10, LockType::Shared));
        };
        let unlocking = async { flocks.unlock(1, 11) };
        let both = async { tokio::join!(waiting, unlocking) };
        tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
        assert!(flocks.try_lock(1, 12, LockType::Unlocked) && flocks.try_lock(2, 12, LockType::Unlocked));
        assert!(flocks.files.lock().is_empty());
    }
}

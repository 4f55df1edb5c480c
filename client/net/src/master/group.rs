//! Which masters there are: the one that leads says so when others have joined or left, and is told that it is known.
//! Who knows all of them finds a leader when those of the configuration are gone.

use std::sync::atomic::Ordering;

use cavern_proto::raft::GetGroupRequest;
use tokio::time::timeout;

use super::members::MASTERS_MAX;
use super::{Inner, MasterChannel};

impl MasterChannel {
    /// The masters are those of this epoch, as the leader says; 0 where it says nothing. `masters` is where they are,
    /// as long as the leader has not been told that this is known.
    pub fn note_group(&self, epoch: u64, masters: &[String]) {
        let inner = &self.inner;
        for master in masters.iter().take(MASTERS_MAX) {
            // One that is no address is written down there.
            let _known = inner.masters.learn(master);
        }
        if epoch == 0 || inner.group_epoch.swap(epoch, Ordering::Relaxed) == epoch || inner.stop.is_cancelled() {
            return;
        }
        if masters.is_empty() {
            // A leader of an earlier version must be asked.
            let inner = inner.clone();
            self.inner.tasks.spawn(async move { inner.learn_group(epoch).await });
        }
    }

    /// Of which the masters are known, for the leader.
    pub fn group_epoch(&self) -> u64 {
        self.inner.group_epoch.load(Ordering::Relaxed)
    }
}

impl Inner {
    async fn learn_group(&self, epoch: u64) {
        let mut stubs = self.masters.preferred();
        let asked = timeout(self.timeout, stubs.raft.get_group(GetGroupRequest {}));
        let Some(answer) = self.stop.run_until_cancelled(asked).await else { return };
        match answer {
            Ok(Ok(group)) => {
                let members = group.into_inner().members;
                for member in members.iter().filter(|member| !member.address.is_empty()) {
                    // One that is no address is written down there.
                    let _known = self.masters.learn(&member.address);
                }
            }
            _ => {
                // The next sign of life asks again.
                let _newer = self.group_epoch.compare_exchange(epoch, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }
}

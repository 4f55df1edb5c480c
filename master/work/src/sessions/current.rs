//! Whom the state machine notifies of changes: the sessions of the term, while there is one. On every master the last
//! changes are remembered, for sessions that go on when it comes to lead, and the directories delegated to sessions.

use std::sync::Arc;

use cavern_consensus::ChangeListener;
use cavern_state::{Changes, StateError, Tables};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use super::delegations::DirectoryDelegations;
use super::event_access::VisibleMounts;
use super::recent::RecentChanges;
use super::watch::WatchHub;

/// The sessions that the state machine notifies.
#[derive(Default)]
pub struct CurrentSessions {
    current: Mutex<Current>,
    delegations: Arc<DirectoryDelegations>,
    pub(super) visible: VisibleMounts,
}

#[derive(Default)]
struct Current {
    recent: RecentChanges,
    hub: Option<Arc<WatchHub>>,
}

impl CurrentSessions {
    /// From now on these sessions are notified; the changes before are those that the masters remember.
    pub fn set(&self, hub: Option<Arc<WatchHub>>) {
        let mut current = self.current.lock();
        self.delegations.forget_claims();
        if let Some(hub) = &hub {
            hub.begin_after(current.recent.last());
        }
        current.hub = hub;
    }

    /// What is remembered, which stays as it is as long as this is there.
    pub(super) fn remembered(&self) -> MappedMutexGuard<'_, RecentChanges> {
        MutexGuard::map(self.current.lock(), |current| &mut current.recent)
    }

    /// The directories delegated to sessions.
    pub fn delegations(&self) -> Arc<DirectoryDelegations> {
        self.delegations.clone()
    }
}

impl ChangeListener for CurrentSessions {
    fn begin_with(&self, tables: Tables<'_>) -> Result<(), StateError> {
        self.delegations.replace(tables.all_delegations()?);
        self.visible.replace(tables.mounts()?);
        Ok(())
    }

    fn will_delegate(&self, changes: &Changes) {
        if !changes.delegations.is_empty() {
            self.delegations.grant(&changes.delegations);
        }
    }

    fn changed(&self, changes: Changes) -> u64 {
        let held = if changes.delegations.is_empty() { Vec::new() } else { changes.delegations.clone() };
        let rules = changes.rules.clone();
        let number = {
            let mut current = self.current.lock();
            if !rules.is_empty() {
                // Whom the changes before might be told is not known any more: whoever missed some forgets everything.
                current.recent.clear();
                self.visible.change(&rules);
            }
            current.recent.add(&changes);
            let number = current.hub.as_ref().map_or(0, |hub| hub.changed(changes));
            if !rules.is_empty() {
                self.visible.have_changed(&rules);
            }
            number
        };
        // Whoever waits for that reads what the sessions have been told of.
        if !held.is_empty() {
            self.delegations.give_back(&held);
        }
        number
    }

    fn replaced(&self) {
        let mut current = self.current.lock();
        current.recent.clear();
        if let Some(hub) = &current.hub {
            hub.replaced();
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::mutation::Change;
    use cavern_proto::master::{CreateInode, Kind as InodeKind, Mount, Mutation, WriteType};
    use cavern_proto::record::command::Command as Kind;
    use cavern_proto::record::{AttachMount, Command, InitCluster, Mutate};
    use cavern_state::{Database, Outcome, Transaction, apply};

    use super::*;

    #[test]
    fn what_sessions_hold_in_the_state_is_known_from_its_begin() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let run = |kind| {
            let mut transaction = Transaction::new(&database).unwrap();
            let outcome = apply(&mut transaction, Command { command: Some(kind) }).unwrap();
            database.write(transaction.finish().unwrap().0.into_batch(&database)).unwrap();
            outcome
        };
        run(Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let write_type = WriteType::FsMode as i32;
        let mount = Mount { path: "/m".into(), uri: "memory://m".into(), write_type, ..Mount::default() };
        let Outcome::Mount(mount) = run(Kind::AttachMount(AttachMount { mount: Some(mount), mounts_epoch: 0 })) else {
            panic!("no mount")
        };
        let (parent, kind) = (mount.root_inode, InodeKind::Directory as i32);
        let create = CreateInode { parent, name: "d".into(), kind, delegate: true, ..CreateInode::default() };
        let mutation = Some(Mutation { seq: 1, change: Some(Change::Create(create)), ..Mutation::default() });
        let made = run(Kind::Mutate(Mutate { session: 7, mutation, ..Mutate::default() }));
        let Outcome::Mutated(made, _) = made else { panic!("{made:?}") };
        assert!(made.delegated, "{made:?}");

        let sessions = CurrentSessions::default();
        assert!(sessions.delegations().is_empty());
        sessions.begin_with(Tables::new(&database)).unwrap();
        assert_eq!(sessions.delegations().holder(made.inode), Some(7));
    }
}

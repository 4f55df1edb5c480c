//! Whom mounts are there for, by the state of every master: a session is told of no name in a mount that is not there
//! for its client.

use std::collections::HashMap;

use cavern_proto::ClientAccess;
use cavern_proto::master::{ClientRule, Mount};
use cavern_security::Identity;
use cavern_state::RulesChange;
use parking_lot::RwLock;

/// Mounts that are not there for all clients. Those that have gone stay in it: sessions are told of that later.
#[derive(Default)]
pub(super) struct VisibleMounts(RwLock<HashMap<u32, Rules>>);

/// The rules of a mount; while a change of them is told, those of before, too.
struct Rules {
    now: Mount,
    before: Option<Mount>,
}

impl VisibleMounts {
    /// These are all mounts.
    pub(super) fn replace(&self, mounts: Vec<Mount>) {
        let restricted = mounts.into_iter().filter(Mount::is_restricted);
        let rules = restricted.map(|mount| (mount.id, Rules { now: with_rules(mount.clients), before: None }));
        *self.0.write() = rules.collect();
    }

    /// Rules are about to change: until [`Self::have_changed`] mounts are there for whoever is let by either.
    pub(super) fn change(&self, rules: &[RulesChange]) {
        let mut mounts = self.0.write();
        for RulesChange { mount_id, before, now } in rules {
            let (now, before) = (with_rules(now.clone()), before.clone().map(with_rules));
            mounts.insert(*mount_id, Rules { now, before });
        }
    }

    pub(super) fn have_changed(&self, rules: &[RulesChange]) {
        let mut mounts = self.0.write();
        for RulesChange { mount_id, .. } in rules {
            if let Some(rules) = mounts.get_mut(mount_id) {
                rules.before = None;
                if !rules.now.is_restricted() {
                    mounts.remove(mount_id);
                }
            }
        }
    }

    /// Whether a mount is there for whoever has opened a session.
    pub(super) fn may_see(&self, mount_id: u32, owner: Option<&Identity>) -> bool {
        self.lets(mount_id, owner, ClientAccess::can_see)
    }

    /// Whether whoever has opened a session may change a mount.
    pub(super) fn may_change(&self, mount_id: u32, owner: Option<&Identity>) -> bool {
        self.lets(mount_id, owner, |access| access == ClientAccess::Full)
    }

    /// Whether a mount whose rules change was there for whoever has opened a session, and is not any more.
    pub(super) fn is_hidden_from(&self, mount_id: u32, owner: Option<&Identity>) -> bool {
        let Some(client) = owner.and_then(Identity::client_name) else { return false };
        self.0.read().get(&mount_id).is_some_and(|Rules { now, before }| {
            let sees = |mount: &Mount| mount.access_of(client).can_see();
            before.as_ref().is_some_and(sees) && !sees(now)
        })
    }

    fn lets(&self, mount_id: u32, owner: Option<&Identity>, is_enough: impl Fn(ClientAccess) -> bool) -> bool {
        let Some(client) = owner.and_then(Identity::client_name) else { return true };
        self.0.read().get(&mount_id).is_none_or(|Rules { now, before }| {
            let lets = |mount: &Mount| is_enough(mount.access_of(client));
            lets(now) || before.as_ref().is_some_and(lets)
        })
    }
}

/// A mount of which only that counts.
fn with_rules(clients: Vec<ClientRule>) -> Mount {
    Mount { clients, ..Mount::default() }
}

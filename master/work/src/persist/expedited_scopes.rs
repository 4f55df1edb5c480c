//! Who waits for which parts of the namespace: until it says that it does not wait any more, or, where it asks again
//! and again how far it is, until it has not asked for [`ASKS_WITHIN`].

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use super::scope::Scope;

/// Much longer than commands pause before they ask again.
const ASKS_WITHIN: Duration = Duration::from_secs(10);
/// While so many wait, nothing is begun for further ones who only ask.
const WAITING_MAX: usize = 100;

/// What somebody waits for.
pub(super) struct ExpeditedScope {
    pub scope: Scope,
    /// Number of the last change.
    pub up_to: u64,
    pub since: Instant,
}

/// All that are waited for.
pub(super) struct ExpeditedScopes {
    waiting: Mutex<Vec<Waiting>>,
    /// Changes when one begins.
    pub begun: watch::Sender<()>,
}

struct Waiting {
    request: Arc<ExpeditedScope>,
    /// When it ends, unless somebody asks once more; `None` for whoever says when.
    until: Option<Instant>,
}

impl Waiting {
    fn is_asked_for(&self, scope: &Scope, up_to: u64) -> bool {
        self.until.is_some() && self.request.scope == *scope && self.request.up_to == up_to
    }
}

impl Default for ExpeditedScopes {
    fn default() -> Self {
        Self { waiting: Mutex::default(), begun: watch::Sender::new(()) }
    }
}

impl ExpeditedScopes {
    /// Somebody waits for this until it is removed.
    pub(super) fn add(&self, scope: Scope, up_to: u64) -> Arc<ExpeditedScope> {
        let request = Arc::new(ExpeditedScope { scope, up_to, since: Instant::now() });
        self.waiting.lock().push(Waiting { request: request.clone(), until: None });
        self.begun.send_replace(());
        request
    }

    pub(super) fn remove(&self, request: &Arc<ExpeditedScope>) {
        self.waiting.lock().retain(|waiting| !Arc::ptr_eq(&waiting.request, request));
    }

    /// Somebody asks how far this is, and will ask again until nothing is left.
    pub(super) fn ask(&self, scope: &Scope, up_to: u64, now: Instant) {
        let (mut waiting, until) = (self.at(now), Some(now + ASKS_WITHIN));
        if let Some(known) = waiting.iter_mut().find(|waiting| waiting.is_asked_for(scope, up_to)) {
            known.until = until;
        } else if waiting.len() < WAITING_MAX {
            let request = Arc::new(ExpeditedScope { scope: scope.clone(), up_to, since: now });
            waiting.push(Waiting { request, until });
            drop(waiting);
            self.begun.send_replace(());
        }
    }

    /// Nothing is left of what somebody has asked for.
    pub(super) fn answer(&self, scope: &Scope, up_to: u64) {
        self.waiting.lock().retain(|waiting| !waiting.is_asked_for(scope, up_to));
    }

    /// All, in the order in which they began to wait.
    pub(super) fn list(&self) -> Vec<Arc<ExpeditedScope>> {
        self.at(Instant::now()).iter().map(|waiting| waiting.request.clone()).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at(Instant::now()).is_empty()
    }

    /// Those who wait now.
    fn at(&self, now: Instant) -> MutexGuard<'_, Vec<Waiting>> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|waiting| waiting.until.is_none_or(|until| now < until));
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(inode: u64) -> Scope {
        Scope { inode, mount_id: 1 }
    }

    #[test]
    fn who_asks_again_and_again_waits_until_nothing_is_left_or_it_has_stopped_asking() {
        let (scopes, now) = (ExpeditedScopes::default(), Instant::now());
        let inodes =
            |now: Instant| scopes.at(now).iter().map(|waiting| waiting.request.scope.inode).collect::<Vec<_>>();
        scopes.ask(&scope(1), 5, now);
        scopes.ask(&scope(2), 5, now);
        let later = now + ASKS_WITHIN / 2;
        scopes.ask(&scope(1), 5, later);
        assert_eq!(inodes(later), [1, 2], "it is the same who asks once more");
        assert_eq!(scopes.list()[0].since, now);
        let kept = scopes.add(scope(1), 5);
        assert_eq!(inodes(now + ASKS_WITHIN), [1, 1], "the second has not asked since");
        scopes.answer(&scope(1), 4);
        assert_eq!(inodes(later), [1, 1], "other changes were asked for");
        scopes.answer(&scope(1), 5);
        assert_eq!(inodes(later + ASKS_WITHIN), [1], "one says itself when it has waited");
        scopes.remove(&kept);
        assert!(scopes.is_empty());
    }

    #[test]
    fn not_everybody_who_asks_is_remembered() {
        let (scopes, now) = (ExpeditedScopes::default(), Instant::now());
        for inode in 0..2 * WAITING_MAX as u64 {
            scopes.ask(&scope(inode), 5, now);
        }
        assert_eq!(scopes.list().len(), WAITING_MAX);
        let _kept = scopes.add(scope(1), 5);
        assert_eq!(scopes.list().len(), WAITING_MAX + 1);
    }
}

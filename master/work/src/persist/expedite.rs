//! Parts of the namespace that somebody waits for: their changes are brought to the bucket without the usual delay, and
//! what has failed before is tried again at once.
//!
//! A request is of the changes up to a number, and ends with the wait ([`expedited_scopes`](super::expedited_scopes)).
//! It is kept nowhere but here: whoever waits keeps what it waits for.

use std::sync::Arc;

use cavern_proto::master::PersistStatus;
use cavern_state::{PendingDeletion, Tables};
use tokio::time::Instant;

use super::backlog::{Backlog, ChangeRange};
use super::expedited_scopes::ExpeditedScope;
use super::intents::{self, DueIntent};
use super::retry_tracker::Priority;
use super::scope::{Scope, ScopeFilter};
use super::{PAGE, Persistence};
use crate::error::WorkError;

/// Somebody waits until this is dropped.
pub struct Expedited {
    persistence: Arc<Persistence>,
    request: Arc<ExpeditedScope>,
}

impl Drop for Expedited {
    fn drop(&mut self) {
        self.persistence.expedited.remove(&self.request);
    }
}

impl Expedited {
    /// What is left of it.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] when the mount is gone.
    pub async fn left(&self) -> Result<Backlog, WorkError> {
        let ExpeditedScope { scope, up_to, since } = &*self.request;
        let span = ChangeRange { up_to: *up_to, expedited_since: Some(*since) };
        let (left, _) = self.persistence.measure(scope.clone(), span).await?;
        let mount_id = scope.mount_id;
        let read = self.persistence.lookups.reader.read(move |tables| Ok(tables.mount(mount_id)?.is_none()));
        if mount_id != 0 && read.await? {
            return Err(WorkError::NotFound("the mount is gone, and what its bucket lacked was given up".into()));
        }
        Ok(left)
    }
}

impl Persistence {
    /// Brings the changes of a scope up to a number to the bucket now, until what is answered is dropped.
    pub fn expedite(self: &Arc<Self>, scope: Scope, up_to: u64) -> Expedited {
        Expedited { persistence: self.clone(), request: self.expedited.add(scope, up_to) }
    }

    /// As [`Self::status`], for whoever asks again and again until nothing is left: that is brought to the bucket now.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a path that leads nowhere.
    pub async fn awaited_status(self: &Arc<Self>, path: &str, up_to: u64) -> Result<PersistStatus, WorkError> {
        let scope = self.scope(path).await?;
        self.expedited.ask(&scope, up_to, Instant::now());
        let status = self.status_of(scope.clone(), up_to).await?;
        if status.files + status.deletions == 0 {
            self.expedited.answer(&scope, up_to);
        }
        Ok(status)
    }

    /// What the bucket of a scope lacks now, and the number of the last change.
    pub async fn backlog(self: &Arc<Self>, scope: Scope) -> Result<(Backlog, u64), WorkError> {
        self.measure(scope, ChangeRange::ALL).await
    }

    /// The intents that follow, and how soon each is to be worked off.
    pub(super) async fn prioritized_intents(self: &Arc<Self>, after: u64) -> Result<Vec<DueIntent>, WorkError> {
        let (expedited, rest) = (self.expedited.list(), self.rest_of_closed());
        let persistence = self.clone();
        let read = self.lookups.reader.read(move |tables| {
            let mut paces = Priorities::new(&expedited);
            let intents = tables.intents(after, PAGE)?.into_iter();
            let paced = intents.map(|(inode, intent)| {
                let priority = paces.of(intent.first_change, |within| within.has(tables, inode, &intent))?;
                // Of those that have just changed, and of those that have not for long, it does not count.
                let at_rest = intents::age(persistence.lookups.reader.clock(), intent.changed_ns);
                let may_be_due = priority == Priority::Normal && at_rest >= rest && at_rest < persistence.delay;
                let is_changing = persistence.changing.contains(inode);
                let is_unfinished = (may_be_due || is_changing) && intents::is_unfinished(tables, inode)?;
                let is_closed = is_changing && !is_unfinished;
                Ok(DueIntent { inode, intent, priority, at_rest, is_unfinished, is_closed })
            });
            paced.collect()
        });
        read.await
    }

    /// The deletions that follow, and how soon each is to be carried out.
    pub(super) async fn prioritized_deletions(
        &self,
        after: Option<(u32, String)>,
    ) -> Result<Vec<(PendingDeletion, Priority)>, WorkError> {
        let (expedited, mounts) = (self.expedited.list(), self.lookups.mounts.clone());
        let read = self.lookups.reader.read(move |tables: Tables<'_>| {
            let mut paces = Priorities::new(&expedited);
            let after = after.as_ref().map(|(mount, key)| (*mount, key.as_str()));
            let paced = tables.deletions(after, PAGE)?.into_iter().map(|deletion| {
                let prefix = || mounts.prefix(deletion.mount_id);
                let pace =
                    paces.of(deletion.record.first_change, |within| within.has_key(tables, &deletion, prefix))?;
                Ok((deletion, pace))
            });
            paced.collect()
        });
        read.await
    }
}

/// Looks up who waits for what.
struct Priorities<'h>(Vec<(&'h ExpeditedScope, ScopeFilter<'h>)>);

impl<'h> Priorities<'h> {
    fn new(expedited: &'h [Arc<ExpeditedScope>]) -> Self {
        Self(expedited.iter().map(|request| (&**request, ScopeFilter::new(&request.scope))).collect())
    }

    /// That of the last who began to wait, if anybody does.
    fn of(
        &mut self,
        first_change: u64,
        mut is_in: impl FnMut(&mut ScopeFilter<'h>) -> Result<bool, WorkError>,
    ) -> Result<Priority, WorkError> {
        for (request, within) in self.0.iter_mut().rev() {
            if first_change <= request.up_to && is_in(within)? {
                return Ok(Priority::Expedited(request.since));
            }
        }
        Ok(Priority::Normal)
    }
}

//! Parts of the namespace that somebody waits for: their changes are brought to the bucket without the usual delay, and
//! what has failed before is tried again at once.
//!
//! A hurry is of the changes up to a number, and ends with the wait. Nothing of it is kept: whoever waits keeps what it
//! waits for.

use std::sync::Arc;
use std::time::Instant;

use cavern_proto::record::IntentRecord;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::ledger::Pace;
use super::scope::{Scope, Within};
use super::status::{Backlog, Span};
use super::{PAGE, Persistence};
use crate::MasterError;
use crate::state::{Doomed, Tables};

/// What somebody waits for.
pub(super) struct Hurry {
    scope: Scope,
    /// Number of the last change.
    up_to: u64,
    since: Instant,
}

/// All that are waited for.
pub(super) struct Hurries {
    list: Mutex<Vec<Arc<Hurry>>>,
    /// Changes when one begins.
    begun: watch::Sender<()>,
}

impl Default for Hurries {
    fn default() -> Self {
        Self { list: Mutex::default(), begun: watch::Sender::new(()) }
    }
}

/// Somebody waits until this is dropped.
pub struct Hurried {
    persistence: Arc<Persistence>,
    hurry: Arc<Hurry>,
}

impl Drop for Hurried {
    fn drop(&mut self) {
        self.persistence.hurries.list.lock().retain(|hurry| !Arc::ptr_eq(hurry, &self.hurry));
    }
}

impl Hurried {
    /// What is left of it.
    ///
    /// # Errors
    /// [`MasterError::NotFound`] when the mount is gone.
    pub async fn left(&self) -> Result<Backlog, MasterError> {
        let Hurry { scope, up_to, since } = &*self.hurry;
        let span = Span { up_to: *up_to, hurried_since: Some(*since) };
        let (left, _) = self.persistence.measure(scope.clone(), span).await?;
        let mount_id = scope.mount_id;
        let read = self.persistence.lookups.listings.read(move |tables| Ok(tables.mount(mount_id)?.is_none()));
        if mount_id != 0 && read.await? {
            return Err(MasterError::NotFound("the mount is gone, and what its bucket lacked was given up".into()));
        }
        Ok(left)
    }
}

impl Hurries {
    /// Those of now.
    pub(super) fn current(&self) -> Vec<Arc<Hurry>> {
        self.list.lock().clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().is_empty()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.begun.subscribe()
    }
}

impl Persistence {
    /// Brings the changes of a scope up to a number to the bucket now, until what is answered is dropped.
    pub fn hurry(self: &Arc<Self>, scope: Scope, up_to: u64) -> Hurried {
        let hurry = Arc::new(Hurry { scope, up_to, since: Instant::now() });
        self.hurries.list.lock().push(hurry.clone());
        self.hurries.begun.send_replace(());
        Hurried { persistence: self.clone(), hurry }
    }

    /// What the bucket of a scope lacks now, and the number of the last change.
    pub async fn backlog(self: &Arc<Self>, scope: Scope) -> Result<(Backlog, u64), MasterError> {
        self.measure(scope, Span::ALL).await
    }

    /// The intents that follow, and how soon each is to be worked off.
    pub(super) async fn paced_intents(&self, after: u64) -> Result<Vec<(u64, IntentRecord, Pace)>, MasterError> {
        let hurries = self.hurries.current();
        let read = self.lookups.listings.read(move |tables| {
            let mut paces = Paces::new(&hurries);
            let intents = tables.intents(after, PAGE)?.into_iter();
            let paced = intents.map(|(inode, intent)| {
                let pace = paces.of(intent.first_change, |within| within.has(tables, inode, &intent))?;
                Ok((inode, intent, pace))
            });
            paced.collect()
        });
        read.await
    }

    /// The deletions that follow, and how soon each is to be carried out.
    pub(super) async fn paced_deletions(
        &self,
        after: Option<(u32, String)>,
    ) -> Result<Vec<(Doomed, Pace)>, MasterError> {
        let (hurries, mounts) = (self.hurries.current(), self.lookups.mounts.clone());
        let read = self.lookups.listings.read(move |tables: Tables<'_>| {
            let mut paces = Paces::new(&hurries);
            let after = after.as_ref().map(|(mount, key)| (*mount, key.as_str()));
            let paced = tables.deletions(after, PAGE)?.into_iter().map(|doomed| {
                let prefix = || mounts.prefix(doomed.mount_id);
                let pace = paces.of(doomed.record.first_change, |within| within.has_key(tables, &doomed, prefix))?;
                Ok((doomed, pace))
            });
            paced.collect()
        });
        read.await
    }
}

/// Looks up who waits for what.
struct Paces<'h>(Vec<(&'h Hurry, Within<'h>)>);

impl<'h> Paces<'h> {
    fn new(hurries: &'h [Arc<Hurry>]) -> Self {
        Self(hurries.iter().map(|hurry| (&**hurry, Within::new(&hurry.scope))).collect())
    }

    /// That of the last who began to wait, if anybody does.
    fn of(
        &mut self,
        first_change: u64,
        mut is_in: impl FnMut(&mut Within<'h>) -> Result<bool, MasterError>,
    ) -> Result<Pace, MasterError> {
        for (hurry, within) in self.0.iter_mut().rev() {
            if first_change <= hurry.up_to && is_in(within)? {
                return Ok(Pace::Hurried(hurry.since));
            }
        }
        Ok(Pace::Usual)
    }
}

//! Views: what is below a directory of a mount as it was at one moment, frozen in one object of a bucket ([decision
//! 45](../../../docs/decisions/0045-views.md)).
//!
//! - [`create`](self::create): the steps from a request to a view that is shown; [`import`](self::import): a view that
//!   was exported, of whichever cluster.
//! - [`tree`](self::tree): what is frozen, read from one snapshot of the tables, in the order in which images are
//!   written. [`image`](self::image): image, table and manifest, as they are read, in a file without a name.
//! - [`object`](self::object): that file in its bucket, and its end there.
//! - [`locate`](self::locate): where blocks are that views have.
//!
//! One view is made at a time, by whoever has the turn. What was begun and is not under way, since its master ended or
//! the log did not answer, is taken away before the next one begins, and in the background. A view goes in this order:
//! its record, so that nothing can finish it any more, and the blocks that only it had; and its object, with the upload
//! that this was to come of, for as long as it takes, by whichever master leads then.

mod create;
mod image;
mod import;
mod locate;
mod object;
#[cfg(test)]
mod tests;
mod tree;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::Proposer;
use cavern_proto::master::{GetViewRequest, View, ViewProgress, ViewState};
use cavern_proto::record::RemoveView;
use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::background::{BackgroundTask, Next, Pace, TaskGroup, TaskList};
use crate::error::WorkError;
use crate::metrics::ViewMetrics;
use crate::namespace::Lookups;
use crate::repair::Repair;

/// How often it is looked for what was left unfinished, and the gauges are set.
const PERIOD: Duration = Duration::from_secs(5);
/// Bytes of the name of a view.
const NAME_MAX: usize = 64;

/// Makes views, and takes them away. Cheap to clone.
#[derive(Clone)]
pub struct ViewMaker {
    lookups: Lookups,
    proposer: Proposer,
    repair: Arc<Repair>,
    /// Of temporary files.
    directory: Arc<Path>,
    cluster_id: Arc<str>,
    metrics: ViewMetrics,
    /// One permit: for whoever makes a view, or takes away what is unfinished.
    turn: Arc<Semaphore>,
    tasks: Arc<TaskGroup>,
}

impl ViewMaker {
    /// What is made has its temporary files in `directory`, which need not exist.
    pub fn new(
        lookups: Lookups,
        proposer: Proposer,
        repair: Arc<Repair>,
        directory: &Path,
        cluster_id: Arc<str>,
        metrics: ViewMetrics,
    ) -> Self {
        let (turn, tasks) = (Arc::new(Semaphore::new(1)), Arc::default());
        Self { lookups, proposer, repair, directory: directory.into(), cluster_id, metrics, turn, tasks }
    }

    /// Begins to look for what was left unfinished: at once, and from time to time.
    pub fn start(&self, list: &TaskList) {
        let task = BackgroundTask::new("views", Pace::every(PERIOD));
        list.start(&self.tasks, task, self.clone(), |views| views.look().boxed());
    }

    /// Stops what is under way: the next master takes away what was begun.
    pub async fn shutdown(&self) {
        self.tasks.shutdown().await;
    }

    async fn look(&self) -> Result<Next, WorkError> {
        if let Ok(_turn) = self.turn.try_acquire() {
            self.take_unfinished_away().await?;
        }
        let read = self.lookups.reader.read(|tables| {
            let (views, counters) = (tables.views()?.len(), tables.counters()?);
            Ok((views, counters.kept, tables.gone_views()?))
        });
        let (views, kept, gone) = read.await?;
        self.metrics.views.set(views as i64);
        self.metrics.kept_blocks.set(i64::try_from(kept).unwrap_or(i64::MAX));
        self.delete_objects(gone).await?;
        Ok(Next::Rest)
    }

    /// The views that are shown, by name.
    pub async fn all(&self) -> Result<Vec<View>, WorkError> {
        let mut views = self.lookups.reader.read(|tables| Ok(tables.views()?)).await?;
        views.retain(|view| view.state() == ViewState::Ready);
        views.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(views)
    }

    /// The view of a name; of an id, where there is no name.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] also for one that is being made.
    pub async fn find(&self, wanted: &GetViewRequest) -> Result<View, WorkError> {
        let GetViewRequest { name, id } = wanted.clone();
        let found = self.lookups.reader.read(move |tables| {
            // Clients ask by the id for each block of a view that they look for.
            Ok(match name.is_empty() {
                true => tables.view(id)?,
                false => tables.views()?.into_iter().find(|view| view.name == name),
            })
        });
        found.await?.filter(|view| view.state() == ViewState::Ready).ok_or_else(|| unknown(wanted))
    }

    /// Takes a view away. Where its object cannot be deleted now, that is done later, also by another master.
    pub async fn delete(&self, name: String) -> Result<View, WorkError> {
        let view = self.find(&GetViewRequest { name, id: 0 }).await?;
        let views = self.clone();
        self.tasks.to_the_end(async move { views.take_away(view.id).await }).await
    }

    async fn turn(&self) -> Result<SemaphorePermit<'_>, WorkError> {
        self.turn.acquire().await.map_err(|_closed| WorkError::stopping())
    }

    /// The view that there is under a name, if it is the one that is wanted. For whoever has the turn.
    ///
    /// # Errors
    /// [`WorkError::AlreadyExists`] for another one.
    async fn known(&self, name: &str, is_wanted: impl Fn(&View) -> bool) -> Result<Option<View>, WorkError> {
        self.take_unfinished_away().await?;
        match self.all().await?.into_iter().find(|view| view.name == name) {
            Some(view) if !is_wanted(&view) => Err(WorkError::AlreadyExists(format!(
                "the view {name} is there already, of {}: choose another name, or delete that one (cv view delete \
                 {name})",
                view.path
            ))),
            known => Ok(known),
        }
    }

    /// Takes away what was begun and is not under way. For whoever has the turn.
    async fn take_unfinished_away(&self) -> Result<(), WorkError> {
        let views = self.lookups.reader.read(|tables| Ok(tables.views()?)).await?;
        for view in views.iter().filter(|view| view.state() != ViewState::Ready) {
            tracing::info!(view = view.name, "a view that was not finished is taken away");
            WorkError::if_found(self.take_away(view.id).await)?;
        }
        Ok(())
    }

    async fn take_away(&self, id: u32) -> Result<View, WorkError> {
        let removal = RemoveView { id, deleted: false };
        let removed = *self.proposer.propose(removal).await?.map_err(WorkError::NotFound)?;
        self.repair.views_removed();
        if let Err(error) = self.delete_object(&removed).await {
            let (name, key) = (&removed.name, &removed.key);
            tracing::warn!(view = name, "\"{key}\" of a view that is gone is left in its bucket for now: {error}");
        }
        Ok(removed)
    }
}

/// What is answered about a view that is not there.
pub fn unknown(wanted: &GetViewRequest) -> WorkError {
    WorkError::NotFound(match wanted.name.is_empty() {
        true => format!("there is no view of the id {}", wanted.id),
        false => format!("there is no view {}: cv view list names those that there are", wanted.name),
    })
}

/// Names are parts of paths, and of what a shell takes for one word.
fn check_view_name(name: &str) -> Result<(), WorkError> {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=NAME_MAX).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_known) {
        return Ok(());
    }
    let shown: String = name.chars().take(NAME_MAX).collect();
    Err(WorkError::Invalid(format!(
        "{shown:?} is no name of a view: 1 to {NAME_MAX} letters, digits, ., _ and -, of which the first is no dot"
    )))
}

/// How far the making of a view has come.
type MakingProgress = Mutex<ViewProgress>;

//! The tasks of persistence.

use std::sync::Arc;

use cavern_conf::backoff::{Jitter, Profile};
use futures::FutureExt as _;

use super::{PAUSES, Persistence, REST, drop_clean_blocks, garbage_collection, status};
use crate::background::{BackgroundTask, Pace, TaskList};

impl Persistence {
    /// Begins to work.
    pub fn start(self: &Arc<Self>, list: &TaskList) {
        let expedited = || Pace::after(PAUSES.1).woken_by(self.expedited.begun.subscribe());
        let persist = BackgroundTask::new("persist-files", expedited()).steady();
        list.start(&self.tasks, persist, self.clone(), |persistence| persistence.persist_due().boxed());
        let delete = BackgroundTask::new("delete-objects", expedited()).steady();
        list.start(&self.tasks, delete, self.clone(), |persistence| persistence.delete_due().boxed());
        let free = BackgroundTask::new("free-blocks", Pace::after(garbage_collection::PAUSE));
        let nobody_away = garbage_collection::Away::new();
        list.start(&self.tasks, free, (self.clone(), nobody_away), |(persistence, away)| {
            persistence.free_garbage(away).boxed()
        });
        let (pause, settle) = (drop_clean_blocks::PAUSE, drop_clean_blocks::SETTLE);
        let room =
            BackgroundTask::new("make-room", Pace::after(pause)).with_backoff(Profile::steady(settle, Jitter::None));
        list.start(&self.tasks, room, (self.clone(), 0u64), |(persistence, after)| {
            persistence.make_room(after).boxed()
        });
        let measure = BackgroundTask::new("measure-backlog", Pace::after_at_least(status::MEASURE, REST));
        list.start(&self.tasks, measure, self.clone(), |persistence| persistence.show_backlog().boxed());
    }
}

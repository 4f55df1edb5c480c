//! Which versions a bucket keeps of objects that were replaced or deleted, as far as that was asked for: what a view
//! has frozen is read by its ETag, also where the bucket has another object under the key by now, or none.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::UfsError;

/// Ids that are remembered, at most; half of them are those of late.
const KNOWN_MAX: usize = 4096;
/// For how long a store that lists no versions is not asked again.
const ABSENT_FOR: Duration = Duration::from_secs(600);

/// Whether a GET is for the object that is there now, or for a version that the bucket keeps, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VersionScope {
    Current,
    Kept,
}

/// What is known of one store.
#[derive(Debug, Default)]
pub(crate) struct KeptVersions(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Ids, by ETag and key: those that were asked for since the others were put aside.
    recent: HashMap<String, Arc<str>>,
    older: HashMap<String, Arc<str>>,
    /// Until when the store counts as one that lists no versions.
    absent_until: Option<Instant>,
    /// The log has told of that.
    is_told: bool,
}

impl State {
    fn insert(&mut self, name: String, id: Arc<str>) {
        if self.recent.len() >= KNOWN_MAX / 2 {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(name, id);
    }
}

/// No ETag has a line end.
fn name_of(key: &str, etag: &str) -> String {
    format!("{etag}\n{key}")
}

impl KeptVersions {
    /// The id of a version that is not the current one.
    pub(crate) fn known(&self, key: &str, etag: &str) -> Option<Arc<str>> {
        let mut state = self.0.lock();
        if state.recent.is_empty() && state.older.is_empty() {
            return None;
        }
        let name = name_of(key, etag);
        if let Some(id) = state.recent.get(&name) {
            return Some(id.clone());
        }
        let id = state.older.remove(&name)?;
        state.insert(name, id.clone());
        Some(id)
    }

    pub(crate) fn found(&self, key: &str, etag: &str, id: String) -> Arc<str> {
        let id: Arc<str> = id.into();
        self.0.lock().insert(name_of(key, etag), id.clone());
        id
    }

    /// The version is not there any more.
    pub(crate) fn gone(&self, key: &str, etag: &str) {
        let (mut state, name) = (self.0.lock(), name_of(key, etag));
        state.recent.remove(&name);
        state.older.remove(&name);
    }

    pub(crate) fn are_absent(&self) -> bool {
        self.0.lock().absent_until.is_some_and(|until| Instant::now() < until)
    }

    /// The store lists no versions, or not to whoever asks.
    pub(crate) fn are_refused(&self, cause: &UfsError) {
        let is_told = {
            let mut state = self.0.lock();
            state.absent_until = Some(Instant::now() + ABSENT_FOR);
            std::mem::replace(&mut state.is_told, true)
        };
        if !is_told {
            tracing::warn!(
                "versions of objects cannot be looked for, so views have only what this bucket still has: {cause}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Operation, Request};

    #[test]
    fn the_versions_of_late_are_known() {
        let versions = KeptVersions::default();
        assert_eq!(versions.known("k", "e"), None);
        for number in 0..10 * KNOWN_MAX {
            versions.found(&format!("k{number}"), "e", number.to_string());
            assert_eq!(versions.known("k0", "e").as_deref(), Some("0"), "{number}: it is asked for again and again");
        }
        assert_eq!((versions.known("k0", "other"), versions.known("k1", "e")), (None, None));
        let state = versions.0.lock();
        assert!(state.recent.len() + state.older.len() <= KNOWN_MAX);
        drop(state);
        versions.gone("k0", "e");
        assert_eq!(versions.known("k0", "e"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_without_versions_is_asked_again_after_a_while() {
        let versions = KeptVersions::default();
        assert!(!versions.are_absent());
        let request = Request::new(Operation::List, &"s3://b".into(), "k");
        versions.are_refused(&UfsError::Rejected { request, reason: "it cannot".to_owned() });
        assert!(versions.are_absent());
        tokio::time::advance(ABSENT_FOR).await;
        assert!(!versions.are_absent());
    }
}

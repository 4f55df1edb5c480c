//! One listing of one directory, on its way, and those who wait for it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use bytes::Bytes;
use cavern_state::namespace::ListingCounts;
use cavern_ufs::first_open_name;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::WorkError;

/// Names that may be checked while one listing runs.
const CHECKS_MAX: usize = 65_536;

/// How far a listing has come.
#[derive(Clone, Debug)]
pub enum Progress {
    /// Names before this one are in the namespace as the bucket has listed them; `None` before the first page.
    Running {
        known_before: Option<Bytes>,
    },
    /// The store has turned out to list in no order, and the listing has begun anew: before any name there may be more.
    Disordered,
    Ended(Result<ListingCounts, Arc<WorkError>>),
}

/// A listing of one directory.
pub struct Flight {
    /// When it was asked for.
    pub created: Instant,
    /// When its first LIST was sent, on the master's clock; 0 before that.
    began_ns: AtomicI64,
    /// Something of it may be in the namespace.
    has_applied: AtomicBool,
    progress: watch::Sender<Progress>,
    /// Held while a difference is found and proposed.
    pub step: tokio::sync::Mutex<()>,
    /// Names that were checked one by one since it began, and when they were asked about.
    checks: Mutex<HashMap<Bytes, i64>>,
}

impl Flight {
    pub(super) fn new() -> Self {
        Self {
            created: Instant::now(),
            began_ns: AtomicI64::new(0),
            has_applied: AtomicBool::new(false),
            progress: watch::Sender::new(Progress::Running { known_before: None }),
            step: tokio::sync::Mutex::new(()),
            checks: Mutex::default(),
        }
    }

    /// Notes the time of the first LIST.
    pub fn begin(&self, now_ns: i64) {
        self.progress.send_modify(|progress| {
            if let Progress::Running { known_before: Some(before) } = progress {
                *before = Bytes::new();
            }
        });
        self.began_ns.store(now_ns, Ordering::Release);
    }

    /// When its first LIST was sent, on the master's clock; 0 before that.
    pub fn began_ns(&self) -> i64 {
        self.began_ns.load(Ordering::Acquire)
    }

    /// Notes that something of it goes into the namespace.
    pub fn applies(&self) {
        self.has_applied.store(true, Ordering::Release);
    }

    pub fn has_applied(&self) -> bool {
        self.has_applied.load(Ordering::Acquire)
    }

    /// Whether it began after `asked_ns`, or has not begun yet.
    pub fn begins_after(&self, asked_ns: i64) -> bool {
        let began = self.began_ns.load(Ordering::Acquire);
        began == 0 || began > asked_ns
    }

    /// Notes that a name was asked about at `asked_ns`; false when that is older than this listing, whose word then
    /// counts. To be called with `step` held.
    pub fn record_check(&self, name: &Bytes, asked_ns: i64) -> Result<bool, WorkError> {
        let began = self.began_ns.load(Ordering::Acquire);
        if began != 0 && began > asked_ns {
            return Ok(false);
        }
        let mut checks = self.checks.lock();
        if checks.len() >= CHECKS_MAX {
            return Err(WorkError::Overloaded(
                "too many names are looked up in a directory that is being listed".into(),
            ));
        }
        let latest = checks.entry(name.clone()).or_insert(asked_ns);
        if *latest > asked_ns {
            return Ok(false);
        }
        *latest = asked_ns;
        Ok(true)
    }

    /// The names of which more is known than this listing can say.
    pub fn checked_names(&self) -> HashSet<Bytes> {
        let began = self.began_ns.load(Ordering::Acquire);
        self.checks.lock().iter().filter(|(_, asked)| **asked >= began).map(|(name, _)| name.clone()).collect()
    }

    /// All that stands up to a place is in the namespace, and more may follow; `absent` is the first name there that
    /// the bucket has not listed. Gives the first name that may follow, if that was the first one before, and readers
    /// could go on behind it.
    pub async fn advance(&self, place: &[u8], absent: Option<&[u8]>) -> Option<Bytes> {
        // What the bucket says of a name that is checked is in the namespace by then.
        let _step = self.step.lock().await;
        let checked = self.checked_names();
        let open = first_open_name(place, |name| checked.contains(name));
        let known = absent.map_or(open, |absent| absent.min(open));
        let mut still_open = None;
        self.progress.send_modify(|progress| {
            let Progress::Running { known_before } = progress else { return };
            match &mut *known_before {
                Some(before) if *before == known => {
                    let is_behind = known == open && open.len() < place.len();
                    still_open = is_behind.then(|| before.clone());
                }
                known_before => *known_before = Some(Bytes::copy_from_slice(known)),
            }
        });
        still_open
    }

    /// The store lists in no order: nothing is known by what has been listed before now.
    pub fn disordered(&self) {
        self.progress.send_replace(Progress::Disordered);
    }

    pub fn end(&self, result: Result<ListingCounts, WorkError>) {
        self.progress.send_replace(Progress::Ended(result.map_err(Arc::new)));
    }

    /// Waits for the end.
    pub async fn ended(&self) -> Result<ListingCounts, WorkError> {
        match self.wait(|progress| matches!(progress, Progress::Ended(_))).await {
            Progress::Ended(result) => Ok(result?),
            Progress::Running { .. } | Progress::Disordered => Err(WorkError::stopping()),
        }
    }

    /// Waits for the first page or the end, whichever comes first.
    pub async fn first_page(&self) -> Progress {
        self.wait(|progress| !matches!(progress, Progress::Running { known_before: None })).await
    }

    /// Waits until it is as far as is wanted. It is at its end at some time.
    pub async fn wait(&self, is_enough: impl FnMut(&Progress) -> bool) -> Progress {
        let mut progress = self.progress.subscribe();
        // The sender lives in `self`, so the channel cannot be closed.
        match progress.wait_for(is_enough).await {
            Ok(progress) => progress.clone(),
            Err(_) => Progress::Running { known_before: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn known_before(flight: &Flight) -> Option<Bytes> {
        match flight.first_page().await {
            Progress::Running { known_before } => known_before,
            progress => panic!("{progress:?}"),
        }
    }

    #[tokio::test]
    async fn a_name_that_may_still_come_is_asked_about_once() {
        let flight = Flight::new();
        flight.begin(1);
        let img = Bytes::from_static(b"img");
        assert_eq!(flight.advance(b"img-1", None).await, None);
        assert_eq!(flight.advance(b"img-2", None).await, Some(img.clone()));
        assert_eq!(known_before(&flight).await, Some(img.clone()));
        assert!(flight.record_check(&img, 2).unwrap());
        // However many pages have nothing: where the listing is, more may come, whatever the bucket says of that name.
        for _ in 0..3 {
            assert_eq!(flight.advance(b"img-2", None).await, None);
            assert_eq!(known_before(&flight).await, Some(Bytes::from_static(b"img-2")));
        }
    }

    #[tokio::test]
    async fn readers_wait_before_what_the_bucket_has_not_listed() {
        let flight = Flight::new();
        flight.begin(1);
        for place in [&b"c"[..], b"d"] {
            assert_eq!(flight.advance(place, Some(b"a-1")).await, None);
            assert_eq!(known_before(&flight).await, Some(Bytes::from_static(b"a-1")));
        }
        flight.disordered();
        assert_eq!(flight.advance(b"e", None).await, None);
        assert!(matches!(flight.first_page().await, Progress::Disordered));
    }
}

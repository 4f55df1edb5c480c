//! Why a name is checked, and checks of one name that run at the same time: what was asked later wins.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::MutexGuard;

/// Why a name is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckReason {
    /// Whatever is there now is to be known.
    Unknown,
    /// A client has just changed the bucket under it: an object that is found need not be compared with what lies below
    /// it.
    Written,
    /// A client has just changed all that is below the name: what is known of a directory does not hold any more.
    WrittenBelow,
}

/// The names that are being checked.
#[derive(Default)]
pub struct NameChecks {
    names: Mutex<HashMap<(u64, Bytes), Name>>,
}

#[derive(Default)]
struct Name {
    /// Number of the latest check.
    latest: u64,
    running: usize,
    /// Number of the latest check whose answer the namespace has.
    recorded: Arc<tokio::sync::Mutex<u64>>,
}

/// One check, from before its question to after its answer.
pub struct Check<'a> {
    checks: &'a NameChecks,
    name: (u64, Bytes),
    number: u64,
    recorded: Arc<tokio::sync::Mutex<u64>>,
}

/// Held while an answer is put into the namespace.
pub struct RecordPermit<'a> {
    number: u64,
    recorded: MutexGuard<'a, u64>,
}

impl NameChecks {
    /// The bucket is about to be asked.
    pub fn begin(&self, directory: u64, name: &Bytes) -> Check<'_> {
        let key = (directory, name.clone());
        let mut names = self.names.lock();
        let name = names.entry(key.clone()).or_default();
        name.latest += 1;
        name.running += 1;
        Check { checks: self, name: key, number: name.latest, recorded: name.recorded.clone() }
    }
}

impl Check<'_> {
    /// Waits until no other answer is being recorded. `None` when the namespace has the answer to a later question.
    pub async fn turn(&self) -> Option<RecordPermit<'_>> {
        let recorded = self.recorded.lock().await;
        (*recorded < self.number).then_some(RecordPermit { number: self.number, recorded })
    }
}

impl RecordPermit<'_> {
    /// The namespace has the answer.
    pub fn done(mut self) {
        *self.recorded = self.number;
    }
}

impl Drop for Check<'_> {
    fn drop(&mut self) {
        let mut names = self.checks.names.lock();
        if let Some(name) = names.get_mut(&self.name) {
            name.running -= 1;
            if name.running == 0 {
                names.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_earlier_question_does_not_undo_the_answer_to_a_later_one() {
        let (checks, name) = (NameChecks::default(), Bytes::from_static(b"name"));
        let earlier = checks.begin(1, &name);
        let later = checks.begin(1, &name);
        let latest = checks.begin(1, &name);
        later.turn().await.unwrap().done();
        assert!(earlier.turn().await.is_none());
        // What failed to be recorded counts for nothing.
        drop(latest.turn().await.unwrap());
        assert!(latest.turn().await.is_some() && later.turn().await.is_none());
        assert!(checks.begin(2, &name).turn().await.is_some());
        drop((earlier, later, latest));
        assert!(checks.names.lock().is_empty());
    }
}

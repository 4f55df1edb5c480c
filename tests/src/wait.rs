//! Waiting for a state, and bounding what must not take long.

use std::thread;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);

/// Asks until `state` answers something, and answers that; panics, naming `what`, when it has not within `patience`.
#[track_caller]
pub fn eventually<T>(what: &str, patience: Duration, state: impl FnMut() -> Option<T>) -> T {
    let Some(value) = poll(patience, state) else { panic!("not within {patience:?}: {what}") };
    value
}

/// As [`eventually`]; the panic says what `explain` has found by then, too.
#[track_caller]
pub fn eventually_or<T>(
    what: &str,
    patience: Duration,
    state: impl FnMut() -> Option<T>,
    explain: impl FnOnce() -> String,
) -> T {
    let Some(value) = poll(patience, state) else { panic!("not within {patience:?}: {what}\n{}", explain()) };
    value
}

fn poll<T>(patience: Duration, mut state: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
    loop {
        let value = state();
        if value.is_some() || Instant::now() >= deadline {
            return value;
        }
        thread::sleep(POLL);
    }
}

/// Runs `work` on a thread of its own; panics, naming `what`, when it takes longer than `limit`. The thread is left
/// behind then: it may be held by the very system call that the test is about.
#[track_caller]
pub fn within<T: Send + 'static>(what: &str, limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    thread::spawn(move || {
        // Nobody listens any more when it took too long.
        let _ = sender.send(work());
    });
    match receiver.recv_timeout(limit) {
        Ok(value) => value,
        Err(_) => panic!("not within {limit:?} (or it panicked): {what}"),
    }
}

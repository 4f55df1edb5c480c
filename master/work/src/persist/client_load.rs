//! How much clients change at the moment. While that is much, what nobody waits for makes way: writing a file to its
//! bucket costs the master and the workers about as much as making it did.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Changes of a window from which on clients are busy: 200 a second.
const MANY: u64 = 100;
const WINDOW: Duration = Duration::from_millis(500);

/// Counts changes of clients.
pub(super) struct ClientLoad(Mutex<Windows>);

/// The window that has begun, and the one before.
struct Windows {
    begun: Instant,
    count: u64,
    before: u64,
}

impl Default for ClientLoad {
    fn default() -> Self {
        Self(Mutex::new(Windows { begun: Instant::now(), count: 0, before: 0 }))
    }
}

impl ClientLoad {
    pub(super) fn add(&self, changes: usize) {
        self.0.lock().at(Instant::now()).count += changes as u64;
    }

    pub(super) fn is_high(&self) -> bool {
        self.0.lock().at(Instant::now()).is_high()
    }
}

impl Windows {
    fn at(&mut self, now: Instant) -> &mut Self {
        let windows = now.saturating_duration_since(self.begun).as_nanos() / WINDOW.as_nanos();
        if windows > 0 {
            self.before = if windows == 1 { self.count } else { 0 };
            (self.begun, self.count) = (now, 0);
        }
        self
    }

    fn is_high(&self) -> bool {
        self.count.max(self.before) >= MANY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_is_high_until_a_window_has_passed_with_few_changes() {
        let begun = Instant::now();
        let mut windows = Windows { begun, count: 0, before: 0 };
        let mut is_high = |windows_later: f64, changes: u64| {
            let now = windows.at(begun + WINDOW.mul_f64(windows_later));
            now.count += changes;
            now.is_high()
        };
        assert!(!is_high(0.1, MANY - 1));
        assert!(is_high(0.9, 1));
        assert!(is_high(1.5, 1), "as in the window before");
        assert!(!is_high(2.6, 1));
        assert!(is_high(2.7, MANY));
        assert!(!is_high(9.0, 0), "many windows have passed");
    }
}

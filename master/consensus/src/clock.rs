//! Time as the master writes it down.
//!
//! What is written down decides things: whether a listing began after another, whether a change has been left alone for
//! long enough, whether a file's time to live is over. The host's clock can be set while the master runs, and between
//! two of its runs. So the master has its own:
//!
//! - **It never runs backwards**, over restarts neither: the log records how far it has come ([`Clock::witness`]).
//!   While the host's clock is behind, it goes on at seven eighths of its pace, until the host's has caught up: delays
//!   become a little longer, and nothing stands still.
//! - **A step forward is no time that has passed.** It follows the host's clock, but remembers what it gained at once,
//!   and [`Clock::age_ns`] leaves that out. Time while the host sleeps does count, and so does all time between two
//!   runs, which nothing but the host's clock measures.

use cavern_conf::host;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// The host's clock may gain so much at once without that being called a step: it is slewed, and read at some distance.
const STEP_NS: i64 = 10_000_000_000;
/// While the host's clock is behind, one part of so many is left out of the time that passes.
const SLOWER_BY: i64 = 8;
/// Steps that are remembered one by one. Beyond it the oldest ones count together, as if all had been made at the time
/// of the last of them: so what is older seems younger than it is.
const STEPS: usize = 32;

/// What the host says.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Nanoseconds since the Unix epoch.
    pub wall_ns: i64,
    /// Nanoseconds since the host was started, those included in which it slept. Nobody can set it.
    pub uptime_ns: i64,
}

impl Reading {
    /// That of now.
    pub fn now() -> Self {
        Self { wall_ns: host::wall_ns(), uptime_ns: i64::try_from(host::uptime().as_nanos()).unwrap_or(i64::MAX) }
    }
}

/// A clock that never runs backwards.
pub struct Clock {
    read: Box<dyn Fn() -> Reading + Send + Sync>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last_ns: i64,
    /// When that was read; not yet, if it is from the log.
    uptime_ns: Option<i64>,
    /// Times at which the host's clock was set forward, the oldest first, and what it gained.
    steps: VecDeque<(i64, i64)>,
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(Reading::now)
    }
}

impl Clock {
    /// A clock that asks somebody for the host's time.
    pub fn new(read: impl Fn() -> Reading + Send + Sync + 'static) -> Self {
        Self { read: Box::new(read), state: Mutex::default() }
    }

    /// The log has seen this time: what is given out from now on is later.
    pub fn witness(&self, ns: i64) {
        let mut state = self.state.lock();
        state.last_ns = state.last_ns.max(ns);
    }

    /// Nanoseconds since the Unix epoch: later than every number given out before, and than those of the log.
    pub fn now_ns(&self) -> i64 {
        let reading = (self.read)();
        self.state.lock().go_on(reading)
    }

    /// Nanoseconds that have passed since a time that this clock, or that of an earlier master, has given out. Negative
    /// for a time that none has given out yet.
    pub fn age_ns(&self, since_ns: i64) -> i64 {
        let reading = (self.read)();
        let mut state = self.state.lock();
        let age = state.go_on(reading).saturating_sub(since_ns);
        let gained = state.steps.iter().filter(|(at, _)| *at >= since_ns);
        let gained = gained.fold(0i64, |sum, (_, gained)| sum.saturating_add(*gained));
        if age < 0 { age } else { age.saturating_sub(gained).max(0) }
    }
}

impl State {
    fn go_on(&mut self, reading: Reading) -> i64 {
        let passed = self.uptime_ns.map(|uptime| reading.uptime_ns.saturating_sub(uptime).max(0));
        let slowly = passed.map_or(0, |passed| passed - passed / SLOWER_BY).max(1);
        let now = reading.wall_ns.max(self.last_ns.saturating_add(slowly));
        if let Some(passed) = passed {
            let gained = now.saturating_sub(self.last_ns).saturating_sub(passed);
            if gained > STEP_NS {
                self.steps.push_back((self.last_ns, gained));
            }
            if self.steps.len() > STEPS
                && let Some((_, oldest)) = self.steps.pop_front()
                && let Some((_, gained)) = self.steps.front_mut()
            {
                *gained = gained.saturating_add(oldest);
            }
        }
        (self.last_ns, self.uptime_ns) = (now, Some(reading.uptime_ns.max(self.uptime_ns.unwrap_or(0))));
        now
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const SECOND: i64 = 1_000_000_000;
    const HOUR: i64 = 3600 * SECOND;

    /// A clock and what sets the host's: wall and uptime.
    fn clock() -> (Clock, impl Fn(i64, i64)) {
        let reading = Arc::new(Mutex::new((1000 * HOUR, HOUR)));
        let read = reading.clone();
        let clock = Clock::new(move || {
            let (wall_ns, uptime_ns) = *read.lock();
            Reading { wall_ns, uptime_ns }
        });
        let pass = move |wall: i64, uptime: i64| {
            let mut reading = reading.lock();
            *reading = (reading.0 + wall, reading.1 + uptime);
        };
        (clock, pass)
    }

    #[test]
    fn numbers_grow() {
        let (clock, _) = clock();
        assert!(clock.now_ns() < clock.now_ns());
        let host = Clock::default();
        assert!(host.now_ns() < host.now_ns());
    }

    #[test]
    fn a_clock_that_is_set_back_goes_on_more_slowly_until_the_host_has_caught_up() {
        let (clock, pass) = clock();
        let before = clock.now_ns();
        pass(-HOUR, 0);
        assert!(clock.now_ns() > before);
        pass(8 * SECOND, 8 * SECOND);
        assert!((7 * SECOND..8 * SECOND).contains(&clock.age_ns(before)), "{}", clock.age_ns(before));
        pass(9 * HOUR, 9 * HOUR);
        assert_eq!(clock.now_ns(), before + 8 * HOUR + 8 * SECOND, "it is the host's again");
    }

    #[test]
    fn what_the_log_has_seen_is_over() {
        let (clock, pass) = clock();
        let seen = 1001 * HOUR;
        clock.witness(seen);
        assert_eq!(clock.now_ns(), seen + 1);
        pass(SECOND, SECOND);
        assert!(clock.age_ns(seen) >= SECOND / 2, "it does not stand still");
        assert!(clock.age_ns(2000 * HOUR) < 0);
    }

    #[test]
    fn a_step_forward_makes_nothing_older() {
        let (clock, pass) = clock();
        let old = clock.now_ns();
        pass(SECOND + 24 * HOUR, SECOND);
        let new = clock.now_ns();
        // Each look is a nanosecond later than the one before.
        let is_age = |since: i64, seconds: i64| (0..1000).contains(&(clock.age_ns(since) - seconds * SECOND));
        assert_eq!(new - old, SECOND + 24 * HOUR);
        assert!(is_age(old, 1) && is_age(new, 0));
        pass(2 * SECOND, 2 * SECOND);
        assert!(is_age(old, 3) && is_age(new, 2));
        for _ in 0..3 * STEPS {
            pass(HOUR, 0);
            clock.now_ns();
        }
        assert!(is_age(old, 3));
        assert_eq!(clock.state.lock().steps.len(), STEPS);
    }

    #[test]
    fn the_sleep_of_the_host_is_time_that_has_passed() {
        let (clock, pass) = clock();
        let old = clock.now_ns();
        pass(HOUR, HOUR);
        assert_eq!(clock.age_ns(old), HOUR);
    }
}

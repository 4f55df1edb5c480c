//! The clocks of the members, beside that of this host.

use std::time::Duration;

use cavern_conf::{counted, host};

use super::finding::{Check, Finding, Level};
use crate::group::Dial;

/// What nobody notices.
const UNNOTICED_MS: i64 = 2_000;
/// A bucket refuses requests that are signed so far beside its time.
const REFUSED_MS: i64 = 15 * 60_000;
/// A store tells whole seconds, and takes a moment to answer.
const STORE_UNNOTICED_MS: i64 = 5_000;
/// For a worker's heartbeat to come to the leader.
const HEARTBEAT_MS: i64 = 500;
const NANOS_PER_MS: i64 = 1_000_000;
const SET_IT: &str = "set it by NTP: `timedatectl set-ntp true`, chrony or systemd-timesyncd";

/// The clock of a member: how far it is ahead of this host's, and by how much that may be wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Clock {
    who: String,
    ahead_ms: i64,
    error_ms: i64,
}

impl Clock {
    /// That of a master, asked once; `None` where it does not say.
    pub async fn of_master(dial: &Dial, address: &str, who: String) -> Option<Self> {
        let before = host::wall_ns();
        let theirs = dial.ask(address).await.ok()?.wall_ns;
        let half = host::wall_ns().saturating_sub(before) / 2;
        let ahead_ms = theirs.saturating_sub(before.saturating_add(half)) / NANOS_PER_MS;
        (theirs != 0).then_some(Self { who, ahead_ms, error_ms: half / NANOS_PER_MS + 1 })
    }

    /// That of a worker, which this one's master has heard to be so far ahead of its own.
    pub fn of_worker(&self, who: String, ahead_ms: i64) -> Self {
        Self { who, ahead_ms: self.ahead_ms.saturating_add(ahead_ms), error_ms: self.error_ms + HEARTBEAT_MS }
    }

    /// By which it is off in any case.
    fn off_ms(&self) -> i64 {
        self.ahead_ms.saturating_abs().saturating_sub(self.error_ms).max(0)
    }
}

pub fn judge(clocks: &[Clock]) -> Vec<Finding> {
    let off: Vec<&Clock> = clocks.iter().filter(|clock| clock.off_ms() > UNNOTICED_MS).collect();
    if off.is_empty() && !clocks.is_empty() {
        let most = clocks.iter().map(Clock::off_ms).max().unwrap_or_default();
        let members = counted(clocks.len() as u64, "member");
        return vec![Finding::ok(Check::Clock, format!("the clocks of {members} are within {} ms", most + 1))];
    }
    let finding = |clock: &&Clock| {
        let (level, why) = match clock.off_ms() {
            REFUSED_MS.. => (Level::Error, "buckets refuse what it signs, and certificates end early"),
            _ => (
                Level::Warning,
                "times of files, and lives of keys and certificates, are not what others take them for",
            ),
        };
        let what = format!("the clock of {} is {} that of this host", clock.who, distance(clock.ahead_ms));
        Finding::new(level, Check::Clock, what, why, SET_IT)
    };
    off.iter().map(finding).collect()
}

/// `behind_s` is by what this host's clock is behind that of a store.
pub fn judge_store(store: &str, behind_s: i64) -> Finding {
    let behind_ms = behind_s.saturating_mul(1000);
    let level = match behind_ms.saturating_abs() {
        off if off >= REFUSED_MS => Level::Error,
        off if off > STORE_UNNOTICED_MS => Level::Warning,
        _ => return Finding::ok(Check::ClockStore, format!("the clock of this host is that of {store}")),
    };
    let what = format!("the clock of {store} is {} that of this host", distance(behind_ms));
    Finding::new(level, Check::ClockStore, what, "a store refuses requests that are signed 15 minutes beside", SET_IT)
}

fn distance(ahead_ms: i64) -> String {
    let side = if ahead_ms < 0 { "behind" } else { "ahead of" };
    format!("{:.1} s {side}", Duration::from_millis(ahead_ms.unsigned_abs()).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::finding::wrong;
    use super::*;

    fn clock(ahead_ms: i64, error_ms: i64) -> Clock {
        Clock { who: "master 2".to_owned(), ahead_ms, error_ms }
    }

    #[test]
    fn clocks_that_are_off_for_certain_are_named() {
        let told = |clock: Clock| wrong(&judge(&[clock]));
        for (ahead_ms, error_ms) in [(0, 5), (1_900, 0), (-1_900, 0), (3_000, 1_500)] {
            assert_eq!(told(clock(ahead_ms, error_ms)), [], "{ahead_ms}");
        }
        assert_eq!(told(clock(-5_000, 10)), [(Level::Warning, Check::Clock)]);
        assert_eq!(told(clock(REFUSED_MS + 100, 10)), [(Level::Error, Check::Clock)]);
        assert_eq!(told(clock(i64::MIN, 10)), [(Level::Error, Check::Clock)]);
        assert!(judge(&[]).is_empty());
        let what = judge(&[clock(0, 1), clock(-5_000, 10)]).remove(0).what;
        assert_eq!(what, "the clock of master 2 is 5.0 s behind that of this host");
        // A worker is known by its leader.
        let worker = clock(60_000, 3).of_worker("worker 1".to_owned(), -60_000);
        assert_eq!(told(worker), []);
    }

    #[test]
    fn a_clock_beside_that_of_a_store_is_named() {
        let told = |behind_s| wrong(&[judge_store("s3://b", behind_s)]);
        assert_eq!(told(-3), []);
        assert_eq!(told(90), [(Level::Warning, Check::ClockStore)]);
        assert_eq!(told(-3600), [(Level::Error, Check::ClockStore)]);
        assert!(judge_store("s3://b", 90).what.contains("90.0 s ahead of"));
    }
}

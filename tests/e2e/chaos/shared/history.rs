//! What clients wrote to a register and read of it, and whether one register could have answered that.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// No value is written twice; 0 is there from the beginning.
pub struct History {
    begun: Instant,
    calls: Mutex<Vec<Call>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Write,
    Read,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub client: usize,
    pub what: What,
    pub value: u64,
    /// Since the beginning of the history.
    pub begun: Duration,
    /// The end of time where a write may take effect later, or never.
    pub ended: Duration,
}

impl History {
    pub fn new() -> Self {
        let first = Call { client: 0, what: What::Write, value: 0, begun: Duration::ZERO, ended: Duration::ZERO };
        Self { begun: Instant::now(), calls: Mutex::new(vec![first]) }
    }

    pub fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Notes a write that has ended now; `done` is false where it failed, as it might.
    pub fn wrote(&self, client: usize, value: u64, begun: Duration, done: bool) {
        let ended = if done { self.now() } else { Duration::MAX };
        self.calls.lock().unwrap().push(Call { client, what: What::Write, value, begun, ended });
    }

    pub fn read(&self, client: usize, value: u64, begun: Duration) {
        let call = Call { client, what: What::Read, value, begun, ended: self.now() };
        self.calls.lock().unwrap().push(call);
    }

    /// All calls but those that say nothing: what a client reads of its own write that fails later is not there for
    /// others.
    pub fn calls(&self) -> Vec<Call> {
        let calls = self.calls.lock().unwrap();
        let is_doubtful = |read: &Call| {
            let is_write = |call: &&Call| call.what == What::Write && call.value == read.value;
            calls.iter().find(is_write).is_some_and(|w| w.ended == Duration::MAX && w.client == read.client)
        };
        calls.iter().filter(|call| call.what == What::Write || !is_doubtful(call)).cloned().collect()
    }
}

/// What a client found after a later value, or after its own later write; `None` when no client did.
pub fn goes_back(calls: &[Call]) -> Option<String> {
    let write = |of: &Call| calls.iter().find(|call| call.what == What::Write && call.value == of.value);
    for later in calls.iter().filter(|call| call.what == What::Read) {
        let Some(old) = write(later) else { return Some(format!("never written:\n{}", shown(&[later]))) };
        if later.ended < old.begun {
            return Some(format!("read before it was written:\n{}", shown(&[later, old])));
        }
        let before = calls.iter().filter(|call| call.client == later.client && call.ended < later.begun);
        for (before, new) in before.filter_map(|before| Some((before, write(before)?))) {
            if old.ended < new.begun {
                return Some(format!("an older value comes back:\n{}", shown(&[old, new, before, later])));
            }
        }
    }
    None
}

/// How long after a later write of another client had ended a value was still read.
pub fn latest(calls: &[Call]) -> Duration {
    let writes: Vec<&Call> = calls.iter().filter(|call| call.what == What::Write).collect();
    let late = |read: &Call| {
        let write = writes.iter().find(|write| write.value == read.value)?;
        let later = writes.iter().filter(|later| later.begun > write.ended && later.client != read.client);
        later.map(|later| read.begun.saturating_sub(later.ended)).max()
    };
    calls.iter().filter(|call| call.what == What::Read).filter_map(late).max().unwrap_or_default()
}

/// The calls of one value: with all its reads it takes this part of the time, from the end of the first call to the
/// beginning of the last one; none where these overlap.
struct Zone<'a> {
    from: Duration,
    to: Duration,
    calls: Vec<&'a Call>,
}

/// Why no single register, which each call reaches at one moment between its beginning and its end, answers so; `None`
/// where one does. As no value is written twice, the zones of values say it: Gibbons and Korach, "Testing Shared
/// Memories", SIAM Journal on Computing 26 (1997), theorem 4.
pub fn contradiction(calls: &[Call]) -> Option<String> {
    let mut values: BTreeMap<u64, Vec<&Call>> = BTreeMap::new();
    calls.iter().for_each(|call| values.entry(call.value).or_default().push(call));
    let mut zones = Vec::new();
    for (value, calls) in values {
        let Some(write) = calls.iter().find(|call| call.what == What::Write) else {
            return Some(format!("{value} was never written:\n{}", shown(&calls)));
        };
        if calls.iter().any(|call| call.ended < write.begun) {
            return Some(format!("{value} was read before it was written:\n{}", shown(&calls)));
        }
        let from = calls.iter().map(|call| call.ended).min().unwrap();
        let to = calls.iter().map(|call| call.begun).max().unwrap();
        // A write that may have done nothing, and that nobody saw.
        if from < Duration::MAX {
            zones.push(Zone { from, to, calls });
        }
    }
    for (number, one) in zones.iter().enumerate().filter(|(_, zone)| zone.from < zone.to) {
        for (other_number, other) in zones.iter().enumerate() {
            if number != other_number && one.from < other.to && other.from < one.to {
                let (one, other) = (shown(&one.calls), shown(&other.calls));
                return Some(format!("these values would be there at the same time:\n{one}\n and\n{other}"));
            }
        }
    }
    None
}

fn shown(calls: &[&Call]) -> String {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.begun);
    let line = |call: &&Call| {
        let Call { client, what, value, begun, ended } = call;
        format!("  client {client}: {what:?} {value}, {begun:.4?} to {ended:.4?}")
    };
    calls.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call of which the times are milliseconds; one that ends at 0 is doubtful.
    fn call(client: usize, what: What, value: u64, begun: u64, ended: u64) -> Call {
        let ended = if ended == 0 { Duration::MAX } else { Duration::from_millis(ended) };
        Call { client, what, value, begun: Duration::from_millis(begun), ended }
    }

    use What::{Read, Write};

    #[test]
    fn what_one_register_answers_is_no_contradiction() {
        let concurrent = [call(0, Write, 1, 10, 40), call(1, Write, 2, 20, 30), call(1, Read, 1, 50, 60)];
        assert_eq!(contradiction(&concurrent), None);
        let early = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 40), call(1, Read, 2, 15, 20)];
        assert_eq!(contradiction(&early), None);
        let doubtful = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 0), call(1, Read, 1, 50, 60)];
        assert_eq!(contradiction(&doubtful), None);
        let later = [&doubtful[..], &[call(1, Read, 2, 70, 80), call(0, Read, 2, 90, 99)]].concat();
        assert_eq!(contradiction(&later), None);
    }

    #[test]
    fn what_no_register_answers_is_found() {
        let stale = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 20), call(1, Read, 1, 21, 22)];
        assert!(contradiction(&stale).is_some());
        let back =
            [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 90), call(1, Read, 2, 20, 30), call(1, Read, 1, 40, 50)];
        assert!(contradiction(&back).is_some());
        let early = [call(0, Write, 1, 10, 20), call(1, Read, 1, 1, 5)];
        assert!(contradiction(&early).is_some());
        assert!(contradiction(&[call(1, Read, 1, 1, 5)]).is_some());
        let undone = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 0), call(1, Read, 2, 20, 30)];
        assert!(contradiction(&[&undone[..], &[call(1, Read, 1, 40, 50)]].concat()).is_some());
    }

    #[test]
    fn a_client_may_see_late_what_another_one_wrote_and_never_goes_back() {
        let calls = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 20), call(1, Read, 1, 50, 51)];
        assert_eq!(latest(&calls), Duration::from_millis(30));
        assert_eq!(goes_back(&calls), None);
        let own = [call(0, Write, 1, 1, 5), call(0, Write, 2, 10, 20), call(0, Read, 1, 50, 51)];
        assert!(goes_back(&own).is_some());
        let back = [&calls[..], &[call(1, Read, 2, 15, 16)]].concat();
        assert!(goes_back(&back).is_some());
        assert!(goes_back(&[call(0, Write, 1, 10, 20), call(1, Read, 1, 1, 5)]).is_some());
    }
}

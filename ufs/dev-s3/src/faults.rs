//! Faults on demand: rules that delay requests or make them fail on the wire.
//!
//! Every rule that matches a request adds its latency; the first that is due to fail decides how. Which requests fail
//! is not drawn at random: with a rate of 0.25 it is every fourth match, so that a test sees the same faults in each
//! run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::error::DevS3Error;
use crate::operation::{Kind, Operation, Target};

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// Answered with 503 `SlowDown`, nothing is done.
    #[serde(rename = "503")]
    Unavailable,
    /// Answered with 403 `AccessDenied`, nothing is done.
    #[serde(rename = "403")]
    Denied,
    /// Answered with 403 `RequestTimeTooSkewed`, nothing is done.
    #[serde(rename = "RequestTimeTooSkewed")]
    ClockOff,
    /// The connection is reset without an answer, nothing is done.
    Reset,
    /// The request is carried out, but half of the answer's body is sent, under the full Content-Length; then the
    /// connection is closed. An answer without a body is not changed.
    ShortBody,
    /// No answer until the rules are cleared; then the request is carried out.
    Hang,
    /// Refused as by a store that keeps objects in a tree of files, if it would make an object above or below another
    /// one: of `a` and `a/b` there is one. Other requests are carried out.
    Tree,
}

/// One rule. In JSON every key may be left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultRule {
    /// Added before a request is looked at.
    pub latency_ms: u64,
    /// How requests fail; none for latency only.
    pub kind: Option<FaultKind>,
    /// Share of the matching requests that fail, 0 to 1.
    pub error_rate: f64,
    /// Kinds (`GET`, `LIST`, …) or operations (`GetObject`, …) that the rule is for; empty for all.
    pub operations: Vec<String>,
    /// Only for keys that start so.
    pub key_prefix: String,
    /// The rule is spent after so many failures (or delays, where it has no `kind`); absent for no end.
    pub count: Option<u64>,
}

impl Default for FaultRule {
    fn default() -> Self {
        Self {
            latency_ms: 0,
            kind: None,
            error_rate: 1.0,
            operations: Vec::new(),
            key_prefix: String::new(),
            count: None,
        }
    }
}

impl FaultRule {
    fn check(&self) -> Result<(), DevS3Error> {
        if !(0.0..=1.0).contains(&self.error_rate) {
            return Err(DevS3Error::InvalidFault(format!("error_rate {} is not between 0 and 1", self.error_rate)));
        }
        for name in &self.operations {
            let known = Operation::ALL.iter().any(|operation| named(*operation, name));
            if !known {
                return Err(DevS3Error::InvalidFault(format!(
                    "operations names {name:?}; use a kind such as GET, HEAD, LIST, PUT, COPY, DELETE, MULTIPART, \
                     BUCKET, or an S3 operation such as GetObject"
                )));
            }
        }
        Ok(())
    }

    fn matches(&self, target: &Target) -> bool {
        (self.operations.is_empty() || self.operations.iter().any(|name| named(target.operation, name)))
            && target.key.starts_with(&self.key_prefix)
    }
}

fn named(operation: Operation, name: &str) -> bool {
    let kind: Kind = operation.kind();
    operation.name().eq_ignore_ascii_case(name) || kind.name().eq_ignore_ascii_case(name)
}

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub latency: Duration,
    pub failure: Option<FaultKind>,
    /// How often the rules had been cleared when this was decided.
    generation: u64,
}

struct Armed {
    rule: FaultRule,
    matched: u64,
    fired: u64,
}

impl Armed {
    /// Whether the rule acts on this match: evenly spread, `error_rate` of all matches.
    fn fire(&mut self) -> bool {
        if self.rule.count.is_some_and(|count| self.fired >= count) {
            return false;
        }
        self.matched += 1;
        let due = if self.rule.kind.is_none() {
            true
        } else {
            let before = ((self.matched - 1) as f64 * self.rule.error_rate).floor();
            (self.matched as f64 * self.rule.error_rate).floor() > before
        };
        self.fired += u64::from(due);
        due
    }
}

/// The rules in force and their counters.
#[derive(Default)]
pub struct FaultPlane {
    rules: Mutex<Vec<Armed>>,
    /// Spares the lock on the usual path.
    any: AtomicBool,
    generation: watch::Sender<u64>,
}

impl FaultPlane {
    /// Puts one more rule in force.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidFault`] where the rate is no share or an operation is unknown.
    pub fn add(&self, rule: FaultRule) -> Result<(), DevS3Error> {
        rule.check()?;
        let mut rules = self.rules.lock();
        rules.push(Armed { rule, matched: 0, fired: 0 });
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// The rules in force.
    pub fn rules(&self) -> Vec<FaultRule> {
        self.rules.lock().iter().map(|armed| armed.rule.clone()).collect()
    }

    /// Removes all rules; requests that hang are carried out.
    pub fn clear(&self) {
        let mut rules = self.rules.lock();
        rules.clear();
        self.any.store(false, Ordering::Release);
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Decides on one request.
    pub fn judge(&self, target: &Target) -> Verdict {
        if !self.any.load(Ordering::Acquire) {
            return Verdict { latency: Duration::ZERO, failure: None, generation: 0 };
        }
        let mut rules = self.rules.lock();
        let mut verdict = Verdict { latency: Duration::ZERO, failure: None, generation: *self.generation.borrow() };
        for armed in rules.iter_mut().filter(|armed| armed.rule.matches(target)) {
            let spent = armed.rule.count.is_some_and(|count| armed.fired >= count);
            if !spent {
                verdict.latency += Duration::from_millis(armed.rule.latency_ms);
            }
            let has_turn = armed.rule.kind.is_none() || verdict.failure.is_none();
            if has_turn && armed.fire() {
                verdict.failure = verdict.failure.or(armed.rule.kind);
            }
        }
        verdict
    }

    /// Waits until the rules behind `verdict` are gone.
    pub async fn cleared_since(&self, verdict: &Verdict) {
        let mut generation = self.generation.subscribe();
        // The sender lives as long as `self`, so the wait cannot fail.
        let _ = generation.wait_for(|now| *now != verdict.generation).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(key: &str) -> Target {
        Target { operation: Operation::GetObject, bucket: "b".into(), key: key.into() }
    }

    #[test]
    fn the_rate_is_kept_exactly() {
        let plane = FaultPlane::default();
        plane.add(FaultRule { kind: Some(FaultKind::Reset), error_rate: 0.25, ..FaultRule::default() }).unwrap();
        let failed = (0..100).filter(|_| plane.judge(&get("k")).failure.is_some()).count();
        assert_eq!(failed, 25);
    }

    #[test]
    fn rules_match_operations_and_prefixes_and_are_spent() {
        let plane = FaultPlane::default();
        let rule = FaultRule {
            kind: Some(FaultKind::Unavailable),
            operations: vec!["get".into()],
            key_prefix: "a/".into(),
            count: Some(2),
            latency_ms: 5,
            ..FaultRule::default()
        };
        plane.add(rule).unwrap();
        assert_eq!(plane.judge(&get("b")).failure, None);
        let list = Target { operation: Operation::ListObjectsV2, ..get("a/") };
        assert_eq!(plane.judge(&list).failure, None);
        assert_eq!(plane.judge(&get("a/1")).failure, Some(FaultKind::Unavailable));
        assert_eq!(plane.judge(&get("a/1")).latency, Duration::from_millis(5));
        let after = plane.judge(&get("a/1"));
        assert_eq!((after.failure, after.latency), (None, Duration::ZERO));
    }

    #[test]
    fn nonsense_is_refused() {
        let plane = FaultPlane::default();
        assert!(plane.add(FaultRule { error_rate: 1.5, ..FaultRule::default() }).is_err());
        assert!(plane.add(FaultRule { error_rate: f64::NAN, ..FaultRule::default() }).is_err());
        assert!(plane.add(FaultRule { operations: vec!["FETCH".into()], ..FaultRule::default() }).is_err());
        assert!(plane.rules().is_empty());
    }

    #[tokio::test]
    async fn clearing_releases_what_hangs_even_when_it_came_first() {
        let plane = FaultPlane::default();
        plane.add(FaultRule { kind: Some(FaultKind::Hang), ..FaultRule::default() }).unwrap();
        let verdict = plane.judge(&get("k"));
        plane.clear();
        plane.cleared_since(&verdict).await;
    }
}

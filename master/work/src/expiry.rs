//! Files whose time to live is over: the leader goes through what each rule governs when something in it can be due.
//!
//! A rule belongs to a directory and holds for the files in and below it, up to directories with rules of their own.
//! What counts is the time of the last change (ctime), which no program can set; so a file that was copied here with an
//! old mtime lives as long as any other. Reading does not count. There is no index that could be wrong: a rule that
//! changes holds for everything from the next round on, and a round is a walk through the names below the directory of
//! the rule ([`walk`]); whatever lies elsewhere costs nothing.
//!
//! A walk finds the oldest file that is left. Before that one's time is over there is nothing to be found, and no walk:
//! a file that is made, changed or renamed is younger. Only with a directory that is moved, or from the bucket, may
//! older ones come, which `Counters.arrivals` tells of.

mod walk;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use cavern_consensus::{Clock, Proposer};
use cavern_proto::master::{FreeFate, TtlAction};
use cavern_proto::record::TtlRecord;
use cavern_state::Outcome;
use futures::FutureExt as _;
use tokio::time::Instant;

use self::walk::Walk;
use crate::background::{BackgroundTask, Next, Pace, TaskGroup, TaskList};
use crate::error::WorkError;
use crate::metrics::ExpiryMetrics;
use crate::namespace::Lookups;
use crate::reader::StateReader;

/// Names looked at with one read.
const PAGE: usize = 1000;
/// Files proposed together.
const TOGETHER: usize = 100;
/// Between two looks at the rules.
const TICK: Duration = Duration::from_secs(1);
/// What a rule governs is walked through when a tenth of its time is over, but not more rarely than this, if something
/// can be due.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Rules by directory.
type Rules = BTreeMap<u64, TtlRecord>;

/// What is known of the files that a rule governs since they were looked at.
#[derive(Clone, Copy, Debug)]
struct RuleState {
    began: Instant,
    /// Number of arrivals before that.
    arrivals: u64,
    /// None has been left alone for longer than since then.
    oldest_ns: i64,
}

impl RuleState {
    /// Whether it is time to look again, and there may be something to be found.
    fn is_due(&self, rule: &TtlRecord, arrivals: u64, clock: &Clock) -> bool {
        let time = Duration::from_secs(rule.seconds);
        let pause = (time / 10).clamp(TICK, LONGEST_PAUSE);
        self.began.elapsed() >= pause && (self.arrivals != arrivals || is_over(self.oldest_ns, rule, clock))
    }
}

/// Whether the time of something that was changed then is over.
fn is_over(changed_ns: i64, rule: &TtlRecord, clock: &Clock) -> bool {
    let age = Duration::from_nanos(u64::try_from(clock.age_ns(changed_ns)).unwrap_or(0));
    age >= Duration::from_secs(rule.seconds)
}

/// What is known from the last look at the rules.
pub struct Expiry {
    lookups: Lookups,
    proposer: Proposer,
    metrics: ExpiryMetrics,
    last: Rules,
    governed: HashMap<u64, RuleState>,
}

impl Expiry {
    pub fn new(lookups: Lookups, proposer: Proposer, metrics: ExpiryMetrics) -> Self {
        Self { lookups, proposer, metrics, last: Rules::new(), governed: HashMap::new() }
    }

    /// Begins to look at the rules.
    pub fn start(self, background: &TaskGroup, list: &TaskList) {
        // The term serves nobody before all of it has begun.
        let task = BackgroundTask::new("expire-files", Pace::after(TICK)).steady().resting_first();
        list.start(background, task, self, |expiry| expiry.look().boxed());
    }

    /// Goes through what those of the rules govern that can have something due.
    async fn look(&mut self) -> Result<Next, WorkError> {
        let (rules, arrivals) = rules(&self.lookups.reader).await?;
        // What one governs depends on all of them.
        if rules != self.last {
            self.governed.clear();
        }
        let mut failure = None;
        for (directory, rule) in rules.iter().filter(|(_, rule)| rule.action() != TtlAction::None) {
            let known = self.governed.get(directory);
            if known.is_some_and(|known| !known.is_due(rule, arrivals, self.lookups.reader.clock())) {
                continue;
            }
            let began = Instant::now();
            let swept = self.sweep(*directory, &rules).await;
            // Where that has failed there may be anything.
            let oldest_ns = swept.as_ref().copied().unwrap_or(0);
            failure = failure.or(swept.err());
            self.governed.insert(*directory, RuleState { began, arrivals, oldest_ns });
        }
        self.last = rules;
        failure.map_or(Ok(Next::Rest), Err)
    }

    /// Goes through what the rule of a directory governs, and expires what is due. Gives the time of the last change of
    /// the oldest file that is left.
    async fn sweep(&self, directory: u64, rules: &Rules) -> Result<i64, WorkError> {
        let reader = &self.lookups.reader;
        let Some(mut walk) = Walk::new(directory, rules, reader.clock().now_ns()) else { return Ok(i64::MAX) };
        while !walk.is_over() {
            let clock = reader.clone();
            let step = reader.read(move |tables| {
                let due = walk.step(tables, PAGE, clock.clock())?;
                Ok((walk, due))
            });
            let due;
            (walk, due) = step.await?;
            for together in due.chunks(TOGETHER) {
                let proposed = self.proposer.propose_all(together.iter().cloned().map(|due| due.command));
                for (outcome, due) in proposed.await?.into_iter().zip(together) {
                    let (is_done, done) = match &outcome {
                        Outcome::Freed(freed) => (freed.fate() == FreeFate::Freed, &self.metrics.freed),
                        _ => (matches!(outcome, Outcome::Done), &self.metrics.removed),
                    };
                    if let Outcome::Delegated(directory) = outcome {
                        // By the next turn it will have been let go of.
                        self.lookups.recalls.ask(directory);
                    }
                    if is_done {
                        done.inc();
                    } else {
                        // It has changed meanwhile, or somebody writes to it: it is looked at again.
                        walk.leave(due);
                    }
                }
            }
        }
        Ok(walk.oldest_ns())
    }
}

/// The rules, and how many arrivals there have been.
async fn rules(reader: &StateReader) -> Result<(Rules, u64), WorkError> {
    let (all, arrivals) = reader.read(|tables| Ok((tables.ttls(0)?, tables.counters()?.arrivals))).await?;
    let rule = |seconds, action| TtlRecord { seconds, action };
    Ok((all.ttls.into_iter().map(|ttl| (ttl.inode, rule(ttl.seconds, ttl.action))).collect(), arrivals))
}

#[cfg(test)]
mod tests;

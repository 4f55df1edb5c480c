//! What was done, how long it took, and what failed: by threads that begin together and share nothing while the clock
//! runs.

use std::sync::{PoisonError, RwLock};
use std::thread;

use tokio::time::Instant;

use super::histogram::Histogram;
use crate::error::{CliError, Context as _};

/// Failures that are named; the others are counted.
const NAMED: usize = 5;

/// Operations that did not do what they were to do.
#[derive(Clone, Default)]
pub struct Failures {
    pub count: u64,
    /// Sentences about the first of them.
    pub first: Vec<String>,
}

impl Failures {
    pub fn add(&mut self, text: String) {
        self.count += 1;
        if self.first.len() < NAMED {
            self.first.push(text);
        }
    }

    pub fn merge(&mut self, other: Self) {
        self.count += other.count;
        let room = NAMED - self.first.len();
        self.first.extend(other.first.into_iter().take(room));
    }
}

/// What one worker, or all of them, did in a phase.
#[derive(Clone, Default)]
pub struct Tally {
    /// Those that succeeded.
    pub operations: u64,
    pub bytes: u64,
    pub latency: Histogram,
    pub failures: Failures,
}

impl Tally {
    /// Does and times one operation, which answers how many bytes it has moved, or what went wrong. Answers whether it
    /// succeeded.
    pub fn time(&mut self, operation: impl FnOnce() -> Result<u64, String>) -> bool {
        let started = Instant::now();
        match operation() {
            Ok(bytes) => {
                self.latency.record(started.elapsed());
                self.operations += 1;
                self.bytes += bytes;
                true
            }
            Err(text) => {
                self.failures.add(text);
                false
            }
        }
    }

    pub fn merge(&mut self, other: Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.latency.merge(&other.latency);
        self.failures.merge(other.failures);
    }
}

/// How fast something was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Operations a second, by the name of the unit.
    Operations(&'static str),
    MibPerSecond,
    GibPerSecond,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Self::Operations(name) => name,
            Self::MibPerSecond => "MiB/s",
            Self::GibPerSecond => "GiB/s",
        }
    }
}

/// A kind of operation.
#[derive(PartialEq, Eq, Debug)]
pub struct Operation {
    pub name: &'static str,
    /// What the latencies are of: `file`, `read of 1 MiB`.
    pub timed: &'static str,
    pub units: &'static [Unit],
}

/// Many operations of one kind by several workers.
pub struct Phase {
    pub operation: &'static Operation,
    /// From the first worker's begin to the last one's end.
    pub seconds: f64,
    pub tally: Tally,
}

impl Phase {
    pub fn rate(&self, unit: Unit) -> f64 {
        let amount = match unit {
            Unit::Operations(_) => self.tally.operations as f64,
            Unit::MibPerSecond => self.tally.bytes as f64 / (1u64 << 20) as f64,
            Unit::GibPerSecond => self.tally.bytes as f64 / (1u64 << 30) as f64,
        };
        amount / self.seconds
    }
}

/// Has `threads` workers do their part: `work` gets the number of the worker, and counts in its tally.
///
/// # Errors
/// When a thread cannot be started, or panics.
pub fn run(
    operation: &'static Operation,
    threads: usize,
    work: impl Fn(usize, &mut Tally) + Sync,
) -> Result<Phase, CliError> {
    // Held for writing until all threads are there; then it says whether they are to begin.
    let gate = RwLock::new(false);
    let one = |worker: usize| {
        let begin = *gate.read().unwrap_or_else(PoisonError::into_inner);
        begin.then(|| {
            let mut tally = Tally::default();
            let started = Instant::now();
            work(worker, &mut tally);
            (started, Instant::now(), tally)
        })
    };
    let one = &one;
    let done: Vec<(Instant, Instant, Tally)> = thread::scope(|scope| {
        let mut begin = gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut workers = Vec::with_capacity(threads);
        for worker in 0..threads {
            let thread = thread::Builder::new().name(format!("bench-{worker}"));
            let started = thread.spawn_scoped(scope, move || one(worker));
            // Without all of them, those that wait end at once.
            workers.push(started.context(format_args!("cannot start thread {worker} of {threads}"))?);
        }
        *begin = true;
        drop(begin);
        // All of them, also after one that panicked.
        let joined: Vec<_> = workers.into_iter().map(|worker| worker.join().ok().flatten()).collect();
        let done = joined.into_iter().collect::<Option<_>>();
        done.ok_or_else(|| CliError::Failed("a thread of the benchmark panicked".to_owned()))
    })?;
    let first = done.iter().map(|(started, ..)| *started).min();
    let last = done.iter().map(|(_, ended, _)| *ended).max();
    let took = last.zip(first).map(|(last, first)| last.duration_since(first)).unwrap_or_default();
    let mut tally = Tally::default();
    done.into_iter().for_each(|(_, _, part)| tally.merge(part));
    // A rate is never infinite.
    let seconds = took.as_secs_f64().max(1e-9);
    Ok(Phase { operation, seconds, tally })
}

#[cfg(test)]
mod tests {
    use super::*;

    static COUNT: Operation = Operation { name: "count", timed: "number", units: &[Unit::Operations("numbers/s")] };

    #[test]
    fn what_fails_is_not_counted_as_done() {
        let mut tally = Tally::default();
        assert!(tally.time(|| Ok(10)) && !tally.time(|| Err("gone".to_owned())));
        let mut other = Tally::default();
        for number in 0..7 {
            other.time(|| Err(number.to_string()));
        }
        tally.merge(other);
        assert_eq!((tally.operations, tally.bytes, tally.latency.count()), (1, 10, 1));
        assert_eq!((tally.failures.count, tally.failures.first.join(" ").as_str()), (8, "gone 0 1 2 3"));
    }

    #[test]
    fn every_worker_does_its_part() {
        let phase = run(&COUNT, 5, |worker, tally| {
            for number in (worker..100).step_by(5) {
                tally.time(|| if number == 99 { Err("too much".to_owned()) } else { Ok(number as u64) });
            }
        })
        .unwrap();
        assert_eq!((phase.tally.operations, phase.tally.failures.count), (99, 1));
        assert_eq!((phase.tally.bytes, phase.tally.latency.count()), (4851, 99));
        assert!(phase.seconds > 0.0 && phase.rate(Unit::Operations("numbers/s")).is_finite());
    }

    #[test]
    fn a_worker_that_panics_is_an_error() {
        let result = run(&COUNT, 2, |worker, _| assert_ne!(worker, 1));
        assert!(result.is_err_and(|error| error.to_string().contains("panicked")));
    }
}

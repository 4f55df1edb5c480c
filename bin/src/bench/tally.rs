//! What was done, how long it took, and what failed.

use tokio::time::Instant;

use super::histogram::Histogram;

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
    /// Processor time of the workers; `None` where the kernel does not tell.
    pub cpu_seconds: Option<f64>,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}

//! What came out: every round, and what they come to. Serialized, it is what `--json` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::histogram::Histogram;
use super::machine::{Machine, Place};
use super::rounds::{Round, Side};
use super::sides::Sides;
use super::tally::{Failures, Phase, Unit};
use crate::error::CliError;

/// What was asked for.
pub struct Heading {
    pub workload: &'static str,
    /// The options of the command.
    pub parameters: Value,
    /// What there is to read or to write, in a sentence.
    pub work: String,
    /// Remarks on how the figures are to be read.
    pub notes: Vec<String>,
}

#[derive(Serialize)]
pub struct Report {
    pub workload: &'static str,
    pub work: String,
    pub notes: Vec<String>,
    pub target: Place,
    pub baseline: Option<Place>,
    pub machine: Machine,
    parameters: Value,
    pub summary: Vec<Summary>,
    pub latencies: Vec<Latencies>,
    rounds: Vec<RoundView>,
    pub failures: u64,
    /// Sentences about the first failures.
    pub first_failures: Vec<String>,
}

/// The least, the median and the most of some rounds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// One rate of one kind of operation.
#[derive(Serialize)]
pub struct Summary {
    pub operation: &'static str,
    pub unit: &'static str,
    pub target: Spread,
    pub baseline: Option<Spread>,
    /// Of the medians, target by baseline.
    pub ratio: Option<f64>,
}

/// How long operations of one side took, those of all rounds together.
#[derive(Serialize)]
pub struct Latencies {
    pub operation: &'static str,
    pub side: &'static str,
    #[serde(flatten)]
    pub latency: Latency,
    /// Processor time of this process for each operation.
    pub cpu_us_per_operation: Option<f64>,
}

#[derive(Serialize)]
pub struct Latency {
    /// What each of them is of.
    pub of: &'static str,
    pub count: u64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

#[derive(Serialize)]
struct RoundView {
    /// From 1, in the order in which they were run.
    round: u32,
    side: &'static str,
    operations: Vec<PhaseView>,
}

#[derive(Serialize)]
struct PhaseView {
    operation: &'static str,
    count: u64,
    failures: u64,
    bytes: u64,
    seconds: f64,
    rates: BTreeMap<&'static str, f64>,
    latency: Latency,
    cpu_us_per_operation: Option<f64>,
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}

impl Spread {
    /// Of at least one figure.
    fn of(mut figures: Vec<f64>) -> Option<Self> {
        figures.sort_by(f64::total_cmp);
        let (min, max, middle) = (*figures.first()?, *figures.last()?, figures.len() / 2);
        let median =
            if figures.len() % 2 == 1 { figures[middle] } else { f64::midpoint(figures[middle - 1], figures[middle]) };
        Some(Self { median, min, max })
    }
}

impl Latency {
    fn of(histogram: &Histogram, of: &'static str) -> Self {
        Self {
            of,
            count: histogram.count(),
            p50_us: micros(histogram.quantile(0.5)),
            p90_us: micros(histogram.quantile(0.9)),
            p99_us: micros(histogram.quantile(0.99)),
            max_us: micros(histogram.max()),
        }
    }
}

impl PhaseView {
    fn of(phase: &Phase) -> Self {
        let tally = &phase.tally;
        Self {
            operation: phase.operation.name,
            count: tally.operations,
            failures: tally.failures.count,
            bytes: tally.bytes,
            seconds: phase.seconds,
            rates: phase.operation.units.iter().map(|unit| (unit.name(), phase.rate(*unit))).collect(),
            latency: Latency::of(&tally.latency, phase.operation.timed),
            cpu_us_per_operation: cpu_us(phase.cpu_seconds, tally.operations),
        }
    }
}

/// What is shorter than a tick of the kernel is not counted by it.
fn cpu_us(seconds: Option<f64>, operations: u64) -> Option<f64> {
    seconds.filter(|seconds| *seconds > 0.0 && operations > 0).map(|seconds| seconds * 1e6 / operations as f64)
}

/// The phases of one side with the number `index` in their rounds.
fn phases_of(rounds: &[Round], side: Side, index: usize) -> impl Iterator<Item = &Phase> {
    rounds.iter().filter(move |round| round.side == side).filter_map(move |round| round.phases.get(index))
}

impl Summary {
    fn of(rounds: &[Round], index: usize, operation: &'static str, unit: Unit) -> Option<Self> {
        let spread = |side| Spread::of(phases_of(rounds, side, index).map(|phase| phase.rate(unit)).collect());
        let (target, baseline) = (spread(Side::Target)?, spread(Side::Baseline));
        let compared = baseline.filter(|baseline| baseline.median > 0.0);
        let ratio = compared.map(|baseline| target.median / baseline.median);
        Some(Self { operation, unit: unit.name(), target, baseline, ratio })
    }
}

impl Latencies {
    fn of(rounds: &[Round], index: usize, side: Side) -> Option<Self> {
        let operation = phases_of(rounds, side, index).next()?.operation;
        let (mut histogram, mut operations, mut cpu) = (Histogram::default(), 0, Some(0.0));
        for phase in phases_of(rounds, side, index) {
            histogram.merge(&phase.tally.latency);
            operations += phase.tally.operations;
            cpu = cpu.zip(phase.cpu_seconds).map(|(sum, more)| sum + more);
        }
        Some(Self {
            operation: operation.name,
            side: side.name(),
            latency: Latency::of(&histogram, operation.timed),
            cpu_us_per_operation: cpu_us(cpu, operations),
        })
    }
}

impl Report {
    pub fn new(heading: Heading, sides: &Sides, rounds: &[Round]) -> Self {
        let operations: Vec<_> =
            rounds.first().map(|round| round.phases.iter().map(|phase| phase.operation).collect()).unwrap_or_default();
        let (mut summary, mut latencies) = (vec![], vec![]);
        for (index, operation) in operations.into_iter().enumerate() {
            let units = operation.units.iter();
            summary.extend(units.filter_map(|unit| Summary::of(rounds, index, operation.name, *unit)));
            let both = [Side::Target, Side::Baseline].into_iter();
            latencies.extend(both.filter_map(|side| Latencies::of(rounds, index, side)));
        }
        let mut failures = Failures::default();
        let all = rounds.iter().flat_map(|round| &round.phases);
        all.for_each(|phase| failures.merge(phase.tally.failures.clone()));
        Self {
            workload: heading.workload,
            work: heading.work,
            notes: heading.notes,
            target: Place::of(&sides.target),
            baseline: sides.baseline.as_deref().map(Place::of),
            machine: Machine::this(),
            parameters: heading.parameters,
            summary,
            latencies,
            rounds: rounds.iter().map(RoundView::of).collect(),
            failures: failures.count,
            first_failures: failures.first,
        }
    }

    /// # Errors
    /// When operations have failed: the figures are of the others only.
    pub fn check(&self) -> Result<(), CliError> {
        if self.failures == 0 {
            return Ok(());
        }
        let more = self.failures - self.first_failures.len() as u64;
        let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
        let text = format!(
            "{} failed, and the rates are of the others only:\n  {}{more}",
            cavern_conf::counted(self.failures, "operation"),
            self.first_failures.join("\n  ")
        );
        Err(CliError::Failed(text))
    }
}

impl RoundView {
    fn of(round: &Round) -> Self {
        let operations = round.phases.iter().map(PhaseView::of).collect();
        Self { round: round.number + 1, side: round.side.name(), operations }
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::super::tally::{Operation, Tally};
    use super::*;

    static READ: Operation =
        Operation { name: "read", timed: "file", units: &[Unit::Operations("files/s"), Unit::MibPerSecond] };

    /// A round in which this many files of 1 MiB were read in a second.
    pub fn round(number: u32, side: Side, files: u64) -> Round {
        let mut tally = Tally { operations: files, bytes: files << 20, ..Tally::default() };
        (0..files).for_each(|file| tally.latency.record(Duration::from_micros(file)));
        let phase = Phase { operation: &READ, seconds: 1.0, cpu_seconds: Some(files as f64 / 1e4), tally };
        Round { number, side, phases: vec![phase] }
    }

    pub fn report(rounds: &[Round]) -> Report {
        let sides = Sides { target: "/proc".into(), baseline: Some("/none".into()) };
        let heading = Heading {
            workload: "files",
            parameters: json!({"threads": 8}),
            work: "3 files".to_owned(),
            notes: vec!["a note".to_owned()],
        };
        Report::new(heading, &sides, rounds)
    }

    #[test]
    fn rounds_come_to_medians_and_a_ratio() {
        use Side::{Baseline, Target};
        let rounds = [(0, Target, 10), (0, Baseline, 80), (1, Baseline, 40), (1, Target, 40), (2, Target, 20)];
        let report = report(&rounds.map(|(number, side, files)| round(number, side, files)));
        let json = serde_json::to_value(&report).unwrap();
        let rates = &json["summary"][0];
        assert_eq!(rates["target"], json!({"median": 20.0, "min": 10.0, "max": 40.0}));
        assert_eq!(rates["baseline"], json!({"median": 60.0, "min": 40.0, "max": 80.0}));
        assert!((report.summary[0].ratio.unwrap() - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(
            (&json["summary"][1]["unit"], &json["summary"][1]["target"]["max"]),
            (&json!("MiB/s"), &json!(40.0))
        );
        assert_eq!(json["rounds"].as_array().unwrap().len(), 5);
        assert_eq!(json["rounds"][2]["side"], "baseline");
        assert_eq!(json["rounds"][2]["operations"][0]["rates"]["files/s"], 40.0);
        assert_eq!((&json["latencies"][0]["count"], &json["latencies"][1]["count"]), (&json!(70), &json!(120)));
        assert_eq!(
            (&json["latencies"][1]["side"], &json["latencies"][1]["max_us"]),
            (&json!("baseline"), &json!(79.0))
        );
        assert!((report.latencies[0].cpu_us_per_operation.unwrap() - 100.0).abs() < 1e-6);
        assert_eq!((&json["parameters"]["threads"], &json["target"]["file_system"]), (&json!(8), &json!("proc")));
        assert!(json["machine"]["cpus"].as_u64().unwrap() > 0);
        report.check().unwrap();
    }

    #[test]
    fn failures_of_all_rounds_are_told() {
        let mut rounds = [round(0, Side::Target, 1), round(1, Side::Target, 1)];
        for (number, round) in rounds.iter_mut().enumerate() {
            let failures = &mut round.phases[0].tally.failures;
            (0..4).for_each(|failure| failures.add(format!("round {number}, failure {failure}")));
        }
        let report = report(&rounds);
        assert_eq!((report.failures, report.summary[0].ratio), (8, None));
        let said = report.check().unwrap_err().to_string();
        assert!(said.starts_with("8 operations failed") && said.ends_with("and 3 more"), "{said}");
        assert!(said.contains("round 0, failure 0") && said.contains("round 1, failure 0"), "{said}");
    }
}

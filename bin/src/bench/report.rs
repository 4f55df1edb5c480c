//! What came out: every round, and what they come to; as JSON, and for people.

use std::collections::BTreeMap;
use std::env::args_os;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_conf::counted;
use cavern_conf::host::wall_ns;
use indicatif::HumanCount;
use jiff::Timestamp;
use rustix::system::{sysinfo, uname};
use serde::Serialize;
use serde_json::{Value, json};

use super::histogram::Histogram;
use super::measure::{Failures, Phase, Unit};
use super::rounds::{Round, Side, Sides};
use crate::console;
use crate::error::CliError;
use crate::local::mounted::kind_of;

/// What was asked for.
#[derive(Serialize)]
pub struct Heading {
    pub workload: &'static str,
    /// What there is to read or to write, in a sentence.
    pub work: String,
    /// Remarks on how the figures are to be read.
    pub notes: Vec<String>,
}

#[derive(Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub heading: Heading,
    pub target: Place,
    pub baseline: Option<Place>,
    pub machine: Machine,
    /// The arguments of this process.
    arguments: Vec<String>,
    pub summary: Vec<Summary>,
    latencies: Vec<Latencies>,
    rounds: Vec<Value>,
    failures: u64,
    /// Sentences about the first failures.
    first_failures: Vec<String>,
}

/// Facts about this host and this program.
#[derive(Serialize)]
pub struct Machine {
    /// When the report was made, in UTC.
    at: String,
    version: &'static str,
    kernel: String,
    /// Processors that this process may use.
    cpus: usize,
    memory_bytes: u64,
}

/// A directory with the type of the file system that it is in: `fuse.cv` is a mount of Cavern.
#[derive(Serialize)]
pub struct Place {
    pub path: String,
    file_system: Option<String>,
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
struct Latencies {
    operation: &'static str,
    side: &'static str,
    #[serde(flatten)]
    latency: Latency,
}

#[derive(Serialize)]
struct Latency {
    /// What each of them is of.
    of: &'static str,
    count: u64,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl Machine {
    fn this() -> Self {
        let memory = sysinfo();
        let now = Timestamp::from_nanosecond(i128::from(wall_ns())).unwrap_or_default();
        Self {
            at: format!("{now:.0}"),
            version: env!("CARGO_PKG_VERSION"),
            kernel: uname().release().to_string_lossy().into_owned(),
            cpus: thread::available_parallelism().map_or(1, |cpus| cpus.get()),
            memory_bytes: memory.totalram.saturating_mul(memory.mem_unit.into()),
        }
    }

    /// In one line.
    pub fn summary(&self) -> String {
        let Self { at, version, kernel, cpus, .. } = self;
        let memory = self.memory_bytes as f64 / (1u64 << 30) as f64;
        format!("cv {version}, kernel {kernel}, {cpus} CPUs, {memory:.1} GiB of memory, {at}")
    }
}

impl Place {
    fn of(path: &Path) -> Self {
        let whole = path.canonicalize().ok();
        Self { path: path.display().to_string(), file_system: whole.and_then(|whole| kind_of(&whole)) }
    }

    pub fn summary(&self) -> String {
        match &self.file_system {
            Some(kind) => format!("{} ({kind})", self.path),
            None => self.path.clone(),
        }
    }
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
        let micros = |duration: Duration| duration.as_nanos() as f64 / 1e3;
        let [p50_us, p90_us, p99_us] = [0.5, 0.9, 0.99].map(|share| micros(histogram.quantile(share)));
        Self { of, count: histogram.count(), p50_us, p90_us, p99_us, max_us: micros(histogram.max()) }
    }
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

    fn rows(&self) -> Vec<[String; 7]> {
        let row = |what: &str, unit: &str, side: &str, spread: Spread, ratio: String| {
            let [median, min, max] = [spread.median, spread.min, spread.max].map(figure);
            [what.to_owned(), unit.to_owned(), side.to_owned(), median, min, max, ratio]
        };
        let ratio = self.ratio.map(ratio).unwrap_or_default();
        let mut rows = vec![row(self.operation, self.unit, "target", self.target, ratio)];
        rows.extend(self.baseline.map(|baseline| row("", "", "baseline", baseline, String::new())));
        rows
    }
}

impl Latencies {
    fn of(rounds: &[Round], index: usize, side: Side) -> Option<Self> {
        let operation = phases_of(rounds, side, index).next()?.operation;
        let mut histogram = Histogram::default();
        phases_of(rounds, side, index).for_each(|phase| histogram.merge(&phase.tally.latency));
        let latency = Latency::of(&histogram, operation.timed);
        Some(Self { operation: operation.name, side: side.name(), latency })
    }

    fn row(&self) -> [String; 6] {
        let latency = &self.latency;
        let [p50, p90, p99, max] = [latency.p50_us, latency.p90_us, latency.p99_us, latency.max_us].map(time);
        [latency.of.to_owned(), self.side.to_owned(), p50, p90, p99, max]
    }
}

/// A round as JSON has it; its number from 1, in the order in which the rounds were run.
fn round_view(round: &Round) -> Value {
    let phase = |phase: &Phase| {
        let (operation, tally) = (phase.operation, &phase.tally);
        let rates = operation.units.iter().map(|unit| (unit.name(), phase.rate(*unit)));
        json!({
            "operation": operation.name,
            "count": tally.operations,
            "failures": tally.failures.count,
            "bytes": tally.bytes,
            "seconds": phase.seconds,
            "rates": rates.collect::<BTreeMap<_, _>>(),
            "latency": Latency::of(&tally.latency, operation.timed),
        })
    };
    let operations: Vec<Value> = round.phases.iter().map(phase).collect();
    json!({"round": round.number + 1, "side": round.side.name(), "operations": operations})
}

impl Report {
    pub fn new(heading: Heading, sides: &Sides, rounds: &[Round]) -> Self {
        let operations = rounds.first().into_iter().flat_map(|round| &round.phases).map(|phase| phase.operation);
        let (mut summary, mut latencies) = (vec![], vec![]);
        for (index, operation) in operations.enumerate() {
            let units = operation.units.iter();
            summary.extend(units.filter_map(|unit| Summary::of(rounds, index, operation.name, *unit)));
            latencies.extend(Side::ALL.into_iter().filter_map(|side| Latencies::of(rounds, index, side)));
        }
        let mut failures = Failures::default();
        let all = rounds.iter().flat_map(|round| &round.phases);
        all.for_each(|phase| failures.merge(phase.tally.failures.clone()));
        Self {
            heading,
            target: Place::of(&sides.target),
            baseline: sides.baseline.as_deref().map(Place::of),
            machine: Machine::this(),
            arguments: args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect(),
            summary,
            latencies,
            rounds: rounds.iter().map(round_view).collect(),
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
            counted(self.failures, "operation"),
            self.first_failures.join("\n  ")
        );
        Err(CliError::Failed(text))
    }

    /// Writes it to stdout, for people.
    pub fn print(&self) -> Result<(), CliError> {
        console::line(format_args!("target    {}", self.target.summary()))?;
        if let Some(baseline) = &self.baseline {
            console::line(format_args!("baseline  {}", baseline.summary()))?;
        }
        console::line(format_args!("work      {}", self.heading.work))?;
        console::line(format_args!("machine   {}", self.machine.summary()))?;
        for note in &self.heading.notes {
            console::line(format_args!("note      {note}"))?;
        }
        console::line("")?;
        let rates = self.summary.iter().flat_map(Summary::rows);
        console::table_of_figures(["RATE", "UNIT", "SIDE", "MEDIAN", "LEAST", "MOST", "RATIO"], rates, 3)?;
        console::line("")?;
        let latencies = self.latencies.iter().map(Latencies::row);
        console::table_of_figures(["LATENCY OF", "SIDE", "P50", "P90", "P99", "MAX"], latencies, 2)
    }
}

/// `12,345`, `98.7`, `0.0123`: as many digits as tell something.
pub fn figure(value: f64) -> String {
    match value {
        value if value >= 999.5 => HumanCount(value.round() as u64).to_string(),
        value if value >= 99.95 => format!("{value:.0}"),
        value if value >= 9.995 => format!("{value:.1}"),
        value if value >= 0.9995 => format!("{value:.2}"),
        value if value > 0.0 => format!("{value:.3}"),
        _ => "0".to_owned(),
    }
}

/// `0.95`, `0.013`.
pub fn ratio(ratio: f64) -> String {
    if ratio < 0.095 { format!("{ratio:.3}") } else { format!("{ratio:.2}") }
}

/// Microseconds in the unit that fits.
fn time(micros: f64) -> String {
    match micros {
        micros if micros >= 999_500.0 => format!("{} s", figure(micros / 1e6)),
        micros if micros >= 999.5 => format!("{} ms", figure(micros / 1e3)),
        micros => format!("{} µs", figure(micros)),
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::measure::{Operation, Tally};
    use super::*;

    static READ: Operation =
        Operation { name: "read", timed: "file", units: &[Unit::Operations("files/s"), Unit::MibPerSecond] };

    /// A round in which this many files of 1 MiB were read in a second.
    pub fn round(number: u32, side: Side, files: u64) -> Round {
        let mut tally = Tally { operations: files, bytes: files << 20, ..Tally::default() };
        (0..files).for_each(|file| tally.latency.record(Duration::from_micros(file)));
        let phase = Phase { operation: &READ, seconds: 1.0, tally };
        Round { number, side, phases: vec![phase] }
    }

    pub fn report(rounds: &[Round]) -> Report {
        let sides = Sides { target: "/proc".into(), baseline: Some("/none".into()) };
        let heading = Heading { workload: "files", work: "3 files".to_owned(), notes: vec!["a note".to_owned()] };
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
        // The arguments are those of the test that runs.
        let arguments: Vec<_> = args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
        assert_eq!((&json["arguments"], &json["target"]["file_system"]), (&json!(arguments), &json!("proc")));
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

    #[test]
    fn figures_have_three_digits_or_all() {
        let figures = [1_234_567.8, 999.6, 999.4, 98.76, 9.876, 0.987_6, 0.01, 0.0].map(figure);
        assert_eq!(figures, ["1,234,568", "1,000", "999", "98.8", "9.88", "0.988", "0.010", "0"]);
        let times = [0.5, 12.34, 999.6, 123_456.0, 1_234_567.0].map(time);
        assert_eq!(times, ["0.500 µs", "12.3 µs", "1.00 ms", "123 ms", "1.23 s"]);
    }

    #[test]
    fn ratios_keep_two_digits() {
        assert_eq!([1.0, 0.95, 0.0134, 12.5].map(ratio), ["1.00", "0.95", "0.013", "12.50"]);
    }

    #[test]
    fn each_side_has_a_row_and_the_ratio_stands_with_the_target() {
        let report = report(&[round(0, Side::Target, 30), round(0, Side::Baseline, 60)]);
        let rows: Vec<_> = report.summary.iter().flat_map(Summary::rows).collect();
        assert_eq!(rows[0], ["read", "files/s", "target", "30.0", "30.0", "30.0", "0.50"]);
        assert_eq!(rows[1], ["", "", "baseline", "60.0", "60.0", "60.0", ""]);
        assert_eq!((rows.len(), rows[2][1].as_str()), (4, "MiB/s"));
        assert_eq!(report.latencies[0].row(), ["file", "target", "14.1 µs", "26.1 µs", "29.0 µs", "29.0 µs"]);
    }

    #[test]
    fn facts_are_plausible() {
        let machine = Machine::this();
        assert!(machine.cpus >= 1 && machine.memory_bytes > 64 << 20, "{}", machine.summary());
        assert!(machine.kernel.contains('.') && machine.at.starts_with("20") && machine.at.ends_with('Z'));
        assert_eq!(Place::of(Path::new("/proc/self")).summary(), "/proc/self (proc)");
        assert_eq!(Place::of(Path::new("/none/at/all")).summary(), "/none/at/all");
    }
}

//! A report for people.

use indicatif::HumanCount;

use super::report::{Latencies, Report, Spread, Summary};
use crate::console;
use crate::error::CliError;

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

/// Cells of a column end at the same place.
fn right_aligned<const N: usize>(
    heading: [&str; N],
    rows: Vec<[String; N]>,
    from: usize,
) -> ([String; N], Vec<[String; N]>) {
    let mut heading = heading.map(str::to_owned);
    let mut rows = rows;
    for column in from..N {
        let cells = rows.iter().chain([&heading]).map(|row| row[column].chars().count());
        let width = cells.max().unwrap_or(0);
        for row in rows.iter_mut().chain([&mut heading]) {
            row[column] = format!("{:>width$}", row[column]);
        }
    }
    (heading, rows)
}

fn print<const N: usize>(heading: [&str; N], rows: Vec<[String; N]>, from: usize) -> Result<(), CliError> {
    let (heading, rows) = right_aligned(heading, rows, from);
    console::table(std::array::from_fn(|column| heading[column].as_str()), rows)
}

impl Report {
    /// Writes it to stdout.
    ///
    /// # Errors
    /// When stdout cannot be written to.
    pub fn print(&self) -> Result<(), CliError> {
        console::line(format_args!("target    {}", self.target.summary()))?;
        if let Some(baseline) = &self.baseline {
            console::line(format_args!("baseline  {}", baseline.summary()))?;
        }
        console::line(format_args!("work      {}", self.work))?;
        console::line(format_args!("machine   {}", self.machine.summary()))?;
        for note in &self.notes {
            console::line(format_args!("note      {note}"))?;
        }
        console::line("")?;
        let rates = self.summary.iter().flat_map(Summary::rows).collect();
        print(["RATE", "UNIT", "SIDE", "MEDIAN", "LEAST", "MOST", "RATIO"], rates, 3)?;
        console::line("")?;
        let latencies = self.latencies.iter().map(Latencies::row).collect();
        print(["LATENCY OF", "SIDE", "P50", "P90", "P99", "MAX", "CPU EACH"], latencies, 2)
    }
}

impl Summary {
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
    fn row(&self) -> [String; 7] {
        let latency = &self.latency;
        let [p50, p90, p99, max] = [latency.p50_us, latency.p90_us, latency.p99_us, latency.max_us].map(time);
        let cpu = self.cpu_us_per_operation.map_or_else(|| "–".to_owned(), time);
        [latency.of.to_owned(), self.side.to_owned(), p50, p90, p99, max, cpu]
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{report, round};
    use super::super::rounds::Side;
    use super::*;

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
        assert_eq!(report.latencies[0].row(), ["file", "target", "14.1 µs", "26.1 µs", "29.0 µs", "29.0 µs", "100 µs"]);
        let (heading, rows) = right_aligned(["A", "B"], vec![["x".to_owned(), "long".to_owned()]], 1);
        assert_eq!((heading[1].as_str(), rows[0][1].as_str()), ("   B", "long"));
    }
}

//! What goes to stdout: lines, tables, JSON. Errors and progress go to stderr, so that a pipe sees results only.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::error::CliError;

/// Writes one line.
pub fn line(text: impl Display) -> Result<(), CliError> {
    output(|out| writeln!(out, "{text}"))
}

/// Writes bytes as they are.
pub fn raw(bytes: &[u8]) -> Result<(), CliError> {
    output(|out| out.write_all(bytes))
}

/// Writes a value as indented JSON.
pub fn json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::Failed(format!("cannot write the result as JSON: {error}")))?;
    line(text)
}

/// Writes a value as JSON on one line, for output that comes piece by piece.
pub fn json_line(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(value)
        .map_err(|error| CliError::Failed(format!("cannot write the result as JSON: {error}")))?;
    line(text)
}

/// One line to stderr: progress and remarks.
pub fn remark(text: impl Display) {
    // Nobody listens on a closed stderr.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Writes rows below a heading, columns aligned by their widest cell, the last one not padded.
pub fn table<const N: usize>(heading: [&str; N], rows: &[[String; N]]) -> Result<(), CliError> {
    let heading = heading.map(str::to_owned);
    let mut widths = [0; N];
    for row in rows.iter().chain([&heading]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    output(|out| {
        [&heading].into_iter().chain(rows).try_for_each(|row| {
            let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(out, "{}", cells.join("  ").trim_end())
        })
    })
}

fn output(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CliError> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    write(&mut out).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::OutputClosed,
        _ => CliError::Failed(format!("cannot write to stdout: {error}")),
    })
}

/// `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// Part of a whole in percent, or a dash of nothing.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "–".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

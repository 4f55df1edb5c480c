//! What goes to stdout: lines, tables, JSON. Errors and progress go to stderr, so that a pipe sees results only.
//!
//! Names, keys, hosts and errors are what others have chosen: no control character of theirs gets to a terminal, nor
//! what is not shown or changes the order of what is, and into a pipe they go as they are.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use serde::Serialize;
use terminal_size::{Width, terminal_size_of};
use tokio::time::Instant;

use crate::error::{CliError, Context as _};

/// A terminal that says it has fewer columns is not asked again: nothing would be left of a table.
const COLUMNS_MIN: u16 = 40;

const NO_JSON: &str = "cannot write the result as JSON";

/// Writes one line.
pub fn line(text: impl Display) -> Result<(), CliError> {
    output(|out| writeln!(out, "{}", harmless(text.to_string(), io::stdout().is_terminal())))
}

/// Writes bytes as they are.
pub fn raw(bytes: &[u8]) -> Result<(), CliError> {
    output(|out| out.write_all(bytes))
}

/// Writes a value as indented JSON.
pub fn json(value: &impl Serialize) -> Result<(), CliError> {
    line(serde_json::to_string_pretty(value).context(NO_JSON)?)
}

/// Writes a value as JSON on one line, for output that comes piece by piece.
pub fn json_line(value: &impl Serialize) -> Result<(), CliError> {
    line(serde_json::to_string(value).context(NO_JSON)?)
}

/// Writes a value as JSON on one line, or what a line says of it.
pub fn say(as_json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<(), CliError> {
    if as_json { json_line(value) } else { line(text()) }
}

/// An object of JSON: the fields of a value that are listed, by their names, and then what has other names.
macro_rules! fields {
    ($of:expr; $($field:ident),+; $($more:tt)*) => {{
        let mut object = ::serde_json::json!({ $($more)* });
        $(object[stringify!($field)] = ::serde_json::json!(&$of.$field);)+
        object
    }};
}
pub(crate) use fields;

/// One line to stderr: progress and remarks.
pub fn remark(text: impl Display) {
    // Nobody listens on a closed stderr.
    let _ = writeln!(io::stderr().lock(), "{}", harmless(text.to_string(), io::stderr().is_terminal()));
}

/// Writes rows below a heading, columns aligned by their widest cell, the last one not padded.
pub fn table<const N: usize>(heading: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Result<(), CliError> {
    table_of_figures(heading, rows, N)
}

/// As [`table`], with figures in the columns from this one on: their cells end at the same place.
pub fn table_of_figures<const N: usize>(
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    from: usize,
) -> Result<(), CliError> {
    let lines = aligned(heading, rows, from);
    output(|out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))
}

/// As [`table`], or a sentence where there are no rows.
pub fn table_or<const N: usize>(
    none: &str,
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> Result<(), CliError> {
    let mut rows = rows.into_iter().peekable();
    if rows.peek().is_some() { table(heading, rows) } else { line(none) }
}

/// As [`table`], cut where the terminal ends: for tables whose last columns say nothing that is not to be had
/// otherwise. What goes into a pipe is whole.
pub fn table_cut<const N: usize>(
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> Result<(), CliError> {
    let size = terminal_size_of(io::stdout()).filter(|(Width(columns), _)| *columns >= COLUMNS_MIN);
    let (lines, columns) = (aligned(heading, rows, N), size.map(|(Width(columns), _)| columns.into()));
    output(|out| lines.iter().try_for_each(|line| writeln!(out, "{}", cut(line, columns))))
}

/// The lines of a table, columns aligned by their widest cell; from column `figures` on cells end at the same place.
pub fn aligned<const N: usize>(
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    figures: usize,
) -> Vec<String> {
    let heading = heading.map(str::to_owned);
    let is_terminal = io::stdout().is_terminal();
    let cell = |cell: String| if is_terminal { escaped(&cell) } else { cell };
    let rows: Vec<[String; N]> = rows.into_iter().map(|row| row.map(cell)).collect();
    let mut widths = [0; N];
    for row in rows.iter().chain([&heading]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column < figures {
            true => format!("{cell:width$}"),
            false => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    [&heading].into_iter().chain(&rows).map(line).collect()
}

/// A line with no more than so many characters; one that has lost some says so by its last.
pub fn cut(line: &str, columns: Option<usize>) -> String {
    match columns {
        Some(columns) if line.chars().count() > columns => {
            line.chars().take(columns.saturating_sub(1)).chain(['…']).collect()
        }
        _ => line.to_owned(),
    }
}

fn output(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CliError> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    write(&mut out).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::OutputClosed,
        _ => CliError::Failed(format!("cannot write to stdout: {error}")),
    })
}

/// The text of a peer on one line: a terminal does not take its control characters for commands, nor show it in another
/// order than it has.
pub fn escaped(text: &str) -> String {
    escaped_where(text, is_deceptive)
}

/// A name for a line of stdout: on one line of a terminal, and as it is in a pipe.
pub fn name(text: &str) -> Cow<'_, str> {
    if io::stdout().is_terminal() { Cow::Owned(escaped(text)) } else { Cow::Borrowed(text) }
}

/// Text as a terminal may have it: lines, and nothing that it would take for a command.
fn harmless(text: String, is_terminal: bool) -> String {
    if is_terminal { escaped_where(&text, |c| is_deceptive(c) && !matches!(c, '\n' | '\t')) } else { text }
}

fn escaped_where(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let escape = |c: char| if is_escaped(c) { c.escape_default().collect() } else { String::from(c) };
    text.chars().map(escape).collect()
}

/// What a terminal obeys, does not show, or lets other characters change places for.
fn is_deceptive(c: char) -> bool {
    let is_unseen = matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{feff}');
    // Line separators, marks of direction, joiners.
    c.is_control() || is_unseen || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
}

/// What there is, or a dash.
pub fn or_dash(value: Option<impl Display>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| value.to_string())
}

/// Text behind a beginning; nothing where there is no text.
pub fn prefixed(beginning: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{beginning}{text}") }
}

/// `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// Part of a whole in percent, or a dash of nothing.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "–".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// `, 5 minutes left` of an estimate in seconds; nothing where there is none.
pub fn left(seconds: Option<f64>) -> String {
    let eta = seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    eta.map(|eta| format!(", {} left", HumanDuration(eta))).unwrap_or_default()
}

/// The length of every bar: its steps are finer than a terminal can show.
const STEPS: u64 = 10_000;
/// How often the sign turns that something is going on.
const TURN: Duration = Duration::from_millis(120);

/// Progress on a terminal, drawn on stderr and removed when it is dropped: a bar, or what has been done so far while
/// nobody knows how much there is to do.
///
/// A whole that still grows has no percentage: what is known of it at first is done at once, and a bar of that would
/// begin at its end and run backwards. So a bar is drawn from the moment at which the whole is known, and never goes
/// back.
pub struct Progress {
    bar: ProgressBar,
    /// Steps that were shown; `None` before there was a whole.
    reached: Option<u64>,
    /// When a line was written in the place of a bar.
    said: Instant,
}

impl Progress {
    /// Draws nothing where `is_hidden`.
    pub fn new(is_hidden: bool) -> Self {
        let bar = if is_hidden { ProgressBar::hidden() } else { ProgressBar::new(STEPS) };
        let bar = bar.with_style(style("{spinner} {wide_msg}"));
        if !is_hidden {
            bar.enable_steady_tick(TURN);
        }
        Self { bar, reached: None, said: Instant::now() }
    }

    /// Shows how far it is: `(done, whole)`, if the whole is known, and a text.
    pub fn show(&mut self, part: Option<(u64, u64)>, text: String) {
        let was_known = self.reached.is_some();
        if let Some(steps) = self.reach(part) {
            if !was_known {
                self.bar.disable_steady_tick();
                self.bar.set_style(style("{bar:24} {percent:>3}% {wide_msg}"));
            }
            self.bar.set_position(steps);
        }
        self.bar.set_message(text);
    }

    /// As [`Self::show`]; where nobody sees that, `say` is called now and then.
    ///
    /// # Errors
    /// Those of `say`.
    pub fn show_or_say(
        &mut self,
        part: Option<(u64, u64)>,
        text: String,
        period: Duration,
        say: impl FnOnce() -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        self.show(part, text);
        if !self.bar.is_hidden() || self.said.elapsed() < period {
            return Ok(());
        }
        self.said = Instant::now();
        say()
    }

    /// Steps to be shown: no fewer than before.
    fn reach(&mut self, part: Option<(u64, u64)>) -> Option<u64> {
        if let Some((done, whole)) = part.filter(|(_, whole)| *whole > 0) {
            let steps = (u128::from(done.min(whole)) * u128::from(STEPS) / u128::from(whole)) as u64;
            self.reached = Some(self.reached.map_or(steps, |reached| reached.max(steps)));
        }
        self.reached
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_commands_of_others_and_a_pipe_gets_names_as_they_are() {
        let name = "a\u{1b}[2J\u{9b}1m\tb\nc\u{7f}";
        assert_eq!(harmless(name.to_owned(), false), name);
        assert_eq!(harmless(name.to_owned(), true), "a\\u{1b}[2J\\u{9b}1m\tb\nc\\u{7f}");
        assert_eq!(escaped("a\nb"), "a\\nb");
        // Shown, this would end in ".txt".
        assert_eq!(escaped("a\u{202e}txt.exe\u{200b}"), "a\\u{202e}txt.exe\\u{200b}");
        assert_eq!(harmless("é\u{2066}\n".to_owned(), true), "é\\u{2066}\n");
        assert_eq!(escaped("名前 é"), "名前 é");
    }

    #[test]
    fn a_table_is_aligned_and_ends_where_the_terminal_does() {
        let rows = [["/train", "ok", "endpoint=http://s3:9000"], ["/a", "failing", "é"]];
        let rows = rows.map(|row| row.map(str::to_owned));
        let lines = aligned(["PATH", "STATUS", "OPTIONS"], rows.clone(), 3);
        assert_eq!(lines[0], "PATH    STATUS   OPTIONS");
        assert_eq!(lines[2], "/a      failing  é");
        let narrow: Vec<String> = lines.iter().map(|line| cut(line, Some(24))).collect();
        assert_eq!(narrow, ["PATH    STATUS   OPTIONS", "/train  ok       endpoi…", "/a      failing  é"]);
        assert_eq!(cut(&lines[1], None), lines[1]);
        assert_eq!(aligned(["PATH", "STATUS", "OPTIONS"], rows, 1)[1], "/train       ok  endpoint=http://s3:9000");
    }

    #[test]
    fn a_bar_begins_when_the_whole_is_known_and_never_runs_backwards() {
        let mut progress = Progress::new(true);
        assert_eq!(progress.reach(None), None);
        assert_eq!(progress.reach(Some((0, 0))), None, "nothing of nothing is no whole");
        assert_eq!(progress.reach(Some((25, 100))), Some(STEPS / 4));
        assert_eq!(progress.reach(Some((25, 200))), Some(STEPS / 4), "the whole has grown");
        assert_eq!(progress.reach(Some((150, 200))), Some(STEPS * 3 / 4));
        assert_eq!(progress.reach(None), Some(STEPS * 3 / 4));
        assert_eq!(progress.reach(Some((u64::MAX, u64::MAX))), Some(STEPS));
    }
}

//! Progress on a terminal: a bar, or what has been done so far while nobody knows how much there is to do.
//!
//! A whole that still grows has no percentage: what is known of it at first is done at once, and a bar of that would
//! begin at its end and run backwards. So a bar is drawn from the moment at which the whole is known, and never goes
//! back.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::error::{CliError, Context as _};

/// The length of every bar: its steps are finer than a terminal can show.
const STEPS: u64 = 10_000;
/// How often the sign turns that something is going on.
const TURN: Duration = Duration::from_millis(120);

/// Drawn on stderr where that is a terminal, and removed when it is dropped.
pub struct Progress {
    bar: ProgressBar,
    /// Steps that were shown; `None` before there was a whole.
    reached: Option<u64>,
    /// When a line was written in the place of a bar.
    said: Instant,
}

impl Progress {
    /// # Errors
    /// Only where the templates below make no sense.
    pub fn new() -> Result<Self, CliError> {
        let bar = ProgressBar::new(STEPS).with_style(style("{spinner} {wide_msg}")?);
        bar.enable_steady_tick(TURN);
        Ok(Self { bar, reached: None, said: Instant::now() })
    }

    /// # Errors
    /// As [`Self::new`].
    pub fn new_unless(is_hidden: bool) -> Result<Self, CliError> {
        if is_hidden { Ok(Self::hidden()) } else { Self::new() }
    }

    /// Draws nothing.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), reached: None, said: Instant::now() }
    }

    /// Whether nobody sees it.
    pub fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    /// Shows how far it is: `(done, whole)`, if the whole is known, and a text.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn show(&mut self, part: Option<(u64, u64)>, text: String) -> Result<(), CliError> {
        let was_known = self.reached.is_some();
        if let Some(steps) = self.reach(part) {
            if !was_known {
                self.bar.disable_steady_tick();
                self.bar.set_style(style("{bar:24} {percent:>3}% {wide_msg}")?);
            }
            self.bar.set_position(steps);
        }
        self.bar.set_message(text);
        Ok(())
    }

    /// As [`Self::show`]; where nobody sees that, `say` is called now and then.
    ///
    /// # Errors
    /// As [`Self::new`], and those of `say`.
    pub fn show_or_say(
        &mut self,
        part: Option<(u64, u64)>,
        text: String,
        period: Duration,
        say: impl FnOnce() -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        self.show(part, text)?;
        if !self.is_hidden() || self.said.elapsed() < period {
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

fn style(template: &str) -> Result<ProgressStyle, CliError> {
    ProgressStyle::with_template(template).context("the progress bar's template")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_begins_when_the_whole_is_known_and_never_runs_backwards() {
        let mut progress = Progress::hidden();
        assert_eq!(progress.reach(None), None);
        assert_eq!(progress.reach(Some((0, 0))), None, "nothing of nothing is no whole");
        assert_eq!(progress.reach(Some((25, 100))), Some(STEPS / 4));
        assert_eq!(progress.reach(Some((25, 200))), Some(STEPS / 4), "the whole has grown");
        assert_eq!(progress.reach(Some((150, 200))), Some(STEPS * 3 / 4));
        assert_eq!(progress.reach(None), Some(STEPS * 3 / 4));
        assert_eq!(progress.reach(Some((u64::MAX, u64::MAX))), Some(STEPS));
    }
}

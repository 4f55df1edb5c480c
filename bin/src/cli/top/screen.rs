//! A terminal that is drawn anew, and gives keys one by one, until this is dropped.

use std::io::{IsTerminal as _, stdin, stdout};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use terminal_size::{Height, Width, terminal_size_of};
use tokio::io::{AsyncReadExt as _, Stdin};

use super::rates::Sort;
use crate::console;
use crate::error::{CliError, Context as _};

/// The other screen, without a cursor; and back.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// To the upper left; what is left of a line, and of the screen, is cleared.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";
/// Of a terminal that does not say.
const COLUMNS: u16 = 80;
const ROWS: u16 = 24;

/// The terminal; as it was before, once this is dropped.
pub struct Screen {
    keys: Stdin,
    before: Termios,
}

impl Screen {
    /// `None` where there is no terminal that shows it, and gives keys.
    pub fn open() -> Result<Option<Self>, CliError> {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if is_dumb || !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(stdin()).context("cannot read the settings of the terminal")?;
        let mut with_keys = before.clone();
        with_keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(stdin(), OptionalActions::Now, &with_keys).context("cannot have the terminal give keys")?;
        let screen = Self { keys: tokio::io::stdin(), before };
        console::raw(ENTER)?;
        Ok(Some(screen))
    }

    /// The next key; none ever without a screen, and after the end of what is typed.
    pub async fn key(screen: &mut Option<Self>) -> u8 {
        if let Some(Self { keys, .. }) = screen
            && let Ok(key) = keys.read_u8().await
        {
            return key;
        }
        std::future::pending().await
    }

    /// Draws lines below one that says what keys do, and why the last look failed, if it did. `lines` is told how many
    /// there is room for.
    pub fn draw(
        &mut self,
        sort: Sort,
        lines: impl FnOnce(usize) -> Vec<String>,
        failure: Option<&str>,
    ) -> Result<(), CliError> {
        let size = terminal_size_of(stdout());
        let (Width(columns), Height(rows)) = size.unwrap_or((Width(COLUMNS), Height(ROWS)));
        let rows = usize::from(rows.max(1));
        let help = match failure {
            Some(cause) => format!("NO ANSWER: {}", console::escaped(cause)),
            None => format!("sorted by {sort:?}; r Read, w Written, o Operations, n Name, q quit"),
        };
        let mut shown = vec![help];
        shown.extend(lines(rows - 1));
        shown.truncate(rows);
        let shown = shown.iter().map(|line| console::cut(line, Some(columns.into())) + CLEAR_LINE);
        let frame = format!("{HOME}{}{CLEAR_BELOW}", shown.collect::<Vec<_>>().join("\n"));
        console::raw(frame.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Whoever closed the terminal needs neither.
        let _left = console::raw(LEAVE);
        let _set = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

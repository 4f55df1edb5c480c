//! The configuration as text: what `cv conf show` prints, and what a program writes for a process that it starts.

use std::fmt::Write as _;

use crate::exposure::Role;
use crate::load::Effective;
use crate::schema::Config;
use crate::settings::show_value;

impl Config {
    /// Every key with its value, as a TOML file that [`Effective::load`] reads back to the same configuration.
    pub fn to_toml(&self) -> String {
        render(self, |_| None)
    }
}

impl Effective {
    /// The defaults of every key.
    pub fn defaults() -> Self {
        Self::default()
    }

    /// Every key with the value that holds, and in a comment where it came from: `default`, `file:line` or the
    /// environment variable; or the limits that it follows, and what else follows these. It is a valid configuration
    /// file.
    pub fn show(&self) -> String {
        let mut text = render(&self.config, |key| Some(self.origin(key).to_string()));
        for role in Role::ALL {
            let gap = if role == Role::Master { "\n" } else { "" };
            let _ = writeln!(text, "{gap}# cv {} has {}", role.name(), self.describe_limits(role));
        }
        text
    }
}

/// Column where the comments start, unless a value is longer.
const COMMENT_COLUMN: usize = 48;

fn render(config: &Config, comment: impl Fn(&str) -> Option<String>) -> String {
    // Strings, numbers, booleans and lists of strings: TOML can spell them all (a test says so for the defaults).
    let sections = toml::Table::try_from(config).unwrap_or_default();
    let mut text = String::new();
    for (section, keys) in &sections {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}[{section}]");
        for (key, value) in keys.as_table().into_iter().flatten() {
            let line = format!("{key} = {}", show_value(key, value));
            let _ = match comment(&format!("{section}.{key}")) {
                Some(comment) => writeln!(text, "{line:COMMENT_COLUMN$} # {comment}"),
                None => writeln!(text, "{line}"),
            };
        }
    }
    text
}

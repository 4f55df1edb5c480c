//! `cv fs find`: what is below a path and is as is asked for.

use std::ffi::OsString;
use std::str::FromStr;

use cavern_client::Node;
use cavern_proto::master::Kind;
use clap::Args;
use serde::Serialize;

use super::glob::Glob;
use super::list::{kind_name, mode_text, path_below, time_text};
use super::walk::{walk, with_client};
use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct FindArgs {
    /// Absolute path in the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// Whose name, the last component of the path, matches this pattern of the shell.
    #[arg(long, value_name = "PATTERN")]
    name: Option<Glob>,
    /// Of this type: f (file), d (directory), l (symbolic link), p (FIFO), s (socket), b or c (device).
    #[arg(long = "type", value_name = "TYPE", value_parser = kind_of)]
    kind: Option<Kind>,
    /// Of this size: 5M, +5M for more, -5M for less, counted in the unit (c, k, M, G, T; without one 512 bytes) and
    /// rounded up.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<Size>,
    /// Changed later than the file or directory of this path.
    #[arg(long, value_name = "PATH")]
    newer: Option<String>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Serialize)]
struct FoundView {
    path: String,
    kind: &'static str,
    size: u64,
    mode: String,
    mtime: String,
    inode: u64,
}

/// The options that find(1) spells with one dash.
const ONE_DASH: [&str; 4] = ["-name", "-type", "-size", "-newer"];

/// Arguments of `cv`, those of `fs find` with the dashes that this command line knows.
pub fn with_two_dashes(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    if arguments.get(1).is_some_and(|word| word == "fs") && arguments.get(2).is_some_and(|word| word == "find") {
        for argument in arguments.iter_mut().skip(3).filter(|argument| ONE_DASH.iter().any(|known| argument == known)) {
            let mut two = OsString::from("-");
            two.push(&argument);
            *argument = two;
        }
    }
    arguments
}

fn kind_of(text: &str) -> Result<Kind, String> {
    Ok(match text {
        "f" => Kind::File,
        "d" => Kind::Directory,
        "l" => Kind::Symlink,
        "p" => Kind::Fifo,
        "s" => Kind::Socket,
        "c" => Kind::CharacterDevice,
        "b" => Kind::BlockDevice,
        _ => return Err("it is one of f, d, l, p, s, b, c".to_owned()),
    })
}

/// Sizes that are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    than: std::cmp::Ordering,
    count: u64,
    unit: u64,
}

impl Size {
    fn has(self, bytes: u64) -> bool {
        bytes.div_ceil(self.unit).cmp(&self.count) == self.than
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let (than, rest) = match text.as_bytes().first() {
            Some(b'+') => (Greater, &text[1..]),
            Some(b'-') => (Less, &text[1..]),
            _ => (Equal, text),
        };
        let digits = rest.trim_end_matches(|last: char| !last.is_ascii_digit());
        let unit = match &rest[digits.len()..] {
            "" | "b" => 512,
            "c" => 1,
            "k" => 1 << 10,
            "M" => 1 << 20,
            "G" => 1 << 30,
            "T" => 1 << 40,
            unit => return Err(format!("\"{unit}\" is no unit: use c (bytes), k, M, G or T")),
        };
        let count = digits.parse().map_err(|_| format!("\"{text}\" is no size: try +100k or -1G"))?;
        Ok(Self { than, count, unit })
    }
}

impl FindArgs {
    pub async fn run(self) -> Result<(), CliError> {
        with_client(&self.cluster, async |client| {
            let newer_than = match &self.newer {
                Some(path) => Some(client.metadata().resolve(path).await?.mtime_ns),
                None => None,
            };
            let root = client.metadata().resolve(&self.path).await?;
            walk(client, root, async |below, node| {
                let path = path_below(&self.path, below);
                if self.wants(&path, node, newer_than) { self.print(path, node) } else { Ok(()) }
            })
            .await
        })
        .await
    }

    fn wants(&self, path: &str, node: &Node, newer_than: Option<i64>) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        self.name.as_ref().is_none_or(|glob| glob.matches(name))
            && self.kind.is_none_or(|kind| node.kind == kind)
            && self.size.is_none_or(|size| size.has(node.size))
            && newer_than.is_none_or(|time_ns| node.mtime_ns > time_ns)
    }

    fn print(&self, path: String, node: &Node) -> Result<(), CliError> {
        if !self.json {
            return console::line(console::name(&path));
        }
        let (kind, letter) = kind_name(node.kind);
        let (mode, mtime) = (mode_text(letter, node.mode), time_text(node.mtime_ns));
        console::json_line(&FoundView { path, kind, size: node.size, mode, mtime, inode: node.inode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_whole_units() {
        let has = |text: &str, bytes| text.parse::<Size>().unwrap().has(bytes);
        assert!(has("1", 1) && has("1", 512) && !has("1", 513) && has("0", 0));
        assert!(has("+1M", (1 << 20) + 1) && !has("+1M", 1 << 20));
        assert!(has("-1k", 0) && !has("-1k", 1), "one byte is rounded up to one unit");
        assert!(has("5c", 5) && has("-6c", 5) && has("+4c", 5));
        for wrong in ["", "M", "5x", "+-5", "5 k"] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn options_of_find_may_have_one_dash() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let given = words("cv fs find /a -name x -type f --json");
        assert_eq!(with_two_dashes(given.into_iter()), words("cv fs find /a --name x --type f --json"));
        let other = words("cv fs ls -name");
        assert_eq!(with_two_dashes(other.clone().into_iter()), other);
    }
}

//! `cv fs find`: what is below a path and is as is asked for.

use std::cmp::Ordering;

use cavern_client::{Client, Node};
use cavern_conf::ByteSize;
use cavern_proto::master::Kind;
use clap::Args;
use glob::Pattern;
use serde_json::json;

use super::list::{kind_name, mode_text, time_text};
use super::walk::{path_below, walk};
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct FindArgs {
    /// Absolute path in the namespace.
    path: String,
    /// Whose name, the last component of the path, matches this pattern of the shell: *, ?, [a-z], [!a-z].
    #[arg(long, value_name = "PATTERN")]
    name: Option<Pattern>,
    /// Of this type: f (file), d (directory), l (symbolic link), p (FIFO), s (socket), b or c (device).
    #[arg(long = "type", value_name = "TYPE", value_parser = kind_of)]
    kind: Option<Kind>,
    /// Of this size: 5MiB, +5MiB for more, -5MiB for less.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = size)]
    size: Option<(Ordering, ByteSize)>,
    /// Changed later than the file or directory of this path.
    #[arg(long, value_name = "PATH")]
    newer: Option<String>,
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

fn size(text: &str) -> Result<(Ordering, ByteSize), String> {
    let (than, rest) = match text.split_at_checked(1) {
        Some(("+", rest)) => (Ordering::Greater, rest),
        Some(("-", rest)) => (Ordering::Less, rest),
        _ => (Ordering::Equal, text),
    };
    rest.parse::<ByteSize>().map(|size| (than, size))
}

impl FindArgs {
    pub async fn run(&self, client: &Client, json: bool) -> Result<(), CliError> {
        let newer_than = match &self.newer {
            Some(path) => Some(client.metadata().resolve(path).await?.mtime_ns),
            None => None,
        };
        let root = client.metadata().resolve(&self.path).await?;
        walk(client, root, async |found| {
            let (path, node) = (path_below(&self.path, found.below), found.node);
            if !self.wants(&path, node, newer_than) {
                return Ok(());
            }
            if !json {
                return console::line(console::name(&path));
            }
            let (mode, mtime) = (mode_text(node.kind, node.mode), time_text(node.mtime_ns));
            let (kind, _) = kind_name(node.kind);
            let (size, inode) = (node.size, node.inode);
            let view = json!({"path": path, "kind": kind, "size": size, "mode": mode, "mtime": mtime, "inode": inode});
            console::json_line(&view)
        })
        .await
    }

    fn wants(&self, path: &str, node: &Node, newer_than: Option<i64>) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        self.name.as_ref().is_none_or(|pattern| pattern.matches(name))
            && self.kind.is_none_or(|kind| node.kind == kind)
            && self.size.is_none_or(|(than, size)| node.size.cmp(&size.bytes()) == than)
            && newer_than.is_none_or(|time_ns| node.mtime_ns > time_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_looked_for_from_both_sides() {
        assert_eq!(size("5MiB"), Ok((Ordering::Equal, ByteSize::mib(5))));
        assert_eq!(size("+1KiB"), Ok((Ordering::Greater, ByteSize::kib(1))));
        assert_eq!(size("-1KiB"), Ok((Ordering::Less, ByteSize::kib(1))));
        for wrong in ["", "M", "5x", "+-5B", "5 KiB"] {
            assert!(size(wrong).is_err(), "{wrong:?}");
        }
    }
}

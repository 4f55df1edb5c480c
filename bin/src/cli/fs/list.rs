//! `cv fs ls` and `cv fs stat`.

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    Entry, Extent, Kind, ListMountsRequest, ListUnavailableRequest, PersistStatusRequest, ReadDirRequest,
    ResolveRequest, WriteType,
};
use clap::Args;
use serde::Serialize;

use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct LsArgs {
    /// Absolute path in the namespace.
    #[arg(value_name = "PATH", default_value = "/")]
    path: String,
    /// With permissions, size and time.
    #[arg(short)]
    long: bool,
    /// With everything below.
    #[arg(short = 'R')]
    recursive: bool,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct StatArgs {
    /// Absolute paths in the namespace.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// An entry as it is shown.
#[derive(Serialize)]
struct EntryView {
    path: String,
    kind: &'static str,
    size: u64,
    mode: String,
    uid: u32,
    gid: u32,
    mtime: String,
    inode: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    mount_id: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    key: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    etag: String,
    /// Age of the listing that this comes from; absent where there is none, as in fs-mode mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    listing_age_ms: Option<i64>,
    /// Whether the bucket has it; `cv fs stat` of what is in fs-mode mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<BucketView>,
    /// Blocks that are at lost workers only, and in no bucket; `cv fs stat` of files of fs-mode mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unavailable: Vec<UnavailableBlock>,
}

/// How far the bucket is behind a file, or behind a directory and all below it.
#[derive(Serialize)]
struct BucketView {
    /// It has everything.
    persisted: bool,
    files: u64,
    bytes: u64,
    deletions: u64,
    /// Age of the oldest change that it lacks.
    waiting_seconds: f64,
    /// Why the last attempt failed; empty when none has.
    last_error: String,
}

impl BucketView {
    async fn of(masters: &MasterChannel, path: &str) -> Result<Self, CliError> {
        let request = PersistStatusRequest { path: path.to_owned(), ..PersistStatusRequest::default() };
        let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
        let status = masters.ask_unary(ask).await?;
        Ok(Self {
            persisted: status.files + status.deletions == 0,
            files: status.files,
            bytes: status.bytes,
            deletions: status.deletions,
            waiting_seconds: status.oldest_age_ms as f64 / 1000.0,
            last_error: status.last_error,
        })
    }

    fn text(&self, kind: &str) -> String {
        if self.persisted {
            let what = if kind == "directory" { "everything below" } else { "it" };
            return format!("has {what}");
        }
        let what = match kind {
            "directory" => {
                format!("lacks {}, {} to delete", counted(self.files, "file"), counted(self.deletions, "object"))
            }
            _ => "lacks the last change".to_owned(),
        };
        let error =
            if self.last_error.is_empty() { String::new() } else { format!("; the last error: {}", self.last_error) };
        format!("{what}, waiting for {:.0} s{error}", self.waiting_seconds)
    }
}

/// A block that nobody who is there has.
#[derive(Serialize)]
struct UnavailableBlock {
    index: u32,
    /// Those that have it.
    workers: Vec<u64>,
}

impl EntryView {
    fn new(path: String, entry: &Entry) -> Self {
        let attr = entry.attr.unwrap_or_default();
        let (kind, letter) = kind_name(attr.kind());
        Self {
            path,
            kind,
            size: attr.size,
            mode: mode_text(letter, attr.mode),
            uid: attr.uid,
            gid: attr.gid,
            mtime: time_text(attr.mtime_ns),
            inode: attr.inode,
            mount_id: (entry.mount_id != 0).then_some(entry.mount_id),
            key: entry.key.clone(),
            etag: entry.etag.clone(),
            listing_age_ms: (entry.listing_age_ms >= 0).then_some(entry.listing_age_ms),
            bucket: None,
            unavailable: Vec::new(),
        }
    }
}

/// What a kind is called, and its letter in `ls -l`.
pub fn kind_name(kind: Kind) -> (&'static str, char) {
    match kind {
        Kind::Directory => ("directory", 'd'),
        Kind::Symlink => ("symlink", 'l'),
        Kind::Fifo => ("fifo", 'p'),
        Kind::Socket => ("socket", 's'),
        Kind::CharacterDevice => ("character device", 'c'),
        Kind::BlockDevice => ("block device", 'b'),
        Kind::File | Kind::Unspecified => ("file", '-'),
    }
}

/// `-rw-r--r--`.
pub fn mode_text(kind: char, mode: u32) -> String {
    let bits = (0..9).map(|bit| if mode & (0o400 >> bit) == 0 { '-' } else { ['r', 'w', 'x'][bit % 3] });
    std::iter::once(kind).chain(bits).collect()
}

pub fn time_text(ns: i64) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(ns)).map_or_else(|_| ns.to_string(), |time| format!("{time:.3}"))
}

/// What `cv fs ls` calls an entry.
fn name_of(path: &str, is_recursive: bool) -> &str {
    match path.rsplit_once('/') {
        Some((_, name)) if !is_recursive && !name.is_empty() => name,
        _ => path,
    }
}

/// The path of a child, `name` as readable as it can be.
pub fn join(directory: &str, name: &[u8]) -> String {
    format!("{}/{}", directory.trim_end_matches('/'), String::from_utf8_lossy(name))
}

/// The path of what is below another, by its path relative to that: empty for that itself.
pub fn path_below(top: &str, below: &str) -> String {
    match (top.trim_end_matches('/'), below) {
        ("", "") => "/".to_owned(),
        (top, "") => top.to_owned(),
        (top, below) => format!("{top}/{below}"),
    }
}

pub async fn resolve(masters: &MasterChannel, path: &str) -> Result<Entry, CliError> {
    let request = ResolveRequest { path: path.to_owned(), session: 0 };
    let resolve = async |mut master: Stubs| master.namespace.resolve(request.clone()).await;
    Ok(masters.ask_unary(resolve).await?)
}

impl LsArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let masters = self.cluster.masters().await?;
        let entry = resolve(&masters, &self.path).await?;
        let attr = entry.attr.unwrap_or_default();
        if attr.kind() != Kind::Directory {
            return self.print(self.path.clone(), &entry);
        }
        let mut pending = vec![(self.path.clone(), attr.inode)];
        while let Some((directory, inode)) = pending.pop() {
            let below = self.directory(&masters, &directory, inode).await?;
            if self.recursive {
                pending.extend(below.into_iter().rev());
            }
        }
        Ok(())
    }

    /// Prints the entries of one directory as they arrive; answers the directories among them.
    async fn directory(&self, masters: &MasterChannel, path: &str, inode: u64) -> Result<Vec<(String, u64)>, CliError> {
        let mut request = ReadDirRequest { inode, ..ReadDirRequest::default() };
        let mut directories = Vec::new();
        // Another master goes on after the last name.
        let list = async |mut master: Stubs| {
            let mut pages = master.namespace.read_dir(request.clone()).await?.into_inner();
            while let Some(page) = pages.message().await? {
                for entry in page.entries {
                    let attr = entry.attr.unwrap_or_default();
                    if self.recursive && attr.kind() == Kind::Directory {
                        directories.push((join(path, &entry.name), attr.inode));
                    }
                    if let Err(error) = self.print(join(path, &entry.name), &entry) {
                        return Ok(Err(error));
                    }
                    request.after_name = entry.name;
                }
            }
            Ok(Ok(()))
        };
        masters.ask(list).await??;
        Ok(directories)
    }

    fn print(&self, path: String, entry: &Entry) -> Result<(), CliError> {
        let view = EntryView::new(path, entry);
        if self.json {
            return console::json_line(&view);
        }
        let name = console::name(name_of(&view.path, self.recursive));
        let slash = if view.kind == "directory" { "/" } else { "" };
        if self.long {
            return console::line(format_args!("{} {:>14} {} {name}{slash}", view.mode, view.size, view.mtime));
        }
        console::line(format_args!("{name}{slash}"))
    }
}

impl StatArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let masters = self.cluster.masters().await?;
        let list = async |mut master: Stubs| master.cluster.list_mounts(ListMountsRequest {}).await;
        let mounts = masters.ask_unary(list).await?.mounts;
        let is_fs_mode = |id: u32| mounts.iter().any(|mount| mount.id == id && mount.write_type() == WriteType::FsMode);
        for path in &self.paths {
            let entry = resolve(&masters, path).await?;
            let mut view = EntryView::new(path.clone(), &entry);
            if is_fs_mode(entry.mount_id) {
                // The namespace is the truth: when the bucket was listed says nothing of the file.
                view.listing_age_ms = None;
                view.bucket = Some(BucketView::of(&masters, path).await?);
            }
            if view.kind == "file" && view.mount_id.is_some() {
                view.unavailable = unavailable(&masters, view.inode).await?;
            }
            if self.json {
                console::json_line(&view)?;
                continue;
            }
            console::line(console::name(&view.path))?;
            let mut facts = vec![
                ("kind", view.kind.to_owned()),
                ("size", view.size.to_string()),
                ("mode", view.mode),
                ("owner", format!("{}:{}", view.uid, view.gid)),
                ("modified", view.mtime),
                ("inode", view.inode.to_string()),
            ];
            let mount = mounts.iter().find(|mount| Some(mount.id) == view.mount_id);
            facts.extend(mount.map(|mount| ("mount", mount.path.clone())));
            facts.extend(Some(view.key).filter(|key| !key.is_empty()).map(|key| ("key", key)));
            facts.extend(Some(view.etag).filter(|etag| !etag.is_empty()).map(|etag| ("etag", etag)));
            facts.extend(view.listing_age_ms.map(|age| ("listed", format!("{:.1} s ago", age as f64 / 1000.0))));
            facts.extend(view.bucket.map(|bucket| ("bucket", bucket.text(view.kind))));
            facts.extend(unavailable_text(&view.unavailable).map(|text| ("LOST", text)));
            for (name, value) in facts {
                console::line(format_args!("  {name:<9} {}", console::name(&value)))?;
            }
        }
        Ok(())
    }
}

/// The blocks of a file that nobody who is there has.
async fn unavailable(masters: &MasterChannel, inode: u64) -> Result<Vec<UnavailableBlock>, CliError> {
    let request = ListUnavailableRequest { inode, ..ListUnavailableRequest::default() };
    let found = masters.ask_unary(async |mut master: Stubs| master.cluster.list_unavailable(request).await).await?;
    let block = |extent: Extent| UnavailableBlock { index: extent.index, workers: extent.workers };
    Ok(found.extents.into_iter().map(block).collect())
}

fn unavailable_text(blocks: &[UnavailableBlock]) -> Option<String> {
    let first = blocks.first()?;
    let workers: Vec<String> = first.workers.iter().map(u64::to_string).collect();
    Some(format!(
        "{} at lost workers only, and in no bucket; block {} at {}: start them again",
        counted(blocks.len() as u64, "block"),
        first.index,
        workers.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_times_and_paths_read_as_usual() {
        assert_eq!(mode_text('d', 0o755), "drwxr-xr-x");
        assert_eq!(mode_text('-', 0o640), "-rw-r-----");
        assert_eq!(time_text(1_700_000_000_123_456_789), "2023-11-14T22:13:20.123Z");
        assert_eq!(time_text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(join("/", b"a"), "/a");
        assert_eq!(join("/a/b", b"c"), "/a/b/c");
        let below = [("/", ""), ("/", "a"), ("/a/", ""), ("/a", "b/c")].map(|(top, below)| path_below(top, below));
        assert_eq!(below, ["/", "/a", "/a", "/a/b/c"]);
    }
}

//! What the masters say of names, without a client: `cv fs ls`, `stat` and `du`.

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    Entry, Extent, Kind, ListMountsRequest, ListUnavailableRequest, PersistStatus, PersistStatusRequest,
    ReadDirRequest, ResolveRequest, UsageProgress, UsageRequest, WriteType,
};
use clap::Args;
use serde_json::{Value, json};

use super::walk::join;
use crate::cli::connect::{ResultArgs, rpc};
use crate::cli::persist::status_view;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct LsArgs {
    /// Absolute path in the namespace.
    #[arg(default_value = "/")]
    path: String,
    /// With permissions, size and time.
    #[arg(short)]
    long: bool,
    /// With everything below.
    #[arg(short = 'R')]
    recursive: bool,
}

#[derive(Args)]
pub struct DuArgs {
    /// Absolute path in the namespace.
    path: String,
    /// Only the total.
    #[arg(short)]
    summary: bool,
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
pub fn mode_text(kind: Kind, mode: u32) -> String {
    let bits = (0..9).map(|bit| if mode & (0o400 >> bit) == 0 { '-' } else { ['r', 'w', 'x'][bit % 3] });
    std::iter::once(kind_name(kind).1).chain(bits).collect()
}

pub fn time_text(ns: i64) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(ns)).map_or_else(|_| ns.to_string(), |time| format!("{time:.3}"))
}

async fn resolve(masters: &MasterChannel, path: &str) -> Result<Entry, CliError> {
    let request = ResolveRequest { path: path.to_owned(), session: 0 };
    Ok(masters.ask_unary(rpc!(namespace.resolve(request))).await?)
}

/// Calls `visit` with the entries of a directory as they arrive; another master goes on after the last name.
async fn list(
    masters: &MasterChannel,
    inode: u64,
    mut visit: impl FnMut(Entry) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let mut request = ReadDirRequest { inode, ..ReadDirRequest::default() };
    let list = async |mut master: Stubs| {
        let mut pages = master.namespace.read_dir(request.clone()).await?.into_inner();
        while let Some(page) = pages.message().await? {
            for entry in page.entries {
                request.after_name = entry.name.clone();
                if let Err(error) = visit(entry) {
                    return Ok(Err(error));
                }
            }
        }
        Ok(Ok(()))
    };
    masters.ask(list).await?
}

/// An entry as it is shown.
fn view(path: &str, entry: &Entry) -> Value {
    let attr = entry.attr.unwrap_or_default();
    json!({
        "path": path,
        "kind": kind_name(attr.kind()).0,
        "size": attr.size,
        "mode": mode_text(attr.kind(), attr.mode),
        "uid": attr.uid,
        "gid": attr.gid,
        "mtime": time_text(attr.mtime_ns),
        "inode": attr.inode,
        "mount_id": (entry.mount_id != 0).then_some(entry.mount_id),
        "key": entry.key,
        "etag": entry.etag,
        // Of the listing that this comes from.
        "listing_age_ms": (entry.listing_age_ms >= 0).then_some(entry.listing_age_ms),
    })
}

impl LsArgs {
    pub async fn run(&self, result: &ResultArgs) -> Result<(), CliError> {
        let masters = result.cluster.masters().await?;
        let entry = resolve(&masters, &self.path).await?;
        let attr = entry.attr.unwrap_or_default();
        if attr.kind() != Kind::Directory {
            return self.print(&self.path, &entry, result.json);
        }
        let mut pending = vec![(self.path.clone(), attr.inode)];
        while let Some((directory, inode)) = pending.pop() {
            let mut below = Vec::new();
            let show = |entry: Entry| {
                let (path, attr) = (join(&directory, &entry.name), entry.attr.unwrap_or_default());
                self.print(&path, &entry, result.json)?;
                if self.recursive && attr.kind() == Kind::Directory {
                    below.push((path, attr.inode));
                }
                Ok(())
            };
            list(&masters, inode, show).await?;
            pending.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn print(&self, path: &str, entry: &Entry, json: bool) -> Result<(), CliError> {
        if json {
            return console::json_line(&view(path, entry));
        }
        let name = match path.rsplit_once('/') {
            Some((_, name)) if !self.recursive && !name.is_empty() => name,
            _ => path,
        };
        let attr = entry.attr.unwrap_or_default();
        let (name, slash) = (console::name(name), if attr.kind() == Kind::Directory { "/" } else { "" });
        if !self.long {
            return console::line(format_args!("{name}{slash}"));
        }
        let (mode, time) = (mode_text(attr.kind(), attr.mode), time_text(attr.mtime_ns));
        console::line(format_args!("{mode} {:>14} {time} {name}{slash}", attr.size))
    }
}

/// `cv fs stat`.
pub async fn stat(paths: &[String], result: &ResultArgs) -> Result<(), CliError> {
    let masters = result.cluster.masters().await?;
    let mounts = masters.ask_unary(rpc!(cluster.list_mounts(ListMountsRequest {}))).await?.mounts;
    for path in paths {
        let entry = resolve(&masters, path).await?;
        let attr = entry.attr.unwrap_or_default();
        let mount = mounts.iter().find(|mount| mount.id == entry.mount_id);
        let (mut bucket, mut unavailable) = (None, Vec::new());
        if mount.is_some_and(|mount| mount.write_type() == WriteType::FsMode) {
            let request = PersistStatusRequest { path: path.clone(), ..PersistStatusRequest::default() };
            bucket = Some(masters.ask_unary(rpc!(cluster.get_persist_status(request))).await?);
        }
        if matches!(attr.kind(), Kind::File | Kind::Unspecified) && mount.is_some() {
            let request = ListUnavailableRequest { inode: attr.inode, ..ListUnavailableRequest::default() };
            unavailable = masters.ask_unary(rpc!(cluster.list_unavailable(request))).await?.extents;
        }
        // The namespace is the truth in fs-mode: when the bucket was listed says nothing of the file.
        let listed = Some(entry.listing_age_ms).filter(|age| *age >= 0 && bucket.is_none());
        if result.json {
            let mut view = view(path, &entry);
            view["listing_age_ms"] = listed.into();
            view["bucket"] = bucket.as_ref().map(status_view).into();
            let lost = |block: &Extent| json!({"index": block.index, "workers": block.workers});
            view["unavailable"] = unavailable.iter().map(lost).collect();
            console::json_line(&view)?;
            continue;
        }
        console::line(console::name(path))?;
        let some = |name, text: &str| Some((name, text.to_owned())).filter(|(_, text)| !text.is_empty());
        let facts = [
            some("kind", kind_name(attr.kind()).0),
            Some(("size", attr.size.to_string())),
            Some(("mode", mode_text(attr.kind(), attr.mode))),
            Some(("owner", format!("{}:{}", attr.uid, attr.gid))),
            Some(("modified", time_text(attr.mtime_ns))),
            Some(("inode", attr.inode.to_string())),
            mount.map(|mount| ("mount", mount.path.clone())),
            some("key", &entry.key),
            some("etag", &entry.etag),
            listed.map(|age| ("listed", format!("{:.1} s ago", age as f64 / 1000.0))),
            bucket.map(|bucket| ("bucket", bucket_text(&bucket, attr.kind()))),
            unavailable.first().map(|first| ("LOST", lost_text(first, unavailable.len()))),
        ];
        for (name, value) in facts.into_iter().flatten() {
            console::line(format_args!("  {name:<9} {}", console::name(&value)))?;
        }
    }
    Ok(())
}

fn bucket_text(status: &PersistStatus, kind: Kind) -> String {
    let is_directory = kind == Kind::Directory;
    if status.files + status.deletions == 0 {
        return format!("has {}", if is_directory { "everything below" } else { "it" });
    }
    let (files, objects) = (counted(status.files, "file"), counted(status.deletions, "object"));
    let what = match is_directory {
        true => format!("lacks {files}, {objects} to delete"),
        false => "lacks the last change".to_owned(),
    };
    let error = console::prefixed("; the last error: ", &status.last_error);
    format!("{what}, waiting for {:.0} s{error}", status.oldest_age_ms as f64 / 1000.0)
}

fn lost_text(first: &Extent, blocks: usize) -> String {
    let workers: Vec<String> = first.workers.iter().map(u64::to_string).collect();
    format!(
        "{} at lost workers only, and in no bucket; block {} at {}: start them again",
        counted(blocks as u64, "block"),
        first.index,
        workers.join(", ")
    )
}

/// What is below a path, the directory itself included.
async fn usage(masters: &MasterChannel, path: &str) -> Result<UsageProgress, CliError> {
    let count = async |mut master: Stubs| {
        let mut progress = master.namespace.usage(UsageRequest { path: path.to_owned() }).await?.into_inner();
        let mut last = UsageProgress::default();
        while let Some(message) = progress.message().await? {
            last = message;
        }
        Ok(last)
    };
    match masters.ask(count).await? {
        last if last.done => Ok(last),
        _ => Err(CliError::Failed(format!("the master gave up counting {path}: see its log"))),
    }
}

impl DuArgs {
    pub async fn run(&self, result: &ResultArgs) -> Result<(), CliError> {
        let masters = result.cluster.masters().await?;
        let root = resolve(&masters, &self.path).await?.attr.unwrap_or_default();
        let (mut entries, mut found) = (Vec::new(), Vec::new());
        if !self.summary && root.kind() == Kind::Directory {
            let note = |entry: Entry| {
                entries.push((entry.name, entry.attr.unwrap_or_default()));
                Ok(())
            };
            list(&masters, root.inode, note).await?;
        }
        for (name, attr) in entries {
            let path = join(&self.path, &name);
            if attr.kind() != Kind::Directory {
                found.push((path, UsageProgress { files: 1, bytes: attr.size, ..UsageProgress::default() }));
            } else if std::str::from_utf8(&name).is_ok() {
                let usage = usage(&masters, &path).await?;
                found.push((path, usage));
            } else {
                // A path is text: what is below another one cannot be asked for by itself.
                console::remark(format_args!(
                    "{}: its name is not UTF-8, so that it is counted in the total only",
                    console::escaped(&path)
                ));
            }
        }
        found.push((self.path.clone(), usage(&masters, &self.path).await?));
        let view = |(path, usage): &(String, UsageProgress)| {
            console::fields! { usage; directories, files, bytes; "path": path }
        };
        result.show(&found.iter().map(view).collect::<Vec<_>>(), || {
            let row = |(path, usage): &(String, UsageProgress)| {
                let [directories, files] = [usage.directories, usage.files].map(|count| count.to_string());
                [directories, files, console::size(usage.bytes), path.clone()]
            };
            console::table(["DIRECTORIES", "FILES", "SIZE", "PATH"], found.iter().map(row))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_times_read_as_usual() {
        assert_eq!(mode_text(Kind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(mode_text(Kind::File, 0o640), "-rw-r-----");
        assert_eq!(time_text(1_700_000_000_123_456_789), "2023-11-14T22:13:20.123Z");
        assert_eq!(time_text(0), "1970-01-01T00:00:00.000Z");
    }
}

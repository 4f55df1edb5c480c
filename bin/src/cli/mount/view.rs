//! Mounts as they may be shown: without secrets.

use std::collections::BTreeMap;

use cavern_conf::{Interval, counted};
use cavern_proto::master::{
    AttributePolicy, Consistency, FetchFailure, KeyStatus, Mount, MountReply, MountStatus, MountTable, Names, WriteType,
};
use cavern_proto::s3_options::VENDED_ROLE;
use cavern_proto::{HIDDEN, shown_option};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::clients::shown_rule;
use crate::cli::cert::timestamp;
use crate::cli::connect::word;
use crate::console;
use crate::error::CliError;

pub struct MountView {
    pub mount: Mount,
    status: Option<MountStatus>,
    /// Until when the keys last that were vended.
    keys: KeyStatus,
}

impl Serialize for MountView {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mount = &self.mount;
        let is_fs_mode = mount.write_type() == WriteType::FsMode;
        let keeps = is_fs_mode || mount.attributes() == AttributePolicy::Keep;
        let is_delegated = is_fs_mode && mount.names() == Names::Delegated;
        let view = console::fields! { mount;
            id, path, uri, metadata_ttl_ms, ttl_ms, block_size, replicas;
            "write_type": self.write_type(),
            "access_mode": if mount.is_written() { "read_write" } else { "read_only" },
            "attributes": if keeps { "keep" } else { "refuse" },
            "consistency": self.consistency(),
            "names": if is_delegated { "delegated" } else { "synced" },
            // As `--client` has them; all of them where there are none.
            "clients": self.clients(),
            "options": self.options(),
            "keys": self.role().map(|role| json!({
                "role": role,
                "read_until": until(self.keys.read_until_ns),
                "write_until": until(self.keys.write_until_ns),
                "last_error": self.keys.last_error,
            })),
            "status": self.status.as_ref().map(status_view),
        };
        view.serialize(serializer)
    }
}

fn status_view(status: &MountStatus) -> Value {
    let failure = |one: &FetchFailure| json!({"worker": one.worker_id, "message": one.message, "age_ms": one.age_ms});
    // So many entries are expected, about, of an index that runs: 0 where nothing tells. Failing workers are live and
    // cannot fetch from the bucket; failures are what the first of them say.
    console::fields! { status;
        indexing, indexed_entries, expected_entries, index_streams, index_rate, hidden_keys, unlisted_directories,
        incomplete_entries, last_error, failing_workers;
        "fetch_failures": status.fetch_failures.iter().map(failure).collect::<Vec<_>>(),
    }
}

/// When keys end; `None` where none is given out.
fn until(ns: i64) -> Option<String> {
    timestamp(ns / 1_000_000_000).filter(|_| ns > 0)
}

impl MountView {
    pub fn new(mount: Mount, mut status: Option<MountStatus>) -> Self {
        let keys = status.as_mut().and_then(|status| status.keys.take()).unwrap_or_default();
        Self { mount, status, keys }
    }

    /// The mount that an answer is about.
    pub fn answered(reply: MountReply) -> Self {
        Self { mount: reply.mount.unwrap_or_default(), status: None, keys: reply.keys.unwrap_or_default() }
    }

    /// All mounts, by path.
    pub fn all(table: &MountTable) -> Vec<Self> {
        let status = |mount: &Mount| table.status.iter().find(|status| status.mount_id == mount.id).cloned();
        let mut views: Vec<_> = table.mounts.iter().map(|mount| Self::new(mount.clone(), status(mount))).collect();
        views.sort_by(|one, other| one.mount.path.cmp(&other.mount.path));
        views
    }

    fn write_type(&self) -> String {
        word(self.mount.write_type().as_str_name(), "WRITE_TYPE_")
    }

    fn consistency(&self) -> String {
        match self.mount.consistency() {
            Consistency::Unspecified => "ttl".to_owned(),
            other => word(other.as_str_name(), "CONSISTENCY_"),
        }
    }

    fn clients(&self) -> Vec<String> {
        self.mount.clients.iter().map(shown_rule).collect()
    }

    fn options(&self) -> BTreeMap<&str, String> {
        self.mount.options.iter().map(|(key, value)| (key.as_str(), shown_option(key, value))).collect()
    }

    /// ARN of the role whose keys are vended, if they are.
    fn role(&self) -> Option<&str> {
        self.mount.options.get(VENDED_ROLE).map(String::as_str).filter(|role| !role.is_empty())
    }

    /// Says what has become of it, and of keys that are vended.
    pub fn say(&self, done: &str) -> Result<(), CliError> {
        console::line(done)?;
        self.key_remarks().iter().try_for_each(console::line)
    }

    /// In a word or two, for a table.
    fn state(&self) -> String {
        let Some(status) = &self.status else { return String::new() };
        let state = match (status.last_error.is_empty(), status.indexing) {
            (false, _) => "failing",
            (true, true) => "indexing",
            (true, false) => "ok",
        };
        let some = |count, what, is: &str| match count {
            0 => String::new(),
            count => format!(", {} {is}", counted(count, what)),
        };
        let hidden = some(status.hidden_keys, "key", "hidden");
        let failing = some(status.failing_workers, "worker", "failing");
        let keys = if self.role().is_some() && !self.keys.last_error.is_empty() { ", keys failing" } else { "" };
        format!("{state}{hidden}{failing}{keys}")
    }

    /// What there is to be said of keys that are vended.
    fn key_remarks(&self) -> Vec<String> {
        let Some(role) = self.role() else { return Vec::new() };
        let KeyStatus { read_until_ns, write_until_ns, last_error } = &self.keys;
        let ends: Vec<String> = [("read", read_until_ns), ("write", write_until_ns)]
            .into_iter()
            .filter_map(|(what, ns)| Some(format!("until {} to {what}", until(*ns)?)))
            .collect();
        let ends = if ends.is_empty() { "none is given out yet".to_owned() } else { ends.join(", ") };
        let mut remarks = vec![format!("keys are vended of {}: {ends}", console::escaped(role))];
        if !last_error.is_empty() {
            remarks.push(format!("no new keys are given out: {}", console::escaped(last_error)));
        }
        remarks
    }

    /// What there is to be said that a table has no room for.
    fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if !self.mount.clients.is_empty() {
            remarks.push(format!("there for {} only", self.clients().join(", ")));
        }
        remarks.extend(self.key_remarks());
        let Some(status) = &self.status else { return remarks };
        if status.indexing {
            let left = match status.unlisted_directories {
                0 => String::new(),
                left => format!(", {} to be listed", counted(left, "directory")),
            };
            remarks.push(format!("indexing, {} so far{left}", counted(status.indexed_entries, "entry")));
        }
        if status.incomplete_entries > 0 {
            let entries = counted(status.incomplete_entries, "entry");
            remarks.push(format!("{entries} recovered without all of their attributes"));
        }
        remarks.extend(Some(status.last_error.clone()).filter(|error| !error.is_empty()));
        remarks.extend(status.fetch_failures.iter().map(|FetchFailure { worker_id, message, age_ms, .. }| {
            let age = Interval::secs(age_ms / 1000);
            format!("worker {worker_id} cannot fetch from the bucket ({age} ago): {}", console::escaped(message))
        }));
        let unnamed = status.failing_workers.saturating_sub(status.fetch_failures.len() as u64);
        if unnamed > 0 {
            remarks.push(format!("{} cannot fetch from the bucket", counted(unnamed, "other worker")));
        }
        remarks
    }
}

/// The table of `cv mount` and `cv report`, and below it what has no room in it. Options that are hidden are left out.
pub fn print(views: &[MountView]) -> Result<(), CliError> {
    if views.is_empty() {
        return console::line("nothing is mounted: attach a bucket with `cv mount s3://BUCKET/PREFIX /PATH`");
    }
    let row = |view: &MountView| {
        let (path, uri, mode) = (view.mount.path.clone(), view.mount.uri.clone(), view.write_type().replace('_', "-"));
        let consistency = match view.consistency() {
            ttl if ttl == "ttl" => format!("ttl {}", Interval::millis(view.mount.metadata_ttl_ms)),
            other => other,
        };
        let options = view.options().into_iter().filter(|(_, value)| value != HIDDEN);
        let options: Vec<_> = options.map(|(key, value)| format!("{key}={value}")).collect();
        [path, uri, mode, consistency, view.state(), options.join(" ")]
    };
    let heading = ["PATH", "URI", "MODE", "CONSISTENCY", "STATUS", "OPTIONS"];
    console::table_cut(heading, views.iter().map(row))?;
    let remarks = views.iter().flat_map(|view| view.remarks().into_iter().map(move |text| (&view.mount.path, text)));
    remarks.map(|(path, text)| format!("{path}: {text}")).try_for_each(console::line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_unknown_options_are_not_shown() {
        let options = [
            ("s3.endpoint_url", "http://h"),
            ("s3.credentials.access", "AK"),
            ("s3.credentials.secret", "hush"),
            ("s3.credentials.session_token", "hush"),
            ("gcs.private_key", "hush"),
        ];
        let options = options.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let view = MountView::new(Mount { options, ..Mount::default() }, None);
        let text = serde_json::to_string(&view).unwrap();
        assert!(!text.contains("hush") && text.contains("http://h") && !text.contains("AK"), "{text}");
    }

    #[test]
    fn workers_that_cannot_fetch_are_named_and_what_they_say_is_shown_as_text() {
        let failure =
            FetchFailure { worker_id: 7, mount_id: 1, message: "clocks\n\u{1b}[2J differ".to_owned(), age_ms: 61_500 };
        let status = MountStatus { failing_workers: 3, fetch_failures: vec![failure], ..MountStatus::default() };
        let view = MountView::new(Mount::default(), Some(status));
        assert_eq!(view.state(), "ok, 3 workers failing");
        let named = r"worker 7 cannot fetch from the bucket (61s ago): clocks\n\u{1b}[2J differ";
        assert_eq!(view.remarks(), [named, "2 other workers cannot fetch from the bucket"]);
    }

    #[test]
    fn it_is_shown_until_when_keys_last_and_why_there_are_no_others() {
        let options = [(VENDED_ROLE.to_owned(), "arn:aws:iam::1:role/r".to_owned())].into();
        let mount = Mount { options, ..Mount::default() };
        let remarks = |mount: &Mount, keys| MountView { keys, ..MountView::new(mount.clone(), None) }.remarks();
        assert_eq!(remarks(&Mount::default(), KeyStatus::default()), [""; 0]);
        let none = remarks(&mount, KeyStatus::default());
        assert_eq!(none, ["keys are vended of arn:aws:iam::1:role/r: none is given out yet"]);
        let status = KeyStatus {
            read_until_ns: 1_700_000_000_000_000_000,
            last_error: "STS\nis down".to_owned(),
            ..KeyStatus::default()
        };
        assert_eq!(
            remarks(&mount, status),
            [
                "keys are vended of arn:aws:iam::1:role/r: until 2023-11-14T22:13:20Z to read",
                r"no new keys are given out: STS\nis down"
            ]
        );
    }
}

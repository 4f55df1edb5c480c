//! The audit log of a process: who did what to the cluster, one line of JSON for each, in a file that is rotated or
//! among the lines of the log.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::process::LogLimit;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;

use crate::error::SecurityError;
use crate::identity::Identity;

/// A file that has become as long as this gets another name,
const ROTATE_AT: u64 = 64 << 20;
/// and so many of those are kept.
const KEPT: u32 = 8;
/// Bytes of what a line is about, and of its result: more is cut off, so that no line is worth thousands of others.
const TEXT_MAX: usize = 4096;

/// What was asked for, and what came of it.
#[derive(Clone, Copy)]
pub struct Audited<'a> {
    /// `None` where connections are not secured.
    pub identity: Option<&'a Identity>,
    /// The address that it came from.
    pub peer: &'a (dyn Display + Sync),
    /// The name of the call or of the frame.
    pub operation: &'a str,
    /// What it is about: a path, a worker, a master. May be empty.
    pub subject: &'a str,
    /// The reason when it was not done.
    pub result: Result<(), &'a str>,
    /// Lines of the kind that were left out before this one, since there were too many.
    pub suppressed: u64,
}

/// Cheap to clone. Writes nothing where none is configured.
#[derive(Clone, Debug, Default)]
pub struct AuditLog {
    sink: Option<Arc<Sink>>,
    has_deletes: bool,
}

#[derive(Debug)]
enum Sink {
    Log,
    File { file: Mutex<Rotated>, failures: LogLimit<()> },
}

impl AuditLog {
    /// `target`: the absolute path of a file, which is created when there is none; `log`; or nothing. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`SecurityError::Unwritable`] when the file cannot be opened, or is that of another process.
    pub fn open(target: &str) -> Result<Self, SecurityError> {
        let sink = match target {
            "" => return Ok(Self::default()),
            "log" => Sink::Log,
            path => {
                let path = PathBuf::from(path);
                let file = Rotated::open(&path, ROTATE_AT)
                    .map_err(|source| SecurityError::Unwritable { path: path.clone(), source })?;
                Sink::File { file: Mutex::new(file), failures: LogLimit::default() }
            }
        };
        Ok(Self { sink: Some(Arc::new(sink)), has_deletes: false })
    }

    /// Whether it is to have names that clients remove, too.
    #[must_use]
    pub fn with_deletes(self, has_deletes: bool) -> Self {
        Self { has_deletes, ..self }
    }

    pub fn is_on(&self) -> bool {
        self.sink.is_some()
    }

    pub fn has_deletes(&self) -> bool {
        self.has_deletes
    }

    /// Writes a line. It is with the operating system when this returns; one that cannot be written is in the log with
    /// the reason, and what it is about goes on.
    pub fn record(&self, audited: Audited<'_>) {
        self.record_all([audited]);
    }

    /// Writes lines, all at once, as [`Self::record`] does one.
    pub fn record_all<'a>(&self, audited: impl IntoIterator<Item = Audited<'a>>) {
        let Some(sink) = &self.sink else { return };
        let lines = audited.into_iter().map(|audited| serde_json::to_string(&Line::of(&audited)).unwrap_or_default());
        match &**sink {
            Sink::Log => lines.for_each(|line| tracing::info!(target: "audit", "{line}")),
            Sink::File { file, failures } => {
                let lines = lines.fold(String::new(), |lines, line| lines + &line + "\n");
                if !lines.is_empty()
                    && let Err(error) = file.lock().append(&lines)
                    && let Some(suppressed) = failures.admit(())
                {
                    let first = lines.lines().next().unwrap_or_default();
                    let count = lines.lines().count();
                    tracing::error!(suppressed, count, "cannot write to the audit log: {error}: {first}");
                }
            }
        }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    identity: Option<String>,
    peer: String,
    operation: &'a str,
    subject: &'a str,
    result: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    suppressed: Option<u64>,
}

/// As much of a text as a line has.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_MAX)]
}

impl<'a> Line<'a> {
    fn of(audited: &Audited<'a>) -> Self {
        Self {
            time: Timestamp::now().to_string(),
            identity: audited.identity.map(ToString::to_string),
            peer: audited.peer.to_string(),
            operation: audited.operation,
            subject: cut(audited.subject),
            result: cut(audited.result.err().unwrap_or("ok")),
            suppressed: Some(audited.suppressed).filter(|suppressed| *suppressed > 0),
        }
    }
}

/// A file that is appended to, and that gets the name `FILE.1` when it is long, as `FILE.1` gets `FILE.2`.
#[derive(Debug)]
struct Rotated {
    path: PathBuf,
    file: File,
    length: u64,
    rotate_at: u64,
}

impl Rotated {
    fn open(path: &Path, rotate_at: u64) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o640).open(path)?;
        // Two processes would put each other's lines aside.
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another process writes its audit log there"),
            TryLockError::Error(error) => error,
        })?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length, rotate_at })
    }

    fn append(&mut self, line: &str) -> io::Result<()> {
        if self.length > 0 && self.length + line.len() as u64 > self.rotate_at {
            self.rotate()?;
        }
        self.file.write_all(line.as_bytes())?;
        self.length += line.len() as u64;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let name = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..KEPT).rev() {
            match fs::rename(name(number), name(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, name(1))?;
        *self = Self::open(&self.path, self.rotate_at)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::identity::Role;

    fn lines(path: &Path) -> Vec<Value> {
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_line_says_who_asked_for_what_and_what_came_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
        let identity = Identity::new("c", Role::Admin, "alice").unwrap();
        let mount = Audited {
            identity: Some(&identity),
            peer: &"10.0.0.1:5",
            operation: "Mount",
            subject: "/a \"b\"\n",
            result: Ok(()),
            suppressed: 0,
        };
        assert!(!AuditLog::default().has_deletes() && AuditLog::default().with_deletes(true).has_deletes());
        for _process in 0..2 {
            let audit = AuditLog::open(path.to_str().unwrap()).unwrap();
            assert!(AuditLog::open(path.to_str().unwrap()).unwrap_err().to_string().contains("another process"));
            audit.record(mount);
            let refused = Audited { identity: None, result: Err("no\nsuch"), suppressed: 3, ..mount };
            audit.record_all([refused, mount]);
            audit.record_all([]);
        }
        let lines = lines(&path);
        assert_eq!(lines.len(), 6, "a later process appends");
        assert_eq!(lines[0]["identity"], "cavern://c/admin/alice");
        assert_eq!(lines[0]["subject"], "/a \"b\"\n");
        assert_eq!((&lines[0]["result"], &lines[1]["result"]), (&"ok".into(), &"no\nsuch".into()));
        assert_eq!(lines[1]["identity"], Value::Null);
        assert_eq!((&lines[0]["suppressed"], &lines[1]["suppressed"]), (&Value::Null, &Value::from(3)));
        assert!(lines[0]["time"].as_str().unwrap().parse::<Timestamp>().is_ok());
        AuditLog::open("").unwrap().record(mount);
        assert!(AuditLog::open(directory.path().to_str().unwrap()).is_err());
    }

    #[test]
    fn a_line_is_not_as_long_as_whoever_asks_wants() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
        let audit = AuditLog::open(path.to_str().unwrap()).unwrap();
        let text = format!("x{}", "é".repeat(1 << 20));
        let peer = &"10.0.0.1:5";
        let (subject, result) = (text.as_str(), Err(text.as_str()));
        audit.record(Audited { identity: None, peer, operation: "Mount", subject, result, suppressed: 0 });
        let line = &lines(&path)[0];
        let shown = line["subject"].as_str().unwrap();
        assert!(shown.len() == TEXT_MAX - 1 && text.starts_with(shown));
        assert_eq!(line["result"], line["subject"]);
    }

    #[test]
    fn a_long_file_is_put_aside_and_the_oldest_goes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
        let mut file = Rotated::open(&path, 10).unwrap();
        for line in 0..30 {
            file.append(&format!("line{line:02}\n")).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "line29\n");
        let aside = |number: u32| directory.path().join(format!("audit.{number}"));
        assert_eq!(fs::read_to_string(aside(1)).unwrap(), "line28\n");
        assert_eq!(fs::read_to_string(aside(KEPT)).unwrap(), format!("line{}\n", 29 - KEPT));
        assert!(!aside(KEPT + 1).exists());
    }
}

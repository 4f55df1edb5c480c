//! One child on its way: its supervisor is started, or another one for a child whose supervisor is gone, and its ready
//! line is waited for.

use std::fs::{self, DirBuilder};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use super::child::{ChildName, Role, RunRecord};
use super::down::stop;
use super::files;
use super::masters::{PROBE_PERIOD, ProgressDeadline, probe};
use super::record::Cluster;
use super::supervisor::{clear_stop, request_stop};
use crate::error::{CliError, Context as _};

const POLL: Duration = Duration::from_millis(5);
/// For a supervisor to end that starts its child no more, or to take a child over.
const SUPERVISOR_DEADLINE: Duration = Duration::from_secs(10);
/// Lines of a failed child's log that are shown.
const LOG_TAIL_LINES: usize = 15;
const LOG_TAIL_BYTES: u64 = 1 << 20;

/// A child whose supervisor has been started.
pub struct Starting<'a> {
    cluster: &'a Cluster,
    pub name: ChildName,
    supervisor: std::process::Child,
    /// Where its own lines begin in its log.
    log_start: u64,
}

/// Begins to start a child; `None` when it is at work and has a supervisor, which it may just have been given.
pub fn ensure(cluster: &Cluster, name: ChildName) -> Result<Option<Starting<'_>>, CliError> {
    if !cluster.is_running(name)? && cluster.is_supervised(name)? {
        // Its supervisor is waiting before it starts it once more.
        request_stop(cluster, name)?;
        let what = format!("the supervisor of {name} does not end: look for it with `ps`");
        within(&what, || Ok(cluster.is_running(name)? || !cluster.is_supervised(name)?))?;
    }
    clear_stop(cluster, name)?;
    if !cluster.is_running(name)? {
        files::remove(&cluster.run_path(name))?;
        return launch(cluster, name).map(Some);
    }
    if !cluster.is_supervised(name)? {
        // What comes of it is in the record.
        let _supervisor = launch(cluster, name)?;
        within(&format!("nobody takes {name} over"), || cluster.is_supervised(name))?;
    }
    Ok(None)
}

fn within(what: &str, condition: impl Fn() -> Result<bool, CliError>) -> Result<(), CliError> {
    let is_so = files::poll(SUPERVISOR_DEADLINE, POLL, || Ok(condition()?.then_some(())))?;
    is_so.ok_or_else(|| CliError::Failed(what.to_owned()))
}

fn launch(cluster: &Cluster, name: ChildName) -> Result<Starting<'_>, CliError> {
    for directory in cluster.data_directories(name) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.context(format_args!("cannot create {}", directory.display()))?;
    }
    let log_start = fs::metadata(cluster.log_path(name)).map_or(0, |metadata| metadata.len());
    let program = std::env::current_exe().context("cannot find this executable")?;
    let mut supervisor = command(&program);
    supervisor.args(["local", "supervise"]).arg(name.to_string()).arg("--dir").arg(&cluster.directory);
    supervisor.current_dir(&cluster.directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let supervisor = supervisor.spawn().context(format_args!("cannot start {name}"))?;
    Ok(Starting { cluster, name, supervisor, log_start })
}

/// A program whose configuration is in its files: what the environment says of it is in those already.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_bytes().starts_with(b"CV_")) {
        command.env_remove(key);
    }
    command
}

impl Starting<'_> {
    /// Waits for the ready line; a master that gets on is waited for longer. Answers why a master cannot become ready
    /// before others do, if that is enough (`may_wait`).
    ///
    /// # Errors
    /// It has ended, and is not started again then, or does not become ready. They have the last lines of its log.
    pub async fn wait(mut self, patience: Duration, may_wait: bool) -> Result<Option<String>, CliError> {
        let (mut watch, mut looked) = (ProgressDeadline::new(self.name, patience), Instant::now());
        let ready = format!("cv {} ready", self.name.role.command());
        loop {
            if self.output().lines().any(|line| line.starts_with(&ready)) {
                return Ok(None);
            }
            let record = self.cluster.run_record(self.name)?;
            if let Some(RunRecord { exit: Some(exit), .. } | RunRecord { last_exit: Some(exit), .. }) = record {
                return Err(self.ended(&format!("ended with {exit} while starting")));
            }
            let supervisor = self.supervisor.try_wait().context("cannot ask for a supervisor")?;
            if let Some(status) = supervisor.filter(|_| !self.cluster.run_path(self.name).exists()) {
                return Err(self.ended(&format!("could not be started (its supervisor ended with {status})")));
            }
            if self.name.role == Role::Master && looked.elapsed() >= PROBE_PERIOD {
                let probe = probe(self.cluster, self.name.number).await?;
                watch.note(&probe);
                if may_wait && probe.waits_for.is_some() {
                    return Ok(probe.waits_for);
                }
                looked = Instant::now();
            }
            if watch.is_over() {
                return Err(self.failure(&format!("was not ready within {} s", patience.as_secs())));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// What this run of the child has said so far, at most the last part of it.
    fn output(&self) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = fs::File::open(self.cluster.log_path(self.name))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(self.log_start.max(length.saturating_sub(LOG_TAIL_BYTES))))?;
            let mut bytes = Vec::new();
            file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
    }

    fn ended(&self, what: &str) -> CliError {
        let failure = self.failure(what);
        // The caller gets the error, and need not be surprised by the child later.
        let _ = stop(self.cluster, self.name, SUPERVISOR_DEADLINE);
        failure
    }

    fn failure(&self, what: &str) -> CliError {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let tail = lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n  ");
        let log = self.cluster.log_path(self.name);
        CliError::Failed(format!("{} {what}; the end of {}:\n  {tail}", self.name, log.display()))
    }
}

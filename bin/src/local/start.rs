//! One child on its way: its keeper is started, or another one for a child whose keeper is gone, and its ready line is
//! waited for.

use std::fs::{self, DirBuilder};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use super::child::{ChildName, RunRecord, State};
use super::files;
use super::record::Cluster;
use super::supervisor::{want, want_not};
use crate::error::{CliError, Context as _};

const POLL: Duration = Duration::from_millis(5);
/// Between two looks at what a child waits for.
const LOOK: Duration = Duration::from_millis(200);
/// For a keeper to end that starts its child no more, or to take a child over.
const KEEPER_DEADLINE: Duration = Duration::from_secs(10);
/// Lines of a failed child's log that are shown.
const LOG_TAIL_LINES: usize = 15;
const LOG_TAIL_BYTES: u64 = 1 << 20;

/// A child whose keeper has been started.
pub struct Starting<'a> {
    cluster: &'a Cluster,
    name: ChildName,
    keeper: std::process::Child,
    /// Where its own lines begin in its log.
    log_start: u64,
}

/// What a look at a child has shown that is not ready yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// It need not be ready.
    Enough,
    /// It is nearer to being so than at the look before: all patience is left.
    Moves,
    Waits,
}

/// Whether a child that did not become ready has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    Yes,
    No,
}

/// Why a child is not ready.
pub struct Failure {
    pub ended: Ended,
    error: CliError,
}

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// Begins to start a child; `None` when it is at work and has a keeper, which it may just have been given.
pub fn ensure(cluster: &Cluster, name: ChildName) -> Result<Option<Starting<'_>>, CliError> {
    if !matches!(cluster.state(name)?, State::Running(_)) && cluster.is_kept(name)? {
        // Its keeper is waiting before it starts it once more.
        want_not(cluster, name)?;
        let what = format!("the keeper of {name} does not end: look for it with `ps`");
        within(&what, || Ok(matches!(cluster.state(name)?, State::Running(_)) || !cluster.is_kept(name)?))?;
    }
    want(cluster, name)?;
    if !matches!(cluster.state(name)?, State::Running(_)) {
        files::remove(&cluster.run_path(name))?;
        return launch(cluster, name).map(Some);
    }
    if !cluster.is_kept(name)? {
        // What comes of it is in the record.
        let _keeper = launch(cluster, name)?;
        within(&format!("nobody takes {name} over"), || cluster.is_kept(name))?;
    }
    Ok(None)
}

fn within(what: &str, condition: impl Fn() -> Result<bool, CliError>) -> Result<(), CliError> {
    let is_so = files::poll(KEEPER_DEADLINE, POLL, || Ok(condition()?.then_some(())))?;
    is_so.ok_or_else(|| CliError::Failed(what.to_owned()))
}

fn launch(cluster: &Cluster, name: ChildName) -> Result<Starting<'_>, CliError> {
    for directory in cluster.data_directories(name) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.context(format_args!("cannot create {}", directory.display()))?;
    }
    let log_start = fs::metadata(cluster.log_path(name)).map_or(0, |metadata| metadata.len());
    let program = std::env::current_exe().context("cannot find this executable")?;
    let mut keeper = Command::new(program);
    keeper.args(["local", "keep"]).arg(name.to_string()).arg("--dir").arg(&cluster.directory);
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.as_bytes().starts_with(b"CV_")) {
        keeper.env_remove(key);
    }
    let keeper = keeper
        .current_dir(&cluster.directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context(format_args!("cannot start {name}"))?;
    Ok(Starting { cluster, name, keeper, log_start })
}

impl Starting<'_> {
    /// Waits for the ready line. An error has the last lines of the child's log.
    pub fn wait(self, patience: Duration) -> Result<(), Failure> {
        self.wait_or(patience, || Ok(Look::Waits))
    }

    /// The same, unless `look` says that the child need not be ready; it is asked now and then, and may help it on. Who
    /// gets on is waited for.
    pub fn wait_or(
        mut self,
        patience: Duration,
        mut look: impl FnMut() -> Result<Look, CliError>,
    ) -> Result<(), Failure> {
        let mut deadline = Instant::now() + patience;
        let mut looked = Instant::now();
        let ready = format!("cv {} ready", self.name.role.ready_word());
        let failed = |ended, error| Err(Failure { ended, error });
        loop {
            if self.output().lines().any(|line| line.starts_with(&ready)) {
                return Ok(());
            }
            match self.cluster.run_record(self.name) {
                Ok(Some(RunRecord { exit: Some(exit), .. } | RunRecord { last_exit: Some(exit), .. })) => {
                    return failed(Ended::Yes, self.failure(&format!("ended with {exit} while starting")));
                }
                Ok(_) => {}
                Err(error) => return failed(Ended::No, error),
            }
            match self.keeper.try_wait() {
                Ok(Some(status)) if !self.cluster.run_path(self.name).exists() => {
                    let what = format!("could not be started (its keeper ended with {status})");
                    return failed(Ended::Yes, self.failure(&what));
                }
                Ok(_) => {}
                Err(error) => return failed(Ended::No, CliError::Failed(format!("cannot ask for a keeper: {error}"))),
            }
            if looked.elapsed() >= LOOK {
                match look() {
                    Ok(Look::Enough) => return Ok(()),
                    Ok(Look::Moves) => deadline = Instant::now() + patience,
                    Ok(Look::Waits) => {}
                    Err(error) => return failed(Ended::No, error),
                }
                looked = Instant::now();
            }
            if Instant::now() > deadline {
                return failed(Ended::No, self.failure(&format!("was not ready within {} s", patience.as_secs())));
            }
            thread::sleep(POLL);
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

    fn failure(&self, what: &str) -> CliError {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let tail = lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n  ");
        let log = self.cluster.log_path(self.name);
        CliError::Failed(format!("{} {what}; the end of {}:\n  {tail}", self.name, log.display()))
    }
}

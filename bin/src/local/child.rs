//! One child process: its name, and what its supervisor has written about it.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::files;
use crate::error::{CliError, Context as _};

/// For the supervisor of a child that is gone to say how it ended, on a busy machine, and between two looks.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);
const SETTLE_PAUSE: Duration = Duration::from_millis(10);

cavern_conf::named_values! {
    /// What a child does, in the order in which they start; they stop in the opposite one.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Role {
        S3 = "s3",
        Master = "master",
        Worker = "worker",
        Fuse = "fuse",
    }
}

impl Role {
    /// The command that runs it, and the word before `ready` in its ready line.
    pub fn command(self) -> &'static str {
        if self == Self::S3 { "dev-s3" } else { self.name() }
    }
}

/// `ROLE[N]`: role and position in the lists of `cv local status --json`, from 0; without N the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChildName {
    pub role: Role,
    pub number: usize,
}

impl fmt::Display for ChildName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.role.name())?;
        // There is one object store.
        if *self == Self::S3 { Ok(()) } else { write!(f, "{}", self.number) }
    }
}

impl ChildName {
    pub const S3: Self = Self { role: Role::S3, number: 0 };
}

impl FromStr for ChildName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no child: say s3, master, worker or fuse, with a number as in worker1");
        let role = Role::ALL.into_iter().find(|role| text.starts_with(role.name())).ok_or_else(wrong)?;
        let digits = text[role.name().len()..].trim_matches(['-', '[', ']']);
        let number = if digits.is_empty() { 0 } else { digits.parse().map_err(|_| wrong())? };
        Ok(Self { role, number })
    }
}

/// A process that cannot be confused with a later one of the same number.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: i32,
    /// Clock ticks between boot and the start of the process (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
    pub boot_id: String,
}

impl ProcessId {
    /// The process that has this number now.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name, field 2, is in parentheses and may hold anything; field 3 is the state.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        if fields.first() == Some(&"Z") {
            return Err(io::ErrorKind::NotFound.into());
        }
        let start_ticks =
            fields.get(19).and_then(|ticks| ticks.parse().ok()).ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { pid, start_ticks, boot_id })
    }

    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
    }

    /// Sends the signal if this very process is still there.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.is_alive()) else { return Ok(()) };
        match kill_process(pid, signal) {
            // It ended since we looked.
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// How a child ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// Its supervisor was not its parent, and only a parent gets the exit status.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
            Self::Unknown => write!(f, "nobody saw how"),
        }
    }
}

/// `D/run/NAME.json`.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RunRecord {
    pub process: ProcessId,
    pub exit: Option<Exit>,
    /// Who waits for the end of the process, and starts the child again.
    pub supervisor: Option<ProcessId>,
    /// How often the supervisor has started the child again.
    pub restarts: u32,
    /// How the run before this one ended.
    pub last_exit: Option<Exit>,
    /// When the child is started again, in milliseconds since 1970.
    pub next_try_ms: Option<u64>,
}

/// What can be said about a child from outside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum State {
    Running(ProcessId),
    /// It was asked to end and did, or has never been started.
    Stopped,
    /// It ended by itself or by a signal; without a supervisor that saw it, unknown how.
    Crashed(Option<Exit>),
}

impl RunRecord {
    /// A process that has just begun.
    pub fn new(process: ProcessId, supervisor: ProcessId) -> Self {
        Self { process, supervisor: Some(supervisor), ..Self::default() }
    }

    /// Whether somebody waits for the end of the child.
    pub fn is_supervised(&self) -> bool {
        self.supervisor.as_ref().is_some_and(ProcessId::is_alive)
    }

    pub fn load(path: &Path) -> Result<Option<Self>, CliError> {
        let record = files::read(path)?.map(|bytes| serde_json::from_slice(&bytes)).transpose();
        record.context(format_args!("cannot read {}", path.display()))
    }

    /// Replaces the file at once: a reader sees the old or the new record.
    pub fn store(&self, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_vec(self).context("cannot write the record of a child as JSON")?;
        files::write_whole(path, &text)
    }

    pub fn state(&self) -> State {
        match self.exit {
            Some(Exit::Code(0)) => State::Stopped,
            Some(exit) => State::Crashed(Some(exit)),
            None if self.process.is_alive() => State::Running(self.process.clone()),
            None => State::Crashed(None),
        }
    }
}

/// The state of the child whose record `load` reads. Its supervisor may be between its end and the record of it: a
/// child that is gone, nobody knows how, is looked at until there is another record, as long as its supervisor is
/// there, for two seconds at most.
pub fn settled(mut load: impl FnMut() -> Result<Option<RunRecord>, CliError>) -> Result<State, CliError> {
    let Some(first) = load()? else { return Ok(State::Stopped) };
    let state = first.state();
    if state != State::Crashed(None) {
        return Ok(state);
    }
    let other = files::poll(SETTLE_PATIENCE, SETTLE_PAUSE, || {
        // The last thing that a supervisor has written is there when it is gone.
        let is_supervised = first.is_supervised();
        let record = load()?;
        Ok((!is_supervised || record.as_ref() != Some(&first)).then_some(record))
    })?;
    Ok(other.map_or(state, |record| record.map_or(State::Stopped, |record| record.state())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_every_spelling_and_refused_otherwise() {
        let name = |role, number| Ok(ChildName { role, number });
        assert_eq!("worker".parse(), name(Role::Worker, 0));
        assert_eq!("worker2".parse(), name(Role::Worker, 2));
        assert_eq!("worker-2".parse(), name(Role::Worker, 2));
        assert_eq!("worker[2]".parse(), name(Role::Worker, 2));
        assert_eq!("s3".parse(), name(Role::S3, 0));
        assert_eq!("fuse".parse::<ChildName>().unwrap().to_string(), "fuse0");
        assert_eq!("s3".parse::<ChildName>().unwrap().to_string(), "s3");
        for wrong in ["", "workerx", "warker1", "2", "master1x"] {
            assert!(wrong.parse::<ChildName>().unwrap_err().contains(wrong));
        }
    }

    #[test]
    fn a_reused_pid_is_not_the_process() {
        let own = i32::try_from(std::process::id()).unwrap();
        let id = ProcessId::of(own).unwrap();
        assert!(id.is_alive());
        let earlier = ProcessId { start_ticks: id.start_ticks - 1, ..id.clone() };
        assert!(!earlier.is_alive());
        earlier.signal(Signal::KILL).unwrap();
        assert!(!ProcessId { boot_id: "another".into(), ..id }.is_alive());
    }

    #[test]
    fn the_record_says_how_a_child_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("worker0.json");
        assert_eq!(
            (RunRecord::load(&path).unwrap(), settled(|| RunRecord::load(&path)).unwrap()),
            (None, State::Stopped)
        );
        let state = |path: &Path| settled(|| RunRecord::load(path)).unwrap();
        let process = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut record = RunRecord::new(process.clone(), process.clone());
        record.store(&path).unwrap();
        assert_eq!(state(&path), State::Running(process.clone()));
        for (exit, expected) in [
            (Exit::Code(0), State::Stopped),
            (Exit::Code(1), State::Crashed(Some(Exit::Code(1)))),
            (Exit::Signal(9), State::Crashed(Some(Exit::Signal(9)))),
        ] {
            record.exit = Some(exit);
            record.store(&path).unwrap();
            assert_eq!(state(&path), expected);
        }
        (record.exit, record.supervisor) = (None, None);
        record.process.start_ticks = 1;
        record.store(&path).unwrap();
        assert_eq!(state(&path), State::Crashed(None));
    }

    #[test]
    fn the_supervisor_of_a_child_that_is_gone_has_a_moment_to_say_how_it_ended() {
        let supervisor = ProcessId::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let looks = |supervisor: ProcessId, unsaid: usize| {
            let gone = RunRecord::new(ProcessId::default(), supervisor);
            let ended = RunRecord { exit: Some(Exit::Signal(9)), ..gone.clone() };
            let (mut records, mut count) = (std::iter::repeat_n(gone, unsaid).chain([ended]), 0);
            let state = settled(|| {
                count += 1;
                Ok(records.next())
            });
            (state.unwrap(), count)
        };
        let ended = State::Crashed(Some(Exit::Signal(9)));
        assert_eq!(looks(supervisor, 2), (ended.clone(), 3));
        // Nobody is waited for who is gone, too, but what that one has said last counts.
        assert_eq!(looks(ProcessId::default(), 2), (State::Crashed(None), 2));
        assert_eq!(looks(ProcessId::default(), 1), (ended, 2));
    }
}

//! The supervisor of a mount: it holds what the mount would be gone without, while the process that serves it comes and
//! goes.
//!
//! `cv fuse` is the supervisor. It starts itself once more as the *daemon*, which does all the work, and has from it
//! the descriptors of `/dev/fuse`, the HTTP port and the journal. When the daemon dies, its requests stay with the
//! kernel, because the descriptors that they were read from stay open; the next daemon has the kernel send them once
//! more, and finds in the journal what it needs to answer them as the first one would have. `cv fuse reload` makes use
//! of that: the daemon brings what was written to the workers, and is replaced by one of the executable that is
//! installed now.
//!
//! The supervisor itself does nothing that could fail, and is the same for as long as the mount is there. When it dies,
//! its daemon does too, and the mount is dead.

mod link;
mod reload;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use cavern_conf::backoff::{self, Backoff};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::kernel::Mount;
use crate::kernel::mount::table::mounts_for_automounter;
pub use link::{Kind, Link, Message};
use reload::{Asked, Reloads};
pub use reload::{ReloadError, reload};

/// The argument of `cv fuse` that makes it the daemon of a supervisor.
pub const DAEMON_ARGUMENT: &str = "--daemon";

/// The executable of this process, also when its file has been replaced.
const OWN: &str = "/proc/self/exe";

/// How often it is looked whether a daemon is dead that cannot end: one of its threads may wait, in the kernel, for
/// what only the next daemon can answer.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often that is looked at when it has closed its end of the link.
const LOOK_AT_END: Duration = Duration::from_millis(20);
/// A mount whose daemon dies so often within [`OFTEN_WITHIN`] after it had begun to serve is given up.
const OFTEN: usize = 20;
const OFTEN_WITHIN: Duration = Duration::from_secs(60);
/// And so is one that nobody could serve for this long.
const UNSERVED_MOST: Duration = Duration::from_secs(600);
/// A daemon that is to be replaced has this long to bring what was written to the workers.
const REPLACE_WAIT: Duration = Duration::from_secs(30);
/// And its successor to serve.
const READY_WAIT: Duration = Duration::from_secs(60);

/// Why a supervisor could not begin, or gave up.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("the process that serves the mount could not be started: {0}")]
    Start(#[source] io::Error),
    #[error("memory for the journal of the mount could not be had: {0}")]
    Journal(#[source] io::Error),
    #[error(
        "{mount_point} is unmounted: the process that serves it died {OFTEN} times within a minute; its log says why"
    )]
    DiesOften { mount_point: String },
    #[error("{mount_point} is unmounted: nobody could serve it for ten minutes; the log says why")]
    Unserved { mount_point: String },
}

/// How a supervisor ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisorExit {
    /// As its daemon did: with this exit code.
    Exit(i32),
    /// By the signal that ended its daemon, which nobody could go on for.
    Signal(i32),
}

/// Which executable a daemon is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Executable {
    /// The one that is installed now.
    Installed,
    /// The supervisor's own, which may have been replaced.
    Own,
}

/// A daemon.
struct Daemon {
    child: Child,
    pid: Option<Pid>,
    link: Link,
    is_ready: bool,
}

/// What the mount would be gone without.
#[derive(Default)]
struct MountResources {
    /// The port, and the devices.
    descriptors: Vec<OwnedFd>,
    /// `None` before there is one.
    mount: Option<SupervisedMount>,
    /// Its number on this host.
    device: Option<String>,
}

/// A mount, as a daemon tells its supervisor of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SupervisedMount {
    pub path: PathBuf,
    pub is_by_root: bool,
}

impl SupervisedMount {
    pub fn text(&self) -> String {
        format!("{}{}", if self.is_by_root { 'r' } else { 'h' }, self.path.display())
    }

    fn of_text(text: &str) -> Option<Self> {
        let is_by_root = text.starts_with('r');
        Some(Self { path: PathBuf::from(text.get(1..)?), is_by_root })
    }
}

struct Supervisor {
    program: PathBuf,
    arguments: Vec<OsString>,
    /// Its daemons have to stay in its process group.
    mounts_for_automounter: bool,
    journal: OwnedFd,
    owned: MountResources,
    reloads: Option<Reloads>,
    executable: Executable,
    /// Daemons that are dead and have not ended yet: each is waited for.
    ending: JoinSet<()>,
    deaths: VecDeque<Instant>,
    /// Between a daemon's death and the start of the next.
    backoff: Backoff,
    unserved_since: Option<Instant>,
}

/// What has become of a daemon.
enum Event {
    Message(Message),
    Ended(ExitStatus),
    Stop,
    Reload(Asked),
}

/// Has daemons serve a mount until `stop`, or until one of them ends by itself. `mount_point` is where it is to be, and
/// `arguments` are those of this process, from which a daemon is started. To be called on the main thread: daemons end
/// with the thread that started them.
///
/// # Errors
/// No daemon could be started, or the mount was given up.
pub async fn supervise(
    mount_point: &Path,
    arguments: Vec<OsString>,
    stop: CancellationToken,
) -> Result<SupervisorExit, SupervisorError> {
    let program = std::env::current_exe().map_err(SupervisorError::Start)?;
    let journal =
        memfd_create("cavern-journal", MemfdFlags::CLOEXEC).map_err(|cause| SupervisorError::Journal(cause.into()))?;
    let supervisor = Supervisor {
        program,
        arguments,
        mounts_for_automounter: mounts_for_automounter(mount_point),
        journal,
        owned: MountResources::default(),
        reloads: None,
        executable: Executable::Installed,
        ending: JoinSet::new(),
        deaths: VecDeque::new(),
        backoff: backoff::DAEMON.begin(),
        unserved_since: None,
    };
    supervisor.run(stop).await
}

impl Supervisor {
    async fn run(mut self, stop: CancellationToken) -> Result<SupervisorExit, SupervisorError> {
        let mut daemon = self.start().await?;
        let (mut is_stopping, mut asked, mut ready_by) = (false, None::<Asked>, None::<Instant>);
        loop {
            let event = tokio::select! {
                event = daemon.event() => event,
                () = stop.cancelled(), if !is_stopping => Event::Stop,
                another = next_reload(self.reloads.as_ref()), if asked.is_none() => Event::Reload(another),
                () = sleep_until(ready_by.unwrap_or_else(Instant::now)), if ready_by.is_some() => {
                    warn!("the new process does not serve the mount in time: it is ended");
                    daemon.signal(Signal::KILL);
                    ready_by = None;
                    continue;
                }
            };
            match event {
                Event::Message(Message { kind: Kind::Keep, text, descriptors }) => self.store(&text, descriptors),
                Event::Message(Message { kind: Kind::Ready, .. }) => {
                    daemon.is_ready = true;
                    if is_stopping {
                        daemon.stop();
                    }
                    (self.unserved_since, ready_by) = (None, None);
                    self.backoff.reset();
                    if let Some(asked) = asked.take() {
                        asked.answer(self.executable == Executable::Installed, daemon.pid).await;
                    }
                }
                Event::Message(_) => {}
                Event::Stop => {
                    is_stopping = true;
                    // One that takes up what another one left must not be ended before it has.
                    if daemon.is_ready || self.owned.mount.is_none() {
                        daemon.stop();
                    }
                }
                Event::Reload(another) if is_stopping || !daemon.is_ready => {
                    another.say("the mount is not served at the moment: try again").await;
                }
                Event::Reload(another) => {
                    if let Err(reason) = daemon.prepare_to_be_replaced().await {
                        another.say(&reason).await;
                        continue;
                    }
                    info!("the process that serves the mount is replaced");
                    asked = Some(another);
                    self.executable = Executable::Installed;
                    daemon.signal(Signal::KILL);
                }
                Event::Ended(status) => {
                    if let Some(kept) = self.is_over(&daemon, status, is_stopping) {
                        return Ok(kept);
                    }
                    self.died(daemon, status, asked.is_some())?;
                    self.backoff.wait().await;
                    daemon = self.start().await?;
                    ready_by = asked.is_some().then(|| Instant::now() + READY_WAIT);
                }
            }
        }
    }

    async fn start(&mut self) -> Result<Daemon, SupervisorError> {
        let started = match self.executable {
            Executable::Installed => self.spawn(&self.program).or_else(|cause| {
                let program = self.program.display();
                warn!(%program, %cause, "the executable cannot be started: the supervisor's own is");
                self.executable = Executable::Own;
                self.spawn(Path::new(OWN))
            }),
            Executable::Own => self.spawn(Path::new(OWN)),
        };
        let daemon = started.map_err(SupervisorError::Start)?;
        let mut descriptors = vec![self.journal.as_fd()];
        descriptors.extend(self.owned.descriptors.iter().map(|owned| owned.as_fd()));
        // One that is dead already is seen to be so.
        if let Err(cause) = daemon.link.send(Kind::Begin, "", &descriptors).await {
            warn!(%cause, "the process that is to serve the mount cannot be given what it needs");
        }
        Ok(daemon)
    }

    fn spawn(&self, program: &Path) -> io::Result<Daemon> {
        let (link, other) = Link::pair()?;
        let mut command = Command::new(program);
        command.args(&self.arguments).arg(DAEMON_ARGUMENT).stdin(Stdio::from(other));
        // An interrupt at the terminal is for the supervisor, which passes it on: a second one ends a daemon undrained.
        if !self.mounts_for_automounter {
            command.process_group(0);
        }
        let child = command.spawn()?;
        let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        Ok(Daemon { child, pid, link, is_ready: false })
    }

    /// Holds what the first daemon has made.
    fn store(&mut self, text: &str, descriptors: Vec<OwnedFd>) {
        let Some(mount) = SupervisedMount::of_text(text) else { return };
        if self.reloads.is_none() {
            match Reloads::listen(&mount.path) {
                Ok(reloads) => self.reloads = Some(reloads),
                Err(cause) => warn!(%cause, "cv fuse reload will not find this mount"),
            }
        }
        let device = self.owned.device.take().or_else(|| Mount::device_at(&mount.path));
        self.owned = MountResources { descriptors, mount: Some(mount), device };
    }

    /// How the supervisor ends with this daemon, if it does: it was to, the mount is gone, or there is none yet.
    fn is_over(&self, daemon: &Daemon, status: ExitStatus, is_stopping: bool) -> Option<SupervisorExit> {
        let has_mount = self.owned.mount.is_some();
        let ended = match (status.code(), status.signal()) {
            (Some(code), _) => SupervisorExit::Exit(code),
            (None, signal) => SupervisorExit::Signal(signal.unwrap_or(libc::SIGKILL)),
        };
        let is_done = ended == SupervisorExit::Exit(0) && (daemon.is_ready || !has_mount);
        // After one that was killed, another one brings what was written to the workers before it ends.
        let cannot_go_on = is_stopping && matches!(ended, SupervisorExit::Exit(_));
        if cannot_go_on && !is_done {
            self.unmount();
        }
        (is_done || cannot_go_on || !has_mount).then_some(ended)
    }

    /// Gets ready for another daemon.
    fn died(&mut self, daemon: Daemon, status: ExitStatus, is_replaced: bool) -> Result<(), SupervisorError> {
        let now = Instant::now();
        let mount_point = self.owned.mount.as_ref().map(|mount| mount.path.display().to_string()).unwrap_or_default();
        if !is_replaced {
            warn!(mount_point, how = %status, "the process that serves the mount has ended: another one goes on");
        }
        while self.ending.try_join_next().is_some() {}
        if daemon.is_ready && !is_replaced {
            self.deaths.push_back(now);
        }
        while self.deaths.front().is_some_and(|death| *death + OFTEN_WITHIN < now) {
            self.deaths.pop_front();
        }
        let dies_often = !is_replaced && self.deaths.len() > OFTEN / 2;
        self.executable = match self.executable {
            // It does not serve the mount, or not for long: perhaps the supervisor's own does.
            Executable::Installed if !daemon.is_ready || dies_often => Executable::Own,
            Executable::Own if is_replaced => Executable::Own,
            _ => Executable::Installed,
        };
        let mut child = daemon.child;
        self.ending.spawn(async move {
            // One that cannot be waited for is nobody's concern any more.
            let _ = child.wait().await;
        });
        let unserved_since = *self.unserved_since.get_or_insert(now);
        let error = if self.deaths.len() >= OFTEN {
            SupervisorError::DiesOften { mount_point }
        } else if unserved_since + UNSERVED_MOST < now {
            SupervisorError::Unserved { mount_point }
        } else {
            return Ok(());
        };
        self.unmount();
        Err(error)
    }

    fn unmount(&self) {
        if let Some(SupervisedMount { path, is_by_root }) = &self.owned.mount {
            // Somebody may have unmounted it, though not for those who have files open, and mounted another. Where its
            // number was not to be learned, one of ours that is seen there now may be another's.
            let at_place = Mount::device_at(path);
            if at_place.is_some() && at_place != self.owned.device {
                return;
            }
            let mut mount = Mount::adopt(path.clone(), *is_by_root, self.owned.device.clone());
            if mount.is_there() {
                error!(mount_point = %path.display(), "the mount is taken away");
                mount.detach();
            }
        }
    }
}

impl Daemon {
    async fn event(&mut self) -> Event {
        loop {
            tokio::select! {
                // What it has said before it ended comes first.
                biased;
                received = self.link.receive() => match received {
                    Ok(Some(message)) => return Event::Message(message),
                    // It ends, or has no use for its supervisor any more.
                    Ok(None) => return self.ended().await,
                    Err(cause) => {
                        warn!(%cause, "the process that serves the mount cannot be understood: it is ended");
                        self.signal(Signal::KILL);
                        return self.ended().await;
                    }
                },
                () = sleep(LOOK_EVERY) => if let Some(status) = self.status() {
                    return Event::Ended(status);
                },
            }
        }
    }

    async fn ended(&mut self) -> Event {
        loop {
            if let Ok(Ok(status)) = timeout(LOOK_AT_END, self.child.wait()).await {
                return Event::Ended(status);
            }
            if let Some(status) = self.status() {
                return Event::Ended(status);
            }
        }
    }

    /// How it has ended, also while threads of it are left that cannot end yet, so that nobody can wait for it.
    fn status(&self) -> Option<ExitStatus> {
        match self.pid {
            Some(pid) => status_of(pid),
            None => Some(ExitStatus::from_raw(libc::SIGKILL)),
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid {
            let _ = kill_process(pid, signal);
        }
    }

    /// Asks it to end, also if somebody has stopped it.
    fn stop(&self) {
        self.signal(Signal::TERM);
        self.signal(Signal::CONT);
    }

    /// Has it bring what was written to where the next one finds it; the reason why it may not be replaced now.
    async fn prepare_to_be_replaced(&self) -> Result<(), String> {
        let asked = async {
            self.link.send(Kind::Replace, "", &[]).await?;
            loop {
                match self.link.receive().await? {
                    Some(Message { kind: Kind::Replace, text, .. }) => return Ok(text),
                    Some(_) => {}
                    None => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                }
            }
        };
        match timeout(REPLACE_WAIT, asked).await {
            Ok(Ok(reason)) if reason.is_empty() => Ok(()),
            Ok(Ok(reason)) => Err(reason),
            Ok(Err(cause)) => Err(format!("the process that serves the mount does not answer: {cause}")),
            Err(_late) => Err("the process that serves the mount does not answer: look into its log".to_owned()),
        }
    }
}

async fn next_reload(reloads: Option<&Reloads>) -> Asked {
    match reloads {
        Some(reloads) => reloads.next().await,
        None => std::future::pending().await,
    }
}

/// How a process has ended whose first thread has: none of the others does anything for the mount then. `None` while it
/// runs.
fn status_of(pid: Pid) -> Option<ExitStatus> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    // Its name may have any character; the state follows, and the last field is what wait(2) would tell.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let raw = fields.last().and_then(|last| last.parse().ok()).unwrap_or(libc::SIGKILL);
    let is_dead = fields.first().is_none_or(|state| matches!(*state, "Z" | "X"));
    is_dead.then(|| ExitStatus::from_raw(raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_knows_the_mount_that_it_is_told_of() {
        for is_by_root in [true, false] {
            let mount = SupervisedMount { path: PathBuf::from("/mnt/my data"), is_by_root };
            assert_eq!(SupervisedMount::of_text(&mount.text()), Some(mount));
        }
        assert_eq!(SupervisedMount::of_text(""), None);
    }

    /// Nobody has waited for any of these.
    #[test]
    fn how_a_process_has_ended_is_known_before_its_last_thread_has() {
        for (script, signal, expected) in [
            ("exit 0", None, ExitStatus::from_raw(0)),
            ("exit 3", None, ExitStatus::from_raw(3 << 8)),
            ("read -r _", Some(Signal::KILL), ExitStatus::from_raw(libc::SIGKILL)),
        ] {
            let mut child =
                std::process::Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
            let pid = Pid::from_child(&child);
            if let Some(signal) = signal {
                assert_eq!(status_of(pid), None, "it waits for a line");
                kill_process(pid, signal).unwrap();
            }
            let status = loop {
                if let Some(status) = status_of(pid) {
                    break status;
                }
                std::thread::yield_now();
            };
            assert_eq!(status, expected, "{script}");
            assert_eq!(child.wait().unwrap(), expected, "{script}");
            assert_eq!(status_of(pid), Some(ExitStatus::from_raw(libc::SIGKILL)), "nobody knows any more");
        }
    }
}

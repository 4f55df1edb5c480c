//! The supervisor: parent of one child, the only one who learns how it ends, and who starts it again.
//!
//! A child that ends though nobody has stopped it is started again after a pause, which doubles from failure to failure
//! up to half a minute, and begins anew once the child has run for a minute. Whoever stops or kills a child on purpose
//! leaves a file first ([`Cluster::stop_path`]), and sends the signal then: the supervisor looks for it before each
//! start. Exit code 0 counts as asked for, whoever did: SIGTERM, or somebody unmounted a mount.
//!
//! A supervisor that is killed leaves its child at work, without anybody who would start it again: `cv local status`
//! says so, and `cv local up` or `start` gives it a new supervisor. That one is not its parent. So it looks now and
//! then whether the child is still there, and cannot know how its end came.
//!
//! What the child needs is read from the record of the cluster at each start. A dead mount of `cv fuse` is not touched
//! before its successor is about to mount, and then by that: until then programs get `ENOTCONN` rather than see, and
//! write into, the directory below.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use cavern_conf::process::create_privately;
use cavern_conf::{backoff, host};
use tokio::time::Instant;

use super::child::{ChildName, Exit, ProcessId, Role, RunRecord};
use super::record::{Cluster, Fuse, Master, Restart, Worker};
use super::{certificates, files};
use crate::error::{CliError, Context as _};

/// A child that has run for so long has not failed in vain: the next pause is the first again.
const SETTLED: Duration = Duration::from_secs(60);
/// Between two looks whether the child is wanted, during a pause.
const POLL: Duration = Duration::from_millis(20);
/// Between two looks whether somebody else's child is still there.
const ADOPTED_POLL: Duration = Duration::from_millis(100);

/// Runs a child of the cluster in `directory`, in a session of its own, its output appended to its log; keeps its run
/// record up to date; returns when it has ended for good. A child that is at work is taken over. The environment is
/// handed on.
pub fn supervise(directory: &Path, name: ChildName) -> Result<(), CliError> {
    // Away from the caller's terminal, so that its Ctrl-C does not end the cluster.
    rustix::process::setsid().context("cannot begin a session")?;
    // The child, its log and what it keeps are its user's alone.
    create_privately();
    let own = i32::try_from(std::process::id()).map_err(io::Error::other).and_then(ProcessId::of);
    let supervisor = Supervisor {
        directory: directory.to_owned(),
        name,
        // Asked for once: whoever replaces the executable gets the new one with the next start.
        program: std::env::current_exe().context("cannot find this executable")?,
        own: own.context("cannot find this process")?,
    };
    supervisor.supervise()
}

impl Cluster {
    /// Arguments of a child, and its environment beside what it inherits. What differs between children of one role
    /// goes through the environment, the rest is in the common configuration; keys of the object store stay out of the
    /// process list.
    pub fn launch(&self, name: ChildName) -> (Vec<String>, Vec<(&'static str, String)>) {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut arguments = vec![name.role.command().to_owned()];
        let mut environment = match name.role {
            Role::S3 => {
                let admin = self.s3.admin.iter().flat_map(|admin| ["--admin-listen", admin]).map(str::to_owned);
                arguments.extend(["--root".to_owned(), text(&self.s3.root), "--listen".to_owned()]);
                arguments.extend([self.s3.listen.clone()].into_iter().chain(admin));
                vec![
                    ("CV_DEV_S3_ACCESS_KEY", self.s3.access_key.clone()),
                    ("CV_DEV_S3_SECRET_KEY", self.s3.secret_key.clone()),
                ]
            }
            Role::Master => {
                let Master { grpc, http, data_dir, .. } = &self.masters[name.number];
                vec![
                    ("CV_MASTER__LISTEN", grpc.clone()),
                    ("CV_MASTER__ADVERTISE", grpc.clone()),
                    ("CV_MASTER__HTTP_LISTEN", http.clone()),
                    ("CV_MASTER__DATA_DIR", text(data_dir)),
                ]
            }
            Role::Worker => {
                let Worker { data, http, socket, dirs } = &self.workers[name.number];
                let dirs: Vec<String> = dirs.iter().map(|dir| format!("{}{}", dir.tier, dir.path.display())).collect();
                vec![
                    ("CV_WORKER__LISTEN", data.clone()),
                    ("CV_WORKER__ADVERTISE", data.clone()),
                    ("CV_WORKER__HTTP_LISTEN", http.clone()),
                    ("CV_WORKER__SOCKET", text(socket)),
                    ("CV_WORKER__DIRS", toml::Value::from(dirs).to_string()),
                ]
            }
            Role::Fuse => {
                let Fuse { http, mount_point } = &self.fuse[name.number];
                vec![("CV_FUSE__HTTP_LISTEN", http.clone()), ("CV_FUSE__MOUNT_POINT", text(mount_point))]
            }
        };
        if name.role != Role::S3 {
            arguments.extend(["--conf".to_owned(), text(&self.conf_path())]);
        }
        environment.extend(certificates::environment(self, name));
        (arguments, environment)
    }
}

struct Supervisor {
    directory: PathBuf,
    name: ChildName,
    program: PathBuf,
    own: ProcessId,
}

impl Supervisor {
    fn supervise(&self) -> Result<(), CliError> {
        let cluster = Cluster::load(&self.directory)?;
        let run_path = cluster.run_path(self.name);
        let left = cluster.run_record(self.name)?.filter(|record| record.exit.is_none() && record.process.is_alive());
        // None of the child of a supervisor that is gone.
        let (mut record, mut child) = match left {
            Some(record) => (RunRecord { supervisor: Some(self.own.clone()), ..record }, None),
            None => {
                let (process, child) = self.spawn(&cluster)?;
                (RunRecord::new(process, self.own.clone()), Some(child))
            }
        };
        let mut backoff = backoff::LOCAL_PROCESS.begin();
        loop {
            record.store(&run_path)?;
            let began = Instant::now();
            let exit = wait(child, &record.process).context(format_args!("cannot wait for {}", self.name))?;
            record.exit = Some(exit);
            if exit == Exit::Code(0) || !self.should_run()? {
                return record.store(&run_path);
            }
            if began.elapsed() >= SETTLED {
                backoff.reset();
            }
            child = loop {
                let pause = backoff.next_pause();
                record.next_try_ms = Some(now_ms().saturating_add(pause.as_millis() as u64));
                record.store(&run_path)?;
                self.log(format_args!("{} has ended ({exit}) and is started again in {pause:?}", self.name));
                let should_run = self.pause(pause)?;
                record.next_try_ms = None;
                if !should_run {
                    return record.store(&run_path);
                }
                match Cluster::load(&self.directory).and_then(|cluster| self.spawn(&cluster)) {
                    Ok((process, child)) => {
                        (record.process, record.exit, record.last_exit) = (process, None, Some(exit));
                        record.restarts = record.restarts.saturating_add(1);
                        break Some(child);
                    }
                    Err(error) => self.log(format_args!("cannot start {}: {error}", self.name)),
                }
            };
        }
    }

    /// Whether the child is to be started again.
    fn should_run(&self) -> Result<bool, CliError> {
        let Some(cluster) = Cluster::find(&self.directory)? else { return Ok(false) };
        Ok(cluster.restart == Restart::OnFailure && !cluster.stop_path(self.name).exists())
    }

    /// Waits, and says whether the child is still to be started then.
    fn pause(&self, pause: Duration) -> Result<bool, CliError> {
        let deadline = Instant::now() + pause;
        while self.should_run()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(true);
            }
            thread::sleep(left.min(POLL));
        }
        Ok(false)
    }

    fn spawn(&self, cluster: &Cluster) -> Result<(ProcessId, Child), CliError> {
        let log = cluster.log_path(self.name);
        let output = OpenOptions::new().create(true).append(true).open(&log);
        let output = output.context(format_args!("cannot write {}", log.display()))?;
        let (arguments, environment) = cluster.launch(self.name);
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::null()).current_dir(&cluster.directory);
        command.stdout(output.try_clone().context("cannot share the log")?).stderr(output);
        let child = command.envs(environment).spawn();
        let child = child.context(format_args!("cannot run {}", self.program.display()))?;
        let pid = i32::try_from(child.id()).context("a process without a number")?;
        // One that has ended already cannot be looked at; its number is still reserved, since nobody has waited for it.
        let process = ProcessId::of(pid).unwrap_or(ProcessId { pid, start_ticks: 0, boot_id: String::new() });
        Ok((process, child))
    }

    /// A line in the child's log, beside its own.
    fn log(&self, text: std::fmt::Arguments<'_>) {
        let Ok(Some(cluster)) = Cluster::find(&self.directory) else { return };
        let log = OpenOptions::new().append(true).open(cluster.log_path(self.name));
        // Without a log nobody reads it.
        let _ = log.and_then(|mut log| writeln!(log, "cv local: {text}"));
    }
}

fn wait(child: Option<Child>, process: &ProcessId) -> io::Result<Exit> {
    let Some(mut child) = child else {
        while process.is_alive() {
            thread::sleep(ADOPTED_POLL);
        }
        return Ok(Exit::Unknown);
    };
    let status = child.wait()?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    })
}

fn now_ms() -> u64 {
    u64::try_from(host::wall_ns() / 1_000_000).unwrap_or_default()
}

/// How long it is until a moment in milliseconds since 1970.
pub fn until_ms(moment_ms: u64) -> u64 {
    moment_ms.saturating_sub(now_ms())
}

/// Takes away that a child was stopped on purpose.
pub fn clear_stop(cluster: &Cluster, name: ChildName) -> Result<(), CliError> {
    files::remove(&cluster.stop_path(name))
}

/// Notes that a child is stopped on purpose. Its supervisor starts it no more once this has returned, unless it has
/// just done so.
pub fn request_stop(cluster: &Cluster, name: ChildName) -> Result<(), CliError> {
    let path = cluster.stop_path(name);
    fs::write(&path, []).context(format_args!("cannot write {}", path.display()))
}

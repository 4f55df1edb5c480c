//! Stopping: one child, or all of them in order with their mounts undone.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_net::journals;
use rustix::process::{Signal, geteuid};

use super::child::{ChildName, ProcessId, Role, State};
use super::files;
use super::mounted::{detach, is_mounted};
use super::record::Cluster;
use super::supervisor::request_stop;
use crate::console;
use crate::error::{CliError, Context as _};

const POLL: Duration = Duration::from_millis(5);
/// After SIGKILL a process is gone as soon as the kernel gets to it, unless a disk does not answer.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// SIGTERM, and SIGKILL when the child is still there after `patience`. It is not started again.
pub fn stop(cluster: &Cluster, name: ChildName, patience: Duration) -> Result<(), CliError> {
    request_stop(cluster, name)?;
    if end(cluster, name, &[Signal::TERM, Signal::CONT], patience)? {
        return Ok(());
    }
    console::remark(format_args!("{name} did not stop within {} s and is killed", patience.as_secs()));
    kill(cluster, name)
}

/// SIGKILL, and waits until the child is gone. It is not started again.
pub fn kill(cluster: &Cluster, name: ChildName) -> Result<(), CliError> {
    request_stop(cluster, name)?;
    if end(cluster, name, &[Signal::KILL], KILL_DEADLINE)? {
        return Ok(());
    }
    Err(CliError::Failed(format!("{name} is still there {} s after SIGKILL", KILL_DEADLINE.as_secs())))
}

/// Sends the signals to a child that is wanted no more, and waits until neither it nor its supervisor is there.
fn end(cluster: &Cluster, name: ChildName, signals: &[Signal], patience: Duration) -> Result<bool, CliError> {
    let mut signalled = None;
    let gone = files::poll(patience, POLL, || {
        match cluster.state(name)? {
            // Its supervisor may have started it once more, just before the stop was recorded.
            State::Running(process) if signalled.as_ref() != Some(&process) => {
                for signal in signals {
                    process.signal(*signal).context(format_args!("cannot stop {name}"))?;
                }
                signalled = Some(process);
            }
            State::Running(_) => {}
            State::Stopped | State::Crashed(_) => return Ok((!cluster.is_supervised(name)?).then_some(())),
        }
        Ok(None)
    })?;
    Ok(gone.is_some())
}

/// Stops these FUSE clients, workers, masters and the object store, in this order, and undoes what is still mounted.
/// What the cluster has stored stays for the next `up`. Goes on after a failure and reports the first.
pub fn stop_all(cluster: &Cluster, children: &[ChildName], patience: Duration) -> Result<(), CliError> {
    let mut outcome = Ok(());
    let mut note = |result: Result<(), CliError>| {
        if outcome.is_ok() {
            outcome = result;
        }
    };
    for role in Role::ALL.into_iter().rev() {
        let names = children.iter().filter(|name| name.role == role);
        // Those of one role end side by side.
        let results: Vec<_> = thread::scope(|scope| {
            let stops: Vec<_> = names.clone().map(|name| scope.spawn(move || stop(cluster, *name, patience))).collect();
            stops.into_iter().map(|stop| stop.join()).collect()
        });
        for result in results {
            note(result.unwrap_or_else(|_| Err(CliError::Failed(format!("stopping a {} panicked", role.name())))));
        }
        if role == Role::Fuse {
            for fuse in names.filter_map(|name| cluster.fuse.get(name.number)) {
                note(undo_mount(&fuse.mount_point));
            }
        }
    }
    let workers = children.iter().filter(|name| name.role == Role::Worker);
    for worker in workers.filter_map(|name| cluster.workers.get(name.number)) {
        // Left behind by a worker that was killed.
        let _ = fs::remove_file(&worker.socket);
        let _ = fs::remove_file(journals::socket_path(&worker.socket));
    }
    if children.iter().any(|name| name.role == Role::Fuse) {
        note(end_helpers(&cluster.conf_path()));
    }
    if let Some(token) = cluster.s3.token().filter(|_| children.iter().any(|name| name.role == Role::S3)) {
        // It was good as long as the store ran.
        let _ = fs::remove_file(token);
    }
    outcome
}

/// Kills what serves a mount beside the child itself, or replays what one has left: with nobody there to answer, it
/// would go on for a while.
fn end_helpers(conf: &Path) -> Result<(), CliError> {
    let mut left = Vec::new();
    let gone = files::poll(KILL_DEADLINE, POLL, || {
        left = helpers(conf).context("cannot list the processes of this host")?;
        for helper in &left {
            helper.signal(Signal::KILL).context(format_args!("cannot kill the process {}", helper.pid))?;
        }
        Ok(left.is_empty().then_some(()))
    })?;
    gone.ok_or_else(|| {
        let pids: Vec<String> = left.iter().map(|helper| helper.pid.to_string()).collect();
        CliError::Failed(format!("processes are still there after SIGKILL: {}", pids.join(", ")))
    })
}

/// The processes of this user that serve or replay mounts with this configuration, and that nobody ends any more.
fn helpers(conf: &Path) -> io::Result<Vec<ProcessId>> {
    let mut helpers = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // One that is gone is none.
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        let arguments: Vec<&[u8]> = line.split(|byte| *byte == 0).skip(1).collect();
        let is_helper = arguments.first() == Some(&&b"fuse"[..])
            && arguments.iter().any(|argument| [&b"--daemon"[..], b"--replay"].contains(argument))
            && arguments.contains(&conf.as_os_str().as_bytes());
        let is_own = || entry.metadata().is_ok_and(|metadata| metadata.uid() == geteuid().as_raw());
        if is_helper && is_own() && is_orphan(pid) {
            helpers.extend(ProcessId::of(pid).ok());
        }
    }
    Ok(helpers)
}

/// Whether neither the supervisor of its mount nor the worker that has it replay is there any more: these end it.
fn is_orphan(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may hold anything: the state, and the parent.
    let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
    let line = parent.and_then(|parent| fs::read(format!("/proc/{parent}/cmdline")).ok()).unwrap_or_default();
    let role = line.split(|byte| *byte == 0).nth(1).unwrap_or_default();
    ![&b"fuse"[..], b"worker"].contains(&role)
}

fn undo_mount(mount_point: &Path) -> Result<(), CliError> {
    // One on top of the other, after crashes.
    while is_mounted(mount_point).context("cannot read the mount table")? {
        detach(mount_point).context(format_args!("cannot unmount {}", mount_point.display()))?;
    }
    Ok(())
}

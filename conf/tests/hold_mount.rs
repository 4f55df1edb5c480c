//! `etc/systemd/hold-mount` with a stand-in for `cv`: what becomes of `cv fuse` when systemd restarts, stops or kills
//! the process that holds it.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(30);
/// Notes each start and each reload, and ends with the codes that files say. It starts no process, which would have the
/// lock, too. It reads for a moment only: a signal just before a read waits until that is over.
const STAND_IN: &str = r#"#!/bin/bash
cd "${0%/*}" || exit
if [ "$2" = reload ]; then
    echo $$ >>reloads
    exit "$(cat reload-code)"
fi
exec 3<>fifo
trap 'exit "$(cat end-code)"' TERM
[ ! -e is-deaf ] || trap '' TERM
echo $$ >>begun
while :; do read -r -t 0.1 _ <&3; done
"#;

struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { directory: tempfile::tempdir().unwrap() };
        let program = host.path("cv");
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../etc/systemd/hold-mount");
        let script = fs::read_to_string(shipped).unwrap();
        assert!(script.contains("/usr/bin/cv ") && script.contains("\npatience=25\n"), "{script}");
        let script = script.replace("/usr/bin/cv", program.to_str().unwrap());
        fs::write(host.path("hold-mount"), script.replace("\npatience=25\n", "\npatience=5\n")).unwrap();
        fs::create_dir(host.path("run")).unwrap();
        host.set("reload-code", "0");
        host.set("end-code", "0");
        assert!(Command::new("mkfifo").arg(host.path("fifo")).status().unwrap().success());
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn set(&self, name: &str, value: &str) {
        fs::write(self.path(name), value).unwrap();
    }

    /// Starts a process that holds `cv fuse`.
    fn hold(&self) -> Child {
        let mut command = Command::new("sh");
        command.arg(self.path("hold-mount")).args(["--conf", "none"]).stdin(Stdio::null());
        command.env("RUNTIME_DIRECTORY", self.path("run")).env("MOUNT_POINT", self.path("mount"));
        command.spawn().unwrap()
    }

    /// One that starts a `cv fuse`: the one of this number.
    #[track_caller]
    fn hold_begun(&self, number: usize) -> Child {
        let holder = self.hold();
        self.wait_for("begun", number);
        holder
    }

    /// Waits until a process that holds `cv fuse` waits for its end: before that it starts another one.
    #[track_caller]
    fn wait_until_held(&self, holder: &Child) {
        let pid = holder.id();
        let waits = format!("flock\0{}\0true\0", self.path("run/lock").display());
        until("it waits for the end", || {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
            let mut lines = children.split_whitespace().map(|child| fs::read(format!("/proc/{child}/cmdline")));
            lines.any(|line| line.is_ok_and(|line| line == waits.as_bytes())).then_some(())
        });
    }

    /// The processes that a file names.
    fn noted(&self, name: &str) -> Vec<i32> {
        let lines = fs::read_to_string(self.path(name)).unwrap_or_default();
        lines.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// Waits until so many processes have been noted, and no more.
    #[track_caller]
    fn wait_for(&self, name: &str, count: usize) {
        until(name, || (self.noted(name).len() >= count).then_some(()));
        assert_eq!(self.noted(name).len(), count, "{name}");
    }

    /// Those `cv fuse` that are there.
    fn running(&self) -> Vec<i32> {
        let program = self.path("cv");
        let is_ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(program.to_str().unwrap())
        };
        self.noted("begun").into_iter().filter(is_ours).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Whoever holds it ends with it.
        for pid in self.running() {
            // It may be gone by now.
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
    }
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[track_caller]
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        sleep(Duration::from_millis(5));
    }
}

/// How a process that holds `cv fuse` ends after a signal.
#[track_caller]
fn end(mut holder: Child, with: Signal) -> ExitStatus {
    kill_process(Pid::from_child(&holder), with).unwrap();
    until("the process ends", || holder.try_wait().unwrap())
}

#[test]
fn cv_fuse_outlives_whoever_holds_it_until_it_is_to_stop() {
    let host = Host::new();
    let holder = host.hold_begun(1);
    let cv_fuse = host.running()[0];
    assert_eq!(end(holder, Signal::HUP).code(), Some(0));
    // The next one finds it.
    let holder = host.hold();
    host.wait_for("reloads", 1);
    assert_eq!(end(holder, Signal::KILL).signal(), Some(Signal::KILL.as_raw()));
    let holder = host.hold();
    host.wait_for("reloads", 2);
    assert_eq!(host.running(), [cv_fuse]);
    assert_eq!(end(holder, Signal::TERM).code(), Some(0));
    assert!(host.running().is_empty());
    // And after a stop there is none to be found.
    assert_eq!(end(host.hold_begun(2), Signal::TERM).code(), Some(0));
}

#[test]
fn a_mount_that_is_not_kept_is_made_anew_and_one_that_cannot_be_replaced_is_left() {
    let host = Host::new();
    end(host.hold_begun(1), Signal::HUP);
    host.set("reload-code", "1");
    let holder = host.hold();
    host.wait_for("reloads", 1);
    end(holder, Signal::HUP);
    assert_eq!(host.running().len(), 1);
    host.set("reload-code", "4");
    let first = host.running();
    let holder = host.hold_begun(2);
    assert!(host.running() != first && host.running().len() == 1);
    assert_eq!(end(holder, Signal::TERM).code(), Some(0));
}

#[test]
fn how_cv_fuse_ends_is_how_its_holder_does() {
    let host = Host::new();
    host.set("end-code", "7");
    // Also where another one has started it.
    end(host.hold_begun(1), Signal::HUP);
    let mut holder = host.hold();
    host.wait_for("reloads", 1);
    host.wait_until_held(&holder);
    signal(host.running()[0], Signal::TERM);
    assert_eq!(until("it ends", || holder.try_wait().unwrap()).code(), Some(7));
    let mut holder = host.hold_begun(2);
    signal(host.running()[0], Signal::KILL);
    assert_eq!(until("it ends", || holder.try_wait().unwrap()).code(), Some(128 + Signal::KILL.as_raw()));
    // One that does not heed SIGTERM is killed.
    host.set("is-deaf", "");
    assert_eq!(end(host.hold_begun(3), Signal::TERM).code(), Some(128 + Signal::KILL.as_raw()));
    assert!(host.running().is_empty());
}

/// A process whose number another has had is not ended in its place.
#[test]
fn a_number_that_another_process_has_by_now_is_left_alone() {
    let host = Host::new();
    let mut other = Command::new("sleep").arg("30").spawn().unwrap();
    host.set("run/pid", &format!("{}\n", other.id()));
    host.set("reload-code", "4");
    let lock = File::create(host.path("run/lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    let holder = host.hold();
    host.wait_for("reloads", 1);
    drop(lock);
    host.wait_for("begun", 1);
    assert!(other.try_wait().unwrap().is_none());
    end(holder, Signal::TERM);
    other.kill().unwrap();
    other.wait().unwrap();
}

/// Whichever line it is at.
#[test]
fn nothing_is_left_by_a_stop_at_any_moment_and_nothing_doubled_by_restarts() {
    let host = Host::new();
    for moment in 0..30 {
        let holder = host.hold();
        sleep(Duration::from_millis(moment));
        end(holder, Signal::TERM);
        assert!(host.running().is_empty(), "after {moment} ms");
    }
    for moment in 0..30 {
        let holder = host.hold();
        sleep(Duration::from_millis(moment));
        end(holder, Signal::HUP);
        assert!(host.running().len() <= 1, "after {moment} ms");
    }
    // Once it has looked whether there is one, it heeds signals.
    let looked = || host.noted("reloads").len() + host.noted("begun").len();
    let before = looked();
    let holder = host.hold();
    until("it runs", || (looked() > before && host.running().len() == 1).then_some(()));
    assert_eq!(end(holder, Signal::TERM).code(), Some(0));
    assert!(host.running().is_empty());
}

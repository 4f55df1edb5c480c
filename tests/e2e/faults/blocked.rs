//! A process that is held by one system call on the mount, and what a signal does to it.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cavern_tests::eventually;
use rustix::process::{Pid, Signal, kill_process};

/// A program inside a system call that a FUSE request holds up. Killed when dropped.
pub struct Blocked {
    child: Child,
    what: String,
}

impl Blocked {
    /// Runs the program until it waits for an answer of the mount, or for a page of it.
    #[track_caller]
    pub fn start(program: &[&str], path: &Path) -> Self {
        Self::start_until(program, path, &["request_wait_answer", "folio_wait"])
    }

    /// The same for a program that waits for no page of the mount: its own pages, while it starts, do not count.
    #[track_caller]
    pub fn start_asking(program: &[&str], path: &Path) -> Self {
        Self::start_until(program, path, &["request_wait_answer"])
    }

    /// Runs it until it sleeps in one of these functions of the kernel.
    #[track_caller]
    fn start_until(program: &[&str], path: &Path, functions: &[&str]) -> Self {
        let what = format!("{} {}", program.join(" "), path.display());
        // A test run in the background of a shell hands down that SIGINT is ignored, and what is ignored interrupts
        // nothing.
        let mut child = Command::new("env")
            .arg("--default-signal=INT")
            .args(program)
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let waits_in = format!("/proc/{}/wchan", child.id());
        eventually(&format!("{what} waits for the mount"), Duration::from_secs(5), || {
            assert!(child.try_wait().unwrap().is_none(), "{what} has ended instead of waiting");
            let function = fs::read_to_string(&waits_in).unwrap_or_default();
            functions.iter().any(|wanted| function.contains(wanted)).then_some(())
        });
        Self { child, what }
    }

    /// Sends the signal and answers how long the process lived on.
    #[track_caller]
    pub fn dies_of(mut self, signal: Signal) -> Duration {
        let began = Instant::now();
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let status = eventually(&format!("{} ends after {signal:?}", self.what), Duration::from_secs(60), || {
            self.child.try_wait().unwrap()
        });
        assert_eq!(status.signal(), Some(signal.as_raw()), "{}", self.what);
        began.elapsed()
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // It has ended already when all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! Locks of files in fs-mode mounts: of flock(2) and fcntl(2), between processes and between mounts, however they end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, Signal, kill_process};

/// For what must come; and for what must not.
const PATIENCE: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(400);

pub const SHARED: i32 = 1;
pub const EXCLUSIVE: i32 = 2;
pub const AT_ONCE: i32 = 4;
pub const UNLOCK: i32 = 8;

/// Numbers of the calls flock(2) and fcntl(2), as `/proc/PID/syscall` has them.
#[cfg(target_arch = "x86_64")]
const LOCKING: [u32; 2] = [73, 72];
#[cfg(target_arch = "aarch64")]
const LOCKING: [u32; 2] = [32, 25];

pub const EAGAIN: &str = "errno 11";

/// Carries out one command of a line, and says how it went.
const LOCKER: &str = r#"
import fcntl, os, signal, struct, sys
# Also where whoever runs the tests has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
files = {}
for line in sys.stdin:
    command, name, *rest = line.split()
    done = "ok"
    try:
        if command == "open":
            files[name] = os.open(rest[0], os.O_RDWR)
        elif command == "close":
            os.close(files.pop(name))
        elif command == "flock":
            fcntl.flock(files[name], int(rest[0]))
        elif command == "lockf":
            fcntl.lockf(files[name], int(rest[0]), int(rest[2]), int(rest[1]))
        elif command == "find":
            asked = struct.pack("hhqqi", int(rest[0]), 0, 0, 0, 0)
            kind, _, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(files[name], fcntl.F_GETLK, asked))
            done = "nothing" if kind == fcntl.F_UNLCK else f"{kind} {start} {length} {pid}"
        elif command == "pairs":
            for _ in range(int(rest[0])):
                fcntl.lockf(files[name], fcntl.LOCK_EX, 10, 5)
                fcntl.lockf(files[name], fcntl.LOCK_UN, 10, 5)
        elif command == "count":
            for _ in range(int(rest[0])):
                fcntl.lockf(files[name], fcntl.LOCK_EX)
                number = int(os.pread(files[name], 20, 0) or b"0")
                os.pwrite(files[name], b"%d" % (number + 1), 0)
                fcntl.lockf(files[name], fcntl.LOCK_UN)
    except OSError as error:
        done = f"errno {error.errno}"
    print(done, flush=True)
"#;

/// A process that locks files.
pub struct Locker {
    pub child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
}

impl Locker {
    /// Has the file open, under the name `f`.
    pub fn with(path: &Path) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", LOCKER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (commands, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (answer, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if answer.send(line).is_err() {
                    return;
                }
            }
        });
        let mut locker = Self { child, commands, answers };
        assert_eq!(locker.ask(&format!("open f {}", path.display())), "ok");
        locker
    }

    pub fn send(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    pub fn answer(&self) -> String {
        self.answers.recv_timeout(PATIENCE).expect("an answer")
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.answer()
    }

    pub fn flock(&mut self, operation: i32) -> String {
        self.ask(&format!("flock f {operation}"))
    }

    /// Asks for a lock that somebody else has, and waits.
    pub fn wait(&mut self, command: &str) {
        self.send(command);
        let syscall = format!("/proc/{}/syscall", self.child.id());
        eventually("the process is in the call", PATIENCE, || {
            let now = std::fs::read_to_string(&syscall).unwrap_or_default();
            LOCKING.iter().any(|number| now.starts_with(&format!("{number} "))).then_some(())
        });
        assert_eq!(self.answers.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "{command}");
    }

    fn signal(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let began = Instant::now();
        self.child.wait().unwrap();
        assert!(began.elapsed() < Duration::from_secs(5), "died {:?} after the signal", began.elapsed());
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A cluster with two mounts, and a file in both of them.
fn mounted() -> (Cluster, PathBuf, PathBuf) {
    let conf = "[master]\nsession_lease = \"5s\"\n[client]\nmetadata_timeout = \"30s\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (here, there) = (cluster.path("fs/file"), cluster.at_start.fuse[1].mount_point.join("fs/file"));
    rustix::fs::mknodat(CWD, &here, FileType::RegularFile, Mode::from_raw_mode(0o644), 0).unwrap();
    eventually("the file is seen by the other mount", PATIENCE, || there.exists().then_some(()));
    (cluster, here, there)
}

/// A descriptor that was closed is released a moment later.
fn until_locked(locker: &mut Locker) {
    eventually("the lock is free", PATIENCE, || (locker.flock(EXCLUSIVE | AT_ONCE) == "ok").then_some(()));
    assert_eq!(locker.flock(UNLOCK), "ok");
}

#[test]
fn a_lock_of_one_mount_is_one_of_the_other_and_whoever_waits_is_woken() {
    let (_cluster, here, there) = mounted();
    let (mut one, mut neighbour, mut other) = (Locker::with(&here), Locker::with(&here), Locker::with(&there));
    assert_eq!(one.flock(EXCLUSIVE), "ok");
    for locker in [&mut neighbour, &mut other] {
        assert_eq!(locker.flock(SHARED | AT_ONCE), EAGAIN);
    }
    // By an unlock, in the order of arrival.
    other.wait(&format!("flock f {EXCLUSIVE}"));
    neighbour.wait(&format!("flock f {EXCLUSIVE}"));
    let began = Instant::now();
    assert_eq!(one.flock(UNLOCK), "ok");
    assert_eq!(other.answer(), "ok");
    eprintln!("a lock went to the other mount within {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(neighbour.answers.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
    // By a close, and by the death of the process.
    assert_eq!(other.ask("close f"), "ok");
    assert_eq!(neighbour.answer(), "ok");
    one.wait(&format!("flock f {SHARED}"));
    neighbour.signal(Signal::KILL);
    assert_eq!(one.answer(), "ok");
    // Two share it, and none of them is alone.
    let mut third = Locker::with(&there);
    assert_eq!(third.flock(SHARED), "ok");
    assert_eq!(third.flock(EXCLUSIVE | AT_ONCE), EAGAIN);
    drop(one);
    until_locked(&mut third);
}

#[test]
fn who_is_interrupted_waits_no_more() {
    let (_cluster, here, there) = mounted();
    let (mut holder, mut third) = (Locker::with(&here), Locker::with(&there));
    for signal in [Signal::INT, Signal::KILL] {
        assert_eq!(holder.flock(EXCLUSIVE), "ok");
        for path in [&here, &there] {
            let mut waiter = Locker::with(path);
            waiter.wait(&format!("flock f {EXCLUSIVE}"));
            waiter.signal(signal);
        }
        assert_eq!(holder.flock(UNLOCK), "ok");
        assert_eq!(third.flock(EXCLUSIVE | AT_ONCE), "ok");
        assert_eq!(third.flock(UNLOCK), "ok");
    }
}

#[test]
fn shared_locks_of_bytes_are_found_by_those_who_ask_and_end_with_any_close() {
    let (_cluster, here, there) = mounted();
    let (mut one, mut neighbour, mut other) = (Locker::with(&here), Locker::with(&here), Locker::with(&there));
    let (read, write) = (0, 1);
    assert_eq!(one.ask(&format!("lockf f {SHARED} 10 5")), "ok");
    assert_eq!(one.ask(&format!("find f {write}")), "nothing", "its own is not in its way");
    assert_eq!(neighbour.ask(&format!("find f {write}")), format!("{read} 10 5 {}", one.child.id()));
    assert_eq!(other.ask(&format!("find f {write}")), format!("{read} 10 5 0"), "a process of another host");
    assert_eq!(other.ask(&format!("find f {read}")), "nothing");
    // flock(2) is another world.
    assert_eq!(other.flock(EXCLUSIVE | AT_ONCE), "ok");
    assert_eq!(one.flock(SHARED | AT_ONCE), EAGAIN);
    // The process has the file open twice, and closes what it has not locked by.
    assert_eq!(one.ask(&format!("open g {}", here.display())), "ok");
    assert_eq!(one.ask("close g"), "ok");
    assert_eq!(neighbour.ask(&format!("find f {write}")), "nothing");
    assert_eq!(one.ask(&format!("lockf f {SHARED} 0 0")), "ok");
    one.signal(Signal::KILL);
    eventually("the lock is gone", PATIENCE, || (other.ask(&format!("find f {write}")) == "nothing").then_some(()));
}

#[test]
fn exclusive_locks_of_bytes_are_split_and_waited_for() {
    let (_cluster, here, there) = mounted();
    let (mut one, mut other) = (Locker::with(&here), Locker::with(&there));
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 0 100")), "ok");
    // A hole in the middle.
    assert_eq!(one.ask(&format!("lockf f {UNLOCK} 40 20")), "ok");
    assert_eq!(other.ask(&format!("lockf f {} 50 5", EXCLUSIVE | AT_ONCE)), "ok");
    for start in [39, 60, 99] {
        assert_eq!(other.ask(&format!("lockf f {} {start} 1", SHARED | AT_ONCE)), EAGAIN);
    }
    assert_eq!(other.ask(&format!("lockf f {} 100 0", SHARED | AT_ONCE)), "ok");
    other.wait(&format!("lockf f {EXCLUSIVE} 60 10"));
    assert_eq!(one.ask("close f"), "ok");
    assert_eq!(other.answer(), "ok");
}

#[test]
fn who_would_wait_for_each_other_is_told_so_across_mounts() {
    let (_cluster, here, there) = mounted();
    let (mut one, mut other) = (Locker::with(&here), Locker::with(&there));
    assert_eq!(one.ask(&format!("lockf f {EXCLUSIVE} 0 1")), "ok");
    assert_eq!(other.ask(&format!("lockf f {EXCLUSIVE} 1 1")), "ok");
    one.wait(&format!("lockf f {EXCLUSIVE} 1 1"));
    assert_eq!(other.ask(&format!("lockf f {EXCLUSIVE} 0 1")), "errno 35");
    assert_eq!(other.ask(&format!("lockf f {UNLOCK} 0 0")), "ok");
    assert_eq!(one.answer(), "ok");
}

#[test]
fn a_number_that_is_counted_up_under_a_lock_counts_everybody() {
    const EACH: usize = 50;
    let (_cluster, here, there) = mounted();
    let mut lockers: Vec<Locker> = [&here, &there, &here, &there].map(|path| Locker::with(path)).into();
    lockers.iter_mut().for_each(|locker| locker.send(&format!("count f {EACH}")));
    for locker in &lockers {
        assert_eq!(locker.answer(), "ok");
    }
    for path in [&here, &there] {
        assert_eq!(std::fs::read_to_string(path).unwrap(), (4 * EACH).to_string());
    }
}

#[test]
fn a_killed_master_forgets_no_lock_and_nobody_who_waits() {
    let (cluster, here, there) = mounted();
    let (mut holder, mut waiter, mut third) = (Locker::with(&here), Locker::with(&there), Locker::with(&there));
    assert_eq!(holder.flock(EXCLUSIVE), "ok");
    waiter.wait(&format!("flock f {EXCLUSIVE}"));
    cluster.kill("master");
    cluster.start("master");
    assert_eq!(third.flock(EXCLUSIVE | AT_ONCE), EAGAIN);
    assert_eq!(waiter.answers.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
    assert_eq!(holder.flock(UNLOCK), "ok");
    assert_eq!(waiter.answer(), "ok");
}

#[test]
fn a_mount_that_is_killed_and_mounted_again_has_left_no_locks() {
    let conf = "[master]\nsession_lease = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let path = cluster.path("fs/file");
    rustix::fs::mknodat(CWD, &path, FileType::RegularFile, Mode::from_raw_mode(0o644), 0).unwrap();
    let mut holder = Locker::with(&path);
    assert_eq!((holder.flock(EXCLUSIVE), holder.ask("lockf f 2 0 0")), ("ok".into(), "ok".into()));
    cluster.kill("fuse0");
    cluster.start("fuse0");
    let mut successor = Locker::with(&path);
    assert_eq!(successor.flock(EXCLUSIVE | AT_ONCE), "ok", "a lease of 60 s is not waited for");
    assert_eq!(successor.ask(&format!("lockf f {} 0 0", EXCLUSIVE | AT_ONCE)), "ok");
}

#[test]
fn the_locks_of_a_mount_that_is_killed_end_with_its_lease() {
    let (cluster, here, there) = mounted();
    let (mut holder, mut waiter) = (Locker::with(&here), Locker::with(&there));
    assert_eq!(holder.flock(EXCLUSIVE), "ok");
    waiter.wait(&format!("flock f {EXCLUSIVE}"));
    let killed = Instant::now();
    cluster.kill("fuse0");
    assert_eq!(waiter.answer(), "ok");
    let took = killed.elapsed();
    assert!(took > Duration::from_secs(2) && took < Duration::from_secs(15), "a lease of 5 s ended after {took:?}");
}

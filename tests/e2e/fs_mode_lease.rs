//! What a client that was stopped for longer than its lease still believes: nothing.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use cavern_tests::{Child, Cluster, MountedOver, Options, Process, eventually, within};
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(30);

/// What a process sees of the directory. It waits for as long as the mount is stopped and has no answer.
fn looks(directory: &Path) -> thread::JoinHandle<(u32, u64, bool, bool, Vec<String>)> {
    let directory = directory.to_owned();
    thread::spawn(move || {
        let file = fs::metadata(directory.join("file")).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let exists = |name: &str| directory.join(name).exists();
        (file.mode() & 0o777, file.len(), exists("gone"), exists("new"), names)
    })
}

#[test]
fn a_client_that_was_stopped_for_longer_than_its_lease_believes_nothing_of_before() {
    let conf = "[master]\nsession_lease = \"2s\"\n[client]\nmetadata_timeout = \"30s\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (here, there) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
    for (name, content) in [("file", "before"), ("gone", "")] {
        fs::write(here.join(name), content).unwrap();
    }
    // Its kernel knows names and attributes, and has the pages of a file that stays open.
    let mut reader = Reader::new(&here.join("file"));
    assert_eq!(reader.read(), "before");
    let before = looks(&here).join().unwrap();
    assert_eq!(before, (0o644, 6, true, false, vec!["file".to_owned(), "gone".to_owned()]));
    let locked = Command::new("flock").arg("-Fx").arg(here.join("file")).args(["sleep", "1000"]).spawn().unwrap();
    let locked = Killed(locked);
    let is_locked =
        || !Command::new("flock").arg("-xn").arg(there.join("file")).arg("true").status().unwrap().success();
    eventually("it is locked", PATIENCE, || is_locked().then_some(()));

    let stopped = Stopped::new(&cluster.at_start.fuse[0]);
    eventually("the lock is free", PATIENCE, || (!is_locked()).then_some(()));
    fs::write(there.join("file"), "after!").unwrap();
    fs::set_permissions(there.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(there.join("gone")).unwrap();
    fs::write(there.join("new"), "").unwrap();
    File::options().write(true).open(there.join("file")).unwrap().set_len(7).unwrap();

    let seen = looks(&here);
    thread::sleep(Duration::from_millis(300));
    drop(stopped);
    assert_eq!(seen.join().unwrap(), (0o600, 7, false, true, vec!["file".to_owned(), "new".to_owned()]));
    eventually("pages of before are gone", PATIENCE, || (reader.read() == "after!").then_some(()));
    drop(locked);
}

/// A program is started with copies of all descriptors of the process that starts it, and closes them first: until a
/// mount that is stopped answers, if they are of its files.
#[test]
fn a_stopped_mount_goes_on_though_a_program_that_starts_waits_for_it() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let mut file = File::create(cluster.path("fs/file")).unwrap();
    file.write_all(b"content").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let control = MountedOver::mount(directory.path(), "fusectl", "rw");
    let connection = rustix::fs::minor(file.metadata().unwrap().dev());
    let waiting = control.path().join(format!("{connection}/waiting"));
    let fuse = cluster.at_start.fuse[0].clone();
    let stopped = Stopped::new(&fuse);
    let program = thread::spawn(|| Command::new("true").status().unwrap());
    let is_asked = || fs::read_to_string(&waiting).unwrap().trim() != "0";
    eventually("its start waits", PATIENCE, || is_asked().then_some(()));
    assert!(within("the process is found", PATIENCE, move || fuse.server()).is_some());
    drop(stopped);
    assert!(program.join().unwrap().success());
}

/// A process of the cluster that goes on with the end of this, however it comes: whoever waits for it would wait for
/// ever.
pub struct Stopped(Process);

impl Stopped {
    pub fn new(child: &Child) -> Self {
        let process = Process::of(child);
        process.signal(Signal::STOP);
        Self(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

/// A process that has a file open and reads its first bytes again and again. Were it this one, every program that is
/// started here would get a copy of the descriptor, and wait for the stopped mount when it closes that.
struct Reader {
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
    _process: Killed,
}

impl Reader {
    fn new(path: &Path) -> Self {
        let program = "import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nfor _ in sys.stdin: print(os.pread(fd, \
            6, 0).decode(), flush=True)";
        let mut command = Command::new("python3");
        command.args(["-c", program]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (ask, answers) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        Self { ask, answers, _process: Killed(process) }
    }

    fn read(&mut self) -> String {
        self.ask.write_all(b"\n").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }
}

/// A process that is ended with its owner.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

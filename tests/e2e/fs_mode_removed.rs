//! What has lost its last name, and is referred to by a process without being open as far as a file system knows:
//! FIFOs, sockets, devices, working directories, whatever is open with `O_PATH`. It is what it is in a local directory.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

/// For the master to delete what nobody holds, and for what was reported late.
const PATIENCE: Duration = Duration::from_secs(20);

/// Makes one of each kind in the directory `argv[1]`, opens it there, and removes it in `argv[2]`, the same directory
/// by another way perhaps.
const REFERRED: &str = r#"
import os, socket, stat, sys, time
here, there = sys.argv[1:]
os.chdir(here)
PATH = os.O_PATH | os.O_NOFOLLOW
def listening(name):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
kinds = {
    "fifo": (os.mkfifo, os.O_RDWR | os.O_NONBLOCK),
    "fifo by path": (os.mkfifo, PATH),
    "socket": (listening, PATH),
    "device": (lambda name: os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, 3)), PATH),
    "file by path": (lambda name: os.close(os.open(name, os.O_CREAT | os.O_WRONLY)), PATH),
    "directory": (os.mkdir, PATH | os.O_DIRECTORY),
    "link": (lambda name: os.symlink("nowhere", name), PATH),
}
def looks(file):
    try:
        it = os.fstat(file)
    except OSError as error:
        return error.errno
    mtime = int(it.st_mtime) if it.st_mtime < 2000 else None
    return oct(it.st_mode), it.st_nlink, it.st_uid, it.st_gid, it.st_rdev, mtime
def said(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return error.errno
files = {}
for kind, (make, how) in kinds.items():
    make(kind)
    files[kind] = os.open(kind, how)
os.mkdir("working")
for kind in kinds:
    path = os.path.join(there, kind)
    os.rmdir(path) if kind == "directory" else os.unlink(path)
os.chdir("working")
os.rmdir(os.path.join(there, "working"))
files["working"] = os.open(".", PATH | os.O_DIRECTORY)
def links(file):
    try:
        return os.fstat(file).st_nlink
    except OSError:
        return 0
# The kernel of another mount is notified a moment later, of names by another thread than of inodes.
if here != there:
    deadline = time.monotonic() + 20
    is_known = lambda kind: os.path.lexists(os.path.join(here, kind)) or links(files[kind]) > 0
    while any(map(is_known, files)) and time.monotonic() < deadline:
        time.sleep(0.05)
# Longer than the kernel believes what it has cached, and longer than it takes to delete what nobody holds.
seen = {kind: set() for kind in files}
until = time.monotonic() + float(os.environ["LOOK_FOR"])
while time.monotonic() < until:
    for kind, file in files.items():
        seen[kind].add(looks(file))
    time.sleep(0.1)
for kind, file in files.items():
    way = f"/proc/self/fd/{file}"
    changed = said(os.chmod, way, 0o640), said(os.chown, way, 12, 13), said(os.utime, way, (1000, 1500))
    if kind == "link":
        changed = None
    print(kind, sorted(map(str, seen[kind])), changed, looks(file), flush=True)
print("working", said(lambda: oct(os.stat(".").st_mode)), said(os.listdir, "."), said(os.mkdir, "new"))
"#;

fn referred(here: &Path, there: &Path, seconds: &str) -> String {
    let mut program = Command::new("python3");
    program.args(["-c", REFERRED]).arg(here).arg(there).env("LOOK_FOR", seconds).stdin(Stdio::null());
    let done = program.output().unwrap();
    assert!(done.status.success(), "{}: {}", here.display(), String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn what_is_referred_to_stays_when_it_is_removed() {
    let conf = "[master]\nsession_lease = \"2s\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (one, other) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
    let local = tempfile::tempdir().unwrap();
    let inodes = || cluster.cv(&["report", "--json"]).json()["inodes"].as_u64().unwrap();
    let before = inodes();
    let expected = referred(local.path(), local.path(), "0.3");
    for there in [&one, &other] {
        let found = referred(&one, there, "5");
        for (found, expected) in found.lines().zip(expected.lines()) {
            assert_eq!(found, expected, "on the mount, and in a local directory");
        }
        assert_eq!(found.lines().count(), expected.lines().count());
    }
    // Nothing of it is left when the process is gone, and the kernel has forgotten what it looked for in vain in a
    // directory that was removed elsewhere.
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    eventually("what was removed is deleted", PATIENCE, || (inodes() == before).then_some(()));
}

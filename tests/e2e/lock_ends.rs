//! When locks end: as in a local directory, whichever descriptor is closed, whoever has inherited it, and however late
//! the kernel reports it. Each scene is played in a local directory, too.

use std::path::Path;
use std::process::{Command, Stdio};

use cavern_tests::{Cluster, Options};

use crate::fs_mode_delegations::Mounts;

/// What all scenes have in common: `look` asks in another process, which has inherited nothing.
const STAGE: &str = r#"
import ctypes, errno, fcntl, mmap, os, struct, sys
name = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
OFD_GET, OFD_SET = 36, 37

def said(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]

def posix(file, kind, start=0, length=0):
    lock = struct.pack("hhqqi4x", kind, 0, start, length, 0)
    return said(lambda: fcntl.fcntl(file, fcntl.F_SETLK, lock) and "locked")

def ofd(file, kind, start=0, length=0):
    return said(lambda: fcntl.fcntl(file, OFD_SET, struct.pack("hhqqi4x", kind, 0, start, length, 0)) and "locked")

def flock(file, how):
    return said(lambda: fcntl.flock(file, how | fcntl.LOCK_NB) or "locked")

def find(file, get, start=0, length=0):
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, length, 0)
    kind, _, start, length, _ = struct.unpack("hhqqi4x", fcntl.fcntl(file, get, asked))
    return "free" if kind == fcntl.F_UNLCK else f"{start}+{length}"

def opened(how=os.O_RDWR):
    return os.open(name, how)

class Other:
    def __init__(self, how):
        self.asks, theirs = os.pipe()[::-1], os.pipe()
        self.ask, self.answers = self.asks[0], theirs[0]
        if os.fork() == 0:
            os.close(self.ask)
            file = os.open(name, how)
            while command := os.read(self.asks[1], 100):
                answer = str(eval(command))
                os.write(theirs[1], answer.encode().ljust(100))
            os._exit(0)
        os.close(self.asks[1])
    def __call__(self, command):
        os.write(self.ask, command.encode())
        return os.read(self.answers, 100).decode().strip()

def mapped(file):
    "As mmap does, but without the descriptor that Python keeps. What unmaps it."
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    at = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    return lambda: libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(4096))

def always(command):
    "What all of many looks say: the kernel may tell late of what was closed."
    return sorted({other(command) for _ in range(100)})

READ, WRITE, UNLOCK = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
# Locks and unlocks, so that nothing is left of the question.
TRY_POSIX = "(posix(file, WRITE), posix(file, UNLOCK))[0]"
TRY_FLOCK = "(flock(file, fcntl.LOCK_EX), flock(file, fcntl.LOCK_UN))[0]"
FIND = "find(file, OFD_GET)"

def child(closes=()):
    "A process that has inherited all and ends when it is told."
    ask, told = os.pipe()[::-1]
    pid = os.fork()
    if pid == 0:
        os.close(ask)
        other and os.close(other.ask)
        os.read(told, 1)
        os._exit(0)
    os.close(told)
    return lambda: (os.close(ask), os.waitpid(pid, 0)) and None
"#;

/// Of fs-mode mounts.
const SCENES: &str = r#"
other = None
other = Other(os.O_RDWR)
os.truncate(name, 8192)

def mapping_outlives_its_descriptor():
    a = opened()
    yield posix(a, WRITE)
    unmap = mapped(a)
    os.close(a)
    yield other(TRY_POSIX)
    b = opened()
    yield posix(b, WRITE, 10, 20), other(FIND)
    unmap()
    yield always(TRY_POSIX), always(FIND)
    os.close(b)
    yield other(TRY_POSIX)

def child_that_inherited_it_ends():
    a = opened()
    yield posix(a, WRITE)
    end = child()
    os.close(a)
    b = opened()
    yield posix(b, WRITE)
    end()
    yield always(TRY_POSIX), always(FIND)
    end = child()
    end()
    yield other(TRY_POSIX), "still"
    os.close(b)
    yield other(TRY_POSIX)

def close_of_any_descriptor_of_the_process():
    a, b = opened(), opened()
    c = os.dup(a)
    yield posix(a, WRITE, 0, 10), posix(b, WRITE, 10, 10), other(FIND)
    os.close(c)
    yield other(FIND)
    yield posix(a, WRITE, 0, 10)
    os.close(b)
    yield other(FIND)
    os.close(a)

def description_with_two_descriptors():
    a = opened()
    yield ofd(a, WRITE, 5, 5), flock(a, fcntl.LOCK_EX)
    c = os.dup(a)
    os.close(a)
    yield other(FIND), other(TRY_FLOCK)
    b = opened()
    yield find(b, OFD_GET), ofd(b, READ)
    os.close(c)
    yield find(b, OFD_GET), ofd(b, READ), flock(b, fcntl.LOCK_SH)
    yield other(FIND), other(TRY_FLOCK)
    os.close(b)
    yield other(FIND), other(TRY_FLOCK)

def description_in_a_child():
    a = opened()
    yield ofd(a, WRITE), flock(a, fcntl.LOCK_EX)
    end = child()
    os.close(a)
    yield other(FIND), other(TRY_FLOCK)
    end()
    yield other(FIND), other(TRY_FLOCK)

def description_and_mapping():
    a = opened()
    yield ofd(a, WRITE), flock(a, fcntl.LOCK_EX)
    unmap = mapped(a)
    os.close(a)
    yield other(FIND), other(TRY_FLOCK)
    unmap()
    yield other(FIND), other(TRY_FLOCK)

def process_and_description_beside_each_other():
    a = opened()
    yield posix(a, WRITE, 0, 10), ofd(a, WRITE, 10, 10), ofd(a, WRITE, 5, 1)
    os.close(opened())
    yield other(FIND), other("find(file, OFD_GET, 0, 10)")
    os.close(a)
    yield other(FIND)

def a_descriptor_that_is_sent_by_a_socket():
    import socket
    here, there = socket.socketpair()
    a = opened()
    yield posix(a, WRITE, 0, 4), ofd(a, WRITE, 4, 4)
    socket.send_fds(here, [b"x"], [a])
    os.close(a)
    yield other(FIND), other("find(file, OFD_GET, 0, 4)")
    b = socket.recv_fds(there, 1, 1)[1][0]
    yield posix(b, WRITE, 0, 4)
    os.close(b)
    yield other(FIND)

def many_times():
    "A closed description is seen by nobody, and the next, which may have its number, keeps what it has."
    wrong = {}
    for _ in range(300):
        a = opened()
        one = ofd(a, WRITE), flock(a, fcntl.LOCK_EX)
        os.close(a)
        b = opened()
        two = find(b, OFD_GET), ofd(b, WRITE), flock(b, fcntl.LOCK_EX)
        three = other(TRY_POSIX), other(TRY_FLOCK)
        os.close(b)
        four = other(FIND), other(TRY_POSIX), other(TRY_FLOCK)
        for what in enumerate((one, two, three, four)):
            wrong[what] = wrong.get(what, 0) + 1
    yield wrong

for scene in (mapping_outlives_its_descriptor, child_that_inherited_it_ends, close_of_any_descriptor_of_the_process,
              description_with_two_descriptors, description_in_a_child, description_and_mapping,
              process_and_description_beside_each_other, a_descriptor_that_is_sent_by_a_socket, many_times):
    print(scene.__name__, *scene(), flush=True)
"#;

/// Of cache-mode mounts, whose objects can be read only.
const SCENES_OF_OBJECTS: &str = r#"
other = None
other = Other(os.O_RDONLY)

def two_descriptors():
    a = opened(os.O_RDONLY)
    yield flock(a, fcntl.LOCK_EX), posix(a, READ), ofd(a, READ)
    c = os.dup(a)
    os.close(a)
    yield other(TRY_FLOCK)
    os.close(c)
    yield other(TRY_FLOCK)

def child_and_mapping():
    a = opened(os.O_RDONLY)
    yield flock(a, fcntl.LOCK_EX)
    unmap = mapped(a)
    end = child()
    os.close(a)
    unmap()
    yield other(TRY_FLOCK)
    end()
    yield other(TRY_FLOCK)

def changed_and_again():
    a, b = opened(os.O_RDONLY), opened(os.O_RDONLY)
    yield flock(a, fcntl.LOCK_SH), flock(b, fcntl.LOCK_SH), flock(a, fcntl.LOCK_EX)
    yield flock(b, fcntl.LOCK_EX), flock(b, fcntl.LOCK_EX), flock(a, fcntl.LOCK_SH)
    os.close(b)
    yield flock(a, fcntl.LOCK_SH)
    os.close(a)

def many_times():
    wrong = {}
    for _ in range(300):
        a = opened(os.O_RDONLY)
        one = flock(a, fcntl.LOCK_EX)
        os.close(a)
        b = opened(os.O_RDONLY)
        two = flock(b, fcntl.LOCK_EX)
        three = other(TRY_FLOCK) if _ % 30 == 0 else "EAGAIN"
        os.close(b)
        four = other(TRY_FLOCK)
        for what in enumerate((one, two, three, four)):
            wrong[what] = wrong.get(what, 0) + 1
    yield wrong

for scene in (two_descriptors, child_and_mapping, changed_and_again, many_times):
    print(scene.__name__, *scene(), flush=True)
"#;

fn played(scenes: &str, file: &Path) -> String {
    let script = format!("{STAGE}{scenes}");
    let mut program = Command::new("python3");
    let done = program.args(["-c", &script]).arg(file).stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Plays the same in a local directory and on a mount.
fn compare(scenes: &str, local: &Path, mounted: &Path) {
    let (expected, found) = (played(scenes, local), played(scenes, mounted));
    for (expected, found) in expected.lines().zip(found.lines()) {
        assert_eq!(found, expected, "on the mount, and in a local directory");
    }
    assert_eq!(found.lines().count(), expected.lines().count());
}

#[test]
fn locks_of_files_end_when_they_end_locally() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let local = tempfile::tempdir().unwrap();
    let (here, there) = (local.path().join("file"), cluster.path("fs/file"));
    for file in [&here, &there] {
        std::fs::write(file, "content").unwrap();
    }
    compare(SCENES, &here, &there);
}

#[test]
fn locks_that_are_answered_here_end_when_they_end_locally() {
    let mounts = Mounts::up(Options::default());
    let local = tempfile::tempdir().unwrap();
    let (here, there) = (local.path().join("file"), mounts.held("held").join("file"));
    for file in [&here, &there] {
        std::fs::write(file, "content").unwrap();
    }
    compare(SCENES, &here, &there);
    assert!(mounts.counter("cavern_client_undone_changes_total") > 0, "locks and unlocks are answered here");
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn locks_of_objects_end_when_they_end_locally() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "file", vec![7; 8192]);
    cluster.mount("s3://bucket", "/objects", &[]);
    let local = tempfile::tempdir().unwrap();
    let here = local.path().join("file");
    std::fs::write(&here, [7; 8192]).unwrap();
    compare(SCENES_OF_OBJECTS, &here, &cluster.path("objects/file"));
}

//! What signals do to programs that handle them: nothing that a local disk would not do.

use std::process::{Command, Stdio};

use cavern_tests::{Cluster, Options};

/// Makes system calls below the directory `argv[1]`, by libc since Python would repeat those that a signal ends, while
/// a timer sends a handled signal every half millisecond. Says which calls failed, and how many signals there were.
const CALLS_UNDER_A_TIMER: &str = r#"
import ctypes, errno, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
libc.readdir.argtypes = libc.closedir.argtypes = [ctypes.c_void_p]
signals = 0
def count(*_):
    global signals
    signals += 1
signal.signal(signal.SIGALRM, count)
signal.siginterrupt(signal.SIGALRM, True)
os.chdir(sys.argv[1])
failed = {}
def call(name, *arguments, failure=-1):
    while True:
        ctypes.set_errno(0)
        began = time.monotonic()
        result = getattr(libc, name)(*arguments)
        # What still waits a second after a signal, as it may on a busy machine, is ended by that.
        if result != failure or ctypes.get_errno() != errno.EINTR or time.monotonic() - began < 1:
            break
    if result == failure:
        what = (name, os.strerror(ctypes.get_errno()))
        failed[what] = failed.get(what, 0) + 1
    return result
buffer = ctypes.create_string_buffer(65536)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
number = 0
while number < 100 or signals <= 100:
    number += 1
    a, b, c = (b"%s%d" % (name, number) for name in (b"a", b"b", b"c"))
    file = call("open", a, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    call("write", file, buffer, 65536)
    call("fsync", file)
    call("fstat", file, buffer)
    call("ftruncate", file, 5000)
    call("pread", file, buffer, 65536, 0)
    call("close", file)
    call("chmod", a, 0o600)
    call("setxattr", a, b"user.x", b"value", 5, 0)
    call("getxattr", a, b"user.x", buffer, 100)
    call("symlink", a, b)
    call("readlink", b, buffer, 100)
    call("rename", a, c)
    call("statvfs", b".", buffer)
    call("stat", c, buffer)
    call("close", call("open", c, os.O_RDONLY))
    directory = call("opendir", b".", failure=None)
    while call("readdir", directory, failure=0): pass
    call("closedir", directory)
    call("unlink", b)
    call("unlink", c)
signal.setitimer(signal.ITIMER_REAL, 0)
print(f"failed: {failed}; signals: {signals > 100}")
"#;

#[test]
fn signals_that_a_program_handles_end_none_of_its_calls() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket", "/data", &[]);
    let local = tempfile::tempdir().unwrap();
    for directory in [local.path(), &cluster.path("data")] {
        let mut program = Command::new("python3");
        let done = program.args(["-c", CALLS_UNDER_A_TIMER]).arg(directory).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert_eq!(said.trim(), "failed: {}; signals: True", "in {}: {done:?}", directory.display());
    }
}

//! What the kernel keeps of files that are written past its pages.

use std::path::Path;
use std::process::{Command, Stdio};

use cavern_tests::{Cluster, Options};

/// Writes below a file of which two others read all pages all the time: asynchronously and with `O_DIRECT`. When such a
/// write is complete, nobody may see what was there before, in whichever way. Says how often somebody did.
const ASYNCHRONOUS_WRITES: &str = r#"
import ctypes, mmap, os, platform, struct, sys
name = sys.argv[1]
io_setup, io_submit, io_getevents = (206, 209, 208) if platform.machine() == "x86_64" else (0, 2, 4)
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

SIZE, PIECE, DEPTH, ROUNDS = 256 << 10, 64 << 10, 2, 600
writer = os.open(name, os.O_RDWR | os.O_DIRECT)
buffer = mmap.mmap(-1, PIECE * DEPTH)
buffer[:] = bytes(PIECE * DEPTH)
for at in range(0, SIZE, PIECE * DEPTH):
    os.pwrite(writer, buffer, at)
readers = []
for which in range(2):
    pid = os.fork()
    if pid == 0:
        file, parent = os.open(name, os.O_RDONLY), os.getppid()
        view = mmap.mmap(file, SIZE, prot=mmap.PROT_READ)
        while os.getppid() == parent:
            for at in range(0, SIZE, 64 << 10):
                os.pread(file, 64 << 10, at) if which else view[at:at + (64 << 10)]
        os._exit(0)
    readers.append(pid)

context = ctypes.c_ulong(0)
syscall(io_setup, DEPTH, ctypes.addressof(context))
memory = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
buffered = os.open(name, os.O_RDONLY)
mapped = mmap.mmap(buffered, SIZE, prot=mmap.PROT_READ)
events = ctypes.create_string_buffer(32 * DEPTH)
PWRITE, stale, latest = 1, 0, {}
for round in range(ROUNDS):
    wanted, blocks, pointers = bytes([round % 255 + 1]), [], []
    buffer[:] = wanted * (PIECE * DEPTH)
    for slot in range(DEPTH):
        at = (round * DEPTH + slot) * PIECE % SIZE
        latest[at] = wanted
        block = struct.pack("QIIHhIQQqQII", at, 0, 0, PWRITE, 0, writer, memory + slot * PIECE, PIECE, at, 0, 0, 0)
        blocks.append(ctypes.create_string_buffer(block))
        pointers.append(ctypes.addressof(blocks[-1]))
    array = (ctypes.c_void_p * DEPTH)(*pointers)
    assert syscall(io_submit, context.value, DEPTH, ctypes.addressof(array)) == DEPTH
    complete = 0
    while complete < DEPTH:
        count = syscall(io_getevents, context.value, 1, DEPTH, ctypes.addressof(events), 0)
        complete += count
        for at, _, result, _ in struct.iter_unpack("QQqq", events.raw[:32 * count]):
            assert result == PIECE, result
            seen = {os.pread(buffered, PIECE, at), mapped[at:at + PIECE]}
            stale += seen != {wanted * PIECE}
for reader in readers:
    os.kill(reader, 9)
    os.waitpid(reader, 0)
os.fsync(writer)
anew = os.open(name, os.O_RDONLY)
for at, wanted in latest.items():
    stale += os.pread(anew, PIECE, at) != wanted * PIECE
print(f"stale: {stale}")
"#;

fn write_asynchronously(file: &Path) {
    let mut program = Command::new("python3");
    let done = program.args(["-c", ASYNCHRONOUS_WRITES]).arg(file).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert_eq!(said.trim(), "stale: 0", "{}: {done:?}", file.display());
}

#[test]
fn asynchronous_direct_writes_are_seen_when_they_are_complete() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    let file = cluster.path("fs/file");
    std::fs::write(&file, "").unwrap();
    write_asynchronously(&file);
}

#[test]
fn asynchronous_direct_writes_to_objects_are_seen_when_they_are_complete() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount("s3://bucket/objects", "/objects", &["--access-mode", "read_write"]);
    let file = cluster.path("objects/file");
    std::fs::write(&file, "").unwrap();
    write_asynchronously(&file);
}

//! Places in listings: who goes on after `telldir` and `seekdir`, or with the place of another descriptor, finds all
//! that is there, once, whatever was removed meanwhile.

use std::path::Path;
use std::process::{Command, Stdio};

use cavern_tests::{Cluster, Options};

/// Reads the directory `argv[1]` with libc while names are removed in `argv[2]`, the same directory by another way
/// perhaps.
const PLACES: &str = r#"
import ctypes, os, sys
here, there = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
pointer = ctypes.c_void_p
libc.opendir.restype = libc.fdopendir.restype = libc.readdir.restype = pointer
for call in (libc.readdir, libc.closedir, libc.telldir, libc.rewinddir):
    call.argtypes = [pointer]
libc.telldir.restype = ctypes.c_long
libc.seekdir.argtypes = [pointer, ctypes.c_long]
def entry(directory):
    while found := libc.readdir(directory):
        name = ctypes.string_at(found + 19).decode()
        if name not in (".", ".."):
            return name
def rest(directory):
    return list(iter(lambda: entry(directory), None))
live = [f"file-with-a-name-{number:05}" for number in range(3000)]
for name in live:
    os.close(os.open(os.path.join(here, name), os.O_CREAT | os.O_WRONLY))
directory = libc.opendir(here.encode())
place_of = {name: place for place, name in enumerate(rest(directory))}
live.sort(key=place_of.get)
libc.rewinddir(directory)
def remove(names):
    names = set(names)
    for name in names:
        os.unlink(os.path.join(there, name))
    live[:] = [name for name in live if name not in names]
def check(what, found, after):
    place, found_once = place_of.get(after, -1), set(found)
    missing = [name for name in live if place_of[name] > place and name not in found_once]
    twice = len(found) - len(found_once)
    strange = [name for name in found if place_of.get(name, -1) <= place]
    if missing or twice or strange:
        print(f"{what}: {len(missing)} missing, {twice} twice, {len(strange)} strange after {after}")
places = []
for count in range(2000):
    name = entry(directory)
    if count % 97 == 0:
        places.append((libc.telldir(directory), name))
remove(live[:1000:2] + live[1500:2500:3])
for place, name in reversed(places):
    libc.seekdir(directory, place)
    check("seekdir", rest(directory), name)
for place, name in places[::3]:
    other = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    os.lseek(other, place, os.SEEK_SET)
    second = libc.fdopendir(other)
    check("another descriptor", rest(second), name)
    libc.closedir(second)
remove(live[:20])
libc.seekdir(directory, places[1][0])
first = entry(directory)
remove(live[:50])
check("in the middle", [first] + rest(directory), places[1][1])
libc.rewinddir(directory)
check("rewinddir", rest(directory), None)
# As `rm -r` of old: back to the beginning of a buffer, and each name is removed as soon as it is read.
libc.rewinddir(directory)
removed = 0
while name := entry(directory):
    if name in live:
        remove([name])
        removed += 1
        if removed % 300 == 0:
            libc.seekdir(directory, libc.telldir(directory))
print(f"left: {live}")
libc.closedir(directory)
os.rmdir(there)
"#;

fn run(here: &Path, there: &Path) -> String {
    let done = Command::new("python3").args(["-c", PLACES]).arg(here).arg(there).stdin(Stdio::null()).output().unwrap();
    String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr)
}

#[test]
fn a_place_in_a_listing_leaves_nothing_out_whatever_is_removed() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/data", "/data", &[]);
    cluster.mount_fs_mode("s3://bucket/strict", "/strict", &["--consistency", "strict"]);
    let local = tempfile::tempdir().unwrap();
    let second = cluster.directory().join("second");
    let mounts = [
        (local.path().to_owned(), local.path().to_owned()),
        (cluster.path("data"), cluster.path("data")),
        (cluster.path("data"), second.join("data")),
        (cluster.path("strict"), second.join("strict")),
    ];
    for (here, there) in mounts {
        std::fs::create_dir(here.join("many")).unwrap();
        assert_eq!(run(&here.join("many"), &there.join("many")), "left: []\n", "in {}", here.display());
    }
}

//! File handles (`name_to_handle_at`, `open_by_handle_at`), as servers of network file systems keep them: they lead to
//! the same inode for as long as that exists, whatever the kernel has forgotten and however often `cv fuse` was started
//! meanwhile.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, PartMount, eventually};

/// Takes handles of paths, or prints what handles lead to: inode, path of a directory, and content.
const HANDLES: &str = r#"
import ctypes, errno, os, stat, sys

libc = ctypes.CDLL(None, use_errno=True)

class Handle(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def take(path):
    handle, mount = Handle(length=128), ctypes.c_int()
    checked(libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0))
    return "%d.%s" % (handle.kind, bytes(handle.data[:handle.length]).hex())

def look(mount, text):
    kind, data = text.split(".")
    handle = Handle(length=len(data) // 2, kind=int(kind))
    ctypes.memmove(handle.data, bytes.fromhex(data), handle.length)
    try:
        fd = checked(libc.open_by_handle_at(mount, ctypes.byref(handle), os.O_RDONLY))
        inode = os.fstat(fd)
        if stat.S_ISDIR(inode.st_mode):
            names = ",".join(sorted(os.listdir(fd)))
            found = "%s %s" % (os.path.relpath(os.readlink("/proc/self/fd/%d" % fd), sys.argv[2]), names)
        else:
            found = os.read(fd, 100).decode()
        os.close(fd)
        return "%d %s" % (inode.st_ino, found)
    except OSError as error:
        return errno.errorcode[error.errno]

if sys.argv[1] == "take":
    for path in sys.argv[3:]:
        print(take(os.path.join(sys.argv[2], path)))
else:
    mount = os.open(sys.argv[2], os.O_RDONLY)
    for text in sys.argv[3:]:
        print(look(mount, text))
"#;

#[track_caller]
fn run(what: &str, place: &Path, arguments: &[String]) -> Vec<String> {
    let done = Command::new("python3").args(["-c", HANDLES, what]).arg(place).args(arguments).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[track_caller]
fn take(place: &Path, paths: &[&str]) -> Vec<String> {
    run("take", place, &paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>())
}

fn forget_what_is_not_in_use() {
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

#[test]
fn handles_lead_to_the_same_inode_for_as_long_as_it_exists() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (root, fs_mode) = (cluster.mount_point(), cluster.path("fs"));
    fs::create_dir_all(fs_mode.join("d/deep")).unwrap();
    for name in ["file", "d/deep/leaf", "moved", "gone", "gone elsewhere", "replaced", "linked"] {
        fs::write(fs_mode.join(name), format!("content of {name}")).unwrap();
    }
    fs::hard_link(fs_mode.join("linked"), fs_mode.join("d/link")).unwrap();
    let inode = |name: &str| fs::metadata(fs_mode.join(name)).unwrap().ino();
    let there = ["file", "d/deep/leaf", "moved", "linked"].map(|name| format!("{} content of {name}", inode(name)));
    let deep = inode("d/deep");
    let of_files = take(&fs_mode, &["file", "d/deep/leaf", "moved", "linked"]);
    let of_gone = take(&fs_mode, &["gone", "gone elsewhere", "replaced"]);
    let of_directories = take(root, &["", "fs", "fs/d/deep"]);
    assert_eq!(run("look", root, &of_files), there);

    fs::rename(fs_mode.join("moved"), fs_mode.join("d/deep/moved")).unwrap();
    fs::rename(fs_mode.join("d"), fs_mode.join("e")).unwrap();
    fs::remove_file(fs_mode.join("linked")).unwrap();
    fs::remove_file(fs_mode.join("gone")).unwrap();
    fs::remove_file(cluster.at_start.fuse[1].mount_point.join("fs/gone elsewhere")).unwrap();
    fs::write(fs_mode.join("another"), "another").unwrap();
    fs::rename(fs_mode.join("another"), fs_mode.join("replaced")).unwrap();
    let check = |when: &str| {
        // New inodes must not be taken for old ones.
        for number in 0..20 {
            fs::write(fs_mode.join(format!("{when} {number}")), "new").unwrap();
        }
        forget_what_is_not_in_use();
        assert_eq!(run("look", root, &of_files), there, "{when}");
        assert_eq!(run("look", root, &of_gone), ["ESTALE"; 3], "{when}");
        let found = run("look", root, &of_directories);
        assert_eq!(found[2], format!("{deep} fs/e/deep leaf,moved"), "{when}");
        assert!(found[0].ends_with(" . fs") && found[1].contains(" fs another"), "{when}: {found:?}");
    };
    fs::write(fs_mode.join("another"), "").unwrap();
    let seen = || (!fs_mode.join("gone elsewhere").exists()).then_some(());
    eventually("the other mount's removal is seen", Duration::from_secs(30), seen);
    check("at once");
    cluster.stop("fuse0");
    cluster.start("fuse0");
    check("started again");
    cluster.kill("fuse0");
    cluster.start("fuse0");
    check("killed and started again");
}

#[test]
fn handles_of_objects_are_those_of_their_version() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "d/object", b"first".as_slice());
    cluster.mount("s3://bucket/", "/data", &[]);
    let root = cluster.mount_point();
    let inode = fs::metadata(cluster.path("data/d/object")).unwrap().ino();
    let handles = take(root, &["data/d/object", "data/d"]);
    cluster.stop("fuse0");
    cluster.start("fuse0");
    forget_what_is_not_in_use();
    let found = run("look", root, &handles);
    assert_eq!(found[0], format!("{inode} first"));
    assert!(found[1].ends_with(" data/d object"), "{found:?}");

    cluster.s3.put("bucket", "d/object", b"second".as_slice());
    cluster.cv(&["refresh", "/data"]);
    assert_eq!(fs::read(cluster.path("data/d/object")).unwrap(), b"second");
    forget_what_is_not_in_use();
    assert_eq!(run("look", root, &handles)[0], "ESTALE", "it is another version");
}

#[test]
fn a_mount_of_a_part_shows_nothing_else_by_handle() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    fs::create_dir(cluster.path("fs/part")).unwrap();
    fs::write(cluster.path("fs/part/inside"), "inside").unwrap();
    fs::write(cluster.path("fs/outside"), "outside").unwrap();
    let handles = take(cluster.mount_point(), &["fs/part/inside", "fs/outside", "fs"]);
    let part = PartMount::of(&cluster, "/fs/part", &[]);
    assert_eq!(fs::read(part.path.join("inside")).unwrap(), b"inside");
    forget_what_is_not_in_use();
    let found = run("look", &part.path, &handles);
    assert!(found[0].ends_with(" inside"), "{found:?}");
    assert_eq!(found[1..], ["ESTALE", "ESTALE"]);
}

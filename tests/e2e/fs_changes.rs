//! The commands of `cv fs` that change an fs-mode mount, and those that read one: that they do what the tools of these
//! names do, seen through the mount, and refuse what cannot be in a clear sentence.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{CWD, FileType, Mode};
use serde_json::{Value, json};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 4;

/// For a change to reach the mount.
const PATIENCE: Duration = Duration::from_secs(60);

fn mounted() -> Cluster {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

/// Waits until something holds of the mount, which is notified of a change a moment after the command is done.
#[track_caller]
fn shows(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, PATIENCE, || holds().then_some(()));
}

#[track_caller]
fn refused(cluster: &Cluster, arguments: &[&str], code: i32, fragments: &[&str]) {
    let finished = cluster.try_cv(arguments);
    let command = arguments.join(" ");
    assert_eq!((finished.code, finished.stdout.as_str()), (code, ""), "cv {command}: {finished:?}");
    for fragment in fragments {
        assert!(finished.stderr.contains(fragment), "cv {command} does not say {fragment:?}: {}", finished.stderr);
    }
}

#[test]
fn names_are_made_moved_and_removed() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("fs").join(path);
    cluster.cv(&["fs", "mkdir", "-p", "-m", "2750", "/fs/a/b/c"]);
    shows("the directories", || at("a/b/c").is_dir());
    assert_eq!(fs::metadata(at("a/b/c")).unwrap().permissions().mode() & 0o7777, 0o2750);
    cluster.cv(&["fs", "mkdir", "-p", "/fs/a/b/c"]);
    refused(&cluster, &["fs", "mkdir", "/fs/a/b"], FAILED, &["/fs/a/b", "exists"]);
    refused(&cluster, &["fs", "mkdir", "/fs/none/b"], NOT_FOUND, &["/fs/none"]);

    cluster.cv(&["fs", "touch", "/fs/a/file", "/fs/a/other"]);
    shows("the files", || at("a/other").is_file());
    let before = fs::metadata(at("a/file")).unwrap();
    assert_eq!((before.len(), before.uid()), (0, rustix::process::geteuid().as_raw()));
    cluster.cv(&["fs", "touch", "/fs/a/file"]);
    shows("a later time", || fs::metadata(at("a/file")).unwrap().modified().unwrap() > before.modified().unwrap());
    refused(&cluster, &["fs", "mkdir", "-p", "/fs/a/file/x"], FAILED, &["/fs/a/file", "no directory"]);

    cluster.cv(&["fs", "ln", "/fs/a/file", "/fs/a/b"]);
    cluster.cv(&["fs", "ln", "-s", "../file", "/fs/a/b/soft"]);
    shows("the links", || at("a/b/soft").is_symlink());
    assert_eq!(fs::metadata(at("a/b/file")).unwrap().ino(), before.ino());
    assert_eq!(fs::read_link(at("a/b/soft")).unwrap().to_str(), Some("../file"));
    refused(&cluster, &["fs", "ln", "/fs/a", "/fs/hard"], FAILED, &["/fs/hard", "directory"]);

    cluster.cv(&["fs", "mv", "/fs/a/other", "/fs/a/renamed"]);
    cluster.cv(&["fs", "mv", "/fs/a/renamed", "/fs/a/file", "/fs/a/b/c"]);
    shows("what was moved", || at("a/b/c/file").is_file() && at("a/b/c/renamed").is_file() && !at("a/file").exists());
    cluster.cv(&["fs", "mv", "/fs/a/b/c/renamed", "/fs"]);
    shows("the root of the mount is a directory like others", || at("renamed").is_file());
    refused(&cluster, &["fs", "mv", "/fs/a", "/fs/a/b"], FAILED, &["below itself"]);
    refused(&cluster, &["fs", "mv", "/fs/a/none", "/fs/x"], NOT_FOUND, &["/fs/a/none"]);
    cluster.cv(&["fs", "mv", "--exchange", "/fs/renamed", "/fs/a"]);
    shows("what was exchanged", || at("a").is_file() && at("renamed/b/c").is_dir());

    refused(&cluster, &["fs", "rm", "/fs/renamed"], FAILED, &["/fs/renamed", "-r"]);
    refused(&cluster, &["fs", "rm", "/fs/none"], NOT_FOUND, &["/fs/none"]);
    cluster.cv(&["fs", "rm", "-f", "/fs/none", "/fs/none/below"]);
    let names = (0..150).map(|number| format!("/fs/renamed/b/c/{number}"));
    let touch: Vec<String> = ["fs", "touch"].map(str::to_owned).into_iter().chain(names).collect();
    cluster.cv(&touch.iter().map(String::as_str).collect::<Vec<_>>());
    let removed = cluster.cv(&["fs", "rm", "-r", "--json", "/fs/renamed", "/fs/a"]).json();
    // renamed, b, c, the hard link b/file, b/soft, c/file and the 150; and a.
    assert_eq!(removed, json!({"removed": 157}));
    shows("nothing", || fs::read_dir(at("")).unwrap().count() == 0);
    refused(&cluster, &["fs", "rm", "-r", "/fs"], FAILED, &["in no mount"]);
    refused(&cluster, &["fs", "rm", "-r", "/"], USAGE, &["name"]);
}

/// Whatever one of them finds gone, it goes on with the rest.
#[test]
fn a_tree_that_several_remove_is_gone_when_each_of_them_is_done() {
    let cluster = mounted();
    let tree = cluster.path("fs/tree");
    for number in 0..12 {
        let directory = tree.join(format!("{number}/below"));
        fs::create_dir_all(&directory).unwrap();
        (0..100).for_each(|file| fs::write(directory.join(file.to_string()), "").unwrap());
    }
    let removal = || {
        let mut command = cluster.command(&["fs", "rm", "-r", "-f", "--json", "/fs/tree"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let removals = [removal(), removal(), removal()];
    let mut removed = 0;
    for removal in removals {
        let output = removal.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        removed += answer["removed"].as_u64().unwrap();
    }
    refused(&cluster, &["fs", "stat", "/fs/tree"], NOT_FOUND, &["/fs/tree"]);
    // 12 × (2 directories and 100 files), and the tree itself: each name was removed once.
    assert_eq!(removed, 12 * 102 + 1);
}

#[test]
fn attributes_are_set_as_the_tools_set_them() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("fs").join(path);
    let mode = |path: &str| fs::symlink_metadata(at(path)).unwrap().permissions().mode() & 0o7777;
    fs::create_dir(at("d")).unwrap();
    fs::write(at("d/f"), "#!/bin/sh\n").unwrap();
    symlink("f", at("d/l")).unwrap();
    cluster.cv(&["fs", "chmod", "4751", "/fs/d/f"]);
    shows("0751 and set-user-id", || mode("d/f") == 0o4751);
    cluster.cv(&["fs", "chown", "1000:2000", "/fs/d/f"]);
    shows("another owner", || fs::metadata(at("d/f")).unwrap().uid() == 1000);
    assert_eq!((fs::metadata(at("d/f")).unwrap().gid(), mode("d/f")), (2000, 0o751), "it does not run as user 1000");
    cluster.cv(&["fs", "chmod", "-R", "u=rwX,go-rwx", "/fs/d"]);
    shows("nothing for others", || (mode("d"), mode("d/f"), mode("d/l")) == (0o700, 0o700, 0o777));
    cluster.cv(&["fs", "chmod", "-x", "/fs/d/f"]);
    shows("no program", || mode("d/f") == 0o600);
    cluster.cv(&["fs", "chown", "-R", ":7", "/fs/d"]);
    shows("another group everywhere", || {
        ["d", "d/f", "d/l"].iter().all(|path| fs::symlink_metadata(at(path)).unwrap().gid() == 7)
    });
    refused(&cluster, &["fs", "chmod", "u+q", "/fs/d"], USAGE, &["u+q"]);
    refused(&cluster, &["fs", "chown", "nobody-has-this-name", "/fs/d"], USAGE, &["/etc/passwd"]);

    cluster.cv(&["fs", "setfattr", "-n", "user.step", "-v", "12000", "/fs/d/f", "/fs/d"]);
    cluster.cv(&["fs", "setfattr", "-n", "user.bytes", "-v", "0x00ff", "/fs/d/f"]);
    let mut value = [0; 16];
    let read = |name: &str, value: &mut [u8]| rustix::fs::getxattr(at("d/f"), name, value);
    shows("the attribute", || read("user.bytes", &mut value) == Ok(2) && value[..2] == [0, 255]);
    let dump = cluster.cv(&["fs", "getfattr", "/fs/d/f", "/fs/d"]).stdout;
    assert_eq!(
        dump,
        "# file: /fs/d/f\nuser.bytes=0sAP8=\nuser.step=\"12000\"\n\n# file: /fs/d\nuser.step=\"12000\"\n\n"
    );
    let printed = cluster.cv(&["fs", "getfattr", "--json", "/fs/d/f"]).json();
    assert_eq!(printed, json!({"path": "/fs/d/f", "xattrs": {"user.bytes": "0sAP8=", "user.step": "12000"}}));
    assert_eq!(cluster.cv(&["fs", "getfattr", "-n", "user.step", "--only-values", "/fs/d"]).stdout, "12000");
    cluster.cv(&["fs", "setfattr", "-x", "user.step", "/fs/d"]);
    refused(&cluster, &["fs", "setfattr", "-x", "user.step", "/fs/d"], FAILED, &["/fs/d", "not there"]);
    refused(&cluster, &["fs", "getfattr", "-n", "user.step", "/fs/d"], NOT_FOUND, &["user.step"]);
    refused(&cluster, &["fs", "setfattr", "-n", "user.x", "-v", "0x1", "/fs/d"], USAGE, &["hexadecimal"]);
    for (name, reason) in
        [("user.", "user.NAME is"), ("x", "use user.x"), ("user.x".repeat(50).as_str(), "name of 300 bytes")]
    {
        refused(&cluster, &["fs", "setfattr", "-n", name, "-v", "1", "/fs/d"], FAILED, &["/fs/d", reason]);
    }
    // As on local file systems.
    for name in ["user.", "trusted.", "security."] {
        let set = rustix::fs::setxattr(at("d/f"), name, b"1", rustix::fs::XattrFlags::empty());
        let got = rustix::fs::getxattr(at("d/f"), name, &mut value[..]);
        let removed = rustix::fs::removexattr(at("d/f"), name);
        let invalid = rustix::io::Errno::INVAL;
        assert_eq!((set, got, removed), (Err(invalid), Err(invalid), Err(invalid)), "{name}");
    }
    let foreign = rustix::fs::setxattr(at("d/f"), "system.", b"1", rustix::fs::XattrFlags::empty());
    assert_eq!(foreign, Err(rustix::io::Errno::OPNOTSUPP));
}

#[test]
fn files_go_in_and_come_out_as_they_are() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("fs").join(path);
    let here = cluster.directory().join("here");
    let from = |path: &str| here.join(path).to_str().unwrap().to_owned();
    fs::create_dir_all(here.join("tree/empty")).unwrap();
    let large: Vec<u8> = (0..9_000_000_u32).map(|byte| (byte % 251) as u8).collect();
    fs::write(from("large"), &large).unwrap();
    fs::write(from("tree/one"), "1").unwrap();
    fs::write(from("tree/nothing"), "").unwrap();
    fs::set_permissions(from("tree/one"), fs::Permissions::from_mode(0o755)).unwrap();

    let copied = cluster.cv(&["fs", "put", "--json", &from("large"), "/fs/large"]).json();
    assert_eq!(copied, json!({"files": 1, "bytes": large.len()}));
    shows("the file", || fs::read(at("large")).is_ok_and(|bytes| bytes == large));
    cluster.cv(&["fs", "put", &from("tree"), "/fs"]);
    shows("the tree", || at("tree/one").exists() && at("tree/nothing").exists() && at("tree/empty").is_dir());
    assert_eq!(fs::metadata(at("tree/one")).unwrap().permissions().mode() & 0o700, 0o700);

    // Who may write there hands out nothing of others.
    fs::write(from("secret"), "secret").unwrap();
    fs::create_dir(from("links")).unwrap();
    symlink(from("secret"), from("links/secret")).unwrap();
    symlink("..", from("links/up")).unwrap();
    for _ in 0..2 {
        cluster.cv(&["fs", "put", &from("links"), "/fs"]);
    }
    shows("the links", || at("links/up").is_symlink());
    assert_eq!(fs::read_link(at("links/secret")).unwrap(), Path::new(&from("secret")));
    assert_eq!(fs::read_link(at("links/up")).unwrap(), Path::new(".."));

    // What is replaced keeps its owner and permissions, and whoever has it open reads on.
    rustix::fs::chown(at("tree/one"), Some(rustix::fs::Uid::from_raw(1000)), None).unwrap();
    fs::set_permissions(at("tree/one"), fs::Permissions::from_mode(0o640)).unwrap();
    let open = fs::File::open(at("tree/one")).unwrap();
    let mut put = cluster.command(&["fs", "put", "-", "/fs/tree/one"]);
    let mut put = put.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    put.stdin.take().unwrap().write_all(b"from stdin\nsecond\nthird").unwrap();
    assert!(put.wait().unwrap().success());
    shows("the new file", || fs::read(at("tree/one")).is_ok_and(|bytes| bytes == b"from stdin\nsecond\nthird"));
    let now = fs::metadata(at("tree/one")).unwrap();
    assert_eq!((now.uid(), now.permissions().mode() & 0o777), (1000, 0o640));
    assert_eq!(std::io::read_to_string(open).unwrap(), "1");
    let names = fs::read_dir(at("tree")).unwrap().count();
    assert_eq!(names, 3, "nothing incomplete is left");

    refused(&cluster, &["fs", "put", &from("none"), "/fs/x"], FAILED, &["none"]);
    refused(&cluster, &["fs", "put", &from("large"), "/fs/none/x"], NOT_FOUND, &["/fs/none"]);
    refused(&cluster, &["fs", "put", "-", "/fs/tree"], USAGE, &["/fs/tree", "name"]);
    refused(&cluster, &["fs", "put", &from("tree"), "/fs/large"], FAILED, &["/fs/large", "no directory"]);

    // Out again.
    assert_eq!(cluster.cv(&["fs", "cat", "/fs/tree/one"]).stdout, "from stdin\nsecond\nthird");
    assert_eq!(cluster.cv(&["fs", "head", "-n", "2", "/fs/tree/one"]).stdout, "from stdin\nsecond\n");
    assert_eq!(cluster.cv(&["fs", "tail", "-n", "2", "/fs/tree/one"]).stdout, "second\nthird");
    assert_eq!(cluster.cv(&["fs", "tail", "/fs/tree/one"]).stdout, "from stdin\nsecond\nthird");
    assert_eq!(cluster.cv(&["fs", "head", "-c", "4", "/fs/tree/one"]).stdout, "from");
    assert_eq!(cluster.cv(&["fs", "head", "-n", "0", "/fs/tree/one"]).stdout, "");
    let both = cluster.cv(&["fs", "tail", "-c", "3", "/fs/tree/one", "/fs/tree/nothing"]).stdout;
    assert_eq!(both, "==> /fs/tree/one <==\nird\n==> /fs/tree/nothing <==\n");
    symlink("tree/one", at("link")).unwrap();
    rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    refused(&cluster, &["fs", "cat", "/fs/link"], USAGE, &["tree/one"]);
    refused(&cluster, &["fs", "head", "/fs/fifo"], USAGE, &["regular"]);
    let target = from("copy");
    let got = cluster.cv(&["fs", "get", "--json", "/fs", &target]);
    assert_eq!(got.json(), json!({"files": 3, "bytes": large.len() + 23}));
    assert!(got.stderr.contains("/fs/fifo"), "{got:?}");
    assert_eq!(fs::read(from("copy/large")).unwrap(), large);
    assert_eq!(fs::read_to_string(from("copy/link")).unwrap(), "from stdin\nsecond\nthird");
    assert!(fs::symlink_metadata(at("fifo")).unwrap().file_type().is_fifo() && !here.join("copy/fifo").exists());
}

#[test]
fn a_copy_is_written_below_its_target_whatever_the_namespace_holds() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("fs").join(path);
    let (target, outside) = (cluster.directory().join("copy"), cluster.directory().join("outside"));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "untouched").unwrap();
    let get = || cluster.try_cv(&["fs", "get", "/fs/tree", target.to_str().unwrap()]);
    fs::create_dir_all(at("tree")).unwrap();
    fs::write(at("tree/plain"), "one").unwrap();
    symlink(&outside, at("tree/directory")).unwrap();
    symlink(outside.join("file"), at("tree/file")).unwrap();
    symlink(outside.join("file"), at("tree/plain.partial")).unwrap();
    for _ in 0..2 {
        let got = get();
        assert_eq!(got.code, 0, "{got:?}");
        assert_eq!(fs::read_link(target.join("directory")).unwrap(), outside);
    }
    // What were links are a file and a directory now.
    fs::remove_file(at("tree/file")).unwrap();
    fs::write(at("tree/file"), "new").unwrap();
    assert_eq!(get().code, 0);
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");
    fs::remove_file(at("tree/directory")).unwrap();
    fs::create_dir_all(at("tree/directory/deep")).unwrap();
    fs::write(at("tree/directory/file"), "through").unwrap();
    fs::write(at("tree/directory/deep/file"), "through").unwrap();
    let refused = get();
    let named = target.join("directory").display().to_string();
    assert!(refused.code == FAILED && refused.stderr.contains(&named), "{refused:?}");
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "untouched");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    // Without the link it goes well.
    fs::remove_file(target.join("directory")).unwrap();
    assert_eq!(get().code, 0);
    assert_eq!(fs::read_to_string(target.join("directory/deep/file")).unwrap(), "through");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 4, "nothing incomplete is left");
}

#[test]
fn what_is_looked_for_is_found() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("fs").join(path);
    fs::create_dir_all(at("a/deep")).unwrap();
    fs::write(at("a/small.txt"), "12").unwrap();
    fs::write(at("a/deep/large.bin"), vec![7; 2_000_000]).unwrap();
    symlink("small.txt", at("a/link.txt")).unwrap();
    let found = |arguments: &[&str]| {
        let printed = cluster.cv(&[&["fs", "find", "/fs"], arguments].concat()).stdout;
        let mut lines: Vec<String> = printed.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let all = ["/fs", "/fs/a", "/fs/a/deep", "/fs/a/deep/large.bin", "/fs/a/link.txt", "/fs/a/small.txt"];
    assert_eq!(found(&[]), all);
    assert_eq!(found(&["--name", "*.txt"]), ["/fs/a/link.txt", "/fs/a/small.txt"]);
    assert_eq!(found(&["--name", "*.txt", "--type", "f"]), ["/fs/a/small.txt"]);
    assert_eq!(found(&["--type", "d"]), ["/fs", "/fs/a", "/fs/a/deep"]);
    assert_eq!(found(&["--size", "+1MiB"]), ["/fs/a/deep/large.bin"]);
    assert_eq!(found(&["--size", "2B", "--type", "f"]), ["/fs/a/small.txt"]);
    assert_eq!(found(&["--newer", "/fs/a/link.txt"]), [""; 0]);
    assert_eq!(found(&["--newer", "/fs/a/small.txt", "--type", "f"]), ["/fs/a/deep/large.bin"]);
    let printed = cluster.cv(&["fs", "find", "/fs/a", "--name", "large*", "--json"]).stdout;
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(
        (&printed["path"], &printed["kind"], &printed["size"]),
        (&json!("/fs/a/deep/large.bin"), &json!("file"), &json!(2_000_000))
    );
    refused(&cluster, &["fs", "find", "/fs/none"], NOT_FOUND, &["/fs/none"]);
    refused(&cluster, &["fs", "find", "/fs", "--type", "x"], USAGE, &["f, d, l"]);
}

#[test]
fn a_bucket_in_cache_mode_is_read_and_not_changed() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    let text: String = (1..=40_000).map(|line| format!("{line}\n")).collect();
    cluster.s3.put("bucket", "p/lines", text.clone());
    cluster.mount("s3://bucket/p", "/data", &[]);
    let lines = |range: std::ops::RangeInclusive<u32>| range.map(|line| format!("{line}\n")).collect::<String>();
    assert_eq!(cluster.cv(&["fs", "head", "/data/lines"]).stdout, lines(1..=10));
    assert_eq!(cluster.cv(&["fs", "tail", "-n", "30000", "/data/lines"]).stdout, lines(10_001..=40_000));
    assert_eq!(cluster.cv(&["fs", "tail", "-n", "50000", "/data/lines"]).stdout, text);
    assert_eq!(cluster.cv(&["fs", "find", "/data", "--size", "+100KiB"]).stdout, "/data/lines\n");

    let source = cluster.directory().join("source");
    fs::write(&source, "x").unwrap();
    let source = source.to_str().unwrap();
    for arguments in [
        &["put", source, "/data/new"][..],
        &["touch", "/data/new"],
        &["touch", "/data/lines"],
        &["mkdir", "/data/new"],
        &["mkdir", "-p", "/data/new/deep"],
        &["ln", "-s", "x", "/data/new"],
        &["ln", "/data/lines", "/data/new"],
        &["rm", "/data/lines"],
        &["mv", "/data/lines", "/data/new"],
        &["chmod", "600", "/data/lines"],
        &["chown", "1", "/data/lines"],
    ] {
        refused(
            &cluster,
            &[&["fs"], arguments].concat(),
            FAILED,
            &["/data", "cache-mode", "--access-mode read-write", "cv refresh /data"],
        );
    }
    for arguments in [&["setfattr", "-n", "user.a", "-v", "1", "/data/lines"][..], &["getfattr", "/data/lines"]] {
        let only = "extended attributes that can be set exist in fs-mode mounts only: /data/lines is in /data";
        refused(&cluster, &[&["fs"], arguments].concat(), FAILED, &[only]);
    }
    refused(&cluster, &["fs", "mkdir", "/new"], FAILED, &["/new", "in no mount"]);
    refused(&cluster, &["fs", "rm", "-r", "/data"], FAILED, &["in no mount"]);
    assert_eq!(cluster.s3.get("bucket", "p/lines"), text.as_bytes());
    assert_eq!(cluster.cv(&["fs", "ls", "/data"]).stdout, "lines\n");
}

//! Modes, owners and times of cache-mode mounts whose buckets keep them (`--attributes keep`).

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use cavern_tests::{Cluster, Options, eventually};
use cavern_ufs::{Metadata, Precondition};
use rustix::io::Errno;

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(60);
/// When nothing was written.
const THEN: Duration = Duration::new(1_000_000_000, 123_456_789);

fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount("s3://bucket/top", "/data", &["--access-mode", "read_write", "--attributes", "keep"]);
    cluster
}

/// Permissions, owner, and seconds and nanoseconds of the mtime.
type Shown = (u32, u32, u32, i64, i64);

fn shown(path: &Path) -> Shown {
    let data = fs::metadata(path).unwrap();
    (data.mode() & 0o7777, data.uid(), data.gid(), data.mtime(), data.mtime_nsec())
}

fn set(path: &Path, mode: u32, owner: (u32, u32)) -> Shown {
    File::open(path).unwrap().set_modified(UNIX_EPOCH + THEN).unwrap();
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    chown(path, Some(owner.0), Some(owner.1)).unwrap();
    (mode, owner.0, owner.1, 1_000_000_000, 123_456_789)
}

fn metadata(entries: &[(&str, &str)]) -> Metadata {
    entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn put(bucket: &Bucket, key: &str, content: &'static str, metadata: &Metadata) {
    let content = bytes::Bytes::from_static(content.as_bytes());
    bucket.runtime.block_on(bucket.ufs.put(key, &content, metadata, Precondition::Anything)).unwrap();
}

/// What an object has beside its bytes, except the name of the write.
#[track_caller]
fn kept_by(bucket: &Bucket, key: &str) -> Metadata {
    let mut metadata = bucket.runtime.block_on(bucket.ufs.head(key)).unwrap().metadata;
    metadata.remove("cavern-write");
    metadata
}

#[test]
fn what_is_set_is_kept_by_the_bucket_and_shown_on_every_mount() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let bucket = Bucket::of(&cluster, "bucket");
    let at = |name: &str| cluster.path("data").join(name);
    let there = |name: &str| cluster.at_start.fuse[1].mount_point.join("data").join(name);
    // By whoever makes it.
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o4640).open(at("file")).unwrap();
    file.write_all(b"content").unwrap();
    drop(file);
    assert_eq!(shown(&at("file")).0, 0o4640);
    assert_eq!(kept_by(&bucket, "top/file"), metadata(&[("gid", "0"), ("mode", "35232"), ("uid", "0")]));
    fs::create_dir(at("directory")).unwrap();
    fs::write(at("directory/below"), "below").unwrap();

    // Of what is closed, and of a directory.
    let file = set(&at("file"), 0o600, (5, 6));
    let directory = set(&at("directory"), 0o750, (7, 8));
    let expected = [("file", file), ("directory", directory)];
    for (name, expected) in expected {
        assert_eq!(shown(&at(name)), expected, "{name}");
        eventually(&format!("{name} looks so on the other mount"), PATIENCE, || {
            (shown(&there(name)) == expected).then_some(())
        });
    }
    let kept = [("gid", "6"), ("mode", "33152"), ("mtime", "1000000000.123456789"), ("uid", "5")];
    assert_eq!(kept_by(&bucket, "top/file"), metadata(&kept));
    assert_eq!(kept_by(&bucket, "top/directory/")["mode"], "16872");
    assert_eq!(bucket.objects()["top/file"], "content");
    // When nobody remembers anything.
    cluster.stop("fuse0");
    cluster.kill("master");
    cluster.start("master");
    cluster.start("fuse0");
    for (name, expected) in expected {
        assert_eq!(shown(&at(name)), expected, "{name}");
    }
    assert_eq!(fs::read(at("file")).unwrap(), b"content");

    // A rename takes it along; who writes keeps all but the time.
    fs::rename(at("file"), at("directory/moved")).unwrap();
    assert_eq!(shown(&at("directory/moved")), file);
    fs::rename(at("directory"), at("renamed")).unwrap();
    assert_eq!((shown(&at("renamed")), shown(&at("renamed/moved"))), (directory, file));
    OpenOptions::new().append(true).open(at("renamed/moved")).unwrap().write_all(b", and more").unwrap();
    let (mode, uid, gid, mtime, _) = shown(&at("renamed/moved"));
    assert_eq!((mode, uid, gid), (0o600, 5, 6));
    assert!(mtime > 1_000_000_000);
    assert_eq!(bucket.objects()["top/renamed/moved"], "content, and more");
    // The mount's own root has no object.
    assert_eq!(
        Errno::from_io_error(&fs::set_permissions(cluster.path("data"), Permissions::from_mode(0o700)).unwrap_err()),
        Some(Errno::OPNOTSUPP)
    );
}

#[test]
fn what_others_keep_with_objects_is_shown_after_one_head_for_each_file() {
    let cluster = mounted(Options::default());
    let bucket = Bucket::of(&cluster, "bucket");
    put(&bucket, "top/plain", "plain", &Metadata::new());
    let kept = metadata(&[("gid", "2"), ("mode", "33184"), ("mtime", "7.5"), ("other", "kept"), ("uid", "1")]);
    put(&bucket, "top/kept", "kept", &kept);
    put(&bucket, "top/link", "kept", &metadata(&[("mode", "41471")]));
    put(&bucket, "top/d/below", "below", &kept);
    let at = |name: &str| cluster.path("data").join(name);
    cluster.cv(&["refresh", "/data"]);
    cluster.s3.reset_stats();
    let names = fs::read_dir(cluster.path("data")).unwrap().count();
    assert_eq!((names, cluster.s3.requests("HEAD")), (4, 0), "names cost nothing");
    for _ in 0..2 {
        assert_eq!(shown(&at("kept")), (0o640, 1, 2, 7, 500_000_000));
        assert_eq!(shown(&at("d/below")), (0o640, 1, 2, 7, 500_000_000));
        let plain = shown(&at("plain"));
        let link = shown(&at("link"));
        assert_eq!((plain.0, link.0), (0o644, 0o644), "as the configuration says");
    }
    let heads = cluster.s3.requests("HEAD");
    assert!((5..=6).contains(&heads), "{heads} for five names");

    // What others say beside that stays; and what they change is seen with the next listing.
    fs::set_permissions(at("kept"), Permissions::from_mode(0o444)).unwrap();
    assert_eq!(kept_by(&bucket, "top/kept")["other"], "kept");
    assert_eq!(shown(&at("kept")), (0o444, 1, 2, 7, 500_000_000));
    put(&bucket, "top/kept", "another", &kept);
    cluster.cv(&["refresh", "/data"]);
    eventually("the new object is shown", PATIENCE, || (shown(&at("kept")).0 == 0o640).then_some(()));
}

#[test]
fn rsync_there_and_back_has_nothing_to_do_the_second_time() {
    let cluster = mounted(Options::default());
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let from = local.path().join("from");
    fs::create_dir_all(from.join("a/b")).unwrap();
    for (number, name) in ["one", "a/two", "a/b/three", "a/empty"].into_iter().enumerate() {
        fs::write(from.join(name), vec![number as u8; number * 50_000]).unwrap();
        set(&from.join(name), [0o644, 0o755, 0o600, 0o4711][number], (number as u32, 10));
    }
    fs::write(from.join("large"), vec![9; 20 << 20]).unwrap();
    set(&from.join("large"), 0o440, (3, 3));
    for name in ["a/b", "a", ""] {
        set(&from.join(name), 0o750, (4, 4));
    }
    let rsync = |from: &Path, to: &Path| {
        let from = format!("{}/", from.display());
        let done = Command::new("rsync").args(["-a", "--itemize-changes", &from]).arg(to).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    let there = cluster.path("data/tree");
    assert!(rsync(&from, &there).contains("a/b/three"));
    assert_eq!(rsync(&from, &there), "", "the second time");
    cluster.stop("fuse0");
    cluster.start("fuse0");
    assert_eq!(rsync(&from, &there), "", "by a client that has seen nothing of it");
    let back = local.path().join("back");
    rsync(&there, &back);
    assert_eq!(rsync(&there, &back), "");
    assert_eq!(rsync(&from, &back), "", "what came back is what was there");
    assert!(fs::read(back.join("large")).unwrap() == vec![9; 20 << 20]);

    // cp sets everything before it closes.
    let mut copy = Command::new("cp");
    let copied = copy.args(["-a", "--no-preserve=xattr"]).arg(&from).arg(cluster.path("data/copied")).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert_eq!(rsync(&from, &cluster.path("data/copied")), "");
}

#[test]
fn a_file_that_stays_open_is_written_on_after_its_attributes_were_set_by_name() {
    let cluster = mounted(Options::default());
    let bucket = Bucket::of(&cluster, "bucket");
    let path = cluster.path("data/log");
    let mut log = File::create(&path).unwrap();
    for mode in [0o600, 0o640, 0o644] {
        log.write_all(b"line\n").unwrap();
        log.sync_all().unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        log.write_all(b"line\n").unwrap();
        log.sync_all().unwrap();
        assert_eq!(kept_by(&bucket, "top/log")["mode"], (0o100_000 | mode).to_string());
    }
    drop(log);
    assert_eq!(cluster.s3.get("bucket", "top/log"), "line\n".repeat(6));
    assert_eq!(shown(&path).0, 0o644);
}

#[test]
fn privileges_go_with_writes_and_new_owners() {
    use std::os::unix::process::CommandExt as _;

    let cluster = mounted(Options::default());
    let path = cluster.path("data/program");
    let privileged = || {
        fs::write(&path, "program").unwrap();
        set(&path, 0o6777, (65_534, 65_534));
        fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
    };
    for changes in ["echo x >> program", "truncate -s 3 program"] {
        privileged();
        assert_eq!(shown(&path).0, 0o6777);
        let done = Command::new("sh").args(["-c", changes]).current_dir(cluster.path("data")).uid(65_534).status();
        assert!(done.unwrap().success());
        assert_eq!(shown(&path).0, 0o777, "{changes}");
    }
    privileged();
    chown(&path, Some(1), None).unwrap();
    assert_eq!(shown(&path).0, 0o777);
}

#[test]
fn a_set_group_id_directory_hands_its_group_on() {
    let cluster = mounted(Options::default());
    let directory = cluster.path("data/group");
    fs::create_dir(&directory).unwrap();
    chown(&directory, None, Some(7)).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o2775)).unwrap();
    fs::write(directory.join("file"), "content").unwrap();
    fs::create_dir(directory.join("below")).unwrap();
    let [file, below] = ["file", "below"].map(|name| shown(&directory.join(name)));
    assert_eq!((file.0 & 0o2000, file.2), (0, 7));
    assert_eq!((below.0 & 0o2000, below.2), (0o2000, 7));
}

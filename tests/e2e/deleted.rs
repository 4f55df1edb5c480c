//! Objects come and go in the bucket: names follow within `metadata_ttl`, and at once after `cv refresh`, on every
//! client.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::io::Errno;

const TTL: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(10);

/// A cluster with two mounts of its namespace, in each of which /data is `bucket`. A listing that is due is waited for,
/// however busy the machine is.
fn two_mounts(options: &[&str], keys: &[&'static str]) -> (Cluster, [PathBuf; 2]) {
    let conf = "[master]\nrefresh_wait = \"30s\"\n[client]\nmetadata_timeout = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    keys.iter().for_each(|key| drop(cluster.s3.put("bucket", key, *key)));
    cluster.mount("s3://bucket", "/data", options);
    let shown = [0, 1].map(|index: usize| cluster.at_start.fuse[index].mount_point.join("data"));
    (cluster, shown)
}

/// Names in a directory, sorted.
fn names(path: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

/// Whether a path is there, as `stat` has it; panics on any other answer than yes and ENOENT.
fn is_there(path: &Path) -> bool {
    match fs::metadata(path) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// What comes and goes. Each is asked for before, so that every cache has an answer, negative ones included.
fn change(cluster: &Cluster, shown: &[PathBuf; 2]) {
    for path in shown {
        assert_eq!(fs::read(path.join("goes")).unwrap(), b"goes");
        assert_eq!(fs::read(path.join("leaving/file")).unwrap(), b"leaving/file");
        assert!(!is_there(&path.join("comes")) && !is_there(&path.join("dir/comes")) && !is_there(&path.join("new")));
        assert_eq!(names(path), ["dir", "goes", "leaving", "stays"]);
        assert_eq!(names(&path.join("dir")), ["one"]);
    }
    for key in ["goes", "leaving/file"] {
        cluster.s3.delete("bucket", key);
    }
    for key in ["comes", "dir/comes", "new/deep/file"] {
        cluster.s3.put("bucket", key, key);
    }
}

fn assert_changed(path: &Path) {
    assert!(!is_there(&path.join("goes")), "{}", path.display());
    assert_eq!(File::open(path.join("goes")).unwrap_err().kind(), io::ErrorKind::NotFound);
    for key in ["comes", "dir/comes", "new/deep/file", "stays"] {
        let read = fs::read(path.join(key)).unwrap_or_else(|error| panic!("{}: {error}", path.join(key).display()));
        assert_eq!(read, key.as_bytes());
    }
    assert!(!is_there(&path.join("leaving/file")) && !is_there(&path.join("leaving")));
    assert_eq!(names(path), ["comes", "dir", "new", "stays"]);
    assert_eq!(names(&path.join("dir")), ["comes", "one"]);
    assert_eq!(names(&path.join("new/deep")), ["file"]);
}

const KEYS: [&str; 4] = ["stays", "goes", "dir/one", "leaving/file"];

#[test]
fn names_follow_the_bucket_within_the_ttl() {
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1s"], &KEYS);
    for order in [[0, 1], [1, 0]] {
        change(&cluster, &shown);
        // The promise is about this very time.
        thread::sleep(TTL);
        order.iter().for_each(|index: &usize| assert_changed(&shown[*index]));
        for key in ["comes", "dir/comes", "new/deep/file"] {
            cluster.s3.delete("bucket", key);
        }
        for key in ["goes", "leaving/file"] {
            cluster.s3.put("bucket", key, key);
        }
        thread::sleep(TTL);
    }
}

/// Nobody looks at a name: the kernel has the whole listing, and asks for no entry of it.
#[test]
fn a_directory_that_is_only_listed_follows_the_bucket_within_the_ttl() {
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1s"], &["dir/one"]);
    let listed = || shown.each_ref().map(|path| names(&path.join("dir")));
    let mut wanted = vec![OsString::from("one")];
    for round in 0..3 {
        wanted.push(format!("two-{round}").into());
        cluster.s3.put("bucket", &format!("dir/two-{round}"), "two");
        eventually("the new name is listed", PATIENCE, || (listed() == [wanted.clone(), wanted.clone()]).then_some(()));
    }
}

#[test]
fn names_follow_the_bucket_at_once_after_a_refresh() {
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1h"], &KEYS);
    change(&cluster, &shown);
    for path in &shown {
        // Nobody has asked the bucket.
        assert!(is_there(&path.join("goes")) && !is_there(&path.join("comes")) && is_there(&path.join("leaving")));
    }
    cluster.cv(&["refresh", "/data"]);
    shown.iter().for_each(|path| assert_changed(path));

    // One name at a time, a directory that goes with its last object included; and back again.
    cluster.s3.delete("bucket", "comes");
    cluster.s3.delete("bucket", "new/deep/file");
    cluster.s3.put("bucket", "goes", "goes");
    let read = |name| shown.each_ref().map(|path| is_there(&path.join(name)));
    assert_eq!((read("comes"), read("new/deep/file"), read("goes")), ([true; 2], [true; 2], [false; 2]));
    cluster.cv(&["refresh", "/data/comes"]);
    cluster.cv(&["refresh", "/data/goes"]);
    assert_eq!((read("comes"), read("new/deep/file"), read("goes")), ([false; 2], [true; 2], [true; 2]));
    cluster.cv(&["refresh", "/data/new"]);
    assert_eq!((read("new/deep/file"), read("new/deep"), read("new")), ([false; 2], [false; 2], [false; 2]));
    assert_eq!(shown.each_ref().map(|path| names(path)), [["dir", "goes", "stays"]; 2]);
    // A name that is nowhere is an error of the command, not of the mount.
    assert_ne!(cluster.try_cv(&["refresh", "/data/nowhere"]).code, 0);
}

#[test]
fn an_open_file_of_a_deleted_object_reads_what_is_cached_and_is_stale_otherwise() {
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1h", "--block-size", "1MiB"], &["small"]);
    let mib = 1 << 20;
    cluster.s3.put("bucket", "large", vec![7; 64 * mib]);
    cluster.cv(&["refresh", "/data"]);
    let (small, large) = (File::open(shown[0].join("small")).unwrap(), File::open(shown[0].join("large")).unwrap());
    let mut page = vec![0; 4096];
    large.read_exact_at(&mut page, 0).unwrap();
    cluster.s3.delete("bucket", "small");
    cluster.s3.delete("bucket", "large");
    cluster.cv(&["refresh", "/data"]);
    assert!(!is_there(&shown[0].join("small")) && !is_there(&shown[1].join("large")));

    let mut bytes = [0; 5];
    small.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"small");
    assert_eq!(small.metadata().unwrap().len(), 5);
    large.read_exact_at(&mut page, 0).unwrap();
    assert!(page.iter().all(|byte| *byte == 7));
    let error = large.read_exact_at(&mut page, 60 << 20).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::STALE.raw_os_error()), "{error}");
}

#[test]
fn a_deletion_that_nobody_told_of_shows_when_the_object_is_opened() {
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1h"], &["cached", "uncached"]);
    for path in &shown {
        assert!(is_there(&path.join("uncached")));
    }
    assert_eq!(fs::read(shown[0].join("cached")).unwrap(), b"cached");
    cluster.s3.delete("bucket", "cached");
    cluster.s3.delete("bucket", "uncached");
    // What is cached is served, as the listing says that it is there.
    assert_eq!(shown.each_ref().map(|path| fs::read(path.join("cached")).unwrap()), [b"cached"; 2]);
    // What must be fetched turns out to be gone: not an I/O error, but no such file, for everyone from then on.
    assert_eq!(File::open(shown[0].join("uncached")).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(!is_there(&shown[0].join("uncached")));
    assert_eq!(File::open(shown[1].join("uncached")).unwrap_err().kind(), io::ErrorKind::NotFound);
}

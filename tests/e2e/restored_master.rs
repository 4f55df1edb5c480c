//! A master whose directory is an older copy: what it does not know any more does not come up in what is made later.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use serde_json::Value;

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

/// A cluster whose master gets back what its directory was.
struct Restored {
    cluster: Cluster,
}

impl Restored {
    fn up() -> Self {
        Self::up_with(Options::default())
    }

    fn up_with(options: Options) -> Self {
        let cluster = Cluster::up(options);
        cluster.s3.create_bucket("bucket");
        cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
        Self { cluster }
    }

    fn copied(from: &Path, to: &Path) {
        assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    }

    fn copy(&self) -> PathBuf {
        self.cluster.directory().join("copy-of-master")
    }

    /// Copies the master's directory while it is stopped.
    fn back_up(&self) {
        self.cluster.stop("fuse");
        self.cluster.stop("master");
        Self::copied(&self.cluster.directory().join("master0"), &self.copy());
        self.cluster.start("master");
        self.cluster.start("fuse");
    }

    /// Puts the copy back.
    fn restore(&self) {
        let data = self.cluster.directory().join("master0");
        self.cluster.stop("fuse");
        self.cluster.stop("master");
        fs::remove_dir_all(&data).unwrap();
        Self::copied(&self.copy(), &data);
        self.cluster.start("master");
        self.cluster.start("fuse");
    }

    /// Writes some bytes far into the second block of each file, and sees that nothing but zeros is before them, behind
    /// what is kept of it; then that the bucket has the same.
    fn holes_are_holes(&self, files: &[(String, Vec<u8>)]) {
        let expected = files.iter().map(|(name, kept)| (format!("fs/{name}"), self.hole_is_hole(name, kept)));
        let expected: Vec<(String, Vec<u8>)> = expected.collect();
        let bucket = Bucket::of(&self.cluster, "bucket");
        for (key, expected) in expected {
            eventually(&format!("the bucket has {key}"), PATIENCE, || {
                bucket.objects().get(&key).is_some_and(|object| *object == expected).then_some(())
            });
        }
    }

    /// Answers what the file has.
    fn hole_is_hole(&self, name: &str, kept: &[u8]) -> Vec<u8> {
        let path = self.cluster.path(format!("fs/{name}"));
        let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
        if kept.len() < MIB {
            file.write_all_at(b"tail", 900_000).unwrap();
        }
        file.write_all_at(b"tail", (MIB + 900_000) as u64).unwrap();
        file.sync_all().unwrap();
        let mut expected = vec![0; MIB + 900_004];
        if kept.len() < MIB {
            expected[900_000..900_004].copy_from_slice(b"tail");
        }
        expected[..kept.len()].copy_from_slice(kept);
        expected[MIB + 900_000..].copy_from_slice(b"tail");
        assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
        expected
    }
}

#[test]
fn no_byte_of_a_file_that_a_restored_master_has_lost_is_in_one_that_is_made_later() {
    let restored = Restored::up();
    let cluster = &restored.cluster;
    fs::write(cluster.path("fs/before"), "before").unwrap();
    restored.back_up();
    for number in 0..4 {
        let lost = File::create(cluster.path(format!("fs/lost{number}"))).unwrap();
        lost.write_all_at(&vec![b'l'; 2 * MIB], 0).unwrap();
        lost.sync_all().unwrap();
    }
    restored.restore();
    assert_eq!(fs::read(cluster.path("fs/before")).unwrap(), b"before");
    let fresh: Vec<(String, Vec<u8>)> = (0..6).map(|number| (format!("fresh{number}"), Vec::new())).collect();
    restored.holes_are_holes(&fresh);
}

#[test]
fn no_byte_that_a_restored_master_has_lost_of_a_file_is_in_what_is_written_to_it_later() {
    let restored = Restored::up();
    let cluster = &restored.cluster;
    let path = |name: &str| cluster.path(format!("fs/{name}"));
    for name in ["empty", "emptied"] {
        File::create(path(name)).unwrap().sync_all().unwrap();
    }
    for name in ["grown", "rewritten", "cut"] {
        fs::write(path(name), vec![b'b'; MIB]).unwrap();
        File::open(path(name)).unwrap().sync_all().unwrap();
    }
    restored.back_up();
    let lost = vec![b'l'; 2 * MIB];
    for name in ["empty", "emptied", "grown", "rewritten", "cut"] {
        let (is_grown, is_kept) = (name == "grown", matches!(name, "grown" | "empty" | "emptied"));
        let file = File::options().write(true).truncate(!is_kept).open(path(name)).unwrap();
        file.write_all_at(&lost[..if is_grown { MIB } else { 2 * MIB }], if is_grown { MIB as u64 } else { 0 })
            .unwrap();
        file.sync_all().unwrap();
    }
    restored.restore();
    drop(File::create(path("emptied")).unwrap());
    drop(File::create(path("rewritten")).unwrap());
    File::options().write(true).open(path("cut")).unwrap().set_len(0).unwrap();
    let empty = ["empty", "emptied", "rewritten", "cut"].map(|name| (name.to_owned(), Vec::new()));
    restored.holes_are_holes(&[&empty[..], &[("grown".to_owned(), vec![b'b'; MIB])]].concat());
}

#[test]
fn workers_tell_of_what_a_restored_master_lacks_and_keep_its_blocks_until_they_are_started_again() {
    let conf = "[worker]\norphan_block_grace = \"3s\"\n".to_owned();
    let restored = Restored::up_with(Options { conf, ..Options::default() });
    let cluster = &restored.cluster;
    fs::write(cluster.path("fs/before"), vec![b'b'; MIB]).unwrap();
    let report = || cluster.cv(&["report", "--json"]).json();
    let rollbacks = || report()["rollbacks"].as_array().unwrap().clone();
    let metric = |name: &str| cluster.status().workers[0].metric(&format!("cavern_worker_{name}")).unwrap();
    restored.back_up();
    assert_eq!(rollbacks(), Vec::<Value>::new(), "a master that was started again lacks nothing");
    let lost = File::create(cluster.path("fs/lost")).unwrap();
    lost.write_all_at(&vec![b'l'; 4 * MIB], 0).unwrap();
    lost.sync_all().unwrap();
    drop(lost);
    let data_bytes = metric("data_bytes");
    eventually("the worker has sent a heartbeat since", PATIENCE, || {
        (report()["workers"][0]["disks"][0]["used_bytes"].as_u64() >= Some(data_bytes)).then_some(())
    });
    let in_bucket =
        || Bucket::of(cluster, "bucket").objects().get("fs/lost").is_some_and(|object| object.len() == 4 * MIB);
    eventually("the bucket has it", PATIENCE, || in_bucket().then_some(()));
    restored.restore();
    let past = eventually("the blocks of the lost file are kept", PATIENCE, || {
        rollbacks().into_iter().find(|past| past["kept_blocks"] == 4)
    });
    assert!(past["who"].as_str().unwrap().starts_with("worker 1 at "), "{past}");
    assert!(past["told"].as_u64() > past["had"].as_u64(), "{past}");
    assert!(past["kept_bytes"].as_u64() >= Some(4 * MIB as u64), "{past}");
    assert_eq!((metric("data_bytes"), metric("orphan_blocks_total")), (data_bytes, 0));
    let said = cluster.cv(&["report"]).stdout;
    assert!(said.lines().any(|line| line.starts_with("RESTORED  worker 1 at ")), "{said}");
    let log = fs::read_to_string(&cluster.at_start.masters[0].log).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("restored from an older copy")).count(), 1, "{log}");

    cluster.stop("worker0");
    cluster.start("worker0");
    eventually("the blocks are freed", PATIENCE, || (metric("orphan_blocks_total") == 4).then_some(()));
    assert_eq!(rollbacks(), Vec::<Value>::new());
    assert!(fs::read(cluster.path("fs/before")).unwrap() == vec![b'b'; MIB]);
    assert!(in_bucket(), "it stays where it can be copied from");
}

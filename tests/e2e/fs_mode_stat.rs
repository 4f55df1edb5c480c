//! What `stat` returns for files of fs-mode mounts beside their names and lengths: the room that they take, and their
//! birth.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::FallocateFlags;

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

fn mounted(conf: &str) -> Cluster {
    let cluster = Cluster::up(Options { conf: conf.to_owned(), more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks()
}

type Operation = (&'static str, fn(&File));

/// What is done to a file, one after the other.
const DEEDS: [Operation; 10] = [
    ("written", |file| file.write_all_at(&[1; 10_000], 0).unwrap()),
    ("lengthened", |file| file.set_len(512 * MIB).unwrap()),
    ("written far behind", |file| file.write_all_at(&[2; 4096], 300 * MIB).unwrap()),
    ("written over", |file| file.write_all_at(&[3; 100], 300 * MIB).unwrap()),
    ("punched", |file| {
        rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 8192).unwrap();
    }),
    ("allocated", |file| {
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 60 * MIB, 8 * MIB).unwrap();
    }),
    ("allocated beyond the end", |file| {
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 600 * MIB, MIB).unwrap();
    }),
    ("written where there is room", |file| file.write_all_at(&[4; 4096], 61 * MIB).unwrap()),
    ("cut", |file| file.set_len(68 * MIB).unwrap()),
    ("emptied", |file| file.set_len(0).unwrap()),
];

/// Blocks after each deed, while the file is open, after it was closed, and soon on another mount.
fn blocks_after_each(path: &Path, elsewhere: Option<&Path>) -> Vec<String> {
    File::create_new(path).unwrap();
    let mut observed = Vec::new();
    for (what, deed) in DEEDS {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        deed(&file);
        let (open, by_name) = (file.metadata().unwrap().blocks(), blocks(path));
        drop(file);
        let closed = blocks(path);
        if let Some(elsewhere) = elsewhere {
            let seen = || (blocks(elsewhere) == closed).then_some(());
            eventually(&format!("{closed} blocks of a file that was {what}, on another mount"), PATIENCE, seen);
        }
        observed.push(format!("{what}: {open} {by_name} {closed}"));
    }
    observed
}

fn room_is_as_locally(conf: &str) {
    let cluster = mounted(conf);
    let local = tempfile::tempdir_in(cluster.directory()).unwrap();
    let second = cluster.at_start.fuse[1].mount_point.join("fs/file");
    let observed = blocks_after_each(&cluster.path("fs/file"), Some(&second));
    assert_eq!(observed, blocks_after_each(&local.path().join("file"), None));
}

#[test]
fn files_take_the_room_that_they_take_locally() {
    room_is_as_locally("");
}

#[test]
fn files_take_that_room_at_workers_on_other_hosts_too() {
    room_is_as_locally("[client]\nlocal_descriptors = false\n");
}

#[test]
fn programs_that_look_at_the_room_leave_holes_alone() {
    let cluster = mounted("");
    let directory = cluster.path("fs");
    let sparse = directory.join("sparse");
    let file = File::create(&sparse).unwrap();
    file.write_all_at(&[1; 4096], 256 * MIB).unwrap();
    file.set_len(512 * MIB).unwrap();
    drop(file);
    assert_eq!(blocks(&sparse), 8);
    let copied = Command::new("cp").args(["--reflink=never", "sparse", "copy"]).current_dir(&directory).status();
    assert!(copied.unwrap().success());
    assert_eq!((blocks(&directory.join("copy")), fs::metadata(directory.join("copy")).unwrap().len()), (8, 512 * MIB));
    let packed = Command::new("tar").args(["-cSf", "packed.tar", "sparse"]).current_dir(&directory).status();
    assert!(packed.unwrap().success());
    assert!(fs::metadata(directory.join("packed.tar")).unwrap().len() < MIB);

    let room = Command::new("du").args(["-k", "copy"]).current_dir(&directory).output().unwrap();
    assert_eq!(room.stdout, b"4\tcopy\n");

    // Where a file ends within a block, what lay behind that counts no longer.
    let cut = directory.join("cut");
    fs::write(&cut, vec![1; 8 << 20]).unwrap();
    assert_eq!(blocks(&cut), 8 * MIB / 512);
    OpenOptions::new().write(true).open(&cut).unwrap().set_len(9000).unwrap();
    assert_eq!(blocks(&cut), 24);

    // A client and a master that are killed take nothing of it with them.
    cluster.kill("fuse0");
    cluster.kill("master");
    cluster.start("master");
    cluster.start("fuse0");
    assert_eq!(blocks(&sparse), 8);
    std::os::unix::fs::symlink("sparse", directory.join("link")).unwrap();
    assert_eq!(fs::symlink_metadata(directory.join("link")).unwrap().blocks(), 0);
}

#[test]
fn what_only_the_bucket_has_takes_as_much_as_it_has() {
    let cluster = mounted("");
    let path = cluster.path("fs/file");
    let file = File::create(&path).unwrap();
    file.write_all_at(&[1; 4096], 2 * MIB).unwrap();
    drop(file);
    assert_eq!(blocks(&path), 8);
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    cluster.cv(&["fs", "free", "/fs/file"]);
    let is_counted = || (blocks(&path) == (2 * MIB + 4096) / 512).then_some(());
    eventually("what was a hole is the bucket's now", PATIENCE, is_counted);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(MIB).unwrap();
    assert_eq!(blocks(&path), MIB / 512);
    // The block comes back, as one of the workers.
    file.write_all_at(&[2; 4096], 3 * MIB).unwrap();
    drop(file);
    assert_eq!(blocks(&path), (MIB + 4096) / 512);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 2 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 8);
}

#[test]
fn every_inode_has_a_birth() {
    let cluster = mounted("");
    cluster.s3.put("bucket", "objects/object", b"bytes".as_slice());
    cluster.mount("s3://bucket/objects", "/objects", &[]);
    let born = |path: &Path| fs::symlink_metadata(path).unwrap().created();
    let before = SystemTime::now();
    let [file, directory, link] = ["file", "directory", "link"].map(|name| cluster.path("fs").join(name));
    fs::write(&file, "bytes").unwrap();
    fs::create_dir(&directory).unwrap();
    std::os::unix::fs::symlink("file", &link).unwrap();
    let births = [&file, &directory, &link].map(|path| born(path).unwrap());
    assert!(births.iter().all(|birth| (before..SystemTime::now()).contains(birth)), "{births:?} after {before:?}");
    let [of_file, of_directory, _] = births;

    fs::write(&file, "other bytes").unwrap();
    fs::write(directory.join("below"), "").unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::rename(&file, directory.join("moved")).unwrap();
    fs::hard_link(directory.join("moved"), &file).unwrap();
    let elsewhere = cluster.at_start.fuse[1].mount_point.join("fs");
    eventually("the other mount sees it", PATIENCE, || elsewhere.join("file").exists().then_some(()));
    cluster.kill("fuse0");
    cluster.kill("master");
    cluster.start("master");
    cluster.start("fuse0");
    for path in [&file, &directory.join("moved"), &elsewhere.join("directory/moved")] {
        assert_eq!(born(path).unwrap(), of_file, "{}", path.display());
    }
    assert_eq!(born(&directory).unwrap(), of_directory);
    assert!(born(&cluster.path("fs")).unwrap() < before, "the mount's own root");
    assert!(born(&cluster.path("objects/object")).is_err(), "a bucket knows of none");
}

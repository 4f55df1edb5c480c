//! Stores that keep objects in a tree of files: of the keys `a` and `a/b` there is one only.

use std::fs;
use std::path::Path;

use bytes::Bytes;
use cavern_tests::{Cluster, eventually};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::json;

use super::{PATIENCE, assert_same, mounted, noise};
use crate::bucket::{Bucket, Objects};

fn mounted_on_tree_store(workers: usize) -> Cluster {
    let cluster = mounted(workers);
    cluster.s3.add_fault(&json!({ "kind": "tree" }));
    cluster
}

/// What the bucket is to have of a directory of the mount.
fn tree(path: &Path, key: &str, objects: &mut Objects) {
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let key = format!("{key}/{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            objects.insert(format!("{key}/"), Bytes::new());
            tree(&entry.path(), &key, objects);
        } else {
            objects.insert(key, fs::read(entry.path()).unwrap().into());
        }
    }
}

#[track_caller]
fn assert_follows(cluster: &Cluster) {
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let mut expected = Objects::new();
    tree(&cluster.path("fs"), "fs", &mut expected);
    assert_same(&Bucket::of(cluster, "bucket").objects(), &expected);
}

#[track_caller]
fn persist(cluster: &Cluster) {
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
}

#[track_caller]
fn exchange(one: &Path, other: &Path) {
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
}

#[test]
fn a_file_that_moves_below_its_own_name_arrives() {
    let cluster = mounted_on_tree_store(2);
    let at = |path: &str| cluster.path("fs").join(path);
    for (name, length) in [("small", 5000), ("large", 20 << 20)] {
        fs::write(at(name), noise(1, length)).unwrap();
        persist(&cluster);
        fs::rename(at(name), at("t")).unwrap();
        fs::create_dir(at(name)).unwrap();
        fs::rename(at("t"), at(name).join(name)).unwrap();
        assert_follows(&cluster);
        // And up again.
        fs::rename(at(name).join(name), at("t")).unwrap();
        fs::remove_dir(at(name)).unwrap();
        fs::rename(at("t"), at(name)).unwrap();
        assert_follows(&cluster);
    }
}

#[test]
fn a_file_and_a_directory_change_places() {
    let cluster = mounted_on_tree_store(1);
    let at = |path: &str| cluster.path("fs").join(path);
    fs::write(at("file"), noise(1, 9 << 20)).unwrap();
    fs::create_dir_all(at("dir/below")).unwrap();
    fs::write(at("dir/one"), noise(2, 100)).unwrap();
    fs::write(at("dir/below/two"), noise(3, 100)).unwrap();
    persist(&cluster);
    exchange(&at("file"), &at("dir"));
    assert_follows(&cluster);
    exchange(&at("file"), &at("dir"));
    assert_follows(&cluster);
}

#[test]
fn files_that_wait_for_each_other_are_written() {
    let cluster = mounted_on_tree_store(1);
    let at = |path: &str| cluster.path("fs").join(path);
    let names = ["a", "b", "c"];
    for (seed, name) in (1..).zip(names) {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("x"), noise(seed, 1000)).unwrap();
    }
    persist(&cluster);
    // Each takes the name of the directory that another one is in.
    for name in names {
        fs::rename(at(name).join("x"), at(&format!("{name}.t"))).unwrap();
        fs::remove_dir(at(name)).unwrap();
    }
    for (name, next) in names.into_iter().zip(["b", "c", "a"]) {
        fs::rename(at(&format!("{name}.t")), at(next)).unwrap();
    }
    assert_follows(&cluster);
}

#[test]
fn names_that_are_removed_are_free_for_another_kind() {
    let cluster = mounted_on_tree_store(1);
    let at = |path: &str| cluster.path("fs").join(path);
    fs::write(at("file"), "f").unwrap();
    fs::create_dir_all(at("dir/below")).unwrap();
    fs::write(at("dir/below/x"), "x").unwrap();
    fs::write(at("open"), "o").unwrap();
    persist(&cluster);
    fs::remove_file(at("file")).unwrap();
    fs::create_dir(at("file")).unwrap();
    fs::write(at("file/x"), "fx").unwrap();
    fs::remove_dir_all(at("dir")).unwrap();
    fs::write(at("dir"), "d").unwrap();
    let open = fs::File::open(at("open")).unwrap();
    fs::remove_file(at("open")).unwrap();
    fs::create_dir(at("open")).unwrap();
    fs::write(at("open/x"), "ox").unwrap();
    assert_follows(&cluster);
    assert_eq!(std::io::read_to_string(&open).unwrap(), "o");
}

#[test]
fn content_that_only_the_old_object_has_is_kept() {
    let cluster = super::cluster(1);
    cluster.s3.create_bucket("bucket");
    let (moved, opened, exchanged) = (noise(1, 3 << 20), noise(2, 3 << 20), noise(3, 20 << 20));
    cluster.s3.put("bucket", "fs/moved", moved.clone());
    cluster.s3.put("bucket", "fs/opened", opened.clone());
    cluster.s3.put("bucket", "fs/exchanged", exchanged.clone());
    cluster.s3.put("bucket", "fs/dir/x", "x");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster.s3.add_fault(&json!({ "kind": "tree" }));
    let at = |path: &str| cluster.path("fs").join(path);
    fs::rename(at("moved"), at("t")).unwrap();
    fs::create_dir(at("moved")).unwrap();
    fs::rename(at("t"), at("moved/moved")).unwrap();
    let open = fs::File::open(at("opened")).unwrap();
    fs::remove_file(at("opened")).unwrap();
    fs::create_dir(at("opened")).unwrap();
    fs::write(at("opened/x"), "ox").unwrap();
    exchange(&at("exchanged"), &at("dir"));
    persist(&cluster);
    let mut expected = Objects::new();
    tree(&cluster.path("fs"), "fs", &mut expected);
    let bucket = Bucket::of(&cluster, "bucket");
    let mut there = bucket.objects();
    // What is open only is kept beside all names.
    let is_kept = |key: &String| key.starts_with("fs/.cavern-preserved-");
    there.retain(|key, _| !is_kept(key));
    assert_same(&there, &expected);
    assert!(expected["fs/moved/moved"] == moved && expected["fs/dir"] == exchanged);
    let mut read = Vec::new();
    std::io::Read::read_to_end(&mut &open, &mut read).unwrap();
    assert!(read == opened);
    drop(open);
    // The master hears of that a moment later.
    eventually("it is kept no longer", PATIENCE, || (!bucket.objects().keys().any(is_kept)).then_some(()));
    assert_follows(&cluster);
}

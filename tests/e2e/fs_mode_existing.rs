//! Prefixes that have objects before they are mounted in fs-mode.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, lchown, symlink};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{Cluster, Options, eventually, within};
use futures::{StreamExt, TryStreamExt, stream};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::bucket::{Bucket, Objects};

const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster that lists slowly enough to be caught at it.
fn cluster() -> Cluster {
    cluster_with("100ms")
}

fn cluster_with(persist_delay: &str) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"{persist_delay}\"\nlist_concurrency = 4\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster
}

/// Puts objects into the bucket, many at a time.
fn put_all(cluster: &Cluster, objects: &Objects) {
    let client = cluster.s3.client();
    let puts = stream::iter(objects).map(|(key, content)| client.put("bucket", key, content.clone()));
    cluster.s3.run(puts.buffer_unordered(16).try_for_each(|_| async { Ok(()) }));
}

/// How the only mount fares.
fn status(cluster: &Cluster) -> Value {
    cluster.cv(&["mount", "--json"]).json()[0]["status"].clone()
}

fn indexed(cluster: &Cluster) -> Value {
    eventually("the index is complete", PATIENCE, || {
        let status = status(cluster);
        (status["indexing"] == false).then_some(status)
    })
}

fn persisted(cluster: &Cluster) {
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
}

fn errno<T>(result: io::Result<T>) -> Errno {
    match result {
        Ok(_) => panic!("it succeeded"),
        Err(error) => Errno::from_io_error(&error).unwrap(),
    }
}

/// Every file below a directory, with its content.
fn files(directory: &Path) -> Objects {
    let (mut files, mut waiting) = (Objects::new(), vec![directory.to_owned()]);
    while let Some(at) = waiting.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap().into());
            }
        }
    }
    files
}

#[test]
fn a_prefix_with_objects_is_used_while_it_is_indexed_and_a_killed_master_goes_on() {
    let cluster = cluster();
    let mut model: Objects = (0..5000)
        .map(|number: u32| {
            let name = match number % 5 {
                0 => format!("flat/file{number:04}"),
                _ => format!("d{}/e{}/file{number:04}", number % 9, number % 90),
            };
            (name, Bytes::from(format!("content of {number}")))
        })
        .collect();
    model.insert("deep/a/b/c/d/e/f/file".to_owned(), Bytes::from_static(b"deep"));
    let directories: BTreeSet<&Path> = model.keys().flat_map(|name| Path::new(name).ancestors().skip(1)).collect();
    // The root is no entry.
    let entries = model.len() + directories.len() - 1;
    let in_bucket = |model: &Objects| {
        model.iter().map(|(name, content)| (format!("fs/{name}"), content.clone())).collect::<Objects>()
    };
    put_all(&cluster, &in_bucket(&model));
    cluster.s3.put("bucket", "fs/d1/./hidden", "hidden");
    // So long that a hundred directories take more time than all that is done meanwhile, on a busy machine too.
    cluster.s3.add_fault(&json!({"latency_ms": 200, "operations": ["LIST"]}));
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let at = |name: &str| cluster.path("fs").join(name);

    // All of this at once.
    assert_eq!(fs::read(at("deep/a/b/c/d/e/f/file")).unwrap(), b"deep");
    assert_eq!(fs::read(at("flat/file4000")).unwrap(), b"content of 4000");
    assert_eq!(errno(fs::metadata(at("flat/file4001"))), Errno::NOENT);
    assert_eq!(errno(fs::metadata(at("d8/e8/none"))), Errno::NOENT);
    assert_eq!(errno(File::create_new(at("d2/e2/file0002"))), Errno::EXIST);
    assert_eq!(errno(fs::create_dir(at("d3/e3"))), Errno::EXIST);
    assert_eq!(errno(fs::remove_dir(at("d4/e4"))), Errno::NOTEMPTY);
    assert_eq!(status(&cluster)["indexing"], true);
    fs::write(at("d5/new"), b"new").unwrap();
    model.insert("d5/new".to_owned(), Bytes::from_static(b"new"));
    fs::rename(at("flat/file0005"), at("d6/moved")).unwrap();
    let moved = model.remove("flat/file0005").unwrap();
    model.insert("d6/moved".to_owned(), moved);
    fs::remove_file(at("flat/file0010")).unwrap();
    model.remove("flat/file0010").unwrap();
    fs::rename(at("deep"), at("deeper")).unwrap();
    let deep = model.remove("deep/a/b/c/d/e/f/file").unwrap();
    model.insert("deeper/a/b/c/d/e/f/file".to_owned(), deep);
    OpenOptions::new()
        .append(true)
        .open(at("flat/file0015"))
        .and_then(|mut file| io::Write::write_all(&mut file, b"+"))
        .unwrap();
    model.insert("flat/file0015".to_owned(), Bytes::from_static(b"content of 15+"));
    assert_eq!(status(&cluster)["indexing"], true);
    cluster.kill("master");
    cluster.s3.clear_faults();
    cluster.start("master");

    let status = indexed(&cluster);
    assert_eq!((&status["indexed_entries"], &status["hidden_keys"]), (&json!(entries), &json!(1)));
    assert_eq!(status["unlisted_directories"], 0);
    assert!(files(&cluster.path("fs")) == model);
    persisted(&cluster);
    let mut left = Bucket::of(&cluster, "bucket").objects();
    left.retain(|key, _| !key.ends_with('/'));
    assert_eq!(left.remove("fs/d1/./hidden"), Some(Bytes::from_static(b"hidden")));
    assert!(left == in_bucket(&model), "the bucket has the namespace's files");

    // What was listed is the namespace's alone, until a refresh asks it to look.
    cluster.s3.put("bucket", "fs/flat/later", "later");
    assert_eq!(errno(fs::metadata(at("flat/later"))), Errno::NOENT);
    cluster.cv(&["refresh", "/fs/flat/later"]);
    assert_eq!(fs::read(at("flat/later")).unwrap(), b"later");
}

#[test]
fn a_bucket_that_is_away_is_waited_for_and_never_taken_for_an_empty_one() {
    let cluster = cluster();
    let objects: Objects =
        (0..30).map(|number| (format!("fs/d{number}/file"), Bytes::from(format!("{number}")))).collect();
    put_all(&cluster, &objects);
    // The bucket is away before all of them can have been listed.
    cluster.s3.add_fault(&json!({"latency_ms": 400, "operations": ["LIST"]}));
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["LIST", "HEAD"]}));
    eventually("the failure is shown", PATIENCE, || {
        let status = status(&cluster);
        (status["indexing"] == true && status["last_error"] != "").then_some(())
    });
    // One of the last directories: it cannot have been listed.
    let unlisted = (0..30).rev().map(|number| format!("d{number}"));
    let known = unlisted.map(|name| cluster.path("fs").join(name)).collect::<Vec<_>>();
    let (mut failed, mut found) = (0, 0);
    for directory in known {
        let outcome = within("an answer of a mount whose bucket is away", PATIENCE, move || {
            [fs::metadata(directory.join("file")).map(drop), fs::write(directory.join("new"), b"new")]
        });
        match outcome {
            [Ok(()), Ok(())] => found += 1,
            [one, other] => {
                for error in [one, other].into_iter().filter_map(Result::err) {
                    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO), "{error}");
                }
                failed += 1;
                if failed == 2 {
                    break;
                }
            }
        }
    }
    assert!(failed > 0, "{found} directories were listed before the bucket went away");
    cluster.s3.clear_faults();
    indexed(&cluster);
    for number in 0..30 {
        assert_eq!(fs::read(cluster.path(format!("fs/d{number}/file"))).unwrap(), number.to_string().as_bytes());
    }
    assert_eq!(status(&cluster)["last_error"], "");
}

/// What a refresh says of names, in their order.
fn names(report: &Value) -> Vec<(String, String)> {
    let text = |name: &Value, key: &str| name[key].as_str().unwrap().to_owned();
    let mut names: Vec<_> =
        report["names"].as_array().unwrap().iter().map(|name| (text(name, "path"), text(name, "fate"))).collect();
    names.sort();
    names
}

#[test]
fn what_others_changed_comes_in_with_a_refresh_and_own_changes_win() {
    // The bucket follows when an export asks for it, so that no upload is in flight during a refresh.
    let cluster = cluster_with("1h");
    let exported = || cluster.cv(&["export", "/fs", "--watch"]);
    let before = ["a/keep", "a/change", "a/delete", "a/dirty", "a/held", "b/one", "b/two"];
    let before: Objects =
        before.iter().map(|name| (format!("fs/{name}"), Bytes::from(format!("old {name}")))).collect();
    put_all(&cluster, &before);
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    indexed(&cluster);
    let at = |name: &str| cluster.path("fs").join(name);
    // All of it is in the caches of kernel and client.
    assert_eq!(files(&cluster.path("fs")).len(), before.len());

    let mut held = OpenOptions::new().append(true).open(at("a/held")).unwrap();
    io::Write::write_all(&mut held, b"+").unwrap();
    held.sync_all().unwrap();
    exported();
    fs::write(at("a/dirty"), b"mine").unwrap();
    fs::write(at("a/made"), b"made").unwrap();
    for (name, size) in [("a/change", 7), ("a/dirty", 8), ("a/held", 9), ("c/new/file", 10), ("a/added", 11)] {
        cluster.s3.put_sparse("bucket", &format!("fs/{name}"), size);
    }
    for name in ["a/delete", "b/one", "b/two"] {
        cluster.s3.delete("bucket", &format!("fs/{name}"));
    }
    let expected = [
        ("/fs/a/added", "added"),
        ("/fs/a/change", "changed"),
        ("/fs/a/delete", "removed"),
        ("/fs/a/dirty", "conflict"),
        ("/fs/a/held", "conflict"),
        ("/fs/b", "removed"),
        ("/fs/b/one", "removed"),
        ("/fs/b/two", "removed"),
        ("/fs/c", "added"),
    ];
    let dry = cluster.cv(&["refresh", "/fs", "--dry-run", "--json"]).json();
    let expected = expected.map(|(path, fate)| (path.to_owned(), fate.to_owned()));
    assert_eq!(names(&dry), expected);
    assert_eq!(fs::read(at("a/change")).unwrap(), b"old a/change", "nothing is changed by that");
    assert_eq!(errno(fs::metadata(at("c"))), Errno::NOENT);

    let report = cluster.cv(&["refresh", "/fs", "--json"]).json();
    let conflicts: Vec<_> = expected.into_iter().filter(|(_, fate)| fate == "conflict").collect();
    assert_eq!(names(&report), conflicts);
    assert_eq!((&report["changed"], &report["removed"], &report["conflicts"]), (&json!(1), &json!(4), &json!(2)));
    assert_eq!(report["added"], json!(4), "a file, and a directory with what is below it");
    assert_eq!(fs::read(at("a/change")).unwrap(), [0; 7]);
    assert_eq!(fs::read(at("c/new/file")).unwrap(), [0; 10]);
    assert_eq!(errno(fs::metadata(at("a/delete"))), Errno::NOENT);
    assert_eq!(errno(fs::metadata(at("b"))), Errno::NOENT);
    assert_eq!(fs::read(at("a/dirty")).unwrap(), b"mine");
    assert_eq!(fs::read(at("a/made")).unwrap(), b"made");
    exported();
    assert_eq!(cluster.s3.get("bucket", "fs/a/dirty"), "mine");
    assert_eq!(cluster.s3.get("bucket", "fs/a/made"), "made");
    drop(held);
    eventually("nobody holds the file", PATIENCE, || {
        cluster.cv(&["refresh", "/fs/a"]);
        (fs::read(at("a/held")).unwrap() == [0; 9]).then_some(())
    });
    let nothing = cluster.cv(&["refresh", "/fs", "--dry-run", "--json"]).json();
    assert_eq!(names(&nothing), []);
    let nowhere = cluster.try_cv(&["refresh", "/fs/nowhere"]);
    assert_eq!(nowhere.code, 4, "{nowhere:?}");
}

// ------------------------------------------------------------------------------------------- recovery

/// All that stat, readlink, listxattr and read return for what is below a directory, by path; inodes as the first path
/// that has each.
fn described(top: &Path) -> BTreeMap<OsString, String> {
    let (mut described, mut waiting, mut first) = (BTreeMap::new(), vec![top.to_owned()], BTreeMap::new());
    while let Some(at) = waiting.pop() {
        let mut entries: Vec<_> = fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let stat = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(top).unwrap().as_os_str().to_owned();
            if stat.is_dir() {
                waiting.push(path.clone());
            }
            let content = match stat.file_type() {
                kind if kind.is_file() => format!("{:?}", fnv(&fs::read(&path).unwrap())),
                kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path).unwrap()),
                _ => String::new(),
            };
            let links = if stat.is_dir() { 0 } else { stat.nlink() };
            let size = if stat.is_dir() { 0 } else { stat.size() };
            described.insert(
                name.clone(),
                format!(
                    "mode {:o} uid {} gid {} size {size} mtime {}.{:09} rdev {} links {links} {content} {:?}",
                    stat.mode(),
                    stat.uid(),
                    stat.gid(),
                    stat.mtime(),
                    stat.mtime_nsec(),
                    stat.rdev(),
                    xattrs(&path)
                ),
            );
            if stat.nlink() > 1 && !stat.is_dir() {
                first.entry(stat.ino()).or_insert_with(Vec::new).push(name);
            }
        }
    }
    for mut names in first.into_values() {
        names.sort();
        for name in &names {
            described.get_mut(name).unwrap().push_str(&format!(" is {:?}", names[0]));
        }
    }
    described
}

fn fnv(content: &[u8]) -> u64 {
    content.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

fn xattrs(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut list = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, &mut list[..]).unwrap();
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let name = String::from_utf8(name.to_vec()).unwrap();
        let mut value = vec![0; 4096];
        let length = rustix::fs::lgetxattr(path, &*name, &mut value[..]).unwrap();
        (name, value[..length].to_vec())
    };
    names.map(value).collect()
}

#[test]
fn a_namespace_is_recovered_from_the_bucket_of_a_cluster_that_is_lost() {
    let lost = cluster();
    lost.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    let at = |name: &str| lost.path("fs").join(name);
    let none = XattrFlags::empty();
    for directory in ["empty", "deep/er/est", "many", "ünï ©ode", "sticky"] {
        fs::create_dir_all(at(directory)).unwrap();
    }
    fs::write(at("deep/er/est/file"), b"deep").unwrap();
    fs::write(at("zero"), b"").unwrap();
    fs::write(at("ünï ©ode/ na'm\"e\n+%41"), b"odd").unwrap();
    let large: Vec<u8> =
        (0..3_500_000u32).flat_map(|number| (number as u8 ^ (number >> 8) as u8).to_le_bytes()).collect();
    fs::write(at("large"), &large).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(5 << 20).unwrap();
    sparse.write_all_at(b"middle", 3 << 20).unwrap();
    for number in 0..300 {
        fs::write(at(&format!("many/{number:03}")), format!("{number}")).unwrap();
    }
    symlink("deep/er/est/file", at("link")).unwrap();
    symlink("nowhere at all", at("many/dangling")).unwrap();
    fs::hard_link(at("large"), at("many/large too")).unwrap();
    fs::hard_link(at("large"), at("deep/large again")).unwrap();
    fs::hard_link(at("zero"), at("zero too")).unwrap();
    rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    rustix::fs::mknodat(CWD, at("socket"), FileType::Socket, Mode::from_raw_mode(0o600), 0).unwrap();
    let device = rustix::fs::makedev(7, 300);
    rustix::fs::mknodat(CWD, at("device"), FileType::CharacterDevice, Mode::from_raw_mode(0o666), device).unwrap();
    rustix::fs::setxattr(at("large"), "user.some", b"value\0\xff", none).unwrap();
    rustix::fs::setxattr(at("empty"), "user.empty", b"", none).unwrap();
    rustix::fs::setxattr(at("zero"), "trusted.t", b"t", none).unwrap();
    for (name, mode) in [("large", 0o4711), ("sticky", 0o1777), ("deep/er", 0o2750), ("zero", 0)] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    chown(at("many/007"), Some(1234), Some(56)).unwrap();
    lchown(at("link"), Some(77), Some(78)).unwrap();
    chown(at("empty"), Some(9), Some(8)).unwrap();
    let time = |seconds, nanoseconds| Timestamps {
        last_access: Timespec { tv_sec: seconds + 1, tv_nsec: nanoseconds },
        last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds },
    };
    for (number, name) in ["large", "deep/er/est/file", "link", "fifo", "empty", "many", "zero"].iter().enumerate() {
        let times = time(1_000_000_000 + number as i64, 123_456_789);
        rustix::fs::utimensat(CWD, at(name), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    rustix::fs::utimensat(CWD, at("many/100"), &time(-7, 5), AtFlags::empty()).unwrap();
    // More than the bucket takes: it is reported.
    rustix::fs::setxattr(at("many/200"), "user.big", &[7; 3000], none).unwrap();
    persisted(&lost);
    let mut before = described(&lost.path("fs"));
    for child in ["fuse", "worker0", "master"] {
        lost.kill(child);
    }

    let new = Cluster::up(Options::default());
    let options = lost.bucket_options();
    let mount = |more: &[&str]| {
        let mut arguments = vec!["mount", "s3://bucket/fs", "/again", "--write-type", "fs_mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        arguments.extend(more);
        new.try_cv(&arguments)
    };
    // Nobody but who gives the command knows that the other cluster is no more.
    let refused = mount(&["--block-size", "1MiB"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("--take-over"), "{}", refused.stderr);
    assert_eq!(mount(&["--block-size", "1MiB", "--take-over"]).code, 0);
    let shown = new.path("again");
    eventually("the mount appears", PATIENCE, || shown.is_dir().then_some(()));
    // Right from the first look on.
    assert_eq!(fs::read_link(shown.join("link")).unwrap(), Path::new("deep/er/est/file"));
    assert_eq!(fs::metadata(shown.join("deep/er")).unwrap().mode() & 0o7777, 0o2750);
    let status = indexed(&new);
    assert_eq!((&status["incomplete_entries"], &status["hidden_keys"]), (&json!(1), &json!(0)));
    let big = before.get_mut(OsStr::new("many/200")).unwrap();
    *big = big.replace(&format!("{:?}", xattrs_of_big()), "{}");
    let after = described(&shown);
    for (name, was) in &before {
        assert_eq!(after.get(name), Some(was), "{}", name.display());
    }
    assert_eq!(after.len(), before.len());
    // The bucket lacks nothing of what was recovered, and follows what is done now.
    let behind = new.cv(&["persist", "status", "/again", "--json"]).json();
    assert_eq!(behind["files"], json!(0));
    let mut names = ["large", "many/large too", "deep/large again"].map(|name| shown.join(name));
    OpenOptions::new().write(true).open(&names[0]).unwrap().write_all_at(b"changed", 2 << 20).unwrap();
    names.reverse();
    for name in names {
        assert_eq!(fs::read(&name).unwrap()[2 << 20..][..7], *b"changed", "{}", name.display());
    }
    new.cv(&["persist", "wait", "/again", "--timeout", "60s"]);
    assert_eq!(lost.s3.get("bucket", "fs/deep/large again")[2 << 20..][..7], *b"changed");
    let twice = mount(&["--block-size", "1MiB"]);
    assert_eq!(twice.code, 0, "{twice:?}");
}

#[test]
fn a_prefix_that_is_unmounted_and_mounted_again_is_as_it_was_unless_it_is_not_to_be() {
    let cluster = cluster();
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let at = |name: &str| cluster.path("fs").join(name);
    fs::create_dir_all(at("d/e")).unwrap();
    fs::write(at("d/e/script"), b"#!/bin/sh").unwrap();
    fs::set_permissions(at("d/e/script"), fs::Permissions::from_mode(0o750)).unwrap();
    chown(at("d/e/script"), Some(12), Some(13)).unwrap();
    rustix::fs::setxattr(at("d/e/script"), "user.some", b"value", XattrFlags::empty()).unwrap();
    fs::hard_link(at("d/e/script"), at("d/twin")).unwrap();
    fs::set_permissions(at("d/e"), fs::Permissions::from_mode(0o2711)).unwrap();
    symlink("e/script", at("d/link")).unwrap();
    rustix::fs::mknodat(CWD, at("d/fifo"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    let device = rustix::fs::makedev(7, 300);
    rustix::fs::mknodat(CWD, at("d/device"), FileType::CharacterDevice, Mode::from_raw_mode(0o620), device).unwrap();
    let old = Timespec { tv_sec: 1_000_000_000, tv_nsec: 5 };
    let times = Timestamps { last_access: old, last_modification: old };
    rustix::fs::utimensat(CWD, at("d/e/script"), &times, AtFlags::empty()).unwrap();
    persisted(&cluster);
    // Somebody else's.
    cluster.s3.put("bucket", "fs/d/plain", "plain");
    let before = described(&cluster.path("fs"));
    cluster.cv(&["umount", "/fs"]);

    cluster.mount_fs_mode("s3://bucket/fs", "/again", &[]);
    let at = |name: &str| cluster.path("again").join(name);
    // Whoever looks a name up first sees what it was.
    assert_eq!(fs::read_link(at("d/link")).unwrap(), Path::new("e/script"));
    let script = fs::metadata(at("d/e/script")).unwrap();
    assert_eq!((script.mode() & 0o7777, script.uid(), script.gid()), (0o750, 12, 13));
    indexed(&cluster);
    let mut after = described(&cluster.path("again"));
    // Nobody knew of it before.
    assert!(after.remove(OsStr::new("d/plain")).unwrap().starts_with("mode 100644 uid 0 gid 0 size 5"));
    assert_eq!(after, before);
    cluster.cv(&["umount", "/again"]);

    cluster.mount_fs_mode("s3://bucket/fs", "/plain", &["--no-recover"]);
    let at = |name: &str| cluster.path("plain").join(name);
    let script = fs::metadata(at("d/e/script")).unwrap();
    assert_eq!((script.mode() & 0o7777, script.uid(), script.nlink()), (0o644, 0, 1));
    assert_eq!(fs::read(at("d/link")).unwrap(), b"e/script");
    assert!(fs::symlink_metadata(at("d/link")).unwrap().is_file());
}

fn xattrs_of_big() -> BTreeMap<String, Vec<u8>> {
    [("user.big".to_owned(), vec![7; 3000])].into()
}

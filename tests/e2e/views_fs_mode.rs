//! Views of fs-mode mounts: they stay what they were while files are changed in every way, and what only they have
//! goes with them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Options, eventually};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};
use serde_json::json;

use crate::cache_writes::uploads;
use crate::client_restart::{content, replace_by_death};
use crate::running::Running;
use crate::views::{KernelView, Seen, WithViews, assert_same, read_anew, seen};

const PATIENCE: Duration = Duration::from_secs(60);
/// The bucket has nothing of what is written, and calls may wait on a busy machine.
const CONF: &str = "[client]\nmetadata_timeout = \"60s\"\n[master]\npersist_delay = \"1h\"\n";
const BLOCK: usize = 1 << 20;
const SIZES: [usize; 7] = [0, 1, 4097, 100_000, BLOCK, 2 * BLOCK + 1, 3 * BLOCK];

fn up(options: Options) -> WithViews {
    let cluster = WithViews::up(Options { conf: format!("{CONF}{}", options.conf), ..options });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--index"]);
    cluster
}

fn file(top: &Path, number: usize) -> PathBuf {
    top.join(format!("files/{number}"))
}

/// Whatever there can be in a tree.
fn make_all(top: &Path) {
    fs::create_dir_all(top.join("files")).unwrap();
    for (number, size) in SIZES.into_iter().enumerate() {
        fs::write(file(top, number), content(number, size)).unwrap();
    }
    fs::create_dir_all(top.join("deep/er")).unwrap();
    fs::set_permissions(top.join("deep"), fs::Permissions::from_mode(0o2750)).unwrap();
    fs::write(top.join("deep/er/mode"), "owned").unwrap();
    chown(top.join("deep/er/mode"), Some(70_000), Some(80_000)).unwrap();
    fs::set_permissions(top.join("deep/er/mode"), fs::Permissions::from_mode(0o4711)).unwrap();
    symlink("../files/3", top.join("deep/link")).unwrap();
    symlink("t".repeat(3000), top.join("deep/long-link")).unwrap();
    fs::hard_link(file(top, 3), top.join("deep/er/hard")).unwrap();
    setxattr(file(top, 3), "user.label", b"value \0 of bytes", XattrFlags::empty()).unwrap();
    let mode = Mode::from_raw_mode(0o640);
    mknodat(CWD, top.join("fifo"), FileType::Fifo, mode, 0).unwrap();
    mknodat(CWD, top.join("null"), FileType::CharacterDevice, mode, makedev(1, 3)).unwrap();
    let holes = File::create(top.join("holes")).unwrap();
    holes.set_len(5 * BLOCK as u64).unwrap();
    holes.write_all_at(b"in the middle", 2 * BLOCK as u64 + 77).unwrap();
    File::create(top.join("hole")).unwrap().set_len(BLOCK as u64 + 5).unwrap();
}

/// Changes all of it, in every way that there is.
fn change_all(top: &Path, round: usize) {
    let other = |number: usize, size: usize| content(number + 100 * (round + 1), size);
    // In place, at the end, cut, replaced, made anew, removed.
    OpenOptions::new().write(true).open(file(top, 6)).unwrap().write_all_at(&other(6, 5000), 3000).unwrap();
    let mut appended = OpenOptions::new().append(true).open(file(top, 5)).unwrap();
    appended.write_all(&other(5, 70_000)).unwrap();
    OpenOptions::new().write(true).open(file(top, 4)).unwrap().set_len(10 + round as u64).unwrap();
    fs::write(top.join("new"), other(3, 50_000)).unwrap();
    fs::rename(top.join("new"), file(top, 2)).unwrap();
    fs::write(file(top, 1), other(1, 3 * BLOCK)).unwrap();
    OpenOptions::new().write(true).open(top.join("deep/er/hard")).unwrap().write_all_at(b"both", 9).unwrap();
    setxattr(file(top, 3), "user.label", format!("{round}").as_bytes(), XattrFlags::empty()).unwrap();
    fs::set_permissions(top.join("deep"), fs::Permissions::from_mode(0o700)).unwrap();
    if round == 0 {
        fs::remove_file(file(top, 0)).unwrap();
        fs::remove_file(top.join("deep/link")).unwrap();
        fs::rename(top.join("deep/er/mode"), top.join("moved")).unwrap();
        OpenOptions::new().write(true).open(top.join("holes")).unwrap().write_all_at(&other(7, BLOCK), 0).unwrap();
    }
}

/// The view shows this everywhere.
#[track_caller]
fn assert_shown(cluster: &WithViews, name: &str, kernel: Option<&KernelView>, expected: &BTreeMap<PathBuf, Seen>) {
    assert_same(&format!("{name} by FUSE"), &seen(&cluster.shown(name)), expected);
    if let Some(kernel) = kernel {
        assert_same(&format!("{name} by EROFS"), &seen(&kernel.0), expected);
    }
}

fn kept_blocks(cluster: &WithViews) -> Option<u64> {
    let masters = cluster.status().masters;
    masters.iter().filter_map(|master| master.metric("cavern_master_kept_blocks")).max()
}

fn used_bytes(cluster: &WithViews) -> u64 {
    cluster.cv(&["report", "--json"]).json()["cache"]["used_bytes"].as_u64().unwrap()
}

#[test]
fn a_view_stays_what_it_was_whatever_becomes_of_the_files() {
    let cluster = up(Options { workers: 2, supervised: true, ..Options::default() });
    let top = cluster.path("fs");
    make_all(&top);
    let expected = seen(&top);
    let inode = fs::metadata(file(&top, 6)).unwrap().ino();
    let open = OpenOptions::new().read(true).write(true).open(file(&top, 6)).unwrap();
    let view = cluster.create("/fs", "v");
    assert_eq!(view["names"], expected.len());
    let kernel = KernelView::mount(&cluster, "v");
    assert_shown(&cluster, "v", kernel.as_ref(), &expected);
    for round in 0..3 {
        change_all(&top, round);
        // By who had it open before as well.
        open.write_all_at(&content(900 + round, 4096), 2 * BLOCK as u64).unwrap();
        assert_shown(&cluster, "v", kernel.as_ref(), &expected);
    }
    assert_eq!(fs::metadata(file(&top, 6)).unwrap().ino(), inode);
    let mut read = vec![0; 4096];
    open.read_exact_at(&mut read, 2 * BLOCK as u64).unwrap();
    assert!(read == content(902, 4096), "who writes reads what he has written");
    let mut changed = content(6, 3 * BLOCK);
    changed[3000..8000].copy_from_slice(&content(306, 5000));
    changed[2 * BLOCK..2 * BLOCK + 4096].copy_from_slice(&content(902, 4096));
    assert!(read_anew(&file(&top, 6)).unwrap() == changed, "and so does everybody");
    drop(open);
    fs::remove_dir_all(top.join("files")).unwrap();
    assert_shown(&cluster, "v", kernel.as_ref(), &expected);
    // Also by a process that has never seen it, when the masters have begun anew.
    cluster.stop("master");
    cluster.start("master");
    replace_by_death(&cluster);
    assert_shown(&cluster, "v", kernel.as_ref(), &expected);
    eventually("nothing is wrong", PATIENCE, || (cluster.try_cv(&["fsck"]).code == 0).then_some(()));
}

#[test]
fn views_that_follow_on_each_other_leave_nothing_behind() {
    let cluster = up(Options { workers: 2, ..Options::default() });
    let top = cluster.path("fs");
    make_all(&top);
    let mut known: Vec<(String, BTreeMap<PathBuf, Seen>)> = Vec::new();
    let written: usize = SIZES.iter().sum();
    let before = eventually("workers tell what they have", PATIENCE, || {
        Some(used_bytes(&cluster)).filter(|used| *used >= written as u64)
    });
    for round in 0..5 {
        let name = format!("v{round}");
        cluster.create("/fs", &name);
        known.push((name, seen(&top)));
        change_all(&top, round);
        if known.len() > 2 {
            let (oldest, _) = known.remove(0);
            cluster.cv(&["view", "delete", &oldest]);
        }
        for (name, expected) in &known {
            assert_shown(&cluster, name, None, expected);
        }
    }
    eventually("blocks are kept", PATIENCE, || kept_blocks(&cluster).filter(|kept| *kept > 0));
    for (name, _) in known {
        cluster.cv(&["view", "delete", &name]);
    }
    eventually("what only views had is freed", PATIENCE, || (kept_blocks(&cluster) == Some(0)).then_some(()));
    // Some files have grown, by less than what views had.
    eventually("the workers have it no more", PATIENCE, || {
        (used_bytes(&cluster) <= before + 6 * BLOCK as u64).then_some(())
    });
    eventually("nothing is left over", PATIENCE, || (cluster.try_cv(&["fsck"]).code == 0).then_some(()));
}

/// Ends writers, whatever becomes of the test.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn what_is_written_while_a_view_is_made_changes_it_no_more_afterwards() {
    let cluster = up(Options { more_mounts: vec!["second"], ..Options::default() });
    let tops = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    for number in 0..4 {
        fs::write(tops[0].join(number.to_string()), content(number, 2 * BLOCK)).unwrap();
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = Over(&is_over);
        let writers: Vec<_> = (0..4)
            .map(|number| {
                let (is_over, path) = (&is_over, tops[number % 2].join(number.to_string()));
                scope.spawn(move || {
                    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
                    let (mut round, mut written) = (0, content(number, 2 * BLOCK));
                    while !is_over.load(Ordering::Acquire) {
                        let (at, bytes) = (round * 7919 % (2 * BLOCK - 9000), content(round, 9000));
                        file.write_all_at(&bytes, at as u64).unwrap();
                        written[at..at + 9000].copy_from_slice(&bytes);
                        round += 1;
                    }
                    written
                })
            })
            .collect();
        let mut first = Vec::new();
        for view in 0..3 {
            let name = format!("v{view}");
            cluster.create("/fs", &name);
            first.push((name.clone(), seen(&cluster.shown(&name))));
            for (name, expected) in &first {
                assert_shown(&cluster, name, None, expected);
            }
        }
        drop(over);
        for (number, writer) in writers.into_iter().enumerate() {
            let written = writer.join().unwrap();
            for top in &tops {
                let path = top.join(number.to_string());
                eventually("everybody reads what was written", PATIENCE, || {
                    (read_anew(&path).unwrap() == written).then_some(())
                });
            }
        }
        for (name, expected) in &first {
            assert_shown(&cluster, name, None, expected);
        }
    });
    eventually("nothing is wrong", PATIENCE, || (cluster.try_cv(&["fsck"]).code == 0).then_some(()));
}

#[test]
fn a_view_whose_making_the_leader_does_not_survive_is_made_by_the_next_one() {
    let cluster = up(Options { masters: 3, workers: 2, ..Options::default() });
    cluster.masters_agree();
    let top = cluster.path("fs");
    make_all(&top);
    let expected = seen(&top);
    // Its upload has begun, and has no part yet.
    let fault = json!({"latency_ms": 8000, "operations": ["UploadPart"], "key_prefix": "fs/.cavern-view-"});
    cluster.s3.add_fault(&fault);
    let making = Running::start(&cluster, &["view", "create", "/fs", "v", "--json"]);
    // It says now and then how much of it is.
    making.says(" stored");
    let killed = cluster.kill_leader();
    cluster.leader_other_than(killed);
    cluster.s3.clear_faults();
    let made = making.finish();
    assert_eq!(made.code, 0, "{made:?}");
    cluster.start(&format!("master{killed}"));
    cluster.masters_agree();
    let views = cluster.cv(&["view", "list", "--json"]).json();
    assert_eq!((views.as_array().unwrap().len(), &views[0]["name"]), (1, &json!("v")));
    change_all(&top, 0);
    assert_shown(&cluster, "v", None, &expected);
    // What the first attempt has left is nothing.
    eventually("its upload is given up", PATIENCE, || (uploads(&cluster) == 0).then_some(()));
    cluster.cv(&["view", "delete", "v"]);
    eventually("nothing is kept", PATIENCE, || (kept_blocks(&cluster) == Some(0)).then_some(()));
}

#[test]
fn content_that_the_bucket_alone_has_is_read_from_there() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = WithViews::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--index"]);
    let top = cluster.path("fs");
    fs::create_dir(top.join("files")).unwrap();
    for (number, size) in SIZES.into_iter().enumerate() {
        fs::write(file(&top, number), content(number, size)).unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs"]);
    let expected = seen(&top);
    cluster.cv(&["fs", "free", "/fs"]);
    cluster.create("/fs", "v");
    let kernel = KernelView::mount(&cluster, "v");
    assert_shown(&cluster, "v", kernel.as_ref(), &expected);
    // As `cv export` and `cv import` have it: the bucket is all that there is.
    let place = tempfile::tempdir().unwrap();
    let exported = place.path().join("v.view");
    let exported = exported.to_str().unwrap();
    cluster.cv(&["view", "export", "v", exported]);
    cluster.cv(&["view", "import", exported, "again", "--path", "/fs"]);
    assert_shown(&cluster, "again", None, &expected);
}

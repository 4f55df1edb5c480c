//! Content of fs-mode files that only the bucket has: read from there, written over block by block, and moved with its
//! names.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, eventually, number};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::FallocateFlags;
use serde_json::Value;

use crate::bucket::{Bucket, Objects};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Blocks are small, so that few operations reach many.
fn mounted(options: Options) -> Cluster {
    persisting_after("100ms", options)
}

fn persisting_after(persist_delay: &str, options: Options) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"{persist_delay}\"\n{}", options.conf);
    let cluster = Cluster::up(Options { conf, ..options });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    cluster
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

fn persisted(cluster: &Cluster) {
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
}

/// Has the bucket get everything, and drops the blocks of what nobody has open for writing.
fn freed(cluster: &Cluster, path: &str) -> Value {
    persisted(cluster);
    cluster.cv(&["fs", "free", path, "--json"]).json()
}

fn objects(cluster: &Cluster) -> Objects {
    Bucket::of(cluster, "bucket").objects()
}

/// Bytes of blocks of files, at all workers.
fn data_bytes(cluster: &Cluster) -> u64 {
    cluster.status().workers.iter().map(|worker| worker.metric("cavern_worker_data_bytes").unwrap()).sum()
}

#[track_caller]
fn assert_content(path: &Path, expected: &[u8]) {
    let read = fs::read(path).unwrap();
    assert_eq!(read.len(), expected.len(), "{}", path.display());
    let differs = read.iter().zip(expected).position(|(read, expected)| read != expected);
    assert_eq!(differs, None, "{}", path.display());
}

#[test]
fn dropped_blocks_are_read_from_the_bucket_and_only_touched_ones_come_back() {
    let cluster = mounted(Options { workers: 2, ..Options::default() });
    let mut content = noise(1, (5 * MIB + 1000) as usize);
    let path = cluster.path("fs/large");
    fs::write(&path, &content).unwrap();
    fs::write(cluster.path("fs/small"), b"small").unwrap();
    fs::write(cluster.path("fs/empty"), b"").unwrap();
    let report = freed(&cluster, "/fs");
    assert_eq!(
        (&report["files"], &report["blocks"], &report["bytes"]),
        (&3.into(), &7.into(), &(5 * MIB + 1005).into())
    );
    eventually("the workers have dropped the blocks", PATIENCE, || (data_bytes(&cluster) == 0).then_some(()));
    assert_content(&path, &content);
    assert_content(&cluster.path("fs/small"), b"small");

    // In the middle of a block, across two blocks, in the last one, and behind it.
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for (number, at) in [MIB + 500, 3 * MIB - 50, 5 * MIB + 10, 6 * MIB].into_iter().enumerate() {
        let bytes = noise(10 + number as u64, 100);
        file.write_all_at(&bytes, at).unwrap();
        content.resize(content.len().max(at as usize + 100), 0);
        content[at as usize..at as usize + 100].copy_from_slice(&bytes);
    }
    assert_content(&path, &content);
    drop(file);
    eventually("blocks that were not touched stay where they are", PATIENCE, || {
        (data_bytes(&cluster) < 5 * MIB).then_some(())
    });
    persisted(&cluster);
    assert_eq!(objects(&cluster)["fs/large"], content);
    assert_content(&path, &content);
    assert_eq!(freed(&cluster, "/fs/large")["blocks"], 5);
    assert_content(&path, &content);
}

#[test]
fn blocks_that_are_written_over_as_a_whole_are_not_fetched() {
    // A request that takes long is not sent a second time: they are counted.
    let conf = COUNTED.to_owned();
    // Nothing is brought to the bucket meanwhile: that reads what is left of the blocks.
    let cluster = persisting_after("1h", Options { workers: 2, conf, ..Options::default() });
    let exported = || cluster.cv(&["export", "/fs", "--watch"]);
    let path = cluster.path("fs/f");
    let mut content = noise(1, (3 * MIB + 1000) as usize);
    fs::write(&path, &content).unwrap();
    fs::write(cluster.path("fs/zeroed"), noise(2, 5000)).unwrap();
    exported();
    cluster.cv(&["fs", "free", "/fs"]);
    eventually("the workers have dropped the blocks", PATIENCE, || (data_bytes(&cluster) == 0).then_some(()));
    cluster.s3.reset_stats();
    let mut write = |at: u64, length: u64| {
        // The kernel passes a whole block on in one request only if its pages are whole.
        let buffer = noise(at, length as usize + 4096);
        let start = buffer.as_ptr().align_offset(4096);
        let bytes = &buffer[start..start + length as usize];
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(bytes, at).unwrap();
        content.resize(content.len().max((at + length) as usize), 0);
        content[at as usize..(at + length) as usize].copy_from_slice(bytes);
    };
    // A block, what there is of the last one and more, and a file that becomes zeros.
    write(MIB, MIB);
    assert_eq!(cluster.s3.requests("GET"), 0);
    write(3 * MIB, 5000);
    assert_eq!(cluster.s3.requests("GET"), 0);
    let zero = FallocateFlags::ZERO_RANGE;
    rustix::fs::fallocate(OpenOptions::new().write(true).open(cluster.path("fs/zeroed")).unwrap(), zero, 0, 5000)
        .unwrap();
    assert_eq!(cluster.s3.requests("GET"), 0);
    // All but a byte.
    write(2 * MIB + 1, MIB - 1);
    assert_eq!(cluster.s3.requests("GET"), 1);
    assert_content(&path, &content);
    assert_content(&cluster.path("fs/zeroed"), &[0; 5000]);
    cluster.kill("worker0");
    cluster.start("worker0");
    exported();
    assert!(objects(&cluster)["fs/f"] == content);
    assert_eq!(objects(&cluster)["fs/zeroed"], vec![0; 5000]);
    assert_content(&path, &content);
}

#[test]
fn cuts_holes_and_zeros_leave_nothing_behind_that_comes_back() {
    let cluster = mounted(Options::default());
    let mut content = noise(2, (4 * MIB) as usize);
    let path = cluster.path("fs/f");
    fs::write(&path, &content).unwrap();
    assert_eq!(freed(&cluster, "/fs")["blocks"], 4);
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // A whole block and a part of the next.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, MIB, MIB + 1000).unwrap();
    content[MIB as usize..(2 * MIB + 1000) as usize].fill(0);
    assert_content(&path, &content);
    // Cut in the middle of a block, and lengthened over it.
    let end = (3 * MIB + 77) as usize;
    file.set_len(end as u64).unwrap();
    file.set_len(4 * MIB).unwrap();
    content[end..].fill(0);
    assert_content(&path, &content);
    assert_eq!(file.seek(SeekFrom::Start(0)).unwrap(), 0);
    let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(2 * MIB + 5000)).unwrap();
    assert_eq!(hole, end as u64, "what is in the bucket is data");
    file.set_len(0).unwrap();
    file.set_len(MIB).unwrap();
    assert_content(&path, &vec![0; MIB as usize]);
    drop(file);
    persisted(&cluster);
    assert_eq!(objects(&cluster)["fs/f"], vec![0; MIB as usize]);
}

#[test]
fn what_is_open_or_not_in_the_bucket_is_not_dropped() {
    let cluster = mounted(Options::default());
    let path = cluster.path("fs/f");
    fs::write(&path, noise(3, MIB as usize)).unwrap();
    persisted(&cluster);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"first", 100).unwrap();
    file.sync_all().unwrap();
    persisted(&cluster);
    let report = cluster.cv(&["fs", "free", "/fs/f", "--json"]).json();
    assert_eq!((&report["blocks"], &report["open_files"], &report["open_bytes"]), (&0.into(), &1.into(), &MIB.into()));
    // What is written now is in a block that is still there.
    file.write_all_at(b"second", 200).unwrap();
    drop(file);
    let read = fs::read(&path).unwrap();
    assert_eq!((&read[100..105], &read[200..206]), (&b"first"[..], &b"second"[..]));
    eventually("it is dropped when it is closed", PATIENCE, || (freed(&cluster, "/fs/f")["blocks"] == 1).then_some(()));
    assert_eq!(fs::read(&path).unwrap(), read);
    cluster.stop("s3");
    fs::write(cluster.path("fs/g"), b"new").unwrap();
    let report = cluster.cv(&["fs", "free", "/fs/g", "--json"]).json();
    assert_eq!(
        (&report["blocks"], &report["unpersisted_files"], &report["unpersisted_bytes"]),
        (&0.into(), &1.into(), &3.into())
    );
    let said = cluster.cv(&["fs", "free", "/fs/g"]).stdout;
    assert!(said.contains("cv persist status"), "{said}");
    cluster.start("s3");
}

#[test]
fn content_goes_with_its_names_and_stays_for_those_who_have_it_open() {
    let cluster = mounted(Options::default());
    let (one, other) = (noise(4, (MIB + 5) as usize), noise(5, (2 * MIB) as usize));
    fs::write(cluster.path("fs/one"), &one).unwrap();
    fs::write(cluster.path("fs/other"), &other).unwrap();
    freed(&cluster, "/fs");
    let cwd = rustix::fs::CWD;
    let exchange = rustix::fs::RenameFlags::EXCHANGE;
    rustix::fs::renameat_with(cwd, cluster.path("fs/one"), cwd, cluster.path("fs/other"), exchange).unwrap();
    assert_content(&cluster.path("fs/one"), &other);
    persisted(&cluster);
    assert_content(&cluster.path("fs/one"), &other);
    assert_content(&cluster.path("fs/other"), &one);
    fs::create_dir(cluster.path("fs/d")).unwrap();
    fs::rename(cluster.path("fs/one"), cluster.path("fs/d/moved")).unwrap();
    fs::rename(cluster.path("fs/d"), cluster.path("fs/e")).unwrap();
    persisted(&cluster);
    assert_content(&cluster.path("fs/e/moved"), &other);
    let there = objects(&cluster);
    assert_eq!(there.keys().collect::<Vec<_>>(), ["fs/e/", "fs/e/moved", "fs/other"]);
    assert!(there["fs/e/moved"] == other && there["fs/other"] == one);

    // Removed, and its name taken, while it is open and nothing of it has been read yet.
    let mut open = File::open(cluster.path("fs/other")).unwrap();
    fs::remove_file(cluster.path("fs/other")).unwrap();
    fs::write(cluster.path("fs/other"), b"taken").unwrap();
    persisted(&cluster);
    assert_eq!(objects(&cluster)["fs/other"], "taken");
    let mut read = Vec::new();
    open.read_to_end(&mut read).unwrap();
    assert!(read == one);
    drop(open);
    eventually("nothing is left of what was removed", PATIENCE, || {
        let keys: Vec<String> = objects(&cluster).into_keys().collect();
        (keys == ["fs/e/", "fs/e/moved", "fs/other"]).then_some(())
    });
}

/// A file here, and what it should be.
struct Twin {
    path: PathBuf,
    content: Vec<u8>,
}

#[test]
fn random_operations_and_drops_give_what_a_local_file_has() {
    let cluster = mounted(Options { workers: 2, ..Options::default() });
    let seed = number("CAVERN_SEED", 7);
    let mut random = StdRng::seed_from_u64(seed);
    let mut twins: Vec<Twin> =
        (0..3).map(|number| Twin { path: cluster.path(format!("fs/f{number}")), content: Vec::new() }).collect();
    for twin in &twins {
        fs::write(&twin.path, b"").unwrap();
    }
    for step in 0..150 {
        let twin = random.random_range(0..twins.len());
        let Twin { path, content } = &mut twins[twin];
        let open = || OpenOptions::new().write(true).open(&*path).unwrap();
        match random.random_range(0..12) {
            0..=4 => {
                let at = random.random_range(0..3 * MIB as usize);
                let length = [10, 5000, 300_000, 1_200_000][random.random_range(0..4)];
                let bytes = noise(random.random(), length);
                open().write_all_at(&bytes, at as u64).unwrap();
                content.resize(content.len().max(at + length), 0);
                content[at..at + length].copy_from_slice(&bytes);
            }
            5 => {
                let length = random.random_range(0..4 * MIB as usize);
                open().set_len(length as u64).unwrap();
                content.resize(length, 0);
            }
            6 if !content.is_empty() => {
                let from = random.random_range(0..content.len());
                let length = random.random_range(1..2 * MIB as usize).min(content.len() - from);
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(open(), punch, from as u64, length as u64).unwrap();
                content[from..from + length].fill(0);
            }
            7 => {
                let to = cluster.path(format!("fs/r{step}"));
                fs::rename(&*path, &to).unwrap();
                *path = to;
            }
            8 | 9 => drop(freed(&cluster, "/fs")),
            10 => drop(cluster.cv(&["fs", "free", "/fs", "--json"])),
            _ => assert_content(path, content),
        }
        if step == 60 {
            cluster.kill("master");
            cluster.start("master");
        }
        if step == 100 {
            cluster.kill("worker0");
            cluster.start("worker0");
        }
    }
    for Twin { path, content } in &twins {
        assert_content(path, content);
    }
    freed(&cluster, "/fs");
    let objects = objects(&cluster);
    assert_eq!(objects.len(), twins.len(), "{:?}", objects.keys());
    for Twin { path, content } in &twins {
        assert_content(path, content);
        let key = format!("fs/{}", path.file_name().unwrap().to_str().unwrap());
        assert!(objects[&key] == *content, "{key} (seed {seed})");
    }
}

#[test]
fn a_file_that_is_being_written_is_held_before_the_master_knows_its_blocks() {
    let cluster = mounted(Options::default());
    let (grows, synced) = (cluster.path("fs/grows"), cluster.path("fs/synced"));
    // What grows so much is committed while it is being written.
    let growing = File::create(&grows).unwrap();
    growing.write_all_at(b"far", 3 * MIB).unwrap();
    let mut syncing = File::create(&synced).unwrap();
    syncing.write_all(b"content").unwrap();
    syncing.sync_all().unwrap();
    let report = freed(&cluster, "/fs");
    assert_eq!((&report["blocks"], &report["open_files"]), (&0.into(), &2.into()), "{report}");
    growing.write_all_at(b"farther", 3 * MIB).unwrap();
    syncing.write_all(b", more").unwrap();
    syncing.sync_all().unwrap();
    drop((growing, syncing));
    assert_eq!(fs::read(&synced).unwrap(), b"content, more");
    assert_eq!(fs::read(&grows).unwrap()[3 * MIB as usize..], *b"farther");
    let is_free = || Some(freed(&cluster, "/fs")).filter(|report| report["open_files"] == 0);
    eventually("what is closed is held no longer", PATIENCE, is_free);
}

#[test]
fn a_file_set_twice_as_large_as_the_disks_is_written_and_read_back() {
    const FILES: u64 = 32;
    let conf = "heartbeat = \"100ms\"\n[worker]\ndirs = [\"[SSD:64MiB]/cache\"]\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let content = |number: u64| noise(number, 4 * MIB as usize);
    let path = |number: u64| cluster.path(format!("fs/f{number:02}"));
    for number in 0..FILES {
        fs::write(path(number), content(number)).unwrap();
    }
    persisted(&cluster);
    assert!(data_bytes(&cluster) <= 64 * MIB);
    for number in 0..FILES {
        assert_content(&path(number), &content(number));
    }
    let kept = cluster.cv(&["fs", "free", "/fs", "--json"]).json();
    assert_eq!((&kept["unpersisted_files"], &kept["open_files"]), (&0.into(), &0.into()));
}

//! Replicas of files of fs-mode mounts: writers do not notice that a worker dies, what is lacking is copied, what
//! nobody has is said to be missing until it is back, and a full worker is waited for.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

use super::fs_mode_content::random_operations;
use super::running::Running;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// Workers are noticed to be lost, and replaced, within seconds. Buckets get nothing meanwhile.
const CONF: &str = r#"
[master]
heartbeat = "200ms"
worker_timeout = "2s"
repair_after = "1s"
persist_delay = "1h"
"#;

fn mounted(options: Options, replicas: &str) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", replicas]);
    cluster
}

fn noise(random: &mut StdRng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    random.fill(&mut bytes[..]);
    bytes
}

/// Each replica of a file: the block, the worker, and whether that is there and has it.
fn replicas(cluster: &Cluster, path: &str) -> Vec<(u64, u64, bool)> {
    let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
    let replica = |view: &Value| {
        let is_there = !view["path"].as_str().unwrap().is_empty();
        (view["index"].as_u64().unwrap(), view["worker"].as_u64().unwrap(), is_there)
    };
    shown.as_array().unwrap().iter().map(replica).collect()
}

/// Waits until each block of a file is at this many workers, all of them there.
#[track_caller]
fn replicated(cluster: &Cluster, path: &str, blocks: u64, count: usize) {
    eventually(&format!("{path} has {count} replicas"), PATIENCE, || {
        let replicas = replicas(cluster, path);
        let is_whole = |index: u64| {
            let of_block = || replicas.iter().filter(|(at, ..)| *at == index);
            of_block().count() == count && of_block().all(|(.., is_there)| *is_there)
        };
        (0..blocks).all(is_whole).then_some(())
    });
}

/// The child of the cluster that is a worker of the worker table.
fn child_of(cluster: &Cluster, worker: u64) -> String {
    let nodes = cluster.cv(&["node", "list", "--json"]).json();
    let address = |node: &Value| node["data"].as_str().unwrap().to_owned();
    let node = nodes.as_array().unwrap().iter().find(|node| node["id"].as_u64() == Some(worker)).unwrap();
    let position = cluster.at_start.workers.iter().position(|child| child.data == address(node)).unwrap();
    format!("worker{position}")
}

#[track_caller]
fn lost(cluster: &Cluster, worker: u64) {
    eventually("the worker is lost", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let is_lost = |node: &Value| node["id"].as_u64() == Some(worker) && node["state"] == "lost";
        nodes.as_array().unwrap().iter().any(is_lost).then_some(())
    });
}

/// Everything is forgotten but what workers and the master have.
fn forget(cluster: &Cluster) {
    cluster.stop("fuse0");
    cluster.start("fuse0");
}

#[test]
fn a_writer_does_not_notice_that_a_worker_dies_and_its_blocks_get_other_replicas() {
    let cluster = mounted(Options { workers: 3, conf: CONF.to_owned(), ..Options::default() }, "2");
    let path = cluster.path("fs/file");
    let (begun, go_on) = (AtomicBool::new(false), AtomicBool::new(false));
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut random = StdRng::seed_from_u64(1);
            let mut file = File::create(&path).unwrap();
            let mut all = Vec::new();
            for number in 0..100 {
                let bytes = noise(&mut random, 150_000);
                file.write_all(&bytes).unwrap();
                all.extend_from_slice(&bytes);
                if number % 10 == 9 {
                    file.sync_data().unwrap();
                }
                // And here and there in what was written before.
                let at = random.random_range(0..all.len() - 1000);
                let bytes = noise(&mut random, 1000);
                file.write_all_at(&bytes, at as u64).unwrap();
                all[at..at + 1000].copy_from_slice(&bytes);
                if number == 30 {
                    begun.store(true, Ordering::Release);
                    while !go_on.load(Ordering::Acquire) {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
            }
            file.sync_all().unwrap();
            all
        });
        eventually("the writer is at work", PATIENCE, || begun.load(Ordering::Acquire).then_some(()));
        cluster.kill("worker1");
        go_on.store(true, Ordering::Release);
        writer.join().unwrap()
    });
    assert!(fs::read(&path).unwrap() == written);
    let blocks = written.len().div_ceil(MIB) as u64;
    replicated(&cluster, "/fs/file", blocks, 2);
    // What is left has everything.
    cluster.kill("worker0");
    forget(&cluster);
    let read = within("reading", PATIENCE, {
        let path = path.clone();
        move || fs::read(path)
    });
    assert!(read.unwrap() == written);
    // Workers that return are given what is lacking, and what they had before is not taken for it.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[7; 3 * MIB], MIB as u64).unwrap();
    file.sync_all().unwrap();
    cluster.start("worker0");
    cluster.start("worker1");
    replicated(&cluster, "/fs/file", blocks, 2);
    cluster.kill("worker2");
    forget(&cluster);
    let read = within("reading", PATIENCE, move || fs::read(path)).unwrap();
    let mut expected = written;
    expected[MIB..4 * MIB].fill(7);
    assert!(read == expected);
}

#[test]
fn workers_that_die_and_return_all_the_time_change_nothing_of_what_is_written() {
    let options = Options {
        workers: 3,
        more_mounts: vec!["second"],
        conf: CONF.replace("repair_after = \"1s\"", "repair_after = \"0s\""),
        ..Options::default()
    };
    let cluster = mounted(options, "2");
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for worker in (0..3).cycle() {
                if is_done.load(Ordering::Acquire) {
                    break;
                }
                cluster.kill(&format!("worker{worker}"));
                cluster.start(&format!("worker{worker}"));
                thread::sleep(Duration::from_millis(400));
            }
        });
        // However it ends, the other thread is stopped.
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let _done = Done(&is_done);
        random_operations(&cluster, 20..22);
    });
}

#[test]
fn an_old_copy_of_a_workers_disk_takes_nothing_over() {
    // The original is started again before the copy may take its place, however long that takes.
    let conf = CONF.replace("worker_timeout = \"2s\"", "worker_timeout = \"30s\"");
    let cluster = mounted(Options { conf, ..Options::default() }, "1");
    let (path, again) = (cluster.path("fs/file"), cluster.path("fs/again"));
    fs::write(&path, "old").unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    cluster.stop("worker0");
    let worker = cluster.at_start.workers[0].clone();
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let copied = process::Command::new("cp").arg("-a").arg(&worker.dirs[0]).arg(place.path()).status().unwrap();
    assert!(copied.success());
    cluster.start("worker0");
    let write = |text: &str| {
        let mut file = OpenOptions::new().write(true).truncate(true).create(true).open(&path).unwrap();
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).unwrap();
    };
    write("new");

    let conf = place.path().join("conf.toml");
    let copy = place.path().join(worker.dirs[0].file_name().unwrap());
    let masters = &cluster.at_start.masters[0].grpc;
    let free = "127.0.0.1:0";
    let text = format!(
        "[cluster]\nmasters = [\"{masters}\"]\n[worker]\nlisten = \"{free}\"\nhttp_listen = \"{free}\"\n\
         dirs = [\"[SSD]{}\"]\n",
        copy.display()
    );
    fs::write(&conf, text).unwrap();
    let running = Running::start(&cluster, &["worker", "--conf", conf.to_str().unwrap()]);
    running.says("one has a copy of the other's directories");
    // Also over starts of the original.
    let nodes = || cluster.cv(&["node", "list", "--json"]).json();
    let heard = |node: &Value| (node["data"].clone(), node["state"].clone());
    for round in 0..3 {
        write(&format!("round {round}"));
        forget(&cluster);
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("round {round}"));
        fs::write(&again, [7; 100_000]).unwrap();
        assert_eq!(fs::read(&again).unwrap(), [7; 100_000]);
        let nodes = nodes();
        let nodes: Vec<_> = nodes.as_array().unwrap().iter().map(heard).collect();
        assert_eq!(nodes, [(worker.data.clone().into(), "live".into())]);
        cluster.kill("worker0");
        cluster.start("worker0");
    }
    running.signal(Signal::TERM);
    let ended = running.finish();
    assert_eq!((ended.code, ended.stderr.matches("one has a copy").count()), (0, 1), "{}", ended.stderr);
}

#[test]
fn random_operations_over_the_network_have_the_results_that_they_have_locally() {
    let conf = format!("{CONF}\n[client]\nlocal_descriptors = false\n");
    let options = Options { workers: 2, more_mounts: vec!["second"], conf, ..Options::default() };
    let cluster = mounted(options, "2");
    random_operations(&cluster, 10..13);
}

#[test]
fn what_is_at_a_lost_worker_only_is_refused_at_once_and_reported_until_it_is_back() {
    // Whoever waited for the deadline would wait too long for this test.
    let conf = format!("{CONF}\n[client]\nread_timeout = \"5m\"\n");
    let cluster = mounted(Options { workers: 2, conf, ..Options::default() }, "1");
    let mut random = StdRng::seed_from_u64(2);
    let files: Vec<(PathBuf, Vec<u8>)> =
        (0..12).map(|number| (cluster.path(format!("fs/{number}")), noise(&mut random, 200_000))).collect();
    for (path, bytes) in &files {
        fs::write(path, bytes).unwrap();
    }
    let worker_of = |number: usize| replicas(&cluster, &format!("/fs/{number}"))[0].1;
    let worker = worker_of(0);
    let hit: Vec<usize> = (0..files.len()).filter(|number| worker_of(*number) == worker).collect();
    let child = child_of(&cluster, worker);
    forget(&cluster);
    cluster.kill(&child);
    lost(&cluster, worker);
    for (number, (path, bytes)) in files.iter().enumerate() {
        let path = path.clone();
        let (read, write) = within("an answer", PATIENCE, move || {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            (fs::read(path), file.write_all_at(b"x", 0).and_then(|()| file.sync_all()))
        });
        if hit.contains(&number) {
            assert_eq!(errno(read), Errno::IO);
            assert_eq!(errno(write), Errno::IO);
        } else {
            assert!(read.unwrap() == *bytes);
            write.unwrap();
        }
    }
    let report = || cluster.cv(&["report", "--json"]).json();
    assert_eq!(report()["unavailable"]["files"].as_u64(), Some(hit.len() as u64));
    let paths = report()["unavailable"]["paths"].clone();
    assert!(paths.as_array().unwrap().iter().any(|path| path == "/fs/0"), "{paths}");
    assert!(cluster.cv(&["report"]).stdout.contains("at lost workers only"));
    let stat = cluster.cv(&["fs", "stat", "/fs/0", "--json"]).json();
    assert_eq!(stat["unavailable"][0]["workers"][0].as_u64(), Some(worker));
    assert!(cluster.cv(&["fs", "stat", "/fs/0"]).stdout.contains("in no bucket"));
    cluster.start(&child);
    for number in &hit {
        let (path, bytes) = &files[*number];
        eventually("the file is back", PATIENCE, || (fs::read(path).ok()? == *bytes).then_some(()));
    }
    assert_eq!(report()["unavailable"]["files"].as_u64(), Some(0));
}

#[test]
fn what_the_bucket_has_is_read_there_when_its_worker_is_lost() {
    for repair_after in ["1h", "0s"] {
        let conf = CONF.replace("repair_after = \"1s\"", &format!("repair_after = \"{repair_after}\""));
        let conf = conf.replace("persist_delay = \"1h\"", "persist_delay = \"20ms\"");
        let cluster = mounted(Options { workers: 2, conf, ..Options::default() }, "1");
        let path = cluster.path("fs/file");
        let bytes = noise(&mut StdRng::seed_from_u64(4), 5 * MIB / 2);
        fs::write(&path, &bytes).unwrap();
        cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
        let worker = replicas(&cluster, "/fs/file")[0].1;
        let child = child_of(&cluster, worker);
        forget(&cluster);
        cluster.kill(&child);
        lost(&cluster, worker);
        if repair_after == "0s" {
            // Nobody need read it.
            eventually("its blocks are dropped", PATIENCE, || replicas(&cluster, "/fs/file").is_empty().then_some(()));
        }
        let read = within("reading", PATIENCE, {
            let path = path.clone();
            move || fs::read(path)
        });
        assert!(read.unwrap() == bytes);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"written", MIB as u64).unwrap();
        file.sync_all().unwrap();
        cluster.start(&child);
        let mut expected = bytes;
        expected[MIB..MIB + 7].copy_from_slice(b"written");
        assert!(fs::read(&path).unwrap() == expected);
    }
}

#[test]
fn what_the_bucket_has_is_written_on_when_its_worker_is_lost() {
    let conf = CONF.replace("repair_after = \"1s\"", "repair_after = \"1h\"");
    let conf = conf.replace("persist_delay = \"1h\"", "persist_delay = \"20ms\"");
    let cluster = mounted(Options { workers: 2, conf, ..Options::default() }, "1");
    let path = |name: &str| cluster.path(format!("fs/{name}"));
    // Of eight blocks, and of eight files, some are at this worker and some at that.
    let mut large = noise(&mut StdRng::seed_from_u64(5), 8 * MIB);
    fs::write(path("large"), &large).unwrap();
    let short: Vec<String> = (0..8).map(|number| format!("short{number}")).collect();
    for name in &short {
        fs::write(path(name), "short").unwrap();
    }
    let mut log = OpenOptions::new().append(true).create(true).open(path("log")).unwrap();
    for line in ["one\n", "two\n"] {
        log.write_all(line.as_bytes()).unwrap();
        log.sync_all().unwrap();
    }
    let three = "three\n".repeat(50_000);
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let worker = replicas(&cluster, "/fs/log")[0].1;
    let child = child_of(&cluster, worker);
    cluster.kill(&child);

    // Not known to be lost yet, held by who writes, and without room for so much.
    log.write_all(three.as_bytes()).unwrap();
    log.sync_all().unwrap();
    lost(&cluster, worker);
    let file = OpenOptions::new().write(true).open(path("large")).unwrap();
    for block in (0..8).map(|index| index * MIB) {
        large[block + 7..block + 11].copy_from_slice(b"over");
        file.write_all_at(b"over", block as u64 + 7).unwrap();
    }
    file.sync_all().unwrap();
    for name in &short {
        OpenOptions::new().write(true).open(path(name)).unwrap().set_len(7).unwrap();
    }
    let lines = format!("one\ntwo\n{three}");
    let written = || {
        assert!(fs::read_to_string(path("log")).unwrap() == lines);
        assert!(fs::read(path("large")).unwrap() == large);
        for name in &short {
            assert_eq!(fs::read(path(name)).unwrap(), b"short\0\0", "{name}");
        }
    };
    written();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(cluster.s3.get("bucket", "fs/log") == lines);
    cluster.start(&child);
    forget(&cluster);
    written();
}

#[test]
fn a_full_worker_is_waited_for_and_what_was_written_stays() {
    let conf = format!("{CONF}\n[worker]\ndirs = [\"[SSD:40MiB]/x\"]\n[client]\nread_timeout = \"10s\"\n");
    let cluster = mounted(Options { workers: 1, conf, ..Options::default() }, "1");
    let mut random = StdRng::seed_from_u64(3);
    let write = |path: &Path, bytes: &[u8]| -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    let (first, second) = (noise(&mut random, 16 * MIB), noise(&mut random, 16 * MIB));
    let name = |name: &str| cluster.path(format!("fs/{name}"));
    write(&name("first"), &first).unwrap();
    write(&name("second"), &second).unwrap();
    // There is room for half of it, and the rest comes while it waits.
    let third = noise(&mut random, 16 * MIB);
    thread::scope(|scope| {
        let writer = scope.spawn(|| write(&name("third"), &third));
        fs::remove_file(name("first")).unwrap();
        writer.join().unwrap().unwrap();
    });
    // And now none comes.
    let fourth = noise(&mut random, 16 * MIB);
    assert_eq!(errno(write(&name("fourth"), &fourth)), Errno::NOSPC);
    // It was made to wait before that.
    assert!(cluster.status().workers[0].metric("cavern_worker_throttled_reservations_total").unwrap() > 0);
    // What is there can be written to all the same.
    let file = OpenOptions::new().write(true).open(name("second")).unwrap();
    file.write_all_at(&third[..MIB], 5 * MIB as u64).unwrap();
    file.sync_all().unwrap();
    let mut second = second;
    second[5 * MIB..6 * MIB].copy_from_slice(&third[..MIB]);
    forget(&cluster);
    assert!(fs::read(name("second")).unwrap() == second);
    assert!(fs::read(name("third")).unwrap() == third);
    fs::remove_file(name("third")).unwrap();
    fs::remove_file(name("fourth")).unwrap();
    write(&name("fourth"), &fourth).unwrap();
    assert!(fs::read(name("fourth")).unwrap() == fourth);
    assert!(fs::read(name("second")).unwrap() == second);
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

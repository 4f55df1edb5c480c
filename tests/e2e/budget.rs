//! A cluster serves more than the memory that it may have, and takes no more of its host than that.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::Path;

use bytes::Bytes;
use cavern_conf::{ByteSize, HostLimits, ResourceLimit};
use cavern_tests::{Child, Cluster, ControlGroup, Options, Process, Status};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 64 * MIB;
const PIECE_BYTES: usize = 1 << 20;

/// Random bytes, as many as a file has; the files have them all.
fn content() -> Bytes {
    let mut content = vec![0; FILE_BYTES as usize];
    StdRng::seed_from_u64(42).fill_bytes(&mut content);
    content.into()
}

#[track_caller]
fn assert_holds(path: &Path, content: &Bytes) {
    let mut file = File::open(path).unwrap();
    let mut piece = vec![0; PIECE_BYTES];
    for (number, expected) in content.chunks(PIECE_BYTES).enumerate() {
        file.read_exact(&mut piece).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(piece == expected, "{}: piece {number}", path.display());
    }
    assert_eq!(file.read(&mut piece).unwrap(), 0);
}

fn write(path: &Path, content: &Bytes) {
    let mut file = File::create(path).unwrap();
    for piece in content.chunks(PIECE_BYTES) {
        file.write_all(piece).unwrap();
    }
    file.sync_all().unwrap();
}

/// Reads and writes `files` files: objects of a bucket, and files of an fs-mode mount.
fn serves(cluster: &Cluster, files: u64) {
    let content = content();
    cluster.s3.create_bucket("bucket");
    cluster.s3.create_bucket("files");
    for number in 0..files {
        cluster.s3.put("bucket", &format!("object{number}"), content.clone());
    }
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.mount_fs_mode("s3://files/fs", "/fs", &[]);
    for number in 0..files {
        assert_holds(&cluster.path(format!("data/object{number}")), &content);
    }
    for number in 0..files {
        write(&cluster.path(format!("fs/file{number}")), &content);
    }
    for path in [format!("data/object{}", files - 1), "fs/file0".to_owned()] {
        assert_holds(&cluster.path(path), &content);
    }
}

/// All processes of the cluster together in a group of so many processors and bytes.
#[track_caller]
fn lives_within(cpus: usize, memory: u64) {
    let group = ControlGroup::make(cpus as u64, memory);
    let cluster = Cluster::up(Options { groups: group.directories().to_vec(), ..Options::default() });
    let conf = fs::read_to_string(&cluster.at_start.conf).unwrap();
    // Object store, master, worker and client.
    let part = ResourceLimit { cpus: None, memory: Some(ByteSize::from_bytes(memory / 4)) };
    let limit = format!("resource_limit = \"{part}\"\n");
    assert_eq!(conf.matches(&limit).count(), 3, "{limit}{conf}");
    // This machine may have fewer.
    let cpus = HostLimits::here().cpus.min(cpus);
    for child in [&cluster.at_start.masters[0], &cluster.at_start.workers[0], &cluster.at_start.fuse[0]] {
        let log = fs::read_to_string(&child.log).unwrap();
        assert!(log.contains(&format!("this process has {cpus}c{part} (")), "{log}");
    }
    serves(&cluster, memory / FILE_BYTES + 1);
    assert_eq!(group.killed(), 0, "{}", cluster.logs());
    let (before, after) = (&cluster.at_start, cluster.status());
    let processes = |status: &Status| {
        let children = status.masters.iter().chain(&status.workers).chain(&status.fuse);
        children.map(|child| (child.pid, child.restarts)).collect::<Vec<_>>()
    };
    assert_eq!(processes(before), processes(&after), "nothing was started again");
}

#[test]
fn a_cluster_with_one_processor_and_half_a_gibibyte_serves_more_than_that() {
    lives_within(1, 512 * MIB);
}

#[test]
#[ignore = "takes minutes: bin/test --long=budget"]
fn a_cluster_with_two_processors_and_four_gibibytes_serves_more_than_that() {
    lives_within(2, 4096 * MIB);
}

#[test]
#[ignore = "takes minutes: bin/test --long=budget"]
fn a_cluster_with_four_processors_and_eight_gibibytes_serves_more_than_that() {
    lives_within(4, 8192 * MIB);
}

/// Threads of a process by their names.
fn threads(child: &Child) -> Vec<String> {
    let process = child.server().expect("the child runs");
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let name = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
    threads.map(|thread| name(thread).trim().to_owned()).collect()
}

#[test]
fn processes_keep_to_what_the_configuration_gives_them() {
    const LIMIT: u64 = 256 * MIB;
    let mut conf = String::new();
    for section in ["master", "worker", "client"] {
        conf.push_str(&format!("[{section}]\nresource_limit = \"3c256m\"\n"));
    }
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let started = &cluster.at_start;
    // Other than this machine has, perhaps.
    let worker = threads(&started.workers[0]);
    let serving = worker.iter().filter(|name| name.strip_prefix("data-").is_some_and(|number| number.len() == 1));
    assert_eq!(serving.count(), 3, "{worker:?}");
    let shown = cluster.cv(&["conf", "show"]).stdout;
    for line in [
        "# cv worker has 3c256m (worker.resource_limit): 3 threads for tasks, 32 for disks",
        "memory_budget = \"32MiB\"",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    serves(&cluster, 3);
    for child in [&started.masters[0], &started.workers[0], &started.fuse[0]] {
        let peak = Process::of(child).peak_memory();
        eprintln!("{}: {} MiB at the most", child.log.display(), peak / MIB);
        assert!(peak <= LIMIT, "{} took {peak} bytes", child.log.display());
    }
}

#[test]
fn what_has_no_room_within_the_limit_is_refused_with_both() {
    let directory = tempfile::tempdir().unwrap();
    let conf = directory.path().join("cluster.toml");
    fs::write(&conf, "[client]\nresource_limit = \"1c512m\"\nmemory_budget = \"1GiB\"\n").unwrap();
    let conf = conf.to_str().unwrap();
    for arguments in [&["fuse", "--conf", conf][..], &["conf", "check", "--conf", conf]] {
        let refused = Cluster::alone(arguments, &[]);
        assert_ne!(refused.code, 0, "{refused:?}");
        let place = format!("{conf}:3: client.memory_budget: ");
        assert!(refused.stderr.contains(&place), "{}", refused.stderr);
        assert!(refused.stderr.contains("client.resource_limit (\"1c512m\")"), "{}", refused.stderr);
    }
}

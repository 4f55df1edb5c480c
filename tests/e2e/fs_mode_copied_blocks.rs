//! Blocks of fs-mode files that are being copied to another worker: whoever changes them waits for the copy, gives it
//! up when it takes too long, and never fails for it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use cavern_proto::master::GetLayoutRequest;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_tests::{Child, Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FallocateFlags, copy_file_range, fallocate};
use rustix::process::Signal;
use serde_json::Value;

/// A copy that has failed again and again is tried again after a minute, and fails after another ten seconds.
const PATIENCE: Duration = Duration::from_secs(150);
/// Bytes of a file: less than its only block.
const LENGTH: usize = 600_000;

/// No worker is ever lost, so that one that is stopped is asked for copies. It is waited for until it greets.
const CONF: &str = r#"
[master]
heartbeat = "200ms"
worker_timeout = "1h"
repair_concurrency = 64
persist_delay = "1h"
[client]
connect_timeout = "20s"
"#;

/// Files whose only block has one worker left, and is being copied to one that does not answer.
struct Copied {
    cluster: Cluster,
    paths: Vec<PathBuf>,
    /// As they are made.
    contents: Vec<Vec<u8>>,
    silent: Child,
}

fn workers_of(cluster: &Cluster, path: &str) -> Vec<u64> {
    let shown = cluster.cv(&["fs", "blocks", path, "--json"]).json();
    let mut workers: Vec<u64> = shown.as_array().unwrap().iter().map(|view| view["worker"].as_u64().unwrap()).collect();
    workers.sort_unstable();
    workers
}

/// The position of a worker of the worker table among the children of the cluster.
fn child_of(cluster: &Cluster, worker: u64) -> usize {
    let nodes = cluster.cv(&["node", "list", "--json"]).json();
    let is_it = |node: &&Value| node["id"].as_u64() == Some(worker);
    let data = nodes.as_array().unwrap().iter().find(is_it).unwrap()["data"].as_str().unwrap().to_owned();
    cluster.at_start.workers.iter().position(|child| child.data == data).unwrap()
}

impl Copied {
    /// `count` files; the copies are about to begin when this returns.
    fn new(count: usize, conf: &str) -> Self {
        let cluster = Cluster::up(Options { workers: 3, conf: format!("{CONF}{conf}"), ..Options::default() });
        cluster.s3.create_bucket("bucket");
        cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", "2"]);
        // As long as the client knows of one worker only, it writes to that one.
        let probe = cluster.path("fs/probe");
        eventually("the client knows of two workers", PATIENCE, || {
            fs::write(&probe, "x").unwrap();
            let count = workers_of(&cluster, "/fs/probe").len();
            fs::remove_file(&probe).unwrap();
            (count == 2).then_some(())
        });
        // Of so many files, `count` are at the same two of the three workers.
        let mut random = StdRng::seed_from_u64(7);
        let mut at_pairs: BTreeMap<Vec<u64>, Vec<(PathBuf, Vec<u8>)>> = BTreeMap::new();
        for number in 0..3 * count {
            let mut content = vec![0; LENGTH];
            random.fill(&mut content[..]);
            let path = cluster.path(format!("fs/{number}"));
            fs::write(&path, &content).unwrap();
            let pair = workers_of(&cluster, &format!("/fs/{number}"));
            assert_eq!(pair.len(), 2, "{number}");
            at_pairs.entry(pair).or_default().push((path, content));
        }
        let (pair, files) = at_pairs.into_iter().max_by_key(|(_, files)| files.len()).unwrap();
        let children = pair.iter().map(|worker| child_of(&cluster, *worker)).collect::<Vec<_>>();
        let third = (0..3).find(|position| !children.contains(position)).unwrap();
        let silent = cluster.status().workers[third].clone();
        cluster.signal(&silent, Signal::STOP);
        cluster.kill(&format!("worker{}", children[1]));
        let (paths, contents) = files.into_iter().take(count).unzip();
        let copied = Self { cluster, paths, contents, silent };
        for number in 0..count {
            let file = copied.open(number);
            // It gives up the worker that is dead.
            file.write_all_at(&copied.contents[number][..1], 0).unwrap();
            file.sync_all().unwrap();
        }
        copied
    }

    fn open(&self, number: usize) -> File {
        OpenOptions::new().read(true).write(true).open(&self.paths[number]).unwrap()
    }

    /// Waits until the blocks of all files are being copied.
    fn begin(&self) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let address = format!("http://{}", self.cluster.at_start.masters[0].grpc);
        let mut master = runtime.block_on(NamespaceClient::connect(address)).unwrap();
        for path in &self.paths {
            let inode = fs::metadata(path).unwrap().ino();
            eventually(&format!("a copy of {}", path.display()), PATIENCE, || {
                let layout = runtime
                    .block_on(master.get_layout(GetLayoutRequest { inode, ..Default::default() }))
                    .unwrap()
                    .into_inner();
                (layout.extents[0].joining != 0).then_some(())
            });
        }
    }

    /// The worker answers again, and every block gets its second replica, which has what was written.
    fn end(self, expected: &[Vec<u8>]) {
        self.cluster.signal(&self.silent, Signal::CONT);
        for (path, expected) in self.paths.iter().zip(expected) {
            let name = format!("/fs/{}", path.file_name().unwrap().to_str().unwrap());
            eventually(&format!("{name} has two replicas"), PATIENCE, || {
                (workers_of(&self.cluster, &name).len() == 2).then_some(())
            });
            assert!(fs::read(path).unwrap() == *expected, "{name}");
        }
    }
}

/// Something that is done to a file, and its content then.
type Operation = (&'static str, fn(&File) -> io::Result<()>, fn(&mut Vec<u8>));

const OPERATIONS: [Operation; 9] = [
    ("write", |file| file.write_all_at(b"over", 100), |content| content[100..104].copy_from_slice(b"over")),
    (
        "append",
        |file| {
            rustix::fs::fcntl_setfl(file, rustix::fs::OFlags::APPEND)?;
            { file }.write_all(b"behind")
        },
        |content| content.extend(b"behind"),
    ),
    (
        "write behind the end",
        |file| file.write_all_at(b"far", 700_000),
        |content| {
            content.resize(700_000, 0);
            content.extend(b"far");
        },
    ),
    ("make longer", |file| file.set_len(650_000), |content| content.resize(650_000, 0)),
    ("make shorter", |file| file.set_len(70_000), |content| content.truncate(70_000)),
    (
        "allocate",
        |file| Ok(fallocate(file, FallocateFlags::empty(), 0, 700_000)?),
        |content| content.resize(700_000, 0),
    ),
    (
        "punch",
        |file| Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 1000, 200_000)?),
        |content| content[1000..201_000].fill(0),
    ),
    (
        "zero",
        |file| Ok(fallocate(file, FallocateFlags::ZERO_RANGE, 5, 300_000)?),
        |content| content[5..300_005].fill(0),
    ),
    (
        "copy",
        |file| {
            let copied = copy_file_range(file, Some(&mut 1000), file, Some(&mut 50), 4)?;
            if copied == 4 { Ok(()) } else { Err(io::Error::other(format!("{copied} bytes"))) }
        },
        |content| content.copy_within(1000..1004, 50),
    ),
];

#[test]
fn whatever_changes_a_block_outlasts_a_copy_that_takes_longer_than_its_deadline() {
    for local_descriptors in [true, false] {
        let conf = format!("read_timeout = \"8s\"\nlocal_descriptors = {local_descriptors}\n");
        let copied = Copied::new(OPERATIONS.len(), &conf);
        copied.begin();
        thread::scope(|scope| {
            let at_work: Vec<_> = OPERATIONS
                .iter()
                .enumerate()
                .map(|(number, (name, operation, _))| {
                    let file = copied.open(number);
                    (name, scope.spawn(move || operation(&file).and_then(|()| file.sync_all())))
                })
                .collect();
            for (name, done) in at_work {
                done.join().unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
            }
        });
        let mut expected = copied.contents.clone();
        for ((.., change), content) in OPERATIONS.iter().zip(&mut expected) {
            change(content);
        }
        copied.end(&expected);
    }
}

#[test]
fn a_writer_goes_on_when_a_commit_of_its_own_has_given_the_copy_up() {
    let copied = Copied::new(3, "read_timeout = \"40s\"\n");
    let mut expected = copied.contents.clone();
    let files: Vec<File> = (0..expected.len()).map(|number| copied.open(number)).collect();
    for (file, content) in files.iter().zip(&mut expected) {
        // It is committed some seconds later.
        file.write_all_at(b"first", 10).unwrap();
        content[10..15].copy_from_slice(b"first");
    }
    copied.begin();
    thread::scope(|scope| {
        for (file, content) in files.iter().zip(&mut expected) {
            scope.spawn(move || file.write_all_at(b"second", 20).unwrap());
            content[20..26].copy_from_slice(b"second");
        }
    });
    copied.end(&expected);
}

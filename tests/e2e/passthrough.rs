//! `fuse.passthrough`: what the kernel reads by itself, when it does not, and what outlives what.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{COUNTED, Cluster, MountedOver, Options, eventually, eventually_or};

use crate::client_restart::{replace_by_death, up};

const PATIENCE: Duration = Duration::from_secs(30);

/// What the process that serves the first mount has counted. Where reads are hedged, one that a busy machine delays may
/// come from the bucket, and the kernel gets no file then: hence [`COUNTED`].
#[derive(Debug, PartialEq, Eq)]
struct Counted {
    reads: u64,
    opens: u64,
    registered: u64,
}

fn counted(cluster: &Cluster) -> Counted {
    let metric = |begins: &str| cluster.at_start.fuse[0].metric(begins).unwrap_or_default();
    Counted {
        reads: metric("cavern_fuse_requests_total{operation=\"read\""),
        opens: metric("cavern_fuse_passthrough_opens"),
        registered: metric("cavern_fuse_registered_files"),
    }
}

/// Block files of the first worker, by the key of their object.
fn blocks(cluster: &Cluster, tree: &BTreeMap<String, Bytes>) -> BTreeMap<String, PathBuf> {
    let mut folders = vec![cluster.at_start.workers[0].dirs[0].join("blocks")];
    let mut found = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
                continue;
            }
            let bytes = fs::read(entry.path()).unwrap();
            if let Some((key, _)) = tree.iter().find(|(_, content)| **content == bytes) {
                found.insert(key.clone(), entry.path());
            }
        }
    }
    found
}

#[test]
fn a_file_is_registered_once_for_all_its_opens() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 30, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    for _ in 0..3 {
        cluster.assert_tree("data", "", &tree);
    }
    assert_eq!(counted(&cluster), Counted { reads: 0, opens: 90, registered: 30 });
}

#[test]
fn without_it_files_are_read_through_the_client() {
    let cluster = Cluster::up(Options { conf: "[fuse]\npassthrough = false\n".to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 10, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    let Counted { reads, opens, registered } = counted(&cluster);
    assert!(reads >= 10 && opens == 0 && registered == 0);
}

#[test]
fn direct_reads_go_through_the_client_beside_those_of_the_kernel() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 2, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let paths: Vec<_> = tree.keys().map(|key| cluster.path("data").join(key)).collect();
    let direct = |path: &Path| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    // The first of a file, and one beside another.
    let before = direct(&paths[0]);
    let handles = [File::open(&paths[0]).unwrap(), before, File::open(&paths[1]).unwrap(), direct(&paths[1])];
    for (number, handle) in handles.iter().enumerate() {
        let mut part = vec![0; 1000];
        // At no multiple of anything.
        handle.read_exact_at(&mut part, 777).unwrap();
        assert!(part == tree.values().nth(number / 2).unwrap()[777..1777], "handle {number}");
    }
    assert!(counted(&cluster).reads >= 2);
}

/// Maps a file, closes it, and copies the mapping to the output when a line comes in.
const MAPPED: &str = "
import ctypes, mmap, os, sys
path, size = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
file = os.open(path, os.O_RDONLY)
at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
os.close(file)
print('mapped' if at not in (None, ctypes.c_void_p(-1).value) else ctypes.get_errno(), flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(ctypes.string_at(at, size))
";

#[test]
fn a_mapping_outlives_its_descriptor_its_block_and_what_serves_the_mount() {
    let cluster = up(Options::default());
    let tree = cluster.seed("objects", "", 3, 300_000);
    cluster.mount("s3://objects", "/data", &[]);
    let (key, content) = tree.first_key_value().unwrap();
    let mut mapping = Command::new("python3")
        .args(["-c", MAPPED])
        .arg(cluster.path("data").join(key))
        .arg(content.len().to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(mapping.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "mapped\n");
    assert_eq!(counted(&cluster).opens, 1);
    cluster.cv(&["fs", "free", "/data"]);
    replace_by_death(&cluster);
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    mapping.stdin.take().unwrap().write_all(b"\n").unwrap();
    let mut read = Vec::new();
    output.read_to_end(&mut read).unwrap();
    assert!(mapping.wait().unwrap().success() && read == *content);
    cluster.assert_tree("data", "", &tree);
}

#[test]
fn a_block_that_is_evicted_or_cut_off_is_read_rightly() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 6, 300_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    let registered = counted(&cluster).registered;
    assert_eq!(registered, 6);
    let open: Vec<_> = tree.keys().map(|key| File::open(cluster.path("data").join(key)).unwrap()).collect();
    cluster.cv(&["fs", "free", "/data"]);
    for (file, content) in open.iter().zip(tree.values()) {
        let mut read = vec![0; content.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == *content, "the kernel has the file still");
    }
    drop(open);
    eventually("the blocks are fetched, and registered, again", PATIENCE, || {
        cluster.assert_tree("data", "", &tree);
        (counted(&cluster).registered == 2 * registered).then_some(())
    });

    // Somebody cuts them off while they are registered: the next who opens them is told nothing wrong.
    let blocks = blocks(&cluster, &tree);
    assert_eq!(blocks.len(), tree.len());
    for path in blocks.values() {
        OpenOptions::new().write(true).open(path).unwrap().set_len(100_000).unwrap();
    }
    cluster.assert_tree("data", "", &tree);
}

#[test]
fn a_directory_that_the_kernel_refuses_is_read_through_the_client_and_others_are_not() {
    let conf = format!("[fuse]\npassthrough = true\n{COUNTED}");
    let cluster = Cluster::up(Options { workers: 2, conf, ..Options::default() });
    let tree = cluster.seed("bucket", "", 40, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    assert_eq!(counted(&cluster), Counted { reads: 0, opens: 40, registered: 40 });

    cluster.stop("worker0");
    let directory = &cluster.at_start.workers[0].dirs[0];
    let beside = |name: &str| {
        let path = cluster.directory().with_file_name(name);
        fs::create_dir(&path).unwrap();
        path.display().to_string()
    };
    let (upper, work) = (beside("upper"), beside("work"));
    let layers = format!("lowerdir={},upperdir={upper},workdir={work}", directory.display());
    let _stacked = MountedOver::mount(directory, "overlay", &layers);
    cluster.start("worker0");
    cluster.stop("fuse");
    cluster.start("fuse");
    for _ in 0..2 {
        cluster.assert_tree("data", "", &tree);
    }
    let Counted { reads, opens, registered } = counted(&cluster);
    assert!(reads > 0 && opens > 0 && opens < 80 && opens == 2 * registered, "{reads} {opens} {registered}");
    let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
    assert_eq!(log.matches("which is stacked on another one").count(), 1, "{log}");
}

#[test]
fn space_of_evicted_blocks_is_free_again_whoever_had_them_registered() {
    let cluster = up(Options::default());
    let tree = cluster.seed("objects", "", 40, 500_000);
    cluster.mount("s3://objects", "/data", &[]);
    let worker = || cluster.cv(&["node", "list", "--json"]).json()[0]["id"].as_u64();
    let earlier = worker();
    cluster.stop("worker0");
    let directory = &cluster.at_start.workers[0].dirs[0];
    fs::remove_dir_all(directory).unwrap();
    fs::create_dir(directory).unwrap();
    let _disk = MountedOver::mount(directory, "tmpfs", "size=100m");
    cluster.start("worker0");
    // Another one, since its directory was empty. It is ready a moment before the master knows it.
    eventually("the master knows the worker", PATIENCE, || (worker() != earlier).then_some(()));
    let used = || {
        let status = rustix::fs::statvfs(directory).unwrap();
        (status.f_blocks - status.f_bfree) * status.f_frsize
    };
    let (count, size) = (tree.len() as u64, tree.values().map(|content| content.len() as u64).sum::<u64>());
    let of_worker = |name: &str| cluster.at_start.workers[0].metric(name).unwrap_or_default();
    let who_has_it = || cluster.space_of(directory);
    for dies in [false, true] {
        // Each of them, at the same time. What came past the worker, which the client may not have known yet, is in its
        // memory for half a minute, and needs no block until then.
        let all_is_registered = || {
            cluster.assert_tree("data", "", &tree);
            let is_cached = of_worker("cavern_worker_blocks") == count && of_worker("cavern_worker_used_bytes") >= size;
            (is_cached && gauge(&cluster, "cavern_client_backing_files") == count).then_some(())
        };
        eventually_or("all is registered", 3 * PATIENCE, all_is_registered, who_has_it);
        let before = used();
        if dies {
            replace_by_death(&cluster);
        }
        let freed = cluster.cv(&["fs", "free", "/data", "--json"]).json();
        assert_eq!(freed["blocks"], count, "{freed}\n{}", who_has_it());
        // A notice may be lost with a connection, or overtake the answer that hands a file out: then workers are asked.
        let is_free = || (used() < before - size * 9 / 10).then_some(());
        eventually_or("the space is free", 3 * PATIENCE, is_free, || format!("{before} before\n{}", who_has_it()));
    }
}

/// Of the first mount, and of the process that serves it now.
fn gauge(cluster: &Cluster, name: &str) -> u64 {
    cluster.at_start.fuse[0].metric(name).unwrap_or_default()
}

#[test]
fn more_files_than_there_are_descriptors_are_registered_once() {
    let conf = format!("{COUNTED}descriptor_cache = 16\n[fuse]\npassthrough_files = 1000\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let tree = cluster.seed("bucket", "", 200, 20_000);
    cluster.mount("s3://bucket", "/data", &[]);
    for _ in 0..3 {
        cluster.assert_tree("data", "", &tree);
    }
    assert_eq!(counted(&cluster), Counted { reads: 0, opens: 600, registered: 200 });
    assert!(gauge(&cluster, "cavern_client_descriptors") <= 16);
    assert_eq!(gauge(&cluster, "cavern_client_backing_files"), 200);
    // The workers have the blocks no longer, and nor has the kernel.
    cluster.cv(&["fs", "free", "/data"]);
    eventually("nothing is kept", PATIENCE, || (gauge(&cluster, "cavern_client_backing_files") == 0).then_some(()));
    cluster.assert_tree("data", "", &tree);
}

#[test]
fn what_a_worker_drops_while_it_is_not_heard_is_let_go() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 30, 20_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    assert_eq!(gauge(&cluster, "cavern_client_backing_files"), 30);
    // It knows nobody who has files of its blocks, and nobody is connected.
    cluster.stop("worker0");
    cluster.start("worker0");
    // Where that took long it is lost until it has registered, and would not be asked.
    let is_live = || cluster.cv(&["node", "list", "--json"]).json()[0]["state"] == "live";
    eventually("the worker is live", PATIENCE, || is_live().then_some(()));
    let freed = cluster.cv(&["fs", "free", "/data", "--json"]).json();
    assert_eq!(freed["blocks"], 30, "{freed}");
    eventually("nothing is kept", 3 * PATIENCE, || (gauge(&cluster, "cavern_client_backing_files") == 0).then_some(()));
    cluster.assert_tree("data", "", &tree);
}

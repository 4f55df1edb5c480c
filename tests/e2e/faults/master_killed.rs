//! kill -9 of the master: what is cached and what is open goes on being read; started again it knows everything.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cavern_tests::{COUNTED, Cluster, Options, eventually, eventually_or};

use crate::readers::{Readers, drop_caches, shown_at};

const FILES: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn cached_and_open_files_go_on_and_the_namespace_is_there_after_the_restart() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "images/", FILES, 50_000);
    cluster.s3.put("bucket", "images/large", vec![7; 8 << 20]);
    cluster.mount("s3://bucket/images", "/data", &[]);
    let tree = shown_at(&cluster.path("data"), "images/", &seeded);
    Readers::start(2, &tree).finish();
    let listed = walk(&cluster.path("data"));
    assert_eq!(listed.iter().filter(|path| path.is_file()).count(), FILES + 1);
    let mounts = || cluster.cv(&["mount", "--json"]).json();
    let before = eventually("the index is complete", PATIENCE, || {
        Some(mounts()).filter(|mounts| mounts[0]["status"]["indexing"] == false)
    });

    // Open, and only its beginning has been read.
    let mut large = File::open(cluster.path("data/large")).unwrap();
    let mut beginning = [0; 4096];
    large.read_exact(&mut beginning).unwrap();

    let readers = Readers::start(8, &tree);
    readers.wait_for(FILES / 4);
    cluster.kill("master");
    readers.finish();
    // From its end: not what read-ahead has brought.
    let mut end = [0; 4096];
    large.read_exact_at(&mut end, (8 << 20) - 4096).unwrap();
    assert_eq!((beginning, end), ([7; 4096], [7; 4096]));

    // And with nothing in the kernel: a listing and all bytes from the client's cache and the worker.
    drop_caches();
    let began = Instant::now();
    assert_eq!(walk(&cluster.path("data")), listed);
    Readers::start(8, &tree).finish();
    // Were a master waited for once for each file, it would take many times as long.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?} without a master", began.elapsed());

    cluster.start("master");
    // A master that begins to lead looks first whether the index is complete.
    let are_as_before = || (mounts() == before).then_some(());
    eventually_or("the mounts are as before", PATIENCE, are_as_before, || format!("{before} became {}", mounts()));
    assert_eq!(walk(&cluster.path("data")), listed);
    let added = cluster.seed("second", "", 10, 1000);
    cluster.mount("s3://second", "/more", &[]);
    cluster.assert_tree("more", "", &added);

    // A client that has seen nothing of all this finds the same, and no listing of the bucket was needed for it.
    eventually("the index of the new mount ends", Duration::from_secs(10), || {
        cluster.s3.reset_stats();
        std::thread::sleep(Duration::from_millis(50));
        (cluster.s3.requests("LIST") == 0).then_some(())
    });
    cluster.stop("fuse");
    cluster.start("fuse");
    assert_eq!(walk(&cluster.path("data")), listed);
    Readers::start(2, &tree).finish();
    assert_eq!(cluster.s3.requests("GET"), 0);
}

/// Every path below `root`.
fn walk(root: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            }
            found.insert(entry.path());
        }
    }
    found
}

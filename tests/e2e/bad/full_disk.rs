//! A worker whose file system is full: reads go on, from the bucket where need be; the cache shrinks by what it must
//! and not again and again; when space returns it is used again.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{Cluster, MountedOver, Options, eventually};

use super::{CONF, assert_read};

/// A file system in memory.
struct SmallDisk(MountedOver);

impl SmallDisk {
    fn mount(path: &Path, megabytes: u32) -> Self {
        fs::create_dir_all(path).unwrap();
        Self(MountedOver::mount(path, "tmpfs", &format!("size={megabytes}m")))
    }

    /// Writes until nothing fits any more.
    fn fill(&self) -> PathBuf {
        let path = self.0.path().join("ballast");
        let mut file = fs::File::create(&path).unwrap();
        while file.write_all(&[1; 1 << 16]).is_ok() {}
        while file.write_all(&[1; 512]).is_ok() {}
        path
    }
}

#[test]
fn a_full_disk_costs_cache_but_no_read() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let old = cluster.seed("old", "", 100, 200_000);
    let new = cluster.seed("new", "", 60, 200_000);
    cluster.mount("s3://old", "/old", &[]);
    cluster.mount("s3://new", "/new", &[]);
    let worker = &cluster.at_start.workers[0];
    cluster.stop("worker0");
    fs::remove_dir_all(&worker.dirs[0]).unwrap();
    let disk = SmallDisk::mount(&worker.dirs[0], 96);
    cluster.start("worker0");
    let fetched = |below: &str| {
        // What the client holds by itself says nothing of the worker.
        cluster.stop("fuse");
        cluster.start("fuse");
        cluster.s3.reset_stats();
        assert_read(&cluster, below, if below == "old" { &old } else { &new });
        cluster.s3.requests("GET") as usize
    };
    assert_eq!(fetched("old"), old.len());
    assert_eq!(fetched("old"), 0, "all is cached: {}", cluster.logs());

    // Somebody else takes all the space there is.
    let ballast = disk.fill();
    let lost = fetched("old");
    assert!(lost < old.len() / 2, "{lost} files went: {}", cluster.logs());
    let first = fetched("new");
    // Newcomers are kept again, in the place of others.
    let again = eventually("new files are cached", Duration::from_secs(30), || {
        let again = fetched("new");
        (again < new.len()).then_some(again)
    });
    eprintln!("full: {lost} of {} files lost, {first} requests for {} new ones, then {again}", old.len(), new.len());
    let said = |what: &str| fs::read_to_string(&worker.log).unwrap().matches(what).count();
    assert!((1..=5).contains(&said("hardly any space left")), "{}", cluster.logs());
    assert!(said("is given up") + said("a data directory failed") == 0, "{}", cluster.logs());
    let nodes = cluster.cv(&["node", "list", "--json"]).json();
    assert_eq!(nodes[0]["state"], "live", "{nodes}");

    fs::remove_file(ballast).unwrap();
    eventually("the space is used again", Duration::from_secs(60), || {
        (fetched("new") + fetched("old") == 0).then_some(())
    });
    let raised = said("there is space on the device again");
    assert!((1..=5).contains(&raised), "raised {raised} times: {}", cluster.logs());
}

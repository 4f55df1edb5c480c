//! A host loses its power: whatever was not on its disk is gone, and all of its processes with it.
//!
//! Master, worker and client are on one host, whose disk is a file system that can lose its power. The bucket is
//! elsewhere. Programs change files in directories that the client holds and in others; then the power fails, at any
//! moment, and the host starts again.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Disk, Options, Status, eventually, number};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::bucket::{Bucket, assert_same};
use crate::matrix::keep_files_to_this_thread;
use crate::powerless::{History, Loss, Programs};

const PATIENCE: Duration = Duration::from_secs(60);
/// What the programs are given until the power fails, in milliseconds.
const WORK: std::ops::Range<u64> = 300..1800;
const CONF: &str = "\
[master]\npersist_delay = \"100ms\"\nsession_lease = \"2s\"\nsnapshot_after = \"256KiB\"\nlog_keep = \"0s\"\n\
[client]\nmetadata_timeout = \"60s\"\nread_timeout = \"60s\"\n";

/// A cluster whose data is on a disk that can lose its power.
struct Host {
    cluster: Cluster,
    // After the cluster has gone.
    disk: Disk,
}

impl Host {
    fn up(conf: &str) -> Self {
        let disk = Disk::make();
        let cluster = Cluster::up(Options { conf: conf.to_owned(), keep_mount: true, ..Options::default() });
        let host = Self { cluster, disk };
        host.local("down");
        // From the very first start on.
        for name in ["master0", "worker0"] {
            let (there, here) = (host.cluster.directory().join(name), host.disk.path().join(name));
            fs::remove_dir_all(&there).unwrap();
            fs::create_dir(&here).unwrap();
            symlink(&here, &there).unwrap();
        }
        host.local("up");
        host
    }

    fn local(&self, what: &str) {
        self.cluster.cv(&["local", what, "--dir", self.cluster.directory().to_str().unwrap()]);
    }

    /// The power fails, and comes back.
    fn lose_power(&self) {
        let status = self.cluster.status();
        self.disk.lose_power(|| end_all(&status));
        eventually("all ends are known", PATIENCE, || {
            let Status { masters, workers, fuse, .. } = self.cluster.status();
            masters.iter().chain(&workers).chain(&fuse).all(|child| child.state == "crashed").then_some(())
        });
        self.local("up");
    }
}

/// SIGKILL for all but the object store, which is elsewhere.
fn end_all(status: &Status) {
    let daemons = status.fuse.iter().filter_map(|fuse| fuse.daemon());
    let children = status.fuse.iter().chain(&status.workers).chain(&status.masters).filter_map(|child| child.pid);
    for pid in children.chain(daemons).filter_map(Pid::from_raw) {
        // A daemon may have gone with its keeper.
        let _ = kill_process(pid, Signal::KILL);
    }
}

#[test]
fn a_host_that_loses_its_power_keeps_what_was_synced_and_the_order_of_the_rest() {
    let seed = number("CAVERN_SEED", 7);
    let mut random = StdRng::seed_from_u64(seed);
    let host = Host::up(CONF);
    let cluster = &host.cluster;
    let images = cluster.seed("images", "", 60, 40_000);
    cluster.mount("s3://images", "/images", &[]);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    // Nobody holds one that was made so.
    cluster.cv(&["fs", "mkdir", "/fs/plain"]);
    let bucket = Bucket::of(cluster, "bucket");
    let mut programs = Programs::new(History::new(cluster.path("fs"), &["plain"]), seed);
    for round in 0..number("CAVERN_POWER_ROUNDS", 6) {
        let began = Instant::now();
        let when = format!("seed {seed}, round {round}");
        cluster.assert_tree("images", "", &images);
        let stop = Arc::new(AtomicBool::new(false));
        let working = thread::spawn({
            let stop = stop.clone();
            move || {
                keep_files_to_this_thread();
                let result = programs.run(&stop);
                (programs, result)
            }
        });
        thread::sleep(Duration::from_millis(random.random_range(WORK)));
        assert!(!working.is_finished(), "{when}: a program failed: {:?}", working.join().map(|(_, result)| result));
        host.lose_power();
        stop.store(true, Ordering::Relaxed);
        let (left, result) = working.join().unwrap();
        programs = left;
        assert!(result.is_err(), "{when}: the power failed, and nobody noticed");
        let back = began.elapsed();
        let (steps, kept) = programs.history.check(&when, Loss::Power);
        cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
        // What the client of before had open without a name is kept until its session is over.
        let objects = eventually("nothing is kept for who is gone", PATIENCE, || {
            let objects = bucket.objects();
            (!objects.keys().any(|key| key.contains("/.cavern-kept-"))).then_some(objects)
        });
        assert_same(&when, &objects, &programs.history.objects("fs/"));
        cluster.assert_tree("images", "", &images);
        eprintln!(
            "{when}: {kept} of {steps} changes kept, back in {back:.1?}, all is well after {:.1?}",
            began.elapsed()
        );
        // Content that only the bucket has.
        if round % 2 == 0 {
            cluster.cv(&["fs", "free", "/fs"]);
        }
    }
}

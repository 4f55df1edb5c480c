//! A host loses its power: whatever was not on its disk is gone, and all of its processes with it.
//!
//! Master, worker and client are on one host, whose disk is a file system that can lose its power. The bucket is
//! elsewhere. Programs change files in directories delegated to the client and in others; then the power fails, at any
//! moment, and the host starts again.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Disk, Options, Status, eventually, number};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use crate::bucket::{Bucket, assert_same};
use crate::matrix::keep_files_to_this_thread;
use crate::powerless::{History, Loss, Programs};

const PATIENCE: Duration = Duration::from_secs(60);
/// What the programs are given until the power fails, in milliseconds.
const WORK: std::ops::Range<u64> = 300..1800;
const CONF: &str = "\
[master]\npersist_delay = \"100ms\"\nsession_lease = \"2s\"\nsnapshot_after = \"256KiB\"\nlog_retention = \"0s\"\n\
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
        let cluster = Cluster::up(Options { conf: conf.to_owned(), supervised: true, ..Options::default() });
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
        self.disk.lose_power(|| {
            end_all(&status);
            // A mount that nobody serves any more keeps the files on the disk that the kernel read by itself.
            let unmounted = unmount(self.cluster.mount_point(), UnmountFlags::DETACH);
            unmounted.expect("it was mounted");
        });
        eventually("all ends are known", PATIENCE, || {
            let Status { masters, workers, fuse, .. } = self.cluster.status();
            masters.iter().chain(&workers).chain(&fuse).all(|child| child.state == "crashed").then_some(())
        });
        self.local("up");
    }
}

/// SIGKILL for all but the object store, which is elsewhere. Workers first: one that saw a client end would have what
/// that answered sent by a process of its own, which no loss of power would leave alive.
fn end_all(status: &Status) {
    let daemons = status.fuse.iter().filter_map(|fuse| fuse.daemon());
    let children = status.workers.iter().chain(&status.masters).chain(&status.fuse).filter_map(|child| child.pid);
    for pid in children.chain(daemons).filter_map(Pid::from_raw) {
        // A daemon may have gone with its supervisor.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A directory that is delegated to nobody.
fn make_plain(cluster: &Cluster) {
    cluster.cv(&["fs", "mkdir", "/fs/plain"]);
    cluster.cv(&["fs", "quota", "set", "/fs/plain", "--inodes", "1000000"]);
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
    // Nobody holds one with a quota.
    make_plain(cluster);
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
            (!objects.keys().any(|key| key.contains("/.cavern-preserved-"))).then_some(objects)
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

/// What was cut off a file is behind its end in the last block. A later length that is in the master's log must not
/// bring it back, when neither the bytes nor the zeros of that length had come to the disk.
#[test]
fn what_was_cut_off_does_not_come_back_with_a_later_length() {
    const OLD: u8 = 0xaa;
    const NEW: u8 = 0xbb;
    const CUT: usize = 100_001;
    const LENGTH: usize = 300_000;
    let host = Host::up(CONF);
    let cluster = &host.cluster;
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    make_plain(cluster);
    let top = cluster.path("fs");
    fs::create_dir(top.join("held")).unwrap();
    let names =
        ["plain", "held"].map(|directory| ["appended", "behind", "again"].map(|name| format!("{directory}/{name}")));
    for name in names.iter().flatten() {
        let file = File::create(top.join(name)).unwrap();
        file.write_all_at(&[OLD; LENGTH], 0).unwrap();
        file.sync_all().unwrap();
    }
    for name in names.iter().flatten() {
        let open = || OpenOptions::new().write(true).open(top.join(name)).unwrap();
        let mut file = open();
        file.set_len(CUT as u64).unwrap();
        file.sync_all().unwrap();
        if name.ends_with("again") {
            file = open();
        }
        match name.ends_with("behind") {
            true => file.write_all_at(&[NEW], LENGTH as u64).unwrap(),
            false => file.write_all_at(&[NEW; LENGTH], CUT as u64).unwrap(),
        }
    }
    for directory in ["plain", "held"] {
        File::open(top.join(directory)).unwrap().sync_all().unwrap();
    }
    host.lose_power();
    for name in names.iter().flatten() {
        let found = fs::read(top.join(name)).unwrap();
        assert!(found.len() > CUT, "{name}: the length was in the master's log: {}", found.len());
        assert!(found[..CUT].iter().all(|byte| *byte == OLD), "{name}: what was synced is lost");
        let old = found[CUT..].iter().position(|byte| *byte == OLD);
        assert_eq!(old, None, "{name}: what was cut off is there again, of {} bytes", found.len());
    }
}

//! Every point, one after the other, in one cluster for each kind of process.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, eventually, http_get};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rustix::thread::UnshareFlags;

use crate::bucket::{Bucket, assert_same};
use crate::model::{Model, Rest};
use crate::workload::Workload;

const PATIENCE: Duration = Duration::from_secs(60);
/// Only a master passes these that takes in a snapshot of another one: see `snapshots`.
pub const OF_SNAPSHOTS: [Failpoint; 4] =
    [Failpoint::SnapshotAdopted, Failpoint::DatabasePrepared, Failpoint::DatabaseNamed, Failpoint::DatabaseReplaced];

/// Whoever holds no delegation, and has nobody look into one, does not pass these: see `delegations`.
const OF_HELD_DIRECTORIES: [Failpoint; 10] = [
    Failpoint::ChangeJournaled,
    Failpoint::ChangeQueued,
    Failpoint::WriteBackSent,
    Failpoint::WriteBackMade,
    Failpoint::ReturnQueued,
    Failpoint::ReplayBegun,
    Failpoint::BlockPreallocated,
    Failpoint::RecallSent,
    Failpoint::DelegationReturned,
    Failpoint::SessionEnding,
];

/// At which pass a point is deadly. What happens all the time is let happen for a while, so that there is something to
/// lose.
fn pass_of(point: Failpoint) -> u32 {
    match point {
        Failpoint::LogAppend
        | Failpoint::LogSynced
        | Failpoint::CommandApplying
        | Failpoint::CommandApplied
        | Failpoint::EntryApplied
        | Failpoint::EntryAnswered => 60,
        Failpoint::WritePlaced | Failpoint::CommitBegun | Failpoint::CommitAnswered => 12,
        Failpoint::BlockReserved | Failpoint::SyncBegun | Failpoint::SyncedAtWorkers => 8,
        Failpoint::CreateAnswered | Failpoint::BlockMade | Failpoint::BlockSynced | Failpoint::FolderSynced => 8,
        Failpoint::RenameAnswered | Failpoint::RemoveAnswered => 4,
        _ => 2,
    }
}

/// `CAVERN_SEED` has the programs do other things.
fn seed() -> u64 {
    std::env::var("CAVERN_SEED").map_or(7, |seed| seed.parse().expect("CAVERN_SEED is a number"))
}

fn wants_large_files(point: Failpoint) -> bool {
    matches!(
        point,
        Failpoint::UploadBegun | Failpoint::UploadPartSent | Failpoint::UploadSent | Failpoint::UploadCompleted
    )
}

/// Where blocks are, and how they are reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Storage {
    /// At one worker of this host, through descriptors.
    Near,
    /// At two workers each, over the network.
    Far,
}

#[test]
fn a_client_dies_at_each_of_its_points() {
    die_at_all_of("fuse", Storage::Near);
}

#[test]
fn a_client_of_two_replicas_dies_at_each_of_its_points() {
    die_at_all_of("fuse", Storage::Far);
}

#[test]
fn a_worker_dies_at_each_of_its_points() {
    die_at_all_of("worker", Storage::Near);
}

#[test]
fn one_of_two_replicas_dies_at_each_of_its_points() {
    die_at_all_of("worker", Storage::Far);
}

#[test]
fn a_master_dies_at_each_of_its_points() {
    die_at_all_of("master", Storage::Near);
}

fn die_at_all_of(role: &str, storage: Storage) {
    // Blocks of unlinked files that a dead client had open are freed when its lease is over.
    let lease = if role == "fuse" { "2s" } else { "30s" };
    // A worker that is away for long is not waited for by programs.
    let conf = format!(
        "[master]\nworker_timeout = \"60s\"\npersist_delay = \"30ms\"\nsession_lease = \"{lease}\"\nsnapshot_after = \
         \"64KiB\"\nlog_retention = \"0s\"\n\
         [client]\nmetadata_timeout = \"60s\"\nread_timeout = \"60s\"\nlocal_descriptors = {}\n",
        storage == Storage::Near
    );
    let replicas = if storage == Storage::Near { 1 } else { 2 };
    // What the death of a client leaves when nobody goes on for it; elsewhere its mount is kept.
    let supervised = role != "fuse";
    let cluster = Cluster::up(Options { failpoints: true, workers: replicas, conf, supervised, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    let replicas = replicas.to_string();
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB", "--replicas", &replicas]);
    let bucket = Bucket::of(&cluster, "bucket");
    let mut workload = Workload {
        model: Model::new(cluster.path("fs")),
        random: StdRng::seed_from_u64(seed()),
        large: false,
        given: 0,
    };
    let is_elsewhere = |point: &Failpoint| OF_SNAPSHOTS.contains(point) || OF_HELD_DIRECTORIES.contains(point);
    let is_tried = |point: &Failpoint| point.role() == role && !is_elsewhere(point);
    let mut points: Vec<Failpoint> = Failpoint::ALL.iter().copied().filter(is_tried).collect();
    assert!(points.len() > 9, "{points:?}");
    // A worker that was away is asked to free blocks only after a while.
    points.sort_by_key(|point| *point != Failpoint::BlockFreed);
    for point in points {
        let began = Instant::now();
        workload.large = wants_large_files(point);
        workload = die_at(&cluster, point, workload);
        let died = began.elapsed();
        let (when, rest) = (format!("after {}", point.name()), if role == "fuse" { Rest::Any } else { Rest::All });
        workload.model.check(&when, rest);
        workload.model.redo();
        cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
        assert_same(&when, &bucket.objects(), &workload.model.objects("fs/"));
        eprintln!("{}: died and back in {died:.1?}, all is well after {:.1?}", point.name(), began.elapsed());
    }
    for directory in &workload.model.names.directories {
        fs::remove_dir_all(cluster.path("fs").join(directory)).unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_same("at the end", &bucket.objects(), &Model::new(cluster.path("fs")).objects("fs/"));
    // A replica that a writer has given up stays at its worker.
    if role != "worker" || storage == Storage::Near {
        eventually("no worker has a block of a file that is gone", PATIENCE, || {
            (data_bytes(&cluster) == Some(0)).then_some(())
        });
    }
}

/// Lets programs work until the process dies at the point, starts it again, and lets them finish what they do.
fn die_at(cluster: &Cluster, point: Failpoint, mut workload: Workload) -> Workload {
    let stop = Arc::new(AtomicBool::new(false));
    let working = thread::spawn({
        let stop = stop.clone();
        move || {
            keep_files_to_this_thread();
            let result = workload.run(&stop);
            (workload, result)
        }
    });
    cluster.arm(point, pass_of(point));
    // A program that fails before the process has died is looked at below.
    eventually(&format!("a process dies at {}", point.name()), PATIENCE, || {
        (cluster.has_died_at(point) || working.is_finished()).then_some(())
    });
    assert!(
        cluster.has_died_at(point),
        "nothing has died at {}, and programs failed: {:?}",
        point.name(),
        working.join().map(|(_, result)| result)
    );
    let child = eventually("its end is known", PATIENCE, || {
        let status = cluster.status();
        let children = match point.role() {
            "fuse" => &status.fuse,
            "worker" => &status.workers,
            _ => &status.masters,
        };
        let number = children.iter().position(|child| child.state == "crashed")?;
        Some(format!("{}{number}", point.role()))
    });
    cluster.start(&child);
    stop.store(true, Ordering::Relaxed);
    let (workload, result) = working.join().unwrap();
    if point.role() == "fuse" {
        // What it was about to do was lost with the client; what it had done before was not.
        assert!(result.is_err(), "{}: the client died, and nobody noticed", point.name());
    } else {
        result.unwrap_or_else(|error| panic!("{}: a program failed while the {child} was away: {error}", point.name()));
    }
    workload
}

/// A process that is started from another thread would have the files of this one for a moment; closing them flushes,
/// and that would have to wait for the very process that is to be started.
pub fn keep_files_to_this_thread() {
    // SAFETY: no descriptor of another thread is used by this one, and none of its own leaves it.
    #[expect(unsafe_code, reason = "descriptors of other threads are other ones from here on")]
    unsafe {
        rustix::thread::unshare_unsafe(UnshareFlags::FILES).unwrap();
    }
}

/// Bytes of blocks of files, at all workers.
fn data_bytes(cluster: &Cluster) -> Option<u64> {
    let at = |http: &str| -> Option<u64> {
        let page = http_get(&format!("http://{http}/metrics")).ok()?.body;
        let line = page.lines().find(|line| line.starts_with("cavern_worker_data_bytes"))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    cluster.status().workers.iter().map(|worker| at(&worker.http)).sum()
}

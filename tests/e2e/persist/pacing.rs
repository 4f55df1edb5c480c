//! When the bucket gets what: closed files while others are made, and one that changes again and again now and then.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, eventually};

use super::{PATIENCE, gauge};
use crate::bucket::Bucket;

fn mounted_after(persist_delay: &str) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"{persist_delay}\"\n{COUNTED}");
    let cluster = Cluster::up(Options { workers: 1, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

#[test]
fn closed_files_arrive_while_the_job_that_makes_them_goes_on() {
    let cluster = mounted_after("2s");
    let job = cluster.path("fs/job");
    fs::create_dir(&job).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = thread::spawn({
        let stop = stop.clone();
        move || {
            let mut files = 0;
            while !stop.load(Ordering::Acquire) {
                fs::write(job.join(format!("f{files:05}")), [7u8; 2000]).unwrap();
                files += 1;
                // Some hundred files a second: clients are busy, and little is left to be done in the end.
                thread::sleep(Duration::from_millis(2));
            }
            files
        }
    });
    // Those that nobody waits for, and that are not overdue.
    eventually("closed files are written while others are made", PATIENCE, || {
        gauge(&cluster, "cavern_master_persist_busy_uploads").filter(|files| *files >= 20)
    });
    eventually("they are in the bucket", PATIENCE, || (cluster.s3.requests("PUT") >= 20).then_some(()));
    assert!(!writer.is_finished());
    stop.store(true, Ordering::Release);
    let files: usize = writer.join().unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let mut bucket = Bucket::of(&cluster, "bucket").objects();
    assert!(bucket.remove("fs/job/").is_some());
    assert_eq!(bucket.len(), files);
    assert!(bucket.values().all(|content| *content == [7u8; 2000][..]));
}

#[test]
fn a_file_that_is_written_again_and_again_is_not_uploaded_each_time() {
    let cluster = mounted_after("20s");
    let bucket = Bucket::of(&cluster, "bucket");
    let arrives = |key: &str| eventually(key, PATIENCE, || bucket.objects().remove(key));
    let path = cluster.path("fs/again");
    fs::write(&path, [0u8; 3000]).unwrap();
    assert_eq!(arrives("fs/again"), [0u8; 3000][..]);
    // Others that are closed after it has changed once more come within a tenth of the delay.
    for number in 1..=2u8 {
        fs::write(&path, [number; 3000]).unwrap();
        fs::write(cluster.path(format!("fs/other{number}")), "other").unwrap();
        assert_eq!(arrives(&format!("fs/other{number}")), "other");
        assert_eq!(arrives("fs/again"), [0u8; 3000][..], "version {number} was uploaded, too");
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(arrives("fs/again"), [2u8; 3000][..]);
}

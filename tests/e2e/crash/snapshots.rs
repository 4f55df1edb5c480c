//! A master dies while a snapshot of another one takes the place of its state.

use std::fs;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

use crate::matrix::OF_SNAPSHOTS;

const PATIENCE: Duration = Duration::from_secs(60);
/// A master that lacks a few entries is taken in at once.
const ENTRIES: u64 = 1200;
const FILES: usize = 50;

#[test]
fn a_master_that_is_given_the_namespace_dies_at_each_step_and_is_taken_in() {
    // The log stays until a master comes for which it is too long.
    let conf = "[master]\nsnapshot_after = \"64KiB\"\n[client]\nmetadata_timeout = \"60s\"\n";
    let cluster = Cluster::up(Options { failpoints: true, workers: 1, conf: conf.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let files = |round: usize| (0..FILES).map(move |number| format!("{round}-{number}"));
    let make = |round| files(round).for_each(|name| fs::write(cluster.path("fs").join(&name), &name).unwrap());
    make(0);
    let first_files = (0..).map(|number| format!("more-{number}"));
    let mut more = 0;
    for name in first_files {
        fs::write(cluster.path("fs").join(&name), "").unwrap();
        more += 1;
        if more % 50 == 0 && cluster.groups()[0].as_ref().is_some_and(|group| group.last_index > ENTRIES) {
            break;
        }
    }
    eventually("the log is long", PATIENCE, || {
        let log = cluster.status().masters[0].metric("cavern_master_log_bytes")?;
        (log > 64 << 10).then_some(())
    });
    let place = cluster.directory().to_str().unwrap();
    let first = cluster.status().masters[0].pid;
    for (round, point) in (1..).zip(OF_SNAPSHOTS) {
        cluster.arm(point, 1);
        let up = cluster.try_cv(&["local", "up", "--dir", place, "--masters", "3", "--timeout", "20"]);
        assert!(cluster.has_died_at(point), "{}: {up:?}", point.name());
        assert_ne!(up.code, 0, "{}: {up:?}", point.name());
        // What ran before goes on.
        assert_eq!(cluster.status().masters[0].pid, first, "{}: {up:?}", point.name());
        make(round);
    }
    cluster.cv(&["local", "up", "--dir", place, "--masters", "3"]);
    cluster.masters_agree();
    assert_eq!(cluster.status().masters[0].pid, first);
    // The one that has died so often knows it all.
    let group = cluster.groups()[1].clone().unwrap();
    cluster.cv(&["raft", "transfer", &group.node_id.to_string()]);
    assert_eq!(cluster.leader(), 1);
    for name in (0..=OF_SNAPSHOTS.len()).flat_map(files) {
        assert_eq!(fs::read_to_string(cluster.path("fs").join(&name)).unwrap(), name);
    }
    for number in 0..3 {
        cluster.stop(&format!("master{number}"));
        cluster.start(&format!("master{number}"));
        cluster.masters_agree();
    }
    assert_eq!(fs::read_dir(cluster.path("fs")).unwrap().count(), more + FILES * (OF_SNAPSHOTS.len() + 1));
}

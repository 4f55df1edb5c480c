//! Blocks of fs-mode mounts that no file has: what a client made that died before it could say so does not stay for
//! ever.

use std::fs::{self, File};
use std::io::Write as _;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, eventually};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

#[test]
fn blocks_that_no_file_has_are_freed_and_no_others() {
    let conf = "[worker]\norphan_block_grace = \"3s\"\n".to_owned();
    let more_mounts = vec!["second"];
    // Nobody goes on for a client that dies.
    let supervised = false;
    let options = Options { workers: 2, more_mounts, conf, failpoints: true, supervised, ..Options::default() };
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    let there = cluster.at_start.fuse[1].mount_point.join("fs");
    fs::write(there.join("kept"), vec![b'k'; 5 * MIB]).unwrap();
    let metric = |name: &str| -> u64 {
        cluster.status().workers.iter().map(|worker| worker.metric(&format!("cavern_worker_{name}")).unwrap()).sum()
    };
    let data_bytes = || metric("data_bytes");
    let kept = data_bytes();

    cluster.arm(Failpoint::CommitBegun, 1);
    // A commit begins at the latest when two blocks have been written.
    let mut lost = File::create(cluster.path("fs/lost")).unwrap();
    assert!(lost.write_all(&[b'l'; 2 * MIB]).and_then(|()| lost.sync_all()).is_err());
    assert!(cluster.has_died_at(Failpoint::CommitBegun));
    // Usually both; one where something else, a worker that was given up, made it commit before.
    let made = (data_bytes() - kept).div_ceil(MIB as u64);
    assert!((1..=2).contains(&made), "{made} blocks were made");
    eventually("what no file has is freed", PATIENCE, || (metric("orphan_blocks_total") == made).then_some(()));
    assert_eq!(data_bytes(), kept);
    assert!(fs::read(there.join("kept")).unwrap() == vec![b'k'; 5 * MIB]);
    assert_eq!(fs::read(there.join("lost")).unwrap(), b"");
}

//! What a master knows after a restart.

use std::sync::Arc;

use cavern_conf::{ByteSize, Config, Interval};
use cavern_consensus::ConsensusError;
use cavern_state::StateError;
use cavern_work::WorkError;
use cavern_work::listing::CheckReason;

use super::harness::{NoWorkers, TestMaster, eventually, name, new_bucket};
use crate::error::MasterError;

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_there_after_restarts_with_and_without_snapshots() {
    let mut config = Config::default();
    // So little that there are several snapshots and purges.
    config.master.snapshot_after = ByteSize::kib(1);
    config.master.log_retention = Interval::millis(0);
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let mut master = TestMaster::with(config, dir, Arc::new(NoWorkers)).await.unwrap();
    let (bucket, uri) = new_bucket();
    let mut expected = Vec::new();
    for round in 0..4 {
        bucket.put(&format!("dir{round}/file"), "1");
        bucket.put("same", format!("{round}"));
        let path = format!("/m{round}");
        let mount = master.mount(&path, &uri).await;
        master.indexed(&mount).await;
        for _ in 0..4 {
            master.refresh("/").await;
        }
        expected.push(mount);
        let before = master.tree("/").await;
        let cluster = master.services().cluster_id.clone();
        master = master.restart().await;
        assert_eq!(master.services().cluster_id, cluster);
        assert_eq!(master.tree("/").await, before);
        assert_eq!(master.services().mounts.table().unwrap().1, expected);
    }
    // One snapshot, a directory and its description; another one may be in the making.
    let snapshots = master.dir.path().join("master/snapshots");
    eventually(|| async { std::fs::read_dir(&snapshots).unwrap().count() == 2 }).await;
    let new = master.services().lookups.resolve("/m0/same").await.unwrap().attr.unwrap().inode;
    bucket.put("same", "changed");
    let parent = master.services().lookups.resolve("/m0").await.unwrap().attr.unwrap().inode;
    let newer = master
        .services()
        .lookups
        .revalidate(parent, &name("same"), CheckReason::Unknown)
        .await
        .unwrap()
        .attr
        .unwrap()
        .inode;
    assert!(newer > new, "inode ids are never given out twice");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_master_on_the_same_directory_is_refused() {
    let master = TestMaster::new().await;
    let second = TestMaster::with(Config::default(), master.dir.clone(), Arc::new(NoWorkers)).await;
    let error = second.err().expect("the directory is in use");
    let in_use =
        matches!(&error, MasterError::Work(WorkError::Consensus(ConsensusError::State(StateError::DataDirInUse(_)))));
    assert!(in_use, "{error}");
    assert!(error.to_string().contains("master.data_dir"));
    let master = master.restart().await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_on_disk_in_no_file_but_as_ciphertext() {
    let master = TestMaster::new().await;
    let secret = "correct-horse-battery-staple";
    let mut mount = super::harness::mount_request("/s", "s3://bucket");
    mount.options.insert("s3.credentials.secret".into(), secret.into());
    let sealed = master.services().mounts.seal(mount).unwrap();
    master.attach(sealed).await;
    assert_eq!(master.services().mounts.table().unwrap().1[0].options["s3.credentials.secret"], secret);
    let dir = master.dir.clone();
    master.stop().await;
    let mut waiting = vec![dir.path().to_owned()];
    let mut files = 0;
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            waiting.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            files += 1;
            let bytes = std::fs::read(&path).unwrap();
            assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{}", path.display());
        }
    }
    assert!(files > 3);
}

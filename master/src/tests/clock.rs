//! The clock of the host is set, between two runs of a master and while one runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cavern_conf::Config;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, SetTtl, TtlAction};
use cavern_work::listing::CheckReason;

use super::harness::{HostClock, NoWorkers, TestMaster, eventually, name, new_bucket};
use super::persist::bench::Fixture;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_to_a_bucket_shows_after_the_clock_was_set_back_across_a_restart() {
    let host = HostClock::default();
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::at(Config::default(), dir, Arc::new(NoWorkers), host.clock()).await.unwrap();
    let (bucket, uri) = new_bucket();
    bucket.put("old", "1");
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    assert_eq!(master.tree("/m").await.len(), 1);
    let seq_before = master.services().watch.seq();
    host.set_by_hours(-1);
    let master = master.restart_at(host.clock()).await;
    assert!(master.services().watch.seq() > seq_before, "numbers of events and sessions are given out once");

    let size = async |file: &str| {
        let written = master.services().lookups.revalidate(mount.root_inode, &name(file), CheckReason::Written).await;
        written.map(|entry| entry.attr.unwrap().size)
    };
    bucket.put("new", "22");
    assert_eq!(size("new").await.unwrap(), 2);
    bucket.put("old", "333");
    assert_eq!(size("old").await.unwrap(), 3);
    assert!(bucket.delete("old"));
    assert!(size("old").await.unwrap_err().is_not_found());
    assert_eq!(master.tree("/m").await.into_keys().collect::<Vec<_>>(), ["new"]);
    let age = master.services().lookups.resolve("/m").await.unwrap().listing_age_ms;
    assert!((0..3_600_000).contains(&age), "{age} ms");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_learns_of_changes_without_delay_when_the_clock_was_set_back_across_a_restart() {
    let host = HostClock::default();
    let mut bench = Fixture::new().await;
    bench.fake.is_away.store(1, Ordering::Release);
    let file = bench.create(bench.root, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    host.set_by_hours(-1);
    bench.restart_at(host.clock()).await;
    bench.fake.is_away.store(0, Ordering::Release);
    bench.check().await;
    // And of later ones, by the clock that has been set back.
    bench.remove(bench.root, "f", false).await;
    bench.check().await;
    assert!(bench.bucket.keys().is_empty());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_file_expires_because_the_clock_was_set_forward_while_the_master_runs() {
    let host = HostClock::default();
    let mut bench = Fixture::idle().await;
    bench.restart_at(host.clock()).await;
    let rule = |inode, seconds| SetTtl { inode, seconds, action: TtlAction::Delete as i32 };
    let day = bench.create(bench.root, "day", Kind::Directory).await;
    let kept = bench.create(day, "kept", Kind::File).await;
    host.set_by_hours(48);
    let moment = bench.create(bench.root, "moment", Kind::Directory).await;
    let gone = bench.create(moment, "gone", Kind::File).await;
    for (directory, seconds) in [(day, 86_400), (moment, 1)] {
        assert_eq!(bench.change(Change::SetTtl(rule(directory, seconds))).await, directory);
    }
    let is_named = async |inode: u64| {
        let read = bench.master().services().lookups.reader.read(move |tables| Ok(tables.inode(inode)?));
        read.await.unwrap().is_some_and(|record| !record.unlinked)
    };
    // What a new rule governs is looked at along with what all others do.
    eventually(|| async { !is_named(gone).await }).await;
    assert!(is_named(kept).await);
    bench.end().await;
}

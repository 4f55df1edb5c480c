//! Mounts that go: with all that was acknowledged, or not at all.

use std::time::Duration;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, LinkInode};
use cavern_proto::record::RemoveMount;
use cavern_proto::record::command::Command;
use cavern_state::{Family, Outcome};
use cavern_work::mounts::changes::DetachPolicy;

use super::bench::Fixture;
use crate::tests::harness::{eventually, name};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_changed_while_a_mount_goes_is_in_the_bucket_or_refused() {
    for delay in [0, 1, 2, 4, 8] {
        let mut bench = Fixture::new().await;
        let root = bench.root;
        bench.create(root, "first", Kind::File).await;
        bench.settled().await;
        let services = bench.master().services().clone();
        let going = tokio::spawn(async move { services.unmount_bucket("/m", DetachPolicy::Keep).await });
        tokio::time::sleep(Duration::from_millis(delay)).await;
        let made = bench.create(root, "second", Kind::File).await;
        let removed = bench.remove(root, "first", false).await;
        going.await.unwrap().unwrap();
        assert_eq!(bench.bucket.object("top/second").is_some(), made != 0, "after {delay} ms");
        // What is removed is answered with the inode, too.
        assert!(removed == 0 || bench.bucket.object("top/first").is_none(), "after {delay} ms");
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_was_changed_since_it_was_looked_at_stays() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let file = bench.create(root, "f", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    bench.settled().await;
    let services = bench.master().services().clone();
    let mount_id = services.mounts.table().unwrap().1[0].id;
    let change = services.lookups.reader.read(|tables| Ok(tables.counters()?.change)).await.unwrap();
    bench.create(root, "g", Kind::File).await;
    bench.settled().await;
    let remove = |change| Command::RemoveMount(RemoveMount { mount_id, change, discard: false });
    assert_eq!(services.proposer.propose(remove(change)).await.unwrap(), Outcome::OutOfDate);

    // So it does while a session holds a file of it.
    bench.change(Change::AddOpenRef(file)).await;
    let refused = services.unmount_bucket("/m", DetachPolicy::Keep).await.unwrap_err().to_string();
    assert!(
        refused.contains("/m has open files that have been written to (1)") && refused.contains("--discard"),
        "{refused}"
    );
    assert_ne!(bench.create(root, "h", Kind::File).await, 0, "it is as it was");
    bench.change(Change::DropOpenRef(file)).await;
    services.unmount_bucket("/m", DetachPolicy::Keep).await.unwrap();
    assert_eq!(bench.bucket.keys(), ["top/f", "top/g", "top/h"]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn links_of_a_mount_go_with_it() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let directory = bench.create(root, "d", Kind::Directory).await;
    let file = bench.create(directory, "f", Kind::File).await;
    for (parent, text) in [(root, "g"), (directory, "h"), (root, "i")] {
        bench.change(Change::Link(LinkInode { inode: file, parent, name: name(text) })).await;
    }
    bench.settled().await;
    let services = bench.master().services().clone();
    services.unmount_bucket("/m", DetachPolicy::Keep).await.unwrap();
    let left = || async {
        let read = services.lookups.reader.read(|tables| {
            Ok((tables.keys(Family::Inode).count(), tables.keys(Family::Link).count(), tables.counters()?.inodes))
        });
        read.await.unwrap()
    };
    // The root of the namespace.
    eventually(|| async { left().await.0 == 1 }).await;
    assert_eq!(left().await, (1, 0, 1));
    bench.end().await;
}

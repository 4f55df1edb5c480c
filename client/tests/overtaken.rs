//! Answers that others' changes overtake: what was true when it was asked for is not believed when that comes later.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{AttributeChange, BucketDefaults, CachedLookup, Client, NewFile};
use cavern_proto::master::SetAttr;
use support::master::MOUNT_ROOT;
use support::{FakeMaster, config, connect, until};

/// Nothing ends trust in what is cached.
const LEASE: Duration = Duration::from_secs(600);

/// Another client changes this inode with the next change that is asked for, which is answered when that is known here.
fn change_first(master: &FakeMaster, inode: u64) {
    master.mutations(|mutations| (mutations.meanwhile, mutations.after_events) = (Some(inode), true));
}

fn is_hit(client: &Client, inode: u64) -> bool {
    let found = client.metadata().cached_lookup(MOUNT_ROOT, b"f");
    matches!(found, CachedLookup::Hit(node) if node.inode == inode)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_was_replaced_while_its_name_was_asked_for_is_not_kept() {
    let master = FakeMaster::start("replaced-meanwhile").await;
    master.set_lease(LEASE);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    master.put_file(MOUNT_ROOT, "f", "first", 5);
    let first = metadata.resolve("/m/f").await.unwrap();
    let second = master.put_file_unannounced(MOUNT_ROOT, "f", "second", 6);
    let release = master.hold_name();
    let asking = tokio::spawn({
        let (metadata, first) = (metadata.clone(), Arc::clone(&first));
        async move { metadata.current(&first).await }
    });
    until("the master has looked", || master.count("Revalidate") == 1).await;
    let third = master.put_file(MOUNT_ROOT, "f", "third", 7);
    master.settled().await;
    drop(release);
    assert_eq!(asking.await.unwrap().unwrap().inode, second, "so it was when that was asked");
    assert!(!is_hit(&client, second));
    let found = metadata.lookup(MOUNT_ROOT, b"f").await.unwrap();
    assert_eq!((found.inode, is_hit(&client, third)), (third, true));
    // What nothing has overtaken is kept, though its name leads elsewhere by now.
    let fourth = master.put_file_unannounced(MOUNT_ROOT, "f", "fourth", 8);
    assert_eq!(metadata.current(&found).await.unwrap().inode, fourth);
    assert!(is_hit(&client, fourth));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_write_to_a_file_that_is_being_emptied_is_asked_for() {
    let master = FakeMaster::start("emptied-meanwhile").await;
    master.fs_mode();
    let inode = master.put_block(MOUNT_ROOT, "f", 1, 10);
    master.keep_extents(inode);
    let client = connect(&config(&master)).await;
    let node = client.metadata().resolve("/m/f").await.unwrap();
    let file = client.open_to_read(&node).await.unwrap();
    change_first(&master, inode);
    let set = SetAttr { inode, size: Some(0), ..SetAttr::default() };
    let defaults = &BucketDefaults { uid: 0, gid: 0, file_mode: 0o644, dir_mode: 0o755 };
    let change = AttributeChange { set, uid: 0, gid: 0, writer: None, thread: 0, user: None, defaults };
    let _ = client.set_attributes(&node, change).await.unwrap();
    assert_eq!(master.count("GetLayout"), 0);
    file.size().await.unwrap();
    assert_eq!(master.count("GetLayout"), 1);
    drop(file);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_write_to_a_new_file_before_it_is_open_here_is_asked_for() {
    let master = FakeMaster::start("written-before").await;
    master.fs_mode();
    let client = connect(&config(&master)).await;
    let directory = client.metadata().resolve("/m").await.unwrap();
    let last = master.put_file(MOUNT_ROOT, "before", "", 0);
    let new =
        |name| NewFile { name, mode: 0o644, umask: 0o022, uid: 0, gid: 0, is_exclusive: true, thread: 0, user: None };
    let alone = client.create(&directory, new(b"alone")).await.unwrap();
    assert_eq!((alone.node.inode, alone.file.size().await.unwrap()), (last + 1, 0));
    assert_eq!(master.count("GetLayout"), 0);
    change_first(&master, last + 2);
    let written = client.create(&directory, new(b"written")).await.unwrap();
    written.file.size().await.unwrap();
    assert_eq!((written.node.inode, master.count("GetLayout")), (last + 2, 1));
    drop((alone, written));
    client.shutdown().await;
}

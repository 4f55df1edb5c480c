//! A client whose master stops to lead while another one does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;

use cavern_client::{Changed, Client, ClientError};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind};
use support::master::MOUNT_ROOT;
use support::{FakeMaster, connect, patient, until};

enum Configured {
    Both,
    /// The other one becomes known when the first one names it.
    First,
}

/// A client, and two masters of which the first one leads.
async fn started(name: &str, configured: Configured) -> (FakeMaster, FakeMaster, Arc<Client>) {
    let old = FakeMaster::start(name).await;
    old.fs_mode();
    let new = old.follower().await;
    let mut config = patient(&old);
    if matches!(configured, Configured::Both) {
        config.cluster.masters.push(new.address());
    }
    let client = connect(&config).await;
    client.metadata().resolve("/m").await.unwrap();
    (old, new, client)
}

async fn create(client: &Client, name: &str) -> Result<Changed, ClientError> {
    let name = name.to_owned().into();
    let create = CreateInode { parent: MOUNT_ROOT, name, kind: Kind::File.into(), mode: 0o640, ..Default::default() };
    client.metadata().change(Change::Create(create), 1, 1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_follows_a_lead_that_is_handed_over() {
    let (old, new, client) = started("handed-over", Configured::First).await;
    let made = create(&client, "a").await.unwrap();
    let resets = client.stats().watch_resets.get();
    old.follow(Some(&new));
    new.lead();
    until("the session goes on at the new one", || client.stats().watch_resets.get() > resets).await;
    assert_eq!(client.master().stubs().address(), new.address());
    let next = create(&client, "b").await.unwrap();
    assert_eq!((next.session, made.session), (made.session, made.session));
    assert_eq!(client.metadata().lookup(MOUNT_ROOT, b"b").await.unwrap().inode, next.result.inode);
    assert_eq!(old.mutations(|mutations| mutations.made), 2);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_leaves_a_master_that_hangs() {
    let (old, new, client) = started("left", Configured::Both).await;
    let made = create(&client, "a").await.unwrap();
    let resets = client.stats().watch_resets.get();
    old.hang(true);
    let election = async {
        new.follow(None);
        until("the change is sent", || old.count("Mutate") == 2).await;
        new.lead();
    };
    // Neither waits for the old one: its connection does not break.
    let (next, ()) = tokio::join!(create(&client, "b"), election);
    let next = next.unwrap();
    until("the session goes on at the new one", || client.stats().watch_resets.get() > resets).await;
    assert_eq!(next.session, made.session);
    assert_eq!(old.mutations(|mutations| mutations.made), 2, "once");
    // What the old one says when it goes on, nobody hears.
    old.follow(Some(&new));
    old.hang(false);
    assert_eq!(client.metadata().lookup(MOUNT_ROOT, b"b").await.unwrap().inode, next.result.inode);
    assert_eq!(client.stats().watch_resets.get(), resets + 1);
    client.shutdown().await;
}

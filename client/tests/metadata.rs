//! Names and attributes against a master that changes, ages, hangs and dies.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_client::{CachedLookup, ClientError, InvalidationSink};
use cavern_net::master::RetryPolicy;
use cavern_proto::master::Consistency;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use support::master::{MOUNT_ROOT, ROOT};
use support::{FakeMaster, config, connect, connect_with, until};
use tonic::Status;

/// Longer than whatever else ends trust.
const LONG_LEASE: Duration = Duration::from_secs(600);
/// One that can be waited for.
const SHORT_LEASE: Duration = Duration::from_secs(3);

fn is_hit(lookup: &CachedLookup, inode: u64) -> bool {
    matches!(lookup, CachedLookup::Hit(node) if node.inode == inode)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_asked_once_is_cached_absent_names_included() {
    let master = FakeMaster::start("cached").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    master.set_lease(LONG_LEASE);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    assert!(matches!(metadata.cached_lookup(MOUNT_ROOT, b"a"), CachedLookup::Miss));
    let node = metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    assert_eq!((node.inode, node.size, node.key(), node.etag()), (inode, 5, "a".to_owned(), "e1".to_owned()));
    assert!(is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), inode));
    assert_eq!(metadata.cached_node(inode).unwrap().inode, inode);
    for _ in 0..3 {
        let missing = metadata.lookup(MOUNT_ROOT, b"zz").await;
        assert!(matches!(missing, Err(ClientError::NotFound(_))), "{missing:?}");
    }
    assert!(matches!(metadata.cached_lookup(MOUNT_ROOT, b"zz"), CachedLookup::Negative));
    assert_eq!(master.count("Lookup"), 2);
    assert_eq!(metadata.trust(&node), Duration::from_secs(30));
    let errors = [
        metadata.lookup(MOUNT_ROOT, &[b'x'; 256]).await.unwrap_err().errno(),
        metadata.lookup(MOUNT_ROOT, b"a/b").await.unwrap_err().errno(),
        metadata.node(999).await.unwrap_err().errno(),
        metadata.resolve("/m/none").await.unwrap_err().errno(),
        metadata.resolve("m").await.unwrap_err().errno(),
    ];
    let expected = [36, 22, 116, 2, 22];
    assert_eq!(errors, expected);
    assert_eq!(metadata.resolve("/m/a").await.unwrap().inode, inode);
    assert_eq!(metadata.resolve("/").await.unwrap().inode, ROOT);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn simultaneous_lookups_ask_once() {
    let master = FakeMaster::start("flight").await;
    master.put_file(MOUNT_ROOT, "a", "e", 5);
    let client = connect(&config(&master)).await;
    let lookups = (0..50).map(|_| client.metadata().lookup(MOUNT_ROOT, b"a"));
    let answers = futures::future::join_all(lookups).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(master.count("Lookup"), 1);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_comes_in_pages_and_leaves_its_entries_in_the_cache() {
    let master = FakeMaster::start("pages").await;
    let names: Vec<String> = (0..10_000).map(|number| format!("{number:05}")).collect();
    for name in &names {
        master.put_file(MOUNT_ROOT, name, "e", 1);
    }
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    let (mut seen, mut after) = (Vec::new(), Vec::new());
    loop {
        let page = metadata.read_dir(MOUNT_ROOT, &after, 300).await.unwrap();
        assert!(page.entries.len() <= 300);
        seen.extend(page.entries.iter().map(|node| String::from_utf8(node.name.to_vec()).unwrap()));
        after = page.entries.last().map(|node| node.name.to_vec()).unwrap_or_default();
        if page.end {
            break;
        }
    }
    assert_eq!(seen, names);
    assert_eq!(master.count("ReadDir"), 3);
    let cached = metadata.cached_dir_page(MOUNT_ROOT, b"00499", 10).unwrap();
    assert_eq!(&*cached.entries[0].name, b"00500");
    assert_eq!(cached.entries[0].key(), "00500");
    assert!(!cached.end);
    assert!(metadata.cached_dir_page(MOUNT_ROOT, b"09998", 10).unwrap().end);
    for name in &names {
        assert!(matches!(metadata.cached_lookup(MOUNT_ROOT, name.as_bytes()), CachedLookup::Hit(_)));
    }
    assert_eq!((master.count("Lookup"), master.count("ReadDir")), (0, 3));
    // One name changes: the listing is read anew, and has it.
    master.put_file(MOUNT_ROOT, "00000a", "e", 1);
    until("the listing is dropped", || metadata.cached_dir_page(MOUNT_ROOT, b"", 10).is_none()).await;
    master.settled().await;
    let page = metadata.read_dir(MOUNT_ROOT, b"00000", 1).await.unwrap();
    assert_eq!(&*page.entries[0].name, b"00000a");
    let empty = master.put_directory(MOUNT_ROOT, "empty");
    let page = metadata.read_dir(empty, b"", 10).await.unwrap();
    assert!(page.end && page.entries.is_empty());
    let gone = metadata.read_dir(999_999, b"", 10).await;
    assert!(matches!(gone, Err(ClientError::Stale(_))), "{gone:?}");
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_breaks_off_does_not_end_there() {
    let master = FakeMaster::start("broken").await;
    master.put_file(MOUNT_ROOT, "a", "e", 1);
    master.fail_listings(Status::not_found("the bucket is gone"));
    let client = connect(&config(&master)).await;
    // Whoever reads a directory takes ENOENT for its end.
    let broken = client.metadata().read_dir(MOUNT_ROOT, b"", 10).await.unwrap_err();
    assert!(matches!(&broken, ClientError::Stale(message) if message.contains("bucket is gone")), "{broken:?}");
    client.shutdown().await;
}

#[derive(Default)]
struct Recording {
    events: Mutex<Vec<String>>,
    /// Nothing passes a barrier while this is true.
    stuck: tokio::sync::watch::Sender<bool>,
    referred: Mutex<Vec<u64>>,
}

impl InvalidationSink for Recording {
    fn entry(&self, parent: u64, name: &[u8], old: u64, new: u64, _kept: bool) {
        self.events.lock().push(format!("{parent}/{} {old}>{new}", String::from_utf8_lossy(name)));
    }
    fn inode(&self, inode: u64) {
        self.events.lock().push(format!("inode {inode}"));
    }
    fn reset(&self) {
        self.events.lock().push("reset".to_owned());
    }
    fn resumed(&self) {
        self.events.lock().push("resumed".to_owned());
    }
    fn referred(&self, inodes: Vec<u64>) -> BoxFuture<'static, Vec<u64>> {
        let referred = self.referred.lock();
        let known = inodes.into_iter().filter(|inode| referred.contains(inode)).collect();
        Box::pin(std::future::ready(known))
    }
    fn invalidated(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
    fn barrier(&self) -> BoxFuture<'static, ()> {
        let mut stuck = self.stuck.subscribe();
        Box::pin(async move {
            let _over = stuck.wait_for(|stuck| !stuck).await;
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_object_is_another_inode_and_is_acknowledged_after_it_was_passed_on() {
    let master = FakeMaster::start("replaced").await;
    master.set_lease(SHORT_LEASE);
    let old = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let sink = Arc::new(Recording::default());
    let client = connect_with(&config(&master), sink.clone()).await;
    let metadata = client.metadata();
    let node = metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    master.settled().await;
    sink.stuck.send_replace(true);
    let new = master.put_file(MOUNT_ROOT, "a", "e2", 6);
    let changed = format!("{MOUNT_ROOT}/a {old}>{new}");
    until("the sink has heard", || sink.events.lock().last() == Some(&changed)).await;
    assert_eq!(sink.events.lock()[0], "reset");
    let replaced = master.seq();
    assert!(master.acknowledged() < replaced, "not before the barrier");
    assert_eq!(metadata.trust(&node), Duration::ZERO, "the old node is out of date");
    // What the kernel waits for may wait for a later event.
    let begun = Instant::now();
    master.put_file(MOUNT_ROOT, "b", "e1", 5);
    until("later events are taken in", || sink.events.lock().iter().any(|event| event.contains("/b "))).await;
    until("the client has let go", || master.invalidated() == master.seq()).await;
    assert!(begun.elapsed() < SHORT_LEASE / 2, "{:?}", begun.elapsed());
    tokio::time::sleep(SHORT_LEASE * 4 / 3).await;
    assert!(!metadata.has_lapsed(), "signs of life go on");
    assert!(master.acknowledged() < replaced, "they acknowledge nothing that was not passed on");
    sink.stuck.send_replace(false);
    master.settled().await;
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, new);
    assert!(matches!(metadata.node(old).await, Err(ClientError::Stale(_))));
    assert_eq!(metadata.current(&node).await.unwrap().inode, new);
    master.remove(MOUNT_ROOT, "a");
    until("the name is forgotten", || matches!(metadata.cached_lookup(MOUNT_ROOT, b"a"), CachedLookup::Miss)).await;
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap_err().errno(), 2);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_goes_on_acknowledges_only_what_was_passed_on_of_the_one_before() {
    let master = FakeMaster::start("going-on").await;
    master.set_lease(LONG_LEASE);
    master.resume_streams();
    let old = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let sink = Arc::new(Recording::default());
    let client = connect_with(&config(&master), sink.clone()).await;
    master.settled().await;
    let has_heard = |what: &str| sink.events.lock().iter().any(|event| event == what);
    sink.stuck.send_replace(true);
    let new = master.put_file(MOUNT_ROOT, "a", "e2", 6);
    let changed = format!("{MOUNT_ROOT}/a {old}>{new}");
    until("the sink has heard", || has_heard(&changed)).await;
    let replaced = master.seq();
    master.kill();
    master.restart().await;
    until("the stream goes on", || has_heard("resumed")).await;
    master.put_file(MOUNT_ROOT, "b", "e1", 5);
    until("the client has let go", || master.invalidated() == master.seq()).await;
    assert!(master.acknowledged() < replaced, "not before the barrier");
    sink.stuck.send_replace(false);
    master.settled().await;
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_listing_is_renewed_first_an_ageing_one_in_the_background() {
    let master = FakeMaster::start("ageing").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e", 5);
    master.set_age(MOUNT_ROOT, 61_000);
    master.set_lease(LONG_LEASE);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    assert_eq!(master.count("Touch"), 1, "the first answer said that the listing is too old");
    assert!(is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), inode));
    assert_eq!(master.count("Touch"), 1);

    // Another directory, past half of its time: served at once, renewed behind the scenes.
    let ageing = master.put_directory(MOUNT_ROOT, "d");
    let file = master.put_file(ageing, "f", "e", 1);
    master.settled().await;
    master.set_age(ageing, 40_000);
    let held = master.hold_touches().await;
    metadata.lookup(ageing, b"f").await.unwrap();
    assert_eq!(master.count("Touch"), 1);
    assert!(is_hit(&metadata.cached_lookup(ageing, b"f"), file));
    drop(held);
    until("the listing is renewed", || master.count("Touch") == 2).await;
    until("its age is known", || metadata.trust_absence(ageing) > Duration::from_secs(25)).await;

    // A bucket that gives no new listing is waited for once, then the old one is served at once.
    let slow = master.put_directory(MOUNT_ROOT, "s");
    let file = master.put_file(slow, "f", "e", 1);
    master.settled().await;
    master.set_age_after_refresh(None);
    master.set_age(slow, 90_000);
    metadata.lookup(slow, b"f").await.unwrap();
    assert_eq!(master.count("Touch"), 3);
    assert!(is_hit(&metadata.cached_lookup(slow, b"f"), file));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consistency_never_trusts_any_age() {
    let master = FakeMaster::start("never").await;
    master.configure(|mount| mount.consistency = Consistency::Never.into());
    let inode = master.put_file(MOUNT_ROOT, "a", "e", 5);
    master.set_age(MOUNT_ROOT, 1_000_000_000);
    master.set_lease(LONG_LEASE);
    let client = connect(&config(&master)).await;
    let node = client.metadata().lookup(MOUNT_ROOT, b"a").await.unwrap();
    assert!(is_hit(&client.metadata().cached_lookup(MOUNT_ROOT, b"a"), inode));
    // As long as the lease lasts at least; never longer.
    let trust = client.metadata().trust(&node);
    assert!(trust > LONG_LEASE / 2 && trust <= LONG_LEASE, "{trust:?}");
    assert_eq!(master.count("Touch"), 0);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_trusted_for_longer_than_the_lease_lasts() {
    let master = FakeMaster::start("trust").await;
    master.set_lease(SHORT_LEASE);
    master.configure(|mount| mount.consistency = Consistency::Never.into());
    let inode = master.put_file(MOUNT_ROOT, "a", "e", 5);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    for _ in 0..20 {
        let node = metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
        assert_eq!(node.inode, inode);
        for trust in [metadata.trust(&node), metadata.trust_absence(MOUNT_ROOT)] {
            assert!(trust <= SHORT_LEASE, "{trust:?}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_master_says_that_hears_nothing_proves_nothing() {
    let master = FakeMaster::start("deaf").await;
    master.set_lease(SHORT_LEASE);
    master.configure(|mount| mount.consistency = Consistency::Never.into());
    let before = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, before);
    assert!(is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), before));
    let resets = client.stats().watch_resets.get();
    master.deafen(true);
    let after = master.put_file_unannounced(MOUNT_ROOT, "a", "e2", 6);
    assert!(is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), before));
    // Its ticks go on.
    until("the lease is over", || metadata.has_lapsed()).await;
    assert!(!is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), before));
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, after);
    master.deafen(false);
    until("the lease goes on", || !metadata.has_lapsed()).await;
    assert_eq!(client.stats().watch_resets.get(), resets, "the session is the same");
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_the_masters_only_when_nobody_answers() {
    let master = FakeMaster::start("silence").await;
    // Over long before it is known that nobody answers.
    master.set_lease(Duration::from_millis(500));
    master.configure(|mount| mount.consistency = Consistency::Never.into());
    let before = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    // So short a lease may lapse in between, on a busy machine.
    while !is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), before) {
        assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, before);
    }
    let after = master.put_file_unannounced(MOUNT_ROOT, "a", "e2", 6);
    // As a process finds it that goes on after it was stopped: all deadlines are past, and no event has arrived.
    master.hang(true);
    until("the lease is over", || metadata.has_lapsed()).await;
    assert!(!is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), before));
    master.hang(false);
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, after);
    // Where nobody answers, what is cached is served without waiting for anybody's deadline.
    master.kill();
    until("nobody answers", || client.master().is_silent()).await;
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, after);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_master_leaves_the_cache_usable_and_its_return_clears_it() {
    let master = FakeMaster::start("dead").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let unlisted = master.put_directory(MOUNT_ROOT, "d");
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    let node = metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    metadata.read_dir(MOUNT_ROOT, b"", 10).await.unwrap();
    master.kill();
    let started = Instant::now();
    let error = metadata.lookup(unlisted, b"b").await.unwrap_err();
    assert_eq!(error.errno(), 5, "{error}");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    let started = Instant::now();
    for _ in 0..100 {
        assert_eq!(metadata.lookup(MOUNT_ROOT, b"b").await.unwrap_err().errno(), 2, "the listing is whole");
        assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, inode);
        assert!(is_hit(&metadata.cached_lookup(MOUNT_ROOT, b"a"), inode));
        assert_eq!(metadata.read_dir(MOUNT_ROOT, b"", 10).await.unwrap().entries.len(), 2);
    }
    // One that waited would do so for `client.metadata_timeout`.
    assert!(started.elapsed() < Duration::from_millis(1500), "the breaker is open: {:?}", started.elapsed());
    assert!(metadata.trust(&node) <= Duration::from_secs(1));
    let resets = client.stats().watch_resets.get();
    let replaced = master.put_file(MOUNT_ROOT, "a", "e2", 6);
    master.restart().await;
    until("the session begins anew", || client.stats().watch_resets.get() > resets).await;
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, replaced);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_nothing_cached_waits_for_a_master_that_restarts() {
    let master = FakeMaster::start("awaited").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let mut config = config(&master);
    config.client.metadata_timeout = cavern_conf::Interval::millis(30_000);
    let client = connect(&config).await;
    let metadata = client.metadata();
    let known = metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    let directory = master.put_directory(MOUNT_ROOT, "d");
    let file = master.put_file(directory, "f", "e1", 5);
    master.settled().await;
    master.kill();
    // It is known that nobody answers.
    let deadline = tokio::time::Instant::now() + Duration::from_millis(300);
    let asked = client.master().call_as("Status", RetryPolicy::UntilDeadline, deadline, |mut stubs| async move {
        stubs.cluster.status(cavern_proto::master::StatusRequest::default()).await
    });
    assert!(asked.await.is_err());
    until("nobody answers", || client.master().is_silent()).await;
    let answers = async {
        futures::join!(
            metadata.lookup(directory, b"f"),
            metadata.lookup(directory, b"none"),
            metadata.node(directory),
            metadata.resolve("/m/d/f"),
            metadata.read_dir(directory, b"", 10),
            metadata.current(&known),
        )
    };
    let (answers, ()) = futures::join!(answers, async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        master.restart().await;
    });
    assert_eq!((answers.0.unwrap().inode, answers.1.unwrap_err().errno()), (file, 2));
    assert_eq!((answers.2.unwrap().inode, answers.3.unwrap().inode), (directory, file));
    assert_eq!((answers.4.unwrap().entries.len(), answers.5.unwrap().inode), (1, inode));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_below_a_listing_that_stays_old_is_asked_for_twice_at_most() {
    let master = FakeMaster::start("older").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e", 5);
    master.set_age(MOUNT_ROOT, 61_000);
    master.set_age_after_refresh(None);
    let client = connect(&config(&master)).await;
    let resolved = tokio::time::timeout(Duration::from_secs(30), client.metadata().resolve("/m/a")).await;
    assert_eq!(resolved.expect("it ends").unwrap().inode, inode);
    assert_eq!((master.count("Touch"), master.count("Resolve")), (1, 2));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_master_keeps_nobody_longer_than_the_deadline() {
    let master = FakeMaster::start("hanging").await;
    master.set_lease(Duration::from_secs(2));
    let inode = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let client = connect(&config(&master)).await;
    let metadata = client.metadata();
    metadata.lookup(MOUNT_ROOT, b"a").await.unwrap();
    master.hang(true);
    let started = Instant::now();
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"b").await.unwrap_err().errno(), 5);
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    // The lease lapses: what is cached is still served, whatever is asked.
    let deadline = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < deadline {
        let started = Instant::now();
        assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, inode);
        assert!(started.elapsed() < Duration::from_millis(1200), "{:?}", started.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    master.hang(false);
    let healed = async {
        while metadata.lookup(MOUNT_ROOT, b"c").await.unwrap_err().errno() != 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), healed).await.expect("it heals by itself");
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_cache_every_lookup_asks() {
    let master = FakeMaster::start("uncached").await;
    let inode = master.put_file(MOUNT_ROOT, "a", "e1", 5);
    let mut config = config(&master);
    config.fuse.client_metadata_cache = false;
    let client = connect(&config).await;
    let metadata = client.metadata();
    for number in 1..=5 {
        assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, inode);
        assert_eq!(metadata.node(inode).await.unwrap().inode, inode);
        assert!(matches!(metadata.cached_lookup(MOUNT_ROOT, b"a"), CachedLookup::Miss));
        assert_eq!(metadata.read_dir(MOUNT_ROOT, b"", 10).await.unwrap().entries.len(), 1);
        assert_eq!(
            (master.count("Lookup"), master.count("GetInode"), master.count("ReadDir")),
            (number, number, number)
        );
    }
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_master_at_all_is_one_clear_error() {
    let master = FakeMaster::start("none").await;
    master.kill();
    let started = Instant::now();
    let error = cavern_client::Client::connect(&config(&master), "test", Arc::new(cavern_client::NoSink)).await;
    let error = error.err().expect("nobody answers").to_string();
    assert!(error.contains(&master.address()) && error.contains("cv master"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(3));
}

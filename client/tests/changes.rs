//! Changes of an fs-mode mount against a master that loses answers, restarts, and ends sessions.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_client::{CachedLookup, Changed, Client, ClientError};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{CreateInode, Kind, RemoveName, RenameName, SetAttr};
use futures::future::join_all;
use rustix::io::Errno;
use support::master::MOUNT_ROOT;
use support::{FakeMaster, config, connect, until};
use tokio_util::sync::CancellationToken;

const EIO: i32 = 5;

fn make(name: &str, kind: Kind) -> Change {
    let name = name.to_owned().into();
    Change::Create(CreateInode { parent: MOUNT_ROOT, name, kind: kind.into(), mode: 0o750, ..CreateInode::default() })
}

async fn started(name: &str) -> (FakeMaster, Arc<Client>) {
    let master = FakeMaster::start(name).await;
    let client = begin(&master).await;
    (master, client)
}

async fn begin(master: &FakeMaster) -> Arc<Client> {
    master.fs_mode();
    let client = connect(&config(master)).await;
    // The directory is known, as it is when a kernel asks for something in it.
    client.metadata().resolve("/m").await.unwrap();
    client
}

async fn create(client: &Client, name: &str) -> Result<Changed, ClientError> {
    client.metadata().change(make(name, Kind::File), 11, 12).await
}

fn cached(client: &Client, name: &str) -> Option<u64> {
    match client.metadata().cached_lookup(MOUNT_ROOT, name.as_bytes()) {
        CachedLookup::Hit(node) => Some(node.inode),
        CachedLookup::Negative => Some(0),
        CachedLookup::Miss => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_that_wait_go_together_under_numbers_without_gaps() {
    let (master, client) = started("together").await;
    let names: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    let made = join_all(names.iter().map(|name| create(&client, name))).await;
    let inodes: Vec<u64> = made.into_iter().map(|made| made.unwrap().result.inode).collect();
    let calls = master.mutations(|mutations| mutations.calls.clone());
    assert!(calls.len() < 100, "{} calls", calls.len());
    let (mut last, mut ends) = (0, vec![0]);
    for call in &calls {
        // Up to two calls before it had no answer yet.
        let answered = ends.iter().rev().take(3).any(|end| *end == call.answered);
        assert!(call.session == calls[0].session && answered, "{call:?} after {ends:?}");
        assert_eq!(call.numbers, (last + 1..=last + call.numbers.len() as u64).collect::<Vec<_>>());
        last = *call.numbers.last().unwrap();
        ends.push(last);
    }
    assert_eq!(last, 300);
    for (name, inode) in names.iter().zip(inodes) {
        assert_eq!(cached(&client, name), Some(inode));
    }
    assert_eq!(master.count("Lookup"), 0);
    client.shutdown().await;
    assert!(matches!(create(&client, "later").await, Err(ClientError::Shutdown)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_leaves_the_caches_as_the_master_has_it() {
    let (master, client) = started("caches").await;
    let metadata = client.metadata();
    let parent = metadata.cached_node(MOUNT_ROOT).unwrap();
    let made = metadata.change(make("a", Kind::Directory), 11, 12).await.unwrap();
    let node = made.node.unwrap();
    assert_eq!((node.uid, node.gid, node.mode, node.is_directory(), node.is_fs_mode()), (11, 12, 0o750, true, true));
    let touched = metadata.cached_node(MOUNT_ROOT).unwrap();
    assert_eq!((touched.mtime_ns, &touched.name), (parent.mtime_ns + 1, &parent.name));
    // A new directory is known to be empty, and whose listing had been read is read anew.
    assert!(metadata.cached_dir_page(node.inode, b"", 10).unwrap().entries.is_empty());
    assert_eq!(metadata.read_dir(MOUNT_ROOT, b"", 10).await.unwrap().entries.len(), 1);
    assert!(metadata.cached_dir_page(MOUNT_ROOT, b"", 10).is_some());

    let set = SetAttr { inode: node.inode, mode: Some(0o700), ..SetAttr::default() };
    let set = metadata.change(Change::SetAttr(set), 0, 0).await.unwrap();
    assert_eq!(set.node.unwrap().mode, 0o700);
    assert_eq!(metadata.cached_node(node.inode).unwrap().mode, 0o700);
    assert_eq!(metadata.cached_dir_page(MOUNT_ROOT, b"", 10).unwrap().entries[0].mode, 0o700);

    let replaced = create(&client, "b").await.unwrap().result.inode;
    let rename = RenameName {
        parent: MOUNT_ROOT,
        name: "a".into(),
        new_parent: MOUNT_ROOT,
        new_name: "b".into(),
        ..RenameName::default()
    };
    metadata.change(Change::Rename(rename), 0, 0).await.unwrap();
    assert_eq!((cached(&client, "a"), cached(&client, "b")), (Some(0), Some(node.inode)));
    assert!(metadata.cached_node(replaced).is_none());
    let listed = metadata.cached_dir_page(MOUNT_ROOT, b"", 10).unwrap();
    let listed: Vec<_> = listed.entries.iter().map(|entry| (&*entry.name, entry.inode)).collect();
    assert_eq!(listed, [(&b"b"[..], node.inode)]);

    let remove = RemoveName { parent: MOUNT_ROOT, name: "b".into(), directory: true };
    metadata.change(Change::Remove(remove.clone()), 0, 0).await.unwrap();
    assert_eq!(cached(&client, "b"), Some(0));
    let again = metadata.change(Change::Remove(remove), 0, 0).await.unwrap_err();
    assert_eq!((again.errno(), master.count("Lookup")), (2, 0));
    let taken = [create(&client, "c").await.map(drop), create(&client, "c").await.map(drop)];
    assert_eq!(taken.map(|taken| taken.map_err(|error| error.errno())), [Ok(()), Err(17)]);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_else_changed_meanwhile_is_not_cached_from_the_answer() {
    let (master, client) = started("meanwhile").await;
    master.mutations(|mutations| mutations.meanwhile = Some(MOUNT_ROOT));
    // The answer may come before the event or after it; either way, the event takes what it is about out.
    create(&client, "a").await.unwrap();
    until("the directory is forgotten", || client.metadata().cached_node(MOUNT_ROOT).is_none()).await;
    assert!(cached(&client, "a").is_some());
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_is_found() {
    let (master, client) = started("taken").await;
    let metadata = client.metadata();
    // The listing tells that neither is there.
    assert!(metadata.read_dir(MOUNT_ROOT, b"", 10).await.unwrap().entries.is_empty());
    assert_eq!((cached(&client, "a"), cached(&client, "b")), (Some(0), Some(0)));
    // Its event is late.
    let inode = master.put_file_unannounced(MOUNT_ROOT, "a", "", 0);
    assert_eq!(create(&client, "a").await.unwrap_err().errno(), Errno::EXIST.raw_os_error());
    assert_eq!(cached(&client, "a"), None);
    assert_eq!(metadata.lookup(MOUNT_ROOT, b"a").await.unwrap().inode, inode);
    assert_eq!(cached(&client, "b"), Some(0));
    // What is known is not asked for again.
    assert_eq!(create(&client, "a").await.unwrap_err().errno(), Errno::EXIST.raw_os_error());
    assert_eq!(cached(&client, "a"), Some(inode));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_asked_for_again_and_nothing_is_made_twice() {
    let (master, client) = started("lost").await;
    master.mutations(|mutations| mutations.lose = 3);
    create(&client, "a").await.unwrap();
    create(&client, "b").await.unwrap();
    let (made, numbers) = master.mutations(|mutations| {
        (mutations.made, mutations.calls.iter().flat_map(|call| call.numbers.clone()).collect::<Vec<_>>())
    });
    assert_eq!((made, numbers), (2, vec![1, 1, 1, 1, 2]));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_wait_for_a_master_that_restarts() {
    let (master, client) = started("restart").await;
    create(&client, "a").await.unwrap();
    master.mutations(|mutations| mutations.lose = 1);
    master.kill();
    let (changes, ()) = futures::join!(
        join_all((0..20).map(|number| {
            let client = client.clone();
            async move { create(&client, &format!("n{number}")).await }
        })),
        async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            master.restart().await;
        }
    );
    changes.into_iter().for_each(|change| drop(change.unwrap()));
    assert_eq!(master.mutations(|mutations| mutations.made), 21);
    let sessions = master.mutations(|mutations| mutations.calls.iter().map(|call| call.session).collect::<Vec<_>>());
    assert!(sessions.iter().all(|session| *session == sessions[0]), "{sessions:?}");
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_was_not_made_goes_on_with_the_next_session() {
    let (master, client) = started("refused").await;
    create(&client, "a").await.unwrap();
    master.mutations(|mutations| (mutations.refuse, mutations.end_session) = (1, true));
    create(&client, "b").await.unwrap();
    let calls = master.mutations(|mutations| mutations.calls.clone());
    assert_eq!(calls[1].session, calls[0].session + 2, "the ended one, and the next");
    assert_eq!((calls[1].numbers.clone(), calls[1].answered), (vec![1], 0));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_whose_refusal_comes_after_the_next_session_has_begun_goes_on_in_that() {
    let (master, client) = started("refused-late").await;
    create(&client, "a").await.unwrap();
    master.mutations(|mutations| {
        (mutations.refuse, mutations.end_session) = (1, true);
        mutations.late = Some(Duration::from_millis(300));
    });
    create(&client, "b").await.unwrap();
    assert_eq!(master.mutations(|mutations| mutations.made), 2);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_leaves_its_changes_unknown_and_numbers_begin_anew() {
    let (master, client) = started("ended").await;
    create(&client, "a").await.unwrap();
    master.mutations(|mutations| (mutations.lose, mutations.end_session) = (1, true));
    let lost = create(&client, "b").await.unwrap_err();
    assert!(matches!(lost, ClientError::OutcomeUnknown { .. }), "{lost}");
    assert_eq!(lost.errno(), EIO);
    create(&client, "c").await.unwrap();
    let last = master.mutations(|mutations| mutations.calls.last().cloned().unwrap());
    assert_eq!((last.numbers, last.answered), (vec![1], 0));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_whose_time_is_up_is_made_once_and_the_session_that_makes_it_goes_on() {
    let master = FakeMaster::start("late").await;
    // The session's stream breaks meanwhile.
    master.set_lease(Duration::from_secs(1));
    let client = begin(&master).await;
    create(&client, "a").await.unwrap();
    master.hang(true);
    let began = Instant::now();
    let late = create(&client, "b").await.unwrap_err();
    assert!(matches!(late, ClientError::OutcomeUnknown { .. }), "{late}");
    assert_eq!(late.errno(), EIO);
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    // Nor does one wait for ever that cannot be sent, since those before it have no answer.
    let others = join_all((0..10).map(|number| create_owned(&client, format!("n{number}")))).await;
    assert!(others.iter().all(|other| other.as_ref().is_err_and(|error| error.errno() == EIO)), "{others:?}");
    master.hang(false);
    // Each under another name: one that is late is made as well.
    let attempts = std::sync::atomic::AtomicU32::new(0);
    let made = until_some("a change is made", async || {
        let attempt = attempts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        create(&client, &format!("c{attempt}")).await.ok()
    });
    let made = made.await;
    let (calls, count) = master.mutations(|mutations| (mutations.calls.clone(), mutations.made));
    assert!(calls.iter().all(|call| call.session == calls[0].session), "{calls:?}");
    let last = calls.last().unwrap().numbers.last().copied().unwrap();
    assert_eq!(last, count, "each number was made once: {calls:?}");
    // And the caches know of it.
    let name = format!("c{}", attempts.into_inner() - 1);
    assert_eq!(client.metadata().lookup(MOUNT_ROOT, name.as_bytes()).await.unwrap().inode, made.result.inode);
    client.metadata().lookup(MOUNT_ROOT, b"b").await.unwrap();
    client.shutdown().await;
}

async fn create_owned(client: &Client, name: String) -> Result<Changed, ClientError> {
    create(client, &name).await
}

async fn until_some<T>(what: &str, state: impl AsyncFn() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(value) = state().await {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain until {what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_closed_while_no_master_answered_is_let_go_of_afterwards() {
    let (master, client) = started("closed").await;
    let metadata = client.metadata();
    let node = create(&client, "a").await.unwrap().node.unwrap();
    let kept = metadata.keep_open_cached(&node).unwrap();
    let seq = master.seq();
    master.announce(Event::Unlinked(node.inode));
    until("the removal is acknowledged", || master.acknowledged() > seq).await;
    assert!(master.mutations(|mutations| mutations.held.contains(&node.inode)));
    master.kill();
    drop(kept);
    // Longer than a change waits for the master.
    for name in ["b", "c"] {
        assert_eq!(create(&client, name).await.unwrap_err().errno(), EIO);
    }
    master.restart().await;
    until("it is let go of", || master.mutations(|mutations| mutations.held.is_empty())).await;
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_begins_anew_costs_what_was_missed_and_nothing_for_what_is_open() {
    const OPEN: u64 = 5000;
    let (master, client) = started("many").await;
    let metadata = client.metadata();
    let names: Vec<String> = (0..OPEN).map(|number| number.to_string()).collect();
    let mut nodes = Vec::new();
    // Few at a time: each has to be answered within its own time.
    for some in names.chunks(250) {
        let made = join_all(some.iter().map(|name| create(&client, name))).await;
        nodes.extend(made.into_iter().map(|made| made.unwrap().node.unwrap()));
    }
    let kept: Vec<_> = nodes.iter().map(|node| metadata.keep_open_cached(node).unwrap()).collect();
    let begin_anew = async || {
        let (resets, made) = (client.stats().watch_resets.get(), master.mutations(|mutations| mutations.made));
        master.kill();
        master.restart().await;
        until("the stream begins anew", || client.stats().watch_resets.get() > resets).await;
        // Its acknowledgement shows that all is held.
        master.announce(Event::InodeChanged(MOUNT_ROOT));
        master.settled().await;
        master.mutations(|mutations| mutations.made) - made
    };
    assert_eq!(begin_anew().await, 0);
    // A third of them has lost its name meanwhile.
    let lost: BTreeSet<u64> = nodes.iter().map(|node| node.inode).filter(|inode| inode % 3 == 0).collect();
    master.mutations(|mutations| mutations.nameless.extend(&lost));
    let changes = begin_anew().await;
    assert!((1..50).contains(&changes), "{changes} changes for {} inodes", lost.len());
    assert_eq!(master.mutations(|mutations| mutations.held.clone()), lost);
    assert_eq!(begin_anew().await, 0, "the master knows it");
    let sessions = master.mutations(|mutations| mutations.calls.iter().map(|call| call.session).collect::<Vec<_>>());
    assert!(sessions.iter().all(|session| *session == sessions[0]));
    drop(kept);
    until("all are let go of", || master.mutations(|mutations| mutations.held.is_empty())).await;
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_inode_is_held_before_its_removal_is_acknowledged() {
    let (master, client) = started("held").await;
    let metadata = client.metadata();
    let [open, closed] = [create(&client, "a").await.unwrap(), create(&client, "b").await.unwrap()];
    let (open, closed) = (open.node.unwrap(), closed.node.unwrap());
    let kept = [metadata.keep_open_cached(&open).unwrap(), metadata.keep_open(&open).await.unwrap()];
    assert!(metadata.keep_open_cached(&closed).is_some());
    let seq = master.seq();
    master.announce(Event::Unlinked(open.inode));
    master.announce(Event::Unlinked(closed.inode));
    until("the removal is acknowledged", || master.acknowledged() > seq).await;
    assert!(master.mutations(|mutations| mutations.held.contains(&open.inode)));
    master.settled().await;
    assert!(master.mutations(|mutations| !mutations.held.contains(&closed.inode)));

    // Another session holds it again, whether or not it was notified of the removal.
    master.mutations(|mutations| {
        mutations.held.clear();
        (mutations.refuse, mutations.end_session) = (1, true);
    });
    create(&client, "c").await.unwrap();
    until("it is held again", || master.mutations(|mutations| mutations.held.contains(&open.inode))).await;
    let [one, other] = kept;
    drop(one);
    create(&client, "d").await.unwrap();
    assert!(master.mutations(|mutations| mutations.held.contains(&open.inode)));
    drop(other);
    until("it is let go of", || master.mutations(|mutations| mutations.held.is_empty())).await;
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_goes_on_holds_what_the_one_before_did_not_before_it_acknowledges_the_removal() {
    let master = FakeMaster::start("held-later").await;
    master.fs_mode();
    master.set_lease(Duration::from_secs(600));
    master.resume_streams();
    let mut config = config(&master);
    config.client.metadata_timeout = cavern_conf::Interval::millis(30_000);
    let client = connect(&config).await;
    client.metadata().resolve("/m").await.unwrap();
    let node = create(&client, "a").await.unwrap().node.unwrap();
    let kept = client.metadata().keep_open_cached(&node).unwrap();
    let (delayed, calls) = (master.hold_mutations().await, master.count("Mutate"));
    master.announce(Event::Unlinked(node.inode));
    let removed = master.seq();
    until("it is to be held", || master.count("Mutate") > calls).await;
    master.kill();
    master.restart().await;
    until("the stream goes on", || client.stats().watch_resumptions.get() > 0).await;
    master.put_file(MOUNT_ROOT, "b", "e", 1);
    until("later events are taken in", || master.invalidated() == master.seq()).await;
    assert!(master.acknowledged() < removed, "it is not held yet");
    drop(delayed);
    master.settled().await;
    assert!(master.mutations(|mutations| mutations.held.contains(&node.inode)));
    drop(kept);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_quota_refuses_is_kept_for_the_next_commit_whatever_was_refused_before() {
    let master = FakeMaster::start("quota").await;
    master.fs_mode();
    let hole = master.put_file(MOUNT_ROOT, "hole", "", 4096);
    let grown = master.put_file(MOUNT_ROOT, "grown", "", 0);
    let client = connect(&config(&master)).await;
    let open = async |inode| {
        let node = client.metadata().node(inode).await.unwrap();
        client.open_to_read(&node).await.unwrap()
    };
    let (hole, file) = (open(hole).await, open(grown).await);
    assert_eq!(file.copy_from(&hole, 0, 0, 4096, &CancellationToken::new()).await.unwrap(), 4096);
    // The first attempt is based on an old layout, the second makes the file too long.
    master
        .mutations(|mutations| mutations.commit_refusals.extend([Errno::STALE, Errno::DQUOT].map(Errno::raw_os_error)));
    let refused = file.flush().await.unwrap_err();
    assert_eq!(refused.errno(), Errno::DQUOT.raw_os_error(), "{refused}");
    assert!(file.is_dirty());
    let _ = file.flush().await.unwrap();
    assert_eq!(client.metadata().node(grown).await.unwrap().size, 4096);
    drop((hole, file));
    client.shutdown().await;
}

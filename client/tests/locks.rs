//! Locks against a master that grants them late, restarts, and ends sessions.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Client, ClientError, LOCK_TO_END};
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{Lock, LockKind, LockType};
use support::{FakeMaster, config, connect, until};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const FILE: u64 = 50;
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

fn lock(r#type: LockType) -> Lock {
    Lock { owner: 3, pid: 30, r#type: r#type.into(), end: LOCK_TO_END, ..Lock::default() }
}

/// Of another client.
fn foreign() -> Lock {
    Lock { session: 999, owner: 3, pid: 30, ..lock(LockType::Exclusive) }
}

async fn started(name: &str) -> (FakeMaster, Arc<Client>) {
    let master = FakeMaster::start(name).await;
    master.fs_mode();
    let client = connect(&config(&master)).await;
    client.metadata().resolve("/m").await.unwrap();
    (master, client)
}

async fn set(client: &Client, r#type: LockType) -> Result<(), i32> {
    let set = client.metadata().set_lock(FILE, LockKind::Posix, lock(r#type)).await;
    set.map(drop).map_err(|error| error.errno())
}

/// Waits for the lock that somebody else has, and is known to do so.
async fn waiting(
    master: &FakeMaster,
    client: &Arc<Client>,
    give_up: &CancellationToken,
) -> (u64, JoinHandle<Result<(), ClientError>>) {
    master.mutations(|mutations| mutations.lock = Some(foreign()));
    let (client, give_up) = (client.clone(), give_up.clone());
    let waiter = tokio::spawn(async move {
        client.metadata().wait_for_lock(FILE, LockKind::Posix, lock(LockType::Shared), &give_up).await.map(drop)
    });
    until("it waits", || master.mutations(|mutations| !mutations.waiting.is_empty())).await;
    (master.mutations(|mutations| *mutations.waiting.first().unwrap()), waiter)
}

/// The master gives the lock to the one who waits.
fn grant(master: &FakeMaster, number: u64) {
    master.mutations(|mutations| {
        assert!(mutations.waiting.remove(&number));
        let session = mutations.calls.last().unwrap().session;
        mutations.lock = Some(Lock { session, ..lock(LockType::Shared) });
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_woken_by_the_master_and_asks_only_once() {
    let (master, client) = started("woken").await;
    let (number, waiter) = waiting(&master, &client, &CancellationToken::new()).await;
    assert_eq!(set(&client, LockType::Shared).await, Err(EAGAIN));
    let found = client.metadata().find_lock(FILE, LockKind::Posix, lock(LockType::Shared)).await.unwrap().unwrap();
    assert_eq!((found.r#type(), found.pid), (LockType::Exclusive, 0), "a process of another host");
    let asked = master.mutations(|mutations| mutations.lock_requests.len());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiter.is_finished());
    master.announce(Event::LockGranted(number + 100));
    grant(&master, number);
    master.announce(Event::LockGranted(number));
    waiter.await.unwrap().unwrap();
    assert_eq!(master.mutations(|mutations| mutations.lock_requests.len()), asked);
    assert!(client.metadata().may_have_locked(FILE, LockKind::Posix, 3));
    set(&client, LockType::Unlocked).await.unwrap();
    assert!(!client.metadata().may_have_locked(FILE, LockKind::Posix, 3));
    assert_eq!(master.mutations(|mutations| mutations.lock), None);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_was_told_to_nobody_is_asked_for_again() {
    let (master, client) = started("again").await;
    let (number, waiter) = waiting(&master, &client, &CancellationToken::new()).await;
    master.kill();
    grant(&master, number);
    master.restart().await;
    waiter.await.unwrap().unwrap();
    let requests = master.mutations(|mutations| mutations.lock_requests.clone());
    assert!(requests.len() >= 2 && requests.iter().all(|request| request.waiter == number && request.wait));
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_gives_up_does_not_wait_at_the_master_either() {
    let (master, client) = started("interrupted").await;
    for is_late in [false, true] {
        let give_up = CancellationToken::new();
        let (number, waiter) = waiting(&master, &client, &give_up).await;
        if is_late {
            grant(&master, number);
        }
        give_up.cancel();
        let given_up = waiter.await.unwrap().map_err(|error| error.errno());
        assert_eq!(given_up, if is_late { Ok(()) } else { Err(EINTR) });
        assert!(master.mutations(|mutations| mutations.waiting.is_empty()));
    }
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_a_session_that_ended_are_lost_until_they_are_unlocked() {
    let (master, client) = started("lost").await;
    set(&client, LockType::Shared).await.unwrap();
    // The next call finds the session ended, and goes on with another.
    master.mutations(|mutations| {
        mutations.lock = None;
        (mutations.refuse, mutations.end_session) = (1, true);
    });
    let other = Lock { owner: 4, ..lock(LockType::Shared) };
    client.metadata().set_lock(FILE + 1, LockKind::Posix, other).await.unwrap();
    client.metadata().set_lock(FILE + 1, LockKind::Posix, Lock { r#type: 0, ..other }).await.unwrap();
    for attempt in [LockType::Exclusive, LockType::Shared, LockType::Unlocked] {
        assert_eq!(set(&client, attempt).await, Err(EIO));
    }
    set(&client, LockType::Exclusive).await.unwrap();
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_closed_while_the_master_is_away_is_unlocked_later() {
    let (master, client) = started("owed").await;
    let unlocked = || master.mutations(|mutations| mutations.lock.is_none());
    for soon in [false, true] {
        set(&client, LockType::Shared).await.unwrap();
        master.kill();
        // Known to be away, it is sent nothing, so the session is still good afterwards.
        client.metadata().find_lock(FILE, LockKind::Posix, lock(LockType::Shared)).await.unwrap_err();
        if soon {
            client.metadata().unlock_closed_soon(FILE, LockKind::Posix, 3, None);
            tokio::time::sleep(Duration::from_millis(1800)).await;
        } else {
            client.metadata().unlock_closed(FILE, LockKind::Posix, 3).await;
        }
        assert!(!unlocked() && !client.metadata().may_have_locked(FILE, LockKind::Posix, 3));
        master.restart().await;
        until("it is unlocked", unlocked).await;
    }
    let requests = master.mutations(|mutations| mutations.lock_requests.len());
    client.metadata().unlock_closed(FILE, LockKind::Posix, 3).await;
    assert_eq!(master.mutations(|mutations| mutations.lock_requests.len()), requests, "nothing is locked");
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_finds_a_lock_whose_unlock_is_on_its_way() {
    let (master, client) = started("found").await;
    set(&client, LockType::Exclusive).await.unwrap();
    master.hang(true);
    client.metadata().unlock_closed_soon(FILE, LockKind::Posix, 3, None);
    let other = Lock { owner: 4, ..lock(LockType::Exclusive) };
    let finding = {
        let client = Arc::clone(&client);
        tokio::spawn(async move { client.metadata().find_lock(FILE, LockKind::Posix, other).await })
    };
    until("the unlock arrives", || master.count("Mutate") == 2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(master.count("GetLock"), 0, "it could be answered before the unlock");
    master.hang(false);
    assert_eq!(finding.await.unwrap().unwrap(), None);
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_unlock_takes_nothing_that_was_locked_since() {
    let (master, client) = started("late").await;
    set(&client, LockType::Shared).await.unwrap();
    master.kill();
    client.metadata().find_lock(FILE, LockKind::Posix, lock(LockType::Shared)).await.unwrap_err();
    client.metadata().unlock_closed(FILE, LockKind::Posix, 3).await;
    master.restart().await;
    while set(&client, LockType::Exclusive).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Unlocks that are owed are sent with each event.
    let requests = || master.mutations(|mutations| mutations.lock_requests.len());
    let before = requests();
    for _ in 0..3 {
        master.settled().await;
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert_eq!(requests(), before);
    assert!(master.mutations(|mutations| mutations.lock.is_some()), "it is still locked");
    client.shutdown().await;
}

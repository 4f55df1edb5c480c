use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use cavern_consensus::{ChangeListener, LeaderLease};
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{ClientRule, EntryChanged, Resumed};
use cavern_security::Role;
use cavern_state::{ALL_BEFORE, Change, Changes, DelegationChange, DirectoryDelegation, InodeLocation, RulesChange};

use super::open::Before;
use super::stream::SessionStream;
use super::*;
use crate::error::WorkError;

fn hub(lease: Duration) -> Arc<WatchHub> {
    hub_of(lease, &Arc::default())
}

/// The sessions of a term, of a master that has seen these changes.
fn hub_of(lease: Duration, changes: &Arc<CurrentSessions>) -> Arc<WatchHub> {
    let (lead, metrics) = (LeaderLease::of_one(), MasterMetrics::default());
    let hub = Arc::new(WatchHub::new((lease, SESSIONS_MAX), lead, metrics, changes.clone(), "c".into()));
    changes.set(Some(hub.clone()));
    hub
}

/// The first lease of its term is over, and mount 1 is there for the client "own" only.
fn hub_with_a_mount_of_own(lease: Duration, master: &Arc<CurrentSessions>) -> Arc<WatchHub> {
    let hub = hub_of(lease, master);
    hub.state.lock().started -= lease;
    let now = vec![ClientRule { name: "own".into(), ..ClientRule::default() }];
    master.visible.change(&[RulesChange { mount_id: 1, before: None, now }]);
    hub
}

/// A change is not answered before this, and is soon after it.
async fn answered_only_after(hub: &Arc<WatchHub>, change: u64, soon: Duration, until: &dyn Fn()) {
    let answered = tokio::spawn({
        let hub = hub.clone();
        async move { hub.wait_invalidated(&[change]).await }
    });
    while hub.state.lock().invalidations.asked() == 0 {
        tokio::task::yield_now().await;
    }
    assert!(!answered.is_finished());
    until();
    tokio::time::timeout(soon, answered).await.unwrap().unwrap();
}

fn entry(parent: u64, first_fill: bool) -> Change {
    Change::Entry { parent, name: Bytes::from_static(b"n"), old_inode: 0, new_inode: 9, first_fill, mount_id: 0 }
}

/// Of the next entry of the log.
fn changes(list: Vec<Change>, origin: u64) -> Changes {
    static INDEX: AtomicU64 = AtomicU64::new(1);
    let position = Changes::position(INDEX.fetch_add(1, Ordering::Relaxed), 1);
    Changes { position, origin, list, ..Changes::default() }
}

/// A mount is there for clients of another name from now on.
fn shown_to(mount_id: u32, before: Option<&str>, now: &str) -> Changes {
    let rules = |name: &str| vec![ClientRule { name: name.into(), ..ClientRule::default() }];
    let change = RulesChange { mount_id, before: before.map(rules), now: rules(now) };
    Changes { rules: vec![change], ..changes(vec![Change::Mounts(2)], 0) }
}

/// Of inodes that each have one name, their number, below another.
fn named(list: Vec<Change>, inodes: &[u64], parent: u64) -> Changes {
    let place =
        |inode: &u64| (*inode, InodeLocation::Named { parent, name: inode.to_string().into(), is_directory: false });
    Changes { inodes: inodes.iter().map(place).collect(), ..changes(list, 0) }
}

async fn kinds(session: &mut SessionStream) -> Vec<Event> {
    next(session).await.into_iter().map(|event| event.event.unwrap()).collect()
}

async fn next(session: &mut SessionStream) -> Vec<WatchEvent> {
    session.next().await.unwrap().iter().flat_map(|events| events.iter().cloned()).collect()
}

#[tokio::test]
async fn a_session_begins_with_a_reset_and_sees_changes_in_order() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", Before::default()).unwrap();
    let first = next(&mut session).await;
    assert!(matches!(&first[0].event, Some(Event::Reset(reset))
            if reset.session == session.id() && reset.cluster_id == "c"));
    hub.watch_directory(session.id(), 7);
    hub.changed(changes(vec![entry(7, false), Change::Workers(2), entry(8, false)], 0));
    hub.changed(changes(vec![Change::Inode(5)], 0));
    let events = next(&mut session).await;
    let kinds: Vec<_> = events.iter().map(|event| event.event.clone().unwrap()).collect();
    assert!(matches!(kinds[..], [Event::Entry(_), Event::WorkersEpoch(2), Event::InodeChanged(5)]), "{kinds:?}");
    assert!(events.windows(2).all(|pair| pair[0].seq < pair[1].seq));
    assert_eq!(events.last().unwrap().seq, hub.seq());
}

#[tokio::test]
async fn the_first_fill_is_told_only_where_an_absence_was() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", Before::default()).unwrap();
    next(&mut session).await;
    hub.watch_directory(session.id(), 7);
    hub.changed(changes(vec![entry(7, true)], 0));
    hub.watch_name(session.id(), 7, b"n");
    hub.changed(changes(vec![entry(7, true)], 0));
    assert_eq!(next(&mut session).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn who_does_not_say_that_it_knows_the_masters_is_named_after_a_lease() {
    let hub = hub(Duration::from_secs(60));
    let (mut one, mut other) =
        (hub.open("one", Before::default()).unwrap(), hub.open("other", Before::default()).unwrap());
    next(&mut one).await;
    next(&mut other).await;
    hub.knows_group(one.id(), 7);
    hub.knows_group(other.id(), 6);
    let id = other.id();
    hub.announce_group();
    assert_eq!(kinds(&mut one).await, [Event::Tick(true)], "each is sent something at once");
    assert_eq!(hub.wait_group_known(7).await, ["client other"]);
    let (unaware, ()) = tokio::join!(hub.wait_group_known(7), async { hub.knows_group(id, 7) });
    assert!(unaware.is_empty(), "{unaware:?}");
    // Those whose streams break may come back, for a lease. Then nobody is left who had to know.
    drop((one, other));
    let begun = Instant::now();
    let unaware = hub.wait_group_known(8).await;
    assert!(unaware.is_empty() && begun.elapsed() >= hub.lease(), "{unaware:?}");
}

#[tokio::test(start_paused = true)]
async fn whoever_freezes_something_waits_until_all_clients_go_by_that() {
    let hub = hub(Duration::from_millis(300));
    let (one, other) = (hub.open("one", Before::default()).unwrap(), hub.open("other", Before::default()).unwrap());
    let (first, second) = (one.id(), other.id());
    while !hub.has_settled(1) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    hub.mounts_settled(first, 8);
    let (settled, ()) = tokio::join!(hub.wait_settled(1, 7), async { hub.mounts_settled(second, 7) });
    settled.unwrap();
    // One that ends writes nothing any more.
    let (settled, ()) = tokio::join!(hub.wait_settled(1, 8), async { hub.end(second) });
    settled.unwrap();
    let late = hub.wait_settled(1, 9).await.unwrap_err().to_string();
    assert!(late.contains("client one did not say in time"), "{late}");

    // One that comes back says it once more.
    drop(one);
    let (settled, again) = tokio::join!(hub.wait_settled(1, 8), async {
        let again = hub.open("one", Before::of(first, false)).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        hub.mounts_settled(first, 8);
        again
    });
    settled.unwrap();
    assert_eq!(again.id(), first);

    // And of one that does not nobody knows what it writes, until it is forgotten.
    drop(again);
    let mut waiting = std::pin::pin!(hub.wait_settled(1, 8));
    let lapsed = loop {
        tokio::select! {
            settled = &mut waiting => break settled.unwrap_err().to_string(),
            () = tokio::time::sleep(Duration::from_millis(20)) => hub.tick(),
        }
    };
    assert!(lapsed.contains("has ended meanwhile"), "{lapsed}");
    hub.wait_settled(1, 9).await.unwrap();
}

#[tokio::test]
async fn a_session_that_falls_behind_is_reset() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", Before::default()).unwrap();
    next(&mut session).await;
    for _ in 0..=QUEUE_EVENTS / 1000 {
        hub.changed(changes((0..1000).map(Change::Inode).collect(), 0));
    }
    let events = next(&mut session).await;
    assert!(matches!(events[0].event, Some(Event::Reset(_))), "{:?}", events[0]);
    assert!(events.len() < QUEUE_EVENTS);
    assert_eq!(events.last().unwrap().seq, hub.seq());
}

#[tokio::test]
async fn a_session_is_not_told_of_its_own_changes_and_nobody_waits_for_it_to_take_them() {
    let hub = hub(Duration::from_secs(60));
    let (mut one, mut other) =
        (hub.open("one", Before::default()).unwrap(), hub.open("other", Before::default()).unwrap());
    let begun = [next(&mut one).await, next(&mut other).await];
    hub.acknowledge(one.stream_id(), begun[0][0].seq, 0);
    hub.changed(changes(vec![Change::Inode(1)], one.id()));
    let seq = hub.seq();
    assert_eq!(
        [hub.last_queued_seq(one.id()), hub.last_queued_seq(other.id()), hub.last_queued_seq(99)],
        [begun[0][0].seq, seq, seq]
    );
    let received = next(&mut other).await;
    assert_eq!(received[0].event, Some(Event::InodeChanged(1)));
    hub.acknowledge(other.stream_id(), received[0].seq, 0);
    tokio::time::timeout(Duration::from_secs(10), hub.wait_acknowledged(seq)).await.unwrap();
    hub.changed(changes(vec![Change::Inode(2)], other.id()));
    assert_eq!(next(&mut one).await[0].event, Some(Event::InodeChanged(2)));
}

#[tokio::test]
async fn a_broken_session_goes_on_within_its_lease_and_no_longer() {
    let hub = hub(Duration::from_millis(300));
    let first = hub.open("a", Before::default()).unwrap();
    let id = first.id();
    // Before the broken stream was noticed, and after.
    let mut second = hub.open("a", Before::of(id, false)).unwrap();
    assert_eq!(second.id(), id);
    drop(first);
    assert!(hub.is_live(id) && matches!(next(&mut second).await[0].event, Some(Event::Reset(_))));
    drop(second);
    assert!(!hub.is_live(id) && !hub.is_over(id));
    let third = hub.open("a", Before::of(id, false)).unwrap();
    assert_eq!(third.id(), id);
    drop(third);
    while !hub.is_over(id) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_ne!(hub.open("a", Before::of(id, true)).unwrap().id(), id);
}

#[tokio::test]
async fn a_stream_goes_on_where_it_was_and_at_another_master_as_well() {
    let lease = Duration::from_secs(60);
    let masters: [Arc<CurrentSessions>; 2] = [Arc::default(), Arc::default()];
    let apply = |changes: Changes| {
        let inodes = changes.inodes.clone();
        let copy = Changes {
            position: changes.position,
            origin: changes.origin,
            list: changes.list.clone(),
            inodes,
            ..Changes::default()
        };
        masters[1].changed(copy);
        masters[0].changed(changes);
    };
    apply(changes(vec![Change::Workers(1)], 0));
    let first = hub_of(lease, &masters[0]);
    let mut stream = first.open("a", Before::default()).unwrap();
    let id = stream.id();
    next(&mut stream).await;
    first.watch_name(id, 7, b"n");
    apply(changes(vec![entry(7, false)], 0));
    let applied_seq = next(&mut stream).await[0].seq;
    drop(stream);
    // What it knew nothing of comes along, and what it did itself does not; it hears of its own removals.
    apply(changes(vec![entry(8, true), Change::Inode(5)], 0));
    apply(changes(vec![Change::Inode(6), Change::Unlinked(6), Change::LockGranted { session: id, waiter: 3 }], id));
    apply(changes(vec![Change::LockGranted { session: id + 1, waiter: 4 }], 0));
    let before = Before { session: id, applied_seq, has_changed: true, ..Before::default() };
    let second = hub_of(lease, &masters[1]);
    for (hub, is_recorded) in [(&first, false), (&second, true)] {
        let mut stream = hub.open("a", Before { is_recorded, ..before }).unwrap();
        let events = next(&mut stream).await;
        assert!(events.windows(2).all(|pair| pair[0].seq < pair[1].seq), "{events:?}");
        assert_eq!(events[0].seq, applied_seq);
        let missed_up_to = events.last().unwrap().seq;
        let kinds: Vec<_> = events.into_iter().map(|event| event.event.unwrap()).collect();
        let resumed = Event::Resumed(Resumed { session: id, lease_ms: 60_000, missed_up_to });
        let foreign = Event::Entry(EntryChanged { parent: 8, name: "n".into(), old_inode: 0, new_inode: 9 });
        assert_eq!(
            kinds,
            [resumed, foreign, Event::InodeChanged(5), Event::Unlinked(6), Event::LockGranted(3)],
            "recorded: {is_recorded}"
        );
        // Here it is known what it knows; there it is not, before it says so and its kernel's trust is over.
        hub.changed(changes(vec![entry(7, false)], 0));
        hub.changed(changes(vec![entry(9, true)], 0));
        let expected = if is_recorded { 2 } else { 1 };
        assert_eq!(next(&mut stream).await.len(), expected);
        if is_recorded {
            hub.watch_directories(id, [7]);
            hub.watches_restored(id);
            hub.state.lock().sessions.get_mut(&id).unwrap().settles_at = Some(Instant::now());
            hub.tick();
            next(&mut stream).await;
            hub.changed(changes(vec![entry(9, true)], 0));
            hub.changed(changes(vec![entry(7, true)], 0));
            assert_eq!(next(&mut stream).await.len(), 1);
        }
    }
}

#[tokio::test]
async fn a_stream_begins_anew_where_something_may_have_been_missed() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    master.changed(changes(vec![Change::Workers(1)], 0));
    let hub = hub_of(lease, &master);
    let applied_seq = hub.seq();
    let first = async |before: Before<'_>| {
        let mut stream = hub.open("a", before).unwrap();
        (stream.id(), next(&mut stream).await[0].event.clone().unwrap())
    };
    let known = Before { session: 7, is_recorded: true, applied_seq, ..Before::default() };
    assert!(matches!(first(known).await, (7, Event::Resumed(_))));
    // A session that is over, with changes that may have been made; one without any goes on under another id.
    let over = Before { session: 5, is_recorded: false, has_changed: true, ..known };
    assert!(matches!(first(over).await.1, Event::Reset(_)));
    let (id, event) = first(Before { has_changed: false, ..over }).await;
    assert!(id != 5 && matches!(event, Event::Resumed(Resumed { session, .. }) if session == id));
    for applied_seq in [applied_seq - 2, applied_seq + 1] {
        assert!(matches!(first(Before { applied_seq, ..known }).await.1, Event::Reset(_)), "{applied_seq}");
    }
    master.replaced();
    assert!(matches!(first(known).await.1, Event::Reset(_)), "the state was replaced");
}

#[tokio::test]
async fn a_session_that_ends_in_order_is_over_at_once() {
    let hub = hub(Duration::from_secs(1));
    while !hub.has_settled(1) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (ended, broken) = (hub.open("a", Before::default()).unwrap(), hub.open("b", Before::default()).unwrap());
    hub.end(ended.id());
    assert!(hub.is_over(ended.id()) && hub.has_settled(1));
    drop(ended);
    assert!(hub.has_settled(1));
    let id = broken.id();
    drop(broken);
    assert!(!hub.is_over(id) && !hub.has_settled(1));
}

#[tokio::test]
async fn sessions_of_before_a_restart_go_on_when_they_are_recorded() {
    let hub = hub(Duration::from_secs(60));
    assert_eq!(hub.open("a", Before::of(7, true)).unwrap().id(), 7);
    assert_ne!(hub.open("b", Before::of(8, false)).unwrap().id(), 8);
}

#[tokio::test]
async fn sessions_are_notified_of_what_they_asked_about() {
    let hub = hub(Duration::from_secs(60));
    let [mut one, mut other] = ["one", "other"].map(|client| hub.open(client, Before::default()).unwrap());
    next(&mut one).await;
    next(&mut other).await;
    hub.watch_name(one.id(), 7, b"5");
    hub.watch_inodes(other.id(), [6]);
    hub.changed(named(vec![Change::Inode(5), Change::Inode(6), Change::Inode(8)], &[5, 6, 8], 7));
    hub.changed(changes(vec![Change::Mounts(2)], 0));
    let (of_one, of_other) = (kinds(&mut one).await, kinds(&mut other).await);
    assert_eq!(of_one, [Event::InodeChanged(5), Event::MountsEpoch(2)]);
    assert_eq!(of_other, [Event::InodeChanged(6), Event::MountsEpoch(2)]);
}

#[tokio::test]
async fn who_knows_an_inode_knows_it_under_another_name_too() {
    let hub = hub(Duration::from_secs(60));
    let mut session = hub.open("a", Before::default()).unwrap();
    next(&mut session).await;
    hub.watch_name(session.id(), 7, b"n");
    let left =
        Change::Entry { parent: 7, name: "n".into(), old_inode: 5, new_inode: 0, first_fill: false, mount_id: 0 };
    hub.changed(named(vec![left], &[5], 8));
    hub.changed(named(vec![Change::Inode(5)], &[5], 8));
    hub.changed(Changes { inodes: [(5, InodeLocation::Nameless)].into(), ..changes(vec![Change::Unlinked(5)], 0) });
    hub.changed(Changes { inodes: [(5, InodeLocation::Nameless)].into(), ..changes(vec![Change::Inode(5)], 0) });
    let kinds = kinds(&mut session).await;
    let left = Event::Entry(EntryChanged { parent: 7, name: "n".into(), old_inode: 5, new_inode: 0 });
    assert_eq!(kinds, [left, Event::InodeChanged(5), Event::Unlinked(5), Event::InodeChanged(5)]);
}

#[tokio::test]
async fn who_changes_something_knows_it_from_then_on() {
    let hub = hub(Duration::from_secs(60));
    let mut session = hub.open("a", Before::default()).unwrap();
    next(&mut session).await;
    let directory = InodeLocation::Named { parent: 7, name: "n".into(), is_directory: true };
    let made = changes(vec![entry(7, false), Change::Inode(9)], session.id());
    hub.changed(Changes { inodes: [(9, directory)].into(), ..made });
    hub.changed(changes(vec![entry(9, false), entry(7, false)], 0));
    let entry = |parent| Event::Entry(EntryChanged { parent, name: "n".into(), old_inode: 0, new_inode: 9 });
    assert_eq!(kinds(&mut session).await, [entry(9), entry(7)]);
}

#[tokio::test]
async fn the_loss_of_a_last_name_is_told_to_those_who_may_have_it_open() {
    let hub = hub(Duration::from_secs(60));
    let mut own = hub.open("own", Before::default()).unwrap();
    let earlier = Before { knows_inodes: true, ..Before::default() };
    let (mut earlier, mut strange) = (hub.open("a", earlier).unwrap(), hub.open("b", Before::default()).unwrap());
    for session in [&mut own, &mut earlier, &mut strange] {
        next(session).await;
    }
    let lost =
        Changes { inodes: [(2, InodeLocation::Nameless)].into(), ..changes(vec![Change::Unlinked(2)], own.id()) };
    hub.changed(lost);
    hub.changed(changes(vec![Change::Workers(3)], 0));
    assert_eq!(kinds(&mut own).await, [Event::Unlinked(2), Event::WorkersEpoch(3)]);
    assert_eq!(kinds(&mut earlier).await, [Event::Unlinked(2), Event::WorkersEpoch(3)]);
    assert_eq!(kinds(&mut strange).await, [Event::WorkersEpoch(3)]);
}

#[tokio::test]
async fn a_strict_change_waits_until_all_whom_it_concerns_have_let_go() {
    let lease = Duration::from_secs(60);
    let hub = hub(lease);
    // Of the sessions of an earlier term nothing is to be feared any more.
    hub.state.lock().started -= lease;
    let [own, mut reader, stranger] = ["own", "reader", "b"].map(|client| hub.open(client, Before::default()).unwrap());
    let reader_id = reader.id();
    next(&mut reader).await;
    hub.watch_name(reader_id, 7, b"n");
    let strict = || Changes { strict_mount: Some(1), ..changes(vec![entry(7, false)], own.id()) };
    let wait = async |change, until: &dyn Fn()| answered_only_after(&hub, change, lease / 2, until).await;
    let first = hub.changed(strict());
    assert_eq!(first, hub.seq());
    let stream = reader.stream_id();
    hub.acknowledge(stream, first, first - 1);
    hub.acknowledge(stranger.stream_id(), 0, 0);
    wait(first, &|| assert!(hub.acknowledge(stream, 0, first))).await;
    hub.wait_invalidated(&[first]).await;
    // Whose stream has broken believes what it has, and for a lease no longer.
    let second = hub.changed(strict());
    drop(reader);
    let third = hub.changed(strict());
    assert!(third > second);
    let back = hub.open("reader", Before::of(reader_id, false)).unwrap();
    assert_eq!(back.id(), reader_id);
    wait(second, &|| assert!(hub.acknowledge(back.stream_id(), 0, hub.seq()))).await;
    hub.wait_invalidated(&[third]).await;
    assert_eq!(hub.changed(strict()), 0, "it knows nothing of that any more");
    hub.watch_name(reader_id, 7, b"n");
    drop(back);
    let of_all = Changes { strict_mount: Some(1), ..changes(vec![Change::Inode(3)], own.id()) };
    assert_ne!(hub.changed(of_all), 0, "of inodes with several names anybody may know, whose stream is broken too");
    hub.end(stranger.id());
    let lapse = || {
        hub.state.lock().broken.values_mut().for_each(|since| *since -= lease);
        hub.tick();
    };
    wait(hub.changed(strict()), &lapse).await;
    assert_eq!(hub.changed(changes(vec![Change::Mounts(1)], own.id())), 0, "nobody waits for other mounts");
}

#[tokio::test]
async fn a_strict_change_waits_for_nobody_who_does_not_see_the_mount() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_with_a_mount_of_own(lease, &master);
    master.changed(changes(vec![Change::Workers(1)], 0));
    let owners = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let [own, other] =
        [0, 1].map(|at| hub.open("a", Before { owner: Some(&owners[at]), ..Before::default() }).unwrap());
    // It may know anything, and takes nothing in.
    hub.watch_inodes(other.id(), 0..100_000);
    let strict = |mount_id| Changes { strict_mount: Some(mount_id), ..named(vec![Change::Inode(9)], &[9], 7) };
    assert_eq!(master.changed(strict(1)), 0);
    assert_eq!(master.changed(strict(2)), hub.seq(), "it sees another mount");
    hub.acknowledge(other.stream_id(), 0, hub.seq());
    hub.watch_name(own.id(), 7, b"9");
    let change = master.changed(strict(1));
    assert_eq!(change, hub.seq());
    answered_only_after(&hub, change, lease / 2, &|| _ = hub.acknowledge(own.stream_id(), 0, change)).await;

    // Nor for one that has missed the change, and comes to a master that does not know what it knows.
    for (owner, waited_for) in [(&owners[0], 1), (&owners[1], 0)] {
        let new = hub_of(lease, &master);
        let seen = Before { owner: Some(owner), applied_seq: change - 1, ..Before::of(5, true) };
        let mut back = new.open("a", seen).unwrap();
        assert!(matches!(kinds(&mut back).await[..], [Event::Resumed(_), Event::InodeChanged(9)]));
        assert_eq!(new.state.lock().invalidations.pending().len(), waited_for);
    }
}

#[tokio::test]
async fn a_strict_change_waits_for_whoever_has_yet_to_forget_everything() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    let owners = ["own", "reader"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let open = |at: usize, before| hub.open("a", Before { owner: Some(&owners[at]), ..before }).unwrap();
    let (own, mut reader) = (open(0, Before::default()), open(1, Before::default()));
    let id = reader.id();
    let strict = |mount_id| Changes { strict_mount: Some(mount_id), ..named(vec![Change::Inode(9)], &[9], 7) };
    let pending = || hub.state.lock().invalidations.pending();
    next(&mut reader).await;
    hub.watch_name(id, 7, b"9");
    master.changed(shown_to(1, Some("*"), "own"));

    // What it knew is not known any more, in other mounts neither, and it shows that until it has heard.
    let change = master.changed(strict(2));
    assert_eq!((change, pending()), (hub.seq(), vec![change]));
    let reset = next(&mut reader).await[0].seq;
    hub.acknowledge(reader.stream_id(), reset, reset - 1);
    assert_eq!(pending(), [change]);
    hub.acknowledge(reader.stream_id(), reset, reset);
    assert!(pending().is_empty());
    assert_eq!(master.changed(strict(2)), 0);

    // Nobody waits for himself.
    master.changed(shown_to(1, Some("own"), "reader"));
    let by_itself = named(vec![Change::Inode(8)], &[8], 7);
    assert_eq!(master.changed(Changes { strict_mount: Some(2), origin: own.id(), ..by_itself }), 0);
    assert_eq!(master.changed(strict(2)), hub.seq());
    hub.acknowledge(own.stream_id(), 0, hub.seq());
    assert!(pending().is_empty());

    // One that is back, and is told to forget everything; and one that is over.
    drop(reader);
    assert_eq!(master.changed(strict(2)), 0, "it knows nothing");
    let back = open(1, Before::of(id, false));
    assert_eq!((back.id(), master.changed(strict(2))), (id, hub.seq()));
    hub.end(id);
    assert!(pending().is_empty());
    assert_eq!(master.changed(strict(2)), 0);
}

#[tokio::test]
async fn what_a_client_says_in_one_stream_answers_for_no_later_one() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    master.changed(changes(vec![Change::Workers(1)], 0));
    let writer = hub.open("writer", Before::default()).unwrap();
    let mut earlier = hub.open("reader", Before { knows_inodes: true, ..Before::default() }).unwrap();
    let (id, seq) = (earlier.id(), next(&mut earlier).await[0].seq);
    hub.watch_name(id, 7, b"9");
    // It has another stream before what it has said is read, and is told once more to forget everything, by an event of
    // the same number: somebody is about to hold a directory.
    master.delegations().claim(8, writer.id());
    let mut later = hub.open("reader", Before { applied_seq: seq, ..Before::of(id, true) }).unwrap();
    let events = next(&mut later).await;
    assert!(matches!(&events[0].event, Some(Event::Reset(_))) && events[0].seq == seq, "{events:?}");
    assert!(!hub.acknowledge(earlier.stream_id(), seq, seq));
    let change = master.changed(Changes { strict_mount: Some(2), ..named(vec![Change::Inode(9)], &[9], 7) });
    assert_eq!(change, hub.seq(), "it has the name in its cache");
    answered_only_after(&hub, change, lease / 2, &|| assert!(hub.acknowledge(later.stream_id(), seq, seq))).await;
}

#[tokio::test(start_paused = true)]
async fn a_strict_change_waits_for_nobody_who_was_to_forget_everything_a_lease_ago() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    let owner = Identity::new("c", Role::Client, "reader").unwrap();
    let mut reader = hub.open("a", Before { owner: Some(&owner), ..Before::default() }).unwrap();
    next(&mut reader).await;
    let strict = || master.changed(Changes { strict_mount: Some(2), ..named(vec![Change::Inode(9)], &[9], 7) });
    master.changed(shown_to(1, Some("*"), "own"));
    tokio::time::advance(lease).await;
    assert_eq!(strict(), hub.seq(), "it was not sent that");
    next(&mut reader).await;
    assert_eq!(strict(), hub.seq());
    tokio::time::advance(lease).await;
    assert_eq!(strict(), 0, "its kernel is stuck");
    assert_eq!(hub.state.lock().invalidations.pending().len(), 2);
    hub.acknowledge(reader.stream_id(), 0, hub.seq());
    assert!(hub.state.lock().invalidations.pending().is_empty());
}

#[tokio::test]
async fn a_strict_change_waits_for_whoever_saw_the_mount_a_moment_ago() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    let [there, away] = ["there", "away"].map(|name| {
        let owner = Identity::new("c", Role::Client, name).unwrap();
        let session = hub.open(name, Before { owner: Some(&owner), ..Before::default() }).unwrap();
        hub.watch_name(session.id(), 7, b"9");
        session
    });
    let strict = || Changes { strict_mount: Some(1), ..named(vec![Change::Inode(9)], &[9], 7) };
    let pending = || hub.state.lock().invalidations.pending();
    let id = away.id();
    drop(away);
    master.changed(shown_to(1, Some("*"), "nobody"));
    // One has not heard of that yet, and the other believes what it has for a lease.
    let change = master.changed(strict());
    assert_eq!((change, pending()), (hub.seq(), vec![change]));
    hub.acknowledge(there.stream_id(), 0, change);
    assert_eq!(pending(), [change]);
    hub.state.lock().invalidations.gone(id);
    assert!(pending().is_empty());
    assert_eq!(master.changed(strict()), hub.seq());
    hub.state.lock().rules_changed.values_mut().for_each(|at| *at -= lease);
    assert_eq!(master.changed(strict()), 0);
}

#[tokio::test]
async fn whoever_saw_a_mount_a_moment_ago_keeps_others_from_holding_what_is_in_it() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    let owners = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let [own, other] =
        [0, 1].map(|at| hub.open("a", Before { owner: Some(&owners[at]), ..Before::default() }).unwrap());
    let known = || known_of_directory(&hub, 1, own.id(), None);
    hub.watch_directory(other.id(), 7);
    drop(other);
    master.changed(shown_to(1, Some("*"), "own"));
    assert_eq!(known(), None, "it has not heard that it is to forget that");
    hub.state.lock().rules_changed.values_mut().for_each(|at| *at -= lease);
    assert_eq!(known(), Some((false, vec![])));
}

/// A client that only reads is recorded nowhere. What it has cached is not known in a new term, and it believes it for
/// a lease.
#[tokio::test]
async fn in_a_new_term_a_strict_change_waits_for_readers_of_the_term_before() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let old = hub_of(lease, &master);
    let mut reader = old.open("reader", Before::default()).unwrap();
    next(&mut reader).await;
    old.watch_name(reader.id(), 7, b"n");
    master.changed(changes(vec![Change::Workers(1)], 0));
    let seen = Before { session: reader.id(), applied_seq: old.seq(), ..Before::default() };
    let new = hub_of(lease, &master);
    let writer = new.open("writer", Before::default()).unwrap();
    let asked = |hub: &Arc<WatchHub>, change| {
        let hub = hub.clone();
        tokio::spawn(async move { hub.wait_invalidated(&[change]).await })
    };

    // It is not back, and nobody else is concerned.
    let strict = |parent| Changes { strict_mount: Some(1), ..changes(vec![entry(parent, false)], writer.id()) };
    let change = master.changed(strict(7));
    assert_eq!(change, new.seq());
    let (answer, again) = (asked(&new, change), asked(&new, ALL_BEFORE));
    tokio::task::yield_now().await;
    assert!(!answer.is_finished() && !again.is_finished());

    // It comes back at the last moment: its client believes nothing before it has been told, and its kernel for as long
    // as it has not let go.
    let mut back = new.open("reader", seen).unwrap();
    let events = kinds(&mut back).await;
    assert!(matches!(events[0], Event::Resumed(Resumed { missed_up_to, .. }) if missed_up_to == change), "{events:?}");
    assert_eq!(events.len(), 2);
    new.state.lock().started -= lease;
    let (answer, again) = (asked(&new, change), asked(&new, ALL_BEFORE));
    while new.state.lock().invalidations.asked() < 2 {
        tokio::task::yield_now().await;
    }
    assert!(!answer.is_finished() && !again.is_finished());
    new.acknowledge(back.stream_id(), change, change - 1);
    tokio::task::yield_now().await;
    assert!(!answer.is_finished());
    new.acknowledge(back.stream_id(), change, change);
    for answer in [answer, again] {
        tokio::time::timeout(lease / 2, answer).await.unwrap().unwrap();
    }
    // From now on it is known who knows what.
    assert_eq!(master.changed(strict(7)), new.seq(), "what it knows is not");
    new.watches_restored(back.id());
    new.state.lock().sessions.get_mut(&back.id()).unwrap().settles_at = Some(Instant::now());
    new.tick();
    assert_eq!(master.changed(strict(8)), 0);
    // Of other mounts nobody waits, in a new term neither.
    let newer = hub_of(lease, &master);
    assert_eq!(master.changed(changes(vec![entry(7, false)], 0)), 0);
    newer.wait_invalidated(&[]).await;
}

#[tokio::test]
async fn a_lock_is_granted_to_its_session_alone() {
    let hub = hub(Duration::from_secs(60));
    let (mut one, mut other) =
        (hub.open("one", Before::default()).unwrap(), hub.open("other", Before::default()).unwrap());
    next(&mut one).await;
    next(&mut other).await;
    let granted = Change::LockGranted { session: one.id(), waiter: 5 };
    hub.changed(changes(vec![granted.clone(), Change::Inode(1)], other.id()));
    let events = next(&mut one).await;
    let kinds: Vec<_> = events.iter().map(|event| event.event.clone().unwrap()).collect();
    assert_eq!(kinds, [Event::LockGranted(5), Event::InodeChanged(1)]);
    assert!(events[0].seq < events[1].seq);
    // Who freed it may have waited itself; and nobody else is there to be waited for.
    hub.changed(changes(vec![granted], one.id()));
    assert_eq!(next(&mut one).await[0].event, Some(Event::LockGranted(5)));
    hub.acknowledge(one.stream_id(), hub.seq(), 0);
    hub.changed(changes(vec![Change::Workers(2)], 0));
    assert_eq!(next(&mut other).await[0].event, Some(Event::WorkersEpoch(2)));
}

#[tokio::test]
async fn acknowledgements_are_waited_for_and_the_lapsed_are_not() {
    let hub = hub(Duration::from_millis(300));
    let session = hub.open("lively", Before::default()).unwrap();
    hub.changed(changes(vec![Change::Inode(1)], 0));
    let seq = hub.seq();
    let waiting = tokio::spawn({
        let hub = hub.clone();
        async move { hub.wait_acknowledged(seq).await }
    });
    hub.acknowledge(session.stream_id(), seq, 0);
    tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap();

    let mut silent = hub.open("silent", Before::default()).unwrap();
    hub.changed(changes(vec![Change::Inode(2)], 0));
    tokio::time::timeout(Duration::from_secs(10), hub.wait_acknowledged(hub.seq())).await.unwrap();
    let ended = async {
        while silent.next().await.is_some() {
            hub.tick();
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap();
    assert!(!hub.acknowledge(silent.stream_id(), seq, 0), "it is not taken up by a word from before");
}

#[tokio::test]
async fn who_comes_to_a_place_ends_only_the_session_of_a_dead_one() {
    let hub = hub(Duration::from_secs(60));
    let place = async |session: &SessionStream| hub.supersede_client("here", session.id()).await;
    let first = hub.open("a", Before::default()).unwrap();
    let id = first.id();
    assert_eq!(place(&first).await, None);
    // Its stream breaks, and it comes back.
    drop(first);
    let first = hub.open("a", Before::of(id, true)).unwrap();
    assert_eq!((first.id(), place(&first).await), (id, None));
    // Somebody else claims to be there, too.
    let other = hub.open("a", Before::default()).unwrap();
    assert_eq!((place(&other).await, hub.is_over(id)), (None, false));
    // A client dies, which shows a moment after its successor has begun.
    let dead = other.id();
    let successor = hub.open("a", Before::default()).unwrap();
    let (over, ()) = tokio::join!(place(&successor), async { drop(other) });
    assert_eq!(over, Some(dead));
    assert_ne!(hub.open("a", Before::of(dead, false)).unwrap().id(), dead, "it cannot come back");
    assert_eq!(hub.supersede_client("elsewhere", first.id()).await, None);
    hub.tick();
    assert_eq!(hub.state.lock().places.len(), 2);
}

#[tokio::test]
async fn a_session_is_at_one_place() {
    let hub = hub(Duration::from_secs(60));
    let mut session = hub.open("a", Before::default()).unwrap();
    let id = session.id();
    for number in 0..100 {
        assert_eq!(hub.supersede_client(&format!("place {number}"), id).await, None);
        session = hub.open("a", Before::of(id, false)).unwrap();
        assert_eq!(session.id(), id);
    }
    assert_eq!(hub.state.lock().places.keys().collect::<Vec<_>>(), ["place 99"]);
}

#[tokio::test]
async fn a_session_is_that_of_whoever_has_opened_it_for_as_long_as_it_may_come_back() {
    let lease = Duration::from_secs(60);
    let hub = hub(lease);
    let [own, other] = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let by = |session: u64, owner| Before { owner: Some(owner), ..Before::of(session, session != 0) };
    let opened = |before| hub.open("a", before).map(|session| (session.id(), session));
    let (id, session) = opened(by(0, &own)).unwrap();
    let denied = |asked: Result<(), WorkError>| assert!(matches!(asked, Err(WorkError::Denied(_))), "{asked:?}");
    assert!(hub.check_owner(id, Some(&own)).is_ok() && hub.check_owner(0, Some(&other)).is_ok());
    denied(hub.check_owner(id, Some(&other)));
    denied(opened(by(id, &other)).map(drop));
    // Whose stream is broken loses nothing to others, not even by coming to its place.
    assert_eq!(hub.supersede_client("here", id).await, None);
    drop(session);
    denied(opened(by(id, &other)).map(drop));
    let (stranger, _strange) = opened(by(0, &other)).unwrap();
    assert_eq!((hub.supersede_client("here", stranger).await, hub.is_over(id)), (None, false));
    let (back, _session) = opened(by(id, &own)).unwrap();
    assert_eq!(back, id);
    // But whoever runs the cluster may finish what a dead client has left.
    let admin = Identity::new("c", Role::Admin, "admin").unwrap();
    assert!(hub.check_owner(id, Some(&admin)).is_ok());
    let (taken_up, _admins) = opened(by(id, &admin)).unwrap();
    assert_eq!(taken_up, id);
    assert_eq!(hub.state.lock().owners.get(id), Some(&own), "and the next client at its place is the owner's");
    hub.end(id);
    assert!(hub.check_owner(id, Some(&other)).is_ok() && hub.state.lock().owners.len() == 1);
    // Whoever comes next to its place has it.
    assert_eq!(hub.supersede_client("here", stranger).await, None);
    assert_eq!(hub.state.lock().places["here"], stranger);
    // Of before owners were recorded: an admin leaves it to the client that it is of.
    let (earlier, admins) = opened(by(77, &admin)).unwrap();
    assert_eq!((earlier, hub.owner_of(77)), (77, None));
    drop(admins);
    let (earlier, _clients) = opened(by(77, &own)).unwrap();
    assert_eq!((earlier, hub.owner_of(77).as_ref()), (77, Some(&own)));
    // Where nobody has shown who he is, nothing is anybody's.
    let plain = hub.open("a", Before::default()).unwrap();
    assert!(hub.check_owner(plain.id(), None).is_ok());
}

#[tokio::test]
async fn a_client_has_so_many_sessions_and_another_as_many_again() {
    let changes = Arc::default();
    let (lead, metrics) = (LeaderLease::of_one(), MasterMetrics::default());
    let hub = Arc::new(WatchHub::new((Duration::from_secs(60), 2), lead, metrics, changes, "c".into()));
    let [own, other] = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let admin = Identity::new("c", Role::Admin, "admin").unwrap();
    let open = |owner, session| hub.open("a", Before { owner: Some(owner), ..Before::of(session, session != 0) });
    let first = open(&own, 0).unwrap();
    let second = open(&own, 0).unwrap();
    let refused = open(&own, 0).map(drop).unwrap_err();
    assert!(matches!(refused, WorkError::Overloaded(_)), "{refused}");
    assert!(refused.to_string().contains("raise master.client_sessions"), "{refused}");
    // One that broke may come back, and counts until it may not.
    let id = second.id();
    drop(second);
    assert!(open(&own, 0).is_err());
    let _back = open(&own, id).unwrap();
    let _others: Vec<_> = (0..2).map(|_| open(&other, 0).unwrap()).collect();
    let _admins: Vec<_> = (0..5).map(|_| open(&admin, 0).unwrap()).collect();
    hub.end(first.id());
    let _next = open(&own, 0).unwrap();
}

/// What others than a session may know of directory 7, which is `d` in the root of a mount: whether its attributes, and
/// which inodes.
fn known_of_directory(hub: &WatchHub, mount_id: u32, session: u64, announced: Option<u64>) -> Option<(bool, Vec<u64>)> {
    let place = InodeLocation::Named { parent: 1, name: Bytes::from_static(b"d"), is_directory: true };
    let known = hub.known_by_others((7, mount_id, &place), session, announced)?;
    Some((known.has_attributes, known.inodes))
}

#[tokio::test]
async fn what_others_may_know_of_a_directory_is_known_but_in_the_first_lease() {
    let lease = Duration::from_secs(60);
    let hub = hub(lease);
    let [own, other] = ["own", "other"].map(|client| hub.open(client, Before::default()).unwrap());
    let known = |announced| known_of_directory(&hub, 1, own.id(), announced);
    assert_eq!(known(None), None, "clients of the term before may be yet to come");
    hub.state.lock().started -= lease;
    hub.watch_name(own.id(), 1, b"d");
    hub.watch_directory(own.id(), 7);
    assert_eq!(known(None), Some((false, vec![])));
    hub.watch_name(other.id(), 1, b"d");
    hub.watch_inodes(other.id(), [5]);
    assert_eq!(known(None), Some((true, vec![5])));
    hub.acknowledge(other.stream_id(), 9, 8);
    assert_eq!([known(Some(8)), known(Some(9))], [Some((false, vec![5])), Some((true, vec![5]))]);
    hub.changed(changes(Vec::new(), 0));
    let third = hub.open("third", Before { knows_inodes: true, ..Before::default() }).unwrap();
    assert_eq!(known(Some(8)), None, "what it has open is to be said");
    hub.acknowledge(third.stream_id(), hub.seq(), 0);
    assert_eq!(known(Some(8)), Some((false, vec![5])));
    hub.watch_name(other.id(), 7, b"n");
    assert_eq!(known(Some(8)), None, "it knows something that is in there");
}

#[tokio::test]
async fn who_does_not_see_a_mount_keeps_nobody_from_holding_what_is_in_it() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_with_a_mount_of_own(lease, &master);
    hub.changed(changes(Vec::new(), 0));
    let owners = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let [own, other] = [false, true].map(|knows_inodes| {
        let owner = Some(&owners[usize::from(knows_inodes)]);
        hub.open("a", Before { owner, knows_inodes, ..Before::default() }).unwrap()
    });
    let known = |mount_id| known_of_directory(&hub, mount_id, own.id(), None);
    assert_eq!((known(1), known(2)), (Some((false, vec![])), None), "what it has open is to be said");
    hub.acknowledge(other.stream_id(), hub.seq(), 0);
    hub.watch_inodes(other.id(), 0..5000);
    assert_eq!((known(1), known(2)), (Some((false, vec![])), None), "it knows too many of them");
    hub.watch_inodes(other.id(), 0..100_000);
    assert_eq!((known(1), known(2)), (Some((false, vec![])), None), "it may know everything");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_see_a_mount_keeps_nothing_in_it_from_being_deleted_or_frozen() {
    let lease = Duration::from_millis(300);
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_with_a_mount_of_own(lease, &master);
    hub.changed(changes(Vec::new(), 0));
    let [own, other] = ["own", "other"].map(|name| {
        let owner = Identity::new("c", Role::Client, name).unwrap();
        hub.open(name, Before { owner: Some(&owner), ..Before::default() }).unwrap()
    });
    // It takes in nothing, and goes by no mount table.
    hub.acknowledge(own.stream_id(), hub.seq(), 0);
    hub.mounts_settled(own.id(), 7);
    assert!(hub.wait_all_acknowledged(1, hub.seq()).await && !hub.wait_all_acknowledged(2, hub.seq()).await);
    hub.wait_settled(1, 7).await.unwrap();
    let late = hub.wait_settled(2, 7).await.unwrap_err().to_string();
    assert!(late.contains("client other did not say in time"), "{late}");
    // It goes away, and its lease ends.
    drop(other);
    assert!(hub.has_settled(1) && !hub.has_settled(2));
    let (settled, ()) = tokio::join!(hub.wait_settled(1, 8), async {
        tokio::time::sleep(lease).await;
        hub.acknowledge(own.stream_id(), hub.seq(), 0);
        hub.tick();
        hub.mounts_settled(own.id(), 8);
    });
    settled.unwrap();
}

#[tokio::test]
async fn who_does_not_see_a_mount_any_more_forgets_everything_and_knows_nothing_when_it_is_there_again() {
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(Duration::from_secs(60), &master);
    let mut sessions = ["own", "other"].map(|name| {
        let owner = Identity::new("c", Role::Client, name).unwrap();
        hub.open(name, Before { owner: Some(&owner), ..Before::default() }).unwrap()
    });
    for session in &mut sessions {
        next(session).await;
        hub.watch_name(session.id(), 7, b"n");
    }
    let [own, other] = &mut sessions;
    let removed =
        || Change::Entry { parent: 7, name: "n".into(), old_inode: 5, new_inode: 0, first_fill: false, mount_id: 1 };
    let told = Event::Entry(EntryChanged { parent: 7, name: "n".into(), old_inode: 5, new_inode: 0 });
    master.changed(shown_to(1, None, "*"));
    master.changed(shown_to(1, Some("*"), "own"));
    assert_eq!(kinds(own).await, [Event::MountsEpoch(2), Event::MountsEpoch(2)]);
    let events = next(other).await;
    assert!(matches!(&events[0].event, Some(Event::Reset(reset)) if reset.session == other.id()), "{events:?}");
    assert_eq!(events[1].event, Some(Event::MountsEpoch(2)));
    assert!(events.len() == 2 && events[0].seq < events[1].seq, "{events:?}");
    master.changed(changes(vec![removed()], 0));

    // It is there again: what was learnt before does not stand, what is learnt now does.
    master.changed(shown_to(1, Some("own"), "*"));
    master.changed(changes(vec![removed()], 0));
    hub.watch_name(other.id(), 7, b"n");
    master.changed(changes(vec![removed()], 0));
    assert_eq!(kinds(other).await, [Event::MountsEpoch(2), told.clone()]);
    let expected = [told.clone(), Event::MountsEpoch(2), told.clone(), told.clone()];
    assert_eq!(kinds(own).await, expected);

    // One that is away meanwhile begins anew.
    let (id, applied_seq) = (own.id(), hub.seq());
    drop(sessions);
    master.changed(shown_to(1, Some("*"), "other"));
    master.changed(shown_to(1, Some("other"), "*"));
    let owner = Identity::new("c", Role::Client, "own").unwrap();
    let before = Before { owner: Some(&owner), applied_seq, ..Before::of(id, true) };
    let mut back = hub.open("own", before).unwrap();
    assert!(matches!(kinds(&mut back).await[..], [Event::Reset(_)]));
}

#[tokio::test]
async fn what_others_change_while_the_state_decides_is_recalled() {
    let master: Arc<CurrentSessions> = Arc::default();
    let hub = hub_of(Duration::from_secs(60), &master);
    let [mut own, other] = ["own", "other"].map(|client| hub.open(client, Before::default()).unwrap());
    next(&mut own).await;
    master.delegations().claim(7, own.id());
    master.changed(changes(vec![entry(7, false)], other.id()));
    assert_eq!(kinds(&mut own).await, [Event::Recall(7)]);
}

#[tokio::test]
async fn what_a_session_changes_while_its_stream_is_broken_it_knows() {
    let lease = Duration::from_secs(60);
    let hub = hub(lease);
    hub.state.lock().started -= lease;
    let [own, other] = ["own", "other"].map(|client| hub.open(client, Before::default()).unwrap());
    let place = InodeLocation::Named { parent: 1, name: Bytes::from_static(b"d"), is_directory: true };
    let is_known = || hub.known_by_others((7, 1, &place), own.id(), None).is_none();
    let id = other.id();
    drop(other);
    assert!(!is_known());
    hub.changed(changes(vec![entry(7, false)], id));
    assert!(is_known(), "its client has the result when it is back");
}

#[tokio::test]
async fn who_has_not_said_that_it_forgot_everything_is_told_again() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    master.changed(changes(vec![Change::Workers(1)], 0));
    let hub = hub_of(lease, &master);
    hub.state.lock().started -= lease;
    let own = hub.open("own", Before::default()).unwrap();
    let granted = DirectoryDelegation { mount_id: 1, directory: 7, session: own.id() };
    let acquired = vec![DelegationChange::Decided(7), DelegationChange::Granted(granted)];
    hub.state.lock().broken.insert(5, Instant::now());
    let before = Before { applied_seq: hub.seq(), ..Before::of(5, true) };
    master.changed(Changes { delegations: acquired, ..changes(Vec::new(), own.id()) });
    let place = InodeLocation::Named { parent: 1, name: Bytes::from_static(b"d"), is_directory: true };
    let is_known = || hub.known_by_others((8, 1, &place), own.id(), None).is_none();
    for _ in 0..2 {
        let mut stream = hub.open("a", before).unwrap();
        assert!(matches!(kinds(&mut stream).await[0], Event::Reset(_)), "it knows what another holds by now");
        drop(stream);
        assert!(is_known(), "it may not have heard of that");
    }
    let mut stream = hub.open("a", before).unwrap();
    next(&mut stream).await;
    hub.acknowledge(stream.stream_id(), hub.seq(), 0);
    assert!(!is_known());
    drop(stream);
    let mut stream = hub.open("a", Before { applied_seq: hub.seq(), ..before }).unwrap();
    assert!(matches!(kinds(&mut stream).await[0], Event::Resumed(_)));
}

#[tokio::test]
async fn who_was_away_when_others_came_to_hold_what_it_may_know_begins_anew() {
    let lease = Duration::from_secs(60);
    let master: Arc<CurrentSessions> = Arc::default();
    let old = hub_of(lease, &master);
    let reader = old.open("reader", Before::default()).unwrap();
    let id = reader.id();
    let acquired = |session| {
        let granted = DelegationChange::Granted(DirectoryDelegation { mount_id: 1, directory: 7, session });
        Changes { delegations: vec![DelegationChange::Decided(7), granted], ..changes(Vec::new(), session) }
    };
    let begins_anew = async |hub: &Arc<WatchHub>, applied_seq| {
        let before = Before { applied_seq, ..Before::of(id, true) };
        let mut stream = hub.open("reader", before).unwrap();
        matches!(kinds(&mut stream).await[0], Event::Reset(_))
    };
    master.changed(changes(vec![Change::Workers(1)], 0));
    let applied_seq = old.seq();
    master.changed(acquired(id));
    assert!(!begins_anew(&hub_of(lease, &master), applied_seq).await, "it knows what it has");
    master.changed(acquired(id + 1));
    assert!(!begins_anew(&old, applied_seq).await, "what it knows was looked at");
    let new = hub_of(lease, &master);
    assert!(begins_anew(&new, applied_seq).await);

    let (later, seq) = (hub_of(lease, &master), new.seq());
    assert!(!begins_anew(&hub_of(lease, &master), seq).await);
    master.delegations().claim(8, id + 1);
    assert!(begins_anew(&later, seq).await, "the state is about to decide");
    master.delegations().give_up(8, id + 1);
    assert!(!begins_anew(&hub_of(lease, &master), seq).await);
}

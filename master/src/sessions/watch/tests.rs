use bytes::Bytes;

use super::*;
use crate::raft::LeaderLease;

fn hub(lease: Duration) -> Arc<WatchHub> {
    let hub = WatchHub::new(lease, &Clock::default(), LeaderLease::of_one(), MasterMetrics::new());
    hub.set_cluster_id("c");
    Arc::new(hub)
}

fn entry(parent: u64, first_fill: bool) -> Change {
    Change::Entry { parent, name: Bytes::from_static(b"n"), old_inode: 0, new_inode: 9, first_fill }
}

async fn next(session: &mut SessionStream) -> Vec<WatchEvent> {
    session.next().await.unwrap().iter().flat_map(|events| events.iter().cloned()).collect()
}

#[tokio::test]
async fn a_session_begins_with_a_reset_and_sees_changes_in_order() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", 0, false).unwrap();
    let first = next(&mut session).await;
    assert!(matches!(&first[0].event, Some(Event::Reset(reset))
            if reset.session == session.id() && reset.cluster_id == "c"));
    hub.mark_seen(7);
    hub.changed(vec![entry(7, false), Change::Workers(2), entry(8, false)], 0);
    hub.changed(vec![Change::Inode(5)], 0);
    let events = next(&mut session).await;
    let kinds: Vec<_> = events.iter().map(|event| event.event.clone().unwrap()).collect();
    assert!(matches!(kinds[..], [Event::Entry(_), Event::WorkersEpoch(2), Event::InodeChanged(5)]), "{kinds:?}");
    assert!(events.windows(2).all(|pair| pair[0].seq < pair[1].seq));
    assert_eq!(events.last().unwrap().seq, hub.seq());
}

#[tokio::test]
async fn the_first_fill_is_told_only_where_an_absence_was() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", 0, false).unwrap();
    next(&mut session).await;
    hub.mark_seen(7);
    hub.changed(vec![entry(7, true)], 0);
    hub.mark_absence_seen(7);
    hub.changed(vec![entry(7, true)], 0);
    assert_eq!(next(&mut session).await.len(), 1);
}

#[tokio::test]
async fn a_session_that_falls_behind_is_reset() {
    let hub = hub(Duration::from_secs(5));
    let mut session = hub.open("test", 0, false).unwrap();
    next(&mut session).await;
    for _ in 0..=QUEUE_EVENTS / 1000 {
        hub.changed((0..1000).map(Change::Inode).collect(), 0);
    }
    let events = next(&mut session).await;
    assert!(matches!(events[0].event, Some(Event::Reset(_))), "{:?}", events[0]);
    assert!(events.len() < QUEUE_EVENTS);
    assert_eq!(events.last().unwrap().seq, hub.seq());
}

#[tokio::test]
async fn a_session_is_not_told_of_its_own_changes_and_nobody_waits_for_it_to_take_them() {
    let hub = hub(Duration::from_secs(60));
    let (mut one, mut other) = (hub.open("one", 0, false).unwrap(), hub.open("other", 0, false).unwrap());
    let begun = [next(&mut one).await, next(&mut other).await];
    hub.acknowledge(one.id(), begun[0][0].seq);
    hub.changed(vec![Change::Inode(1)], one.id());
    let seq = hub.seq();
    assert_eq!(
        [hub.last_queued_seq(one.id()), hub.last_queued_seq(other.id()), hub.last_queued_seq(99)],
        [begun[0][0].seq, seq, seq]
    );
    let received = next(&mut other).await;
    assert_eq!(received[0].event, Some(Event::InodeChanged(1)));
    hub.acknowledge(other.id(), received[0].seq);
    tokio::time::timeout(Duration::from_secs(10), hub.wait_acknowledged(seq)).await.unwrap();
    hub.changed(vec![Change::Inode(2)], other.id());
    assert_eq!(next(&mut one).await[0].event, Some(Event::InodeChanged(2)));
}

#[tokio::test]
async fn a_broken_session_goes_on_within_its_lease_and_no_longer() {
    let hub = hub(Duration::from_millis(300));
    let first = hub.open("a", 0, false).unwrap();
    let id = first.id();
    // Before the broken stream was noticed, and after.
    let mut second = hub.open("a", id, false).unwrap();
    assert_eq!(second.id(), id);
    drop(first);
    assert!(hub.is_live(id) && matches!(next(&mut second).await[0].event, Some(Event::Reset(_))));
    drop(second);
    assert!(!hub.is_live(id) && !hub.is_over(id));
    let third = hub.open("a", id, false).unwrap();
    assert_eq!(third.id(), id);
    drop(third);
    while !hub.is_over(id) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_ne!(hub.open("a", id, true).unwrap().id(), id);
}

#[tokio::test]
async fn a_session_that_ends_in_order_is_over_at_once() {
    let hub = hub(Duration::from_secs(1));
    while !hub.has_settled() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (ended, broken) = (hub.open("a", 0, false).unwrap(), hub.open("b", 0, false).unwrap());
    hub.end(ended.id());
    assert!(hub.is_over(ended.id()) && hub.has_settled());
    drop(ended);
    assert!(hub.has_settled());
    let id = broken.id();
    drop(broken);
    assert!(!hub.is_over(id) && !hub.has_settled());
}

#[tokio::test]
async fn sessions_of_before_a_restart_go_on_when_they_are_recorded() {
    let hub = hub(Duration::from_secs(60));
    assert_eq!(hub.open("a", 7, true).unwrap().id(), 7);
    assert_ne!(hub.open("b", 8, false).unwrap().id(), 8);
}

#[tokio::test]
async fn the_loss_of_a_last_name_is_told_to_everybody() {
    let hub = hub(Duration::from_secs(60));
    let mut session = hub.open("a", 0, false).unwrap();
    next(&mut session).await;
    hub.changed(vec![Change::Inode(1), Change::Unlinked(2)], session.id());
    let events = next(&mut session).await;
    assert_eq!(events.iter().map(|event| event.event.clone().unwrap()).collect::<Vec<_>>(), [Event::Unlinked(2)]);
}

#[tokio::test]
async fn a_lock_is_granted_to_its_session_alone() {
    let hub = hub(Duration::from_secs(60));
    let (mut one, mut other) = (hub.open("one", 0, false).unwrap(), hub.open("other", 0, false).unwrap());
    next(&mut one).await;
    next(&mut other).await;
    let granted = Change::LockGranted { session: one.id(), waiter: 5 };
    hub.changed(vec![granted.clone(), Change::Inode(1)], other.id());
    let events = next(&mut one).await;
    let kinds: Vec<_> = events.iter().map(|event| event.event.clone().unwrap()).collect();
    assert_eq!(kinds, [Event::InodeChanged(1), Event::LockGranted(5)]);
    assert!(events[0].seq < events[1].seq);
    // Who freed it may have waited itself; and nobody else is there to be waited for.
    hub.changed(vec![granted], one.id());
    assert_eq!(next(&mut one).await[0].event, Some(Event::LockGranted(5)));
    hub.acknowledge(one.id(), hub.seq());
    hub.changed(vec![Change::Workers(2)], 0);
    assert_eq!(next(&mut other).await[0].event, Some(Event::WorkersEpoch(2)));
}

#[tokio::test]
async fn acknowledgements_are_waited_for_and_the_lapsed_are_not() {
    let hub = hub(Duration::from_millis(300));
    let session = hub.open("lively", 0, false).unwrap();
    hub.changed(vec![Change::Inode(1)], 0);
    let seq = hub.seq();
    let waiting = tokio::spawn({
        let hub = hub.clone();
        async move { hub.wait_acknowledged(seq).await }
    });
    hub.acknowledge(session.id(), seq);
    tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap();

    let mut silent = hub.open("silent", 0, false).unwrap();
    hub.changed(vec![Change::Inode(2)], 0);
    tokio::time::timeout(Duration::from_secs(10), hub.wait_acknowledged(hub.seq())).await.unwrap();
    let ended = async {
        while silent.next().await.is_some() {
            hub.tick();
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap();
    assert!(!hub.acknowledge(silent.id(), seq), "it is not taken up by a word from before");
}

#[tokio::test]
async fn who_comes_to_a_place_ends_only_the_session_of_a_dead_one() {
    let hub = hub(Duration::from_secs(60));
    let place = async |session: &SessionStream| hub.supersede_client("here", session.id()).await;
    let first = hub.open("a", 0, false).unwrap();
    let id = first.id();
    assert_eq!(place(&first).await, None);
    // Its stream breaks, and it comes back.
    drop(first);
    let first = hub.open("a", id, true).unwrap();
    assert_eq!((first.id(), place(&first).await), (id, None));
    // Somebody else claims to be there, too.
    let other = hub.open("a", 0, false).unwrap();
    assert_eq!((place(&other).await, hub.is_over(id)), (None, false));
    // A client dies, which shows a moment after its successor has begun.
    let dead = other.id();
    let successor = hub.open("a", 0, false).unwrap();
    let (over, ()) = tokio::join!(place(&successor), async { drop(other) });
    assert_eq!(over, Some(dead));
    assert_ne!(hub.open("a", dead, false).unwrap().id(), dead, "it cannot come back");
    assert_eq!(hub.supersede_client("elsewhere", first.id()).await, None);
    hub.tick();
    assert_eq!(hub.state.lock().places.len(), 2);
}

//! What many proposers cost, and what the log keeps for a master that is away.

use std::collections::BTreeMap;
use std::time::Duration;

use cavern_conf::{ByteSize, Interval, schema};
use cavern_consensus::Proposer;
use cavern_proto::master::Job;
use cavern_proto::record::command::Command;
use cavern_state::{Database, Family, Outcome};
use openraft::async_runtime::watch::WatchReceiver as _;
use rocksdb::IteratorMode;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::harness::{eventually, metric};
use super::members::{Member, addresses, group, group_with, leader, stop};

/// So little that tests write more.
const SMALL: ByteSize = ByteSize::kib(64);

/// One after another from each of the proposers, each with so many bytes.
async fn propose(proposer: &Proposer, proposers: usize, each: usize, bytes: usize) {
    let mut tasks = JoinSet::new();
    for _ in 0..proposers {
        let proposer = proposer.clone();
        tasks.spawn(async move {
            for _ in 0..each {
                let command = match bytes {
                    0 => Command::ReserveMasterId(0),
                    _ => Command::PutJob(Job { path: "x".repeat(bytes), ..Job::default() }),
                };
                let outcome = proposer.propose(command).await.unwrap();
                assert!(matches!(outcome, Outcome::Job(_) | Outcome::MasterId(_)), "{outcome:?}");
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

async fn proposer(members: &[Member]) -> (usize, Proposer) {
    let leads = leader(members).await;
    (leads, members[leads].term().unwrap().services.proposer.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_proposers_share_syncs() {
    for masters in [1, 3] {
        let members = group(masters).await;
        let (leads, proposer) = proposer(&members).await;
        for proposers in [1, 40, 400] {
            let each = 4000 / proposers / if proposers == 1 { 10 } else { 1 };
            let syncs = || metric(&members[leads].metrics, "log_sync_seconds_count");
            let (before, begun) = (syncs(), Instant::now());
            propose(&proposer, proposers, each, 0).await;
            let (took, syncs) = (begun.elapsed(), syncs() - before);
            let commands = (proposers * each) as u64;
            let micros = took.as_micros() as u64 / each as u64;
            eprintln!(
                "{masters} masters, {proposers} proposers: {commands} commands, {syncs} syncs, {micros} us a proposal, \
                 {} commands/s",
                u128::from(commands) * 1_000_000 / took.as_micros().max(1)
            );
            assert!(proposers == 1 || syncs < commands / 4, "{syncs} syncs for {commands} commands");
            assert!(members[leads].term().is_some(), "the lead was lost within {took:?}");
        }
        drop(proposer);
        stop(members).await;
    }
}

/// Last applied entry, and the last ones that a snapshot covers and that are purged.
fn progress(member: &Member) -> (u64, u64, u64) {
    let observed = member.running.as_ref().unwrap().observe();
    let observed = observed.borrow_watched();
    let index = |id: Option<_>| id.map_or(0, |id: cavern_consensus::LogId| id.index);
    (index(observed.last_applied), index(observed.snapshot), index(observed.purged))
}

/// All that a master has applied, after its end.
fn state(member: &Member) -> BTreeMap<(usize, Vec<u8>), Vec<u8>> {
    let database = Database::open(&member.dir.path().join("master"), 1 << 20).unwrap();
    let mut all = BTreeMap::new();
    for (number, family) in Family::STATE.iter().enumerate() {
        for item in database.raw().iterator_cf(database.family(*family), IteratorMode::Start) {
            let (key, value) = item.unwrap();
            all.insert((number, key.into()), value.into());
        }
    }
    all
}

/// Stops a follower while 500 KB are written, and starts it again; returns when all are equal, with the number of
/// snapshots that it was sent. `is_ready` is awaited before the start, with the index at which it was stopped, and the
/// bytes of the log.
async fn away_for_a_while(settings: schema::Master, is_ready: impl Fn((u64, u64, u64), u64, u64) -> bool) -> u64 {
    let mut members = group_with(3, settings).await;
    let masters = addresses(&members);
    let (leads, proposer) = proposer(&members).await;
    propose(&proposer, 10, 5, 1000).await;
    let away = (leads + 1) % 3;
    eventually(|| async { progress(&members[away]).0 == progress(&members[leads]).0 }).await;
    let at = progress(&members[away]).0;
    members[away].running.take().unwrap().stop().await;
    // One after another, so that there are many entries.
    propose(&proposer, 2, 250, 1000).await;
    let log_bytes = || metric(&members[leads].metrics, "log_bytes");
    eventually(|| async { is_ready(progress(&members[leads]), at, log_bytes()) }).await;
    let before = metric(&members[away].metrics, "snapshots_installed_total");
    assert_eq!(before, 0);

    let back = members[away].start(&masters).await.await.unwrap().unwrap().unwrap();
    members[away].running = Some(back);
    // Once with what it lacked, and once with what comes then.
    eventually(|| async { progress(&members[away]).0 == progress(&members[leads]).0 }).await;
    propose(&proposer, 10, 5, 1000).await;
    eventually(|| async { members.iter().all(|member| progress(member).0 == progress(&members[leads]).0) }).await;
    assert!(members[leads].term().is_some(), "the lead has changed");
    let sent = metric(&members[away].metrics, "snapshots_installed_total");
    drop(proposer);
    let applied: Vec<u64> = members.iter().map(|member| progress(member).0).collect();
    assert!(applied.iter().all(|index| *index == applied[0]), "{applied:?}");
    let (leader, followers): (Vec<_>, Vec<_>) = (0..3).partition(|number| *number == leads);
    for number in followers.into_iter().chain(leader) {
        members[number].running.take().unwrap().stop().await;
    }
    let states: Vec<_> = members.iter().map(state).collect();
    // Of the jobs that have ended only the last ones are kept.
    assert!(states[away].len() > 100, "{} records", states[away].len());
    assert!(states.iter().all(|state| *state == states[leads]), "the masters differ");
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_too_long_is_cut_and_who_was_away_gets_a_snapshot() {
    let settings = schema::Master { snapshot_after: SMALL, log_size_max: SMALL, ..schema::Master::default() };
    // When no more is to be cut: what is cut while a snapshot is sent takes another one.
    let most = SMALL.bytes() + SMALL.bytes() / 8;
    let sent = away_for_a_while(settings, |(_, snapshot, purged), at, bytes| {
        purged > at && snapshot >= purged && bytes <= most
    });
    assert_eq!(sent.await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_away_for_a_moment_gets_the_entries_that_snapshots_cover() {
    let settings = schema::Master { snapshot_after: SMALL, ..schema::Master::default() };
    let sent = away_for_a_while(settings, |(_, snapshot, purged), at, _| {
        assert_eq!(purged, 0);
        snapshot > at
    });
    assert_eq!(sent.await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_are_old_are_cut_after_a_snapshot_and_never_before_it() {
    let settings =
        schema::Master { snapshot_after: SMALL, log_retention: Interval::millis(1500), ..schema::Master::default() };
    let members = group_with(1, settings).await;
    let (_, proposer) = proposer(&members).await;
    let begun = Instant::now();
    propose(&proposer, 1, 90, 1000).await;
    // By the time alone: nothing else is written.
    eventually(|| async { progress(&members[0]).2 > 30 }).await;
    assert!(begun.elapsed() > Duration::from_millis(1500), "young entries are gone: {:?}", progress(&members[0]));
    let (applied, snapshot, purged) = progress(&members[0]);
    assert!(purged <= snapshot && snapshot <= applied, "{applied} {snapshot} {purged}");
    eventually(|| async { metric(&members[0].metrics, "log_bytes") < 70_000 }).await;
    drop(proposer);
    stop(members).await;
}

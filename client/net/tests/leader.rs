//! The way to the master that leads, with masters that lead, follow, hang, and change their minds.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::time::Duration;

use cavern_net::master::{RetryPolicy, SUSPECT_AFTER, StreamFailure, Stubs};
use cavern_net::{MasterChannel, NetError};
use cavern_proto::NotLeading;
use cavern_proto::master::{Entry, LookupRequest};
use support::{FakeMaster, Role, config, nobody, until};
use tonic::{Code, Status};

/// More than anything here takes, on a busy machine.
const AMPLE: Duration = Duration::from_secs(30);

async fn lookup(channel: &MasterChannel) -> Result<Entry, NetError> {
    channel.call_patiently("Lookup", ask).await
}

async fn ask(mut stubs: Stubs) -> Result<tonic::Response<Entry>, Status> {
    stubs.namespace.lookup(LookupRequest::default()).await
}

fn follows(leader: &str) -> Role {
    Role::Follows(Some(leader.to_owned()))
}

/// A channel, and the masters of its configuration with these roles.
fn group<const N: usize>(roles: [Role; N], timeout: Duration) -> (MasterChannel, [FakeMaster; N]) {
    let masters = roles.map(FakeMaster::start);
    let addresses: Vec<String> = masters.iter().map(FakeMaster::address).collect();
    (MasterChannel::new(&config(&addresses, timeout)).unwrap(), masters)
}

#[tokio::test]
async fn a_call_follows_a_hint_to_an_address_outside_the_configuration() {
    let leader = FakeMaster::start(Role::Leads);
    let (channel, [follower]) = group([follows(&leader.address())], AMPLE);
    let begun = tokio::time::Instant::now();
    lookup(&channel).await.unwrap();
    assert_eq!((follower.count("Lookup"), leader.count("Lookup")), (1, 1));
    lookup(&channel).await.unwrap();
    assert_eq!((follower.count("Lookup"), leader.count("Lookup")), (1, 2), "it is preferred from then on");
    let (took, probes) = (begun.elapsed(), follower.count("ListWorkers") + leader.count("ListWorkers"));
    assert!(probes == 0 || took >= SUSPECT_AFTER, "nobody is suspected who answers within {took:?}");
    assert_eq!(channel.stubs().address(), leader.address());
    channel.shutdown().await;
}

#[tokio::test]
async fn masters_that_name_each_other_are_not_asked_without_a_pause() {
    let timeout = Duration::from_millis(700);
    let (channel, [one, other]) = group([Role::Leads, Role::Leads], timeout);
    one.is_now(follows(&other.address()));
    other.is_now(follows(&one.address()));
    let started = tokio::time::Instant::now();
    let error = lookup(&channel).await.unwrap_err();
    assert!(error.is_master_silent() && error.to_string().contains("no master leads"), "{error}");
    assert!(started.elapsed() >= timeout / 2, "it is tried until its deadline: {:?}", started.elapsed());
    // Two for each pause of 20, 40, 80, 160, 320 ms, and one round more.
    let calls = one.count("Lookup") + other.count("Lookup");
    assert!((2..=12).contains(&calls), "{calls}");
    // The real one, whom nobody names.
    other.is_now(Role::Leads);
    let found = MasterChannel::new(&config(&[one.address(), other.address()], AMPLE)).unwrap();
    lookup(&found).await.unwrap();
    found.shutdown().await;
    channel.shutdown().await;
}

#[tokio::test]
async fn bad_hints_are_no_hints() {
    let (channel, [one, leader]) = group([follows("no address"), Role::Leads], AMPLE);
    lookup(&channel).await.unwrap();
    assert_eq!((one.count("Lookup"), leader.count("Lookup")), (1, 1));
    channel.shutdown().await;
    let (channel, [one, leader]) = group([Role::Leads, Role::Leads], AMPLE);
    one.is_now(follows(&one.address()));
    lookup(&channel).await.unwrap();
    assert_eq!(leader.count("Lookup"), 1, "one that names itself");
    channel.shutdown().await;
}

#[tokio::test]
async fn a_call_waits_for_an_election() {
    let nobody = || Role::Follows(None);
    let (channel, [one, other, third]) = group([nobody(), nobody(), nobody()], AMPLE);
    let (answer, before) = tokio::join!(lookup(&channel), async {
        let probes = || [&one, &other, &third].map(|master| master.count("ListWorkers"));
        until("all are probed, again and again", || channel.is_silent() && probes().iter().all(|count| *count > 1))
            .await;
        third.is_now(Role::Leads);
        third.count("Lookup")
    });
    answer.unwrap();
    assert_eq!(third.count("Lookup"), before + 1);
    assert!(!channel.is_silent());
    channel.shutdown().await;
}

#[tokio::test]
async fn a_group_without_a_leader_is_no_answer() {
    let timeout = Duration::from_millis(1500);
    let (channel, [one, other]) = group([Role::Follows(None), Role::Follows(None)], timeout);
    let deadline = tokio::time::Instant::now() + timeout;
    let error = channel.call_as("Lookup", RetryPolicy::UntilDeadline, deadline, ask).await.unwrap_err();
    assert!(matches!(error, NetError::MasterUnavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("no master leads"), "{error}");
    assert!(one.count("Lookup") >= 1 && other.count("Lookup") >= 1);
    until("it is known", || channel.is_given_up()).await;
    // Who has something cached does not wait.
    let before = one.count("Lookup") + other.count("Lookup");
    let error = channel.try_call("Lookup", ask).await.unwrap_err();
    assert!(error.is_master_silent());
    assert_eq!(one.count("Lookup") + other.count("Lookup"), before);
    channel.shutdown().await;
}

#[tokio::test]
async fn a_call_leaves_a_master_that_hangs_once_another_leads() {
    let (channel, [old, new]) = group([Role::Leads, Role::Leads], AMPLE);
    new.is_now(follows(&old.address()));
    lookup(&channel).await.unwrap();
    let stream = channel.stubs();
    old.is_now(Role::Hangs);
    let election = async {
        until("the call has come", || old.count("Lookup") == 2).await;
        // It still thinks that the other one leads; nobody is moved.
        until("it is probed", || new.count("ListWorkers") > 1).await;
        new.is_now(Role::Follows(None));
        let probes = new.count("ListWorkers");
        until("it is probed again", || new.count("ListWorkers") > probes + 1).await;
        assert_eq!(new.count("Lookup"), 0);
        new.is_now(Role::Leads);
    };
    let (answer, (), ()) = tokio::join!(lookup(&channel), election, channel.moved_from(&stream));
    answer.unwrap();
    assert_eq!((old.count("Lookup"), new.count("Lookup")), (2, 1));
    assert_eq!(channel.stubs().address(), new.address());
    // What the old one still says is out of date.
    channel.note_answer(&stream);
    assert_eq!(channel.stubs().address(), new.address());
    channel.shutdown().await;
}

#[tokio::test]
async fn a_slow_leader_keeps_its_call() {
    let slow = Role::LeadsSlowly(Duration::from_millis(1200));
    let (channel, [leader, follower]) = group([slow, Role::Leads], AMPLE);
    follower.is_now(follows(&leader.address()));
    lookup(&channel).await.unwrap();
    assert_eq!(leader.count("Lookup"), 1, "it was never asked again");
    assert!(leader.count("ListWorkers") >= 1, "it was suspected");
    assert_eq!(follower.count("Lookup"), 0);
    channel.shutdown().await;
}

#[tokio::test]
async fn a_refused_connection_rotates() {
    let leader = FakeMaster::start(Role::Leads);
    let masters = [nobody(), nobody(), leader.address()];
    let channel = MasterChannel::new(&config(&masters, AMPLE)).unwrap();
    lookup(&channel).await.unwrap();
    assert_eq!((leader.count("Lookup"), channel.stubs().address()), (1, leader.address().as_str()));
    channel.shutdown().await;
}

#[tokio::test]
async fn the_leaders_own_errors_are_answers() {
    let (channel, [follower, leader]) = group([Role::Leads, Role::Refuses(Code::FailedPrecondition)], AMPLE);
    follower.is_now(follows(&leader.address()));
    let error = channel.call_as("Lookup", RetryPolicy::OneAttempt, channel.deadline(), ask).await.unwrap_err();
    assert!(matches!(error, NetError::Master { code: Code::FailedPrecondition, .. }), "{error:?}");
    assert_eq!((follower.count("Lookup"), leader.count("Lookup")), (1, 1));
    channel.shutdown().await;
}

#[tokio::test]
async fn a_stream_follows_what_ended_it() {
    let (channel, [follower, leader]) = group([Role::Leads, Role::Leads], AMPLE);
    let stubs = channel.stubs();
    let named = NotLeading { leader: Some(leader.address()) }.to_status();
    assert_eq!(channel.stream_failed(&stubs, &named), StreamFailure::Redirected);
    let next = channel.stubs();
    assert_eq!((stubs.address(), next.address()), (follower.address().as_str(), leader.address().as_str()));
    // It opens there, and says so: a stream that is still open at the first one is to move.
    assert_eq!(channel.open(&next, async { 1 }).await, Some(1));
    channel.note_answer(&next);
    channel.moved_from(&stubs).await;
    assert_eq!(channel.open(&stubs, std::future::pending::<()>()).await, None);
    let refused = Status::failed_precondition("the session has lapsed");
    assert_eq!(channel.stream_failed(&next, &refused), StreamFailure::Answered);
    assert_eq!(follower.count("ListWorkers") + leader.count("ListWorkers"), 0);
    let unled = NotLeading { leader: None }.to_status();
    assert_eq!(channel.stream_failed(&next, &unled), StreamFailure::NoLeader);
    let lost = channel.broken(unled);
    assert!(lost.is_master_silent(), "{lost:?}");
    until("it is suspected", || leader.count("ListWorkers") > 0).await;
    assert_eq!(channel.stubs().address(), leader.address(), "it leads, whatever it said");
    channel.shutdown().await;
}

#[tokio::test]
async fn masters_that_the_leader_has_named_are_asked_when_it_is_gone() {
    let other = FakeMaster::start(Role::Leads);
    let channel = MasterChannel::new(&config(&[nobody()], AMPLE)).unwrap();
    let said = [nobody(), "no address".to_owned(), other.address()];
    channel.note_group(7, &said);
    assert_eq!(channel.group_epoch(), 7, "the leader is told that");
    lookup(&channel).await.unwrap();
    assert_eq!((other.count("Lookup"), other.count("GetGroup")), (1, 0));
    channel.note_group(0, &[]);
    assert_eq!(channel.group_epoch(), 7, "it says nothing");
    channel.note_group(8, &[]);
    assert_eq!(channel.group_epoch(), 7, "the masters of that epoch are not known");
    channel.shutdown().await;
}

/// Three masters, of which the one with this id leads.
fn three(leader: u64) -> [FakeMaster; 3] {
    let masters = [(); 3].map(|()| FakeMaster::start(Role::Follows(None)));
    let members: Vec<(u64, String)> = (1..).zip(masters.iter().map(FakeMaster::address)).collect();
    for (id, master) in (1..).zip(&masters) {
        master.has_group(id, leader, &members);
    }
    masters
}

#[tokio::test]
async fn a_command_finds_the_leader_among_three() {
    let masters = three(3);
    let all = masters.each_ref().map(FakeMaster::address);
    let channel = MasterChannel::connect(&config(&all, AMPLE)).await.unwrap();
    assert_eq!(channel.stubs().address(), all[2]);
    assert_eq!(masters.each_ref().map(|master| master.count("GetGroup")), [1, 0, 1], "the first one knows");
    // Where the configuration names one that follows only, or one that is gone.
    let channel = MasterChannel::connect(&config(&[nobody(), all[1].clone()], AMPLE)).await.unwrap();
    assert_eq!(channel.stubs().address(), all[2]);
}

#[tokio::test]
async fn a_command_waits_for_a_leader_and_not_for_ever() {
    let masters = three(0);
    let all = masters.each_ref().map(FakeMaster::address);
    let error = MasterChannel::connect(&config(&all, Duration::from_millis(300))).await.unwrap_err().to_string();
    assert!(error.contains("no master leads"), "{error}");
    for address in &all {
        assert!(error.contains(&format!("{address}: knows no leader")), "{error}");
    }
    let members: Vec<(u64, String)> = (1..).zip(all.iter().cloned()).collect();
    let election = async {
        until("it was asked", || masters[1].count("GetGroup") > 4).await;
        masters[1].has_group(2, 2, &members);
    };
    let config = config(&all, AMPLE);
    let (channel, ()) = tokio::join!(MasterChannel::connect(&config), election);
    assert_eq!(channel.unwrap().stubs().address(), all[1]);
}

#[tokio::test]
async fn a_command_takes_a_master_that_knows_of_no_groups() {
    let master = FakeMaster::start(Role::Leads);
    let channel = MasterChannel::connect(&config(&[master.address()], AMPLE)).await.unwrap();
    assert_eq!(channel.stubs().address(), master.address());
    // None that can be reached: there is nothing to wait for.
    let gone = nobody();
    let error = MasterChannel::connect(&config(std::slice::from_ref(&gone), AMPLE)).await.unwrap_err();
    assert!(matches!(&error, NetError::MasterUnavailable { masters, .. } if *masters == gone), "{error}");
}

/// The first one was stopped, and does not know yet that another one leads.
#[tokio::test]
async fn a_command_is_not_held_by_one_that_says_that_it_leads() {
    for role in [Role::Follows(None), Role::Hangs] {
        let masters = three(1);
        let all = masters.each_ref().map(FakeMaster::address);
        masters[0].is_now(role);
        masters[1].is_now(Role::Leads);
        let channel = MasterChannel::connect(&config(&all, AMPLE)).await.unwrap();
        assert_eq!(channel.stubs().address(), all[0]);
        channel.ask(ask).await.unwrap();
        assert_eq!(channel.stubs().address(), all[1]);
        assert_eq!((masters[1].count("Lookup"), masters[2].count("Lookup")), (1, 0));
        channel.shutdown().await;
    }
}

#[tokio::test]
async fn a_command_sends_again_what_may_be_done_and_not_what_was_refused() {
    let masters = three(2);
    let all = masters.each_ref().map(FakeMaster::address);
    masters[1].is_now(Role::StopsLeading);
    let channel = MasterChannel::for_command(&config(&all, AMPLE)).unwrap();
    channel.begin_at(&all[0]);
    let again = async {
        until("it was asked again", || masters[1].count("Lookup") > 2).await;
        masters[1].is_now(Role::Leads);
    };
    let (answer, ()) = tokio::join!(channel.ask_unary(ask), again);
    answer.unwrap();
    assert_eq!(masters[0].count("Lookup"), 1, "it does not lead");
    masters[1].is_now(Role::Refuses(Code::NotFound));
    let asked = masters[1].count("Lookup");
    let error = channel.ask_unary(ask).await.unwrap_err();
    assert!(matches!(error, NetError::Master { code: Code::NotFound, .. }), "{error:?}");
    assert_eq!(masters[1].count("Lookup"), asked + 1);
    channel.shutdown().await;
}

#[tokio::test]
async fn a_command_gives_up_when_no_master_answers_any_more() {
    let timeout = Duration::from_millis(400);
    let masters = three(1);
    masters[0].is_now(Role::Leads);
    let all = masters.each_ref().map(FakeMaster::address);
    let channel = MasterChannel::connect(&config(&all, timeout)).await.unwrap();
    masters[0].is_now(Role::StopsLeading);
    let error = channel.ask(ask).await.unwrap_err();
    assert!(error.is_master_silent() && error.to_string().contains("it leads no more"), "{error}");
    channel.shutdown().await;
}

#[tokio::test]
async fn a_command_looks_for_a_leader_as_long_as_it_may_and_no_longer() {
    let timeout = Duration::from_millis(1200);
    let masters = three(0);
    let all = masters.each_ref().map(FakeMaster::address);
    let channel = MasterChannel::for_command(&config(&all, timeout)).unwrap();
    let begun = tokio::time::Instant::now();
    let error = channel.ask(ask).await.unwrap_err();
    let took = begun.elapsed();
    assert!(error.is_master_silent() && error.to_string().contains("no master leads"), "{error}");
    assert!(took >= timeout / 2 && took < timeout * 2, "{took:?}");
    channel.shutdown().await;
}

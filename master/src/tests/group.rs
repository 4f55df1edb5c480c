//! Several masters in one process: how they become a group, and how it changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cavern_consensus::ConsensusError;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{
    AddMasterRequest, MakeSnapshotRequest, RemoveMasterRequest, Target, TransferLeadershipRequest, VoteRequest,
};
use cavern_proto::record::command::Command;
use cavern_state::feature_version::FIRST;
use cavern_work::WorkError;
use openraft::async_runtime::watch::WatchReceiver as _;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::harness::eventually;
use super::members::{Member, addresses, group, have_lead, leader, member, mount, mounts, started, stop};
use crate::feature_version::{FEATURE_VERSION, OLDER, agreed, raise, require};

#[tokio::test(flavor = "multi_thread")]
async fn three_masters_agree_and_each_can_lead() {
    let members = group(3).await;
    let first = leader(&members).await;
    mount(&members[first], "/a").await;
    let group = members[first].group().await;
    assert_eq!(group.members.len(), 3);
    assert!(group.members.iter().all(|member| member.votes), "{group:?}");
    assert_eq!(group.members.iter().map(|member| member.node_id).collect::<Vec<_>>(), [1, 2, 3]);
    for next in (0..3).filter(|next| *next != first).chain([first]) {
        let now = leader(&members).await;
        let id = members[next].group().await.node_id;
        let request = TransferLeadershipRequest { node_id: id };
        let after = members[now].calls().await.transfer_leadership(request).await.unwrap().into_inner();
        assert_eq!(after.leader, id);
        eventually(|| async { members[next].term().is_some() && members[now].term().is_none() }).await;
        assert_eq!(mounts(&members[next]).await, 1);
        // What only a leader does is answered with its address, and nothing is done.
        let mut cluster =
            cavern_proto::master::cluster_client::ClusterClient::connect(format!("http://{}", members[now].address))
                .await
                .unwrap();
        let refused = cluster.list_mounts(cavern_proto::master::ListMountsRequest {}).await.unwrap_err();
        let leader = cavern_proto::NotLeading::from_status(&refused).unwrap().leader;
        assert_eq!(leader.as_deref(), Some(members[next].address.as_str()));
    }
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn masters_of_one_version_agree_on_all_that_it_knows() {
    let members = group(3).await;
    for next in [1, 2, 0] {
        let leader = leader(&members).await;
        let term = || members[leader].term().unwrap();
        eventually(|| async { agreed(&term().services.lookups.reader).await.unwrap() == FEATURE_VERSION }).await;
        let request = TransferLeadershipRequest { node_id: members[next].group().await.node_id };
        let group = members[leader].calls().await.transfer_leadership(request).await.unwrap().into_inner();
        assert_eq!(group.feature_version, FEATURE_VERSION);
    }
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_new_is_used_once_the_last_master_is_upgraded_and_no_older_one_is_taken_in() {
    let members: Vec<Member> = (0..3).map(|_| member()).collect();
    let older = members[1].address.clone();
    OLDER.lock().insert(older.clone());
    let mut members = started(members).await;
    assert_eq!(members[1].group().await.feature_version, FIRST);
    // Whichever leads, all that comes with the first version is done, and nothing of the next one.
    for next in [1, 2] {
        have_lead(&members, next).await;
        mount(&members[next], &format!("/{next}")).await;
        let term = members[next].term().unwrap();
        let reader = &term.services.lookups.reader;
        assert!(!raise(&term.services).await.unwrap(), "one does not know it");
        require(reader, FIRST, "what is old").await.unwrap();
        let refused = require(reader, FEATURE_VERSION, "what is new").await.unwrap_err().to_string();
        assert!(refused.contains("what is new") && refused.contains("upgrade them all"), "{refused}");
    }
    OLDER.lock().remove(&older);
    let term = members[2].term().unwrap();
    let reader = &term.services.lookups.reader;
    eventually(|| async { require(reader, FEATURE_VERSION, "what is new").await.is_ok() }).await;

    let late = member();
    OLDER.lock().insert(late.address.clone());
    let starting = late.start(&[addresses(&members), vec![late.address.clone()]].concat()).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", late.address)).await.is_ok() }).await;
    let add = || AddMasterRequest { address: late.address.clone() };
    let refused = members[2].calls().await.add_master(add()).await.unwrap_err();
    assert!(refused.message().contains(&late.address) && refused.message().contains("upgrade it"), "{refused}");
    OLDER.lock().remove(&late.address);
    let added = members[2].calls().await.add_master(add()).await.unwrap().into_inner();
    assert!(added.members.iter().any(|member| member.address == late.address && member.votes), "{added:?}");
    members.push(Member { running: starting.await.unwrap().unwrap(), ..late });
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_outlives_any_one_of_its_masters() {
    let mut members = group(3).await;
    let masters = addresses(&members);
    let first = leader(&members).await;
    mount(&members[first], "/a").await;
    let gone = members[first].running.take().unwrap();
    gone.stop().await;
    let second = leader(&members).await;
    assert_eq!(mounts(&members[second]).await, 1);
    mount(&members[second], "/b").await;
    // Back again, it has what happened meanwhile.
    let back = members[first].start(&masters).await.await.unwrap().unwrap().unwrap();
    members[first].running = Some(back);
    have_lead(&members, first).await;
    assert_eq!(mounts(&members[first]).await, 2);
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proposal_of_a_lead_that_is_over_goes_into_no_log() {
    let members = group(3).await;
    let first = leader(&members).await;
    let proposer = members[first].term().unwrap().services.proposer.clone();
    let reader = members[first].term().unwrap().services.lookups.reader.clone();
    members[first].calls().await.transfer_leadership(TransferLeadershipRequest { node_id: 0 }).await.unwrap();
    // The term ends a moment after the lead.
    eventually(|| async { members[first].term().is_none() }).await;
    assert_ne!(leader(&members).await, first);
    // Nor when the same master leads again.
    have_lead(&members, first).await;
    let late = proposer.propose(Command::ReserveMasterId(0)).await;
    assert!(matches!(late, Err(ConsensusError::NotLeading(_) | ConsensusError::Unavailable(_))), "{late:?}");
    let late = reader.read(|tables| Ok(tables.counters()?)).await;
    assert!(matches!(late, Err(WorkError::Consensus(ConsensusError::NotLeading(_)))), "{late:?}");
    let term = members[first].term().unwrap();
    assert_eq!(term.services.lookups.reader.read(|tables| Ok(tables.counters()?)).await.unwrap().master, 0);
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_master_grows_to_three_and_a_lost_one_is_replaced() {
    let mut members = group(1).await;
    mount(&members[0], "/a").await;
    // The new ones need a snapshot: the log does not begin at its beginning any more.
    members[0].calls().await.make_snapshot(MakeSnapshotRequest {}).await.unwrap();
    for _ in 0..2 {
        let new = member();
        let masters = [addresses(&members), vec![new.address.clone()]].concat();
        let starting = new.start(&masters).await;
        let request = AddMasterRequest { address: new.address.clone() };
        eventually(|| async { RaftClient::connect(format!("http://{}", new.address)).await.is_ok() }).await;
        let added = members[0].calls().await.add_master(request).await.unwrap().into_inner();
        assert!(added.members.iter().any(|member| member.address == new.address && member.votes), "{added:?}");
        members.push(Member { running: starting.await.unwrap().unwrap(), ..new });
    }
    let masters = addresses(&members);
    assert_eq!(members[0].group().await.members.iter().map(|member| member.node_id).collect::<Vec<_>>(), [1, 2, 3]);
    let already = AddMasterRequest { address: masters[1].clone() };
    let again = members[0].calls().await.add_master(already).await.unwrap().into_inner();
    assert_eq!(again.members.len(), 3, "whoever asks again has what was asked for");

    // The last one loses its data.
    let mut lost = members.pop().unwrap();
    lost.running.take().unwrap().stop().await;
    lost.dir = tempfile::tempdir().unwrap();
    let refused = lost.start(&masters).await.await.unwrap().err().unwrap().to_string();
    assert!(refused.contains("has lost its data") && refused.contains("cv raft remove 3"), "{refused}");
    let now = leader(&members).await;
    let mut calls = members[now].calls().await;
    let unknown = calls.remove_master(RemoveMasterRequest { node_id: 9 }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    calls.remove_master(RemoveMasterRequest { node_id: 3 }).await.unwrap();
    let starting = lost.start(&masters).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", lost.address)).await.is_ok() }).await;
    let added = calls.add_master(AddMasterRequest { address: lost.address.clone() }).await.unwrap().into_inner();
    // An id is never given twice.
    assert!(added.members.iter().any(|member| member.node_id == 4 && member.votes), "{added:?}");
    members.push(Member { running: starting.await.unwrap().unwrap(), ..lost });
    have_lead(&members, 2).await;
    assert_eq!(mounts(&members[2]).await, 1);
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_waits_for_a_leader_is_stopped_at_once() {
    let mut members = group(2).await;
    let masters = addresses(&members);
    for member in &mut members {
        member.running.take().unwrap().stop().await;
    }
    // The one that led last: the other knows it as its leader.
    let (alone, end) = (&members[1], CancellationToken::new());
    let starting = alone.start_until(&masters, end.clone()).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", alone.address)).await.is_ok() }).await;
    // Its consensus runs, and has no majority.
    eventually(|| async { alone.group().await.members.len() == 2 }).await;
    let begin = Instant::now();
    end.cancel();
    assert!(starting.await.unwrap().unwrap().is_none());
    assert!(begin.elapsed() < Duration::from_secs(4), "it has waited for itself: {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_for_another_cluster_or_master_are_refused() {
    let members = group(1).await;
    let cluster_id = members[0].group().await.cluster_id;
    let mut calls = members[0].calls().await;
    for (cluster_id, node_id) in [(cluster_id.clone(), 2), ("another".to_owned(), 1), (String::new(), 0)] {
        let target = Some(Target { cluster_id, node_id });
        let request = VoteRequest { target, ..VoteRequest::default() };
        assert_eq!(calls.vote(request.clone()).await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(calls.pre_vote(request).await.unwrap_err().code(), Code::FailedPrecondition);
    }
    let target = Some(Target { cluster_id, node_id: 1 });
    let senseless = VoteRequest { target, ..VoteRequest::default() };
    assert_eq!(calls.vote(senseless).await.unwrap_err().code(), Code::InvalidArgument);
    let place = cavern_proto::raft::JoinRequest { cluster_id: "another".into(), node_id: 2, ..Default::default() };
    assert_eq!(calls.join(place).await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(mounts(&members[0]).await, 0, "it goes on");
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_looks_at_the_lead_while_it_changes_keeps_nobody_waiting() {
    let members = group(1).await;
    leader(&members).await;
    let consensus = members[0].term().unwrap().services.consensus.clone();
    let (stop_looking, looks) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..4 {
        let (consensus, stop_looking, looks) = (consensus.clone(), stop_looking.clone(), looks.clone());
        // Of its own: one that waits for ever must not keep the test from saying so.
        std::thread::spawn(move || {
            let observed = consensus.observe();
            while !stop_looking.is_cancelled() {
                assert!(consensus.leads_as(&observed.borrow_watched()).is_some());
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mounting = async {
        for number in 0..50 {
            mount(&members[0], &format!("/m{number}")).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), mounting).await.expect("the master stands still");
    stop_looking.cancel();
    assert!(looks.load(Ordering::Relaxed) > 0);
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_a_founder_that_has_left_is_given_to_nobody() {
    let mut members = group(3).await;
    let mut lost = members.pop().unwrap();
    lost.running.take().unwrap().stop().await;
    lost.dir = tempfile::tempdir().unwrap();
    let masters = [addresses(&members), vec![lost.address.clone()]].concat();
    let founder = members[0].group().await.members.iter().find(|member| member.address == lost.address).cloned();
    let founder = founder.unwrap().node_id;
    // Which of the three is gone is not said: the largest number is the one that would be given again.
    let largest = members[0].group().await.members.iter().map(|member| member.node_id).max();
    let now = leader(&members).await;
    let mut calls = members[now].calls().await;
    calls.remove_master(RemoveMasterRequest { node_id: founder }).await.unwrap();
    let starting = lost.start(&masters).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", lost.address)).await.is_ok() }).await;
    // Two ask for the same at once, as somebody does who has given up waiting: both have what they wanted.
    let ask = || AddMasterRequest { address: lost.address.clone() };
    let mut others = calls.clone();
    let (first, second) = tokio::join!(calls.add_master(ask()), others.add_master(ask()));
    for added in [first.unwrap().into_inner(), second.unwrap().into_inner()] {
        let taken_in = added.members.iter().find(|member| member.address == lost.address).unwrap();
        assert!(taken_in.votes && Some(taken_in.node_id) > largest, "{added:?} after {largest:?}");
    }
    members.push(Member { running: starting.await.unwrap().unwrap(), ..lost });
    stop(members).await;
}

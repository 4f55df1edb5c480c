//! A master that joins is known to clients and workers before it votes.

use std::collections::BTreeSet;

use bytes::Bytes;
use cavern_conf::{Interval, schema};
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::{HeartbeatRequest, RegisterWorkerRequest, WatchRequest, Worker};
use cavern_proto::raft::AddMasterRequest;
use cavern_proto::raft::raft_client::RaftClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::harness::{PATIENCE, eventually};
use super::members::{Member, addresses, group_with, leader, member, stop};

#[tokio::test(flavor = "multi_thread")]
async fn a_master_votes_when_clients_and_workers_know_it() {
    // Sessions of before the term are waited for that long; and on a busy machine nobody lapses meanwhile.
    let patient = Interval::millis(10_000);
    let settings = schema::Master { session_lease: patient, worker_timeout: patient, ..schema::Master::default() };
    let mut members = group_with(1, settings).await;
    leader(&members).await;
    let alone = addresses(&members);
    let mut cluster = ClusterClient::connect(format!("http://{}", alone[0])).await.unwrap();
    let (say, said) = mpsc::channel(16);
    say.send(WatchRequest { client: "test".into(), ..WatchRequest::default() }).await.unwrap();
    let mut events = cluster.watch(ReceiverStream::new(said)).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    assert_eq!(first.masters, alone);
    let worker = Worker { data_address: "127.0.0.1:1".to_owned(), ..Worker::default() };
    let uuid = Bytes::copy_from_slice(&[1; 16]);
    let register = RegisterWorkerRequest { uuid, worker: Some(worker), ..RegisterWorkerRequest::default() };
    let registered = cluster.register_worker(register).await.unwrap().into_inner();
    assert_eq!((&registered.masters, registered.group_epoch), (&alone, first.group_epoch));
    let beat = |group_epoch| {
        let request = HeartbeatRequest { worker_id: registered.worker_id, group_epoch, ..HeartbeatRequest::default() };
        let mut cluster = cluster.clone();
        async move { cluster.heartbeat(request).await.unwrap().into_inner() }
    };
    assert!(beat(first.group_epoch).await.masters.is_empty(), "it knows");

    let new = member();
    let both = [alone.clone(), vec![new.address.clone()]].concat();
    let starting = new.start(&both).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", new.address)).await.is_ok() }).await;
    let (mut calls, address) = (members[0].calls().await, new.address.clone());
    let adding =
        tokio::spawn(async move { calls.add_master(AddMasterRequest { address }).await.unwrap().into_inner() });
    // The client is told, and says nothing but that it lives.
    let told = loop {
        let event = tokio::time::timeout(PATIENCE, events.message()).await.unwrap().unwrap().unwrap();
        let known = if event.masters == alone { event.group_epoch } else { first.group_epoch };
        say.send(WatchRequest { group_epoch: known, ..WatchRequest::default() }).await.unwrap();
        if event.masters.len() == 2 {
            break event;
        }
    };
    assert_eq!(told.masters.iter().collect::<BTreeSet<_>>(), both.iter().collect());
    let votes = async || members[0].group().await.members.iter().filter(|member| member.votes).count();
    assert_eq!(votes().await, 1);
    say.send(WatchRequest { group_epoch: told.group_epoch, ..WatchRequest::default() }).await.unwrap();
    let told = beat(first.group_epoch).await;
    assert_eq!((told.masters.len(), votes().await), (2, 1), "the worker has not said that it knows");
    let known = beat(told.group_epoch).await;
    assert!(known.masters.is_empty() || known.group_epoch != told.group_epoch, "{known:?}");
    let added = tokio::time::timeout(PATIENCE, adding).await.unwrap().unwrap();
    assert!(added.unaware.is_empty(), "{added:?}");
    assert_eq!(votes().await, 2);
    members.push(Member { running: starting.await.unwrap().unwrap(), ..new });
    stop(members).await;
}

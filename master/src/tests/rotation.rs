//! Another key for the cluster's secrets, while masters come, go and lead.

use std::fs;

use bytes::Bytes;
use cavern_proto::master::Mount;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{AddMasterRequest, JoinRequest, RotateSecretsReply, RotateSecretsRequest};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{AttachMount, Command, SealSecrets, SealedOptions};
use cavern_state::{Database, Outcome, Tables, Transaction, apply};
use tonic::{Code, Status};

use super::harness::{eventually, mount_request};
use super::members::{Member, addresses, group, have_lead, leader, member, stop};

const SECRET: &str = "hush";

fn with_secret(path: &str) -> Mount {
    let options = [("s3.credentials.secret".to_owned(), SECRET.to_owned())].into();
    Mount { options, ..mount_request(path, "memory://secrets") }
}

/// Records a mount with a secret at the leader.
async fn mount(members: &[Member], path: &str) {
    let term = members[leader(members).await].term().unwrap();
    let services = &term.services;
    let mounts_epoch = services.mounts.table().unwrap().0;
    let sealed = services.mounts.seal(with_secret(path)).unwrap();
    assert!(!sealed.options["s3.credentials.secret"].contains(SECRET));
    let attach = Kind::AttachMount(AttachMount { mount: Some(sealed), mounts_epoch });
    assert!(matches!(services.proposer.propose(attach).await.unwrap(), Outcome::Mount(_)));
}

async fn rotate(members: &[Member], id: u8) -> Result<RotateSecretsReply, Status> {
    let request = RotateSecretsRequest { request_id: vec![id; 16].into() };
    loop {
        let mut calls = members[leader(members).await].calls().await;
        match calls.rotate_secrets(request.clone()).await {
            // It leads no more: the next one is asked the same.
            Err(status) if status.code() == Code::Unavailable => tokio::task::yield_now().await,
            answer => return answer.map(tonic::Response::into_inner),
        }
    }
}

/// Has a master lead, and read all secrets.
async fn can_lead(members: &[Member], next: usize, mounts: usize) {
    have_lead(members, next).await;
    let (_, table) = members[next].term().unwrap().services.mounts.table().unwrap();
    assert_eq!(table.len(), mounts);
    assert!(table.iter().all(|mount| mount.options["s3.credentials.secret"] == SECRET));
}

fn keys(member: &Member) -> Vec<(String, Vec<u8>)> {
    let directory = member.dir.path().join("master");
    let files = fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter(|name| name.starts_with("secret.key")).collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), fs::read(directory.join(name)).unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn all_masters_have_the_new_key_and_forget_the_old_one() {
    let mut members = group(3).await;
    let masters = addresses(&members);
    mount(&members, "/a").await;
    mount(&members, "/b").await;
    let old = keys(&members[0]);
    assert!(members.iter().all(|member| keys(member) == old) && old.len() == 1);

    // Not while one of them is away.
    let away = (leader(&members).await + 1) % 3;
    members[away].running.take().unwrap().stop().await;
    let refused = rotate(&members, 1).await.unwrap_err();
    let id = away + 1;
    assert_eq!(refused.code(), Code::FailedPrecondition);
    for said in [format!("master {id} at {}", masters[away]), format!("cv raft remove {id}")] {
        assert!(refused.message().contains(&said), "{refused:?}");
    }
    assert!(members.iter().all(|member| keys(member)[0] == old[0]));
    let back = members[away].start(&masters).await.await.unwrap().unwrap().unwrap();
    members[away].running = Some(back);

    let rotated = rotate(&members, 1).await.unwrap();
    assert_eq!((rotated.generation, rotated.mounts, &rotated.behind[..]), (1, 2, &[][..]));
    let new = keys(&members[0]);
    assert!(new.len() == 1 && new != old, "{new:?}");
    assert!(members.iter().all(|member| keys(member) == new));
    // Each can lead, also after a restart.
    for next in 0..3 {
        can_lead(&members, next, 2).await;
        assert_eq!(rotate(&members, 1).await.unwrap(), rotated, "it is the same request");
    }
    for restarted in 0..3 {
        members[restarted].running.take().unwrap().stop().await;
        let back = members[restarted].start(&masters).await.await.unwrap().unwrap().unwrap();
        members[restarted].running = Some(back);
        can_lead(&members, restarted, 2).await;
    }
    // And what is mounted then has the new key, until there is another one.
    mount(&members, "/c").await;
    assert_eq!(rotate(&members, 2).await.unwrap().generation, 2);
    assert!(members.iter().all(|member| keys(member) != new && keys(member) == keys(&members[0])));
    for next in 0..3 {
        can_lead(&members, next, 3).await;
    }
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_joins_has_the_key_though_it_got_its_place_before() {
    let mut members = group(1).await;
    mount(&members, "/a").await;
    let old = keys(&members[0]);
    let new = member();
    let starting = new.start(&[addresses(&members), vec![new.address.clone()]].concat()).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", new.address)).await.is_ok() }).await;
    // Somebody has begun to take it in, and came no further.
    let cluster_id = members[0].group().await.cluster_id;
    let place = JoinRequest { cluster_id, node_id: 7, secret_key: Bytes::copy_from_slice(&old[0].1) };
    new.calls().await.join(place).await.unwrap();
    assert_eq!(rotate(&members, 1).await.unwrap().generation, 1);
    let request = AddMasterRequest { address: new.address.clone() };
    let mut calls = members[0].calls().await;
    eventually(|| {
        let (mut calls, request) = (calls.clone(), request.clone());
        async move { calls.add_master(request).await.is_ok() }
    })
    .await;
    members.push(Member { running: starting.await.unwrap().unwrap(), ..new });
    can_lead(&members, 1, 1).await;
    // What it was given first is forgotten when it has applied that.
    eventually(|| async { keys(&members[1]) == keys(&members[0]) }).await;
    // One that comes now is given the key in use.
    let last = member();
    let starting = last.start(&[addresses(&members), vec![last.address.clone()]].concat()).await;
    eventually(|| async { RaftClient::connect(format!("http://{}", last.address)).await.is_ok() }).await;
    calls = members[leader(&members).await].calls().await;
    calls.add_master(AddMasterRequest { address: last.address.clone() }).await.unwrap();
    members.push(Member { running: starting.await.unwrap().unwrap(), ..last });
    can_lead(&members, 2, 1).await;
    assert!(rotate(&members, 2).await.unwrap().behind.is_empty());
    stop(members).await;
}

#[test]
fn what_was_sealed_with_the_key_before_is_looked_at_again() {
    let dir = tempfile::tempdir().unwrap();
    let database = Database::open(dir.path(), 1 << 20).unwrap();
    let run = |kind: Kind| {
        let mut transaction = Transaction::new(&database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(kind) }).unwrap();
        let (writes, _) = transaction.finish().unwrap();
        database.write(writes.into_batch(&database)).unwrap();
        outcome
    };
    let epoch = || Tables::new(&database).counters().unwrap().mounts_epoch;
    let attach =
        |path: &str, mounts_epoch| Kind::AttachMount(AttachMount { mount: Some(with_secret(path)), mounts_epoch });
    run(Kind::Init(cavern_proto::record::InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
    let Outcome::Mount(mount) = run(attach("/a", epoch())) else { panic!("no mount") };
    let seal = |mounts_epoch, generation| {
        let options = [("s3.credentials.secret".to_owned(), format!("sealed in {generation}"))].into();
        let sealed = vec![SealedOptions { mount_id: mount.id, options }];
        Kind::SealSecrets(SealSecrets { mounts_epoch, generation, key_id: vec![1; 16].into(), sealed })
    };
    let before = epoch();
    assert_eq!(run(seal(before - 1, 1)), Outcome::OutOfDate, "a mount was made meanwhile");
    assert_eq!(run(seal(before, 2)), Outcome::OutOfDate, "it is not the next");
    assert_eq!(run(seal(before, 1)), Outcome::Done);
    assert_eq!(run(seal(epoch(), 1)), Outcome::OutOfDate, "it is in use");
    assert_eq!(run(attach("/b", before)), Outcome::OutOfDate, "it was sealed before");
    let tables = Tables::new(&database);
    assert_eq!(tables.mount(mount.id).unwrap().unwrap().options["s3.credentials.secret"], "sealed in 1");
    assert_eq!(tables.secrets().unwrap().generation, 1);
}

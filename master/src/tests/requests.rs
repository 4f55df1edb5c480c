//! Requests that are sent again because the answer to the first was lost, at the same master or at the next leader.

use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use cavern_conf::Config;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::{
    DrainWorkerRequest, GetJobRequest, JobKind, JobState, Mount, MountReply, MountRequest, RegisterWorkerRequest,
    RemoveWorkerRequest, SubmitExportRequest, SubmitLoadRequest, UnmountRequest, UpdateMountRequest, Worker, WriteType,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{Command, Once};
use cavern_state::requests::KEPT;
use cavern_state::{Outcome, Tables, Transaction, apply};
use cavern_work::Request;
use cavern_work::mounts::changes::DetachPolicy;
use futures::FutureExt as _;
use tonic::Code;
use tonic::transport::Channel;

use super::harness::{NoWorkers, TestMaster, eventually, mount_request, new_bucket};
use super::members::{Member, group, have_lead, leader, stop};

async fn cluster(member: &Member) -> ClusterClient<Channel> {
    ClusterClient::connect(format!("http://{}", member.address)).await.unwrap()
}

fn id(number: u8) -> Bytes {
    vec![number; 16].into()
}

/// Has the next master lead; what the one before answered last may never have arrived.
async fn next_leader(members: &[Member]) -> ClusterClient<Channel> {
    let now = leader(members).await;
    let next = (now + 1) % members.len();
    have_lead(members, next).await;
    cluster(&members[next]).await
}

/// Gives a call up as soon as the log has what it is for, as that of a caller who is gone by then.
async fn give_up_when(mut call: impl Future + Unpin, is_recorded: impl Fn() -> bool) {
    let until_recorded = std::future::poll_fn(|context| {
        if is_recorded() {
            return Poll::Ready(());
        }
        assert!(call.poll_unpin(context).is_pending(), "it is answered before it is recorded");
        Poll::Pending
    });
    until_recorded.await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_recorded_is_done_though_its_caller_is_gone() {
    let master = TestMaster::new().await;
    let (services, (bucket, uri)) = (master.services(), new_bucket());
    bucket.put("a", "1");
    let mounts = || services.mounts.all_recorded().unwrap();
    let mount = Box::pin(services.mount_bucket(mount_request("/m", &uri), false));
    give_up_when(mount, || !mounts().is_empty()).await;
    let mount = mounts().remove(0);
    master.indexed(&mount).await;

    let update = UpdateMountRequest { path: "/m".into(), metadata_ttl_ms: Some(7000), ..UpdateMountRequest::default() };
    let update = Box::pin(services.mount_changes.update(update));
    give_up_when(update, || mounts()[0].metadata_ttl_ms == 7000).await;
    eventually(|| async { services.mounts.get(mount.id).unwrap().mount.metadata_ttl_ms == 7000 }).await;

    let request = Request::default();
    let job = Box::pin(services.jobs.submit_once(&request, JobKind::LoadMetadata, "/m", 0));
    let has_job = || services.lookups.reader.look(|tables| Ok(!tables.jobs()?.is_empty())).now_or_never();
    give_up_when(job, || has_job().is_some_and(|found| found.unwrap())).await;
    eventually(|| async { services.jobs.list().await.unwrap()[0].state() == JobState::Done }).await;

    let unmount = Box::pin(services.unmount_bucket("/m", DetachPolicy::Keep));
    give_up_when(unmount, || mounts().is_empty()).await;
    eventually(|| async { services.mounts.status().is_empty() }).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_done_once_whichever_masters_it_is_sent_to() {
    let members = group(3).await;
    let first = leader(&members).await;
    let mut calls = cluster(&members[first]).await;
    let ((_, uri), (_, other)) = (new_bucket(), new_bucket());

    // A mount.
    let request = |number| MountRequest {
        mount: Some(mount_request("/m", &uri)),
        request_id: id(number),
        ..MountRequest::default()
    };
    let mounted = calls.mount(request(1)).await.unwrap().into_inner();
    assert!(mounted.is_empty, "{mounted:?}");
    // What was found under the prefix is told once.
    let again = MountReply { is_empty: false, ..mounted.clone() };
    assert_eq!(calls.mount(request(1)).await.unwrap().into_inner(), again);
    let mut calls = next_leader(&members).await;
    assert_eq!(calls.mount(request(1)).await.unwrap().into_inner(), again);
    let worker = Worker { data_address: "w:1".into(), ..Worker::default() };
    let register = RegisterWorkerRequest { uuid: id(99), cluster_id: String::new(), worker: Some(worker.clone()) };
    let worker_id = calls.register_worker(register.clone()).await.unwrap().into_inner().worker_id;

    // A job: it is one, and runs.
    let load = || SubmitLoadRequest { path: "/m".into(), request_id: id(2), ..SubmitLoadRequest::default() };
    let job = calls.submit_load(load()).await.unwrap().into_inner();
    let again = calls.submit_load(load()).await.unwrap().into_inner();
    assert_eq!((again.id, again.started_ns), (job.id, job.started_ns));
    let mut calls = next_leader(&members).await;
    assert_eq!(calls.submit_load(load()).await.unwrap().into_inner().id, job.id);
    let jobs = calls.list_jobs(cavern_proto::master::ListJobsRequest {}).await.unwrap().into_inner().jobs;
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    // Under another id it is another one.
    let another = SubmitLoadRequest { request_id: id(3), ..load() };
    assert_ne!(calls.submit_load(another).await.unwrap().into_inner().id, job.id);

    // What has no id needs none: a worker is the same worker, a mark is as it is to be, an update changes nothing.
    assert_eq!(calls.register_worker(register).await.unwrap().into_inner().worker_id, worker_id);
    let update = UpdateMountRequest { path: "/m".into(), ttl_ms: Some(7), ..UpdateMountRequest::default() };
    let updated = calls.update_mount(update.clone()).await.unwrap().into_inner();
    let mut calls = next_leader(&members).await;
    assert_eq!(calls.update_mount(update).await.unwrap().into_inner(), updated);
    let spare = RegisterWorkerRequest {
        uuid: id(98),
        cluster_id: String::new(),
        worker: Some(Worker { data_address: "w:2".into(), ..worker }),
    };
    calls.register_worker(spare).await.unwrap();
    let drain = DrainWorkerRequest { worker_id, undo: false };
    for _ in 0..2 {
        assert!(calls.drain_worker(drain).await.unwrap().into_inner().draining);
    }

    // A removal: the second time there is nothing to be removed.
    let remove = |number| RemoveWorkerRequest { worker_id, force: false, request_id: id(number) };
    let removed = calls.remove_worker(remove(4)).await.unwrap().into_inner();
    assert!(removed.removed, "{removed:?}");
    let mut calls = next_leader(&members).await;
    assert_eq!(calls.remove_worker(remove(4)).await.unwrap().into_inner(), removed);
    assert_eq!(calls.remove_worker(remove(5)).await.unwrap_err().code(), Code::NotFound);

    // An unmount, and what was mounted in the same place meanwhile.
    let unmount = |number| UnmountRequest { path: "/m".into(), request_id: id(number), ..UnmountRequest::default() };
    let unmounted = calls.unmount(unmount(6)).await.unwrap().into_inner();
    let mut calls = next_leader(&members).await;
    assert_eq!(calls.unmount(unmount(6)).await.unwrap().into_inner(), unmounted);
    assert_eq!(calls.unmount(unmount(7)).await.unwrap_err().code(), Code::NotFound);
    let second = MountRequest { mount: Some(mount_request("/m", &other)), ..request(8) };
    let second = calls.mount(second).await.unwrap().into_inner();
    assert_eq!(calls.unmount(unmount(6)).await.unwrap().into_inner(), unmounted);
    let mounts = calls.list_mounts(cavern_proto::master::ListMountsRequest {}).await.unwrap().into_inner().mounts;
    assert_eq!(mounts, [second.mount.unwrap()]);
    // It was mounted; that it is gone is another story.
    let before = calls.mount(request(1)).await.unwrap().into_inner().mount.unwrap();
    assert_eq!((before.uri, before.id), (uri.clone(), mounted.mount.unwrap().id));
    // An id is that of one request.
    let confused = calls.mount(MountRequest { request_id: id(4), ..request(1) }).await.unwrap_err();
    assert_eq!(confused.code(), Code::InvalidArgument);
    stop(members).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_begun_and_tried_again_once() {
    let master = TestMaster::with(Config::default(), Arc::new(tempfile::tempdir().unwrap()), Arc::new(NoWorkers));
    let master = master.await.unwrap();
    let services = master.services().clone();
    let mount = Mount { write_type: WriteType::FsMode as i32, ..mount_request("/w", &new_bucket().1) };
    services.mount_bucket(mount, false).await.unwrap();
    let mut calls = ClusterClient::connect(format!("http://{}", master.master.address)).await.unwrap();
    // Two that arrive at the same time.
    let export = || SubmitExportRequest { path: "/w".into(), request_id: id(1) };
    let mut other = calls.clone();
    let (one, two) = tokio::join!(calls.submit_export(export()), other.submit_export(export()));
    let (one, two) = (one.unwrap().into_inner(), two.unwrap().into_inner());
    assert_eq!(one.id, two.id);
    let job = || async { services.jobs.get(one.id).await.unwrap() };
    eventually(|| async { job().await.state() == JobState::Done }).await;
    assert_eq!(calls.submit_export(export()).await.unwrap().into_inner(), job().await, "it is not begun again");
    assert_eq!(services.jobs.list().await.unwrap().len(), 1);
    let retry = calls.retry_job(GetJobRequest { id: one.id, request_id: id(2) }).await.unwrap_err();
    assert_eq!(retry.code(), Code::FailedPrecondition);
    master.stop().await;
}

#[test]
fn the_last_requests_are_remembered_and_refusals_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let database = cavern_state::Database::open(dir.path(), 1 << 20).unwrap();
    let run = |number: u64, kind: Kind| {
        let mut transaction = Transaction::new(&database).unwrap();
        let request = Bytes::copy_from_slice(&u128::from(number).to_be_bytes());
        let command = Some(Box::new(Command { command: Some(kind) }));
        let once = Kind::Once(Box::new(Once { request, reply: Bytes::from("reply"), command }));
        let outcome = apply(&mut transaction, Command { command: Some(once) }).unwrap();
        let (writes, _) = transaction.finish().unwrap();
        database.write(writes.into_batch(&database)).unwrap();
        outcome
    };
    let job = || Kind::PutJob(cavern_proto::master::Job { state: JobState::Running as i32, ..Default::default() });
    for number in 1..=KEPT + 10 {
        assert_eq!(run(number, job()), Outcome::Job(number));
    }
    let Outcome::Repeated(record) = run(11, job()) else { panic!("it was forgotten") };
    assert_eq!((record.job, record.reply.as_ref()), (11, b"reply".as_slice()));
    // So old that it is another one.
    assert_eq!(run(10, job()), Outcome::Job(KEPT + 11));
    assert_eq!(Tables::new(&database).jobs().unwrap().len() as u64, KEPT + 11);
    // What was refused is decided anew.
    for _ in 0..2 {
        let nowhere = cavern_proto::record::DrainWorker { worker_id: 9, draining: true };
        assert!(matches!(run(9_999, Kind::DrainWorker(nowhere)), Outcome::Refused(_)));
    }
}

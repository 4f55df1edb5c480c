//! Sessions over a real connection.

use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_client::{Client, NoSink};
use cavern_conf::host;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    FetchFailure, HeartbeatRequest, Kind, ListClaimsRequest, ListMountsRequest, ListWorkersRequest, LookupRequest,
    RefreshRequest, RegisterWorkerRequest, RemoveName, Reset, ResolveRequest, StatusRequest, WatchRequest, Worker,
    WorkerState, WorkerTable,
};
use cavern_proto::record::RemoveWorker;
use cavern_security::{Identity, Role};
use cavern_work::WorkError;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::harness::{PATIENCE, TestMaster, eventually, name, new_bucket};

#[tokio::test(flavor = "multi_thread")]
async fn a_refresh_ends_when_the_client_has_heard_of_the_changes() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("a", "old");
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    let endpoint = format!("http://{}", master.master.address);
    let mut cluster = ClusterClient::connect(endpoint.clone()).await.unwrap();
    let mut names = NamespaceClient::connect(endpoint).await.unwrap();
    let (acknowledge, requests) = mpsc::channel(16);
    acknowledge.send(WatchRequest { client: "test".into(), ..WatchRequest::default() }).await.unwrap();
    let mut events = cluster.watch(ReceiverStream::new(requests)).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap();
    let Some(Event::Reset(Reset { session, .. })) = first.event else { panic!("{first:?}") };

    let root =
        names.resolve(ResolveRequest { path: "/m".into(), session }).await.unwrap().into_inner().attr.unwrap().inode;
    let old = names.lookup(LookupRequest { parent: root, name: name("a"), session }).await.unwrap().into_inner();
    let absent = names.lookup(LookupRequest { parent: root, name: name("b"), session }).await.unwrap_err();
    assert_eq!(absent.code(), tonic::Code::NotFound);
    bucket.put("a", "newer");
    bucket.put("b", "1");
    let request = RefreshRequest { path: "/m".into(), ..RefreshRequest::default() };
    let mut progress = names.refresh(request).await.unwrap().into_inner();
    let finished = tokio::spawn(async move {
        let mut last = None;
        while let Some(message) = progress.message().await.unwrap() {
            last = Some(message);
        }
        last.unwrap()
    });
    let mut changed = Vec::new();
    while changed.len() < 2 {
        let event = tokio::time::timeout(PATIENCE, events.message()).await.unwrap().unwrap().unwrap();
        match event.event {
            Some(Event::Entry(entry)) => changed.push((entry, event.seq)),
            _ => {
                acknowledge.send(WatchRequest { acknowledged_seq: event.seq, ..WatchRequest::default() }).await.unwrap()
            }
        }
        assert!(!finished.is_finished(), "the refresh ended before the changes were acknowledged");
    }
    assert_eq!(changed[0].0.name, name("a"));
    assert_eq!(changed[0].0.old_inode, old.attr.unwrap().inode);
    assert_eq!((changed[1].0.name.clone(), changed[1].0.old_inode), (name("b"), 0));
    acknowledge.send(WatchRequest { acknowledged_seq: changed[1].1, ..WatchRequest::default() }).await.unwrap();
    let last = tokio::time::timeout(PATIENCE, finished).await.unwrap().unwrap();
    assert_eq!((last.changed, last.added, last.removed, last.done), (1, 1, 0, true));
    tokio::time::timeout(PATIENCE, master.stop()).await.unwrap();
    // The stream ends with the master.
    while let Ok(Some(_)) = events.message().await {}
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_come_and_go_and_come_back() {
    let mut config = cavern_conf::Config::default();
    config.master.worker_timeout = cavern_conf::Interval::millis(1);
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let fillers = std::sync::Arc::new(super::harness::NoWorkers);
    let master = TestMaster::with(config, dir, fillers).await.unwrap();
    let endpoint = format!("http://{}", master.master.address);
    let mut cluster = ClusterClient::connect(endpoint).await.unwrap();
    let worker =
        |port: u32| Worker { data_address: format!("127.0.0.1:{port}"), capacity_bytes: 7, ..Worker::default() };
    let register = |uuid: u8, port| RegisterWorkerRequest {
        uuid: Bytes::copy_from_slice(&[uuid; 16]),
        cluster_id: String::new(),
        worker: Some(worker(port)),
    };
    let first = cluster.register_worker(register(1, 1)).await.unwrap().into_inner();
    let second = cluster.register_worker(register(2, 2)).await.unwrap().into_inner();
    assert!(first.worker_id != second.worker_id && first.epoch < second.epoch);
    let state = |cluster: ClusterClient<tonic::transport::Channel>, id: u64| async move {
        let mut cluster = cluster;
        let table = cluster.list_workers(ListWorkersRequest {}).await.unwrap().into_inner();
        table.workers.into_iter().find(|worker| worker.id == id).map(|worker| worker.state())
    };
    // One that is alive is at one address.
    eventually(|| async { state(cluster.clone(), first.worker_id).await == Some(WorkerState::Lost) }).await;
    let again = cluster.register_worker(register(1, 3)).await.unwrap().into_inner();
    assert_eq!(again.worker_id, first.worker_id);
    assert!(again.epoch > second.epoch, "its address has changed");
    let foreign = RegisterWorkerRequest { cluster_id: "other".into(), ..register(3, 4) };
    assert_eq!(cluster.register_worker(foreign).await.unwrap_err().code(), tonic::Code::FailedPrecondition);

    eventually(|| async { state(cluster.clone(), first.worker_id).await == Some(WorkerState::Lost) }).await;
    let beat = |worker_id| HeartbeatRequest { worker_id, used_bytes: 5, ..HeartbeatRequest::default() };
    let reply = cluster.heartbeat(beat(first.worker_id)).await.unwrap().into_inner();
    assert!(!reply.register && reply.workers_epoch > again.epoch);
    let shown = async |said: HeartbeatRequest| {
        let mut cluster = cluster.clone();
        cluster.heartbeat(said).await.unwrap();
        let table = cluster.list_workers(ListWorkersRequest {}).await.unwrap().into_inner();
        table.workers.into_iter().find(|worker| worker.id == first.worker_id).unwrap().clock_ahead_ms
    };
    // A minute ahead, but for the way of the message; and one that does not say.
    let sent = Instant::now();
    let ahead = HeartbeatRequest { wall_ns: host::wall_ns() + 60_000_000_000, ..beat(first.worker_id) };
    let ahead_ms = shown(ahead).await.unwrap();
    let late_ms = i64::try_from(sent.elapsed().as_millis()).unwrap() + 1;
    assert!((60_000 - late_ms..=60_000).contains(&ahead_ms), "{ahead_ms} with a message of {late_ms} ms");
    assert_eq!(shown(beat(first.worker_id)).await, None);
    assert!(cluster.heartbeat(beat(99)).await.unwrap().into_inner().register);
    let replaced = cluster.register_worker(register(9, 3)).await.unwrap().into_inner();
    assert!(replaced.worker_id > second.worker_id);
    assert_eq!(state(cluster.clone(), first.worker_id).await, None, "its address belongs to another");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_show_what_live_workers_cannot_fetch() {
    let master = TestMaster::new().await;
    let (_bucket, uri) = new_bucket();
    let mount = master.mount("/m", &uri).await;
    let mut cluster = ClusterClient::connect(format!("http://{}", master.master.address)).await.unwrap();
    let register = |number: u8| {
        let worker = Some(Worker { data_address: format!("127.0.0.1:{number}"), ..Worker::default() });
        let uuid = Bytes::copy_from_slice(&[number; 16]);
        RegisterWorkerRequest { uuid, worker, ..RegisterWorkerRequest::default() }
    };
    let id = cluster.register_worker(register(1)).await.unwrap().into_inner().worker_id;
    let failure = |mount_id| FetchFailure { worker_id: 99, mount_id, message: "é".repeat(5000), age_ms: 7 };
    let beat = |fetch_failures| HeartbeatRequest { worker_id: id, fetch_failures, ..HeartbeatRequest::default() };
    let shown = async |mut cluster: ClusterClient<tonic::transport::Channel>| {
        let table = cluster.list_mounts(ListMountsRequest {}).await.unwrap().into_inner();
        assert_eq!(table.mounts.len(), 1);
        let status = table.status.into_iter().filter(|status| status.failing_workers > 0).collect::<Vec<_>>();
        status.into_iter().map(|status| (status.mount_id, status.fetch_failures)).collect::<Vec<_>>()
    };
    cluster.heartbeat(beat(vec![failure(mount.id), failure(mount.id + 1)])).await.unwrap();
    let status = shown(cluster.clone()).await;
    assert_eq!((status.len(), status[0].0, status[0].1.len()), (1, mount.id, 1));
    let FetchFailure { worker_id, message, age_ms, .. } = &status[0].1[0];
    assert_eq!((*worker_id, message.chars().count(), *age_ms), (id, 1000, 7), "cut, and by who said it");
    cluster.heartbeat(beat(vec![])).await.unwrap();
    assert_eq!(shown(cluster.clone()).await, []);
    // What a lost worker said last counts no more.
    cluster.heartbeat(beat(vec![failure(mount.id)])).await.unwrap();
    assert_eq!(shown(cluster.clone()).await.len(), 1);
    master.services().workers.hear_nothing_of(id);
    eventually(|| async {
        master.services().workers.expire().await.unwrap();
        shown(cluster.clone()).await.is_empty()
    })
    .await;
    master.stop().await;
}

/// A copy of a worker's directories, on another host.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_at_one_address_at_a_time() {
    let mut config = cavern_conf::Config::default();
    config.master.worker_timeout = cavern_conf::Interval::millis(60_000);
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, dir, std::sync::Arc::new(super::harness::NoWorkers)).await.unwrap();
    let workers = &master.services().workers;
    let address = |port: u32| format!("127.0.0.1:{port}");
    let register = async |port| {
        let worker = Some(Worker { data_address: address(port), ..Worker::default() });
        let uuid = Bytes::copy_from_slice(&[1; 16]);
        let request = RegisterWorkerRequest { uuid, worker, ..RegisterWorkerRequest::default() };
        workers.register(request, None).await.map(|(id, _)| id)
    };
    let beat = async |worker_id, port| {
        let data_address = address(port);
        workers.heartbeat(HeartbeatRequest { worker_id, data_address, ..HeartbeatRequest::default() }, None).await
    };
    let shown = || workers.table().unwrap().workers.remove(0).data_address;
    let id = register(1).await.unwrap();
    let refused = register(2).await.unwrap_err();
    assert!(matches!(&refused, WorkError::AlreadyExists(reason) if reason.contains("has a copy")), "{refused:?}");
    // A heartbeat from elsewhere is not that of the worker, nor does it keep it alive.
    assert!(!beat(id, 2).await.unwrap() && beat(id, 1).await.unwrap());
    assert_eq!((register(1).await.unwrap(), shown()), (id, address(1)), "it may start again where it is");
    // It has moved when nothing is heard from there any more, and then that is the copy.
    workers.hear_nothing_of(id);
    assert!(!beat(id, 2).await.unwrap());
    assert_eq!((register(2).await.unwrap(), shown()), (id, address(2)));
    assert!(beat(id, 2).await.unwrap() && !beat(id, 1).await.unwrap());
    assert!(register(1).await.is_err());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_speaks_for_the_worker_of_another() {
    let master = TestMaster::new().await;
    let services = master.services();
    let [first, second] = ["first", "second"].map(|name| Identity::new("cavern", Role::Worker, name).unwrap());
    let worker = |port: u32| Worker { data_address: format!("127.0.0.1:{port}"), ..Worker::default() };
    let register = async |uuid: u8, port, asker: Option<&Identity>| {
        let uuid = Bytes::copy_from_slice(&[uuid; 16]);
        let request = RegisterWorkerRequest { uuid, worker: Some(worker(port)), ..RegisterWorkerRequest::default() };
        services.workers.register(request, asker).await.map(|(id, _)| id)
    };
    let beat = async |worker_id, asker: Option<&Identity>| {
        let request = HeartbeatRequest { worker_id, used_bytes: 5, ..HeartbeatRequest::default() };
        services.workers.heartbeat(request, asker).await
    };
    let claims = async |worker_id, asker: Option<&Identity>| {
        let cluster_id = services.cluster_id.to_string();
        services.repair.claims(ListClaimsRequest { worker_id, cluster_id, after: None }, asker.cloned()).await
    };
    let denied = |what: &str, refused: Option<WorkError>| match refused {
        Some(WorkError::Denied(reason)) => {
            assert!(reason.contains("\"first\"") && reason.contains("\"second\""), "{what}: {reason}");
        }
        other => panic!("{what}: {other:?}"),
    };

    let id = register(1, 1, Some(&first)).await.unwrap();
    let before = services.workers.table().unwrap();
    denied("its id", register(1, 2, Some(&second)).await.err());
    denied("its place", register(2, 1, Some(&second)).await.err());
    denied("a heartbeat", beat(id, Some(&second)).await.err());
    denied("its blocks", claims(id, Some(&second)).await.err());
    let after = services.workers.table().unwrap();
    let plain =
        |table: &WorkerTable| table.workers.iter().map(|w| (w.id, w.data_address.clone(), w.used_bytes)).collect();
    let plain: [Vec<_>; 2] = [plain(&before), plain(&after)];
    assert!(plain[0] == plain[1] && before.epoch == after.epoch, "{plain:?}");

    assert!(beat(id, Some(&first)).await.unwrap() && claims(id, Some(&first)).await.is_ok());
    services.workers.hear_nothing_of(id);
    assert_eq!(register(1, 3, Some(&first)).await.unwrap(), id, "it has moved");
    let anew = register(9, 3, Some(&first)).await.unwrap();
    assert!(anew > id, "it has lost its disks");

    // One of before connections were secured is whose it shows itself to be: it has a uuid that nobody else knows.
    let open = register(5, 5, None).await.unwrap();
    assert!(beat(open, None).await.unwrap());
    assert!(!beat(open, Some(&second)).await.unwrap(), "it registers first");
    let epoch = services.workers.table().unwrap().epoch;
    assert_eq!(register(5, 5, Some(&first)).await.unwrap(), open);
    assert_eq!(services.workers.table().unwrap().epoch, epoch, "nothing is new for others");
    services.workers.hear_nothing_of(open);
    assert_eq!(register(5, 6, None).await.unwrap(), open);
    denied("an adopted one", beat(open, Some(&second)).await.err());
    assert!(beat(open, Some(&first)).await.unwrap());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_has_no_more_workers_than_it_may_have() {
    let mut config = cavern_conf::Config::default();
    config.master.workers_per_certificate = 2;
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, dir, std::sync::Arc::new(super::harness::NoWorkers)).await.unwrap();
    let services = master.services();
    let [first, second] = ["first", "second"].map(|name| Identity::new("cavern", Role::Worker, name).unwrap());
    let register = async |number: u8, port: u32, asker: Option<&Identity>| {
        let worker = Some(Worker { data_address: format!("127.0.0.1:{port}"), ..Worker::default() });
        let uuid = Bytes::copy_from_slice(&[number; 16]);
        let request = RegisterWorkerRequest { uuid, worker, ..RegisterWorkerRequest::default() };
        services.workers.register(request, asker).await.map(|(id, _)| id)
    };
    let refused = async |number, port| {
        let before = services.workers.table().unwrap();
        match register(number, port, Some(&first)).await {
            Err(WorkError::Refused(reason)) => {
                assert!(reason.contains("\"first\"") && reason.contains("master.workers_per_certificate"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let after = services.workers.table().unwrap();
        assert_eq!((after.epoch, after.workers.len()), (before.epoch, before.workers.len()));
    };
    let ids = [register(1, 1, Some(&first)).await.unwrap(), register(2, 2, Some(&first)).await.unwrap()];
    refused(3, 3).await;
    // Nothing has become another's by that, and those that are there come back, also without their disks.
    register(4, 4, Some(&second)).await.unwrap();
    register(5, 5, None).await.unwrap();
    assert_eq!(register(1, 1, Some(&first)).await.unwrap(), ids[0]);
    let anew = register(6, 2, Some(&first)).await.unwrap();
    // One that is lost counts until it is taken out.
    services.workers.hear_nothing_of(anew);
    services.workers.expire().await.unwrap();
    refused(3, 3).await;
    let removal = RemoveWorker { worker_id: anew, with_replicas: false };
    services.proposer.propose(removal).await.unwrap().unwrap();
    register(3, 3, Some(&first)).await.unwrap();
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_two_hundred_clients_have_open_is_held_across_a_restart() {
    const CLIENTS: usize = 200;
    const FILES: usize = 100;
    let mut config = cavern_conf::Config::default();
    // A busy machine may take long, and that is not what this is about.
    config.master.session_lease = cavern_conf::Interval::millis(60_000);
    config.client.metadata_timeout = cavern_conf::Interval::millis(60_000);
    let dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config.clone(), dir, std::sync::Arc::new(super::harness::NoWorkers)).await.unwrap();
    let root = super::mutations::mount(&master).await.root_inode;
    config.cluster.masters = vec![master.master.address.clone()];
    let connect = async |number: usize| {
        let name = format!("client {number}");
        Client::connect(&config, name.as_str(), std::sync::Arc::new(NoSink)).await.unwrap()
    };
    let clients = join_all((0..CLIENTS).map(connect)).await;
    let create = |file: &str| super::mutations::create(root, file, Kind::File);
    let remove = |file: usize| {
        let name = name(&file.to_string());
        Change::Remove(RemoveName { parent: root, name, directory: false })
    };
    let made = join_all((0..FILES).map(|file| clients[0].metadata().change(create(&file.to_string()), 0, 0))).await;
    let inodes: Vec<u64> = made.into_iter().map(|made| made.unwrap().result.inode).collect();
    let kept = join_all(clients.iter().map(async |client| {
        let metadata = client.metadata();
        metadata.resolve("/m").await.unwrap();
        let mut kept = Vec::new();
        for file in 0..FILES {
            let node = metadata.lookup(root, file.to_string().as_bytes()).await.unwrap();
            kept.push(metadata.keep_open(&node).await.unwrap());
        }
        kept
    }))
    .await;
    let holds = async |master: &TestMaster| {
        let count =
            master.services().lookups.reader.read(|tables| Ok(tables.keys(cavern_state::Family::OpenRef).count()));
        count.await.unwrap()
    };

    for file in 0..FILES / 2 {
        clients[0].metadata().change(remove(file), 0, 0).await.unwrap();
    }
    eventually(|| async { holds(&master).await == CLIENTS * FILES / 2 }).await;
    // Meanwhile everybody changes something, and the other half goes.
    let changes = join_all(clients.iter().enumerate().map(async |(number, client)| {
        let made = client.metadata().change(create(&format!("of {number}")), 0, 0).await.map(drop);
        match FILES / 2 + number {
            file if file < FILES => made.and(client.metadata().change(remove(file), 0, 0).await.map(drop)),
            _ => made,
        }
    }));
    let (master, changes) = futures::join!(master.restart_in_place(), changes);
    changes.into_iter().for_each(|change| change.unwrap());
    eventually(|| async { holds(&master).await == CLIENTS * FILES }).await;
    assert_eq!(master.services().watch.sessions(), CLIENTS as u64);
    let there =
        master.services().lookups.reader.read(move |tables| Ok(tables.inodes(inodes.into_iter())?)).await.unwrap();
    assert!(there.iter().all(|record| record.as_ref().is_some_and(|record| record.unlinked)));
    drop(kept);
    eventually(|| async { holds(&master).await == 0 }).await;
    join_all(clients.iter().map(|client| client.shutdown())).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_port_harms_nobody() {
    let master = TestMaster::new().await;
    for garbage in [
        b"GET / HTTP/1.1\r\n\r\n".as_slice(),
        &[0; 4096],
        &[0xff; 100],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut stream = tokio::net::TcpStream::connect(&master.master.address).await.unwrap();
        let _ = stream.write_all(garbage).await;
        let mut reply = Vec::new();
        let _ = tokio::time::timeout(Duration::from_millis(300), stream.read_to_end(&mut reply)).await;
    }
    let mut cluster = ClusterClient::connect(format!("http://{}", master.master.address)).await.unwrap();
    let status = cluster.status(StatusRequest::default()).await.unwrap().into_inner();
    assert_eq!((status.inodes, status.leader), (1, 1));
    master.stop().await;
}

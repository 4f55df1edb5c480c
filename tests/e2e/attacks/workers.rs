//! What passes for a worker, says of itself what it likes, or has workers write what is not theirs.

use std::process::{Command, Stdio};

use cavern_proto::data::PersistRequest;
use cavern_proto::frame::encode_frame;
use cavern_proto::master::{DiskReport, ListClaimsRequest, MountHits, StatusRequest, Worker, WorkerCounters};

use super::*;
use crate::bucket::Bucket;

#[test]
fn nobody_takes_the_place_of_a_worker() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 5, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let [attacker, admin] = [Role::Worker, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let status = admin.answer(calls.status(StatusRequest::default())).unwrap().into_inner();
    let victim = status.workers.unwrap().workers[0].clone();
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    let refused = |what: &str, answered: Option<Status>| assert_denied(what, answered, "and this one is \"attacker\"");
    let claims = ListClaimsRequest {
        worker_id: victim.id,
        cluster_id: status.cluster_id.clone(),
        ..ListClaimsRequest::default()
    };
    // The worker is its certificate's as soon as the master has agreed with itself that it knows what that is.
    let owned =
        eventually("the worker has an owner", PATIENCE, || attacker.answer(calls.list_claims(claims.clone())).err());
    refused("ListClaims", Some(owned));
    let before = state(&cluster);
    let beat = HeartbeatRequest { worker_id: victim.id, capacity_bytes: 1, ..HeartbeatRequest::default() };
    refused("Heartbeat", attacker.answer(calls.heartbeat(beat)).err());
    // As a worker that has lost its disks: the one before would leave the table, and its blocks with it.
    let worker = Worker { data_address: victim.data_address.clone(), ..Worker::default() };
    let uuid = vec![7; 16].into();
    let register = RegisterWorkerRequest { uuid, cluster_id: status.cluster_id, worker: Some(worker) };
    refused("RegisterWorker", attacker.answer(calls.register_worker(register)).err());
    assert_eq!(state(&cluster), before);
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let workers = admin.answer(calls.list_workers(ListWorkersRequest {})).unwrap().into_inner().workers;
    let places = |workers: &[Worker]| workers.iter().map(|w| (w.id, w.data_address.clone())).collect::<Vec<_>>();
    assert_eq!(places(&workers), places(&[victim]));
    cluster.assert_tree("data", "", &tree);
}

#[test]
fn no_certificate_fills_the_table_of_workers() {
    let cluster = up();
    let [attacker, admin] = [Role::Worker, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    let mut register = |number: u8| {
        let worker = Some(Worker { data_address: format!("127.0.0.1:{number}"), ..Worker::default() });
        let uuid = vec![number; 16].into();
        let request = RegisterWorkerRequest { uuid, worker, ..RegisterWorkerRequest::default() };
        attacker.answer(calls.register_worker(request)).map(drop)
    };
    let most = u8::try_from(Config::default().master.workers_per_certificate).unwrap();
    (1..=most).for_each(|number| register(number).unwrap());
    for number in most + 1..200 {
        let refused = register(number).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("master.workers_per_certificate"), "{refused}");
    }
    register(1).unwrap();
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let workers = admin.answer(calls.list_workers(ListWorkersRequest {})).unwrap().into_inner().workers;
    assert_eq!(workers.len(), usize::from(most) + cluster.at_start.workers.len());
}

#[test]
fn what_a_worker_says_of_itself_ends_nothing_and_gives_a_terminal_no_orders() {
    const MOST: u64 = u64::MAX;
    const ORDER: &str = "\u{1b}[2J";
    let cluster = up();
    let attacker = Somebody::of(&cluster, Role::Worker);
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    let text = || format!("{ORDER}said");
    let disk = DiskReport {
        path: text(),
        tier: text(),
        error: text(),
        capacity_bytes: MOST,
        used_bytes: MOST,
        data_bytes: MOST,
        blocks: MOST,
        healthy: true,
    };
    let counters = WorkerCounters {
        hit_bytes: MOST,
        miss_bytes: MOST,
        ufs_bytes: MOST,
        ufs_requests: MOST,
        evicted_blocks: MOST,
        corrupt_chunks: MOST,
        hits: MOST,
        misses: MOST,
    };
    let runs = || {
        let tasks = cluster.cv(&["report", "--tasks", "--json"]).json();
        tasks.as_array()?.iter().find(|task| task["name"] == "make-room")?["runs"].as_u64()
    };
    for number in 1..=2 {
        let data_address = format!("127.0.0.1:{number}{ORDER}");
        let worker = Worker {
            data_address: data_address.clone(),
            host: text(),
            http_address: text(),
            version: text(),
            capacity_bytes: MOST,
            ..Worker::default()
        };
        let uuid = vec![number; 16].into();
        let request = RegisterWorkerRequest { uuid, worker: Some(worker), ..RegisterWorkerRequest::default() };
        let worker_id = attacker.answer(calls.register_worker(request)).unwrap().into_inner().worker_id;
        let beat = HeartbeatRequest {
            worker_id,
            used_bytes: MOST,
            capacity_bytes: MOST,
            blocks: MOST,
            disks: vec![disk.clone(); 2],
            counters: Some(counters),
            data_address,
            kept_blocks: MOST,
            kept_bytes: MOST,
            wall_ns: i64::MIN,
            hits: vec![MountHits { mount_id: 1, hit_bytes: MOST, miss_bytes: MOST }; 2],
            ..HeartbeatRequest::default()
        };
        attacker.answer(calls.heartbeat(beat)).unwrap();
    }
    // The leader looks at what disks have.
    let before = runs().unwrap();
    eventually("the leader has gone by these numbers", PATIENCE, || (runs()? > before + 1).then_some(()));
    for arguments in [&["node", "list"][..], &["report"], &["report", "--json"]] {
        let said = cluster.cv(arguments);
        assert!(!said.stderr.contains("panicked"), "{said:?}");
    }
    let command = cluster.command(&["node", "list"]);
    let words: Vec<&str> =
        [command.get_program()].into_iter().chain(command.get_args()).flat_map(|word| word.to_str()).collect();
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &words.join(" "), "/dev/null"]).env("CV_CONF", &cluster.at_start.conf);
    let shown = terminal.stdin(Stdio::null()).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("\\u{1b}[2Jsaid") && !shown.contains(ORDER), "{shown:?}");
    let master = cluster.status().masters.swap_remove(0);
    assert_eq!(master.pid, cluster.at_start.masters[0].pid);
    assert!(!fs::read_to_string(&master.log).unwrap().contains("panicked"), "{}", cluster.logs());
}

#[test]
fn workers_write_nothing_that_is_not_in_the_prefix_of_a_mount() {
    let cluster = up();
    let tree = cluster.seed("bucket", "read/", 5, 50_000);
    cluster.mount("s3://bucket/read", "/read", &[]);
    cluster.mount_fs_mode("s3://bucket/own", "/own", &[]);
    let (admin, master) = (Somebody::of(&cluster, Role::Admin), Somebody::of(&cluster, Role::Master));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let mounts = admin.answer(calls.list_mounts(ListMountsRequest {})).unwrap().into_inner().mounts;
    let id_of = |path: &str| mounts.iter().find(|mount| mount.path == path).unwrap().id;
    let persist = |mount_id: u32, key: &str| {
        let (key, inline) = (key.to_owned(), "evil".into());
        let request =
            PersistRequest { mount_id, key, inline, length: 4, deadline_ms: 5000, ..PersistRequest::default() };
        let mut bytes = hello();
        bytes.extend(encode_frame(FrameKind::Persist, 1, &request, 0));
        bytes
    };
    let bucket = Bucket::of(&cluster, "bucket");
    let before = bucket.objects();
    for (mount, key, reason) in [
        ("/own", "read/evil", "is not within \"own/\""),
        ("/own", "ownevil", "is not within \"own/\""),
        ("/read", "read/evil", "is no fs-mode mount"),
    ] {
        let answer = master.ask_worker(&cluster, &persist(id_of(mount), key), reason).unwrap();
        assert!(answer.contains(reason), "{key}: {answer}");
    }
    assert_eq!(bucket.objects(), before);
    cluster.assert_tree("read", "read/", &tree);
}

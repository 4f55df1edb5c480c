//! Replicas: what becomes of them with commits, how new ones join, and how old ones are freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_conf::{Config, Interval};
use cavern_consensus::LeaderLease;
use cavern_net::Placement;
use cavern_proto::data::{BlockRef, CopyRequest, InspectReply, InspectRequest, PersistReply, PersistRequest};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Claim, CommitContent, CreateInode, Extent, Kind, ListClaimsRequest, Mount, Mutation, SetAttr, View, Worker,
    WorkerState, WorkerTable, WriteType,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{
    BeginView, DrainWorker, FinishView, FreezeView, JoinReplica, Mutate, PutWorker, RemoveView, RemoveWorker,
};
use cavern_state::Outcome;
use cavern_work::repair::claims;
use cavern_work::workers::Workers;
use cavern_work::workers::calls::ObjectWriter;
use cavern_work::{Request, WorkError};
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::harness::{NoWorkers, TestMaster, eventually, name, new_bucket, placement_of};
use crate::leader_state::{WorkerClientFactory, WorkerClients};

/// Target, sources and index of a copy.
type Copied = (u64, Vec<u64>, u32);

/// Workers that say that they did what they were asked to.
#[derive(Clone, Default)]
struct Fake {
    live: Arc<Mutex<Vec<(u64, WorkerState)>>>,
    /// The whole table in place of that.
    table: Arc<Mutex<Option<Vec<Worker>>>>,
    copied: Arc<Mutex<Vec<Copied>>>,
    freed: Arc<Mutex<Vec<(u64, u32)>>>,
    copies_fail: Arc<AtomicBool>,
    /// A copy takes until this is taken away.
    copies_wait: Arc<AtomicBool>,
}

impl WorkerClientFactory for Fake {
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str, _: LeaderLease) -> WorkerClients {
        WorkerClients { filler: Arc::new(NoWorkers), writer: Arc::new(self.clone()), pool: None }
    }
}

impl ObjectWriter for Fake {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        if let Some(workers) = self.table.lock().clone() {
            return Ok(Arc::new(Placement::new(&WorkerTable { epoch: 1, workers })));
        }
        Ok(placement_of(&self.live.lock()))
    }

    fn reported(&self) -> Result<Vec<Worker>, WorkError> {
        Ok(Vec::new())
    }

    fn persist(&self, _: u64, _: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(async { Err("not now".to_owned()) })
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        self.freed.lock().extend(blocks.iter().map(|block| (worker, block.index)));
        Box::pin(async { Ok(()) })
    }

    fn has(&self, _: u64, _: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        Box::pin(async { Err("not now".to_owned()) })
    }

    fn copy(&self, worker: u64, request: CopyRequest, _: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let index = request.block.unwrap_or_default().index;
            self.copied.lock().push((worker, request.workers, index));
            while self.copies_wait.load(Ordering::Acquire) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            if self.copies_fail.load(Ordering::Acquire) { Err("on purpose".to_owned()) } else { Ok(()) }
        })
    }

    fn inspect(&self, _: u64, _: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>> {
        Box::pin(async { Err("not now".to_owned()) })
    }
}

struct Fixture {
    master: Option<TestMaster>,
    fake: Fake,
    file: u64,
    seq: u64,
}

impl Fixture {
    async fn new(live: &[u64]) -> Self {
        let fake = Fake::default();
        *fake.live.lock() = live.iter().map(|id| (*id, WorkerState::Live)).collect();
        let (_, uri) = new_bucket();
        let mut config = Config::default();
        // No client is waited for after the start.
        config.master.session_lease = Interval::millis(1);
        config.master.repair_after = Interval::millis(0);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let master = TestMaster::with(config, dir, Arc::new(fake.clone())).await.unwrap();
        master.register_workers(u8::try_from(live.len()).unwrap()).await;
        let mount = Mount {
            path: "/m".into(),
            uri,
            write_type: WriteType::FsMode as i32,
            block_size: 1 << 20,
            replicas: 2,
            ..Mount::default()
        };
        let parent = master.attach(mount).await.root_inode;
        let mut bench = Self { master: Some(master), fake, file: 0, seq: 0 };
        let create = CreateInode { parent, name: name("f"), kind: Kind::File as i32, ..CreateInode::default() };
        bench.file = bench.change(Change::Create(create)).await.unwrap();
        bench
    }

    fn master(&self) -> &TestMaster {
        self.master.as_ref().unwrap()
    }

    async fn change(&mut self, change: Change) -> Result<u64, i32> {
        self.seq += 1;
        let services = self.master().services();
        let mutation = Mutation { seq: self.seq, uid: 1, gid: 2, change: Some(change), ..Mutation::default() };
        let mutate =
            Mutate { session: 1, answered: self.seq - 1, now_ns: 5, mutation: Some(mutation), ..Mutate::default() };
        match services.proposer.propose(Command::Mutate(mutate)).await.unwrap() {
            Outcome::Mutated(result, _) if result.errno == 0 => Ok(result.inode),
            Outcome::Mutated(result, _) => Err(result.errno),
            other => panic!("{other:?}"),
        }
    }

    async fn commit(&mut self, index: u32, workers: &[u64], joined: &[u32]) -> Result<u64, i32> {
        let (workers, joined) = (workers.to_vec(), joined.to_vec());
        let made = vec![Extent { index, workers, joined, ..Extent::default() }];
        let commit = CommitContent { inode: self.file, grow_to: 1, made, changed: true };
        self.change(Change::Commit(commit)).await
    }

    /// Workers of a block, which replica of each it is, and who joins.
    async fn extent(&self, index: u32) -> (Vec<u64>, Vec<u32>, u64) {
        let file = self.file;
        let read = self.master().services().lookups.reader.read(move |tables| Ok(tables.extent(file, index)?));
        let record = read.await.unwrap().unwrap();
        (record.workers, record.joined, record.joining)
    }

    async fn becomes(&self, index: u32, workers: &[u64], joined: &[u32]) {
        eventually(|| async { self.extent(index).await == (workers.to_vec(), joined.to_vec(), 0) }).await;
    }

    async fn has_strays(&self) -> bool {
        let read = self.master().services().lookups.reader.read(|tables| Ok(tables.strays(None, 10)?));
        !read.await.unwrap().is_empty()
    }

    async fn end(self) {
        self.master.unwrap().stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lacks_a_replica_gets_one_and_what_was_given_up_is_freed() {
    let mut bench = Fixture::new(&[1, 2, 3]).await;
    bench.commit(0, &[1, 2], &[]).await.unwrap();
    bench.commit(1, &[3], &[]).await.unwrap();
    eventually(|| async { bench.extent(1).await.0.len() == 2 }).await;
    let copied = bench.fake.copied.lock().clone();
    let extent = bench.extent(1).await;
    assert_eq!((copied[0].0, &copied[0].1[..], copied[0].2), (extent.0[1], &[3][..], 1));
    assert_eq!(extent.1, [0, 1]);
    assert_eq!(bench.extent(0).await, (vec![1, 2], vec![], 0), "it lacks nothing");

    // A writer gave 2 up, which is not given a copy before it has freed what it had.
    bench.commit(0, &[1], &[]).await.unwrap();
    eventually(|| async { bench.extent(0).await.0.len() == 2 }).await;
    eventually(|| async { !bench.has_strays().await }).await;
    assert!(bench.fake.freed.lock().contains(&(2, 0)));
    let (workers, joined, _) = bench.extent(0).await;
    assert_eq!((workers[0], joined), (1, vec![0, 1]));
    // One that writes to what there was before has not reached the new one.
    bench.commit(0, &[1, workers[1]], &[]).await.unwrap();
    assert_eq!(bench.extent(0).await.0[..1], [1]);
    eventually(|| async { bench.extent(0).await.1 == [0, 2] }).await;
    // With nobody left who has it, it is refused.
    assert!(bench.commit(0, &[9], &[]).await.is_err());
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_lost_worker_had_is_copied_from_where_else_it_is() {
    let mut bench = Fixture::new(&[1, 2, 3]).await;
    for index in 0..20 {
        bench.commit(index, &[1, 2], &[]).await.unwrap();
    }
    *bench.fake.live.lock() = vec![(1, WorkerState::Live), (2, WorkerState::Lost), (3, WorkerState::Live)];
    bench.commit(20, &[2], &[]).await.unwrap();
    for index in 0..20 {
        bench.becomes(index, &[1, 3], &[0, 1]).await;
    }
    assert!(bench.fake.copied.lock().iter().filter(|(_, sources, _)| sources == &[1]).count() >= 20);
    // Nobody who is there has it, and it was not given up.
    assert_eq!(bench.extent(20).await.0, [2]);
    let lost = bench.master().services().repair.unavailable(10).await.unwrap();
    assert_eq!((lost.files, lost.blocks, &lost.listed[0].path[..]), (1, 1, "/m/f"));
    assert!(bench.has_strays().await && bench.fake.freed.lock().iter().all(|(worker, _)| *worker != 2));
    bench.fake.live.lock()[1].1 = WorkerState::Live;
    eventually(|| async { !bench.has_strays().await }).await;
    let freed = bench.fake.freed.lock().clone();
    assert!((0..20).all(|index| freed.contains(&(2, index))));
    assert_eq!(bench.master().services().repair.unavailable(10).await.unwrap().files, 0);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_while_a_copy_is_made_ends_it() {
    let mut bench = Fixture::new(&[1, 2]).await;
    bench.fake.copies_wait.store(true, Ordering::Release);
    bench.commit(0, &[1], &[]).await.unwrap();
    eventually(|| async { bench.extent(0).await.2 == 2 && !bench.fake.copied.lock().is_empty() }).await;
    bench.commit(0, &[1], &[]).await.unwrap();
    assert_eq!(bench.extent(0).await, (vec![1], vec![], 0));
    bench.fake.copies_wait.store(false, Ordering::Release);
    // What the first copy lacks it may: it is freed, and another one made.
    bench.becomes(0, &[1, 2], &[0, 1]).await;
    assert!(bench.fake.freed.lock().contains(&(2, 0)) && bench.fake.copied.lock().len() >= 2);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_fails_is_given_up_and_made_again_elsewhere() {
    let mut bench = Fixture::new(&[1, 2]).await;
    bench.fake.copies_fail.store(true, Ordering::Release);
    bench.commit(0, &[1], &[]).await.unwrap();
    eventually(|| async { !bench.fake.freed.lock().is_empty() }).await;
    assert_eq!(bench.extent(0).await.0, [1]);
    bench.fake.copies_fail.store(false, Ordering::Release);
    bench.becomes(0, &[1, 2], &[0, 1]).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_a_restart_cut_off_is_given_up() {
    let mut bench = Fixture::new(&[1]).await;
    bench.commit(0, &[1], &[]).await.unwrap();
    let extent = Extent { workers: vec![1], joining: 7, ..Extent::default() };
    let join = JoinReplica { inode: bench.file, extent: Some(extent) };
    // The leader gives up a copy that it does not make itself: both are on their way before it finds the first.
    let joined = bench.master().services().proposer.propose_all([join.clone(), join]).await.unwrap();
    assert!(matches!(joined[..], [Ok(()), Err(_)]), "{joined:?}");
    let (dir, config) = bench.master.take().unwrap().end().await;
    bench.master = Some(TestMaster::with(config, dir, Arc::new(bench.fake.clone())).await.unwrap());
    bench.becomes(0, &[1], &[]).await;
    // Worker 7 is in no table: there is nothing to be freed.
    eventually(|| async { !bench.has_strays().await }).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_to_keep_its_own_and_what_those_had_that_are_gone() {
    let mut bench = Fixture::new(&[]).await;
    bench.master().register_workers(9).await;
    for (index, workers) in [(0, [1, 2]), (1, [2, 1]), (2, [2, 9]), (3, [9, 1]), (4, [1, 2])] {
        bench.commit(index, &workers, &[0, 0]).await.unwrap();
    }
    let remove = RemoveWorker { worker_id: 9, with_replicas: true };
    let removed = bench.master().services().proposer.propose(Command::RemoveWorker(remove)).await.unwrap();
    assert_eq!(removed, Outcome::Done);
    let reader = bench.master().services().lookups.reader.clone();
    let page = async |worker, after, limit| {
        reader.read(move |tables| claims::page(tables, worker, after, limit)).await.unwrap()
    };
    for limit in [1, 2, 3, 6, 7, 100] {
        let (mut claimed, mut after) = (Vec::new(), None);
        loop {
            let list = page(1, after, limit).await;
            assert!(list.claims.len() <= limit);
            claimed.extend(list.claims.iter().map(|claim| (claim.worker_id, claim.index)));
            if list.is_last {
                break;
            }
            after = list.claims.last().copied();
        }
        assert_eq!(claimed, [(1, 0), (1, 1), (1, 3), (1, 4), (9, 2), (9, 3)], "{limit} at a time");
    }
    let first = page(2, None, 1).await.claims;
    let mount_id = bench.master().services().mounts.all_recorded().unwrap()[0].id;
    assert_eq!(first, [Claim { worker_id: 2, inode: bench.file, mount_id, ..Claim::default() }]);

    let repair = bench.master().services().repair.clone();
    let cluster_id = bench.master().services().cluster_id.to_string();
    let known = ListClaimsRequest { worker_id: 1, cluster_id, after: None };
    assert_eq!(repair.claims(known.clone(), None).await.unwrap().claims.len(), 6);
    let others = ListClaimsRequest { cluster_id: "another".into(), ..known.clone() };
    assert!(matches!(repair.claims(others, None).await, Err(WorkError::Refused(_))));
    assert!(matches!(
        repair.claims(ListClaimsRequest { worker_id: 9, ..known }, None).await,
        Err(WorkError::Refused(_))
    ));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_only_views_have_stay_at_their_workers_until_these_go() {
    const BLOCK: u64 = 1 << 20;
    let mut bench = Fixture::new(&[1, 2, 3]).await;
    let file = bench.file;
    for index in 0..3 {
        bench.commit(index, &[1, 2], &[]).await.unwrap();
    }
    let grown = CommitContent { inode: file, grow_to: 3 * BLOCK, changed: true, ..CommitContent::default() };
    bench.change(Change::Commit(grown)).await.unwrap();
    let (proposer, repair) = (bench.master().services().proposer.clone(), bench.master().services().repair.clone());
    let mount_id = bench.master().services().mounts.all_recorded().unwrap()[0].id;
    let view = View { name: "v".into(), path: "/m".into(), mount_id, store_mount_id: mount_id, ..View::default() };
    let view = *proposer.propose(BeginView { view: Some(view) }).await.unwrap().unwrap();
    let id = view.id;
    for settled in [false, true] {
        proposer.propose(FreezeView { id, settled }).await.unwrap().unwrap();
    }
    // One that is being made would be taken away.
    proposer.propose(FinishView { view: Some(view) }).await.unwrap().unwrap();
    let cut = SetAttr { inode: file, size: Some(BLOCK), ..SetAttr::default() };
    bench.change(Change::SetAttr(cut)).await.unwrap();

    let reader = bench.master().services().lookups.reader.clone();
    let page = async |worker, after, limit| {
        reader.read(move |tables| claims::page(tables, worker, after, limit)).await.unwrap()
    };
    for limit in [1, 2, 3, 100] {
        let (mut claimed, mut after) = (Vec::new(), None);
        loop {
            let list = page(1, after, limit).await;
            assert!(list.claims.len() <= limit);
            claimed.extend(list.claims.iter().map(|claim| (claim.kept, claim.index, claim.mount_id)));
            if list.is_last {
                break;
            }
            after = list.claims.last().copied();
        }
        let expected = [(false, 0), (true, 1), (true, 2)].map(|(kept, index)| (kept, index, mount_id));
        assert_eq!(claimed, expected, "{limit} at a time");
    }
    assert!(page(3, None, 100).await.claims.is_empty());

    bench.fake.live.lock()[0].1 = WorkerState::Lost;
    let refused = repair.remove_once(&Request::default(), 1, false).await.unwrap();
    assert!(!refused.removed && refused.reason.contains("2 blocks at worker 1 are kept for views"), "{refused:?}");
    bench.fake.live.lock()[0].1 = WorkerState::Live;

    proposer.propose(RemoveView { id, deleted: false }).await.unwrap().unwrap();
    repair.views_removed();
    let expected = [(1, 1), (1, 2), (2, 1), (2, 2)];
    eventually(|| async { expected.iter().all(|freed| bench.fake.freed.lock().contains(freed)) }).await;
    let counters = reader.read(|tables| Ok(tables.counters()?)).await.unwrap();
    assert_eq!((counters.kept, counters.frozen_views), (0, 0));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_that_leaves_has_moves_and_it_is_removed_for_good() {
    let mut bench = Fixture::new(&[]).await;
    let proposer = bench.master().services().proposer.clone();
    let put = |number: u8| {
        let worker = Worker { data_address: format!("host{number}:1"), ..Worker::default() };
        Command::PutWorker(PutWorker { uuid: vec![number; 16].into(), worker: Some(worker), ..PutWorker::default() })
    };
    let drain = |worker_id, draining| Command::DrainWorker(DrainWorker { worker_id, draining });
    proposer.propose(put(1)).await.unwrap();
    assert!(matches!(proposer.propose(drain(1, true)).await.unwrap(), Outcome::Refused(_)), "nobody else is there");
    for number in 2..=4 {
        proposer.propose(put(number)).await.unwrap();
    }
    let table = async || bench.master().services().workers.table().unwrap().workers;
    let show = |workers: Vec<Worker>| *bench.fake.table.lock() = Some(workers);
    show(table().await);
    let repair = bench.master().services().repair.clone();
    bench.commit(0, &[1, 2], &[]).await.unwrap();
    bench.commit(1, &[2, 1], &[]).await.unwrap();
    bench.commit(2, &[1, 2, 3], &[]).await.unwrap();
    let refused = repair.remove_once(&Request::default(), 1, false).await.unwrap();
    assert!(!refused.removed && refused.reason.contains("cv node drain"), "{refused:?}");

    // Copies fail at first, and nothing is given up for them.
    bench.fake.copies_fail.store(true, Ordering::Release);
    assert_eq!(repair.drain(1, true).await.unwrap().blocks, 3);
    let draining = bench.master().services().workers.table().unwrap().workers;
    assert!(draining[0].draining && draining[0].state() == WorkerState::Live);
    *bench.fake.table.lock() = Some(draining);
    bench.becomes(2, &[2, 3], &[]).await;
    eventually(|| async { !repair.blocks_of(1).await.unwrap().stuck.is_empty() }).await;
    // A worker that registers again is still one that leaves.
    proposer.propose(put(1)).await.unwrap();
    assert!(bench.master().services().workers.table().unwrap().workers[0].draining);
    bench.fake.copies_fail.store(false, Ordering::Release);
    eventually(|| async { repair.blocks_of(1).await.unwrap().blocks == 0 }).await;
    for index in 0..2 {
        let (workers, ..) = bench.extent(index).await;
        assert!(workers.len() == 2 && !workers.contains(&1), "{workers:?}");
    }

    let removed = repair.remove_once(&Request::default(), 1, false).await.unwrap();
    assert!(removed.removed && removed.only_here.unwrap().blocks == 0);
    assert!(matches!(repair.remove_once(&Request::default(), 1, false).await, Err(WorkError::NotFound(_))));
    match proposer.propose(put(1)).await.unwrap() {
        Outcome::Refused(reason) => {
            assert!(reason.contains("cv node remove") && reason.contains("host1:1"), "{reason}")
        }
        other => panic!("{other:?}"),
    }

    // One that is lost is removed if others have what it had, and with force in any case.
    let mut workers = bench.master().services().workers.table().unwrap().workers;
    bench.commit(3, &[2], &[]).await.unwrap();
    eventually(|| async { bench.extent(3).await.0.len() == 2 }).await;
    bench.fake.copies_fail.store(true, Ordering::Release);
    bench.commit(4, &[2], &[]).await.unwrap();
    workers[0].set_state(WorkerState::Lost);
    *bench.fake.table.lock() = Some(workers);
    let refused = repair.remove_once(&Request::default(), 2, false).await.unwrap();
    let only_here = refused.only_here.unwrap();
    assert_eq!(
        (refused.removed, only_here.blocks, only_here.files, &only_here.listed[0].path[..]),
        (false, 1, 1, "/m/f")
    );
    assert!(bench.extent(3).await.0.contains(&2), "a refusal changes nothing");
    assert_eq!(repair.remove_once(&Request::default(), 2, true).await.unwrap().only_here.unwrap().blocks, 1);
    assert!(bench.master().services().workers.table().unwrap().workers.iter().all(|worker| worker.id > 2));
    bench.end().await;
}

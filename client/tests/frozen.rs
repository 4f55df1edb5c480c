//! Files of which views have blocks: these are never written to again, and programs see what they have written.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what fails here fails the test")]

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Allocation, AttributeChange, BucketDefaults, Client, File};
use cavern_proto::CHUNK_BYTES;
use cavern_proto::master::SetAttr;
use proptest::prelude::*;
use support::master::MOUNT_ROOT;
use support::worker::DataName;
use support::{FakeMaster, FakeWorker, Mood, connect, content, patient};

const BLOCK: u64 = CHUNK_BYTES as u64;
/// Three blocks, of which the last is not whole.
const BYTES: u64 = 2 * BLOCK + 1000;

/// A file at one worker, and what is frozen of it.
struct Fixture {
    master: FakeMaster,
    worker: FakeWorker,
    client: Arc<Client>,
    inode: u64,
    file: File,
    /// The last generation that may have begun.
    latest: u32,
    frozen: HashMap<DataName, Vec<u8>>,
}

impl Fixture {
    async fn new(name: &str, bytes: &[u8]) -> Self {
        let worker = FakeWorker::remote(1).await;
        let master = FakeMaster::start(name).await;
        master.fs_mode();
        master.configure(|mount| mount.block_size = BLOCK);
        master.set_workers(vec![worker.entry()]);
        let inode = master.put_blocks(MOUNT_ROOT, "f", &[&[1], &[1], &[1]], bytes.len() as u64);
        master.keep_extents(inode);
        for (index, block) in (0..).zip(bytes.chunks(BLOCK as usize)) {
            worker.put_data((inode, 1, index), block.to_vec());
        }
        let client = connect(&patient(&master)).await;
        let file = client.open_to_read(&client.metadata().node(inode).await.unwrap()).await.unwrap();
        Self { master, worker, client, inode, file, latest: 1, frozen: HashMap::new() }
    }

    /// A view is made: what is there then is what it has.
    async fn freeze(&mut self) {
        let (attr, extents) = self.master.layout(self.inode);
        let generations = extents.iter().map(|extent| extent.generation).chain([attr.generation, self.latest]);
        self.latest = generations.max().unwrap() + 1;
        self.master.freeze(self.latest);
        self.master.settled_by(self.master.announce_mounts()).await;
        self.frozen = self.worker.data();
    }

    /// And all clients go by that.
    async fn freeze_and_settle(&mut self) {
        self.freeze().await;
        self.settle().await;
    }

    async fn settle(&self) {
        self.master.all_settled();
        self.master.settled_by(self.master.announce_mounts()).await;
    }

    /// There are no views any more.
    async fn thaw(&mut self) {
        self.master.freeze(0);
        self.master.settled_by(self.master.announce_mounts()).await;
        self.frozen.clear();
    }

    async fn cut(&self, size: u64, keeps_block: bool) {
        let node = self.client.metadata().node(self.inode).await.unwrap();
        let set = SetAttr { inode: self.inode, size: Some(size), keeps_block, ..SetAttr::default() };
        let defaults = &BucketDefaults { uid: 0, gid: 0, file_mode: 0o644, dir_mode: 0o755 };
        let change = AttributeChange { set, uid: 0, gid: 0, writer: None, thread: 0, user: None, defaults };
        let _ = self.client.set_attributes(&node, change).await.unwrap();
    }

    async fn zero(&self, range: std::ops::Range<u64>) {
        let how = Allocation { zero: true, reserve: false, grow: false };
        self.file.allocate(range, how).await.unwrap();
    }

    async fn check(&self, expected: &[u8]) {
        let read = self.file.read_direct(0, expected.len() + 1).await.unwrap();
        assert!(read[..] == *expected, "{} bytes are read, of {}", read.len(), expected.len());
        let now = self.worker.data();
        for (name, bytes) in &self.frozen {
            assert!(now[name] == *bytes, "{name:?} was written to");
        }
    }

    /// What others see, who read the blocks that the master knows.
    async fn check_committed(&self, expected: &[u8]) {
        let _ = self.file.flush().await.unwrap();
        let (attr, extents) = self.master.layout(self.inode);
        assert_eq!(attr.size, expected.len() as u64);
        let (data, mut seen) = (self.worker.data(), vec![0; expected.len()]);
        for extent in extents {
            let start = (u64::from(extent.index) * BLOCK) as usize;
            let bytes = &data[&(self.inode, extent.generation, extent.index)];
            let end = (start + bytes.len()).min(seen.len());
            if start < end {
                seen[start..end].copy_from_slice(&bytes[..end - start]);
            }
        }
        assert!(seen == expected);
    }

    async fn end(self) {
        drop(self.file);
        self.client.shutdown().await;
        self.worker.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_to_a_frozen_block_makes_another_which_the_master_knows_before_the_answer() {
    let mut expected = content(1, BYTES as usize);
    let mut bench = Fixture::new("frozen-write", &expected).await;
    bench.file.write(10, vec![1; 20].into(), None).await.unwrap();
    expected[10..30].fill(1);
    bench.check(&expected).await;
    assert_eq!(bench.worker.data().len(), 3, "in its place");
    bench.freeze_and_settle().await;
    assert!(bench.master.mutations(|mutations| !mutations.committed.is_empty()), "what was written before is known");

    bench.file.write(40, vec![2; 20].into(), None).await.unwrap();
    expected[40..60].fill(2);
    let made = bench.master.mutations(|mutations| mutations.committed.last().cloned()).unwrap();
    assert_eq!((made.index, made.generation, made.replaces), (0, bench.latest, Some(1)));
    bench.check(&expected).await;
    bench.file.write(70, vec![3; 20].into(), None).await.unwrap();
    expected[70..90].fill(3);
    bench.check(&expected).await;
    assert_eq!(bench.worker.count("Copied"), 1, "once for each view");
    assert_eq!(bench.worker.data().len(), 4);
    bench.check_committed(&expected).await;

    // Another view, of what has been made since.
    bench.freeze_and_settle().await;
    bench.file.write(0, vec![4; 5].into(), None).await.unwrap();
    expected[..5].fill(4);
    bench.check(&expected).await;
    bench.check_committed(&expected).await;
    // Without a view it is written to as ever.
    bench.thaw().await;
    let before = bench.worker.data().len();
    bench.file.write(BLOCK, vec![5; 5].into(), None).await.unwrap();
    expected[BLOCK as usize..][..5].fill(5);
    bench.check_committed(&expected).await;
    assert_eq!(bench.worker.data().len(), before);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_goes_by_a_mount_table_when_what_it_has_begun_is_done() {
    let mut expected = content(2, BYTES as usize);
    let mut bench = Fixture::new("frozen-settled", &expected).await;
    bench.master.settled_by(1).await;
    bench.file.write(0, vec![1; 10].into(), None).await.unwrap();
    expected[..10].fill(1);
    bench.check_committed(&expected).await;
    // It takes longer than a mount table.
    bench.worker.set_mood(Mood::Slow(Duration::from_millis(400)));
    let before = bench.worker.count("Write");
    let writer = bench.file.clone();
    let writing = tokio::spawn(async move { writer.write(20, vec![2; 10].into(), None).await });
    support::until("it is on its way", || bench.worker.count("Write") > before).await;
    bench.freeze().await;
    assert!(bench.frozen[&(bench.inode, 1, 0)][20..30] == [2; 10], "it was waited for");
    bench.settle().await;
    expected[20..30].fill(2);
    bench.worker.set_mood(Mood::Well);
    writing.await.unwrap().unwrap();
    bench.check(&expected).await;
    bench.check_committed(&expected).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_would_change_what_is_frozen_waits_until_all_clients_have_heard_of_it() {
    let mut expected = content(4, BYTES as usize);
    let mut bench = Fixture::new("frozen-waits", &expected).await;
    bench.master.settled_by(1).await;
    bench.freeze().await;
    // One block that a view has, and one that another client may be making.
    let spans = [(10, 1u8), (3 * BLOCK, 2)];
    let writing = spans.map(|(at, value)| {
        let writer = bench.file.clone();
        tokio::spawn(async move { writer.write(at, vec![value; 10].into(), None).await })
    });
    let before = bench.worker.data();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(writing.iter().all(|writing| !writing.is_finished()) && bench.worker.data() == before);
    bench.settle().await;
    for (writing, (at, value)) in writing.into_iter().zip(spans) {
        writing.await.unwrap().unwrap();
        expected.resize(expected.len().max(at as usize + 10), 0);
        expected[at as usize..][..10].fill(value);
    }
    bench.check(&expected).await;
    bench.check_committed(&expected).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_view_has_any_more_is_written_to_in_its_place_by_whoever_hears_of_that_late() {
    let mut expected = content(5, BYTES as usize);
    let mut bench = Fixture::new("frozen-thawed", &expected).await;
    bench.freeze_and_settle().await;
    // What is answered for, and not committed, when a replacement is refused.
    bench.file.write(4 * BLOCK, vec![1; 10].into(), None).await.unwrap();
    expected.resize(4 * BLOCK as usize + 10, 0);
    expected[4 * BLOCK as usize..].fill(1);
    let before = bench.worker.count("Copied");
    bench.master.freeze(0);
    bench.frozen.clear();
    let writer = bench.file.clone();
    let writing = tokio::spawn(async move { writer.write(7, vec![2; 10].into(), None).await });
    support::until("it was refused", || bench.worker.count("Copied") > before).await;
    bench.thaw().await;
    writing.await.unwrap().unwrap();
    expected[7..17].fill(2);
    bench.check(&expected).await;
    bench.check_committed(&expected).await;
    assert_eq!(bench.master.layout(bench.inode).1[0].generation, 1);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_does_not_write_since_a_view_has_the_block_goes_to_another_one() {
    let mut expected = content(6, BYTES as usize);
    let mut bench = Fixture::new("frozen-refused", &expected).await;
    bench.file.write(10, vec![1; 20].into(), None).await.unwrap();
    expected[10..30].fill(1);
    bench.check_committed(&expected).await;
    // All have heard of a view but this client.
    bench.latest += 1;
    bench.master.freeze(bench.latest);
    bench.master.all_settled();
    bench.worker.freeze(bench.latest);
    bench.frozen = bench.worker.data();
    let writer = bench.file.clone();
    let writing = tokio::spawn(async move { writer.write(20, vec![2; 20].into(), None).await });
    support::until("it was refused", || bench.worker.count("Refused") > 0).await;
    bench.master.settled_by(bench.master.announce_mounts()).await;
    writing.await.unwrap().unwrap();
    expected[20..40].fill(2);
    bench.check(&expected).await;
    bench.check_committed(&expected).await;
    assert_eq!(bench.master.layout(bench.inode).1[0].workers, [1], "the replica is as good as it was");
    bench.end().await;
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, length: usize },
    Zero { at: u64, length: u64 },
    Cut { size: u64, keeps_block: bool },
    Flush,
    Freeze,
    Thaw,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || prop_oneof![3 => 0..BYTES + BLOCK, 1 => Just(0), 1 => Just(BLOCK), 1 => Just(BLOCK - 5)];
    prop_oneof![
        6 => (at(), 1usize..3000).prop_map(|(at, length)| Step::Write { at, length }),
        2 => (at(), 1..2 * BLOCK).prop_map(|(at, length)| Step::Zero { at, length }),
        2 => (at(), any::<bool>()).prop_map(|(size, keeps_block)| Step::Cut { size, keeps_block }),
        1 => Just(Step::Flush),
        3 => Just(Step::Freeze),
        1 => Just(Step::Thaw),
    ]
}

async fn take(steps: Vec<Step>) {
    let mut expected = content(3, BYTES as usize);
    let mut bench = Fixture::new("frozen-steps", &expected).await;
    for (step, value) in steps.into_iter().zip(1u8..) {
        match step {
            Step::Write { at, length } => {
                bench.file.write(at, vec![value; length].into(), None).await.unwrap();
                let (start, end) = (at as usize, at as usize + length);
                expected.resize(expected.len().max(end), 0);
                expected[start..end].fill(value);
            }
            Step::Zero { at, length } => {
                bench.zero(at..at + length).await;
                let (start, end) = ((at as usize).min(expected.len()), ((at + length) as usize).min(expected.len()));
                expected[start..end].fill(0);
            }
            Step::Cut { size, keeps_block } => {
                bench.cut(size, keeps_block && size == 0).await;
                expected.resize(size as usize, 0);
            }
            Step::Flush => bench.check_committed(&expected).await,
            Step::Freeze => bench.freeze_and_settle().await,
            Step::Thaw => bench.thaw().await,
        }
        bench.check(&expected).await;
    }
    bench.check_committed(&expected).await;
    bench.end().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_done_to_a_file_what_a_view_has_of_it_stays(steps in prop::collection::vec(step(), 1..25)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(take(steps));
    }
}

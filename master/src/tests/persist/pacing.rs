//! When files are written: those that are at rest soon, those that change again and again not each time, and few while
//! clients are busy.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cavern_proto::master::cluster_server::Cluster as _;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, PersistStatusRequest};
use cavern_work::persist::Scope;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Request;

use super::bench::Fixture;
use crate::tests::harness::eventually;

/// Long enough for what happens within a tenth of it to come before what waits for all of it.
const DELAY: Duration = Duration::from_secs(10);

impl Fixture {
    /// A file with one block.
    async fn create_written(&mut self, text: &str) -> u64 {
        let file = self.create(self.root, text, Kind::File).await;
        self.commit(file, 0, 0, vec![1]).await;
        file
    }

    /// A file with one block, which a session has had open since before it was written.
    async fn create_open(&mut self, text: &str) -> u64 {
        let file = self.create(self.root, text, Kind::File).await;
        self.change(Change::AddOpenRef(file)).await;
        self.commit(file, 0, 0, vec![1]).await;
        file
    }

    fn times_written(&self, key: &str) -> usize {
        self.fake.written.lock().iter().filter(|written| *written == key).count()
    }

    async fn written(&self, key: &str) {
        eventually(|| async { self.times_written(key) > 0 }).await;
    }

    /// Whether nobody waited for the key, each time that it was to be written.
    fn background(&self, key: &str) -> Vec<bool> {
        let asked = self.fake.asked.lock();
        asked.iter().filter(|(of, _)| *of == key).map(|(_, background)| *background).collect()
    }

    async fn scope(&self, path: &str) -> Scope {
        self.master().services().persistence.scope(path).await.unwrap()
    }

    /// Clients make many changes until this is aborted.
    async fn busy_clients(&self) -> JoinHandle<()> {
        let persistence = self.master().services().persistence.clone();
        let changes = tokio::spawn(async move {
            loop {
                persistence.clients_changed(1000);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        eventually(|| async { self.master().services().persistence.yields_to_clients() }).await;
        changes
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_file_is_written_before_those_that_are_open_or_empty() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let root = bench.root;
    bench.create(root, "empty", Kind::File).await;
    let open = bench.create_open("open").await;
    bench.create_written("closed").await;
    bench.written("top/closed").await;
    assert_eq!(bench.bucket.keys(), ["top/closed"]);
    bench.change(Change::DropOpenRef(open)).await;
    bench.written("top/open").await;
    assert_eq!(bench.bucket.keys(), ["top/closed", "top/open"]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_file_is_not_taken_for_a_closed_one_where_a_look_at_all_files_takes_long() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    for number in 0..70 {
        bench.create_written(&format!("f{number:02}")).await;
    }
    // A tenth of the delay after its last change it is looked at whether it is open: not yet when those above are.
    tokio::time::sleep(DELAY / 20).await;
    bench.create_open("open").await;
    let written = Instant::now();
    // The look at all of them waits for one of the 56 places.
    let under_way = bench.fake.under_way.clone();
    eventually(|| async { under_way.load(Ordering::Acquire) == 56 }).await;
    tokio::time::sleep_until(written + DELAY / 8).await;
    drop(held);
    eventually(|| async { bench.bucket.keys().len() == 70 }).await;
    assert_eq!(bench.background("top/open"), [] as [bool; 0]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_opened_while_it_waits_for_its_turn_waits_as_an_open_one() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let root = bench.root;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    for number in 0..56 {
        bench.create_written(&format!("f{number:02}")).await;
    }
    let under_way = bench.fake.under_way.clone();
    eventually(|| async { under_way.load(Ordering::Acquire) == 56 }).await;
    // The second is at rest when the first is, which waits for a place.
    let first = bench.create(root, "first", Kind::File).await;
    let second = bench.create(root, "second", Kind::File).await;
    for file in [second, first] {
        bench.commit(file, 0, 0, vec![1]).await;
    }
    tokio::time::sleep(DELAY / 5).await;
    bench.change(Change::AddOpenRef(second)).await;
    bench.commit(second, 1, 0, vec![1]).await;
    drop(held);
    bench.create_written("last").await;
    bench.written("top/last").await;
    assert_eq!((bench.times_written("top/first"), bench.background("top/second")), (1, Vec::new()));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_written_a_moment_ago_waits_until_somebody_waits_for_it() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let file = bench.create_written("again").await;
    bench.written("top/again").await;
    bench.commit(file, 1, 0, vec![1]).await;
    bench.create_written("other").await;
    bench.written("top/other").await;
    assert_eq!(bench.times_written("top/again"), 1);
    let scope = bench.scope("/m/again").await;
    let waited = bench.master().services().persistence.expedite(scope, u64::MAX);
    eventually(|| async { waited.left().await.unwrap().items() == 0 }).await;
    assert_eq!(bench.times_written("top/again"), 2);
    assert_eq!(bench.background("top/again"), [true, false]);
    drop(waited);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_upload_was_in_vain_waits_until_it_is_closed_or_awaited() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    let open = bench.create_written("open").await;
    let closed = bench.create_written("closed").await;
    let under_way = bench.fake.under_way.clone();
    eventually(|| async { under_way.load(Ordering::Acquire) == 2 }).await;
    bench.fake.sent_bytes.store(1, Ordering::Release);
    for file in [open, closed] {
        bench.change(Change::AddOpenRef(file)).await;
        bench.commit(file, 1, 0, vec![1]).await;
    }
    drop(held);
    eventually(|| async { bench.status("/m").await.changing_files == 2 }).await;
    bench.fake.sent_bytes.store(0, Ordering::Release);

    bench.change(Change::DropOpenRef(closed)).await;
    bench.written("top/closed").await;
    assert_eq!(bench.background("top/open").len(), 1, "it waits");
    eventually(|| async { bench.status("/m").await.changing_files == 1 }).await;
    let waited = bench.master().services().persistence.expedite(bench.scope("/m/open").await, u64::MAX);
    eventually(|| async { waited.left().await.unwrap().items() == 0 }).await;
    assert_eq!(bench.background("top/open"), [true, false]);
    drop(waited);
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_all_the_time_is_uploaded_less_and_less_often() {
    let delay = Duration::from_millis(50);
    let mut bench = Fixture::start(&[], delay).await;
    bench.fake.sent_bytes.store(1, Ordering::Release);
    let begun = Instant::now();
    let file = bench.create_open("log").await;
    eventually(|| async { bench.background("top/log").len() >= 5 }).await;
    assert!(begun.elapsed() >= delay * (1 + 2 + 4 + 8), "after {:?}", begun.elapsed());
    bench.fake.sent_bytes.store(0, Ordering::Release);
    bench.change(Change::DropOpenRef(file)).await;
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_clients_make_many_changes_few_files_are_written_at_a_time() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let changes = bench.busy_clients().await;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    for number in 0..20 {
        bench.create_written(&format!("f{number:02}")).await;
    }
    let under_way = bench.fake.under_way.clone();
    let few = || async { under_way.load(Ordering::Acquire) };
    eventually(|| async { few().await == 4 }).await;
    // Each of them takes a look at all files, at which others could have been begun.
    let mut waited = Vec::new();
    for number in [19, 18, 17] {
        let scope = bench.scope(&format!("/m/f{number}")).await;
        waited.push(bench.master().services().persistence.expedite(scope, u64::MAX));
        let expected = 4 + waited.len() as u32;
        eventually(|| async { few().await >= expected }).await;
        assert_eq!(few().await, expected);
    }
    drop(held);
    eventually(|| async { bench.bucket.keys().len() == 20 }).await;

    // Deletions make way altogether.
    drop(waited);
    let root = bench.root;
    bench.remove(root, "f00", false).await;
    bench.create_written("last").await;
    bench.written("top/last").await;
    assert!(bench.bucket.keys().contains(&"top/f00".to_owned()));
    changes.abort();
    eventually(|| async { bench.bucket.keys().len() == 20 }).await;
    assert!(!bench.bucket.keys().contains(&"top/f00".to_owned()));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_waits_for_begins_while_all_others_are_under_way() {
    let mut bench = Fixture::start(&[], DELAY).await;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    for number in 0..70 {
        bench.create_written(&format!("f{number:02}")).await;
    }
    // Of 64 that may be under way at a time.
    let under_way = bench.fake.under_way.clone();
    eventually(|| async { under_way.load(Ordering::Acquire) == 56 }).await;
    let waited = bench.master().services().persistence.expedite(bench.scope("/m/f69").await, u64::MAX);
    eventually(|| async { under_way.load(Ordering::Acquire) == 57 }).await;
    assert_eq!(bench.background("top/f69"), [false]);
    drop(held);
    eventually(|| async { bench.bucket.keys().len() == 70 }).await;
    drop(waited);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_until_nothing_is_left_does_not_wait_for_a_delay() {
    let mut bench = Fixture::start(&[], DELAY).await;
    for text in ["asked", "other"] {
        bench.create_open(text).await;
    }
    let up_to_change = bench.status("/m").await.change;
    eventually(|| async {
        let request = PersistStatusRequest { path: "/m/asked".into(), up_to_change, settle: false };
        let status = bench.master().services().get_persist_status(Request::new(request)).await;
        status.unwrap().into_inner().files == 0
    })
    .await;
    assert_eq!(bench.background("top/asked"), [false]);
    assert!(bench.background("top/other").is_empty(), "nobody has asked for it");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_waited_for_long_is_written_at_any_rate() {
    let mut bench = Fixture::start(&[], Duration::from_millis(200)).await;
    bench.fake.is_away.store(1, Ordering::Release);
    bench.create_written("f").await;
    eventually(|| async { bench.background("top/f").contains(&false) }).await;
    assert_eq!(bench.background("top/f").first(), Some(&true));
    bench.fake.is_away.store(0, Ordering::Release);
    bench.settled().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletions_make_way_for_clients_but_not_for_ever_nor_where_room_is_lacking() {
    let delay = Duration::from_millis(50);
    let mut bench = Fixture::start(&[], delay).await;
    let changes = bench.busy_clients().await;
    let root = bench.root;
    bench.create_written("f").await;
    bench.settled().await;
    let begun = Instant::now();
    bench.remove(root, "f", false).await;
    bench.settled().await;
    assert!(begun.elapsed() >= delay * 10, "deleted after {:?}", begun.elapsed());
    assert!(bench.bucket.keys().is_empty());

    *bench.fake.disk.lock() = (100, 90);
    eventually(|| async { !bench.master().services().persistence.yields_to_clients() }).await;
    changes.abort();
    bench.end().await;
}

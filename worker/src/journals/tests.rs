use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;

use cavern_conf::process::Metrics;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::pwrite;
use rustix::process::{PidfdFlags, pidfd_open};
use tokio::io::AsyncReadExt as _;
use tokio::process::Child;

use super::*;
use crate::local_peers::bind_unix;

const PATIENCE: Duration = Duration::from_secs(20);
/// A process that replays nothing, and fails.
const NO_COMMAND: &str = "--no-such-argument";

struct Host {
    directory: tempfile::TempDir,
    journals: Arc<Journals>,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

impl Host {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (membership, metrics) = (Arc::new(Membership::default()), WorkerMetrics::register(&Metrics::new("worker")));
        membership.set(1, "cluster");
        let stop = CancellationToken::new();
        let journals = Journals::new(vec![NO_COMMAND.into()], membership, metrics, stop.clone());
        let path = journals::socket_path(&directory.path().join("socket"));
        let listener = bind_unix(&path, LocalPeers::default()).await.unwrap();
        let serving = tokio::spawn(Arc::clone(&journals).serve(listener, path));
        Self { directory, journals, stop, serving }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    async fn hand_over(
        &self,
        journal: BorrowedFd<'_>,
        supervisor: BorrowedFd<'_>,
    ) -> Result<journals::JournalGuard, String> {
        journals::hand_over(&self.socket(), &hello("cluster"), journal, supervisor)
            .await
            .map_err(|cause| cause.to_string())
    }

    async fn nothing_left(&self, wait: Duration) -> bool {
        timeout(wait, journals::wait_for_replays(&self.socket(), "place")).await.is_ok_and(|waited| waited.is_ok())
    }

    async fn eventually(&self, what: &str, is_so: impl Fn(&Journals) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&self.journals) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.journals);
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn end(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.serving).await.unwrap().unwrap();
        assert!(!journals::socket_path(&self.directory.path().join("socket")).exists());
    }
}

fn hello(cluster: &str) -> Hello {
    let [cluster_id, place, name] = [cluster, "place", "host:/mnt"].map(str::to_owned);
    Hello { ask: Ask::Keep.into(), cluster_id, place, name }
}

fn journal() -> OwnedFd {
    let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
    pwrite(&memory, &journals::MAGIC.to_le_bytes(), 0).unwrap();
    pwrite(&memory, &0_u64.to_le_bytes(), journals::ENDED_AT).unwrap();
    memory
}

/// A process that stays, and a descriptor of it.
fn supervisor() -> (Child, OwnedFd) {
    let child = Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    (child, descriptor)
}

#[tokio::test]
async fn what_is_no_journal_or_comes_without_its_supervisor_is_refused() {
    let host = Host::new().await;
    let (_child, process) = supervisor();
    let (null, memory) = (File::open("/dev/null").unwrap(), journal());
    let empty = memfd_create("empty", MemfdFlags::CLOEXEC).unwrap();
    let on_disk = tempfile::tempfile_in(host.directory.path()).unwrap();
    pwrite(&on_disk, &journals::MAGIC.to_le_bytes(), 0).unwrap();
    for wrong in [null.as_fd(), process.as_fd(), empty.as_fd()] {
        let refused = host.hand_over(wrong, process.as_fd()).await.unwrap_err();
        assert_eq!(refused, "refused: this is no journal of a mount");
    }
    for wrong in [null.as_fd(), memory.as_fd(), host_directory(host.directory.path()).as_fd()] {
        let refused = host.hand_over(memory.as_fd(), wrong).await.unwrap_err();
        assert_eq!(refused, "refused: this is no descriptor of a process");
    }
    let (journal, supervisor) = (memory.as_fd(), process.as_fd());
    for cluster in ["", "another"] {
        let refused = journals::hand_over(&host.socket(), &hello(cluster), journal, supervisor).await.unwrap_err();
        assert!(refused.to_string().contains("this worker is of cluster \"cluster\""), "{refused}");
    }
    assert!(host.nothing_left(PATIENCE).await);
    assert_eq!(host.journals.kept.lock().len(), 0);
    host.end().await;
}

fn host_directory(path: &Path) -> File {
    File::open(path).unwrap()
}

#[tokio::test]
async fn whatever_else_comes_over_the_socket_is_refused_and_harms_nothing() {
    use tokio::io::AsyncWriteExt as _;

    let host = Host::new().await;
    let path = journals::socket_path(&host.socket());
    for bytes in [&b""[..], b"\0\0\0\0", b"\xff\xff\xff\xffabc", b"GET / HTTP/1.0\r\n\r\n", b"\x03\0\0\0\xff\xff\xff"] {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // It may have been cut off with bytes that nobody has read.
        let _cut = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty() || answer.starts_with(b"refused: "), "{answer:?}");
    }
    assert!(host.nothing_left(PATIENCE).await);
    host.end().await;
}

#[tokio::test]
async fn a_mount_that_has_ended_leaves_nothing_and_one_that_is_served_nothing_yet() {
    let host = Host::new().await;
    let (mut child, process) = supervisor();
    let memory = journal();
    let first = host.hand_over(memory.as_fd(), process.as_fd()).await.unwrap();
    // Another one that serves the same mount.
    let second = host.hand_over(memory.as_fd(), process.as_fd()).await.unwrap();
    assert_eq!(host.journals.kept.lock().len(), 1);
    drop(first);
    drop(second);
    assert!(host.nothing_left(PATIENCE).await, "its supervisor lives");
    let third = host.hand_over(memory.as_fd(), process.as_fd()).await.unwrap();
    pwrite(&memory, &1_u64.to_le_bytes(), journals::ENDED_AT).unwrap();
    child.kill().await.unwrap();
    assert!(!host.nothing_left(Duration::from_millis(100)).await, "somebody serves it");
    drop(third);
    assert!(host.nothing_left(PATIENCE).await);
    assert_eq!((host.journals.kept.lock().len(), host.journals.metrics.replays.get()), (0, 0));
    host.end().await;
}

#[tokio::test]
async fn a_replay_that_fails_is_begun_again_until_the_journal_has_ended() {
    let host = Host::new().await;
    let (mut child, process) = supervisor();
    let memory = journal();
    let serving = host.hand_over(memory.as_fd(), process.as_fd()).await.unwrap();
    drop(serving);
    child.kill().await.unwrap();
    host.eventually("it is tried several times", |journals| journals.metrics.replays.get() > 1).await;
    assert!(host.journals.are_replayed() && !host.nothing_left(Duration::from_millis(100)).await);
    pwrite(&memory, &1_u64.to_le_bytes(), journals::ENDED_AT).unwrap();
    assert!(host.nothing_left(PATIENCE).await && !host.journals.are_replayed());
    host.end().await;
}

#[tokio::test]
async fn a_worker_that_stops_lets_go_of_what_it_keeps() {
    let host = Host::new().await;
    let (_child, process) = supervisor();
    let memory = journal();
    let mut kept = host.hand_over(memory.as_fd(), process.as_fd()).await.unwrap();
    let journals = Arc::clone(&host.journals);
    host.end().await;
    timeout(PATIENCE, kept.ended()).await.unwrap();
    assert_eq!((journals.kept.lock().len(), journals.metrics.replays.get()), (0, 0));
}

#[tokio::test]
async fn so_many_are_kept_and_no_more() {
    let host = Host::new().await;
    let (_child, process) = supervisor();
    let mut kept = Vec::new();
    for _ in 0..JOURNALS_MAX {
        kept.push(host.hand_over(journal().as_fd(), process.as_fd()).await.unwrap());
    }
    let refused = host.hand_over(journal().as_fd(), process.as_fd()).await.unwrap_err();
    assert_eq!(refused, "refused: this worker takes no more journals");
    host.end().await;
}

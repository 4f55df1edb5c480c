//! Rates, out of what is counted since processes began.
//!
//! A rate is the mean of the last seconds. Who was not there at their beginning has done nothing since: what it counts
//! may be of long before, as with a client that goes on in another session.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use cavern_conf::counted;
use cavern_proto::master::{
    ClientActivity, ClusterStatus, MountBacklog, Worker, WorkerCounters, WorkerState, WriteType,
};
use clap::ValueEnum;
use serde::Serialize;
use tokio::time::Instant;

use crate::cli::connect::word;
use crate::console::{self, or_dash};

/// Rates are means of so much, where there are that many looks: what is told once a second is told once more, or once
/// less, in a time that is no longer than some.
const WINDOW: Duration = Duration::from_secs(6);

/// What comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Bytes read.
    Read,
    /// Bytes written.
    Written,
    /// Reads and writes.
    Operations,
    /// By name.
    Name,
}

impl Sort {
    /// What a key stands for.
    pub fn of_key(key: u8) -> Option<Self> {
        match key {
            b'r' => Some(Self::Read),
            b'w' => Some(Self::Written),
            b'o' => Some(Self::Operations),
            b'n' => Some(Self::Name),
            _ => None,
        }
    }
}

/// What the masters have said at one time.
pub struct Sample {
    pub at: Instant,
    pub status: ClusterStatus,
}

/// What somebody has done in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Io {
    read_bytes_per_second: f64,
    reads_per_second: f64,
    written_bytes_per_second: f64,
    writes_per_second: f64,
}

/// How much of what was asked for was cached, and what had to be fetched, in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Hits {
    hit_bytes_per_second: f64,
    miss_bytes_per_second: f64,
    /// `None` where nothing was asked for.
    hit_ratio: Option<f64>,
}

/// What the bucket of an fs-mode mount lacks.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Queue {
    files: u64,
    bytes: u64,
    deletions: u64,
    oldest_seconds: f64,
    lost_files: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MountRow {
    path: String,
    #[serde(flatten)]
    io: Io,
    #[serde(flatten)]
    hits: Hits,
    /// `None` in cache-mode.
    persist: Option<Queue>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClientRow {
    client: String,
    /// The name in its certificate, where it has shown one.
    identity: String,
    session: u64,
    #[serde(flatten)]
    io: Io,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerRow {
    id: u64,
    host: String,
    state: String,
    used_bytes: u64,
    capacity_bytes: u64,
    failed_disks: usize,
    /// Read from buckets, also ahead of those who ask.
    ufs_bytes_per_second: f64,
    #[serde(flatten)]
    hits: Hits,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TopView {
    /// What the rates are means of.
    seconds: f64,
    cluster_id: String,
    leader: u64,
    #[serde(flatten)]
    io: Io,
    #[serde(flatten)]
    hits: Hits,
    ufs_bytes_per_second: f64,
    mounts: Vec<MountRow>,
    clients: Vec<ClientRow>,
    workers: Vec<WorkerRow>,
}

/// What was said lately.
pub struct Rates {
    samples: VecDeque<Sample>,
}

impl From<Sample> for Rates {
    fn from(first: Sample) -> Self {
        Self { samples: VecDeque::from([first]) }
    }
}

impl Rates {
    pub fn add(&mut self, sample: Sample) {
        let now = sample.at;
        self.samples.push_back(sample);
        while self.samples.get(1).is_some_and(|second| now - second.at >= WINDOW) {
            self.samples.pop_front();
        }
    }

    /// What is done now.
    pub fn view(&self, sort: Sort) -> TopView {
        let (Some(before), Some(now)) = (self.samples.front(), self.samples.back()) else { return TopView::default() };
        let span = Span { seconds: (now.at - before.at).as_secs_f64() };
        let mut view = TopView {
            seconds: span.seconds,
            cluster_id: now.status.cluster_id.clone(),
            leader: now.status.leader,
            workers: workers(span, before, now),
            ..TopView::default()
        };
        let done = grown(&activities(before), &activities(now));
        view.io = span.io(sums(&done, |_| ()).remove(&()).unwrap_or_default());
        let of_clients = sums(&done, |(session, _)| session);
        for client in &now.status.clients {
            let (name, identity, session) = (client.client.clone(), client.identity.clone(), client.session);
            let io = span.io(of_clients.get(&session).copied().unwrap_or_default());
            view.clients.push(ClientRow { client: name, identity, session, io });
        }
        let of_mounts = sums(&done, |(_, mount_id)| mount_id);
        let served = sums(&grown(&hits(before), &hits(now)), |(_, mount_id)| mount_id);
        for mount in now.status.mounts.iter().flat_map(|table| &table.mounts) {
            view.mounts.push(MountRow {
                path: mount.path.clone(),
                io: span.io(of_mounts.get(&mount.id).copied().unwrap_or_default()),
                hits: span.hits(served.get(&mount.id).copied().unwrap_or_default()),
                persist: (mount.write_type() == WriteType::FsMode).then(|| Queue::of(&now.status.backlogs, mount.id)),
            });
        }
        let served = |of: fn(&Hits) -> f64| view.workers.iter().map(|worker| of(&worker.hits)).sum::<f64>();
        view.hits = Hits::of(served(|hits| hits.hit_bytes_per_second), served(|hits| hits.miss_bytes_per_second));
        view.ufs_bytes_per_second = view.workers.iter().map(|worker| worker.ufs_bytes_per_second).sum();
        view.mounts.sort_by(|one, other| order(sort, (&one.io, one.path.as_str()), (&other.io, other.path.as_str())));
        view.clients
            .sort_by(|one, other| order(sort, (&one.io, one.client.as_str()), (&other.io, other.client.as_str())));
        view
    }
}

/// What is counted of each mount, by whom: the session of a client, or a worker.
type Counts<const N: usize> = HashMap<(u64, u32), [u64; N]>;

/// Bytes read, reads, bytes written and writes of clients.
fn activities(sample: &Sample) -> Counts<4> {
    let mut counts = Counts::new();
    for client in &sample.status.clients {
        let Some(activity) = &client.activity else { continue };
        let ClientActivity { mount_ids, reads, read_bytes, writes, written_bytes } = activity;
        for (place, mount_id) in mount_ids.iter().enumerate() {
            // What a list lacks is nothing.
            let lists = [read_bytes, reads, written_bytes, writes];
            let of_mount = lists.map(|list| list.get(place).copied().unwrap_or_default());
            counts.insert((client.session, *mount_id), of_mount);
        }
    }
    counts
}

/// Bytes that were there, and that had to be fetched, at workers.
fn hits(sample: &Sample) -> Counts<2> {
    let workers = sample.status.hits.iter();
    let all = workers.flat_map(|worker| {
        worker.mounts.iter().map(move |hits| ((worker.worker_id, hits.mount_id), [hits.hit_bytes, hits.miss_bytes]))
    });
    all.collect()
}

/// What has grown between two looks. A process that began anew counts from nothing.
fn grown<const N: usize>(before: &Counts<N>, now: &Counts<N>) -> Counts<N> {
    let grown = now.iter().filter_map(|(key, now)| {
        let before = before.get(key)?;
        Some((*key, std::array::from_fn(|place| now[place].saturating_sub(before[place]))))
    });
    grown.collect()
}

/// Sums of all that have the same key.
fn sums<K: Eq + Hash, const N: usize>(counts: &Counts<N>, key: impl Fn((u64, u32)) -> K) -> HashMap<K, [u64; N]> {
    let mut sums = HashMap::<K, [u64; N]>::new();
    for (of, counts) in counts {
        let sum = sums.entry(key(*of)).or_insert([0; N]);
        for (sum, count) in sum.iter_mut().zip(counts) {
            *sum = sum.saturating_add(*count);
        }
    }
    sums
}

impl Queue {
    /// A mount that is not among them lacks nothing.
    fn of(backlogs: &[MountBacklog], mount_id: u32) -> Self {
        let backlog = backlogs.iter().find(|backlog| backlog.mount_id == mount_id);
        let backlog = backlog.copied().unwrap_or_default();
        Self {
            files: backlog.files,
            bytes: backlog.bytes,
            deletions: backlog.deletions,
            oldest_seconds: backlog.oldest_age_ms as f64 / 1000.0,
            lost_files: backlog.lost_files,
        }
    }
}

fn workers(span: Span, before: &Sample, now: &Sample) -> Vec<WorkerRow> {
    let all = |sample: &Sample| sample.status.workers.clone().unwrap_or_default().workers;
    let before: HashMap<u64, WorkerCounters> =
        all(before).into_iter().filter_map(|worker| Some((worker.id, worker.counters?))).collect();
    let row = |worker: Worker| {
        let counters = worker.counters.unwrap_or_default();
        let known = before.get(&worker.id).copied().unwrap_or(counters);
        let grown = |of: fn(&WorkerCounters) -> u64| of(&counters).saturating_sub(of(&known));
        WorkerRow {
            id: worker.id,
            state: word(worker.state().as_str_name(), "WORKER_STATE_"),
            used_bytes: worker.used_bytes,
            capacity_bytes: worker.capacity_bytes,
            failed_disks: worker.disks.iter().filter(|disk| !disk.healthy).count(),
            ufs_bytes_per_second: span.rate(grown(|counters| counters.ufs_bytes)),
            hits: match worker.state() {
                WorkerState::Live => {
                    span.hits([grown(|counters| counters.hit_bytes), grown(|counters| counters.miss_bytes)])
                }
                _ => Hits::default(),
            },
            host: worker.host,
        }
    };
    all(now).into_iter().map(row).collect()
}

/// Between two looks.
#[derive(Clone, Copy)]
struct Span {
    seconds: f64,
}

impl Span {
    fn rate(self, amount: u64) -> f64 {
        if self.seconds > 0.0 { amount as f64 / self.seconds } else { 0.0 }
    }

    fn io(self, [read_bytes, reads, written_bytes, writes]: [u64; 4]) -> Io {
        Io {
            read_bytes_per_second: self.rate(read_bytes),
            reads_per_second: self.rate(reads),
            written_bytes_per_second: self.rate(written_bytes),
            writes_per_second: self.rate(writes),
        }
    }

    fn hits(self, [hit_bytes, miss_bytes]: [u64; 2]) -> Hits {
        Hits::of(self.rate(hit_bytes), self.rate(miss_bytes))
    }
}

impl Hits {
    fn of(hit_bytes_per_second: f64, miss_bytes_per_second: f64) -> Self {
        let asked = hit_bytes_per_second + miss_bytes_per_second;
        let hit_ratio = (asked > 0.0).then(|| hit_bytes_per_second / asked);
        Self { hit_bytes_per_second, miss_bytes_per_second, hit_ratio }
    }

    fn share(self) -> String {
        or_dash(self.hit_ratio.map(|ratio| format!("{:.1} %", ratio * 100.0)))
    }
}

impl Io {
    /// What it is sorted by.
    fn rank(&self, sort: Sort) -> f64 {
        match sort {
            Sort::Read => self.read_bytes_per_second,
            Sort::Written => self.written_bytes_per_second,
            Sort::Operations => self.reads_per_second + self.writes_per_second,
            Sort::Name => 0.0,
        }
    }

    fn cells(&self) -> [String; 4] {
        [
            console::size(self.read_bytes_per_second as u64),
            format!("{:.0}", self.reads_per_second),
            console::size(self.written_bytes_per_second as u64),
            format!("{:.0}", self.writes_per_second),
        ]
    }
}

/// The most first, and by name where they are equal.
fn order(sort: Sort, (one, one_name): (&Io, &str), (other, other_name): (&Io, &str)) -> Ordering {
    other.rank(sort).total_cmp(&one.rank(sort)).then_with(|| one_name.cmp(other_name))
}

impl TopView {
    /// For people. `rows`: so many lines are shown; `None` for all there are.
    pub fn lines(&self, rows: Option<usize>) -> Vec<String> {
        let [read, reads, written, writes] = self.io.cells();
        let live = self.workers.iter().filter(|worker| worker.state == "live").count() as u64;
        let mut lines = vec![
            format!(
                "{}, {}, {} live; master {} leads cluster {}",
                counted(self.mounts.len() as u64, "mount"),
                counted(self.clients.len() as u64, "client"),
                counted(live, "worker"),
                self.leader,
                self.cluster_id
            ),
            format!(
                "read {read}/s in {reads}/s, written {written}/s in {writes}/s, {} hits, {}/s from buckets",
                self.hits.share(),
                console::size(self.ufs_bytes_per_second as u64)
            ),
        ];
        let mount = |row: &MountRow| {
            let [read, reads, written, writes] = row.io.cells();
            let fetched = console::size(row.hits.miss_bytes_per_second as u64);
            let queue = row.persist.as_ref().map(|queue| match queue.files + queue.deletions {
                0 => "0".to_owned(),
                items => format!("{items}, {}", console::size(queue.bytes)),
            });
            let waiting = row.persist.as_ref().filter(|queue| queue.files + queue.deletions > 0);
            let oldest = waiting.map(|queue| format!("{:.0} s", queue.oldest_seconds));
            let (hits, queue, oldest) = (row.hits.share(), or_dash(queue), or_dash(oldest));
            [row.path.clone(), read, reads, written, writes, hits, fetched, queue, oldest]
        };
        let heading =
            ["MOUNT", "READ/s", "READS/s", "WRITTEN/s", "WRITES/s", "HITS", "FETCHED/s", "TO PERSIST", "OLDEST"];
        // A third for each kind, where there are more.
        let most = rows.map(|rows| rows.saturating_sub(lines.len()) / 3);
        section(&mut lines, heading, self.mounts.iter().map(mount), 1, most);
        let worker = |row: &WorkerRow| {
            let state = match row.failed_disks {
                0 => row.state.clone(),
                disks => format!("{}, {} failed", row.state, counted(disks as u64, "disk")),
            };
            let served = console::size((row.hits.hit_bytes_per_second + row.hits.miss_bytes_per_second) as u64);
            let (used, capacity) = (console::size(row.used_bytes), console::size(row.capacity_bytes));
            let full = console::share(row.used_bytes, row.capacity_bytes);
            let fetched = console::size(row.ufs_bytes_per_second as u64);
            [row.id.to_string(), row.host.clone(), state, used, capacity, full, served, row.hits.share(), fetched]
        };
        let heading = ["WORKER", "HOST", "STATE", "USED", "OF", "FULL", "SERVED/s", "HITS", "FETCHED/s"];
        section(&mut lines, heading, self.workers.iter().map(worker), 3, most);
        let client = |row: &ClientRow| {
            let [read, reads, written, writes] = row.io.cells();
            let name = match row.identity.as_str() {
                "" => row.client.clone(),
                identity => format!("{} ({identity})", row.client),
            };
            [name, read, reads, written, writes]
        };
        let heading = ["CLIENT", "READ/s", "READS/s", "WRITTEN/s", "WRITES/s"];
        let left = rows.map(|rows| rows.saturating_sub(lines.len()));
        section(&mut lines, heading, self.clients.iter().map(client), 1, left);
        lines
    }
}

/// A table below an empty line, with so many lines in all. Figures stand in the columns from `figures` on.
fn section<const N: usize>(
    lines: &mut Vec<String>,
    heading: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    figures: usize,
    most: Option<usize>,
) {
    let mut table = console::aligned(heading, rows, figures);
    // The empty line, and the one that says that there are more.
    let room = most.map_or(usize::MAX, |most| most.saturating_sub(1));
    if table.len() > room {
        let more = table.len() - room.saturating_sub(1);
        table.truncate(room.saturating_sub(1));
        table.push(format!("and {more} more"));
    }
    lines.push(String::new());
    lines.append(&mut table);
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{ClientStatus, Mount, MountHits, MountTable, WorkerHits, WorkerTable};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn client(session: u64, name: &str, mounts: &[(u32, u64, u64)]) -> ClientStatus {
        let activity = ClientActivity {
            mount_ids: mounts.iter().map(|(mount_id, ..)| *mount_id).collect(),
            reads: mounts.iter().map(|(_, read, _)| read / MIB).collect(),
            read_bytes: mounts.iter().map(|(_, read, _)| *read).collect(),
            writes: mounts.iter().map(|(_, _, written)| written / MIB).collect(),
            // A client that says less than it should does not mislead.
            written_bytes: mounts.iter().map(|(_, _, written)| *written).take(1).collect(),
        };
        ClientStatus { session, client: name.into(), activity: Some(activity), ..ClientStatus::default() }
    }

    fn sample(at: Instant, clients: Vec<ClientStatus>, (hit_bytes, miss_bytes): (u64, u64)) -> Sample {
        let mount = |id: u32, path: &str, write_type: WriteType| Mount {
            id,
            path: path.into(),
            write_type: write_type.into(),
            ..Mount::default()
        };
        let mounts = vec![mount(1, "/a", WriteType::CacheMode), mount(2, "/b", WriteType::FsMode)];
        let counters = WorkerCounters { hit_bytes, miss_bytes, ufs_bytes: 2 * miss_bytes, ..WorkerCounters::default() };
        let worker = Worker {
            id: 5,
            host: "h".into(),
            state: WorkerState::Live as i32,
            used_bytes: MIB,
            capacity_bytes: 4 * MIB,
            counters: Some(counters),
            ..Worker::default()
        };
        let status = ClusterStatus {
            cluster_id: "c".into(),
            leader: 1,
            workers: Some(WorkerTable { epoch: 1, workers: vec![worker] }),
            mounts: Some(MountTable { epoch: 1, mounts, status: Vec::new() }),
            clients,
            hits: vec![WorkerHits { worker_id: 5, mounts: vec![MountHits { mount_id: 1, hit_bytes, miss_bytes }] }],
            backlogs: vec![MountBacklog {
                mount_id: 2,
                files: 3,
                bytes: MIB,
                oldest_age_ms: 4000,
                ..MountBacklog::default()
            }],
            ..ClusterStatus::default()
        };
        Sample { at, status }
    }

    #[test]
    fn rates_are_what_has_grown_by_mount_and_by_client() {
        let start = Instant::now();
        let first = vec![client(1, "one", &[(1, 10 * MIB, 0), (2, 0, 0)]), client(2, "two", &[(1, 100 * MIB, 0)])];
        let mut rates = Rates::from(sample(start, first, (0, 0)));
        let idle = rates.view(Sort::Read);
        assert_eq!((idle.seconds, idle.io, idle.hits.hit_ratio), (0.0, Io::default(), None));

        // The second client began anew, and the third was not there before.
        let second = vec![
            client(1, "one", &[(1, 30 * MIB, 8 * MIB), (2, 4 * MIB, 0)]),
            client(2, "two", &[(1, MIB, 0)]),
            client(3, "three", &[(1, 1000 * MIB, 0)]),
        ];
        let mut second = sample(start + Duration::from_secs(2), second, (30 * MIB, 10 * MIB));
        // Nor was this worker, which was away.
        let mounts = vec![MountHits { mount_id: 1, hit_bytes: 1000 * MIB, miss_bytes: 1000 * MIB }];
        second.status.hits.push(WorkerHits { worker_id: 6, mounts });
        rates.add(second);
        let view = rates.view(Sort::Read);
        let mib = MIB as f64;
        let one = view.clients.iter().find(|row| row.client == "one").unwrap();
        assert_eq!((one.io.read_bytes_per_second, one.io.reads_per_second), (12.0 * mib, 12.0));
        assert_eq!((one.io.written_bytes_per_second, one.io.writes_per_second), (4.0 * mib, 4.0));
        let others = view.clients.iter().filter(|row| row.client != "one");
        assert!(others.map(|row| row.io).all(|io| io == Io::default()), "{:?}", view.clients);
        let mounts: Vec<_> = view.mounts.iter().map(|row| (row.path.as_str(), row.io.read_bytes_per_second)).collect();
        assert_eq!(mounts, [("/a", 10.0 * mib), ("/b", 2.0 * mib)]);
        assert_eq!((view.io.read_bytes_per_second, view.seconds), (12.0 * mib, 2.0));
        assert_eq!((view.mounts[0].hits.hit_ratio, view.mounts[0].hits.miss_bytes_per_second), (Some(0.75), 5.0 * mib));
        assert_eq!((view.hits.hit_ratio, view.ufs_bytes_per_second), (Some(0.75), 10.0 * mib));
        assert_eq!((view.mounts[0].persist.is_none(), view.mounts[1].persist.as_ref().unwrap().files), (true, 3));

        let shown = serde_json::to_value(&view).unwrap();
        assert_eq!(shown["mounts"][0]["read_bytes_per_second"], 10.0 * mib);
        assert_eq!((&shown["workers"][0]["used_bytes"], &shown["hit_ratio"]), (&MIB.into(), &0.75.into()));
        let lines = view.lines(None);
        assert_eq!(lines[0], "2 mounts, 3 clients, 1 worker live; master 1 leads cluster c");
        assert!(lines[1].contains("read 12.00 MiB/s in 12/s, written 4.00 MiB/s in 4/s, 75.0 % hits"), "{}", lines[1]);
        assert!(lines.iter().any(|line| line.contains("3, 1.00 MiB") && line.contains("4 s")), "{lines:?}");
    }

    #[test]
    fn rows_are_sorted_by_what_is_asked_for() {
        let start = Instant::now();
        let before = vec![client(1, "a", &[(1, 0, 0)]), client(2, "b", &[(1, 0, 0)])];
        let mut rates = Rates::from(sample(start, before, (0, 0)));
        let after = vec![client(1, "a", &[(1, 3 * MIB, 9 * MIB)]), client(2, "b", &[(1, 5 * MIB, 0)])];
        rates.add(sample(start + Duration::from_secs(1), after, (0, 0)));
        let first = |sort| rates.view(sort).clients[0].client.clone();
        assert_eq!([Sort::Read, Sort::Written, Sort::Operations, Sort::Name].map(first), ["b", "a", "a", "a"]);
        assert_eq!(
            b"rwonx".map(Sort::of_key).map(|sort| sort.map(first)),
            [Some("b".to_owned()), Some("a".to_owned()), Some("a".to_owned()), Some("a".to_owned()), None]
        );
    }

    #[test]
    fn looks_are_kept_for_a_window_and_a_screen_is_not_left() {
        let start = Instant::now();
        let clients = || (0..50).map(|number| client(number, &format!("c{number}"), &[])).collect::<Vec<_>>();
        let mut rates = Rates::from(sample(start, clients(), (0, 0)));
        for second in 1..20 {
            rates.add(sample(start + Duration::from_secs(second), clients(), (0, 0)));
        }
        let view = rates.view(Sort::Name);
        assert_eq!(view.seconds, WINDOW.as_secs_f64());
        let lines = view.lines(Some(24));
        assert!(lines.len() <= 24 && lines.last().unwrap().starts_with("and ") && lines.len() > 20, "{lines:?}");
        assert!(view.lines(None).len() > 50);
        assert!(view.lines(Some(0)).len() < 12, "it is little, and no panic");
    }
}

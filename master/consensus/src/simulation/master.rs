//! Masters of a simulation. Consensus, log, state machine, proposer, lease and the way to read are the real ones; so is
//! the database, in a temporary directory. What is around them is simulated.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use cavern_conf::process::Metrics;
use cavern_proto::master::Mutation;
use cavern_proto::record::Mutate;
use cavern_proto::record::command::Command as Kind;
use cavern_state::feature_version::FEATURE_VERSION;
use cavern_state::records::attributes;
use cavern_state::{Changes, CurrentDatabase, Database, Family, Lock, Outcome, Resources, Tables};
use openraft::EntryPayload;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::sleep;

use super::history::{Asked, Told};
use super::model::Seen;
use super::service::Service;
use super::world::{Disk, Host, World, address};
use crate::clock::{Clock, Reading};
use crate::error::ConsensusError;
use crate::leader_lease::Promise;
use crate::leadership::{RETRY_PAUSE, alone, leadership_lost, leadership_won, open_log};
use crate::types::{NodeId, decode_entry};
use crate::{
    ChangeListener, Consensus, ConsensusConfig, ConsensusMetrics, Identity, LeaderLease, LogLimits, PeerConnector,
    Proposer,
};

/// Masters of a group.
pub const MASTERS: NodeId = 3;
/// What the hosts' clocks show at the begin.
const WALL_NS: i64 = 1_700_000_000_000_000_000;

/// What is wrong with the masters, for the judge to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// A master that was a leader answers reads without a look at its lease.
    NoLease,
    /// The disks say that they have synced, and have not.
    LyingDisks,
    /// A leader keeps its lease while it gives its leadership away.
    KeptLease,
    /// A master that was restarted gives votes at once.
    NoPromise,
}

/// One master, whether it runs or not.
pub struct SimulatedMaster {
    pub id: NodeId,
    world: Arc<World>,
    flaw: Flaw,
    directory: TempDir,
    /// How fast its clock runs, and by how much its time of day was set.
    pace: f64,
    pub set_by_ns: Arc<AtomicI64>,
    life: Mutex<Option<Life>>,
}

/// What of it runs.
#[derive(Clone)]
struct Life {
    host: Arc<Host>,
    consensus: Arc<Consensus>,
    database: Arc<CurrentDatabase>,
    serving: Arc<Mutex<Option<Serving>>>,
}

/// What a leader answers with.
#[derive(Clone)]
struct Serving {
    proposer: Proposer,
    database: Arc<Database>,
    lease: LeaderLease,
    clock: Arc<Clock>,
}

/// Why a client has no answer.
#[derive(Debug)]
pub enum Refusal {
    /// This one leads, perhaps.
    NotLeading(Option<NodeId>),
    /// What was asked for may be done nevertheless.
    Unknown,
}

impl From<ConsensusError> for Refusal {
    fn from(error: ConsensusError) -> Self {
        match error {
            ConsensusError::NotLeading(other) => {
                let leader =
                    other.leader.as_deref().and_then(|leader| leader.strip_prefix("master-")?.split(':').next());
                Self::NotLeading(leader.and_then(|id| id.parse().ok()))
            }
            _ => Self::Unknown,
        }
    }
}

/// Writes down what a master applies.
struct Recorder {
    world: Arc<World>,
    host: Arc<Host>,
    database: Arc<CurrentDatabase>,
}

impl ChangeListener for Recorder {
    fn changed(&self, changes: Changes) -> u64 {
        // The index is what is left of the rest.
        let index = changes.position >> Changes::position(1, 0).trailing_zeros();
        let bytes = self.database.get().get(Family::RaftLog, &index.to_be_bytes()).expect("the log can be read");
        let mut history = self.world.history.lock();
        let Some(bytes) = bytes else {
            history.violations.push(format!("master {} applies entry {index}, which its log lacks", self.host.id));
            return 0;
        };
        let entry = decode_entry(&bytes).expect("an entry of the log");
        let commands = match entry.payload {
            EntryPayload::Normal(batch) => batch.0.commands,
            _ => Vec::new(),
        };
        let kinds = commands.into_iter().filter_map(|command| command.command).collect();
        history.applied(self.host.id, entry.log_id, kinds);
        0
    }

    fn replaced(&self) {
        // A snapshot is on disk when it is taken over.
        self.host.disk.lock().note_synced();
        let line = format!("{:6} master {} has taken over a snapshot", self.world.now_ms(), self.host.id);
        let mut history = self.world.history.lock();
        history.lines.push(line);
        history.installations.1 += 1;
    }
}

impl SimulatedMaster {
    pub fn new(world: &Arc<World>, id: NodeId, flaw: Flaw) -> Arc<Self> {
        // Memory, where there is such a directory: what a disk does is simulated.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        let pace = 0.96 + world.chance.lock().below(81) as f64 / 1000.0;
        let (set_by_ns, life) = (Arc::default(), Mutex::default());
        Arc::new(Self { id, world: world.clone(), flaw, directory, pace, set_by_ns, life })
    }

    fn life(&self) -> Option<Life> {
        self.life.lock().clone()
    }

    /// The process that runs, if one does.
    pub fn host(&self) -> Option<Arc<Host>> {
        self.life().map(|life| life.host)
    }

    pub fn leads(&self) -> bool {
        self.life().is_some_and(|life| life.serving.lock().is_some())
    }

    /// Whether it would answer reads, and believes that nobody else does.
    pub fn may_read(&self) -> bool {
        let Some(Life { host, serving, .. }) = self.life() else { return false };
        let lease = serving.lock().as_ref().map(|serving| serving.lease.clone());
        host.within(|| lease.is_some_and(|lease| lease.holds()))
    }

    /// The term in which it leads, if it does.
    pub fn term(&self) -> Option<u64> {
        self.life()?.consensus.leads().map(|lead| lead.term)
    }

    /// Index of the last entry that is applied.
    pub fn applied(&self) -> Option<u64> {
        self.life().map(|life| life.consensus.progress().0)
    }

    pub async fn start(&self) -> Result<(), ConsensusError> {
        let mut disk = Disk::new(self.directory.path().to_owned());
        disk.lies = self.flaw == Flaw::LyingDisks;
        let host = Host::new(&self.world, self.id, self.pace, disk);
        let starting = begin(host.clone(), self.directory.path().to_owned(), self.clock(), self.flaw);
        let life = host.spawn(starting).await.map_err(|error| ConsensusError::Unavailable(error.to_string()))?;
        *self.life.lock() = Some(life?);
        Ok(())
    }

    fn clock(&self) -> Clock {
        let (set_by, begin, pace) = (self.set_by_ns.clone(), self.world.begin(), self.pace);
        Clock::new(move || {
            let uptime_ns = begin.elapsed().mul_f64(pace).as_nanos() as i64;
            Reading { wall_ns: WALL_NS + uptime_ns + set_by.load(Ordering::Relaxed), uptime_ns }
        })
    }

    /// Ends the process without its having a say in it; or the whole host, by a loss of power.
    pub async fn kill(&self, is_power_lost: bool) {
        let Some(Life { host, consensus, database, serving }) = self.life.lock().take() else { return };
        let free = database.free();
        drop((consensus, database));
        host.kill().await;
        serving.lock().take();
        drop(serving);
        for _ in 0..1000 {
            if free.is_set() {
                break;
            }
            yield_now().await;
        }
        assert!(free.is_set(), "somebody keeps the database of master {}", self.id);
        if is_power_lost {
            host.disk.lock().lose_power(&mut self.world.chance.lock());
        }
    }

    /// Gives the leadership away, if it has it.
    pub async fn hand_over(&self) {
        let Some(Life { host, consensus, .. }) = self.life() else { return };
        let to = 1 + self.id % MASTERS;
        let keeps_lease = self.flaw == Flaw::KeptLease;
        let giving = async move {
            if keeps_lease {
                let _ = consensus.raft.trigger().transfer_leader(to).await;
            } else if let Err(error) = consensus.hand_over(to).await {
                tracing::info!("{error}");
            }
        };
        let _killed = host.spawn(giving).await;
    }

    pub async fn make_snapshot(&self) {
        let Some(Life { host, consensus, .. }) = self.life() else { return };
        let _ = host.spawn(async move { consensus.make_snapshot().await }).await;
    }

    /// Answers a client, unless it is killed meanwhile.
    pub async fn answer(&self, asked: Asked) -> Result<Told, Refusal> {
        let Some(life) = self.life() else { return Err(Refusal::Unknown) };
        let (host, flaw) = (life.host.clone(), self.flaw);
        host.spawn(async move { life.answer(asked, flaw).await }).await.unwrap_or(Err(Refusal::Unknown))
    }

    /// Proposes something that is none of the clients' changes.
    pub async fn propose(&self, kind: Kind) -> Result<Outcome, Refusal> {
        let Some(Life { host, consensus, serving, .. }) = self.life() else { return Err(Refusal::Unknown) };
        let Some(serving) = serving.lock().clone() else { return Err(consensus_refusal(&consensus)) };
        drop(consensus);
        let proposed = host.spawn(async move { Ok(serving.proposer.propose(kind).await?) });
        proposed.await.unwrap_or(Err(Refusal::Unknown))
    }

    /// Reads what it has applied, whether it leads or not.
    pub fn look<T>(&self, look: impl FnOnce(Tables<'_>) -> Result<T, ConsensusError>) -> Option<T> {
        let life = self.life()?;
        Some(look(Tables::new(&life.database.get())).expect("the tables can be read"))
    }
}

fn consensus_refusal(consensus: &Consensus) -> Refusal {
    ConsensusError::NotLeading(consensus.not_leading()).into()
}

impl Life {
    async fn answer(self, asked: Asked, flaw: Flaw) -> Result<Told, Refusal> {
        let is_read = !matches!(asked, Asked::Change { .. });
        let serving = self.serving.lock().clone();
        // As the gate has it.
        let may = |serving: &Serving| serving.lease.holds() || (is_read && flaw == Flaw::NoLease);
        let Some(serving) = serving.filter(may) else { return Err(consensus_refusal(&self.consensus)) };
        if let Asked::Change { session, seq, change } = asked {
            let mutation = Some(Mutation { seq, change: Some(change), ..Mutation::default() });
            let now_ns = serving.clock.now_ns();
            let mutate = Mutate { session, answered: seq - 1, now_ns, mutation, ..Mutate::default() };
            let result = serving.proposer.propose(mutate).await?.result;
            return Ok(Told::Changed(if result.errno == 0 { Ok(result.inode) } else { Err(result.errno) }));
        }
        if flaw == Flaw::NoLease {
            return Ok(read(Tables::new(&self.database.get()), &asked)?);
        }
        Ok(serving.lease.read(serving.database, move |tables| read(tables, &asked)).await?)
    }
}

/// What the tables say.
pub fn read(tables: Tables<'_>, asked: &Asked) -> Result<Told, ConsensusError> {
    Ok(match asked {
        Asked::Lookup { parent, name } => match tables.dentry(*parent, name.as_bytes())? {
            Some(dentry) => Told::Seen(seen(tables, dentry.inode)?),
            None => Told::Seen(None),
        },
        Asked::Stat { inode } => Told::Seen(seen(tables, *inode)?),
        Asked::List { directory } => {
            let (entries, _) = tables.page(*directory, None, usize::MAX)?;
            let name = |name: bytes::Bytes| String::from_utf8_lossy(&name).into_owned();
            Told::Names(entries.into_iter().map(|(text, inode, _)| (name(text), inode)).collect())
        }
        Asked::Change { .. } => unreachable!("a change is no read"),
    })
}

/// An inode as the tables have it.
pub fn seen(tables: Tables<'_>, inode: u64) -> Result<Option<Seen>, ConsensusError> {
    let record = tables.inode(inode)?;
    Ok(record.map(|record| {
        let attr = attributes(inode, &record);
        let is_directory = attr.kind() == cavern_proto::master::Kind::Directory;
        let (mode, ctime_ns, is_named) = (attr.mode, attr.ctime_ns, attr.nlink != 0);
        Seen { inode, is_directory, mode, ctime_ns, is_named }
    }))
}

/// Starts a master on a host.
async fn begin(host: Arc<Host>, directory: PathBuf, clock: Clock, flaw: Flaw) -> Result<Life, ConsensusError> {
    // Each file of a snapshot is a step of its own: a seed has one course only where their number is always the same.
    let resources = Resources::of_cache(1 << 20).without_compactions();
    let database = Arc::new(CurrentDatabase::open(&directory, resources, Lock::take(&directory)?)?);
    let (id, clock) = (host.id, Arc::new(clock));
    let identity = match Identity::read(&database.get())? {
        Some(known) => known,
        None => {
            let founds = (id == 1).then(|| (1..=MASTERS).map(address).collect());
            let identity = Identity { cluster_id: "simulated".into(), node_id: id, founds };
            identity.write(&database.get())?;
            identity
        }
    };
    host.disk.lock().note_synced();
    let connector = PeerConnector(cavern_security::Transport::Plain);
    let snapshots = directory.join("snapshots");
    let config = ConsensusConfig {
        cluster_name: "simulated",
        identity,
        address: address(id),
        snapshots: &snapshots,
        // Who was away for a moment needs a snapshot.
        log: LogLimits { snapshot_after: 2 << 10, keep: Duration::ZERO, size_max: 1 << 10 },
        connector,
        known: FEATURE_VERSION,
    };
    let recorder = Recorder { world: host.world.clone(), host: host.clone(), database: database.clone() };
    let metrics = ConsensusMetrics::register(&Metrics::new("master"));
    let mut consensus = Consensus::start(database.clone(), config, Arc::new(recorder), metrics).await?;
    if flaw == Flaw::NoPromise {
        consensus.promise = Promise::default();
    }
    let consensus = Arc::new(consensus);
    host.world.open(host.clone(), Service(consensus.clone()));
    let life = Life { host: host.clone(), consensus, database, serving: Arc::default() };
    let _leading: JoinHandle<()> = host.spawn(lead(life.clone(), clock));
    Ok(life)
}

/// As a master does, without the services.
async fn lead(life: Life, clock: Arc<Clock>) {
    let Life { host, consensus, database, serving } = life;
    let note = |what: String| {
        let line = format!("{:6} master {} {what}", host.world.now_ms(), host.id);
        host.world.history.lock().lines.push(line);
    };
    loop {
        let lead = leadership_won(&consensus).await;
        match open_log(&database.get(), &clock, &consensus, lead).await {
            Ok((proposer, proposals)) => {
                note(format!("leads in term {}", lead.term));
                let lease = consensus.lease(lead);
                let (database, clock) = (database.get(), clock.clone());
                *serving.lock() = Some(Serving { proposer, database, lease: lease.clone(), clock });
                tokio::select! {
                    biased;
                    () = leadership_lost(&consensus, lead) => {}
                    () = alone(&lease) => {}
                }
                *serving.lock() = None;
                proposals.abort();
                note(format!("leads no more in term {}", lead.term));
            }
            Err(error) => {
                note(format!("cannot begin term {}: {error}", lead.term));
                host.world.history.lock().false_starts += 1;
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

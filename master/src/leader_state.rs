//! One term of this master: everything that only a leader has, from the moment when it leads until it does not. All of
//! it is made anew from the tables, so that nothing of an earlier term is believed.

use std::sync::Arc;

use cavern_conf::Config;
use cavern_consensus::leadership::open_log;
use cavern_consensus::{Clock, Consensus, LeaderId, LeaderLease, Proposer};
use cavern_fsck::Fsck;
use cavern_net::WorkerPool;
use cavern_state::{CurrentDatabase, Database, StateError, Tables};
use cavern_work::background::TaskList;
use cavern_work::jobs::Jobs;
use cavern_work::listing::Listings;
use cavern_work::metrics::MasterMetrics;
use cavern_work::mounts::changes::MountChanges;
use cavern_work::mounts::{Claims, Mounts, SecretSealer};
use cavern_work::namespace::Lookups;
use cavern_work::persist::Persistence;
use cavern_work::repair::Repair;
use cavern_work::sessions::{CurrentSessions, Recalls, WatchHub};
use cavern_work::views::ViewMaker;
use cavern_work::workers::Workers;
use cavern_work::workers::calls::{BlockFiller, ObjectWriter};
use cavern_work::{StateReader, WorkError};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::MasterError;
use crate::leader_tasks::LeaderTasks;
use crate::services::Services;

/// The way to the workers.
pub struct WorkerClients {
    pub filler: Arc<dyn BlockFiller>,
    pub writer: Arc<dyn ObjectWriter>,
    pub pool: Option<Arc<WorkerPool>>,
}

/// Makes the way to the workers in a term, once these are known; tests have their own.
pub trait WorkerClientFactory {
    fn make(&self, config: &Config, workers: Arc<Workers>, cluster_id: &str, lease: LeaderLease) -> WorkerClients;
}

/// What terms are made of: it outlives them.
pub struct LeaderContext {
    pub config: Config,
    pub database: Arc<CurrentDatabase>,
    pub sealer: Arc<SecretSealer>,
    pub clock: Arc<Clock>,
    pub metrics: MasterMetrics,
    pub workers: Arc<dyn WorkerClientFactory + Send + Sync>,
    pub consensus: Arc<Consensus>,
}

/// Everything that this master has as long as it leads.
pub struct LeaderState {
    pub services: Services,
    running: Mutex<Option<Running>>,
}

/// What the end of a term ends.
struct Running {
    tasks: LeaderTasks,
    pool: Option<Arc<WorkerPool>>,
    proposals: JoinHandle<()>,
}

impl LeaderState {
    /// Begins when everything of before this leadership is applied.
    ///
    /// # Errors
    /// [`WorkError::Consensus`] when the leadership is over before that. Nothing of it is under way then.
    pub async fn begin(
        context: &LeaderContext,
        lead: LeaderId,
        sessions: &Arc<CurrentSessions>,
        stop: &CancellationToken,
    ) -> Result<Self, MasterError> {
        let LeaderContext { clock, consensus, .. } = context;
        // For as long as this master has this lead it takes no snapshot in: it stays the current one.
        let database = &context.database.get();
        let opened = stop.run_until_cancelled(open_log(database, clock, consensus, lead)).await;
        let (proposer, proposals) = opened.ok_or_else(WorkError::stopping)??;
        let (services, pool) = services(context, database, lead, proposer, sessions)?;
        let tasks = LeaderTasks::new(&services);
        // What it puts into the log may wait for a majority that is not there any more.
        let begun = stop.run_until_cancelled(tasks.begin(database, &context.metrics)).await;
        let begun = begun.unwrap_or_else(|| Err(WorkError::stopping().into()));
        let term = Self { services, running: Mutex::new(Some(Running { tasks, pool, proposals })) };
        if let Err(error) = begun {
            term.end().await;
            return Err(error);
        }
        if let Err(error) = consensus.publish_address().await {
            tracing::warn!("the group does not know the address of this master yet: {error}");
        }
        Ok(term)
    }

    /// Lets nothing of the term go on. Calls under way are answered that it is over.
    pub async fn end(&self) {
        let Some(Running { tasks, pool, proposals }) = self.running.lock().take() else { return };
        let services = &self.services;
        services.stop.cancel();
        services.watch.close();
        services.tasks.close();
        services.tasks.wait().await;
        tasks.end().await;
        if let Some(pool) = pool {
            pool.shutdown().await;
        }
        proposals.abort();
        // Aborted, which is how it is meant to end.
        let _ = proposals.await;
    }
}

/// Everything that a leader's services speak for, as the tables have it now.
fn services(
    context: &LeaderContext,
    database: &Arc<Database>,
    lead: LeaderId,
    proposer: Proposer,
    sessions: &Arc<CurrentSessions>,
) -> Result<(Services, Option<Arc<WorkerPool>>), MasterError> {
    let LeaderContext { config, sealer, clock, metrics, workers: way, consensus, .. } = context;
    let conf = &config.master;
    let cluster_id = Tables::new(database).cluster_id()?;
    let missing = || StateError::Corrupt("the cluster id, which is missing,".into());
    let cluster_id: Arc<str> = cluster_id.ok_or_else(missing)?.into();
    let lease = consensus.lease(lead);
    let watch = Arc::new(WatchHub::new(
        (conf.session_lease.get(), conf.client_sessions),
        lease.clone(),
        metrics.clone(),
        sessions.clone(),
        cluster_id.clone(),
    ));
    watch.know_owners(Tables::new(database).session_owners()?);
    sessions.set(Some(watch.clone()));
    let mounts = Arc::new(Mounts::new(database.clone(), sealer.clone(), config.ufs.clone()));
    let reader = StateReader::new(database.clone(), clock.clone(), lease.clone());
    let background = TaskList::default();
    let listings = Listings::new(
        reader.clone(),
        mounts.clone(),
        proposer.clone(),
        metrics.listing.clone(),
        background.clone(),
        config,
        cluster_id.clone(),
    );
    let workers = Arc::new(Workers::new(
        database.clone(),
        proposer.clone(),
        conf.worker_timeout.get(),
        u32::try_from(conf.workers_per_certificate).unwrap_or(u32::MAX),
        cluster_id.to_string(),
        metrics.clone(),
    ));
    let lookups = Lookups {
        asker: 0,
        client: None,
        charge: None,
        listings_only: false,
        reader: reader.clone(),
        listings,
        mounts: mounts.clone(),
        watch: watch.clone(),
        recalls: Arc::new(Recalls::new(watch.clone())),
        refresh_wait: conf.refresh_wait.get(),
    };
    let WorkerClients { filler, writer, pool } = way.make(config, workers.clone(), &cluster_id, lease.clone());
    let persistence = Persistence::new(
        lookups.clone(),
        proposer.clone(),
        writer.clone(),
        cluster_id.clone(),
        conf,
        metrics.persist.clone(),
    );
    let jobs = Jobs::new(
        lookups.clone(),
        proposer.clone(),
        filler,
        conf.load_concurrency,
        persistence.clone(),
        metrics.jobs.clone(),
    );
    let repair = Repair::new(
        (reader, watch.clone()),
        proposer.clone(),
        writer.clone(),
        workers.clone(),
        cluster_id.clone(),
        conf,
        metrics.repair.clone(),
    );
    let views = ViewMaker::new(
        lookups.clone(),
        proposer.clone(),
        repair.clone(),
        &conf.data_dir.join("views"),
        cluster_id.clone(),
        metrics.views.clone(),
    );
    let fsck = Fsck {
        lookups: lookups.clone(),
        proposer: proposer.clone(),
        writer,
        persistence: persistence.clone(),
        repair: repair.clone(),
        cluster_id: cluster_id.clone(),
        settle: conf.session_lease.get() + conf.worker_timeout.get(),
    };
    let claims = Claims { mounts: mounts.clone(), lease: lease.clone(), cluster_id: cluster_id.clone() };
    let mount_changes = MountChanges {
        lookups: lookups.clone(),
        persistence: persistence.clone(),
        proposer: proposer.clone(),
        claims,
        tasks: Arc::default(),
    };
    let services = Services {
        lookups,
        mounts,
        mount_changes,
        watch,
        workers,
        rollbacks: Arc::default(),
        jobs,
        persistence,
        repair,
        views,
        fsck,
        consensus: consensus.clone(),
        lease,
        proposer,
        cluster_id,
        term: lead.term,
        heartbeat_ms: u32::try_from(conf.heartbeat.get().as_millis()).unwrap_or(u32::MAX),
        background,
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
    };
    Ok((services, pool))
}

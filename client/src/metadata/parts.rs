//! The objects that the metadata of a client consists of: the page at the head of the module says what each is for.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_net::master::{MasterChannel, RetryPolicy};

use super::directory::DirPage;
use super::lease::SessionLease;
use super::listing_refresh::ListingRefresh;
use super::locks::Locks;
use super::log::OperationLog;
use super::names::Names;
use super::node::Node;
use super::open_files::OpenFiles;
use super::outage::Outage;
use super::recent_invalidations::InvalidationMark;
use crate::error::ClientError;
use crate::journal::Journal;
use crate::single_flight::SingleFlight;
use crate::stats::Stats;
use crate::tables::Tables;

/// A name below a directory.
type NameKey = (u64, Box<[u8]>);

/// The namespace as this client sees it: cached, coherent under the lease, served stale while no master answers.
/// Cheap to clone.
#[derive(Clone)]
pub struct Metadata {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub master: MasterChannel,
    pub tables: Arc<Tables>,
    pub stats: Arc<Stats>,
    /// `client.change_timeout`.
    pub change_timeout: Duration,
    pub names: Names,
    pub lease: SessionLease,
    pub log: OperationLog,
    pub open: OpenFiles,
    pub locks: Locks,
    pub refresh: ListingRefresh,
    pub outage: Outage,
    pub questions: PendingQueries,
}

/// Questions under way. Those are shared that begin at the same mark: an answer that was read before somebody's change
/// is none to that one.
#[derive(Default)]
pub(super) struct PendingQueries {
    pub lookups: SingleFlight<(NameKey, InvalidationMark, RetryPolicy), Result<Arc<Node>, ClientError>>,
    pub nodes: SingleFlight<(u64, InvalidationMark, RetryPolicy), Result<Arc<Node>, ClientError>>,
    pub pages: SingleFlight<(NameKey, usize, InvalidationMark, RetryPolicy), Result<DirPage, ClientError>>,
}

impl Metadata {
    pub(crate) fn new(
        master: MasterChannel,
        tables: Arc<Tables>,
        stats: Arc<Stats>,
        config: &Config,
        journal: Option<Arc<Journal>>,
    ) -> Self {
        let (client, caching) = (&config.client, config.fuse.client_metadata_cache);
        let (lease, locks) = (SessionLease::new(), Locks::default());
        if let Some(journal) = &journal {
            lease.begin(journal.session().0);
            locks.begin_epoch(journal.epoch());
        }
        let names = Names::new(client.metadata_cache_entries, caching, &stats.metadata_entries);
        let inner = Inner {
            master,
            tables,
            stats,
            change_timeout: client.change_timeout.get(),
            names,
            lease,
            log: OperationLog::new(journal, client.directory_delegations && caching),
            open: OpenFiles::default(),
            locks,
            refresh: ListingRefresh::new(config.master.refresh_wait.get()),
            outage: Outage::new(client),
            questions: PendingQueries::default(),
        };
        Self { inner: Arc::new(inner) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use cavern_net::WorkerPool;
    use cavern_security::Transport;

    use super::*;

    /// The metadata of a client whose masters do not answer.
    pub(crate) fn metadata(journal: Option<Arc<Journal>>) -> Metadata {
        let (config, stats) = (Config::default(), Arc::new(Stats::default()));
        let master = MasterChannel::new(&config).unwrap();
        let pool = WorkerPool::new(&config.client, Transport::Plain, "test");
        let tables = Arc::new(Tables::new(master.clone(), pool, &config.ufs));
        Metadata::new(master, tables, stats, &config, journal)
    }
}

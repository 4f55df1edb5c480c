//! The mounts as this worker knows them: how to reach the bucket that a block comes from.
//!
//! The table comes from the master, credentials included, and is kept in memory only. Of mounts whose keys are vended
//! it has none: keys come from the master as requests need them, and end soon. It stays in use while the master is
//! away. A mount that is not in it makes the worker ask again, once a second at most.

mod fetch_failures;
mod hits;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_net::master::Stubs;
use cavern_net::{MasterChannel, NetError, key_lender};
use cavern_proto::ClientAccess;
use cavern_proto::data::Status;
use cavern_proto::master::{AccessMode, ListMountsRequest, Mount, MountTable, WriteType};
use cavern_ufs::{KeyRight, Ufs, UfsError};
use fetch_failures::FetchFailures;
use hits::HitCounters;
use parking_lot::RwLock;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::request_error::Refusal;

/// Unknown mounts make the worker ask the master at most this often.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// Between two fetches for those who may have been let in since.
const RENEWAL_PAUSE: Duration = Duration::from_millis(100);
/// How long they wait for one.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct CachedMount {
    mount: Mount,
    ufs: Result<Ufs, Refusal>,
}

/// What a client may do in a mount.
#[derive(Debug)]
pub struct MountAccess {
    pub access: ClientAccess,
    /// 0 for any number.
    pub bytes_per_second: u64,
    /// `None` when it cannot be opened: nothing tells then which objects are its own.
    pub ufs: Option<Ufs>,
}

#[derive(Debug, Default)]
struct Table {
    epoch: Option<u64>,
    mounts: HashMap<u32, Arc<CachedMount>>,
}

/// The mount table of this worker.
#[derive(Debug)]
pub struct Mounts {
    table: RwLock<Table>,
    /// Goes up with each table.
    version: AtomicU64,
    /// When the master was last asked; held while it is asked, so that one asks for all.
    asked: Mutex<Option<Instant>>,
    master: MasterChannel,
    conf: schema::Ufs,
    /// What this worker cannot fetch from.
    pub failures: FetchFailures,
    /// What was asked for of each mount since the process started.
    pub hits: HitCounters,
}

impl Mounts {
    pub fn new(master: MasterChannel, conf: schema::Ufs) -> Self {
        Self {
            table: RwLock::default(),
            version: AtomicU64::new(1),
            asked: Mutex::new(None),
            master,
            conf,
            failures: FetchFailures::default(),
            hits: HitCounters::default(),
        }
    }

    /// The bucket of a mount.
    ///
    /// # Errors
    /// The mount is unknown, also to the master, or the master cannot be asked; or its options make no sense.
    pub async fn ufs(&self, mount_id: u32) -> Result<Ufs, Refusal> {
        self.find(mount_id).await?.ufs.clone()
    }

    /// The bucket of a mount into which workers write what its files have.
    ///
    /// # Errors
    /// Also those of a mount that is only read, or whose clients write to the bucket by themselves.
    pub async fn ufs_to_write(&self, mount_id: u32) -> Result<Ufs, Refusal> {
        let found = self.find(mount_id).await?;
        let Mount { path, .. } = &found.mount;
        if found.mount.write_type() != WriteType::FsMode || found.mount.access_mode() == AccessMode::ReadOnly {
            return Err(Refusal::new(
                Status::PermissionDenied,
                format!("{path} (mount {mount_id}) is no fs-mode mount: workers write nothing into its bucket"),
            ));
        }
        found.ufs.clone()
    }

    /// The bucket of a mount, for an object that is the mount's.
    ///
    /// # Errors
    /// Also [`Status::PermissionDenied`] for a key that is not within the mount's prefix.
    pub async fn ufs_for(&self, mount_id: u32, key: &str) -> Result<Ufs, Refusal> {
        let ufs = self.ufs(mount_id).await?;
        check_key(mount_id, ufs.prefix(), key)?;
        Ok(ufs)
    }

    async fn find(&self, mount_id: u32) -> Result<Arc<CachedMount>, Refusal> {
        if let Some(known) = self.known(mount_id) {
            return Ok(known);
        }
        let unknown =
            |reason: &str| Refusal::new(Status::UnknownMount, format!("mount {mount_id} is not known{reason}"));
        let mut asked = self.asked.lock().await;
        if let Some(known) = self.known(mount_id) {
            return Ok(known);
        }
        if asked.is_some_and(|last| last.elapsed() < ASK_INTERVAL) {
            return Err(unknown(", and the master was asked a moment ago"));
        }
        *asked = Some(Instant::now());
        self.fetch().await.map_err(|error| unknown(&format!(", and the master cannot be asked: {error}")))?;
        drop(asked);
        self.known(mount_id).ok_or_else(|| unknown(" to the master"))
    }

    fn known(&self, mount_id: u32) -> Option<Arc<CachedMount>> {
        self.table.read().mounts.get(&mount_id).cloned()
    }

    /// Fetches the table if the master has a newer one than `epoch`.
    ///
    /// # Errors
    /// Those of the call.
    pub async fn refresh_to(&self, epoch: u64) -> Result<(), NetError> {
        if self.table.read().epoch == Some(epoch) { Ok(()) } else { self.fetch().await }
    }

    async fn fetch(&self) -> Result<(), NetError> {
        let ask = |mut stubs: Stubs| async move { stubs.cluster.get_credentials(ListMountsRequest {}).await };
        let table = self.master.try_call("GetCredentials", ask).await?;
        self.apply(table);
        Ok(())
    }

    /// Takes over a table. Mounts that did not change keep their connections.
    pub fn apply(&self, fresh: MountTable) {
        let mut table = self.table.write();
        let before = std::mem::take(&mut table.mounts);
        for mount in fresh.mounts {
            let same = before.get(&mount.id).filter(|known| {
                known.ufs.is_ok() && known.mount.uri == mount.uri && known.mount.options == mount.options
            });
            let ufs = match same {
                Some(known) => known.ufs.clone(),
                None => self.open(&mount).map_err(|error| {
                    warn!(mount = mount.id, path = mount.path, %error, "cannot use a mount");
                    Refusal::from(error)
                }),
            };
            if !before.contains_key(&mount.id) {
                info!(mount = mount.id, path = mount.path, uri = mount.uri, "knows a mount");
            }
            table.mounts.insert(mount.id, Arc::new(CachedMount { mount, ufs }));
        }
        table.epoch = Some(fresh.epoch);
        self.failures.retain(|mount_id| table.mounts.contains_key(&mount_id));
        self.hits.retain(|mount_id| table.mounts.contains_key(&mount_id));
        self.version.fetch_add(1, Ordering::Release);
    }

    fn open(&self, mount: &Mount) -> Result<Ufs, UfsError> {
        // Clients of other mounts write to the bucket by themselves.
        let right = if mount.write_type() == WriteType::FsMode { KeyRight::Write } else { KeyRight::Read };
        let lender = key_lender(&self.master, mount.id, &mount.path, right);
        Ufs::open_vended(&mount.uri, &mount.options, &self.conf, &lender)
    }

    /// Of the table as it is: what was taken from it holds for as long as this is the same. At least 1.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// What a client may do in a mount, by the table as it is. `None` when the mount is not in the table.
    pub fn access_of(&self, mount_id: u32, client: &str) -> Option<MountAccess> {
        let known = self.known(mount_id)?;
        let CachedMount { mount, ufs } = &*known;
        let (access, bytes_per_second) = (mount.access_of(client), mount.rates_of(client).1);
        Some(MountAccess { access, bytes_per_second, ufs: ufs.clone().ok() })
    }

    /// Whether views have a block of an fs-mode file, and every client that may be heard of has said that it writes to
    /// no such block.
    pub fn is_frozen(&self, mount_id: u32, inode: u64, generation: u32) -> bool {
        self.known(mount_id).is_some_and(|known| {
            let Mount { frozen_below, frozen_inodes, settled_below, .. } = &known.mount;
            settled_below >= frozen_below && generation < *frozen_below && inode <= *frozen_inodes
        })
    }

    /// Whether views have a block of an fs-mode file as it is, so that what is read of it has been written before.
    /// Beside [`Self::is_frozen`] it also says so while another view is being made, as long as no client has heard of
    /// that which may write otherwise.
    pub fn is_of_view(&self, mount_id: u32, inode: u64, generation: u32) -> bool {
        self.known(mount_id).is_some_and(|known| {
            let Mount { frozen_below, frozen_inodes, settled_below, .. } = &known.mount;
            generation < *frozen_below.min(settled_below) && inode <= *frozen_inodes
        })
    }

    /// Fetches the table as the master has it from now on. Those who come while one is fetched share the next. Returns
    /// within seconds also where no master can be asked: the table is the former one then.
    pub async fn renew(&self) {
        let came = Instant::now();
        let renewed = async {
            let mut asked = self.asked.lock().await;
            if asked.is_some_and(|last| last >= came) {
                return Ok(());
            }
            if let Some(last) = *asked {
                tokio::time::sleep_until(last + RENEWAL_PAUSE).await;
            }
            *asked = Some(Instant::now());
            self.fetch().await
        };
        match tokio::time::timeout(RENEWAL_TIMEOUT, renewed).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "the mount table stays as it is"),
            Err(_elapsed) => debug!("the mount table stays as it is: no master has answered in time"),
        }
    }

    /// Notes that a fetch of an object of a mount failed. The log tells of the first of a mount, the heartbeat of all
    /// mounts with failures. An object that is gone or replaced is no failure.
    pub fn fetch_failed(&self, mount_id: u32, key: &str, error: &UfsError) {
        if !error.is_metadata_outdated()
            && let Some(known) = self.known(mount_id)
        {
            self.failures.failed(mount_id, &known.mount.path, key, &error.to_string());
        }
    }

    /// Makes the bucket of a mount misbehave.
    #[cfg(test)]
    pub(crate) fn inject(&self, mount_id: u32, faults: cavern_ufs::Faults) {
        let known = self.known(mount_id).unwrap();
        let ufs = known.ufs.as_ref().unwrap().with_faults(faults);
        self.table.write().mounts.insert(mount_id, Arc::new(CachedMount { mount: known.mount.clone(), ufs: Ok(ufs) }));
    }

    /// Seconds after which blocks of a mount may go first; `None` for never.
    pub fn ttl_seconds(&self, mount_id: u32) -> Option<u32> {
        let ttl_ms = self.known(mount_id)?.mount.ttl_ms;
        (ttl_ms > 0).then(|| u32::try_from(ttl_ms.div_ceil(1000)).unwrap_or(u32::MAX))
    }
}

/// Refuses keys that are somebody else's in the bucket.
///
/// # Errors
/// [`Status::PermissionDenied`] for a key that is not within the prefix.
pub fn check_key(mount_id: u32, prefix: &str, key: &str) -> Result<(), Refusal> {
    if key.starts_with(prefix) {
        return Ok(());
    }
    let (key, prefix) = (key.escape_debug(), prefix.escape_debug());
    let message =
        format!("the key \"{key}\" is not within \"{prefix}\", which is all that mount {mount_id} has of its bucket");
    Err(Refusal::new(Status::PermissionDenied, message))
}

#[cfg(test)]
pub(crate) mod tests {
    use cavern_conf::Config;

    use super::*;

    /// The way to a master that is not there: port 9 of the loopback has no listener.
    pub(crate) fn no_master() -> MasterChannel {
        let mut config = Config::default();
        config.cluster.masters = vec!["127.0.0.1:9".to_owned()];
        MasterChannel::new(&config).unwrap()
    }

    fn mounts() -> Mounts {
        let link = no_master();
        Mounts::new(link, schema::Ufs::default())
    }

    fn mount(id: u32, uri: &str) -> Mount {
        Mount { id, uri: uri.to_owned(), ttl_ms: 1500, ..Default::default() }
    }

    #[tokio::test]
    async fn known_mounts_open_and_unknown_ones_are_refused_without_a_master() {
        let mounts = mounts();
        mounts.apply(MountTable {
            epoch: 3,
            mounts: vec![mount(1, "memory://m"), mount(2, "nonsense")],
            status: vec![],
        });
        assert!(mounts.ufs(1).await.is_ok());
        assert_eq!(mounts.ufs(2).await.unwrap_err().status, Status::UfsUnavailable);
        let refusal = mounts.ufs(3).await.unwrap_err();
        assert_eq!(refusal.status, Status::UnknownMount);
        assert!(refusal.message.contains("cannot be asked"), "{refusal}");
        assert!(mounts.ufs(3).await.unwrap_err().message.contains("a moment ago"));
        assert_eq!((mounts.ttl_seconds(1), mounts.ttl_seconds(9)), (Some(2), None));
        assert!(mounts.refresh_to(3).await.is_ok() && mounts.refresh_to(4).await.is_err());
    }

    #[tokio::test]
    async fn what_views_have_is_frozen_when_all_clients_have_settled() {
        let mounts = mounts();
        for (settled_below, is_frozen) in [(0, false), (5, true)] {
            let frozen = Mount { frozen_below: 5, frozen_inodes: 100, settled_below, ..mount(1, "memory://m") };
            mounts.apply(MountTable { epoch: 1, mounts: vec![frozen], status: vec![] });
            assert_eq!(mounts.is_frozen(1, 100, 4), is_frozen);
            assert_eq!(mounts.is_of_view(1, 100, 4), is_frozen);
            for (mount_id, inode, generation) in [(1, 100, 5), (1, 101, 4), (2, 100, 4)] {
                assert!(!mounts.is_of_view(mount_id, inode, generation), "{mount_id} {inode} {generation}");
                assert!(!mounts.is_frozen(mount_id, inode, generation), "{mount_id} {inode} {generation}");
            }
        }
        // Another view is being made.
        let more = Mount { frozen_below: 9, frozen_inodes: 200, settled_below: 5, ..mount(1, "memory://m") };
        mounts.apply(MountTable { epoch: 2, mounts: vec![more], status: vec![] });
        assert!(mounts.is_of_view(1, 100, 4) && !mounts.is_of_view(1, 100, 5) && !mounts.is_frozen(1, 100, 4));
    }
}

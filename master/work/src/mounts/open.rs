//! The mounts as this process uses them: opened object stores, and how each of them fares.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_proto::master::{self, AttributePolicy, Mount, MountStatus, WriteType};
use cavern_proto::reserved::CLAIM;
use cavern_state::{Database, Tables};
use cavern_ufs::{KeyProvider, KeyStatus, KeyVendor, Ufs};
use parking_lot::Mutex;
use tokio::sync::RwLock;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::secrets::SecretSealer;
use crate::error::WorkError;

/// After a failed listing, accesses that could do with an old one do not wait for a new one for this long.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// One log line per mount and this much time for failures of its bucket.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// The opened mounts, made when they are first needed.
pub struct Mounts {
    database: Arc<Database>,
    sealer: Arc<SecretSealer>,
    conf: schema::Ufs,
    opened: Mutex<HashMap<u32, Arc<OpenMount>>>,
    /// There may be one that is not there for all clients.
    restricted: AtomicBool,
    /// Whether there may be rules with rates.
    have_rates: AtomicBool,
}

/// One mount with its object store.
pub struct OpenMount {
    /// As recorded, with the options in clear: never to be printed.
    pub mount: Mount,
    pub ufs: Ufs,
    /// Where its keys are vended; or why this master cannot.
    pub vendor: Result<Option<KeyVendor>, Arc<WorkError>>,
    /// Held for reading by whoever puts what it knows of some directory into the log without being that directory's
    /// listing; a listing takes it for writing for a moment before it begins, so that older knowledge cannot come
    /// later.
    pub gate: Arc<RwLock<()>>,
    pub(crate) health: Arc<Mutex<Health>>,
    /// Cancelled when it is unmounted.
    detached: CancellationToken,
}

#[derive(Default)]
pub(crate) struct Health {
    /// Without the mount's number, and how its keys fare.
    pub status: MountStatus,
    failed: Option<Instant>,
    logged: Option<Instant>,
    /// Why nothing may be written under the prefix: another cluster does.
    claimant: Option<String>,
    /// A listing was in no order since this master leads, though the store should list in that of keys.
    pub in_no_order: bool,
}

impl OpenMount {
    pub fn id(&self) -> u32 {
        self.mount.id
    }

    /// Whether the namespace, not the bucket, says what is in the mount.
    pub fn is_fs_mode(&self) -> bool {
        self.mount.write_type() == WriteType::FsMode
    }

    /// Whether the bucket may keep attributes of its files, which are shown then.
    pub fn keeps_attributes(&self) -> bool {
        !self.is_fs_mode() && self.mount.attributes() == AttributePolicy::Keep
    }

    /// Completes when the mount is gone: nothing is to be done with its credentials any more.
    pub async fn detached(&self) {
        self.detached.cancelled().await;
    }

    pub fn succeeded(&self) {
        let mut health = self.health.lock();
        health.failed = None;
        health.status.last_error.clear();
    }

    /// Notes a failure, and writes it to the log unless one was written a moment ago.
    pub fn failed(&self, error: &WorkError) {
        let mut health = self.health.lock();
        health.failed = Some(Instant::now());
        health.status.last_error = error.to_string();
        if health.logged.is_none_or(|logged| logged.elapsed() > LOG_PAUSE) {
            health.logged = health.failed;
            drop(health);
            let what = match self.is_fs_mode() {
                true => "the bucket falls behind the namespace",
                false => "what is known of the bucket is served as it is",
            };
            tracing::warn!(mount = self.mount.path, "{what}: {error}");
        }
    }

    /// Notes that another cluster writes under the prefix, as this says, or that none does any more.
    pub fn set_claimant(&self, claimant: Option<String>) {
        let mut health = self.health.lock();
        if health.claimant == claimant {
            return;
        }
        match &claimant {
            Some(reason) => tracing::error!(
                mount = self.mount.path,
                "nothing is written to the bucket any more: {reason}. Unmount it here or there; to take it back, \
                 delete \"{}{CLAIM}\" from the bucket once it is unmounted there",
                self.ufs.prefix()
            ),
            None => tracing::info!(mount = self.mount.path, "the bucket is this cluster's again"),
        }
        health.claimant = claimant;
    }

    /// Another cluster writes under the prefix: this one is not to.
    ///
    /// # Errors
    /// [`WorkError::Refused`] says which one does.
    pub fn check_claimant(&self) -> Result<(), WorkError> {
        self.health.lock().claimant.clone().map_or(Ok(()), |reason| Err(WorkError::Refused(reason)))
    }

    /// Whether the bucket failed a moment ago.
    pub fn is_failing(&self) -> bool {
        self.health.lock().failed.is_some_and(|failed| failed.elapsed() < FAILURE_PAUSE)
    }

    pub fn set_index(&self, indexing: bool, entries: u64, hidden: u64, unlisted: u64) {
        let status = &mut self.health.lock().status;
        (status.indexing, status.indexed_entries, status.hidden_keys) = (indexing, entries, hidden);
        status.unlisted_directories = unlisted;
        (status.expected_entries, status.index_streams, status.index_rate) = (0, 0, 0);
    }

    /// Notes how far an index is that runs: entries and hidden keys so far, about how many entries there will be, how
    /// many requests are sent at a time, and how many entries come in a second.
    pub fn set_index_progress(&self, (entries, hidden): (u64, u64), expected: u64, streams: usize, rate: u64) {
        self.set_index(true, entries, hidden, 0);
        let status = &mut self.health.lock().status;
        (status.expected_entries, status.index_rate) = (expected, rate);
        status.index_streams = u32::try_from(streams).unwrap_or(u32::MAX);
    }

    /// How the keys fare, where they are vended.
    pub fn key_status(&self) -> Option<master::KeyStatus> {
        let vendor = match &self.vendor {
            Ok(vendor) => vendor.as_ref()?,
            Err(error) => {
                return Some(master::KeyStatus { last_error: error.to_string(), ..master::KeyStatus::default() });
            }
        };
        let KeyStatus { read_until_ns, write_until_ns, last_error } = vendor.status();
        Some(master::KeyStatus {
            read_until_ns: read_until_ns.unwrap_or(0),
            write_until_ns: write_until_ns.unwrap_or(0),
            last_error: last_error.unwrap_or_default(),
        })
    }

    pub fn status(&self) -> MountStatus {
        let status = self.health.lock().status.clone();
        MountStatus { mount_id: self.mount.id, keys: self.key_status(), ..status }
    }
}

impl Mounts {
    pub fn new(database: Arc<Database>, sealer: Arc<SecretSealer>, conf: schema::Ufs) -> Self {
        // Those that cannot be read may be.
        let mounts = Tables::new(&database).mounts();
        let all = |known: fn(&Mount) -> bool| mounts.as_ref().is_ok_and(|mounts| mounts.iter().all(known));
        let restricted = AtomicBool::new(!all(|mount| !mount.is_restricted()));
        let have_rates = AtomicBool::new(!all(|mount| !mount.has_rates()));
        Self { database, sealer, conf, opened: Mutex::default(), restricted, have_rates }
    }

    /// Whether there may be mounts that are not there for all clients.
    pub fn are_restricted(&self) -> bool {
        self.restricted.load(Ordering::Acquire)
    }

    /// Notes whom a mount will be there for. Before it is: whoever asks then is asked for its name.
    pub fn will_be(&self, mount: &Mount) {
        self.restricted.fetch_or(mount.is_restricted(), Ordering::AcqRel);
        self.have_rates.fetch_or(mount.has_rates(), Ordering::AcqRel);
    }

    /// Whether there may be mounts in which clients go on no faster than at a rate.
    pub fn have_rates(&self) -> bool {
        self.have_rates.load(Ordering::Acquire)
    }

    /// All mounts as they are recorded, with their options sealed.
    pub fn all_recorded(&self) -> Result<Vec<Mount>, WorkError> {
        Ok(Tables::new(&self.database).mounts()?)
    }

    /// A handle on what a mount request names; nothing is sent.
    pub fn open_ufs(&self, mount: &Mount) -> Result<Ufs, WorkError> {
        Ok(Ufs::open(&mount.uri, &mount.options, &self.conf)?)
    }

    /// Who gets the keys of a mount that vends them; nothing is sent.
    pub fn vendor(&self, mount: &Mount) -> Result<Option<KeyVendor>, WorkError> {
        Ok(KeyVendor::open(&mount.uri, &mount.options, &self.conf)?)
    }

    /// A handle on what a mount request names, with keys that are vended.
    pub fn open_vended(&self, mount: &Mount, lender: &KeyProvider) -> Result<Ufs, WorkError> {
        Ok(Ufs::open_vended(&mount.uri, &mount.options, &self.conf, lender)?)
    }

    /// The mount as it may be proposed. Call it after the epoch of the mount table was read that the command names: if
    /// the key is changed meanwhile, that is another one.
    pub fn seal(&self, mount: Mount) -> Result<Mount, WorkError> {
        self.sealer.seal(&Tables::new(&self.database).secrets()?.key_id, mount)
    }

    pub fn unseal(&self, mount: Mount) -> Result<Mount, WorkError> {
        self.sealer.unseal(mount)
    }

    /// The mount of this id.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] when it was removed.
    pub fn get(&self, id: u32) -> Result<Arc<OpenMount>, WorkError> {
        if let Some(open) = self.opened.lock().get(&id) {
            return Ok(open.clone());
        }
        let (_, mount) = self.readable(id)?;
        let (ufs, vendor) = (self.open_ufs(&mount)?, self.vendor(&mount).map_err(Arc::new));
        let detached = CancellationToken::new();
        let open = OpenMount { mount, ufs, vendor, gate: Arc::default(), health: Arc::default(), detached };
        Ok(self.opened.lock().entry(id).or_insert_with(|| Arc::new(open)).clone())
    }

    /// A mount as it is recorded, with its options sealed.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] when it was removed.
    pub fn recorded(&self, id: u32) -> Result<Mount, WorkError> {
        let recorded = Tables::new(&self.database).mount(id)?;
        recorded.ok_or_else(|| WorkError::NotFound(format!("mount {id} is gone")))
    }

    /// A mount as it is recorded, and with its options in clear.
    fn readable(&self, id: u32) -> Result<(Mount, Mount), WorkError> {
        loop {
            let recorded = self.recorded(id)?;
            match self.sealer.unseal(recorded.clone()) {
                Ok(mount) => return Ok((recorded, mount)),
                // It was sealed anew meanwhile, and the old key is forgotten.
                Err(_) if self.recorded(id)? != recorded => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Opens a mount with the options that it has by now. Who has it open goes on with those that it had.
    pub fn reopen(&self, id: u32) -> Result<(), WorkError> {
        let before = self.get(id)?;
        loop {
            let (recorded, mount) = self.readable(id)?;
            let (ufs, vendor) = (self.open_ufs(&mount)?, self.vendor(&mount).map_err(Arc::new));
            let (gate, health, detached) = (before.gate.clone(), before.health.clone(), before.detached.clone());
            self.opened.lock().insert(id, Arc::new(OpenMount { mount, ufs, vendor, gate, health, detached }));
            // Another change may have come in between, and have been opened before this one.
            if self.recorded(id)? == recorded {
                return Ok(());
            }
        }
    }

    /// What the keys of a mount begin with; empty for a mount that cannot be used.
    pub fn prefix(&self, id: u32) -> String {
        self.get(id).map_or_else(|_| String::new(), |mount| mount.ufs.prefix().to_owned())
    }

    /// Drops what is held of a mount that was removed, and ends what is asked of its bucket.
    pub fn forget(&self, id: u32) {
        if let Some(open) = self.opened.lock().remove(&id) {
            open.detached.cancel();
        }
    }

    /// The mount table's epoch and its mounts, with the options in clear. A mount whose options cannot be read is left
    /// out.
    pub fn table(&self) -> Result<(u64, Vec<Mount>), WorkError> {
        let tables = Tables::new(&self.database);
        let epoch = tables.counters()?.mounts_epoch;
        let mut mounts = Vec::new();
        for recorded in tables.mounts()? {
            let (id, path) = (recorded.id, recorded.path.clone());
            match self.sealer.unseal(recorded).or_else(|_| self.readable(id).map(|(_, mount)| mount)) {
                Ok(mount) => mounts.push(mount),
                // The epoch is another one by now, and the table is asked for again.
                Err(error) if error.is_not_found() => {}
                Err(error) => tracing::error!(mount = path, "the mount cannot be used: {error}"),
            }
        }
        Ok((epoch, mounts))
    }

    /// How each mount fares; mounts that nobody has used yet report nothing.
    pub fn status(&self) -> Vec<MountStatus> {
        let mut status: Vec<_> = self.opened.lock().values().map(|open| open.status()).collect();
        status.sort_by_key(|status| status.mount_id);
        status
    }
}

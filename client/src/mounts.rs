//! The mount table as the client uses it: each mount with its object store opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_conf::schema::OutageLookups;
use cavern_net::{MasterChannel, key_lender};
use cavern_proto::data::BlockRef;
use cavern_proto::master::{AccessMode, AttributePolicy, Consistency, Mount, MountTable, Names, User, WriteType};
use cavern_proto::{ContentId, HIDDEN};
use cavern_ufs::{KeyRight, Ufs};
use parking_lot::RwLock;

use crate::activity::Activity;
use crate::error::ClientError;

/// One mount. Its options and its freshness may become others while it is in use; whoever holds a view of it sees them
/// at once.
#[derive(Debug)]
pub struct MountView {
    /// As it was first seen: for all of it that stays.
    mount: Mount,
    /// Whether this client changes what is in it. It may be allowed to, or no more.
    is_changeable: AtomicBool,
    /// Whether the masters judge what is changed in it by the user who asks.
    limits_users: AtomicBool,
    frozen: Frozen,
    /// Which of the attributes that programs ask each file for its inodes may have.
    probed_xattrs: AtomicU32,
    activity: Activity,
    current: RwLock<Current>,
}

/// Which blocks of an fs-mode mount views have frozen. They are in the order in which they are written when there are
/// more, so that no look finds fewer than there are in both tables.
#[derive(Debug, Default)]
struct Frozen {
    up_to_inode: AtomicU64,
    below_generation: AtomicU32,
    /// As the last but one when all clients go by that, and when this one does; less before.
    settled_below: AtomicU32,
    settled_here_below: AtomicU32,
}

impl Frozen {
    /// Takes them off a mount of the table.
    fn take(&self, mount: &mut Mount) {
        let (below, inodes) = (std::mem::take(&mut mount.frozen_below), std::mem::take(&mut mount.frozen_inodes));
        self.settled_below.store(std::mem::take(&mut mount.settled_below), Ordering::Release);
        self.up_to_inode.store(inodes, Ordering::Release);
        self.below_generation.store(below, Ordering::Release);
    }
}

#[derive(Debug)]
struct Current {
    mount: Mount,
    ufs: Result<Ufs, String>,
}

impl Current {
    /// Opens the mount's object store (no I/O). A store that cannot be opened makes reads fail, not the mount table.
    fn open(mount: Mount, conf: &schema::Ufs, master: Option<&MasterChannel>) -> Self {
        // Whoever runs the cluster gets no credentials, and speaks to buckets with those of the environment, if at all.
        let mut options = mount.options.clone();
        options.retain(|_, value| value != HIDDEN);
        let ufs = match master {
            Some(master) => {
                let changes_objects = mount.write_type() != WriteType::FsMode && is_changeable(&mount);
                let right = if changes_objects { KeyRight::Write } else { KeyRight::Read };
                Ufs::open_vended(&mount.uri, &options, conf, &key_lender(master, mount.id, &mount.path, right))
            }
            None => Ufs::open(&mount.uri, &options, conf),
        };
        let ufs = ufs.map_err(|error| error.to_string());
        if let Err(cause) = &ufs {
            tracing::warn!(path = mount.path, "the bucket of this mount cannot be used: {cause}");
        }
        Self { mount, ufs }
    }
}

impl MountView {
    /// Opens the mount's object store, without I/O. Where its keys are vended, `master` gives them.
    pub fn new(mut mount: Mount, conf: &schema::Ufs, master: Option<&MasterChannel>) -> Self {
        let (frozen, probed_xattrs) = (Frozen::default(), AtomicU32::new(std::mem::take(&mut mount.probed_xattrs)));
        frozen.take(&mut mount);
        let is_changeable = AtomicBool::new(is_changeable(&mount));
        let limits_users = AtomicBool::new(mount.users.is_some());
        let current = RwLock::new(Current::open(mount.clone(), conf, master));
        Self { mount, is_changeable, limits_users, frozen, probed_xattrs, activity: Activity::default(), current }
    }

    /// Takes on what the mount table has of the same mount by now.
    fn update(&self, mut mount: Mount, conf: &schema::Ufs, master: Option<&MasterChannel>) {
        self.frozen.take(&mut mount);
        self.probed_xattrs.store(std::mem::take(&mut mount.probed_xattrs), Ordering::Relaxed);
        if self.current.read().mount != mount {
            self.is_changeable.store(is_changeable(&mount), Ordering::Relaxed);
            self.limits_users.store(mount.users.is_some(), Ordering::Relaxed);
            let current = Current::open(mount, conf, master);
            *self.current.write() = current;
        }
    }

    pub fn id(&self) -> u32 {
        self.mount.id
    }

    /// What this client has read and written in it.
    pub(crate) fn activity(&self) -> &Activity {
        &self.activity
    }

    /// Absolute namespace path.
    pub fn path(&self) -> &str {
        &self.mount.path
    }

    /// Whether its names can be asked of the bucket by whoever knows no more than the mount: a `file://` tree may be
    /// another one on each host, and a bucket that keeps attributes says little in its listings.
    pub(crate) fn is_asked_without_masters(&self, which: OutageLookups) -> bool {
        let is_chosen = match which {
            OutageLookups::Never => false,
            OutageLookups::ReadOnly => !self.is_fs_mode() && !self.has_writable_bucket(),
            OutageLookups::CacheMode => !self.is_fs_mode(),
        };
        is_chosen && self.mount.capabilities().shared && !self.keeps_attributes()
    }

    /// Inode of the mount's root directory.
    pub fn root_inode(&self) -> u64 {
        self.mount.root_inode
    }

    /// Bytes of a block; never 0.
    pub fn block_size(&self) -> u64 {
        self.mount.block_size.max(u64::from(cavern_proto::CHUNK_BYTES))
    }

    /// Workers that hold a block; at least 1.
    pub fn replicas(&self) -> usize {
        self.mount.replicas.max(1) as usize
    }

    /// Whether this client changes what is in it.
    pub fn is_changeable(&self) -> bool {
        self.is_changeable.load(Ordering::Relaxed)
    }

    /// Whether masters judge what users of this client do in it, who need not count as themselves there.
    pub fn limits_users(&self) -> bool {
        self.limits_users.load(Ordering::Relaxed)
    }

    /// Whether masters take a user of this client for somebody else, so that what the kernel has decided for him is not
    /// what they would. False where they limit none.
    pub fn squashes(&self, user: &User) -> bool {
        let current = self.current.read();
        current.mount.users.as_ref().is_some_and(|limits| limits.mapped(Some(user)) != *user)
    }

    /// Whether the namespace is the truth of what is in it.
    pub fn is_fs_mode(&self) -> bool {
        self.mount.write_type() == WriteType::FsMode
    }

    /// Whether a view has frozen a block of a file of this fs-mode mount: whoever changes it makes another one in its
    /// place.
    pub(crate) fn is_frozen(&self, inode: u64, generation: u32) -> bool {
        let below = self.frozen.below_generation.load(Ordering::Acquire);
        generation < below && inode <= self.frozen.up_to_inode.load(Ordering::Acquire)
    }

    /// The generation below which blocks are frozen, as of the last table; 0 without views.
    pub(crate) fn frozen_below(&self) -> u32 {
        self.frozen.below_generation.load(Ordering::Acquire)
    }

    /// Whether nobody writes to what is frozen any more, this client included: others may take its place.
    pub(crate) fn is_settled(&self) -> bool {
        let below = self.frozen_below();
        let Frozen { settled_below, settled_here_below, .. } = &self.frozen;
        [settled_below, settled_here_below].into_iter().all(|settled| settled.load(Ordering::Acquire) >= below)
    }

    /// This client writes to no block that was frozen when `frozen_below` was this.
    pub(crate) fn settle_here(&self, below: u32) {
        self.frozen.settled_here_below.store(below, Ordering::Release);
    }

    /// Whether the bucket is the truth, and is written to by way of the mount.
    pub fn has_writable_bucket(&self) -> bool {
        !self.is_fs_mode() && self.is_changeable()
    }

    /// Whether it is in cache-mode, and what programs set of files' attributes is kept as metadata of the objects.
    pub fn keeps_attributes(&self) -> bool {
        !self.is_fs_mode() && self.mount.attributes() == AttributePolicy::Keep
    }

    pub fn consistency(&self) -> Consistency {
        self.current.read().mount.consistency()
    }

    /// Whether changes are answered only when nobody has anything cached that they made untrue. Kernels keep no names
    /// and attributes of such a mount: to take a name back they wait for whoever is changing its directory, who may
    /// wait for them.
    pub fn is_strict(&self) -> bool {
        self.mount.consistency() == Consistency::Strict
    }

    /// Whether no change of a name is answered before the masters have it on disk.
    pub fn has_synced_names(&self) -> bool {
        self.mount.names() == Names::Synced
    }

    /// How long a listing is fresh; `None` when it is trusted until a refresh.
    pub fn metadata_ttl(&self) -> Option<Duration> {
        self.current.read().mount.listing_ttl()
    }

    /// The object store, for reads past every worker.
    pub fn ufs(&self) -> Result<Ufs, ClientError> {
        let ufs = self.current.read().ufs.clone();
        ufs.map_err(|cause| ClientError::Mount { mount: self.mount.id, cause })
    }

    /// Names one version of one object of this mount.
    pub fn content_id(&self, key: &str, etag: &str, length: u64) -> Result<ContentId, ClientError> {
        Ok(ContentId::of_object(self.ufs()?.store_id(), key, etag, length, self.block_size()))
    }
}

/// As the masters show it to this client.
fn is_changeable(mount: &Mount) -> bool {
    match mount.write_type() {
        WriteType::FsMode => mount.access_mode() != AccessMode::ReadOnly,
        _ => mount.access_mode() == AccessMode::ReadWrite,
    }
}

/// One version of one object, cut into blocks: what reads, `cv fs blocks` and load jobs name.
#[derive(Clone, Debug)]
pub struct ObjectVersion {
    pub mount: Arc<MountView>,
    pub content: ContentId,
    pub key: Arc<str>,
    pub etag: Arc<str>,
    /// Bytes of the object.
    pub length: u64,
    /// It is part of a view: a bucket that keeps versions is asked for this one, where it has another by now.
    pub is_pinned: bool,
}

impl ObjectVersion {
    /// Computes the content id.
    pub fn new(mount: Arc<MountView>, key: &str, etag: &str, length: u64) -> Result<Self, ClientError> {
        let content = mount.content_id(key, etag, length)?;
        Ok(Self { mount, content, key: key.into(), etag: etag.into(), length, is_pinned: false })
    }

    /// How many blocks the object has; 0 for an empty one.
    pub fn block_count(&self) -> u32 {
        u32::try_from(self.length.div_ceil(self.mount.block_size())).unwrap_or(u32::MAX)
    }

    /// Bytes of block `index`; 0 past the end.
    pub fn block_length(&self, index: u32) -> u32 {
        cavern_proto::block_id::block_length(self.length, self.mount.block_size(), index)
    }

    /// Block `index` as the data plane names it.
    pub fn block(&self, index: u32) -> BlockRef {
        BlockRef {
            content_id: bytes::Bytes::copy_from_slice(self.content.as_bytes()),
            index,
            block_size: self.mount.block_size(),
            mount_id: self.mount.id(),
            key: self.key.to_string(),
            etag: self.etag.to_string(),
            object_length: self.length,
            pinned: self.is_pinned,
            ..BlockRef::default()
        }
    }
}

/// The mounts of one epoch.
#[derive(Clone, Debug, Default)]
pub struct Mounts {
    epoch: u64,
    by_id: HashMap<u32, Arc<MountView>>,
}

impl Mounts {
    /// The table's mounts. Those of `known` are taken over, and take on what has become another.
    pub fn new(table: MountTable, known: &Self, conf: &schema::Ufs, master: Option<&MasterChannel>) -> Self {
        let view = |mount: Mount| match known.by_id.get(&mount.id) {
            Some(view) => {
                view.update(mount, conf, master);
                view.clone()
            }
            None => Arc::new(MountView::new(mount, conf, master)),
        };
        Self { epoch: table.epoch, by_id: table.mounts.into_iter().map(|mount| (mount.id, view(mount))).collect() }
    }

    /// Epoch of the table.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn get(&self, id: u32) -> Option<&Arc<MountView>> {
        self.by_id.get(&id)
    }

    /// Which of the attributes that programs ask each file for inodes of any of them may have, by the bits of
    /// [`cavern_posix::xattr::probed`].
    pub(crate) fn probed_xattrs(&self) -> u32 {
        self.iter().fold(0, |all, mount| all | mount.probed_xattrs.load(Ordering::Relaxed))
    }

    /// Every mount, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<MountView>> {
        self.by_id.values()
    }
}

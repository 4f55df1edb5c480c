//! What a client may do with the blocks of a mount: what the rules of the mount say of the name in its certificate.
//!
//! The rules come with the mount table, so that no request asks the master. Where the table as it is here would refuse
//! a request, the master may have let the client in since: the table is fetched once more before the refusal, though
//! not for each request of whoever goes on asking.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::data::{
    BlockRef, CorruptRequest, FillRequest, OpenRequest, QueryRequest, ReadRequest, ReserveRequest, Status, SyncRequest,
    WriteRequest,
};
use cavern_proto::{ClientAccess, ContentId};
use cavern_security::Identity;
use cavern_ufs::Ufs;
use tokio::time::Instant;

use super::roles::Peer;
use crate::membership::Membership;
use crate::mounts::{MountAccess, Mounts, check_key};
use crate::request_error::Refusal;

/// The table is fetched for the sake of one connection at most this often. What the master tells all workers comes
/// with their heartbeats meanwhile.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(5);
/// Mounts whose rules a connection has at hand, at most.
const MAX_KNOWN: usize = 64;

/// A request about blocks of mounts.
pub(super) trait OfBlocks {
    fn blocks(&self) -> impl Iterator<Item = &BlockRef>;

    /// Whether it changes blocks of files. What is kept of objects stands for what the bucket has, and is no change.
    fn is_change(&self) -> bool;
}

/// Says of each request which blocks it is about, and whether it changes them.
macro_rules! of_blocks {
    ($($request:ty: |$it:ident| $blocks:expr, $is_change:expr;)+) => {$(
        impl OfBlocks for $request {
            fn blocks(&self) -> impl Iterator<Item = &BlockRef> {
                let $it = self;
                $blocks
            }

            fn is_change(&self) -> bool {
                let $it = self;
                let _ = $it;
                $is_change
            }
        }
    )+};
}

of_blocks! {
    ReadRequest: |read| read.items.iter().filter_map(|item| item.block.as_ref()), false;
    OpenRequest: |open| open.items.iter().filter_map(|item| item.block.as_ref()), false;
    FillRequest: |fill| fill.items.iter().filter_map(|item| item.block.as_ref()), false;
    QueryRequest: |query| query.blocks.iter(), false;
    CorruptRequest: |report| report.block.iter(), false;
    ReserveRequest: |reserve| reserve.block.iter().chain(&reserve.origin), true;
    WriteRequest: |write| write.block.iter(), write.block.as_ref().is_some_and(|block| block.data);
    SyncRequest: |sync| sync.blocks.iter().chain(&sync.failed), true;
}

/// Whether a request may be carried out.
#[derive(Debug)]
pub(super) enum Verdict {
    Allowed,
    Refused(Refusal),
    /// It is checked against the next table.
    Later,
}

/// What the peer of a connection may do.
#[derive(Debug)]
pub(super) struct BlockAccess {
    /// The client's name. Nobody else is checked: other roles serve all mounts, and whoever comes over the Unix socket
    /// could open the files of the blocks.
    client: Option<Arc<str>>,
    mounts: Arc<Mounts>,
    membership: Arc<Membership>,
    /// What `known` was taken from.
    version: u64,
    known: HashMap<u32, Option<MountAccess>>,
    /// When the table was last fetched for this peer.
    renewed: Option<Instant>,
}

impl BlockAccess {
    pub(super) fn of(peer: &Peer, mounts: Arc<Mounts>, membership: Arc<Membership>) -> Self {
        let client = peer.identity().and_then(Identity::client_name).map(Arc::from);
        Self { client, mounts, membership, version: 0, known: HashMap::new(), renewed: None }
    }

    /// The client's name, if it is checked.
    pub(super) fn client(&self) -> Option<&Arc<str>> {
        self.client.as_ref()
    }

    /// Whether the client may have, or change, the blocks of a request.
    pub(super) fn check(&mut self, request: &impl OfBlocks) -> Verdict {
        let Some(client) = self.client.clone() else { return Verdict::Allowed };
        let is_change = request.is_change();
        let mut blocks = request.blocks();
        let refused = blocks.find_map(|block| self.check_block(block, is_change, &client).err());
        match refused {
            None => Verdict::Allowed,
            Some(_) if self.renewed.is_none_or(|last| last.elapsed() >= RENEWAL_INTERVAL) => Verdict::Later,
            Some(refusal) => Verdict::Refused(refusal),
        }
    }

    fn check_block(&mut self, block: &BlockRef, is_change: bool, client: &str) -> Result<(), Refusal> {
        let refused = |status, what: &str| {
            Err(Refusal::new(status, format!("mount {} is {what} the client \"{client}\"", block.mount_id)))
        };
        let of_file = block.data.then(|| check_file(block, &self.membership));
        let Some(known) = self.known(block.mount_id, client) else {
            return refused(Status::UnknownMount, "not known to this worker, which cannot judge");
        };
        match known.access {
            ClientAccess::None => refused(Status::PermissionDenied, "not there for"),
            ClientAccess::ReadOnly if is_change => refused(Status::PermissionDenied, "only read by"),
            ClientAccess::ReadOnly | ClientAccess::Full => match (of_file, &known.ufs) {
                (Some(checked), _) => checked,
                (None, Some(ufs)) => check_object(block, ufs),
                (None, None) => refused(
                    Status::UnknownMount,
                    "not usable by this worker (see its log), which cannot tell its objects from others for",
                ),
            },
        }
    }

    /// The mount of a request that was allowed, and how many bytes in a second the peer may have there, if they are
    /// bounded. What it asks for in one request is counted in the mount of the first block.
    pub(super) fn rate(&mut self, request: &impl OfBlocks) -> Option<(u32, u64)> {
        let client = self.client.clone()?;
        let mount_id = request.blocks().next()?.mount_id;
        let per_second = self.known(mount_id, &client)?.bytes_per_second;
        (per_second != 0).then_some((mount_id, per_second))
    }

    /// The table as the master has it now; what the peer asks for within the next seconds is checked against that.
    pub(super) fn renew(&mut self) -> impl Future<Output = ()> + Send + 'static {
        self.renewed = Some(Instant::now());
        let mounts = self.mounts.clone();
        async move { mounts.renew().await }
    }

    fn known(&mut self, mount_id: u32, client: &str) -> Option<&MountAccess> {
        let version = self.mounts.version();
        if self.version != version || self.known.len() >= MAX_KNOWN && !self.known.contains_key(&mount_id) {
            self.version = version;
            self.known.clear();
        }
        self.known.entry(mount_id).or_insert_with(|| self.mounts.access_of(mount_id, client)).as_ref()
    }
}

/// Whether the name of a block is that of a file of the mount. Those of files of other mounts, whose numbers anybody
/// can count up to, are neither looked at nor made under the name of this one.
fn check_file(block: &BlockRef, membership: &Membership) -> Result<(), Refusal> {
    if membership.is_of_cluster(block) {
        return Ok(());
    }
    Err(Refusal::bad_request("the content id is not that of the file, generation and mount named"))
}

/// Whether the name of a block is that of an object of the mount. The names of those of others, also in the same
/// bucket, open nothing.
fn check_object(block: &BlockRef, ufs: &Ufs) -> Result<(), Refusal> {
    check_key(block.mount_id, ufs.prefix(), &block.key)?;
    let content = ContentId::of_object(ufs.store_id(), &block.key, &block.etag, block.object_length, block.block_size);
    if content.as_bytes()[..] == block.content_id[..] {
        return Ok(());
    }
    Err(Refusal::bad_request("the content id is not that of the key, version and bucket named"))
}

#[cfg(test)]
mod tests {
    use cavern_conf::schema;
    use cavern_proto::data::open_request;
    use cavern_proto::master::{ClientRule, Mount, MountTable};
    use cavern_security::Role;

    use super::*;
    use crate::mounts::tests::no_master;

    fn rule(name: &str, read_only: bool) -> ClientRule {
        ClientRule { name: name.to_owned(), read_only, ..ClientRule::default() }
    }

    fn table(epoch: u64, rules: Vec<ClientRule>) -> MountTable {
        let mount = |id, clients| Mount { id, uri: format!("memory://rights-{id}"), clients, ..Mount::default() };
        MountTable { epoch, mounts: vec![mount(1, Vec::new()), mount(2, rules)], status: Vec::new() }
    }

    fn named(role: Role, name: &str) -> Peer {
        Peer::Known(Identity::new("c", role, name).unwrap())
    }

    /// In a cluster that the worker does not know the name of.
    fn of_file(mount_id: u32) -> BlockRef {
        BlockRef::of_inode("", 77, 1, 0, 64, mount_id)
    }

    fn query(mounts: &[u32]) -> QueryRequest {
        let block = |mount_id: &u32| of_file(*mount_id);
        QueryRequest { blocks: mounts.iter().map(block).collect(), held: None }
    }

    fn write(mount_id: u32) -> WriteRequest {
        WriteRequest { block: Some(of_file(mount_id)), ..WriteRequest::default() }
    }

    fn open(mount_id: u32, key: &str, store: &str) -> OpenRequest {
        let content_id = ContentId::of_object(store, key, "e", 5, 8).as_bytes().to_vec().into();
        let block = BlockRef {
            content_id,
            mount_id,
            key: key.into(),
            etag: "e".into(),
            object_length: 5,
            block_size: 8,
            ..BlockRef::default()
        };
        OpenRequest { items: vec![open_request::Item { block: Some(block), want: Vec::new() }], deadline_ms: 0 }
    }

    #[track_caller]
    fn refused(verdict: Verdict, status: Status, text: &str) {
        let Verdict::Refused(refusal) = verdict else { panic!("{verdict:?}") };
        assert_eq!(refusal.status, status);
        assert!(refusal.message.contains(text), "{refusal}");
    }

    #[tokio::test]
    async fn a_client_is_judged_by_the_rules_that_are_known_and_once_more_by_later_ones() {
        let mounts = Arc::new(Mounts::new(no_master(), schema::Ufs::default()));
        mounts.apply(table(1, vec![rule("reader", true), rule("writer", false)]));
        let rights = |peer: &Peer| BlockAccess::of(peer, mounts.clone(), Arc::default());
        let mut writer = rights(&named(Role::Client, "writer"));
        assert!(matches!(writer.check(&write(2)), Verdict::Allowed));
        let mut reader = rights(&named(Role::Client, "reader"));
        assert!(matches!(reader.check(&query(&[1, 2])), Verdict::Allowed));
        assert!(matches!(reader.check(&write(1)), Verdict::Allowed));
        assert!(matches!(reader.check(&write(2)), Verdict::Later));
        reader.renew().await;
        refused(reader.check(&write(2)), Status::PermissionDenied, "only read by the client \"reader\"");

        let mut stranger = rights(&named(Role::Client, "stranger"));
        assert!(matches!(stranger.check(&query(&[1, 2])), Verdict::Later));
        stranger.renew().await;
        refused(stranger.check(&query(&[1, 2])), Status::PermissionDenied, "mount 2 is not there for");
        refused(stranger.check(&query(&[3])), Status::UnknownMount, "mount 3 is not known");
        assert!(matches!(stranger.check(&query(&[1])), Verdict::Allowed));
        mounts.apply(table(2, vec![rule("stranger", false)]));
        assert!(matches!(stranger.check(&write(2)), Verdict::Allowed));
        refused(reader.check(&query(&[2])), Status::PermissionDenied, "not there for");
    }

    #[tokio::test]
    async fn blocks_of_files_are_those_of_the_mount() {
        let mounts = Arc::new(Mounts::new(no_master(), schema::Ufs::default()));
        mounts.apply(table(1, vec![rule("somebody-else", false)]));
        let mut rights = BlockAccess::of(&named(Role::Client, "writer"), mounts, Arc::default());
        rights.renew().await;
        assert!(matches!(rights.check(&write(1)), Verdict::Allowed));
        // Those of another mount, said to be of one's own.
        let squatted = BlockRef { mount_id: 1, ..of_file(2) };
        let request = WriteRequest { block: Some(squatted.clone()), ..WriteRequest::default() };
        refused(rights.check(&request), Status::BadRequest, "not that of the file");
        let request = QueryRequest { blocks: vec![squatted], held: None };
        refused(rights.check(&request), Status::BadRequest, "not that of the file");
    }

    #[tokio::test]
    async fn objects_are_those_of_the_mount() {
        let mounts = Arc::new(Mounts::new(no_master(), schema::Ufs::default()));
        let mount = Mount { id: 1, uri: "memory://rights/a".into(), ..Mount::default() };
        mounts.apply(MountTable { epoch: 1, mounts: vec![mount], status: Vec::new() });
        let store = mounts.ufs(1).await.unwrap().store_id().to_owned();
        let mut rights = BlockAccess::of(&named(Role::Client, "reader"), mounts, Arc::default());
        rights.renew().await;
        assert!(matches!(rights.check(&open(1, "a/k", &store)), Verdict::Allowed));
        refused(rights.check(&open(1, "b/k", &store)), Status::PermissionDenied, "\"b/k\" is not within \"a/\"");
        refused(rights.check(&open(1, "a/k", "another")), Status::BadRequest, "not that of the key");
        // Under the name of one of its own objects.
        let mut disguised = open(1, "b/k", &store);
        disguised.items[0].block.as_mut().unwrap().key = "a/k".into();
        refused(rights.check(&disguised), Status::BadRequest, "not that of the key");
    }

    #[tokio::test]
    async fn of_a_mount_that_cannot_be_opened_no_object_is_anybodys() {
        let mounts = Arc::new(Mounts::new(no_master(), schema::Ufs::default()));
        let mount = Mount { id: 1, uri: "nothing://rights".into(), ..Mount::default() };
        mounts.apply(MountTable { epoch: 1, mounts: vec![mount], status: Vec::new() });
        let mut rights = BlockAccess::of(&named(Role::Client, "reader"), mounts, Arc::default());
        rights.renew().await;
        let another = open(1, "a/k", "memory://another");
        refused(rights.check(&another), Status::UnknownMount, "mount 1 is not usable by this worker");
        assert!(matches!(rights.check(&write(1)), Verdict::Allowed), "files are known by their names");
    }

    #[tokio::test]
    async fn only_clients_are_judged() {
        let mounts = Arc::new(Mounts::new(no_master(), schema::Ufs::default()));
        mounts.apply(table(1, vec![rule("writer", false)]));
        let others = [Role::Master, Role::Worker, Role::Admin].map(|role| named(role, "stranger"));
        for peer in others.into_iter().chain([Peer::Anybody, Peer::SameHost]) {
            let mut rights = BlockAccess::of(&peer, mounts.clone(), Arc::default());
            assert!(rights.client().is_none() && matches!(rights.check(&write(2)), Verdict::Allowed), "{peer}");
        }
        assert!(BlockAccess::of(&named(Role::Client, "stranger"), mounts, Arc::default()).client().is_some());
    }
}

//! Mounts that are not there for all clients, as each of them is answered.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::cluster_server::Cluster;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::views_server::Views;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    AccessMode, CheckAccessRequest, CheckOpenRefsRequest, ClientRule, CreateInode, FreeContentRequest, FreedContent,
    GetInodeRequest, GetLayoutRequest, GetLockRequest, GetQuotasRequest, GetTtlsRequest, GetViewRequest,
    GetXattrsRequest, Kind, ListMountsRequest, ListViewsRequest, LocateBlocksRequest, Lock, LockKind, LockType,
    LookupRequest, MakeListedRequest, Mount, MountRequest, MutateRequest, Mutation, PersistStatusRequest,
    ReadDirRequest, RecallRequest, RefreshListingsRequest, RefreshRequest, ResolveRequest, RestoreWatchesRequest,
    RevalidateRequest, SetAttr, SetLock, SetQuota, SetTtl, TtlAction, UnmountRequest, UpdateMountRequest, UsageRequest,
    User, UserLimits, VendKeysRequest, View, WriteType,
};
use cavern_proto::record::{BeginView, FinishView, FreezeView};
use cavern_security::{Identity, RateCharge, Role, Tenant};
use cavern_work::WorkError;
use cavern_work::mounts::changes::DetachPolicy;
use cavern_work::namespace::Lookups;
use cavern_work::sessions::{Before, SessionStream, WatchHub};
use futures::StreamExt;
use rustix::io::Errno;
use tonic::{Code, Request, Response, Status};

use super::harness::{TestMaster, eventually, mount_request, name, new_bucket, session_before};
use super::mutations::{self, create};
use crate::service::Peer;

/// A call of somebody.
fn of<T>(role: Role, name: &str, message: T) -> Request<T> {
    let identity = Arc::new(OnceLock::from(Identity::new("c", role, name).unwrap()));
    let mut request = Request::new(message);
    request.extensions_mut().insert(Peer { secured: true, identity, ..Peer::default() });
    request
}

fn client<T>(name: &str, message: T) -> Request<T> {
    of(Role::Client, name, message)
}

fn rules(rules: &[(&str, bool)]) -> Vec<ClientRule> {
    rules
        .iter()
        .map(|(name, read_only)| ClientRule {
            name: (*name).to_owned(),
            read_only: *read_only,
            ..ClientRule::default()
        })
        .collect()
}

/// With `/open` in cache-mode for all, and `/m` in fs-mode for `a`, and for `r` to be read.
async fn master() -> (TestMaster, Mount) {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("f", "1");
    let open = master.mount("/open", &uri).await;
    // Its index would tell sessions of `f` at any later time.
    master.indexed(&open).await;
    let mount = mutations::mount(&master).await;
    assert_eq!(change(&master, "a", create(mount.root_inode, "f", Kind::File)).await, 0);
    let clients = cavern_proto::master::ClientRules { rules: rules(&[("a", false), ("r", true)]) };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    master.services().update_mount(of(Role::Admin, "x", update)).await.unwrap();
    (master, mount)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_changes_count_in_the_mount_that_they_are_about() {
    let (master, mount) = master().await;
    let services = master.services();
    let clients = cavern_proto::master::ClientRules {
        rules: vec![ClientRule { name: "a".into(), operations_per_second: 10, ..ClientRule::default() }],
    };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    services.update_mount(of(Role::Admin, "x", update)).await.unwrap();

    let tenants = crate::service::tenants(&cavern_conf::schema::Master::default());
    let tenant = |name: &str| tenants.admit(&Identity::new("c", Role::Client, name).unwrap()).unwrap().unwrap();
    let (a, b) = (tenant("a"), tenant("b"));
    let owes = async |path: &str| {
        let charge = Arc::new(RateCharge::of((*a).clone()));
        let mut resolve = client("a", ResolveRequest { path: path.into(), session: 0 });
        resolve.extensions_mut().insert(charge.clone());
        services.resolve(resolve).await.unwrap();
        charge.wait()
    };
    let changes = |count| {
        vec![Mutation { change: Some(create(mount.root_inode, "g", Kind::File)), ..Mutation::default() }; count]
    };
    let pace = async |tenant: &Tenant, changes: &[Mutation]| {
        let client = Some(tenant.identity().name.as_str().into());
        let lookups = Lookups { client, ..services.lookups.clone() };
        lookups.pace(tenant, changes).await.unwrap()
    };
    assert!(owes("/m").await.is_zero());
    assert!(pace(&a, &changes(40)).await.is_zero(), "who comes next waits");
    assert!(owes("/m/f").await > Duration::from_secs(2));
    assert!(pace(&a, &changes(1)).await > Duration::from_secs(2));
    assert_eq!((owes("/open/f").await, owes("/").await), Default::default());
    let hold = Mutation { change: Some(Change::AddOpenRef(mount.root_inode)), ..Mutation::default() };
    assert!(pace(&a, &[hold]).await.is_zero());
    assert!(pace(&b, &changes(100)).await.is_zero() && pace(&b, &changes(1)).await.is_zero());

    let before = Instant::now();
    let listed = {
        let mut request = client("a", ReadDirRequest { inode: mount.root_inode, ..ReadDirRequest::default() });
        request.extensions_mut().get_mut::<Peer>().unwrap().tenant = Arc::new(OnceLock::from(Ok(tenant("a"))));
        services.read_dir(request).await.unwrap().into_inner().next().await.unwrap().unwrap()
    };
    assert!(!listed.entries.is_empty() && before.elapsed() > Duration::from_secs(2), "a page waits as well");
}

#[tokio::test(flavor = "multi_thread")]
async fn few_walks_of_a_client_are_made_at_a_time() {
    let (master, mount) = master().await;
    let services = master.services();
    let tenants = crate::service::tenants(&cavern_conf::schema::Master::default());
    let tenant = |name: &str| tenants.admit(&Identity::new("c", Role::Client, name).unwrap()).unwrap().unwrap();
    let (a, b) = (tenant("a"), tenant("r"));
    let by = |name: &str, message: UsageRequest| {
        let mut request = client(name, message);
        request.extensions_mut().get_mut::<Peer>().unwrap().tenant = Arc::new(OnceLock::from(Ok(tenant(name))));
        request
    };
    let whole = || UsageRequest { path: "/m".into() };
    let walks = a.walks.clone();
    let all = walks.acquire_many(u32::try_from(walks.available_permits()).unwrap()).await.unwrap();
    let mut waits = services.usage(by("a", whole())).await.unwrap().into_inner();
    assert!(tokio::time::timeout(Duration::from_millis(200), waits.next()).await.is_err(), "it has no turn");
    let mut other = services.usage(by("r", whole())).await.unwrap().into_inner();
    assert!(other.next().await.unwrap().unwrap().done, "others have turns of their own");
    // A change that waits for the names of a directory is told to ask again.
    let mut listed = client("a", MakeListedRequest { inode: mount.root_inode, recursive: true });
    listed.extensions_mut().get_mut::<Peer>().unwrap().tenant = Arc::new(OnceLock::from(Ok(tenant("a"))));
    assert!(!services.make_listed(listed).await.unwrap().into_inner().done);
    drop(all);
    assert!(waits.next().await.unwrap().unwrap().done);
    drop(b);
    master.stop().await;
}

async fn names_in(master: &TestMaster, client_name: &str, inode: u64) -> Result<Vec<Bytes>, Status> {
    let request = ReadDirRequest { inode, ..ReadDirRequest::default() };
    let mut pages = master.services().read_dir(client(client_name, request)).await?.into_inner();
    let mut names = Vec::new();
    while let Some(page) = pages.next().await {
        names.extend(page?.entries.into_iter().map(|entry| entry.name));
    }
    Ok(names)
}

/// Records views, of these mounts and in the buckets of these, as if they had been made. Gives their ids.
async fn record_views(master: &TestMaster, mounts: &[(u32, u32)]) -> Vec<u32> {
    let (proposer, mut ids) = (&master.services().proposer, Vec::new());
    for ((mount_id, store_mount_id), number) in mounts.iter().copied().zip(1..) {
        let view = View { name: format!("v{number}"), mount_id, store_mount_id, ..View::default() };
        let view = *proposer.propose(BeginView { view: Some(view) }).await.unwrap().unwrap();
        // That of a cache-mode mount is not frozen.
        for settled in [false, true] {
            let _ = proposer.propose(FreezeView { id: view.id, settled }).await.unwrap();
        }
        ids.push(view.id);
        proposer.propose(FinishView { view: Some(view) }).await.unwrap().unwrap();
    }
    ids
}

async fn views_of(master: &TestMaster, name: &str) -> Vec<String> {
    let listed = master.services().list_views(client(name, ListViewsRequest {})).await.unwrap().into_inner();
    listed.views.into_iter().map(|view| view.name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_there_for_whom_its_mounts_are_and_limit_no_users() {
    let (master, mount) = master().await;
    let open = master.services().lookups.resolve("/open").await.unwrap().mount_id;
    record_views(&master, &[(open, open), (mount.id, open), (open, mount.id)]).await;
    assert_eq!((views_of(&master, "a").await, views_of(&master, "r").await), (all_views(), all_views()));
    assert_eq!(views_of(&master, "b").await, ["v1"]);
    let limits = Some(UserLimits { root_squash: true, ..UserLimits::default() });
    let limited = ClientRule { name: "a".into(), users: limits, ..ClientRule::default() };
    let clients = cavern_proto::master::ClientRules { rules: [vec![limited], rules(&[("r", true)])].concat() };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    master.services().update_mount(of(Role::Admin, "x", update)).await.unwrap();
    assert_eq!((views_of(&master, "a").await, views_of(&master, "r").await), (vec!["v1".to_owned()], all_views()));
    let admin = master.services().list_views(of(Role::Admin, "x", ListViewsRequest {})).await.unwrap().into_inner();
    assert_eq!(admin.views.len(), 3);
    master.stop().await;
}

fn all_views() -> Vec<String> {
    ["v1", "v2", "v3"].map(str::to_owned).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_is_not_there_for_a_client_is_not_there_in_any_call() {
    let (master, mount) = master().await;
    let services = master.services();
    let root = mount.root_inode;
    let file = services.lookups.resolve("/m/f").await.unwrap().attr.unwrap().inode;
    let asked = RefCell::new(BTreeSet::new());
    let is_asked = |what: &str| {
        asked.borrow_mut().insert(what.split(' ').next().unwrap_or_default().to_owned());
    };
    let not_found = |what: &str, answered: Option<Status>| {
        is_asked(what);
        let status = answered.unwrap_or_else(|| panic!("{what} was answered"));
        assert_eq!(status.code(), Code::NotFound, "{what}: {status}");
    };
    for inode in [root, file] {
        let of = |what| format!("{what} of {inode}");
        let path = if inode == root { "/m" } else { "/m/f" };
        let resolve = ResolveRequest { path: path.into(), session: 0 };
        not_found(&of("Resolve"), services.resolve(client("b", resolve)).await.err());
        let get = GetInodeRequest { inode, session: 0 };
        not_found(&of("GetInode"), services.get_inode(client("b", get)).await.err());
        not_found(&of("ReadDir"), names_in(&master, "b", inode).await.err());
        let layout = GetLayoutRequest { inode, ..GetLayoutRequest::default() };
        not_found(&of("GetLayout"), services.get_layout(client("b", layout)).await.err());
        let xattrs = GetXattrsRequest { inode, session: 0 };
        not_found(&of("GetXattrs"), services.get_xattrs(client("b", xattrs)).await.err());
        let access = CheckAccessRequest { inode, wanted: 4, ..CheckAccessRequest::default() };
        not_found(&of("CheckAccess"), services.check_access(client("b", access)).await.err());
        let free = FreeContentRequest { inodes: vec![inode], session: 0 };
        let freed = services.free_content(client("b", free)).await.unwrap().into_inner();
        assert_eq!(freed.results, [FreedContent::default()]);
        let lock = GetLockRequest { inode, kind: LockKind::Flock as i32, lock: Some(Lock::default()) };
        not_found(&of("GetLock"), services.get_lock(client("b", lock)).await.err());
        let listed = MakeListedRequest { inode, recursive: false };
        not_found(&of("MakeListed"), services.make_listed(client("b", listed)).await.err());
        let recall = RecallRequest { inode, whole_mount: true, ..RecallRequest::default() };
        not_found(&of("Recall"), services.recall(client("b", recall)).await.err());
        not_found(&of("GetTtls"), services.get_ttls(client("b", GetTtlsRequest { inode })).await.err());
        not_found(&of("GetQuotas"), services.get_quotas(client("b", GetQuotasRequest { inode })).await.err());
        let refresh = RefreshRequest { path: path.into(), ..RefreshRequest::default() };
        not_found(&of("Refresh"), services.refresh(client("b", refresh)).await.err());
        let status = PersistStatusRequest { path: path.into(), ..PersistStatusRequest::default() };
        not_found(&of("GetPersistStatus"), services.get_persist_status(client("b", status)).await.err());
        let usage = UsageRequest { path: path.into() };
        let mut usage = services.usage(client("b", usage)).await.unwrap().into_inner();
        not_found(&of("Usage"), usage.next().await.unwrap().err());
        let touch = RefreshListingsRequest { directories: vec![inode], ..RefreshListingsRequest::default() };
        let touched = services.refresh_listings(client("b", touch)).await.unwrap().into_inner();
        assert!(touched.directories[0].gone);
        let holds = CheckOpenRefsRequest { session: 0, open: vec![inode], referenced: vec![] };
        let holds = services.check_open_refs(client("b", holds)).await.unwrap().into_inner();
        assert_eq!((holds.missing, holds.gone), (vec![], vec![inode]));
        let remember =
            RestoreWatchesRequest { inodes: vec![inode], directories: vec![inode], ..RestoreWatchesRequest::default() };
        services.restore_watches(client("b", remember)).await.unwrap();
        ["RefreshListings", "CheckOpenRefs", "RestoreWatches", "FreeContent"].into_iter().for_each(is_asked);
        let removal = Change::SetAttr(SetAttr { inode, mode: Some(0o700), ..SetAttr::default() });
        assert_eq!(change(&master, "b", removal).await, Errno::STALE.raw_os_error());
        is_asked("Mutate");
    }
    for (parent, text) in [(root, "f"), (ROOT_INODE, "m")] {
        let lookup = LookupRequest { parent, name: name(text), session: 0 };
        not_found("Lookup", services.lookup(client("b", lookup)).await.err());
    }
    let revalidate = RevalidateRequest { parent: root, name: name("f"), ..RevalidateRequest::default() };
    not_found("Revalidate", services.revalidate(client("b", revalidate)).await.err());
    let keys = VendKeysRequest { mount_id: mount.id, to_write: false };
    not_found("VendKeys", services.vend_keys(client("b", keys)).await.err());
    assert_eq!(names_in(&master, "b", ROOT_INODE).await.unwrap(), [name("open")]);
    let usage = async |path: &str| {
        let usage = services.usage(client("b", UsageRequest { path: path.into() })).await.unwrap();
        usage.into_inner().next().await.unwrap().unwrap_err()
    };
    assert_eq!(usage("/").await.code(), Code::PermissionDenied);
    // Nobody tells a path of the mount from one that leads nowhere.
    let (hidden, nowhere) = (usage("/m").await, usage("/elsewhere").await);
    assert_eq!(hidden.message().replace("/m", "/elsewhere"), nowhere.message());
    assert_eq!((hidden.code(), nowhere.code()), (Code::NotFound, Code::NotFound));
    let all = GetQuotasRequest { inode: 0 };
    assert_eq!(services.get_quotas(client("b", all)).await.unwrap_err().code(), Code::PermissionDenied);
    for table in [
        services.list_mounts(client("b", ListMountsRequest {})).await.unwrap().into_inner(),
        services.get_credentials(client("b", ListMountsRequest {})).await.unwrap().into_inner(),
    ] {
        assert_eq!(table.mounts.iter().map(|mount| mount.path.as_str()).collect::<Vec<_>>(), ["/open"]);
        assert!(table.status.iter().all(|status| status.mount_id != mount.id));
    }
    let id = record_views(&master, &[(mount.id, mount.id)]).await[0];
    let wanted = |name: &str, id| GetViewRequest { name: name.to_owned(), id };
    not_found("GetView", services.get_view(client("b", wanted("v1", 0))).await.err());
    not_found("GetView by id", services.get_view(client("b", wanted("", id))).await.err());
    let locate = LocateBlocksRequest { view: id, inode: file, prefetch: Vec::new() };
    not_found("LocateBlocks", services.locate_blocks(client("b", locate.clone())).await.err());
    assert!(views_of(&master, "b").await.is_empty());
    assert_eq!(views_of(&master, "r").await, ["v1"]);
    assert!(services.locate_blocks(client("r", locate)).await.unwrap().into_inner().files.is_empty());
    ["ListMounts", "GetCredentials", "ListViews"].into_iter().for_each(is_asked);
    // These are all that are said to be checked so.
    let by_mount =
        crate::service::documented().into_iter().filter(|row| row[2] == "mount").map(|row| row[0].to_owned());
    assert_eq!(*asked.borrow(), by_mount.collect::<BTreeSet<_>>());
    // Those who may see it do, as does whoever runs the cluster.
    for request in [client("a", ()), client("r", ()), of(Role::Admin, "b", ())] {
        let resolve = request.extensions().clone();
        let mut asked = Request::new(ResolveRequest { path: "/m/f".into(), session: 0 });
        *asked.extensions_mut() = resolve;
        assert_eq!(services.resolve(asked).await.unwrap().into_inner().attr.unwrap().inode, file);
    }
    assert_eq!(names_in(&master, "r", ROOT_INODE).await.unwrap(), [name("m"), name("open")]);
    master.stop().await;
}

/// A text in which something else stands for a number.
fn without(number: u64, text: &str) -> String {
    let number = number.to_string();
    let pieces = text.split_inclusive(|c: char| !c.is_ascii_digit()).map(|piece| match piece.strip_prefix(&number) {
        Some(end) if !end.starts_with(|c: char| c.is_ascii_digit()) => format!("N{end}"),
        _ => piece.to_owned(),
    });
    pieces.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inode_in_a_mount_that_is_not_there_is_answered_as_one_that_is_nowhere() {
    let (master, mount) = master().await;
    let services = master.services();
    let file = services.lookups.resolve("/m/f").await.unwrap().attr.unwrap().inode;
    let own = services.lookups.resolve("/open/f").await.unwrap().attr.unwrap().inode;
    // What a client is answered about an inode, but for its number.
    let answers = async |inode: u64| {
        let mut answers = Vec::new();
        macro_rules! ask {
            ($call:ident, $message:expr) => {
                ask!($call, $message, |answer| format!("{answer:?}"));
            };
            ($call:ident, $message:expr, $shown:expr) => {
                let answer = services.$call(client("b", $message)).await.map(Response::into_inner).map($shown);
                let answer = answer.map_err(|status| (status.code(), status.message().to_owned()));
                answers.push(without(inode, &format!("{}: {answer:?}", stringify!($call))));
            };
        }
        ask!(get_inode, GetInodeRequest { inode, session: 0 });
        ask!(get_layout, GetLayoutRequest { inode, ..GetLayoutRequest::default() });
        let beside = GetLayoutRequest { inode: own, prefetch: vec![own, inode], ..GetLayoutRequest::default() };
        ask!(get_layout, beside, |layout| layout.prefetch.len().to_string());
        ask!(get_xattrs, GetXattrsRequest { inode, session: 0 });
        ask!(check_access, CheckAccessRequest { inode, wanted: 4, ..CheckAccessRequest::default() });
        ask!(free_content, FreeContentRequest { inodes: vec![inode], session: 0 });
        ask!(get_lock, GetLockRequest { inode, kind: LockKind::Flock as i32, lock: Some(Lock::default()) });
        ask!(make_listed, MakeListedRequest { inode, recursive: false });
        ask!(recall, RecallRequest { inode, ..RecallRequest::default() });
        ask!(recall, RecallRequest { inode, whole_mount: true, ..RecallRequest::default() });
        ask!(get_ttls, GetTtlsRequest { inode });
        ask!(get_quotas, GetQuotasRequest { inode });
        let touch = RefreshListingsRequest { directories: vec![inode], ..RefreshListingsRequest::default() };
        ask!(refresh_listings, touch, |touched| format!("{:?}", touched.directories));
        ask!(check_open_refs, CheckOpenRefsRequest { session: 0, open: vec![inode], referenced: vec![inode] });
        ask!(lookup, LookupRequest { parent: inode, name: name("f"), session: 0 });
        ask!(revalidate, RevalidateRequest { parent: inode, name: name("f"), ..RevalidateRequest::default() });
        answers.push(format!("{:?}", names_in(&master, "b", inode).await.map_err(|status| status.code())));
        let hold = change(&master, "b", Change::AddOpenRef(inode)).await;
        let made = change(&master, "b", create(inode, "g", Kind::File)).await;
        answers.push(format!("{hold} {made}"));
        answers
    };
    let nowhere = answers(1 << 40).await;
    for hidden in [file, mount.root_inode] {
        assert_eq!(answers(hidden).await, nowhere);
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_only_reads_has_nobody_let_go_of_what_he_holds() {
    let (master, mount) = master().await;
    let services = master.services();
    // The rules of the mount were changed a moment ago.
    eventually(async || services.lookups.recalls.allow_delegations(None)).await;
    let (parent, kind) = (mount.root_inode, Kind::Directory as i32);
    let made = CreateInode { parent, name: name("held"), kind, mode: 0o755, delegate: true, ..CreateInode::default() };
    assert_eq!(change(&master, "a", Change::Create(made)).await, 0);
    assert!(!services.watch.delegations().is_empty());
    let dry = RefreshRequest { path: "/m".into(), recursive: true, dry_run: true };
    let mut progress = services.refresh(client("r", dry)).await.unwrap().into_inner();
    while let Some(progress) = progress.next().await {
        progress.unwrap();
    }
    let status = PersistStatusRequest { path: "/m".into(), settle: true, ..PersistStatusRequest::default() };
    services.get_persist_status(client("r", status)).await.unwrap();
    let mut usage = services.usage(client("r", UsageRequest { path: "/m".into() })).await.unwrap().into_inner();
    while let Some(usage) = usage.next().await {
        usage.unwrap();
    }
    assert!(!services.watch.delegations().is_empty());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_mount_is_recalled_seldom_and_for_who_sets_what_is_about_all_of_it() {
    let (master, mount) = master().await;
    let services = master.services();
    let whole = || RecallRequest { inode: mount.root_inode, whole_mount: true, ..RecallRequest::default() };
    let refused = services.recall(client("a", whole())).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("the option quotas or ttl"), "{refused}");
    services.recall(of(Role::Admin, "x", whole())).await.unwrap();
    let rule = ClientRule { name: "a".into(), sets_ttls: true, ..ClientRule::default() };
    let clients = cavern_proto::master::ClientRules { rules: vec![rule] };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    services.update_mount(of(Role::Admin, "x", update)).await.unwrap();

    let tenants = crate::service::tenants(&cavern_conf::schema::Master::default());
    let tenant = tenants.admit(&Identity::new("c", Role::Client, "a").unwrap()).unwrap().unwrap();
    let asked = || {
        let mut request = client("a", whole());
        request.extensions_mut().insert(Arc::new(RateCharge::of((*tenant).clone())));
        request
    };
    // As if it had asked for that again and again.
    tenant.seconds.take(60);
    services.recall(asked()).await.unwrap();
    eventually(async || services.lookups.recalls.allow_delegations(None)).await;
    let (parent, kind) = (mount.root_inode, Kind::Directory as i32);
    let made = CreateInode { parent, name: name("held"), kind, mode: 0o755, delegate: true, ..CreateInode::default() };
    assert_eq!(change(&master, "a", Change::Create(made)).await, 0);
    assert!(!services.watch.delegations().is_empty());
    let refused = services.recall(asked()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("once in 10 seconds") && !services.watch.delegations().is_empty(), "{refused}");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_is_held_nobody_is_kept_from_holding_something_for_a_whole_mount() {
    let (master, mount) = master().await;
    let services = master.services();
    let whole = |inode| RecallRequest { inode, whole_mount: true, ..RecallRequest::default() };
    // The rules of the mount were changed a moment ago.
    eventually(async || services.lookups.recalls.allow_delegations(None)).await;
    services.recall(client("r", whole(ROOT_INODE))).await.unwrap();
    services.recall(of(Role::Admin, "x", whole(mount.root_inode))).await.unwrap();
    assert!(services.lookups.recalls.allow_delegations(None));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wish_is_judged_where_its_client_may_come_to_hold_a_directory() {
    let (master, mount) = master().await;
    let services = master.services();
    let open = services.mounts.all_recorded().unwrap().into_iter().find(|mount| mount.path == "/open").unwrap();
    let judged = async |name: Option<&str>, directory: u64| {
        let lookups = Lookups { client: name.map(Into::into), ..services.lookups.clone() };
        lookups.check_wish(directory).await
    };
    judged(Some("a"), mount.root_inode).await.unwrap();
    judged(None, mount.root_inode).await.unwrap();
    let refused = judged(Some("r"), mount.root_inode).await;
    assert!(matches!(refused, Err(WorkError::Denied(_))), "{refused:?}");
    let cached = judged(Some("a"), open.root_inode).await;
    assert!(matches!(cached, Err(WorkError::Refused(_))), "{cached:?}");
    for (name, directory) in [(Some("b"), mount.root_inode), (Some("a"), ROOT_INODE), (None, 1 << 40)] {
        let nowhere = judged(name, directory).await.unwrap_err();
        assert!(nowhere.is_not_found(), "{name:?} {directory}: {nowhere}");
    }
    let limits = UserLimits { root_squash: true, ..UserLimits::default() };
    let rules = vec![ClientRule { name: "a".into(), users: Some(limits), ..ClientRule::default() }];
    let clients = cavern_proto::master::ClientRules { rules };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    services.update_mount(of(Role::Admin, "x", update)).await.unwrap();
    let limited = judged(Some("a"), mount.root_inode).await;
    assert!(matches!(limited, Err(WorkError::Refused(_))), "{limited:?}");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_of_a_mount_that_is_gone_keeps_nobody_from_the_rest() {
    let (master, mount) = master().await;
    let services = master.services();
    let gone = services.lookups.resolve("/open").await.unwrap().attr.unwrap().inode;
    services.unmount_bucket("/open", DetachPolicy::Keep).await.unwrap();
    let both = vec![gone, mount.root_inode];
    let touch = RefreshListingsRequest { directories: both.clone(), ..RefreshListingsRequest::default() };
    let touched = services.refresh_listings(client("a", touch)).await.unwrap().into_inner().directories;
    assert!(touched[0].gone && !touched[1].gone, "{touched:?}");
    let holds = CheckOpenRefsRequest { session: 0, open: both.clone(), referenced: vec![] };
    let holds = services.check_open_refs(client("a", holds)).await.unwrap().into_inner();
    assert_eq!(holds.gone, [gone]);
    let remember =
        RestoreWatchesRequest { inodes: both.clone(), directories: both, ..RestoreWatchesRequest::default() };
    services.restore_watches(client("a", remember)).await.unwrap();
    master.stop().await;
}

/// A change of a client, in a session of its own; what it was answered.
async fn change(master: &TestMaster, client_name: &str, change: Change) -> i32 {
    let services = master.services();
    let identity = Identity::new("c", Role::Client, client_name).unwrap();
    let before = Before { owner: Some(&identity), ..Before::default() };
    let session = services.watch.open(client_name, before).unwrap();
    let mutations = vec![Mutation { seq: 1, change: Some(change), ..Mutation::default() }];
    let call = MutateRequest { session: session.id(), mutations, answered: 0 };
    let asker = (services.client(Some(&identity)), Some(&identity));
    let made = services.begin_changes(call, asker, None).await.unwrap().await.unwrap();
    made.results[0].errno
}

#[tokio::test(flavor = "multi_thread")]
async fn only_whoever_may_changes_a_mount_and_whoever_reads_may_lock() {
    let (master, mount) = master().await;
    let root = mount.root_inode;
    let file = master.services().lookups.resolve("/m/f").await.unwrap().attr.unwrap().inode;
    let before = master.tree("/m").await;
    for (name, errno) in [("b", Errno::STALE), ("r", Errno::ROFS)] {
        assert_eq!(change(&master, name, create(root, "g", Kind::File)).await, errno.raw_os_error(), "{name}");
    }
    let lock = |inode| {
        let lock = Lock { owner: 1, r#type: LockType::Shared as i32, end: u64::MAX, ..Lock::default() };
        Change::SetLock(SetLock { inode, kind: LockKind::Flock as i32, lock: Some(lock), ..SetLock::default() })
    };
    assert_eq!(change(&master, "b", lock(file)).await, Errno::STALE.raw_os_error());
    assert_eq!(change(&master, "b", Change::AddOpenRef(file)).await, Errno::STALE.raw_os_error());
    assert_eq!(master.tree("/m").await, before);
    assert_eq!(change(&master, "r", lock(file)).await, 0);
    assert_eq!(change(&master, "r", Change::AddOpenRef(file)).await, 0);
    assert_eq!(change(&master, "a", create(root, "g", Kind::File)).await, 0);
    assert_eq!(master.tree("/m").await.len(), before.len() + 1);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_mount_that_it_could_change_puts_nothing_into_the_log() {
    let (master, mount) = master().await;
    let services = master.services();
    let sessions = async || services.lookups.reader.read(|tables| Ok(tables.session_ids()?)).await.unwrap().len();
    let before = sessions().await;
    for asked in
        [create(mount.root_inode, "g", Kind::File), Change::AddOpenRef(mount.root_inode), Change::DropOpenRef(7)]
    {
        assert_eq!(change(&master, "b", asked).await, Errno::STALE.raw_os_error());
    }
    assert_eq!(sessions().await, before, "no session is recorded, and no result kept");
    // Whoever may read a mount has locks there.
    assert_eq!(change(&master, "r", Change::AddOpenRef(mount.root_inode)).await, 0);
    assert_eq!(sessions().await, before + 1);
    master.stop().await;
}

fn open_as(master: &TestMaster, owner: &Identity, session: u64) -> Result<SessionStream, WorkError> {
    let before = Before { owner: Some(owner), ..session_before(session, session != 0) };
    master.services().watch.open("x", before)
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_takes_up_the_session_of_another_client_on_a_master_that_has_not_seen_it_yet() {
    let (master, _) = master().await;
    let file = master.services().lookups.resolve("/m/f").await.unwrap().attr.unwrap().inode;
    let [own, other] = ["a", "r"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let admin = Identity::new("c", Role::Admin, "x").unwrap();
    let session = open_as(&master, &own, 0).unwrap();
    let id = session.id();
    let lock = Lock { owner: 7, pid: 42, r#type: LockType::Exclusive as i32, end: u64::MAX, ..Lock::default() };
    let set = SetLock { inode: file, kind: LockKind::Flock as i32, lock: Some(lock), ..SetLock::default() };
    let mutations = vec![Mutation { seq: 1, change: Some(Change::SetLock(set)), ..Mutation::default() }];
    let call = MutateRequest { session: id, mutations, answered: 0 };
    let asker = (master.services().client(Some(&own)), Some(&own));
    let made = master.services().begin_changes(call, asker, None).await.unwrap().await.unwrap();
    assert_eq!(made.results[0].errno, 0, "{made:?}");
    // Nobody is told which session that is.
    let asked = GetLockRequest { inode: file, kind: LockKind::Flock as i32, lock: Some(lock) };
    let found = master.services().get_lock(client("r", asked)).await.unwrap().into_inner().lock.unwrap();
    assert_eq!((found.session, found.owner, found.pid, found.r#type()), (0, 0, 0, LockType::Exclusive));
    let stranger = open_as(&master, &other, 0).unwrap();
    let mutations = vec![Mutation { seq: 1, change: Some(Change::SetLock(set)), ..Mutation::default() }];
    let call = MutateRequest { session: stranger.id(), mutations, answered: 0 };
    let asker = (master.services().client(Some(&other)), Some(&other));
    let refused = master.services().begin_changes(call, asker, None).await.unwrap().await.unwrap();
    assert_eq!(refused.results[0].errno, Errno::AGAIN.raw_os_error());
    assert!(!refused.results[0].reason.contains(&id.to_string()), "{refused:?}");
    drop((session, stranger));

    let master = master.restart().await;
    let denied = |asked: Result<(), WorkError>| assert!(matches!(asked, Err(WorkError::Denied(_))), "{asked:?}");
    denied(open_as(&master, &other, id).map(drop));
    denied(master.services().watch.check_owner(id, Some(&other)));
    let recall = RecallRequest { inode: file, whole_mount: false, session: id };
    let refused = master.services().recall(client("r", recall)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    // Whoever runs the cluster does, and does not become its owner.
    let taken_up = open_as(&master, &admin, id).unwrap();
    assert_eq!(taken_up.id(), id);
    drop(taken_up);
    denied(open_as(&master, &other, id).map(drop));
    let back = open_as(&master, &own, id).unwrap();
    assert_eq!(back.id(), id);
    drop(back);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_no_rule_lets_set_quotas_does_not_also_where_there_are_no_rules() {
    let master = TestMaster::new().await;
    let mount = mutations::mount(&master).await;
    let quota = || Change::SetQuota(SetQuota { inode: mount.root_inode, max_bytes: Some(0), max_inodes: Some(9) });
    assert!(master.services().client(Some(&Identity::new("c", Role::Client, "a").unwrap())).is_none());
    assert_eq!(change(&master, "a", quota()).await, Errno::PERM.raw_os_error());
    assert_eq!(change(&master, "a", create(mount.root_inode, "f", Kind::File)).await, 0, "all else goes on");
    let with_quotas = ClientRule { name: "a".into(), sets_quotas: true, ..ClientRule::default() };
    let clients = cavern_proto::master::ClientRules { rules: vec![with_quotas] };
    let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
    master.services().update_mount(of(Role::Admin, "x", update)).await.unwrap();
    assert_eq!(change(&master, "a", quota()).await, 0);
    let ttl = SetTtl { inode: mount.root_inode, seconds: 9, action: TtlAction::Delete as i32 };
    assert_eq!(change(&master, "a", Change::SetTtl(ttl)).await, Errno::PERM.raw_os_error());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_whose_users_are_limited_reads_what_the_user_may() {
    let (master, mount) = master().await;
    let services = master.services();
    let file = services.lookups.resolve("/m/f").await.unwrap().attr.unwrap().inode;
    let is = |inode, uid, mode| {
        Change::SetAttr(SetAttr { inode, uid: Some(uid), gid: Some(uid), mode: Some(mode), ..SetAttr::default() })
    };
    assert_eq!(change(&master, "a", is(file, 1000, 0o640)).await, 0);
    let users = Some(UserLimits { root_squash: true, ..UserLimits::default() });
    let limiting =
        |read_only| vec![ClientRule { name: "a".into(), read_only, users: users.clone(), ..ClientRule::default() }];
    let update = |rules| {
        let clients = Some(cavern_proto::master::ClientRules { rules });
        UpdateMountRequest { path: "/m".into(), clients, ..UpdateMountRequest::default() }
    };
    services.update_mount(of(Role::Admin, "x", update(limiting(false)))).await.unwrap();
    for (anon_uid, anon_gid) in [(Some(0), None), (None, Some(0))] {
        let users = Some(UserLimits { all_squash: true, anon_uid, anon_gid, ..UserLimits::default() });
        let rules = vec![ClientRule { name: "a".into(), users, ..ClientRule::default() }];
        let refused = services.update_mount(of(Role::Admin, "x", update(rules))).await.unwrap_err();
        assert!(refused.code() == Code::InvalidArgument && refused.message().contains("nobody is root"), "{refused}");
    }
    let user = |uid, groups: &[u32]| Some(User { uid, gid: uid, groups: groups.to_vec() });
    let check = async |who: &str, inode, user: Option<User>, expected: bool| {
        let access = CheckAccessRequest { inode, user: user.clone(), wanted: 4, session: 0 };
        let access = services.check_access(client(who, access)).await.unwrap().into_inner();
        assert_eq!(access.allowed, expected, "{user:?} of {who}");
        let layout = GetLayoutRequest { inode, user: user.clone(), ..GetLayoutRequest::default() };
        match services.get_layout(client(who, layout)).await {
            Ok(_) => assert!(expected, "{user:?} of {who}"),
            Err(refused) => assert!(refused.code() == Code::PermissionDenied && !expected, "{user:?}: {refused}"),
        }
    };
    for (user, expected) in [
        (user(1000, &[]), true),
        (user(2000, &[1000]), true),
        (user(2000, &[]), false),
        (user(0, &[1000]), false),
        (None, false),
    ] {
        check("a", file, user, expected).await;
    }
    // What is beside another file is told of to no more.
    let beside = async |user| {
        let layout = GetLayoutRequest { inode: file, user, prefetch: vec![file], ..GetLayoutRequest::default() };
        services.get_layout(client("a", layout)).await.map(|layout| layout.into_inner().prefetch.len())
    };
    assert_eq!(beside(user(1000, &[])).await.unwrap(), 1);
    // The directory above must let the user through as well.
    services.update_mount(of(Role::Admin, "x", update(rules(&[("a", false)])))).await.unwrap();
    assert_eq!(change(&master, "a", is(mount.root_inode, 3000, 0o700)).await, 0);
    assert_eq!(change(&master, "a", is(file, 1000, 0o644)).await, 0);
    check("a", file, None, true).await;
    services.update_mount(of(Role::Admin, "x", update(limiting(true)))).await.unwrap();
    check("a", file, user(1000, &[]), false).await;
    check("a", file, user(3000, &[]), true).await;
    check("a", file, None, false).await;
    // The client is told of its own limits, and gets no keys.
    let table = services.get_credentials(client("a", ListMountsRequest {})).await.unwrap().into_inner();
    let seen = table.mounts.into_iter().find(|mount| mount.path == "/m").unwrap();
    assert_eq!((seen.access_mode(), seen.users), (AccessMode::ReadOnly, users.clone()));
    let recorded = services.list_mounts(of(Role::Admin, "x", ListMountsRequest {})).await.unwrap().into_inner();
    assert!(recorded.mounts.iter().all(|mount| mount.users.is_none()), "it is not recorded");
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_client_is_shown_the_mount_as_it_is_for_it_and_none_the_rules() {
    let master = TestMaster::new().await;
    let (_, uri) = new_bucket();
    let wanted = Mount {
        access_mode: AccessMode::ReadWrite as i32,
        clients: rules(&[("r", true), ("*", false)]),
        ..mount_request("/c", &uri)
    };
    let request = MountRequest { mount: Some(wanted), ..MountRequest::default() };
    let services = master.services();
    // Without names there is nobody whom the rules could be about.
    let refused = services.mount(Request::new(request.clone())).await.unwrap_err();
    assert!(refused.code() == Code::FailedPrecondition && refused.message().contains("[security]"), "{refused}");
    services.mount(of(Role::Admin, "x", request)).await.unwrap();
    let seen = async |name| {
        let table = services.get_credentials(client(name, ListMountsRequest {})).await.unwrap().into_inner();
        let mount = table.mounts.into_iter().next().unwrap();
        assert!(mount.clients.is_empty(), "{name}");
        mount.access_mode()
    };
    assert_eq!(seen("r").await, AccessMode::ReadOnly);
    assert_eq!(seen("w").await, AccessMode::ReadWrite);
    let nobody = services.get_credentials(Request::new(ListMountsRequest {})).await.unwrap().into_inner();
    assert!(nobody.mounts.is_empty(), "{nobody:?}");
    let all = services.list_mounts(Request::new(ListMountsRequest {})).await.unwrap().into_inner();
    assert_eq!(all.mounts[0].clients.len(), 2, "so that it can be opened again");
    let worker = services.get_credentials(of(Role::Worker, "w", ListMountsRequest {})).await.unwrap().into_inner();
    assert_eq!(worker.mounts[0].write_type(), WriteType::CacheMode);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_is_told_of_no_name_in_a_mount_that_is_not_there_for_it() {
    let (master, mount) = master().await;
    let watch = master.services().watch.clone();
    let [own, other] = ["a", "b"].map(|name| Identity::new("c", Role::Client, name).unwrap());
    let open = |owner, before| watch.open("x", Before { owner: Some(owner), ..before }).unwrap();
    let (mut a, mut b) = (open(&own, Before::default()), open(&other, Before::default()));
    let all = |session| watch.watch_directories(session, [ROOT_INODE, mount.root_inode]);
    [a.id(), b.id()].into_iter().for_each(all);
    told(&watch, &mut a).await;
    told(&watch, &mut b).await;
    let seen = watch.seq();
    assert_eq!(change(&master, "a", create(mount.root_inode, "secret", Kind::File)).await, 0);
    assert_eq!(told(&watch, &mut a).await, ["secret"]);
    // Of one who comes back, and may have missed anything.
    drop(b);
    let before = Before { applied_seq: seen, ..session_before(0, false) };
    let mut b = open(&other, before);
    assert_eq!(told(&watch, &mut b).await, [] as [&str; 0]);
    all(b.id());
    // Of what is there for all, who may have seen anything is told every name.
    let (bucket, uri) = new_bucket();
    bucket.put("g", "1");
    let beside = master.mount("/beside", &uri).await;
    master.indexed(&beside).await;
    assert_eq!(told(&watch, &mut a).await, ["beside"]);
    assert_eq!(told(&watch, &mut b).await, ["beside", "g"]);
    // Who may see it from now on is told that it is there, and who might until now forgets everything.
    let of = |names: &[(&str, bool)]| {
        let clients = cavern_proto::master::ClientRules { rules: rules(names) };
        let update = UpdateMountRequest { path: "/m".into(), clients: Some(clients), ..UpdateMountRequest::default() };
        master.services().update_mount(self::of(Role::Admin, "x", update))
    };
    of(&[("b", false)]).await.unwrap();
    assert_eq!(told(&watch, &mut a).await, [EVERYTHING]);
    assert_eq!(told(&watch, &mut b).await, ["m"]);
    let seen = watch.seq();
    assert_eq!(change(&master, "b", create(mount.root_inode, "another", Kind::File)).await, 0);
    let id = a.id();
    drop(a);
    let mut a = open(&own, Before { applied_seq: seen, ..session_before(id, false) });
    assert_eq!((told(&watch, &mut a).await, told(&watch, &mut b).await), (vec![], vec!["another".to_owned()]));
    of(&[]).await.unwrap();
    assert_eq!((told(&watch, &mut a).await, told(&watch, &mut b).await), (vec!["m".to_owned()], vec!["m".to_owned()]));
    // One that comes and goes.
    let (_, uri) = new_bucket();
    let wanted = Mount { clients: rules(&[("a", false)]), ..mount_request("/hidden", &uri) };
    let request = MountRequest { mount: Some(wanted), ..MountRequest::default() };
    master.services().mount(self::of(Role::Admin, "x", request)).await.unwrap();
    assert_eq!((told(&watch, &mut a).await, told(&watch, &mut b).await), (vec!["hidden".to_owned()], vec![]));
    let unmount = UnmountRequest { path: "/hidden".into(), ..UnmountRequest::default() };
    master.services().unmount(self::of(Role::Admin, "x", unmount)).await.unwrap();
    assert_eq!((told(&watch, &mut a).await, told(&watch, &mut b).await), (vec!["hidden".to_owned()], vec![]));
}

/// In the place of a name.
const EVERYTHING: &str = "everything";

/// Names that a session has been told of.
async fn told(watch: &WatchHub, session: &mut SessionStream) -> Vec<String> {
    let mut names = Vec::new();
    // What there is, and the tick behind it.
    while !names.iter().any(Option::is_none) {
        watch.tick();
        for event in session.next().await.unwrap().iter().flat_map(|events| events.iter()) {
            match event.event.clone().unwrap() {
                Event::Entry(entry) => names.push(Some(String::from_utf8(entry.name.to_vec()).unwrap())),
                Event::Reset(_) => names.push(Some(EVERYTHING.to_owned())),
                Event::Tick(_) => names.push(None),
                _ => {}
            }
        }
    }
    names.into_iter().flatten().collect()
}

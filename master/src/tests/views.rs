//! Views: made, shown, located, exported and imported, and what is left of those that were not finished.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::{Config, Interval};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::views_server::Views;
use cavern_proto::master::{
    CommitContent, CreateViewRequest, DeleteViewRequest, Extent, GetViewRequest, ImportViewRequest, Kind,
    ListViewsRequest, LocateBlocksRequest, LocatedFile, Mount, SetAttr, View, ViewState, ViewStep,
};
use cavern_proto::record::{BeginView, Counters, RemoveView, ViewFile, ViewIndex, ViewManifest, ViewPage};
use cavern_proto::view_file::{PageIndex, TRAILER_BYTES, manifest_bytes, runs};
use cavern_ufs::{MemoryBucket, Metadata, Precondition};
use cavern_work::WorkError;
use cavern_work::mounts::changes::DetachPolicy;
use cavern_work::sessions::Before;
use futures::{StreamExt, stream};
use prost::Message;
use tonic::{Code, Request, Status};

use super::harness::{NoWorkers, TestMaster, eventually, metric, new_bucket};
use super::mutations::{self, create, mutate};

fn wanted(name: &str, path: &str) -> CreateViewRequest {
    CreateViewRequest {
        name: name.to_owned(),
        path: path.to_owned(),
        uid: 1,
        gid: 2,
        file_mode: 0o644,
        directory_mode: 0o755,
        ..CreateViewRequest::default()
    }
}

async fn make(master: &TestMaster, request: CreateViewRequest) -> Result<View, Status> {
    let mut progress = master.services().create_view(Request::new(request)).await?.into_inner();
    let mut last = None;
    while let Some(message) = progress.next().await {
        last = Some(message?);
    }
    let last = last.unwrap();
    assert_eq!(last.step(), ViewStep::Done);
    Ok(last.view.unwrap())
}

async fn refused(master: &TestMaster, request: CreateViewRequest, code: Code, reason: &str) {
    let status = make(master, request).await.unwrap_err();
    assert!(status.code() == code && status.message().contains(reason), "{status}");
}

async fn names(master: &TestMaster) -> Vec<String> {
    let listed = master.services().list_views(Request::new(ListViewsRequest {})).await.unwrap().into_inner();
    listed.views.into_iter().map(|view| view.name).collect()
}

/// Views in any state.
async fn recorded(master: &TestMaster) -> Vec<View> {
    master.services().lookups.reader.read(|tables| Ok(tables.views()?)).await.unwrap()
}

/// Views of which a bucket may have something.
async fn gone(master: &TestMaster) -> Vec<View> {
    master.services().lookups.reader.read(|tables| Ok(tables.gone_views()?)).await.unwrap()
}

async fn counters(master: &TestMaster) -> Counters {
    master.services().lookups.reader.read(|tables| Ok(tables.counters()?)).await.unwrap()
}

/// What the table of a view has, by key.
fn table(object: &[u8], view: &View) -> BTreeMap<String, ViewFile> {
    let (pages, index) = (view.image_bytes as usize, (view.image_bytes + view.pages_bytes) as usize);
    let decoded = ViewIndex::decode(&object[index..index + view.index_bytes as usize]).unwrap();
    let decoded = PageIndex::new(decoded, view.pages_bytes).unwrap();
    let mut files = BTreeMap::new();
    for number in 0.. {
        let Some(bytes) = decoded.bytes_of(number) else { break };
        let page = ViewPage::decode(&object[pages + bytes.start as usize..pages + bytes.end as usize]).unwrap();
        files.extend(runs(&page).map(|(_, key, file)| (file.object_key(key).unwrap(), file.clone())));
    }
    files
}

/// Keys and versions of all files with bytes.
fn versions(bucket: &MemoryBucket, view: &View) -> BTreeMap<String, String> {
    let object = bucket.object(&view.key).unwrap().0;
    table(&object, view).into_iter().map(|(key, file)| (key, file.object_etag())).collect()
}

fn manifest(object: &[u8]) -> ViewManifest {
    let (before, trailer) = object.split_last_chunk::<TRAILER_BYTES>().unwrap();
    let start = before.len() - manifest_bytes(trailer).unwrap() as usize;
    ViewManifest::decode(&before[start..]).unwrap()
}

/// A cache-mode mount at `/m` of a bucket with some objects.
async fn cache_mode() -> (TestMaster, MemoryBucket, String, Mount) {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    for (key, content) in [("a", "1"), ("d/b", "22"), ("d/e/c", "333"), ("empty", "")] {
        bucket.put(key, content);
    }
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    (master, bucket, uri, mount)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_made_shown_and_deleted() {
    let (master, bucket, uri, mount) = cache_mode().await;
    let view = make(&master, wanted("v", "/m")).await.unwrap();
    assert_eq!((view.names, view.inodes, view.bytes), (6, 7, 6));
    assert_eq!((view.state(), view.generation, view.mount_id), (ViewState::Ready, 0, mount.id));
    assert!(view.key.starts_with(".cavern-view-") && view.key.len() == 45, "{}", view.key);
    assert_eq!(bucket.etag(&view.key), Some(view.etag.clone()));
    let object = bucket.object(&view.key).unwrap().0;
    assert_eq!((object.len() as u64, bucket.uploads()), (view.object_bytes, 0));
    let objects = ["a", "d/b", "d/e/c"].map(|key| (key.to_owned(), bucket.etag(key).unwrap()));
    assert_eq!(versions(&bucket, &view), BTreeMap::from(objects));
    let told = manifest(&object);
    let said = told.view.unwrap();
    assert_eq!((told.uri, told.cluster_id), (uri, master.services().cluster_id.to_string()));
    assert_eq!((said.hash, said.names, said.id, said.key), (view.hash.clone(), 6, 0, String::new()));

    // It is in no listing, under no name, and changes nothing of the next one.
    master.refresh("/m").await;
    assert!(!master.tree("/m").await.keys().any(|path| path.contains("cavern")));
    let asked = master.services().lookups.resolve(&format!("/m/{}", view.key)).await;
    assert!(asked.unwrap_err().is_not_found());
    let other = make(&master, wanted("w", "/m")).await.unwrap();
    assert_eq!(other.hash, view.hash, "equal contents are the same wherever they are");
    assert!(other.id > view.id && other.key != view.key);
    let part = make(&master, wanted("sub", "/m/d/")).await.unwrap();
    assert_eq!((part.names, &part.path[..]), (3, "/m/d"));
    assert_eq!(versions(&bucket, &part).into_keys().collect::<Vec<_>>(), ["d/b", "d/e/c"]);

    // Whoever asks again is told of what there is.
    assert_eq!(make(&master, wanted("v", "/m/")).await.unwrap(), view);
    refused(&master, wanted("v", "/m/d"), Code::AlreadyExists, "the view v is there already, of /m").await;
    assert_eq!(names(&master).await, ["sub", "v", "w"]);
    let services = master.services();
    let get = |name: &str, id| services.get_view(Request::new(GetViewRequest { name: name.to_owned(), id }));
    assert_eq!(get("v", 0).await.unwrap().into_inner(), view);
    assert_eq!(get("", other.id).await.unwrap().into_inner(), other);
    assert_eq!(get("nowhere", view.id).await.unwrap_err().code(), Code::NotFound);
    let detached = services.unmount_bucket("/m", DetachPolicy::Discard).await.unwrap_err().to_string();
    assert!(detached.contains("/m has views (v, w, sub)"), "{detached}");

    // What the bucket has by now is frozen when that is asked for.
    bucket.put("d/new", "1");
    let fresh = make(&master, CreateViewRequest { fresh: true, ..wanted("fresh", "/m") }).await.unwrap();
    assert!(versions(&bucket, &fresh).contains_key("d/new"));

    for name in ["v", "w", "sub", "fresh"] {
        let request = DeleteViewRequest { name: name.to_owned() };
        services.delete_view(Request::new(request.clone())).await.unwrap();
        assert_eq!(services.delete_view(Request::new(request)).await.unwrap_err().code(), Code::NotFound);
    }
    assert!(!bucket.keys().iter().any(|key| key.contains("cavern")), "{:?}", bucket.keys());
    services.unmount_bucket("/m", DetachPolicy::Keep).await.unwrap();
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_frozen_is_refused_with_the_reason() {
    let (master, bucket, ..) = cache_mode().await;
    let directory = tempfile::tempdir().unwrap();
    let read_only = master.mount("/files", &format!("file://{}", directory.path().display())).await;
    master.indexed(&read_only).await;
    for name in ["", ".v", "a/b", &"x".repeat(65)] {
        refused(&master, wanted(name, "/m"), Code::InvalidArgument, "no name of a view").await;
    }
    refused(&master, wanted("v", "m"), Code::InvalidArgument, "not absolute").await;
    refused(&master, wanted("v", "/nowhere"), Code::NotFound, "/nowhere").await;
    refused(&master, wanted("v", "/"), Code::FailedPrecondition, "no directory of a mount").await;
    refused(&master, wanted("v", "/m/a"), Code::FailedPrecondition, "no directory of a mount").await;
    let stored = |store: &str| CreateViewRequest { store: store.to_owned(), ..wanted("v", "/m") };
    refused(&master, stored("/m/d"), Code::NotFound, "/m/d is not a mount").await;
    for request in [stored("/files"), wanted("v", "/files")] {
        refused(&master, request, Code::FailedPrecondition, "the bucket of /files takes no objects").await;
    }
    assert!(recorded(&master).await.is_empty());
    // The bucket of another mount will do.
    let elsewhere = CreateViewRequest { store: "/m".to_owned(), ..wanted("v", "/files") };
    let view = make(&master, elsewhere).await.unwrap();
    assert_eq!(bucket.etag(&view.key), Some(view.etag));
    let detached = master.services().unmount_bucket("/m", DetachPolicy::Keep).await.unwrap_err().to_string();
    assert!(detached.contains("/m has views (v)"), "{detached}");
    master.stop().await;
}

/// A change of a client that ends with it.
async fn change(master: &TestMaster, change: Change) -> u64 {
    let watch = &master.services().watch;
    let session = watch.open("test", Before::default()).unwrap();
    let done = mutate(master, session.id(), 1, vec![change]).await.unwrap().remove(0);
    assert_eq!(done.errno, 0, "{done:?}");
    watch.end(session.id());
    done.inode
}

/// An fs-mode mount at `/m` with a file of one block at worker 1.
async fn fs_mode() -> (TestMaster, Mount, u64) {
    let mut config = Config::default();
    config.master.session_lease = Interval::millis(1500);
    let directory = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, directory, Arc::new(NoWorkers)).await.unwrap();
    master.register_workers(2).await;
    let mount = mutations::mount(&master).await;
    let inode = change(&master, create(mount.root_inode, "f", Kind::File)).await;
    let made = vec![Extent { workers: vec![1], ..Extent::default() }];
    change(&master, Change::Commit(CommitContent { inode, grow_to: 5000, made, changed: true })).await;
    (master, mount, inode)
}

async fn located(master: &TestMaster, view: u32, inodes: &[u64]) -> Vec<LocatedFile> {
    let request = LocateBlocksRequest { view, inode: inodes[0], prefetch: inodes[1..].to_vec() };
    master.services().locate_blocks(Request::new(request)).await.unwrap().into_inner().files
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_a_view_are_located_when_their_file_has_lost_them() {
    let (master, mount, inode) = fs_mode().await;
    let view = make(&master, wanted("v", "/m")).await.unwrap();
    assert!(view.generation > 0 && view.last_inode >= inode, "{view:?}");
    let frozen = master.services().mounts.recorded(mount.id).unwrap();
    assert_eq!((frozen.frozen_below, frozen.frozen_inodes), (view.generation, view.last_inode));
    assert_eq!(frozen.settled_below, view.generation);
    let bucket = MemoryBucket::named(mount.uri.strip_prefix("memory://").unwrap());
    let files = table(&bucket.object(&view.key).unwrap().0, &view);
    assert_eq!(files.keys().collect::<Vec<_>>(), ["f"]);
    assert_eq!((files["f"].inode, &files["f"].generations[..]), (inode, &[1][..]));

    let found = |files: &[LocatedFile]| files.iter().map(|file| (file.inode, file.extents[0].workers.clone())).next();
    let now = located(&master, view.id, &[inode]).await;
    assert_eq!(found(&now), Some((inode, vec![1])));
    change(&master, Change::SetAttr(SetAttr { inode, size: Some(0), ..SetAttr::default() })).await;
    let kept = located(&master, view.id, &[mount.root_inode, inode]).await;
    assert_eq!((kept.len(), found(&kept)), (1, Some((inode, vec![1]))));
    assert_eq!(counters(&master).await.kept, 1);

    // A later view does not have it, and nobody does when this one goes.
    let later = make(&master, wanted("later", "/m")).await.unwrap();
    assert!(later.generation > view.generation && located(&master, later.id, &[inode]).await.is_empty());
    assert_eq!(located(&master, view.id, &[inode]).await.len(), 1);
    let many = LocateBlocksRequest { view: view.id, inode, prefetch: vec![inode; 257] };
    let too_many = master.services().locate_blocks(Request::new(many)).await.unwrap_err();
    assert_eq!(too_many.code(), Code::InvalidArgument);
    master.services().delete_view(Request::new(DeleteViewRequest { name: "v".to_owned() })).await.unwrap();
    eventually(|| async { counters(&master).await.kept == 0 }).await;
    let gone = LocateBlocksRequest { view: view.id, inode, prefetch: Vec::new() };
    assert_eq!(master.services().locate_blocks(Request::new(gone)).await.unwrap_err().code(), Code::NotFound);
    let fresh = CreateViewRequest { fresh: true, ..wanted("fresh", "/m") };
    refused(&master, fresh, Code::InvalidArgument, "fs-mode").await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_view_that_a_client_keeps_from_being_frozen() {
    let (master, mount, _) = fs_mode().await;
    let bucket = MemoryBucket::named(mount.uri.strip_prefix("memory://").unwrap());
    let late = master.services().watch.open("late", Before::default()).unwrap();
    refused(&master, wanted("v", "/m"), Code::FailedPrecondition, "").await;
    assert!(recorded(&master).await.is_empty());
    let counted = counters(&master).await;
    assert_eq!((counted.frozen_views, counted.unfrozen_views), (0, 0));

    // Whoever has asked may go away.
    let another = master.services().watch.open("another", Before::default()).unwrap();
    let asked = master.services().create_view(Request::new(wanted("v", "/m"))).await.unwrap();
    eventually(|| async { !recorded(&master).await.is_empty() }).await;
    drop(asked);
    eventually(|| async { recorded(&master).await.is_empty() }).await;
    assert!(!bucket.keys().iter().any(|key| key.contains("cavern-view")), "{:?}", bucket.keys());
    eventually(|| async { bucket.uploads() == 0 }).await;
    drop((late, another));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_master_takes_away_what_was_not_finished() {
    let (master, bucket, _, mount) = cache_mode().await;
    let done = make(&master, wanted("done", "/m")).await.unwrap();
    let key = format!(".cavern-view-{}", "0".repeat(32));
    bucket.put(&key, "a part of it");
    let ufs = master.services().mounts.get(mount.id).unwrap().ufs.clone();
    let upload = ufs.begin_multipart(&key, &Metadata::new()).await.unwrap();
    upload.part(1, &Bytes::from_static(b"a part")).await.unwrap();
    let view = View {
        name: "v".to_owned(),
        path: "/m".to_owned(),
        state: ViewState::Creating.into(),
        mount_id: mount.id,
        store_mount_id: mount.id,
        key: key.clone(),
        upload: upload.id().to_owned(),
        ..View::default()
    };
    let id = master.services().proposer.propose(BeginView { view: Some(view) }).await.unwrap().unwrap().id;
    assert_eq!(names(&master).await, ["done"], "it is not shown");
    let get = GetViewRequest { id, ..GetViewRequest::default() };
    assert_eq!(master.services().get_view(Request::new(get)).await.unwrap_err().code(), Code::NotFound);
    let master = master.restart().await;
    eventually(|| async { recorded(&master).await.len() == 1 }).await;
    eventually(|| async { bucket.object(&key).is_none() && bucket.uploads() == 0 }).await;
    eventually(|| async { gone(&master).await.is_empty() }).await;
    assert!(upload.complete(&[], Precondition::Anything).await.is_err(), "the master of before finishes nothing");
    assert_eq!(recorded(&master).await, [done]);
    make(&master, wanted("v", "/m/d")).await.unwrap();
    eventually(|| async { metric(&master.metrics, "views") == 2 }).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_master_was_to_delete_when_it_ended_the_next_one_deletes() {
    let (master, bucket, ..) = cache_mode().await;
    let [one, other] = ["one", "other"].map(|name| wanted(name, "/m"));
    let (one, other) = (make(&master, one).await.unwrap(), make(&master, other).await.unwrap());
    // As if it had come no further; somebody else's object is left where it is.
    let another = bucket.put(&other.key, "another");
    for id in [one.id, other.id] {
        let removal = RemoveView { id, deleted: false };
        let removed = master.services().proposer.propose(removal).await.unwrap().unwrap();
        assert_eq!(removed.upload, "");
    }
    let master = master.restart().await;
    eventually(|| async { bucket.object(&one.key).is_none() && gone(&master).await.is_empty() }).await;
    assert_eq!(bucket.etag(&other.key), Some(another));
    master.stop().await;
}

/// The parts of a file after the first, as they come.
fn rest(parts: &[&[u8]]) -> impl futures::Stream<Item = Result<Bytes, WorkError>> + Send + use<> {
    let parts: Vec<_> = parts.iter().map(|part| Ok(Bytes::copy_from_slice(part))).collect();
    stream::iter(parts)
}

async fn import(master: &TestMaster, name: &str, path: &str, file: &[u8]) -> Result<View, WorkError> {
    let (first, more) = file.split_at(file.len().min(100));
    let first = ImportViewRequest {
        name: name.to_owned(),
        path: path.to_owned(),
        data: Bytes::copy_from_slice(first),
        ..ImportViewRequest::default()
    };
    let parts: Vec<&[u8]> = more.chunks(1000).collect();
    master.services().views.import(first, rest(&parts)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_taken_in_by_another_cluster_as_it_was_exported() {
    let (first, bucket, uri, _) = cache_mode().await;
    let exported = make(&first, wanted("v", "/m")).await.unwrap();
    let other = make(&first, wanted("w", "/m/d")).await.unwrap();
    let object = |view: &View| bucket.object(&view.key).unwrap().0;
    let (file, another) = (object(&exported), object(&other));
    let expected = versions(&bucket, &exported);
    first.stop().await;

    let master = TestMaster::new().await;
    let nowhere = import(&master, "v", "", &file).await.unwrap_err();
    assert!(nowhere.is_not_found() && nowhere.to_string().contains(&uri), "{nowhere}");
    let (_, elsewhere) = new_bucket();
    let mount = master.mount("/x", &format!("{uri}/")).await;
    master.mount("/y", &format!("{elsewhere}/below")).await;
    let view = import(&master, "v", "", &file).await.unwrap();
    assert!(view.imported && view.mount_id == mount.id && view.key != exported.key, "{view:?}");
    assert_eq!((&view.hash, view.names, view.bytes), (&exported.hash, exported.names, exported.bytes));
    assert_eq!((object(&view), versions(&bucket, &view)), (file.clone(), expected));
    assert_eq!(import(&master, "v", "/x", &file).await.unwrap(), view, "it is there");
    let taken = import(&master, "v", "/x", &another).await.unwrap_err();
    assert!(matches!(taken, WorkError::AlreadyExists(_)), "{taken}");

    // Its objects are not below the prefix of every mount.
    let outside = import(&master, "z", "/y", &file).await.unwrap_err().to_string();
    assert!(outside.contains("objects that are not of the mount"), "{outside}");
    let mut changed = file.to_vec();
    changed[2000] ^= 1;
    let cut = &file[..file.len() - 1];
    let longer = [&[0][..], &file[..]].concat();
    for broken in [&b""[..], &b"garbage"[..], cut, &changed[..], &longer[..], &file[file.len() - TRAILER_BYTES..]] {
        let error = import(&master, "z", "/x", broken).await.unwrap_err();
        assert!(matches!(error, WorkError::Invalid(_)), "{error}");
    }
    assert!(matches!(import(&master, "a/b", "/x", &file).await, Err(WorkError::Invalid(_))));
    assert_eq!(recorded(&master).await, [view]);
    master.stop().await;
}

//! Changes of an fs-mode mount over the service, across restarts of the master, and what becomes of removed inodes.

use std::sync::Arc;

use cavern_conf::{Config, Interval};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    Consistency, CreateInode, GetXattrsRequest, Kind, LinkInode, Mount, MutateRequest, Mutation, MutationResult,
    ReadDirRequest, RemoveName, RenameName, SetXattr, WatchEvent, WriteType, Xattr,
};
use cavern_work::sessions::{Before, ReapCursor, SessionStream, reap_unlinked};
use futures::StreamExt;
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use super::harness::{NoWorkers, TestMaster, eventually, name, new_bucket, session_before};
use crate::services::Services;

async fn with_short_leases() -> TestMaster {
    let mut config = Config::default();
    config.master.session_lease = Interval::millis(1500);
    TestMaster::with(config, Arc::new(tempfile::tempdir().unwrap()), Arc::new(NoWorkers)).await.unwrap()
}

pub(super) async fn mount(master: &TestMaster) -> Mount {
    let (_, uri) = new_bucket();
    let write_type = WriteType::FsMode as i32;
    let mount = Mount { path: "/m".into(), uri, write_type, created_ns: 5, block_size: 1 << 20, ..Mount::default() };
    master.attach(mount).await
}

pub(super) async fn mutate(
    master: &TestMaster,
    session: u64,
    first: u64,
    changes: Vec<Change>,
) -> Result<Vec<MutationResult>, Status> {
    let numbered = changes.into_iter().zip(first..);
    let mutations = numbered
        .map(|(change, seq)| Mutation { seq, uid: 1, gid: 2, change: Some(change), ..Mutation::default() })
        .collect();
    let request = MutateRequest { session, mutations, answered: first - 1 };
    Ok(master.services().begin_changes(request, (None, None), None).await?.await?.results)
}

pub(super) fn create(parent: u64, text: &str, kind: Kind) -> Change {
    Change::Create(CreateInode { parent, name: name(text), kind: kind as i32, mode: 0o600, ..CreateInode::default() })
}

fn remove(parent: u64, text: &str) -> Change {
    Change::Remove(RemoveName { parent, name: name(text), directory: false })
}

async fn names(master: &TestMaster, inode: u64) -> Vec<String> {
    let request = ReadDirRequest { inode, ..ReadDirRequest::default() };
    let mut pages = master.services().read_dir(Request::new(request)).await.unwrap().into_inner();
    let mut names = Vec::new();
    while let Some(page) = pages.next().await {
        let entries = page.unwrap().entries;
        names.extend(entries.into_iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()));
    }
    names
}

/// Takes in, and acknowledges, what there is; gives the inodes that lost their last name.
async fn take_in(master: &TestMaster, session: &mut SessionStream) -> Vec<u64> {
    let mut unlinked = Vec::new();
    for events in session.next().await.unwrap() {
        for event in events.iter() {
            if let Some(Event::Unlinked(inode)) = event.event {
                unlinked.push(inode);
            }
            master.services().watch.acknowledge(session.stream_id(), event.seq, 0);
        }
    }
    unlinked
}

#[tokio::test]
async fn changes_are_seen_at_once_and_a_retry_after_a_restart_applies_nothing_twice() {
    let master = TestMaster::new().await;
    let root = mount(&master).await.root_inode;
    let session = master.services().watch.open("test", Before::default()).unwrap();
    let id = session.id();
    let changes =
        || vec![create(root, "d", Kind::Directory), create(root, "f", Kind::File), create(root, "f", Kind::File)];
    let results = mutate(&master, id, 1, changes()).await.unwrap();
    assert_eq!(results.iter().map(|result| result.errno).collect::<Vec<_>>(), [0, 0, libc_exist()]);
    assert_eq!(names(&master, root).await, ["d", "f"]);
    let entry = master.services().lookups.lookup(root, &name("f")).await.unwrap();
    let attr = entry.attr.unwrap();
    assert_eq!((attr.inode, attr.uid, attr.gid, attr.mode), (results[1].inode, 1, 2, 0o600));
    drop(session);

    let master = master.restart().await;
    let refused = mutate(&master, id, 1, changes()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let session = master.services().watch.open("test", session_before(id, true)).unwrap();
    assert_eq!(session.id(), id);
    assert_eq!(mutate(&master, id, 1, changes()).await.unwrap(), results);
    assert_eq!(names(&master, root).await, ["d", "f"]);
    drop(session);
    master.stop().await;
}

#[tokio::test]
async fn extended_attributes_are_read_as_they_were_set() {
    let master = TestMaster::new().await;
    let root = mount(&master).await.root_inode;
    let session = master.services().watch.open("test", Before::default()).unwrap();
    let xattrs = |inode| {
        let services = master.services().clone();
        async move {
            services
                .get_xattrs(Request::new(GetXattrsRequest { inode, session: 0 }))
                .await
                .map(|xattrs| xattrs.into_inner().xattrs)
        }
    };
    let inode = mutate(&master, session.id(), 1, vec![create(root, "f", Kind::File)]).await.unwrap()[0].inode;
    assert_eq!(xattrs(inode).await.unwrap(), []);
    let set = |name: &str, value: &str| {
        let (name, value) = (name.to_owned().into(), value.to_owned().into());
        Change::SetXattr(SetXattr { inode, name, value, ..SetXattr::default() })
    };
    let results = mutate(&master, session.id(), 2, vec![set("user.b", "2"), set("user.a", "1")]).await.unwrap();
    assert!(results.iter().all(|result| result.errno == 0 && result.attributes[0].has_xattrs));
    let xattr = |name: &str, value: &str| Xattr { name: name.to_owned().into(), value: value.to_owned().into() };
    assert_eq!(xattrs(inode).await.unwrap(), [xattr("user.a", "1"), xattr("user.b", "2")]);
    assert_eq!(xattrs(999).await.unwrap_err().code(), Code::NotFound);
    drop(session);
    master.stop().await;
}

#[tokio::test]
async fn a_removed_inode_stays_while_it_is_held_and_goes_after_that() {
    let master = with_short_leases().await;
    let root = mount(&master).await.root_inode;
    let mut holder = master.services().watch.open("holder", Before::default()).unwrap();
    let id = holder.id();
    let created = mutate(&master, id, 1, vec![create(root, "a", Kind::File), create(root, "b", Kind::File)]).await;
    let inodes: Vec<u64> = created.unwrap().iter().map(|result| result.inode).collect();
    mutate(&master, id, 3, vec![remove(root, "a"), remove(root, "b")]).await.unwrap();
    let here = |inode| {
        let reader = master.services().lookups.reader.clone();
        async move { reader.read(move |tables| Ok(tables.inode(inode)?)).await.unwrap().is_some() }
    };

    // Notified of both, it holds one, and goes on living.
    let mut unlinked = Vec::new();
    while unlinked.len() < 2 {
        let received = take_in(&master, &mut holder).await;
        if received.contains(&inodes[0]) {
            mutate(&master, id, 5, vec![Change::AddOpenRef(inodes[0])]).await.unwrap();
        }
        unlinked.extend(received);
    }
    let alive = async {
        loop {
            take_in(&master, &mut holder).await;
        }
    };
    let reaped = eventually(|| async { !here(inodes[1]).await });
    tokio::select! {
        () = alive => {}
        () = reaped => {}
    }
    assert!(here(inodes[0]).await);

    // Its lease ends, and with it what it holds.
    drop(holder);
    eventually(|| async { !here(inodes[0]).await }).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_inode_goes_only_when_those_who_may_have_it_open_have_heard_of_the_removal() {
    let master = TestMaster::new().await;
    let Mount { id: mount_id, root_inode: root, .. } = mount(&master).await;
    let mut session = master.services().watch.open("reader", Before::default()).unwrap();
    let id = session.id();
    while !master.services().watch.has_settled(mount_id) {
        take_in(&master, &mut session).await;
    }
    let services = master.services().clone();
    let reaping = tokio::spawn(async move {
        let mut cursor = ReapCursor::default();
        loop {
            let Services { watch, consensus, proposer, .. } = &services;
            reap_unlinked(&mut cursor, watch, consensus, proposer, &services.lookups.reader).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    let mut seq = 1;
    let mut change = async |change| {
        seq += 1;
        mutate(&master, id, seq - 1, vec![change]).await.unwrap()[0].inode
    };
    for _ in 0..300 {
        let inode = change(create(root, "f", Kind::File)).await;
        master.services().watch.acknowledge(session.stream_id(), master.services().watch.seq(), 0);
        change(remove(root, "f")).await;
        let mut received = Vec::new();
        while !received
            .iter()
            .any(|event: &WatchEvent| matches!(event.event, Some(Event::Unlinked(lost)) if lost == inode))
        {
            received.extend(session.next().await.unwrap().iter().flat_map(|events| events.iter().cloned()));
        }
        // It says so through the log, and until then it has acknowledged nothing.
        let held = change(Change::AddOpenRef(inode)).await;
        assert_eq!(held, inode, "it was deleted before its removal was acknowledged");
        change(Change::DropOpenRef(inode)).await;
        master.services().watch.acknowledge(session.stream_id(), received.last().unwrap().seq, 0);
    }
    reaping.abort();
    drop(session);
    master.stop().await;
}

/// Its object would be written over that by which other clusters know whose the prefix is.
#[tokio::test]
async fn no_file_has_the_name_of_an_object_of_the_cluster() {
    let master = TestMaster::new().await;
    let root = mount(&master).await.root_inode;
    let session = master.services().watch.open("test", Before::default()).unwrap();
    let id = session.id();
    let changes = vec![create(root, "d", Kind::Directory), create(root, "f", Kind::File)];
    let made = mutate(&master, id, 1, changes).await.unwrap();
    let [directory, file] = [made[0].inode, made[1].inode];
    let link = |parent, text: &str| Change::Link(LinkInode { inode: file, parent, name: name(text) });
    let rename = |new_parent, text: &str| {
        let (name, new_name) = (name("f"), name(text));
        Change::Rename(RenameName { parent: root, name, new_parent, new_name, ..RenameName::default() })
    };
    let own = [".cavern-cluster", ".cavern-preserved-0123456789abcdef-7-9"];
    let refused = own.into_iter().flat_map(|text| {
        [create(root, text, Kind::File), create(root, text, Kind::Directory), link(root, text), rename(root, text)]
    });
    let refused = mutate(&master, id, 3, refused.collect()).await.unwrap();
    assert!(refused.iter().all(|result| result.errno == rustix::io::Errno::PERM.raw_os_error()), "{refused:?}");
    assert_eq!(names(&master, root).await, ["d", "f"]);
    // Elsewhere they are names as any others.
    let changes = vec![link(directory, own[0]), create(directory, own[1], Kind::File)];
    let made = mutate(&master, id, 11, changes).await.unwrap();
    assert!(made.iter().all(|result| result.errno == 0), "{made:?}");
    drop(session);
    master.stop().await;
}

fn libc_exist() -> i32 {
    rustix::io::Errno::EXIST.raw_os_error()
}

/// Whoever read in the term before may still believe what it has cached.
#[tokio::test(flavor = "multi_thread")]
async fn in_the_first_lease_of_a_term_no_change_of_a_strict_mount_is_answered() {
    let master = with_short_leases().await;
    let lease = master.config.master.session_lease.get();
    let consistency = Consistency::Strict as i32;
    let strict = Mount { path: "/s".into(), uri: new_bucket().1, consistency, ..mount(&master).await };
    let strict = Mount { write_type: WriteType::FsMode as i32, id: 0, root_inode: 0, ..strict };
    let root = master.attach(strict).await.root_inode;
    let stream = master.services().watch.open("writer", Before::default()).unwrap();
    let session = stream.id();
    let made = mutate(&master, session, 1, vec![create(root, "a", Kind::File)]).await.unwrap();
    let began = Instant::now();
    drop(stream);
    let master = master.restart().await;
    let stream = master.services().watch.open("writer", session_before(session, true)).unwrap();
    assert_eq!(stream.id(), session);
    // The answer that it had may have been lost while it waited; and what is new waits as well.
    let again = async {
        let again = mutate(&master, session, 1, vec![create(root, "a", Kind::File)]).await.unwrap();
        assert_eq!(again, made);
        began.elapsed()
    };
    let new = async {
        mutate(&master, session, 2, vec![create(root, "b", Kind::File)]).await.unwrap();
        began.elapsed()
    };
    let (again, new) = futures::join!(again, new);
    assert!(again >= lease && new >= lease, "{again:?} {new:?}");
    drop(stream);
    master.stop().await;
}

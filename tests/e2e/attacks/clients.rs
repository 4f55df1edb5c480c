//! Mounts that are not there for all clients.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    FreeContentRequest, GetInodeRequest, GetLockRequest, Lock, LockKind, LockType, Mutation, RecallRequest,
    RefreshRequest, SetLock, WatchEvent,
};
use rustix::io::Errno;
use tokio::sync::mpsc::Sender;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::*;

/// How long a client may take to hear of another mount table.
const TOLD: Duration = Duration::from_secs(10);

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

/// Waits until a directory of the mount is there, or is not.
fn until_there(directory: &Path, is_there: bool) {
    let listed = || {
        let names = fs::read_dir(directory.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<Vec<_>>().contains(&directory.file_name().unwrap().to_owned())
    };
    eventually(&format!("{} is {}there", directory.display(), if is_there { "" } else { "not " }), TOLD, || {
        (directory.exists() == is_there && listed() == is_there).then_some(())
    });
}

#[test]
fn a_mount_is_there_for_those_clients_that_it_is_for() {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    // The master takes rules as soon as it has agreed with itself that it knows what they are.
    let rules = ["mount", "update", "/work", "--client", "fuse0", "--client", "reader-*=ro"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    cluster.mount_fs_mode("s3://bucket/more", "/more", &["--client", "fuse0", "--client", "reader-*=ro"]);
    let work = cluster.path("work");
    fs::write(work.join("f"), "written").unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(work.join("f")).unwrap());
    let before = state(&cluster);

    // By its path, by its number, and as a part of all that is mounted.
    let attacker = Somebody::of(&cluster, Role::Client);
    let mut calls = NamespaceClient::new(attacker.channel(&cluster));
    for path in ["/work", "/work/f"] {
        let resolve = ResolveRequest { path: path.to_owned(), session: 0 };
        assert_eq!(attacker.answer(calls.resolve(resolve)).unwrap_err().code(), Code::NotFound);
    }
    let get = GetInodeRequest { inode, session: 0 };
    assert_eq!(attacker.answer(calls.get_inode(get)).unwrap_err().code(), Code::NotFound);
    let mut calls = ClusterClient::new(attacker.channel(&cluster));
    for listed in [
        attacker.answer(calls.list_mounts(ListMountsRequest {})).unwrap().into_inner(),
        attacker.answer(calls.get_credentials(ListMountsRequest {})).unwrap().into_inner(),
    ] {
        assert!(listed.mounts.is_empty(), "{listed:?}");
    }
    assert_eq!(state(&cluster), before);

    // Whoever may only read gets no keys, with which it could write to the bucket.
    let secret = &cluster.at_start.s3.secret_key;
    let mut has_secret = || {
        let listed = attacker.answer(calls.get_credentials(ListMountsRequest {})).unwrap().into_inner();
        listed.mounts[0].options.values().any(|value| value == secret)
    };
    cluster.cv(&["mount", "update", "/work", "--client", "fuse0", "--client", "attacker=ro"]);
    assert!(!has_secret());
    // Nor has it others lose what they have: blocks at workers, names in directories delegated to them, and whatever
    // the bucket has not got.
    let reading = Somebody::of(&cluster, Role::Client);
    let mut names = NamespaceClient::new(reading.channel(&cluster));
    let denied = |what: &str, refused: Option<Status>| {
        let refused = refused.unwrap_or_else(|| panic!("{what} is done"));
        assert_eq!(refused.code(), Code::PermissionDenied, "{what}: {refused}");
        assert!(refused.message().contains("to be read"), "{what}: {refused}");
    };
    let free = FreeContentRequest { inodes: vec![inode], session: 0 };
    denied("FreeContent", reading.answer(names.free_content(free)).err());
    let recall = RecallRequest { inode, whole_mount: true, session: 0 };
    denied("Recall", reading.answer(names.recall(recall)).err());
    reading.answer(names.recall(RecallRequest { inode, whole_mount: false, session: 0 })).unwrap();
    let refresh = RefreshRequest { path: "/work".to_owned(), recursive: true, dry_run: false };
    denied("Refresh", reading.answer(names.refresh(refresh.clone())).err());
    reading.answer(names.refresh(RefreshRequest { dry_run: true, ..refresh })).unwrap();
    cluster.cv(&["mount", "update", "/work", "--client", "fuse0", "--client", "attacker"]);
    assert!(has_secret());

    // Of those who have it, one that may only read.
    cluster.cv(&["mount", "update", "/work", "--client", "fuse0=ro"]);
    let shown = cluster.cv(&["mount"]).stdout;
    assert!(shown.contains("/work: there for fuse0=ro only"), "{shown}");
    eventually("the mount is read-only", TOLD, || {
        (fs::write(work.join("g"), "x").err()?.raw_os_error() == Some(Errno::ROFS.raw_os_error())).then_some(())
    });
    let _made_before = fs::remove_file(work.join("g"));
    assert_eq!(errno(fs::remove_file(work.join("f"))), Some(Errno::ROFS.raw_os_error()));
    assert_eq!(errno(fs::create_dir(work.join("d"))), Some(Errno::ROFS.raw_os_error()));
    assert_eq!(errno(fs::OpenOptions::new().append(true).open(work.join("f"))), Some(Errno::ROFS.raw_os_error()));
    assert_eq!(fs::read_to_string(work.join("f")).unwrap(), "written");

    // Not there at all, and there again.
    cluster.cv(&["mount", "update", "/work", "--client", "somebody-else"]);
    until_there(&work, false);
    assert_eq!(errno(fs::read(work.join("f"))), Some(Errno::NOENT.raw_os_error()));
    cluster.cv(&["mount", "update", "/work", "--all-clients"]);
    until_there(&work, true);
    assert_eq!(fs::read_to_string(work.join("f")).unwrap(), "written");
    fs::write(work.join("h"), "again").unwrap();
}

#[test]
fn a_mount_that_is_there_again_is_shown_as_it_has_become_meanwhile() {
    let cluster = Cluster::up(Options { secure: true, more_mounts: vec!["second"], ..Options::default() });
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let [own, other] = [0, 1].map(|mount| cluster.at_start.fuse[mount].mount_point.join("work"));
    fs::create_dir_all(own.join("a/b")).unwrap();
    fs::write(own.join("a/b/f"), "before").unwrap();
    let names = || {
        let entries = fs::read_dir(other.join("a/b")).ok()?;
        Some(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>())
    };
    eventually("the other client knows the file", PATIENCE, || (names()? == ["f"]).then_some(()));
    assert_eq!(fs::read_to_string(other.join("a/b/f")).unwrap(), "before");

    let rules = ["mount", "update", "/work", "--client", "fuse0"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    until_there(&other, false);
    fs::rename(own.join("a/b/f"), own.join("a/b/g")).unwrap();
    cluster.cv(&["mount", "update", "/work", "--all-clients"]);
    until_there(&other, true);
    assert_eq!(errno(fs::metadata(other.join("a/b/f"))), Some(Errno::NOENT.raw_os_error()));
    assert_eq!(names().unwrap(), ["g"]);
}

/// A session of somebody, or one that he takes up, and what it lasts as long as.
fn open_session(
    somebody: &Somebody,
    cluster: &Cluster,
    session: u64,
) -> Result<(u64, Sender<WatchRequest>, Streaming<WatchEvent>), Status> {
    let (sender, messages) = tokio::sync::mpsc::channel(1);
    let first = WatchRequest { client: "x".to_owned(), session, has_changed: session != 0, ..WatchRequest::default() };
    sender.try_send(first).unwrap();
    let mut calls = ClusterClient::new(somebody.channel(cluster));
    let mut events = somebody.answer(calls.watch(ReceiverStream::new(messages)))?.into_inner();
    let first = somebody.answer(events.message())?.expect("the stream begins with an event");
    let id = match first.event {
        Some(Event::Reset(reset)) => reset.session,
        Some(Event::Resumed(resumed)) => resumed.session,
        other => panic!("{other:?}"),
    };
    Ok((id, sender, events))
}

#[test]
fn nobody_takes_up_the_session_of_another_when_the_master_has_changed() {
    // However long the master takes to be there again, the session is not over.
    let conf = "[master]\nsession_lease = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { secure: true, conf, ..Options::default() });
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    // From then on the master records whose sessions are.
    let rules = ["mount", "update", "/work", "--client", "attacker=ro", "--client", "*"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    fs::write(cluster.path("work/f"), "written").unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(cluster.path("work/f")).unwrap());
    let authority = Authority::open(&cluster.directory().join("certificates")).unwrap();
    let identity = Identity::new(&name_of(&cluster), Role::Client, "victim").unwrap();
    let victim = Somebody::signed(&authority, authority.certificate(), &identity, DAY);
    let (session, sender, events) = open_session(&victim, &cluster, 0).unwrap();
    let lock = Lock { owner: 7, r#type: LockType::Exclusive as i32, end: u64::MAX, ..Lock::default() };
    let set = SetLock { inode, kind: LockKind::Flock as i32, lock: Some(lock), ..SetLock::default() };
    let mutations = vec![Mutation { seq: 1, change: Some(Change::SetLock(set)), ..Mutation::default() }];
    let request = MutateRequest { session, mutations, answered: 0 };
    let mut calls = NamespaceClient::new(victim.channel(&cluster));
    let mutate = async { calls.mutate(tokio_stream::iter([request])).await?.into_inner().message().await };
    assert_eq!(victim.answer(mutate).unwrap().unwrap().results[0].errno, 0);

    let attacker = Somebody::of(&cluster, Role::Client);
    let ask = GetLockRequest { inode, kind: LockKind::Flock as i32, lock: Some(lock) };
    let mut calls = NamespaceClient::new(attacker.channel(&cluster));
    let found = attacker.answer(calls.get_lock(ask)).unwrap().into_inner().lock.expect("it is locked");
    assert_eq!((found.session, found.owner), (0, 0), "nobody is told whose it is");

    cluster.kill("master");
    drop((sender, events));
    cluster.start("master");
    // He comes first, and knows the number from elsewhere.
    eventually("the attacker is refused", PATIENCE, || match open_session(&attacker, &cluster, session) {
        Ok(_) => panic!("it is his now"),
        Err(refused) if refused.code() == Code::PermissionDenied => Some(()),
        Err(_) => None,
    });
    let back = eventually("the victim is back", PATIENCE, || open_session(&victim, &cluster, session).ok());
    assert_eq!(back.0, session);
    let mut calls = NamespaceClient::new(attacker.channel(&cluster));
    assert!(attacker.answer(calls.get_lock(ask)).unwrap().into_inner().lock.is_some(), "it is still locked");
}

#[test]
fn a_client_that_takes_in_nothing_keeps_no_content_of_a_mount_that_is_not_there_for_it() {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let rules = ["mount", "update", "/work", "--client", "fuse0"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    let attacker = Somebody::of(&cluster, Role::Client);
    let (_, sender, mut events) = open_session(&attacker, &cluster, 0).unwrap();
    let (stop, until) = (AtomicBool::new(false), Instant::now() + 12 * PATIENCE);
    let blocks = || cluster.cv(&["report", "--json"]).json()["cache"]["blocks"].as_u64();
    std::thread::scope(|scope| {
        // It is alive, and acknowledges no event.
        let live = async {
            while !stop.load(Ordering::Relaxed) && Instant::now() < until {
                let _sent = sender.try_send(WatchRequest::default());
                let _event = tokio::time::timeout(Duration::from_millis(200), events.message()).await;
            }
        };
        scope.spawn(|| attacker.runtime.block_on(live));
        let path = cluster.path("work/f");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        eventually("a worker tells of the block", PATIENCE, || (blocks()? > 0).then_some(()));
        fs::remove_file(&path).unwrap();
        eventually("the block is freed", 6 * PATIENCE, || (blocks()? == 0).then_some(()));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn rules_about_clients_are_refused_where_these_have_no_names() {
    let cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "x/", 1, 1000);
    let arguments =
        ["mount", "s3://bucket/work", "/work", "--write-type", "fs-mode", "--client", "a"].map(str::to_owned);
    let options = cluster.bucket_options();
    let options = options.iter().flat_map(|option| ["-c".to_owned(), option.clone()]);
    let arguments: Vec<String> = arguments.into_iter().chain(options).collect();
    let refused = cluster.try_cv(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(refused.stderr.contains("set [security] first"), "{}", refused.stderr);
    assert!(!cluster.path("work").exists());
}

//! Directories delegated to a session, with a second one that looks and changes: it waits for all that was answered,
//! and for nothing else.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, Interval};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    AcquireDelegation, ClientRule, ClientRules, CommitContent, CreateInode, Extent, GetInodeRequest, GetLayoutRequest,
    GetLockRequest, GetXattrsRequest, Kind, LinkInode, Lock, LockKind, LockType, LookupRequest, MutateRequest,
    Mutation, MutationResult, ReadDirRequest, RecallRequest, RemoveName, RenameName, ResolveRequest, ReturnDelegations,
    SetAttr, SetLock, SetQuota, SetTtl, SetXattr, TtlAction, UpdateMountRequest, UsageRequest, UserLimits,
};
use cavern_proto::record::Mutate;
use cavern_proto::record::command::Command;
use cavern_security::{Authority, Identity, PeerStream, Protocol, Role, Tls, Transport};
use cavern_state::Outcome;
use cavern_work::WorkError;
use cavern_work::mounts::changes::DetachPolicy;
use cavern_work::namespace::Lookups;
use cavern_work::sessions::{Before, SessionStream};
use futures::StreamExt;
use rustix::io::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tonic::{Code, Request};

use super::harness::{NoWorkers, PATIENCE, TestMaster, eventually, name, session_before};
use super::mutations::{create, mount};
use crate::services::Services;

const LEASE: Duration = Duration::from_secs(3);
const AGAIN: i32 = Errno::AGAIN.raw_os_error();
const STALE: i32 = Errno::STALE.raw_os_error();

async fn with_lease(lease: Duration) -> TestMaster {
    let mut config = Config::default();
    config.master.session_lease = Interval::millis(u64::try_from(lease.as_millis()).unwrap());
    let dir = Arc::new(tempfile::tempdir().unwrap());
    TestMaster::with(config, dir, Arc::new(NoWorkers)).await.unwrap()
}

/// A client.
struct Session {
    services: Services,
    stream: SessionStream,
    seq: u64,
    /// Recalls that it has been sent and not looked at.
    recalls: Vec<u64>,
}

impl Session {
    fn open(master: &TestMaster, before: Before<'_>) -> Self {
        let services = master.services().clone();
        let stream = services.watch.open("test", before).unwrap();
        Self { services, stream, seq: 0, recalls: Vec::new() }
    }

    fn id(&self) -> u64 {
        self.stream.id()
    }

    async fn mutate(&mut self, mutations: Vec<Mutation>) -> Vec<MutationResult> {
        let numbered = mutations.into_iter().zip(self.seq + 1..);
        let mutations: Vec<_> = numbered.map(|(mutation, seq)| Mutation { seq, ..mutation }).collect();
        let answered = self.seq;
        self.seq += mutations.len() as u64;
        let request = MutateRequest { session: self.id(), mutations, answered };
        self.services.begin_changes(request, (None, None), None).await.unwrap().await.unwrap().results
    }

    async fn change(&mut self, change: Change) -> MutationResult {
        self.mutate(vec![Mutation { change: Some(change), ..Mutation::default() }]).await.remove(0)
    }

    async fn done(&mut self, change: Change) -> u64 {
        let result = self.change(change).await;
        assert_eq!(result.errno, 0, "{}", result.reason);
        result.inode
    }

    /// A directory delegated to it from now on.
    async fn hold(&mut self, parent: u64, text: &str) -> u64 {
        let made = self.change(holding(parent, text)).await;
        assert!(made.errno == 0 && made.delegated, "{made:?}");
        made.inode
    }

    /// Asks for a directory that was there before, until it is delegated to the session.
    async fn acquire(&mut self, directory: u64) {
        let asking = async {
            while !self.change(wish(directory)).await.delegated {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, asking).await.expect("it is delegated");
    }

    /// Asks for a directory, in vain, until this other session is told to forget it.
    async fn announce(&mut self, directory: u64, other: &mut Self) {
        let asking = async {
            loop {
                assert!(!self.change(wish(directory)).await.delegated, "others know it");
                let mut told = futures::FutureExt::now_or_never(other.stream.next()).flatten().into_iter().flatten();
                if told.any(|events| events.iter().any(|one| one.event == Some(Event::InodeChanged(directory)))) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, asking).await.expect("others are told");
    }

    /// The next recall that it is sent. Whatever else it is sent it has taken in.
    async fn recalled(&mut self) -> u64 {
        let next = async {
            while self.recalls.is_empty() {
                for event in
                    self.stream.next().await.expect("the session goes on").iter().flat_map(|events| events.iter())
                {
                    self.services.watch.acknowledge(self.stream.stream_id(), event.seq, event.seq);
                    self.recalls.extend(match event.event {
                        Some(Event::Recall(directory)) => Some(directory),
                        _ => None,
                    });
                }
            }
            self.recalls.remove(0)
        };
        tokio::time::timeout(PATIENCE, next).await.expect("a recall")
    }

    /// Sends what it has answered for, and returns a directory, or of all that it holds.
    async fn let_go(&mut self, directory: u64, answered: Vec<Change>) {
        let answered = answered.into_iter().map(|change| Mutation {
            change: Some(change),
            is_write_back: true,
            ..Mutation::default()
        });
        let let_go = ReturnDelegations { directories: vec![directory], all: directory == 0 };
        let let_go = Mutation { change: Some(Change::ReturnDelegations(let_go)), ..Mutation::default() };
        for result in self.mutate(answered.chain([let_go]).collect()).await {
            assert_eq!(result.errno, 0, "{}", result.reason);
        }
    }

    /// Whether it has been sent another recall; what it has been sent is forgotten.
    fn is_recalled(&mut self) -> bool {
        let mut is_recalled = !self.recalls.is_empty();
        self.recalls.clear();
        while let Some(Some(events)) = futures::FutureExt::now_or_never(self.stream.next()) {
            is_recalled |= events
                .iter()
                .flat_map(|events| events.iter())
                .any(|event| matches!(event.event, Some(Event::Recall(_))));
        }
        is_recalled
    }
}

fn holding(parent: u64, text: &str) -> Change {
    let Change::Create(create) = create(parent, text, Kind::Directory) else { unreachable!() };
    Change::Create(CreateInode { delegate: true, ..create })
}

fn wish(inode: u64) -> Change {
    Change::AcquireDelegation(AcquireDelegation { inode, ..AcquireDelegation::default() })
}

fn holder(master: &TestMaster, directory: u64) -> Option<u64> {
    master.services().lookups.recalls.delegations().holder(directory)
}

/// What a client asks about a directory, the file `old` in it, which has two names, and the file that is made while it
/// waits; what it is told.
#[derive(Clone, Copy, Debug)]
enum Question {
    Lookup,
    Stat,
    GetDirectory,
    ReadDir,
    ReadParent,
    Resolve,
    OtherName,
    GetFile,
    Layout,
    Xattrs,
    Lock,
    Usage,
    Recall,
    RecallMount,
}

const QUESTIONS: [Question; 14] = [
    Question::Lookup,
    Question::Stat,
    Question::GetDirectory,
    Question::ReadDir,
    Question::ReadParent,
    Question::Resolve,
    Question::OtherName,
    Question::GetFile,
    Question::Layout,
    Question::Xattrs,
    Question::Lock,
    Question::Usage,
    Question::Recall,
    Question::RecallMount,
];

/// Where a question is asked.
#[derive(Clone)]
struct Place {
    services: Services,
    session: u64,
    root: u64,
    directory: u64,
    text: String,
    file: u64,
    /// How many such directories there are.
    round: u64,
}

impl Place {
    /// Whether the answer shows what the holder has answered before it let go: the file `new`, and the mode of `old`.
    async fn ask(self, question: Question) -> bool {
        let Self { services, session, root, directory, text, file, round } = self;
        let entries = |attr: Option<cavern_proto::master::Attr>| attr.unwrap().nlink;
        let mode = |attr: Option<cavern_proto::master::Attr>| attr.unwrap().mode & 0o7777 == 0o444;
        match question {
            Question::Lookup => {
                let request = LookupRequest { parent: directory, name: name("new"), session };
                services.lookup(Request::new(request)).await.is_ok()
            }
            Question::Stat => {
                let request = LookupRequest { parent: root, name: name(&text), session };
                entries(services.lookup(Request::new(request)).await.unwrap().into_inner().attr) == 3
            }
            Question::GetDirectory => {
                let request = GetInodeRequest { inode: directory, session };
                entries(services.get_inode(Request::new(request)).await.unwrap().into_inner().attr) == 3
            }
            Question::ReadDir => {
                let request = ReadDirRequest { inode: directory, session, ..ReadDirRequest::default() };
                let pages: Vec<_> =
                    services.read_dir(Request::new(request)).await.unwrap().into_inner().collect().await;
                let page = pages.into_iter().next().unwrap().unwrap();
                page.entries.len() == 3 && entries(page.directory.unwrap().attr) == 3
            }
            Question::ReadParent => {
                let request = ReadDirRequest { inode: root, session, ..ReadDirRequest::default() };
                let pages: Vec<_> =
                    services.read_dir(Request::new(request)).await.unwrap().into_inner().collect().await;
                let page = pages.into_iter().next().unwrap().unwrap();
                let entry = page.entries.into_iter().find(|entry| entry.name == text.as_bytes());
                entries(entry.unwrap().attr) == 3
            }
            Question::Resolve => {
                let request = ResolveRequest { path: format!("/m/{text}/new"), session };
                services.resolve(Request::new(request)).await.is_ok()
            }
            Question::OtherName => {
                let request = LookupRequest { parent: root, name: name(&format!("{text}-link")), session };
                mode(services.lookup(Request::new(request)).await.unwrap().into_inner().attr)
            }
            Question::GetFile => {
                let request = GetInodeRequest { inode: file, session };
                mode(services.get_inode(Request::new(request)).await.unwrap().into_inner().attr)
            }
            Question::Layout => {
                let request = GetLayoutRequest { inode: file, session, ..GetLayoutRequest::default() };
                mode(services.get_layout(Request::new(request)).await.unwrap().into_inner().attr)
            }
            Question::Xattrs => {
                let request = GetXattrsRequest { inode: file, session };
                services.get_xattrs(Request::new(request)).await.unwrap().into_inner().xattrs.len() == 1
            }
            Question::Lock => {
                let lock = Lock { session, r#type: LockType::Shared as i32, end: 1, ..Lock::default() };
                let request = GetLockRequest { inode: file, kind: LockKind::Posix as i32, lock: Some(lock) };
                services.get_lock(Request::new(request)).await.unwrap();
                true
            }
            Question::Usage => {
                let request = UsageRequest { path: "/m".into() };
                let all: Vec<_> = services.usage(Request::new(request)).await.unwrap().into_inner().collect().await;
                let last = all.into_iter().next_back().unwrap().unwrap();
                // Of each round two directories, and three names of files.
                last.done && (last.files, last.directories) == (3 * round, 1 + 2 * round)
            }
            Question::Recall | Question::RecallMount => {
                let whole_mount = matches!(question, Question::RecallMount);
                let request = RecallRequest { inode: directory, whole_mount, session };
                services.recall(Request::new(request)).await.unwrap();
                services.lookups.recalls.delegations().holder(directory).is_none()
            }
        }
    }
}

/// What is answered without the master, before a directory is returned.
fn answered(directory: u64, file: u64) -> Vec<Change> {
    vec![
        create(directory, "new", Kind::File),
        create(directory, "inner", Kind::Directory),
        Change::SetAttr(SetAttr { inode: file, mode: Some(0o444), ..SetAttr::default() }),
        Change::SetXattr(SetXattr { inode: file, name: name("user.a"), value: name("1"), ..SetXattr::default() }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_looks_waits_for_all_that_was_answered() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let mut own = Session::open(&master, Before::default());
    let other = Session::open(&master, Before::default());
    let mut round = 0;
    for (number, question) in QUESTIONS.into_iter().enumerate() {
        for session in [other.id(), 0] {
            round += 1;
            let text = format!("{number}-{session}");
            // Whoever has needed the whole mount has its turn first.
            eventually(|| async { master.services().lookups.recalls.allow_delegations(None) }).await;
            let directory = own.hold(root, &text).await;
            let file = own.done(create(directory, "old", Kind::File)).await;
            let link = LinkInode { inode: file, parent: root, name: name(&format!("{text}-link")) };
            own.done(Change::Link(link)).await;
            assert!(!own.is_recalled(), "{question:?}");
            let place = Place { services: master.services().clone(), session, root, directory, text, file, round };
            // The holder is asked for nothing itself, but for a whole mount.
            if !matches!(question, Question::Usage | Question::RecallMount) {
                let own_place = Place { session: own.id(), ..place.clone() };
                let ask = tokio::time::timeout(PATIENCE, own_place.ask(question));
                let shows = ask.await.expect("the holder does not wait for itself");
                assert!(!shows || matches!(question, Question::Lock), "{question:?}");
                assert!(!own.is_recalled(), "{question:?}");
            }
            let asking = tokio::spawn(place.ask(question));
            let recalled = own.recalled().await;
            let is_whole = matches!(question, Question::Usage | Question::RecallMount);
            assert_eq!(recalled, if is_whole { 0 } else { directory }, "{question:?}");
            assert!(!asking.is_finished(), "{question:?} was answered too early");
            own.let_go(recalled, answered(directory, file)).await;
            let shows = tokio::time::timeout(PATIENCE, asking).await.expect("an answer").unwrap();
            assert!(shows, "{question:?} by {session} misses what was answered before");
            // On a busy machine it may have been asked again.
            own.is_recalled();
        }
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_changes_something_has_it_recalled_and_finds_what_was_answered() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let (mut own, mut other) = (Session::open(&master, Before::default()), Session::open(&master, Before::default()));
    other.done(create(root, "file", Kind::File)).await;
    for number in 0..5 {
        let text = format!("d{number}");
        let directory = own.hold(root, &text).await;
        let file = own.done(create(directory, "old", Kind::File)).await;
        let link = LinkInode { inode: file, parent: root, name: name(&format!("link{number}")) };
        let (change, errno) = match number {
            0 => (create(directory, "new", Kind::File), Errno::EXIST.raw_os_error()),
            1 => (Change::Link(link), 0),
            2 => (Change::SetAttr(SetAttr { inode: file, uid: Some(5), ..SetAttr::default() }), 0),
            3 => {
                let (new_parent, new_name) = (directory, name("inner"));
                let rename = RenameName { parent: root, name: name("file"), new_parent, new_name, mode: 0 };
                (Change::Rename(rename), Errno::ISDIR.raw_os_error())
            }
            _ => {
                let remove = RemoveName { parent: root, name: name(&text), directory: true };
                (Change::Remove(remove), Errno::NOTEMPTY.raw_os_error())
            }
        };
        let refused = other.change(change.clone()).await;
        assert_eq!((refused.errno, refused.delegated_elsewhere), (AGAIN, directory), "{change:?}");
        let (services, session) = (master.services().clone(), other.id());
        let recall: JoinHandle<_> = tokio::spawn(async move {
            let request = RecallRequest { inode: directory, session, whole_mount: false };
            services.recall(Request::new(request)).await.map(drop)
        });
        assert_eq!(own.recalled().await, directory);
        own.let_go(directory, answered(directory, file)).await;
        recall.await.unwrap().unwrap();
        let result = other.change(change.clone()).await;
        assert_eq!((result.errno, result.delegated_elsewhere), (errno, 0), "{change:?}: {}", result.reason);
        own.is_recalled();
        if number == 2 {
            let attr = result.attributes[0];
            assert_eq!((attr.uid, attr.mode & 0o777), (5, 0o444), "the answered change comes first");
        }
    }
    // What is sent too late changes nothing.
    let late = Mutation { change: Some(create(root, "late", Kind::File)), is_write_back: true, ..Mutation::default() };
    assert_eq!(own.mutate(vec![late]).await[0].errno, STALE);
    let missing = master.services().lookups.lookup(root, &name("late")).await.unwrap_err();
    assert!(missing.is_not_found());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_mount_is_recalled_for_what_is_about_all_of_it() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let (mut own, mut other) = (Session::open(&master, Before::default()), Session::open(&master, Before::default()));
    let first = own.hold(root, "first").await;
    let second = other.hold(root, "second").await;
    let quota = Change::SetQuota(SetQuota { inode: root, max_bytes: Some(1 << 40), max_inodes: None });
    let refused = own.change(quota.clone()).await;
    assert_eq!((refused.errno, refused.delegated_elsewhere), (AGAIN, first), "its own counts as well");
    let (services, session) = (master.services().clone(), own.id());
    let recall = tokio::spawn(async move {
        let request = RecallRequest { inode: root, whole_mount: true, session };
        services.recall(Request::new(request)).await.map(drop)
    });
    assert_eq!((own.recalled().await, other.recalled().await), (0, 0));
    own.let_go(0, vec![create(first, "a", Kind::File)]).await;
    assert!(!recall.is_finished());
    // Meanwhile, and for a moment after, nobody comes to hold more, but for what was answered.
    let made = own.change(holding(root, "third")).await;
    assert!(made.errno == 0 && !made.delegated);
    let inner = Mutation { change: Some(holding(second, "inner")), is_write_back: true, ..Mutation::default() };
    assert!(other.mutate(vec![inner]).await[0].delegated);
    other.let_go(0, vec![create(second, "b", Kind::File)]).await;
    recall.await.unwrap().unwrap();
    own.done(quota).await;
    let made = own.change(holding(root, "fourth")).await;
    assert!(made.errno == 0 && !made.delegated);

    // A detached bucket has everything; what is to be lost is not waited for any longer than what is held.
    let over = Change::SetQuota(SetQuota { inode: root, max_bytes: Some(0), max_inodes: None });
    own.done(over).await;
    eventually(|| async { master.services().lookups.recalls.allow_delegations(None) }).await;
    let held = own.hold(root, "fifth").await;
    let services = master.services().clone();
    let unmount = tokio::spawn(async move { services.unmount_bucket("/m", DetachPolicy::Discard).await.map(drop) });
    assert_eq!(own.recalled().await, 0);
    assert!(!unmount.is_finished());
    own.let_go(0, vec![create(held, "c", Kind::File)]).await;
    tokio::time::timeout(PATIENCE, unmount).await.unwrap().unwrap().unwrap();
    assert!(master.services().lookups.recalls.delegations().is_empty());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_session_frees_whoever_waits() {
    let master = with_lease(LEASE).await;
    let root = mount(&master).await.root_inode;
    let mut own = Session::open(&master, Before::default());
    let (id, directory) = (own.id(), own.hold(root, "d").await);
    let lookups = master.services().lookups.clone();
    let look = {
        let lookups = lookups.clone();
        tokio::spawn(async move { lookups.lookup(directory, &name("f")).await })
    };
    assert_eq!(own.recalled().await, directory);
    // It is never heard of again.
    drop(own);
    let looked = tokio::time::timeout(PATIENCE, look).await.unwrap().unwrap();
    assert!(looked.unwrap_err().is_not_found());
    assert_eq!(holder(&master, directory), None);
    let late = Mutation {
        seq: 99,
        change: Some(create(directory, "f", Kind::File)),
        is_write_back: true,
        ..Mutation::default()
    };
    let late = Mutate { session: id, answered: 0, now_ns: 1, mutation: Some(late), ..Mutate::default() };
    // It may still be on its way into the log.
    let Outcome::Mutated(late, _) = master.services().proposer.propose(Command::Mutate(late)).await.unwrap() else {
        panic!("no result")
    };
    assert_eq!(late.errno, STALE, "{}", late.reason);
    assert!(lookups.lookup(directory, &name("f")).await.unwrap_err().is_not_found());

    // One that is there and does not let go is not waited for for ever.
    let mut own = Session::open(&master, Before::default());
    let directory = own.hold(root, "stubborn").await;
    let mut look = tokio::spawn(async move { lookups.lookup(directory, &name("f")).await });
    let mut recalls = 0;
    let error = loop {
        tokio::select! {
            looked = &mut look => break looked.unwrap().unwrap_err(),
            recalled = own.recalled() => {
                assert_eq!(recalled, directory);
                recalls += 1;
            }
        }
    };
    assert!(matches!(error, WorkError::Deadline(_)) && error.to_string().contains("does not return it"), "{error}");
    assert!((3..=8).contains(&recalls), "it was asked {recalls} times, once a second");
    assert_eq!(holder(&master, directory), Some(own.id()));
    master.stop().await;
}

/// Keeps a session alive that returns nothing, until it is over.
fn take_in(master: &TestMaster, session: &Session) -> tokio::task::JoinHandle<()> {
    let (watch, stream) = (master.services().watch.clone(), session.stream.stream_id());
    tokio::spawn(async move {
        while watch.acknowledge(stream, 0, 0) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_there_is_delegated_while_nobody_else_knows_what_is_in_it() {
    let master = with_lease(Duration::from_secs(1)).await;
    let root = mount(&master).await.root_inode;
    let services = master.services().clone();
    let (mut own, other) = (Session::open(&master, Before::default()), Session::open(&master, Before::default()));
    let alive = [take_in(&master, &own), take_in(&master, &other)];
    let directory = own.done(create(root, "d", Kind::Directory)).await;
    own.acquire(directory).await;
    assert_eq!(holder(&master, directory), Some(own.id()));

    let looking = {
        let (services, session) = (services.clone(), other.id());
        let request = LookupRequest { parent: directory, name: name("f"), session };
        tokio::spawn(async move { services.lookup(Request::new(request)).await.map(drop) })
    };
    assert_eq!(own.recalled().await, directory);
    own.let_go(directory, vec![create(directory, "f", Kind::File)]).await;
    tokio::time::timeout(PATIENCE, looking).await.unwrap().unwrap().expect("what was answered before");
    // Whoever has looked may have that in a cache.
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(1500) {
        assert!(!own.change(wish(directory)).await.delegated);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    services.watch.end(other.id());
    own.acquire(directory).await;
    // Nobody waits longer for who does not return it than for any other.
    let refused = services.lookups.lookup(directory, &name("f")).await.unwrap_err();
    assert!(matches!(refused, WorkError::Deadline(_)), "{refused}");
    services.watch.end(own.id());
    eventually(|| async { services.lookups.lookup(directory, &name("f")).await.is_ok() }).await;
    for task in alive {
        task.await.unwrap();
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_knows_a_directory_alone_has_let_go_of_it_when_it_is_delegated() {
    let master = with_lease(Duration::from_secs(1)).await;
    let root = mount(&master).await.root_inode;
    let services = master.services().clone();
    let (mut own, mut other) = (Session::open(&master, Before::default()), Session::open(&master, Before::default()));
    let alive = [take_in(&master, &own), take_in(&master, &other)];
    let directory = own.done(create(root, "d", Kind::Directory)).await;
    let session = other.id();
    let look = || async {
        let request = LookupRequest { parent: root, name: name("d"), session };
        services.lookup(Request::new(request)).await.map(drop)
    };
    let stream = other.stream.stream_id();
    let has_let_go = || services.watch.acknowledge(stream, services.watch.seq(), services.watch.seq());
    look().await.unwrap();
    own.announce(directory, &mut other).await;
    assert!(!own.change(wish(directory)).await.delegated, "it has not let go");
    // What it learns after that it has to forget again, and what others change.
    look().await.unwrap();
    assert!(has_let_go());
    own.announce(directory, &mut other).await;
    assert!(has_let_go());
    other.done(Change::SetAttr(SetAttr { inode: directory, mode: Some(0o711), ..SetAttr::default() })).await;
    assert!(!own.change(wish(directory)).await.delegated, "it has changed it");
    // What it changes itself meanwhile is not in its way.
    for number in 0.. {
        assert!(number < 500, "it is delegated");
        own.done(create(directory, &number.to_string(), Kind::File)).await;
        if own.change(wish(directory)).await.delegated {
            break;
        }
        assert!(has_let_go());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let looking = {
        let (services, request) = (services.clone(), LookupRequest { parent: root, name: name("d"), session });
        tokio::spawn(async move { services.lookup(Request::new(request)).await.map(drop) })
    };
    assert_eq!(own.recalled().await, directory);
    assert!(!looking.is_finished(), "it waits");
    own.let_go(directory, Vec::new()).await;
    tokio::time::timeout(PATIENCE, looking).await.unwrap().unwrap().unwrap();
    services.watch.end(own.id());
    services.watch.end(other.id());
    for task in alive {
        task.await.unwrap();
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_let_go_keeps_no_right_that_is_taken_from_him() {
    let master = with_lease(Duration::from_secs(1)).await;
    let root = mount(&master).await.root_inode;
    let services = master.services().clone();
    let (mut held, mut taking_in) = (Vec::new(), Vec::new());
    for name in ["a", "b"] {
        let client = Identity::new("c", Role::Client, name).unwrap();
        let mut own = Session::open(&master, Before { owner: Some(&client), ..Before::default() });
        let directory = own.hold(root, name).await;
        taking_in.push(take_in(&master, &own));
        held.push((own, client, directory));
    }
    // One may change nothing from now on; what the other says that it has answered would be checked by no user.
    let limits = UserLimits { root_squash: true, ..UserLimits::default() };
    let rules = vec![
        ClientRule { name: "a".into(), read_only: true, ..ClientRule::default() },
        ClientRule { name: "b".into(), users: Some(limits), ..ClientRule::default() },
    ];
    let clients = Some(ClientRules { rules });
    let request = UpdateMountRequest { path: "/m".into(), clients, ..UpdateMountRequest::default() };
    services.mount_changes.update(request).await.unwrap();
    for task in taking_in {
        task.await.unwrap();
    }
    for (own, client, directory) in held {
        assert!(!services.watch.is_live(own.id()));
        assert_eq!(holder(&master, directory), None);
        let change = Some(create(directory, "f", Kind::File));
        let answered = Mutation { seq: 50, change, is_write_back: true, ..Mutation::default() };
        let request = MutateRequest { session: own.id(), mutations: vec![answered], answered: 0 };
        let who = (client.client_name().map(Into::into), Some(&client));
        if let Ok(making) = services.begin_changes(request, who, None).await
            && let Ok(made) = making.await
        {
            assert_ne!(made.results[0].errno, 0, "{made:?}");
        }
        assert!(services.lookups.lookup(directory, &name("f")).await.unwrap_err().is_not_found());
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_never_lets_go_keeps_nobody_out_for_long() {
    let master = with_lease(Duration::from_secs(1)).await;
    let root = mount(&master).await.root_inode;
    let services = master.services().clone();
    let client = Identity::new("c", Role::Client, "a").unwrap();
    let mut own = Session::open(&master, Before { owner: Some(&client), ..Before::default() });
    let directory = own.hold(root, "d").await;
    let id = own.id();
    let taking_in = take_in(&master, &own);
    let recalls = &services.lookups.recalls;
    let asking = async { while recalls.recall(directory, 0).await.is_err() {} };
    tokio::time::timeout(PATIENCE, asking).await.expect("its session is ended");
    assert!(!services.watch.is_live(id));
    assert!(
        recalls.allow_delegations(None)
            && recalls.allow_delegations(Some("b"))
            && !recalls.allow_delegations(Some("a"))
    );
    taking_in.await.unwrap();
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_outlives_its_lease_until_somebody_wants_what_it_holds() {
    let mut master = with_lease(LEASE).await;
    let root = mount(&master).await.root_inode;
    let recorded = |master: &TestMaster| {
        let reader = master.services().lookups.reader.clone();
        async move { reader.read(|tables| Ok(tables.session_ids()?)).await.unwrap() }
    };
    let (mut id, mut directory, mut seq) = (0, 0, 0);
    for is_restarted in [false, true] {
        let mut own = Session::open(&master, session_before(id, id != 0));
        assert!(id == 0 || own.id() == id);
        if id == 0 {
            directory = own.hold(root, "d").await;
        } else {
            own.seq = seq;
            own.let_go(directory, vec![create(directory, "f", Kind::File)]).await;
            let found = master.services().lookups.lookup(directory, &name("f")).await;
            found.expect("what it had answered is made");
            directory = own.hold(root, "e").await;
        }
        (id, seq) = (own.id(), own.seq);
        // One that has a lock, and one that holds nothing.
        let mut locker = Session::open(&master, Before::default());
        let inode = locker.hold(root, &format!("l{is_restarted}")).await;
        let file = locker.done(create(inode, "locked", Kind::File)).await;
        let lock = Lock { session: locker.id(), r#type: LockType::Exclusive as i32, end: 1, ..Lock::default() };
        let lock = SetLock { inode: file, kind: LockKind::Posix as i32, lock: Some(lock), ..SetLock::default() };
        locker.done(Change::SetLock(lock)).await;
        let mut plain = Session::open(&master, Before::default());
        plain.done(create(root, &format!("p{is_restarted}"), Kind::File)).await;
        drop((own, locker, plain));
        if is_restarted {
            master = master.restart().await;
        }
        eventually(|| async { recorded(&master).await == [id] }).await;
    }
    let lookups = master.services().lookups.clone();
    let looked = tokio::time::timeout(PATIENCE, lookups.lookup(directory, &name("f"))).await.unwrap();
    assert!(looked.unwrap_err().is_not_found());
    let own = Session::open(&master, session_before(id, true));
    assert_ne!(own.id(), id, "it is over");
    eventually(|| async { recorded(&master).await.is_empty() }).await;
    master.stop().await;
}

/// What a process with a certificate of its own speaks with.
fn tls(authority: &Authority, identity: &Identity, file: &str) -> Arc<Tls> {
    let directory = authority.certificate().parent().unwrap();
    let issued = authority.issue(identity, Duration::from_secs(3600), directory, file).unwrap();
    let mut config = Config::default();
    config.cluster.name.clone_from(&identity.cluster);
    config.security.ca = authority.certificate().to_owned();
    (config.security.certificate, config.security.key) = (issued.certificate, issued.key);
    config.security.revoked = authority.revoke(&[], None).unwrap().path;
    let Transport::Tls(tls) = Transport::of(&config).unwrap() else { panic!("it is configured") };
    tls
}

/// The master's end of a connection of a client, and the client's.
async fn connection(master: &Tls, client: &Tls) -> (PeerStream, PeerStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (far, _) = listener.accept().await.unwrap();
    let (own, other) = tokio::join!(master.accept(far, Protocol::Grpc), client.connect(near, Role::Master));
    (own.unwrap(), other.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_session_holds_whose_certificate_is_revoked_is_kept_for_no_longer_than_its_lease() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::create(directory.path(), "c").unwrap();
    let [master, client] = [Role::Master, Role::Client].map(|role| Identity::new("c", role, "a").unwrap());
    let speaks = tls(&authority, &master, "master");
    let (stolen, _stolen) = connection(&speaks, &tls(&authority, &client, "stolen")).await;
    let (renewed, _renewed) = connection(&speaks, &tls(&authority, &client, "renewed")).await;
    let [stolen, renewed] = [&stolen, &renewed].map(|stream| stream.certificate().unwrap().clone());

    let master = with_lease(LEASE).await;
    let root = mount(&master).await.root_inode;
    let before = |certificate, id| Before { owner: Some(&client), certificate, ..session_before(id, id != 0) };
    let [mut taken, mut good, mut back] =
        [&stolen, &renewed, &stolen].map(|certificate| Session::open(&master, before(Some(certificate), 0)));
    for (session, name) in [(&mut taken, "taken"), (&mut good, "good"), (&mut back, "back")] {
        session.hold(root, name).await;
    }
    let (good_id, back_id) = (good.id(), back.id());
    let streams = [&taken, &good, &back].map(|session| session.stream.stream_id());
    let watch = &master.services().watch;
    authority.revoke(&[directory.path().join("stolen.pem")], None).unwrap();
    eventually(|| async {
        // Their streams are not those of the connections here.
        assert!(streams.iter().all(|stream| watch.acknowledge(*stream, 0, 0)));
        stolen.is_revoked()
    })
    .await;
    assert!(!renewed.is_revoked());
    drop((taken, good, back));
    // Whoever is back with another certificate before its lease is over goes on.
    let back = Session::open(&master, before(Some(&renewed), back_id));
    assert_eq!(back.id(), back_id);
    drop(back);
    let mut expected = [good_id, back_id];
    expected.sort_unstable();
    eventually(|| async {
        let reader = &master.services().lookups.reader;
        let mut recorded = reader.read(|tables| Ok(tables.session_ids()?)).await.unwrap();
        recorded.sort_unstable();
        recorded == expected
    })
    .await;
    // Those that are left outlive their leases, as ever.
    eventually(|| async { watch.outlives_lease(good_id) && watch.outlives_lease(back_id) }).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_master_knows_who_holds_what() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let mut own = Session::open(&master, Before::default());
    let (id, directory, seq) = (own.id(), own.hold(root, "d").await, own.seq);
    drop(own);
    let master = master.restart().await;
    assert_eq!(holder(&master, directory), Some(id));
    let lookups = master.services().lookups.clone();
    let look = tokio::spawn(async move { lookups.lookup(directory, &name("f")).await.map(drop) });
    let mut own = Session::open(&master, session_before(id, true));
    own.seq = seq;
    assert_eq!(own.id(), id);
    // It was asked before it was back, and is asked once more.
    assert_eq!(own.recalled().await, directory);
    assert!(!look.is_finished());
    own.let_go(directory, vec![create(directory, "f", Kind::File)]).await;
    tokio::time::timeout(PATIENCE, look).await.unwrap().unwrap().unwrap();
    drop(own);
    let master = master.restart().await;
    assert!(master.services().lookups.recalls.delegations().is_empty());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_time_is_over_is_removed_when_its_directory_was_recalled() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let mut own = Session::open(&master, Before::default());
    let directory = own.hold(root, "d").await;
    let ruled = own.done(create(root, "ruled", Kind::Directory)).await;
    let (services, session) = (master.services().clone(), own.id());
    let rule = SetTtl { inode: ruled, seconds: 1, action: TtlAction::Delete as i32 };
    // Nothing is held when the rule begins to count, and then a directory is that comes to be below it.
    own.let_go(directory, Vec::new()).await;
    own.done(Change::SetTtl(rule)).await;
    let directory = own.hold(root, "held").await;
    let rename = RenameName {
        parent: root,
        name: name("held"),
        new_parent: ruled,
        new_name: name("held"),
        ..RenameName::default()
    };
    own.done(Change::Rename(rename)).await;
    let old = Mutation {
        change: Some(create(directory, "old", Kind::File)),
        is_write_back: true,
        made_ns: 5,
        ..Mutation::default()
    };
    assert_eq!(own.mutate(vec![old]).await[0].errno, 0);
    assert_eq!(own.recalled().await, directory);
    let is_there = || async {
        let lookups = Lookups { asker: session, ..services.lookups.clone() };
        lookups.lookup(directory, &name("old")).await.is_ok()
    };
    assert!(is_there().await);
    own.let_go(directory, Vec::new()).await;
    eventually(|| async { !is_there().await }).await;
    master.stop().await;
}

#[tokio::test]
async fn a_recall_of_what_is_not_there_is_over_at_once() {
    let master = with_lease(Duration::from_secs(20)).await;
    let root = mount(&master).await.root_inode;
    let services = master.services();
    for inode in [root, 4711] {
        let request = RecallRequest { inode, session: 5, whole_mount: false };
        services.recall(Request::new(request)).await.unwrap();
    }
    let request = RecallRequest { inode: root, session: 5, whole_mount: true };
    services.recall(Request::new(request)).await.unwrap();
    let request = RecallRequest { inode: 4711, session: 5, whole_mount: true };
    assert_eq!(services.recall(Request::new(request)).await.unwrap_err().code(), Code::NotFound);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_of_files_beside_the_one_that_is_asked_for_come_with_it() {
    let master = with_lease(Duration::from_secs(20)).await;
    master.register_workers(1).await;
    let root = mount(&master).await.root_inode;
    let mut session = Session::open(&master, Before::default());
    let directory = session.done(create(root, "d", Kind::Directory)).await;
    let mut files = Vec::new();
    for file in 0..4 {
        let inode = session.done(create(directory, &format!("f{file}"), Kind::File)).await;
        let made = vec![Extent { workers: vec![1], ..Extent::default() }];
        session.done(Change::Commit(CommitContent { inode, grow_to: 100 + file, made, changed: true })).await;
        files.push(inode);
    }
    let elsewhere = session.done(create(root, "elsewhere", Kind::File)).await;
    let ask = async |beside: Vec<u64>| {
        let request = GetLayoutRequest { inode: files[0], session: session.id(), prefetch: beside, user: None };
        master.services().get_layout(Request::new(request)).await.map(tonic::Response::into_inner)
    };
    let answer = ask(vec![files[1], elsewhere, directory, u64::MAX, files[3]]).await.unwrap();
    let sizes: Vec<_> =
        answer.prefetch.iter().map(|layout| (layout.attr.unwrap().inode, layout.attr.unwrap().size)).collect();
    assert_eq!(sizes, [(files[1], 101), (files[3], 103)]);
    assert_eq!((answer.attr.unwrap().size, answer.extents.len(), answer.prefetch[0].extents.len()), (100, 1, 1));
    assert_eq!(ask(vec![1; 257]).await.unwrap_err().code(), Code::InvalidArgument);
    master.stop().await;
}

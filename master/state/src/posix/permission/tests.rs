//! What each kind of user may do, change by change.

use bytes::Bytes;
use cavern_proto::NOBODY;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    ClientRule, CommitContent, CreateInode, IdRange, LinkInode, Lock, LockKind, LockType, Mutation, MutationResult,
    OpenToWrite, RemoveName, RemoveXattr, RenameMode, SetLock, SetOpenRefs, SetQuota, SetTtl, SetXattr, Time,
    TtlAction, UserLimits, WriteType,
};
use cavern_proto::record::command::Command as Kinds;
use cavern_proto::record::{AttachMount, Command, EndSessionStep, Expire, InitCluster, Mutate};
use rocksdb::IteratorMode;

use super::*;
use crate::records::mode;
use crate::{Database, Family, Outcome, Tables, Transaction, apply};

const ACCES: i32 = Errno::ACCESS.raw_os_error();
const PERM: i32 = Errno::PERM.raw_os_error();
/// The session that asks, and another one of the same client.
const SESSION: u64 = 7;
const OTHER: u64 = 8;
/// A client whose root is squashed, as are users outside of a range; one whose root is root, within a range; and one
/// that is not limited.
const SQUASHED: &str = "squashed";
const RANGED: &str = "ranged";
const UNLIMITED: &str = "unlimited";
/// One that is not limited, and sets neither quotas nor times to live, as the others do.
const PLAIN: &str = "plain";
/// One that may only read.
const READER: &str = "reader";

fn owner() -> User {
    User { uid: 1000, gid: 100, groups: vec![100, 150] }
}

/// In the owner's group.
fn member() -> User {
    User { uid: 3000, gid: 300, groups: vec![100] }
}

fn stranger() -> User {
    User { uid: 2000, gid: 200, groups: vec![] }
}

/// Named in an access list.
fn named() -> User {
    User { uid: 4000, gid: 400, groups: vec![] }
}

fn root() -> User {
    User { uid: 0, gid: 0, groups: vec![0, 100] }
}

/// Outside of the range, though in the owner's group.
fn outside() -> User {
    User { uid: 5000, gid: 100, groups: vec![100] }
}

fn everybody() -> [(&'static str, Option<User>); 7] {
    [
        ("owner", Some(owner())),
        ("member", Some(member())),
        ("stranger", Some(stranger())),
        ("named", Some(named())),
        ("root", Some(root())),
        ("outside", Some(outside())),
        ("no user", None),
    ]
}

fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn creation(parent: u64, text: &str, kind: Kind, mode: u32) -> CreateInode {
    CreateInode { parent, name: name(text), kind: kind as i32, mode, ..CreateInode::default() }
}

fn create(parent: u64, text: &str, kind: Kind) -> Change {
    Change::Create(creation(parent, text, kind, 0o644))
}

fn remove(parent: u64, text: &str, directory: bool) -> Change {
    Change::Remove(RemoveName { parent, name: name(text), directory })
}

fn rename(from: (u64, &str), to: (u64, &str), mode: RenameMode) -> Change {
    let ((parent, old), (new_parent, new)) = (from, to);
    let (name, new_name, mode) = (name(old), name(new), mode as i32);
    Change::Rename(RenameName { parent, name, new_parent, new_name, mode })
}

fn set_xattr(inode: u64, text: &str, value: &[u8]) -> Change {
    let (name, value) = (name(text), Bytes::copy_from_slice(value));
    Change::SetXattr(SetXattr { inode, name, value, ..SetXattr::default() })
}

fn set(inode: u64, set: impl FnOnce(&mut SetAttr)) -> Change {
    let mut attributes = SetAttr { inode, ..SetAttr::default() };
    set(&mut attributes);
    Change::SetAttr(attributes)
}

fn commit(inode: u64) -> Change {
    Change::Commit(CommitContent { inode, grow_to: 10, changed: true, ..CommitContent::default() })
}

/// An access list by which user 4000 reads and writes, beside the owner.
fn list() -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in
        [(1u16, 6u16, u32::MAX), (2, 6, 4000), (4, 0, u32::MAX), (0x10, 6, u32::MAX), (0x20, 0, u32::MAX)]
    {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

struct Fixture {
    database: Database,
    root: u64,
    seq: u64,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let mut bench = Self { database, root: 0, seq: 0, _dir: dir };
        bench.run(Kinds::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let range = |low, high| IdRange { low, high };
        let squashed = UserLimits { root_squash: true, uids: vec![range(1000, 4000)], ..UserLimits::default() };
        let uids = vec![range(0, 0), range(1000, 1999)];
        let ranged = UserLimits { uids, gids: vec![range(0, 199)], ..UserLimits::default() };
        let rule = |name: &str, users| {
            let is_granted = name != PLAIN;
            let (sets_quotas, sets_ttls) = (is_granted, is_granted);
            ClientRule { name: name.into(), users, sets_quotas, sets_ttls, ..ClientRule::default() }
        };
        let (squashed, ranged) = (rule(SQUASHED, Some(squashed)), rule(RANGED, Some(ranged)));
        let reader = ClientRule { read_only: true, ..rule(READER, None) };
        let clients = vec![squashed, ranged, rule(UNLIMITED, None), rule(PLAIN, None), reader];
        let (uri, write_type) = ("memory://m".to_owned(), WriteType::FsMode as i32);
        let mount = Mount { path: "/m".into(), uri, write_type, block_size: 1 << 20, clients, ..Mount::default() };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let Outcome::Mount(mount) = bench.run(Kinds::AttachMount(attach)) else { panic!("no mount") };
        bench.root = mount.root_inode;
        bench
    }

    fn apply(&self, command: Kinds, writes: bool) -> Outcome {
        let mut transaction = Transaction::new(&self.database).unwrap();
        let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
        if writes {
            self.database.write(transaction.finish().unwrap().0.into_batch(&self.database)).unwrap();
        }
        outcome
    }

    fn run(&mut self, command: Kinds) -> Outcome {
        self.apply(command, true)
    }

    fn mutation(&mut self, (client, session): (Option<&str>, u64), user: Option<User>, change: Change) -> Kinds {
        self.seq += 1;
        // Whose it is said to be without being asked counts for nothing.
        let mutation = Mutation { seq: self.seq, user, uid: 0, gid: 0, change: Some(change), ..Mutation::default() };
        let client = client.map(str::to_owned);
        Kinds::Mutate(Mutate {
            session,
            answered: 0,
            now_ns: 1000,
            mutation: Some(mutation),
            client,
            ..Mutate::default()
        })
    }

    fn ask(&mut self, asker: (Option<&str>, u64), user: Option<User>, change: Change) -> MutationResult {
        let command = self.mutation(asker, user, change);
        let Outcome::Mutated(result, _) = self.run(command) else { panic!("no result") };
        *result
    }

    /// A change of whoever runs the cluster.
    fn done(&mut self, change: Change) -> u64 {
        let result = self.ask((None, OTHER), None, change);
        assert_eq!(result.errno, 0, "{}", result.reason);
        result.inode
    }

    /// Something of the owner's, or of root's.
    fn make(&mut self, parent: u64, text: &str, kind: Kind, (uid, mode): (u32, u32)) -> u64 {
        let inode = self.done(Change::Create(creation(parent, text, kind, 0)));
        let gid = if uid == 0 { 0 } else { 100 };
        let attributes = |set: &mut SetAttr| (set.uid, set.gid, set.mode) = (Some(uid), Some(gid), Some(mode));
        self.done(set(inode, attributes));
        inode
    }

    fn record(&self, inode: u64) -> InodeRecord {
        Tables::new(&self.database).inode(inode).unwrap().unwrap()
    }

    /// All of the state but results, and the sessions that have them.
    fn dump(&self) -> Vec<(Family, Vec<u8>, Vec<u8>)> {
        let mut dump = Vec::new();
        for &family in Family::STATE.iter().filter(|family| !matches!(family, Family::Result | Family::Session)) {
            for item in self.database.raw().iterator_cf(self.database.family(family), IteratorMode::Start) {
                let (key, value) = item.unwrap();
                dump.push((family, key.to_vec(), value.to_vec()));
            }
        }
        dump
    }

    /// Those may make a change, and all others are refused with one of these and leave everything as it was.
    fn check(&mut self, what: &str, change: &Change, allowed: &[&str], errnos: &[i32]) {
        for (who, user) in everybody() {
            let before = self.dump();
            let command = self.mutation((Some(SQUASHED), SESSION), user.clone(), change.clone());
            // Nothing of it is kept.
            let Outcome::Mutated(result, _) = self.apply(command, false) else { panic!("no result") };
            let MutationResult { errno, reason, .. } = &*result;
            if allowed.contains(&who) {
                assert_eq!(*errno, 0, "{what} by {who}: {reason}");
                continue;
            }
            assert!(errnos.contains(errno), "{what} by {who}: {errno}, {reason}");
            let written = self.ask((Some(SQUASHED), SESSION), user, change.clone());
            assert_eq!(written.errno, *errno, "{what} by {who}");
            assert_eq!(self.dump(), before, "{what} by {who}");
        }
        // Whoever is not limited, and whoever runs the cluster.
        for client in [Some(UNLIMITED), None] {
            let command = self.mutation((client, SESSION), None, change.clone());
            let Outcome::Mutated(result, _) = self.apply(command, false) else { panic!("no result") };
            assert_eq!(result.errno, 0, "{what} by {client:?}: {}", result.reason);
        }
    }
}

const ALL: [&str; 7] = ["owner", "member", "stranger", "named", "root", "outside", "no user"];

#[test]
fn names_change_where_the_directory_lets_the_user_do_so() {
    let mut bench = Fixture::new();
    let root = bench.root;
    let closed = bench.make(root, "closed", Kind::Directory, (1000, 0o750));
    bench.make(closed, "f", Kind::File, (1000, 0o640));
    bench.make(closed, "d", Kind::Directory, (1000, 0o755));
    let group = bench.make(root, "group", Kind::Directory, (1000, 0o775));
    let file = bench.make(group, "f", Kind::File, (1000, 0o664));
    let sticky = bench.make(root, "sticky", Kind::Directory, (0, 0o1777));
    bench.make(sticky, "f", Kind::File, (1000, 0o666));
    bench.make(sticky, "d", Kind::Directory, (1000, 0o777));
    let private = bench.make(root, "private", Kind::Directory, (1000, 0o700));
    let open_below = bench.make(private, "open", Kind::Directory, (1000, 0o777));
    let link = |inode, parent| Change::Link(LinkInode { inode, parent, name: name("l") });
    let (owner, members) = (&["owner"][..], &["owner", "member"][..]);

    for kind in [Kind::File, Kind::Directory, Kind::Symlink, Kind::Fifo] {
        let target = if kind == Kind::Symlink { name("x") } else { Bytes::new() };
        let in_directory =
            |parent| Change::Create(CreateInode { target: target.clone(), ..creation(parent, "new", kind, 0o644) });
        bench.check("a name in a closed directory", &in_directory(closed), owner, &[ACCES]);
        bench.check("a name in a group's directory", &in_directory(group), members, &[ACCES]);
        bench.check("a name in everybody's directory", &in_directory(sticky), &ALL, &[]);
        bench.check("a name below a private directory", &in_directory(open_below), owner, &[ACCES]);
        bench.check("a name in the mount's own directory", &in_directory(root), &[], &[ACCES]);
    }
    for kind in [Kind::CharacterDevice, Kind::BlockDevice] {
        bench.check("a device", &create(sticky, "new", kind), &[], &[PERM]);
    }
    let nameless = CreateInode { name: Bytes::new(), naming: 1, ..creation(group, "", Kind::File, 0o644) };
    bench.check("a file without a name", &Change::Create(nameless), members, &[ACCES]);
    bench.check("a link", &link(file, group), members, &[ACCES]);
    bench.check("unlink", &remove(group, "f", false), members, &[ACCES]);
    bench.check("unlink in a closed directory", &remove(closed, "f", false), owner, &[ACCES]);
    bench.check("rmdir", &remove(closed, "d", true), owner, &[ACCES]);
    bench.check("unlink in a sticky directory", &remove(sticky, "f", false), owner, &[PERM]);
    bench.check("rmdir in a sticky directory", &remove(sticky, "d", true), owner, &[PERM]);

    let (replace, exchange) = (RenameMode::Replace, RenameMode::Exchange);
    bench.check("rename", &rename((group, "f"), (group, "g"), replace), members, &[ACCES]);
    bench.check("rename out of a sticky directory", &rename((sticky, "f"), (sticky, "g"), replace), owner, &[PERM]);
    bench.check("rename into one", &rename((group, "f"), (sticky, "new"), replace), members, &[ACCES]);
    bench.check("replace in one", &rename((group, "f"), (sticky, "f"), replace), owner, &[ACCES, PERM]);
    bench.check("exchange with one", &rename((group, "f"), (sticky, "f"), exchange), owner, &[ACCES, PERM]);
    bench.check("a directory moves", &rename((group, "f"), (closed, "new"), replace), owner, &[ACCES]);
    let own = bench.make(group, "own", Kind::Directory, (1000, 0o755));
    let moves = rename((group, "own"), (sticky, "new"), replace);
    bench.check("a directory gets another above it", &moves, owner, &[ACCES]);
    let stays = rename((group, "own"), (group, "new"), replace);
    bench.check("a directory stays in its own", &stays, members, &[ACCES]);
    bench.check(
        "a quota",
        &Change::SetQuota(SetQuota { inode: own, max_inodes: Some(9), ..SetQuota::default() }),
        &[],
        &[PERM],
    );
    bench.check(
        "a rule of how long files live",
        &Change::SetTtl(SetTtl { inode: own, seconds: 9, action: 1 }),
        &[],
        &[PERM],
    );
}

#[test]
fn attributes_are_the_owners_and_content_is_of_those_who_may_write() {
    let mut bench = Fixture::new();
    let root = bench.root;
    let group = bench.make(root, "group", Kind::Directory, (1000, 0o775));
    let file = bench.make(group, "f", Kind::File, (1000, 0o664));
    let listed = bench.make(group, "listed", Kind::File, (1000, 0o600));
    bench.done(set_xattr(listed, "system.posix_acl_access", &list()));
    bench.done(set_xattr(file, "user.there", b"v"));
    bench.done(set_xattr(file, "security.capability", b"v"));
    let read_only = bench.make(group, "read-only", Kind::File, (1000, 0o444));
    let link = bench.done(Change::Create(CreateInode { target: name("f"), ..creation(group, "s", Kind::Symlink, 0) }));
    let private = bench.make(root, "private", Kind::Directory, (1000, 0o700));
    let below = bench.make(private, "f", Kind::File, (1000, 0o666));
    let sticky = bench.make(root, "sticky", Kind::Directory, (1000, 0o1777));
    let (owner, members) = (&["owner"][..], &["owner", "member"][..]);
    let (now, at) = (Time { now: true, ns: 0 }, Time { now: false, ns: 5 });

    bench.check("chmod", &set(file, |set| set.mode = Some(0o777)), owner, &[PERM]);
    bench.check("chown", &set(file, |set| set.uid = Some(3000)), &[], &[PERM]);
    bench.check("chown to root", &set(file, |set| set.uid = Some(0)), &[], &[PERM]);
    bench.check("chown to whose it is", &set(file, |set| set.uid = Some(1000)), owner, &[PERM]);
    bench.check("chgrp to another of the owner's", &set(file, |set| set.gid = Some(150)), owner, &[PERM]);
    bench.check("chgrp to one of others", &set(file, |set| set.gid = Some(300)), &[], &[PERM]);
    bench.check("utimes", &set(file, |set| set.mtime = Some(at)), owner, &[PERM]);
    bench.check("touch", &set(file, |set| (set.atime, set.mtime) = (Some(now), Some(now))), members, &[ACCES]);
    bench.check("truncate", &set(file, |set| set.size = Some(3)), members, &[ACCES]);
    bench.check("truncate by a list", &set(listed, |set| set.size = Some(3)), &["owner", "named"], &[ACCES]);
    bench.check("cut what the owner may not open", &set(read_only, |set| set.size = Some(3)), owner, &[ACCES]);
    bench.check("truncate below a private directory", &set(below, |set| set.size = Some(3)), owner, &[ACCES]);
    bench.check("what a write takes away", &set(file, |set| set.kill_privileges = true), members, &[ACCES]);
    bench.check("nothing is set", &set(file, |_| {}), members, &[ACCES]);

    bench.check("a commit", &commit(file), members, &[ACCES]);
    bench.check("a commit by a list", &commit(listed), &["owner", "named"], &[ACCES]);
    bench.check("a commit below a private directory", &commit(below), owner, &[ACCES]);
    let open = |inode, read| Change::OpenToWrite(OpenToWrite { inode, read });
    bench.check("open", &open(file, true), members, &[ACCES]);
    bench.check("open by a list", &open(listed, true), &["owner", "named"], &[ACCES]);
    bench.done(set(read_only, |set| set.mode = Some(0o222)));
    bench.check("open to write alone", &open(read_only, false), &ALL, &[]);
    bench.check("open to read as well", &open(read_only, true), &[], &[ACCES]);

    bench.check("user.", &set_xattr(file, "user.x", b"v"), members, &[ACCES]);
    bench.check("user. of a sticky directory", &set_xattr(sticky, "user.x", b"v"), owner, &[PERM]);
    bench.check("user. of a symlink", &set_xattr(link, "user.x", b"v"), &[], &[PERM]);
    bench.check("trusted.", &set_xattr(file, "trusted.x", b"v"), &[], &[PERM]);
    bench.check("a capability", &set_xattr(file, "security.capability", b"w"), &[], &[PERM]);
    bench.check("an access list", &set_xattr(file, "system.posix_acl_access", &list()), owner, &[PERM]);
    // Whoever does not get to the file is not told what it would take there.
    let acl = set_xattr(below, "system.posix_acl_access", &list());
    bench.check("an access list below a private directory", &acl, owner, &[ACCES]);
    for attribute in ["trusted.x", "security.capability"] {
        let refused = bench.ask((Some(SQUASHED), SESSION), Some(stranger()), set_xattr(below, attribute, b"v"));
        assert_eq!(refused.errno, ACCES, "{attribute}: {}", refused.reason);
    }
    let refused = bench.ask((Some(SQUASHED), SESSION), Some(stranger()), set_xattr(file, "user.x", b"v"));
    assert!(refused.reason.contains("may not write attributes of"), "{}", refused.reason);
    let taken = |text: &str| Change::RemoveXattr(RemoveXattr { inode: file, name: name(text) });
    bench.check("user. is taken away", &taken("user.there"), members, &[ACCES]);
    bench.check("a capability is, as before a write", &taken("security.capability"), members, &[ACCES]);
}

#[test]
fn what_is_made_belongs_to_whoever_the_user_counts_as() {
    let mut bench = Fixture::new();
    let sticky = bench.make(bench.root, "sticky", Kind::Directory, (0, 0o1777));
    let group = bench.make(bench.root, "group", Kind::Directory, (0, 0o2777));
    let squashed = (Some(SQUASHED), SESSION);
    for (number, (who, user)) in everybody().into_iter().enumerate() {
        let made = bench.ask(squashed, user.clone(), create(sticky, &format!("{number}"), Kind::File));
        let record = bench.record(made.inode);
        let expected = match who {
            "root" | "outside" | "no user" => (NOBODY, NOBODY),
            _ => user.map(|user| (user.uid, user.gid)).unwrap(),
        };
        assert_eq!((record.uid, record.gid), expected, "{who}");
    }
    // A directory with the bit gives its group, and a file no more of it than to a member.
    let change = |text: &str, kind| Change::Create(creation(group, text, kind, 0o2775));
    let made = bench.ask(squashed, Some(stranger()), change("f", Kind::File)).inode;
    assert_eq!((bench.record(made).gid, mode(&bench.record(made))), (0, 0o775));
    let made = bench.ask(squashed, Some(stranger()), change("d", Kind::Directory)).inode;
    assert_eq!((bench.record(made).gid, mode(&bench.record(made))), (0, 0o2775));
    // Nor does a chmod give the bit of a group that the owner is not in.
    let own = bench.ask(squashed, Some(stranger()), create(group, "own", Kind::File)).inode;
    bench.ask(squashed, Some(stranger()), set(own, |set| set.mode = Some(0o2755)));
    assert_eq!(mode(&bench.record(own)), 0o755);
}

#[test]
fn root_that_is_root_is_it_within_the_ranges() {
    let mut bench = Fixture::new();
    let group = bench.make(bench.root, "group", Kind::Directory, (1000, 0o700));
    let file = bench.make(group, "f", Kind::File, (1000, 0o600));
    let ranged = (Some(RANGED), SESSION);
    let mut errno = |change: Change| bench.ask(ranged, Some(root()), change).errno;
    assert_eq!(errno(create(group, "device", Kind::CharacterDevice)), 0);
    assert_eq!(errno(set(file, |set| (set.uid, set.gid) = (Some(1999), Some(199)))), 0);
    assert_eq!(errno(set(file, |set| set.uid = Some(NOBODY))), 0);
    assert_eq!(errno(set(file, |set| set.uid = Some(2000))), PERM);
    assert_eq!(errno(set(file, |set| set.gid = Some(200))), PERM);
    assert_eq!(errno(Change::SetQuota(SetQuota { inode: group, max_inodes: Some(9), ..SetQuota::default() })), 0);
    // A group outside is none of his.
    let shared = bench.make(bench.root, "shared", Kind::Directory, (0, 0o770));
    bench.done(set(shared, |set| set.gid = Some(300)));
    let user = User { uid: 1000, gid: 100, groups: vec![300] };
    assert_eq!(bench.ask(ranged, Some(user.clone()), create(shared, "f", Kind::File)).errno, ACCES);
    bench.done(set(shared, |set| set.gid = Some(150)));
    let user = User { groups: vec![150], ..user };
    assert_eq!(bench.ask(ranged, Some(user), create(shared, "f", Kind::File)).errno, 0);
}

#[test]
fn quotas_and_times_to_live_are_set_by_clients_whose_rule_says_so() {
    let mut bench = Fixture::new();
    let directory = bench.make(bench.root, "d", Kind::Directory, (1000, 0o755));
    let quota = Change::SetQuota(SetQuota { inode: directory, max_inodes: Some(9), ..SetQuota::default() });
    let ttl = Change::SetTtl(SetTtl { inode: directory, seconds: 9, action: 1 });
    for (change, option) in [(quota, "option quotas"), (ttl, "option ttl")] {
        let before = bench.dump();
        let result = bench.ask((Some(PLAIN), SESSION), Some(root()), change.clone());
        assert_eq!(result.errno, PERM, "{}", result.reason);
        assert!(result.reason.contains("\"plain\"") && result.reason.contains(option), "{}", result.reason);
        assert_eq!(bench.dump(), before);
        assert_eq!(bench.ask((Some(UNLIMITED), SESSION), None, change.clone()).errno, 0);
        // Whoever runs the cluster, and whoever has no name, where connections are not secured.
        assert_eq!(bench.ask((None, SESSION), None, change).errno, 0);
    }
}

#[test]
fn what_is_open_to_be_written_can_be_committed_until_it_is_let_go_of() {
    let mut bench = Fixture::new();
    let group = bench.make(bench.root, "group", Kind::Directory, (1000, 0o775));
    let file = bench.make(group, "f", Kind::File, (1000, 0o664));
    let squashed = (Some(SQUASHED), SESSION);
    let open = Change::OpenToWrite(OpenToWrite { inode: file, read: true });
    assert_eq!(bench.ask(squashed, Some(member()), open).errno, 0);
    bench.done(set(file, |set| set.mode = Some(0o600)));
    bench.done(set(group, |set| set.mode = Some(0o700)));
    // The client may say of it once more that it holds it.
    let holds = |hold: &[u64], let_go: &[u64]| {
        Change::SetOpenRefs(SetOpenRefs { opened: hold.to_vec(), closed: let_go.to_vec() })
    };
    assert_eq!(bench.ask(squashed, None, holds(&[file], &[])).errno, 0);
    assert_eq!(bench.ask(squashed, Some(member()), commit(file)).errno, 0);
    assert_eq!(bench.ask(squashed, None, commit(file)).errno, 0);
    assert_eq!(bench.ask((Some(SQUASHED), OTHER), Some(member()), commit(file)).errno, ACCES);
    // Another user of the client does no more with that than what the member has written.
    assert_eq!(bench.ask(squashed, Some(root()), set(file, |set| set.size = Some(0))).errno, ACCES);
    assert_eq!(bench.ask(squashed, None, holds(&[], &[file])).errno, 0);
    assert_eq!(bench.ask(squashed, Some(member()), commit(file)).errno, ACCES);
    // Holding it alone gives nothing.
    assert_eq!(bench.ask(squashed, Some(member()), holds(&[file], &[])).errno, 0);
    assert_eq!(bench.ask(squashed, Some(member()), commit(file)).errno, ACCES);
    // Whoever makes a file writes to it, whatever its mode.
    bench.done(set(group, |set| set.mode = Some(0o777)));
    for naming in [0, 1] {
        let text = if naming == 0 { "made" } else { "" };
        let made = CreateInode { naming, ..creation(group, text, Kind::File, 0o400) };
        let made = bench.ask(squashed, Some(root()), Change::Create(made)).inode;
        assert_eq!(bench.ask(squashed, None, commit(made)).errno, 0);
        bench.done(set(made, |set| set.uid = Some(1000)));
        assert_eq!(bench.ask(squashed, Some(root()), commit(made)).errno, 0);
        assert_eq!(bench.ask((Some(SQUASHED), OTHER), Some(root()), commit(made)).errno, ACCES);
    }
}

#[test]
fn nobody_holds_a_directory_but_what_was_answered_in_one_before_is_made() {
    let mut bench = Fixture::new();
    let group = bench.make(bench.root, "group", Kind::Directory, (1000, 0o700));
    let holding =
        |text: &str| Change::Create(CreateInode { delegate: true, ..creation(group, text, Kind::Directory, 0o755) });
    let squashed = (Some(SQUASHED), SESSION);
    let made = bench.ask(squashed, Some(owner()), holding("not"));
    assert!(made.errno == 0 && !made.delegated, "{made:?}");
    // A session that held one before users were limited for its client.
    let held = bench.ask((Some(UNLIMITED), SESSION), None, holding("held"));
    assert!(held.errno == 0 && held.delegated, "{held:?}");
    bench.seq += 1;
    let mutation = Mutation {
        seq: bench.seq,
        uid: 1000,
        gid: 100,
        is_write_back: true,
        change: Some(create(held.inode, "f", Kind::File)),
        ..Mutation::default()
    };
    let client = Some(SQUASHED.to_owned());
    let mutate = |mutation| Mutate {
        session: SESSION,
        answered: 0,
        now_ns: 1,
        mutation: Some(mutation),
        client,
        ..Mutate::default()
    };
    let Outcome::Mutated(result, _) = bench.run(Kinds::Mutate(mutate(mutation))) else { panic!("no result") };
    assert_eq!((result.errno, bench.record(result.inode).uid), (0, 1000));
    // To say so of anything else gains nothing.
    bench.seq += 1;
    let change = Some(create(group, "f", Kind::File));
    let mutation = Mutation { seq: bench.seq, is_write_back: true, change, ..Mutation::default() };
    let client = Some(SQUASHED.to_owned());
    let mutate =
        Mutate { session: SESSION, answered: 0, now_ns: 1, mutation: Some(mutation), client, ..Mutate::default() };
    let Outcome::Mutated(result, _) = bench.run(Kinds::Mutate(mutate)) else { panic!("no result") };
    assert_eq!(result.errno, Errno::STALE.raw_os_error());
}

#[test]
fn locks_and_holds_are_left_to_the_kernel_of_the_client() {
    let mut bench = Fixture::new();
    let file = bench.make(bench.root, "f", Kind::File, (1000, 0o600));
    let lock = Lock { owner: 1, r#type: LockType::Shared as i32, end: u64::MAX, ..Lock::default() };
    let lock = SetLock { inode: file, kind: LockKind::Flock as i32, lock: Some(lock), ..SetLock::default() };
    bench.check("a lock", &Change::SetLock(lock), &ALL, &[]);
    bench.check("a hold", &Change::AddOpenRef(file), &ALL, &[]);
}

#[test]
fn what_is_held_by_whoever_may_not_write_to_it_does_not_count_as_changed_nor_as_written_to() {
    let hold = |inode| Change::SetOpenRefs(SetOpenRefs { opened: vec![inode], closed: Vec::new() });
    let end = Kinds::EndSessionStep(EndSessionStep { session: SESSION, limit: 256, part: 0, now_ns: 99_000 });
    let mut bench = Fixture::new();
    let file = bench.make(bench.root, "f", Kind::File, (1000, 0o644));
    bench.done(commit(file));
    for (client, is_written) in [(READER, false), (SQUASHED, true)] {
        let before = bench.record(file);
        assert_eq!(bench.ask((Some(client), SESSION), None, hold(file)).errno, 0);
        let tables = Tables::new(&bench.database);
        assert!(tables.is_open(file).unwrap(), "{client}");
        assert_eq!(tables.is_written_by_others(file, 0).unwrap(), is_written, "{client}");
        bench.run(end.clone());
        assert!(!Tables::new(&bench.database).is_open(file).unwrap(), "{client}");
        assert_eq!(bench.record(file) != before, is_written, "{client}");
    }
    // Who may write to it has perhaps written when the session ends, whatever it holds once more afterwards.
    let open = Change::OpenToWrite(OpenToWrite { inode: file, read: false });
    let asked = [((Some(UNLIMITED), None), hold(file)), ((Some(SQUASHED), Some(owner())), open)];
    for ((client, user), change) in asked {
        let before = bench.record(file);
        assert_eq!(bench.ask((client, SESSION), user, change).errno, 0, "{client:?}");
        for again in [client, Some(SQUASHED), Some(READER)] {
            assert_eq!(bench.ask((again, SESSION), None, hold(file)).errno, 0, "{again:?}");
            assert!(Tables::new(&bench.database).is_written_by_others(file, 0).unwrap(), "{client:?}, {again:?}");
        }
        bench.run(end.clone());
        assert_eq!(bench.record(file).version, before.version + 1, "{client:?}");
    }
    // Its time to live is over all the same.
    bench.done(Change::SetTtl(SetTtl { inode: bench.root, seconds: 1, action: TtlAction::Delete as i32 }));
    assert_eq!(bench.ask((Some(READER), SESSION), None, hold(file)).errno, 0);
    let expire = Expire { inode: file, ctime_ns: bench.record(file).ctime_ns, now_ns: 2_000_000_000 };
    assert!(matches!(bench.run(Kinds::Expire(expire)), Outcome::Done));
    let tables = Tables::new(&bench.database);
    assert!(tables.dentry(bench.root, b"f").unwrap().is_none());
    assert!(tables.inode(file).unwrap().is_some(), "and it is kept for whoever reads it");
}

use std::collections::BTreeSet;

use bytes::Bytes;
use cavern_consensus::clock::Reading;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Existing, Extent, Kind, LinkInode, Mount, Mutation, RenameMode, RenameName, SetTtl,
    Worker, WriteType,
};
use cavern_proto::record::command::Command as Kinds;
use cavern_proto::record::{AdoptListing, AttachMount, InitCluster, ListedEntry, Mutate, PutWorker, Restored};
use cavern_state::records::is_directory;
use cavern_state::{Database, Tables, Transaction, apply};
use proptest::prelude::*;
use rocksdb::perf::{PerfContext, PerfMetric, PerfStatsLevel, set_perf_stats};

use super::*;

const SECOND: i64 = 1_000_000_000;
/// The time that it is.
const NOW: i64 = 1_000_000 * SECOND;

struct Fixture {
    database: Database,
    root: u64,
    seq: u64,
    clock: Clock,
    _dir: tempfile::TempDir,
}

fn rule(seconds: u64, action: TtlAction) -> TtlRecord {
    TtlRecord { seconds, action: action as i32 }
}

impl Fixture {
    fn new(existing: Existing) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let clock = Clock::new(|| Reading { wall_ns: NOW, uptime_ns: NOW });
        let mut bench = Self { database, root: ROOT_INODE + 1, seq: 0, clock, _dir: dir };
        bench.run(Kinds::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let (path, uri, write_type) = ("/m".to_owned(), "memory://m".to_owned(), WriteType::FsMode as i32);
        let existing = existing as i32;
        let mount = Mount { path, uri, write_type, existing, block_size: 1 << 20, created_ns: 1, ..Mount::default() };
        bench.run(Kinds::AttachMount(AttachMount { mount: Some(mount), mounts_epoch: 0 }));
        bench
    }

    fn run(&mut self, command: Kinds) -> Outcome {
        let mut transaction = Transaction::new(&self.database).unwrap();
        let command = cavern_proto::record::Command { command: Some(command) };
        let outcome = apply(&mut transaction, command).unwrap();
        self.database.write(transaction.finish().unwrap().0.into_batch(&self.database)).unwrap();
        outcome
    }

    fn tables(&self) -> Tables<'_> {
        Tables::new(&self.database)
    }

    /// Makes a change so many seconds ago.
    fn change(&mut self, age: i64, change: Change) -> u64 {
        self.seq += 1;
        let mutation = Mutation { seq: self.seq, uid: 0, gid: 0, change: Some(change), ..Mutation::default() };
        let (answered, now_ns) = (self.seq - 1, NOW - age * SECOND);
        let mutate = Mutate { session: 7, answered, now_ns, mutation: Some(mutation), ..Mutate::default() };
        let Outcome::Mutated(result, _) = self.run(Kinds::Mutate(mutate)) else { panic!("no result") };
        assert_eq!(result.errno, 0, "{}", result.reason);
        result.inode
    }

    fn create(&mut self, age: i64, parent: u64, name: &str, kind: Kind) -> u64 {
        let name = name.to_owned().into();
        self.change(age, Change::Create(CreateInode { parent, name, kind: kind as i32, ..CreateInode::default() }))
    }

    fn set_rule(&mut self, directory: u64, rule: TtlRecord) {
        let TtlRecord { seconds, action } = rule;
        self.change(0, Change::SetTtl(SetTtl { inode: directory, seconds, action }));
    }

    fn arrivals(&self) -> u64 {
        self.tables().counters().unwrap().arrivals
    }

    /// All files that are due by one rule, and the oldest time that is left.
    fn walk(&self, directory: u64, rules: &Rules, limit: usize) -> (BTreeSet<u64>, i64) {
        let mut walk = Walk::new(directory, rules, NOW).unwrap();
        let mut found = BTreeSet::new();
        while !walk.is_over() {
            for due in walk.step(self.tables(), limit, &self.clock).unwrap() {
                assert!(found.insert(due.inode), "inode {} was found twice", due.inode);
            }
        }
        (found, walk.oldest_ns())
    }

    /// What all rules together say of all inodes: the nearest directory with a rule decides.
    fn expected(&self, rules: &Rules) -> BTreeSet<u64> {
        let is_due = |record: &cavern_proto::record::InodeRecord| {
            let mut at = record.parent;
            let governing = loop {
                match rules.get(&at) {
                    Some(rule) => break rule,
                    None => match self.tables().inode(at).unwrap() {
                        Some(above) if above.mount_id != 0 => at = above.parent,
                        _ => return false,
                    },
                }
            };
            governing.action() == TtlAction::Delete && NOW - record.ctime_ns >= governing.seconds as i64 * SECOND
        };
        let all = self.tables().inodes_after(0, usize::MAX).unwrap().into_iter();
        let files = all.filter(|(_, record)| !record.unlinked && !is_directory(record) && record.mount_id != 0);
        files.filter(|(_, record)| is_due(record)).map(|(inode, _)| inode).collect()
    }
}

#[test]
fn what_lies_elsewhere_is_not_looked_at() {
    const ELSEWHERE: usize = 5000;
    let mut bench = Fixture::new(Existing::None);
    let elsewhere = bench.create(100, bench.root, "elsewhere", Kind::Directory);
    let governed = bench.create(100, bench.root, "governed", Kind::Directory);
    for number in 0..ELSEWHERE {
        bench.create(100, elsewhere, &number.to_string(), Kind::File);
    }
    let below = bench.create(100, governed, "below", Kind::Directory);
    let own = bench.create(100, governed, "own", Kind::Directory);
    let old: BTreeSet<u64> = (0..5).map(|number| bench.create(100, below, &number.to_string(), Kind::File)).collect();
    for number in 0..500 {
        bench.create(100, own, &number.to_string(), Kind::File);
    }
    bench.create(3, governed, "young", Kind::File);
    let rules = Rules::from([(governed, rule(10, TtlAction::Delete)), (own, rule(1000, TtlAction::None))]);

    set_perf_stats(PerfStatsLevel::EnableCount);
    let mut counts = PerfContext::default();
    counts.reset();
    assert_eq!(bench.walk(governed, &rules, PAGE), (old, NOW - 3 * SECOND));
    let read = [PerfMetric::GetFromMemtableCount, PerfMetric::SeekOnMemtableCount, PerfMetric::NextOnMemtableCount];
    let read: u64 = read.into_iter().map(|metric| counts.metric(metric)).sum();
    assert!((1..100).contains(&read), "{read} records were read");
}

#[test]
fn nothing_is_looked_at_before_something_can_be_due() {
    let mut bench = Fixture::new(Existing::None);
    let governed = bench.create(100, bench.root, "governed", Kind::Directory);
    let other = bench.create(100, bench.root, "other", Kind::Directory);
    let rules = Rules::from([(governed, rule(10, TtlAction::Delete))]);
    let known = |bench: &Fixture| {
        let (arrivals, oldest_ns) = (bench.arrivals(), bench.walk(governed, &rules, PAGE).1);
        let began = Instant::now().checked_sub(Duration::from_secs(5)).unwrap();
        RuleState { began, arrivals, oldest_ns }
    };
    let is_due = |known: &RuleState, bench: &Fixture, later: i64| {
        let clock = Clock::new(move || Reading { wall_ns: NOW + later * SECOND, uptime_ns: NOW + later * SECOND });
        known.is_due(&rules[&governed], bench.arrivals(), &clock)
    };
    let empty = known(&bench);
    assert!(!is_due(&empty, &bench, 9) && is_due(&empty, &bench, 11), "a file may be made right after the look");
    bench.create(4, governed, "file", Kind::File);
    let with_file = known(&bench);
    assert!(!is_due(&with_file, &bench, 5) && is_due(&with_file, &bench, 7));
    // A file that moves is changed by that; what is in a directory that moves is not.
    let old = bench.create(100, other, "d", Kind::Directory);
    let inside = bench.create(100, old, "old", Kind::File);
    let rename = |from: &'static str, to: &'static str| {
        let (name, new_name) = (Bytes::from(from), Bytes::from(to));
        let mode = RenameMode::Replace as i32;
        Change::Rename(RenameName { parent: other, name, new_parent: governed, new_name, mode })
    };
    bench.create(100, other, "f", Kind::File);
    bench.change(2, rename("f", "f"));
    assert!(!is_due(&with_file, &bench, 5));
    bench.change(1, rename("d", "d"));
    assert!(is_due(&with_file, &bench, 5));
    assert_eq!(bench.walk(governed, &rules, PAGE).0, BTreeSet::from([inside]));
    let just_now = RuleState { began: Instant::now(), ..with_file };
    assert!(!is_due(&just_now, &bench, 50), "one look in a tenth of the time");
}

#[test]
fn what_could_not_be_expired_is_looked_at_again() {
    let mut bench = Fixture::new(Existing::None);
    let governed = bench.create(100, bench.root, "governed", Kind::Directory);
    let file = bench.create(50, governed, "file", Kind::File);
    let by = |action| Rules::from([(governed, rule(10, action))]);
    let (delete, free) = (by(TtlAction::Delete), by(TtlAction::Free));
    let mut walk = Walk::new(governed, &delete, NOW).unwrap();
    let due = walk.step(bench.tables(), PAGE, &bench.clock).unwrap();
    assert!(walk.is_over() && due.len() == 1 && walk.oldest_ns() == NOW);
    walk.leave(&due[0]);
    assert_eq!(walk.oldest_ns(), NOW - 50 * SECOND);
    // One without blocks has nothing to be freed; one that the bucket lacks is to be freed later.
    assert_eq!(bench.walk(governed, &free, PAGE), (BTreeSet::new(), NOW));
    let worker = Some(Worker { data_address: "worker:1".into(), ..Worker::default() });
    bench.run(Kinds::PutWorker(PutWorker { uuid: vec![1; 16].into(), worker, ..PutWorker::default() }));
    let made = vec![Extent { workers: vec![1], ..Extent::default() }];
    bench.change(40, Change::Commit(CommitContent { inode: file, grow_to: 5, made, changed: true }));
    assert_eq!(bench.walk(governed, &free, PAGE), (BTreeSet::new(), NOW - 40 * SECOND));
}

#[test]
fn what_no_rule_removes_any_more_when_it_is_to_go_stays() {
    let mut bench = Fixture::new(Existing::None);
    let root = bench.root;
    let delete = rule(10, TtlAction::Delete);
    let governed = bench.create(100, root, "governed", Kind::Directory);
    let mut file_below = |name: &str| {
        let directory = bench.create(100, governed, name, Kind::Directory);
        (directory, bench.create(50, directory, "file", Kind::File))
    };
    let [(_, gone), (own, kept), (_, moved), (longer, young), (_, late)] =
        ["gone", "own", "moved", "longer", "late"].map(&mut file_below);
    bench.set_rule(governed, delete);
    let mut walk = Walk::new(governed, &Rules::from([(governed, delete)]), NOW).unwrap();
    let due = walk.step(bench.tables(), PAGE, &bench.clock).unwrap();
    assert_eq!(due.len(), 5);
    let expire = |bench: &mut Fixture, file: u64| {
        let due = due.iter().find(|due| due.inode == file).unwrap();
        bench.run(due.command.clone())
    };
    bench.set_rule(own, rule(10, TtlAction::None));
    bench.set_rule(longer, rule(60, TtlAction::Delete));
    let (name, new_name, mode) = (Bytes::from("moved"), Bytes::from("moved"), RenameMode::Replace as i32);
    bench.change(0, Change::Rename(RenameName { parent: governed, name, new_parent: root, new_name, mode }));
    for file in [kept, moved, young] {
        assert!(matches!(expire(&mut bench, file), Outcome::Refused(_)), "inode {file}");
    }
    assert_eq!(expire(&mut bench, gone), Outcome::Done);
    bench.set_rule(governed, rule(0, TtlAction::None));
    assert!(matches!(expire(&mut bench, late), Outcome::Refused(_)));
    let is_named = |file: u64| bench.tables().inode(file).unwrap().is_some_and(|record| !record.unlinked);
    assert_eq!([gone, kept, moved, young, late].map(is_named), [false, true, true, true, true]);
}

#[test]
fn what_was_in_the_bucket_lives_from_its_last_change_there() {
    let mut bench = Fixture::new(Existing::Indexed);
    let arrivals = bench.arrivals();
    // By what a program has set, each is from before that.
    let restored = Restored { kind: Kind::File as i32, mtime_ns: 5, ..Restored::default() };
    let entry = |name: &'static str, age: i64, restored: Option<Restored>| ListedEntry {
        name: name.into(),
        kind: Kind::File as i32,
        size: 1,
        mtime_ns: NOW - age * SECOND,
        etag: name.to_owned(),
        restored,
    };
    let entries = vec![
        entry("old", 20, None),
        entry("recovered-old", 20, Some(restored.clone())),
        entry("recovered-young", 5, Some(restored)),
        entry("young", 5, None),
    ];
    let listing = AdoptListing { mount_id: 1, directory: bench.root, entries, complete: true, ..Default::default() };
    bench.run(Kinds::AdoptListing(AdoptListing { now_ns: NOW, ..listing }));
    assert!(bench.arrivals() > arrivals);
    let rules = Rules::from([(bench.root, rule(10, TtlAction::Delete))]);
    let inode = |name: &str| bench.tables().dentry(bench.root, name.as_bytes()).unwrap().unwrap().inode;
    let expected = BTreeSet::from([inode("old"), inode("recovered-old")]);
    assert_eq!(bench.walk(bench.root, &rules, PAGE), (expected, NOW - 5 * SECOND));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn walks_find_what_the_nearest_rules_govern(
        directories in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
        files in prop::collection::vec((any::<prop::sample::Index>(), 0i64..40), 0..40),
        links in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0i64..40), 0..10),
        ruled in prop::collection::vec((any::<prop::sample::Index>(), 1u64..40, 0i32..3), 0..6),
        limit in 1usize..20,
    ) {
        let mut bench = Fixture::new(Existing::None);
        let (mut places, mut all) = (vec![bench.root], Vec::new());
        for (number, above) in directories.iter().enumerate() {
            places.push(bench.create(50, *above.get(&places), &format!("d{number}"), Kind::Directory));
        }
        for (number, (above, age)) in files.iter().enumerate() {
            all.push(bench.create(*age, *above.get(&places), &format!("f{number}"), Kind::File));
        }
        for (number, (file, above, age)) in links.iter().enumerate().filter(|_| !all.is_empty()) {
            let (inode, name) = (*file.get(&all), format!("l{number}").into());
            bench.change(*age, Change::Link(LinkInode { inode, parent: *above.get(&places), name }));
        }
        let rules: Rules = ruled
            .into_iter()
            .map(|(place, seconds, action)| (*place.get(&places), TtlRecord { seconds, action }))
            .collect();
        let mut found = BTreeSet::new();
        for directory in rules.keys() {
            let (due, _) = bench.walk(*directory, &rules, limit);
            prop_assert!(found.is_disjoint(&due));
            found.extend(due);
        }
        prop_assert_eq!(found, bench.expected(&rules));
    }
}

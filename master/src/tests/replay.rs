//! The state machine is deterministic: the same commands make the same bytes.

use bytes::Bytes;
use cavern_proto::master::{Job, Kind as EntryKind, Mount, View, Worker};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{
    ApplyListing, AttachMount, BeginView, Command, FreezeView, InitCluster, ListedEntry, ListingGroup, PutWorker,
    ReapOrphans, RemoveMount, RemoveView, SetWorkerState,
};
use cavern_state::{Change, Database, Family, Outcome, Transaction, apply};
use proptest::prelude::*;
use rocksdb::IteratorMode;

fn any_name() -> impl Strategy<Value = Bytes> {
    prop::sample::select(vec!["a", "b", "c"]).prop_map(|name| Bytes::from_static(name.as_bytes()))
}

fn any_group() -> impl Strategy<Value = ListingGroup> {
    let entry = (any_name(), prop::bool::ANY, 0u64..3).prop_map(|(name, is_directory, version)| ListedEntry {
        name,
        kind: if is_directory { EntryKind::Directory } else { EntryKind::File } as i32,
        size: version,
        mtime_ns: 1,
        etag: version.to_string(),
        restored: None,
    });
    let path = prop::collection::vec(any_name(), 0..3);
    let (remove, upsert) = (prop::collection::vec(any_name(), 0..2), prop::collection::vec(entry, 0..4));
    (path, remove, upsert, 0i64..3, 0u64..8, 0i64..3).prop_map(
        |(directory, remove, upsert, listed_ns, inode, observed_ns)| ListingGroup {
            directory,
            remove,
            upsert,
            listed_ns,
            expect_inode: inode.saturating_sub(5),
            observed_ns,
        },
    )
}

fn any_command() -> impl Strategy<Value = Kind> {
    let path = prop::sample::select(vec!["/m", "/x/m", "/x/m/n", "/x"]).prop_map(str::to_owned);
    prop_oneof![
        1 => Just(Kind::Init(InitCluster { cluster_id: "other".into(), now_ns: 9, feature_version: 1 })),
        3 => path.prop_map(|path| {
            let mount = Some(Mount { path, uri: "memory://m".into(), ..Mount::default() });
            // Compared with whatever mount table there is then.
            Kind::AttachMount(AttachMount { mount, mounts_epoch: 0 })
        }),
        1 => (1u32..4).prop_map(|mount_id| Kind::RemoveMount(RemoveMount { mount_id, change: 0, discard: true })),
        8 => (1u32..4, prop::collection::vec(any_group(), 1..4))
            .prop_map(|(mount_id, groups)| {
                Kind::Listing(ApplyListing { mount_id, groups, now_ns: 3, ..ApplyListing::default() })
            }),
        2 => (0u8..3, 0u8..3).prop_map(|(uuid, port)| {
            let worker = Worker { data_address: format!("h:{port}"), ..Worker::default() };
            let (uuid, worker) = (Bytes::copy_from_slice(&[uuid; 16]), Some(worker));
            Kind::PutWorker(PutWorker { uuid, worker, ..PutWorker::default() })
        }),
        1 => (1u64..4, 1i32..3).prop_map(|(worker_id, state)| Kind::WorkerState(SetWorkerState { worker_id, state })),
        1 => (0u64..3, 0i32..4).prop_map(|(id, state)| Kind::PutJob(Job { id, state, ..Job::default() })),
        2 => (1u32..4).prop_map(|limit| Kind::ReapOrphans(ReapOrphans { limit, from: 0 })),
        2 => (1u32..4, 0u32..3).prop_map(|(mount_id, name)| {
            let view = View { name: name.to_string(), mount_id, store_mount_id: mount_id, ..View::default() };
            Kind::BeginView(BeginView { view: Some(view) })
        }),
        1 => (1u32..4, any::<bool>()).prop_map(|(id, settled)| Kind::FreezeView(FreezeView { id, settled })),
        1 => (1u32..4).prop_map(|id| Kind::RemoveView(RemoveView { id, deleted: false })),
    ]
}

/// Every key and value of the state.
type Dump = Vec<(Vec<u8>, Vec<u8>)>;

fn replay(commands: &[Kind]) -> (Vec<Outcome>, Vec<Change>, Dump) {
    let dir = tempfile::tempdir().unwrap();
    let database = Database::open(dir.path(), 1 << 20).unwrap();
    let (mut outcomes, mut all_changes) = (Vec::new(), Vec::new());
    let first = Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 });
    for mut kind in std::iter::once(&first).chain(commands).cloned() {
        let mut transaction = Transaction::new(&database).unwrap();
        if let Kind::AttachMount(attach) = &mut kind {
            attach.mounts_epoch = transaction.counters.mounts_epoch;
        }
        outcomes.push(apply(&mut transaction, Command { command: Some(kind) }).unwrap());
        let (writes, changes) = transaction.finish().unwrap();
        database.write(writes.into_batch(&database)).unwrap();
        all_changes.extend(changes.list);
    }
    check_invariants(&database);
    let mut dump = Vec::new();
    for &family in Family::STATE {
        for item in database.raw().iterator_cf(database.family(family), IteratorMode::Start) {
            let (key, value) = item.unwrap();
            dump.push((key.to_vec(), value.to_vec()));
        }
    }
    (outcomes, all_changes, dump)
}

/// Every name leads to an inode that says so, every inode has a name or is waiting to be reaped, and the count is
/// right.
fn check_invariants(database: &Database) {
    let tables = cavern_state::Tables::new(database);
    let mut inodes = 0;
    for item in database.raw().iterator_cf(database.family(Family::Inode), IteratorMode::Start) {
        let (key, _) = item.unwrap();
        let inode = cavern_state::records::leading_id(&key).unwrap();
        let record = tables.inode(inode).unwrap().unwrap();
        inodes += 1;
        let is_orphan = database.get(Family::Orphan, &key).unwrap().is_some();
        if inode != cavern_proto::ROOT_INODE && !is_orphan {
            let dentry = tables.dentry(record.parent, &record.name).unwrap();
            assert_eq!(dentry.map(|dentry| dentry.inode), Some(inode), "the name of inode {inode}");
        }
    }
    assert_eq!(tables.counters().unwrap().inodes, inodes);
    for item in database.raw().iterator_cf(database.family(Family::Dentry), IteratorMode::Start) {
        let (key, _) = item.unwrap();
        let parent = cavern_state::records::leading_id(&key).unwrap();
        let dentry = tables.dentry(parent, &key[8..]).unwrap().unwrap();
        let record = tables.inode(dentry.inode).unwrap().expect("the inode of a name");
        assert_eq!(record.kind, dentry.kind);
        assert!(tables.inode(parent).unwrap().is_some(), "the directory of a name");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn the_same_log_makes_the_same_state(commands in prop::collection::vec(any_command(), 0..40)) {
        let (first, second) = (replay(&commands), replay(&commands));
        prop_assert_eq!(first.0, second.0);
        prop_assert_eq!(first.1, second.1);
        prop_assert!(first.2 == second.2, "the tables differ");
    }
}

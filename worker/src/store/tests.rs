//! The store against a model, with restarts, crashes and damage at any point.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use cavern_conf::process::Metrics;
use cavern_conf::{Budgets, ByteSize};
use cavern_proto::chunk::{chunk_count, chunk_range};
use cavern_proto::{BlockId, CHUNK_BYTES, ContentId};
use proptest::prelude::*;

use super::space::UNIT_BYTES;
use super::*;

pub(super) const MIB: u64 = 1 << 20;

thread_local! {
    static KEYS: RefCell<Arc<KeyWrapping>> = RefCell::default();
}

/// With this key-encryption key and the former one, as bytes of files.
pub(super) fn wrapping(current: &[u8], former: Option<&[u8]>) -> Arc<KeyWrapping> {
    Arc::new(KeyWrapping::of_bytes("worker.key_encryption_key", Some(current), former).unwrap())
}

/// What is opened meanwhile is encrypted, with these keys.
pub(super) fn with_keys<T>(keys: Arc<KeyWrapping>, body: impl FnOnce() -> T) -> T {
    struct Without;
    impl Drop for Without {
        fn drop(&mut self) {
            KEYS.take();
        }
    }
    let _without = Without;
    KEYS.replace(keys);
    body()
}

pub(super) fn options(dirs: &[(&Path, u64)]) -> StoreOptions {
    StoreOptions {
        conf: schema::Worker {
            create_dirs: true,
            high_watermark: 0.98,
            low_watermark: 0.96,
            fill_size_max: ByteSize::kib(128),
            index_cache: ByteSize::mib(1),
            ..schema::Worker::default()
        },
        directories: dirs
            .iter()
            .map(|(path, bytes)| format!("[SSD:{bytes}B]{}", path.display()).parse().unwrap())
            .collect(),
        max_open_blocks: 4,
        keys: KEYS.with_borrow(Arc::clone),
        budget: Budgets::default().worker,
    }
}

pub(super) fn open_store(dir: &Path, capacity: u64) -> Stores {
    try_open(dir, capacity).unwrap()
}

pub(super) fn try_open(dir: &Path, capacity: u64) -> Result<Stores, WorkerError> {
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let (store, cleanup) = open(options(&[(dir, capacity)]), metrics, mpsc::channel(64).0)?;
    cleanup.run(&CancellationToken::new());
    Ok(store)
}

pub(super) fn id(value: u64) -> BlockId {
    BlockId { content: ContentId::of_object("s", &value.to_string(), "e", 1, 1), index: 0 }
}

/// The bytes of a chunk, different for each block and chunk.
fn content(id: &BlockId, index: u32, length: u32) -> Vec<u8> {
    let seed = id.content.hash64() ^ u64::from(index) << 17;
    let bytes = chunk_range(index, length).len();
    (0..bytes as u64).map(|at| (seed.wrapping_add(at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

/// Fills chunks that are missing, as the fill engine does.
pub(super) fn fill(store: &Stores, id: &BlockId, length: u32, chunks: Range<u32>) -> Result<(), StoreError> {
    fill_of(1, store, id, length, chunks)
}

/// Fills chunks of a block of a mount.
fn fill_of(mount_id: u32, store: &Stores, id: &BlockId, length: u32, chunks: Range<u32>) -> Result<(), StoreError> {
    let cache = &store.cache;
    let block = cache.create(id, length, mount_id, Touch::None)?;
    for index in chunks {
        cache.verify(&block, index..index + 1)?;
        if block.has(index..index + 1) {
            continue;
        }
        cache.reserve(&block, index..index + 1)?;
        let bytes = content(id, index, length);
        let pieces: Vec<Bytes> = bytes.chunks(50_000).map(Bytes::copy_from_slice).collect();
        cache.write(&block, index, &pieces).unwrap();
    }
    block.close_writer();
    cache.record(&block)
}

pub(super) fn find(store: &Stores, id: &BlockId) -> Option<Arc<CachedBlock>> {
    store.cache.find(id, Touch::Open)
}

/// The chunks that can be read, each compared with what it must be.
fn readable(store: &Stores, id: &BlockId, length: u32) -> Vec<u32> {
    let Some(block) = find(store, id) else { return Vec::new() };
    assert_eq!(block.length(), length);
    store.cache.verify(&block, 0..chunk_count(length)).unwrap();
    let verified: Vec<u32> = block.state().verified.iter().collect();
    for index in &verified {
        let expected = content(id, *index, length);
        let mut bytes = vec![0; expected.len()];
        block.read(chunk_range(*index, length).start, &mut bytes).unwrap();
        assert!(bytes == expected, "chunk {index} of {id} has wrong bytes");
    }
    verified
}

pub(super) fn used(store: &Stores) -> u64 {
    store.table.residents.lock().cache.check_sums();
    store.table.usage()[0].used_bytes
}

pub(super) fn block_files(dir: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir.join("blocks")).unwrap().map(|folder| folder.unwrap().path());
    folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|file| file.unwrap().path())).collect()
}

pub(super) fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for item in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(item.file_name());
        if item.file_type().unwrap().is_dir() {
            copy_tree(&item.path(), &target);
        } else {
            fs::copy(item.path(), target).unwrap();
        }
    }
}

/// Copies the directory of an open store as a crash would leave it at this moment.
pub(super) fn copy_as_crashed(store: &Stores, from: &Path, to: &Path) {
    // A copy is no moment: a table file that is compacted meanwhile would be missing in it.
    store.table.directories.iter().for_each(|directory| directory.index.wait_for_compactions());
    copy_tree(from, to);
}

#[derive(Clone, Debug)]
enum Step {
    Fill {
        block: u64,
        from: u32,
        count: u32,
    },
    Read {
        block: u64,
    },
    Remove {
        block: u64,
    },
    Corrupt {
        block: u64,
    },
    Truncate {
        block: u64,
    },
    Delete {
        block: u64,
    },
    Relieve,
    /// With `crash`, the directory as it is at that moment is opened instead, nothing having been flushed.
    Restart {
        crash: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let block = 0u64..12;
    prop_oneof![
        6 => (block.clone(), 0u32..4, 1u32..4).prop_map(|(block, from, count)| Step::Fill { block, from, count }),
        4 => block.clone().prop_map(|block| Step::Read { block }),
        1 => block.clone().prop_map(|block| Step::Remove { block }),
        1 => block.clone().prop_map(|block| Step::Corrupt { block }),
        1 => block.clone().prop_map(|block| Step::Truncate { block }),
        1 => block.prop_map(|block| Step::Delete { block }),
        1 => Just(Step::Relieve),
        1 => any::<bool>().prop_map(|crash| Step::Restart { crash }),
    ]
}

/// Four blocks of four chunks fill it, so that evictions happen.
fn length_of(block: u64) -> u32 {
    [50_000, CHUNK_BYTES, 3 * CHUNK_BYTES + 1, 4 * CHUNK_BYTES][block as usize % 4]
}

fn run_steps(steps: Vec<Step>) {
    let home = tempfile::tempdir().unwrap();
    let capacity = 2 * MIB;
    let mut generation = 0;
    let mut dir = home.path().join("0");
    let mut store = open_store(&dir, capacity);
    // What was filled and not damaged since: readable unless evicted. Nothing else may ever be readable.
    let mut model: HashMap<u64, Vec<u32>> = HashMap::new();
    for step in steps {
        match step {
            Step::Fill { block, from, count } => {
                let length = length_of(block);
                let chunks = from.min(chunk_count(length))..(from + count).min(chunk_count(length));
                if !chunks.is_empty() && fill(&store, &id(block), length, chunks.clone()).is_ok() {
                    let known = model.entry(block).or_default();
                    known.extend(chunks);
                }
            }
            Step::Read { block } => {
                let seen = readable(&store, &id(block), length_of(block));
                let known = model.entry(block).or_default();
                assert!(seen.iter().all(|index| known.contains(index)), "{seen:?} of {known:?}");
                *known = seen;
            }
            Step::Remove { block } => {
                store.cache.remove(&id(block));
                model.remove(&block);
            }
            Step::Corrupt { block } | Step::Truncate { block } | Step::Delete { block } => {
                // Damage is found after the next start; what this run has verified it believes.
                let place = match find(&store, &id(block)) {
                    Some(block) => block.path().to_owned(),
                    None => continue,
                };
                drop(store);
                match step {
                    Step::Corrupt { .. } => {
                        let mut bytes = fs::read(&place).unwrap();
                        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
                        fs::write(&place, bytes).unwrap();
                    }
                    Step::Truncate { .. } => {
                        fs::File::options().write(true).open(&place).unwrap().set_len(100).unwrap()
                    }
                    _ => fs::remove_file(&place).unwrap(),
                }
                store = open_store(&dir, capacity);
                assert_eq!(readable(&store, &id(block), length_of(block)), [0u32; 0]);
                model.remove(&block);
            }
            Step::Relieve => while store.cache.relieve() {},
            Step::Restart { crash } => {
                let before: HashMap<u64, Vec<u32>> =
                    (0..12).map(|block| (block, readable(&store, &id(block), length_of(block)))).collect();
                if crash {
                    generation += 1;
                    let next = home.path().join(generation.to_string());
                    copy_as_crashed(&store, &dir, &next);
                    dir = next;
                }
                drop(store);
                store = open_store(&dir, capacity);
                for (block, chunks) in before {
                    assert_eq!(readable(&store, &id(block), length_of(block)), chunks, "after a restart");
                }
            }
        }
        assert!(used(&store) <= capacity);
    }
    let blocks = store.table.usage()[0].blocks;
    assert_eq!(block_files(&dir).len() as u64, blocks, "one file per block");
}

/// Sequences of steps for a model, which take a second each: so many, or as `CAVERN_MODEL_CASES` says.
pub(super) fn cases(usual: u32) -> ProptestConfig {
    let cases = std::env::var("CAVERN_MODEL_CASES").map_or(usual, |cases| cases.parse().unwrap());
    ProptestConfig { cases, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(9))]
    #[test]
    fn behaves_like_its_model(steps in prop::collection::vec(step(), 1..40)) {
        run_steps(steps);
    }

    #[test]
    fn behaves_like_its_model_where_it_is_encrypted(steps in prop::collection::vec(step(), 1..40)) {
        with_keys(wrapping(&[1; 32], None), || run_steps(steps));
    }
}

#[test]
fn nothing_is_believed_before_it_was_verified_in_this_run() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), MIB);
    fill(&store, &id(1), 300_000, 0..3).unwrap();
    assert!(find(&store, &id(1)).unwrap().has(0..3));
    drop(store);
    let store = open_store(dir.path(), MIB);
    let block = find(&store, &id(1)).unwrap();
    assert!(!block.has(0..1));
    store.cache.verify(&block, 1..2).unwrap();
    assert!(block.has(1..2) && !block.has(0..1));
    store.cache.verify(&block, 0..3).unwrap();
    assert!(block.is_complete());
}

#[test]
fn a_block_that_is_closed_and_opened_again_stays_verified() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    (0..20).for_each(|value| fill(&store, &id(value), 50_000, 0..1).unwrap());
    let closed = (0..20).filter(|value| matches!(store.cache.get(&id(*value), Touch::None), Lookup::Closed)).count();
    assert!(closed >= 16, "at most four are kept open");
    assert!((0..20).all(|value| find(&store, &id(value)).unwrap().is_complete()));
}

#[test]
fn an_evicted_block_stays_readable_through_its_handle() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let (eviction_sender, mut evictions) = mpsc::channel(64);
    let (store, _) = open(options(&[(dir.path(), MIB)]), metrics, eviction_sender).unwrap();
    fill(&store, &id(1), 100_000, 0..1).unwrap();
    let block = find(&store, &id(1)).unwrap();
    assert!(store.cache.remove(&id(1)).is_some());
    assert!(block.is_dead() && !block.path().exists());
    assert_eq!(evictions.try_recv().unwrap(), Eviction { id: id(1), incarnation: block.incarnation() });
    let mut bytes = vec![0; 100_000];
    block.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, content(&id(1), 0, 100_000));
    assert!(block.read_cached(0, &mut bytes).is_ok());
    // A late record of the dead block does not bring it back.
    store.cache.record(&block).unwrap();
    fill(&store, &id(1), 100_000, 0..1).unwrap();
    assert!(find(&store, &id(1)).unwrap().incarnation() > block.incarnation());
    assert_eq!(used(&store), 25 * 4096);
}

#[test]
fn what_clients_hold_is_told_when_it_goes_and_used_when_they_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let capacity = 8 * u64::from(CHUNK_BYTES);
    {
        let store = open_store(dir.path(), capacity);
        (0..7).for_each(|value| fill(&store, &id(value), CHUNK_BYTES, 0..1).unwrap());
    }
    // By another process, which has handed out nothing.
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let (eviction_sender, mut evictions) = mpsc::channel(64);
    let (store, _) = open(options(&[(dir.path(), capacity)]), metrics, eviction_sender).unwrap();
    let ask = |values: &[(u64, bool)]| {
        let files: Vec<_> = values.iter().map(|(value, is_read)| (Some(id(*value)), *is_read)).collect();
        store.table.confirm(&files)
    };
    // Often, and in an order that would have them go first.
    for _ in 0..10 {
        assert!(ask(&[(0, true), (1, true), (2, false)]).iter().all(Option::is_some));
    }
    assert_eq!(store.table.confirm(&[(None, true), (Some(id(99)), true)]), [None, None]);
    for value in 10..40 {
        // Used more often than what nobody says anything of.
        (0..5).for_each(|_| drop(store.cache.get(&id(value), Touch::Read(CHUNK_BYTES))));
        let _ = fill(&store, &id(value), CHUNK_BYTES, 0..1);
    }
    assert!(ask(&[(0, false), (1, false)]).iter().all(Option::is_some), "they are used");
    assert_eq!(ask(&[(2, false)]), [None]);
    let told: Vec<_> = std::iter::from_fn(|| evictions.try_recv().ok()).map(|eviction| eviction.id).collect();
    assert_eq!(told, [id(2)], "nobody has the others");
}

#[test]
fn blocks_in_use_are_not_evicted_and_a_full_store_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), MIB);
    let held: Vec<Arc<CachedBlock>> = (0..8)
        .map(|value| {
            fill(&store, &id(value), CHUNK_BYTES, 0..1).unwrap();
            find(&store, &id(value)).unwrap()
        })
        .collect();
    assert!(matches!(fill(&store, &id(100), CHUNK_BYTES, 0..1), Err(StoreError::Full)));
    assert_eq!(used(&store), MIB);
    drop(held);
    fill(&store, &id(100), CHUNK_BYTES, 0..1).unwrap();
    assert!(used(&store) <= MIB);
}

#[test]
fn a_damaged_index_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    (0..10).for_each(|value| fill(&store, &id(value), 200_000, 0..2).unwrap());
    store.table.flush();
    drop(store);
    for file in fs::read_dir(dir.path().join("index")).unwrap().map(|file| file.unwrap().path()) {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("MANIFEST") || name.ends_with(".sst") {
            fs::File::options().write(true).open(&file).unwrap().set_len(20).unwrap();
        }
    }
    let store = open_store(dir.path(), 4 * MIB);
    assert!(dir.path().join("index.damaged-1").is_dir());
    assert_eq!(used(&store), 0);
    assert!(block_files(dir.path()).is_empty(), "blocks without an index are deleted");
    assert!(!dir.path().join("blocks.orphaned-1").exists());
    fill(&store, &id(1), 200_000, 0..2).unwrap();
    assert_eq!(readable(&store, &id(1), 200_000), [0, 1]);
}

#[test]
fn files_without_a_record_are_deleted_after_a_start() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    fill(&store, &id(1), 1000, 0..1).unwrap();
    drop(store);
    let stray = directory::block_path(dir.path(), &id(2), 5);
    fs::write(&stray, b"left by a crash").unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    assert!(!stray.exists());
    assert_eq!(readable(&store, &id(1), 1000), [0]);
}

#[test]
fn a_smaller_capacity_after_a_restart_is_kept_to() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    (0..15).for_each(|value| fill(&store, &id(value), 2 * CHUNK_BYTES, 0..2).unwrap());
    drop(store);
    let store = open_store(dir.path(), MIB);
    assert!(used(&store) <= MIB && store.table.usage()[0].blocks == block_files(dir.path()).len() as u64);
}

/// With a share of each mount, in percent.
fn open_shared(dir: &Path, capacity: u64, mount_cache_share: u32) -> Stores {
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let mut options = options(&[(dir, capacity)]);
    options.conf.mount_cache_share = mount_cache_share;
    open(options, metrics, mpsc::channel(64).0).unwrap().0
}

#[test]
fn a_mount_has_its_share_and_what_others_have_stays() {
    const LENGTH: u32 = 4 * CHUNK_BYTES;
    let dir = tempfile::tempdir().unwrap();
    let open_with = |mount_cache_share| open_shared(dir.path(), 20 * u64::from(LENGTH), mount_cache_share);
    let (others, flood) = (0..4, 100..130);
    let count = |store: &Stores, blocks: &Range<u64>| {
        used(store);
        blocks.clone().filter(|value| !matches!(store.cache.get(&id(*value), Touch::None), Lookup::Absent)).count()
    };
    let store = open_with(50);
    others.clone().for_each(|value| fill_of(2, &store, &id(value), LENGTH, 0..4).unwrap());
    flood.clone().for_each(|value| fill_of(1, &store, &id(value), LENGTH, 0..4).unwrap());
    assert_eq!(count(&store, &others), 4);
    let own = count(&store, &flood);
    assert!((8..=10).contains(&own), "{own} of 20");
    assert!(find(&store, &id(129)).unwrap().is_complete(), "what came last is there");
    drop(store);

    let store = open_with(25);
    while store.cache.relieve() {}
    assert_eq!(count(&store, &others), 4);
    let own = count(&store, &flood);
    assert!((3..=4).contains(&own), "{own} of 20, after a start with a smaller share");
    drop(store);

    let store = open_with(100);
    flood.clone().for_each(|value| fill_of(1, &store, &id(value), LENGTH, 0..4).unwrap());
    let own = count(&store, &flood);
    assert!(own > 10, "{own} of 20, where nothing is limited");
}

#[test]
fn what_exceeds_a_share_because_it_is_held_goes_when_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_shared(dir.path(), 20 * u64::from(CHUNK_BYTES), 50);
    let held: Vec<Arc<CachedBlock>> = (0..16)
        .map(|value| {
            fill(&store, &id(value), CHUNK_BYTES, 0..1).unwrap();
            find(&store, &id(value)).unwrap()
        })
        .collect();
    while store.cache.relieve() {}
    assert_eq!(used(&store), 16 * u64::from(CHUNK_BYTES));
    drop(held);
    assert!(store.cache.needs_relief());
    while store.cache.relieve() {}
    assert!(!store.cache.needs_relief());
    let own = used(&store) / u64::from(CHUNK_BYTES);
    assert!((8..=10).contains(&own), "{own} of 20");
}

#[test]
fn what_exceeds_a_smaller_share_goes_in_batches_after_the_start() {
    let (dir, capacity) = (tempfile::tempdir().unwrap(), 400 * u64::from(UNIT_BYTES));
    let store = open_shared(dir.path(), capacity, 60);
    (0..200).for_each(|value| fill(&store, &id(value), UNIT_BYTES, 0..1).unwrap());
    drop(store);
    let store = open_shared(dir.path(), capacity, 10);
    let blocks = || store.table.usage()[0].blocks;
    assert_eq!(blocks(), 200, "the start waits for nothing");
    fill(&store, &id(200), UNIT_BYTES, 0..1).unwrap();
    assert_eq!(blocks(), 200, "a fill makes up for itself alone");
    assert!(store.cache.relieve());
    assert!((130..200).contains(&blocks()), "{} after a batch", blocks());
    while store.cache.relieve() {}
    assert!((30..=40).contains(&blocks()), "{} of 400", blocks());
    assert_eq!(used(&store), blocks() * u64::from(UNIT_BYTES));
}

#[test]
fn clusters_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), MIB);
    let (uuid, worker_id, cluster) = store.table.identity();
    assert_eq!((worker_id, cluster.as_str()), (0, ""));
    store.table.join_cluster(5, "one").unwrap();
    assert!(matches!(try_open(dir.path(), MIB), Err(WorkerError::DirectoryInUse(_))));
    drop(store);
    let store = open_store(dir.path(), MIB);
    assert_eq!(store.table.identity(), (uuid, 5, "one".to_owned()));
    // Masters that were restored may have it under another id.
    store.table.join_cluster(6, "one").unwrap();
    let error = store.table.join_cluster(7, "two").unwrap_err();
    assert!(matches!(error, WorkerError::ForeignCluster { .. }), "{error}");
    drop(store);
    assert_eq!(open_store(dir.path(), MIB).table.identity(), (uuid, 6, "one".to_owned()));
}

#[test]
fn a_directory_of_the_worker_that_is_missing_or_empty_is_begun_anew_on_request_alone() {
    let home = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| home.path().join(name));
    let start = |create_dirs: bool, dirs: &[&Path]| {
        let dirs: Vec<_> = dirs.iter().map(|path| (*path, 8 * MIB)).collect();
        let metrics = WorkerMetrics::register(&Metrics::new("worker"));
        let mut options = options(&dirs);
        options.conf.create_dirs = create_dirs;
        open(options, metrics, mpsc::channel(64).0).map(drop)
    };
    let refused = |dirs: &[&Path], parts: &[&str]| {
        let said = start(false, dirs).unwrap_err().to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    refused(&[&one], &[&one.display().to_string(), "mount its disk", "worker.create_dirs = true"]);
    assert!(!one.exists());
    fs::create_dir(&one).unwrap();
    start(false, &[&one]).unwrap();
    // A disk that comes beside it is empty, and one that goes is not missed.
    refused(&[&one, &other], &[&other.display().to_string()]);
    fs::create_dir(&other).unwrap();
    start(false, &[&one, &other]).unwrap();
    // Not mounted, with a mount point that is there.
    fs::remove_dir_all(&other).unwrap();
    fs::create_dir(&other).unwrap();
    refused(&[&one, &other], &[&other.display().to_string(), "is empty", "worker.create_dirs = true"]);
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "nothing is left in it");
    start(false, &[&one]).unwrap();
    start(false, &[&one, &other]).unwrap();
    fs::remove_dir_all(&other).unwrap();
    refused(&[&one, &other], &[&other.display().to_string(), "is not there"]);
    start(true, &[&one, &other]).unwrap();
    start(false, &[&one, &other]).unwrap();
    // What was in memory is lost with the host.
    let memory = home.path().join("memory");
    let spec = |path: &Path| format!("[MEM:8MiB]{}", path.display()).parse().unwrap();
    for _ in 0..2 {
        let metrics = WorkerMetrics::register(&Metrics::new("worker"));
        let mut options = options(&[(&one, 8 * MIB)]);
        options.conf.create_dirs = false;
        options.directories.push(spec(&memory));
        drop(open(options, metrics, mpsc::channel(64).0).unwrap());
        fs::remove_dir_all(&memory).unwrap();
    }
}

#[test]
fn a_disk_that_keeps_failing_is_given_up() {
    let (good, bad) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let metrics = WorkerMetrics::register(&Metrics::new("worker"));
    let dirs = [(good.path(), 8 * MIB), (bad.path(), 8 * MIB)];
    let (store, _) = open(options(&dirs), metrics, mpsc::channel(64).0).unwrap();
    (0..40).for_each(|value| fill(&store, &id(value), CHUNK_BYTES, 0..1).unwrap());
    assert!(store.table.usage().iter().all(|directory| directory.blocks > 0));
    // Folders gone stand for a disk gone.
    fs::remove_dir_all(bad.path().join("blocks")).unwrap();
    for value in 100..200 {
        let _ = fill(&store, &id(value), CHUNK_BYTES, 0..1);
    }
    let usage = store.table.usage();
    assert!(usage[0].healthy && !usage[1].healthy && usage[1].blocks == 0, "{usage:?}");
    assert!(usage[1].error.contains("No such file"));
    fill(&store, &id(300), CHUNK_BYTES, 0..1).unwrap();
    assert_eq!(readable(&store, &id(300), CHUNK_BYTES), [0]);
}

#[test]
fn the_scrubber_drops_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    fill(&store, &id(1), 3 * CHUNK_BYTES, 0..3).unwrap();
    let block = find(&store, &id(1)).unwrap();
    let mut bytes = fs::read(block.path()).unwrap();
    bytes[CHUNK_BYTES as usize + 5] ^= 1;
    fs::write(block.path(), bytes).unwrap();
    assert_eq!(store.cache.scrub_block(&id(1)).0, 3 * u64::from(CHUNK_BYTES));
    assert!(block.has(0..1) && !block.has(1..2) && block.has(2..3));
    assert_eq!(used(&store), 2 * u64::from(CHUNK_BYTES));
    fill(&store, &id(1), 3 * CHUNK_BYTES, 0..3).unwrap();
    assert_eq!(readable(&store, &id(1), 3 * CHUNK_BYTES), [0, 1, 2]);
}

#[test]
fn the_scrubber_counts_what_it_has_asked_a_failing_disk_for() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    fill(&store, &id(1), 3 * CHUNK_BYTES, 0..3).unwrap();
    let record = find(&store, &id(1)).unwrap().record();
    {
        let mut residents = store.table.lock();
        let slot = residents.cache.slab.find(&id(1)).unwrap();
        let mut place = store.table.place(residents.cache.slab.at(slot).unwrap());
        // A regular file whose beginning cannot be read: nothing is mapped there.
        place.path = PathBuf::from("/proc/self/mem");
        let failing = CachedBlock::open(place, &record, true).unwrap();
        residents.open(slot, Block::Cached(Arc::new(failing)));
    }
    assert_eq!(store.cache.scrub_block(&id(1)).0, u64::from(CHUNK_BYTES), "it stops at the first chunk");
    assert_eq!(store.table.metrics.scrubbed_bytes.get(), u64::from(CHUNK_BYTES));
    assert_eq!(used(&store), 3 * u64::from(CHUNK_BYTES), "nothing is dropped that was not read");
}

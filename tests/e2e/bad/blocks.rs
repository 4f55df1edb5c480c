//! Files of cached blocks that are not what they were: readers get the right bytes, from the bucket if need be, the
//! damage is counted and logged, and the blocks are whole again afterwards.
//!
//! While the worker is down: a byte flipped at the begin and at the end, zeroes, cut to nothing, cut within a chunk,
//! extended, another block's bytes, deleted, replaced by a directory, by a link and by a pipe, without permissions.
//! While it runs: flipped, cut, deleted.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{Cluster, Options, eventually};

use super::{CONF, assert_read, counter, cut, files, restart_fuse, start_worker};

type Damage = (&'static str, fn(&Path));

fn flip(path: &Path, at: impl Fn(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn replace(path: &Path, by: impl Fn(&Path)) {
    fs::remove_file(path).unwrap();
    by(path);
}

const WHILE_DOWN: [Damage; 12] = [
    ("a byte at the begin", |path| flip(path, |_| 0)),
    ("a byte at the end", |path| flip(path, |length| length - 1)),
    ("zeroes", |path| fs::write(path, vec![0; fs::metadata(path).unwrap().len() as usize]).unwrap()),
    ("cut to nothing", |path| cut(path, 0)),
    ("cut within a chunk", |path| cut(path, 200_000)),
    ("extended", |path| {
        let mut bytes = fs::read(path).unwrap();
        bytes.extend([7; 100_000]);
        fs::write(path, bytes).unwrap();
    }),
    ("another's bytes", |path| fs::write(path, vec![b'x'; fs::metadata(path).unwrap().len() as usize]).unwrap()),
    ("deleted", |path| fs::remove_file(path).unwrap()),
    ("a directory", |path| replace(path, |path| fs::create_dir(path).unwrap())),
    ("a link", |path| replace(path, |path| symlink("/dev/zero", path).unwrap())),
    ("a pipe", |path| replace(path, |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()))),
    ("no permissions", |path| fs::set_permissions(path, fs::Permissions::from_mode(0o0)).unwrap()),
];

const WHILE_RUNNING: [Damage; 3] = [
    ("a byte", |path| flip_in_place(path)),
    ("cut", |path| cut(path, 100_000)),
    ("deleted", |path| fs::remove_file(path).unwrap()),
];

/// The same file goes on to exist: whoever has it open sees the change.
fn flip_in_place(path: &Path) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 140_000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 140_000).unwrap();
}

/// Block files by the key of their object, identified by their bytes; one that was extended is still whole.
fn blocks(cluster: &Cluster, tree: &BTreeMap<String, Bytes>) -> BTreeMap<String, PathBuf> {
    let all = files(&cluster.at_start.workers[0].dirs[0].join("blocks"), |_| true);
    let key_of = |path: &PathBuf| {
        let bytes = fs::read(path).unwrap();
        tree.iter().find(|(_, content)| bytes.starts_with(content)).map(|(key, _)| key.clone())
    };
    all.into_iter().filter_map(|path| Some((key_of(&path)?, path))).collect()
}

/// Reads until nothing is fetched from the bucket any more.
#[track_caller]
fn assert_heals(cluster: &Cluster, tree: &BTreeMap<String, Bytes>) {
    eventually("every block is whole again", Duration::from_secs(20), || {
        restart_fuse(cluster);
        cluster.s3.reset_stats();
        assert_read(cluster, "data", tree);
        (cluster.s3.requests("GET") == 0).then_some(())
    });
}

#[track_caller]
fn damage(cluster: &Cluster, tree: &BTreeMap<String, Bytes>, how: &[Damage]) {
    let blocks = blocks(cluster, tree);
    assert!(blocks.len() == tree.len(), "{} blocks of {} objects", blocks.len(), tree.len());
    for ((what, damage), (key, path)) in how.iter().zip(&blocks) {
        eprintln!("{what}: {key} in {}", path.display());
        damage(path);
    }
}

fn survive(descriptors: bool, while_running: &[Damage]) {
    let conf = CONF.replace("[client]\n", &format!("[client]\nlocal_descriptors = {descriptors}\n"));
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    // All of several chunks.
    let tree = cluster.seed("bucket", "", WHILE_DOWN.len() + 2, 600_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let worker = &cluster.at_start.workers[0];
    assert_heals(&cluster, &tree);

    cluster.stop("worker0");
    damage(&cluster, &tree, &WHILE_DOWN);
    start_worker(&cluster);
    assert_read(&cluster, "data", &tree);
    // Extended is as good as whole, and root needs no permissions.
    let wrong = WHILE_DOWN.len() as u64 - 2;
    let counted = counter(worker, "corrupt_chunks_total");
    assert!(counted >= wrong, "{counted} corrupt chunks of {wrong} files: {}", cluster.logs());
    let log = fs::read_to_string(&worker.log).unwrap();
    assert!(log.contains("dropped chunks with a wrong checksum"), "{log}");
    assert!(log.contains("the file or the record of a block is gone"), "{log}");
    assert!(!log.contains("panicked") && !log.contains("is given up"), "{log}");
    assert_heals(&cluster, &tree);

    damage(&cluster, &tree, while_running);
    restart_fuse(&cluster);
    assert_read(&cluster, "data", &tree);
    assert_heals(&cluster, &tree);
    let log = fs::read_to_string(&worker.log).unwrap();
    assert!(!log.contains("panicked") && !log.contains("is given up"), "{log}");
    assert_eq!(cluster.status().workers[0].state, "running");
}

#[test]
fn damaged_block_files_are_fetched_again_where_descriptors_are_passed() {
    survive(true, &WHILE_RUNNING[1..]);
}

#[test]
fn damaged_block_files_are_fetched_again_where_blocks_are_sent() {
    survive(false, &WHILE_RUNNING);
}

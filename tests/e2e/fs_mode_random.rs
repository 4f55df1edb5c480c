//! Anything that programs do to files and directories, in any order, on a mount and in a local directory at once:
//! results, errors and what is there must be the same; and on two mounts in turn.
//!
//! A few seeds by default; `CAVERN_SEEDS=10 CAVERN_OPERATIONS=10000` for more, `CAVERN_FIRST_SEED` to begin elsewhere.

pub mod step;
pub mod tree;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, number};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use step::{Handles, Step};
use tree::tree;

/// For everything to reach another mount.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn seeds(default: u64) -> std::ops::Range<u64> {
    let first = number("CAVERN_SEED", 0);
    first..first + number("CAVERN_SEEDS", default)
}

pub fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    // Small blocks, so that few operations reach many.
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    cluster
}

/// Does a step on both sides, and compares; says how many of one succeeded.
pub fn both(seed: u64, number: u64, step: &Step, ours: (&Path, &mut Handles), theirs: (&Path, &mut Handles)) -> u64 {
    let (our, their) = (step.run(ours.0, ours.1), step.run(theirs.0, theirs.1));
    assert_eq!(our, their, "seed {seed}, step {number}: {step:?}");
    u64::from(our.0 == 0)
}

#[test]
fn one_mount_does_what_a_local_directory_does() {
    let cluster = mounted(Options::default());
    // Not /tmp, which may lack extended attributes.
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let operations = number("CAVERN_OPERATIONS", 1500);
    let (mut tried, mut succeeded) = (0, 0);
    for seed in seeds(3) {
        let (began, before) = (Instant::now(), succeeded);
        let (ours, theirs) = (cluster.path(format!("fs/{seed}")), local.path().join(seed.to_string()));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        let mut random = StdRng::seed_from_u64(seed);
        let (mut our_handles, mut their_handles) = (Handles::default(), Handles::default());
        for number in 0..operations {
            let step = Step::random(&mut random);
            succeeded += both(seed, number, &step, (&ours, &mut our_handles), (&theirs, &mut their_handles));
            if number % 250 == 249 {
                assert_eq!(tree(&ours), tree(&theirs), "seed {seed}, after step {number}");
            }
        }
        drop((our_handles, their_handles));
        assert_eq!(tree(&ours), tree(&theirs), "seed {seed}");
        tried += operations;
        let here = succeeded - before;
        eprintln!("seed {seed}: {operations} operations, {here} without an error, in {:.1?}", began.elapsed());
    }
    assert!(succeeded > tried / 5, "{succeeded} of {tried} operations succeeded");
    // When no client remembers anything.
    cluster.stop("fuse0");
    cluster.start("fuse0");
    for seed in seeds(3) {
        let name = seed.to_string();
        assert_eq!(tree(&cluster.path("fs").join(&name)), tree(&local.path().join(&name)), "seed {seed}");
        // The bucket follows all of it.
        fs::remove_dir_all(local.path().join(&name)).unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "120s"]);
}

#[test]
fn two_mounts_in_turn_do_what_a_local_directory_does() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let mounts = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let operations = number("CAVERN_OPERATIONS", 1000);
    for seed in seeds(2) {
        let began = Instant::now();
        let theirs = local.path().join(seed.to_string());
        let ours: Vec<PathBuf> = mounts.iter().map(|mount| mount.join(seed.to_string())).collect();
        fs::create_dir(&ours[0]).unwrap();
        fs::create_dir(&theirs).unwrap();
        let mut random = StdRng::seed_from_u64(1000 + seed);
        let (mut number, mut turns, mut names) = (0, 0, BTreeSet::new());
        while number < operations {
            let here = &ours[turns % 2];
            // What was closed on the other mount is there soon, with all that it has.
            let expected = tree(&theirs);
            names.extend(expected.keys().cloned());
            let when = format!("seed {seed}, step {number}: mount {} shows what the other one did", turns % 2);
            eventually(&when, PATIENCE, || {
                let there = here.is_dir().then(|| tree(here))?;
                // No listing has a name that is gone, though the kernel may not have heard of that.
                let looked = |path: PathBuf| path.symlink_metadata().err().map(|error| error.raw_os_error());
                let is_known = |name: &PathBuf| looked(here.join(name)) == looked(theirs.join(name));
                (there == expected && names.iter().all(is_known)).then_some(())
            });
            let (mut our_handles, mut their_handles) = (Handles::default(), Handles::default());
            for _ in 0..random.random_range(1..60) {
                let step = Step::random(&mut random);
                both(seed, number, &step, (here, &mut our_handles), (&theirs, &mut their_handles));
                number += 1;
            }
            turns += 1;
        }
        eprintln!("seed {seed}: {number} operations in {turns} turns, {:.1?}", began.elapsed());
    }
}

//! What one client does to an fs-mode mount, another one sees soon, whatever it and its kernel have cached of before.
//!
//! How soon is printed. 100 changes of each kind by default, `CAVERN_LITMUS=1000` for more; seeds and operations of the
//! random run as in `fs_mode_random`.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, eventually_or, number};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fs_mode_random::step::{Handles, NAMES, Step};
use crate::fs_mode_random::tree::tree;
use crate::fs_mode_random::{both, mounted, seeds};

/// For one change to be seen at all, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// For half of the changes of a kind.
const MEDIAN: Duration = Duration::from_secs(1);

/// The same directory as two clients show it: one makes the changes, the other one looks at them.
struct Sides {
    here: PathBuf,
    there: PathBuf,
}

impl Sides {
    fn new(cluster: &Cluster, directory: &str) -> Self {
        let [here, there] = mounts(cluster).map(|mount| mount.join(directory));
        fs::create_dir(&here).unwrap();
        eventually("the directory is there", PATIENCE, || there.is_dir().then_some(()));
        Self { here, there }
    }

    /// A file that both know, names and bytes.
    fn write(&self, name: &str, content: &str) {
        fs::write(self.here.join(name), content).unwrap();
        let there = self.there.join(name);
        eventually("both know the file", PATIENCE, || is_content(&there, content).then_some(()));
    }
}

/// How long it took from each change until it was seen.
struct Litmus {
    kind: &'static str,
    times: Vec<Duration>,
}

impl Litmus {
    /// Makes a change on one side as often as is wanted, and asks the other one until it is seen. `prepare` has the
    /// other side cache what was before.
    fn run(
        cluster: &Cluster,
        kind: &'static str,
        prepare: impl Fn(&Sides, &str),
        change: impl Fn(&Path) -> io::Result<()>,
        is_seen: impl Fn(&Path) -> bool,
    ) -> Self {
        let sides = Sides::new(cluster, kind);
        let time = |number: u64| {
            let name = number.to_string();
            prepare(&sides, &name);
            let there = sides.there.join(&name);
            assert!(!is_seen(&there), "{kind}: {name} is seen before it is made");
            change(&sides.here.join(&name)).unwrap_or_else(|error| panic!("{kind}: {name}: {error}"));
            let made = Instant::now();
            while !is_seen(&there) {
                assert!(made.elapsed() < PATIENCE, "{kind}: {name} is not seen");
                thread::yield_now();
            }
            made.elapsed()
        };
        let mut times: Vec<_> = (0..number("CAVERN_LITMUS", 100)).map(time).collect();
        times.sort();
        Self { kind, times }
    }

    fn at(&self, percent: usize) -> Duration {
        self.times[(self.times.len() - 1) * percent / 100]
    }
}

fn mounts(cluster: &Cluster) -> [PathBuf; 2] {
    [0, 1].map(|mount| cluster.at_start.fuse[mount].mount_point.join("fs"))
}

fn two_mounts() -> Cluster {
    mounted(Options { more_mounts: vec!["second"], ..Options::default() })
}

fn is_content(path: &Path, content: &str) -> bool {
    fs::read(path).is_ok_and(|read| read == content.as_bytes())
}

fn is_listed(path: &Path) -> bool {
    let listing = fs::read_dir(path.parent().unwrap()).unwrap();
    listing.map(|entry| entry.unwrap().file_name()).any(|name| Some(&*name) == path.file_name())
}

fn other(path: &Path) -> PathBuf {
    path.with_extension("other")
}

/// One after the other, so that nothing but the change itself is waited for.
#[test]
fn each_kind_of_change_is_seen_by_another_client_within_moments() {
    let cluster = two_mounts();
    let absent = |sides: &Sides, name: &str| assert!(!sides.there.join(name).exists());
    let written = |sides: &Sides, name: &str| sides.write(name, "before");
    let kinds = [
        Litmus::run(&cluster, "create", absent, |here| File::create_new(here).map(drop), |there| there.exists()),
        Litmus::run(&cluster, "mkdir", absent, |here| fs::create_dir(here), |there| there.is_dir()),
        Litmus::run(
            &cluster,
            "write and close",
            written,
            |here| File::options().write(true).open(here)?.write_all_at(b"behind", 0),
            |there| is_content(there, "behind"),
        ),
        Litmus::run(
            &cluster,
            "rename",
            written,
            |here| fs::rename(here, other(here)),
            |there| !there.exists() && is_content(&other(there), "before"),
        ),
        Litmus::run(&cluster, "unlink", written, |here| fs::remove_file(here), |there| !there.exists()),
        Litmus::run(
            &cluster,
            "truncate",
            written,
            |here| File::options().write(true).open(here)?.set_len(2),
            |there| is_content(there, "be") && fs::metadata(there).unwrap().len() == 2,
        ),
        Litmus::run(
            &cluster,
            "chmod",
            written,
            |here| fs::set_permissions(here, Permissions::from_mode(0o600)),
            |there| fs::metadata(there).unwrap().mode() & 0o777 == 0o600,
        ),
        Litmus::run(
            &cluster,
            "replace by rename",
            |sides, name| {
                sides.write(name, "before");
                fs::write(other(&sides.here.join(name)), "replaced").unwrap();
            },
            |here| fs::rename(other(here), here),
            |there| is_content(there, "replaced"),
        ),
        Litmus::run(
            &cluster,
            "listing",
            |sides, name| assert!(!is_listed(&sides.there.join(name))),
            |here| File::create_new(here).map(drop),
            is_listed,
        ),
    ];
    eprintln!("{:<20}{:>12}{:>12}{:>12}", "seen after", "median", "p95", "worst");
    for litmus in &kinds {
        let times = [50, 95, 100].map(|percent| format!("{:.2?}", litmus.at(percent)));
        eprintln!("{:<20}{:>12}{:>12}{:>12}", litmus.kind, times[0], times[1], times[2]);
    }
    for litmus in &kinds {
        assert!(litmus.at(50) < MEDIAN, "{}: {:?} at the median", litmus.kind, litmus.at(50));
    }
}

/// Names that the random steps may have made and that are not there.
fn left_over(top: &Path, is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let paths = NAMES.iter().flat_map(|first| {
        let below = NAMES.iter().map(move |second| Path::new(first).join(second));
        std::iter::once(PathBuf::from(first)).chain(below)
    });
    paths.filter(|path| !is_there(path)).find(|path| top.join(path).symlink_metadata().is_ok())
}

#[test]
fn two_clients_agree_after_every_few_operations_of_either() {
    let cluster = two_mounts();
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    for seed in seeds(1) {
        let name = format!("agree{seed}");
        let (theirs, ours) = (local.path().join(&name), mounts(&cluster).map(|mount| mount.join(&name)));
        fs::create_dir(&theirs).unwrap();
        fs::create_dir(&ours[0]).unwrap();
        let mut random = StdRng::seed_from_u64(2000 + seed);
        let (operations, mut done, mut times) = (number("CAVERN_OPERATIONS", 400), 0, Vec::new());
        while done < operations {
            let side = random.random_range(0..2);
            let (mut our_handles, mut their_handles) = (Handles::default(), Handles::default());
            for _ in 0..random.random_range(1..6) {
                let step = Step::random(&mut random);
                both(seed, done, &step, (&ours[side], &mut our_handles), (&theirs, &mut their_handles));
                done += 1;
            }
            drop((our_handles, their_handles));
            let (expected, made) = (tree(&theirs), Instant::now());
            for (side, ours) in ours.iter().enumerate() {
                let when = format!("seed {seed}, step {done}: mount {side} shows it");
                eventually(&when, PATIENCE, || (ours.is_dir() && tree(ours) == expected).then_some(()));
                // What has gone is not only not listed: a kernel forgets names behind listings.
                let left = || left_over(ours, |path| theirs.join(path).symlink_metadata().is_ok());
                let when = format!("seed {seed}, step {done}: mount {side} finds no more than that");
                let is_clean = || left().is_none().then_some(());
                eventually_or(&when, PATIENCE, is_clean, || format!("{:?} is still found", left()));
            }
            times.push(made.elapsed());
        }
        times.sort();
        let (turns, [median, worst]) = (times.len(), [times[times.len() / 2], times[times.len() - 1]]);
        eprintln!("seed {seed}: {done} operations in {turns} turns, agreed after {median:.1?}, {worst:.1?} at worst");
    }
}

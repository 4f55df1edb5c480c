//! Three masters, three workers and two clients, each on a host of its own, under a steady load of readers, writers of
//! names and writers of files; and one failure after the other: processes that are killed or stopped, a network that is
//! cut, loses packets or is slow, full disks.
//!
//! After each round everything that was acknowledged is there, once; no call has failed, but for those of a client that
//! was cut off for longer than its calls wait; both clients show one tree; and the bucket has the same. How long the
//! longest call of each round took is printed.
//!
//! `CAVERN_CHAOS_ROUNDS=30` for more than a round of each kind, `CAVERN_CHAOS_KINDS=KillLeader,Loss` for some of them,
//! `CAVERN_SEED=7` for other operations, `CAVERN_CHAOS_LOG=debug CAVERN_CHAOS_LOGS=DIRECTORY` to keep all logs.

// A test reports by panicking, and what it has measured on stderr.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../crash/bucket.rs"]
mod bucket;
mod delay;
mod fault;
mod journal;
mod load;
mod model;
mod shared;
mod site;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::IntoRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_tests::{eventually, number};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::{FlockOperation, Mode};

use fault::Fault;
use journal::{Call, Journal};
use load::{Contents, Load, own_directories};
use model::{Digest, Kind, Model, Shown, difference, walk};
use site::{CLIENTS, FILES, PATIENCE, Site};

/// Images in the bucket, and files that are there from the beginning.
const IMAGES: usize = 60;
const KEPT: usize = 20;
/// Directory of the latter.
const KEPT_DIRECTORY: &str = "kept";
/// A file that a client has locked all the time.
const LOCKED: &str = "kept/locked";
const LOCK_OWNER: usize = 0;
/// Of which the trees stay until the end, when nobody remembers anything.
const KEPT_ROUNDS: usize = 3;

#[test]
fn whatever_fails_no_call_does_and_nothing_is_lost() {
    let (rounds, seed) = (number("CAVERN_CHAOS_ROUNDS", 1), number("CAVERN_SEED", 1));
    let kinds = kinds();
    eprintln!("CAVERN_SEED={seed} CAVERN_CHAOS_ROUNDS={rounds}");
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let mut random = StdRng::seed_from_u64(seed);
    let images = Arc::new(contents(&mut random, "", IMAGES));
    let site = Site::start(&images);
    let kept = Arc::new(contents(&mut random, &format!("{KEPT_DIRECTORY}/"), KEPT));
    let locked = keep(&site, &kept);
    let mut pauses: BTreeMap<String, Vec<Call>> = BTreeMap::new();
    let mut trees = Vec::new();
    for round in 0..rounds {
        for (number, fault) in kinds.iter().enumerate() {
            let directory = format!("{round}-{fault:?}");
            let when = format!("round {round}, {fault}, CAVERN_SEED={seed}");
            eprintln!("{when}");
            let mut random = StdRng::seed_from_u64(seed ^ (round * kinds.len() as u64 + number as u64) << 16);
            let load = Load::start(&site, &directory, &images, &kept, random.next_u64());
            fault.strike(&site, &load, &mut random);
            site.masters_agree();
            load.go_on();
            let (models, journal) = load.finish();
            let tree = check(&site, &when, &directory, &models);
            note(&mut pauses, *fault, &journal);
            trees.push((directory, tree));
            if trees.len() > KEPT_ROUNDS {
                let (directory, _) = trees.remove(0);
                remove(&site, FILES, &directory);
            }
        }
    }
    print(&kinds, &pauses);
    // Clients that know nothing.
    close(locked).unwrap();
    for (client, host) in CLIENTS.iter().enumerate() {
        site.on(host, "systemctl stop cavern-fuse && systemctl start cavern-fuse");
        let top = site.mount(client).join(FILES);
        eventually("the mount is back", PATIENCE, || top.join(KEPT_DIRECTORY).is_dir().then_some(()));
        for (directory, tree) in &trees {
            let found = walk(&top.join(directory)).unwrap();
            assert_eq!(difference(tree, &found, &BTreeSet::new()), None, "{directory} on a new client {client}");
        }
        let names = fs::read_dir(top).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let expected = trees.iter().map(|(directory, _)| directory.clone()).chain([KEPT_DIRECTORY.to_owned()]);
        assert_eq!(names.collect::<BTreeSet<_>>(), expected.collect::<BTreeSet<_>>(), "on a new client {client}");
    }
}

/// All kinds, or those that the environment names.
fn kinds() -> Vec<Fault> {
    let Ok(names) = std::env::var("CAVERN_CHAOS_KINDS") else { return Fault::ALL.to_vec() };
    let named = |name| Fault::ALL.into_iter().find(|fault| format!("{fault:?}") == name);
    names.split(',').map(|name| named(name).unwrap_or_else(|| panic!("{name} is none of {:?}", Fault::ALL))).collect()
}

/// Bytes of a mean length of 40 KB, by their names.
fn contents(random: &mut StdRng, directory: &str, count: usize) -> Contents {
    let content = |number: usize| {
        let mut bytes = vec![0; random.random_range(1000..80_000)];
        random.fill_bytes(&mut bytes);
        (format!("{directory}{:02}.jpg", number), bytes)
    };
    (0..count).map(content).collect()
}

/// Makes the files that all rounds read, and locks one; both clients show them when this returns.
fn keep(site: &Site, kept: &Contents) -> File {
    let tops: Vec<PathBuf> = (0..CLIENTS.len()).map(|client| site.mount(client).join(FILES)).collect();
    fs::create_dir(tops[0].join(KEPT_DIRECTORY)).unwrap();
    for (name, content) in kept {
        fs::write(tops[0].join(name), content).unwrap();
    }
    let locked = File::create_new(tops[LOCK_OWNER].join(LOCKED)).unwrap();
    rustix::fs::flock(&locked, FlockOperation::LockExclusive).unwrap();
    let there = || kept.iter().all(|(name, content)| fs::read(tops[1].join(name)).is_ok_and(|read| read == *content));
    eventually("both clients have all files", PATIENCE, || there().then_some(()));
    eventually("both clients have the file that is locked", PATIENCE, || tops[1].join(LOCKED).exists().then_some(()));
    locked
}

/// Both clients, and the bucket, have what the programs made, and nothing else; answers that.
#[track_caller]
fn check(site: &Site, when: &str, directory: &str, models: &[Model]) -> BTreeMap<String, Shown> {
    let mut made = Model::default();
    own_directories().iter().for_each(|own| made.add(own, Kind::Directory, 0o755));
    let expected: BTreeMap<String, Shown> = models.iter().chain([&made]).flat_map(|model| model.all()).collect();
    let uncertain: BTreeSet<String> = models.iter().flat_map(|model| model.uncertain.iter().cloned()).collect();
    let mut differs = String::new();
    let begun = Instant::now();
    // What the other one did arrives within moments.
    let tree = eventually("", 2 * PATIENCE, || {
        assert!(begun.elapsed() < PATIENCE, "{when}: {differs}");
        match look_at_both(site, directory, &expected, &uncertain) {
            Ok(tree) => return Some(tree),
            Err(difference) => differs = difference,
        }
        None
    });
    let key = |(name, shown): (&String, &Shown)| match shown.kind {
        "directory" => (format!("{name}/"), shown.content),
        _ => (name.clone(), shown.content),
    };
    let expected: BTreeMap<String, Digest> = tree.iter().map(key).collect();
    let differs = difference(&expected, &site.objects(directory), &BTreeSet::new());
    assert_eq!(differs, None, "{when}: namespace and bucket");
    tree
}

/// The tree that both clients show; or what distinguishes them from each other, or from what must be there.
fn look_at_both(
    site: &Site,
    directory: &str,
    expected: &BTreeMap<String, Shown>,
    uncertain: &BTreeSet<String>,
) -> Result<BTreeMap<String, Shown>, String> {
    let mut trees = Vec::new();
    for client in 0..CLIENTS.len() {
        let top = site.mount(client).join(FILES).join(directory);
        let found = walk(&top).map_err(|error| format!("client {client}: a walk fails: {error}"))?;
        match difference(expected, &found, uncertain) {
            Some(difference) => return Err(format!("client {client}: {difference}")),
            None => trees.push(found),
        }
    }
    match difference(&trees[0], &trees[1], &BTreeSet::new()) {
        Some(difference) => Err(format!("client 0 (expected) and client 1 (found): {difference}")),
        None => Ok(trees.remove(0)),
    }
}

/// Removes a tree on one client; the other one sees it go.
#[track_caller]
fn remove(site: &Site, mount: &str, directory: &str) {
    let [here, there] = [0, 1].map(|client| site.mount(client).join(mount).join(directory));
    fs::remove_dir_all(here).unwrap();
    eventually("a removed tree is gone", PATIENCE, || (!there.exists()).then_some(()));
}

fn note(pauses: &mut BTreeMap<String, Vec<Call>>, fault: Fault, journal: &Journal) {
    let (longest, cut): (Vec<_>, Vec<_>) = (0..CLIENTS.len())
        .filter_map(|client| journal.longest(client))
        .partition(|call| fault.cut_client() != Some(call.client));
    let longest = longest.into_iter().max_by_key(|call| call.took);
    let cut = cut.into_iter().next();
    for (name, call) in [(format!("{fault}"), longest), (format!("{fault}: its calls"), cut)] {
        let Some(call) = call else { continue };
        let last: PathBuf = call.path.components().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect();
        let place = last.display();
        let (what, client, took) = (call.what, call.client, call.took);
        eprintln!("  {name}: {} calls, the longest {took:.2?} ({what} {place} on client {client})", journal.ended());
        pauses.entry(name).or_default().push(call);
    }
}

fn print(kinds: &[Fault], pauses: &BTreeMap<String, Vec<Call>>) {
    eprintln!("{:<40}{:>8}{:>12}{:>12}", "the longest call of a round", "rounds", "median", "worst");
    for fault in kinds {
        for name in [format!("{fault}"), format!("{fault}: its calls")] {
            let Some(calls) = pauses.get(&name) else { continue };
            let mut times: Vec<Duration> = calls.iter().map(|call| call.took).collect();
            times.sort();
            let [median, worst] = [times.len() / 2, times.len() - 1].map(|at| format!("{:.2?}", times[at]));
            eprintln!("{name:<40}{:>8}{median:>12}{worst:>12}", times.len());
        }
    }
}

/// Closes a file, which may fail as a write does.
fn close(file: File) -> io::Result<()> {
    #[expect(unsafe_code, reason = "the standard library does not tell what close(2) answered")]
    // SAFETY: the descriptor is ours, and nothing else closes it.
    let answer = unsafe { libc::close(file.into_raw_fd()) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

//! Masters that live on simulated hosts: what a seed does once, it does always.
//!
//! Three masters run on one thread and on a clock that only the simulation moves ([`runtime`]). Their network, their
//! disks and their clocks are simulated ([`world`]); what they are made of is real ([`master`]), and so is what they
//! answer each other ([`service`]). While [`faults`] makes things go wrong, [`clients`] change and read the namespace.
//! Then [`history`] judges whether what they were told can be explained by one namespace that did one thing after
//! another, that of [`model`], and all masters must have that.
//!
//! `CAVERN_SIMULATION_SEEDS` says how many seeds are tried, `CAVERN_SEED` which is the first.

mod clients;
mod faults;
mod history;
mod master;
mod model;
mod runtime;
mod service;
mod world;

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::{Mount, WriteType};
use cavern_proto::record::AttachMount;
use cavern_proto::record::command::Command as Kind;
use cavern_state::Outcome;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use self::clients::{Client, Group};
use self::faults::{Faults, heal, keep_failing, start_all, watch_leases};
use self::history::{Asked, History, Told};
use self::master::{Flaw, MASTERS, SimulatedMaster, read, seen};
use self::model::Model;

pub use runtime::SeededRuntime;
pub use world::{Host, Transport};

/// Seeds of the short profile.
const SEEDS: u64 = 25;
const CLIENTS: u64 = 4;
/// Calls of each client.
const CALLS: usize = 40;
/// How long things go wrong.
const FAILING: Duration = Duration::from_secs(10);
/// By then everything must be done: it is simulated time.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a run went.
struct Run {
    lines: Vec<String>,
    false_starts: usize,
    installations: (usize, usize),
    verdict: Result<(), String>,
}

fn run(seed: u64, faults: Faults, flaw: Flaw) -> Run {
    in_group(seed, flaw, async |group| live(group, faults).await)
}

/// Runs masters that are started already.
fn in_group(seed: u64, flaw: Flaw, lives: impl AsyncFnOnce(&Arc<Group>) -> Result<(), String>) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world = world::World::new(seed);
        let masters = (1..=MASTERS).map(|id| SimulatedMaster::new(&world, id, flaw)).collect();
        let (directories, inodes) = Default::default();
        let group = Arc::new(Group { world: world.clone(), masters, directories, inodes });
        start_all(&group).await;
        let verdict = match timeout(PATIENCE, lives(&group)).await {
            Ok(verdict) => verdict,
            Err(_elapsed) => Err("the clients are not served".to_owned()),
        };
        for master in &group.masters {
            master.kill(false).await;
        }
        let history = std::mem::take(&mut *world.history.lock());
        let verdict = history.violations.first().map_or(verdict, |violation| Err(violation.clone()));
        let History { lines, false_starts, installations, .. } = history;
        Run { lines, false_starts, installations, verdict }
    })
}

/// Returns the leader, when there is one that answers.
async fn leader(group: &Group) -> Arc<SimulatedMaster> {
    loop {
        if let Some(leader) = group.masters.iter().find(|master| master.may_read()) {
            return leader.clone();
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// From the start of the clients to the verdict.
async fn live(group: &Arc<Group>, faults: Faults) -> Result<(), String> {
    let first = mount(group).await;
    group.directories.lock().push(first.root);
    group.inodes.lock().push(first.root);
    let watching = tokio::spawn(watch_leases(group.clone()));
    let mut clients = JoinSet::new();
    for number in 1..=CLIENTS {
        clients.spawn(Client::new(group.clone(), number).run(CALLS));
    }
    keep_failing(group.clone(), faults, FAILING).await;
    heal(group).await;
    while let Some(ended) = clients.join_next().await {
        ended.map_err(|error| error.to_string())?;
    }
    watching.abort();
    let applied = || group.masters.iter().map(|master| master.applied()).collect::<Vec<_>>();
    // What the clients that died have sent may still come.
    sleep(Duration::from_secs(3)).await;
    while applied().windows(2).any(|pair| pair[0] != pair[1]) {
        sleep(Duration::from_millis(20)).await;
    }
    let last = group.world.history.lock().judge(first)?;
    group.masters.iter().try_for_each(|master| compare(master, &last))
}

/// Makes the mount that clients work in, and gives its namespace.
async fn mount(group: &Group) -> Model {
    let write_type = WriteType::FsMode as i32;
    let mount = Mount {
        path: "/m".into(),
        uri: "memory://m".into(),
        write_type,
        created_ns: 5,
        block_size: 1 << 20,
        ..Mount::default()
    };
    loop {
        for master in &group.masters {
            let Some(mounts_epoch) = master.look(|tables| Ok(tables.counters()?.mounts_epoch)) else { continue };
            let attach = AttachMount { mount: Some(mount.clone()), mounts_epoch };
            let root = match master.propose(Kind::AttachMount(attach)).await {
                Ok(Outcome::Mount(mount) | Outcome::MountExists(mount)) => mount.root_inode,
                _ => continue,
            };
            let looked = master.look(|tables| Ok((seen(tables, root)?, tables.counters()?.inode)));
            if let Some((Some(root), last)) = looked {
                return Model::new(root, last);
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Whether a master has the namespace that it must have.
fn compare(master: &SimulatedMaster, model: &Model) -> Result<(), String> {
    let asked = model.inodes().into_iter().flat_map(|inode| [Asked::Stat { inode }, Asked::List { directory: inode }]);
    for asked in asked {
        let told = master.look(|tables| read(tables, &asked)).ok_or("a master does not run")?;
        let expected = match &asked {
            Asked::Stat { inode } => Told::Seen(model.inode(*inode)),
            Asked::List { directory } => Told::Names(model.names(*directory)),
            other => unreachable!("{other:?}"),
        };
        if told != expected {
            return Err(format!("master {} has {told:?} for {asked:?}, where {expected:?} must be", master.id));
        }
    }
    Ok(())
}

/// Says the end of a run's history, where it was not right.
#[track_caller]
fn check(seed: u64, run: &Run) {
    if let Err(violation) = &run.verdict {
        let from = run.lines.len().saturating_sub(200);
        let history = run.lines[from..].join("\n");
        panic!("seed {seed}: {violation}\n{history}\nseed {seed}: {violation}");
    }
}

fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

#[test]
fn nothing_goes_wrong_where_nothing_fails() {
    check(1, &run(1, Faults::None, Flaw::None));
}

#[test]
fn a_seed_has_one_course() {
    for seed in 1..4 {
        let (once, again) = (run(seed, Faults::All, Flaw::None), run(seed, Faults::All, Flaw::None));
        let differs = once.lines.iter().zip(&again.lines).position(|(once, again)| once != again);
        if let Some(at) = differs {
            panic!("seed {seed}: {}\nand then: {}", once.lines[..=at].join("\n"), again.lines[at]);
        }
        assert_eq!(once.lines.len(), again.lines.len());
        assert!(once.lines.len() > 100, "{}", once.lines.join("\n"));
    }
}

#[test]
fn seeds_are_linearizable() {
    let first = number_from_environment("CAVERN_SEED").unwrap_or(1);
    let number = number_from_environment("CAVERN_SIMULATION_SEEDS").unwrap_or(SEEDS);
    let (mut begun, mut done) = (0, 0);
    for seed in first..first + number {
        // The last one that is said is the one that fails, or does not end.
        println!("seed {seed}");
        let run = run(seed, Faults::All, Flaw::None);
        check(seed, &run);
        (begun, done) = (begun + run.installations.0, done + run.installations.1);
    }
    println!("{begun} snapshots were sent, and {done} of them have taken the place of a state");
    assert!(number < 20 || done > 0, "no seed has come to a snapshot of another master");
}

#[test]
fn a_lead_begins_when_it_can_write() {
    for seed in 1..=5 {
        let run = run(seed, Faults::None, Flaw::None);
        check(seed, &run);
        assert_eq!(run.false_starts, 0, "{}", run.lines.join("\n"));
    }
}

/// Entries that it had sent may be on other disks, and not on its own.
#[test]
fn a_leader_that_was_restarted_does_not_go_on_in_its_term() {
    for seed in 1..=5 {
        let run = in_group(seed, Flaw::None, async |group| {
            let first = leader(group).await;
            let term = first.term();
            first.kill(true).await;
            start_all(group).await;
            let second = leader(group).await;
            if second.term() > term { Ok(()) } else { Err(format!("master {} leads again in {term:?}", second.id)) }
        });
        check(seed, &run);
    }
}

/// Runs in which something is done to a group, and nobody may answer reads beside its leader.
fn with_leases_watched(flaw: Flaw, scenario: impl AsyncFn(&Arc<Group>)) -> Result<(), String> {
    (1..=20).try_for_each(|seed| {
        let run = in_group(seed, flaw, async |group| {
            let watching = tokio::spawn(watch_leases(group.clone()));
            scenario(group).await;
            watching.abort();
            Ok(())
        });
        run.verdict.map_err(|violation| format!("seed {seed}: {violation}\n{}", run.lines.join("\n")))
    })
}

/// A follower is restarted that has promised the leader to elect no other.
fn restarts_a_follower(flaw: Flaw) -> Result<(), String> {
    with_leases_watched(flaw, async |group| {
        let first = leader(group).await;
        let others: Vec<_> = group.masters.iter().filter(|master| master.id != first.id).cloned().collect();
        let cut = |other: u64| [(first.id, other), (other, first.id)];
        // One does not hear of the leader, whom the other one acknowledges.
        group.world.links.lock().cut.extend(cut(others[0].id));
        sleep(Duration::from_secs(2)).await;
        group.world.links.lock().cut.extend(cut(others[1].id));
        others[1].kill(false).await;
        start_all(group).await;
        sleep(Duration::from_secs(3)).await;
    })
}

#[test]
fn a_master_that_was_restarted_keeps_what_it_has_promised() {
    assert_eq!(restarts_a_follower(Flaw::None), Ok(()));
    let violation = restarts_a_follower(Flaw::NoPromise).expect_err("nobody notices that promises are forgotten");
    assert!(violation.contains("all answer reads"), "{violation}");
}

/// A leader gives its leadership away, and does not hear what comes of that.
fn gives_the_lead_away(flaw: Flaw) -> Result<(), String> {
    with_leases_watched(flaw, async |group| {
        let first = leader(group).await;
        sleep(Duration::from_secs(1)).await;
        let giving = first.clone();
        let giving = tokio::spawn(async move { giving.hand_over().await });
        let others = (1..=MASTERS).filter(|other| *other != first.id);
        group.world.links.lock().cut.extend(others.map(|other| (other, first.id)));
        sleep(Duration::from_secs(3)).await;
        giving.abort();
    })
}

#[test]
fn a_leader_that_gives_its_lead_away_answers_no_more_reads() {
    assert_eq!(gives_the_lead_away(Flaw::None), Ok(()));
    let violation = gives_the_lead_away(Flaw::KeptLease).expect_err("nobody notices that a lease is kept");
    assert!(violation.contains("all answer reads"), "{violation}");
}

/// Seeds until one is found to be wrong.
fn found(faults: Faults, flaw: Flaw) -> Option<String> {
    (1..=10).find_map(|seed| run(seed, faults, flaw).verdict.err())
}

#[test]
fn reads_of_a_leader_that_is_none_any_more_are_found() {
    let violation = found(Faults::Isolation, Flaw::NoLease).expect("nobody notices that leases are not kept");
    assert!(violation.contains("must have seen one of the states"), "{violation}");
    assert_eq!(found(Faults::Isolation, Flaw::None), None);
}

#[test]
fn disks_that_do_not_sync_are_found() {
    found(Faults::Blackouts, Flaw::LyingDisks).expect("nobody notices that nothing is on disk");
    assert_eq!(found(Faults::Blackouts, Flaw::None), None);
}

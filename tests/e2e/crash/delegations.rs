//! Directories delegated to a client, and each moment at which somebody may die: the process that answers for changes,
//! all of the client, and the master that has directories recalled.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, Process, eventually, eventually_or, number};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::bucket::{Bucket, assert_same};
use crate::matrix::keep_files_to_this_thread;
use crate::powerless::{History, Loss, Programs};

const PATIENCE: Duration = Duration::from_secs(60);
const CONF: &str = "\
[master]\npersist_delay = \"100ms\"\nsession_lease = \"2s\"\nworker_timeout = \"60s\"\n\
[client]\nmetadata_timeout = \"60s\"\nread_timeout = \"60s\"\n";

/// Points that a client passes whose mount is kept, and at which pass they are deadly.
const OF_CLIENTS: [(Failpoint, u32); 13] = [
    (Failpoint::ChangeJournaled, 20),
    (Failpoint::ChangeQueued, 20),
    (Failpoint::WriteBackSent, 3),
    (Failpoint::WriteBackMade, 3),
    (Failpoint::ReturnQueued, 1),
    (Failpoint::BlockPreallocated, 3),
    (Failpoint::BlockReserved, 6),
    (Failpoint::WritePlaced, 6),
    (Failpoint::CommitBegun, 6),
    (Failpoint::CommitAnswered, 6),
    (Failpoint::SyncedAtWorkers, 4),
    (Failpoint::CreateAnswered, 6),
    (Failpoint::ReplayBegun, 1),
];

/// Two mounts, with a session each.
struct Mounts {
    cluster: Cluster,
    here: PathBuf,
    there: PathBuf,
}

impl Mounts {
    fn up() -> Self {
        let options = Options { failpoints: true, supervised: true, secure: true, ..Options::default() };
        let cluster = Cluster::up(Options { conf: CONF.to_owned(), more_mounts: vec!["second"], ..options });
        cluster.s3.create_bucket("bucket");
        cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
        let (here, there) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
        Self { cluster, here, there }
    }

    fn programs(&self, seed: u64) -> Programs {
        Programs::new(History::new(self.here.clone(), &[]), seed)
    }

    /// A directory delegated to the first mount, and in which it answers.
    fn held(&self, name: &str) -> PathBuf {
        let directory = self.here.join(name);
        fs::create_dir(&directory).unwrap();
        let answered = || self.cluster.status().fuse[0].metric("cavern_client_write_back_changes_total").unwrap_or(0);
        let before = answered();
        eventually("changes are answered here", PATIENCE, || {
            let probe = directory.join("probe");
            File::create(&probe).unwrap();
            fs::remove_file(&probe).unwrap();
            (answered() > before).then_some(())
        });
        directory
    }

    /// The worker has the journals of both mounts: from then on it makes what they have answered.
    fn journals_are_kept(&self) {
        let journals = || self.cluster.status().workers[0].metric("cavern_worker_journals");
        eventually("the worker keeps the journals", PATIENCE, || (journals() == Some(2)).then_some(()));
    }

    /// Both mounts show the same: the other one a moment later, where it knew what was before.
    #[track_caller]
    fn show_the_same(&self, below: &str, when: &str) {
        let [here, there] = [&self.here, &self.there].map(|top| top.join(below));
        let expected = look(&here);
        let is_same = || (look(&there) == expected).then_some(());
        eventually_or(&format!("{when}: the other mount shows the same"), PATIENCE, is_same, || {
            format!("{:?} where {expected:?} is there", look(&there))
        });
    }

    /// Everything is in the bucket as the programs have left it.
    #[track_caller]
    fn converges(&self, when: &str, programs: &Programs) {
        self.cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
        let bucket = Bucket::of(&self.cluster, "bucket");
        let objects = eventually("nothing is kept for who is gone", PATIENCE, || {
            let objects = bucket.objects();
            (!objects.keys().any(|key| key.contains("/.cavern-preserved-"))).then_some(objects)
        });
        assert_same(when, &objects, &programs.history.objects("fs/"));
    }
}

/// Programs at work.
struct Working {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<(Programs, std::io::Result<()>)>,
}

impl Working {
    fn start(mut programs: Programs) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = stop.clone();
            move || {
                keep_files_to_this_thread();
                let result = programs.run(&stop);
                (programs, result)
            }
        });
        Self { stop, thread }
    }

    /// They go on until something fails.
    fn fail(self) -> (Programs, std::io::Result<()>) {
        self.thread.join().unwrap()
    }

    fn end(self) -> (Programs, std::io::Result<()>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

#[test]
fn a_daemon_dies_at_each_of_its_points_and_nobody_notices() {
    die_at(|point| point != Failpoint::ReplayBegun);
}

#[test]
#[ignore = "a successor may be past the point before that is armed again: see the loop"]
fn its_successors_die_as_they_begin_to_replay_and_nobody_notices() {
    die_at(|point| point == Failpoint::ReplayBegun);
}

fn die_at(is_tried: impl Fn(Failpoint) -> bool) {
    let mounts = Mounts::up();
    let cluster = &mounts.cluster;
    let mut programs = mounts.programs(number("CAVERN_SEED", 7));
    for (point, pass) in OF_CLIENTS.into_iter().filter(|(point, _)| is_tried(*point)) {
        let began = Instant::now();
        let before = cluster.status().fuse[0].daemon();
        cluster.arm(point, pass);
        let working = Working::start(programs);
        if point == Failpoint::ReplayBegun {
            // Its successor, and that one's, and that one's.
            for _ in 0..3 {
                if let Some(pid) = cluster.status().fuse[0].daemon().and_then(Pid::from_raw) {
                    // It may be dead by itself.
                    let _ = kill_process(pid, Signal::KILL);
                }
                eventually("it dies", PATIENCE, || cluster.has_died_at(point).then_some(()));
                cluster.arm(point, pass);
            }
            // Nobody dies there any more.
            cluster.disarm(point);
        }
        eventually(&format!("the daemon dies at {}", point.name()), PATIENCE, || {
            if point == Failpoint::ReturnQueued {
                // Somebody else looks into whatever there is.
                look(&mounts.there);
            }
            (point == Failpoint::ReplayBegun || cluster.has_died_at(point) || working.thread.is_finished())
                .then_some(())
        });
        eventually("another one serves the mount", PATIENCE, || {
            cluster.status().fuse[0].daemon().filter(|daemon| Some(*daemon) != before)
        });
        // Of whoever goes on, too.
        thread::sleep(Duration::from_millis(50));
        let (left, result) = working.end();
        programs = left;
        result.unwrap_or_else(|error| panic!("{}: a program failed: {error}", point.name()));
        let (steps, kept) = programs.history.check(point.name(), Loss::Nothing);
        assert_eq!(steps, kept, "{}: changes are missing", point.name());
        mounts.show_the_same("", point.name());
        mounts.converges(point.name(), &programs);
        eprintln!("{}: all is well after {:.1?}", point.name(), began.elapsed());
    }
}

#[test]
fn a_client_that_is_killed_as_a_whole_loses_nothing_that_it_answered() {
    let mounts = Mounts::up();
    let cluster = &mounts.cluster;
    let seed = number("CAVERN_SEED", 7);
    let (mut programs, mut random) = (mounts.programs(seed), StdRng::seed_from_u64(seed));
    for round in 0..number("CAVERN_CRASH_ROUNDS", 6) {
        let when = format!("seed {seed}, round {round}");
        mounts.journals_are_kept();
        let working = Working::start(programs);
        thread::sleep(Duration::from_millis(random.random_range(200..1200)));
        let client = &cluster.status().fuse[0];
        for pid in [client.pid, client.daemon()].into_iter().flatten().filter_map(Pid::from_raw) {
            // The daemon may have gone with its supervisor.
            let _ = kill_process(pid, Signal::KILL);
        }
        let (left, result) = working.fail();
        programs = left;
        assert!(result.is_err(), "{when}: {result:?}");
        eventually("its end is known", PATIENCE, || (cluster.status().fuse[0].state == "crashed").then_some(()));
        cluster.start("fuse0");
        let (steps, kept) = programs.history.check(&when, Loss::Client);
        // The last one may have had no answer.
        assert!(steps - kept <= 1, "{when}: {kept} of {steps} changes kept");
        mounts.converges(&when, &programs);
        mounts.show_the_same("", &when);
    }
}

#[test]
fn a_master_dies_at_each_step_of_a_recall_and_everything_is_there_once() {
    let mounts = Mounts::up();
    for (point, pass) in [
        (Failpoint::RecallSent, 1),
        (Failpoint::DelegationReturned, 1),
        (Failpoint::CommandApplying, 3),
        (Failpoint::EntryAnswered, 3),
    ] {
        let held = mounts.held(point.name());
        let names: BTreeSet<String> = (0..40).map(|number| number.to_string()).collect();
        names.iter().for_each(|name| fs::write(held.join(name), name).unwrap());
        mounts.cluster.arm(point, pass);
        let looking = thread::spawn({
            let there = mounts.there.join(point.name());
            move || look(&there)
        });
        master_dies(&mounts.cluster, point, &held);
        let seen = looking.join().unwrap();
        // What is made meanwhile may be there as well.
        assert!(names.iter().all(|name| seen.contains(&(name.clone(), name.clone().into_bytes()))), "{seen:?}");
        mounts.show_the_same(point.name(), point.name());
    }
}

/// Waits for the master to die at a point, while somebody changes a directory, and starts it again.
#[track_caller]
fn master_dies(cluster: &Cluster, point: Failpoint, held: &std::path::Path) {
    let mut number = 0;
    let making = |number: usize| {
        let path = held.join(format!("more-{number}"));
        thread::spawn(move || fs::write(path, "").unwrap())
    };
    let mut made = Vec::new();
    eventually(&format!("the master dies at {}", point.name()), PATIENCE, || {
        if number < 200 {
            number += 1;
            made.push(making(number));
        }
        cluster.has_died_at(point).then_some(())
    });
    eventually("its end is known", PATIENCE, || (cluster.status().masters[0].state == "crashed").then_some(()));
    cluster.start("master");
    made.into_iter().for_each(|made| made.join().unwrap());
}

#[test]
fn a_master_dies_in_the_middle_of_the_end_of_a_session_and_lets_go_of_the_rest() {
    let mounts = Mounts::up();
    let cluster = &mounts.cluster;
    let directories = mounts.there.join("directories");
    fs::create_dir(&directories).unwrap();
    // More than one step lets go of.
    for number in 0..600 {
        fs::create_dir(directories.join(format!("{number}"))).unwrap();
    }
    fs::write(directories.join("last"), "last").unwrap();
    File::open(&directories).unwrap().sync_all().unwrap();
    cluster.arm(Failpoint::SessionEnding, 1);
    // Neither the worker, which has the journal, nor the daemon, when its supervisor dies, may let go of the
    // directories.
    let daemon = Process::of(&cluster.status().fuse[1]);
    cluster.kill("worker0");
    daemon.signal(Signal::STOP);
    cluster.kill("fuse1");
    daemon.signal(Signal::KILL);
    // It is kept until somebody wants what it holds.
    let here = mounts.here.join("directories");
    let wanted = here.clone();
    let listing = thread::spawn(move || fs::read_dir(wanted).unwrap().count());
    eventually("the master dies", PATIENCE, || cluster.has_died_at(Failpoint::SessionEnding).then_some(()));
    eventually("its end is known", PATIENCE, || (cluster.status().masters[0].state == "crashed").then_some(()));
    cluster.start("master");
    cluster.start("worker0");
    let began = Instant::now();
    assert_eq!(listing.join().unwrap(), 601);
    assert_eq!(fs::read(here.join("last")).unwrap(), b"last");
    for number in 0..600 {
        fs::write(here.join(format!("{number}/theirs")), "").unwrap();
    }
    // Nothing of it is waited for until a lease is over, again and again: that would be 1,200 seconds.
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
    cluster.start("fuse1");
    mounts.show_the_same("", "after the end of a session");
}

/// Every file below a directory, with its content; and every directory, with none.
fn look(directory: &std::path::Path) -> BTreeSet<(String, Vec<u8>)> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![String::new()];
    while let Some(below) = waiting.pop() {
        // What is taken away meanwhile is not there.
        for entry in fs::read_dir(directory.join(&below)).into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let name = if below.is_empty() { name } else { format!("{below}/{name}") };
            let path = directory.join(&name);
            if fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir()) {
                found.insert((format!("{name}/"), Vec::new()));
                waiting.push(name);
            } else if let Ok(content) = fs::read(&path) {
                found.insert((name, content));
            }
        }
    }
    found
}

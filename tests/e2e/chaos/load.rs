//! Programs that use both mounts of both clients, and what they know of them in the end.

mod names;
mod reader;
mod writer;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cavern_tests::eventually;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::journal::{Caller, Journal};
use crate::model::Model;
use crate::site::{CLIENTS, FILES, IMAGES, PATIENCE, Site};
use names::Names;
use reader::Reader;
use writer::Writer;

/// Steps of each program after which it certainly goes on.
const STEPS: usize = 6;
/// What a program does between two steps, as one that has something to compute: the machine is not to be full.
const PAUSE: Duration = Duration::from_millis(3);
/// Where programs of both clients make names.
pub const SHARED: &str = "shared";

/// What all rounds read: images, and files that were made before.
pub type Contents = BTreeMap<String, Vec<u8>>;

/// A program: it does one step after the other.
pub trait Steps: Send {
    fn step(&mut self, caller: &Caller);

    /// Ends it; answers what must be there.
    fn finish(self: Box<Self>, _caller: &Caller) -> Model {
        Model::default()
    }
}

struct Program {
    client: usize,
    steps: Arc<AtomicUsize>,
    thread: JoinHandle<Model>,
}

/// Files that both clients try to make, by their number, and what came of it for which client.
type Races = Mutex<BTreeMap<usize, Vec<(usize, Race)>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Race {
    Won,
    Lost,
    /// The call failed.
    Unknown,
}

/// The programs of a round.
pub struct Load {
    pub journal: Arc<Journal>,
    done: Arc<AtomicBool>,
    may_fail: [Arc<AtomicBool>; CLIENTS.len()],
    programs: Vec<Program>,
    races: Arc<Races>,
    /// Programs of one client wait for those of the other one.
    pub shares_locks: bool,
}

impl Load {
    /// Begins in a new directory of the fs-mode mount; returns when everything is under way.
    #[track_caller]
    pub fn start(site: &Site, directory: &str, images: &Arc<Contents>, kept: &Arc<Contents>, seed: u64) -> Self {
        let tops: Vec<PathBuf> = (0..CLIENTS.len()).map(|client| site.mount(client).join(FILES)).collect();
        fs::create_dir(tops[0].join(directory)).unwrap();
        for own in own_directories() {
            fs::create_dir(tops[0].join(directory).join(own)).unwrap();
        }
        let mut load = Self { shares_locks: false, ..Self::new() };
        for (client, top) in tops.iter().enumerate() {
            let here = top.join(directory);
            eventually("the directories are there", PATIENCE, || here.join(SHARED).is_dir().then_some(()));
            let random = |program: u64| StdRng::seed_from_u64(seed ^ (program * 2 + client as u64) << 32);
            let images = (site.mount(client).join(IMAGES), Arc::clone(images));
            let all: [Box<dyn Steps>; 3] = [
                Box::new(Reader::new(images, (top.clone(), Arc::clone(kept)), random(1))),
                Box::new(Names::new(here.clone(), client, Arc::clone(&load.races), random(2))),
                Box::new(Writer::new(here, client, random(3))),
            ];
            all.into_iter().for_each(|program| load.add(client, program));
        }
        load.go_on();
        load
    }

    /// One without programs, and of programs that share locks.
    pub fn new() -> Self {
        Self {
            journal: Arc::default(),
            done: Arc::default(),
            may_fail: Default::default(),
            programs: Vec::new(),
            races: Arc::default(),
            shares_locks: true,
        }
    }

    /// Has a program of a client begin.
    pub fn add(&mut self, client: usize, program: Box<dyn Steps>) {
        let (journal, may_fail) = (Arc::clone(&self.journal), Arc::clone(&self.may_fail[client]));
        self.programs.push(Program::start(program, Caller { client, journal, may_fail }, Arc::clone(&self.done)));
    }

    /// Waits until each program of each client has gone on.
    #[track_caller]
    pub fn go_on(&self) {
        self.all_go_on(|_| true);
    }

    /// The same of one client.
    #[track_caller]
    pub fn client_goes_on(&self, client: usize) {
        self.all_go_on(|program| program.client == client);
    }

    #[track_caller]
    fn all_go_on(&self, wanted: impl Fn(&Program) -> bool) {
        let steps = || self.programs.iter().filter(|program| wanted(program)).map(Program::steps).collect::<Vec<_>>();
        let before = steps();
        let go_on = || steps().iter().zip(&before).all(|(now, before)| *now > before + STEPS);
        self.wait("go on", || {
            assert!(!self.programs.iter().any(|program| program.thread.is_finished()), "a program has failed");
            go_on()
        });
    }

    /// Waits for something; whoever waits in vain says which calls have not ended.
    #[track_caller]
    pub fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        eventually("", 2 * PATIENCE, || {
            let waits = || format!("the programs do not {what}; calls:\n{}", self.journal.slow());
            assert!(begun.elapsed() < PATIENCE, "{}", waits());
            is_so().then_some(())
        });
    }

    /// From now on calls of a client may fail, or must not.
    pub fn may_fail(&self, client: usize, may: bool) {
        self.may_fail[client].store(may, Ordering::SeqCst);
    }

    /// Ends all programs; what must be there below the directory, and the journal.
    #[track_caller]
    pub fn finish(self) -> (Vec<Model>, Arc<Journal>) {
        self.done.store(true, Ordering::Relaxed);
        self.wait("end", || self.programs.iter().all(|program| program.thread.is_finished()));
        let join = |program: Program| program.thread.join().unwrap_or_else(|_| panic!("a program has failed"));
        let mut models: Vec<Model> = self.programs.into_iter().map(join).collect();
        models.push(names::judge(&self.races.lock().unwrap()));
        (models, self.journal)
    }
}

impl Program {
    fn start(mut program: Box<dyn Steps>, caller: Caller, done: Arc<AtomicBool>) -> Self {
        let (client, steps) = (caller.client, Arc::new(AtomicUsize::new(0)));
        let thread = thread::spawn({
            let steps = Arc::clone(&steps);
            move || {
                while !done.load(Ordering::Relaxed) {
                    program.step(&caller);
                    steps.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(PAUSE);
                }
                program.finish(&caller)
            }
        });
        Self { client, steps, thread }
    }

    fn steps(&self) -> usize {
        self.steps.load(Ordering::Relaxed)
    }
}

/// What is made for the programs before they begin.
pub fn own_directories() -> Vec<String> {
    let own = |client| [Names::directory(client), Writer::directory(client)];
    (0..CLIENTS.len()).flat_map(own).chain([SHARED.to_owned()]).collect()
}

//! Names that both clients try to make, in each way of which only one can succeed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::make;
use crate::journal::Caller;
use crate::load::Steps;
use crate::site::CLIENTS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Open,
    Mkdir,
    Link,
    Rename,
    Symlink,
}

const WAYS: [Way; 5] = [Way::Open, Way::Mkdir, Way::Link, Way::Rename, Way::Symlink];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Won,
    Lost,
    /// The call failed, as it might.
    Unknown,
}

/// Names by their number, and what came of them for which client.
#[derive(Default)]
pub struct Exclusive(Mutex<BTreeMap<usize, Vec<(usize, Outcome)>>>);

impl Exclusive {
    pub fn start(top: &Path) -> Arc<Self> {
        (0..CLIENTS.len()).for_each(|client| make(&top.join(source(client)), word(client).as_bytes()));
        Arc::default()
    }

    pub fn program(self: &Arc<Self>, top: &Path, client: usize, random: StdRng) -> Box<dyn Steps> {
        Box::new(Contender { all: Arc::clone(self), top: top.to_owned(), client, next: 0, random })
    }

    /// Each name was made once, and a client shows it as its maker did. How many there are.
    pub fn judge(&self, top: &Path) -> Result<usize, String> {
        let tried = self.0.lock().unwrap();
        for (number, outcomes) in tried.iter() {
            let name = name(*number);
            let who =
                |wanted| outcomes.iter().filter(move |(_, outcome)| *outcome == wanted).map(|(client, _)| *client);
            let (won, unknown) = (who(Outcome::Won).collect::<Vec<_>>(), who(Outcome::Unknown).collect::<Vec<_>>());
            assert!(won.len() == 1 || won.is_empty() && !unknown.is_empty(), "{name}: {outcomes:?}");
            let made = made_by(&top.join(&name), way(*number));
            // Who failed may have made it, and not what is in it.
            let is_right = match (won.first(), &made) {
                (Some(won), Ok(made)) => made.is_none_or(|made| made == *won),
                (None, Ok(made)) => made.is_none_or(|made| unknown.contains(&made)),
                (_, Err(_)) => won.is_empty(),
            };
            if !is_right {
                return Err(format!("{}: {outcomes:?}, and there is {made:?}", top.join(name).display()));
            }
        }
        Ok(tried.len())
    }
}

/// Who made a name, as far as it tells.
fn made_by(path: &Path, way: Way) -> Result<Option<usize>, String> {
    let told = match way {
        Way::Mkdir => path.read_dir().map(|_| String::new()),
        Way::Symlink => fs::read_link(path).map(|target| target.to_string_lossy().into_owned()),
        Way::Open | Way::Link | Way::Rename => fs::read_to_string(path),
    };
    let told = told.map_err(|error| error.to_string())?;
    Ok((0..CLIENTS.len()).find(|client| word(*client) == told))
}

struct Contender {
    all: Arc<Exclusive>,
    top: PathBuf,
    client: usize,
    next: usize,
    random: StdRng,
}

impl Contender {
    fn contend(&mut self, caller: &Caller) {
        let number = self.next;
        self.next += 1;
        let outcome = self.attempt(caller, number);
        self.all.0.lock().unwrap().entry(number).or_default().push((self.client, outcome));
    }

    fn attempt(&self, caller: &Caller, number: usize) -> Outcome {
        let path = self.top.join(name(number));
        let own = self.top.join(format!("own-{}-{number}", self.client));
        if way(number) == Way::Rename && self.write(caller, &own).is_none() {
            return Outcome::Unknown;
        }
        let may_fail = caller.may_fail();
        let made = caller.call_or("make", &path, &[Errno::EXIST], || match way(number) {
            Way::Open => File::create_new(&path).map(Some),
            Way::Mkdir => fs::create_dir(&path).map(|()| None),
            Way::Link => fs::hard_link(self.top.join(source(self.client)), &path).map(|()| None),
            Way::Rename => Ok(renameat_with(CWD, &own, CWD, &path, RenameFlags::NOREPLACE).map(|()| None)?),
            Way::Symlink => symlink(word(self.client), &path).map(|()| None),
        });
        // What was answered may be lost, and the name be made again.
        if may_fail || caller.may_fail() {
            return Outcome::Unknown;
        }
        match made {
            None => Outcome::Unknown,
            Some(Ok(None)) => Outcome::Won,
            Some(Ok(Some(mut file))) => {
                let written = caller.change("write", &path, || file.write_all(word(self.client).as_bytes()));
                let closed = caller.change("close", &path, || crate::close(file));
                if written.and(closed).is_some() { Outcome::Won } else { Outcome::Unknown }
            }
            Some(Err(_)) if way(number) == Way::Rename => {
                let removed = caller.change("unlink", &own, || fs::remove_file(&own));
                if removed.is_some() { Outcome::Lost } else { Outcome::Unknown }
            }
            Some(Err(_)) => Outcome::Lost,
        }
    }

    fn write(&self, caller: &Caller, path: &Path) -> Option<()> {
        let mut file = caller.change("create", path, || File::create_new(path))?;
        caller.change("write", path, || file.write_all(word(self.client).as_bytes()))?;
        caller.change("close", path, || crate::close(file))
    }
}

impl Steps for Contender {
    fn step(&mut self, caller: &Caller) {
        // Whoever is behind goes on at once: the names are the same for both.
        let ahead = self.all.0.lock().unwrap().last_key_value().map_or(0, |(number, _)| *number);
        for _ in 0..=ahead.saturating_sub(self.next).min(self.random.random_range(0..5)) {
            self.contend(caller);
        }
    }
}

fn way(number: usize) -> Way {
    WAYS[number % WAYS.len()]
}

fn name(number: usize) -> String {
    format!("{:?}-{number}", way(number)).to_lowercase()
}

fn source(client: usize) -> String {
    format!("source-{client}")
}

fn word(client: usize) -> String {
    format!("client {client}")
}

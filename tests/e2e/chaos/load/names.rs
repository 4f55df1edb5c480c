//! Makes, renames, links and removes names, some of them in a directory where both clients do.
//!
//! Each call fails where an earlier one was done twice, or not at all: new names are new, and old ones are there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::sync::Arc;

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{Race, Races, SHARED, Steps};
use crate::journal::Caller;
use crate::model::{Kind, Model, is_below, look};
use crate::{LOCK_OWNER, LOCKED};

/// From so many names on they are rather removed.
const MANY: usize = 60;

pub struct Names {
    top: PathBuf,
    client: usize,
    model: Model,
    next: usize,
    races: Arc<Races>,
    random: StdRng,
}

impl Names {
    pub fn new(top: PathBuf, client: usize, races: Arc<Races>, random: StdRng) -> Self {
        Self { top, client, model: Model::default(), next: 0, races, random }
    }

    pub fn directory(client: usize) -> String {
        format!("names{client}")
    }

    /// A name that nobody has had, in any directory.
    fn new_name(&mut self, below: impl Fn(&str) -> bool) -> String {
        let directory = match self.random.random_range(0..4) {
            0 => SHARED.to_owned(),
            1 => Self::directory(self.client),
            _ => {
                let own = self.model.pick(&mut self.random, |kind| *kind == Kind::Directory);
                own.filter(|own| below(own)).unwrap_or_else(|| Self::directory(self.client))
            }
        };
        self.next += 1;
        format!("{directory}/{}-{}", self.client, self.next)
    }

    fn create(&mut self, caller: &Caller) {
        let (name, content) = (self.new_name(|_| true), format!("{} ", self.next).repeat(self.next % 100).into_bytes());
        let path = self.top.join(&name);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o644);
        let Some(file) = caller.change("create", &path, || options.open(&path)) else {
            return self.model.doubt(&name);
        };
        let written = caller.change("write", &path, || std::io::Write::write_all(&mut &file, &content));
        let closed = caller.change("close", &path, || crate::close(file));
        if written.and(closed).is_none() {
            return self.model.doubt(&name);
        }
        self.model.add(&name, Kind::File(content), 0o644);
    }

    fn mkdir(&mut self, caller: &Caller) {
        let name = self.new_name(|_| true);
        let path = self.top.join(&name);
        match caller.change("mkdir", &path, || DirBuilder::new().mode(0o755).create(&path)) {
            Some(()) => self.model.add(&name, Kind::Directory, 0o755),
            None => self.model.doubt(&name),
        }
    }

    fn symlink(&mut self, caller: &Caller) {
        let name = self.new_name(|_| true);
        let (path, target) = (self.top.join(&name), format!("to/{}", self.next));
        match caller.change("symlink", &path, || symlink(&target, &path)) {
            Some(()) => self.model.add(&name, Kind::Symlink(target), 0o777),
            None => self.model.doubt(&name),
        }
    }

    /// To a new name, or over another file.
    fn rename(&mut self, caller: &Caller) {
        let Some(from) = self.model.pick(&mut self.random, |_| true) else { return };
        let is_directory = self.model.node(&from).kind == Kind::Directory;
        let over = self.model.pick(&mut self.random, |kind| *kind != Kind::Directory);
        let over = over.filter(|_| !is_directory).filter(|_| self.random.random_bool(0.3));
        let to = over.unwrap_or_else(|| self.new_name(|directory| !is_below(directory, &from)));
        let (old, new) = (self.top.join(&from), self.top.join(&to));
        match caller.change("rename", &old, || fs::rename(&old, &new)) {
            // Two names of one file stay both.
            Some(()) if self.model.is_same(&from, &to) => {}
            Some(()) => self.model.rename(&from, &to),
            None => {
                self.model.doubt(&from);
                self.model.doubt(&to);
            }
        }
    }

    fn link(&mut self, caller: &Caller) {
        let Some(from) = self.model.pick(&mut self.random, |kind| matches!(kind, Kind::File(_))) else { return };
        let to = self.new_name(|_| true);
        let (old, new) = (self.top.join(&from), self.top.join(&to));
        match caller.change("link", &new, || fs::hard_link(&old, &new)) {
            Some(()) => self.model.link(&from, &to),
            None => {
                self.model.doubt(&from);
                self.model.doubt(&to);
            }
        }
    }

    fn remove(&mut self, caller: &Caller) {
        let Some(name) = self.model.pick(&mut self.random, |_| true) else { return };
        let path = self.top.join(&name);
        let is_directory = self.model.node(&name).kind == Kind::Directory;
        let removed = match is_directory {
            true if !self.model.is_empty(&name) => return,
            true => caller.change("rmdir", &path, || fs::remove_dir(&path)),
            false => caller.change("unlink", &path, || fs::remove_file(&path)),
        };
        match removed {
            Some(()) => self.model.remove(&name),
            None => self.model.doubt(&name),
        }
    }

    fn chmod(&mut self, caller: &Caller) {
        let Some(name) = self.model.pick(&mut self.random, |kind| !matches!(kind, Kind::Symlink(_))) else { return };
        let (path, mode) = (self.top.join(&name), 0o700 | self.random.random_range(0..0o100));
        match caller.change("chmod", &path, || fs::set_permissions(&path, Permissions::from_mode(mode))) {
            Some(()) => self.model.node(&name).mode = mode,
            None => self.model.doubt(&name),
        }
    }

    /// What this program did shows at once on this client.
    fn look(&mut self, caller: &Caller) {
        let Some(name) = self.model.pick(&mut self.random, |_| true) else { return };
        let path = self.top.join(&name);
        if let Some(shown) = caller.call("look", &path, || look(&path)) {
            assert_eq!(shown, self.model.shown(&name), "{} on client {}", path.display(), self.client);
        }
        let directory = Self::directory(self.client);
        let path = self.top.join(&directory);
        let list = || fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name().into_string().unwrap())).collect();
        let listed: Option<BTreeSet<String>> = caller.call("list", &path, list);
        if let Some(listed) = listed.filter(|_| self.model.is_certain(&directory)) {
            assert_eq!(listed, self.model.children(&directory), "{} on client {}", path.display(), self.client);
        }
    }

    /// A file that the other client tries to make, too.
    fn race(&mut self, caller: &Caller) {
        let number = {
            let races = self.races.lock().unwrap();
            // The last one, unless this client has tried it already.
            let last = races.last_key_value().map_or(0, |(number, _)| *number);
            last.max(self.next_race(&races))
        };
        let path = self.top.join(race_name(number));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o644);
        let race = match caller.call_or("create", &path, &[Errno::EXIST], || options.open(&path)) {
            Some(Ok(_)) => Race::Won,
            Some(Err(_)) => Race::Lost,
            None => Race::Unknown,
        };
        self.races.lock().unwrap().entry(number).or_default().push((self.client, race));
    }

    fn next_race(&self, races: &BTreeMap<usize, Vec<(usize, Race)>>) -> usize {
        let mine = races.iter().rev().find(|(_, tried)| tried.iter().any(|(client, _)| *client == self.client));
        mine.map_or(0, |(number, _)| number + 1)
    }

    /// What one client has locked all the time the other one never gets.
    fn lock(&self, caller: &Caller) {
        if self.client == LOCK_OWNER {
            return;
        }
        let path = self.top.parent().unwrap().join(LOCKED);
        let got = caller.call_or("flock", &path, &[Errno::WOULDBLOCK], || {
            let file = File::open(&path)?;
            Ok(rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?)
        });
        assert!(!matches!(got, Some(Ok(()))), "{} is locked by client {LOCK_OWNER}", path.display());
    }
}

impl Steps for Names {
    fn step(&mut self, caller: &Caller) {
        match self.random.random_range(0..24) {
            0..=3 => self.create(caller),
            4 | 5 => self.mkdir(caller),
            6 => self.symlink(caller),
            7..=10 => self.rename(caller),
            11 | 12 => self.link(caller),
            13..=15 => self.remove(caller),
            16 | 17 => self.chmod(caller),
            18 | 19 => self.race(caller),
            20 => self.lock(caller),
            _ => self.look(caller),
        }
        if self.model.len() > MANY {
            self.remove(caller);
        }
    }

    fn finish(self: Box<Self>, _: &Caller) -> Model {
        self.model
    }
}

fn race_name(number: usize) -> String {
    format!("{SHARED}/race-{number}")
}

/// Each file of the races was made once, by one client; what must be there of them.
pub fn judge(races: &BTreeMap<usize, Vec<(usize, Race)>>) -> Model {
    let mut model = Model::default();
    for (number, tried) in races {
        let count = |race| tried.iter().filter(|(_, other)| *other == race).count();
        let (won, unknown) = (count(Race::Won), count(Race::Unknown));
        let name = race_name(*number);
        assert!(won == 1 || won == 0 && unknown > 0, "{name} was made {won} times: {tried:?}");
        if won == 1 {
            model.add(&name, Kind::File(vec![]), 0o644);
        } else {
            model.doubt(&name);
        }
    }
    model
}

//! What programs do to files, and what of it may be missing after a loss of power.
//!
//! Names: what is found is one moment of the past, no earlier than what was promised last: by fsync(2) of anything, or
//! by a change in a directory that the client does not hold. Content: of a file that was synced, that; of what was
//! written since, any part, and zeros where it is missing; but the length is that of the last close before the moment
//! that is found, or a later one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::IntoRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use crate::bucket::Objects;
use crate::model::{Names, walk};

const FILES_MAX: usize = 24;
const DIRECTORIES_MAX: usize = 8;

/// The namespace at one moment.
#[derive(Clone, Debug, Default)]
struct Moment {
    names: Names,
    /// Of each file, how many versions of its content the master has been told of, at least.
    reported: BTreeMap<usize, usize>,
}

/// Contents of a file, from the first one on.
#[derive(Default)]
struct Contents {
    versions: Vec<Vec<u8>>,
    /// How many of them are superseded by one that is on disk.
    superseded: usize,
    /// The last one was being written: any part of it may be there.
    is_cut_short: bool,
    /// What was done to it, for who has to find out what went wrong.
    steps: Vec<String>,
}

impl Contents {
    fn of(content: Vec<u8>) -> Self {
        Self { versions: vec![content], ..Self::default() }
    }

    fn last(&self) -> &[u8] {
        self.versions.last().expect("there is at least one")
    }

    /// Why this cannot be what is found, when the master had been told of so many versions.
    fn why_not(&self, found: &[u8], reported: usize, loss: Loss) -> Option<String> {
        if loss == Loss::Nothing {
            let is_last = self.last() == found;
            return (!is_last).then(|| format!("{} bytes, and other ones than were written last", found.len()));
        }
        let possible = &self.versions[self.superseded..];
        let reported = reported.max(self.superseded + 1);
        let before = self.versions.len().saturating_sub(2);
        let is_part = self.is_cut_short && (self.versions[before].len()..self.last().len()).contains(&found.len());
        if !is_part && !self.versions[reported - 1..].iter().any(|version| version.len() == found.len()) {
            let lengths: Vec<usize> = possible.iter().map(Vec::len).collect();
            return Some(format!("{} bytes, and the versions have {lengths:?}, reported {reported}", found.len()));
        }
        let at = |version: &Vec<u8>, at: usize| version.get(at).copied().unwrap_or(0);
        let is_wrong = |(place, byte): &(usize, &u8)| {
            let is_certain = possible.iter().all(|version| at(version, *place) == at(&possible[0], *place));
            let may_be_missing = loss == Loss::Power && !is_certain;
            !(possible.iter().any(|version| at(version, *place) == **byte) || **byte == 0 && may_be_missing)
        };
        let (place, byte) = found.iter().enumerate().find(is_wrong)?;
        let wrong = found.iter().enumerate().filter(is_wrong).count();
        Some(format!("{wrong} of {} bytes are wrong, the first at {place}: {byte}", found.len()))
    }
}

/// What was lost with whoever died.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// There is a successor, or the one who died had nothing to lose.
    Nothing,
    /// The client, with what it had answered and not sent.
    Client,
    /// The host, with what was not on its disk.
    Power,
}

/// What has happened since what is certain.
pub struct History {
    pub top: PathBuf,
    /// Directories that no client holds, nor comes to hold.
    not_held: BTreeSet<String>,
    /// The first is certain, the last is now.
    moments: Vec<Moment>,
    files: Vec<Contents>,
}

impl History {
    pub fn new(top: PathBuf, directories: &[&str]) -> Self {
        let directories: BTreeSet<String> = directories.iter().map(|name| (*name).to_owned()).collect();
        let names = Names { directories: directories.clone(), files: BTreeMap::new() };
        let moments = vec![Moment { names, reported: BTreeMap::new() }];
        Self { top, not_held: directories, moments, files: Vec::new() }
    }

    fn now(&self) -> &Moment {
        self.moments.last().expect("there is at least one")
    }

    /// Everything up to now is in the master's log.
    fn names_are_safe(&mut self) {
        self.moments.drain(..self.moments.len() - 1);
    }

    /// A file is on disk, and everything up to now in the master's log.
    fn is_synced(&mut self, file: usize) {
        let contents = &mut self.files[file];
        contents.steps.push("synced".to_owned());
        contents.superseded = contents.versions.len() - 1;
        let all = contents.versions.len();
        let mut moment = self.now().clone();
        moment.reported.insert(file, all);
        self.moments = vec![moment];
    }

    /// Looks at every name and byte, and takes what there is for certain. Says how many moments there were, and the
    /// number of the one that is found.
    #[track_caller]
    pub fn check(&mut self, when: &str, loss: Loss) -> (usize, usize) {
        let mut found = (BTreeSet::new(), BTreeMap::new());
        walk(&self.top, "", &mut found);
        let (directories, contents) = found;
        let why_not = |moment: &Moment| -> Option<String> {
            let names = &moment.names;
            if names.directories != directories || !names.files.keys().eq(contents.keys()) {
                let missing = names.files.keys().filter(|name| !contents.contains_key(*name));
                let more = contents.keys().filter(|name| !names.files.contains_key(*name));
                return Some(format!(
                    "directories {:?}, not {directories:?}; files missing {:?}, more {:?}",
                    names.directories,
                    missing.collect::<Vec<_>>(),
                    more.collect::<Vec<_>>()
                ));
            }
            names.files.iter().find_map(|(name, file)| {
                let reported = moment.reported.get(file).copied().unwrap_or(0);
                let file = &self.files[*file];
                Some(format!("{name}: {}; {:?}", file.why_not(&contents[name], reported, loss)?, file.steps))
            })
        };
        let reasons: Vec<Option<String>> = self.moments.iter().map(why_not).collect();
        let Some(moment) = reasons.iter().rposition(Option::is_none) else {
            let reasons: Vec<String> = reasons.into_iter().flatten().collect();
            panic!("{when}: what is found was at no moment: {reasons:#?}");
        };
        let steps = self.moments.len();
        let names = self.moments[moment].names.clone();
        let mut reported = BTreeMap::new();
        for (name, file) in &names.files {
            self.files[*file] = Contents::of(contents[name].clone());
            reported.insert(*file, 1);
        }
        self.moments = vec![Moment { names, reported }];
        (steps, moment + 1)
    }

    /// What the bucket is to have, below a prefix.
    pub fn objects(&self, prefix: &str) -> Objects {
        let names = &self.now().names;
        let directories = names.directories.iter().map(|name| (format!("{prefix}{name}/"), Bytes::new()));
        let content = |file: &usize| Bytes::copy_from_slice(self.files[*file].last());
        let files = names.files.iter().map(|(name, file)| (format!("{prefix}{name}"), content(file)));
        directories.chain(files).collect()
    }

    fn is_held(&self, name: &str) -> bool {
        name.rsplit_once('/').is_none_or(|(directory, _)| !self.not_held.contains(directory))
    }
}

/// One program, which does all of that.
pub struct Programs {
    pub history: History,
    random: StdRng,
    /// Names that were given.
    given: usize,
    /// How many of twelve files that are written are synced.
    synced: u32,
}

impl Programs {
    pub fn new(history: History, seed: u64) -> Self {
        Self { history, random: StdRng::seed_from_u64(seed), given: 0, synced: 0 }
    }

    /// Works until it is stopped, or something fails.
    pub fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        self.synced = self.random.random_range(1..8);
        // Those of before nobody may hold any more.
        self.remove_trees()?;
        for _ in 0..2 {
            let name = self.new_name("d");
            self.make_directory_at(name)?;
        }
        while !stop.load(Ordering::Relaxed) {
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> io::Result<()> {
        let (files, directories) = (self.history.now().names.files.len(), self.history.now().names.directories.len());
        match self.random.random_range(0..20) {
            _ if directories < 4 => self.make_directory(),
            _ if files > FILES_MAX => self.remove(),
            0..=5 => self.create(),
            _ if files < 6 => self.create(),
            6..=8 => self.overwrite(),
            9 => self.append(),
            10 => self.set_length(),
            11 | 12 => self.rename(),
            13 => self.remove(),
            14 | 15 => self.replace(),
            16 => self.sync_again(),
            17 => self.sync_directory(),
            18 if directories < DIRECTORIES_MAX => self.make_directory(),
            _ => self.rename_directory(),
        }
    }

    // ------------------------------------------------------------------------------------------- names

    /// Makes a change of the names, which is about these.
    fn change(&mut self, about: &[&str], after: Names, change: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let moment = Moment { names: after, ..self.history.now().clone() };
        self.history.moments.push(moment);
        change(&self.history.top)?;
        if !about.iter().any(|name| self.history.is_held(name)) {
            self.history.names_are_safe();
        }
        Ok(())
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.given += 1;
        format!("{kind}{}", self.given)
    }

    fn some_directory(&mut self) -> String {
        let directories = &self.history.now().names.directories;
        let at = self.random.random_range(0..directories.len());
        directories.iter().nth(at).expect("there are as many").clone()
    }

    fn new_path(&mut self) -> String {
        format!("{}/{}", self.some_directory(), self.new_name("f"))
    }

    fn some_file(&mut self) -> (String, usize) {
        let files = &self.history.now().names.files;
        let at = self.random.random_range(0..files.len());
        let (name, file) = files.iter().nth(at).expect("there are as many");
        (name.clone(), *file)
    }

    /// At the top, or in another one.
    fn make_directory(&mut self) -> io::Result<()> {
        let name = self.new_name("d");
        let name = if self.random.random() { name } else { format!("{}/{name}", self.some_directory()) };
        self.make_directory_at(name)
    }

    fn make_directory_at(&mut self, name: String) -> io::Result<()> {
        let mut after = self.history.now().names.clone();
        after.directories.insert(name.clone());
        self.change(&[&name], after, |top| fs::create_dir(top.join(&name)))
    }

    /// Leaves few directories, beside those that nobody holds.
    fn remove_trees(&mut self) -> io::Result<()> {
        while self.history.now().names.directories.len() > DIRECTORIES_MAX / 2 {
            let top = self.some_directory();
            if self.history.not_held.contains(&top) {
                continue;
            }
            let is_below = |name: &&String| name.strip_prefix(&top).is_some_and(|rest| rest.starts_with('/'));
            let Names { files, directories } = &self.history.now().names;
            let files: Vec<String> = files.keys().filter(is_below).cloned().collect();
            let directories: Vec<String> = directories.iter().filter(is_below).cloned().collect();
            for name in files {
                self.remove_at(&name)?;
            }
            // What is below comes behind.
            for name in directories.into_iter().rev().chain([top]) {
                let mut after = self.history.now().names.clone();
                after.directories.remove(&name);
                self.change(&[&name], after, |top| fs::remove_dir(top.join(&name)))?;
            }
        }
        Ok(())
    }

    fn rename_directory(&mut self) -> io::Result<()> {
        let from = self.some_directory();
        if self.history.not_held.contains(&from) {
            return Ok(());
        }
        let to = self.new_name("d");
        let renamed =
            |name: &String| match name.strip_prefix(&from).filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                Some(rest) => format!("{to}{rest}"),
                None => name.clone(),
            };
        let before = &self.history.now().names;
        let after = Names {
            directories: before.directories.iter().map(renamed).collect(),
            files: before.files.iter().map(|(name, file)| (renamed(name), *file)).collect(),
        };
        self.change(&[&from, &to], after, |top| fs::rename(top.join(&from), top.join(&to)))
    }

    fn rename_to(&mut self, from: &str, to: &str) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        let mut after = self.history.now().names.clone();
        let file = after.files.remove(from).expect("it is there");
        after.files.insert(to.to_owned(), file);
        self.change(&[from, to], after, |top| fs::rename(top.join(from), top.join(to)))
    }

    /// To a new name, or in the place of another file.
    fn rename(&mut self) -> io::Result<()> {
        let (from, _) = self.some_file();
        let to = if self.random.random() { self.new_path() } else { self.some_file().0 };
        self.rename_to(&from, &to)
    }

    fn remove(&mut self) -> io::Result<()> {
        let (name, _) = self.some_file();
        self.remove_at(&name)
    }

    fn remove_at(&mut self, name: &str) -> io::Result<()> {
        let mut after = self.history.now().names.clone();
        after.files.remove(name);
        self.change(&[name], after, |top| fs::remove_file(top.join(name)))
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        let directory = self.some_directory();
        File::open(self.history.top.join(directory))?.sync_all()?;
        self.history.names_are_safe();
        Ok(())
    }

    // ---------------------------------------------------------------------------------------- contents

    fn noise(&mut self) -> Vec<u8> {
        let length = match self.random.random_range(0..10) {
            0 | 1 => self.random.random_range(0..100),
            2 => self.random.random_range(0..1_500_000),
            _ => self.random.random_range(0..30_000),
        };
        let mut bytes = vec![0; length];
        self.random.fill_bytes(&mut bytes);
        bytes
    }

    fn make(&mut self, name: &str) -> io::Result<(File, usize)> {
        let file = self.history.files.len();
        self.history.files.push(Contents::of(Vec::new()));
        let mut after = self.history.now().names.clone();
        after.files.insert(name.to_owned(), file);
        let mut opened = None;
        self.change(&[name], after, |top| {
            opened = Some(OpenOptions::new().write(true).create_new(true).open(top.join(name))?);
            Ok(())
        })?;
        Ok((opened.expect("it was opened"), file))
    }

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.history.top.join(name))
    }

    fn write(&mut self, handle: &File, file: usize, at: usize, bytes: &[u8]) -> io::Result<()> {
        let Contents { versions, steps, .. } = &mut self.history.files[file];
        steps.push(format!("written {at} {}", bytes.len()));
        let mut content = versions.last().expect("there is at least one").clone();
        if !bytes.is_empty() {
            content.resize(content.len().max(at + bytes.len()), 0);
            content[at..at + bytes.len()].copy_from_slice(bytes);
        }
        versions.push(content);
        let written = handle.write_all_at(bytes, at as u64);
        self.history.files[file].is_cut_short = written.is_err();
        written
    }

    /// Syncs it, or does not, and closes it.
    fn finish(&mut self, name: &str, handle: File, file: usize) -> io::Result<()> {
        if self.random.random_range(0..12) >= self.synced {
            return self.close(name, handle, file);
        }
        if self.random.random() {
            handle.sync_all()?
        } else {
            handle.sync_data()?
        }
        self.history.is_synced(file);
        self.close(name, handle, file)
    }

    fn close(&mut self, name: &str, handle: File, file: usize) -> io::Result<()> {
        self.history.files[file].steps.push(format!("closed as {name}"));
        let mut moment = self.history.now().clone();
        moment.reported.insert(file, self.history.files[file].versions.len());
        self.history.moments.push(moment);
        // Its result tells that the client is there still: a close that failed would promise nothing.
        close(handle)?;
        if !self.history.is_held(name) {
            self.history.names_are_safe();
        }
        Ok(())
    }

    fn create(&mut self) -> io::Result<()> {
        let name = self.new_path();
        let (handle, file) = self.make(&name)?;
        let mut at = 0;
        for _ in 0..self.random.random_range(1..4) {
            let bytes = self.noise();
            self.write(&handle, file, at, &bytes)?;
            at += bytes.len();
        }
        self.finish(&name, handle, file)
    }

    /// In the middle, across the end, or behind a hole.
    fn overwrite(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = self.open(&name)?;
        for _ in 0..self.random.random_range(1..4) {
            let (length, bytes) = (self.history.files[file].last().len(), self.noise());
            let at = self.random.random_range(0..=length + 10_000);
            self.write(&handle, file, at, &bytes)?;
        }
        self.finish(&name, handle, file)
    }

    /// A line of a log that is on disk when it is written.
    fn append(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = OpenOptions::new()
            .write(true)
            .custom_flags(rustix::fs::OFlags::DSYNC.bits() as i32)
            .open(self.history.top.join(&name))?;
        let at = self.history.files[file].last().len();
        self.write(&handle, file, at, b"one more line\n")?;
        // What others have written to the file is not said to be.
        self.close(&name, handle, file)
    }

    fn set_length(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = self.open(&name)?;
        let length = self.random.random_range(0..1_200_000);
        let mut content = self.history.files[file].last().to_vec();
        content.resize(length, 0);
        self.history.files[file].steps.push(format!("cut {length}"));
        self.history.files[file].versions.push(content);
        handle.set_len(length as u64)?;
        self.finish(&name, handle, file)
    }

    /// As programs do that care, and as others do: a temporary file that is renamed over the last one, synced or not.
    fn replace(&mut self) -> io::Result<()> {
        let temporary = self.new_path();
        let (handle, file) = self.make(&temporary)?;
        let bytes = self.noise();
        self.write(&handle, file, 0, &bytes)?;
        self.finish(&temporary, handle, file)?;
        let (name, _) = self.some_file();
        self.rename_to(&temporary, &name)
    }

    /// A file that was closed is synced by another program.
    fn sync_again(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = File::open(self.history.top.join(&name))?;
        handle.sync_all()?;
        self.history.is_synced(file);
        drop(handle);
        Ok(())
    }
}

/// close(2), with what it says.
fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and is given up here.
    #[expect(unsafe_code, reason = "the library's own way of closing says nothing")]
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

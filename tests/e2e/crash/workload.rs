//! What programs do to files, in any order, recorded in the model before it is done.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngCore};
use rustix::fs::{CWD, RenameFlags};

use crate::model::{Model, Names};

/// Between two things that are done: blocks that are given up faster than they are freed fill the disk.
const PACE: Duration = Duration::from_millis(3);
const FILES_MAX: usize = 12;
/// More than one part of an upload.
const LARGE_BYTES: usize = 9 << 20;

pub struct Workload {
    pub model: Model,
    pub random: StdRng,
    /// Some files are large.
    pub large: bool,
    /// Names that were given.
    pub given: usize,
}

impl Workload {
    /// Works until it is stopped, or something fails.
    pub fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            self.step()?;
            thread::sleep(PACE);
        }
        Ok(())
    }

    fn step(&mut self) -> io::Result<()> {
        if self.model.names.directories.len() < 2 {
            return self.make_directory();
        }
        let files = self.model.names.files.len();
        match self.random.random_range(0..17) {
            _ if files > FILES_MAX => self.remove(),
            0..=3 => self.create(),
            _ if files < 4 => self.create(),
            4..=6 => self.overwrite(),
            7 => self.append(),
            8 => self.set_length(),
            9 => self.replace(),
            10 | 11 => self.rename(),
            12 => self.exchange(),
            13 | 14 => self.remove(),
            15 => self.rename_directory(),
            _ => self.checkpoint(),
        }
    }

    // ------------------------------------------------------------------------------------------- names

    /// Makes a change of names that leads to `after`.
    fn change(&mut self, after: Names, change: impl FnOnce(&Model) -> io::Result<()>) -> io::Result<()> {
        self.model.after = Some(after.clone());
        change(&self.model)?;
        self.model.names = after;
        self.model.after = None;
        Ok(())
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.given += 1;
        format!("{kind}{}", self.given)
    }

    fn new_path(&mut self) -> String {
        let directories = self.model.names.directories.len();
        let at = self.random.random_range(0..directories);
        let directory = self.model.names.directories.iter().nth(at).expect("there are as many").clone();
        let name = self.new_name("f");
        format!("{directory}/{name}")
    }

    fn some_file(&mut self) -> (String, usize) {
        let at = self.random.random_range(0..self.model.names.files.len());
        let (name, file) = self.model.names.files.iter().nth(at).expect("there are as many");
        (name.clone(), *file)
    }

    fn make_directory(&mut self) -> io::Result<()> {
        let name = self.new_name("d");
        let mut after = self.model.names.clone();
        after.directories.insert(name.clone());
        self.change(after, |model| fs::create_dir(model.top.join(name)))
    }

    fn rename_directory(&mut self) -> io::Result<()> {
        let at = self.random.random_range(0..self.model.names.directories.len());
        let from = self.model.names.directories.iter().nth(at).expect("there are as many").clone();
        let to = self.new_name("d");
        let renamed =
            |name: &String| match name.strip_prefix(&from).filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                Some(rest) => format!("{to}{rest}"),
                None => name.clone(),
            };
        let before = &self.model.names;
        let after = Names {
            directories: before.directories.iter().map(renamed).collect(),
            files: before.files.iter().map(|(name, file)| (renamed(name), *file)).collect(),
        };
        self.change(after, |model| fs::rename(model.top.join(&from), model.top.join(&to)))
    }

    /// To a new name, or in the place of another file.
    fn rename(&mut self) -> io::Result<()> {
        let (from, file) = self.some_file();
        let to = if self.random.random() { self.new_path() } else { self.some_file().0 };
        if from == to {
            return Ok(());
        }
        let mut after = self.model.names.clone();
        after.files.remove(&from);
        after.files.insert(to.clone(), file);
        self.change(after, |model| fs::rename(model.top.join(&from), model.top.join(&to)))
    }

    fn exchange(&mut self) -> io::Result<()> {
        let ((from, first), (to, second)) = (self.some_file(), self.some_file());
        if from == to {
            return Ok(());
        }
        let mut after = self.model.names.clone();
        after.files.insert(from.clone(), second);
        after.files.insert(to.clone(), first);
        self.change(after, |model| {
            let (from, to) = (model.top.join(&from), model.top.join(&to));
            Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?)
        })
    }

    fn remove(&mut self) -> io::Result<()> {
        let (name, _) = self.some_file();
        let mut after = self.model.names.clone();
        after.files.remove(&name);
        self.change(after, |model| fs::remove_file(model.top.join(&name)))
    }

    // ---------------------------------------------------------------------------------------- contents

    fn noise(&mut self) -> Vec<u8> {
        let length = match self.random.random_range(0..8) {
            0 | 1 => self.random.random_range(0..100),
            2 => self.random.random_range(0..1_200_000),
            3 if self.large => LARGE_BYTES + self.random.random_range(0..1000),
            _ => self.random.random_range(0..30_000),
        };
        let mut bytes = vec![0; length];
        self.random.fill_bytes(&mut bytes);
        bytes
    }

    fn make(&mut self, name: &str) -> io::Result<(File, usize)> {
        let file = self.model.new_file();
        let mut after = self.model.names.clone();
        after.files.insert(name.to_owned(), file);
        let mut opened = None;
        self.change(after, |model| {
            opened = Some(OpenOptions::new().write(true).create_new(true).open(model.top.join(name))?);
            Ok(())
        })?;
        Ok((opened.expect("it was opened"), file))
    }

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.model.top.join(name))
    }

    /// Writes, and syncs mostly.
    fn write(&mut self, handle: &File, file: usize, at: usize, bytes: &[u8]) -> io::Result<()> {
        let versions = &mut self.model.files[file];
        let mut content = versions.last().to_vec();
        // A write of nothing makes no file longer.
        if !bytes.is_empty() {
            content.resize(content.len().max(at + bytes.len()), 0);
            content[at..at + bytes.len()].copy_from_slice(bytes);
        }
        versions.push(content);
        handle.write_all_at(bytes, at as u64)?;
        if self.random.random_range(0..5) < 3 || self.model.files[file].pending() > 4 {
            handle.sync_all()?;
            self.model.files[file].settle();
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
        Ok(())
    }

    /// In the middle, across the end, or behind a hole.
    fn overwrite(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = self.open(&name)?;
        for _ in 0..self.random.random_range(1..4) {
            let (length, bytes) = (self.model.files[file].last().len(), self.noise());
            let at = self.random.random_range(0..=length + 10_000);
            self.write(&handle, file, at, &bytes)?;
        }
        Ok(())
    }

    fn append(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let mut handle = OpenOptions::new().append(true).open(self.model.top.join(&name))?;
        let mut content = self.model.files[file].last().to_vec();
        content.extend_from_slice(b"one more line\n");
        self.model.files[file].push(content);
        handle.write_all(b"one more line\n")?;
        handle.sync_data()?;
        self.model.files[file].settle();
        Ok(())
    }

    fn set_length(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        let handle = self.open(&name)?;
        let length = self.random.random_range(0..1_200_000);
        let mut content = self.model.files[file].last().to_vec();
        content.resize(length, 0);
        self.model.files[file].push(content);
        handle.set_len(length as u64)?;
        // All that was written before is committed with it.
        self.model.files[file].settle();
        Ok(())
    }

    /// As editors do that do not care: cut to nothing, and written anew.
    fn replace(&mut self) -> io::Result<()> {
        let (name, file) = self.some_file();
        self.model.files[file].push(Vec::new());
        let handle = OpenOptions::new().write(true).truncate(true).open(self.model.top.join(&name))?;
        self.model.files[file].settle();
        let bytes = self.noise();
        self.write(&handle, file, 0, &bytes)
    }

    /// As programs do that care: a temporary file, synced, renamed over the last one.
    fn checkpoint(&mut self) -> io::Result<()> {
        let temporary = self.new_path();
        let (handle, file) = self.make(&temporary)?;
        let bytes = self.noise();
        self.model.files[file].push(bytes.clone());
        handle.write_all_at(&bytes, 0)?;
        handle.sync_all()?;
        self.model.files[file].settle();
        let (name, _) = self.some_file();
        if name == temporary {
            return Ok(());
        }
        let mut after = self.model.names.clone();
        after.files.remove(&temporary);
        after.files.insert(name.clone(), file);
        self.change(after, |model| fs::rename(model.top.join(&temporary), model.top.join(&name)))
    }
}

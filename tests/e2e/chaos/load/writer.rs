//! Writes files, whole ones and parts of them, syncs some, reads back what it has written before; and keeps a log that
//! stays open.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{Rng, RngCore};

use super::Steps;
use crate::journal::Caller;
use crate::model::{Kind, Model};

const LARGEST_BYTES: usize = 200_000;

pub struct Writer {
    top: PathBuf,
    client: usize,
    model: Model,
    next: usize,
    /// Its name, and the open file.
    log: Option<(String, File)>,
    random: StdRng,
}

impl Writer {
    pub fn new(top: PathBuf, client: usize, random: StdRng) -> Self {
        Self { top, client, model: Model::default(), next: 0, log: None, random }
    }

    pub fn directory(client: usize) -> String {
        format!("files{client}")
    }

    fn new_name(&mut self) -> String {
        self.next += 1;
        format!("{}/{}", Self::directory(self.client), self.next)
    }

    fn noise(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.random.random_range(0..LARGEST_BYTES)];
        self.random.fill_bytes(&mut bytes);
        bytes
    }

    /// A new file, as careful programs make it.
    fn create(&mut self, caller: &Caller) {
        let (name, content, syncs) = (self.new_name(), self.noise(), self.random.random_bool(0.3));
        let part = format!("{name}.part");
        let (new, path) = (self.top.join(&part), self.top.join(&name));
        let made = (|| {
            let file = caller.call("create", &new, || new_file().open(&new))?;
            for piece in content.chunks(70_000) {
                caller.call("write", &new, || (&file).write_all(piece))?;
            }
            if syncs {
                caller.call("fsync", &new, || file.sync_all())?;
            }
            caller.call("close", &new, || crate::close(file))?;
            caller.call("rename", &new, || fs::rename(&new, &path))
        })();
        match made {
            Some(()) => self.model.add(&name, Kind::File(content), 0o644),
            None => {
                self.model.doubt(&part);
                self.model.doubt(&name);
            }
        }
    }

    fn any_file(&mut self) -> Option<(String, Vec<u8>)> {
        let log = self.log.as_ref().map(|(name, _)| name.clone());
        let name = self.model.pick(&mut self.random, |_| true).filter(|name| Some(name) != log.as_ref())?;
        match &self.model.node(&name).kind {
            Kind::File(content) => Some((name, content.clone())),
            _ => None,
        }
    }

    /// A range of a file, and perhaps its end.
    fn change(&mut self, caller: &Caller) {
        let Some((name, mut content)) = self.any_file() else { return };
        let (path, noise) = (self.top.join(&name), self.noise());
        let at = self.random.random_range(0..content.len() + 10_000);
        let cut = self.random.random_bool(0.3).then(|| self.random.random_range(0..content.len() + 10_000));
        let changed = (|| {
            let file = caller.call("open", &path, || OpenOptions::new().write(true).open(&path))?;
            caller.call("write", &path, || file.write_all_at(&noise, at as u64))?;
            if let Some(length) = cut {
                caller.call("truncate", &path, || file.set_len(length as u64))?;
            }
            caller.call("close", &path, || crate::close(file))
        })();
        if changed.is_none() {
            return self.model.doubt(&name);
        }
        if !noise.is_empty() {
            content.resize(content.len().max(at + noise.len()), 0);
            content[at..at + noise.len()].copy_from_slice(&noise);
        }
        content.resize(cut.unwrap_or(content.len()), 0);
        self.model.node(&name).kind = Kind::File(content);
    }

    fn read(&mut self, caller: &Caller) {
        let Some((name, content)) = self.any_file() else { return };
        let path = self.top.join(&name);
        if let Some(read) = caller.call("read", &path, || fs::read(&path)) {
            assert!(
                read == content,
                "{} on client {}: {} bytes of {}, wrong content",
                path.display(),
                self.client,
                read.len(),
                content.len()
            );
        }
    }

    /// A line at the end of a file that stays open.
    fn log(&mut self, caller: &Caller) {
        if self.log.is_none() {
            let name = self.new_name();
            let path = self.top.join(&name);
            match caller.call("create", &path, || new_file().append(true).open(&path)) {
                Some(file) => {
                    self.model.add(&name, Kind::File(vec![]), 0o644);
                    self.log = Some((name, file));
                }
                None => return self.model.doubt(&name),
            }
        }
        let Some((name, mut file)) = self.log.take() else { return };
        let (path, line) = (self.top.join(&name), format!("line {}\n", self.random.next_u64()));
        let syncs = self.random.random_bool(0.3);
        let written = (|| {
            caller.call("append", &path, || file.write_all(line.as_bytes()))?;
            if syncs { caller.call("fsync", &path, || file.sync_data()) } else { Some(()) }
        })();
        if written.is_none() {
            return self.model.doubt(&name);
        }
        if let Kind::File(content) = &mut self.model.node(&name).kind {
            content.extend_from_slice(line.as_bytes());
        }
        self.log = Some((name, file));
    }
}

fn new_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o644);
    options
}

impl Steps for Writer {
    fn step(&mut self, caller: &Caller) {
        match self.random.random_range(0..10) {
            0..=3 => self.create(caller),
            4 | 5 => self.change(caller),
            6 | 7 => self.log(caller),
            _ => self.read(caller),
        }
    }

    fn finish(mut self: Box<Self>, caller: &Caller) -> Model {
        if let Some((name, file)) = self.log.take() {
            let path = self.top.join(&name);
            if caller.call("close", &path, || crate::close(file)).is_none() {
                self.model.doubt(&name);
            }
        }
        self.model
    }
}

//! Files of one word. Some are written in place, each by one client; another one is replaced by a rename, by all.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use super::history::{Call, History, What, contradiction, goes_back, latest};
use super::{Mount, make};
use crate::journal::Caller;
use crate::load::Steps;
use crate::site::CLIENTS;

/// What another client wrote is seen within milliseconds while it hears the master that leads. Until then there may be
/// an election, or a network that is cut.
const LATE: Duration = Duration::from_secs(15);
/// The last one is replaced.
const FILES: usize = CLIENTS.len() + 1;
const REPLACED: usize = CLIENTS.len();

pub struct Registers {
    mount: Mount,
    histories: [History; FILES],
}

impl Registers {
    pub fn start(mount: Mount, top: &Path) -> Arc<Self> {
        (0..FILES).for_each(|file| make(&top.join(name(file)), word(0).as_bytes()));
        Arc::new(Self { mount, histories: std::array::from_fn(|_| History::new()) })
    }

    pub fn program(self: &Arc<Self>, top: &Path, client: usize, random: StdRng) -> Box<dyn Steps> {
        Box::new(Program { registers: Arc::clone(self), top: top.to_owned(), client, next: 0, random })
    }

    /// Whether all clients have the same words in the end, and saw them in an order that the mount promises. How late
    /// one of them saw what another one had written.
    pub fn judge(&self, tops: &[PathBuf]) -> Result<Duration, String> {
        let mut late = Duration::ZERO;
        for (file, history) in self.histories.iter().enumerate() {
            let mut last = Vec::new();
            for (client, top) in tops.iter().enumerate() {
                let begun = history.now();
                let word = fs::read_to_string(top.join(name(file))).map_err(|error| error.to_string())?;
                last.push(Call { client, what: What::Read, value: value(&word)?, begun, ended: history.now() });
            }
            if last.iter().any(|call| call.value != last[0].value) {
                return Err(format!("{} in the end: {last:?}", name(file)));
            }
            let calls = [history.calls(), last].concat();
            let behind = latest(&calls);
            late = late.max(behind);
            let found = match self.mount {
                Mount::Strict => contradiction(&calls),
                Mount::Default => goes_back(&calls).or_else(|| (behind > LATE).then(|| format!("{behind:?} behind"))),
            };
            if let Some(found) = found {
                panic!("{} of the {:?} mount: {found}", name(file), self.mount);
            }
        }
        Ok(late)
    }
}

struct Program {
    registers: Arc<Registers>,
    top: PathBuf,
    client: usize,
    /// Of the values that this program writes.
    next: u64,
    random: StdRng,
}

impl Program {
    fn write(&mut self, caller: &Caller) {
        self.next += 1;
        let value = self.next * CLIENTS.len() as u64 + self.client as u64;
        let file = if self.random.random_bool(0.5) { self.client } else { REPLACED };
        let (path, new) = (self.top.join(name(file)), self.top.join(format!("new-{}", self.client)));
        let history = &self.registers.histories[file];
        if file != REPLACED {
            let begun = history.now();
            let syncs = self.random.random_bool(0.5);
            let done = put(caller, &path, OpenOptions::new().write(true), value, syncs);
            history.wrote(self.client, value, begun, done.is_some());
        } else if put(caller, &new, OpenOptions::new().write(true).create(true).truncate(true), value, true).is_some() {
            let begun = history.now();
            let done = caller.change("rename", &path, || fs::rename(&new, &path));
            history.wrote(self.client, value, begun, done.is_some());
        }
    }

    fn read(&mut self, caller: &Caller) {
        let file = self.random.random_range(0..FILES);
        let (path, history) = (self.top.join(name(file)), &self.registers.histories[file]);
        let begun = history.now();
        let read = || fs::read_to_string(&path);
        let read = match self.registers.mount {
            Mount::Strict => caller.call("read", &path, read),
            // Whoever is cut off goes on showing what it knows.
            Mount::Default => caller.change("read", &path, read),
        };
        let Some(read) = read else { return };
        let value =
            value(&read).unwrap_or_else(|error| panic!("{} on client {}: {error}", path.display(), self.client));
        history.read(self.client, value, begun);
    }
}

impl Steps for Program {
    fn step(&mut self, caller: &Caller) {
        if self.random.random_bool(0.4) { self.write(caller) } else { self.read(caller) }
    }
}

/// Writes a word; others may read it when this returns.
fn put(caller: &Caller, path: &Path, options: &OpenOptions, value: u64, syncs: bool) -> Option<()> {
    let file: File = caller.change("open", path, || options.open(path))?;
    let written = caller.change("pwrite", path, || file.write_all_at(word(value).as_bytes(), 0));
    let synced = if syncs { caller.change("fsync", path, || file.sync_all()) } else { Some(()) };
    let closed = caller.change("close", path, || crate::close(file));
    written.and(synced).and(closed)
}

fn name(file: usize) -> String {
    if file == REPLACED { "replaced".to_owned() } else { format!("word-{file}") }
}

fn word(value: u64) -> String {
    format!("{value:019}\n")
}

fn value(word: &str) -> Result<u64, String> {
    let digits = word.strip_suffix('\n').filter(|digits| digits.len() == 19);
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| format!("{word:?} is no word"))
}

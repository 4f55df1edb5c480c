//! Lines at the ends of files: of one that both clients append to under a lock, of one that they open for each line
//! under the lock of another file, and of one for each client, to which two of its programs append without a lock.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::FlockOperation::{LockExclusive, Unlock};
use rustix::fs::flock;

use super::make;
use crate::journal::Caller;
use crate::load::Steps;
use crate::model::Model;
use crate::site::CLIENTS;

/// Programs of each client.
pub const WRITERS: usize = 2;
const LOCKED: &str = "log-locked";
const IN_TURN: &str = "log-in-turn";
const TURN: &str = "turn";

#[derive(Clone, Debug)]
struct Line {
    log: String,
    text: String,
    is_certain: bool,
}

pub struct Appends {
    /// Those of each program, in their order.
    lines: Mutex<Vec<Vec<Line>>>,
}

impl Appends {
    pub fn start(top: &Path) -> Arc<Self> {
        [LOCKED.to_owned(), IN_TURN.to_owned(), TURN.to_owned()].iter().for_each(|name| make(&top.join(name), b""));
        (0..CLIENTS.len()).for_each(|client| make(&top.join(own(client)), b""));
        Arc::new(Self { lines: Mutex::default() })
    }

    pub fn program(self: &Arc<Self>, top: &Path, client: usize, writer: usize, random: StdRng) -> Box<dyn Steps> {
        let all = Arc::clone(self);
        Box::new(Writer {
            all,
            top: top.to_owned(),
            client,
            writer,
            open: None,
            unsynced: vec![],
            lines: vec![],
            random,
        })
    }

    /// Whether a client shows each line once, as a whole, and those of each program in their order.
    pub fn judge(&self, top: &Path) -> Result<usize, String> {
        let mut count = 0;
        let programs = self.lines.lock().unwrap();
        for log in [LOCKED.to_owned(), IN_TURN.to_owned()].into_iter().chain((0..CLIENTS.len()).map(own)) {
            let path = top.join(&log);
            let content = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            let content = String::from_utf8_lossy(&content);
            let mut found: Vec<&str> = content.split_inclusive('\n').collect();
            count += found.len();
            for lines in programs.iter() {
                let mut at = 0;
                for line in lines.iter().filter(|line| line.log == log) {
                    match found[at..].iter().position(|found| *found == line.text) {
                        // Whatever is not the line of a program stays in the list.
                        Some(more) => {
                            at += more;
                            found.remove(at);
                        }
                        None if line.is_certain => {
                            return Err(format!(
                                "{}: {:?} is not there, or not in its place",
                                path.display(),
                                line.text
                            ));
                        }
                        None => {}
                    }
                }
            }
            if let Some(wrong) = found.first() {
                return Err(format!("{}: {wrong:?} is there twice, or nobody's line", path.display()));
            }
        }
        Ok(count)
    }
}

struct Writer {
    all: Arc<Appends>,
    top: PathBuf,
    client: usize,
    writer: usize,
    /// Which log it has open, of those that stay open.
    open: Option<(String, File)>,
    /// Which lines were written there since the last sync.
    unsynced: Vec<usize>,
    lines: Vec<Line>,
    random: StdRng,
}

impl Writer {
    fn next_line(&mut self, log: &str) -> String {
        let pad = "x".repeat(self.random.random_range(0..60));
        let text = format!("{}.{} {} {pad}\n", self.client, self.writer, self.lines.len());
        self.lines.push(Line { log: log.to_owned(), text: text.clone(), is_certain: false });
        text
    }

    fn append(&mut self, caller: &Caller) -> Option<()> {
        if self.open.is_none() {
            let log = if self.random.random_bool(0.5) { LOCKED.to_owned() } else { own(self.client) };
            let path = self.top.join(&log);
            let file = caller.call("open", &path, || OpenOptions::new().append(true).open(&path))?;
            self.open = Some((log, file));
        }
        let (log, mut file) = self.open.take()?;
        let path = self.top.join(&log);
        if log == LOCKED {
            caller.change("lock", &path, || Ok(flock(&file, LockExclusive)?))?;
        }
        let line = self.next_line(&log);
        self.unsynced.push(self.lines.len() - 1);
        let mut done = caller.change("append", &path, || file.write_all(line.as_bytes()));
        let syncs = self.random.random_bool(0.3);
        if syncs {
            done = done.and_then(|()| caller.change("fsync", &path, || file.sync_data()));
        }
        if log == LOCKED {
            done = caller.change("unlock", &path, || Ok(flock(&file, Unlock)?)).and(done);
        }
        done?;
        if syncs {
            self.are_certain();
        }
        self.open = Some((log, file));
        if self.random.random_bool(0.1) { self.close(caller) } else { Some(()) }
    }

    /// `open`, `write` and `close`, when it is this program's turn.
    fn append_in_turn(&mut self, caller: &Caller) {
        let (turn, path) = (self.top.join(TURN), self.top.join(IN_TURN));
        let Some(lock) = caller.call("open", &turn, || File::open(&turn)) else { return };
        if caller.change("lock", &turn, || Ok(flock(&lock, LockExclusive)?)).is_none() {
            return;
        }
        let line = self.next_line(IN_TURN);
        let done = (|| {
            let mut file = caller.change("open", &path, || OpenOptions::new().append(true).open(&path))?;
            caller.change("append", &path, || file.write_all(line.as_bytes()))?;
            caller.change("close", &path, || crate::close(file))
        })();
        // Also ends the lock.
        let _closed = caller.change("close", &turn, || crate::close(lock));
        self.lines.last_mut().unwrap().is_certain = done.is_some();
    }

    fn close(&mut self, caller: &Caller) -> Option<()> {
        let Some((log, file)) = self.open.take() else { return Some(()) };
        let path = self.top.join(log);
        caller.change("fsync", &path, || file.sync_data())?;
        caller.change("close", &path, || crate::close(file))?;
        self.are_certain();
        Some(())
    }

    fn are_certain(&mut self) {
        self.unsynced.drain(..).for_each(|line| self.lines[line].is_certain = true);
    }
}

impl Steps for Writer {
    fn step(&mut self, caller: &Caller) {
        if caller.may_fail() {
            // What is lost is told once, maybe to the other program.
            self.open = None;
            self.unsynced.clear();
        }
        if self.random.random_bool(0.3) {
            self.append_in_turn(caller);
        } else if self.append(caller).is_none() {
            // The file is closed, and nobody knows what came of these.
            self.unsynced.clear();
        }
    }

    fn finish(mut self: Box<Self>, caller: &Caller) -> Model {
        let _closed = self.close(caller);
        self.all.lines.lock().unwrap().push(self.lines);
        Model::default()
    }
}

fn own(client: usize) -> String {
    format!("log-{client}")
}

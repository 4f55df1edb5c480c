//! Accounts in a file: whoever has its lock reads them, moves something from one to another, and counts that.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::FlockOperation;

use super::make;
use crate::journal::Caller;
use crate::load::Steps;

const ACCOUNTS: usize = 8;
const AT_FIRST: u64 = 1000;
/// After so many transfers a program opens the file anew.
const OPEN_FOR: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    Flock,
    /// Of fcntl(2), and of an open file, since all programs are threads of one process.
    Range,
}

/// A bank for each kind of lock.
const LOCKS: [Lock; 2] = [Lock::Flock, Lock::Range];

impl Lock {
    fn name(self) -> &'static str {
        match self {
            Self::Flock => "bank-flock",
            Self::Range => "bank-fcntl",
        }
    }

    fn set(self, file: &File, locks: bool) -> io::Result<()> {
        if self == Self::Flock {
            let operation = if locks { FlockOperation::LockExclusive } else { FlockOperation::Unlock };
            return Ok(rustix::fs::flock(file, operation)?);
        }
        let l_type = if locks { libc::F_WRLCK } else { libc::F_UNLCK };
        let range =
            libc::flock { l_type: l_type as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 };
        #[expect(unsafe_code, reason = "rustix knows no locks of open files")]
        // SAFETY: the descriptor is open, and the range outlives the call.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &raw const range) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// What a client saw and did while it had the lock.
#[derive(Clone, Debug)]
struct Held {
    client: usize,
    /// Since the beginning, when it had got the lock.
    at: Duration,
    /// The count and the sum; `None` where the lock may have been lost.
    seen: Option<(u64, u64)>,
    wrote: Wrote,
}

impl Held {
    fn shown(&self) -> String {
        let Self { client, at, seen, wrote } = self;
        format!("  client {client} at {at:.4?}: count and sum {seen:?}, wrote: {wrote:?}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrote {
    Nothing,
    /// The next count, and the accounts.
    Transfer,
    /// All of it, a part, or nothing.
    Maybe,
}

pub struct Bank {
    begun: Instant,
    held: [Mutex<Vec<Held>>; LOCKS.len()],
}

impl Bank {
    pub fn start(top: &Path) -> Arc<Self> {
        let content: Vec<u8> =
            [&[0][..], &[AT_FIRST; ACCOUNTS]].concat().into_iter().flat_map(u64::to_le_bytes).collect();
        LOCKS.iter().for_each(|lock| make(&top.join(lock.name()), &content));
        Arc::new(Self { begun: Instant::now(), held: Default::default() })
    }

    pub fn program(self: &Arc<Self>, top: &Path, client: usize, random: StdRng) -> Box<dyn Steps> {
        let files = [None, None];
        Box::new(Teller { bank: Arc::clone(self), top: top.to_owned(), client, files, random })
    }

    /// Whether each holder of a lock saw what the one before had done; and everybody in the end. How many transfers
    /// there were.
    #[track_caller]
    pub fn judge(&self, tops: &[PathBuf]) -> usize {
        let mut transfers = 0;
        for (lock, held) in LOCKS.iter().zip(&self.held) {
            let mut held = held.lock().unwrap().clone();
            for (client, top) in tops.iter().enumerate() {
                let file = File::options().read(true).write(true).open(top.join(lock.name())).unwrap();
                lock.set(&file, true).unwrap();
                let (at, seen) = (self.begun.elapsed(), read(&file).unwrap());
                let seen = Some((seen[0], seen[1..].iter().sum()));
                held.push(Held { client, at, seen, wrote: Wrote::Nothing });
            }
            transfers += held.iter().filter(|held| held.wrote == Wrote::Transfer).count();
            if let Err(wrong) = check(held) {
                panic!("{}: {wrong}", tops[0].join(lock.name()).display());
            }
        }
        transfers
    }
}

fn check(mut held: Vec<Held>) -> Result<(), String> {
    held.sort_by_key(|held| held.at);
    // The count that is there, and transfers since then that may be.
    let (mut count, mut maybe, mut torn) = (0, 0, false);
    for (number, one) in held.iter().enumerate() {
        if let Some((seen, sum)) = one.seen {
            let is_right = (count..=count + maybe).contains(&seen) && (torn || sum == AT_FIRST * ACCOUNTS as u64);
            if !is_right {
                let last =
                    held[number.saturating_sub(8)..=number].iter().map(Held::shown).collect::<Vec<_>>().join("\n");
                return Err(format!("{count} to {} transfers are there, but for the last one:\n{last}", count + maybe));
            }
            (count, maybe) = (seen, 0);
        }
        match one.wrote {
            Wrote::Nothing => {}
            Wrote::Transfer => count += 1,
            Wrote::Maybe => (maybe, torn) = (maybe + 1, true),
        }
    }
    Ok(())
}

fn read(file: &File) -> io::Result<Vec<u64>> {
    let mut content = [0; 8 * (ACCOUNTS + 1)];
    file.read_exact_at(&mut content, 0)?;
    Ok(content.chunks_exact(8).map(|account| u64::from_le_bytes(account.try_into().unwrap())).collect())
}

struct Teller {
    bank: Arc<Bank>,
    top: PathBuf,
    client: usize,
    files: [Option<(File, usize)>; LOCKS.len()],
    random: StdRng,
}

impl Teller {
    /// `None` when a call failed, as it might.
    fn transfer(&mut self, caller: &Caller, number: usize, file: &File) -> Option<()> {
        let (lock, path) = (LOCKS[number], self.top.join(LOCKS[number].name()));
        caller.change("lock", &path, || lock.set(file, true))?;
        let at = self.bank.begun.elapsed();
        let content = caller.change("pread", &path, || read(file));
        let Some(content) = content else {
            let _unlocked = caller.change("unlock", &path, || lock.set(file, false));
            return None;
        };
        let seen = Some((content[0], content[1..].iter().sum()));
        let mut held = Held { client: self.client, at, seen, wrote: Wrote::Nothing };
        let (from, to) = (self.random.random_range(1..=ACCOUNTS), self.random.random_range(1..=ACCOUNTS));
        let amount = self.random.random_range(0..=content[from]);
        let mut done = Some(());
        if from != to {
            let parts = [(from, content[from] - amount), (to, content[to] + amount), (0, content[0] + 1)];
            for (slot, value) in parts {
                let write = || file.write_all_at(&value.to_le_bytes(), 8 * slot as u64);
                done = done.and_then(|()| caller.change("pwrite", &path, write));
            }
            if self.random.random_bool(0.7) {
                done = done.and_then(|()| caller.change("fsync", &path, || file.sync_data()));
            }
        }
        let unlocked = caller.change("unlock", &path, || lock.set(file, false));
        held.wrote = match done.and(unlocked) {
            _ if from == to => Wrote::Nothing,
            Some(()) => Wrote::Transfer,
            None => Wrote::Maybe,
        };
        self.bank.held[number].lock().unwrap().push(held);
        done.and(unlocked)
    }
}

impl Steps for Teller {
    fn step(&mut self, caller: &Caller) {
        let number = self.random.random_range(0..LOCKS.len());
        let path = self.top.join(LOCKS[number].name());
        let open = || OpenOptions::new().read(true).write(true).open(&path);
        let opened = self.files[number].take().or_else(|| Some((caller.call("open", &path, open)?, 0)));
        let Some((file, transfers)) = opened else { return };
        if self.transfer(caller, number, &file).is_some() && transfers < OPEN_FOR {
            self.files[number] = Some((file, transfers + 1));
        } else {
            let _closed = caller.change("close", &path, || crate::close(file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(at: u64, count: u64, wrote: Wrote) -> Held {
        Held { client: 0, at: Duration::from_secs(at), seen: Some((count, AT_FIRST * ACCOUNTS as u64)), wrote }
    }

    #[test]
    fn an_update_that_is_lost_or_comes_back_is_found() {
        use Wrote::{Maybe, Nothing, Transfer};
        assert_eq!(check(vec![held(2, 1, Nothing), held(1, 0, Transfer), held(3, 1, Transfer)]), Ok(()));
        assert!(check(vec![held(1, 0, Transfer), held(2, 0, Transfer)]).is_err());
        assert_eq!(check(vec![held(1, 0, Maybe), held(2, 1, Transfer), held(3, 2, Nothing)]), Ok(()));
        assert_eq!(check(vec![held(1, 0, Maybe), held(2, 0, Transfer), held(3, 1, Nothing)]), Ok(()));
        assert!(check(vec![held(1, 0, Maybe), held(2, 0, Nothing), held(3, 1, Nothing)]).is_err());
        assert!(check(vec![Held { seen: Some((0, 1)), ..held(1, 0, Nothing) }]).is_err());
    }
}

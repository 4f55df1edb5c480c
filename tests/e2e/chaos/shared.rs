//! Programs of two clients that use the same files, in a mount with the default consistency and in a strict one at
//! once: words that are read while they are written, locks, lines at the end of a file, and names that both try to
//! make. One failure after the other, as in [`super`].
//!
//! No call fails, but for those of a client that was cut off for longer than its calls wait; and all answers are some
//! that the mount promises: of one register in a strict mount, each client's own order in the other one.
//!
//! Some kinds, which `CAVERN_SEED` chooses; all of them with `CAVERN_CHAOS_ROUNDS`, or those of `CAVERN_CHAOS_KINDS`.

mod appends;
mod bank;
mod exclusive;
mod history;
mod registers;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use cavern_tests::{eventually, number};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use rustix::fs::Mode;

use crate::journal::{Call, Journal};
use crate::load::Load;
use crate::site::{CLIENTS, FILES, PATIENCE, Site};
use crate::{kinds, note, print, remove};
use appends::{Appends, WRITERS};
use bank::Bank;
use exclusive::Exclusive;
use registers::Registers;

/// Kinds of a run that is not told which.
const KINDS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mount {
    Default,
    Strict,
}

const MOUNTS: [Mount; 2] = [Mount::Default, Mount::Strict];

impl Mount {
    fn name(self) -> &'static str {
        match self {
            Self::Default => FILES,
            Self::Strict => "strict",
        }
    }
}

#[test]
fn what_clients_share_is_whole_and_in_order_whatever_fails() {
    let (rounds, seed) = (number("CAVERN_CHAOS_ROUNDS", 1), number("CAVERN_SEED", 1));
    let mut kinds = kinds();
    if ["CAVERN_CHAOS_ROUNDS", "CAVERN_CHAOS_KINDS"].iter().all(|name| std::env::var_os(name).is_none()) {
        let count = kinds.len();
        kinds.rotate_left(seed as usize % count);
        kinds.truncate(KINDS);
    }
    eprintln!("CAVERN_SEED={seed} CAVERN_CHAOS_ROUNDS={rounds}");
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let site = Site::start(&BTreeMap::new());
    site.attach(Mount::Strict.name(), "--write-type fs-mode --replicas 2 --consistency strict");
    let mut pauses = BTreeMap::new();
    for round in 0..rounds {
        for (number, fault) in kinds.iter().enumerate() {
            let directory = format!("{round}-{fault:?}");
            eprintln!("round {round}, {fault}, CAVERN_SEED={seed}");
            let mut random = StdRng::seed_from_u64(seed ^ (round * kinds.len() as u64 + number as u64) << 16);
            let mut load = Load::new();
            let all = MOUNTS.map(|mount| Shared::start(&site, mount, &directory, &mut load, &mut random));
            load.go_on();
            fault.strike(&site, &load, &mut random);
            site.masters_agree();
            load.go_on();
            let (_, journal) = load.finish();
            all.iter().for_each(|shared| shared.judge(&journal));
            note(&mut pauses, *fault, &journal);
            MOUNTS.iter().for_each(|mount| remove(&site, mount.name(), &directory));
        }
    }
    print(&kinds, &pauses);
}

/// What the programs of both clients do in one directory of a mount.
struct Shared {
    mount: Mount,
    /// Of each client.
    tops: Vec<PathBuf>,
    registers: Arc<Registers>,
    bank: Arc<Bank>,
    appends: Arc<Appends>,
    exclusive: Arc<Exclusive>,
}

impl Shared {
    #[track_caller]
    fn start(site: &Site, mount: Mount, directory: &str, load: &mut Load, random: &mut StdRng) -> Self {
        let top = |client| site.mount(client).join(mount.name()).join(directory);
        let tops: Vec<PathBuf> = (0..CLIENTS.len()).map(top).collect();
        let here = &tops[0];
        fs::create_dir(here).unwrap();
        let (bank, appends, exclusive) = (Bank::start(here), Appends::start(here), Exclusive::start(here));
        let registers = Registers::start(mount, here);
        let made = |top: &PathBuf| fs::read_dir(top).map_or(0, Iterator::count);
        let all = made(here);
        eventually("both clients have all files", PATIENCE, || (made(&tops[1]) == all).then_some(()));
        for (client, top) in tops.iter().enumerate() {
            let mut next = || StdRng::seed_from_u64(random.next_u64());
            load.add(client, registers.program(top, client, next()));
            load.add(client, bank.program(top, client, next()));
            (0..WRITERS).for_each(|writer| load.add(client, appends.program(top, client, writer, next())));
            load.add(client, exclusive.program(top, client, next()));
        }
        Self { mount, tops, registers, bank, appends, exclusive }
    }

    /// Whether everything is there that must be, and was seen as the mount promises.
    #[track_caller]
    fn judge(&self, journal: &Journal) {
        let late = self.settled(|| self.registers.judge(&self.tops));
        let transfers = self.bank.judge(&self.tops);
        let (mut lines, mut names) = (0, 0);
        for top in &self.tops {
            lines = self.settled(|| self.appends.judge(top));
            names = self.settled(|| self.exclusive.judge(top));
        }
        let mount = self.mount;
        eprintln!("  {mount:?}: {transfers} transfers, {lines} lines, {names} names; seen {late:.1?} late at most");
        // A lock is waited for as long as others have it.
        let is_here = |call: &Call| self.tops.iter().any(|top| call.path.starts_with(top)) && call.what != "lock";
        if let Some(Call { client, what, path, took, .. }) = journal.longest_of(is_here) {
            let name = path.file_name().unwrap_or_default().display();
            eprintln!("  {mount:?}: the longest call but for locks {took:.2?} ({what} {name} on client {client})");
        }
    }

    /// What holds at once in a strict mount, and within moments in another one.
    #[track_caller]
    fn settled<T>(&self, check: impl Fn() -> Result<T, String>) -> T {
        let begun = Instant::now();
        eventually("", 2 * PATIENCE, || match check() {
            Ok(value) => Some(value),
            Err(wrong) => {
                assert!(self.mount == Mount::Default && begun.elapsed() < PATIENCE, "{:?}: {wrong}", self.mount);
                None
            }
        })
    }
}

/// Makes a file for the programs.
fn make(path: &Path, content: &[u8]) {
    let mut file = File::create_new(path).unwrap();
    file.write_all(content).unwrap();
    file.sync_all().unwrap();
}

//! What the processes of this host may take of its memory, by their configuration, beside what there is.

use std::fs;
use std::path::Path;

use cavern_conf::{Role, Tier};

use super::finding::{Check, Finding};
use super::process::Process;
use crate::console;

const MIB: u64 = 1 << 20;
/// Of each process, beside its budgets.
const BASE: u64 = 128 * MIB;
/// Of an entry of the client's metadata cache; and of places in listings.
const ENTRY: u64 = 300;
const LISTINGS: u64 = 32 * MIB;
/// What is left for programs and for the page cache is little when the processes may take more than this.
const SHARE_MAX: f64 = 0.8;

/// The memory that there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    host: u64,
    /// The least limit of the control groups that this command is in.
    limit: Option<u64>,
}

impl Memory {
    /// `None` without /proc. *Blocking*.
    pub fn look() -> Option<Self> {
        let host = total(&fs::read_to_string("/proc/meminfo").ok()?)?;
        let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default().to_owned();
        let limits = Path::new(&group).ancestors().filter_map(|group| {
            let file = Path::new("/sys/fs/cgroup").join(group).join("memory.max");
            fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()
        });
        Some(Self { host, limit: limits.min() })
    }

    pub fn judge(&self, processes: &[Process]) -> Finding {
        let wanted = processes.iter().map(budget).fold(0, u64::saturating_add);
        let (there, whose) = match self.limit.filter(|limit| *limit < self.host) {
            Some(limit) => (limit, "the control group"),
            None => (self.host, "this host"),
        };
        let (shown, all) = (console::size(wanted), console::size(there));
        let todo = "lower worker.memory_budget, client.memory_budget, client.metadata_cache_entries, \
                    master.metadata_cache or the [MEM] directories of worker.dirs, or raise the limit";
        if wanted > there {
            let what = format!("the processes may take {shown}, and {whose} has {all}");
            let why = "the kernel kills one of them when they do, and with it mounts or the cache";
            return Finding::error(Check::Memory, what, why, todo);
        }
        let what = format!("the processes may take {shown} of the {all} of {whose}");
        if wanted as f64 > there as f64 * SHARE_MAX {
            let why = "little is left for programs, and for the pages that make reads fast";
            return Finding::warning(Check::Memory, what, why, todo);
        }
        Finding::ok(Check::Memory, what)
    }
}

/// `MemTotal` of /proc/meminfo, in bytes.
fn total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib.saturating_mul(1024))
}

/// What a process may take (docs/operations.md).
fn budget(process: &Process) -> u64 {
    let config = process.config();
    let of_role = match process.role {
        Role::Master => config.master.metadata_cache.bytes(),
        Role::Worker => {
            let dirs = config.worker.dir_specs().unwrap_or_default();
            let in_memory = dirs.iter().filter(|dir| dir.tier == Tier::Mem).filter_map(|dir| dir.capacity);
            let in_memory = in_memory.fold(0, |sum: u64, capacity| sum.saturating_add(capacity.bytes()));
            let indexes = config.worker.index_cache.bytes().saturating_mul(dirs.len() as u64);
            config.worker.memory_budget.bytes().saturating_add(indexes).saturating_add(in_memory)
        }
        Role::Fuse => {
            let entries = (config.client.metadata_cache_entries as u64).saturating_mul(ENTRY);
            config.client.memory_budget.bytes().saturating_add(entries).saturating_add(LISTINGS)
        }
    };
    of_role.saturating_add(BASE)
}

#[cfg(test)]
mod tests {
    use cavern_conf::{ByteSize, Config, Effective};

    use super::super::finding::{Level, wrong};
    use super::*;

    fn process(role: Role, change: impl FnOnce(&mut Config)) -> Process {
        let mut effective = Effective::defaults();
        change(&mut effective.config);
        Process { role, effective }
    }

    #[test]
    fn budgets_are_held_against_what_there_is() {
        let gib = |count: u64| count << 30;
        let told = |memory: Memory, processes: &[Process]| wrong(&[memory.judge(processes)]);
        let all = Role::ALL.map(|role| process(role, |_| {}));
        let host = |host| Memory { host, limit: None };
        assert_eq!(told(host(gib(8)), &all), []);
        assert_eq!(told(host(gib(1)), &all), [(Level::Error, Check::Memory)]);
        let limited = Memory { host: gib(64), limit: Some(gib(1)) };
        assert_eq!(told(limited, &all), [(Level::Error, Check::Memory)]);
        assert!(limited.judge(&all).what.contains("control group"));
        let large = process(Role::Worker, |config| config.worker.memory_budget = ByteSize::gib(7));
        assert_eq!(told(host(gib(8)), &[large]), [(Level::Warning, Check::Memory)]);
        let tier = process(Role::Worker, |config| config.worker.dirs = vec!["[MEM:16GiB]/dev/shm/x".to_owned()]);
        assert_eq!(told(host(gib(8)), &[tier]), [(Level::Error, Check::Memory)]);
        // A limit above what the host has is none.
        assert_eq!(told(Memory { host: gib(8), limit: Some(gib(900)) }, &all), []);
    }

    #[test]
    fn the_memory_of_the_host_is_read() {
        assert_eq!(total("MemTotal:       16303412 kB\nMemFree: 1 kB\n"), Some(16_303_412 << 10));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert!(Memory::look().is_some_and(|memory| memory.host > 64 * MIB));
    }
}

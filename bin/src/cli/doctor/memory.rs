//! What the processes of this host may take of its memory, by their configuration, beside what there is.

use std::fs;
use std::path::{Path, PathBuf};

use cavern_conf::{Role, Tier};

use super::finding::{Check, Finding, Level};
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

/// *Blocking*; nothing is found without /proc.
pub fn look(processes: &[Process]) -> Vec<Finding> {
    limits().map(|(memory, by)| judge(processes, memory, by.as_deref())).into_iter().collect()
}

/// Bytes that processes of this host may have, and the file of the control group that leaves less than there is: the
/// least of those that this command is in.
fn limits() -> Option<(u64, Option<PathBuf>)> {
    let machine = total(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let files = Path::new(group).ancestors().map(|group| Path::new("/sys/fs/cgroup").join(group).join("memory.max"));
    let limit_of = |file: PathBuf| Some((fs::read_to_string(&file).ok()?.trim().parse::<u64>().ok()?, file));
    let least = files.filter_map(limit_of).min().filter(|(limit, _)| *limit < machine);
    Some(least.map_or((machine, None), |(limit, file)| (limit, Some(file))))
}

fn judge(processes: &[Process], memory: u64, by: Option<&Path>) -> Finding {
    let wanted = processes.iter().map(budget).fold(0, u64::saturating_add);
    let whose = by.map_or_else(|| "this host".to_owned(), |file| file.display().to_string());
    let what = format!("the processes may take {} of the {} of {whose}", console::size(wanted), console::size(memory));
    let (level, why) = if wanted > memory {
        (Level::Error, "the kernel kills one of them when they do, and with it mounts or the cache")
    } else if wanted as f64 > memory as f64 * SHARE_MAX {
        (Level::Warning, "little is left for programs, and for the pages that make reads fast")
    } else {
        return Finding::ok(Check::Memory, what);
    };
    let todo = "lower worker.memory_budget, client.memory_budget, client.metadata_cache_entries, master.metadata_cache \
                or the [MEM] directories of worker.dirs, or raise the limit";
    Finding::new(level, Check::Memory, what, why, todo)
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

    use super::super::finding::wrong;
    use super::*;

    fn process(role: Role, change: impl FnOnce(&mut Config)) -> Process {
        let mut effective = Effective::defaults();
        change(&mut effective.config);
        Process { role, effective }
    }

    #[test]
    fn budgets_are_held_against_what_there_is() {
        let told = |gib: u64, processes: &[Process]| wrong(&[judge(processes, gib << 30, None)]);
        let all = Role::ALL.map(|role| process(role, |_| {}));
        assert_eq!(told(8, &all), []);
        assert_eq!(told(1, &all), [(Level::Error, Check::Memory)]);
        let large = process(Role::Worker, |config| config.worker.memory_budget = ByteSize::gib(7));
        assert_eq!(told(8, &[large]), [(Level::Warning, Check::Memory)]);
        let tier = process(Role::Worker, |config| config.worker.dirs = vec!["[MEM:16GiB]/dev/shm/x".to_owned()]);
        assert_eq!(told(8, &[tier]), [(Level::Error, Check::Memory)]);
        let limited = judge(&all, 1 << 30, Some(Path::new("/sys/fs/cgroup/memory.max")));
        assert!(limited.what.ends_with("of /sys/fs/cgroup/memory.max"), "{limited:?}");
    }

    #[test]
    fn the_memory_of_the_host_is_read() {
        assert_eq!(total("MemTotal:       16303412 kB\nMemFree: 1 kB\n"), Some(16_303_412 << 10));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert!(limits().is_some_and(|(memory, _)| memory > 64 * MIB));
    }
}

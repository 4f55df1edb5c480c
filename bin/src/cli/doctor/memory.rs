//! What the processes of this host may take of its memory, by their configuration, beside what there is.

use cavern_conf::HostLimits;

use super::finding::{Check, Finding, Level};
use super::process::Process;
use crate::console;

/// What is left for programs and for the page cache is little when the processes may take more than this.
const SHARE_MAX: f64 = 0.8;

/// Beside what this host, or the control group of this command, has. *Blocking*.
pub fn look(processes: &[Process]) -> Vec<Finding> {
    let host = HostLimits::here();
    // Without /proc nobody knows.
    (host.memory < u64::MAX).then(|| judge(processes, &host)).into_iter().collect()
}

fn judge(processes: &[Process], host: &HostLimits) -> Finding {
    let demand = |process: &Process| process.effective.demand(process.role);
    let (wanted, memory) = (processes.iter().map(demand).fold(0, u64::saturating_add), host.memory);
    let whose = host.memory_by.as_ref().map_or_else(|| "this host".to_owned(), |file| file.display().to_string());
    let what = format!("the processes may take {} of the {} of {whose}", console::size(wanted), console::size(memory));
    let (level, why) = if wanted > memory {
        (Level::Error, "the kernel kills one of them when they do, and with it mounts or the cache")
    } else if wanted as f64 > memory as f64 * SHARE_MAX {
        (Level::Warning, "little is left for programs, and for the pages that make reads fast")
    } else {
        return Finding::ok(Check::Memory, what);
    };
    let todo = "give each process a resource_limit, and leave its sizes to \"auto\"; make [MEM] directories of \
                worker.dirs smaller; or raise the limit";
    Finding::new(level, Check::Memory, what, why, todo)
}

#[cfg(test)]
mod tests {
    use cavern_conf::{ByteSize, Config, Effective, Role};

    use super::super::finding::wrong;
    use super::*;

    fn process(role: Role, change: impl FnOnce(&mut Config)) -> Process {
        let mut effective = Effective::defaults();
        change(&mut effective.config);
        Process { role, effective }
    }

    #[test]
    fn budgets_are_held_against_what_there_is() {
        let host = |gib: u64| HostLimits { memory: gib << 30, ..HostLimits::default() };
        let told = |gib: u64, processes: &[Process]| wrong(&[judge(processes, &host(gib))]);
        let all = Role::ALL.map(|role| process(role, |_| {}));
        assert_eq!(told(8, &all), []);
        assert_eq!(told(1, &all), [(Level::Error, Check::Memory)]);
        let large = process(Role::Worker, |config| config.worker.memory_budget = ByteSize::gib(7));
        assert_eq!(told(8, &[large]), [(Level::Warning, Check::Memory)]);
        let tier = process(Role::Worker, |config| config.worker.dirs = vec!["[MEM:16GiB]/dev/shm/x".to_owned()]);
        assert_eq!(told(8, &[tier]), [(Level::Error, Check::Memory)]);
        let limited = judge(&all, &HostLimits { memory_by: Some("/sys/fs/cgroup/memory.max".into()), ..host(1) });
        assert!(limited.what.ends_with("of /sys/fs/cgroup/memory.max"), "{limited:?}");
        // Those of a host that is limited take less.
        let small = Effective::compose_on(host(1), None, []).unwrap();
        assert_eq!(told(1, &[Process { role: Role::Fuse, effective: small }]), []);
    }
}

//! What a host lets this process use: processors by its affinity, which the kernel keeps within its cpuset, and by the
//! quotas of its control groups; memory by these groups, and what the machine has.
//!
//! Of version 1 and 2 of control groups, of hosts that have both, and in containers, which may be shown their own group
//! only. The groups above count as well: the least of them holds.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::thread::sched_getaffinity;

use crate::rules::is_absolute_and_plain;
use crate::units::{ByteSize, ResourceLimit};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Processors and memory that a process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLimits {
    /// At least one.
    pub cpus: usize,
    /// The file of the control group that leaves fewer than the affinity.
    pub cpus_by: Option<PathBuf>,
    /// In bytes; `u64::MAX` where nobody knows.
    pub memory: u64,
    /// The file of the control group that leaves less than the machine has.
    pub memory_by: Option<PathBuf>,
}

impl Default for HostLimits {
    /// Of a host that nobody has looked at: two processors, and memory without end.
    fn default() -> Self {
        Self { cpus: 2, cpus_by: None, memory: u64::MAX, memory_by: None }
    }
}

impl HostLimits {
    /// Of this process. *Blocking*, on the kernel alone.
    pub fn here() -> Self {
        Self::below(Path::new("/"), affinity())
    }

    /// What one of so many processes may have, in whole MiB: what a process needs at least in any case.
    pub(crate) fn memory_of_one(&self, processes: usize) -> ByteSize {
        let mib = self.memory / processes.max(1) as u64 / MIB;
        ByteSize::mib(mib.clamp(*ResourceLimit::MEMORY_MIB.start(), *ResourceLimit::MEMORY_MIB.end()))
    }

    /// What the files below `root` leave to a process that may run on `affinity` processors.
    fn below(root: &Path, affinity: usize) -> Self {
        let quota = least(root, "cpu", quota_of);
        let quota = quota.map(|(cpus, file)| (usize::try_from(cpus).unwrap_or(usize::MAX), file));
        let (cpus, cpus_by) = match quota.filter(|(cpus, _)| *cpus < affinity) {
            Some((cpus, file)) => (cpus, Some(file)),
            None => (affinity, None),
        };
        let machine = machine_memory(root).unwrap_or(u64::MAX);
        let (memory, memory_by) = match least(root, "memory", memory_of).filter(|(bytes, _)| *bytes < machine) {
            Some((bytes, file)) => (bytes, Some(file)),
            None => (machine, None),
        };
        Self { cpus, cpus_by, memory, memory_by }
    }
}

/// Processors that the kernel runs this thread on.
fn affinity() -> usize {
    match sched_getaffinity(None) {
        Ok(set) => usize::try_from(set.count()).unwrap_or(usize::MAX).max(1),
        // A machine with more processors than the set has room for.
        Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
    }
}

fn machine_memory(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(KIB)
}

/// A number, and the file that says so.
type Limit = (u64, PathBuf);

fn least(root: &Path, controller: &str, limit_of: impl Fn(&Path) -> Option<Limit>) -> Option<Limit> {
    groups(root, controller).iter().filter_map(|group| limit_of(group)).min()
}

/// Bytes that a group may have, and above which the kernel slows it down.
fn memory_of(group: &Path) -> Option<Limit> {
    let files = ["memory.max", "memory.high", "memory.limit_in_bytes"].map(|name| group.join(name));
    files.into_iter().filter_map(|file| Some((number(&file)?, file))).min()
}

/// Processors that a group may keep busy, a part of one for a whole one.
fn quota_of(group: &Path) -> Option<Limit> {
    let (file, former) = (group.join("cpu.max"), group.join("cpu.cfs_quota_us"));
    let (quota, period, file) = match fs::read_to_string(&file) {
        Ok(text) => {
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.parse().ok()?, period.parse().ok()?, file)
        }
        Err(_) => (number(&former)?, number(&group.join("cpu.cfs_period_us"))?, former),
    };
    (period > 0).then(|| (u64::div_ceil(quota, period).max(1), file))
}

/// The number in a file; `None` for words as `max`, and below zero, both of which are no limit.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The directories of the control groups that hold this process for a controller (`memory`, `cpu`): its own first, then
/// those above it, as far as they are shown here.
pub fn control_groups(controller: &str) -> Vec<PathBuf> {
    groups(Path::new("/"), controller)
}

fn groups(root: &Path, controller: &str) -> Vec<PathBuf> {
    // Others may have mounted something at a path that is no text.
    let read = |name: &str| String::from_utf8_lossy(&fs::read(root.join(name)).unwrap_or_default()).into_owned();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let is_named = |list: &str| list.split(',').any(|name| name == controller);
    // `NUMBER:CONTROLLERS:PATH`; version 2 names no controllers.
    let lines = || groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let of_version_1 = lines().find(|&(names, _)| is_named(names));
    let Some((names, path)) = of_version_1.or_else(|| lines().find(|&(names, _)| names.is_empty())) else {
        return Vec::new();
    };
    // `NUMBER PARENT DEVICE ROOT MOUNT_POINT OPTIONS … - KIND SOURCE OPTIONS`
    let mount = mounts.lines().find_map(|line| {
        let (place, file_system) = line.split_once(" - ")?;
        let (mut place, mut file_system) = (place.split(' ').skip(3), file_system.split(' '));
        let (shown, mount_point) = (place.next()?, place.next()?);
        let (kind, _source, options) = (file_system.next()?, file_system.next()?, file_system.next()?);
        let is_it = if names.is_empty() { kind == "cgroup2" } else { kind == "cgroup" && is_named(options) };
        is_it.then_some((shown, mount_point))
    });
    let Some((shown, mount_point)) = mount else { return Vec::new() };
    let top = root.join(mount_point.trim_start_matches('/'));
    // What a container is not shown it cannot look at.
    let path = Path::new(path);
    let below = path.strip_prefix(shown).ok().filter(|_| is_absolute_and_plain(path));
    let own = top.join(below.unwrap_or(Path::new("")));
    own.ancestors().take_while(|group| group.starts_with(&top)).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CpuSet, sched_setaffinity};

    use super::*;

    const VERSION_2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const VERSION_1: &str = "\
        31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    /// What a host of 16 GiB and eight processors says with these files below its root.
    fn found(files: &[(&str, &str)]) -> (HostLimits, tempfile::TempDir) {
        let root = tempfile::tempdir().unwrap();
        let machine = [("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n")];
        for (name, text) in machine.iter().chain(files) {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (HostLimits::below(root.path(), 8), root)
    }

    fn says(files: &[(&str, &str)]) -> (usize, u64, Option<String>, Option<String>) {
        let (limits, root) = found(files);
        let short = |file: PathBuf| file.strip_prefix(root.path()).unwrap().display().to_string();
        (limits.cpus, limits.memory >> 20, limits.cpus_by.map(short), limits.memory_by.map(short))
    }

    #[test]
    fn a_host_without_limits_is_its_machine() {
        let machine = (8, 16 << 10, None, None);
        assert_eq!(says(&[]), machine);
        let group = "sys/fs/cgroup/system.slice/cavern.service";
        let (cpu, memory) = (format!("{group}/cpu.max"), format!("{group}/memory.max"));
        let files = [
            ("proc/self/cgroup", "0::/system.slice/cavern.service\n"),
            ("proc/self/mountinfo", VERSION_2),
            (cpu.as_str(), "max 100000\n"),
            (memory.as_str(), "max\n"),
        ];
        assert_eq!(says(&files), machine);
        // More than there is limits nothing.
        let more = [files[0], files[1], (cpu.as_str(), "900000 100000\n"), (memory.as_str(), "99999999999\n")];
        assert_eq!(says(&more), machine);
        let none = [
            ("proc/self/cgroup", "9:memory:/a\n3:cpu,cpuacct:/a\n"),
            ("proc/self/mountinfo", VERSION_1),
            ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(says(&none), machine);
    }

    #[test]
    fn the_least_of_a_group_and_those_above_it_holds() {
        let group = "sys/fs/cgroup/a/b";
        let quota = format!("{group}/cpu.max");
        let most = format!("{group}/memory.max");
        let files = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/self/mountinfo", VERSION_2),
            // One and a half are two threads.
            (quota.as_str(), "150000 100000\n"),
            (most.as_str(), "2147483648\n"),
            ("sys/fs/cgroup/a/memory.high", "1073741824\n"),
            ("sys/fs/cgroup/a/cpu.max", "400000 100000\n"),
        ];
        let by = |name: &str| Some(format!("sys/fs/cgroup/{name}"));
        assert_eq!(says(&files), (2, 1024, by("a/b/cpu.max"), by("a/memory.high")));
    }

    #[test]
    fn groups_of_version_1_are_those_of_their_controllers() {
        let files = [
            ("proc/self/cgroup", "4:memory:/m\n2:cpu,cpuacct:/\n0::/elsewhere\n"),
            ("proc/self/mountinfo", VERSION_1),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/unified/elsewhere/memory.max", "1\n"),
        ];
        let by = |name: &str| Some(format!("sys/fs/cgroup/{name}"));
        assert_eq!(says(&files), (1, 512, by("cpu,cpuacct/cpu.cfs_quota_us"), by("memory/m/memory.limit_in_bytes")));
    }

    #[test]
    fn a_container_that_is_shown_its_own_group_only_finds_it() {
        let shown = VERSION_1.replace(" / /sys/fs/cgroup/memory", " /docker/x /sys/fs/cgroup/memory");
        for path in ["/docker/x", "/docker/x/", "/../x", "/of/another/name"] {
            let group = format!("4:memory:{path}\n");
            let files = [
                ("proc/self/cgroup", group.as_str()),
                ("proc/self/mountinfo", shown.as_str()),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ];
            let by = Some("sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned());
            assert_eq!(says(&files), (8, 256, None, by), "{path}");
        }
    }

    #[test]
    fn mounts_of_others_that_are_no_text_hide_no_limit() {
        let most = ("sys/fs/cgroup/memory.max", "536870912\n");
        let (_, root) = found(&[("proc/self/cgroup", "0::/\n"), most]);
        let mounts = [b"29 23 0:7 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n".as_slice(), VERSION_2.as_bytes()].concat();
        fs::write(root.path().join("proc/self/mountinfo"), mounts).unwrap();
        assert_eq!(HostLimits::below(root.path(), 8).memory, 512 << 20);
    }

    #[test]
    fn files_without_sense_limit_nothing() {
        let quota = "sys/fs/cgroup/cpu.max";
        for (text, cpus) in [("", 8), ("1", 8), ("x 1\n", 8), ("100000 0\n", 8), ("0 100000\n", 1), ("1 1 1", 8)] {
            let files = [("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", VERSION_2), (quota, text)];
            assert_eq!(says(&files).0, cpus, "{text:?}");
        }
        for cgroup in ["", "::", "x\n0:\n", "0::/\n"] {
            let files = [("proc/self/cgroup", cgroup), ("proc/self/mountinfo", "x - y\n\n - \n")];
            assert_eq!(says(&files).1, 16 << 10, "{cgroup:?}");
        }
    }

    #[test]
    fn this_process_has_the_processors_of_its_affinity() {
        let mine = sched_getaffinity(None).unwrap();
        assert_eq!(affinity(), mine.count() as usize);
        let one = (0..CpuSet::MAX_CPU).find(|cpu| mine.is_set(*cpu)).unwrap();
        // Of a thread that ends.
        let alone = std::thread::spawn(move || {
            let mut set = CpuSet::new();
            set.set(one);
            sched_setaffinity(None, &set).unwrap();
            HostLimits::here()
        });
        let alone = alone.join().unwrap();
        assert_eq!(alone.cpus, 1);
        assert!(alone.memory >= 128 << 20 && alone.memory < 1 << 50, "{alone:?}");
    }
}

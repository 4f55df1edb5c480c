//! How much of its host each process takes: a function of the processors and the memory that it may use.
//!
//! `resource_limit` says what these are; what it leaves open the host does ([`HostLimits`]). A process whose memory
//! nobody limits takes what it would of [`Limits::STANDARD`], for which the defaults are made: the rest of the machine
//! is for others. A setting that somebody has set stays as it is, and what cannot be beside it is refused.
//!
//! The table in `docs/operations.md` has all sizes; a test holds it against this.

use toml::{Table, Value};

use crate::exposure::Role;
use crate::host_limits::HostLimits;
use crate::schema::PASSTHROUGH_FILES_MAX;
use crate::units::{ByteSize, ResourceLimit, counted};

pub(crate) const MIB: u64 = 1 << 20;
/// What leaves a setting to the limits of its process.
pub(crate) const AUTO: &str = "auto";
/// RocksDB fills one of them while it writes the other to the disk.
pub(crate) const WRITE_BUFFERS: u64 = 2;
/// Of all databases of a master: RocksDB flushes when its log has as much.
const MASTER_WRITE_BUFFERS: u64 = 256 * MIB;
/// Of a worker's index: no more is of use to it.
const INDEX_WRITE_BUFFER: u64 = 16 * MIB;

/// What a process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Processors, at least one.
    pub cpus: usize,
    /// In bytes.
    pub memory: u64,
}

impl Limits {
    /// Two processors and 4 GiB.
    pub const STANDARD: Self = Self { cpus: 2, memory: 4096 * MIB };

    fn mib(self) -> u64 {
        self.memory / MIB
    }
}

/// What follows the limits of a process and is no setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Threads for tasks. Those of a worker move bytes: one for each processor. Others do little before they hand on to
    /// a disk, a socket or a thread of their own: one for two. With more of them each change of the namespace wakes
    /// some that then find nothing to do; on two cores a new file costs the master and the client thirteen changes of
    /// threads each with two threads, and eight with one.
    pub threads: usize,
    /// Threads for what waits on disks, of each runtime; as many as have something to do.
    pub blocking_threads: usize,
    /// RocksDB's, of each database.
    pub background_jobs: i32,
    /// Bytes of RocksDB's write buffers, of all databases together.
    pub write_buffers: u64,
    /// Block files that a worker keeps open, if its limit of descriptors allows it.
    pub open_blocks: u64,
}

impl Budget {
    /// That of a process with these limits.
    pub fn of(role: Role, limits: Limits) -> Self {
        let (cpus, mib) = (limits.cpus.max(1), limits.mib());
        Self {
            threads: if role == Role::Worker { cpus } else { cpus.div_ceil(2) },
            blocking_threads: usize::try_from(mib / 16).unwrap_or(usize::MAX).clamp(32, 64),
            background_jobs: i32::try_from(cpus).unwrap_or(i32::MAX).clamp(2, 4),
            write_buffers: MIB
                * match role {
                    Role::Master => (mib / 64).clamp(16, MASTER_WRITE_BUFFERS / MIB),
                    Role::Worker => mib / 16,
                    Role::Fuse => 0,
                },
            open_blocks: (mib * 8).min(32_768),
        }
    }

    /// Bytes of one write buffer of each index, of a worker with so many directories: 1 to 16 MiB.
    pub fn index_write_buffer(&self, directories: usize) -> u64 {
        let buffers = WRITE_BUFFERS * (directories.max(1) as u64);
        (self.write_buffers / buffers).clamp(MIB, INDEX_WRITE_BUFFER)
    }
}

/// Of the processes that read this configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budgets {
    pub master: Budget,
    pub worker: Budget,
    pub client: Budget,
}

impl Default for Budgets {
    fn default() -> Self {
        Self::each(|role| Budget::of(role, Limits::STANDARD))
    }
}

impl Budgets {
    pub(crate) fn each(of: impl Fn(Role) -> Budget) -> Self {
        Self { master: of(Role::Master), worker: of(Role::Worker), client: of(Role::Fuse) }
    }

    pub fn of(&self, role: Role) -> &Budget {
        match role {
            Role::Master => &self.master,
            Role::Worker => &self.worker,
            Role::Fuse => &self.client,
        }
    }
}

/// A setting that follows the limits of its process where nobody has set it.
struct Following {
    role: Role,
    section: &'static str,
    key: &'static str,
    /// Of a worker with so many directories.
    size: fn(Limits, u64) -> Size,
}

enum Size {
    Mib(u64),
    Count(u64),
}

const fn following(role: Role, section: &'static str, key: &'static str, size: fn(Limits, u64) -> Size) -> Following {
    Following { role, section, key, size }
}

static FOLLOWING: [Following; 11] = [
    following(Role::Master, "master", "metadata_cache", |limits, _| Size::Mib((limits.mib() / 16).max(1))),
    following(Role::Worker, "worker", "index_cache", |limits, directories| {
        Size::Mib((limits.mib() / 128).min(limits.mib() / 16 / directories).max(1))
    }),
    following(Role::Worker, "worker", "memory_budget", |limits, _| Size::Mib((limits.mib() / 8).max(32))),
    // Sending costs a few milliseconds of a processor for each MiB: a quarter of it at most.
    following(Role::Worker, "worker", "background_upload_rate", |limits, _| Size::Mib(limits.cpus as u64 * 64)),
    following(Role::Fuse, "client", "memory_budget", |limits, _| Size::Mib((limits.mib() / 8).max(16))),
    following(Role::Fuse, "client", "readahead_max", |limits, _| Size::Mib((limits.mib() / 32).clamp(4, 32))),
    following(Role::Fuse, "client", "write_behind", |limits, _| Size::Mib(limits.mib() / 64)),
    following(Role::Fuse, "client", "metadata_cache_entries", |limits, _| {
        Size::Count((limits.mib() * 1_000_000 / 4096).max(10_000))
    }),
    following(Role::Fuse, "client", "descriptor_cache", |limits, _| Size::Count((limits.mib() * 4).max(256))),
    // More loops than there are processors only wake each other.
    following(Role::Fuse, "fuse", "threads", |limits, _| Size::Count(limits.cpus.clamp(1, 4) as u64)),
    following(Role::Fuse, "fuse", "passthrough_files", |limits, _| {
        Size::Count((limits.mib() * 32).min(PASSTHROUGH_FILES_MAX as u64))
    }),
];

/// Whether the setting follows the limits of its process, so that it may be `"auto"`.
pub(crate) fn follows(section: &str, key: &str) -> bool {
    FOLLOWING.iter().any(|following| following.section == section && following.key == key)
}

/// The section that a process has its `resource_limit` in.
pub(crate) fn section_of(role: Role) -> &'static str {
    match role {
        Role::Master => "master",
        Role::Worker => "worker",
        Role::Fuse => "client",
    }
}

/// The limits of a process, and who has set them.
#[derive(Clone, Debug)]
pub(crate) struct ProcessLimits {
    pub limits: Limits,
    /// As `2c4g (worker.resource_limit)`.
    pub origin: String,
}

impl Default for ProcessLimits {
    /// Those that the defaults are made for.
    fn default() -> Self {
        Self { limits: Limits::STANDARD, origin: "2c4g (default)".to_owned() }
    }
}

impl ProcessLimits {
    pub(crate) fn of(role: Role, set: ResourceLimit, host: &HostLimits) -> Self {
        let key = format!("{}.resource_limit", section_of(role));
        let (cpus, cpus_by) = match (set.cpus, &host.cpus_by) {
            (Some(cpus), _) => (cpus as usize, key.clone()),
            (None, Some(file)) => (host.cpus, file.display().to_string()),
            (None, None) => (host.cpus, "the processors of this host".to_owned()),
        };
        let (memory, memory_by) = match (set.memory, &host.memory_by) {
            (Some(memory), _) => (memory.bytes(), key),
            (None, Some(file)) => (host.memory, file.display().to_string()),
            (None, None) if host.memory > Limits::STANDARD.memory => {
                (Limits::STANDARD.memory, "no limit of memory".to_owned())
            }
            (None, None) => (host.memory, "the memory of this host".to_owned()),
        };
        let memory = memory.max(MIB);
        let limit = ResourceLimit {
            cpus: Some(u32::try_from(cpus).unwrap_or(u32::MAX)),
            memory: Some(ByteSize::mib(memory / MIB)),
        };
        let origin = if cpus_by == memory_by {
            format!("{limit} ({cpus_by})")
        } else {
            format!("{limit} ({cpus_by}; {memory_by})")
        };
        Self { limits: Limits { cpus, memory }, origin }
    }

    /// What else follows them, for people.
    pub(crate) fn describe(&self, role: Role) -> String {
        let Budget { threads, blocking_threads, background_jobs, write_buffers, open_blocks } =
            Budget::of(role, self.limits);
        let databases = format!("{background_jobs} background jobs and {} of write buffers", whole_mib(write_buffers));
        let beside = match role {
            Role::Master => format!(", {databases}"),
            Role::Worker => format!(", {databases}, {open_blocks} open block files"),
            Role::Fuse => String::new(),
        };
        let threads = counted(threads as u64, "thread");
        format!("{}: {threads} for tasks, {blocking_threads} for disks{beside}", self.origin)
    }
}

/// The limit that somebody has set for a process, in these sections.
pub(crate) fn limit_in(sections: &Table, role: Role) -> ResourceLimit {
    let text = sections.get(section_of(role)).and_then(|keys| keys.get("resource_limit")).and_then(Value::as_str);
    // It was checked alone before.
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The keys of a section.
pub(crate) fn keys_of<'a>(sections: &'a mut Table, section: &str) -> Option<&'a mut Table> {
    sections.entry(section).or_insert_with(|| Value::Table(Table::new())).as_table_mut()
}

/// Sets what follows the limits of a process and nobody has set; says which `section.key` these are.
pub(crate) fn fill(sections: &mut Table, role: Role, limits: Limits) -> Vec<String> {
    let directories = sections.get("worker").and_then(|keys| keys.get("dirs")).and_then(Value::as_array);
    let directories = directories.map_or(1, |directories| directories.len().max(1)) as u64;
    let mut filled = Vec::new();
    for following in FOLLOWING.iter().filter(|following| following.role == role) {
        let Some(keys) = keys_of(sections, following.section).filter(|keys| !keys.contains_key(following.key)) else {
            continue;
        };
        let value = match (following.size)(limits, directories) {
            Size::Mib(mib) => Value::String(ByteSize::mib(mib).to_string()),
            Size::Count(count) => Value::Integer(i64::try_from(count).unwrap_or(i64::MAX)),
        };
        keys.insert(following.key.to_owned(), value);
        filled.push(format!("{}.{}", following.section, following.key));
    }
    filled
}

/// A number of bytes, rounded up to what people read.
pub(crate) fn whole_mib(bytes: u64) -> ByteSize {
    ByteSize::mib(bytes.div_ceil(MIB))
}

#[cfg(test)]
mod tests;

//! Whether what somebody has set for a process has room within its `resource_limit`, and on its host.

use crate::budget::{AUTO, MIB, WRITE_BUFFERS, section_of, whole_mib};
use crate::dirs::Tier;
use crate::exposure::Role;
use crate::host_limits::HostLimits;
use crate::rules::Rules;
use crate::schema::Config;
use crate::units::ResourceLimit;

/// What a process takes beside its budgets (connections, stacks, what is under way), and of a small limit at most half.
const BESIDE: u64 = 128 * MIB;
/// Of a name and an inode in the metadata cache of a client.
const ENTRY_BYTES: u64 = 300;
/// Of the kernel, for a file that is registered with it.
const PASSTHROUGH_BYTES: u64 = 2 << 10;

/// What the settings of a process have it take at most, in bytes, and what it takes beside that.
pub(crate) fn demand(config: &Config, role: Role, memory: u64) -> (Vec<(&'static str, u64)>, u64) {
    let times = |count: usize, bytes: u64| bytes.saturating_mul(count as u64);
    let mut beside = BESIDE.min(memory / 2);
    let parts = match role {
        Role::Master => {
            beside += config.budgets.master.write_buffers;
            vec![("master.metadata_cache", config.master.metadata_cache.bytes())]
        }
        Role::Worker => {
            let worker = &config.worker;
            let directories = worker.dir_specs().unwrap_or_default();
            let in_memory = directories.iter().filter(|directory| directory.tier == Tier::Mem);
            let in_memory = in_memory.filter_map(|directory| directory.capacity);
            let buffers = WRITE_BUFFERS * config.budgets.worker.index_write_buffer(directories.len());
            let of_directories =
                in_memory.fold(times(directories.len(), buffers), |sum, capacity| sum.saturating_add(capacity.bytes()));
            vec![
                ("worker.memory_budget", worker.memory_budget.bytes()),
                ("worker.index_cache", times(directories.len(), worker.index_cache.bytes())),
                ("worker.dirs", of_directories),
            ]
        }
        Role::Fuse => {
            let client = &config.client;
            vec![
                ("client.memory_budget", client.memory_budget.bytes()),
                ("client.metadata_cache_entries", times(client.metadata_cache_entries, ENTRY_BYTES)),
                ("fuse.passthrough_files", times(config.fuse.passthrough_files, PASSTHROUGH_BYTES)),
            ]
        }
    };
    (parts, beside)
}

/// Notes it if a process may take more memory than `by` allows: for what somebody has set.
fn check_demand(config: &Config, role: Role, (memory, by): (u64, &str), rules: &mut Rules<'_>) {
    let (parts, beside) = demand(config, role, memory);
    let all = parts.iter().fold(beside, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let keys: Vec<&str> = parts.iter().map(|(key, _)| *key).collect();
    rules.require(all <= memory || !rules.any_is_set(&keys), &keys, || {
        let parts = parts.iter().map(|(key, bytes)| format!("{} for {key}", whole_mib(*bytes)));
        format!(
            "{} and {} beside are more than the {} of {by}: set less, or \"{AUTO}\" where that can be, or raise the \
             limit",
            parts.collect::<Vec<_>>().join(", "),
            whole_mib(beside),
            whole_mib(memory)
        )
    });
}

/// Notes settings that have a process take more than its `resource_limit`.
pub(crate) fn check(config: &Config, rules: &mut Rules<'_>) {
    for (role, limit) in Role::ALL.map(|role| (role, config.resource_limit(role))) {
        if let Some(memory) = limit.memory {
            let by = format!("{}.resource_limit (\"{limit}\")", section_of(role));
            check_demand(config, role, (memory.bytes(), &by), rules);
        }
    }
}

/// Notes a `resource_limit`, or settings, that have a process take more than the host lets it.
pub(crate) fn check_on(host: &HostLimits, config: &Config, role: Role, rules: &mut Rules<'_>) {
    let by = match &host.memory_by {
        Some(file) => file.display().to_string(),
        None => "this host".to_owned(),
    };
    let limit = config.resource_limit(role);
    let Some(memory) = limit.memory else {
        return check_demand(config, role, (host.memory, &by), rules);
    };
    let key = format!("{}.resource_limit", section_of(role));
    rules.require(memory.bytes() <= host.memory, &[&key], || {
        format!("\"{limit}\" is more memory than the {} of {by}: write less, or raise that", whole_mib(host.memory))
    });
}

impl Config {
    /// What somebody has set for the process of this role.
    pub(crate) fn resource_limit(&self, role: Role) -> ResourceLimit {
        match role {
            Role::Master => self.master.resource_limit,
            Role::Worker => self.worker.resource_limit,
            Role::Fuse => self.client.resource_limit,
        }
    }
}

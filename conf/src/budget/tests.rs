use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::Config;
use crate::demand::demand;

/// As the columns of the documentation.
const DOCUMENTED: [&str; 3] = ["1c512m", "2c4g", "4c8g"];

fn limits(text: &str) -> Limits {
    let limit: ResourceLimit = text.parse().unwrap();
    Limits { cpus: limit.cpus.unwrap() as usize, memory: limit.memory.unwrap().bytes() }
}

/// What is set for each process with the same limits, with so many directories of a worker.
fn filled(limits: Limits, directories: usize) -> Table {
    let dirs = (0..directories).map(|number| Value::String(format!("[SSD]/{number}"))).collect();
    let mut sections = Table::new();
    keys_of(&mut sections, "worker").unwrap().insert("dirs".to_owned(), Value::Array(dirs));
    for role in Role::ALL {
        fill(&mut sections, role, limits);
    }
    sections
}

fn config(limits: Limits, directories: usize) -> Config {
    let config: Config = filled(limits, directories).try_into().unwrap();
    Config { budgets: Budgets::each(|role| Budget::of(role, limits)), ..config }
}

/// Every size by its name in the documentation, as it is written there.
fn sizes(limits: Limits) -> BTreeMap<String, String> {
    let sections = filled(limits, 1);
    let mut sizes = BTreeMap::new();
    for Following { section, key, .. } in &FOLLOWING {
        let value = match &sections[*section][*key] {
            Value::String(size) => size.clone(),
            count => count.to_string(),
        };
        sizes.insert(format!("`{section}.{key}`"), value);
    }
    let [master, worker, client] = Role::ALL.map(|role| Budget::of(role, limits));
    sizes.insert("threads for tasks, of `cv worker`".into(), worker.threads.to_string());
    assert_eq!(master.threads, client.threads);
    sizes.insert("the same of `cv master` and `cv fuse`".into(), client.threads.to_string());
    sizes.insert("threads for disks, of each runtime".into(), client.blocking_threads.to_string());
    sizes.insert("background jobs of RocksDB".into(), master.background_jobs.to_string());
    sizes.insert("write buffers of `cv master`".into(), whole_mib(master.write_buffers).to_string());
    let index = whole_mib(worker.index_write_buffer(1)).to_string();
    sizes.insert("each of two write buffers of an index, of `cv worker`".into(), index);
    sizes.insert("block files kept open, of `cv worker`".into(), worker.open_blocks.to_string());
    sizes
}

#[test]
fn the_documentation_has_every_size() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");
    let text = std::fs::read_to_string(path).unwrap();
    let heading = format!("| what | how much | {} |", DOCUMENTED.join(" | "));
    let rows = text.split_once(&heading).expect("there is a table").1.lines().skip(2);
    let mut documented: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in rows.take_while(|row| row.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        documented.insert(cells[0].to_owned(), cells[2..].iter().map(|cell| (*cell).to_owned()).collect());
    }
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (what, size) in DOCUMENTED.into_iter().flat_map(|text| sizes(limits(text))) {
        expected.entry(what).or_default().push(size);
    }
    assert_eq!(documented, expected);
}

#[test]
fn the_defaults_are_for_the_standard_limits() {
    assert_eq!(limits("2c4g"), Limits::STANDARD);
    assert_eq!(filled(Limits::STANDARD, 1).len(), 4);
    let dirs = Config::default().worker.dirs;
    let standard = config(Limits::STANDARD, 1);
    assert_eq!(Config { worker: crate::schema::Worker { dirs, ..standard.worker }, ..standard }, Config::default());
}

#[test]
fn what_is_set_stays_and_nothing_else() {
    let mut sections: Table = "[client]\nmemory_budget = \"1MiB\"\n[fuse]\nthreads = 9\n".parse().unwrap();
    let filled = fill(&mut sections, Role::Fuse, limits("1c512m"));
    assert_eq!(sections["client"]["memory_budget"].as_str(), Some("1MiB"));
    assert_eq!(sections["fuse"]["threads"].as_integer(), Some(9));
    assert!(filled.contains(&"client.readahead_max".to_owned()));
    assert!(!filled.contains(&"client.memory_budget".to_owned()) && !filled.contains(&"fuse.threads".to_owned()));
    assert!(!sections.contains_key("worker") && !sections.contains_key("master"), "those of others are not touched");
}

#[test]
fn the_limits_are_those_that_are_set_then_those_of_groups_then_those_of_the_machine() {
    let machine = HostLimits { cpus: 8, cpus_by: None, memory: 64 << 30, memory_by: None };
    let of = |set: &str, host: &HostLimits| {
        let found = ProcessLimits::of(Role::Worker, set.parse().unwrap(), host);
        (found.limits, found.origin)
    };
    let (free, origin) = of("", &machine);
    assert_eq!(free, Limits { cpus: 8, memory: Limits::STANDARD.memory }, "the rest of the machine is for others");
    assert_eq!(origin, "8c4g (the processors of this host; no limit of memory)");
    let small = HostLimits { memory: 2 << 30, ..machine.clone() };
    assert_eq!(of("", &small).0.memory, 2 << 30);
    assert_eq!(
        of("16g", &machine),
        (limits("8c16g"), "8c16g (the processors of this host; worker.resource_limit)".into())
    );
    let group = HostLimits {
        cpus: 3,
        cpus_by: Some("/g/cpu.max".into()),
        memory: 8 << 30,
        memory_by: Some("/g/memory.max".into()),
    };
    assert_eq!(of("", &group), (limits("3c8g"), "3c8g (/g/cpu.max; /g/memory.max)".into()));
    assert_eq!(of("1c", &group).1, "1c8g (worker.resource_limit; /g/memory.max)");
    assert_eq!(of("1c512m", &group), (limits("1c512m"), "1c512m (worker.resource_limit)".into()));
}

fn any_limits() -> impl Strategy<Value = Limits> {
    // As a `resource_limit` may be, up to 256 GiB.
    (1usize..=256, 7u32..=17, any::<u64>()).prop_map(|(cpus, order, more)| {
        let mib = (1 << order) + more % (1 << order);
        Limits { cpus, memory: mib * MIB }
    })
}

proptest! {
    /// With up to one directory for 16 MiB.
    #[test]
    fn what_a_process_takes_has_room(limits in any_limits(), directories in any::<usize>()) {
        let most = usize::try_from(limits.memory / MIB / 16).unwrap().min(255);
        let config = config(limits, 1 + directories % most);
        for role in Role::ALL {
            let (parts, beside) = demand(&config, role, limits.memory);
            let all = parts.iter().map(|(_, bytes)| bytes).sum::<u64>() + beside;
            prop_assert!(all <= limits.memory, "{role:?}: {parts:?} and {beside} of {limits:?}");
        }
        prop_assert!(config.check().is_ok(), "{:?}", config.check());
    }

    #[test]
    fn more_gives_no_less(limits in any_limits(), cpus in 0usize..64, memory in 0u64..1 << 36) {
        let more = Limits { cpus: limits.cpus + cpus, memory: limits.memory + memory };
        for Following { key, size, .. } in &FOLLOWING {
            let [less, more] = [limits, more].map(|limits| match size(limits, 3) {
                Size::Mib(size) | Size::Count(size) => size,
            });
            prop_assert!(less <= more, "{key}: {less}, and {more} with more");
        }
        for role in Role::ALL {
            let sizes = |limits| {
                let of = Budget::of(role, limits);
                let buffers = of.index_write_buffer(3);
                let threads = [of.threads as u64, of.blocking_threads as u64, of.background_jobs as u64];
                (threads, [of.write_buffers, of.open_blocks, buffers])
            };
            let (less, more) = (sizes(limits), sizes(more));
            let all = [less.0, less.1].concat().into_iter().zip([more.0, more.1].concat());
            prop_assert!(all.clone().all(|(less, more)| less <= more), "{role:?}: {:?}", all.collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_least_is_enough_to_work(limits in any_limits()) {
        let config = config(limits, 1);
        prop_assert!(config.master.metadata_cache >= ByteSize::mib(8));
        prop_assert!(config.worker.memory_budget >= ByteSize::mib(32) && config.worker.index_cache >= ByteSize::mib(1));
        prop_assert!(config.client.memory_budget >= ByteSize::mib(16));
        prop_assert!(config.client.readahead_max >= ByteSize::mib(4));
        prop_assert!(config.client.metadata_cache_entries >= 10_000 && config.fuse.threads >= 1);
        prop_assert!(config.budgets.master.write_buffers >= 16 * MIB);
        let of_worker = &config.budgets.worker;
        prop_assert_eq!(of_worker.threads, limits.cpus);
        prop_assert!(of_worker.blocking_threads >= 32 && of_worker.open_blocks >= 1024);
    }
}

//! Values that cannot be and combinations that cannot work.
//!
//! Only what has no sensible meaning is refused; a setting that is merely unwise is its owner's business. Every rule
//! names the keys it looks at: the problem is reported at the first of them that somebody set, since the default beside
//! it is seldom what is wrong.

use std::path::Path;

use crate::endpoint::AllowedEndpoint;
use crate::error::{Problem, SettingSource};
use crate::exposure::{self, Role};
use crate::process::parse_level;
use crate::rules::{LONGEST, Port, Rules, is_host_port};
use crate::schema::{Choice, Config, Fuse, Security};
use crate::units::{ByteSize, Interval};

/// A fill takes whole chunks; a smaller request could not hold one.
const CHUNK: ByteSize = ByteSize::kib(128);
/// Below this a lease lapses from an ordinary scheduling delay.
const SHORTEST_LEASE: Interval = Interval::millis(500);
/// Clients say every few seconds what they have made.
const SHORTEST_UNCLAIMED: Interval = Interval::secs(1);
/// Clients commit every three seconds, and wait for a worker for five.
const SHORTEST_RESERVED: Interval = Interval::secs(10);
/// With less there would be a snapshot for every few changes.
const SHORTEST_LOG: ByteSize = ByteSize::kib(64);
/// A heartbeat more often than this is a load, not a sign of life.
const SHORTEST_HEARTBEAT: Interval = Interval::millis(10);
/// What one client may do in a second, at least: a change of a thousand inodes, and what it may have asked for at a
/// time within the patience of its readers.
const SLOWEST_OPERATIONS: usize = 1000;
const SLOWEST_BYTES: ByteSize = ByteSize::mib(8);
/// What clients may have made and not committed, at least.
const LEAST_RESERVED: ByteSize = ByteSize::mib(16);
/// What a page of a listing has.
const FEWEST_ENTRIES: u64 = 1000;
/// Of so many masters a group can be made.
const MASTERS: [usize; 3] = [1, 3, 5];
/// The journal of a mount has room for little more.
const PASSTHROUGH_FILES_MAX: usize = 200_000;
/// Longest path of a Unix socket: `sun_path` without its final NUL.
const SOCKET_PATH_MAX: usize = 107;

/// All that is wrong with `config`, in the order of the file. `origin` says where the value of a `section.key` came
/// from.
pub(crate) fn check(config: &Config, origin: impl Fn(&str) -> SettingSource) -> Vec<Problem> {
    let mut rules = Rules::new(&origin);
    cluster(config, &mut rules);
    security(&config.security, &mut rules);
    master(config, &mut rules);
    worker(config, &mut rules);
    ufs(config, &mut rules);
    client(config, &mut rules);
    fuse(&config.fuse, &mut rules);
    rules.into_problems()
}

/// What of `config` keeps others from reaching the process of this role.
pub(crate) fn check_reach(config: &Config, role: Role, origin: impl Fn(&str) -> SettingSource) -> Vec<Problem> {
    let mut rules = Rules::new(&origin);
    exposure::check(config, role, &mut rules);
    rules.into_problems()
}

fn cluster(config: &Config, rules: &mut Rules<'_>) {
    let cluster = &config.cluster;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    rules.require((1..=64).contains(&cluster.name.len()) && cluster.name.chars().all(plain), &["cluster.name"], || {
        format!("\"{}\" must be 1 to 64 letters, digits, \"-\", \"_\" or \".\"", cluster.name.escape_debug())
    });
    rules.require(!cluster.masters.is_empty(), &["cluster.masters"], || {
        "must name at least one master, as [\"127.0.0.1:7700\"]".to_owned()
    });
    for master in &cluster.masters {
        if let Err(message) = check_master(master) {
            rules.require(false, &["cluster.masters"], || message);
        }
    }
    number_of_masters(cluster.masters.len(), rules);
    let repeated = cluster.masters.iter().enumerate().find(|(at, master)| cluster.masters[..*at].contains(master));
    if let Some((_, master)) = repeated {
        rules.require(false, &["cluster.masters"], || {
            format!("names \"{master}\" twice: give each master an address of its own")
        });
    }
    exposure::check_masters(&cluster.masters, rules);
    if let Err(error) = parse_level(&config.log.level) {
        rules.require(false, &["log.level"], || error.to_string());
    }
}

fn number_of_masters(number: usize, rules: &mut Rules<'_>) {
    // None at all is refused before.
    rules.require(number == 0 || MASTERS.contains(&number), &["cluster.masters"], || match number {
        2 | 4 => format!(
            "names {number} masters, which survive no more failures than {} would, since a majority must be left: \
             name 1, 3 or 5",
            number - 1
        ),
        _ => format!("names {number} masters, but each change waits for a majority of them: name 1, 3 or 5"),
    });
}

fn security(security: &Security, rules: &mut Rules<'_>) {
    let files = [
        ("security.ca", &security.ca),
        ("security.certificate", &security.certificate),
        ("security.key", &security.key),
    ];
    let is_set = |path: &Path| !path.as_os_str().is_empty();
    let any = files.iter().any(|(_, path)| is_set(path));
    for (key, path) in files.into_iter().filter(|_| any) {
        rules.require(is_set(path), &[key], || {
            "must be set, since another file of [security] is: there are three, or none".to_owned()
        });
        if is_set(path) {
            rules.absolute(key, path);
        }
    }
    if is_set(&security.revoked) {
        rules.absolute("security.revoked", &security.revoked);
        rules.require(any, &["security.revoked"], || {
            "needs the three files of [security]: without them nobody shows a certificate".to_owned()
        });
    }
    if is_set(&security.http_token) {
        rules.absolute("security.http_token", &security.http_token);
        rules.require(any, &["security.http_token"], || {
            "needs the three files of [security]: without them nobody is asked for a token, which would go over the \
             network in clear"
                .to_owned()
        });
    }
}

/// The files of a key-encryption key and of the one before.
fn key_encryption(settings: [&'static str; 2], current: &Path, former: &Path, rules: &mut Rules<'_>) {
    let is_set = |path: &Path| !path.as_os_str().is_empty();
    for (key, path) in settings.into_iter().zip([current, former]).filter(|(_, path)| is_set(path)) {
        rules.absolute(key, path);
    }
    let [key, former_key] = settings;
    rules.require(!is_set(former) || is_set(current), &[former_key, key], || {
        format!("there is no {key}, which takes the place of the former one: set it")
    });
}

fn master(config: &Config, rules: &mut Rules<'_>) {
    let master = &config.master;
    rules.listen_address("master.listen", &master.listen);
    rules.listen_address("master.http_listen", &master.http_listen);
    rules.distinct(["master.listen", "master.http_listen"], &master.listen, &master.http_listen);
    rules.advertised("master.advertise", &master.advertise, "node1:7700");
    rules.absolute("master.data_dir", &master.data_dir);
    let keys = ["master.key_encryption_key", "master.former_key_encryption_key"];
    key_encryption(keys, &master.key_encryption_key, &master.former_key_encryption_key, rules);
    rules.audit_log("master.audit_log", &master.audit_log);
    let has_log = !master.audit_deletes || !master.audit_log.is_empty();
    rules.require(has_log, &["master.audit_deletes", "master.audit_log"], || {
        "there is no audit log that names could be in: set master.audit_log as well".to_owned()
    });
    rules.at_least("master.metadata_cache", master.metadata_cache, ByteSize::mib(1));
    rules.at_least("master.snapshot_after", master.snapshot_after, SHORTEST_LOG);
    rules.ordered(("master.snapshot_after", master.snapshot_after), ("master.log_size_max", master.log_size_max));
    rules.at_most_ten_years("master.log_keep", master.log_keep);
    rules.require((SHORTEST_HEARTBEAT..=LONGEST).contains(&master.heartbeat), &["master.heartbeat"], || {
        format!("\"{}\" must be at least \"{SHORTEST_HEARTBEAT}\", as \"1s\"", master.heartbeat)
    });
    rules.require(
        master.worker_timeout.as_millis() >= master.heartbeat.as_millis().saturating_mul(2),
        &["master.worker_timeout", "master.heartbeat"],
        || {
            format!(
                "master.worker_timeout (\"{}\") must be at least twice master.heartbeat (\"{}\"), or one late \
                 heartbeat loses a worker",
                master.worker_timeout, master.heartbeat
            )
        },
    );
    rules.at_most_ten_years("master.worker_timeout", master.worker_timeout);
    rules.require((SHORTEST_LEASE..=LONGEST).contains(&master.session_lease), &["master.session_lease"], || {
        format!("\"{}\" must be at least \"{SHORTEST_LEASE}\", as \"5s\"", master.session_lease)
    });
    rules.at_most_ten_years("master.refresh_wait", master.refresh_wait);
    rules.count("master.list_concurrency", master.list_concurrency);
    for (key, most) in
        [("master.listing_entries", master.listing_entries), ("master.index_entries", master.index_entries)]
    {
        rules.require(most >= FEWEST_ENTRIES, &[key], || {
            format!("{most} must be at least {FEWEST_ENTRIES}: a page of a listing has as many")
        });
    }
    rules.count("master.load_concurrency", master.load_concurrency);
    rules.at_most_ten_years("master.persist_delay", master.persist_delay);
    rules.count("master.persist_concurrency", master.persist_concurrency);
    rules.at_most_ten_years("master.repair_after", master.repair_after);
    rules.count("master.repair_concurrency", master.repair_concurrency);
    for (key, most) in [
        ("master.client_connections", master.client_connections),
        ("master.client_sessions", master.client_sessions),
        ("master.client_calls", master.client_calls),
    ] {
        rules.count(key, most);
    }
    rules.require(
        master.client_operations_per_second == 0 || master.client_operations_per_second >= SLOWEST_OPERATIONS,
        &["master.client_operations_per_second"],
        || {
            format!(
                "{} must be 0, for any number, or at least {SLOWEST_OPERATIONS}: with fewer a directory is not listed \
                 before its reader gives up",
                master.client_operations_per_second
            )
        },
    );
}

fn worker(config: &Config, rules: &mut Rules<'_>) {
    let worker = &config.worker;
    rules.listen_address("worker.listen", &worker.listen);
    rules.listen_address("worker.http_listen", &worker.http_listen);
    rules.distinct(["worker.listen", "worker.http_listen"], &worker.listen, &worker.http_listen);
    rules.advertised("worker.advertise", &worker.advertise, "node7:7710");
    rules.audit_log("worker.audit_log", &worker.audit_log);
    rules.require(!worker.dirs.is_empty(), &["worker.dirs"], || {
        "must name at least one directory, as [\"[SSD:1TB]/nvme0/cavern\"]".to_owned()
    });
    let dirs = worker.dir_specs();
    if let Err(error) = &dirs {
        rules.require(false, &["worker.dirs"], || error.to_string());
    }
    if !worker.socket.as_os_str().is_empty() {
        rules.absolute("worker.socket", &worker.socket);
    }
    let socket = match (worker.socket.as_os_str().is_empty(), dirs.as_deref()) {
        (true, Ok([first, ..])) => first.path.join("worker.sock"),
        _ => worker.socket.clone(),
    };
    rules.require(socket.as_os_str().len() <= SOCKET_PATH_MAX, &["worker.socket", "worker.dirs"], || {
        format!(
            "the socket's path \"{}\" is longer than the {SOCKET_PATH_MAX} bytes that the system allows: set \
             worker.socket to a shorter one, as \"/run/cavern/worker.sock\"",
            socket.display()
        )
    });
    for (key, fraction) in
        [("worker.high_watermark", worker.high_watermark), ("worker.low_watermark", worker.low_watermark)]
    {
        rules.require(fraction > 0.0 && fraction <= 1.0, &[key], || {
            format!("{fraction} must be a fraction above 0 and at most 1, as 0.95")
        });
    }
    // What is no number is refused above already.
    rules.require(
        worker.low_watermark < worker.high_watermark || worker.low_watermark.is_nan() || worker.high_watermark.is_nan(),
        &["worker.low_watermark", "worker.high_watermark"],
        || {
            format!(
                "worker.low_watermark ({}) must be below worker.high_watermark ({})",
                worker.low_watermark, worker.high_watermark
            )
        },
    );
    rules.require((1..=100).contains(&worker.mount_cache_share), &["worker.mount_cache_share"], || {
        format!("{} must be from 1 to 100 percent: 100 limits nothing", worker.mount_cache_share)
    });
    rules.at_least("worker.index_cache", worker.index_cache, ByteSize::mib(1));
    rules.require(
        (SHORTEST_UNCLAIMED..=LONGEST).contains(&worker.unclaimed_after),
        &["worker.unclaimed_after"],
        || format!("\"{}\" must be at least \"{SHORTEST_UNCLAIMED}\", as \"1h\"", worker.unclaimed_after),
    );
    rules.require((SHORTEST_RESERVED..=LONGEST).contains(&worker.reserved_after), &["worker.reserved_after"], || {
        format!("\"{}\" must be at least \"{SHORTEST_RESERVED}\", as \"10m\"", worker.reserved_after)
    });
    for (key, most) in
        [("worker.client_reserved", worker.client_reserved), ("worker.mount_reserved", worker.mount_reserved)]
    {
        rules.require(most.bytes() == 0 || most >= LEAST_RESERVED, &[key], || {
            format!(
                "\"{most}\" must be \"0B\", for a share of the capacity, or at least \"{LEAST_RESERVED}\": a writer \
                 has made a few blocks before it commits the first of them"
            )
        });
    }
    rules.count("worker.fill_concurrency", worker.fill_concurrency);
    rules.at_least("worker.fill_size_max", worker.fill_size_max, CHUNK);
    rules.ordered(("worker.fill_size_max", worker.fill_size_max), ("worker.memory_budget", worker.memory_budget));
    let keys = ["worker.key_encryption_key", "worker.former_key_encryption_key"];
    key_encryption(keys, &worker.key_encryption_key, &worker.former_key_encryption_key, rules);
    rules.count("worker.client_connections", worker.client_connections);
    let rate = worker.client_bytes_per_second;
    rules.require(rate.bytes() == 0 || rate >= SLOWEST_BYTES, &["worker.client_bytes_per_second"], || {
        format!(
            "\"{rate}\" must be \"0B\", for any number, or at least \"{SLOWEST_BYTES}\": what a mount asks for at a \
             time would come too late with less"
        )
    });
}

fn ufs(config: &Config, rules: &mut Rules<'_>) {
    let ufs = &config.ufs;
    rules.positive("ufs.connect_timeout", ufs.connect_timeout);
    rules.positive("ufs.request_timeout", ufs.request_timeout);
    rules.positive("ufs.io_timeout", ufs.io_timeout);
    rules.require(ufs.retries <= 100, &["ufs.retries"], || format!("{} must be from 0 to 100", ufs.retries));
    rules.positive("ufs.retry_backoff", ufs.retry_backoff);
    rules.ordered(("ufs.retry_backoff", ufs.retry_backoff), ("ufs.retry_backoff_max", ufs.retry_backoff_max));
    rules.at_most_ten_years("ufs.retry_backoff_max", ufs.retry_backoff_max);
    rules.count("ufs.concurrency", ufs.concurrency);
    for root in &ufs.file_roots {
        rules.absolute("ufs.file_roots", root);
    }
    for endpoint in &ufs.endpoints {
        if let Err(message) = AllowedEndpoint::parse(endpoint) {
            rules.require(false, &["ufs.endpoints"], || message);
        }
    }
}

fn client(config: &Config, rules: &mut Rules<'_>) {
    let client = &config.client;
    rules.at_least("client.memory_budget", client.memory_budget, ByteSize::mib(1));
    rules.positive("client.connect_timeout", client.connect_timeout);
    rules.positive("client.metadata_timeout", client.metadata_timeout);
    rules.positive("client.change_timeout", client.change_timeout);
    rules.positive("client.read_timeout", client.read_timeout);
    rules.positive("client.bucket_timeout", client.bucket_timeout);
    rules.positive("client.worker_timeout", client.worker_timeout);
    rules.positive("client.worker_backoff", client.worker_backoff);
    rules.ordered(
        ("client.worker_backoff", client.worker_backoff),
        ("client.worker_backoff_max", client.worker_backoff_max),
    );
    rules.at_most_ten_years("client.worker_backoff_max", client.worker_backoff_max);
    rules.ordered(("client.readahead_max", client.readahead_max), ("client.memory_budget", client.memory_budget));
    rules.require(client.metadata_cache_entries > 0, &["client.metadata_cache_entries"], || {
        "must be at least 1; fuse.client_metadata_cache = false switches the cache off".to_owned()
    });
    rules.require(client.descriptor_cache > 0, &["client.descriptor_cache"], || {
        "must be at least 1; client.local_descriptors = false does without descriptors".to_owned()
    });
    rules.require(client.hedge_percent <= 100, &["client.hedge_percent"], || {
        format!("{} must be from 0 to 100 percent", client.hedge_percent)
    });
    rules.absolute("client.staging_directory", &client.staging_directory);
    rules.at_least("client.staging_size", client.staging_size, ByteSize::mib(64));
}

fn fuse(fuse: &Fuse, rules: &mut Rules<'_>) {
    rules.absolute("fuse.mount_point", &fuse.mount_point);
    rules.require(fuse.mount_point != Path::new("/"), &["fuse.mount_point"], || {
        "\"/\" cannot be mounted over: choose a directory, as \"/mnt/cavern\"".to_owned()
    });
    rules.listen_address("fuse.http_listen", &fuse.http_listen);
    rules.absolute("fuse.path", Path::new(&fuse.path));
    rules.require((1..=256).contains(&fuse.threads), &["fuse.threads"], || {
        format!("{} must be from 1 to 256", fuse.threads)
    });
    rules.at_most_ten_years("fuse.entry_timeout", fuse.entry_timeout);
    rules.at_most_ten_years("fuse.attr_timeout", fuse.attr_timeout);
    rules.at_most_ten_years("fuse.negative_timeout", fuse.negative_timeout);
    rules.at_most_ten_years("fuse.trace_above", fuse.trace_above);
    for (key, id) in [("fuse.uid", fuse.uid), ("fuse.gid", fuse.gid)] {
        // The largest 32-bit number is -1 to the kernel, and means nobody.
        rules.require((-1..i64::from(u32::MAX)).contains(&id), &[key], || {
            format!("{id} must be an id from 0 to {}, or -1 for the process's own", u32::MAX - 1)
        });
    }
    for (key, mode) in [("fuse.file_mode", fuse.file_mode), ("fuse.dir_mode", fuse.dir_mode)] {
        rules.require(mode <= 0o777, &[key], || {
            format!("0o{mode:o} must be permissions from 0o000 to 0o777, with the prefix 0o, as 0o644")
        });
    }
    rules.require(fuse.kernel_readahead <= ByteSize::gib(1), &["fuse.kernel_readahead"], || {
        format!("\"{}\" must be at most \"1GiB\", as \"1MiB\"", fuse.kernel_readahead)
    });
    for (key, set) in [("fuse.passthrough", fuse.passthrough == Choice::On), ("fuse.direct", fuse.direct)] {
        rules.require(!(fuse.no_open == Choice::On && set), &["fuse.no_open", key], || {
            format!("cannot be true together with {key}, which needs the open that fuse.no_open leaves out")
        });
    }
    rules.require(fuse.passthrough_files <= PASSTHROUGH_FILES_MAX, &["fuse.passthrough_files"], || {
        format!("{} must be from 0 to {PASSTHROUGH_FILES_MAX}", fuse.passthrough_files)
    });
    rules.require(fuse.max_background > 0, &["fuse.max_background"], || "must be from 1 to 65535, as 256".to_owned());
}

/// Refuses what cannot be the address of a master, with what would be one.
///
/// # Errors
/// The sentence for whoever wrote it.
pub fn check_master(address: &str) -> Result<(), String> {
    if is_host_port(address, Port::Given) {
        return Ok(());
    }
    let with_port = format!("{address}:7700");
    Err(match is_host_port(&with_port, Port::Given) {
        true => format!("\"{address}\" has no port: write HOST:PORT, as \"{with_port}\""),
        false => format!("\"{address}\" is not the address of a master: write HOST:PORT, as \"127.0.0.1:7700\""),
    })
}

//! Values that cannot be and combinations that cannot work.
//!
//! Only what has no sensible meaning is refused; a setting that is merely unwise is its owner's business. Every rule
//! names the keys it looks at: the problem is reported at the first of them that somebody set, since the default beside
//! it is seldom what is wrong.

use std::path::Path;

use crate::demand;
use crate::endpoint::AllowedEndpoint;
use crate::exposure;
use crate::process::parse_level;
use crate::rules::{Port, Rules, is_host_port, is_set};
use crate::schema::{Choice, Client, Config, Fuse, Master, Security, Ufs, Worker};
use crate::units::ByteSize;

/// What one client may do in a second, at least: a change of a thousand inodes.
const SLOWEST_OPERATIONS: usize = 1000;

/// Of so many masters a group can be made.
const MASTERS: [usize; 3] = [1, 3, 5];

/// Longest path of a Unix socket: `sun_path` without its final NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Notes all that is wrong with `config`, section by section.
pub(crate) fn check(config: &Config, rules: &mut Rules<'_>) {
    config.cluster.check_values(rules);
    masters(&config.cluster.masters, rules);
    if let Err(error) = parse_level(&config.log.level) {
        rules.refuse("log.level", error.to_string());
    }
    security(&config.security, rules);
    config.master.check_values(rules);
    master(&config.master, rules);
    config.worker.check_values(rules);
    worker(&config.worker, rules);
    config.ufs.check_values(rules);
    ufs(&config.ufs, rules);
    config.client.check_values(rules);
    client(&config.client, rules);
    config.fuse.check_values(rules);
    fuse(&config.fuse, rules);
    demand::check(config, rules);
}

fn masters(masters: &[String], rules: &mut Rules<'_>) {
    const KEY: &str = "cluster.masters";
    rules.require(!masters.is_empty(), &[KEY], || "must name at least one master, as [\"127.0.0.1:7700\"]".to_owned());
    for message in masters.iter().filter_map(|master| check_master(master).err()) {
        rules.refuse(KEY, message);
    }
    // None at all is refused before.
    let number = masters.len();
    rules.require(number == 0 || MASTERS.contains(&number), &[KEY], || match number {
        2 | 4 => format!(
            "names {number} masters, which survive no more failures than {} would, since a majority must be left: \
             name 1, 3 or 5",
            number - 1
        ),
        _ => format!("names {number} masters, but each change waits for a majority of them: name 1, 3 or 5"),
    });
    let repeated = masters.iter().enumerate().find(|(at, master)| masters[..*at].contains(master));
    if let Some((_, master)) = repeated {
        rules.refuse(KEY, format!("names \"{master}\" twice: give each master an address of its own"));
    }
    exposure::check_masters(masters, rules);
}

fn security(security: &Security, rules: &mut Rules<'_>) {
    let files = [
        ("security.ca", &security.ca),
        ("security.certificate", &security.certificate),
        ("security.key", &security.key),
    ];
    let any = files.iter().any(|(_, path)| is_set(path));
    for (key, path) in files.into_iter().filter(|_| any) {
        rules.require(is_set(path), &[key], || {
            "must be set, since another file of [security] is: there are three, or none".to_owned()
        });
        rules.absolute_if_set(key, path);
    }
    for (key, path, reason) in [
        ("security.revoked", &security.revoked, "nobody shows a certificate"),
        (
            "security.http_token",
            &security.http_token,
            "nobody is asked for a token, which would go over the network in clear",
        ),
    ] {
        rules.absolute_if_set(key, path);
        rules.require(any || !is_set(path), &[key], || {
            format!("needs the three files of [security]: without them {reason}")
        });
    }
}

/// The files of a key-encryption key and of the one before.
fn key_encryption([key, former_key]: [&'static str; 2], current: &Path, former: &Path, rules: &mut Rules<'_>) {
    rules.require(!is_set(former) || is_set(current), &[former_key, key], || {
        format!("there is no {key}, which takes the place of the former one: set it")
    });
}

fn master(master: &Master, rules: &mut Rules<'_>) {
    rules.distinct(["master.listen", "master.http_listen"], &master.listen, &master.http_listen);
    let keys = ["master.key_encryption_key", "master.previous_key_encryption_key"];
    key_encryption(keys, &master.key_encryption_key, &master.previous_key_encryption_key, rules);
    let has_log = !master.audit_deletes || !master.audit_log.is_empty();
    rules.require(has_log, &["master.audit_deletes", "master.audit_log"], || {
        "there is no audit log that names could be in: set master.audit_log as well".to_owned()
    });
    rules.ordered(("master.snapshot_after", master.snapshot_after), ("master.log_size_max", master.log_size_max));
    let (timeout, heartbeat) = (master.worker_timeout, master.heartbeat);
    let is_late_twice = timeout.as_millis() >= heartbeat.as_millis().saturating_mul(2);
    rules.require(is_late_twice, &["master.worker_timeout", "master.heartbeat"], || {
        format!(
            "master.worker_timeout (\"{timeout}\") must be at least twice master.heartbeat (\"{heartbeat}\"), or one \
             late heartbeat loses a worker"
        )
    });
    let operations = master.client_operations_per_second;
    let is_enough = operations == 0 || operations >= SLOWEST_OPERATIONS;
    rules.require(is_enough, &["master.client_operations_per_second"], || {
        format!(
            "{operations} must be 0, for any number, or at least {SLOWEST_OPERATIONS}: with fewer a directory is not \
             listed before its reader gives up"
        )
    });
}

fn worker(worker: &Worker, rules: &mut Rules<'_>) {
    rules.distinct(["worker.listen", "worker.http_listen"], &worker.listen, &worker.http_listen);
    rules.require(!worker.dirs.is_empty(), &["worker.dirs"], || {
        "must name at least one directory, as [\"[SSD:1TB]/nvme0/cavern\"]".to_owned()
    });
    let dirs = worker.dir_specs();
    if let Err(error) = &dirs {
        rules.refuse("worker.dirs", error.clone());
    }
    let socket = match dirs.as_deref() {
        Ok([first, ..]) if !is_set(&worker.socket) => first.path.join("worker.sock"),
        _ => worker.socket.clone(),
    };
    rules.require(socket.as_os_str().len() <= SOCKET_PATH_MAX, &["worker.socket", "worker.dirs"], || {
        format!(
            "the socket's path \"{}\" is longer than the {SOCKET_PATH_MAX} bytes that the system allows: set \
             worker.socket to a shorter one, as \"/run/cavern/worker.sock\"",
            socket.display()
        )
    });
    let (low, high) = (worker.low_watermark, worker.high_watermark);
    // What is no number is refused before.
    let is_below = low < high || low.is_nan() || high.is_nan();
    rules.require(is_below, &["worker.low_watermark", "worker.high_watermark"], || {
        format!("worker.low_watermark ({low}) must be below worker.high_watermark ({high})")
    });
    rules.ordered(("worker.fill_size_max", worker.fill_size_max), ("worker.memory_budget", worker.memory_budget));
    let keys = ["worker.key_encryption_key", "worker.previous_key_encryption_key"];
    key_encryption(keys, &worker.key_encryption_key, &worker.previous_key_encryption_key, rules);
}

fn ufs(ufs: &Ufs, rules: &mut Rules<'_>) {
    rules.ordered(("ufs.retry_backoff", ufs.retry_backoff), ("ufs.retry_backoff_max", ufs.retry_backoff_max));
    for message in ufs.endpoints.iter().filter_map(|endpoint| AllowedEndpoint::parse(endpoint).err()) {
        rules.refuse("ufs.endpoints", message);
    }
}

fn client(client: &Client, rules: &mut Rules<'_>) {
    rules.ordered(
        ("client.worker_backoff", client.worker_backoff),
        ("client.worker_backoff_max", client.worker_backoff_max),
    );
    rules.ordered(("client.readahead_max", client.readahead_max), ("client.memory_budget", client.memory_budget));
}

fn fuse(fuse: &Fuse, rules: &mut Rules<'_>) {
    rules.require(fuse.mount_point != Path::new("/"), &["fuse.mount_point"], || {
        "\"/\" cannot be mounted over: choose a directory, as \"/mnt/cavern\"".to_owned()
    });
    rules.require(fuse.kernel_readahead <= ByteSize::gib(1), &["fuse.kernel_readahead"], || {
        format!("\"{}\" must be at most \"1GiB\", as \"1MiB\"", fuse.kernel_readahead)
    });
    for (key, set) in [("fuse.passthrough", fuse.passthrough == Choice::On), ("fuse.direct", fuse.direct)] {
        rules.require(!(fuse.no_open == Choice::On && set), &["fuse.no_open", key], || {
            format!("cannot be true together with {key}, which needs the open that fuse.no_open leaves out")
        });
    }
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

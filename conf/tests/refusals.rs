//! What is wrong with a configuration is said with file, line, key and what would be right.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use cavern_conf::{ByteSize, Config, ConfigError, Effective, HostLimits, Role};
use proptest::prelude::*;

const FILE: &str = "/etc/cv.toml";

fn compose(text: &str, environment: &[(&str, &str)]) -> Result<Effective, ConfigError> {
    let environment = environment.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    Effective::compose(Some((PathBuf::from(FILE), text.as_bytes().to_vec())), environment)
}

fn refusal(text: &str) -> String {
    compose(text, &[]).expect_err(text).to_string()
}

/// Each case: the file, the line that is at fault, the key as it is named, and what the message must contain.
const BAD_FILES: &[(&str, usize, &str, &[&str])] = &[
    // Syntax.
    ("[fuse\nthreads = 2", 1, "", &["near \"[fuse\""]),
    ("[fuse]\nthreads = \n", 2, "", &["near \"threads =\""]),
    ("[fuse]\nthreads 2\n", 2, "", &["near \"threads 2\""]),
    ("[fuse]\npath = \"/a\n", 2, "", &["invalid basic string", "near \"path = \"/a\""]),
    ("[fuse]\nthreads = 1\n\nthreads = 2\n", 4, "", &["duplicate key", "near \"threads = 2\""]),
    ("[fuse]\n[log]\n[fuse]\n", 3, "", &["duplicate key"]),
    ("[client]\nread_timeout = 10s\n", 2, "", &["near \"read_timeout = 10s\""]),
    // Unknown sections and keys.
    ("\n[fues]\nthreads = 2\n", 2, "[fues]", &["no such section", "did you mean [fuse]?"]),
    ("[workers]\n", 1, "[workers]", &["did you mean [worker]?"]),
    ("[gateway]\n", 1, "[gateway]", &["the sections are cluster, security, log, master, worker, ufs, client, fuse"]),
    ("[fuse]\nmountpoint = \"/x\"\n", 2, "fuse.mountpoint", &["no such key in [fuse]", "did you mean mount_point?"]),
    ("[fuse]\n\n\nthread = 2\n", 4, "fuse.thread", &["did you mean threads?"]),
    ("[worker]\ndir = [\"[SSD]/a\"]\n", 2, "worker.dir", &["did you mean dirs?"]),
    ("[worker]\nhigh_watermrak = 0.9\n", 2, "worker.high_watermrak", &["did you mean high_watermark?"]),
    ("[fuse]\nread_timeout = \"3s\"\n", 2, "fuse.read_timeout", &["it belongs in [client]"]),
    ("[log]\nzzz = 1\n", 2, "log.zzz", &["its keys are level, format"]),
    ("mount_point = \"/x\"\n", 1, "mount_point", &["outside of every section", "it belongs below [fuse]"]),
    ("nonsense = 1\n", 1, "nonsense", &["outside of every section", "the sections are"]),
    ("fuse = 3\n", 1, "fuse", &["is a section: write [fuse]"]),
    ("[[worker]]\nlisten = \"a:1\"\n", 1, "worker", &["is a section: write [worker] once"]),
    (
        "[security]\nca = \"/c/ca.pem\"\ncertificate = \"w.pem\"\nkey = \"/c/w-key.pem\"\n",
        3,
        "security.certificate",
        &["absolute path"],
    ),
    ("[master]\naudit_deletes = true\n", 2, "master.audit_deletes", &["set master.audit_log"]),
    // Wrong types and units.
    ("[fuse]\nthreads = \"two\"\n", 2, "fuse.threads", &["string \"two\"", "(default: threads = 2)"]),
    ("[fuse]\nthreads = -1\n", 2, "fuse.threads", &["`-1`", "(default: threads = 2)"]),
    ("[fuse]\nmax_background = 70000\n", 2, "fuse.max_background", &["70000", "(default: max_background = 256)"]),
    ("[fuse]\ndirect = \"yes\"\n", 2, "fuse.direct", &["expected a boolean", "(default: direct = false)"]),
    ("[fuse]\nthreads.x = 1\n", 2, "fuse.threads", &["map"]),
    ("[log]\nformat = \"xml\"\n", 2, "log.format", &["`text` or `json`"]),
    ("[client]\noutage_lookups = \"always\"\n", 2, "client.outage_lookups", &["`read-only`, `cache-mode`, `never`"]),
    (
        "[client]\nmemory_budget = 512\n",
        2,
        "client.memory_budget",
        &["as \"64MiB\"", "(default: memory_budget = \"512MiB\")"],
    ),
    ("[client]\nmemory_budget = \"512\"\n", 2, "client.memory_budget", &["has no unit", "\"512MiB\""]),
    (
        "[client]\nmemory_budget = \"512mb\"\n",
        2,
        "client.memory_budget",
        &["unknown unit \"mb\"", "did you mean \"MB\"?"],
    ),
    ("[client]\nmemory_budget = \"0.5GiB\"\n", 2, "client.memory_budget", &["fraction"]),
    ("[client]\nread_timeout = 10\n", 2, "client.read_timeout", &["as \"10s\"", "(default: read_timeout = \"15s\")"]),
    ("[client]\nread_timeout = \"10\"\n", 2, "client.read_timeout", &["write it as \"10s\""]),
    ("[client]\nread_timeout = \"10 seconds\"\n", 2, "client.read_timeout", &["did you mean \"s\"?"]),
    (
        "[cluster]\nmasters = \"a:7700\"\n",
        2,
        "cluster.masters",
        &["sequence", "(default: masters = [\"127.0.0.1:7700\"])"],
    ),
    ("[cluster]\nmasters = [\n  \"a:1\",\n  7700,\n]\n", 4, "cluster.masters", &["expected a string"]),
    // Values that cannot be.
    ("[cluster]\nname = \"\"\n", 2, "cluster.name", &["1 to 64 letters"]),
    ("[cluster]\nmasters = []\n", 2, "cluster.masters", &["at least one master"]),
    ("[cluster]\nmasters = [\"localhost\"]\n", 2, "cluster.masters", &["has no port", "\"localhost:7700\""]),
    ("[cluster]\nmasters = [\"a:0\"]\n", 2, "cluster.masters", &["HOST:PORT"]),
    (
        "[cluster]\nname = \"c\"\nmasters = [\"a:1\", \"b:1\"]\n",
        3,
        "cluster.masters",
        &["names 2 masters", "no more failures than 1 would", "1, 3 or 5"],
    ),
    (
        "[cluster]\nmasters = [\"a:1\", \"b:1\", \"c:1\", \"d:1\"]\n",
        2,
        "cluster.masters",
        &["names 4 masters", "no more failures than 3 would"],
    ),
    (
        "[cluster]\nmasters = [\"a:1\", \"b:1\", \"c:1\", \"d:1\", \"e:1\", \"f:1\", \"g:1\"]\n",
        2,
        "cluster.masters",
        &["names 7 masters", "1, 3 or 5"],
    ),
    ("[cluster]\nmasters = [\"a:1\", \"b:1\", \"a:1\"]\n", 2, "cluster.masters", &["names \"a:1\" twice"]),
    (
        "[cluster]\nmasters = [\"node1:1\", \"localhost:1\", \"node3:1\"]\n",
        2,
        "cluster.masters",
        &["\"localhost:1\" leads each host to itself", "\"node1:1\""],
    ),
    ("[master]\nadvertise = \"node7\"\n", 2, "master.advertise", &["as \"node1:7700\""]),
    ("[log]\nlevel = \"verbose\"\n", 2, "log.level", &["off, error, warn, info, debug, trace"]),
    ("[master]\nlisten = \"127.0.0.1:77000\"\n", 2, "master.listen", &["as \"0.0.0.0:7700\""]),
    ("[master]\nlisten = \"::1:7700\"\n", 2, "master.listen", &["host:port"]),
    ("[master]\nlisten = \"127.0.0.1:7701\"\n", 2, "master.listen", &["a port of its own"]),
    ("[master]\ndata_dir = \"data\"\n", 2, "master.data_dir", &["absolute path"]),
    ("[master]\nlist_concurrency = 0\n", 2, "master.list_concurrency", &["from 1 to"]),
    ("[master]\nlisting_entries = 999\n", 2, "master.listing_entries", &["at least 1000"]),
    ("[master]\nindex_entries = 0\n", 2, "master.index_entries", &["at least 1000"]),
    ("[master]\nindex_streams = 0\n", 2, "master.index_streams", &["from 1 to"]),
    ("[master]\nindex_memory = \"1MiB\"\n", 2, "master.index_memory", &["at least \"8MiB\""]),
    ("[master]\nload_concurrency = 0\n", 2, "master.load_concurrency", &["from 1 to"]),
    ("[master]\npersist_concurrency = 0\n", 2, "master.persist_concurrency", &["from 1 to"]),
    ("[master]\nsnapshot_after = \"1KiB\"\n", 2, "master.snapshot_after", &["at least \"64KiB\""]),
    (
        "[master]\nlog_size_max = \"100MiB\"\n",
        2,
        "master.log_size_max",
        &["master.snapshot_after (\"256MiB\") must be at most master.log_size_max (\"100MiB\")"],
    ),
    ("[master]\nlog_retention = \"20000d\"\n", 2, "master.log_retention", &["at most ten years"]),
    ("[master]\nheartbeat = \"0s\"\n", 2, "master.heartbeat", &["at least \"10ms\""]),
    ("[master]\nsession_lease = \"1ms\"\n", 2, "master.session_lease", &["at least \"500ms\""]),
    ("[worker]\norphan_block_grace = \"0s\"\n", 2, "worker.orphan_block_grace", &["at least \"1s\""]),
    ("[worker]\nreservation_timeout = \"9s\"\n", 2, "worker.reservation_timeout", &["at least \"10s\""]),
    ("[worker]\nclient_reserved = \"1MiB\"\n", 2, "worker.client_reserved", &["at least \"16MiB\""]),
    ("[worker]\nmount_reserved = \"1B\"\n", 2, "worker.mount_reserved", &["at least \"16MiB\""]),
    ("[worker]\ndirs = []\n", 2, "worker.dirs", &["at least one directory"]),
    ("[worker]\ndirs = [\"/nvme0\"]\n", 2, "worker.dirs", &["\"[SSD:1TB]/path\""]),
    ("[worker]\ndirs = [\"[NVME]/nvme0\"]\n", 2, "worker.dirs", &["MEM, SSD, HDD"]),
    ("[worker]\ndirs = [\"[SSD:1tb]/a\"]\n", 2, "worker.dirs", &["did you mean \"TB\"?"]),
    ("[worker]\ndirs = [\"[SSD]a\"]\n", 2, "worker.dirs", &["absolute"]),
    ("[worker]\ndirs = [\"[SSD]/a\", \"[HDD]/a/\"]\n", 2, "worker.dirs", &["lie in one another"]),
    ("[worker]\nadvertise = \"node7\"\n", 2, "worker.advertise", &["as \"node7:7710\""]),
    ("[worker]\nsocket = \"w.sock\"\n", 2, "worker.socket", &["absolute"]),
    ("[worker]\nhigh_watermark = 1.5\n", 2, "worker.high_watermark", &["at most 1"]),
    ("[worker]\nmount_cache_share = 0\n", 2, "worker.mount_cache_share", &["from 1 to 100"]),
    ("[worker]\nmount_cache_share = 101\n", 2, "worker.mount_cache_share", &["from 1 to 100"]),
    ("[worker]\nlow_watermark = nan\n", 2, "worker.low_watermark", &["above 0"]),
    ("[worker]\nfill_concurrency = 0\n", 2, "worker.fill_concurrency", &["from 1 to"]),
    ("[worker]\nbackground_upload_rate = \"0B\"\n", 2, "worker.background_upload_rate", &["at least \"1MiB\""]),
    ("[worker]\nfill_size_max = \"64KiB\"\n", 2, "worker.fill_size_max", &["at least \"128KiB\""]),
    ("[ufs]\nconcurrency = 0\n", 2, "ufs.concurrency", &["from 1 to"]),
    ("[ufs]\nio_timeout = \"0s\"\n", 2, "ufs.io_timeout", &["more than zero"]),
    ("[ufs]\nfile_roots = [\"data\"]\n", 2, "ufs.file_roots", &["\"data\"", "absolute path"]),
    ("[ufs]\nfile_roots = [\"/data/../etc\"]\n", 2, "ufs.file_roots", &["without \".\" or \"..\""]),
    ("[ufs]\nendpoints = [\"http://u@h\"]\n", 2, "ufs.endpoints", &["\"http://u@h\"", "HOST:PORT"]),
    ("[client]\nhedge_percent = 101\n", 2, "client.hedge_percent", &["from 0 to 100"]),
    ("[fuse]\nthreads = 0\n", 2, "fuse.threads", &["from 1 to 256"]),
    ("[fuse]\nmount_point = \"mnt\"\n", 2, "fuse.mount_point", &["absolute path"]),
    ("[fuse]\nmount_point = \"/\"\n", 2, "fuse.mount_point", &["as \"/mnt/cavern\""]),
    ("[fuse]\npath = \"/a/../b\"\n", 2, "fuse.path", &["without \".\" or \"..\""]),
    ("[fuse]\nfile_mode = 644\n", 2, "fuse.file_mode", &["prefix 0o", "0o644"]),
    ("[fuse]\nuid = -2\n", 2, "fuse.uid", &["-1 for the process's own"]),
    ("[fuse]\nnegative_timeout = \"9999d\"\n", 2, "fuse.negative_timeout", &["ten years"]),
    ("[fuse]\npassthrough = \"always\"\n", 2, "fuse.passthrough", &["must be \"auto\", true or false", "\"auto\")"]),
    // Combinations.
    ("[fuse]\npassthrough_files = 200001\n", 2, "fuse.passthrough_files", &["from 0 to 200000"]),
    ("[fuse]\nno_open = true\npassthrough = true\n", 2, "fuse.no_open", &["together with fuse.passthrough"]),
    ("[fuse]\nno_open = 1\n", 2, "fuse.no_open", &["\"auto\", true or false"]),
    ("[fuse]\ndirect = true\nno_open = true\n", 3, "fuse.no_open", &["together with fuse.direct"]),
    (
        "[worker]\nhigh_watermark = 0.5\nlow_watermark = 0.6\n",
        3,
        "worker.low_watermark",
        &["(0.6) must be below worker.high_watermark (0.5)"],
    ),
    ("[worker]\nhigh_watermark = 0.5\n", 2, "worker.high_watermark", &["worker.low_watermark (0.98) must be below"]),
    ("[master]\nworker_timeout = \"1s\"\n", 2, "master.worker_timeout", &["twice master.heartbeat (\"1s\")"]),
    ("[master]\nheartbeat = \"1m\"\n", 2, "master.heartbeat", &["master.worker_timeout (\"5s\")"]),
    ("[client]\nreadahead_max = \"1GiB\"\n", 2, "client.readahead_max", &["at most client.memory_budget (\"512MiB\")"]),
    ("[client]\nmemory_budget = \"16MiB\"\n", 2, "client.memory_budget", &["client.readahead_max (\"32MiB\")"]),
    // Limits.
    ("[worker]\nresource_limit = 2\n", 2, "worker.resource_limit", &["processors and memory in quotes, as \"2c4g\""]),
    ("[worker]\nresource_limit = \"64m\"\n", 2, "worker.resource_limit", &["\"64m\" is no limit", "128m or more"]),
    ("[master]\nresource_limit = \"0c\"\n", 2, "master.resource_limit", &["1 to 1024", "\"2c4g\""]),
    (
        "[fuse]\nresource_limit = \"2c4g\"\n",
        2,
        "fuse.resource_limit",
        &["it belongs in [master] or [worker] or [client]"],
    ),
    ("[ufs]\nconcurrency = \"auto\"\n", 2, "ufs.concurrency", &["string \"auto\""]),
    (
        "[client]\nresource_limit = \"1c512m\"\nmemory_budget = \"1GiB\"\n",
        3,
        "client.memory_budget",
        &["1GiB for client.memory_budget", "more than the 512MiB of client.resource_limit (\"1c512m\")"],
    ),
    (
        "[fuse]\nthreads = 1\npassthrough_files = 200000\n[client]\nresource_limit = \"512m\"\n",
        3,
        "fuse.passthrough_files",
        &["for fuse.passthrough_files", "client.resource_limit (\"512m\")"],
    ),
    (
        "[master]\nmetadata_cache = \"256MiB\"\nresource_limit = \"1c256m\"\n",
        2,
        "master.metadata_cache",
        &["256MiB for master.metadata_cache and 144MiB beside", "256MiB of master.resource_limit (\"1c256m\")"],
    ),
    (
        "[worker]\nresource_limit = \"4c8g\"\ndirs = [\"[MEM:7GiB]/dev/shm/cv\"]\n",
        3,
        "worker.dirs",
        &["for worker.dirs", "8GiB of worker.resource_limit (\"4c8g\")"],
    ),
    (
        "[client]\nresource_limit = \"1c512m\"\nreadahead_max = \"128MiB\"\n",
        3,
        "client.readahead_max",
        &["at most client.memory_budget (\"64MiB\")"],
    ),
    ("[ufs]\nretry_backoff = \"1m\"\n", 2, "ufs.retry_backoff", &["at most ufs.retry_backoff_max (\"2s\")"]),
    ("[worker]\nfill_size_max = \"1GiB\"\n", 2, "worker.fill_size_max", &["at most worker.memory_budget"]),
];

#[test]
fn a_bad_file_is_refused_with_its_line_its_key_and_what_would_be_right() {
    let mut wrong = Vec::new();
    for (text, line, key, expected) in BAD_FILES {
        let error = refusal(text);
        let place = if key.is_empty() { format!("{FILE}:{line}: ") } else { format!("{FILE}:{line}: {key}: ") };
        let one_mistake = !error.contains('\n');
        if !error.starts_with(&place) || !one_mistake || !expected.iter().all(|part| error.contains(part)) {
            wrong.push(format!("{text:?}\n  wanted {place}{expected:?}\n  got {error}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Each case: the file, whose process it keeps others from, the line, the key, and the other key that the message must
/// name.
const OUT_OF_REACH: &[(&str, Role, usize, &str, &str)] = &[
    ("[cluster]\nmasters = [\"10.0.0.1:7700\"]\n", Role::Master, 2, "cluster.masters", "master.listen"),
    ("[cluster]\nmasters = [\"10.0.0.1:7700\"]\n", Role::Worker, 2, "cluster.masters", "worker.listen"),
    (
        "[cluster]\nmasters = [\"node1:7700\"]\n[master]\nlisten = \"localhost:7700\"\n",
        Role::Master,
        4,
        "master.listen",
        "cluster.masters",
    ),
    ("[master]\nlisten = \"10.0.0.1:7700\"\n", Role::Master, 2, "master.listen", "cluster.masters"),
    ("[cluster]\nmasters = [\"0.0.0.0:7700\"]\n", Role::Master, 2, "cluster.masters", "stands for all"),
    (
        "[cluster]\nmasters = [\"a:1\", \"b:1\", \"0.0.0.0:1\"]\n[master]\nlisten = \"0.0.0.0:1\"\n",
        Role::Master,
        2,
        "cluster.masters",
        "\"0.0.0.0:1\" stands for all",
    ),
    ("[cluster]\nmasters = [\"a:1\", \"b:1\", \"c:1\"]\n", Role::Master, 2, "cluster.masters", "master.listen"),
    ("[cluster]\nmasters = [\"a:1\", \"b:1\", \"c:1\"]\n", Role::Worker, 2, "cluster.masters", "worker.listen"),
    ("[master]\nadvertise = \"node7:7700\"\n", Role::Master, 2, "master.advertise", "master.listen"),
    ("[master]\nadvertise = \"0.0.0.0:7700\"\n", Role::Master, 2, "master.advertise", "stands for all"),
    (
        "[cluster]\nmasters = [\"a:1\"]\n[master]\nlisten = \"0.0.0.0:1\"\nadvertise = \"127.0.0.1:1\"\n",
        Role::Master,
        5,
        "master.advertise",
        "cluster.masters",
    ),
    (
        "[cluster]\nmasters = [\"node1:7700\"]\n[worker]\nlisten = \"0.0.0.0:7710\"\nadvertise = \"127.0.0.1:7710\"\n",
        Role::Worker,
        5,
        "worker.advertise",
        "cluster.masters",
    ),
    ("[worker]\nadvertise = \"node7:7710\"\n", Role::Worker, 2, "worker.advertise", "worker.listen"),
    ("[worker]\nadvertise = \"0.0.0.0:7710\"\n", Role::Worker, 2, "worker.advertise", "stands for all"),
];

/// Other hosts may come in, and nobody is asked who he is: not what most of these are about.
const INSECURE: &str = "[security]\ninsecure = true\n";

#[test]
fn who_is_named_to_others_listens_where_they_can_come() {
    for (text, role, line, key, expected) in OUT_OF_REACH {
        let effective = compose(&format!("{text}{INSECURE}"), &[]).unwrap();
        let error = effective.check_reach(*role).expect_err(text).to_string();
        assert!(error.starts_with(&format!("{FILE}:{line}: {key}: ")) && error.contains(expected), "{text}\n{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    for good in WITHIN_REACH {
        let effective = compose(&format!("{good}{INSECURE}"), &[]).unwrap();
        for role in [Role::Master, Role::Worker] {
            effective.check_reach(role).expect(good);
        }
    }
}

const WITHIN_REACH: &[&str] = &[
    "",
    "[master]\nlisten = \"0.0.0.0:7700\"\n[worker]\nlisten = \"0.0.0.0:7710\"\n",
    "[cluster]\nmasters = [\"node1:7700\"]\n[master]\nlisten = \"0.0.0.0:7700\"\n[worker]\nlisten = \"[::]:7710\"\n",
    "[cluster]\nmasters = [\"node1:7700\"]\n[master]\nlisten = \"10.0.0.1:7700\"\n[worker]\nlisten = \
     \"10.0.0.2:7710\"\n",
    "[cluster]\nmasters = [\"127.0.0.1:1\", \"127.0.0.1:2\", \"localhost:3\"]\n[master]\nlisten = \
     \"127.0.0.1:2\"\n",
    "[cluster]\nmasters = [\"a:1\", \"b:1\", \"c:1\", \"d:1\", \"e:1\"]\n[master]\nlisten = \
     \"0.0.0.0:1\"\nadvertise = \"f:1\"\n[worker]\nlisten = \"0.0.0.0:2\"\n",
];

#[test]
fn who_lets_other_hosts_in_asks_who_they_are_unless_nobody_needs_to() {
    let files = "[security]\nca = \"/c/ca.pem\"\ncertificate = \"/c/w.pem\"\nkey = \"/c/w-key.pem\"\n";
    for (listen, is_open) in [
        ("0.0.0.0:7710", true),
        ("[::]:7710", true),
        ("10.0.0.2:7710", true),
        ("node1:7710", true),
        ("127.0.0.1:7710", false),
        ("[::1]:7710", false),
        ("localhost:7710", false),
    ] {
        for (key, role) in [("worker", Role::Worker), ("master", Role::Master)] {
            let other_role = if role == Role::Worker { Role::Master } else { Role::Worker };
            // A master is named where it listens.
            let port = if key == "master" { listen.replace("7710", "7700") } else { listen.to_owned() };
            let named = listen.replace("0.0.0.0", "node1").replace("[::]", "node1").replace("7710", "7700");
            let masters = if key == "master" { named } else { "127.0.0.1:7700".to_owned() };
            let text = format!("[cluster]\nmasters = [\"{masters}\"]\n[{key}]\nlisten = \"{port}\"\n");
            let checked = |text: &str, role| compose(text, &[]).unwrap().check_reach(role);
            if is_open {
                let error = checked(&text, role).expect_err(&text).to_string();
                assert!(error.starts_with(&format!("{FILE}:4: {key}.listen: ")), "{error}");
                for way in ["[security]", "`cv cert`", "security.insecure = true", &port] {
                    assert!(error.contains(way), "{way}: {error}");
                }
                if key == "worker" {
                    checked(&text, other_role).expect(&text);
                }
            } else {
                checked(&text, role).expect(&text);
            }
            checked(&format!("{text}{files}"), role).expect(&text);
            checked(&format!("{text}{INSECURE}"), role).expect(&text);
        }
    }
    for (role, key) in Role::ALL.into_iter().zip(["master", "worker", "fuse"]) {
        let open = format!("[{key}]\nhttp_listen = \"0.0.0.0:7701\"\n");
        let checked = |text: &str| compose(text, &[]).unwrap().check_reach(role);
        let error = checked(&open).expect_err(&open).to_string();
        assert!(error.starts_with(&format!("{FILE}:2: {key}.http_listen: ")), "{error}");
        assert!(error.contains("metrics") && error.contains("security.insecure = true"), "{error}");
        for text in [format!("{open}{files}"), format!("{open}{INSECURE}"), open.replace("0.0.0.0", "127.0.0.1")] {
            checked(&text).expect(&text);
        }
    }
}

#[test]
fn a_former_key_comes_beside_a_present_one() {
    let with = |lines: &str| format!("[master]\n{lines}");
    compose(&with("key_encryption_key = \"/k\"\nprevious_key_encryption_key = \"/f\"\n"), &[]).unwrap();
    let error = refusal(&with("previous_key_encryption_key = \"/f\"\n"));
    assert!(error.contains("master.previous_key_encryption_key: ") && error.contains("set it"), "{error}");
    let error = refusal(&with("key_encryption_key = \"k\"\n"));
    assert!(error.contains("master.key_encryption_key: ") && error.contains("absolute path"), "{error}");
}

#[test]
fn the_three_files_of_security_come_together() {
    let all = [("ca", "/c/ca.pem"), ("certificate", "/c/w.pem"), ("key", "/c/w-key.pem")];
    let written = |missing: &str| {
        let lines = all.iter().filter(|(key, _)| *key != missing);
        lines.fold("[security]\n".to_owned(), |text, (key, path)| format!("{text}{key} = \"{path}\"\n"))
    };
    compose(&written(""), &[]).unwrap();
    for (missing, _) in all {
        let error = refusal(&written(missing));
        assert!(error.contains(&format!("security.{missing}: ")) && error.contains("three, or none"), "{error}");
    }
    // A token goes with them.
    let token = "http_token = \"/c/token\"\n";
    compose(&format!("{}{token}", written("")), &[]).unwrap();
    let error = refusal(&format!("[security]\n{token}"));
    assert!(error.contains("security.http_token: ") && error.contains("three files"), "{error}");
    // So does a list of revoked certificates.
    let list = "revoked = \"/c/crl.pem\"\n";
    compose(&format!("{}{list}", written("")), &[]).unwrap();
    let error = refusal(&format!("[security]\n{list}"));
    assert!(error.contains("security.revoked: ") && error.contains("three files"), "{error}");
    let error = refusal(&format!("{}revoked = \"crl.pem\"\n", written("")));
    assert!(error.contains("security.revoked: ") && error.contains("absolute path"), "{error}");
    // The environment takes them all away.
    let none = ["CA", "CERTIFICATE", "KEY"].map(|key| format!("CV_SECURITY__{key}"));
    let none: Vec<(&str, &str)> = none.iter().map(|name| (name.as_str(), "")).collect();
    assert!(!compose(&written(""), &none).unwrap().config.security.is_on());
}

#[test]
fn all_mistakes_are_told_at_once() {
    let error = compose("[fuse]\nthread = 2\ndirect = 1\n[logs]\n", &[("CV_LOG__FORMAT", "xml")]).unwrap_err();
    let keys: Vec<&str> = error.problems().iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["fuse.thread", "fuse.direct", "[logs]", "log.format"]);
    assert_eq!(error.to_string().lines().count(), 4);
}

#[test]
fn overrides_are_held_to_the_same_rules() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("CV_FUSE__THREADS", "two", &["CV_FUSE__THREADS: fuse.threads: ", "(default: threads = 2)"]),
        ("CV_FUSE__THREADS", "0", &["CV_FUSE__THREADS: fuse.threads: ", "from 1 to 256"]),
        ("CV_FUSE__THREADS", "", &["CV_FUSE__THREADS: fuse.threads: "]),
        ("CV_FUSE__TREADS", "2", &["CV_FUSE__TREADS: ", "names no key", "did you mean CV_FUSE__THREADS?"]),
        ("CV_fuse__threads", "2", &["CV_fuse__threads: ", "did you mean CV_FUSE__THREADS?"]),
        ("CV_NOTHING_LIKE__IT_AT_ALL", "2", &["CV_SECTION__KEY"]),
        ("CV_CLIENT__READ_TIMEOUT", "3", &["CV_CLIENT__READ_TIMEOUT: client.read_timeout: ", "write it as \"3s\""]),
        ("CV_WORKER__DIRS", "[SSD:1TB]/nvme0", &["is not a list", "[\"[SSD]/var/lib/cavern/worker\"]"]),
        ("CV_WORKER__DIRS", "[\"/nvme0\"]", &["CV_WORKER__DIRS: worker.dirs: ", "no tier"]),
        ("CV_WORKER__HIGH_WATERMARK", "0.5", &["CV_WORKER__HIGH_WATERMARK: worker.high_watermark: "]),
        ("CV_FUSE__FILE_MODE", "0o1777", &["0o1777"]),
    ];
    for (name, value, expected) in cases {
        let error = compose("", &[(name, value)]).expect_err(name).to_string();
        for part in *expected {
            assert!(error.contains(part), "{name}={value}: {error}");
        }
    }
    let bytes = [(OsString::from("CV_LOG__LEVEL"), OsString::from_vec(vec![0xff]))];
    let error = Effective::compose(None, bytes).unwrap_err().to_string();
    assert_eq!(error, "CV_LOG__LEVEL: log.level: the value is not UTF-8");
}

#[test]
fn overrides_win_over_the_file_and_say_so() {
    let text = "[fuse]\nthreads = 4\nmount_point = \"/a\"\n";
    let effective = compose(
        text,
        &[
            ("CV_FUSE__MOUNT_POINT", "/b"),
            ("CV_FUSE__FILE_MODE", "0o600"),
            ("CV_CLUSTER__NAME", "7"),
            ("CV_LOG__LEVEL", "\"warn\""),
            ("CV_CLIENT__READ_TIMEOUT", "3s"),
            ("CV_WORKER__HIGH_WATERMARK", "1"),
            ("CV_WORKER__DIRS", "[\"[MEM:1GiB]/dev/shm/cv\", \"[SSD]/nvme0\"]"),
            ("CV_CONF", "/elsewhere"),
            ("CVS__ROOT", "not ours"),
            ("PATH", "/bin"),
        ],
    )
    .unwrap();
    let config = &effective.config;
    assert_eq!(config.fuse.threads, 4);
    assert_eq!(config.fuse.mount_point, Path::new("/b"));
    assert_eq!(config.fuse.file_mode, 0o600);
    assert_eq!(config.cluster.name, "7");
    assert_eq!(config.log.level, "warn");
    assert_eq!(config.client.read_timeout.as_millis(), 3000);
    assert_eq!(config.worker.high_watermark, 1.0);
    assert_eq!(config.worker.dir_specs().unwrap().len(), 2);

    let shown = effective.show();
    let line = |start: &str| shown.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
    assert!(line("threads = 4 ").ends_with("# /etc/cv.toml:2"));
    assert!(line("mount_point = \"/b\" ").ends_with("# environment CV_FUSE__MOUNT_POINT"));
    assert!(line("file_mode = 0o600 ").ends_with("# environment CV_FUSE__FILE_MODE"));
    assert!(line("dir_mode = 0o755 ").ends_with("# default"));
}

#[test]
fn what_nobody_has_set_follows_the_limits_of_its_process() {
    let text = "[worker]\nresource_limit = \"1c512m\"\nindex_cache = \"8MiB\"\n[client]\nresource_limit = \"4c8g\"\n";
    let effective = compose(text, &[]).unwrap();
    let shown = effective.show();
    let line = |section: &str, key: &str| {
        let keys = shown.split_once(&format!("[{section}]\n")).unwrap().1;
        keys.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap().to_owned()
    };
    let budget = line("worker", "memory_budget");
    assert!(budget.starts_with("memory_budget = \"64MiB\" "), "{budget}");
    assert!(budget.ends_with("# auto, for 1c512m (worker.resource_limit)"), "{budget}");
    assert!(line("worker", "index_cache").ends_with("# /etc/cv.toml:3"));
    assert!(line("client", "memory_budget").starts_with("memory_budget = \"1GiB\" "));
    assert!(line("fuse", "threads").ends_with("# auto, for 4c8g (client.resource_limit)"));
    assert!(line("master", "metadata_cache").starts_with("metadata_cache = \"256MiB\" "));
    assert!(shown.contains("\n# cv worker has 1c512m (worker.resource_limit): 1 thread for tasks, 32 for disks"));
    let budgets = &effective.config.budgets;
    assert_eq!((budgets.worker.threads, budgets.client.threads, budgets.master.threads), (1, 2, 1));
    // A word takes back what the file says.
    let environment = [("CV_WORKER__INDEX_CACHE", "auto"), ("CV_CLIENT__RESOURCE_LIMIT", "1c")];
    let effective = compose(text, &environment).unwrap();
    assert_eq!(effective.config.worker.index_cache, ByteSize::mib(4));
    assert_eq!((effective.config.fuse.threads, effective.config.client.memory_budget), (1, ByteSize::mib(512)));
}

#[test]
fn what_the_host_gives_is_followed_and_what_it_cannot_give_is_refused_with_both() {
    let group = HostLimits {
        cpus: 1,
        cpus_by: None,
        memory: 512 << 20,
        memory_by: Some(PathBuf::from("/sys/fs/cgroup/a/memory.max")),
    };
    let on = |host: &HostLimits, text: &str| {
        Effective::compose_on(host.clone(), Some((PathBuf::from(FILE), text.as_bytes().to_vec())), []).unwrap()
    };
    let effective = on(&group, "");
    assert_eq!(effective.config.client.memory_budget, ByteSize::mib(64));
    for role in Role::ALL {
        effective.check_limits(role).unwrap();
        assert!(effective.describe_limits(role).contains("/sys/fs/cgroup/a/memory.max"));
    }
    // One file serves all hosts: what is too much for this one is so for the process alone.
    let too_much = on(&group, "[worker]\nmemory_budget = \"512MiB\"\n[master]\nresource_limit = \"2c4g\"\n");
    too_much.check_limits(Role::Fuse).unwrap();
    let error = too_much.check_limits(Role::Worker).unwrap_err().to_string();
    assert!(error.starts_with("/etc/cv.toml:2: worker.memory_budget: 512MiB for worker.memory_budget"), "{error}");
    assert!(error.contains("more than the 512MiB of /sys/fs/cgroup/a/memory.max"), "{error}");
    let error = too_much.check_limits(Role::Master).unwrap_err().to_string();
    assert!(error.starts_with("/etc/cv.toml:4: master.resource_limit: \"2c4g\" is more memory than the"), "{error}");
    assert!(error.contains("512MiB of /sys/fs/cgroup/a/memory.max"), "{error}");
    // What is not limited has the whole machine.
    let machine = HostLimits { memory: 64 << 30, memory_by: None, ..group.clone() };
    on(&machine, "[worker]\nmemory_budget = \"32GiB\"\n").check_limits(Role::Worker).unwrap();
    let error = on(&machine, "[worker]\nmemory_budget = \"64GiB\"\n").check_limits(Role::Worker).unwrap_err();
    assert!(error.to_string().contains("the 64GiB of this host"), "{error}");
}

#[test]
fn processes_share_what_a_group_has() {
    let group = HostLimits { cpus: 2, cpus_by: None, memory: 512 << 20, memory_by: Some(PathBuf::from("/g")) };
    let text = b"[master]\nresource_limit = \"1c128m\"\n[client]\nresource_limit = \"1c\"\n".to_vec();
    let file = || Some((PathBuf::from(FILE), text.clone()));
    let mut shared = Effective::compose_on(group.clone(), file(), []).unwrap();
    shared.share_memory(3).unwrap();
    let of = |config: &Config| {
        [config.master.resource_limit, config.worker.resource_limit, config.client.resource_limit]
            .map(|limit| limit.to_string())
    };
    assert_eq!(of(&shared.config), ["1c128m", "170m", "1c170m"]);
    assert_eq!(shared.config.worker.memory_budget, ByteSize::mib(32));
    // What is written for the processes says the same to them.
    assert_eq!(compose(&shared.config.to_toml(), &[]).unwrap().config, shared.config);
    let machine = HostLimits { memory_by: None, ..group };
    let mut alone = Effective::compose_on(machine, file(), []).unwrap();
    let before = alone.config.clone();
    alone.share_memory(3).unwrap();
    assert_eq!(alone.config, before);
}

#[test]
fn what_is_shown_reads_back() {
    let mut config = Config::default();
    config.fuse.path = "/with \"quotes\" and ünïcode\\".into();
    config.worker.dirs = vec!["[SSD:10GB]/a".into(), "[HDD]/b".into()];
    config.check().unwrap();
    let read = compose(&config.to_toml(), &[]).unwrap();
    assert_eq!(read.config, config);
    assert_eq!(compose(&read.show(), &[]).unwrap().config, config);
    let defaults = Effective::defaults();
    assert!(defaults.show().lines().filter(|line| line.contains(" = ")).all(|line| line.ends_with("# default")));
    assert_eq!(compose(&defaults.show(), &[]).unwrap().config, Config::default());
    assert_eq!(compose("", &[]).unwrap().config, Config::default());
    assert_eq!(Effective::compose(None, []).unwrap().config, Config::default());
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.toml");
    for path in [missing.as_path(), dir.path()] {
        let error = Config::load(Some(path)).unwrap_err();
        assert!(matches!(error, ConfigError::Unreadable { .. }));
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()) && text.contains("named by --conf"), "{text}");
    }
    let latin = dir.path().join("latin.toml");
    std::fs::write(&latin, b"[cluster]\n# caf\xe9\nname = \"x\"\n").unwrap();
    let text = Config::load(Some(&latin)).unwrap_err().to_string();
    assert_eq!(text, format!("{}:2: this line is not UTF-8 text: save the file as UTF-8", latin.display()));
    let good = dir.path().join("good.toml");
    std::fs::write(&good, b"\xef\xbb\xbf[cluster]\r\nname = \"x\"\r\n").unwrap();
    assert_eq!(Config::load(Some(&good)).unwrap().cluster.name, "x", "a byte order mark and CRLF do no harm");
}

#[test]
fn impossible_configurations_of_a_program_are_refused() {
    let mut config = Config::default();
    config.worker.dirs = vec![format!("[SSD]/{}", "x".repeat(120))];
    let error = config.check().unwrap_err().to_string();
    assert!(error.starts_with("worker.socket: ") && error.contains("107 bytes"), "{error}");
    config.worker.socket = PathBuf::from("/run/w.sock");
    config.check().unwrap();
}

proptest! {
    /// Whatever the file and the environment hold: a configuration or a reason, never a panic, and never an empty
    /// reason.
    #[test]
    fn garbage_is_answered(bytes in prop::collection::vec(any::<u8>(), 0..200), value in ".{0,30}") {
        let environment = [(OsString::from("CV_WORKER__DIRS"), OsString::from(value))];
        if let Err(error) = Effective::compose(Some((PathBuf::from(FILE), bytes)), environment) {
            prop_assert!(!error.problems().is_empty());
            prop_assert!(!error.to_string().trim().is_empty());
        }
    }

    /// The same with text that resembles a configuration.
    #[test]
    fn near_misses_are_answered(lines in prop::collection::vec(
        prop::sample::select(vec![
            "[fuse]", "[worker]", "[", "]]", "threads", "=", "dirs", "\"", "[\"[SSD]/a\"", "0x", "\"10s\"", "\n", ".",
            "é", "1",
        ]),
        0..24,
    )) {
        if let Err(error) = compose(&lines.concat(), &[]) {
            prop_assert!(error.problems().iter().all(|problem| !problem.message.is_empty()));
        }
    }
}

//! The configuration of a cluster: one file for every process on every host. Each key is described, with its unit and
//! default, in `etc/cluster.toml`; a test holds that file against these types.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::budget::Budgets;
use crate::rules::Rules;
use crate::units::{ByteSize, Interval, ResourceLimit};

/// A fill takes whole chunks; a smaller request could not hold one.
const CHUNK: ByteSize = ByteSize::kib(128);

/// Below this a lease lapses from an ordinary scheduling delay.
const SHORTEST_LEASE: Interval = Interval::millis(500);

/// Clients say every few seconds what they have made.
const SHORTEST_ORPHAN_GRACE: Interval = Interval::secs(1);

/// Clients commit every three seconds, and wait for a worker for five.
const SHORTEST_RESERVATION: Interval = Interval::secs(10);

/// With less there would be a snapshot for every few changes.
const SHORTEST_LOG: ByteSize = ByteSize::kib(64);

/// A heartbeat more often than this is a load, not a sign of life.
const SHORTEST_HEARTBEAT: Interval = Interval::millis(10);

/// What one client may have asked for at a time, within the patience of its readers.
const SLOWEST_BYTES: ByteSize = ByteSize::mib(8);
const PER_SECOND: [&str; 2] = ["any number", "what a mount asks for at a time would come too late with less"];

/// What clients may have made and not committed, at least.
const LEAST_RESERVED: ByteSize = ByteSize::mib(16);
const RESERVED: [&str; 2] =
    ["a share of the capacity", "a writer has made a few blocks before it commits the first of them"];

/// The journal of a mount has room for little more.
pub(crate) const PASSTHROUGH_FILES_MAX: usize = 200_000;

/// A section of the file: each key with its type, its default, and the rule that its value is held to where that is
/// about no other key: one of [`Rules`], with its limits.
macro_rules! section {
    ($(#[$meta:meta])* $section:literal $name:ident {
        $($(#[$doc:meta])* $key:ident: $type:ty = $default:expr $(, $rule:ident $(($($limit:expr),+))?)?;)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }

        impl $name {
            /// Holds each value to its rule.
            pub(crate) fn check_values(&self, rules: &mut Rules<'_>) {
                $($(rules.$rule(concat!($section, ".", stringify!($key)), &self.$key $($(, $limit)+)?);)?)*
            }
        }
    };
}

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub cluster: Cluster,
    pub security: Security,
    pub log: Log,
    pub master: Master,
    pub worker: Worker,
    pub ufs: Ufs,
    pub client: Client,
    pub fuse: Fuse,
    /// What else follows the `resource_limit` of each process.
    #[serde(skip)]
    pub budgets: Budgets,
}

section! {
    /// What every process must agree on.
    "cluster" Cluster {
        name: String = "cavern".into(), cluster_name;
        /// host:port of every master's gRPC port: one, three or five.
        masters: Vec<String> = vec!["127.0.0.1:7700".into()];
    }
}

/// How processes know each other: all three files, or none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Security {
    /// Certificates of the authorities that sign those of the cluster.
    pub ca: PathBuf,
    /// The certificate of this process, with what lies between it and the authority behind it.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Lists of certificates that the authorities have revoked; none if empty.
    pub revoked: PathBuf,
    /// The token that shows the pages of the HTTP ports, beside the certificate of a person; none if empty.
    pub http_token: PathBuf,
    /// Metrics are shown to everybody.
    pub open_metrics: bool,
    /// Other hosts may come in without any of it.
    pub insecure: bool,
}

impl Security {
    /// Whether connections are secured.
    pub fn is_on(&self) -> bool {
        !self.ca.as_os_str().is_empty()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// A level, or directives as `info,cavern_worker=debug`. At `info` the library of the master's log logs warnings
    /// only.
    pub level: String,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

section! {
    "master" Master {
        /// gRPC address, host:port.
        listen: String = "127.0.0.1:7700".into(), listen_address;
        /// Metrics and health, host:port; over TLS where connections are secured.
        http_listen: String = "127.0.0.1:7701".into(), listen_address;
        /// Address that clients and the other masters use; empty for the entry of `cluster.masters` that is this
        /// master: see [`Config::master_address`].
        advertise: String = String::new(), advertised("node1:7700");
        data_dir: PathBuf = "/var/lib/cavern/master".into(), absolute;
        /// `data_dir` is made if it is not there.
        create_dir: bool = false;
        /// A file of 32 or more random bytes: what encrypts the keys of the secrets in `data_dir`. Empty for keys in
        /// clear.
        key_encryption_key: PathBuf = PathBuf::new(), absolute_if_set;
        /// What encrypted them before that.
        previous_key_encryption_key: PathBuf = PathBuf::new(), absolute_if_set;
        /// The file of the audit log; `log` for the process's log, empty for none.
        audit_log: String = String::new(), audit_log;
        /// It has each name that a client removes or moves in an fs-mode mount.
        audit_deletes: bool = false;
        /// Processors and memory of the process; what it does not name is what the process finds.
        resource_limit: ResourceLimit = ResourceLimit::default();
        /// RocksDB's block cache, shared by all column families.
        metadata_cache: ByteSize = ByteSize::mib(256), at_least(ByteSize::mib(1));
        /// A snapshot is made when the log has grown by this much since the last one.
        snapshot_after: ByteSize = ByteSize::mib(256), at_least(SHORTEST_LOG);
        /// What a snapshot covers stays in the log for this long, for masters that were away,
        log_retention: Interval = Interval::secs(600), at_most_ten_years;
        /// unless the log has more than this behind it.
        log_size_max: ByteSize = ByteSize::gib(1);
        heartbeat: Interval = Interval::millis(1000), lasting(SHORTEST_HEARTBEAT, "1s");
        /// A worker that has sent no heartbeat for this long leaves the worker table.
        worker_timeout: Interval = Interval::millis(5000), at_most_ten_years;
        /// A client that has sent no sign of life for this long loses its session.
        session_lease: Interval = Interval::millis(5000), lasting(SHORTEST_LEASE, "5s");
        /// How long an access to a listing older than metadata_ttl waits for a newer one before it is served the old
        /// one.
        refresh_wait: Interval = Interval::millis(1000), at_most_ten_years;
        /// LIST requests in flight at most, but for those of indexes of cache-mode mounts.
        list_concurrency: usize = 32, count;
        /// Entries that the listing of one directory of a bucket may have,
        listing_entries: u64 = 50_000_000, entries;
        /// and the index of a whole mount.
        index_entries: u64 = 1_000_000_000, entries;
        /// LIST requests of the index of one mount in flight at most,
        index_streams: usize = 64, count;
        /// as many as there is memory for, which holds pages on their way and names to be taken away.
        index_memory: ByteSize = ByteSize::mib(128), at_least(ByteSize::mib(8));
        /// Blocks of all loads together in flight at most.
        load_concurrency: usize = 32, count;
        /// How long a file of an fs-mode mount that has just changed is left alone before it is written to the bucket
        /// while somebody has it open or it is empty, and one that was just written there; a tenth of it when it is
        /// closed.
        persist_delay: Interval = Interval::millis(5000), at_most_ten_years;
        /// Objects written to and deleted from buckets at a time,
        persist_concurrency: usize = 64, count;
        /// and files that nobody waits for, while clients make many changes.
        persist_busy_concurrency: usize = 4, count;
        /// A worker that has been lost for this long is replaced: what it had of fs-mode files is copied from where
        /// else it is.
        repair_after: Interval = Interval::millis(60_000), at_most_ten_years;
        /// Blocks copied from worker to worker at a time.
        repair_concurrency: usize = 8, count;
        /// Workers that may register with certificates of the same name.
        workers_per_certificate: usize = 8, count;
        /// What one client may have at once, by the identity in its certificate: connections, sessions and calls;
        client_connections: usize = 1024, count;
        client_sessions: usize = 512, count;
        client_calls: usize = 4096, count;
        /// and operations in a second; 0 for any number.
        client_operations_per_second: usize = 0;
    }
}

section! {
    "worker" Worker {
        /// Data plane, host:port.
        listen: String = "127.0.0.1:7710".into(), listen_address;
        http_listen: String = "127.0.0.1:7711".into(), listen_address;
        /// Address that clients use; empty for `listen` (or the host's name where that is a wildcard).
        advertise: String = String::new(), advertised("node7:7710");
        /// Unix socket for clients of the same host; empty for `worker.sock` in the first directory.
        socket: PathBuf = PathBuf::new(), absolute_if_set;
        /// Members of this group may connect to it as well; empty for none. A name of this host, or a number.
        socket_group: String = String::new();
        /// `[TIER:CAPACITY]/path`; tiers MEM, SSD, HDD; without capacity: what the file system has.
        dirs: Vec<String> = vec!["[SSD]/var/lib/cavern/worker".into()];
        /// Those that are not there are made, and those that have lost what the worker had in them are begun anew.
        create_dirs: bool = false;
        /// File with the key that the keys of the directories are encrypted with; with one, blocks are encrypted on
        /// disk.
        key_encryption_key: PathBuf = PathBuf::new(), absolute_if_set;
        /// The one before, until all directories have been opened with the present one.
        previous_key_encryption_key: PathBuf = PathBuf::new(), absolute_if_set;
        /// As that of the master.
        audit_log: String = String::new(), audit_log;
        /// Fractions of a directory's capacity: eviction starts above the one and stops below the other.
        high_watermark: f64 = 0.99, fraction;
        low_watermark: f64 = 0.98, fraction;
        /// What the cached blocks of one mount may take of each directory, in percent of its capacity: 1 to 100. A
        /// mount may have `fill_size_max` in any case.
        mount_cache_share: u32 = 100, within(1..=100, " percent: 100 limits nothing");
        /// Processors and memory of the worker; what it does not name is what the process finds.
        resource_limit: ResourceLimit = ResourceLimit::default();
        /// RocksDB block cache of the block index, per directory.
        index_cache: ByteSize = ByteSize::mib(32), at_least(ByteSize::mib(1));
        /// Buffers of fills and of answers over the network.
        memory_budget: ByteSize = ByteSize::mib(512);
        /// GETs in flight at most, over all buckets.
        fill_concurrency: usize = 64, count;
        /// Largest single ranged GET.
        fill_size_max: ByteSize = ByteSize::mib(8), at_least(CHUNK);
        /// Checksums verified in the background, per second; "0B" switches the scrubber off.
        scrub_rate: ByteSize = ByteSize::mib(10);
        /// What is written to buckets in a second of files that nobody waits for, while clients are served.
        background_upload_rate: ByteSize = ByteSize::mib(128), at_least(ByteSize::mib(1));
        /// Blocks of fs-mode mounts that no file has are freed when nobody has written to them for so long.
        orphan_block_grace: Interval = Interval::millis(3_600_000), lasting(SHORTEST_ORPHAN_GRACE, "1h");
        /// Blocks that one client has made over the network, by the identity in its certificate, and that no file has
        /// yet take so much at most; 0 for a quarter of the capacity.
        client_reserved: ByteSize = ByteSize::mib(0), nothing_or(LEAST_RESERVED, RESERVED);
        /// What such blocks of all clients in one mount take at most; 0 for half of the capacity.
        mount_reserved: ByteSize = ByteSize::mib(0), nothing_or(LEAST_RESERVED, RESERVED);
        /// Such blocks are freed when no file has them after so long.
        reservation_timeout: Interval = Interval::secs(600), lasting(SHORTEST_RESERVATION, "10m");
        /// Connections that one client may have at once, by the identity in its certificate,
        client_connections: usize = 512, count;
        /// and what it may read and write over them in a second; 0 for any number.
        client_bytes_per_second: ByteSize = ByteSize::mib(0), nothing_or(SLOWEST_BYTES, PER_SECOND);
    }
}

section! {
    /// How buckets are spoken to, by every process.
    "ufs" Ufs {
        connect_timeout: Interval = Interval::millis(3000), positive;
        /// One request, without its body.
        request_timeout: Interval = Interval::millis(5000), positive;
        /// Longest pause inside a body. A store may take five times as long for each part of an object that it puts
        /// together.
        io_timeout: Interval = Interval::millis(5000), positive;
        retries: usize = 3, within(0..=100, "");
        retry_backoff: Interval = Interval::millis(50), positive;
        retry_backoff_max: Interval = Interval::millis(2000), at_most_ten_years;
        /// Requests in flight per bucket and process.
        concurrency: usize = 256, count;
        /// Directories in which those of `file://` mounts must lie; none: there are no such mounts.
        file_roots: Vec<PathBuf> = Vec::new(), all_absolute;
        /// Endpoints at loopback and link-local addresses that may be connected to all the same:
        /// [`AllowedEndpoint`](crate::AllowedEndpoint).
        endpoints: Vec<String> = Vec::new();
        /// Whether mounts may use the credentials of the instance or container that the process runs in.
        instance_credentials: bool = false;
    }
}

section! {
    "client" Client {
        /// Processors and memory of the client, which has this section and the next; what it does not name is what the
        /// process finds.
        resource_limit: ResourceLimit = ResourceLimit::default();
        /// Buffers of the whole process: of what is read, read ahead, uploaded and written behind.
        memory_budget: ByteSize = ByteSize::mib(512), at_least(ByteSize::mib(1));
        connect_timeout: Interval = Interval::millis(1000), positive;
        /// One question to the masters, retries included.
        metadata_timeout: Interval = Interval::millis(5000), positive;
        /// One change, retries included.
        change_timeout: Interval = Interval::secs(300), positive;
        /// Of which mounts names are asked of the bucket while no master answers.
        outage_lookups: OutageLookups = OutageLookups::ReadOnly;
        /// Whether `cv fuse` answers changes in directories that it made, or uses alone, before the master has them.
        directory_delegations: bool = true;
        /// One read, write or sync of a file, every fallback included; then EIO.
        read_timeout: Interval = Interval::millis(15_000), positive;
        /// A read whose bucket does not answer, or too slowly, as long as that is longer.
        bucket_timeout: Interval = Interval::secs(300), positive;
        /// One attempt at one worker; then the next source.
        worker_timeout: Interval = Interval::millis(5000), positive;
        /// A worker that failed is left alone for this long, doubling up to the second.
        worker_backoff: Interval = Interval::millis(200), positive;
        worker_backoff_max: Interval = Interval::millis(10_000), at_most_ten_years;
        /// Largest read-ahead window of one handle.
        readahead_max: ByteSize = ByteSize::mib(32);
        /// What may be on its way to workers over the network behind its writers, of the memory budget and a quarter of
        /// it at most; 0 for nothing.
        write_behind: ByteSize = ByteSize::mib(64);
        /// Inodes (and their names) kept in the client metadata cache at most.
        metadata_cache_entries: usize = 1_000_000, some("fuse.client_metadata_cache = false switches the cache off");
        /// Idle descriptors of block files kept at most.
        descriptor_cache: usize = 16_384, some("client.local_descriptors = false does without descriptors");
        /// Share of reads that may be sent twice, in percent; 0 for no hedging.
        hedge_percent: u32 = 5, within(0..=100, " percent");
        /// Read from a worker's Unix socket where that can be reached.
        local_descriptors: bool = true;
        /// Where files of cache-mode mounts lie while they are written, and how much of them at a time.
        staging_directory: PathBuf = "/var/tmp".into(), absolute;
        staging_size: ByteSize = ByteSize::gib(16), at_least(ByteSize::mib(64));
    }
}

/// The mounts whose buckets are asked for names that are not cached while no master answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutageLookups {
    /// Those in cache-mode that cannot be written to.
    ReadOnly,
    /// All in cache-mode.
    CacheMode,
    /// None: such names cannot be looked up then.
    Never,
}

/// A switch that may be left to the process: `"auto"`, `true` or `false` in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "toml::Value", into = "toml::Value")]
pub enum Choice {
    Auto,
    On,
    Off,
}

impl Choice {
    /// What was chosen; `suits` where that was left open.
    pub fn or(self, suits: bool) -> bool {
        match self {
            Self::Auto => suits,
            Self::On => true,
            Self::Off => false,
        }
    }
}

impl From<bool> for Choice {
    fn from(is_on: bool) -> Self {
        if is_on { Self::On } else { Self::Off }
    }
}

impl TryFrom<toml::Value> for Choice {
    type Error = &'static str;

    fn try_from(written: toml::Value) -> Result<Self, &'static str> {
        match (written.as_bool(), written.as_str()) {
            (_, Some("auto")) => Ok(Self::Auto),
            // In the environment a switch is a word, too.
            (Some(true), _) | (_, Some("true")) => Ok(Self::On),
            (Some(false), _) | (_, Some("false")) => Ok(Self::Off),
            _ => Err("must be \"auto\", true or false"),
        }
    }
}

impl From<Choice> for toml::Value {
    fn from(choice: Choice) -> Self {
        match choice {
            Choice::Auto => "auto".into(),
            Choice::On => true.into(),
            Choice::Off => false.into(),
        }
    }
}

section! {
    "fuse" Fuse {
        mount_point: PathBuf = "/mnt/cavern".into(), absolute;
        /// What the mount table has as the source of the mount.
        source: String = "cavern".into();
        http_listen: String = "127.0.0.1:7721".into(), listen_address;
        /// Namespace path shown at the mount point.
        path: String = "/".into(), absolute;
        /// Event loops.
        threads: usize = 2, within(1..=256, "");
        kernel_metadata_cache: bool = true;
        client_metadata_cache: bool = true;
        /// Longest time the kernel may trust a name, attributes, and the absence of a name; shortened to half of a
        /// mount's metadata_ttl.
        entry_timeout: Interval = Interval::millis(60_000), at_most_ten_years;
        attr_timeout: Interval = Interval::millis(60_000), at_most_ten_years;
        negative_timeout: Interval = Interval::millis(5000), at_most_ten_years;
        /// Other users may use the mount.
        allow_other: bool = true;
        /// Programs in the mount may be run.
        exec: bool = true;
        /// Owner and permissions shown for objects; -1 (uid, gid) for the process's own.
        uid: i64 = -1, id_or_own;
        gid: i64 = -1, id_or_own;
        file_mode: u32 = 0o644, permissions;
        dir_mode: u32 = 0o755, permissions;
        /// Kernel read-ahead.
        kernel_readahead: ByteSize = ByteSize::mib(1);
        /// Requests that the kernel may have in flight in the background.
        max_background: u16 = 256, within(1..=u16::MAX, ", as 256");
        /// No kernel pages kept, no read-ahead: for random one-touch reads.
        direct: bool = false;
        /// Objects that are one complete block of a worker on this host are read by the kernel itself: with `Auto`
        /// without a word where that cannot be.
        passthrough: Choice = Choice::Auto;
        /// So are files of fs-mode mounts: see the documentation for what that means to their readers.
        passthrough_fs_mode: bool = false;
        /// Files that stay registered with the kernel when nobody has them open, at most: it keeps each of them open.
        passthrough_files: usize = 131_072, within(0..=PASSTHROUGH_FILES_MAX, "");
        /// The kernel opens and closes files without asking: for objects that are never replaced.
        no_open: Choice = Choice::Auto;
        /// Files have extended attributes, and access lists.
        xattrs: Choice = Choice::Auto;
        /// The kernel heeds access lists of fs-mode mounts.
        posix_acl: bool = true;
        /// The mount outlives the process that serves it: another one goes on when it dies, or is replaced.
        supervised: bool = true;
        /// Requests that take as long are in the trace of the mount.
        trace_above: Interval = Interval::millis(10), at_most_ten_years;
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_a_switch_or_auto_and_is_written_as_it_was_read() {
        for (written, read) in [("\"auto\"", Choice::Auto), ("true", Choice::On), ("false", Choice::Off)] {
            let config: Config = toml::from_str(&format!("[fuse]\npassthrough = {written}\n")).unwrap();
            assert_eq!(config.fuse.passthrough, read);
            assert_eq!(toml::Value::try_from(read).unwrap().to_string(), written);
        }
        assert_eq!(Config::default().fuse.passthrough, Choice::Auto);
        assert_eq!([Choice::Auto, Choice::On, Choice::Off].map(|choice| choice.or(true)), [true, true, false]);
        assert!(!Choice::Auto.or(false));
    }
}

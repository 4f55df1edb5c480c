//! The configuration of a cluster: one file for every process on every host. Each key is described, with its unit and
//! default, in `etc/cluster.toml`; a test holds that file against these types.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::units::{ByteSize, Interval};

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
}

/// What every process must agree on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    pub name: String,
    /// host:port of every master's gRPC port: one, three or five.
    pub masters: Vec<String>,
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Master {
    /// gRPC address, host:port.
    pub listen: String,
    /// Metrics and health, host:port; over TLS where connections are secured.
    pub http_listen: String,
    /// Address that clients and the other masters use; empty for the entry of `cluster.masters` that is this master:
    /// see [`Config::master_address`].
    pub advertise: String,
    pub data_dir: PathBuf,
    /// `data_dir` is made if it is not there.
    pub create_dir: bool,
    /// A file of 32 or more random bytes: what encrypts the keys of the secrets in `data_dir`. Empty for keys in clear.
    pub key_encryption_key: PathBuf,
    /// What encrypted them before that.
    pub former_key_encryption_key: PathBuf,
    /// The file of the audit log; `log` for the process's log, empty for none.
    pub audit_log: String,
    /// It has each name that a client removes or moves in an fs-mode mount.
    pub audit_deletes: bool,
    /// RocksDB's block cache, shared by all column families.
    pub metadata_cache: ByteSize,
    /// A snapshot is made when the log has grown by this much since the last one.
    pub snapshot_after: ByteSize,
    /// What a snapshot covers stays in the log for this long, for masters that were away,
    pub log_keep: Interval,
    /// unless the log has more than this behind it.
    pub log_size_max: ByteSize,
    pub heartbeat: Interval,
    /// A worker that has sent no heartbeat for this long leaves the worker table.
    pub worker_timeout: Interval,
    /// A client that has sent no sign of life for this long loses its session.
    pub session_lease: Interval,
    /// How long an access to a listing older than metadata_ttl waits for a newer one before it is served the old one.
    pub refresh_wait: Interval,
    /// LIST requests in flight at most.
    pub list_concurrency: usize,
    /// Entries that the listing of one directory of a bucket may have,
    pub listing_entries: u64,
    /// and the index of a whole mount.
    pub index_entries: u64,
    /// Blocks of all loads together in flight at most.
    pub load_concurrency: usize,
    /// How long a file of an fs-mode mount that has just changed is left alone before it is written to the bucket; up
    /// to ten times as long while clients make many changes.
    pub persist_delay: Interval,
    /// Objects written to and deleted from buckets at a time.
    pub persist_concurrency: usize,
    /// A worker that has been lost for this long is replaced: what it had of fs-mode files is copied from where else it
    /// is.
    pub repair_after: Interval,
    /// Blocks copied from worker to worker at a time.
    pub repair_concurrency: usize,
    /// What one client may have at once, by the identity in its certificate: connections, sessions and calls;
    pub client_connections: usize,
    pub client_sessions: usize,
    pub client_calls: usize,
    /// and operations in a second; 0 for any number.
    pub client_operations_per_second: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Worker {
    /// Data plane, host:port.
    pub listen: String,
    pub http_listen: String,
    /// Address that clients use; empty for `listen` (or the host's name where that is a wildcard).
    pub advertise: String,
    /// Unix socket for clients of the same host; empty for `worker.sock` in the first directory.
    pub socket: PathBuf,
    /// Members of this group may connect to it as well; empty for none. A name of this host, or a number.
    pub socket_group: String,
    /// `[TIER:CAPACITY]/path`; tiers MEM, SSD, HDD; without capacity: what the file system has.
    pub dirs: Vec<String>,
    /// Those that are not there are made, and those that have lost what the worker had in them are begun anew.
    pub create_dirs: bool,
    /// File with the key that the keys of the directories are encrypted with; with one, blocks are encrypted on disk.
    pub key_encryption_key: PathBuf,
    /// The one before, until all directories have been opened with the present one.
    pub former_key_encryption_key: PathBuf,
    /// As that of the master.
    pub audit_log: String,
    /// Fractions of a directory's capacity: eviction starts above the one and stops below the other.
    pub high_watermark: f64,
    pub low_watermark: f64,
    /// What the cached blocks of one mount may take of each directory, in percent of its capacity: 1 to 100. A mount
    /// may have `fill_size_max` in any case.
    pub mount_cache_share: u32,
    /// RocksDB block cache of the block index, per directory.
    pub index_cache: ByteSize,
    /// Buffers of fills and of answers over the network.
    pub memory_budget: ByteSize,
    /// GETs in flight at most, over all buckets.
    pub fill_concurrency: usize,
    /// Largest single ranged GET.
    pub fill_size_max: ByteSize,
    /// Checksums verified in the background, per second; "0B" switches the scrubber off.
    pub scrub_rate: ByteSize,
    /// Blocks of fs-mode mounts that no file has are freed when nobody has written to them for so long.
    pub unclaimed_after: Interval,
    /// Blocks that one client has made over the network, by the identity in its certificate, and that no file has yet
    /// take so much at most; 0 for a quarter of the capacity.
    pub client_reserved: ByteSize,
    /// The same of all clients in one mount; 0 for half of the capacity.
    pub mount_reserved: ByteSize,
    /// Such blocks are freed when no file has them after so long.
    pub reserved_after: Interval,
    /// Connections that one client may have at once, by the identity in its certificate,
    pub client_connections: usize,
    /// and what it may read and write over them in a second; 0 for any number.
    pub client_bytes_per_second: ByteSize,
}

/// How buckets are spoken to, by every process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ufs {
    pub connect_timeout: Interval,
    /// One request, without its body.
    pub request_timeout: Interval,
    /// Longest pause inside a body. A store may take five times as long for each part of an object that it puts
    /// together.
    pub io_timeout: Interval,
    pub retries: usize,
    pub retry_backoff: Interval,
    pub retry_backoff_max: Interval,
    /// Requests in flight per bucket and process.
    pub concurrency: usize,
    /// Directories in which those of `file://` mounts must lie; none: there are no such mounts.
    pub file_roots: Vec<PathBuf>,
    /// Endpoints at loopback and link-local addresses that may be connected to all the same:
    /// [`AllowedEndpoint`](crate::AllowedEndpoint).
    pub endpoints: Vec<String>,
    /// Whether mounts may use the credentials of the instance or container that the process runs in.
    pub instance_credentials: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    /// Buffers of the whole process: of what is read, read ahead, uploaded and written behind.
    pub memory_budget: ByteSize,
    pub connect_timeout: Interval,
    /// One question to the masters, retries included.
    pub metadata_timeout: Interval,
    /// One change, retries included.
    pub change_timeout: Interval,
    /// Of which mounts names are asked of the bucket while no master answers.
    pub outage_lookups: OutageLookups,
    /// Whether `cv fuse` answers changes in directories that it made before the master has them.
    pub hold_directories: bool,
    /// One read, write or sync of a file, every fallback included; then EIO.
    pub read_timeout: Interval,
    /// A read whose bucket does not answer, or too slowly, as long as that is longer.
    pub bucket_timeout: Interval,
    /// One attempt at one worker; then the next source.
    pub worker_timeout: Interval,
    /// A worker that failed is left alone for this long, doubling up to the second.
    pub worker_backoff: Interval,
    pub worker_backoff_max: Interval,
    /// Largest read-ahead window of one handle.
    pub readahead_max: ByteSize,
    /// What may be on its way to workers over the network behind its writers, of the memory budget and a quarter of it
    /// at most; 0 for nothing.
    pub write_behind: ByteSize,
    /// Inodes (and their names) kept in the client metadata cache at most.
    pub metadata_cache_entries: usize,
    /// Idle descriptors of block files kept at most.
    pub descriptor_cache: usize,
    /// Share of reads that may be sent twice, in percent; 0 for no hedging.
    pub hedge_percent: u32,
    /// Read from a worker's Unix socket where that can be reached.
    pub local_descriptors: bool,
    /// Where files of cache-mode mounts lie while they are written, and how much of them at a time.
    pub staging_directory: PathBuf,
    pub staging_size: ByteSize,
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
#[serde(from = "AutoOrSwitch", into = "AutoOrSwitch")]
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

#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "must be \"auto\", true or false")]
enum AutoOrSwitch {
    Switch(bool),
    Word(Word),
}

/// In the environment a switch is a word, too.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Auto,
    True,
    False,
}

impl From<AutoOrSwitch> for Choice {
    fn from(written: AutoOrSwitch) -> Self {
        match written {
            AutoOrSwitch::Word(Word::Auto) => Self::Auto,
            AutoOrSwitch::Switch(true) | AutoOrSwitch::Word(Word::True) => Self::On,
            AutoOrSwitch::Switch(false) | AutoOrSwitch::Word(Word::False) => Self::Off,
        }
    }
}

impl From<Choice> for AutoOrSwitch {
    fn from(choice: Choice) -> Self {
        match choice {
            Choice::Auto => Self::Word(Word::Auto),
            Choice::On => Self::Switch(true),
            Choice::Off => Self::Switch(false),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fuse {
    pub mount_point: PathBuf,
    pub http_listen: String,
    /// Namespace path shown at the mount point.
    pub path: String,
    /// Event loops.
    pub threads: usize,
    pub kernel_metadata_cache: bool,
    pub client_metadata_cache: bool,
    /// Longest time the kernel may trust a name, attributes, and the absence of a name; shortened to half of a mount's
    /// metadata_ttl.
    pub entry_timeout: Interval,
    pub attr_timeout: Interval,
    pub negative_timeout: Interval,
    /// Other users may use the mount.
    pub allow_other: bool,
    /// Owner and permissions shown for objects; -1 (uid, gid) for the process's own.
    pub uid: i64,
    pub gid: i64,
    pub file_mode: u32,
    pub dir_mode: u32,
    /// Kernel read-ahead.
    pub kernel_readahead: ByteSize,
    /// Requests that the kernel may have in flight in the background.
    pub max_background: u16,
    /// No kernel pages kept, no read-ahead: for random one-touch reads.
    pub direct: bool,
    /// Files that are one complete block of a worker on this host are read by the kernel itself: with `Auto` without a
    /// word where that cannot be.
    pub passthrough: Choice,
    /// Files that stay registered with the kernel when nobody has them open, at most: it keeps each of them open.
    pub passthrough_files: usize,
    /// The kernel opens and closes files without asking: for objects that are never replaced.
    pub no_open: Choice,
    /// Files have extended attributes, and access lists.
    pub xattrs: Choice,
    /// The kernel heeds access lists of fs-mode mounts.
    pub posix_acl: bool,
    /// The mount outlives the process that serves it: another one goes on when it dies, or is replaced.
    pub keep_mount: bool,
    /// Requests that take as long are in the trace of the mount.
    pub trace_above: Interval,
}

fn text(value: &str) -> String {
    value.to_owned()
}

impl Default for Cluster {
    fn default() -> Self {
        Self { name: text("cavern"), masters: vec![text("127.0.0.1:7700")] }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { level: text("info"), format: LogFormat::Text }
    }
}

impl Default for Master {
    fn default() -> Self {
        Self {
            listen: text("127.0.0.1:7700"),
            http_listen: text("127.0.0.1:7701"),
            advertise: String::new(),
            data_dir: PathBuf::from("/var/lib/cavern/master"),
            create_dir: false,
            key_encryption_key: PathBuf::new(),
            former_key_encryption_key: PathBuf::new(),
            audit_log: String::new(),
            audit_deletes: false,
            metadata_cache: ByteSize::mib(256),
            snapshot_after: ByteSize::mib(256),
            log_keep: Interval::secs(600),
            log_size_max: ByteSize::gib(1),
            heartbeat: Interval::millis(1000),
            worker_timeout: Interval::millis(5000),
            session_lease: Interval::millis(5000),
            refresh_wait: Interval::millis(1000),
            list_concurrency: 32,
            listing_entries: 50_000_000,
            index_entries: 1_000_000_000,
            load_concurrency: 32,
            persist_delay: Interval::millis(5000),
            persist_concurrency: 64,
            repair_after: Interval::millis(60_000),
            repair_concurrency: 8,
            client_connections: 1024,
            client_sessions: 512,
            client_calls: 4096,
            client_operations_per_second: 0,
        }
    }
}

impl Default for Worker {
    fn default() -> Self {
        Self {
            listen: text("127.0.0.1:7710"),
            http_listen: text("127.0.0.1:7711"),
            advertise: String::new(),
            socket: PathBuf::new(),
            socket_group: String::new(),
            dirs: vec![text("[SSD]/var/lib/cavern/worker")],
            create_dirs: false,
            key_encryption_key: PathBuf::new(),
            former_key_encryption_key: PathBuf::new(),
            audit_log: String::new(),
            high_watermark: 0.99,
            low_watermark: 0.98,
            mount_cache_share: 100,
            index_cache: ByteSize::mib(32),
            memory_budget: ByteSize::mib(512),
            fill_concurrency: 64,
            fill_size_max: ByteSize::mib(8),
            scrub_rate: ByteSize::mib(10),
            unclaimed_after: Interval::millis(3_600_000),
            client_reserved: ByteSize::mib(0),
            mount_reserved: ByteSize::mib(0),
            reserved_after: Interval::secs(600),
            client_connections: 512,
            client_bytes_per_second: ByteSize::mib(0),
        }
    }
}

impl Default for Ufs {
    fn default() -> Self {
        Self {
            connect_timeout: Interval::millis(3000),
            request_timeout: Interval::millis(5000),
            io_timeout: Interval::millis(5000),
            retries: 3,
            retry_backoff: Interval::millis(50),
            retry_backoff_max: Interval::millis(2000),
            concurrency: 256,
            file_roots: Vec::new(),
            endpoints: Vec::new(),
            instance_credentials: false,
        }
    }
}

impl Default for Client {
    fn default() -> Self {
        Self {
            memory_budget: ByteSize::mib(512),
            connect_timeout: Interval::millis(1000),
            metadata_timeout: Interval::millis(5000),
            change_timeout: Interval::secs(300),
            outage_lookups: OutageLookups::ReadOnly,
            hold_directories: true,
            read_timeout: Interval::millis(15_000),
            bucket_timeout: Interval::secs(300),
            worker_timeout: Interval::millis(5000),
            worker_backoff: Interval::millis(200),
            worker_backoff_max: Interval::millis(10_000),
            readahead_max: ByteSize::mib(32),
            write_behind: ByteSize::mib(64),
            metadata_cache_entries: 1_000_000,
            descriptor_cache: 16_384,
            hedge_percent: 5,
            local_descriptors: true,
            staging_directory: PathBuf::from("/var/tmp"),
            staging_size: ByteSize::gib(16),
        }
    }
}

impl Default for Fuse {
    fn default() -> Self {
        Self {
            mount_point: PathBuf::from("/mnt/cavern"),
            http_listen: text("127.0.0.1:7721"),
            path: text("/"),
            threads: 2,
            kernel_metadata_cache: true,
            client_metadata_cache: true,
            entry_timeout: Interval::millis(60_000),
            attr_timeout: Interval::millis(60_000),
            negative_timeout: Interval::millis(5000),
            allow_other: true,
            uid: -1,
            gid: -1,
            file_mode: 0o644,
            dir_mode: 0o755,
            kernel_readahead: ByteSize::mib(1),
            max_background: 256,
            direct: false,
            passthrough: Choice::Auto,
            passthrough_files: 131_072,
            no_open: Choice::Auto,
            xattrs: Choice::Auto,
            posix_acl: true,
            keep_mount: true,
            trace_above: Interval::millis(10),
        }
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

//! A whole cluster in a temporary directory, gone with the test.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{FAILPOINTS_VARIABLE, Failpoint};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::process::Signal;
use serde::Deserialize;

use crate::http::{HttpAnswer, Https, http_get};
use crate::process::send;
use crate::s3::{S3, S3Admin};
use crate::wait::{eventually, within};

/// The line of [`COUNTED`] that counts; other configurations have it with more below `[client]`.
const HEDGED_NEVER: &str = "hedge_percent = 0";

/// The configuration of a test that counts what the bucket is asked for: clients ask once for each thing, however long
/// that takes.
pub const COUNTED: &str = "[client]\nhedge_percent = 0\n";

/// What the cluster of a test is like.
pub struct Options {
    /// 1, 3 or 5.
    pub masters: usize,
    pub workers: usize,
    /// Mounts beside the first, each with a FUSE client of its own: names of directories in the cluster's.
    pub more_mounts: Vec<&'static str>,
    /// The configuration of all processes, TOML.
    pub conf: String,
    /// Endpoints of this host that mounts may lead to, beside the cluster's own object store.
    pub endpoints: Vec<&'static str>,
    /// Processes show each other certificates.
    pub secure: bool,
    /// Processes can be made to die where the test wants it: [`Cluster::arm`].
    pub failpoints: bool,
    /// Instead of the executable under test, until a process is started again by [`Cluster::start`].
    pub program: Option<PathBuf>,
    /// Directories of control groups that all processes start in: those of a [`ControlGroup`](crate::ControlGroup).
    pub groups: Vec<PathBuf>,
    /// A process that ends by itself is started again, as it is outside of tests. Most of them want to see what happens
    /// meanwhile.
    pub restart: bool,
    /// The death of what serves a mount is not that of the mount (`fuse.supervised`), as it is outside of tests. With
    /// `CAVERN_SUPERVISED=0` in the environment it is where a test does not say otherwise.
    pub supervised: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            masters: 1,
            workers: 1,
            more_mounts: vec![],
            conf: String::new(),
            endpoints: vec!["127.0.0.1"],
            secure: false,
            failpoints: false,
            program: None,
            groups: vec![],
            restart: false,
            supervised: std::env::var("CAVERN_SUPERVISED").map_or(true, |keeps| keeps != "0"),
        }
    }
}

/// `cv local status --json`, as far as tests read it.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    pub conf: PathBuf,
    pub mount_point: PathBuf,
    pub mounted: bool,
    pub s3: S3Status,
    pub masters: Vec<Child>,
    pub workers: Vec<Child>,
    pub fuse: Vec<Child>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct S3Status {
    #[serde(flatten)]
    pub child: Child,
    pub endpoint: String,
    /// The port for statistics and faults; `None` where it has none.
    pub admin: Option<String>,
    pub admin_token: Option<PathBuf>,
    pub access_key: String,
    pub secret_key: String,
    pub root: PathBuf,
}

/// One process. Addresses are `host:port`, and empty where a role has no such port.
#[derive(Clone, Debug, Deserialize)]
pub struct Child {
    pub pid: Option<i32>,
    /// `running`, `stopped` or `crashed`.
    pub state: String,
    #[serde(default)]
    pub restarts: u32,
    /// How long it is until it is started again; `None` when it is not.
    pub next_try_ms: Option<u64>,
    #[serde(default)]
    pub supervised: bool,
    pub log: PathBuf,
    #[serde(default)]
    pub grpc: String,
    #[serde(default)]
    pub data: String,
    /// Of one of several masters that run: `leader`, `follower` and others.
    pub role: Option<String>,
    #[serde(default)]
    pub http: String,
    #[serde(default)]
    pub socket: PathBuf,
    #[serde(default)]
    pub dirs: Vec<PathBuf>,
    #[serde(default)]
    pub mount_point: PathBuf,
}

impl Child {
    /// What its HTTP port answers, with the token of its cluster where it takes one.
    pub fn page(&self, path: &str) -> io::Result<HttpAnswer> {
        match self.https() {
            Some(https) => https.get(&self.http, path),
            None => http_get(&format!("http://{}{path}", self.http)),
        }
    }

    /// How its HTTP port is asked, if connections are secured.
    fn https(&self) -> Option<Https> {
        let certificates = self.log.parent()?.parent()?.join("certificates");
        let token = fs::read_to_string(certificates.join("http-token")).ok()?;
        let authority = certificates.join("ca.pem");
        Some(Https { authority, token: Some(token.trim().to_owned()), certificate: None })
    }

    /// The sum of all samples of a process's metrics page whose name and labels begin so; `None` while it does not
    /// answer, or has none.
    pub fn metric(&self, begins: &str) -> Option<u64> {
        let page = self.page("/metrics").ok()?.body;
        let samples = page.lines().filter(|line| line.starts_with(begins));
        let values = samples.map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.map(|value| value.map(|value| value as u64)).reduce(|sum, value| Some(sum? + value?))?
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; -1 when a signal ended it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// The standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// A running cluster.
pub struct Cluster {
    pub s3: S3,
    /// As it was when the cluster came up; `status` asks anew.
    pub at_start: Status,
    directory: PathBuf,
    /// Where points are armed.
    failpoints: Option<PathBuf>,
    _ports: Vec<UnixListener>,
}

impl Cluster {
    /// Starts a cluster; the mount is usable when this returns.
    #[track_caller]
    pub fn up(options: Options) -> Self {
        // In the system's directory for temporary files, whose path is short enough for the sockets of the workers.
        let top = tempfile::Builder::new().prefix("cavern-test-").tempdir().unwrap().keep();
        // Others than the owner may pass, as in the directory of a user.
        fs::set_permissions(&top, fs::Permissions::from_mode(0o755)).unwrap();
        // A cluster begins in a directory of its own.
        let directory = top.join("cluster");
        // Whatever fails from here on, the guard stops what has been started.
        let guard = Guard(directory.clone());
        let conf = top.join("conf.toml");
        fs::write(&conf, &options.conf).unwrap();
        let failpoints = options.failpoints.then(|| top.join("failpoints"));
        if let Some(failpoints) = &failpoints {
            fs::create_dir(failpoints).unwrap();
            fs::set_permissions(failpoints, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let restart = if options.restart { "on-failure" } else { "never" };
        let program = options.program.clone().unwrap_or_else(cv_path);
        let mut command = cv_command_in(&options.groups, &program);
        command.args(["local", "up", "--json", "--restart", restart]);
        command.envs(failpoints.iter().map(|failpoints| (FAILPOINTS_VARIABLE, failpoints)));
        if options.program.is_none() {
            command.env("CV_FUSE__SUPERVISED", options.supervised.to_string());
            command.env("CV_UFS__ENDPOINTS", format!("{:?}", options.endpoints));
            command.arg("--s3-admin");
        }
        command.arg("--dir").arg(&directory).arg("--conf").arg(&conf);
        command.arg("--masters").arg(options.masters.to_string()).arg("--workers").arg(options.workers.to_string());
        command.arg("--mount-point").arg(directory.join("mnt"));
        if options.secure {
            command.arg("--secure");
        }
        for name in options.more_mounts {
            command.arg("--mount-point").arg(directory.join(name));
        }
        let up = finish(command);
        assert_eq!(up.code, 0, "cv local up: {}{}", up.stdout, up.stderr);
        let status: Status =
            serde_json::from_str(&up.stdout).unwrap_or_else(|error| panic!("{error} in {}", up.stdout));
        let S3Status { endpoint, access_key, secret_key, .. } = &status.s3;
        let admin = S3Admin { url: status.s3.admin.clone().unwrap_or_default(), token: status.s3.admin_token.clone() };
        let s3 = S3::new(endpoint, admin, access_key, secret_key, !options.conf.contains(HEDGED_NEVER));
        std::mem::forget(guard);
        Self { s3, directory, failpoints, _ports: set_aside(&status), at_start: status }
    }

    /// Where the cluster keeps everything.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The first mount point.
    pub fn mount_point(&self) -> &Path {
        &self.at_start.mount_point
    }

    /// A path below the first mount point.
    pub fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.at_start.mount_point.join(below)
    }

    #[track_caller]
    pub fn status(&self) -> Status {
        let status = self.local("status", &["--json"]);
        serde_json::from_str(&status.stdout).unwrap_or_else(|error| panic!("{error} in {status:?}"))
    }

    /// Runs `cv` against this cluster and answers whatever came out.
    pub fn try_cv(&self, arguments: &[&str]) -> Finished {
        finish(self.command(arguments))
    }

    /// Runs `cv` against no cluster, and answers whatever came out.
    pub fn alone(arguments: &[&str], environment: &[(&str, &str)]) -> Finished {
        let mut command = cv_command(&cv_path(), arguments);
        command.envs(environment.iter().copied());
        finish(command)
    }

    /// `cv` against this cluster, for a test that does something while it runs.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = cv_command(&cv_path(), arguments);
        command.env("CV_CONF", &self.at_start.conf);
        // For processes that it starts.
        command.envs(self.failpoints.iter().map(|failpoints| (FAILPOINTS_VARIABLE, failpoints)));
        command
    }

    /// Runs `cv` against this cluster; panics unless it succeeds.
    #[track_caller]
    pub fn cv(&self, arguments: &[&str]) -> Finished {
        let finished = self.try_cv(arguments);
        assert_eq!(finished.code, 0, "cv {}: {}{}", arguments.join(" "), finished.stdout, finished.stderr);
        finished
    }

    /// Mounts `uri` of the cluster's object store at `path`, waiting until the FUSE clients show it.
    #[track_caller]
    pub fn mount(&self, uri: &str, path: &str, more: &[&str]) {
        self.mount_from(&self.bucket_options(), uri, path, more);
    }

    /// Mounts `uri` of the object store that `options` (`-c`) reach, waiting as [`Self::mount`] does.
    #[track_caller]
    pub fn mount_from(&self, options: &[String], uri: &str, path: &str, more: &[&str]) {
        self.mount_as("cache_mode", options, uri, path, more);
    }

    /// Mounts `uri` of the cluster's object store at `path` in fs-mode, waiting as [`Self::mount`] does.
    #[track_caller]
    pub fn mount_fs_mode(&self, uri: &str, path: &str, options: &[&str]) {
        self.mount_as("fs_mode", &self.bucket_options(), uri, path, options);
    }

    #[track_caller]
    fn mount_as(&self, write_type: &str, options: &[String], uri: &str, path: &str, more: &[&str]) {
        let mut arguments = vec!["mount", uri, path, "--write-type", write_type];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        arguments.extend(more);
        self.cv(&arguments);
        for fuse in &self.at_start.fuse {
            let shown = fuse.mount_point.join(path.trim_start_matches('/'));
            eventually(&format!("{} appears", shown.display()), Duration::from_secs(60), || {
                let shown = shown.clone();
                within("a stat on the mount", Duration::from_secs(30), move || shown.is_dir()).then_some(())
            });
        }
    }

    /// The options (`-c`) that reach the cluster's object store.
    pub fn bucket_options(&self) -> Vec<String> {
        vec![
            format!("s3.endpoint_url={}", self.s3.endpoint),
            "s3.region_name=us-east-1".to_owned(),
            format!("s3.credentials.access={}", self.s3.access_key),
            format!("s3.credentials.secret={}", self.s3.secret_key),
        ]
    }

    /// Fills a bucket (made if need be) with `count` objects of random bytes, of 0.5 to 1.5 times `mean_bytes`, in
    /// folders of 100 below `prefix`: `prefix0001/000123.bin`. The same arguments give the same bytes.
    #[track_caller]
    pub fn seed(&self, bucket: &str, prefix: &str, count: usize, mean_bytes: usize) -> BTreeMap<String, Bytes> {
        self.s3.create_bucket(bucket);
        let mut random = StdRng::seed_from_u64(count as u64 ^ mean_bytes as u64);
        let mut tree = BTreeMap::new();
        for index in 0..count {
            let mut content = vec![0; random.random_range(mean_bytes / 2..=mean_bytes + mean_bytes / 2)];
            random.fill_bytes(&mut content);
            let key = format!("{prefix}{:04}/{index:06}.bin", index / 100);
            let content = Bytes::from(content);
            self.s3.put(bucket, &key, content.clone());
            tree.insert(key, content);
        }
        tree
    }

    /// Reads every object of `tree` through the first mount, at `below` in place of the key's `prefix`, and compares
    /// every byte.
    #[track_caller]
    pub fn assert_tree(&self, below: &str, prefix: &str, tree: &BTreeMap<String, Bytes>) {
        for (key, content) in tree {
            let path = self.path(below).join(key.strip_prefix(prefix).expect("every key has the prefix"));
            let read = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(read == *content, "{}: {} bytes, wrong content", path.display(), read.len());
        }
    }

    /// SIGKILL for a child: `worker0`, `master`, `fuse`, `s3`.
    #[track_caller]
    pub fn kill(&self, child: &str) {
        self.local("kill", &[child]);
    }

    /// SIGTERM for a child, and waits for its end.
    #[track_caller]
    pub fn stop(&self, child: &str) {
        self.local("stop", &[child]);
    }

    /// Starts a child again; it is ready when this returns.
    #[track_caller]
    pub fn start(&self, child: &str) {
        self.local("start", &[child]);
    }

    /// Gives the object store another secret key, as when keys are rotated: whoever has the old one is refused from now
    /// on.
    #[track_caller]
    pub fn change_secret_key(&mut self, secret_key: &str) {
        self.stop("s3");
        let path = self.directory.join("cluster.json");
        let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        record["s3"]["secret_key"] = secret_key.into();
        fs::write(&path, record.to_string()).unwrap();
        self.start("s3");
        self.s3 = self.s3.with_secret_key(secret_key);
    }

    /// Any signal for a running child of the status: TERM and KILL, say.
    #[track_caller]
    pub fn signal(&self, child: &Child, signal: Signal) {
        send(child.pid.expect("the child runs"), signal);
    }

    /// Has the process that passes a point for the `pass`th time from now on die there, as by SIGKILL. Only with
    /// [`Options::failpoints`].
    #[track_caller]
    pub fn arm(&self, point: Failpoint, pass: u32) {
        let armed = self.failpoint(point);
        let _earlier = fs::remove_file(armed.with_extension("hit"));
        // It is read at any time, so it appears whole.
        let whole = armed.with_extension("new");
        fs::write(&whole, pass.to_string()).unwrap();
        fs::rename(whole, armed).unwrap();
    }

    /// Nobody dies there any more, unless somebody has.
    #[track_caller]
    pub fn disarm(&self, point: Failpoint) {
        // Whoever has died has taken it away.
        let _ = fs::remove_file(self.failpoint(point));
    }

    /// Whether a process has died at a point that was armed.
    #[track_caller]
    pub fn has_died_at(&self, point: Failpoint) -> bool {
        self.failpoint(point).with_extension("hit").exists()
    }

    #[track_caller]
    fn failpoint(&self, point: Failpoint) -> PathBuf {
        self.failpoints.as_ref().expect("the cluster has failpoints").join(point.name())
    }

    #[track_caller]
    fn local(&self, what: &str, arguments: &[&str]) -> Finished {
        let mut command = cv_command(&cv_path(), &["local", what]);
        command.envs(self.failpoints.iter().map(|failpoints| (FAILPOINTS_VARIABLE, failpoints)));
        command.args(arguments).arg("--dir").arg(&self.directory);
        let finished = finish(command);
        assert_eq!(finished.code, 0, "cv local {what}: {}{}", finished.stdout, finished.stderr);
        finished
    }

    /// The ends of all logs, for a test that is about to fail.
    pub fn logs(&self) -> String {
        logs(&self.directory)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(Guard(self.directory.clone()));
    }
}

/// Stops the cluster in a directory, and removes it with what lies beside it.
struct Guard(PathBuf);

impl Drop for Guard {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", logs(&self.0));
        }
        let mut command = cv_command(&cv_path(), &["local", "down", "--dir"]);
        command.arg(&self.0);
        let down = finish(command);
        if down.code == 0 {
            // Nothing is mounted below any more.
            let _ = fs::remove_dir_all(self.0.parent().unwrap_or(&self.0));
        } else if !thread::panicking() {
            panic!("cv local down: {}{}", down.stdout, down.stderr);
        }
    }
}

fn logs(directory: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(directory.join("log")).into_iter().flatten().flatten() {
        let log = fs::read_to_string(entry.path()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n");
        text.push_str(&format!("---- {}\n{tail}\n", entry.file_name().to_string_lossy()));
    }
    text
}

fn cv_command(program: &Path, arguments: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new(program);
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("CV_")) {
        command.env_remove(key);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// What is started in these control groups, without arguments yet. No one else may be in this process when it enters
/// them, so a shell does, and becomes the program.
fn cv_command_in(groups: &[PathBuf], program: &Path) -> Command {
    const ENTER: &str =
        "for group in $CONTROL_GROUPS; do echo $$ >$group/cgroup.procs || exit 1; done; exec \"$0\" \"$@\"";
    let Some(groups) = groups.iter().map(|group| group.to_str()).collect::<Option<Vec<_>>>() else {
        panic!("the names of {groups:?} are no text");
    };
    if groups.is_empty() {
        return cv_command(program, &[] as &[&str]);
    }
    let mut command = cv_command(Path::new("/bin/sh"), &[OsStr::new("-c"), OsStr::new(ENTER), program.as_os_str()]);
    command.env("CONTROL_GROUPS", groups.join(" "));
    command
}

/// The executable under test.
pub fn cv_path() -> PathBuf {
    let path = std::env::var_os("CV_BIN").map_or_else(
        || std::env::current_exe().unwrap().parent().and_then(Path::parent).unwrap().join("cv"),
        PathBuf::from,
    );
    assert!(path.exists(), "{} is missing: cargo build --release -p cavern", path.display());
    path
}

fn finish(mut command: Command) -> Finished {
    let output = command.output().unwrap();
    Finished {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Keeps the ports of a cluster from being given to another one while a process of it is stopped: `cv local up` sets
/// ports aside by sockets of these names.
fn set_aside(status: &Status) -> Vec<UnixListener> {
    let children = status.masters.iter().chain(&status.workers).chain(&status.fuse);
    let addresses = children.flat_map(|child| [&child.grpc, &child.data, &child.http]);
    let of_store = [&status.s3.endpoint].into_iter().chain(&status.s3.admin);
    let names =
        addresses.chain(of_store).filter_map(|address| Some(format!("cavern-port-{}", address.rsplit_once(':')?.1)));
    names.filter_map(|name| UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).ok()).collect()
}

//! Hosts on this machine: a network namespace each, joined by a bridge in one more, and an object store beside them.
//!
//! Nothing of it is visible in the machine's own network. The processes of a host live in a process namespace whose
//! first one ends with the test, and take their mounts with them.

mod console;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;

use crate::cluster::cv_path;
use crate::s3::{S3, S3Admin};
use crate::wait::eventually;
use console::{Console, quoted};

/// Names of namespaces begin with it, and with the number of the test's process.
const PREFIX: &str = "cavern-hosts-";
const PATIENCE: Duration = Duration::from_secs(60);
/// As `docs/hosts.md` has them.
const KEYS: (&str, &str) = ("access-of-the-guide", "secret-of-the-guide");
/// What programs on a host find in their environment.
const ENVIRONMENT: [(&str, &str); 2] = [("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"), ("HOME", "/root")];

/// Hosts, and what is between them. Dropping it ends all that runs on them.
pub struct Network {
    /// Namespaces that were made.
    namespaces: Vec<String>,
    bridge: Namespace,
    /// Of the hosts and of the object store, in this order.
    places: BTreeMap<String, Place>,
    hosts: BTreeMap<String, Host>,
    store: Option<Child>,
    console: Console,
    /// What the hosts find at `/src`, and their roots.
    top: TempDir,
}

/// A network namespace.
#[derive(Clone, Debug)]
pub struct Namespace(String);

/// Where a host is in the network.
struct Place {
    namespace: Namespace,
    /// The end of its cable at the bridge.
    port: String,
}

struct Host {
    /// Waits for the first process of the host, which ends with it.
    holder: Child,
    first: i32,
}

impl Network {
    /// Hosts of these names and addresses, and an object store with a bucket on one more. It listens on port 9000.
    #[track_caller]
    pub fn new(hosts: &[(&str, &str)], (store, store_address): (&str, &str), bucket: &str) -> Self {
        remove_leftovers();
        let top = tempfile::Builder::new().prefix("cavern-test-").tempdir().unwrap();
        let console = Console::start(ended_with_test(), top.path());
        let bridge = Namespace(format!("{PREFIX}{}-bridge", std::process::id()));
        let (places, hosts_up) = (BTreeMap::new(), BTreeMap::new());
        let mut network = Self { namespaces: vec![], bridge, places, hosts: hosts_up, store: None, console, top };
        network.prepare_source();
        let bridge = network.add_namespace("bridge");
        ip(&["-n", &bridge, "link", "add", "br0", "type", "bridge"]);
        ip(&["-n", &bridge, "link", "set", "br0", "up"]);
        for (number, (name, address)) in hosts.iter().chain([&(store, store_address)]).enumerate() {
            let (namespace, port) = (network.add_namespace(&number.to_string()), format!("p{number}"));
            ip(&["link", "add", &port, "netns", &bridge, "type", "veth", "peer", "name", "eth0", "netns", &namespace]);
            ip(&["-n", &bridge, "link", "set", &port, "master", "br0", "up"]);
            ip(&["-n", &namespace, "address", "add", &format!("{address}/24"), "dev", "eth0"]);
            ip(&["-n", &namespace, "link", "set", "eth0", "up"]);
            let place = Place { namespace: Namespace(namespace.clone()), port };
            network.places.insert((*name).to_owned(), place);
            if *name == store {
                network.start_store(&namespace, bucket);
            } else {
                network.start_host(name, &namespace);
            }
        }
        network
    }

    fn add_namespace(&mut self, role: &str) -> String {
        let namespace = format!("{PREFIX}{}-{role}", std::process::id());
        ip(&["netns", "add", &namespace]);
        self.namespaces.push(namespace.clone());
        namespace
    }

    fn source(&self) -> PathBuf {
        self.top.path().join("src")
    }

    /// The executable, what the repository has in `etc`, and what stands in for systemd.
    fn prepare_source(&self) {
        let (source, repository) = (self.source(), Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
        fs::create_dir_all(&source).unwrap();
        // Every host has a copy in memory, and needs no symbols.
        good(Command::new("strip").arg("-o").arg(source.join("cv")).arg(cv_path()));
        for folder in ["etc/systemd", "etc/package"] {
            fs::create_dir_all(source.join(folder)).unwrap();
            for file in fs::read_dir(repository.join(folder)).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), source.join(folder).join(file.file_name())).unwrap();
            }
        }
        fs::copy(repository.join("tests/e2e/hosts/systemctl"), source.join("systemctl")).unwrap();
    }

    fn start_store(&mut self, namespace: &str, bucket: &str) {
        let root = self.top.path().join("objects");
        let serve = |command: &mut Command, listen: &str| {
            command.arg("dev-s3").arg("--root").arg(&root).arg("--listen").arg(listen);
            command.env("CV_DEV_S3_ACCESS_KEY", KEYS.0).env("CV_DEV_S3_SECRET_KEY", KEYS.1);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
        };
        // Where it listens, once it does.
        let endpoint = |store: &mut Child| {
            let mut ready = String::new();
            BufReader::new(store.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
            let endpoint = ready.split_whitespace().find_map(|word| word.strip_prefix("s3=")).map(str::to_owned);
            endpoint.ok_or(ready)
        };
        // The bucket is made from here, where the hosts cannot be reached.
        let mut here = serve(&mut Command::new(cv_path()), "127.0.0.1:0");
        let made = endpoint(&mut here)
            .map(|endpoint| S3::new(&endpoint, S3Admin::default(), KEYS.0, KEYS.1, true).create_bucket(bucket));
        kill_process(pid_of(&here), Signal::TERM).unwrap();
        here.wait().unwrap();
        made.expect("the object store listens");
        let store = self.store.insert(serve(in_namespace(namespace).arg(cv_path()), "0.0.0.0:9000"));
        endpoint(store).expect("the object store listens");
    }

    fn start_host(&mut self, name: &str, namespace: &str) {
        let place = self.top.path().join(name);
        fs::create_dir(&place).unwrap();
        let log = File::create(self.top.path().join(format!("{name}.log"))).unwrap();
        let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/hosts/init");
        let mut command = in_namespace(namespace);
        command.args(["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]);
        command.arg("sh").arg(init).arg(&place).arg(self.source()).arg(name);
        let holder = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", holder.id());
        self.hosts.insert(name.to_owned(), Host { holder, first: 0 });
        let first = eventually(&format!("{name} has its first process"), PATIENCE, || {
            let first: i32 = fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse().ok()?;
            fs::exists(format!("/proc/{first}/root/run/ready")).ok()?.then_some(first)
        });
        self.hosts.get_mut(name).unwrap().first = first;
    }

    /// Runs a line of a shell on a host, where `cv` and `etc` lie; what it printed, or what went wrong.
    pub fn on(&self, host: &str, line: &str) -> Result<String, String> {
        let variables: Vec<String> = ENVIRONMENT.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let enter = self.enter(host).join(" ");
        let line = quoted(&format!("cd /src && {line}"));
        self.console.run(&format!("env -i {} nsenter {enter} sh -c {line}", variables.join(" ")))
    }

    /// Writes a file on a host, with its directory.
    pub fn write(&self, host: &str, path: &str, text: &str, append: bool) {
        let to = if append { ">>" } else { ">" };
        let mut command = self.shell(host, &format!("mkdir -p \"$(dirname {path})\" && cat {to}{path}"));
        let mut writer = command.stdin(Stdio::piped()).spawn().unwrap();
        writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success(), "{path} on {host}");
    }

    /// The root directory of a host, as this process reaches it.
    pub fn root(&self, host: &str) -> PathBuf {
        format!("/proc/{}/root", self.hosts[host].first).into()
    }

    /// The network of a host, or of the object store.
    pub fn namespace(&self, host: &str) -> Namespace {
        self.places[host].namespace.clone()
    }

    /// The end of a host's cable at the bridge, for [`Self::filter`].
    pub fn port(&self, host: &str) -> &str {
        &self.places[host].port
    }

    /// The client of the object store, for [`Namespace::inside`].
    pub fn s3(address: &str) -> S3 {
        S3::new(&format!("http://{address}:9000"), S3Admin::default(), KEYS.0, KEYS.1, true)
    }

    /// The keys of the object store: access and secret.
    pub fn keys() -> (&'static str, &'static str) {
        KEYS
    }

    /// Replaces the rules (of `nft`) by which a host takes packets, or the bridge passes them on (`None`).
    #[track_caller]
    pub fn filter(&self, host: Option<&str>, rules: &str) {
        let namespace = host.map_or(&self.bridge, |host| &self.places[host].namespace);
        let file = self.top.path().join("rules");
        fs::write(&file, format!("flush ruleset\n{rules}\n")).unwrap();
        let command = format!("ip netns exec {} nft -f {}", namespace.0, quoted(file.to_str().unwrap()));
        self.console.run(&command).unwrap_or_else(|error| panic!("{rules}: {error}: run bin/setup --tests"));
    }

    fn shell(&self, host: &str, line: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(self.enter(host)).args(["sh", "-c", line]).env_clear().current_dir("/").envs(ENVIRONMENT);
        command
    }

    /// What `nsenter` takes for a host.
    fn enter(&self, host: &str) -> Vec<String> {
        let target = format!("--target={}", self.hosts[host].first);
        [&target, "--net", "--mount", "--uts", "--pid", "--root", "--wd"].map(str::to_owned).to_vec()
    }
}

impl Namespace {
    /// Moves the calling thread there, and threads that it starts from then on: a socket belongs to the network of the
    /// thread that made it.
    #[track_caller]
    pub fn enter(&self) {
        let namespace = File::open(Path::new("/run/netns").join(&self.0)).unwrap();
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    /// Does something on a thread that is there.
    #[track_caller]
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let there = || {
            self.enter();
            work()
        };
        thread::scope(|scope| scope.spawn(there).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in self.hosts.keys().filter(|host| self.hosts[*host].first != 0) {
                let logs = self.on(host, "tail -n 40 /var/log/cavern-*.log");
                eprintln!("---- {host}\n{}", logs.unwrap_or_else(|failure| failure));
            }
        }
        for host in self.hosts.values().filter(|host| host.first != 0) {
            abort_mounts(host.first);
        }
        for child in self.hosts.values_mut().map(|host| &mut host.holder).chain(&mut self.store) {
            let _ended = child.kill();
            let _ended = child.wait();
        }
        for namespace in &self.namespaces {
            remove(namespace);
        }
    }
}

/// Ends the FUSE mounts of a host. A client that is killed while it tells the kernel of a change waits in the kernel
/// for a call that itself waits for the client: neither would end, nor would the host.
fn abort_mounts(first: i32) {
    let mounts = fs::read_to_string(format!("/proc/{first}/mountinfo")).unwrap_or_default();
    for mount in mounts.lines().filter(|mount| mount.contains(" - fuse.")) {
        let device = mount.split(' ').nth(2).and_then(|device| device.split_once(':'));
        if let Some((_, minor)) = device {
            // One that has ended is as good.
            let _ended = fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1");
        }
    }
}

/// Namespaces of test processes that are gone, and could not tidy up.
fn remove_leftovers() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
            remove(&name);
        }
    }
}

fn remove(namespace: &str) {
    // One that is gone already is as good.
    let _gone = Command::new("ip").args(["netns", "delete", namespace]).output();
}

/// A program in a namespace, which is killed when the thread of the test is gone.
fn in_namespace(namespace: &str) -> Command {
    let mut command = ended_with_test();
    command.args(["ip", "netns", "exec", namespace]);
    command
}

fn ended_with_test() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    command
}

fn ip(arguments: &[&str]) {
    good(Command::new("ip").args(arguments));
}

fn good(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}: run bin/setup --tests"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

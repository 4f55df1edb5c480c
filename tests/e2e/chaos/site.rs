//! The cluster: three masters, three workers and two clients, a host each, and an object store.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use cavern_proto::raft::Group;
use cavern_security::Transport;
use cavern_tests::{Network, ask_masters, eventually, leading_master, masters_agree};
use serde_json::Value;

use crate::bucket::Bucket;
use crate::model::Digest;

pub const MASTERS: [&str; 3] = ["master0", "master1", "master2"];
pub const WORKERS: [&str; 3] = ["worker0", "worker1", "worker2"];
pub const CLIENTS: [&str; 2] = ["client0", "client1"];
pub const MASTER_PORT: u16 = 7700;

const STORE: (&str, &str) = ("store", "10.77.0.5");
const BUCKET: &str = "chaos";
/// Where images and files are, in the bucket and in the namespace.
pub const IMAGES: &str = "images";
pub const FILES: &str = "files";
/// What is waited for at most: an election, a process that starts, or the bucket, on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Each master has a disk of its own, which a test can fill.
const DISK: &str = "mkdir -p /var/lib/cavern/master && mount -t tmpfs -o size=256m,mode=700 disk \
    /var/lib/cavern/master";

/// How long a call may wait is not the point here, on a machine that is busy; but some calls are to fail in the end, if
/// only reads of the bucket.
const CONF: &str = "\
[cluster]\nname = \"chaos\"\nmasters = [\"10.77.0.10:7700\", \"10.77.0.11:7700\", \"10.77.0.12:7700\"]\n\
[security]\ninsecure = true\n\
[master]\nlisten = \"0.0.0.0:7700\"\npersist_delay = \"1s\"\n\
[worker]\nlisten = \"0.0.0.0:7710\"\n\
[client]\nmetadata_timeout = \"15s\"\nread_timeout = \"15s\"\nbucket_timeout = \"45s\"\n\
[fuse]\nmount_point = \"/mnt/cavern\"\n";

pub struct Site {
    pub network: Network,
}

impl Site {
    /// Returns when both clients show both mounts.
    pub fn start(images: &BTreeMap<String, Vec<u8>>) -> Self {
        let hosts = hosts();
        let hosts: Vec<(&str, &str)> = hosts.iter().map(|(name, address)| (*name, address.as_str())).collect();
        let site = Self { network: Network::new(&hosts, STORE, BUCKET) };
        let names: String = hosts.iter().map(|(name, address)| format!("{address} {name}\n")).collect();
        let level = std::env::var("CAVERN_CHAOS_LOG").unwrap_or("info".to_owned());
        for (host, _) in &hosts {
            site.network.write(host, "/etc/hosts", &names, true);
            site.network.write(host, "/etc/cavern/cluster.toml", &format!("{CONF}[log]\nlevel = \"{level}\"\n"), false);
            site.on(host, "ln -s /src/cv /usr/bin/cv && cp etc/systemd/cavern-*.service /etc/systemd/system/");
            site.on(host, "install -m 755 -D -t /usr/libexec/cavern etc/systemd/hold-mount");
        }
        site.network.namespace(CLIENTS[0]).inside(|| {
            let s3 = Network::s3(STORE.1);
            images.iter().for_each(|(key, content)| drop(s3.put(BUCKET, &format!("{IMAGES}/{key}"), content.clone())));
        });
        MASTERS.iter().for_each(|host| drop(site.on(host, DISK)));
        let units = [(&MASTERS[..], "cavern-master"), (&WORKERS, "cavern-worker"), (&CLIENTS, "cavern-fuse")];
        for (hosts, unit) in units {
            hosts.iter().for_each(|host| site.begin(host, unit));
        }
        site.masters_agree();
        site.workers_live();
        let (access, secret) = Network::keys();
        let keys = format!("AWS_ACCESS_KEY_ID={access}\nAWS_SECRET_ACCESS_KEY={secret}\n");
        site.network.write(CLIENTS[0], "/root/keys", &keys, false);
        for (path, options) in
            [(IMAGES, "--write-type cache-mode --metadata-ttl 1s"), (FILES, "--write-type fs-mode --replicas 2")]
        {
            site.attach(path, options);
        }
        site
    }

    /// Mounts a prefix of the bucket; both clients show it when this returns.
    #[track_caller]
    pub fn attach(&self, path: &str, options: &str) {
        let store = format!("-c s3.endpoint_url=http://{}:9000 -c s3.region_name=us-east-1", STORE.1);
        let command = format!("chmod 600 /root/keys && cv mount s3://{BUCKET}/{path} /{path} {options}");
        self.on(CLIENTS[0], &format!("{command} --credentials-file /root/keys {store}"));
        for client in 0..CLIENTS.len() {
            let shown = self.mount(client).join(path);
            eventually(&format!("{} appears", shown.display()), PATIENCE, || shown.is_dir().then_some(()));
        }
    }

    /// Runs a line on a host, which must succeed.
    #[track_caller]
    pub fn on(&self, host: &str, line: &str) -> String {
        self.network.on(host, line).unwrap_or_else(|error| panic!("`{line}` on {host}: {error}"))
    }

    /// Where a client shows the namespace.
    pub fn mount(&self, client: usize) -> PathBuf {
        self.network.root(CLIENTS[client]).join("mnt/cavern")
    }

    #[track_caller]
    pub fn begin(&self, host: &str, unit: &str) {
        self.on(host, &format!("systemctl start {unit}"));
    }

    #[track_caller]
    pub fn signal(&self, host: &str, unit: &str, signal: &str) {
        self.on(host, &format!("kill -{signal} $(cat /run/{unit}.pid)"));
    }

    fn is_running(&self, host: &str, unit: &str) -> bool {
        let alive =
            format!("pid=$(cat /run/{unit}.pid) && [ -d /proc/$pid ] && ! grep -q '^State:.*Z' /proc/$pid/status");
        self.network.on(host, &alive).is_ok()
    }

    /// Whether a master goes on with the others; false when it has ended.
    #[track_caller]
    pub fn goes_on(&self, master: usize, unit: &str) -> bool {
        let mut committed = None;
        eventually("a master goes on, or ends", PATIENCE, || {
            let is_running = self.is_running(MASTERS[master], unit);
            (!is_running || masters_agree(&self.groups(), &mut committed).is_some()).then_some(is_running)
        })
    }

    /// What each master says, asked on its own host: whatever the network is like.
    fn groups(&self) -> Vec<Option<Group>> {
        let addresses = hosts();
        std::thread::scope(|scope| {
            let ask = |(master, address): &(&str, String)| {
                let (host, address) = (self.network.namespace(master), format!("{address}:{MASTER_PORT}"));
                scope.spawn(move || host.inside(|| ask_masters(&[address], &Transport::Plain).remove(0)))
            };
            let asked: Vec<_> = addresses[..MASTERS.len()].iter().map(ask).collect();
            asked.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The number of the master that leads.
    #[track_caller]
    pub fn leader(&self) -> usize {
        eventually("a master leads", PATIENCE, || leading_master(&self.groups()))
    }

    #[track_caller]
    pub fn leader_other_than(&self, number: usize) {
        let another = || leading_master(&self.groups()).filter(|leader| *leader != number);
        eventually("another master leads", PATIENCE, another);
    }

    #[track_caller]
    pub fn masters_agree(&self) {
        let mut committed = None;
        eventually("all masters agree", PATIENCE, || masters_agree(&self.groups(), &mut committed));
    }

    #[track_caller]
    pub fn workers_live(&self) {
        eventually("all workers are live", PATIENCE, || {
            let listed = self.network.on(CLIENTS[0], "cv node list --json").ok()?;
            let nodes: Vec<Value> = serde_json::from_str(&listed).unwrap();
            (nodes.iter().filter(|node| node["state"] == "live").count() == WORKERS.len()).then_some(())
        });
    }

    /// What the bucket has of the fs-mode mount below a directory, once it has everything.
    #[track_caller]
    pub fn objects(&self, directory: &str) -> BTreeMap<String, Digest> {
        self.on(CLIENTS[0], &format!("cv persist wait /{FILES} --timeout {}s", PATIENCE.as_secs()));
        let (access, secret) = Network::keys();
        let options = [
            format!("s3.endpoint_url=http://{}:9000", STORE.1),
            "s3.region_name=us-east-1".to_owned(),
            format!("s3.credentials.access={access}"),
            format!("s3.credentials.secret={secret}"),
        ];
        let prefix = format!("{FILES}/{directory}/");
        let bucket = || Bucket::open(&options, BUCKET).objects_below(&prefix);
        let objects = self.network.namespace(CLIENTS[0]).inside(bucket);
        let below = |(key, content): (String, bytes::Bytes)| {
            let name = key.strip_prefix(&prefix).expect("the listing is of this prefix");
            // The directory itself is an object, too.
            (!name.is_empty()).then(|| (name.to_owned(), Digest::of(&content)))
        };
        objects.into_iter().filter_map(below).collect()
    }

    /// Keeps the logs of all hosts where `CAVERN_CHAOS_LOGS` says.
    pub fn keep_logs(&self) {
        let Some(to) = std::env::var_os("CAVERN_CHAOS_LOGS") else { return };
        for (host, _) in hosts() {
            let from = self.network.root(host).join("var/log");
            for entry in fs::read_dir(from).into_iter().flatten().flatten() {
                let name = entry.file_name().into_string().unwrap_or_default();
                if name.starts_with("cavern-") {
                    let _kept = fs::copy(entry.path(), PathBuf::from(&to).join(format!("{host}.{name}")));
                }
            }
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.keep_logs();
    }
}

/// All hosts with their addresses: masters first.
fn hosts() -> Vec<(&'static str, String)> {
    let numbered = |hosts: &[&'static str], first: usize| {
        let numbered = hosts.iter().enumerate().map(|(number, host)| (*host, format!("10.77.0.{}", first + number)));
        numbered.collect::<Vec<_>>()
    };
    [numbered(&MASTERS, 10), numbered(&WORKERS, 20), numbered(&CLIENTS, 30)].concat()
}

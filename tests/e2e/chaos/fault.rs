//! What is done to the cluster.

use std::fmt;
use std::fs::File;
use std::thread;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use crate::delay::Delay;
use crate::load::Load;
use crate::site::{CLIENTS, FILES, MASTER_PORT, MASTERS, Site, WORKERS};

const MASTER: &str = "cavern-master";
const WORKER: &str = "cavern-worker";
/// The client that is cut off. The other one keeps a lock.
const CUT: usize = 1;
/// Where a proxy is, beside the port of the master.
const PROXY_PORT: u16 = 7799;
/// Less than calls may wait.
const SHORT_CUT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    KillLeader,
    KillFollower,
    FreezeLeader,
    StopLeader,
    TransferLeadership,
    CutLeader,
    /// It is heard, and hears nobody.
    DeafLeader,
    /// It hears everybody, and is not heard.
    MuteLeader,
    CutFollower,
    CutClient,
    /// For longer than calls wait.
    LoseClient,
    Loss,
    Delay,
    FullDiskOfLeader,
    FullDiskOfFollower,
    KillWorker,
    FreezeWorker,
}

impl Fault {
    pub const ALL: [Self; 17] = [
        Self::KillLeader,
        Self::KillFollower,
        Self::FreezeLeader,
        Self::StopLeader,
        Self::TransferLeadership,
        Self::CutLeader,
        Self::DeafLeader,
        Self::MuteLeader,
        Self::CutFollower,
        Self::CutClient,
        Self::LoseClient,
        Self::Loss,
        Self::Delay,
        Self::FullDiskOfLeader,
        Self::FullDiskOfFollower,
        Self::KillWorker,
        Self::FreezeWorker,
    ];

    /// The client whose calls wait because of this, and for nothing else.
    pub fn cut_client(self) -> Option<usize> {
        [Self::CutClient, Self::LoseClient].contains(&self).then_some(CUT)
    }

    /// Does it, has the programs go on meanwhile, and mends it.
    #[track_caller]
    pub fn strike(self, site: &Site, load: &Load, random: &mut StdRng) {
        let leader = site.leader();
        let follower = (leader + random.random_range(1..MASTERS.len())) % MASTERS.len();
        match self {
            Self::KillLeader => {
                site.signal(MASTERS[leader], MASTER, "KILL");
                site.leader_other_than(leader);
                load.go_on();
                site.begin(MASTERS[leader], MASTER);
            }
            Self::KillFollower => {
                site.signal(MASTERS[follower], MASTER, "KILL");
                load.go_on();
                load.go_on();
                site.begin(MASTERS[follower], MASTER);
            }
            Self::FreezeLeader => {
                site.signal(MASTERS[leader], MASTER, "STOP");
                site.leader_other_than(leader);
                load.go_on();
                site.signal(MASTERS[leader], MASTER, "CONT");
            }
            Self::StopLeader => {
                site.on(MASTERS[leader], &format!("systemctl stop {MASTER}"));
                site.leader_other_than(leader);
                load.go_on();
                site.begin(MASTERS[leader], MASTER);
            }
            Self::TransferLeadership => {
                site.on(CLIENTS[0], "cv raft transfer");
                site.leader_other_than(leader);
                load.go_on();
            }
            Self::CutLeader | Self::DeafLeader | Self::MuteLeader => {
                let ways = match self {
                    Self::DeafLeader => [Some("oifname"), None],
                    Self::MuteLeader => [Some("iifname"), None],
                    _ => [Some("oifname"), Some("iifname")],
                };
                cut(site, MASTERS[leader], ways);
                site.leader_other_than(leader);
                load.go_on();
                heal(site);
            }
            Self::CutFollower => {
                cut(site, MASTERS[follower], [Some("oifname"), Some("iifname")]);
                load.go_on();
                heal(site);
            }
            Self::CutClient => {
                cut(site, CLIENTS[CUT], [Some("oifname"), Some("iifname")]);
                // Whoever waits for a lock of the other one goes on later.
                if !load.shares_locks {
                    load.client_goes_on(1 - CUT);
                }
                thread::sleep(SHORT_CUT);
                heal(site);
            }
            Self::LoseClient => {
                load.may_fail(CUT, true);
                // What was answered before is not lost.
                File::open(site.mount(CUT).join(FILES)).unwrap().sync_all().unwrap();
                cut(site, CLIENTS[CUT], [Some("oifname"), Some("iifname")]);
                load.client_goes_on(1 - CUT);
                load.wait("fail where they must", || load.journal.failed(CUT) > 0);
                load.client_goes_on(1 - CUT);
                heal(site);
                // What was under way may still fail.
                load.go_on();
                load.may_fail(CUT, false);
            }
            Self::Loss => {
                let percent = random.random_range(5..=20);
                bridge(site, &format!("numgen random mod 100 < {percent} drop"));
                load.go_on();
                load.go_on();
                heal(site);
            }
            Self::Delay => delay(site, load, Duration::from_millis(random.random_range(10..60))),
            Self::FullDiskOfLeader => fill(site, load, leader),
            Self::FullDiskOfFollower => fill(site, load, follower),
            Self::KillWorker => {
                let worker = WORKERS[random.random_range(0..WORKERS.len())];
                site.signal(worker, WORKER, "KILL");
                load.go_on();
                load.go_on();
                site.begin(worker, WORKER);
                site.workers_live();
            }
            Self::FreezeWorker => {
                let worker = WORKERS[random.random_range(0..WORKERS.len())];
                site.signal(worker, WORKER, "STOP");
                load.go_on();
                site.signal(worker, WORKER, "CONT");
                site.workers_live();
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::KillLeader => "kill -9 of the leader",
            Self::KillFollower => "kill -9 of a follower",
            Self::FreezeLeader => "SIGSTOP of the leader",
            Self::StopLeader => "SIGTERM of the leader",
            Self::TransferLeadership => "cv raft transfer",
            Self::CutLeader => "leader cut off",
            Self::DeafLeader => "leader hears nobody",
            Self::MuteLeader => "leader is not heard",
            Self::CutFollower => "follower cut off",
            Self::CutClient => "client cut off briefly",
            Self::LoseClient => "client cut off",
            Self::Loss => "packets lost",
            Self::Delay => "packets late",
            Self::FullDiskOfLeader => "full disk of the leader",
            Self::FullDiskOfFollower => "full disk of a follower",
            Self::KillWorker => "kill -9 of a worker",
            Self::FreezeWorker => "SIGSTOP of a worker",
        })
    }
}

/// What the bridge does with each packet.
fn bridge(site: &Site, rules: &str) {
    let chain = format!("chain passed {{\ntype filter hook forward priority 0; policy accept\n{rules}\n}}");
    site.network.filter(None, &format!("table bridge chaos {{\n{chain}\n}}"));
}

/// Drops what comes from a host (`iifname`, as the bridge sees it), or goes there (`oifname`).
fn cut(site: &Site, host: &str, ways: [Option<&str>; 2]) {
    let port = site.network.port(host);
    let rules: Vec<String> = ways.iter().flatten().map(|way| format!("{way} \"{port}\" drop")).collect();
    bridge(site, &rules.join("\n"));
}

fn heal(site: &Site) {
    site.network.filter(None, "");
}

/// All masters are behind proxies for a while. Connections that are open are reset.
fn delay(site: &Site, load: &Load, by: Duration) {
    let led = format!("iifname \"eth0\" tcp dport {MASTER_PORT}");
    let rules = format!(
        "table ip chaos {{\n\
            chain led {{\ntype nat hook prerouting priority -100\n{led} redirect to :{PROXY_PORT}\n}}\n\
            chain broken {{\ntype filter hook input priority 0\n{led} reject with tcp reset\n}}\n\
        }}"
    );
    let proxies = MASTERS.map(|host| Delay::start(site.network.namespace(host), PROXY_PORT, MASTER_PORT, by));
    MASTERS.iter().for_each(|host| site.network.filter(Some(host), &rules));
    load.go_on();
    load.go_on();
    MASTERS.iter().for_each(|host| site.network.filter(Some(host), ""));
    drop(proxies);
}

/// The disk of a master has no room for a while. The master may end, and then says why.
fn fill(site: &Site, load: &Load, master: usize) {
    let host = MASTERS[master];
    let disk = "/var/lib/cavern/master";
    let fill = || site.on(host, &format!("! cat /dev/zero >>{disk}/filler"));
    fill();
    // The log has some room set aside, until a snapshot begins another one.
    let _made = site.network.on(host, &format!("cv raft snapshot --on localhost:{MASTER_PORT}"));
    fill();
    load.go_on();
    load.go_on();
    site.on(host, &format!("rm {disk}/filler"));
    if !site.goes_on(master, MASTER) {
        let said = site.on(host, &format!("grep -i 'no space' /var/log/{MASTER}.log"));
        assert!(!said.is_empty(), "{host} has ended without a word");
        site.begin(host, MASTER);
    }
}

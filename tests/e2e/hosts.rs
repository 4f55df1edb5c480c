//! `docs/hosts.md`, word for word: its files are written and its commands run on hosts that are network namespaces on a
//! bridge, each with a root directory, a host name and processes of its own.
//!
//! A block of the guide says where it belongs behind its language: `on=HOST,HOST` or `on=all`, and `file=PATH`, with
//! `append`, for a file. A line is repeated until it succeeds or patience ends, as a person would who is told that
//! something takes a second.

#[path = "hosts/guide.rs"]
mod guide;

use std::time::Duration;

use cavern_tests::{Network, eventually};
use serde_json::Value;

use guide::{Block, Guide};

const PATIENCE: Duration = Duration::from_secs(120);
const HOSTS: [(&str, &str); 4] =
    [("cavern-master", "10.77.0.10"), ("node1", "10.77.0.11"), ("node2", "10.77.0.12"), ("node3", "10.77.0.13")];

/// Files that are written when the bucket is mounted, and read after each section from then on.
const WRITE: &str = "mkdir -p /mnt/cavern/data/kept && for n in 1 2 3 4 5 6 7 8; do head -c 3000000 /dev/urandom > \
    /mnt/cavern/data/kept/$n; done && cd /mnt/cavern/data/kept && sha256sum * > /src/sums";
/// What a package does that takes the place of another one, where systemd runs.
const UPGRADE: &str = "mkdir -p /run/systemd/system && install -m 755 cv /usr/bin/cv && . etc/package/steps.sh && \
    after_install yes 2>&1";
/// Writes and reads until it is told to end, or something fails.
const LOAD: &str = r#"
mkdir -p /mnt/cavern/data/load
cd /mnt/cavern/data/kept
step=0
while [ ! -e /run/load.end ]; do
    step=$((step + 1))
    echo $step >/mnt/cavern/data/load/$step && grep -qx $step /mnt/cavern/data/load/$step &&
        sha256sum --quiet --check /src/sums || break
    echo $step >/run/load.steps
done
echo "over after $step"
"#;
const READ: &str = "cd /mnt/cavern/data/kept && sha256sum --quiet --check /src/sums";

#[test]
fn the_guide_leads_to_a_cluster_that_grows_and_shrinks_and_loses_nothing() {
    let guide = Guide::read();
    let network = Network::new(&HOSTS, ("s3.example.com", "10.77.0.5"), "example");
    let mut mount = String::new();
    for section in &guide.sections {
        for block in &section.blocks {
            run(&network, block);
        }
        let nodes = || nodes(&network);
        let mount_of_node1 = || network.on("node1", "findmnt --noheadings --output MAJ:MIN /mnt/cavern").unwrap();
        match section.title.as_str() {
            "Start" => live(&network, &["node1", "node2"]),
            "Mount a bucket" => {
                repeat(&network, "node1", WRITE);
                mount = mount_of_node1();
            }
            // The mount has not been made anew.
            "Upgrade a host" => assert_eq!(mount_of_node1(), mount),
            "Add a host" => live(&network, &["node1", "node2", "node3"]),
            "Replace a disk, or a whole worker" => {
                live(&network, &["node1", "node2", "node3"]);
                let again = nodes().into_iter().find(|node| node["host"] == "node2").unwrap();
                assert!(again["id"].as_u64().unwrap() > 3, "{again}");
            }
            "Remove a host" => {
                live(&network, &["node1", "node2"]);
                assert_eq!(nodes().len(), 2);
            }
            "Three masters" | "Replace a master" => three_masters(&network),
            _ => {}
        }
        if guide.is_beyond(&section.title, "Mount a bucket") {
            for host in ["node1", "node2"] {
                repeat(&network, host, READ);
            }
        }
    }
    upgrade(&network);
    // The first master of all is not needed any more: what began with it goes on without it.
    network.on("cavern-master", "systemctl stop cavern-master").unwrap();
    repeat(&network, "node1", "echo later > /mnt/cavern/data/later");
    repeat(&network, "node2", "grep later /mnt/cavern/data/later");
    live(&network, &["node1", "node2"]);
    let log = network.on("cavern-master", "cat /var/log/cavern-master.log").unwrap();
    assert!(!log.contains("security.insecure") && !log.contains("other hosts can reach"), "{log}");
    // Who is no admin cannot change the cluster.
    let refused = network.on("node1", "cv umount /data").unwrap_err();
    assert!(refused.contains("admin"), "{refused}");

    // The worker that was removed and has its directory still gets that as an error.
    network.on("node2", "systemctl stop cavern-worker").unwrap();
    network
        .on("node2", "mv /var/lib/cavern/worker /tmp/new && mv /var/lib/cavern/worker.removed /var/lib/cavern/worker")
        .unwrap();
    network.on("node2", "systemctl start cavern-worker").unwrap();
    repeat(&network, "node2", "grep 'was removed with `cv node remove`' /var/log/cavern-worker.log");
}

#[test]
fn every_command_and_file_of_the_guide_says_where_it_belongs() {
    let guide = Guide::read();
    let titles: Vec<&str> = guide.sections.iter().map(|section| section.title.as_str()).collect();
    for wanted in [
        "Certificates",
        "Start",
        "Mount a bucket",
        "Add a host",
        "Replace a disk, or a whole worker",
        "Remove a host",
        "Upgrade a host",
        "Three masters",
        "Replace a master",
    ] {
        assert!(titles.contains(&wanted), "{wanted} is not in {titles:?}");
    }
    for block in guide.sections.iter().flat_map(|section| &section.blocks) {
        assert!(!block.hosts.is_empty(), "{block:?}");
        let is_known = |host: &String| host == "all" || HOSTS.iter().any(|(known, _)| known == host);
        assert!(block.hosts.iter().all(is_known), "{block:?}");
    }
}

fn run(network: &Network, block: &Block) {
    let names: Vec<&str> = match &block.hosts[..] {
        [all] if all == "all" => HOSTS.iter().map(|(name, _)| *name).collect(),
        hosts => hosts.iter().map(String::as_str).collect(),
    };
    for name in names {
        match &block.file {
            Some(file) => network.write(name, file, &block.text, block.append),
            None => block.text.lines().for_each(|line| repeat(network, name, line)),
        }
    }
}

#[track_caller]
fn repeat(network: &Network, host: &str, command: &str) {
    let mut last = String::new();
    eventually(&format!("`{command}` on {host}"), PATIENCE, || match network.on(host, command) {
        Ok(_) => Some(()),
        Err(failure) => {
            if failure != last {
                eprintln!("{host}: {command}: {failure}");
                last = failure;
            }
            None
        }
    });
}

fn nodes(network: &Network) -> Vec<Value> {
    let listed = network.on("node1", "cv node list --json").unwrap();
    serde_json::from_str(&listed).unwrap()
}

/// Packages upgrade all hosts, one after the other, while a program goes on: it gets no error, and the mounts stay.
fn upgrade(network: &Network) {
    let shown = |path: &str| network.on("node1", &format!("cat {path}")).unwrap_or_default();
    let steps = || shown("/run/load.steps").trim().parse::<u64>().unwrap_or_default();
    let go_on = || {
        let before = steps();
        eventually("the program goes on", PATIENCE, || {
            let log = shown("/run/load.log");
            assert!(!log.contains("over"), "{log}");
            (steps() > before + 2).then_some(())
        });
    };
    let mounts = || ["node1", "node2"].map(|host| network.on(host, "findmnt -no MAJ:MIN /mnt/cavern").unwrap());
    network.write("node1", "/run/load", LOAD, false);
    network.on("node1", "sh /run/load >/run/load.log 2>&1 </dev/null &").unwrap();
    go_on();
    let before = mounts();
    for host in ["node1", "node2", "cavern-master"] {
        let said = network.on(host, UPGRADE).unwrap();
        assert!(!said.contains("does not go on"), "{host}: {said}");
        eventually("three masters answer", PATIENCE, || {
            let group: Value = serde_json::from_str(&network.on("node1", "cv raft status --json").ok()?).ok()?;
            (group["answering"] == 3 && group["leader"].is_u64()).then_some(())
        });
        live(network, &["node1", "node2"]);
        go_on();
    }
    assert_eq!(mounts(), before);
    network.on("node1", "touch /run/load.end").unwrap();
    let log =
        eventually("the program ends", PATIENCE, || Some(shown("/run/load.log")).filter(|log| log.contains("over")));
    assert!(log.starts_with("over after"), "{log}");
}

/// Three masters vote, and a leader is among them.
#[track_caller]
fn three_masters(network: &Network) {
    let status = network.on("node1", "cv raft status --json").unwrap();
    let group: Value = serde_json::from_str(&status).unwrap();
    assert_eq!((&group["voters"], &group["answering"]), (&3.into(), &3.into()), "{group}");
    assert!(group["leader"].is_u64(), "{group}");
}

/// Waits until the workers of these hosts are live.
#[track_caller]
fn live(network: &Network, hosts: &[&str]) {
    eventually(&format!("{hosts:?} are live"), PATIENCE, || {
        let nodes = nodes(network);
        let is_live = |host: &&str| nodes.iter().any(|node| node["host"] == **host && node["state"] == "live");
        hosts.iter().all(is_live).then_some(())
    });
}

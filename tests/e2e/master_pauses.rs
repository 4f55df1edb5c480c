//! Masters that stand still for longer than leases last, and go on: nothing that clients have answered meanwhile is
//! lost, and nobody is taken for dead.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use cavern_tests::{Options, eventually};

use crate::fs_mode_delegations::{Mounts, tree};
use crate::fs_mode_lease::Stopped;

const PATIENCE: Duration = Duration::from_secs(60);
/// A lease, of sessions and of workers, as it is by default. When a master goes on, most of it has passed: of a shorter
/// one clients of a busy machine have too little left to be heard.
const LEASE: Duration = Duration::from_secs(5);

/// Files are made in directories delegated to the client, while every master stands still for two leases.
fn nothing_is_lost(options: Options) {
    let mounts = Mounts::up(options);
    let held = mounts.held("held");
    fs::write(held.join("before"), "before").unwrap();
    let masters = mounts.cluster.status().masters;
    let stopped: Vec<Stopped> = masters.iter().map(Stopped::new).collect();
    let mut expected = BTreeMap::from([(PathBuf::from("before"), (0o100_644, b"before".to_vec()))]);
    for number in 0..20 {
        let (name, content) = (format!("{number}"), format!("content of {number}").repeat(100));
        fs::write(held.join(&name), &content).unwrap();
        expected.insert(name.into(), (0o100_644, content.into_bytes()));
    }
    // How long they stand still is what is tested.
    thread::sleep(2 * LEASE);
    drop(stopped);
    eventually("changes are made again", PATIENCE, || fs::write(held.join("after"), "after").ok());
    expected.insert("after".into(), (0o100_644, b"after".to_vec()));
    eventually("the other mount shows everything", PATIENCE, || {
        (mounts.there.join("held").is_dir() && tree(&mounts.there.join("held")) == expected).then_some(())
    });
    assert_eq!(tree(&held), expected);
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
    for master in &masters {
        let log = fs::read_to_string(&master.log).unwrap();
        for taken_for_dead in ["session has lapsed", "a worker is lost"] {
            assert!(!log.contains(taken_for_dead), "{log}");
        }
    }
}

#[test]
fn a_master_that_stands_still_costs_nobody_anything() {
    nothing_is_lost(Options::default());
}

#[test]
fn three_masters_that_stand_still_cost_nobody_anything() {
    nothing_is_lost(Options { masters: 3, ..Options::default() });
}

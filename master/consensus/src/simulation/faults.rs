//! What goes wrong in a simulation, and when: one thing after another, several at a time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::clients::Group;
use super::master::{MASTERS, SimulatedMaster};
use super::runtime::Chance;
use crate::types::NodeId;

const LOOK_PERIOD: Duration = Duration::from_millis(5);
const SECOND_NS: i64 = 1_000_000_000;

/// Which things may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    None,
    /// Whatever there is.
    All,
    /// The power of all hosts fails at once, again and again.
    Blackouts,
    /// The leader is cut off from the other masters, and not from the clients.
    Isolation,
}

/// Looks all the time whether two masters would answer reads.
pub async fn watch_leases(group: Arc<Group>) {
    loop {
        sleep(LOOK_PERIOD).await;
        let readers: Vec<NodeId> = group.masters.iter().filter(|master| master.may_read()).map(|one| one.id).collect();
        if readers.len() > 1 {
            let violation = format!("at {} ms the masters {readers:?} all answer reads", group.world.now_ms());
            note(&group, &violation);
            group.world.history.lock().violations.push(violation);
            return;
        }
    }
}

/// Goes on for so long, and leaves things as they are then.
pub async fn keep_failing(group: Arc<Group>, faults: Faults, lasting: Duration) {
    let mut chance = Chance::new(group.world.chance.lock().next());
    let begin = Instant::now();
    while begin.elapsed() < lasting {
        sleep(chance.millis(100, 1200)).await;
        match faults {
            Faults::None => {}
            Faults::All => one_fault(&group, &mut chance).await,
            Faults::Blackouts => {
                for master in &group.masters {
                    master.kill(true).await;
                }
                start_all(&group).await;
                sleep(chance.millis(1000, 3000)).await;
            }
            Faults::Isolation => {
                isolate_leader(&group, &mut chance);
                sleep(chance.millis(1500, 4000)).await;
                heal_network(&group);
            }
        }
    }
}

fn note(group: &Group, what: &str) {
    let line = format!("{:6} {what}", group.world.now_ms());
    group.world.history.lock().lines.push(line);
}

/// Starts those that do not run.
pub async fn start_all(group: &Group) {
    for master in &group.masters {
        if master.host().is_none() {
            note(group, &format!("master {} is started", master.id));
            if let Err(error) = master.start().await {
                let violation = format!("master {} does not start: {error}", master.id);
                group.world.history.lock().violations.push(violation);
            }
        }
    }
}

/// Makes everything whole again.
pub async fn heal(group: &Group) {
    note(group, "everything is whole");
    heal_network(group);
    for master in &group.masters {
        if master.host().is_some_and(|host| host.disk.lock().is_broken) {
            master.kill(false).await;
        }
        if let Some(host) = master.host() {
            host.disk.lock().slowest = 1;
        }
    }
    start_all(group).await;
}

fn heal_network(group: &Group) {
    let mut links = group.world.links.lock();
    links.cut.clear();
    (links.lost, links.slowest) = (0, 3);
}

fn leader(group: &Group, chance: &mut Chance) -> NodeId {
    let leads = group.masters.iter().filter(|master| master.leads()).map(|master| master.id).next_back();
    leads.unwrap_or_else(|| 1 + chance.below(MASTERS))
}

/// Cuts the leader off from all or some of the other masters, both ways or one.
fn isolate_leader(group: &Group, chance: &mut Chance) {
    let leader = leader(group, chance);
    cut_off(group, leader, chance);
}

fn cut_off(group: &Group, whom: NodeId, chance: &mut Chance) {
    let (to, from) = chance.of(&[(true, true), (true, true), (true, false), (false, true)]);
    let mut cut = BTreeSet::new();
    for other in (1..=MASTERS).filter(|other| *other != whom) {
        if chance.permille(850) {
            cut.extend(to.then_some((whom, other)));
            cut.extend(from.then_some((other, whom)));
        }
    }
    note(group, &format!("nothing goes from whom to whom: {cut:?}"));
    group.world.links.lock().cut.extend(cut);
}

async fn one_fault(group: &Group, chance: &mut Chance) {
    let anybody = 1 + chance.below(MASTERS);
    let victim = if chance.permille(600) { leader(group, chance) } else { anybody };
    let master: &Arc<SimulatedMaster> = &group.masters[victim as usize - 1];
    match chance.below(15) {
        0..3 => {
            let is_power_lost = chance.permille(500);
            note(
                group,
                &format!("master {victim} is killed{}", if is_power_lost { " by a loss of power" } else { "" }),
            );
            master.kill(is_power_lost).await;
        }
        3..6 => start_all(group).await,
        6..8 => cut_off(group, victim, chance),
        8..10 => {
            note(group, "the network is whole");
            heal_network(group);
        }
        10 => {
            let (lost, slowest) = (chance.below(200), 1 + chance.below(250));
            note(group, &format!("{lost} messages of 1000 are lost, the others take up to {slowest} ms"));
            let mut links = group.world.links.lock();
            (links.lost, links.slowest) = (lost, slowest);
        }
        11 => {
            let seconds = chance.below(7200) as i64 - 3600;
            note(group, &format!("the clock of master {victim} is set by {seconds} s"));
            master.set_by_ns.fetch_add(seconds * SECOND_NS, Ordering::Relaxed);
        }
        12 => {
            let slowest = 1 + chance.below(800);
            note(group, &format!("the disk of master {victim} takes up to {slowest} ms"));
            if let Some(host) = master.host() {
                host.disk.lock().slowest = slowest;
            }
        }
        13 => {
            note(group, &format!("the disk of master {victim} breaks"));
            if let Some(host) = master.host() {
                host.disk.lock().is_broken = true;
            }
            sleep(chance.millis(0, 1000)).await;
            // It ends, and the disk is mended.
            master.kill(chance.permille(500)).await;
        }
        _ if chance.permille(500) => {
            note(group, &format!("master {victim} gives the lead away"));
            let master = master.clone();
            tokio::spawn(async move { master.hand_over().await });
        }
        _ => {
            note(group, &format!("master {victim} makes a snapshot"));
            let master = master.clone();
            tokio::spawn(async move { master.make_snapshot().await });
        }
    }
}

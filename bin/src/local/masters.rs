//! What several masters of a local cluster need beside being started: one that comes later is taken in by the others,
//! one that must wait for others is not waited for, and who gets on is waited for however long that takes.

use std::time::Duration;

use cavern_conf::Interval;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::raft::{AddMasterRequest, Group, SnapshotTransfer};
use futures::FutureExt as _;
use futures::future::{Fuse, FusedFuture as _, LocalBoxFuture};
use tokio::time::Instant;

use super::child::{ChildName, Role};
use super::record::Cluster;
use crate::console;
use crate::error::CliError;
use crate::group::{Dial, MasterRole, Survey, remark_unaware};

/// For a connection to a master of this host, and for its answer.
const ANSWER: Duration = Duration::from_millis(250);
/// Between two looks at a master, and between two lines about the same wait; a short one needs none.
pub const PROBE_PERIOD: Duration = Duration::from_millis(200);
const SAY_PERIOD: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// What each master answers.
pub async fn survey(cluster: &Cluster) -> Result<Survey, CliError> {
    let mut dial = Dial::of(&cluster.conf()?)?;
    dial.wait = ANSWER;
    let addresses: Vec<String> = cluster.masters.iter().map(|master| master.grpc.clone()).collect();
    Ok(Survey::take(&addresses, &dial).await)
}

/// How far a master is: bytes of a snapshot that it is given, or entries of the log that it has not applied yet.
#[derive(Clone, Copy, Debug)]
enum Progress {
    Received(u64),
    Lacking(u64),
}

/// What a master does that is not ready yet.
#[derive(Default)]
pub struct Readiness {
    /// It is a member of the group, and votes.
    is_member: bool,
    /// It answers, and there is a leader that it can be added by.
    can_be_added: bool,
    /// How far it is, and what it does for that.
    progress: Option<(Progress, Option<String>)>,
    /// Why it cannot become ready by itself.
    pub waits_for: Option<String>,
}

/// Looks at the master with this number.
pub async fn probe(cluster: &Cluster, number: usize) -> Result<Readiness, CliError> {
    let Some(master) = cluster.masters.get(number) else { return Ok(Readiness::default()) };
    let survey = survey(cluster).await?;
    let view = survey.view();
    let place = view.masters.iter().find(|view| view.address == master.grpc && view.id.is_some());
    let is_member = place.is_some_and(|place| place.votes);
    let Some(Ok(own)) = survey.answer(&master.grpc) else { return Ok(Readiness { is_member, ..Readiness::default() }) };
    let leader = survey.leader_address().and_then(|leader| survey.answer(leader)).and_then(Result::ok);
    let is_missing = view.masters.iter().any(|view| view.role == MasterRole::Unreachable);
    let waits_for = match (own.cluster_id.is_empty(), place.is_some()) {
        _ if cluster.masters.len() < 2 => None,
        (false, _) if view.majority => None,
        (false, _) => Some(format!("it waits for others ({})", view.summary())),
        // One that has lost its data: it is about to end, and says why.
        (true, true) => None,
        (true, false) if view.voters > 0 => Some(format!(
            "it is empty and waits to be taken in: `cv raft add {} --local {}`",
            master.grpc,
            cluster.directory.display()
        )),
        (true, false) if is_missing => Some("it waits for the other masters, to begin a group with them".to_owned()),
        (true, false) => None,
    };
    Ok(Readiness { is_member, can_be_added: leader.is_some(), progress: progress(own, leader), waits_for })
}

fn progress(own: &Group, leader: Option<&Group>) -> Option<(Progress, Option<String>)> {
    if let Some(SnapshotTransfer { received, bytes }) = own.incoming {
        let text = format!("has {} of {} MiB of the namespace", received / MIB, bytes.div_ceil(MIB));
        return Some((Progress::Received(received), Some(text)));
    }
    // A master that has no log yet is told of it by the leader; clients make it longer meanwhile.
    let end = leader.map_or(own.last_index, |leader| leader.committed_index);
    if end == 0 || own.applied_index == 0 {
        return None;
    }
    let lacking = end.saturating_sub(own.applied_index);
    let doing = (lacking > 0).then(|| format!("lacks {lacking} entries of the log"));
    Some((Progress::Lacking(lacking), doing))
}

/// How long a child is waited for: who gets on has all patience again.
pub struct ProgressDeadline {
    name: ChildName,
    length: Duration,
    deadline: Instant,
    /// The most that there was of a snapshot, and the fewest entries that it has lacked.
    received: u64,
    lacking: Option<u64>,
    /// What was going on at the last look, and when that was said.
    doing: Option<String>,
    said: Instant,
}

impl ProgressDeadline {
    pub fn new(name: ChildName, length: Duration) -> Self {
        let now = Instant::now();
        Self { name, length, deadline: now + length, received: 0, lacking: None, doing: None, said: now }
    }

    /// Notes what a look has shown, and says on stderr what the master does if that lasts.
    pub fn note(&mut self, probe: &Readiness) {
        let Some((progress, doing)) = &probe.progress else {
            self.doing = None;
            return;
        };
        self.doing.clone_from(doing);
        if !self.has_progressed(*progress) {
            return;
        }
        self.deadline = Instant::now() + self.length;
        if let Some(doing) = doing
            && self.said.elapsed() >= SAY_PERIOD
        {
            console::remark(format_args!("{} {doing}", self.name));
            self.said = Instant::now();
        }
    }

    /// Whether it is further than it was: another snapshot begins at nothing, and the log may grow as fast as it is
    /// applied.
    fn has_progressed(&mut self, now: Progress) -> bool {
        let (received, lacking) = (self.received, self.lacking);
        match now {
            Progress::Received(bytes) => {
                self.received = received.max(bytes);
                bytes > received
            }
            Progress::Lacking(entries) => {
                self.lacking = Some(lacking.map_or(entries, |least| least.min(entries)));
                lacking.is_none_or(|least| entries < least)
            }
        }
    }

    pub fn is_over(&self) -> bool {
        Instant::now() > self.deadline
    }
}

/// Has the group take in a master that came later, and waits until it is a member. A request that fails is sent again:
/// the leader goes on, or has nothing left to do.
///
/// # Errors
/// It does not get on for as long as `patience`: why the leader did not take it in last, if it has said so.
pub async fn add_to_group(cluster: &Cluster, number: usize, patience: Duration) -> Result<(), CliError> {
    let Some(master) = cluster.masters.get(number) else { return Ok(()) };
    let mut config = cluster.conf()?;
    config.client.metadata_timeout = Interval::secs(patience.as_secs());
    let masters = MasterChannel::for_command(&config)?;
    let request = AddMasterRequest { address: master.grpc.clone() };
    let mut asked: Fuse<LocalBoxFuture<'_, Result<Group, CliError>>> = Fuse::terminated();
    let mut watch = ProgressDeadline::new(ChildName { role: Role::Master, number }, patience);
    let mut refused = None;
    while !watch.is_over() {
        let found = probe(cluster, number).await?;
        // An earlier request may have gone on without the one who sent it.
        if found.is_member {
            return Ok(());
        }
        watch.note(&found);
        if found.can_be_added && asked.is_terminated() {
            asked = add(&masters, &request).boxed_local().fuse();
        }
        tokio::select! {
            answer = &mut asked => match answer {
                Ok(group) => {
                    remark_unaware(&group);
                    return Ok(());
                }
                Err(error) => {
                    refused = Some(error);
                    tokio::time::sleep(PROBE_PERIOD).await;
                }
            },
            () = tokio::time::sleep(PROBE_PERIOD) => {}
        }
    }
    let doing = watch.doing.map(|doing| format!(" (it {doing})")).unwrap_or_default();
    let seconds = patience.as_secs();
    let stands = format!("master{number} is not taken in by the others, and has not got on for {seconds} s{doing}");
    Err(refused.unwrap_or(CliError::Failed(stands)))
}

async fn add(masters: &MasterChannel, request: &AddMasterRequest) -> Result<Group, CliError> {
    Ok(masters.ask_unary(async |mut leader: Stubs| leader.raft.add_master(request.clone()).await).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gets_on_is_waited_for_and_who_does_not_is_not() {
        let mut patience = ProgressDeadline::new(ChildName { role: Role::Master, number: 1 }, Duration::from_secs(1));
        let mut has_progressed = |own: Group, committed_index: u64| {
            let found = progress(&own, Some(&Group { committed_index, ..Group::default() }));
            let has_progressed = found.as_ref().is_some_and(|(progress, _)| patience.has_progressed(*progress));
            (has_progressed, found.and_then(|(_, doing)| doing).unwrap_or_default())
        };
        let sent =
            |received| Group { incoming: Some(SnapshotTransfer { received, bytes: 10 * MIB }), ..Group::default() };
        let applied = |applied_index| Group { applied_index, ..Group::default() };
        assert_eq!(has_progressed(Group::default(), 1000), (false, String::new()));
        assert!(!has_progressed(sent(0), 1000).0);
        assert_eq!(has_progressed(sent(3 * MIB), 1000), (true, "has 3 of 10 MiB of the namespace".to_owned()));
        assert!(!has_progressed(sent(3 * MIB), 1000).0, "it stands still");
        assert!(!has_progressed(sent(MIB), 1000).0, "one that begins anew for ever does not get on");
        assert_eq!(has_progressed(applied(200), 1000), (true, "lacks 800 entries of the log".to_owned()));
        assert!(!has_progressed(applied(200), 1000).0);
        assert!(has_progressed(applied(900), 1000).0);
        assert!(!has_progressed(applied(1900), 2000).0, "the log grows as fast as it is applied");
        assert!(
            !has_progressed(sent(MIB), 2000).0 && !has_progressed(applied(1900), 2000).0,
            "nor does it by a snapshot in between"
        );
        assert_eq!(has_progressed(applied(2000), 2000), (true, String::new()), "it lacks nothing");
        assert!(!has_progressed(applied(2000), 2000).0);
    }
}

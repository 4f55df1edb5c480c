//! What several masters of a local cluster need beside being started: one that comes later is taken in by the others,
//! one that must wait for others is not waited for, and who gets on is waited for however long that takes.

use std::mem::discriminant;
use std::time::Duration;

use cavern_conf::Interval;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::raft::{AddMasterRequest, Group, SnapshotTransfer};
use tokio::time::Instant;

use super::child::{ChildName, Role};
use super::record::Cluster;
use crate::console;
use crate::error::CliError;
use crate::group::{Dial, MasterRole, Survey, remark_unaware};

/// For a connection to a master of this host, and for its answer.
const ANSWER: Duration = Duration::from_millis(250);
/// Between two looks at a master, and between two lines about the same wait; a short one needs none.
pub const LOOK: Duration = Duration::from_millis(200);
const SAY_PERIOD: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// What each master answers.
pub async fn survey(cluster: &Cluster) -> Result<Survey, CliError> {
    let mut dial = Dial::of(&cluster.conf()?)?;
    dial.wait = ANSWER;
    let addresses: Vec<String> = cluster.masters.iter().map(|master| master.grpc.clone()).collect();
    Ok(Survey::take(&addresses, &dial).await)
}

/// How far a master is: bytes of a snapshot that it is given, or entries of the log that it has applied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Progress {
    Received(u64),
    Applied(u64),
}

/// What a master does that is not ready yet.
#[derive(Default)]
pub struct Look {
    /// It is a member of the group, and votes.
    is_member: bool,
    /// Where it lacks something.
    progress: Option<(Progress, String)>,
    /// Why it cannot become ready by itself.
    pub waits_for: Option<String>,
}

/// Looks at the master with this number.
pub async fn look(cluster: &Cluster, number: usize) -> Result<Look, CliError> {
    let Some(master) = cluster.masters.get(number) else { return Ok(Look::default()) };
    let survey = survey(cluster).await?;
    let view = survey.view();
    let place = view.masters.iter().find(|view| view.address == master.grpc && view.id.is_some());
    let is_member = place.is_some_and(|place| place.votes);
    let Some(Ok(own)) = survey.answer(&master.grpc) else { return Ok(Look { is_member, ..Look::default() }) };
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
    Ok(Look { is_member, progress: progress(own, leader), waits_for })
}

fn progress(own: &Group, leader: Option<&Group>) -> Option<(Progress, String)> {
    if let Some(SnapshotTransfer { received, bytes }) = own.incoming {
        let text = format!("has {} of {} MiB of the namespace", received / MIB, bytes.div_ceil(MIB));
        return Some((Progress::Received(received), text));
    }
    // A master that has no log yet is told of it by the leader.
    let end = leader.map_or(own.last_index, |leader| leader.committed_index);
    let (applied, lacking) = (own.applied_index, end.saturating_sub(own.applied_index));
    let is_lacking = applied > 0 && lacking > 0;
    is_lacking.then(|| (Progress::Applied(applied), format!("lacks {lacking} entries of the log")))
}

/// How long a child is waited for: who gets on has all patience again.
pub struct Patience {
    name: ChildName,
    length: Duration,
    deadline: Instant,
    /// The most that there was of it.
    best: Option<Progress>,
    /// What was going on at the last look, and when that was said.
    doing: Option<String>,
    said: Instant,
}

impl Patience {
    pub fn new(name: ChildName, length: Duration) -> Self {
        let now = Instant::now();
        Self { name, length, deadline: now + length, best: None, doing: None, said: now }
    }

    /// Notes what a look has shown, and says on stderr what the master does if that lasts.
    pub fn note(&mut self, look: &Look) {
        let Some((progress, doing)) = &look.progress else {
            self.doing = None;
            return;
        };
        self.doing = Some(doing.clone());
        if !self.moves(*progress) {
            return;
        }
        self.deadline = Instant::now() + self.length;
        if self.said.elapsed() >= SAY_PERIOD {
            console::remark(format_args!("{} {doing}", self.name));
            self.said = Instant::now();
        }
    }

    /// Whether it is further than it was. Another snapshot begins at nothing, and the log comes behind it.
    fn moves(&mut self, now: Progress) -> bool {
        let moves = self.best.is_none_or(|best| now > best || discriminant(&now) != discriminant(&best));
        if moves {
            self.best = Some(now);
        }
        moves
    }

    pub fn is_over(&self) -> bool {
        Instant::now() > self.deadline
    }
}

/// Has the group take in a master that came later, and waits until it is a member.
///
/// # Errors
/// Why the leader does not take it in, or that it does not get on for as long as `patience`.
pub async fn take_in(cluster: &Cluster, number: usize, patience: Duration) -> Result<(), CliError> {
    let Some(master) = cluster.masters.get(number) else { return Ok(()) };
    let mut config = cluster.conf()?;
    config.client.metadata_timeout = Interval::secs(patience.as_secs());
    let masters = MasterChannel::for_command(&config)?;
    let request = AddMasterRequest { address: master.grpc.clone() };
    // Asked again, the leader goes on, or has nothing left to do.
    let ask = masters.ask_unary(async |mut leader: Stubs| leader.raft.add_master(request.clone()).await);
    tokio::pin!(ask);
    let mut watch = Patience::new(ChildName { role: Role::Master, number }, patience);
    while !watch.is_over() {
        tokio::select! {
            asked = &mut ask => {
                let asked = asked.map(|group| remark_unaware(&group)).map_err(CliError::from);
                // An earlier request may have gone on without the one who sent it.
                let is_in = asked.is_err() && look(cluster, number).await?.is_member;
                return if is_in { Ok(()) } else { asked };
            }
            () = tokio::time::sleep(LOOK) => watch.note(&look(cluster, number).await?),
        }
    }
    let doing = watch.doing.map(|doing| format!(" (it {doing})")).unwrap_or_default();
    Err(CliError::Failed(format!(
        "master{number} is not taken in by the others, and has not got on for {} s{doing}",
        patience.as_secs()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gets_on_is_waited_for_and_who_does_not_is_not() {
        let mut patience = Patience::new(ChildName { role: Role::Master, number: 1 }, Duration::from_secs(1));
        let leader = Group { committed_index: 1000, ..Group::default() };
        let mut moves = |own: Group| {
            let found = progress(&own, Some(&leader));
            let moves = found.as_ref().is_some_and(|(progress, _)| patience.moves(*progress));
            (moves, found.map(|(_, doing)| doing).unwrap_or_default())
        };
        let sent =
            |received| Group { incoming: Some(SnapshotTransfer { received, bytes: 10 * MIB }), ..Group::default() };
        let applied = |applied_index| Group { applied_index, ..Group::default() };
        assert_eq!(moves(Group::default()), (false, String::new()));
        assert!(moves(sent(0)).0);
        assert_eq!(moves(sent(3 * MIB)), (true, "has 3 of 10 MiB of the namespace".to_owned()));
        assert!(!moves(sent(3 * MIB)).0, "it stands still");
        assert!(!moves(sent(MIB)).0, "one that begins anew for ever does not get on");
        assert_eq!(moves(applied(200)), (true, "lacks 800 entries of the log".to_owned()));
        assert!(!moves(applied(200)).0);
        assert!(moves(applied(900)).0);
        assert_eq!(moves(applied(1000)), (false, String::new()), "it lacks nothing");
    }
}

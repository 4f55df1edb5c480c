//! The masters of a cluster, each reached by itself ([`Dial`]), and what they say of their group ([`Survey`]): it needs
//! no leader, and no majority.
//!
//! The masters of the configuration are asked, and those that their answers name as members. Answers may contradict
//! each other: one that was stopped for a while still believes what held before. The one that leads in the highest term
//! is right; without a leader, the one that is furthest.

use std::time::Duration;

use cavern_conf::{Config, counted};
use cavern_net::master::{Stubs, innermost};
use cavern_proto::raft::{GetGroupRequest, Group, Member};
use cavern_security::Transport;
use futures::future::join_all;
use serde::Serialize;
use tonic::{Code, Response, Status};

use crate::console;
use crate::error::CliError;

/// How masters are connected to, each by itself, whether it leads or not.
#[derive(Clone)]
pub struct Dial {
    /// To be connected; for an answer there is as long again.
    pub wait: Duration,
    pub transport: Transport,
}

impl Dial {
    /// As a configuration has it.
    ///
    /// # Errors
    /// A file of `[security]` is not usable.
    pub fn of(config: &Config) -> Result<Self, CliError> {
        let transport = Transport::of(config).map_err(|error| CliError::Usage(error.to_string()))?;
        Ok(Self { wait: config.client.connect_timeout.get(), transport })
    }

    /// Connects to the master at an address.
    ///
    /// # Errors
    /// The cause, as the system has it.
    pub async fn connect(&self, address: &str) -> Result<Stubs, String> {
        Stubs::connect(address, self.wait, &self.transport).await
    }

    /// What the master at an address says of its group.
    ///
    /// # Errors
    /// Why it says nothing.
    pub async fn ask(&self, address: &str) -> Result<Group, String> {
        let answer = async {
            let mut master = self.connect(address).await?;
            let group = master.raft.get_group(GetGroupRequest {}).await;
            group.map(Response::into_inner).map_err(|status| cause(&status))
        };
        let answer = tokio::time::timeout(self.wait * 2, answer).await;
        answer.unwrap_or_else(|_| Err(format!("no answer within {} ms", self.wait.as_millis() * 2)))
    }
}

/// Why a master did not answer a question that any of them answers.
fn cause(status: &Status) -> String {
    match (status.code(), std::error::Error::source(status)) {
        (Code::Unimplemented, _) => "it is of a version that knows no groups of masters".to_owned(),
        (_, Some(source)) => innermost(source),
        _ if status.message().is_empty() => format!("{:?}", status.code()),
        _ => status.message().to_owned(),
    }
}

/// Whether a master says that it leads itself. One that was stopped for a while may be wrong.
pub fn leads(group: &Group) -> bool {
    group.node_id != 0 && group.leader == group.node_id
}

/// Says who may not know a master that was taken in.
pub fn remark_unaware(group: &Group) {
    if !group.unaware.is_empty() {
        console::remark(format_args!(
            "these have not said that they know the new master, and may not find it should the others fail now: {}. \
             They are told again each second; restart what stays without a connection",
            group.unaware.join(", ")
        ));
    }
}

/// What each address answered, or why it did not, in the order in which they were learned.
pub struct Survey {
    answers: Vec<(String, Result<Group, String>)>,
}

/// What a master does in its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterRole {
    Leader,
    Follower,
    /// It is being taken in, and does not vote yet.
    Learner,
    Unreachable,
    /// It has nothing, and no place in a group.
    Empty,
    /// It has a place in another cluster, or has lost the one that it had in this one.
    Stranger,
}

impl MasterRole {
    /// In one word.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MasterView {
    /// Absent for one that is no member.
    pub id: Option<u64>,
    pub address: String,
    pub role: MasterRole,
    /// It is a member whose vote counts.
    pub votes: bool,
    /// What it says of itself; absent when it does not answer.
    pub term: Option<u64>,
    pub log_index: Option<u64>,
    pub committed_index: Option<u64>,
    pub applied_index: Option<u64>,
    pub snapshot_index: Option<u64>,
    /// Up to where the leader knows the log to be on its disk.
    pub matched_index: Option<u64>,
    pub version: Option<String>,
    /// Up to which feature version it knows the commands of the log.
    pub feature_version: Option<u32>,
    /// What is wrong with it.
    pub error: Option<String>,
}

/// The group as all answers together show it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GroupView {
    /// Empty while there is none yet.
    pub cluster_id: String,
    pub leader: Option<u64>,
    pub voters: usize,
    /// Voters that answer.
    pub answering: usize,
    /// Whether these are more than a half, so that they can have a leader.
    pub majority: bool,
    pub masters: Vec<MasterView>,
}

impl Survey {
    /// Asks each of `addresses`, and every member that one of them names.
    pub async fn take(addresses: &[String], dial: &Dial) -> Self {
        let mut answers: Vec<(String, Result<Group, String>)> = Vec::new();
        let mut left = addresses.to_vec();
        while !left.is_empty() {
            let round = join_all(left.iter().map(|address| dial.ask(address))).await;
            answers.extend(std::mem::take(&mut left).into_iter().zip(round));
            let named = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).flat_map(|group| &group.members);
            for Member { address, .. } in named {
                if !left.contains(address) && answers.iter().all(|(asked, _)| asked != address) {
                    left.push(address.clone());
                }
            }
        }
        Self { answers }
    }

    /// What an address answered; `None` for one that was not asked.
    pub fn answer(&self, address: &str) -> Option<Result<&Group, &str>> {
        let (_, answer) = self.answers.iter().find(|(asked, _)| asked == address)?;
        Some(answer.as_ref().map_err(String::as_str))
    }

    /// Whether nobody answered at all; with what became of each.
    pub fn silence(&self) -> Option<String> {
        let causes = self.answers.iter().map(|(address, answer)| match answer {
            Ok(_) => None,
            Err(cause) => Some(format!("{address}: {cause}")),
        });
        causes.collect::<Option<Vec<_>>>().map(|causes| causes.join("; "))
    }

    /// Where the leader answered, if it did. One that has no majority leads nobody, though it may not know yet.
    pub fn leader_address(&self) -> Option<&str> {
        let (address, group) = self.best()?;
        (leads(group) && self.view().majority).then_some(address)
    }

    /// The answers that there are, with the address that was asked.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &Group)> {
        self.answers.iter().filter_map(|(address, answer)| Some((address.as_str(), answer.as_ref().ok()?)))
    }

    /// The answer that is right, of the cluster that the first of the configuration is of.
    fn best(&self) -> Option<(&str, &Group)> {
        let cluster_id = self.groups().map(|(_, group)| &group.cluster_id).find(|id| !id.is_empty())?;
        let own = self.groups().filter(|(_, group)| group.cluster_id == *cluster_id);
        own.max_by_key(|(_, group)| (leads(group), group.term, group.committed_index))
    }

    pub fn view(&self) -> GroupView {
        let best = self.best().map(|(_, group)| group);
        let mut told = Vec::new();
        let mut masters = Vec::new();
        for member in best.map_or(&[][..], |group| &group.members) {
            let (asked, view) = self.member(best, member);
            told.extend(asked);
            masters.push(view);
        }
        note_older(&mut masters);
        // By id they do not change their places when another one leads.
        masters.sort_by_key(|view| view.id);
        let voters = masters.iter().filter(|view| view.votes).count();
        let answering = masters.iter().filter(|view| view.votes && view.answers()).count();
        let others = self.answers.iter().filter(|(address, _)| !told.contains(&address.as_str()));
        masters.extend(others.map(|(address, answer)| outsider(address, answer, best)));
        let majority = answering * 2 > voters;
        GroupView {
            cluster_id: best.map(|group| group.cluster_id.clone()).unwrap_or_default(),
            leader: best.filter(|group| leads(group) && majority).map(|group| group.node_id),
            voters,
            answering,
            majority,
            masters,
        }
    }

    /// A member, and under which addresses it was asked: the configuration may spell them otherwise than the group.
    fn member<'a>(&'a self, best: Option<&Group>, member: &'a Member) -> (Vec<&'a str>, MasterView) {
        let is_own = |group: &Group| {
            best.is_some_and(|best| best.cluster_id == group.cluster_id) && group.node_id == member.node_id
        };
        let mut asked: Vec<&str> =
            self.groups().filter(|(_, group)| is_own(group)).map(|(address, _)| address).collect();
        let own = asked.first().and_then(|address| self.answer(address)).and_then(Result::ok);
        asked.push(&member.address);
        let (role, error) = match (own, self.answer(&member.address)) {
            (Some(_), _) if best.is_some_and(|best| leads(best) && best.node_id == member.node_id) => {
                (MasterRole::Leader, None)
            }
            (Some(_), _) if member.votes => (MasterRole::Follower, None),
            (Some(_), _) => (MasterRole::Learner, None),
            (None, Some(Ok(group))) if group.cluster_id.is_empty() => {
                let id = member.node_id;
                (MasterRole::Empty, Some(format!("it has lost its data: `cv raft remove {id}`, then `cv raft add`")))
            }
            (None, Some(Ok(_))) => (MasterRole::Stranger, Some("another master has its address".to_owned())),
            (None, Some(Err(cause))) => (MasterRole::Unreachable, Some(cause.to_owned())),
            (None, None) => (MasterRole::Unreachable, None),
        };
        let view = MasterView {
            id: Some(member.node_id),
            votes: member.votes,
            matched_index: member.matched_index,
            error,
            ..MasterView::new(&member.address, role, own)
        };
        (asked, view)
    }
}

/// Says of which members the others know more.
fn note_older(masters: &mut [MasterView]) {
    let most = masters.iter().filter_map(|view| view.feature_version).max();
    for view in masters.iter_mut().filter(|view| view.feature_version < most && view.answers()) {
        let version = view.version.as_deref().unwrap_or_default();
        view.error =
            Some(format!("its version, {version}, is older: what is new in others is not used before it is upgraded"));
    }
}

/// One that was asked and is no member.
fn outsider(address: &str, answer: &Result<Group, String>, best: Option<&Group>) -> MasterView {
    match answer {
        Err(cause) => {
            MasterView { error: Some(cause.clone()), ..MasterView::new(address, MasterRole::Unreachable, None) }
        }
        Ok(group) if group.cluster_id.is_empty() => MasterView::new(address, MasterRole::Empty, None),
        Ok(group) => {
            let error = match best {
                Some(best) if best.cluster_id == group.cluster_id => "it was removed from this group".to_owned(),
                _ => format!("it belongs to another cluster, {}", group.cluster_id),
            };
            MasterView { error: Some(error), ..MasterView::new(address, MasterRole::Stranger, Some(group)) }
        }
    }
}

impl MasterView {
    fn new(address: &str, role: MasterRole, answer: Option<&Group>) -> Self {
        Self {
            id: None,
            address: address.to_owned(),
            role,
            votes: false,
            term: answer.map(|group| group.term),
            log_index: answer.map(|group| group.last_index),
            committed_index: answer.map(|group| group.committed_index),
            applied_index: answer.map(|group| group.applied_index),
            snapshot_index: answer.map(|group| group.snapshot_index),
            matched_index: None,
            version: answer.map(|group| group.version.clone()),
            feature_version: answer.map(|group| group.feature_version),
            error: None,
        }
    }

    /// Whether it takes part in the group.
    pub fn answers(&self) -> bool {
        matches!(self.role, MasterRole::Leader | MasterRole::Follower | MasterRole::Learner)
    }

    /// `master 2 at b:7700`, or `b:7700` for one without a number.
    pub fn name(&self) -> String {
        self.id.map_or_else(|| self.address.clone(), |id| format!("master {id} at {}", self.address))
    }
}

impl GroupView {
    /// How many masters vote, and how many of them answer, without one of them.
    pub fn without(&self, id: u64) -> (usize, usize) {
        let left = || self.masters.iter().filter(|view| view.votes && view.id != Some(id));
        (left().count(), left().filter(|view| view.answers()).count())
    }

    /// In one line, whether the group can work.
    pub fn summary(&self) -> String {
        if self.voters == 0 {
            return "no group yet: with empty directories it begins when all of cluster.masters run".to_owned();
        }
        let reached = format!("{} of {} answering", self.answering, counted(self.voters as u64, "voting master"));
        match (self.majority, self.leader) {
            (true, Some(leader)) => format!("majority: {reached}, master {leader} leads"),
            (true, None) => format!("majority: {reached}, but none leads at the moment"),
            (false, _) => format!("no majority: {reached}, so that nothing can be changed before more of them run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(node_id: u64, leader: u64, term: u64) -> Group {
        let member = |id: u64| Member {
            node_id: id,
            address: format!("m{id}:1"),
            votes: true,
            matched_index: (leader == node_id).then_some(7),
        };
        Group {
            cluster_id: "c".to_owned(),
            node_id,
            address: format!("m{node_id}:1"),
            term,
            leader,
            last_index: 7,
            members: vec![member(3), member(1), member(2)],
            ..Group::default()
        }
    }

    fn survey<const N: usize>(answers: [(&str, Result<Group, &str>); N]) -> Survey {
        let answers = answers.into_iter().map(|(address, answer)| (address.to_owned(), answer.map_err(str::to_owned)));
        Survey { answers: answers.collect() }
    }

    fn roles(view: &GroupView) -> Vec<(Option<u64>, MasterRole)> {
        view.masters.iter().map(|master| (master.id, master.role)).collect()
    }

    #[test]
    fn the_leader_of_the_highest_term_is_believed() {
        use MasterRole::{Follower, Leader};

        // The first was stopped, and does not know yet that another one leads.
        let survey = survey([("m1:1", Ok(group(1, 1, 4))), ("m2:1", Ok(group(2, 2, 5))), ("m3:1", Ok(group(3, 2, 5)))]);
        let view = survey.view();
        assert_eq!(roles(&view), [(Some(1), Follower), (Some(2), Leader), (Some(3), Follower)]);
        assert_eq!((survey.leader_address(), view.leader, view.majority), (Some("m2:1"), Some(2), true));
        assert_eq!(view.masters[0].matched_index, Some(7));
        assert_eq!(view.summary(), "majority: 3 of 3 voting masters answering, master 2 leads");
    }

    #[test]
    fn what_does_not_answer_is_shown_and_counted() {
        use MasterRole::{Empty, Follower, Unreachable};

        let survey = survey([("m1:1", Err("refused")), ("m2:1", Ok(group(2, 1, 5))), ("m3:1", Err("refused"))]);
        let view = survey.view();
        assert_eq!(roles(&view), [(Some(1), Unreachable), (Some(2), Follower), (Some(3), Unreachable)]);
        assert_eq!((view.leader, view.answering, view.majority), (None, 1, false));
        assert!(view.summary().starts_with("no majority: 1 of 3 voting masters answering"), "{}", view.summary());
        assert_eq!(survey.silence(), None);
        assert_eq!(survey.leader_address(), None);

        // One without data in the place of a member.
        let survey = self::survey([("m1:1", Ok(Group::default())), ("m2:1", Ok(group(2, 2, 5))), ("m3:1", Err(""))]);
        let view = survey.view();
        assert_eq!((view.masters[0].role, view.answering), (Empty, 1));
        assert!(view.masters[0].error.as_ref().unwrap().contains("cv raft remove 1"));

        // A leader that is alone leads nobody.
        let survey = self::survey([("m1:1", Err("refused")), ("m2:1", Ok(group(2, 2, 5))), ("m3:1", Err("refused"))]);
        assert_eq!((survey.leader_address(), survey.view().leader), (None, None));

        let silent = self::survey([("m1:1", Err("refused")), ("m2:1", Err("no route"))]);
        assert_eq!(silent.silence().unwrap(), "m1:1: refused; m2:1: no route");
    }

    #[test]
    fn a_master_is_told_once_however_its_address_is_spelled() {
        use MasterRole::{Empty, Follower, Leader, Stranger};

        let other = Group { cluster_id: "other".to_owned(), ..group(1, 1, 9) };
        let removed = group(4, 0, 3);
        let survey = survey([
            ("localhost:1", Ok(group(1, 1, 5))),
            ("m1:1", Ok(group(1, 1, 5))),
            ("m2:1", Ok(group(2, 1, 5))),
            ("m3:1", Ok(group(3, 1, 5))),
            ("new:1", Ok(Group::default())),
            ("gone:1", Ok(removed)),
            ("far:1", Ok(other)),
        ]);
        let view = survey.view();
        assert_eq!(
            roles(&view),
            [
                (Some(1), Leader),
                (Some(2), Follower),
                (Some(3), Follower),
                (None, Empty),
                (None, Stranger),
                (None, Stranger)
            ]
        );
        assert!(view.masters[4].error.as_ref().unwrap().contains("was removed"));
        assert!(view.masters[5].error.as_ref().unwrap().contains("another cluster, other"));
    }

    #[test]
    fn a_master_that_is_still_to_be_upgraded_is_named() {
        let newer = |id| Group { feature_version: 2, ..group(id, 1, 5) };
        let older = Group { version: "0.9".into(), feature_version: 1, ..group(2, 1, 5) };
        let view = survey([("m1:1", Ok(newer(1))), ("m2:1", Ok(older)), ("m3:1", Err("refused"))]).view();
        let known: Vec<_> = view.masters.iter().map(|master| master.feature_version).collect();
        assert_eq!(known, [Some(2), Some(1), None]);
        assert_eq!(view.masters[0].error, None);
        assert!(view.masters[1].error.as_ref().unwrap().contains("0.9, is older"), "{:?}", view.masters[1]);
        assert_eq!(view.masters[2].error.as_deref(), Some("refused"));
    }

    #[test]
    fn what_is_left_without_one_is_counted() {
        let view = survey([("m1:1", Err("")), ("m2:1", Ok(group(2, 2, 5))), ("m3:1", Ok(group(3, 2, 5)))]).view();
        assert_eq!(view.without(1), (2, 2));
        assert_eq!(view.without(3), (2, 1));
        assert_eq!(view.without(9), (3, 2));
    }

    #[test]
    fn before_there_is_a_group_all_are_empty() {
        let view = survey([("m1:1", Ok(Group::default())), ("m2:1", Err("refused"))]).view();
        assert_eq!(roles(&view), [(None, MasterRole::Empty), (None, MasterRole::Unreachable)]);
        assert!(!view.majority && view.summary().starts_with("no group yet"));
    }
}

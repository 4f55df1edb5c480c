//! Who belongs to the group of masters, and how that changes while it works.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cavern_proto::raft::{Group, Member};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::{ChangeMembers, Instant as _, RaftMetrics};

use super::node::{Consensus, fatal};
use super::observe;
use super::types::{Node, NodeId, Types};
use crate::error::{ConsensusError, Result};

/// A follower that has answered within this is there.
const ALIVE: Duration = Duration::from_secs(2);
/// For a leader that has just begun to hear of the others.
const HEARD: Duration = Duration::from_millis(500);
/// For the next leader to lead.
const HAND_OVER: Duration = Duration::from_secs(3);
/// Bytes of the log that a master applies which is new in the group; for more it is given a snapshot.
const REPLAYED_MAX: u64 = 16 << 20;
/// For the log to be cut.
const CUT: Duration = Duration::from_secs(5);
/// In an epoch, those of the place in the log; those of the term are before them.
const EPOCH_INDEX_BITS: u32 = 40;
/// For a snapshot to be made, and between two requests for it.
const SNAPSHOT: Duration = Duration::from_secs(600);
const SNAPSHOT_AGAIN: Duration = Duration::from_millis(200);

impl Consensus {
    /// The group as this master sees it. What its program knows is for others to add.
    pub fn group(&self) -> Group {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let membership = metrics.membership_config.membership();
        let voters: BTreeSet<NodeId> = membership.voter_ids().collect();
        let index = |id: Option<super::types::LogId>| id.map_or(0, |id| id.index);
        let member = |(id, node): (&NodeId, &Node)| Member {
            node_id: *id,
            address: node.addr.clone(),
            votes: voters.contains(id),
            matched_index: match &metrics.replication {
                Some(_) if *id == metrics.id => metrics.last_log_index,
                Some(replication) => replication.get(id).map(|matched| index(*matched)),
                None => None,
            },
        };
        Group {
            cluster_id: self.identity.cluster_id.clone(),
            node_id: metrics.id,
            address: self.address.clone(),
            term: metrics.current_term,
            leader: metrics.current_leader.unwrap_or(0),
            last_index: metrics.last_log_index.unwrap_or(0),
            committed_index: index(metrics.local_committed),
            applied_index: index(metrics.last_applied),
            snapshot_index: index(metrics.snapshot),
            members: membership.nodes().map(member).collect(),
            incoming: self.arrival.transfer(),
            ..Group::default()
        }
    }

    /// Another number when the members are others, and a greater one as long as this master leads.
    pub fn group_epoch(&self) -> u64 {
        epoch(&self.raft.metrics().borrow_watched())
    }

    /// The epoch of the group, and where its masters are, for somebody who knows those of that epoch.
    pub fn masters_unless_known(&self, known: u64) -> (u64, Vec<String>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let epoch = epoch(&metrics);
        if epoch == known {
            return (epoch, Vec::new());
        }
        let nodes = metrics.membership_config.membership().nodes();
        (epoch, nodes.map(|(_, node)| node.addr.clone()).collect())
    }

    /// Takes a master in that has its place, but nothing else: returns when it has caught up. It does not vote yet.
    pub async fn add(&self, id: NodeId, address: &str) -> Result {
        self.cut_log_for(id).await?;
        self.raft.add_learner(id, Node::new(address), true).await.map(drop).map_err(explain)
    }

    /// Has a master vote that has been added.
    pub async fn let_vote(&self, id: NodeId, address: &str) -> Result {
        let voters = ChangeMembers::AddVoterIds(BTreeSet::from([id]));
        self.raft.change_membership(voters, true).await.map_err(explain)?;
        tracing::info!(id, address, "a master joins the group");
        Ok(())
    }

    /// Has a master that has nothing be given a snapshot where the log is long: to apply all of that would take many
    /// times as long. What another master of the group lacks stays in the log.
    async fn cut_log_for(&self, id: NodeId) -> Result {
        let index = |id: Option<super::types::LogId>| id.map_or(0, |id| id.index);
        // None while another master leads.
        let matched = |metrics: &RaftMetrics<Types>, id: &NodeId| {
            metrics.replication.as_ref().map(|all| index(all.get(id).copied().flatten()))
        };
        let observed = self.raft.metrics();
        let has_something = matched(&observed.borrow_watched(), &id) != Some(0);
        if has_something || self.log_size.lock().bytes_after(None) < self.limits.snapshot_after.min(REPLAYED_MAX) {
            return Ok(());
        }
        self.make_snapshot().await?;
        let upto = {
            let metrics = observed.borrow_watched();
            let members = metrics.membership_config.membership().nodes().map(|(member, _)| member);
            let others = members.filter(|member| **member != metrics.id && **member != id);
            let lacking = others.filter_map(|member| matched(&metrics, member)).min();
            index(metrics.snapshot).min(lacking.unwrap_or(u64::MAX))
        };
        if upto > 0 {
            self.raft.trigger().purge_log(upto).await.map_err(fatal)?;
            // It may be in use; then the new master is given what there is.
            let _is_cut = self.until_within(CUT, |metrics| index(metrics.purged) >= upto).await;
        }
        Ok(())
    }

    /// Takes a master out for good. The leader may take itself out, and leads no more then.
    ///
    /// # Errors
    /// [`ConsensusError::Refused`] when no majority of those who stay is there.
    pub async fn remove(&self, id: NodeId) -> Result {
        let observed = self.raft.metrics();
        let staying = |metrics: &RaftMetrics<Types>| -> Vec<NodeId> {
            metrics.membership_config.membership().voter_ids().filter(|voter| *voter != id).collect()
        };
        {
            let metrics = observed.borrow_watched();
            if metrics.membership_config.membership().get_node(&id).is_none() {
                return Err(ConsensusError::NotFound(format!("the group has no master {id}: see `cv raft status`")));
            }
            if staying(&metrics).is_empty() {
                return Err(ConsensusError::Refused(format!(
                    "master {id} is the only one: there is nobody else to lead"
                )));
            }
        }
        // A leader that has just begun has heard of nobody yet.
        let alive =
            |metrics: &RaftMetrics<Types>| staying(metrics).iter().filter(|voter| is_alive(metrics, **voter)).count();
        if !self.until_within(ALIVE, |metrics| alive(metrics) > staying(metrics).len() / 2).await {
            let metrics = observed.borrow_watched();
            return Err(ConsensusError::Refused(format!(
                "of the {} masters that stay without master {id} only {} answer, which is no majority: start the \
                 others first",
                staying(&metrics).len(),
                alive(&metrics)
            )));
        }
        let voters = ChangeMembers::RemoveVoters(BTreeSet::from([id]));
        self.raft.change_membership(voters, false).await.map_err(explain)?;
        // One that did not vote yet is no voter that could be removed.
        let left = observed.borrow_watched().membership_config.membership().get_node(&id).is_some();
        if left {
            let nodes = ChangeMembers::RemoveNodes(BTreeSet::from([id]));
            self.raft.change_membership(nodes, false).await.map_err(explain)?;
        }
        tracing::info!(id, "a master has left the group");
        Ok(())
    }

    /// Has the group know the address of this master, which leads: it may be another than at the last start.
    pub async fn publish_address(&self) -> Result {
        let own = self.identity.node_id;
        let known = self.raft.metrics().borrow_watched().membership_config.membership().get_node(&own).cloned();
        if known.is_none_or(|known| known.addr == self.address) {
            return Ok(());
        }
        let nodes = ChangeMembers::SetNodes(BTreeMap::from([(own, Node::new(&self.address))]));
        self.raft.change_membership(nodes, true).await.map(drop).map_err(explain)
    }

    /// Has another master lead: that one, or for 0 whichever has most of the log. Returns who leads then.
    ///
    /// # Errors
    /// [`ConsensusError::Refused`] when there is none who could, [`ConsensusError::Deadline`] when it does not.
    pub async fn hand_over(&self, to: NodeId) -> Result<NodeId> {
        let own = self.identity.node_id;
        let observed = self.raft.metrics();
        let fit = |metrics: &RaftMetrics<Types>| -> Vec<NodeId> {
            let voters = metrics.membership_config.membership().voter_ids();
            voters.filter(|id| *id != own && (to == 0 || *id == to)).collect()
        };
        if to == own {
            return Ok(own);
        }
        // A leader that has just begun has heard of nobody yet.
        let is_there = |metrics: &RaftMetrics<Types>| {
            let fit = fit(metrics);
            fit.is_empty() || fit.into_iter().any(|id| is_alive(metrics, id))
        };
        let _is_there = self.until_within(HEARD, is_there).await;
        let to = {
            let metrics = observed.borrow_watched();
            let fit = fit(&metrics);
            if to != 0 && fit.is_empty() {
                return Err(ConsensusError::NotFound(format!(
                    "the group has no voting master {to}: see `cv raft status`"
                )));
            }
            let matched = |id: &NodeId| metrics.replication.as_ref().and_then(|all| all.get(id).copied().flatten());
            let alive = fit.into_iter().filter(|id| is_alive(&metrics, *id));
            alive.max_by_key(matched).ok_or_else(|| {
                let whom = if to == 0 { "no other master".to_owned() } else { format!("master {to} has not") };
                ConsensusError::Refused(format!("{whom} answered lately: nobody can take the lead"))
            })?
        };
        tracing::info!(to, "handing the lead over");
        if let Some(lead) = self.leads() {
            self.given_away.set(lead);
        }
        self.raft.trigger().transfer_leader(to).await.map_err(fatal)?;
        let leads = |metrics: &RaftMetrics<Types>| {
            metrics.current_leader.is_some_and(|leader| leader != own) || metrics.running_state.is_err()
        };
        if self.until_within(HAND_OVER, leads).await {
            return Ok(observed.borrow_watched().current_leader.unwrap_or(0));
        }
        Err(ConsensusError::Deadline(format!("master {to} did not take the lead within {HAND_OVER:?}")))
    }

    /// Makes a snapshot of all that is applied. The log is cut of what is old enough.
    pub async fn make_snapshot(&self) -> Result {
        let applied = self.raft.metrics().borrow_watched().last_applied;
        let made = |metrics: &RaftMetrics<Types>| metrics.snapshot >= applied || metrics.running_state.is_err();
        let making = async {
            loop {
                // While one is being made, no other is begun, and that one may lack what was applied last.
                self.raft.trigger().snapshot().await.map_err(fatal)?;
                if self.until_within(SNAPSHOT_AGAIN, made).await {
                    return Ok::<_, ConsensusError>(());
                }
            }
        };
        let late = |_elapsed| Err(ConsensusError::Deadline(format!("no snapshot was made within {SNAPSHOT:?}")));
        tokio::time::timeout(SNAPSHOT, making).await.unwrap_or_else(late)
    }

    /// Whether it comes to be so within a time, and before the consensus ends.
    async fn until_within(&self, within: Duration, is_so: impl Fn(&RaftMetrics<Types>) -> bool) -> bool {
        let mut observed = self.raft.metrics();
        tokio::time::timeout(within, observe::until(&mut observed, is_so)).await.unwrap_or(false)
    }
}

/// Where in the log the members are; no two entries have the same number. 0 before there are any.
fn epoch(metrics: &RaftMetrics<Types>) -> u64 {
    let log_id = *metrics.membership_config.log_id();
    log_id.map_or(0, |id| (id.leader_id.term << EPOCH_INDEX_BITS).wrapping_add(id.index).wrapping_add(1))
}

/// Whether the leader has heard of a voter lately.
fn is_alive(metrics: &RaftMetrics<Types>, id: NodeId) -> bool {
    let heard = metrics.heartbeat.as_ref().and_then(|all| all.get(&id).copied().flatten());
    id == metrics.id || heard.is_some_and(|at| at.elapsed() < ALIVE)
}

/// A change of the membership that did not come to be.
fn explain(error: RaftError<Types, ClientWriteError<Types>>) -> ConsensusError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => {
            ConsensusError::NotLeading(observe::forwarded(&forward))
        }
        RaftError::APIError(ClientWriteError::ChangeMembershipError(error)) => {
            ConsensusError::Refused(format!("the group was not changed: {error}"))
        }
        other => fatal(other),
    }
}

//! Several masters: which of them leads, and how far each of them is.

use std::time::Duration;

use cavern_conf::Config;
use cavern_net::master::channel;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{GetGroupRequest, Group};
use cavern_security::Transport;
use tonic::transport::Endpoint;

use crate::cluster::Cluster;
use crate::wait::eventually;

/// For one master to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// For an election, or for a master to get what it lacks, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Cluster {
    /// What each master says of the group, in the order of the status; `None` for one that does not answer.
    #[track_caller]
    pub fn groups(&self) -> Vec<Option<Group>> {
        ask_masters(&self.master_addresses(), &self.transport())
    }

    /// The number of the master that leads; waits for one.
    #[track_caller]
    pub fn leader(&self) -> usize {
        let (addresses, transport) = (self.master_addresses(), self.transport());
        eventually("a master leads", PATIENCE, || leading_master(&ask_masters(&addresses, &transport)))
    }

    /// The number of the master that leads, as soon as it is another one than this.
    #[track_caller]
    pub fn leader_other_than(&self, number: usize) -> usize {
        let (addresses, transport) = (self.master_addresses(), self.transport());
        eventually("another master leads", PATIENCE, || {
            leading_master(&ask_masters(&addresses, &transport)).filter(|leader| *leader != number)
        })
    }

    /// SIGKILL for the master that leads; answers its number.
    #[track_caller]
    pub fn kill_leader(&self) -> usize {
        let leader = self.leader();
        self.kill(&format!("master{leader}"));
        leader
    }

    /// Waits until every master has a vote, follows the same leader, and has applied what is committed now.
    #[track_caller]
    pub fn masters_agree(&self) {
        let (addresses, transport) = (self.master_addresses(), self.transport());
        let mut committed = None;
        eventually("all masters agree", PATIENCE, || {
            masters_agree(&ask_masters(&addresses, &transport), &mut committed)
        });
    }

    /// How its admin connects.
    fn transport(&self) -> Transport {
        Transport::of(&Config::load(Some(&self.at_start.conf)).unwrap()).unwrap()
    }

    #[track_caller]
    fn master_addresses(&self) -> Vec<String> {
        self.status().masters.into_iter().map(|master| master.grpc).collect()
    }
}

/// Whether every master has a vote, follows the same leader, and has applied what was committed at the first question.
pub fn masters_agree(groups: &[Option<Group>], committed: &mut Option<u64>) -> Option<()> {
    let leader = groups[leading_master(groups)?].clone()?;
    let groups: Vec<&Group> = groups.iter().map(Option::as_ref).collect::<Option<_>>()?;
    let committed = *committed.get_or_insert(leader.committed_index);
    let is_member = |group: &Group| {
        let member = leader.members.iter().find(|member| member.node_id == group.node_id);
        member.is_some_and(|member| member.votes)
    };
    let agrees = |group: &&Group| {
        group.cluster_id == leader.cluster_id
            && (group.leader, group.term) == (leader.node_id, leader.term)
            && group.applied_index >= committed
            && is_member(group)
    };
    (leader.members.len() == groups.len() && groups.iter().all(agrees)).then_some(())
}

/// Of those that believe they lead, the one whose term is the highest: another one was stopped, and does not know yet.
pub fn leading_master(groups: &[Option<Group>]) -> Option<usize> {
    let groups = groups.iter().enumerate().filter_map(|(number, group)| Some((number, group.as_ref()?)));
    let leaders = groups.filter(|(_, group)| group.node_id != 0 && group.leader == group.node_id);
    leaders.max_by_key(|(_, group)| group.term).map(|(number, _)| number)
}

/// What each master says of the group; `None` for one that does not answer.
#[track_caller]
pub fn ask_masters(addresses: &[String], transport: &Transport) -> Vec<Option<Group>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let one = async |address: &String| {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_timeout(ANSWER);
        let answer = async {
            let mut master = RaftClient::new(channel(&endpoint, transport));
            master.get_group(GetGroupRequest {}).await.ok().map(tonic::Response::into_inner)
        };
        tokio::time::timeout(ANSWER, answer).await.ok().flatten()
    };
    runtime.block_on(futures::future::join_all(addresses.iter().map(one)))
}

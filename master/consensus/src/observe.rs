//! What the consensus shows of itself, as it changes.

use cavern_proto::NotLeading;
use openraft::RaftMetrics;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::ForwardToLeader;
use openraft::type_config::alias::WatchReceiverOf;

use super::types::{Node, NodeId, Types};

/// The latest that there is to see.
pub type Observed = WatchReceiverOf<Types, RaftMetrics<Types>>;

/// Returns when it is so, or when the consensus has ended: then false.
pub async fn until(observed: &mut Observed, is_so: impl Fn(&RaftMetrics<Types>) -> bool) -> bool {
    loop {
        if is_so(&observed.borrow_and_update()) {
            return true;
        }
        if observed.changed().await.is_err() {
            return false;
        }
    }
}

/// The answer of a master that does not lead, as it sees the group.
pub fn not_leading(observed: &RaftMetrics<Types>, own: NodeId) -> NotLeading {
    let leader = observed.current_leader.filter(|leader| *leader != own);
    at(leader.and_then(|leader| observed.membership_config.membership().get_node(&leader)))
}

/// The answer of a master that does not lead, to what the consensus refused for that.
pub fn forwarded(forward: &ForwardToLeader<Types>) -> NotLeading {
    at(forward.leader_node.as_ref())
}

fn at(leader: Option<&Node>) -> NotLeading {
    NotLeading { leader: leader.map(|node| node.addr.clone()) }
}

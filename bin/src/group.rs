//! The masters of a cluster, each reached by itself ([`Dial`]), and what they say of their group ([`Survey`]).

mod connection;
mod survey;

use cavern_proto::raft::Group;

pub use self::connection::Dial;
pub use self::survey::{GroupView, MasterRole, MasterView, Survey, leads};
use crate::console;

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

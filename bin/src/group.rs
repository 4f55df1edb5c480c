//! The masters of a cluster, as commands reach them: the one that leads ([`Leader`]), whichever of them leads a change
//! of the group ([`ask_leader`]), and each by itself ([`Survey`]).

mod connection;
mod leader;
mod survey;

pub use self::connection::{
    Attempt, Dial, ELECTION_PATIENCE, ELECTION_POLL, ask_leader, remark_unaware, unreachable, until_answered,
};
pub use self::leader::{Leader, new_request_id};
pub use self::survey::{GroupView, MasterRole, MasterView, Survey};

//! What each command makes of the state, one file for each thing that commands are about. None knows how commands come
//! to it: [`apply`](crate::apply) does.

pub mod existing;
pub mod external;
pub mod lost;
pub mod mend;
pub mod mount;
pub mod mutate;
pub mod namespace;
pub mod orphans;
pub mod persist;
pub mod registry;
pub mod replicas;
pub mod requests;
pub mod results;
pub mod views;

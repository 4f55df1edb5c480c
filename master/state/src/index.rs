//! What commands keep true beside the records that they are about: where blocks are, which of them views have, what the
//! bucket lacks, names of inodes that have several, what is held, how much is below directories, and which attributes
//! mounts may have. Each is a function of a transaction and of records; none knows who asks, or for what.

pub mod delegations;
pub mod extents;
pub mod inodes;
pub mod intents;
pub mod origins;
pub mod probed_xattrs;
pub mod space;
pub mod usage;
pub mod views;

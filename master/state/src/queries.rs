//! What the masters ask of the state beyond single records: pages, counts and lists for those who work on it, and
//! whether somebody may do something. No command reads any of it.

mod access;
mod bucket;
mod content;
mod replicas;
mod rules;
mod sessions;

pub use access::{blocking_lock, may_access, may_have_layout};
pub use bucket::PendingDeletion;
pub use content::{has_content, is_clean};
pub use replicas::StrayReplica;

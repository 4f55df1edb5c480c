//! Mounts that come, change and go.

use std::sync::Arc;

use cavern_consensus::Proposer;

use super::claim::{Claims, TakeOver};
use crate::namespace::Lookups;
use crate::persist::Persistence;

/// What changes of mounts work with. Cheap to clone.
#[derive(Clone)]
pub struct MountChanges {
    pub lookups: Lookups,
    pub persistence: Arc<Persistence>,
    pub proposer: Proposer,
    pub claims: Claims,
}

/// What is to be done about a mount request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountPolicy {
    /// It is verified only.
    Check(TakeOver),
    Record(TakeOver),
}

/// What becomes of changes that the bucket of an fs-mode mount lacks when it is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachPolicy {
    /// They are written, or the mount stays.
    Keep,
    Discard,
}

//! What holds a key of the credentials, as logs may show it: an invitation into a cluster, and another key.

use std::fmt;

use crate::raft::{JoinRequest, TakeKeyRequest};

impl fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinRequest")
            .field("cluster_id", &self.cluster_id)
            .field("node_id", &self.node_id)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for TakeKeyRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TakeKeyRequest")
            .field("target", &self.target)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

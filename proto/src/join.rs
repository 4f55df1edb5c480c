//! An invitation into a cluster as logs may show it: it holds the key of the credentials.

use std::fmt;

use crate::raft::JoinRequest;

impl fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinRequest")
            .field("cluster_id", &self.cluster_id)
            .field("node_id", &self.node_id)
            .finish_non_exhaustive()
    }
}

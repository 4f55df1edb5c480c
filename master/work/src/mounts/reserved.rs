//! Names of objects that a cluster keeps for itself in a bucket, below the prefix of a mount. No file of an fs-mode
//! mount comes from one of them.

/// Tells other clusters whose the prefix is ([`claim`](super::claim)).
pub const CLAIM: &str = ".cavern-cluster";
/// Begins the names of objects that were written once more, out of the way of others; the cluster's id follows.
pub const PRESERVED: &str = ".cavern-preserved-";

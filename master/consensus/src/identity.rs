//! Who this master is: its id, and the cluster that it is a member of. It is given a place once, and keeps it for as
//! long as it has its data: one that has lost them is another master, and needs another place, since it no longer knows
//! how it voted.

use cavern_state::{Database, Family};
use rocksdb::WriteBatch;
use serde::{Deserialize, Serialize};

use super::types::{NodeId, from_json, to_json};
use crate::error::Result;

const IDENTITY_KEY: &[u8] = b"identity";
/// The first master of every cluster.
pub const FIRST_NODE: NodeId = 1;

/// The id of this master, and its cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub cluster_id: String,
    pub node_id: NodeId,
    /// The addresses of all members, in the order of their ids, where this master is the one that begins the cluster.
    pub founds: Option<Vec<String>>,
}

impl Identity {
    /// The place that a database has; none for an empty one.
    pub fn read(database: &Database) -> Result<Option<Self>> {
        let bytes = database.get(Family::RaftMeta, IDENTITY_KEY)?;
        bytes.map(|bytes| from_json(&bytes, "the identity of this master")).transpose()
    }

    /// Keeps the place, on disk when this returns. *Blocking*.
    pub fn write(&self, database: &Database) -> Result {
        let mut batch = WriteBatch::default();
        batch.put_cf(database.family(Family::RaftMeta), IDENTITY_KEY, to_json(self, "an identity")?);
        Ok(database.write_synced(batch)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        assert_eq!(Identity::read(&database).unwrap(), None);
        let new = Identity { cluster_id: "new".into(), node_id: 3, founds: Some(vec!["a:1".into()]) };
        new.write(&database).unwrap();
        assert_eq!(Identity::read(&database).unwrap(), Some(new));
    }
}

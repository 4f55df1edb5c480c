//! Who this master is: its id, and the cluster that it is a member of. It is given a place once, and keeps it for as
//! long as it has its data: one that has lost them is another master, and needs another place, since it no longer knows
//! how it voted.

use rocksdb::WriteBatch;
use serde::{Deserialize, Serialize};

use super::types::{NodeId, from_json, to_json};
use crate::MasterError;
use crate::state::{Database, Family, Tables};

const IDENTITY_KEY: &[u8] = b"identity";
/// The first master of every cluster.
pub const FIRST_NODE: NodeId = 1;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub cluster_id: String,
    pub node_id: NodeId,
    /// The addresses of all members, in the order of their ids, where this master is the one that begins the cluster.
    pub founds: Option<Vec<String>>,
}

impl Identity {
    /// The place that a database has; none for an empty one.
    pub fn read(database: &Database) -> Result<Option<Self>, MasterError> {
        if let Some(bytes) = database.get(Family::RaftMeta, IDENTITY_KEY)? {
            return from_json(&bytes, "the identity of this master").map(Some);
        }
        // What versions for one master have left.
        let cluster_id = Tables::new(database).cluster_id()?;
        Ok(cluster_id.map(|cluster_id| Self { cluster_id, node_id: FIRST_NODE, founds: None }))
    }

    /// Keeps the place, on disk when this returns. *Blocking*.
    pub fn write(&self, database: &Database) -> Result<(), MasterError> {
        let mut batch = WriteBatch::default();
        batch.put_cf(database.family(Family::RaftMeta), IDENTITY_KEY, to_json(self, "an identity")?);
        database.write_synced(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_kept_and_one_of_an_earlier_version_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        assert_eq!(Identity::read(&database).unwrap(), None);
        let mut batch = WriteBatch::default();
        batch.put_cf(database.family(Family::Meta), crate::state::tables::CLUSTER_KEY, b"old");
        database.write(batch).unwrap();
        let old = Identity { cluster_id: "old".into(), node_id: FIRST_NODE, founds: None };
        assert_eq!(Identity::read(&database).unwrap(), Some(old));
        let new = Identity { cluster_id: "new".into(), node_id: 3, founds: Some(vec!["a:1".into()]) };
        new.write(&database).unwrap();
        assert_eq!(Identity::read(&database).unwrap(), Some(new));
    }
}

//! The types that openraft is instantiated with, and their encoding in the log.

use std::path::PathBuf;

use cavern_proto::record::log_record::Payload;
use cavern_proto::record::{CommandBatch, LogRecord};
use cavern_state::Outcome;
use openraft::EntryPayload;
use openraft::impls::{BasicNode, leader_id_adv};
use openraft::type_config::alias::{DefaultEntryOf, LogIdOf, SnapshotMetaOf, SnapshotOf, StoredMembershipOf, VoteOf};
use prost::Message;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::error::{ConsensusError, Result};

pub type NodeId = u64;
pub type Node = BasicNode;
/// One leadership of one master.
pub type LeaderId = leader_id_adv::LeaderId<u64, NodeId>;
pub type LogId = LogIdOf<Types>;
pub type Vote = VoteOf<Types>;
pub type Membership = openraft::Membership<NodeId, Node>;
pub type StoredMembership = StoredMembershipOf<Types>;
pub type Entry = DefaultEntryOf<Types>;
/// What a snapshot is of.
pub type Meta = SnapshotMetaOf<Types>;
pub type Snapshot = SnapshotOf<Types, Checkpoint>;

#[cfg(not(test))]
pub type Runtime = openraft_rt_tokio::TokioRuntime;
/// What openraft runs on where a simulation owns time and chance.
#[cfg(test)]
pub type Runtime = super::simulation::SeededRuntime;

openraft::declare_raft_types!(
    /// Everything that openraft must know about a master.
    pub Types:
        D = Batch,
        R = Outcomes,
        NodeId = NodeId,
        Node = Node,
        AsyncRuntime = Runtime,
);

/// A snapshot's content: the directory of a RocksDB checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub directory: PathBuf,
}

/// The commands of one log entry.
#[derive(Clone, Debug, Default)]
pub struct Batch(pub CommandBatch);

/// What each command of an entry did, in their order; empty for entries of the consensus itself.
#[derive(Clone, Debug, Default)]
pub struct Outcomes(pub Vec<Outcome>);

impl std::fmt::Display for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} commands", self.0.commands.len())
    }
}

// openraft demands serde for what it might send between nodes. The log has its own encoding (below), and outcomes
// never leave the process that proposed.
impl Serialize for Batch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0.encode_to_vec())
    }
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Vec::<u8>::deserialize(deserializer)?;
        CommandBatch::decode(bytes.as_slice()).map(Self).map_err(de::Error::custom)
    }
}

impl Serialize for Outcomes {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(ser::Error::custom("outcomes stay in the process that proposed"))
    }
}

impl<'de> Deserialize<'de> for Outcomes {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(de::Error::custom("outcomes stay in the process that proposed"))
    }
}

/// An entry as the log and the network have it.
pub fn record_of_entry(entry: Entry) -> Result<LogRecord> {
    let Entry { log_id, payload } = entry;
    let payload = match payload {
        EntryPayload::Blank => Payload::Blank(true),
        EntryPayload::Normal(Batch(commands)) => Payload::Commands(commands),
        EntryPayload::Membership(membership) => Payload::Membership(to_json(&membership, "a membership")?.into()),
    };
    let (leader, index) = (log_id.leader_id, log_id.index);
    Ok(LogRecord { term: leader.term, node_id: leader.node_id, index, payload: Some(payload) })
}

/// The reverse of [`record_of_entry`].
pub fn entry_of_record(record: LogRecord) -> Result<Entry> {
    let corrupt = || ConsensusError::corrupt("an entry of the log".into());
    let payload = match record.payload.ok_or_else(corrupt)? {
        Payload::Blank(_) => EntryPayload::Blank,
        Payload::Commands(batch) => EntryPayload::Normal(Batch(batch)),
        Payload::Membership(json) => {
            EntryPayload::Membership(from_json::<Membership>(&json, "a membership of the log")?)
        }
    };
    Ok(Entry { log_id: log_id(record.term, record.node_id, record.index), payload })
}

/// An entry as the log keeps it, and the entry itself, which is needed for a moment without a copy.
pub fn encode_entry(entry: Entry) -> Result<(Vec<u8>, Entry)> {
    let log_id = entry.log_id;
    // A membership is kept as JSON, and is small.
    let membership = match &entry.payload {
        EntryPayload::Membership(membership) => Some(membership.clone()),
        _ => None,
    };
    let record = record_of_entry(entry)?;
    let bytes = record.encode_to_vec();
    let payload = match (record.payload, membership) {
        (Some(Payload::Commands(commands)), _) => EntryPayload::Normal(Batch(commands)),
        (_, Some(membership)) => EntryPayload::Membership(membership),
        _ => EntryPayload::Blank,
    };
    Ok((bytes, Entry { log_id, payload }))
}

/// An entry from the log.
pub fn decode_entry(bytes: &[u8]) -> Result<Entry> {
    entry_of_record(LogRecord::decode(bytes).map_err(|_| ConsensusError::corrupt("an entry of the log".into()))?)
}

/// A position in the log.
pub fn log_id(term: u64, node_id: NodeId, index: u64) -> LogId {
    LogId::new(leader_id_adv::LeaderId { term, node_id }, index)
}

/// Small records of the consensus, as JSON.
pub fn to_json(value: &impl Serialize, what: &str) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| ConsensusError::corrupt(format!("{what} ({error})")))
}

/// The reverse of [`to_json`].
pub fn from_json<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|_| ConsensusError::corrupt(what.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use cavern_proto::record::{Command, InitCluster, command};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn entries_survive_the_round_trip() {
        let init = command::Command::Init(InitCluster { cluster_id: "c".into(), now_ns: -5, feature_version: 1 });
        let batch = CommandBatch { commands: vec![Command { command: Some(init) }], now_ns: 7 };
        let nodes = BTreeMap::from([(1, Node::new("a:1")), (2, Node::new("b:1"))]);
        let membership = Membership::new(vec![BTreeSet::from([1, 2])], nodes).unwrap();
        for payload in
            [EntryPayload::Blank, EntryPayload::Normal(Batch(batch.clone())), EntryPayload::Membership(membership)]
        {
            let entry = Entry { log_id: log_id(3, 1, 77), payload };
            let (bytes, entry) = encode_entry(entry).unwrap();
            let back = decode_entry(&bytes).unwrap();
            assert_eq!(back.log_id, entry.log_id);
            match (back.payload, entry.payload) {
                (EntryPayload::Blank, EntryPayload::Blank) => {}
                (EntryPayload::Normal(back), EntryPayload::Normal(_)) => assert_eq!(back.0, batch),
                (EntryPayload::Membership(back), EntryPayload::Membership(want)) => assert_eq!(back, want),
                (back, want) => panic!("{back:?} for {want:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode_entry(&bytes);
        }
    }
}

//! What the client keeps for its successor. New fields may be added: an executable of another version reads them.

use prost::Message;

/// The field of a record that a mutation is.
const MUTATION_TAG: u32 = 4;
/// Bytes of a length, or of a field's key, at most.
const LENGTH_BYTES: usize = 5;

/// A change that the master was asked for.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ChangeRecord {
    #[prost(uint64, tag = "1")]
    pub session: u64,
    #[prost(uint64, tag = "2")]
    pub seq: u64,
    /// The request of the kernel that it belongs to; 0 for none.
    #[prost(uint64, tag = "3")]
    pub unique: u64,
    /// A `Mutation`, encoded.
    #[prost(bytes = "vec", tag = "4")]
    pub mutation: Vec<u8>,
    /// Of a change that was answered before it was sent (`seq` 0): they are sent in this order.
    #[prost(uint64, tag = "5")]
    pub order: u64,
}

impl ChangeRecord {
    /// The record with this mutation in place of its own, which is not encoded by itself before.
    pub fn encode_with(&self, mutation: &impl Message) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.encoded_len() + mutation.encoded_len() + 2 * LENGTH_BYTES);
        self.encode_raw(&mut bytes);
        prost::encoding::message::encode(MUTATION_TAG, mutation, &mut bytes);
        bytes
    }
}

/// What was written to a file and is not committed, or not known to be on disks.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ContentRecord {
    #[prost(uint64, tag = "1")]
    pub inode: u64,
    #[prost(uint64, tag = "2")]
    pub size: u64,
    #[prost(uint64, tag = "3")]
    pub grow_to: u64,
    #[prost(bool, tag = "4")]
    pub changed: bool,
    #[prost(int64, tag = "5")]
    pub written_ns: i64,
    #[prost(uint32, tag = "6")]
    pub generation: u32,
    #[prost(message, repeated, tag = "7")]
    pub blocks: Vec<BlockRecord>,
    #[prost(uint32, repeated, tag = "8")]
    pub unsynced: Vec<u32>,
}

impl ContentRecord {
    /// Whether the master lacks something of it.
    pub fn is_uncommitted(&self) -> bool {
        self.changed || self.grow_to != 0 || !self.blocks.is_empty()
    }
}

/// One of its blocks.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct BlockRecord {
    #[prost(uint32, tag = "1")]
    pub index: u32,
    #[prost(uint32, tag = "2")]
    pub generation: u32,
    #[prost(uint64, repeated, tag = "3")]
    pub workers: Vec<u64>,
    #[prost(uint32, repeated, tag = "4")]
    pub joined: Vec<u32>,
    #[prost(bool, tag = "5")]
    pub is_made: bool,
    #[prost(bool, tag = "6")]
    pub is_written: bool,
    #[prost(bool, tag = "7")]
    pub is_urgent: bool,
    #[prost(bool, tag = "8")]
    pub is_committed: bool,
}

/// Bytes that were taken to be written behind; they lie behind the record.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct WriteRecord {
    #[prost(uint64, tag = "1")]
    pub inode: u64,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    #[prost(uint64, tag = "3")]
    pub length: u64,
    /// Pieces of a file are written in this order.
    #[prost(uint64, tag = "4")]
    pub order: u64,
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::Mutation;

    use super::*;

    #[test]
    fn a_mutation_that_is_encoded_in_its_place_is_read_as_one_of_the_record() {
        let mutation = Mutation { seq: 300, uid: 7, made_ns: 9, ..Mutation::default() };
        let record = ChangeRecord { session: 1 << 60, seq: 300, unique: 5, order: 8, ..ChangeRecord::default() };
        let read = ChangeRecord::decode(&record.encode_with(&mutation)[..]).unwrap();
        assert_eq!(read, ChangeRecord { mutation: mutation.encode_to_vec(), ..record });
    }
}

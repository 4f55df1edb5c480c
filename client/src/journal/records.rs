//! How a change is entered: the other records are encoded as they are.

use cavern_proto::journal::ChangeRecord;
use prost::Message;

/// The field of a record that a mutation is.
const MUTATION_TAG: u32 = 4;
/// Bytes of a length, or of a field's key, at most.
const LENGTH_BYTES: usize = 5;

/// The record with this mutation in place of its own, which is not encoded by itself before.
pub(super) fn encode_change(record: &ChangeRecord, mutation: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(record.encoded_len() + mutation.encoded_len() + 2 * LENGTH_BYTES);
    record.encode_raw(&mut bytes);
    prost::encoding::message::encode(MUTATION_TAG, mutation, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::Mutation;

    use super::*;

    #[test]
    fn a_mutation_that_is_encoded_in_its_place_is_read_as_one_of_the_record() {
        let mutation = Mutation { seq: 300, uid: 7, made_ns: 9, ..Mutation::default() };
        let record = ChangeRecord { session: 1 << 60, seq: 300, unique: 5, order: 8, ..ChangeRecord::default() };
        let read = ChangeRecord::decode(&encode_change(&record, &mutation)[..]).unwrap();
        assert_eq!(read, ChangeRecord { mutation: mutation.encode_to_vec().into(), ..record });
    }
}

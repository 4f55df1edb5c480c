//! Decoding what a peer sent, with a bound on what it may become.
//!
//! An empty element of a repeated message takes two bytes on the wire and a hundred or more in memory: four megabytes
//! that are a valid message could become half a gigabyte. All repeated messages of the data plane stand at the top
//! level of their message (below it are small ones at most), so the fields of that level are counted before anything is
//! decoded. Of what clients may send to masters only changes have any, and blocks within them: [`BoundedCodec`] counts
//! both.

use std::any::TypeId;
use std::marker::PhantomData;

use bytes::{Buf as _, Bytes};
use prost::Message;
use prost::encoding::decode_varint;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::master::MutateRequest;

/// Elements that a request or an answer may have at most.
pub const MAX_ITEMS: usize = 10_000;
/// The elements, and beside them the fields that are not repeated.
const MAX_FIELDS: usize = MAX_ITEMS + 16;

/// Changes that a call of `Mutate` may have.
pub const MAX_CHANGES: usize = 1000;
/// Blocks in all of them.
const MAX_BLOCKS: usize = 50_000;
/// Numbers of changes of a session whose results a master keeps, beyond the last one that the session says it has.
pub const MAX_CACHED_RESULTS: u64 = 1 << 18;
/// Bytes of these results.
pub const MAX_CACHED_RESULT_BYTES: u64 = 64 << 20;
/// Bytes of a reason in a result: one with the path of a deep directory has a megabyte.
pub const MAX_REASON_BYTES: usize = 4096;

/// Where these are: `mutations`, `commit` in one of them, and `made` in that.
const MUTATIONS: u64 = 2;
const COMMIT: u64 = 13;
const MADE: u64 = 3;

/// Decodes a message of the data plane.
///
/// # Errors
/// It is no message of this type, or has more elements than any request needs.
pub fn decode<M: Message + Default>(message: Bytes) -> Result<M, String> {
    if has_more_fields_than(&message, MAX_FIELDS) {
        return Err(format!("the message has more than {MAX_FIELDS} fields"));
    }
    M::decode(message).map_err(malformed)
}

fn malformed(error: prost::DecodeError) -> String {
    format!("the message cannot be decoded: {error}")
}

/// Decodes the messages of masters. Only those with changes are counted: of others no client can make much.
#[derive(Clone, Copy, Debug)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Message + Default + 'static> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = source.copy_to_bytes(source.remaining());
        if TypeId::of::<U>() == TypeId::of::<MutateRequest>() {
            check_changes(&message).map_err(Status::invalid_argument)?;
        }
        U::decode(message).map(Some).map_err(|error| Status::internal(malformed(error)))
    }
}

fn check_changes(call: &[u8]) -> Result<(), String> {
    let (mut changes, mut blocks) = (0, 0);
    for (_, change) in Fields(call).filter(|(number, _)| *number == MUTATIONS) {
        changes += 1;
        for (_, commit) in Fields(change).filter(|(number, _)| *number == COMMIT) {
            blocks += Fields(commit).filter(|(number, _)| *number == MADE).count();
        }
        if changes > MAX_CHANGES || blocks > MAX_BLOCKS {
            return Err(format!("a call has at most {MAX_CHANGES} changes, and {MAX_BLOCKS} blocks in them"));
        }
    }
    Ok(())
}

/// How many fields there are at the top level of a message, repeated ones each time: at least as many as it has
/// elements.
pub fn count_fields(message: &[u8]) -> usize {
    Fields(message).take(MAX_FIELDS).count()
}

fn has_more_fields_than(message: &[u8], limit: usize) -> bool {
    Fields(message).take(limit + 1).count() > limit
}

/// The numbers of the fields of a message, and what is in those that have a length. What is malformed ends the walk:
/// the decoder will say what is wrong.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let tag = decode_varint(&mut self.0).ok()?;
        let length = match tag & 7 {
            0 => decode_varint(&mut self.0).ok().map(|_| 0),
            1 => Some(8),
            2 => decode_varint(&mut self.0).ok(),
            5 => Some(4),
            // Groups, which proto3 does not have: the decoder skips them, field by field.
            3 | 4 => Some(0),
            _ => None,
        };
        let length = length.and_then(|bytes| usize::try_from(bytes).ok());
        let parts = length.and_then(|length| self.0.split_at_checked(length));
        let (field, rest) = parts.unwrap_or_default();
        self.0 = rest;
        Some((tag >> 3, field))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::{BlockRef, CorruptRequest, QueryRequest, ReadRequest, read_request};
    use crate::master::mutation::Change;
    use crate::master::{CommitContent, Extent, Mutation};

    #[test]
    fn what_a_request_needs_passes_and_an_element_more_than_that_does_not() {
        let request = |count| {
            let item = read_request::Item {
                block: Some(BlockRef { key: "k".repeat(100), ..BlockRef::default() }),
                range: None,
                part: None,
            };
            let request = ReadRequest { items: vec![item; count], deadline_ms: 5 };
            decode::<ReadRequest>(request.encode_to_vec().into())
        };
        assert_eq!(request(MAX_ITEMS).unwrap().items.len(), MAX_ITEMS);
        assert!(request(MAX_ITEMS + 100).unwrap_err().contains("fields"));
        let bomb = Bytes::from([0x0a, 0].repeat(2 << 20));
        assert!(decode::<QueryRequest>(bomb).unwrap_err().contains("fields"));
        // A packed list is one field.
        let chunks = CorruptRequest { block: None, chunks: (0..100_000).collect() };
        assert_eq!(decode(chunks.encode_to_vec().into()), Ok(chunks));
    }

    #[test]
    fn changes_and_their_blocks_are_counted_before_they_are_decoded() {
        let commit = |blocks| {
            let made = vec![Extent::default(); blocks];
            let change = Some(Change::Commit(CommitContent { made, ..CommitContent::default() }));
            Mutation { change, ..Mutation::default() }
        };
        let check = |mutations| check_changes(&MutateRequest { mutations, ..MutateRequest::default() }.encode_to_vec());
        assert_eq!(check(vec![commit(MAX_BLOCKS / MAX_CHANGES); MAX_CHANGES]), Ok(()));
        assert_eq!(check(vec![commit(MAX_BLOCKS)]), Ok(()));
        for refused in [
            check(vec![commit(0); MAX_CHANGES + 1]),
            check(vec![commit(MAX_BLOCKS), commit(1)]),
            check_changes(&[0x12, 0].repeat(1 << 19)),
        ] {
            assert!(refused.unwrap_err().contains("at most"));
        }
    }

    proptest! {
        #[test]
        fn changes_are_counted_whatever_the_bytes_are(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let _ = check_changes(&bytes);
        }

        #[test]
        fn garbage_is_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let _ = decode::<ReadRequest>(bytes.into());
        }

        #[test]
        fn the_count_is_right(fields in prop::collection::vec((1u64..2000, any::<u32>()), 0..50)) {
            let mut message = Vec::new();
            for (number, value) in &fields {
                prost::encoding::encode_varint(number << 3, &mut message);
                prost::encoding::encode_varint(u64::from(*value), &mut message);
            }
            prop_assert!(!has_more_fields_than(&message, fields.len()));
            prop_assert!(fields.is_empty() || has_more_fields_than(&message, fields.len() - 1));
        }
    }
}

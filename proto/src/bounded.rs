//! Decoding what a peer sent, with a bound on what it may become.
//!
//! An empty element of a repeated message takes two bytes on the wire and a hundred or more in memory: four megabytes
//! that are a valid message could become half a gigabyte. All repeated messages of the data plane stand at the top
//! level of their message (below it are small ones at most), so the fields of that level are counted before anything is
//! decoded.

use bytes::Bytes;
use prost::Message;
use thiserror::Error;

/// Elements that a request or an answer may have at most.
pub const MAX_ITEMS: usize = 10_000;
/// The elements, and beside them the fields that are not repeated.
const MAX_FIELDS: usize = MAX_ITEMS + 16;

/// Why bytes are no message.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum MessageError {
    #[error("the message has more than {MAX_FIELDS} fields")]
    TooMany,
    #[error("the message cannot be decoded: {0}")]
    Malformed(#[from] prost::DecodeError),
}

/// Decodes a message of the data plane.
///
/// # Errors
/// It is no message of this type, or has more elements than any request needs.
pub fn decode<M: Message + Default>(message: Bytes) -> Result<M, MessageError> {
    if has_more_fields_than(&message, MAX_FIELDS) {
        return Err(MessageError::TooMany);
    }
    Ok(M::decode(message)?)
}

/// Walks over the fields of the top level. What is malformed ends the walk: the decoder will say what is wrong.
fn has_more_fields_than(mut message: &[u8], limit: usize) -> bool {
    let mut fields = 0;
    while let Some(tag) = varint(&mut message) {
        fields += 1;
        if fields > limit {
            return true;
        }
        let skipped = match tag & 7 {
            0 => varint(&mut message).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut message),
            5 => Some(4),
            // Groups, which proto3 does not have: the decoder skips them, field by field.
            3 | 4 => Some(0),
            _ => None,
        };
        let rest = skipped.and_then(|bytes| usize::try_from(bytes).ok()).and_then(|bytes| message.get(bytes..));
        let Some(rest) = rest else { return false };
        message = rest;
    }
    false
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::{BlockRef, CorruptRequest, QueryRequest, ReadRequest, read_request};

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
        assert_eq!(request(MAX_ITEMS + 100), Err(MessageError::TooMany));
        let bomb = Bytes::from([0x0a, 0].repeat(2 << 20));
        assert_eq!(decode::<QueryRequest>(bomb), Err(MessageError::TooMany));
        // A packed list is one field.
        let chunks = CorruptRequest { block: None, chunks: (0..100_000).collect() };
        assert_eq!(decode(chunks.encode_to_vec().into()), Ok(chunks));
    }

    proptest! {
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

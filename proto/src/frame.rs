//! The frame of the data plane: a fixed header, a prost message, a raw payload.
//!
//! ```text
//!  0      4      5      6      8            16             20             24
//!  | CVD1 | kind | zero | zero | request id | message len  | payload len  | message … | payload …
//! ```
//!
//! Integers are little-endian. Many requests are in flight on one connection and are answered out of order; the
//! request id, chosen by the client, ties an answer to its request, and 0 is for what a worker sends unasked. The
//! payload follows the message without padding, so that a client can read it into the place where it is wanted.

use thiserror::Error;

use crate::data;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 24;
/// Longest message that a peer accepts. A batch of 1,000 block references with long keys fits.
pub const MAX_MESSAGE_BYTES: u32 = 4 << 20;
/// Longest payload that a peer accepts.
pub const MAX_PAYLOAD_BYTES: u32 = 64 << 20;
/// Longest payload of a write, the one request that has a payload.
pub const MAX_WRITE_BYTES: u32 = 8 << 20;
/// Version of the frames and messages, exchanged in `Hello`.
pub const PROTOCOL_VERSION: u32 = 2;

const MAGIC: [u8; 4] = *b"CVD1";

macro_rules! kinds {
    ($($kind:ident = $number:literal,)+) => {
        /// What a frame carries: the message type of the same name in `proto/data.proto`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub enum FrameKind {
            $($kind = $number,)+
        }

        impl FrameKind {
            pub const ALL: [Self; [$($number),+].len()] = [$(Self::$kind),+];
        }
    };
}

kinds! {
    Hello = 1,
    Read = 2,
    ReadReply = 3,
    Open = 4,
    OpenReply = 5,
    Fill = 6,
    FillReply = 7,
    Query = 8,
    QueryReply = 9,
    Free = 10,
    FreeReply = 11,
    Corrupt = 12,
    CorruptReply = 13,
    Evicted = 14,
    Cancel = 15,
    Failure = 16,
    Reserve = 17,
    ReserveReply = 18,
    Write = 19,
    WriteReply = 20,
    Sync = 21,
    SyncReply = 22,
    Persist = 23,
    PersistReply = 24,
    Copy = 40,
    CopyReply = 41,
    Inspect = 42,
    InspectReply = 43,
}

/// A request to a worker: the frames that it and its answer are in, and what the answer is.
pub trait Call: prost::Message {
    type Reply: prost::Message + Default;
    const KIND: FrameKind;
    const ANSWER: FrameKind;
}

macro_rules! calls {
    ($($kind:ident: $request:ident => $reply:ident,)+) => {
        $(impl Call for data::$request {
            type Reply = data::$reply;
            const KIND: FrameKind = FrameKind::$kind;
            const ANSWER: FrameKind = FrameKind::$reply;
        })+
    };
}

calls! {
    Read: ReadRequest => ReadReply,
    Open: OpenRequest => OpenReply,
    Fill: FillRequest => FillReply,
    Query: QueryRequest => QueryReply,
    Free: FreeRequest => FreeReply,
    Corrupt: CorruptRequest => CorruptReply,
    Reserve: ReserveRequest => ReserveReply,
    Write: WriteRequest => WriteReply,
    Sync: SyncRequest => SyncReply,
    Persist: PersistRequest => PersistReply,
    Copy: CopyRequest => CopyReply,
    Inspect: InspectRequest => InspectReply,
}

/// Why 24 bytes are no header. The connection that carried them cannot be used further.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    #[error("not a data-plane frame (begins with {0:02x?}): is the peer speaking another protocol?")]
    Magic([u8; 4]),
    #[error("unknown frame kind {0}: is the peer of a newer version?")]
    Kind(u8),
    #[error("reserved header bytes are not zero: the stream is out of step or corrupt")]
    Reserved,
    #[error("message of {0} bytes, more than the limit of {MAX_MESSAGE_BYTES}")]
    Message(u32),
    #[error("payload of {0} bytes, more than the limit of {MAX_PAYLOAD_BYTES}")]
    Payload(u32),
}

/// The fixed part of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    pub kind: FrameKind,
    pub request_id: u64,
    pub message_bytes: u32,
    pub payload_bytes: u32,
}

impl FrameHeader {
    /// The header as it goes over the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.message_bytes.to_le_bytes());
        bytes[20..].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes
    }

    /// Reads a header and checks every bound.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let kind = FrameKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[4]).ok_or(FrameError::Kind(bytes[4]))?;
        if bytes[5..8] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let header = Self {
            kind,
            request_id: u64::from(word(8)) | u64::from(word(12)) << 32,
            message_bytes: word(16),
            payload_bytes: word(20),
        };
        match header {
            Self { message_bytes, .. } if message_bytes > MAX_MESSAGE_BYTES => Err(FrameError::Message(message_bytes)),
            Self { payload_bytes, .. } if payload_bytes > MAX_PAYLOAD_BYTES => Err(FrameError::Payload(payload_bytes)),
            header => Ok(header),
        }
    }
}

/// Header and message in one buffer, ready to be followed by `payload_bytes` of payload.
pub fn encode_frame(kind: FrameKind, request_id: u64, message: &impl prost::Message, payload_bytes: u32) -> Vec<u8> {
    let message_bytes = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(HEADER_BYTES + message_bytes as usize);
    frame.extend_from_slice(&FrameHeader { kind, request_id, message_bytes, payload_bytes }.encode());
    message.encode_raw(&mut frame);
    frame
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_survive_the_round_trip(
            kind in 0usize..FrameKind::ALL.len(),
            request_id: u64,
            message_bytes in 0..=MAX_MESSAGE_BYTES,
            payload_bytes in 0..=MAX_PAYLOAD_BYTES,
        ) {
            let header = FrameHeader { kind: FrameKind::ALL[kind], request_id, message_bytes, payload_bytes };
            prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn garbage_is_an_error_or_a_header_within_bounds(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = FrameHeader::decode(&bytes) {
                prop_assert!(header.message_bytes <= MAX_MESSAGE_BYTES && header.payload_bytes <= MAX_PAYLOAD_BYTES);
            }
        }
    }

    #[test]
    fn each_broken_field_is_named() {
        let good = FrameHeader { kind: FrameKind::Read, request_id: 1, message_bytes: 2, payload_bytes: 3 }.encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            FrameHeader::decode(&bytes)
        };
        assert!(matches!(with(0, b'G'), Err(FrameError::Magic(_))));
        assert_eq!(with(4, 99), Err(FrameError::Kind(99)));
        assert_eq!(with(6, 1), Err(FrameError::Reserved));
        assert!(matches!(with(19, 0xff), Err(FrameError::Message(_))));
        assert!(matches!(with(23, 0xff), Err(FrameError::Payload(_))));
    }
}

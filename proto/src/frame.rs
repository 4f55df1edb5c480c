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
    ///
    /// # Errors
    /// The bytes are no header: the connection that carried them cannot be used further.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            let text =
                format!("not a data-plane frame (begins with {magic:02x?}): is the peer speaking another protocol?");
            return Err(text);
        }
        let kind = FrameKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[4]);
        let kind = kind.ok_or_else(|| format!("unknown frame kind {}: is the peer of a newer version?", bytes[4]))?;
        if bytes[5..8] != [0; 3] {
            return Err("reserved header bytes are not zero: the stream is out of step or corrupt".to_owned());
        }
        let header = Self {
            kind,
            request_id: u64::from(word(8)) | u64::from(word(12)) << 32,
            message_bytes: word(16),
            payload_bytes: word(20),
        };
        for (what, bytes, limit) in
            [("message", header.message_bytes, MAX_MESSAGE_BYTES), ("payload", header.payload_bytes, MAX_PAYLOAD_BYTES)]
        {
            if bytes > limit {
                return Err(format!("{what} of {bytes} bytes, more than the limit of {limit}"));
            }
        }
        Ok(header)
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
        for (at, value, named) in [
            (0, b'G', "not a data-plane frame"),
            (4, 99, "unknown frame kind 99"),
            (6, 1, "reserved header bytes"),
            (19, 0xff, "message of"),
            (23, 0xff, "payload of"),
        ] {
            let error = with(at, value).unwrap_err();
            assert!(error.starts_with(named), "{error}");
        }
    }
}

//! The payload of a write on its way in: first memory of the budget, then the bytes, into one buffer. What makes no
//! sense, or gets no memory in time, is answered at once, and its bytes are thrown away as they come.

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use tokio::sync::AcquireError;
use tokio::time::Instant;

use super::memory::{PendingShare, Share};
use super::socket::Socket;
use super::writes::Write;

/// A write waits for memory at most this long. Nothing else of its connection is looked at meanwhile.
pub(super) const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// What becomes of the bytes.
pub(super) enum PayloadState {
    /// There is no memory for them yet.
    AwaitingMemory {
        write: Write,
        share: PendingShare,
        since: Instant,
    },
    Buffered {
        write: Write,
        payload: BytesMut,
        memory: Share,
    },
    Discarded,
}

/// The payload that comes next on a connection.
pub(super) struct Upload {
    pub request_id: u64,
    /// Bytes that have not come yet.
    pub missing: usize,
    pub fate: PayloadState,
}

impl Upload {
    /// Takes what belongs to it of the bytes that have arrived.
    pub(super) fn take(&mut self, incoming: &mut BytesMut) {
        let here = self.missing.min(incoming.len());
        match &mut self.fate {
            PayloadState::AwaitingMemory { .. } => return,
            PayloadState::Buffered { payload, .. } => payload.extend_from_slice(&incoming[..here]),
            PayloadState::Discarded => {}
        }
        incoming.advance(here);
        self.missing -= here;
    }

    /// Reads straight into its buffer what has arrived; `None` when it has none.
    pub(super) fn receive(&mut self, socket: &Socket) -> Option<io::Result<usize>> {
        let PayloadState::Buffered { payload, .. } = &mut self.fate else { return None };
        let received = socket.try_read(&mut payload.limit(self.missing));
        if let Ok(bytes) = received {
            self.missing -= bytes;
        }
        Some(received)
    }

    pub(super) fn waits_for_memory(&self) -> bool {
        matches!(self.fate, PayloadState::AwaitingMemory { .. })
    }

    /// Whether it has waited for memory longer than it may.
    pub(super) fn waited_too_long(&self) -> bool {
        matches!(&self.fate, PayloadState::AwaitingMemory { since, .. } if since.elapsed() > MEMORY_TIMEOUT)
    }

    /// The bytes come into this memory.
    pub(super) fn keep(&mut self, memory: Share) {
        if let PayloadState::AwaitingMemory { write, .. } = std::mem::replace(&mut self.fate, PayloadState::Discarded) {
            self.fate = PayloadState::Buffered { write, payload: BytesMut::with_capacity(self.missing), memory };
        }
    }
}

/// The share that an upload waits for; waits for ever when there is none that does.
pub(super) async fn memory_for(upload: &mut Option<Upload>) -> Result<Share, AcquireError> {
    match upload {
        Some(Upload { fate: PayloadState::AwaitingMemory { share, .. }, .. }) => share.await,
        _ => std::future::pending().await,
    }
}

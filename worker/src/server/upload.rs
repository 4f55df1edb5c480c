//! The payload of a write on its way in, into one buffer. Of a write that is answered already the bytes are thrown away
//! as they come.

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use cavern_net::Socket;

use super::writes::Write;
use crate::memory::Share;

/// A write waits for memory at most this long. Nothing else of its connection is looked at meanwhile.
pub(super) const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// The payload that comes next on a connection.
pub(super) struct Upload {
    pub request_id: u64,
    /// Bytes that have not come yet.
    pub missing: usize,
    /// Where they are gathered.
    pub buffer: Option<Buffer>,
}

/// What has come of the payload of a write.
pub(super) struct Buffer {
    pub write: Write,
    pub payload: BytesMut,
    pub memory: Share,
}

impl Upload {
    /// Takes what belongs to it of the bytes that have arrived.
    pub(super) fn take(&mut self, incoming: &mut BytesMut) {
        let here = self.missing.min(incoming.len());
        if let Some(buffer) = &mut self.buffer {
            buffer.payload.extend_from_slice(&incoming[..here]);
        }
        incoming.advance(here);
        self.missing -= here;
    }

    /// Reads straight into its buffer what has arrived; `None` when it has none.
    pub(super) fn receive(&mut self, socket: &Socket) -> Option<io::Result<usize>> {
        let Buffer { payload, .. } = self.buffer.as_mut()?;
        let received = socket.try_read(&mut payload.limit(self.missing));
        if let Ok(bytes) = received {
            self.missing -= bytes;
        }
        Some(received)
    }
}

//! Memory for payloads that is used again.
//!
//! New memory costs a fault for every page, as much as it costs to fill it. So the buffer of a payload comes back when
//! the last reference to its bytes is dropped, and the next payload of about its size is read into it. Whoever has
//! bytes has the buffer: it cannot be handed out to anybody else meanwhile.
//!
//! What is idle is bounded, and what nobody needed between two calls of [`ReceiveBuffers::trim`] is given up.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

/// Shorter payloads get memory of their own: allocators keep that at hand.
const RECYCLED_MIN_BYTES: usize = 32 << 10;
/// Sizes between one power of two and the next: a buffer is at most a quarter larger than its payload.
const SIZES_PER_DOUBLING: usize = 4;

#[derive(Debug, Default)]
pub(super) struct ReceiveBuffers {
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    /// By their size.
    buffers: BTreeMap<usize, Shelf>,
    bytes: usize,
    limit: usize,
}

/// Idle buffers of one size; the last one was used last.
#[derive(Debug, Default)]
struct Shelf {
    buffers: Vec<BytesMut>,
    /// As many were here all the time since the last trim.
    unused: usize,
}

/// Memory for one payload.
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    bytes: BytesMut,
    /// Where it came from; nowhere if it is short.
    home: Weak<ReceiveBuffers>,
}

impl ReceiveBuffers {
    /// The bytes that may be idle; 0 until this is set.
    pub(super) fn set_limit(&self, bytes: usize) {
        self.idle.lock().limit = bytes;
        self.trim();
    }

    /// An empty buffer with room for `bytes`.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> ReceiveBuffer {
        if bytes < RECYCLED_MIN_BYTES {
            return ReceiveBuffer { bytes: BytesMut::with_capacity(bytes), home: Weak::new() };
        }
        let size = size_for(bytes);
        let mut idle = self.idle.lock();
        let known = idle.buffers.get_mut(&size).and_then(|shelf| {
            let buffer = shelf.buffers.pop();
            shelf.unused = shelf.unused.min(shelf.buffers.len());
            buffer
        });
        if known.is_some() {
            idle.bytes -= size;
        }
        drop(idle);
        let bytes = known.unwrap_or_else(|| BytesMut::with_capacity(size));
        ReceiveBuffer { bytes, home: Arc::downgrade(self) }
    }

    fn give_back(&self, mut buffer: BytesMut) {
        buffer.clear();
        let size = buffer.capacity();
        let mut idle = self.idle.lock();
        // An allocation that came out larger than it was asked for has no shelf.
        if size_for(size) != size || idle.bytes + size > idle.limit {
            drop(idle);
            return;
        }
        idle.bytes += size;
        idle.buffers.entry(size).or_default().buffers.push(buffer);
    }

    /// Gives up what nobody has needed since the last time.
    pub(super) fn trim(&self) {
        let mut dropped = Vec::new();
        let mut idle = self.idle.lock();
        let Idle { buffers, bytes, .. } = &mut *idle;
        buffers.retain(|size, shelf| {
            let unused = shelf.unused.min(shelf.buffers.len());
            dropped.extend(shelf.buffers.drain(..unused));
            *bytes -= unused * size;
            shelf.unused = shelf.buffers.len();
            !shelf.buffers.is_empty()
        });
        // Memory is given back after the lock.
        drop(idle);
    }
}

impl ReceiveBuffer {
    pub(super) fn bytes_mut(&mut self) -> &mut BytesMut {
        &mut self.bytes
    }

    /// The bytes that were received; the buffer goes home after the last reference to them.
    pub(super) fn freeze(mut self) -> Bytes {
        if self.home.strong_count() == 0 { std::mem::take(&mut self.bytes).freeze() } else { Bytes::from_owner(self) }
    }
}

impl AsRef<[u8]> for ReceiveBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for ReceiveBuffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.give_back(std::mem::take(&mut self.bytes));
        }
    }
}

/// The size of a buffer for so many bytes.
fn size_for(bytes: usize) -> usize {
    let step = (bytes.max(RECYCLED_MIN_BYTES).next_power_of_two() / 2 / SIZES_PER_DOUBLING).max(1);
    bytes.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn received(buffers: &Arc<ReceiveBuffers>, bytes: usize, value: u8) -> Bytes {
        let mut buffer = buffers.take(bytes);
        assert!(buffer.bytes_mut().is_empty() && buffer.bytes_mut().capacity() >= bytes);
        buffer.bytes_mut().extend(std::iter::repeat_n(value, bytes));
        buffer.freeze()
    }

    #[test]
    fn a_buffer_is_used_again_when_its_last_reference_is_gone_and_no_sooner() {
        let buffers = Arc::new(ReceiveBuffers::default());
        buffers.set_limit(1 << 20);
        let first = received(&buffers, 100_000, 1);
        let (place, part) = (first.as_ptr(), first.slice(99_000..));
        drop(first);
        let second = received(&buffers, 100_000, 2);
        assert_ne!(second.as_ptr(), place, "a part of it is still used");
        assert!(part.iter().all(|byte| *byte == 1));
        drop(part);
        let third = received(&buffers, 99_000, 3);
        assert_eq!(third.as_ptr(), place);
        assert!(second.iter().all(|byte| *byte == 2) && third.iter().all(|byte| *byte == 3));
        assert_eq!(third.len(), 99_000);
    }

    #[test]
    fn what_is_idle_is_bounded_and_given_up_when_nobody_needs_it() {
        let buffers = Arc::new(ReceiveBuffers::default());
        let idle = || buffers.idle.lock().bytes;
        drop(received(&buffers, 100_000, 1));
        assert_eq!(idle(), 0, "no limit was set");
        buffers.set_limit(1 << 20);
        let many: Vec<Bytes> = (0..20).map(|_| received(&buffers, 128 << 10, 1)).collect();
        drop((many, received(&buffers, 10, 1)));
        assert_eq!(idle(), 1 << 20);
        buffers.trim();
        assert_eq!(idle(), 1 << 20, "all of it was used lately");
        drop([received(&buffers, 128 << 10, 1), received(&buffers, 128 << 10, 1)]);
        buffers.trim();
        assert_eq!(idle(), 2 * (128 << 10));
        buffers.trim();
        assert_eq!(idle(), 0);
        assert!(buffers.idle.lock().buffers.is_empty());
    }

    #[test]
    fn bytes_outlive_the_pool() {
        let buffers = Arc::new(ReceiveBuffers::default());
        buffers.set_limit(1 << 20);
        let bytes = received(&buffers, 100_000, 7);
        drop(buffers);
        assert!(bytes.iter().all(|byte| *byte == 7));
    }

    proptest! {
        #[test]
        fn sizes_waste_a_quarter_at_most(bytes in RECYCLED_MIN_BYTES..64 << 20) {
            let size = size_for(bytes);
            prop_assert!(size >= bytes && size - bytes <= bytes / 4);
            prop_assert_eq!(size_for(size), size);
        }
    }
}

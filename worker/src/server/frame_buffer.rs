//! Bytes of answers, in memory that is used again.
//!
//! Memory that was used has bytes in it, and payloads are read over them. A plain `Vec` would have to be zeroed first,
//! which takes about half of the time that it takes to read into it.

use std::ops::{Deref, DerefMut};

#[derive(Debug, Default)]
pub(super) struct FrameBuffer {
    /// What is behind `used` is left from before.
    memory: Vec<u8>,
    used: usize,
}

impl FrameBuffer {
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { memory: Vec::with_capacity(bytes), used: 0 }
    }

    pub(super) fn capacity(&self) -> usize {
        self.memory.capacity()
    }

    /// Sees that so many bytes can be appended without another allocation.
    pub(super) fn reserve(&mut self, bytes: usize) {
        self.memory.reserve((self.used + bytes).saturating_sub(self.memory.len()));
    }

    /// Appends so many bytes, all of which are the caller's to write: what they are now is left from before.
    pub(super) fn append(&mut self, bytes: usize) -> &mut [u8] {
        let end = self.used + bytes;
        if end > self.memory.len() {
            self.memory.resize(end, 0);
        }
        let begin = std::mem::replace(&mut self.used, end);
        &mut self.memory[begin..end]
    }

    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.append(bytes.len()).copy_from_slice(bytes);
    }

    /// Keeps the first `bytes` bytes.
    pub(super) fn truncate(&mut self, bytes: usize) {
        self.used = self.used.min(bytes);
    }
}

impl From<Vec<u8>> for FrameBuffer {
    fn from(memory: Vec<u8>) -> Self {
        Self { used: memory.len(), memory }
    }
}

impl Deref for FrameBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.used]
    }
}

impl DerefMut for FrameBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.used]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_before_is_written_over_and_seen_by_nobody() {
        let mut buffer = FrameBuffer::with_capacity(10);
        buffer.extend(b"0123456789");
        let (place, capacity) = (buffer.as_ptr(), buffer.capacity());
        buffer.truncate(3);
        buffer.truncate(7);
        assert_eq!(&buffer[..], b"012");
        buffer.extend(b"abc");
        assert_eq!(buffer.append(2), b"67", "not zeroed");
        buffer.truncate(6);
        buffer[0] = b'x';
        assert_eq!(&buffer[..], b"x12abc");
        buffer.reserve(4);
        assert_eq!((buffer.as_ptr(), buffer.capacity()), (place, capacity), "there is room for four");
        assert_eq!(buffer.append(capacity), [&b"6789"[..], &vec![0; capacity - 4]].concat());
        assert_eq!(buffer.len(), 6 + capacity);
    }
}

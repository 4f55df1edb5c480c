//! Writes to an area of the image that are nearly in order: what may still change is kept, the rest goes out in large
//! pieces.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::slots::REACH;
use crate::error::Error;

/// What is written together, in bytes.
const PIECE: usize = 64 << 10;

pub(super) struct Window<'a> {
    image: &'a File,
    /// Of the first byte of `bytes` in the image; what is before has been written.
    start: u64,
    bytes: Vec<u8>,
}

impl<'a> Window<'a> {
    pub(super) fn new(image: &'a File, start: u64) -> Self {
        Self { image, start, bytes: Vec::new() }
    }

    pub(super) fn write(&mut self, place: u64, bytes: &[u8]) -> Result<(), Error> {
        self.put(place, bytes).map_err(Error::Write)
    }

    pub(super) fn flush(&mut self) -> Result<(), Error> {
        self.write_out(self.bytes.len()).map_err(Error::Write)
    }

    fn put(&mut self, place: u64, bytes: &[u8]) -> io::Result<()> {
        let end = self.start + self.bytes.len() as u64;
        if place > end + REACH {
            self.write_out(self.bytes.len())?;
            self.start = place;
        }
        let before = self.start.saturating_sub(place).min(bytes.len() as u64) as usize;
        let (before, bytes) = bytes.split_at(before);
        if !before.is_empty() {
            self.image.write_all_at(before, place)?;
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let from = (place.max(self.start) - self.start) as usize;
        let end = from + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[from..end].copy_from_slice(bytes);
        let kept = REACH as usize;
        if self.bytes.len() >= kept + PIECE { self.write_out(self.bytes.len() - kept) } else { Ok(()) }
    }

    fn write_out(&mut self, count: usize) -> io::Result<()> {
        self.image.write_all_at(&self.bytes[..count], self.start)?;
        self.bytes.drain(..count);
        self.start += count as u64;
        Ok(())
    }
}

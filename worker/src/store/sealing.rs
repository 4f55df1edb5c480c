//! Encryption of blocks on disk.
//!
//! ```text
//!   key     of a directory: 32 random bytes, encrypted with the key-encryption key of the host
//! ```
//!
//! The file of a block has the bytes of the block, each in its place, by XTS-AES-256 (IEEE 1619) in data units of
//! 4 KiB. A data unit is named by its number and by the incarnation of the file, which no two files of a worker share.
//! So bytes are read and changed in place, sixteen at a time, and nothing beside them has to be kept in step with them.
//!
//! **Holes.** Sixteen zeros on disk are sixteen zeros of the block: what was never written, or was punched. That they
//! come from anything else is as likely as guessing half a key.
//!
//! **The last bytes** of a block whose length is no multiple of sixteen are combined with what AES makes of their
//! place. Such blocks are those of objects, which are written once; those of files are whole chunks.
//!
//! Nothing here notices that a file was changed: cached chunks have checksums, which are combined with a secret too.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use aes::cipher::{BlockDecrypt as _, BlockEncrypt as _, KeyInit as _};
use aes::{Aes256, Block as AesBlock};
use cavern_security::{KEY_BYTES, KeyWrapping, random_bytes};
use parking_lot::RwLock;
use ring::digest::{SHA512, digest};

use super::files::{replace_file, write_at};
use crate::error::WorkerError;

/// What is encrypted by itself.
const CELL: u32 = 16;
/// A data unit of XTS.
const UNIT: u32 = 4096;
/// Cells that are encrypted at a time: as many as keep the processor's units for it busy.
const AT_A_TIME: usize = 16;
/// Of a directory.
const KEY_FILE: &str = "key";

/// The key of a directory, and what it makes of bytes.
pub(super) struct Cipher {
    cells: Aes256,
    tweaks: Aes256,
    /// For what is shorter than a cell.
    masks: Aes256,
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Cipher").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Seal,
    Open,
}

/// Of what a mask is.
#[derive(Clone, Copy)]
enum Masked {
    Tail = 1,
    Checksum = 2,
}

impl Cipher {
    fn new(key: &[u8; KEY_BYTES]) -> Self {
        let derived = |label: &[u8]| digest(&SHA512, &[label, key].concat());
        let (pair, single) = (derived(b"cavern block cells\n"), derived(b"cavern block masks\n"));
        let part = |digest: &ring::digest::Digest, range: Range<usize>| Aes256::new_from_slice(&digest.as_ref()[range]);
        match (part(&pair, 0..32), part(&pair, 32..64), part(&single, 0..32)) {
            (Ok(cells), Ok(tweaks), Ok(masks)) => Self { cells, tweaks, masks },
            _ => unreachable!("a key of AES-256 has 32 bytes"),
        }
    }

    /// The key of a directory, which is encrypted; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be read with the keys of the host.
    pub fn read(directory: &Path, wrapping: &KeyWrapping) -> Result<Option<Self>, WorkerError> {
        let path = directory.join(KEY_FILE);
        let file = match fs::read(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(WorkerError::directory("read", &path)(error)),
        };
        if !wrapping.is_there() {
            return Err(WorkerError::DirectoryEncrypted(directory.to_owned()));
        }
        let unwrapped =
            wrapping.unwrap(&file).map_err(|reason| WorkerError::DirectoryKey { path: path.clone(), reason })?;
        if unwrapped.is_outdated {
            write_key(directory, &unwrapped.key, wrapping)?;
        }
        Ok(Some(Self::new(&unwrapped.key)))
    }

    /// Gives a directory a key.
    ///
    /// # Errors
    /// Its file cannot be written.
    pub fn make(directory: &Path, wrapping: &KeyWrapping) -> Result<Self, WorkerError> {
        let unmade = |reason| WorkerError::DirectoryKey { path: directory.join(KEY_FILE), reason };
        let key = random_bytes().map_err(unmade)?;
        write_key(directory, &key, wrapping)?;
        Ok(Self::new(&key))
    }

    fn tweak(&self, incarnation: u64, unit: u64) -> u128 {
        let mut block = AesBlock::from((u128::from(incarnation) << 64 | u128::from(unit)).to_le_bytes());
        self.tweaks.encrypt_block(&mut block);
        u128::from_le_bytes(block.into())
    }

    /// Whole cells, from an offset in the block that is a multiple of a cell.
    fn cells(&self, direction: Direction, incarnation: u64, offset: u32, bytes: &mut [u8]) {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let length = ((UNIT - at % UNIT) as usize).min(rest.len());
            let (part, more) = std::mem::take(&mut rest).split_at_mut(length);
            let mut tweak = self.tweak(incarnation, u64::from(at / UNIT));
            for _ in 0..at % UNIT / CELL {
                tweak = next(tweak);
            }
            for group in part.chunks_mut(AT_A_TIME * CELL as usize) {
                tweak = self.group(direction, group, tweak);
            }
            at += length as u32;
            rest = more;
        }
    }

    /// Some cells of one unit, the first of which has this tweak; gives that of the cell behind them.
    fn group(&self, direction: Direction, group: &mut [u8], mut tweak: u128) -> u128 {
        let (mut blocks, mut tweaks) = ([AesBlock::default(); AT_A_TIME], [0; AT_A_TIME]);
        let (cells, _) = group.as_chunks_mut::<{ CELL as usize }>();
        for ((block, used), cell) in blocks.iter_mut().zip(&mut tweaks).zip(&*cells) {
            *used = tweak;
            *block = (u128::from_le_bytes(*cell) ^ tweak).to_le_bytes().into();
            tweak = next(tweak);
        }
        let count = cells.len();
        match direction {
            Direction::Seal => self.cells.encrypt_blocks(&mut blocks[..count]),
            Direction::Open => self.cells.decrypt_blocks(&mut blocks[..count]),
        }
        for ((block, used), cell) in blocks.iter().zip(&tweaks).zip(cells) {
            let is_hole = direction == Direction::Open && *cell == [0; CELL as usize];
            if !is_hole {
                *cell = (u128::from_le_bytes((*block).into()) ^ used).to_le_bytes();
            }
        }
        tweak
    }

    fn mask(&self, what: Masked, incarnation: u64, place: u32) -> [u8; CELL as usize] {
        let text = u128::from(incarnation) << 64 | (what as u128) << 32 | u128::from(place);
        let mut block = AesBlock::from(text.to_le_bytes());
        self.masks.encrypt_block(&mut block);
        block.into()
    }
}

/// The tweak of the next cell of a unit.
fn next(tweak: u128) -> u128 {
    tweak << 1 ^ if tweak >> 127 == 1 { 0x87 } else { 0 }
}

fn write_key(directory: &Path, key: &[u8; KEY_BYTES], wrapping: &KeyWrapping) -> Result<(), WorkerError> {
    let path = directory.join(KEY_FILE);
    let bytes = wrapping.wrap(key).map_err(|reason| WorkerError::DirectoryKey { path: path.clone(), reason })?;
    let written = replace_file(directory, KEY_FILE, &bytes);
    written.map_err(WorkerError::directory("write", &path))
}

/// How the file of one block is encrypted.
#[derive(Debug)]
pub(super) struct Sealed {
    cipher: Arc<Cipher>,
    incarnation: u64,
    /// Of the block.
    length: u32,
    /// Whoever changes a part of a cell reads it first; and who reads one is to see it before or after.
    pub changes: RwLock<()>,
}

impl Sealed {
    pub fn new(cipher: Arc<Cipher>, incarnation: u64, length: u32) -> Self {
        Self { cipher, incarnation, length, changes: RwLock::new(()) }
    }

    /// The cells that a range touches.
    fn around(&self, range: &Range<u32>) -> Range<u32> {
        range.start / CELL * CELL..range.end.next_multiple_of(CELL).min(self.length.max(range.end))
    }

    /// The cells that lie within a range of a block of whole cells.
    pub fn within(range: &Range<u32>) -> Range<u32> {
        let start = range.start.next_multiple_of(CELL);
        start..(range.end / CELL * CELL).max(start)
    }

    /// Reads bytes of the block by way of what reads the file; false where that has not.
    pub fn read(
        &self,
        offset: u32,
        buffer: &mut [u8],
        read: impl FnOnce(u32, &mut [u8]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let wanted = offset..offset + buffer.len() as u32;
        let around = self.around(&wanted);
        if around == wanted {
            let is_read = read(offset, buffer)?;
            self.apply(Direction::Open, offset, buffer);
            return Ok(is_read);
        }
        let mut cells = vec![0; around.len()];
        let is_read = read(around.start, &mut cells)?;
        self.apply(Direction::Open, around.start, &mut cells);
        buffer.copy_from_slice(&cells[(wanted.start - around.start) as usize..][..buffer.len()]);
        Ok(is_read)
    }

    /// Writes bytes of the block into its file. The caller is alone where they are not whole cells, or somebody may
    /// read them.
    ///
    /// # Errors
    /// How many of the bytes were written, and why no more.
    pub fn write(&self, file: &File, offset: u32, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let range = offset..offset + bytes.len() as u32;
        let around = self.around(&range);
        let before = (range.start - around.start) as usize;
        let mut cells = vec![0; around.len()];
        // The first and the last cell, which may be one, keep what is not written.
        let mut keep = |cell: u32| {
            let end = (cell + CELL).min(around.end);
            let kept = &mut cells[(cell - around.start) as usize..(end - around.start) as usize];
            file.read_exact_at(kept, u64::from(cell))?;
            self.apply(Direction::Open, cell, kept);
            io::Result::Ok(())
        };
        if around.start < range.start {
            keep(around.start).map_err(|error| (0, error))?;
        }
        if range.end < around.end {
            keep((around.end - 1) / CELL * CELL).map_err(|error| (0, error))?;
        }
        cells[before..][..bytes.len()].copy_from_slice(bytes);
        self.apply(Direction::Seal, around.start, &mut cells);
        let written = write_at(file, around.start, &cells);
        written.map_err(|(done, error)| (done.saturating_sub(before).min(bytes.len()), error))
    }

    /// All that is at an offset which begins a cell, to the end of the block or of another cell.
    fn apply(&self, direction: Direction, offset: u32, bytes: &mut [u8]) {
        let whole = bytes.len() / CELL as usize * CELL as usize;
        let (cells, tail) = bytes.split_at_mut(whole);
        self.cipher.cells(direction, self.incarnation, offset, cells);
        if !tail.is_empty() {
            let mask = self.cipher.mask(Masked::Tail, self.incarnation, offset + whole as u32);
            tail.iter_mut().zip(mask).for_each(|(byte, mask)| *byte ^= mask);
        }
    }

    /// Checksums of the block's chunks as they are kept, or those that are kept as they are.
    pub fn mask_checksums(&self, crcs: &mut [u32]) {
        for (crc, chunk) in crcs.iter_mut().zip(0..) {
            let mask = self.cipher.mask(Masked::Checksum, self.incarnation, chunk);
            *crc ^= mask.first_chunk().copied().map_or(0, u32::from_le_bytes);
        }
    }
}

#[cfg(test)]
mod tests;

//! The chunks of a file: equal parts, each in one piece, as large as the extents allow.

use crate::error::EntryFault;
use crate::format::{CHUNK, CHUNK_BITS_MAX, HOLE};
use crate::tree::{BLOCK_BYTES, Device, Extent, Place};

/// Of a file; `EntryFault::Chunks` names it.
const CHUNKS_MAX: u64 = 65_536;

/// What chunks are made of: extents that continue one another are one.
struct Run {
    /// Of the file, where it begins and ends, in blocks.
    start: u64,
    end: u64,
    /// Device and first block.
    place: Option<(u16, u64)>,
}

pub(super) struct Chunks {
    /// Of the file, in bytes.
    pub(super) size: u64,
    /// Blocks of a chunk, as a power of two.
    pub(super) bits: u32,
    count: u64,
    runs: Vec<Run>,
}

impl Chunks {
    pub(super) fn of(extents: &[Extent], devices: &[Device]) -> Result<Self, EntryFault> {
        let mut size = 0_u64;
        let mut runs: Vec<Run> = Vec::new();
        for extent in extents.iter().filter(|extent| extent.length > 0) {
            if !size.is_multiple_of(BLOCK_BYTES) {
                return Err(EntryFault::Alignment);
            }
            let start = size / BLOCK_BYTES;
            size = size.checked_add(extent.length).filter(|&size| size <= i64::MAX as u64).ok_or(EntryFault::Size)?;
            let run = Run { start, end: size.div_ceil(BLOCK_BYTES), place: place(extent, devices)? };
            match runs.last_mut() {
                Some(last) if last.is_continued_by(&run) => last.end = run.end,
                _ => runs.push(run),
            }
        }
        let blocks = size.div_ceil(BLOCK_BYTES);
        let covering = blocks.next_power_of_two().trailing_zeros().min(CHUNK_BITS_MAX);
        let bits = runs.iter().skip(1).fold(covering, |bits, run| bits.min(run.start.trailing_zeros()));
        let count = blocks.div_ceil(1 << bits);
        if count > CHUNKS_MAX { Err(EntryFault::Chunks) } else { Ok(Self { size, bits, count, runs }) }
    }

    /// As they follow the inode.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        let mut runs = self.runs.iter();
        let mut run = runs.next();
        for chunk in 0..self.count {
            let start = chunk << self.bits;
            while run.is_some_and(|run| run.end <= start) {
                run = runs.next();
            }
            let (device, block) = match run.and_then(|run| Some((run.start, run.place?))) {
                Some((first, (device, block))) => (device, (block + (start - first)) as u32),
                None => (0, HOLE),
            };
            bytes.extend_from_slice(&[0; 2]);
            bytes.extend_from_slice(&device.to_le_bytes());
            bytes.extend_from_slice(&block.to_le_bytes());
        }
    }

    /// What `encode` appends.
    pub(super) fn bytes(&self) -> usize {
        self.count as usize * CHUNK
    }
}

impl Run {
    fn is_continued_by(&self, next: &Self) -> bool {
        match (self.place, next.place) {
            (None, None) => true,
            (Some((device, block)), Some(next)) => next == (device, block + (self.end - self.start)),
            _ => false,
        }
    }
}

/// Device and block of an extent, or nothing for a hole.
fn place(extent: &Extent, devices: &[Device]) -> Result<Option<(u16, u64)>, EntryFault> {
    let Place::Device { device, offset } = extent.place else {
        return Ok(None);
    };
    if offset % BLOCK_BYTES != 0 {
        return Err(EntryFault::Alignment);
    }
    let block = offset / BLOCK_BYTES;
    let known = usize::from(device).checked_sub(1).and_then(|index| devices.get(index));
    let end = block + extent.length.div_ceil(BLOCK_BYTES);
    if known.is_none_or(|known| end > u64::from(known.blocks)) {
        return Err(EntryFault::Device);
    }
    Ok(Some((device, block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: [Device; 2] = [Device { blocks: u32::MAX, tag: [0; 64] }, Device { blocks: 1000, tag: [0; 64] }];
    const KIB_4: u64 = BLOCK_BYTES;

    fn at(device: u16, block: u64, length: u64) -> Extent {
        Extent { length, place: Place::Device { device, offset: block * KIB_4 } }
    }

    fn hole(length: u64) -> Extent {
        Extent { length, place: Place::Hole }
    }

    /// Bits, and of each chunk device and block.
    fn chunks(extents: &[Extent]) -> Result<(u32, Vec<(u16, u32)>), EntryFault> {
        let chunks = Chunks::of(extents, &DEVICES)?;
        let mut bytes = Vec::new();
        chunks.encode(&mut bytes);
        assert_eq!(bytes.len(), chunks.bytes());
        let decoded = |chunk: &[u8]| (crate::format::u16_at(chunk, 2), crate::format::u32_at(chunk, 4));
        Ok((chunks.bits, bytes.chunks(8).map(decoded).collect()))
    }

    #[test]
    fn a_piece_is_a_chunk_whatever_its_size() {
        assert_eq!(chunks(&[]), Ok((0, vec![])));
        assert_eq!(chunks(&[at(1, 7, 1)]), Ok((0, vec![(1, 7)])));
        assert_eq!(chunks(&[at(2, 7, 5 * KIB_4)]), Ok((3, vec![(2, 7)])));
        assert_eq!(chunks(&[at(1, 3, 8 << 40)]), Ok((31, vec![(1, 3)])));
        assert_eq!(chunks(&[at(1, 3, 10 << 40)]), Ok((31, vec![(1, 3), (1, (1 << 31) + 3)])));
        assert_eq!(chunks(&[at(1, 7, KIB_4), at(1, 8, 2 * KIB_4)]), Ok((2, vec![(1, 7)])));
    }

    #[test]
    fn pieces_are_cut_where_both_sides_are_whole() {
        let hole_between = [at(1, 10, 4 * KIB_4), hole(2 * KIB_4), at(2, 20, 100)];
        let expected = vec![(1, 10), (1, 12), (0, HOLE), (2, 20)];
        assert_eq!(chunks(&hole_between), Ok((1, expected)));
        let two_devices = [at(1, 0, 1 << 40), at(2, 0, KIB_4)];
        assert_eq!(chunks(&two_devices), Ok((28, vec![(1, 0), (2, 0)])));
    }

    #[test]
    fn what_no_device_has_is_refused() {
        assert_eq!(chunks(&[at(0, 1, 1)]), Err(EntryFault::Device));
        assert_eq!(chunks(&[at(3, 1, 1)]), Err(EntryFault::Device));
        assert_eq!(chunks(&[at(2, 999, KIB_4 + 1)]), Err(EntryFault::Device));
        assert_eq!(chunks(&[at(1, 0, 100), at(1, 1, 1)]), Err(EntryFault::Alignment));
        let unaligned = Extent { length: 1, place: Place::Device { device: 1, offset: 100 } };
        assert_eq!(chunks(&[unaligned]), Err(EntryFault::Alignment));
        assert_eq!(chunks(&[hole(1 << 62), hole(1 << 62)]), Err(EntryFault::Size));
        assert_eq!(chunks(&[at(1, 0, KIB_4), hole(1 << 40)]), Err(EntryFault::Chunks));
    }
}

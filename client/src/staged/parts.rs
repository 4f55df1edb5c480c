//! The parts that an object is uploaded in, and which of them the bucket has as they are now.
//!
//! How long an object becomes shows at its end, so the parts grow with their number: small ones first, and with all
//! that there may be an object is as long as S3 lets it be. An upload takes at most [`UPLOAD_BYTES`] of memory, or one
//! part where that is more: beyond 39 GiB.

use std::ops::Range;

const MIB: u64 = 1 << 20;

/// How many parts of which length, in their order.
const SIZES: [(u64, u64); 4] = [(1000, 8 * MIB), (1000, 32 * MIB), (1000, 128 * MIB), (7000, 768 * MIB)];

/// What S3 takes of an object.
pub const OBJECT_BYTES_MAX: u64 = 5 << 40;
/// Parts on their way, all files together.
pub(super) const UPLOAD_BYTES: u64 = 64 * MIB;

/// The bytes of part `index`, from 0, of an object that is long enough.
pub(super) fn part_range(index: u64) -> Range<u64> {
    let (mut first, mut start) = (0, 0);
    let mut length = 0;
    for (count, bytes) in SIZES {
        length = bytes;
        if index < first + count {
            break;
        }
        (first, start) = (first + count, start + count * bytes);
    }
    let start = start + (index - first) * length;
    start..start + length
}

/// The part that a byte lies in.
pub(super) fn part_of(byte: u64) -> u64 {
    let (mut first, mut start) = (0, 0);
    for (count, length) in SIZES {
        if byte < start + count * length {
            return first + (byte - start) / length;
        }
        (first, start) = (first + count, start + count * length);
    }
    let (_, last) = SIZES[SIZES.len() - 1];
    first + (byte - start) / last
}

/// How many parts an object has.
pub(super) fn part_count(length: u64) -> u64 {
    if length == 0 { 0 } else { part_of(length - 1) + 1 }
}

/// What was sent of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UploadedPart {
    changes: u64,
    length: u64,
    etag: String,
}

#[derive(Clone, Debug, Default)]
struct Part {
    /// How often bytes of it were written.
    changes: u64,
    sent: Option<UploadedPart>,
}

/// The parts of a file that is being written.
#[derive(Debug, Default)]
pub(super) struct Parts(Vec<Part>);

impl Parts {
    /// Bytes were written, or cut off. To be called when that has been done: what was read before may be a mixture.
    pub fn touch(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (part_of(range.start), part_of(range.end - 1));
        // Of what has never been sent nothing needs to be known.
        let known = self.0.len() as u64;
        for index in first..(last + 1).min(known) {
            self.0[index as usize].changes += 1;
        }
    }

    /// A part is about to be read; give the answer to `sent`.
    pub fn begin(&mut self, index: u64) -> u64 {
        let length = usize::try_from(index).unwrap_or(usize::MAX).saturating_add(1).max(self.0.len());
        self.0.resize(length, Part::default());
        self.0[index as usize].changes
    }

    /// A part of this length was sent, as it was after so many changes.
    pub fn sent(&mut self, index: u64, changes: u64, length: u64, etag: String) {
        if let Some(part) = self.0.get_mut(index as usize) {
            part.sent = Some(UploadedPart { changes, length, etag });
        }
    }

    /// The ETag of a part, if the bucket has it as it is now.
    pub fn etag(&self, index: u64, length: u64) -> Option<&str> {
        let part = self.0.get(usize::try_from(index).ok()?)?;
        let sent = part.sent.as_ref().filter(|sent| sent.changes == part.changes && sent.length == length);
        sent.map(|sent| sent.etag.as_str())
    }
}

#[cfg(test)]
mod tests {
    use cavern_ufs::PARTS_MAX;

    use super::*;

    #[test]
    fn any_object_that_may_be_has_no_more_parts_than_there_may_be() {
        assert!(part_count(OBJECT_BYTES_MAX) <= PARTS_MAX);
        assert!(part_range(PARTS_MAX - 1).end >= OBJECT_BYTES_MAX);
        // What S3 takes of a part.
        assert!(SIZES.iter().all(|(_, length)| (5 * MIB..=5 << 30).contains(length)));
        assert_eq!((part_count(0), part_count(1), part_count(8 * MIB), part_count(8 * MIB + 1)), (0, 1, 1, 2));
    }

    #[test]
    fn parts_follow_each_other_without_a_gap() {
        let mut end = 0;
        for index in 0..PARTS_MAX + 10 {
            let range = part_range(index);
            assert_eq!(range.start, end, "part {index}");
            assert_eq!((part_of(range.start), part_of(range.end - 1)), (index, index));
            assert_eq!(part_count(range.end), index + 1);
            end = range.end;
        }
        assert_eq!((part_range(999).end, part_range(1999).end), (8000 * MIB, 40_000 * MIB));
    }

    #[test]
    fn a_part_that_was_written_to_is_sent_again() {
        let mut parts = Parts::default();
        let length = 8 * MIB;
        let first = parts.begin(0);
        parts.sent(0, first, length, "a".into());
        let second = parts.begin(1);
        // Written while it was read.
        parts.touch(length..length + 1);
        parts.sent(1, second, length, "b".into());
        assert_eq!((parts.etag(0, length), parts.etag(1, length)), (Some("a"), None));
        assert_eq!((parts.etag(0, length - 1), parts.etag(7, length)), (None, None));
        parts.touch(length - 1..length + 1);
        parts.touch(1 << 50..1 << 51);
        assert_eq!(parts.etag(0, length), None);
        let again = parts.begin(1);
        parts.sent(1, again, 5, "c".into());
        assert_eq!((parts.etag(1, 5), parts.etag(1, 6)), (Some("c"), None));
    }
}

//! Where the bytes of a file are that is being written: staged on this host; where none were, in the object that it was
//! opened from; in no place but parts that are on their way to the bucket; else nowhere, and they are zeros.

use std::ops::Range;
use std::sync::Arc;

use super::ranges::RangeSet;
use crate::read::{OpenFile, PartLocation};

/// Where the bytes of a file are that is being written.
pub(super) struct StagedLayout {
    /// Bytes of the file.
    pub size: u64,
    pub staged: RangeSet,
    /// What was staged, and is in no place but the parts of an upload.
    pub sent_away: RangeSet,
    pub base: Option<Base>,
}

/// The object that a file was opened from, or has last been written as.
#[derive(Clone)]
pub(super) struct Base {
    pub file: Arc<OpenFile>,
    pub etag: String,
    /// So many bytes of it, from the first on, are still the file's.
    pub valid: u64,
}

/// The beginning of a range, all in one place.
pub(super) enum Located {
    Staged(Range<u64>),
    Elsewhere(Range<u64>, PartLocation),
    /// It cannot be read before the upload is over.
    SentAway,
}

impl StagedLayout {
    pub(super) fn new(base: Option<Base>) -> Self {
        let size = base.as_ref().map_or(0, |base| base.valid);
        Self { size, staged: RangeSet::default(), sent_away: RangeSet::default(), base }
    }

    pub(super) fn locate(&self, range: Range<u64>) -> Located {
        let (piece, is_staged) = self.staged.first_piece(range);
        if is_staged {
            return Located::Staged(piece);
        }
        let (piece, is_sent_away) = self.sent_away.first_piece(piece);
        if is_sent_away {
            return Located::SentAway;
        }
        match &self.base {
            Some(base) if piece.start < base.valid => {
                let piece = piece.start..piece.end.min(base.valid);
                Located::Elsewhere(piece.clone(), PartLocation::Object(base.file.clone(), piece))
            }
            _ => Located::Elsewhere(piece, PartLocation::Hole),
        }
    }

    /// A range has been staged; how many of its bytes were not before.
    pub(super) fn wrote(&mut self, range: Range<u64>) -> u64 {
        self.size = self.size.max(range.end);
        self.staged.insert(range)
    }

    /// The file has another length; how many bytes are not staged any more.
    pub(super) fn cut(&mut self, size: u64) -> u64 {
        if let Some(base) = &mut self.base {
            base.valid = base.valid.min(size);
        }
        // What is written from here on has nothing to do with any earlier version.
        if size == 0 {
            self.base = None;
        }
        self.size = size;
        self.sent_away.remove(size..u64::MAX);
        self.staged.remove(size..u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(layout: &StagedLayout, range: Range<u64>) -> (Range<u64>, &'static str) {
        match layout.locate(range.clone()) {
            Located::Staged(piece) => (piece, "staged"),
            Located::Elsewhere(piece, PartLocation::Hole) => (piece, "hole"),
            Located::Elsewhere(piece, _) => (piece, "object"),
            Located::SentAway => (range, "sent away"),
        }
    }

    #[test]
    fn a_range_is_found_piece_by_piece() {
        let mut layout = StagedLayout::new(None);
        assert_eq!((layout.wrote(10..20), layout.wrote(15..25), layout.size), (10, 5, 25));
        assert_eq!(located(&layout, 0..30), (0..10, "hole"));
        assert_eq!(located(&layout, 12..30), (12..25, "staged"));
        layout.staged.remove(10..15);
        layout.sent_away.insert(10..15);
        assert_eq!(located(&layout, 10..12), (10..12, "sent away"));
        assert_eq!(located(&layout, 5..30), (5..10, "hole"), "what was sent away is no hole");
        assert_eq!((layout.cut(18), layout.size), (7, 18));
        assert_eq!(located(&layout, 16..30), (16..18, "staged"));
        assert_eq!((layout.cut(0), located(&layout, 10..12)), (3, (10..12, "hole")));
    }
}

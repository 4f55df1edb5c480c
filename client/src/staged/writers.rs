//! Who has written to a file since the bucket had it.
//!
//! Every close of a copy of a descriptor asks for a flush, also that of a child process which got the copy with
//! everything else and never used it. A program that starts others while it writes a file would have it sent to the
//! bucket half-written, again and again; its own close does that in any case.

/// Processes that are distinguished; of more, every close counts.
const WRITERS_MAX: usize = 16;

/// Open file tables, as the kernel names them.
#[derive(Debug, Default)]
pub(super) struct Writers {
    known: Vec<u64>,
    /// By way of pages, whose writer is not known, or more than can be distinguished.
    are_others: bool,
}

impl Writers {
    pub fn add(&mut self, writer: Option<u64>) {
        match writer {
            Some(writer) if self.known.contains(&writer) => {}
            Some(writer) if self.known.len() < WRITERS_MAX => self.known.push(writer),
            _ => self.are_others = true,
        }
    }

    /// Whether a close by somebody may be the last word of one of them. Nobody has written anything of a file that is
    /// new.
    pub fn may_be(&self, closer: u64) -> bool {
        self.are_others || self.known.is_empty() || self.known.contains(&closer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_wrote_nothing_is_passed_over() {
        let mut writers = Writers::default();
        assert!(writers.may_be(1));
        writers.add(Some(1));
        writers.add(Some(1));
        assert!(writers.may_be(1) && !writers.may_be(2));
        (2..=16).for_each(|writer| writers.add(Some(writer)));
        assert!(writers.may_be(16) && !writers.may_be(17));
        writers.add(Some(17));
        assert!(writers.may_be(99));
        let mut mapped = Writers::default();
        mapped.add(Some(1));
        mapped.add(None);
        assert!(mapped.may_be(2));
    }
}

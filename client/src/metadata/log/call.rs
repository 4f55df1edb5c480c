//! Calls: operations with numbers, as they are sent to the master.

use std::sync::Arc;

use cavern_proto::bounded::MAX_CACHED_RESULTS;
use cavern_proto::master::MutateRequest;

use super::operation::Operation;
use crate::journal::Journal;
use crate::metadata::recent_invalidations::InvalidationMark;

/// Calls under way at a time. Changes gather while all are.
pub(in crate::metadata) const AHEAD: usize = 3;
/// Changes that were answered and whose results the master is to keep, as many as the journal has slots: with those
/// under way far fewer than it would, and fewer bytes.
const ASKED_AGAIN_MAX: u64 = MAX_CACHED_RESULTS / 32;

/// Operations with numbers.
#[derive(Debug)]
pub(in crate::metadata) struct Call {
    pub operations: Vec<Operation>,
    /// Number of the first.
    pub(super) first: u64,
    /// Before it was sent.
    pub mark: InvalidationMark,
    /// On the stream that there is.
    pub(super) is_sent: bool,
    /// On one that broke.
    pub(super) was_sent: bool,
}

impl Call {
    pub(super) fn last(&self) -> u64 {
        self.first + self.operations.len() as u64 - 1
    }

    /// Whether some had their answer before.
    pub fn has_answered(&self) -> bool {
        self.operations.iter().any(|operation| operation.mutation.is_write_back)
    }
}

/// What is sent of a call.
pub(in crate::metadata) struct Outgoing {
    pub request: MutateRequest,
    pub has_answered: bool,
}

/// A call that is out of the log while its records are written: nobody who is answered meanwhile waits for that.
pub(in crate::metadata) struct Departing {
    pub(super) call: Call,
    /// Among all calls of the log.
    pub(super) place: usize,
    pub(super) session: u64,
    /// Every number up to this one has been answered.
    pub(super) answered: u64,
}

impl Departing {
    /// Enters the call in the journal, with its numbers. To be sent when it has been put back.
    pub fn enter(&mut self, journal: Option<&Arc<Journal>>) -> Outgoing {
        let (session, mut answered, call) = (self.session, self.answered, &mut self.call);
        if let Some(journal) = journal {
            journal.note_changes(session, call.last());
            if !call.was_sent {
                call.operations.iter_mut().for_each(|operation| operation.note(journal, session));
            }
            answered = acknowledged(answered, journal.first_unanswered());
        }
        call.is_sent = true;
        let mutations = call.operations.iter().map(|operation| operation.mutation.clone()).collect();
        let request = MutateRequest { session, answered, mutations };
        Outgoing { request, has_answered: call.has_answered() }
    }
}

/// Up to which change the master need not keep results, of those up to `answered`. What the kernel has no answer to, it
/// may ask a process after this one for, unless so much was changed meanwhile that the master would take no more.
fn acknowledged(answered: u64, first_unanswered: Option<u64>) -> u64 {
    let has_answer = first_unanswered.map_or(answered, |first| answered.min(first.saturating_sub(1)));
    has_answer.max(answered.saturating_sub(ASKED_AGAIN_MAX))
}

#[cfg(test)]
mod tests {
    use cavern_proto::bounded::{MAX_CACHED_RESULT_BYTES, MAX_CHANGES, MAX_REASON_BYTES};
    use cavern_proto::master::{Attr, MutationResult};
    use prost::Message;

    use super::*;

    /// Bytes of a result with its key, at the most: a reason, or the inodes that a change touches. Only those of
    /// `SetOpenRefs` may be longer, which are few.
    fn most_bytes_of_a_result() -> u64 {
        let reason = "x".repeat(MAX_REASON_BYTES + '…'.len_utf8());
        let refused = MutationResult { errno: 133, reason, unlisted: u64::MAX, ..MutationResult::default() };
        let attr = Attr {
            inode: u64::MAX,
            size: u64::MAX,
            mtime_ns: -1,
            ctime_ns: -1,
            atime_ns: -1,
            btime_ns: Some(-1),
            version: u64::MAX,
            allocated: Some(u64::MAX),
            mode: u32::MAX,
            uid: u32::MAX,
            gid: u32::MAX,
            nlink: u32::MAX,
            rdev: u32::MAX,
            generation: u32::MAX,
            next_generation: u32::MAX,
            ..Attr::default()
        };
        let made = MutationResult { inode: u64::MAX, attributes: vec![attr; 16], ..MutationResult::default() };
        let key = 2 * size_of::<u64>();
        (key + refused.encoded_len().max(made.encoded_len())) as u64
    }

    #[test]
    fn the_master_never_has_to_keep_more_results_than_it_would() {
        assert_eq!(acknowledged(100, None), 100);
        assert_eq!([1, 50, 101].map(|first| acknowledged(100, Some(first))), [0, 49, 100]);
        let mut most = 0;
        for answered in [0, 1, ASKED_AGAIN_MAX, ASKED_AGAIN_MAX + 1, 10 * MAX_CACHED_RESULTS] {
            // The kernel has been waiting for the first change ever since.
            let last = answered + (AHEAD * MAX_CHANGES) as u64;
            most = most.max(last - acknowledged(answered, Some(1)));
        }
        assert!((ASKED_AGAIN_MAX..MAX_CACHED_RESULTS / 2).contains(&most), "{most}");
        let bytes = most * most_bytes_of_a_result();
        assert!(bytes < MAX_CACHED_RESULT_BYTES, "{bytes}");
    }
}

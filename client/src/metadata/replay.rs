//! The log as the process before has left it in the journal.
//!
//! What had no answer when that process died, or whose answer the kernel has not got, is sent again under its numbers
//! before anything else; behind it comes what was answered and not sent, in its order.

use std::collections::HashMap;

use cavern_conf::Failpoint;
use cavern_proto::journal::ChangeRecord;
use cavern_proto::master::Mutation;
use futures::FutureExt;
use prost::Message;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::log::{Earlier, Operation, Waiter};
use super::parts::{Inner, Metadata};
use crate::error::ClientError;
use crate::journal::RequestContext;

impl Inner {
    /// Loads the log that the process before has left in its session, and returns the directories that it held.
    pub(super) fn go_on(&self) {
        let Some(journal) = &self.log.journal else { return };
        let (session, used) = journal.session();
        let decode = |(slot, record): (_, Vec<u8>)| {
            let record = ChangeRecord::decode(&record[..]).ok().filter(|record| record.session == session)?;
            let mutation = Mutation::decode(&record.mutation[..]).ok()?;
            Some((record, mutation, slot))
        };
        let mut found: Vec<_> = journal.changes.take_all().into_iter().filter_map(decode).collect();
        found.sort_by_key(|(record, ..)| (record.seq == 0, record.seq, record.order));
        let deadline = Instant::now() + self.change_timeout;
        let (mut operations, mut contexts) = (Vec::with_capacity(found.len()), HashMap::new());
        for (record, mutation, slot) in found {
            let Some(change) = mutation.change.clone() else { continue };
            let (answer, waiting) = oneshot::channel();
            let context = (record.unique != 0).then(|| {
                let known = contexts.entry(record.unique).or_insert_with(|| RequestContext::new(record.unique));
                known.clone()
            });
            let inodes = self.affected_by(&change);
            self.log.replayed.add(Earlier {
                asked: context.clone().map(|context| (change, context)),
                answer: waiting.shared(),
                was_answered: mutation.is_write_back,
            });
            operations.push(Operation {
                waiter: Some(Waiter { answer, deadline }),
                // Whoever asked for it counts on what was answered.
                must_deliver: mutation.is_write_back,
                is_inherited: true,
                inodes,
                context,
                slot: Some(journal.change_slot(slot, record.unique, mutation.seq)),
                mutation,
                ..Operation::default()
            });
        }
        self.log.lock().load((session, used), operations, self.names.recent.mark());
        self.log.return_all();
        if journal.epoch() > 0 {
            Failpoint::ReplayBegun.pass();
        }
    }
}

impl Metadata {
    /// Waits until what the process before had asked for is answered. Bounded by `client.metadata_timeout`.
    pub(crate) async fn replayed(&self) {
        drop(self.failed_replays().await);
    }

    /// Waits as [`Self::replayed`] does, and gives the errors of changes that the process before had answered.
    pub(crate) async fn failed_replays(&self) -> Vec<ClientError> {
        let replayed = &self.inner.log.replayed;
        let count = replayed.len();
        if count > 0 {
            tracing::info!(changes = count, "what the process before had asked for is asked for again");
        }
        replayed.answered().await
    }

    /// The kernel has asked again for whatever it had no answer to: what it did not ask for is let go of.
    pub fn forget_replayed(&self) {
        self.inner.log.replayed.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::mem::forget;

    use cavern_proto::master::SetXattr;
    use cavern_proto::master::mutation::Change;
    use rustix::fs::{MemfdFlags, memfd_create};
    use tokio_util::sync::CancellationToken;

    use super::super::parts::tests::metadata;
    use super::*;
    use crate::journal::Journal;

    #[tokio::test]
    async fn calls_of_what_was_asked_for_before_are_no_larger_than_others() {
        let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        let before = Journal::open(memory.try_clone().unwrap()).unwrap();
        let note = |seq, change| {
            let mutation = Mutation { seq, change: Some(change), ..Mutation::default() };
            // As kill -9 has it.
            forget(before.note_change(7, 0, None, &mutation).unwrap());
        };
        // Three full calls were under way; and behind a gap others, which are few and long.
        (1..=2500).for_each(|seq| note(seq, Change::AddOpenRef(seq)));
        let value = bytes::Bytes::from(vec![0; 64 << 10]);
        for seq in 3001..=3020 {
            let set = SetXattr { inode: seq, name: "user.a".into(), value: value.clone(), ..SetXattr::default() };
            note(seq, Change::SetXattr(set));
        }
        before.note_changes(7, 3020);

        let metadata = metadata(Some(Journal::open(memory).unwrap()));
        let log = &metadata.inner.log;
        metadata.inner.go_on();
        let numbers = || {
            let request = log.next_request(metadata.inner.names.recent.mark())?.request;
            Some((request.answered, request.mutations.first()?.seq, request.mutations.len()))
        };
        let calls: Vec<_> = std::iter::from_fn(numbers).take(6).collect();
        // The first of them has no answer yet.
        let expected = [(0, 1, 1000), (0, 1001, 1000), (0, 2001, 500), (0, 3001, 7), (0, 3008, 7), (0, 3015, 6)];
        assert_eq!(calls, expected);
        assert!(numbers().is_none(), "more would be under way than may be");
    }

    #[tokio::test]
    async fn what_was_asked_for_before_is_waited_for_before_anything_is_sent() {
        let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        let before = Journal::open(memory.try_clone().unwrap()).unwrap();
        before.note_changes(7, 0);
        let mutation = Mutation { is_write_back: true, change: Some(Change::AddOpenRef(1)), ..Mutation::default() };
        // As kill -9 has it.
        forget(before.note_change(7, 0, Some(1), &mutation).unwrap());

        let metadata = metadata(Some(Journal::open(memory).unwrap()));
        let _not_polled = metadata.send_changes(CancellationToken::new());
        assert!(metadata.replayed().now_or_never().is_none(), "nobody has answered it");
    }
}

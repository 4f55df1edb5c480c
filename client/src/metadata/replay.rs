//! Changes that the process before had asked for, and that had no answer when it died, or whose answer the kernel has
//! not got.
//!
//! They are sent again under their numbers before anything else. The kernel asks for the same once more; its request
//! gets the answer that it would have had, instead of a second change. A commit says what is left to be committed, and
//! a lock that is waited for how things stand: both are asked for anew, when what was asked for before is answered.

use std::collections::{HashMap, VecDeque};
use std::mem::discriminant;
use std::sync::Arc;

use cavern_proto::master::Mutation;
use cavern_proto::master::mutation::Change;
use futures::FutureExt;
use futures::future::{Shared, join_all};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::changes::{Answer, CallSize, Pending};
use super::{Inner, Metadata};
use crate::error::ClientError;
use crate::journal::{ChangeRecord, Journal, RequestContext};

type Answered = Shared<oneshot::Receiver<Answer>>;

/// See the module.
#[derive(Default)]
pub(super) struct Replayed {
    /// By the request that they belong to, in their order.
    requests: Mutex<HashMap<u64, VecDeque<Earlier>>>,
    all: Mutex<Vec<EarlierAnswer>>,
}

/// What becomes of a change that the process before had asked for.
#[derive(Clone)]
struct EarlierAnswer {
    answer: Answered,
    /// That process had answered it.
    was_answered: bool,
}

/// A change that was asked for by the process before.
struct Earlier {
    change: Change,
    answer: Answered,
    context: Arc<RequestContext>,
}

/// Changes with consecutive numbers, no more than a call may have.
pub(super) struct EarlierCall {
    pub first: u64,
    pub changes: Vec<Pending>,
    size: CallSize,
}

impl Replayed {
    /// Takes out what a request had asked for, up to a change of this kind.
    fn take(&self, unique: u64, change: &Change) -> Option<Earlier> {
        let mut requests = self.requests.lock();
        let earlier = requests.get_mut(&unique)?;
        let found = loop {
            match earlier.pop_front() {
                Some(earlier) if discriminant(&earlier.change) == discriminant(change) => break Some(earlier),
                Some(_another) => {}
                None => break None,
            }
        };
        if earlier.is_empty() {
            requests.remove(&unique);
        }
        found
    }
}

fn is_asked_anew(change: &Change) -> bool {
    match change {
        Change::Commit(_) | Change::SetHolds(_) => true,
        Change::SetLock(set) => set.waiter != 0,
        _ => false,
    }
}

impl Inner {
    /// What the process before left, to be sent in its session.
    /// That was under numbers; behind it, what was answered and not sent.
    pub(super) fn earlier_changes(&self, journal: &Arc<Journal>) -> (Vec<EarlierCall>, Vec<Pending>) {
        let session = journal.session().0;
        let decode = |(slot, record): (_, Vec<u8>)| {
            let record = ChangeRecord::decode(&record[..]).ok().filter(|record| record.session == session)?;
            let mutation = Mutation::decode(&record.mutation[..]).ok()?;
            Some((record, mutation, slot))
        };
        let mut found: Vec<_> = journal.changes.take_all().into_iter().filter_map(decode).collect();
        found.sort_by_key(|(record, ..)| (record.seq == 0, record.seq, record.order));
        let deadline = Instant::now() + self.change_timeout;
        let (mut calls, mut unsent, mut contexts) = (Vec::<EarlierCall>::new(), Vec::new(), HashMap::new());
        for (record, mutation, slot) in found {
            let Some(change) = mutation.change else { continue };
            let (asker, answer) = oneshot::channel();
            let answer = answer.shared();
            let was_answered = mutation.is_answered;
            self.replayed.all.lock().push(EarlierAnswer { answer: answer.clone(), was_answered });
            let mut context = None;
            if record.unique != 0 {
                let known = contexts.entry(record.unique).or_insert_with(|| RequestContext::new(record.unique));
                let earlier = Earlier { change: change.clone(), answer, context: known.clone() };
                self.replayed.requests.lock().entry(record.unique).or_default().push_back(earlier);
                context = Some(known.clone());
            }
            let (asker, slot) = (Some(asker), Some(journal.change_slot(slot, record.seq)));
            let (made_ns, unique) = (mutation.made_ns, record.unique);
            // Whoever asked for it counts on what was answered.
            let (is_answered, is_owed) = (mutation.is_answered, mutation.is_answered);
            let subject = Some(self.ask(&change));
            let (owner, user) = ((mutation.uid, mutation.gid), mutation.user);
            let pending = Pending {
                asker,
                user,
                context,
                slot,
                made_ns,
                unique,
                is_answered,
                is_owed,
                is_inherited: true,
                subject,
                ..Pending::new(change, owner, deadline)
            };
            if record.seq == 0 {
                unsent.push(pending);
                continue;
            }
            let last = calls.last_mut().filter(|call| call.first + call.changes.len() as u64 == record.seq);
            match last.and_then(|call| call.size.admit(&pending).then_some(call)) {
                Some(call) => call.changes.push(pending),
                None => {
                    let mut size = CallSize::default();
                    size.admit(&pending);
                    calls.push(EarlierCall { first: record.seq, changes: vec![pending], size });
                }
            }
        }
        (calls, unsent)
    }

    /// The answer that this change had, if the process before asked for it in the name of the same request.
    pub(super) async fn earlier_answer(&self, change: &Change) -> Option<Answer> {
        let context = RequestContext::current()?;
        let earlier = self.replayed.take(context.unique(), change)?;
        context.go_on_from(earlier.context);
        let answer = earlier.answer.await.unwrap_or(Err(ClientError::Shutdown));
        (!is_asked_anew(change)).then_some(answer)
    }

    /// Completes when what the process before had asked for is answered, or nobody waits for that any more.
    pub(super) async fn earlier_answered(&self) {
        let all: Vec<_> = self.replayed.all.lock().iter().map(|earlier| earlier.answer.clone()).collect();
        join_all(all).await;
    }

    /// The number under which the same request waited for a lock in the process before.
    pub(super) fn earlier_waiter(&self) -> Option<u64> {
        let context = RequestContext::current()?;
        let requests = self.replayed.requests.lock();
        requests.get(&context.unique())?.iter().find_map(|earlier| match &earlier.change {
            Change::SetLock(set) if set.waiter != 0 => Some(set.waiter),
            _ => None,
        })
    }
}

impl Metadata {
    /// Waits until what the process before had asked for is answered. Bounded by `client.metadata_timeout`.
    pub(crate) async fn replayed(&self) {
        let count = self.inner.replayed.all.lock().len();
        if count > 0 {
            tracing::info!(changes = count, "what the process before had asked for is asked for again");
        }
        self.inner.earlier_answered().await;
    }

    /// Waits as [`Self::replayed`] does, and gives the errors of changes that the process before had answered.
    pub(crate) async fn failed_replays(&self) -> Vec<ClientError> {
        self.replayed().await;
        let answered: Vec<_> = {
            let all = self.inner.replayed.all.lock();
            all.iter().filter(|earlier| earlier.was_answered).map(|earlier| earlier.answer.clone()).collect()
        };
        let answers = join_all(answered).await.into_iter();
        answers.filter_map(|answer| answer.unwrap_or(Err(ClientError::Shutdown)).err()).collect()
    }

    /// The kernel has asked again for whatever it had no answer to: what it did not ask for is let go of.
    pub fn forget_replayed(&self) {
        let left = std::mem::take(&mut *self.inner.replayed.requests.lock());
        drop(left);
        self.inner.replayed.all.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::mem::forget;

    use cavern_conf::Config;
    use cavern_net::WorkerPool;
    use cavern_net::master::MasterChannel;
    use cavern_proto::master::SetXattr;
    use cavern_security::Transport;
    use rustix::fs::{MemfdFlags, memfd_create};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::stats::Stats;
    use crate::tables::Tables;

    fn metadata(journal: Arc<Journal>) -> Metadata {
        let (config, stats) = (Config::default(), Arc::new(Stats::default()));
        let master = MasterChannel::new(&config).unwrap();
        let pool = WorkerPool::new(&config.client, Transport::Plain, "test");
        let tables = Arc::new(Tables::new(master.clone(), pool, &config.ufs));
        Metadata::new(master, tables, stats, &config, Some(journal))
    }

    #[tokio::test]
    async fn calls_of_what_was_asked_for_before_are_no_larger_than_others() {
        let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        let before = Journal::open(memory.try_clone().unwrap()).unwrap();
        let note = |seq, change| {
            let record = ChangeRecord { session: 7, seq, ..ChangeRecord::default() };
            let mutation = Mutation { seq, change: Some(change), ..Mutation::default() };
            // As kill -9 has it.
            forget(before.note_change(&record, &mutation).unwrap());
        };
        // Three full calls were under way; and behind a gap others, which are few and long.
        (1..=2500).for_each(|seq| note(seq, Change::Hold(seq)));
        let value = bytes::Bytes::from(vec![0; 64 << 10]);
        for seq in 3001..=3020 {
            let set = SetXattr { inode: seq, name: "user.a".into(), value: value.clone(), ..SetXattr::default() };
            note(seq, Change::SetXattr(set));
        }
        before.note_changes(7, 3020);

        let journal = Journal::open(memory).unwrap();
        let metadata = metadata(journal.clone());
        let (calls, unsent) = metadata.inner.earlier_changes(&journal);
        let sizes: Vec<_> = calls.iter().map(|call| (call.first, call.changes.len())).collect();
        assert_eq!(sizes, [(1, 1000), (1001, 1000), (2001, 500), (3001, 7), (3008, 7), (3015, 6)]);
        assert!(unsent.is_empty());
    }

    #[tokio::test]
    async fn what_was_asked_for_before_is_waited_for_before_anything_is_sent() {
        let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        let before = Journal::open(memory.try_clone().unwrap()).unwrap();
        before.note_session(7);
        let record = ChangeRecord { session: 7, order: 1, ..ChangeRecord::default() };
        let mutation = Mutation { is_answered: true, change: Some(Change::Hold(1)), ..Mutation::default() };
        // As kill -9 has it.
        forget(before.note_change(&record, &mutation).unwrap());

        let metadata = metadata(Journal::open(memory).unwrap());
        let _not_polled = metadata.send_changes(CancellationToken::new());
        assert!(metadata.replayed().now_or_never().is_none(), "nobody has answered it");
    }
}

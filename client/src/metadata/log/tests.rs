//! The log against a simple model: whatever happens to streams, sessions and processes, what was acknowledged is made
//! once and in its order, or its loss is told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::journal::ChangeRecord;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Lock, LockKind, LockType, MutateRequest, Mutation, MutationResult, RemoveXattr, SetLock};
use futures::FutureExt;
use proptest::prelude::*;
use prost::Message;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::operation::{Answer, Changed, LocalResult, Operation, Waiter};
use super::state::{State, StreamEnd, Verdict};
use super::{Done, OperationLog};
use crate::error::ClientError;
use crate::journal::{Journal, RequestContext};
use crate::metadata::recent_invalidations::RecentInvalidations;

/// Later than anything is due.
const LATER: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Somebody asks for a change, and waits.
    Ask,
    /// A change is answered here.
    Answer,
    /// Something is to be made for which nobody waits.
    Owe,
    /// A call goes on its way.
    Send,
    /// The master takes in the next call that is on its way.
    Make,
    /// Its answer arrives.
    Reply,
    /// The stream breaks; calls and answers on it are lost.
    Break,
    /// The master says that nothing of it was made, or refuses the first call: only if that is so.
    NotMade,
    Refuse,
    /// The master opens no stream.
    RefuseStream,
    /// The time of all who wait is up.
    Expire,
    /// The kernel gets the answers that there are, and asks for nothing of that again.
    Reach,
    /// Another session begins.
    NextSession,
    /// The process dies, and another one goes on.
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Ask),
        6 => Just(Step::Answer),
        2 => Just(Step::Owe),
        6 => Just(Step::Send),
        6 => Just(Step::Make),
        6 => Just(Step::Reply),
        2 => Just(Step::Break),
        2 => Just(Step::NotMade),
        1 => Just(Step::Refuse),
        1 => Just(Step::RefuseStream),
        1 => Just(Step::Expire),
        1 => Just(Step::Reach),
        1 => Just(Step::NextSession),
        2 => Just(Step::Crash),
    ]
}

/// A master as far as changes go: it applies a number of the session once.
#[derive(Default)]
struct Master {
    session: u64,
    results: BTreeMap<u64, MutationResult>,
    /// What was made in each session, in its order.
    made: Vec<(u64, u64)>,
}

impl Master {
    fn apply(&mut self, request: &MutateRequest) -> Vec<MutationResult> {
        request.mutations.iter().map(|mutation| self.apply_once(mutation)).collect()
    }

    fn apply_once(&mut self, mutation: &Mutation) -> MutationResult {
        if let Some(known) = self.results.get(&mutation.seq) {
            return known.clone();
        }
        let id = id_of(mutation);
        // What was answered in an earlier session is held no more.
        let is_refused = mutation.is_write_back && u64::from(mutation.uid) != self.session;
        let errno = if is_refused { 116 } else { 0 };
        if !is_refused {
            self.made.push((self.session, id));
        }
        let result = MutationResult { errno, inode: id, ..MutationResult::default() };
        self.results.insert(mutation.seq, result.clone());
        result
    }
}

fn id_of(mutation: &Mutation) -> u64 {
    match &mutation.change {
        Some(Change::RemoveXattr(remove)) => remove.inode,
        other => panic!("not in this test: {other:?}"),
    }
}

/// The log, the master, and what is known of the operations, which are numbered in their order.
struct World {
    memory: OwnedFd,
    journal: Arc<Journal>,
    log: State,
    master: Master,
    /// Calls on the stream, and answers.
    on_way: VecDeque<MutateRequest>,
    answers: VecDeque<Vec<MutationResult>>,
    /// Calls that the master has taken from this stream.
    taken: usize,
    operations: u64,
    /// Those that were answered here, and in which session.
    answered: BTreeMap<u64, u64>,
    waiting: BTreeMap<u64, oneshot::Receiver<Answer>>,
    /// Requests of the kernel, which have no answer.
    requests: BTreeMap<u64, Arc<RequestContext>>,
    /// What is owed, unless the session or the process ends before.
    must_deliver: BTreeSet<u64>,
    /// Whose answer says that they were made, or that they were not.
    told_made: BTreeSet<u64>,
    told_not_made: BTreeSet<u64>,
    /// Answered, and told to be lost.
    lost: BTreeSet<u64>,
    /// Whom nobody can tell any more: they were answered in a session that was over when the process died.
    forgotten: BTreeSet<u64>,
    sessions: u64,
    /// The session was given up, and there is no other one yet.
    is_over: bool,
    /// The master may have refused what was answered.
    may_lose: bool,
}

impl World {
    fn new() -> Self {
        let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
        let journal = Journal::open(memory.try_clone().unwrap()).unwrap();
        let mut world = Self {
            memory,
            journal,
            log: State::default(),
            master: Master { session: 1, ..Master::default() },
            on_way: VecDeque::new(),
            answers: VecDeque::new(),
            taken: 0,
            operations: 0,
            answered: BTreeMap::new(),
            waiting: BTreeMap::new(),
            requests: BTreeMap::new(),
            must_deliver: BTreeSet::new(),
            told_made: BTreeSet::new(),
            told_not_made: BTreeSet::new(),
            lost: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            sessions: 1,
            is_over: false,
            may_lose: false,
        };
        world.journal.note_changes(1, 0);
        assert!(world.log.follow(1).is_some_and(|done| done.is_empty()));
        world
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Ask => {
                let (answer, waiting) = oneshot::channel();
                let waiter = Some(Waiter { answer, deadline: Instant::now() + LATER });
                let operation = self.operation();
                let request = RequestContext::new(self.operations);
                self.log.push(Operation { waiter, context: Some(request.clone()), ..operation });
                self.waiting.insert(self.operations, waiting);
                self.requests.insert(self.operations, request);
            }
            Step::Owe => {
                let operation = Operation { must_deliver: true, ..self.operation() };
                self.log.push(operation);
                self.must_deliver.insert(self.operations);
            }
            Step::Expire => {
                let (done, _) = self.log.expire(Instant::now() + 2 * LATER, LATER);
                self.end(done);
            }
            Step::Reach => self.requests.retain(|id, _| self.waiting.contains_key(id)),
            Step::NextSession => self.next_session(),
            Step::Crash => self.crash(),
            // There is no stream, and nothing is held.
            _ if self.is_over => {}
            Step::Answer => self.answer(),
            Step::Send => {
                let (mark, now) = (RecentInvalidations::default().mark(), Instant::now() + LATER / 2);
                self.on_way.extend(self.log.next_request(Some(&self.journal), mark, now).map(|sent| sent.request));
            }
            Step::Make => {
                let Some(request) = self.on_way.pop_front() else { return };
                assert_eq!(request.session, self.master.session);
                self.taken += 1;
                let results = self.master.apply(&request);
                self.answers.push_back(results);
            }
            Step::Reply => {
                let Some(results) = self.answers.pop_front() else { return };
                let call = self.log.take_answered().unwrap();
                assert_eq!(call.operations.len(), results.len());
                let done = call.operations.into_iter().zip(results).map(|(operation, result)| {
                    let answer = match result.errno {
                        0 => Ok(Changed::new(result, None, self.master.session, 0)),
                        errno => Err(ClientError::Refused { errno, reason: String::new() }),
                    };
                    (operation, answer)
                });
                let done = done.collect();
                self.end(done);
            }
            Step::Break => self.break_with(StreamEnd::Broken, Verdict::Unknown),
            // The master says so to a stream of which it has taken nothing.
            Step::NotMade if self.taken == 0 => self.break_with(StreamEnd::Broken, Verdict::NotMade),
            Step::Refuse if self.taken == 0 => self.break_with(StreamEnd::Broken, Verdict::Refused),
            Step::RefuseStream if self.taken == 0 && self.on_way.is_empty() => {
                self.break_with(StreamEnd::NotOpened, Verdict::Refused);
            }
            Step::NotMade | Step::Refuse | Step::RefuseStream => {}
        }
        self.check();
    }

    fn operation(&mut self) -> Operation {
        self.operations += 1;
        let change = Change::RemoveXattr(RemoveXattr { inode: self.operations, name: "user.a".into() });
        Operation { inodes: vec![self.operations], ..Operation::new(change, (0, 0)) }
    }

    fn answer(&mut self) {
        let mut operation = self.operation();
        operation.mutation.is_write_back = true;
        // For this master, the session that it was answered in.
        operation.mutation.uid = u32::try_from(self.master.session).unwrap();
        let number = self.log.affected.next_number();
        let result = MutationResult { inode: self.operations, ..MutationResult::default() };
        (operation.must_deliver, operation.number) = (true, Some(number));
        operation.answered = Some(Box::new(LocalResult { result, is_overwrite: false, upgrade: None }));
        operation.slot = self.journal.note_change(self.master.session, 0, Some(number), &operation.mutation);
        assert!(operation.slot.is_some());
        self.log.push(operation);
        self.answered.insert(self.operations, self.master.session);
    }

    /// The stream is over.
    fn cut(&mut self) {
        self.taken = 0;
        self.on_way.clear();
        self.answers.clear();
    }

    fn break_with(&mut self, end: StreamEnd, verdict: Verdict) {
        self.cut();
        self.may_lose |= verdict == Verdict::Refused;
        let error = ClientError::Invalid("the stream broke".to_owned());
        match self.log.broken(end, verdict, &error, Instant::now() + LATER / 2) {
            Some(done) => {
                // The only operation of a call that is refused is known to be what the master refuses, and is given up.
                if let (StreamEnd::Broken, Verdict::Refused, [(operation, _)]) = (end, verdict, &done[..]) {
                    self.must_deliver.remove(&id_of(&operation.mutation));
                }
                self.end(done);
            }
            None => {
                self.is_over = true;
                self.must_deliver.clear();
                let done = self.log.give_up("nobody knows");
                self.end(done);
            }
        }
    }

    fn next_session(&mut self) {
        self.cut();
        self.must_deliver.clear();
        self.sessions += 1;
        (self.is_over, self.may_lose) = (false, true);
        (self.master.session, self.master.results) = (self.sessions, BTreeMap::new());
        self.journal.note_changes(self.sessions, 0);
        let done = self.log.follow(self.sessions).unwrap();
        self.end(done);
    }

    /// The process dies at this moment. What it had in memory is gone, but for the journal.
    fn crash(&mut self) {
        self.cut();
        let sessions = self.sessions;
        self.forgotten.extend(self.answered.iter().filter(|(_, session)| **session < sessions).map(|(id, _)| *id));
        self.journal.freeze();
        // Who has waited asks again, if he lives: what becomes of it he finds out then.
        self.waiting.clear();
        self.requests.clear();
        // The session may be taken up again, though it was given up here.
        (self.is_over, self.must_deliver) = (false, BTreeSet::new());
        self.log = State::default();
        self.journal = Journal::open(self.memory.try_clone().unwrap()).unwrap();
        let (session, used) = self.journal.session();
        let decode = |(slot, record): (_, Vec<u8>)| {
            let record = ChangeRecord::decode(&record[..]).unwrap();
            let mutation = Mutation::decode(&record.mutation[..]).unwrap();
            (record.session == session).then_some((record, mutation, slot))
        };
        let mut found: Vec<_> = self.journal.changes.take_all().into_iter().filter_map(decode).collect();
        found.sort_by_key(|(record, ..)| (record.seq == 0, record.seq, record.order));
        let numbers = found.iter().map(|(record, ..)| record.seq).filter(|number| *number != 0);
        assert!(numbers.is_sorted_by(|one, next| one < next), "a number of two operations");
        let operations = found.into_iter().map(|(record, mutation, slot)| {
            let request = (record.unique != 0).then(|| RequestContext::new(record.unique));
            self.requests.extend(request.clone().map(|request| (record.unique, request)));
            Operation {
                must_deliver: mutation.is_write_back,
                is_inherited: true,
                inodes: vec![id_of(&mutation)],
                context: request,
                slot: Some(self.journal.change_slot(slot, record.unique, mutation.seq)),
                mutation,
                ..Operation::default()
            }
        });
        let operations = operations.collect();
        self.log.load((session, used), operations, RecentInvalidations::default().mark());
        self.journal.thaw();
    }

    /// Operations are at their end.
    fn end(&mut self, done: Vec<Done>) {
        for (operation, answer) in done {
            self.log.leave(&operation, &answer);
            let id = id_of(&operation.mutation);
            if self.log.affected.take_loss(id).is_some() {
                assert!(self.lost.insert(id), "told twice");
            }
            operation.deliver(answer);
        }
    }

    fn check(&mut self) {
        // In each session what was made is in the order in which it was asked for, and nothing was made twice.
        assert!(
            self.master.made.is_sorted_by(|one, other| one.0 < other.0 || one.1 < other.1),
            "{:?}",
            self.master.made
        );
        let all: BTreeSet<u64> = self.master.made.iter().map(|(_, id)| *id).collect();
        assert_eq!(all.len(), self.master.made.len(), "made twice");
        let waiting = std::mem::take(&mut self.waiting);
        for (id, mut answer) in waiting {
            match (&mut answer).now_or_never() {
                None => {
                    self.waiting.insert(id, answer);
                }
                Some(Ok(Ok(made))) => {
                    assert_eq!(made.result.inode, id, "the answer of another");
                    self.told_made.insert(id);
                }
                // It may be made, or the process has died.
                Some(Ok(Err(ClientError::OutcomeUnknown { .. })) | Err(_)) => {}
                Some(Ok(Err(_))) => {
                    self.told_not_made.insert(id);
                }
            }
        }
        assert!(self.told_made.is_subset(&all), "not made: {:?}", self.told_made.difference(&all));
        assert!(self.told_not_made.is_disjoint(&all), "made: {:?}", self.told_not_made.intersection(&all));
    }

    /// Everything is answered.
    fn settle(&mut self) {
        if self.is_over {
            self.next_session();
        }
        self.run(Step::Break);
        for _ in 0..=self.operations {
            [Step::Send, Step::Make, Step::Reply].into_iter().for_each(|step| self.run(step));
        }
        assert!(!self.log.has_work(Instant::now() + LATER) && self.log.affected.unmade().is_none());
        let all: BTreeSet<u64> = self.master.made.iter().map(|(_, id)| *id).collect();
        assert!(self.must_deliver.is_subset(&all), "owed: {:?}", self.must_deliver.difference(&all));
        let missing: Vec<u64> = self.answered.keys().copied().filter(|id| !all.contains(id)).collect();
        let is_told = |id: &u64| self.lost.contains(id) || self.forgotten.contains(id);
        assert!(missing.iter().all(is_told), "{missing:?} {:?}", self.lost);
        assert!(self.may_lose || self.lost.is_empty() && missing.is_empty(), "{missing:?} {:?}", self.lost);
    }
}

proptest! {
    #[test]
    fn what_was_acknowledged_is_made_once_and_in_order_or_told_to_be_lost(
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.run(step));
        world.settle();
    }
}

fn unlock() -> Operation {
    let lock = Lock { owner: 1, r#type: LockType::Unlocked.into(), end: 9, ..Lock::default() };
    let set = SetLock { inode: 5, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() };
    Operation::must_deliver(Change::SetLock(set))
}

fn push(log: &OperationLog, operation: Operation) {
    log.push(&mut log.lock(), operation);
}

#[tokio::test]
async fn what_waits_at_the_end_and_what_comes_after_it_is_told_so() {
    let log = OperationLog::new(None, false);
    let waiting = || {
        let (answer, waiting) = oneshot::channel();
        let waiter = Some(Waiter { answer, deadline: Instant::now() });
        push(&log, Operation { waiter, ..Operation::new(Change::AddOpenRef(1), (0, 0)) });
        waiting
    };
    let before = waiting();
    log.close();
    for answer in [before, waiting()] {
        assert!(matches!(answer.await, Ok(Err(ClientError::Shutdown))));
    }
}

#[tokio::test]
async fn what_was_answered_and_not_sent_is_left_to_whoever_keeps_the_journal() {
    let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
    let journal = Journal::open(memory.try_clone().unwrap()).unwrap();
    journal.note_changes(1, 0);
    let log = OperationLog::new(Some(journal.clone()), true);
    let mut answered = Operation::must_deliver(Change::AddOpenRef(1));
    answered.mutation.is_write_back = true;
    answered.slot = journal.note_change(1, 0, Some(0), &answered.mutation);
    push(&log, answered);
    push(&log, Operation::new(Change::AddOpenRef(2), (0, 0)));
    journal.freeze();
    log.close();
    drop(log);
    assert_eq!(Journal::open(memory).unwrap().left().changes, 1);
}

#[tokio::test]
async fn what_was_not_made_in_time_has_no_number_in_the_journal_while_its_request_is_answered() {
    let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
    let journal = Journal::open(memory.try_clone().unwrap()).unwrap();
    let log = OperationLog::new(Some(journal.clone()), false);
    let (answer, waiting) = oneshot::channel();
    let waiter = Some(Waiter { answer, deadline: Instant::now() });
    let request = RequestContext::new(1);
    let operation = Operation::new(Change::AddOpenRef(1), (0, 0));
    push(&log, Operation { waiter, context: Some(request.clone()), ..operation });
    assert!(log.next_request(RecentInvalidations::default().mark()).is_some());
    assert_eq!(journal.first_unanswered(), Some(1));
    let error = ClientError::Invalid("no session".to_owned());
    let done = log.lock().broken(StreamEnd::Broken, Verdict::NotMade, &error, Instant::now());
    assert!(done.is_some_and(|done| done.is_empty()));
    let (over, _) = log.lock().expire(Instant::now(), LATER);
    log.finish(over);
    assert!(matches!(waiting.await, Ok(Err(ClientError::Net(_)))));
    assert_eq!(journal.first_unanswered(), None);
    assert!(Journal::open(memory).unwrap().changes.take_all().is_empty());
    drop(request);
}

#[tokio::test]
async fn an_unlock_that_nobody_waits_for_is_waited_for_by_whoever_looks_for_locks_and_keeps_no_sync_waiting() {
    let log = OperationLog::new(None, false);
    log.lock().follow(1);
    push(&log, unlock());
    assert!(log.names_made(LATER).now_or_never().is_some() && log.all_made(LATER).now_or_never().is_some());
    let settled = log.all_unlocked(LATER);
    tokio::pin!(settled);
    assert!((&mut settled).now_or_never().is_none());
    let outgoing = log.next_request(RecentInvalidations::default().mark()).unwrap();
    assert_eq!(outgoing.request.mutations.len(), 1);
    assert!((&mut settled).now_or_never().is_none());
    // Nobody has an answer to it while no master gives one, and it stays.
    let (over, is_unanswered) = log.lock().expire(Instant::now() + LATER, LATER);
    assert!(over.is_empty() && !is_unanswered);
    let call = log.lock().take_answered().unwrap();
    let made = |operation| (operation, Ok::<_, ClientError>(Changed::new(MutationResult::default(), None, 1, 0)));
    log.finish(call.operations.into_iter().map(made));
    assert!(settled.now_or_never().is_some_and(|settled| settled.is_ok()));
}

#[tokio::test]
async fn what_is_recalled_is_let_go_of_behind_all_that_was_answered() {
    let log = OperationLog::new(None, false);
    log.lock().follow(1);
    push(&log, Operation::new(Change::AddOpenRef(1), (0, 0)));
    log.recalled(7);
    push(&log, Operation::new(Change::AddOpenRef(2), (0, 0)));
    let request = log.next_request(RecentInvalidations::default().mark()).unwrap().request;
    let changes: Vec<_> = request.mutations.into_iter().filter_map(|mutation| mutation.change).collect();
    assert!(matches!(&changes[..], [Change::AddOpenRef(1), Change::ReturnDelegations(let_go), Change::AddOpenRef(2)]
        if let_go.directories == [7] && !let_go.all));
}

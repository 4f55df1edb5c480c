//! The results that sessions may ask for again.

use cavern_proto::bounded::{MAX_CACHED_RESULT_BYTES, MAX_CACHED_RESULTS, MAX_REASON_BYTES};
use cavern_proto::master::{Mutation, MutationResult};
use cavern_proto::record::{EndSessionStep, InodeRange, ResultBytes, SessionRecord};
use prost::Message as _;
use rustix::io::Errno;

use crate::error::Result;
use crate::index::delegations;
use crate::outcome::StepProgress;
use crate::posix::{lock, open_references as holds};
use crate::schema::{self, encode_key};
use crate::transaction::Transaction;

/// Results forgotten with one mutation at most.
const FORGET_MAX: u64 = 1000;
/// What a session has answered for already would be lost: it is refused at so many times the bounds.
pub const ANSWERED_TIMES: u64 = 4;
/// Bits of the number of a mutation by which the bytes of results are not told apart.
const PART_BITS: u32 = 10;
/// What the locks of a file count for in one step of the end of a session: there may be thousands in one record.
const LOCKS_COST: usize = 16;
/// What a session leaves behind: locks, what it holds, results.
const PARTS: u32 = 3;
/// Reservations of a session: a new one takes the place of the oldest.
pub const RANGES_MAX: usize = 4;

/// What is known of a mutation that is asked for.
pub enum Known {
    /// It was applied before: its result, or a refusal where that is no longer kept.
    Result(MutationResult),
    /// It is new.
    New(CachedResults),
}

/// The results of a session that is about to get one more.
pub struct CachedResults {
    session: u64,
    record: SessionRecord,
    /// The record is to be written.
    is_changed: bool,
}

/// Whether mutation `seq` of a session was applied before.
pub fn find(tx: &Transaction<'_>, session: u64, seq: u64) -> Result<Known> {
    let tables = tx.before();
    if let Some(result) = tables.get(schema::Results, (session, seq))? {
        return Ok(Known::Result(result));
    }
    let before = tables.session(session)?;
    let (is_changed, record) = (before.is_none(), before.unwrap_or_default());
    if seq > record.answered {
        return Ok(Known::New(CachedResults { session, record, is_changed }));
    }
    Ok(Known::Result(MutationResult {
        errno: Errno::STALE.raw_os_error(),
        reason: format!("mutation {seq} of session {session} was answered long ago"),
        ..MutationResult::default()
    }))
}

impl CachedResults {
    /// Before mutation `seq`: forgets the results up to `answered`, which the session has. Its first owner stays its
    /// owner.
    pub fn acknowledge(&mut self, tx: &mut Transaction<'_>, answered: u64, seq: u64, owner: &str) -> Result {
        if self.record.owner.is_empty() && !owner.is_empty() {
            owner.clone_into(&mut self.record.owner);
            self.is_changed = true;
        }
        // Never beyond what is being answered: a wrong number must not make retries fail.
        let (answered, forgotten) = (answered.min(seq.saturating_sub(1)), self.record.answered);
        if answered <= forgotten {
            return Ok(());
        }
        // Of more than go with one mutation, the rest goes with later ones.
        self.record.answered = if answered - forgotten > FORGET_MAX {
            self.forget_sparse(tx, answered)?
        } else {
            (forgotten + 1..=answered).for_each(|seq| tx.delete(schema::Results, (self.session, seq)));
            answered
        };
        let first = (self.record.answered + 1) >> PART_BITS;
        self.record.cached.retain(|kept| kept.part >= first);
        self.is_changed = true;
        Ok(())
    }

    /// Forgets results whose numbers may be far apart; gives the number up to which none is kept then.
    fn forget_sparse(&self, tx: &mut Transaction<'_>, answered: u64) -> Result<u64> {
        let forgotten = Some((self.session, self.record.answered));
        let rows = tx.before().rows_after(schema::Results, self.session, forgotten);
        let mut gone = rows.page(FORGET_MAX as usize, |row| Ok(row.key()?.1))?;
        gone.retain(|seq| *seq <= answered);
        gone.iter().for_each(|seq| tx.delete(schema::Results, (self.session, *seq)));
        Ok(gone.last().copied().filter(|_| gone.len() as u64 == FORGET_MAX).unwrap_or(answered))
    }

    /// The refusal of a mutation, if too much would be kept until the session says what it has.
    pub fn refusal(&self, mutation: &Mutation) -> Option<MutationResult> {
        let (session, seq) = (self.session, mutation.seq);
        let numbers = seq - self.record.answered;
        let bytes: u64 = self.record.cached.iter().map(|kept| kept.bytes).sum();
        let times = if mutation.is_write_back { ANSWERED_TIMES } else { 1 };
        let (most_numbers, most_bytes) = (MAX_CACHED_RESULTS * times, MAX_CACHED_RESULT_BYTES * times);
        if numbers <= most_numbers && bytes < most_bytes {
            return None;
        }
        let mib = most_bytes >> 20;
        let reason = format!(
            "mutation {seq} of session {session} was not made: the session has not acknowledged results of its last \
             {numbers} mutations ({bytes} bytes), and {most_numbers} or {mib} MiB are kept: acknowledge those that \
             it has (`answered`), and send it again"
        );
        Some(MutationResult { errno: Errno::NOBUFS.raw_os_error(), reason, ..MutationResult::default() })
    }

    /// Keeps the result of mutation `seq`, and what was reserved with it.
    pub fn keep(mut self, tx: &mut Transaction<'_>, seq: u64, result: &MutationResult, reserved: Option<InodeRange>) {
        let key = (self.session, seq);
        if let Some(range) = reserved {
            let reserved = &mut self.record.reserved;
            reserved.push(range);
            reserved.drain(..reserved.len().saturating_sub(RANGES_MAX));
        }
        let stored = encode_key::<schema::Results>(&key).len() + result.encoded_len();
        let (part, bytes) = (seq >> PART_BITS, stored as u64);
        match self.record.cached.iter_mut().find(|kept| kept.part == part) {
            Some(kept) => kept.bytes += bytes,
            None => self.record.cached.push(ResultBytes { part, bytes }),
        }
        self.is_changed = true;
        tx.put(schema::Results, key, result);
        self.put(tx);
    }

    /// Writes what has changed of the session.
    pub fn put(self, tx: &mut Transaction<'_>) {
        if self.is_changed {
            tx.put(schema::Sessions, self.session, &self.record);
        }
    }
}

/// A reason as it is kept.
pub fn shortened(mut reason: String) -> String {
    if reason.len() > MAX_REASON_BYTES {
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        reason.push('…');
    }
    reason
}

/// Does a part of the end of a session, which forgets its results, what it holds and what it has locked. Directories
/// come first, and locks, since others wait for them. The session's record goes last: as long as it is there, a master
/// that starts goes on with this, and lets nobody take the session up again.
pub fn end_session_step(tx: &mut Transaction<'_>, step: &EndSessionStep) -> Result<StepProgress> {
    let EndSessionStep { session, limit, mut part, now_ns } = *step;
    let (mut left, mut held) = ((limit as usize).max(LOCKS_COST), 0);
    // From the first step on, nothing is taken any more that the session has answered for.
    let released = delegations::release_some(tx, session, left)?;
    let has_directories = released > 0 && released == left;
    left -= released;
    while part < PARTS && !has_directories {
        let cost = if part == 0 { LOCKS_COST } else { 1 };
        let most = left / cost;
        let taken = match part {
            0 => lock::release_some(tx, session, most)?,
            1 => holds::release_some(tx, session, most, now_ns)?,
            _ => forget_some(tx, session, most)?,
        };
        left -= taken * cost;
        held += if part == 1 { taken } else { 0 };
        // A step that found less than it may take has found the end of this part.
        if taken == most {
            break;
        }
        part += 1;
    }
    let more = part < PARTS;
    match tx.before().session(session)? {
        Some(record) if more => tx.put(schema::Sessions, session, &SessionRecord { is_ending: true, ..record }),
        _ => tx.delete(schema::Sessions, session),
    }
    Ok(StepProgress { inodes: held as u64, more, next: part.into() })
}

fn forget_some(tx: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize> {
    let results = tx.before().rows(schema::Results, session).page(limit, |row| row.key())?;
    results.iter().for_each(|key| tx.delete(schema::Results, *key));
    Ok(results.len())
}

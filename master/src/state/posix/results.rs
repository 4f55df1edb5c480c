//! The results that sessions may ask for again.

use cavern_proto::master::MutationResult;
use cavern_proto::record::{EndSessionStep, InodeRange, SessionRecord};
use rustix::io::Errno;

use super::held::with_range;
use super::{hold, lock};
use crate::MasterError;
use crate::state::orphans::StepProgress;
use crate::state::records::result_key;
use crate::state::transaction::Transaction;
use crate::state::{Family, Outcome, held};

/// Results forgotten with one mutation at most.
const FORGET_MAX: u64 = 1000;
/// What the locks of a file count for in one step of the end of a session: there may be thousands in one record.
const LOCKS_COST: usize = 16;
/// What a session leaves behind: locks, what it holds, results.
const PARTS: u32 = 3;

/// The result of a mutation that was applied before; a refusal for one whose result is no longer kept.
pub(super) fn find(
    transaction: &Transaction<'_>,
    session: u64,
    seq: u64,
) -> Result<Option<MutationResult>, MasterError> {
    let tables = transaction.before();
    if let Some(result) = tables.result(session, seq)? {
        return Ok(Some(result));
    }
    let answered = tables.session(session)?.unwrap_or_default().answered;
    Ok((seq <= answered).then(|| MutationResult {
        errno: Errno::STALE.raw_os_error(),
        reason: format!("mutation {seq} of session {session} was answered long ago"),
        ..MutationResult::default()
    }))
}

/// Keeps a result, and what was reserved with it; forgets the results that the session has. Its first owner stays its
/// owner.
pub(super) fn keep(
    transaction: &mut Transaction<'_>,
    (session, owner): (u64, &str),
    answered: u64,
    seq: u64,
    (result, reserved): (&MutationResult, Option<InodeRange>),
) -> Result<(), MasterError> {
    // Never beyond what is being answered: a wrong number must not make retries fail.
    let answered = answered.min(seq.saturating_sub(1));
    let before = transaction.before().session(session)?;
    let (is_new, mut record) = (before.is_none(), before.unwrap_or_default());
    let forgotten = record.answered;
    let is_owned = record.owner.is_empty() && !owner.is_empty();
    if is_new || answered > forgotten || reserved.is_some() || is_owned {
        // The rest goes with later mutations.
        record.answered = answered.min(forgotten + FORGET_MAX).max(forgotten);
        (forgotten + 1..=record.answered).for_each(|seq| transaction.delete(Family::Result, &result_key(session, seq)));
        if let Some(range) = reserved {
            record.reserved = with_range(record.reserved, range);
        }
        if is_owned {
            owner.clone_into(&mut record.owner);
        }
        transaction.put(Family::Session, &session.to_be_bytes(), &record);
    }
    transaction.put(Family::Result, &result_key(session, seq), result);
    Ok(())
}

/// Does a part of the end of a session, which forgets its results, what it holds and what it has locked. Directories
/// come first, and locks, since others wait for them. The session's record goes last: as long as it is there, a master
/// that starts goes on with this, and lets nobody take the session up again.
pub fn end_session_step(transaction: &mut Transaction<'_>, step: &EndSessionStep) -> Result<Outcome, MasterError> {
    let EndSessionStep { session, limit, mut part, now_ns } = *step;
    let (mut left, mut held) = ((limit as usize).max(LOCKS_COST), 0);
    // From the first step on, nothing is taken any more that the session has answered for.
    let released = held::release_some(transaction, session, left)?;
    let has_directories = released > 0 && released == left;
    left -= released;
    while part < PARTS && !has_directories {
        let cost = if part == 0 { LOCKS_COST } else { 1 };
        let most = left / cost;
        let taken = match part {
            0 => lock::release_some(transaction, session, most)?,
            1 => hold::release_some(transaction, session, most, now_ns)?,
            _ => forget_some(transaction, session, most)?,
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
    let key = session.to_be_bytes();
    match transaction.before().session(session)? {
        Some(record) if more => {
            transaction.put(Family::Session, &key, &SessionRecord { is_ending: true, ..record });
        }
        _ => transaction.delete(Family::Session, &key),
    }
    Ok(Outcome::StepProgress(StepProgress { inodes: held as u64, more, next: part.into() }))
}

fn forget_some(transaction: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize, MasterError> {
    let results = transaction.before().keys_under(Family::Result, &session.to_be_bytes()).take(limit);
    let results = results.collect::<Result<Vec<_>, _>>()?;
    for key in &results {
        transaction.delete(Family::Result, key);
    }
    Ok(results.len())
}

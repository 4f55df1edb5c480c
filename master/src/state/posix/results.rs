//! The results that sessions may ask for again.

use cavern_proto::master::MutationResult;
use cavern_proto::record::SessionRecord;
use rustix::io::Errno;

use super::{hold, lock};
use crate::MasterError;
use crate::state::records::result_key;
use crate::state::transaction::Transaction;
use crate::state::{Family, Outcome};

/// Results forgotten with one mutation at most.
const FORGET_MAX: u64 = 1000;

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

/// Keeps a result, and forgets those that the session has.
pub(super) fn keep(
    transaction: &mut Transaction<'_>,
    session: u64,
    answered: u64,
    seq: u64,
    result: &MutationResult,
) -> Result<(), MasterError> {
    // Never beyond what is being answered: a wrong number must not make retries fail.
    let answered = answered.min(seq.saturating_sub(1));
    let known = transaction.before().session(session)?;
    let forgotten = known.unwrap_or_default().answered;
    if known.is_none() || answered > forgotten {
        // The rest goes with later mutations.
        let answered = answered.min(forgotten + FORGET_MAX);
        (forgotten + 1..=answered).for_each(|seq| transaction.delete(Family::Result, &result_key(session, seq)));
        transaction.put(Family::Session, &session.to_be_bytes(), &SessionRecord { answered });
    }
    transaction.put(Family::Result, &result_key(session, seq), result);
    Ok(())
}

/// Forgets a session, its results, what it holds and what it has locked.
pub fn end_session(transaction: &mut Transaction<'_>, session: u64) -> Result<Outcome, MasterError> {
    transaction.delete(Family::Session, &session.to_be_bytes());
    for key in transaction.before().keys_under(Family::Result, &session.to_be_bytes()) {
        let key = key?;
        transaction.delete(Family::Result, &key);
    }
    hold::release_all(transaction, session)?;
    lock::release_all(transaction, session)?;
    Ok(Outcome::Done)
}

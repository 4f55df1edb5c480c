//! Commands under ids that their callers have chosen. Whoever got no answer asks again, perhaps at another master, and
//! must be told what the first attempt has done: that is decided here, where all masters decide the same.

use cavern_proto::master::Mount;
use cavern_proto::record::{Command, Once, RequestRecord};

use super::apply::apply_changes;
use super::tables::{request_key, requested_key};
use super::{Family, Outcome, Transaction};
use crate::error::StateError;

/// Requests that are remembered. They come from people and their scripts, and are sent again within minutes.
pub const KEPT: u64 = 1000;

/// Applies a command, unless it was applied under this id before.
pub fn once(transaction: &mut Transaction<'_>, once: Once) -> Result<Outcome, StateError> {
    let Once { request, reply, command } = once;
    if let Some(record) = transaction.before().request(&request)? {
        return Ok(Outcome::Repeated(Box::new(record)));
    }
    let outcome = apply_changes(transaction, command.map_or_else(Command::default, |command| *command))?;
    let (mount, job) = match &outcome {
        // Credentials are kept in one place.
        Outcome::Mount(mount) => (Some(Mount { options: Default::default(), ..(**mount).clone() }), 0),
        Outcome::Job(id) => (None, *id),
        Outcome::Done => (None, 0),
        // Nothing was done: whoever asks again may succeed.
        _ => return Ok(outcome),
    };
    transaction.counters.request += 1;
    let number = transaction.counters.request;
    transaction.put(Family::Meta, &request_key(&request), &RequestRecord { number, mount, job, reply });
    transaction.put_bytes(Family::Meta, &requested_key(number), &request);
    if let Some(oldest) = number.checked_sub(KEPT)
        && let Some(request) = transaction.before().requested(oldest)?
    {
        transaction.delete(Family::Meta, &request_key(&request));
        transaction.delete(Family::Meta, &requested_key(oldest));
    }
    Ok(outcome)
}

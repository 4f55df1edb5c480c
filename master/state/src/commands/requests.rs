//! Commands under ids that their callers have chosen. Whoever got no answer asks again, perhaps at another master, and
//! must be told what the first attempt has done: that is decided here, where all masters decide the same.

use bytes::Bytes;
use cavern_proto::master::Mount;
use cavern_proto::record::RequestRecord;

use crate::error::Result;
use crate::outcome::Outcome;
use crate::schema;
use crate::transaction::Transaction;

/// Requests that are remembered. They come from people and their scripts, and are sent again within minutes.
pub const KEPT: u64 = 1000;

/// Takes down what a command did that was asked for under an id, if it did anything.
pub fn remember(tx: &mut Transaction<'_>, request: Bytes, reply: Bytes, outcome: &Outcome) -> Result {
    let (mount, job) = match outcome {
        // Credentials are kept in one place.
        Outcome::Mount(mount) => (Some(Mount { options: Default::default(), ..(**mount).clone() }), 0),
        Outcome::Job(id) => (None, *id),
        Outcome::Done => (None, 0),
        // Nothing was done: whoever asks again may succeed.
        _ => return Ok(()),
    };
    tx.counters.request += 1;
    let number = tx.counters.request;
    tx.put(schema::Requests, &request[..], &RequestRecord { number, mount, job, reply });
    tx.put(schema::RequestIds, number, &request);
    if let Some(oldest) = number.checked_sub(KEPT)
        && let Some(request) = tx.before().get(schema::RequestIds, oldest)?
    {
        tx.delete(schema::Requests, &request[..]);
        tx.delete(schema::RequestIds, oldest);
    }
    Ok(())
}

//! Where a database stands in the log.

use cavern_state::{Database, Family};

use super::types::{LogId, StoredMembership, from_json};
use crate::error::Result;

/// Keys in `meta` of the position of the last entry that was applied, and of the last membership.
pub const APPLIED_KEY: &[u8] = b"applied";
pub const MEMBERSHIP_KEY: &[u8] = b"membership";

/// Last applied log id and last membership.
pub type Position = (Option<LogId>, StoredMembership);

/// Where a database stands in the log.
pub fn read_position(database: &Database) -> Result<Position> {
    let applied = database.get(Family::Meta, APPLIED_KEY)?;
    let membership = database.get(Family::Meta, MEMBERSHIP_KEY)?;
    Ok((
        applied.map(|bytes| from_json(&bytes, "the applied position")).transpose()?,
        membership.map(|bytes| from_json(&bytes, "the membership")).transpose()?.unwrap_or_default(),
    ))
}

//! The feature version of a group of masters: which commands they have agreed to put into their log.
//!
//! While a cluster is upgraded, masters of two versions work together. A command that one of them does not know, or
//! understands otherwise, would make its state another than that of the others. So every version of the program knows
//! the commands up to a feature version, and the leader proposes nothing that is beyond the one in the state. It never
//! falls: whoever knows less does not start with such a state, and stops where the others agree on it.
//!
//! | feature version | adds |
//! |---|---|
//! | 1 | all commands of the first version of the program: a new group begins with it |

use crate::database::Database;
use crate::error::{Result, StateError};
use crate::tables::Tables;

/// What this version knows. One more with each command that is new, or means something else, and its line above.
pub const FEATURE_VERSION: u32 = FIRST;
/// What every version knows: whatever a new group is made of, it begins with this.
pub const FIRST: u32 = 1;

/// Refuses a state whose feature version is beyond what a replica knows, and one of before there were any.
///
/// # Errors
/// [`StateError::NewerFeatureVersion`], [`StateError::FormerState`], and those of reading it.
pub fn check_state(database: &Database, known: u32) -> Result {
    let tables = Tables::new(database);
    let counters = tables.counters()?;
    // A replica that has nothing yet has no feature version either.
    let lacks_version = counters.feature_version == 0 && tables.cluster_id()?.is_some();
    if counters.former_feature_version != 0 || lacks_version {
        return Err(StateError::FormerState);
    }
    check(counters.feature_version, known)
}

/// Refuses a feature version beyond what a replica knows.
///
/// # Errors
/// [`StateError::NewerFeatureVersion`].
pub fn check(agreed: u32, known: u32) -> Result {
    match agreed > known {
        true => Err(StateError::NewerFeatureVersion { agreed, known }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_is_refused_with_what_to_do() {
        assert!(check(2, 2).is_ok());
        let refused = check(3, 2).unwrap_err().to_string();
        assert!(refused.contains("feature version 3") && refused.contains("upgrade this master"), "{refused}");
    }
}

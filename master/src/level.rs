//! The level of a group of masters: which commands they have agreed to put into their log.
//!
//! While a cluster is upgraded, masters of two versions work together. A command that one of them does not know, or
//! understands otherwise, would make its state another than that of the others. So every version has a level, and the
//! leader proposes nothing that is beyond the level in the state. It raises that as soon as all masters of the group
//! say that they know a higher one. It never falls: whoever knows less is not taken in then, and does not start.
//!
//! | level | adds |
//! |---|---|
//! | 0 | the commands of before there were levels |
//! | 1 | `RaiseLevel` |
//! | 2 | `Once`, `SealSecrets` |
//! | 3 | directories that a session holds: the fields of mutations that say so, and their records |
//! | 4 | `EndSessionStep.now_ns`, `Mount.names` |
//! | 5 | `PutWorker.owner` |
//! | 6 | `Mutate.client`, `Mount.clients` |
//! | 7 | `ClientRule.users`, `Mutation.user`, `OpenToWrite` |
//! | 8 | rates of `ClientRule` |
//! | 9 | `SkipInodes` |
//! | 10 | `DropLost` |
//! | 11 | `Mutation.rename_whiteout` |
//! | 12 | `BeginHistory`; who sets quotas and times to live; names of `SetXattr`; mounts whose keys are vended |
//! | 13 | `Mutate.owner`; holds of readers; ids of owners; what commits name; ends of generations; bounds of results |

use std::time::Duration;

use cavern_proto::raft::Group;
use cavern_proto::record::command::Command;
use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::MasterError;
use crate::group::look;
use crate::service::Services;
use crate::state::{Database, StateReader, Tables};

/// What this version knows. One more with each command that is new, or means something else, and its line above.
pub const LEVEL: u32 = 13;
/// The level from which on files that a session held count as changed when it ends.
pub const ENDS_MARKED: u32 = 4;
/// The level from which on a mount says when changes of names are answered.
pub const MOUNT_NAMES: u32 = 4;
/// The level from which on a worker is that of the certificate with which it has registered.
pub const WORKER_OWNERS: u32 = 5;
/// The level from which on a mount may not be there for all clients.
pub const CLIENT_RULES: u32 = 6;
/// The level from which on a mount may limit the users of a client.
pub const USER_LIMITS: u32 = 7;
/// The level from which on a mount may have rates for a client.
pub const CLIENT_RATES: u32 = 8;
/// The level from which on a term begins with numbers of inodes that no other has used.
pub const INODES_SKIPPED: u32 = 9;
/// The level from which on blocks that all of their workers have lost can be given up.
pub const LOST_DROPPED: u32 = 10;
/// The level from which on a rename may leave a whiteout.
pub const WHITEOUTS: u32 = 11;
/// The level from which on masters that were started begin a history.
pub const HISTORIES: u32 = 12;
/// The level from which on clients set quotas and times to live where their rule says so, and nowhere else.
pub const CLIENT_SETTINGS: u32 = 12;
/// The level from which on no attribute is called as its prefix alone.
pub const XATTR_NAMES: u32 = 12;
/// The level from which on keys of a mount may be vended: a leader that knew nothing of it would give out those that
/// the mount has.
pub const VENDED_KEYS: u32 = 12;
/// The level from which on a session is recorded with its owner.
pub const SESSION_OWNERS: u32 = 13;
/// The level from which on what is held by whoever may only read counts as read.
pub const READING_HOLDS: u32 = 13;
/// The level from which on no file is owned by an id that is none.
pub const OWNER_IDS: u32 = 13;
/// The level from which on blocks are committed at workers of the table only, and each once in a commit.
pub const COMMITS_CHECKED: u32 = 13;
/// The level from which on the results that a session has not got are bounded.
pub const RESULTS_BOUNDED: u32 = 13;
/// Between two looks at the others, as long as one of them knows less.
const PERIOD: Duration = Duration::from_secs(2);

/// Which commands the masters have agreed on.
///
/// # Errors
/// [`MasterError::NotLeading`] when this master leads no more.
pub async fn agreed(reader: &StateReader) -> Result<u32, MasterError> {
    reader.look(|tables| Ok(tables.counters()?.level)).await
}

/// Refuses what takes commands that not every master knows; `what` as it is asked for.
///
/// # Errors
/// [`MasterError::Refused`], and those of [`agreed`].
pub async fn require(reader: &StateReader, level: u32, what: &str) -> Result<(), MasterError> {
    if agreed(reader).await? >= level {
        return Ok(());
    }
    Err(MasterError::Refused(format!("not every master knows yet {what}: upgrade them all first")))
}

/// The same as [`check`] of what a database has.
pub fn check_state(database: &Database) -> Result<(), MasterError> {
    check(Tables::new(database).counters()?.level)
}

/// Refuses a state which has been agreed to have commands that this version does not know.
///
/// # Errors
/// [`MasterError::NewerLevel`].
pub fn check(level: u32) -> Result<(), MasterError> {
    if level > LEVEL { Err(MasterError::NewerLevel { level, known: LEVEL }) } else { Ok(()) }
}

/// Refuses to take a master in that does not know what the others have agreed on.
///
/// # Errors
/// [`MasterError::Refused`].
pub fn check_joining(joining: &Group, agreed: u32) -> Result<(), MasterError> {
    if joining.level >= agreed {
        return Ok(());
    }
    Err(MasterError::Refused(format!(
        "the master at {} is of an older version ({}, level {}), and the others have agreed on commands of level \
         {agreed}: upgrade it first",
        joining.address, joining.version, joining.level
    )))
}

/// Raises the level when all masters know more than it has; goes on until `stop`, or until there is nothing to raise.
pub async fn keep_raising(services: Services, stop: CancellationToken) {
    let work = async {
        loop {
            match raise(&services).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::debug!("the level of the group is not raised: {error}"),
            }
            tokio::time::sleep(PERIOD).await;
        }
    };
    stop.run_until_cancelled(work).await;
}

/// Whether the group has the level of this version by now.
async fn raise(services: &Services) -> Result<bool, MasterError> {
    let agreed = agreed(&services.lookups.reader).await?;
    if agreed >= LEVEL {
        return Ok(true);
    }
    let group = services.consensus.group();
    let others = group.members.iter().filter(|member| member.node_id != group.node_id);
    let answers = join_all(others.map(|member| look(services.consensus.ways(), &member.address))).await;
    let known = known_to_all(answers.into_iter().collect::<Result<Vec<_>, _>>()?.iter());
    if known > agreed {
        services.proposer.propose(Command::RaiseLevel(known)).await?;
        tracing::info!(level = known, "all masters know what is new since level {agreed}: it is used from now on");
    }
    Ok(known >= LEVEL)
}

fn known_to_all<'a>(others: impl Iterator<Item = &'a Group>) -> u32 {
    others.map(|group| group.level).fold(LEVEL, u32::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(level: u32) -> Group {
        Group { level, address: "m:1".into(), version: "0.0.9".into(), ..Group::default() }
    }

    #[test]
    fn what_one_does_not_know_is_not_agreed_on() {
        assert_eq!(known_to_all([].iter()), LEVEL, "alone");
        assert_eq!(known_to_all([group(LEVEL), group(LEVEL + 1)].iter()), LEVEL);
        assert_eq!(known_to_all([group(LEVEL), group(LEVEL - 1)].iter()), LEVEL - 1);
    }

    #[test]
    fn whoever_knows_less_is_refused_with_what_to_do() {
        assert!(check(LEVEL).is_ok());
        let refused = check(LEVEL + 1).unwrap_err().to_string();
        assert!(refused.contains(&format!("level {LEVEL}")) && refused.contains("upgrade this master"), "{refused}");
        assert!(check_joining(&group(3), 3).is_ok());
        let refused = check_joining(&group(2), 3).unwrap_err().to_string();
        assert!(
            refused.contains("m:1") && refused.contains("0.0.9") && refused.contains("upgrade it first"),
            "{refused}"
        );
    }
}

//! How the masters of a group come to a higher [feature version](cavern_state::feature_version): the leader raises it
//! as soon as all masters of the group say that they know a higher one. Whoever knows less is not taken in then.

use std::time::Duration;

use cavern_proto::raft::Group;
use cavern_proto::record::command::Command;
use cavern_state::feature_version as state;
use cavern_work::background::{BackgroundTask, Next, Pace, TaskGroup};
use cavern_work::{StateReader, WorkError};
use futures::FutureExt as _;
use futures::future::join_all;

use crate::bootstrap::{ask_group, described};
use crate::error::MasterError;
use crate::services::Services;

/// What this version knows.
#[cfg(not(test))]
pub const FEATURE_VERSION: u32 = state::FEATURE_VERSION;
/// Tests pretend to know one more: a group of theirs has something to agree on.
#[cfg(test)]
pub const FEATURE_VERSION: u32 = state::FEATURE_VERSION + 1;
/// Addresses of masters that pretend to be of the version before, in tests.
#[cfg(test)]
pub static OLDER: parking_lot::Mutex<std::collections::BTreeSet<String>> =
    parking_lot::Mutex::new(std::collections::BTreeSet::new());
/// Between two looks at the others, as long as one of them knows less.
const PERIOD: Duration = Duration::from_secs(2);

/// What the master of this program at an address knows.
pub fn known_at(_address: &str) -> u32 {
    #[cfg(test)]
    if OLDER.lock().contains(_address) {
        return state::FEATURE_VERSION;
    }
    FEATURE_VERSION
}

/// Which feature version the masters have agreed on.
///
/// # Errors
/// [`WorkError::Consensus`] when this master leads no more.
pub async fn agreed(reader: &StateReader) -> Result<u32, WorkError> {
    reader.look(|tables| Ok(tables.counters()?.feature_version)).await
}

/// Refuses what takes commands of a feature version that not every master knows; `what` as it is asked for.
///
/// # Errors
/// [`WorkError::Refused`], and those of [`agreed`].
#[cfg_attr(not(test), expect(dead_code, reason = "every master knows what the first version has"))]
pub async fn require(reader: &StateReader, version: u32, what: &str) -> Result<(), WorkError> {
    if agreed(reader).await? >= version {
        return Ok(());
    }
    Err(WorkError::Refused(format!("not every master knows yet {what}: upgrade them all first")))
}

/// Refuses to take a master in that does not know what the others have agreed on.
///
/// # Errors
/// [`WorkError::Refused`].
pub fn check_joining(joining: &Group, agreed: u32) -> Result<(), WorkError> {
    if joining.feature_version >= agreed {
        return Ok(());
    }
    Err(WorkError::Refused(format!(
        "the master at {} is of an older version ({}, feature version {}), and the others have agreed on feature \
         version {agreed}: upgrade it first",
        joining.address, joining.version, joining.feature_version
    )))
}

/// Begins to raise the feature version when all masters know more than that, until there is nothing to raise.
pub fn start_raising(background: &TaskGroup, services: &Services) {
    let task = BackgroundTask::new("raise-feature-version", Pace::after(PERIOD));
    services.background.start(background, task, services.clone(), |services| raise_step(services).boxed());
}

async fn raise_step(services: &Services) -> Result<Next, WorkError> {
    Ok(match raise(services).await {
        Ok(true) => Next::End,
        Ok(false) => Next::Rest,
        // Masters are away for a while when they are upgraded: it is no failure.
        Err(error) => {
            tracing::debug!("the feature version of the group is not raised: {error}");
            Next::Rest
        }
    })
}

/// Whether the group has agreed on all that this version knows by now.
pub async fn raise(services: &Services) -> Result<bool, MasterError> {
    let agreed = agreed(&services.lookups.reader).await?;
    if agreed >= FEATURE_VERSION {
        return Ok(true);
    }
    let group = described(&services.consensus);
    let others = group.members.iter().filter(|member| member.node_id != group.node_id);
    let answers = join_all(others.map(|member| ask_group(&services.consensus.connector, &member.address))).await;
    let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
    let known = known_to_all(answers.iter().chain([&group]));
    if known > agreed {
        services.proposer.propose(Command::RaiseFeatureVersion(known)).await?;
        tracing::info!(known, "all masters know what is new since feature version {agreed}: it is used from now on");
    }
    Ok(known >= FEATURE_VERSION)
}

/// `masters` as each of them sees the group.
fn known_to_all<'a>(masters: impl Iterator<Item = &'a Group>) -> u32 {
    masters.map(|group| group.feature_version).fold(FEATURE_VERSION, u32::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(feature_version: u32) -> Group {
        Group { feature_version, address: "m:1".into(), version: "0.0.9".into(), ..Group::default() }
    }

    #[test]
    fn what_one_does_not_know_is_not_agreed_on() {
        assert_eq!(known_to_all([].iter()), FEATURE_VERSION, "alone");
        assert_eq!(known_to_all([group(2), group(3)].iter()), FEATURE_VERSION);
        assert_eq!(known_to_all([group(2), group(state::FIRST)].iter()), state::FIRST);
    }

    #[test]
    fn whoever_knows_less_is_refused_with_what_to_do() {
        assert!(check_joining(&group(3), 3).is_ok());
        assert!(check_joining(&group(0), state::FIRST).is_err(), "of before there were feature versions");
        let refused = check_joining(&group(2), 3).unwrap_err().to_string();
        assert!(
            refused.contains("m:1") && refused.contains("0.0.9") && refused.contains("upgrade it first"),
            "{refused}"
        );
    }
}

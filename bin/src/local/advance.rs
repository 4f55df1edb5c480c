//! Whether a master that is not ready yet gets on: it is sent the namespace, or applies what it lacks. Who gets on is
//! waited for, however long that takes, and what is waited for is said now and then.

use std::time::Duration;

use cavern_proto::raft::{Group, SnapshotTransfer};
use tokio::time::Instant;

use super::child::ChildName;
use super::masters::survey;
use super::record::Cluster;
use super::start::Look;
use crate::console;
use crate::error::CliError;

/// Between two lines about the same wait; a short one needs none.
const SAY_PERIOD: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// See the module.
pub struct Advance {
    name: ChildName,
    /// The most that has been there of a snapshot, and the fewest entries that were to be applied.
    received: u64,
    lacking: Option<u64>,
    /// What was going on at the last look.
    doing: Option<String>,
    said: Instant,
}

impl Advance {
    pub fn of(name: ChildName) -> Self {
        Self { name, received: 0, lacking: None, doing: None, said: Instant::now() }
    }

    /// Looks at the master, and says on stderr what it does if that lasts.
    pub fn look(&mut self, cluster: &Cluster) -> Result<Look, CliError> {
        let Some(master) = cluster.masters.get(self.name.number) else { return Ok(Look::Waits) };
        let survey = survey(cluster)?;
        let Some(Ok(own)) = survey.answer(&master.grpc) else { return Ok(Look::Waits) };
        let leader = survey.leader_address().and_then(|leader| survey.answer(leader)).and_then(Result::ok);
        let look = self.note(own, leader);
        if look == Look::Moves
            && self.said.elapsed() >= SAY_PERIOD
            && let Some(doing) = &self.doing
        {
            console::remark(format_args!("{} {doing}", self.name));
            self.said = Instant::now();
        }
        Ok(look)
    }

    /// What the master was doing when it was looked at, for the end of a sentence.
    pub fn remark(&self) -> String {
        self.doing.as_ref().map(|doing| format!(" (it {doing})")).unwrap_or_default()
    }

    fn note(&mut self, own: &Group, leader: Option<&Group>) -> Look {
        if let Some(SnapshotTransfer { received, bytes }) = own.incoming {
            self.doing = Some(format!("has {} of {} MiB of the namespace", received / MIB, bytes.div_ceil(MIB)));
            let moves = received > self.received;
            // Another snapshot begins at nothing, once.
            self.received = self.received.max(received);
            return if moves { Look::Moves } else { Look::Waits };
        }
        // A master that has no log yet is told of it by the leader; clients make it longer meanwhile.
        let end = leader.map_or(own.last_index, |leader| leader.committed_index);
        let lacking = end.saturating_sub(own.applied_index);
        if end == 0 || own.applied_index == 0 {
            return Look::Waits;
        }
        self.doing = (lacking > 0).then(|| format!("lacks {lacking} entries of the log"));
        let moves = self.lacking.is_none_or(|least| lacking < least);
        self.lacking = Some(self.lacking.map_or(lacking, |least| least.min(lacking)));
        if moves { Look::Moves } else { Look::Waits }
    }
}

#[cfg(test)]
mod tests {
    use super::super::child::Role;
    use super::*;

    #[test]
    fn who_gets_on_is_waited_for_and_who_does_not_is_not() {
        let mut advance = Advance::of(ChildName { role: Role::Master, number: 1 });
        let empty = Group::default();
        assert_eq!(advance.note(&empty, None), Look::Waits);
        let sent =
            |received| Group { incoming: Some(SnapshotTransfer { received, bytes: 10 * MIB }), ..Group::default() };
        let leader = Group { committed_index: 1000, ..Group::default() };
        assert_eq!(advance.note(&sent(0), Some(&leader)), Look::Waits);
        assert_eq!(advance.note(&sent(3 * MIB), Some(&leader)), Look::Moves);
        assert_eq!(advance.remark(), " (it has 3 of 10 MiB of the namespace)");
        assert_eq!(advance.note(&sent(3 * MIB), Some(&leader)), Look::Waits, "it stands still");
        assert_eq!(advance.note(&sent(MIB), Some(&leader)), Look::Waits, "one that begins anew for ever does not");
        let applied = |applied_index| Group { applied_index, ..Group::default() };
        assert_eq!(advance.note(&applied(200), Some(&leader)), Look::Moves);
        assert_eq!(advance.remark(), " (it lacks 800 entries of the log)");
        assert_eq!(advance.note(&applied(200), Some(&leader)), Look::Waits);
        assert_eq!(advance.note(&applied(900), Some(&leader)), Look::Moves);
        // The log grows as fast as it is applied.
        let busy = Group { committed_index: 2000, ..Group::default() };
        assert_eq!(advance.note(&applied(1900), Some(&busy)), Look::Waits);
        assert_eq!(advance.note(&applied(2000), Some(&busy)), Look::Moves);
        assert_eq!((advance.remark().as_str(), advance.note(&applied(2000), Some(&busy))), ("", Look::Waits));
    }
}

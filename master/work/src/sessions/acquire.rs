//! Directories that were there before, and that a session wants to hold. The state grants that; here the master that
//! leads sees to what the state knows nothing of, caches.
//!
//! - Nobody else may know anything of what is in the directory, be it that a name is not there. Whoever has looked into
//!   it may have that in a cache as long as its session lives: then it is not delegated.
//! - Others may know the directory itself, as a name in the one above. They are told to forget its attributes, and when
//!   all have let go, and none of them has asked for them since or changed the directory, the next wish is granted.
//! - Whoever changes it while the state decides has it recalled
//!   ([`DirectoryDelegations`](super::delegations::DirectoryDelegations)).
//! - What was recalled is not granted soon.

use cavern_proto::master::AcquireStep;
use cavern_state::InodeLocation;

use super::delegations::ClaimBegin;
use super::recall::Recalls;
use crate::error::WorkError;
use crate::reader::StateReader;

/// What the leader finds.
enum Judged {
    /// Somebody else uses the directory.
    Used,
    /// Others know its attributes.
    Remembered,
    /// Nobody else knows anything.
    Free,
}

impl Recalls {
    /// What becomes of the wish of a session to hold a directory, as it is put into the log. Of what is to be granted
    /// all who ask about the directory wait until the state has decided: it is to be proposed, or given up.
    ///
    /// # Errors
    /// Those of reading the state.
    pub async fn judge_wish(
        &self,
        reader: &StateReader,
        directory: u64,
        session: u64,
    ) -> Result<AcquireStep, WorkError> {
        // Clients of an earlier term would come back to a claim, and forget everything for that.
        if self.hub.is_young() || self.is_damped(directory) {
            return Ok(AcquireStep::Later);
        }
        let delegations = self.delegations();
        let announced = match delegations.claim(directory, session) {
            ClaimBegin::Taken => return Ok(AcquireStep::Later),
            ClaimBegin::New => None,
            ClaimBegin::Announced(seq) => Some(seq),
        };
        let judged = self.judge(reader, (directory, session), announced).await;
        match judged {
            Ok(Judged::Free) => return Ok(AcquireStep::Grant),
            Ok(Judged::Remembered) => delegations.postpone(directory, announced),
            Ok(Judged::Used) | Err(_) => delegations.give_up(directory, session),
        }
        match judged? {
            Judged::Remembered if announced.is_none() => Ok(AcquireStep::Announce),
            _ => Ok(AcquireStep::Later),
        }
    }

    async fn judge(
        &self,
        reader: &StateReader,
        (directory, session): (u64, u64),
        announced: Option<u64>,
    ) -> Result<Judged, WorkError> {
        let record = reader.look(move |tables| Ok(tables.inode(directory)?)).await?;
        let Some(record) = record else { return Ok(Judged::Used) };
        let location = InodeLocation::of(&record);
        if !matches!(location, InodeLocation::Named { is_directory: true, .. }) {
            return Ok(Judged::Used);
        }
        let place = (directory, record.mount_id, &location);
        let Some(known) = self.hub.known_by_others(place, session, announced) else {
            return Ok(Judged::Used);
        };
        if !known.inodes.is_empty() {
            let is_inside = reader.read(move |tables| {
                for inode in known.inodes {
                    if tables.inode(inode)?.is_some_and(|record| record.parent == directory) {
                        return Ok(true);
                    }
                }
                Ok(false)
            });
            if is_inside.await? {
                return Ok(Judged::Used);
            }
        }
        Ok(if known.has_attributes { Judged::Remembered } else { Judged::Free })
    }
}

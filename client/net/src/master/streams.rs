//! Streams: they are opened at the stubs of one master, and end when another one leads.

use std::error::Error as _;
use std::time::Duration;

use cavern_proto::NotLeading;
use tonic::Status;

use super::{MasterChannel, NO_LEADER, Stubs, innermost};
use crate::error::NetError;

/// What the end of a stream, or of the attempt to open one, says of its master.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamFailure {
    /// It does not lead, and has named the one that does: the next [`MasterChannel::stubs`] are of that one, or of one
    /// that was found meanwhile.
    Redirected,
    /// It does not lead, and nobody knows who does: the probe looks for a leader.
    NoLeader,
    /// No answer came: the probe looks for a leader.
    Broken,
    /// An error, which is the master's own answer.
    Answered,
}

impl MasterChannel {
    /// The stubs of the master that is thought to lead, for streams. Report what comes of them: with `open`,
    /// `note_answer` and `stream_failed`; and listen to `moved_from`.
    pub fn stubs(&self) -> Stubs {
        self.inner.masters.preferred()
    }

    /// Opens a stream at `stubs`. `None` when another master was found to lead before this one answered.
    pub async fn open<T>(&self, stubs: &Stubs, opening: impl Future<Output = T>) -> Option<T> {
        self.attend(stubs.origin, opening).await
    }

    /// Completes when another master leads than that of these stubs: their streams are to be opened there.
    pub async fn moved_from(&self, stubs: &Stubs) {
        self.inner.masters.moved_from(stubs.origin).await;
    }

    /// Waits for a pause after a failure at `stubs`; less, if a master, any, has answered as a leader since these stubs
    /// were taken while that was in doubt.
    pub async fn wait_for_leader(&self, stubs: &Stubs, pause: Duration) {
        self.inner.wait_for_leader(stubs.origin, pause).await;
    }

    /// The master of these stubs gave a sign of life, as only a leader does.
    pub fn note_answer(&self, stubs: &Stubs) {
        self.inner.answered(stubs.origin);
    }

    /// A stream at `stubs` could not be opened, or broke: follows a master that names the leader, and suspects one that
    /// does not answer.
    pub fn stream_failed(&self, stubs: &Stubs, status: &Status) -> StreamFailure {
        match NotLeading::from_status(status) {
            Some(NotLeading { leader: Some(leader) }) if self.inner.masters.follow(stubs.origin, &leader) => {
                StreamFailure::Redirected
            }
            Some(_) => {
                self.suspect();
                StreamFailure::NoLeader
            }
            None if status.source().is_some() => {
                self.suspect();
                StreamFailure::Broken
            }
            None => StreamFailure::Answered,
        }
    }

    /// What the end of a stream means whose beginning was a call.
    pub fn broken(&self, status: Status) -> NetError {
        let cause = match NotLeading::from_status(&status) {
            Some(NotLeading { leader }) => {
                // Which master that was is not known here. The probe asks all that are known.
                leader.and_then(|leader| self.inner.masters.learn(&leader));
                NO_LEADER.to_owned()
            }
            None if status.source().is_some() => innermost(&status),
            None => return status.into(),
        };
        self.suspect();
        self.inner.unavailable(cause)
    }
}

//! What the log has of sessions: of each owner's, and of each other kind, a few lines in a second, which say how many
//! were left out before. A client opens and ends as many as it likes.

use cavern_conf::process::LogLimit;
use cavern_proto::COMMAND_CLIENT;
use cavern_security::Identity;

/// Bounds what the log has of each owner's sessions.
#[derive(Default)]
pub struct SessionLog {
    /// By owner; `None` where connections are not secured.
    lives: LogLimit<Option<Identity>>,
    behind: LogLimit<()>,
    stuck: LogLimit<()>,
}

impl SessionLog {
    /// Writes down what becomes of a session. Those of commands would fill the log, and say nothing.
    pub fn life(&self, owner: Option<&Identity>, session: u64, client: &str, what: &str) {
        if client == COMMAND_CLIENT {
            tracing::debug!(session, client, "{what}");
        } else if let Some(suppressed) = self.lives.admit(owner.cloned()) {
            tracing::info!(session, client, suppressed, "{what}");
        }
    }

    /// A client does not take its events.
    pub fn behind(&self, session: u64, client: &str) {
        if let Some(suppressed) = self.behind.admit(()) {
            tracing::warn!(session, client, suppressed, "too far behind: it is to forget everything");
        }
    }

    /// A client does not let go in time.
    pub fn stuck(&self) {
        if let Some(suppressed) = self.stuck.admit(()) {
            tracing::warn!(
                suppressed,
                "a client has not let go of what a change made untrue: it is answered nevertheless"
            );
        }
    }
}

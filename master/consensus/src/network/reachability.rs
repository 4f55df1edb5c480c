//! Whether another master can be reached, for the log. The consensus tries it many times in a second, and its library
//! says each time that this was in vain; the log has one line when nothing was heard for a while, and one at the end.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::types::NodeId;

/// Whoever does not answer for so long is told of.
const SILENCE: Duration = Duration::from_secs(1);

/// Shared by whatever calls one master.
#[derive(Debug)]
pub struct Reachability {
    address: String,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Reached,
    /// It has answered no call from then on.
    SilentSince(Instant),
    /// And that has been said.
    ToldSince(Instant),
}

impl Reachability {
    pub fn of(address: &str) -> Self {
        Self { address: address.to_owned(), state: Mutex::default() }
    }

    /// It has answered.
    pub fn reached(&self, master: NodeId) {
        let before = std::mem::take(&mut *self.state.lock());
        if let State::ToldSince(since) = before {
            let silent_s = since.elapsed().as_secs();
            info!(master, address = self.address, silent_s, "the other master is reached again");
        }
    }

    /// A call was in vain: it did not arrive, was refused, or was not answered in time.
    pub fn not_reached(&self, master: NodeId, cause: &str) {
        let mut state = self.state.lock();
        match *state {
            State::Reached => *state = State::SilentSince(Instant::now()),
            State::SilentSince(since) if since.elapsed() >= SILENCE => {
                *state = State::ToldSince(since);
                warn!(master, address = self.address, cause, "another master cannot be reached");
            }
            State::SilentSince(_) | State::ToldSince(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_for_a_while_is_told_of_until_it_answers() {
        let reachability = Reachability::of("host:1");
        let state = || *reachability.state.lock();
        for _ in 0..2 {
            reachability.not_reached(2, "refused");
            tokio::time::advance(SILENCE / 2).await;
            reachability.not_reached(2, "refused");
            assert!(matches!(state(), State::SilentSince(_)), "{:?}", state());
            reachability.reached(2);
            assert_eq!(state(), State::Reached);
        }
        let since = Instant::now();
        reachability.not_reached(2, "refused");
        tokio::time::advance(SILENCE).await;
        for _ in 0..2 {
            reachability.not_reached(2, "refused");
            assert_eq!(state(), State::ToldSince(since));
        }
        reachability.reached(2);
        assert_eq!(state(), State::Reached);
    }
}

//! Which sessions know who the masters are.

use super::WatchHub;

impl WatchHub {
    /// The client of a session knows the masters of an epoch.
    pub fn knows_group(&self, session: u64, epoch: u64) {
        if let Some(known) = self.state.lock().sessions.get_mut(&session) {
            known.epochs.group = epoch;
        }
        self.progress.notify_waiters();
    }

    /// Sends every session something at once: which masters there are goes with it.
    pub fn announce_group(&self) {
        if self.lead.holds() {
            self.state.lock().push_ticks();
        }
    }

    /// Returns when all clients know the masters of an epoch, those that are on their way to another stream too; at the
    /// latest after one lease. Gives the names of those that have not said so.
    pub async fn wait_group_known(&self, epoch: u64) -> Vec<String> {
        let know = |state: &super::State| {
            state.has_settled(self.lease, |_| true) && state.sessions.values().all(|known| known.epochs.group >= epoch)
        };
        if self.wait_until(know).await {
            return Vec::new();
        }
        let state = self.state.lock();
        let unaware = state.sessions.values().filter(|session| session.epochs.group < epoch);
        let broken = state.broken.iter().filter(|(_, since)| since.elapsed() < self.lease);
        let names = unaware.map(|session| format!("client {}", session.client));
        names.chain(broken.map(|(id, _)| format!("the client of session {id}, which has no stream"))).collect()
    }
}

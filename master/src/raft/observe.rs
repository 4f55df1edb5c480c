//! What the consensus shows of itself, as it changes.

use openraft::RaftMetrics;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::type_config::alias::WatchReceiverOf;

use super::types::Types;

/// The latest that there is to see.
pub type Observed = WatchReceiverOf<Types, RaftMetrics<Types>>;

/// Returns when it is so, or when the consensus has ended: then false.
pub async fn until(observed: &mut Observed, is_so: impl Fn(&RaftMetrics<Types>) -> bool) -> bool {
    loop {
        if is_so(&observed.borrow_and_update()) {
            return true;
        }
        if observed.changed().await.is_err() {
            return false;
        }
    }
}

//! Single flight: identical requests at one time are one request, whose answer all of them get.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, WeakShared};
use parking_lot::Mutex;

type Map<K, V> = Arc<Mutex<HashMap<K, (u64, WeakShared<BoxFuture<'static, V>>)>>>;

/// The flights of one kind of request. A flight that everybody has stopped waiting for is dropped.
#[derive(Debug)]
pub(crate) struct SingleFlight<K, V: Clone> {
    map: Map<K, V>,
}

impl<K: Eq + Hash + Clone + Send + 'static, V: Clone + Send + Sync + 'static> SingleFlight<K, V> {
    /// Joins the flight of `key`, or starts it.
    pub(crate) async fn join(&self, key: K, start: impl Future<Output = V> + Send + 'static) -> V {
        let flight = {
            let mut map = self.map.lock();
            match map.get(&key).and_then(|(_, flight)| flight.upgrade()) {
                Some(flight) => flight,
                None => {
                    let id = map.get(&key).map_or(0, |(id, _)| id.wrapping_add(1));
                    let landing = RemoveOnDrop { map: self.map.clone(), key: key.clone(), id };
                    let flight = async move {
                        let landing = landing;
                        let answer = start.await;
                        // Whoever comes after the answer asks anew.
                        drop(landing);
                        answer
                    };
                    let flight = flight.boxed().shared();
                    // A flight that has not been polled cannot have ended.
                    if let Some(weak) = flight.downgrade() {
                        map.insert(key, (id, weak));
                    }
                    flight
                }
            }
        };
        flight.await
    }
}

impl<K, V: Clone> Default for SingleFlight<K, V> {
    fn default() -> Self {
        Self { map: Arc::default() }
    }
}

/// Takes a flight off the map when it ends or is given up.
struct RemoveOnDrop<K: Eq + Hash, V: Clone> {
    map: Map<K, V>,
    key: K,
    id: u64,
}

impl<K: Eq + Hash, V: Clone> Drop for RemoveOnDrop<K, V> {
    fn drop(&mut self) {
        let mut map = self.map.lock();
        if map.get(&self.key).is_some_and(|(id, _)| *id == self.id) {
            // Dropped after the lock: the last reference may own anything.
            let gone = map.remove(&self.key);
            drop(map);
            drop(gone);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn simultaneous_requests_fly_once_and_later_ones_anew() {
        let flights = SingleFlight::<u8, u32>::default();
        let count = Arc::new(AtomicU32::new(0));
        let start = || {
            let count = count.clone();
            async move {
                tokio::task::yield_now().await;
                count.fetch_add(1, Ordering::Relaxed)
            }
        };
        let answers = futures::join!(flights.join(1, start()), flights.join(1, start()), flights.join(2, start()));
        assert_eq!((answers.0, count.load(Ordering::Relaxed)), (answers.1, 2));
        flights.join(1, start()).await;
        assert_eq!(count.load(Ordering::Relaxed), 3);
        assert!(flights.map.lock().is_empty());
    }

    #[tokio::test]
    async fn a_flight_that_nobody_waits_for_is_given_up() {
        let flights = SingleFlight::<u8, u32>::default();
        assert!(flights.join(1, std::future::pending()).now_or_never().is_none());
        assert!(flights.map.lock().is_empty());
        assert_eq!(flights.join(1, async { 7 }).await, 7);
    }
}

//! Places for peers of which nothing is known yet: of them there are few, and whoever comes last has one.
//!
//! A peer that has not shown who it is costs a connection, and nobody can tell it from one that will. When all places
//! are taken, the oldest peer makes way of the address that has the most of them: whoever holds connections open and
//! says nothing loses those, and a peer that begins to speak has long got further. Networks of IPv6 count as one
//! address, since a host has all of its own.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Bits of an IPv6 address behind those of its network.
const HOST_BITS: u32 = 64;

/// The slots of peers that are not known yet. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HandshakeSlots(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    most: usize,
    /// The oldest first.
    taken: VecDeque<Taken>,
    by_address: HashMap<IpAddr, usize>,
    next: u64,
}

#[derive(Debug)]
struct Taken {
    number: u64,
    address: IpAddr,
    make_way: oneshot::Sender<()>,
}

/// The place of one peer, until this is dropped, or another needs it.
#[derive(Debug)]
pub struct HandshakeSlot {
    number: u64,
    told: oneshot::Receiver<()>,
    places: HandshakeSlots,
}

impl HandshakeSlots {
    /// At least one.
    pub fn new(most: usize) -> Self {
        let state = State { most: most.max(1), taken: VecDeque::new(), by_address: HashMap::new(), next: 0 };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Another peer is told to make way if there is no place.
    pub fn take(&self, address: IpAddr) -> HandshakeSlot {
        let address = network(address);
        let mut state = self.0.lock();
        if state.taken.len() >= state.most {
            state.displace();
        }
        let (make_way, told) = oneshot::channel();
        let number = state.next;
        state.next += 1;
        state.taken.push_back(Taken { number, address, make_way });
        *state.by_address.entry(address).or_default() += 1;
        HandshakeSlot { number, told, places: self.clone() }
    }
}

impl State {
    fn displace(&mut self) {
        let most = self.by_address.iter().max_by_key(|(_, count)| **count).map(|(address, _)| *address);
        let oldest = self.taken.iter().position(|taken| Some(taken.address) == most);
        if let Some(taken) = oldest.and_then(|at| self.remove(at)) {
            // It may have ended meanwhile.
            let _ = taken.make_way.send(());
        }
    }

    fn remove(&mut self, at: usize) -> Option<Taken> {
        let taken = self.taken.remove(at)?;
        if let Some(count) = self.by_address.get_mut(&taken.address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&taken.address);
            }
        }
        Some(taken)
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << HOST_BITS))),
        address => address,
    }
}

impl HandshakeSlot {
    /// Ready when the peer has to make way.
    pub fn poll_displaced(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The sender is dropped only with the place itself.
        std::pin::Pin::new(&mut self.told).poll(cx).map(drop)
    }

    /// Returns when the peer has to make way.
    pub async fn displaced(&mut self) {
        std::future::poll_fn(|cx| self.poll_displaced(cx)).await;
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut state = self.places.0.lock();
        // Numbers rise from the front to the back.
        if let Ok(at) = state.taken.binary_search_by_key(&self.number, |taken| taken.number) {
            state.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(20);

    async fn has_to_go(place: &mut HandshakeSlot) -> bool {
        tokio::time::timeout(MOMENT, place.displaced()).await.is_ok()
    }

    #[tokio::test]
    async fn the_oldest_makes_way_of_the_address_that_has_the_most() {
        let places = HandshakeSlots::new(4);
        let [one, other] = ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().unwrap());
        let mut own = places.take(other);
        let mut flood: Vec<HandshakeSlot> = (0..3).map(|_| places.take(one)).collect();
        let _more = places.take(one);
        assert!(has_to_go(&mut flood[0]).await && !has_to_go(&mut flood[1]).await && !has_to_go(&mut own).await);
        let _newcomer = places.take("10.0.0.3".parse().unwrap());
        assert!(has_to_go(&mut flood[1]).await && !has_to_go(&mut flood[2]).await);
        assert!(!has_to_go(&mut own).await);
        assert_eq!(places.0.lock().taken.len(), 4);
    }

    #[tokio::test]
    async fn a_place_that_is_given_back_is_there_for_others() {
        let places = HandshakeSlots::new(2);
        let address = "10.0.0.1".parse().unwrap();
        let mut first = places.take(address);
        for _ in 0..10 {
            drop(places.take(address));
        }
        assert!(!has_to_go(&mut first).await);
        drop(first);
        let state = places.0.lock();
        assert!(state.taken.is_empty() && state.by_address.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_a_mapped_one_that_of_ipv4() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}

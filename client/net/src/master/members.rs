//! The masters that are known, and which of them is thought to lead.
//!
//! The configuration names the first ones; the list grows when one of them names a leader that is not among them. Two
//! of them stand out. The *preferred* one is where calls begin: a guess, which any failure may change, since a wrong
//! one costs another attempt. The *confirmed* one was the last to answer as only a leader does: that alone takes calls
//! and streams away from another master, where they may be well.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, check_master};
use cavern_security::Transport;
use parking_lot::RwLock;
use tokio::sync::watch;

use super::channel::channel;
use super::stubs::{Stubs, endpoint};
use crate::error::NetError;

/// Masters that are known at a time. A group has five at most; the rest is room for those that came and went. Where
/// there is none, the one goes that was named first.
pub(super) const MASTERS_MAX: usize = 16;

#[derive(Debug)]
pub(super) struct Members {
    state: RwLock<State>,
    confirmed: watch::Sender<Confirmed>,
    connect_timeout: Duration,
    /// How long a ping may stay unanswered.
    keep_alive: Duration,
    transport: Transport,
}

#[derive(Debug)]
struct State {
    /// Never empty, and first those of the configuration.
    known: Vec<Stubs>,
    configured: usize,
    preferred: u64,
    next_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct Confirmed {
    member: u64,
    /// Grows with each confirmation, also of the same master.
    count: u64,
}

/// Which master stubs lead to, and which confirmation was the last when they were taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Origin {
    pub(super) member: u64,
    seen: u64,
}

impl Members {
    pub(super) fn new(config: &Config, keep_alive: Duration) -> Result<Self, NetError> {
        let connect_timeout = config.client.connect_timeout.get();
        let transport = Transport::of(config)?;
        let mut known = Vec::new();
        for (address, member) in config.cluster.masters.iter().zip(0..) {
            known.push(lazy(address, (connect_timeout, keep_alive), &transport, member)?);
        }
        if known.is_empty() {
            return Err(NetError::Invalid("cluster.masters names no master".to_owned()));
        }
        let (configured, next_id) = (known.len(), known.len() as u64);
        Ok(Self {
            state: RwLock::new(State { known, configured, preferred: 0, next_id }),
            confirmed: watch::Sender::new(Confirmed { member: 0, count: 0 }),
            connect_timeout,
            keep_alive,
            transport,
        })
    }

    /// All of them, for a person.
    pub(super) fn addresses(&self) -> String {
        let state = self.state.read();
        state.known.iter().map(Stubs::address).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn preferred(&self) -> Stubs {
        let state = self.state.read();
        let found = state.known.iter().find(|stubs| stubs.origin.member == state.preferred);
        self.taken_now(found.unwrap_or(&state.known[0]))
    }

    pub(super) fn is_preferred(&self, member: u64) -> bool {
        self.state.read().preferred == member
    }

    pub(super) fn all(&self) -> Vec<Stubs> {
        self.state.read().known.iter().map(|stubs| self.taken_now(stubs)).collect()
    }

    fn taken_now(&self, stubs: &Stubs) -> Stubs {
        let mut stubs = stubs.clone();
        stubs.origin.seen = self.confirmed.borrow().count;
        stubs
    }

    /// Prefers the next one, unless another is preferred by now.
    pub(super) fn rotate(&self, from: Origin) {
        let mut state = self.state.write();
        if state.preferred == from.member {
            let place = state.known.iter().position(|stubs| stubs.origin.member == from.member);
            let next = place.map_or(0, |place| (place + 1) % state.known.len());
            state.preferred = state.known[next].origin.member;
        }
    }

    /// Prefers the master at an address that the one at `from` has named, unless another is preferred by now. False for
    /// an address that cannot be followed.
    pub(super) fn follow(&self, from: Origin, leader: &str) -> bool {
        let Some(leader) = self.learn(leader).filter(|leader| *leader != from.member) else { return false };
        let mut state = self.state.write();
        if state.preferred == from.member {
            state.preferred = leader;
        }
        true
    }

    /// Prefers a master.
    pub(super) fn prefer(&self, to: Origin) {
        self.state.write().preferred = to.member;
    }

    /// To be connected to a master.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The stubs of the master at an address, which comes from the network.
    pub(super) fn at(&self, address: &str) -> Option<Stubs> {
        let member = self.learn(address)?;
        let state = self.state.read();
        state.known.iter().find(|stubs| stubs.origin.member == member).map(|stubs| self.taken_now(stubs))
    }

    /// The master at an address, which comes from the network.
    pub(super) fn learn(&self, address: &str) -> Option<u64> {
        let mut state = self.state.write();
        if let Some(known) = state.known.iter().find(|stubs| stubs.address() == address) {
            return Some(known.origin.member);
        }
        let member = state.next_id;
        let checked = check_master(address).map_err(NetError::Invalid);
        let timeouts = (self.connect_timeout, self.keep_alive);
        let stubs = match checked.and_then(|()| lazy(address, timeouts, &self.transport, member)) {
            Ok(stubs) => stubs,
            Err(error) => {
                tracing::warn!("a master names a leader that cannot be: {error}");
                return None;
            }
        };
        if state.known.len() >= MASTERS_MAX {
            let (preferred, confirmed) = (state.preferred, self.confirmed.borrow().member);
            let is_spare = |stubs: &Stubs| ![preferred, confirmed].contains(&stubs.origin.member);
            let named_first = state.known.iter().skip(state.configured).position(is_spare)?;
            let place = state.configured + named_first;
            state.known.remove(place);
        }
        tracing::info!("learnt of a master at {address}");
        state.next_id += 1;
        state.known.push(stubs);
        Some(member)
    }

    /// Whether the master is the one that was last confirmed.
    pub(super) fn is_confirmed(&self, from: Origin) -> bool {
        self.confirmed.borrow().member == from.member
    }

    /// A master has answered as only a leader does, a question that was asked with the stubs of `from`. False when that
    /// is out of date, since another one has done so meanwhile.
    pub(super) fn confirm(&self, from: Origin) -> bool {
        let mut state = self.state.write();
        let is_current = self.confirmed.send_if_modified(|last| {
            let is_current = last.count == from.seen || last.member == from.member;
            if is_current {
                *last = Confirmed { member: from.member, count: last.count + 1 };
            }
            is_current
        });
        if is_current {
            state.preferred = from.member;
        }
        is_current
    }

    /// Completes when another master has been confirmed since the stubs were taken, and is the last that was.
    pub(super) async fn moved_from(&self, from: Origin) {
        self.confirmed_as(|last| last.count != from.seen && last.member != from.member).await;
    }

    /// Completes when any master has been confirmed since the stubs were taken.
    pub(super) async fn confirmed_since(&self, from: Origin) {
        self.confirmed_as(|last| last.count != from.seen).await;
    }

    async fn confirmed_as(&self, condition: impl Fn(&Confirmed) -> bool) {
        let mut confirmed = self.confirmed.subscribe();
        // Cannot fail: the sender is here.
        let _last = confirmed.wait_for(condition).await;
    }
}

fn lazy(
    address: &str,
    (connect_timeout, keep_alive): (Duration, Duration),
    transport: &Transport,
    member: u64,
) -> Result<Stubs, NetError> {
    let channel = channel(&endpoint(address, connect_timeout, keep_alive)?, transport);
    Ok(Stubs::new(channel, Arc::from(address), Origin { member, seen: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(addresses: &[&str]) -> Members {
        let mut config = Config::default();
        config.cluster.masters = addresses.iter().map(|address| (*address).to_owned()).collect();
        Members::new(&config, Duration::from_secs(2)).unwrap()
    }

    #[tokio::test]
    async fn a_named_leader_is_preferred_and_a_bad_address_is_not() {
        let members = members(&["a:1", "b:1"]);
        let first = members.preferred().origin;
        for bad in ["", "a", "b:0", "b:99999", "a b:1", "user@b:1", "b:1/path"] {
            assert!(!members.follow(first, bad), "{bad}");
        }
        assert!(!members.follow(first, "a:1"), "itself");
        assert_eq!((members.preferred().address(), members.addresses().as_str()), ("a:1", "a:1, b:1"));
        assert!(members.follow(first, "c:1"));
        assert_eq!((members.preferred().address(), members.addresses().as_str()), ("c:1", "a:1, b:1, c:1"));
        assert!(members.follow(first, "b:1"));
        members.rotate(first);
        assert_eq!(members.preferred().address(), "c:1", "somebody has found it since");
        members.rotate(members.preferred().origin);
        assert_eq!(members.preferred().address(), "a:1");
    }

    #[tokio::test]
    async fn the_list_is_bounded_and_keeps_those_that_matter() {
        let members = members(&["a:1"]);
        let first = members.preferred().origin;
        assert!(members.follow(first, "leader:1"));
        assert!(members.confirm(members.preferred().origin));
        for port in 1..100 {
            assert!(members.learn(&format!("b:{port}")).is_some());
        }
        let known: Vec<String> = members.all().iter().map(|stubs| stubs.address().to_owned()).collect();
        assert_eq!((known.len(), known[0].as_str(), known[1].as_str()), (MASTERS_MAX, "a:1", "leader:1"));
        assert_eq!(known[2..].last().map(String::as_str), Some("b:99"));
        let before = members.learn("b:99");
        assert_eq!(members.learn("b:99"), before, "once");
    }

    #[tokio::test]
    async fn only_a_later_confirmation_of_another_moves() {
        let members = members(&["a:1", "b:1"]);
        let stream = members.preferred();
        assert!(members.confirm(stream.origin));
        let moved = || tokio::time::timeout(Duration::from_millis(20), members.moved_from(stream.origin));
        assert!(moved().await.is_err(), "it stays where it is");
        assert!(members.follow(stream.origin, "b:1"));
        assert!(moved().await.is_err(), "a hint is no confirmation");
        let other = members.preferred().origin;
        assert!(members.confirm(other));
        assert!(moved().await.is_ok());
        assert!(!members.confirm(stream.origin), "its last words are out of date");
        assert_eq!(members.preferred().address(), "b:1");
        // A stream that was opened since, at a guess that was wrong.
        members.rotate(other);
        let guess = members.preferred();
        assert_eq!(guess.address(), "a:1");
        let ((), _confirmed) = tokio::join!(members.moved_from(guess.origin), async { members.confirm(other) });
    }
}

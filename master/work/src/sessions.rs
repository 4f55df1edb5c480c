//! Sessions of clients: their leases, the events that they are sent, and what they leave behind.
//!
//! - [`acquire`]: directories that were there before, and that a session wants to hold.
//! - [`current`]: whom the state machine notifies: the sessions of the term.
//! - [`delegations`], [`recall`]: the directories delegated to sessions, and how they are made to let go of them.
//! - [`watch`]: who has a session, for how long, and the stream of events of each.
//! - [`watch_registry`]: what each session can have seen, so that it is notified of nothing else.
//! - [`pending_invalidations`]: who has to let go of something before a change of a strict mount is answered.
//! - [`recent`]: the last changes, for sessions that go on at another master.
//! - [`reaper`]: the ends of sessions in the log, and the inodes that only they kept.

mod acquire;
mod current;
mod delegations;
mod event_access;
mod owners;
mod pending_invalidations;
mod reaper;
mod recall;
mod recent;
mod session_log;
mod watch;
mod watch_registry;

pub use current::CurrentSessions;
pub use reaper::{END_STEP, ReapCursor, end, end_courtesy, reap_unlinked};
pub(crate) use recall::RECALLS;
pub use recall::Recalls;
pub use watch::{WatchHub, open::Before, stream::SessionStream, stream::StreamId};

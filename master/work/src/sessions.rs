//! Sessions of clients: their leases, the events that they are sent, and what they leave behind.
//!
//! - [`current`]: whom the state machine notifies: the sessions of the term.
//! - [`held`], [`recall`]: the directories that sessions hold, and how they are made to let go of them.
//! - [`watch`]: who has a session, for how long, and the stream of events of each.
//! - [`interest`]: what each session can have seen, so that it is notified of nothing else.
//! - [`let_go`]: who has to let go of something before a change of a strict mount is answered.
//! - [`recent`]: the last changes, for sessions that go on at another master.
//! - [`reaper`]: the ends of sessions in the log, and the inodes that only they kept.

mod current;
mod event_access;
mod held;
mod interest;
mod let_go;
mod owners;
mod reaper;
mod recall;
mod recent;
mod session_log;
mod watch;

pub use current::CurrentSessions;
pub use reaper::{END_STEP, end, end_lapsed, reap_unlinked};
pub use recall::Recalls;
pub use watch::open::Before;
pub use watch::{SessionStream, WatchHub};

//! The mounts: buckets that the namespace shows.
//!
//! - [`attach`], [`update`], [`detach`]: how they come, change and go; [`overlap`] refuses two that have keys in
//!   common, and [`claim`] tells other clusters whose a prefix is.
//! - [`vending`]: keys of theirs that end, for workers and clients.
//! - [`open`]: their object stores, and how each of them fares.
//! - [`secrets`]: their credentials at rest; [`keys`]: what these are encrypted with.

mod attach;
mod claim;
mod detach;
mod keys;
mod open;
mod overlap;
mod secrets;
mod update;
mod vending;

pub use attach::MountPolicy;
pub use claim::{CLAIM, TakeOver, start_checking_claims};
pub use detach::DetachPolicy;
pub use keys::KeyDirectory;
pub use open::{Mounts, OpenMount};
pub use secrets::{Vault, redact};
pub use vending::told;

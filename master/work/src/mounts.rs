//! The mounts: buckets that the namespace shows.
//!
//! - [`open`]: their object stores, and how each of them fares.
//! - [`secrets`]: their credentials at rest; [`keys`]: what these are encrypted with. [`vending`]: keys of theirs that
//!   end, for workers and clients.
//! - [`overlap`] refuses two that have keys in common, and [`claim`] tells other clusters whose a prefix is, by an
//!   object of a [reserved](cavern_proto::reserved) name.
//! - [`changes`], [`attach`], [`update`], [`detach`]: how they come, change and go. These are above the namespace and
//!   persistence; all others are below.

mod attach;
pub mod changes;
mod claim;
mod detach;
mod keys;
mod open;
mod overlap;
mod secrets;
mod update;
mod vending;

pub use claim::{Claims, TakeOver};
pub use keys::KeyDirectory;
pub use open::{Mounts, OpenMount};
pub use secrets::{SecretSealer, redact};
pub use vending::told;

//! The FUSE protocol between the kernel and this process, without any notion of what is served.
//!
//! We speak it ourselves (`docs/decisions/0001-own-fuse-protocol-layer.md`): signals must reach requests that wait, and
//! the device's descriptor must stay in our hands. The layers, from the wire up: [`abi`] (structures), [`channel`]
//! (one descriptor), [`request`] and [`reply`] (one operation), [`in_flight`] (operations that wait), [`session`]
//! (handshake and event loops), [`notify`] (what the kernel must forget), and beside them [`mount`].

pub mod abi;
mod begun_task;
pub mod channel;
mod credentials;
pub mod directory;
pub mod in_flight;
mod ioctl;
pub mod mount;
pub mod notify;
pub mod reply;
pub mod request;
pub mod request_stats;
pub mod session;
mod statx;

pub use channel::Backing;
pub use credentials::Credentials;
pub use directory::DirectoryPage;
pub use mount::Mount;
pub use mount::options::{MountError, MountOptions};
pub use mount::staged::StagedMount;
pub use notify::Notifier;
pub use reply::{Delivery, Reply};
pub use request::{Caller, CopyRange, LockRequest, NewAttributes, NewTime, Operation};
pub use session::{Agreement, Connection, Filesystem, READ_MAX, Session, SessionError, SessionOptions};

//! Object stores as Cavern sees them.
//!
//! [`Ufs`] is a handle on one mount's bucket and prefix. It lists, describes, reads, writes and deletes objects. What
//! it promises, whatever the store:
//!
//! - **Exact keys.** A key that was listed is the key that is asked for, byte for byte: spaces at either end, `%`, `+`,
//!   control characters, Unicode in any form. What cannot be represented in UTF-8 is counted in [`ListPage::hidden`].
//! - **Exact versions.** Reads carry the ETag, or what the store has in its place, as their condition; another version
//!   is [`UfsError::VersionChanged`], and a retry in the middle of a body goes on with the same version or fails. A
//!   read for a view ([`Ufs::get_pinned`]) looks for this version among those that a bucket keeps, too.
//! - **Exact lengths.** A body has the length of its range or ends in an error.
//! - **Whole objects.** An object is written in one request, or appears when its last part has arrived, or not at all;
//!   and only in the place of the version that the writer expects ([`Precondition`]).
//! - **Listings are in the order of keys**, also where the store has another ([`ListPage::restarts`]), and **need no
//!   HEAD**: size, ETag and time of every object come with the page, about a thousand to one LIST.
//! - **Every wait ends**, see [`Ufs::deadline`].
//! - **Secrets stay secret**: no error, log line or `Debug` text of this crate holds a credential.
//!
//! How a request goes through retries, limits, counters and deadlines is described in `retry.rs` and `attempt.rs`; the
//! URIs in [`cavern_proto::StoreUri`], the options of each store in `s3/options.rs`, `gs/options.rs` and
//! `azblob/options.rs`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod allowed;
mod attempt;
mod attributes;
mod azblob;
mod error;
mod fault;
mod file;
mod gs;
mod key_space;
mod lister;
mod memory;
mod metrics;
mod object;
mod options;
mod range_lister;
mod retry;
mod s3;
mod shared_store;
mod store;
mod token;
mod ufs;
mod versions;
mod window;
mod write;

pub use attributes::{ObjectAttributes, nanoseconds, seconds};
pub use error::{Denial, Operation, Request, UfsError};
pub use fault::Faults;
pub use key_space::KeySpace;
pub use lister::Lister;
pub use memory::MemoryBucket;
pub use metrics::{UfsStats, register as register_metrics};
pub use object::{ListMode, ListPage, Metadata, ObjectMeta, Precondition};
pub use range_lister::{RangeLister, RangePage};
pub use s3::{
    KeyError, KeyProvider, KeyRight, KeyStatus, KeyVendor, VendedKeys, changed_options, found_options, is_vended,
    vended_options,
};
pub use store::ByteStream;
pub use ufs::{Contents, Probe, Ufs};
pub use window::{Listed, Window, Windows, first_open_name, is_name, place_cmp};
pub use write::{MultipartUpload, PARTS_MAX, WRITE_NAME, named};

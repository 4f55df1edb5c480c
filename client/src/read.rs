//! Reading files: descriptors of local blocks first, then buffers, then the ladder of workers and the bucket.
//!
//! `location` says where a block is, one of an object or one of an fs-mode file, and all else is the same for both:
//! `reader` has the steps that every reader takes, `source_fallback` the choice of the source, `fetch` one attempt at
//! one source, `outage_wait` the wait for a bucket that cannot be reached. `part` is about what no worker has: holes,
//! staged bytes, and the object that lies below a file which is changed. `file` is the handle of an object, and the way
//! to its descriptors; that of an fs-mode file is in `fs_file`.
//!
//! `descriptors` and `buffers` hold what was obtained, of all files; `resources` is what these share. `readahead`
//! decides what to ask for early, `hedge` when to ask twice; `local_file` reads from files of this host, `disk_read`
//! does so on a thread of its own.

mod buffers;
mod descriptor;
mod descriptors;
mod disk_read;
pub(crate) mod fetch;
mod file;
mod files;
mod hedge;
pub(crate) mod local_file;
mod location;
mod outage_wait;
mod part;
mod readahead;
mod reader;
mod resources;
mod source_fallback;
pub(crate) mod span;

pub(crate) use buffers::BufferKey;
pub(crate) use descriptors::{BlockFile, Descriptors, WholeFile};
pub use disk_read::DiskRead;
pub(crate) use file::EAGER_BYTES;
pub use file::{CachedRead, OpenFile};
pub use files::Files;
pub(crate) use files::TrustedFile;
pub(crate) use location::ReplicatedBlock;
pub(crate) use part::{Owner, PartLocation};
pub(crate) use reader::{BlockReader, REMOTE_PIECE_BYTES};

//! The content of files of fs-mode mounts: read and written at the workers, and made known to the master.
//!
//! A file that is open here has one [`FsFile`], whoever has it open (`file`; what is known of it, under one lock, in
//! `state`). What is written goes to every worker of its block at once, through a descriptor where the worker is on
//! this host, else behind the writer (`write_behind`); new blocks, and a new length, are committed to the master when a
//! file is flushed, synced, or given other attributes, and every few seconds while it stays open
//! ([`commit`](FsFile::commit)). `layout` knows the file without I/O, `block` one block at its workers, `blocks` opens
//! them, `layout_cache` is what stays known when nobody has the file open, `origin` is about what no block has,
//! `kernel_reads` about what a kernel reads by itself, `read`, `write`, `append`, `copy` and `set_attributes` do what
//! their names say. `open_file_table` are all that are open; `settle` is about what views freeze of them.
//!
//! A write that overlaps another client's cut of the same file either comes before it or after it.

mod append;
mod block;
mod block_preallocator;
mod blocks;
mod commit;
mod copy;
mod file;
mod group_commit;
mod journaled_content;
mod kernel_reads;
mod layout;
mod layout_cache;
mod layout_prefetch;
mod open_file_table;
mod origin;
mod page_versions;
mod prefetch_window;
mod read;
mod recovery;
mod set_attributes;
mod settle;
mod state;
mod sync;
mod write;
mod write_back;
mod write_behind;
mod write_log;

pub use append::FileEnd;
pub use file::{FsFile, UncommittedAttr};
pub use kernel_reads::KernelReads;
pub use open_file_table::OpenFileTable;
pub use read::Seek;
pub use sync::LocalSync;
pub(crate) use write_behind::WriteBehindOutcome;

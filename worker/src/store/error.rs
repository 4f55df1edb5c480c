//! Why a store could not do what it was asked for.

use std::io;

/// Why a store could not keep something. Reading goes on in every case.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// What could be evicted is held by requests, the block exceeds the capacity, or the file system takes no more
    /// bytes.
    #[error("no room: everything that could be evicted is in use, or the file system is full")]
    Full,
    /// No directory works any more.
    #[error("all data directories have failed")]
    NoDirectory,
    /// The block was evicted or dropped meanwhile.
    #[error("the block was dropped meanwhile")]
    Dropped,
    /// A block of an fs-mode file cannot grow: what remains is data like it, or in use.
    #[error("no space: nothing is left that could be evicted for it")]
    NoSpace,
    /// A block of an fs-mode file is asked for that is not here.
    #[error("the block is not here")]
    NoSuchBlock,
    /// The block is not what the request takes it for.
    #[error("{0}")]
    Mismatch(String),
    #[error("{action} failed: {source}")]
    Io { action: &'static str, source: io::Error },
}

/// Whether an error says that the file system takes no more bytes. That is no fault of the disk.
pub(crate) fn is_out_of_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

//! A file that is open: what the kernel's handle of it stands for.

use cavern_client::File;
use cavern_client::journal::Slot;

use super::failed_reads::FailedReads;
use super::open_nodes::IoMode;

/// An open file as the kernel has it.
pub struct OpenHandle {
    pub(super) file: File,
    pub(super) how: IoMode,
    pub(super) failed: FailedReads,
    /// What is written through it goes to the end of the file, if the kernel appends.
    pub(super) appends: bool,
    /// What a process after this one finds of it.
    _noted: Option<Slot>,
}

impl OpenHandle {
    pub(super) fn new(file: File) -> Self {
        Self::noted(file, IoMode::default(), false, None)
    }

    pub(super) fn noted(file: File, how: IoMode, appends: bool, noted: Option<Slot>) -> Self {
        Self { file, how, failed: FailedReads::default(), appends, _noted: noted }
    }
}

//! What can go wrong in a master, and what a caller sees of it.

use cavern_conf::process::ProcessError;
use thiserror::Error;

/// Why a master cannot start or go on.
#[derive(Debug, Error)]
pub enum MasterError {
    #[error(transparent)]
    Process(#[from] ProcessError),
}

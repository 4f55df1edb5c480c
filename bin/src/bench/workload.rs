//! What is measured.

use std::path::Path;

use super::stop::Stop;
use super::tally::Phase;
use crate::error::CliError;

/// A kind of work in a directory. It is the same for the target and the baseline.
pub trait Workload: Send {
    /// Whatever has to be done right before a round in a directory, and is not measured.
    ///
    /// # Errors
    /// What makes the round pointless.
    fn before(&self, _directory: &Path) -> Result<(), CliError> {
        Ok(())
    }

    /// One round in a directory; `round` counts from 0, and decides with the seed what is done. Operations that fail
    /// are in the tallies of the phases.
    ///
    /// # Errors
    /// What makes the round as a whole fail.
    fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError>;
}

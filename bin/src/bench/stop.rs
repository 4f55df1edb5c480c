//! That the person at the terminal has had enough.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::CliError;

/// Asked for by SIGINT or SIGTERM. Workers look at it between operations.
#[derive(Default)]
pub struct Stop(AtomicBool);

impl Stop {
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// # Errors
    /// When it has been asked for.
    pub fn check(&self) -> Result<(), CliError> {
        if self.is_asked() { Err(CliError::Failed("interrupted: there is no result".to_owned())) } else { Ok(()) }
    }
}

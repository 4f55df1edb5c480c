//! Who may change a cluster's directory.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_conf::host;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::time::Instant;

use crate::error::{CliError, Context as _};

const POLL: Duration = Duration::from_millis(5);
/// For another `cv local` of the same cluster, which starts a child perhaps.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What a directory may hold before there is a record of the cluster: an `up` that was interrupted has left it.
pub const MADE_FIRST: [&str; 2] = ["lock", "cluster.tmp"];

/// One `cv local` at a time changes what a cluster consists of; another one waits a while for its end.
pub fn lock(directory: &Path) -> Result<fs::File, CliError> {
    let path = directory.join("lock");
    let file = host::lock_file(&path).context(format_args!("cannot create {}", path.display()))?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(POLL),
            Err(error) => {
                let text = format!("another `cv local` is at work on {}: {error}", directory.display());
                return Err(CliError::Failed(text));
            }
        }
    }
}

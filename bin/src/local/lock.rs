//! Who may change a cluster's directory.

use std::fs;
use std::path::Path;
use std::time::Duration;

use cavern_conf::host;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::files;
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
    let busy = || format!("another `cv local` is at work on {}", directory.display());
    let locked = files::poll(LOCK_PATIENCE, POLL, || match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        locked => locked.map(Some).context(busy()),
    })?;
    locked.map(|()| file).ok_or_else(|| CliError::Failed(format!("{}: {}", busy(), Errno::WOULDBLOCK)))
}

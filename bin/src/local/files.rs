//! Files of a cluster: read if they are there, replaced as a whole, removed; who may change its directory; and looks at
//! something until it is so.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_conf::host;
use cavern_fuse::kernel::mount::is_directory;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::time::Instant;

use crate::error::{CliError, Context as _};

const LOCK_POLL: Duration = Duration::from_millis(5);
/// For another `cv local` of the same cluster, which starts a child perhaps.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What a directory may hold before there is a record of the cluster: an `up` that was interrupted has left it.
pub const MADE_FIRST: [&str; 2] = ["lock", "cluster.tmp"];

/// The bytes of a file; `None` where there is none.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, CliError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).context(format_args!("cannot read {}", path.display())),
    }
}

/// Writes a file so that a reader sees either the whole of it or what was there before. Only the owner may read it.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let temporary = path.with_extension("tmp");
    let write = || -> io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        fs::rename(&temporary, path)
    };
    write().context(format_args!("cannot write {}", path.display()))
}

/// Removes a file, if it is there.
pub fn remove(path: &Path) -> Result<(), CliError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(format_args!("cannot remove {}", path.display())),
    }
}

/// Creates a folder that only its user may look into, and closes one of an earlier version.
pub fn private_folder(path: &Path) -> Result<(), CliError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))
        .context(format_args!("cannot create {}", path.display()))
}

/// Makes a directory with its parents; says whether it was not there.
pub fn make_directory(path: &Path) -> Result<bool, CliError> {
    let made = match (fs::create_dir(path), path.parent()) {
        (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(parent).and_then(|()| fs::create_dir(path))
        }
        (made, _) => made,
    };
    match made {
        // A symbolic link to one will do, too.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_directory(path).unwrap_or(false) => Ok(false),
        made => made.map(|()| true).context(format_args!("cannot create {}", path.display())),
    }
}

/// A directory with files of somebody else is not filled with ours. It may hold `made_first`, which a start that was
/// interrupted has left. An error says that it is `nothing` of ours, and by which option another is named.
///
/// # Errors
/// `Usage`: it holds something else.
pub fn refuse_foreign(directory: &Path, made_first: &[&str], nothing: &str, option: &str) -> Result<(), CliError> {
    let name = directory.display();
    let mut entries = fs::read_dir(directory).context(format_args!("cannot list {name}"))?;
    let is_own = |name: &OsStr| made_first.iter().any(|own| name == *own);
    let foreign = entries.find(|entry| !entry.as_ref().is_ok_and(|entry| is_own(&entry.file_name())));
    let Some(entry) = foreign else { return Ok(()) };
    let entry = entry.context(format_args!("cannot list {name}"))?.file_name();
    Err(CliError::Usage(format!(
        "{name} is not empty (it holds {}) and {nothing}: name a new or an empty directory with {option}",
        entry.display()
    )))
}

/// Looks, with a pause in between, until there is an answer: `None` if there was none for so long.
pub fn poll<T>(
    patience: Duration,
    pause: Duration,
    mut look: impl FnMut() -> Result<Option<T>, CliError>,
) -> Result<Option<T>, CliError> {
    let deadline = Instant::now() + patience;
    loop {
        let answer = look()?;
        if answer.is_some() || Instant::now() > deadline {
            return Ok(answer);
        }
        thread::sleep(pause);
    }
}

/// One `cv local` at a time changes what a cluster consists of; another one waits a while for its end.
pub fn lock(directory: &Path) -> Result<fs::File, CliError> {
    let path = directory.join("lock");
    let file = host::lock_file(&path).context(format_args!("cannot create {}", path.display()))?;
    let busy = || format!("another `cv local` is at work on {}", directory.display());
    let locked = poll(LOCK_PATIENCE, LOCK_POLL, || match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(None),
        locked => locked.map(Some).context(busy()),
    })?;
    locked.map(|()| file).ok_or_else(|| CliError::Failed(format!("{}: {}", busy(), Errno::WOULDBLOCK)))
}

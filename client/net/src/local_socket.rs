//! Unix sockets of workers: whether who answers at one is a worker that somebody trusted has put there.
//!
//! Any user of a host may make a socket where a directory is for everybody, as below `/dev/shm` once a host was started
//! again: he would be handed what is written, and say what is read. Trusted are root and the user of this process; and
//! whoever has a directory on the path that one of them must have given to him, since nobody else may write in the one
//! above.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid, getgroups};
use tokio::net::UnixStream;

/// Bits of a mode.
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Connects to a worker's socket.
///
/// # Errors
/// Nobody listens there, or somebody who is not trusted to.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    let peer = stream.peer_cred()?.uid();
    match trusted(path) {
        Ok(trusted) if trusted.contains(&peer) => return Ok(stream),
        Ok(_) => tracing::warn!(path = %path.display(), user = peer, "another user answers at the socket of a worker"),
        Err(reason) => tracing::warn!(path = %path.display(), "the socket of a worker is not used: {reason}"),
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "anybody may have put this socket there"))
}

/// The users who may have put something at a path.
fn trusted(path: &Path) -> Result<Vec<u32>, String> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let directory = directory.canonicalize().map_err(|error| format!("{}: {error}", directory.display()))?;
    let mut from_top: Vec<&Path> = directory.ancestors().collect();
    from_top.reverse();
    let mut trusted = vec![0, geteuid().as_raw()];
    let mut is_shared = false;
    for directory in from_top {
        let stat = directory.metadata().map_err(|error| format!("{}: {error}", directory.display()))?;
        if !trusted.contains(&stat.uid()) {
            if is_shared {
                let (directory, user) = (directory.display(), stat.uid());
                return Err(format!("{directory} is one of user {user}'s, in a directory that is for everybody"));
            }
            trusted.push(stat.uid());
        }
        let group_writes = stat.mode() & GROUP_WRITES != 0 && !is_own_group(stat.gid());
        is_shared = group_writes || stat.mode() & OTHERS_WRITE != 0;
        if is_shared && stat.mode() & STICKY == 0 {
            return Err(format!("others may write in {}: chmod go-w", directory.display()));
        }
    }
    if is_shared {
        return Err(format!("{} is for everybody: put it into a directory of its own", PathBuf::from(path).display()));
    }
    Ok(trusted)
}

/// Whether a group is root's, or one of this process.
fn is_own_group(group: u32) -> bool {
    group == 0
        || group == getegid().as_raw()
        || getgroups().is_ok_and(|own| own.iter().any(|own| own.as_raw() == group))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    #[test]
    fn only_those_are_trusted_who_must_have_been_given_their_directory() {
        let top = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        let at = |name: &str, mode: u32| {
            let path = top.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        };
        let private = at("private", 0o755);
        assert!(trusted(&private.join("worker.sock")).unwrap().contains(&own));
        assert!(trusted(&top.path().join("missing/worker.sock")).is_err());
        let open = at("open", 0o777);
        assert!(trusted(&open.join("worker.sock")).unwrap_err().contains("chmod go-w"));
        let shared = at("shared", 0o1777);
        assert!(trusted(&shared.join("worker.sock")).unwrap_err().contains("for everybody"));
        let below = at("shared/below", 0o755);
        assert!(trusted(&below.join("worker.sock")).unwrap().iter().all(|user| [0, own].contains(user)));
        std::os::unix::fs::symlink(&shared, private.join("link")).unwrap();
        assert!(trusted(&private.join("link/worker.sock")).is_err(), "a symlink is where it leads");
        if own != 0 {
            return;
        }
        // Root has given it to him, or he has made it himself where everybody may.
        let given = at("given", 0o755);
        chown(&given, Some(4321), None).unwrap();
        assert!(trusted(&given.join("worker.sock")).unwrap().contains(&4321));
        chown(&below, Some(4321), None).unwrap();
        assert!(trusted(&below.join("worker.sock")).unwrap_err().contains("user 4321"));
    }
}

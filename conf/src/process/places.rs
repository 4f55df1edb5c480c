use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Access, Mode};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::ProcessError;
use crate::backoff;

/// Listens on `listen` (host:port; port 0 takes a free one). `key` is the configuration key that the address came from,
/// as `worker.listen`, which an error names.
///
/// # Errors
/// [`ProcessError::AddressInUse`], or [`ProcessError::Bind`] for what is not an address of this host.
pub async fn bind_tcp(listen: &str, key: &str) -> Result<TcpListener, ProcessError> {
    TcpListener::bind(listen).await.map_err(|source| {
        let (address, key) = (listen.to_owned(), key.to_owned());
        match source.kind() {
            io::ErrorKind::AddrInUse => ProcessError::AddressInUse { address, key },
            _ => ProcessError::Bind { address, key, source },
        }
    })
}

/// Listens on a port that is in clear, and shows no certificate: if other hosts can come to it, the log says so.
///
/// # Errors
/// As [`bind_tcp`].
pub async fn bind_open_tcp(listen: &str, key: &str) -> Result<TcpListener, ProcessError> {
    let listener = bind_tcp(listen, key).await?;
    if let Ok(address) = listener.local_addr() {
        warn_if_others_reach(address, key);
    }
    Ok(listener)
}

/// Says in the log that other hosts can come to a port that is in clear, if they can.
pub fn warn_if_others_reach(address: SocketAddr, key: &str) {
    if !address.ip().is_loopback() {
        tracing::warn!(%address, key, "other hosts can reach this port, which is in clear: trusted networks only");
    }
}

/// Serves the connections of a listener, so many at a time, until `stop`. Those that there are then get `drain` to end.
pub async fn serve_connections<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    most: usize,
    drain: Duration,
    stop: &CancellationToken,
    serve: impl Fn(TcpStream, SocketAddr) -> F,
) {
    let mut connections = JoinSet::new();
    loop {
        let is_full = connections.len() >= most;
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if !is_full => match accepted {
                Ok((stream, peer)) => drop(connections.spawn(serve(stream, peer))),
                Err(error) => {
                    tracing::warn!(address = ?listener.local_addr().ok(), %error, "cannot accept a connection");
                    tokio::time::sleep(backoff::ACCEPT.first).await;
                }
            },
        }
    }
    drop(listener);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(drain, drained).await.is_err() {
        connections.shutdown().await;
    }
}

/// The mode of directories of Cavern's own: what is in them is as private as the files that it is part of.
const PRIVATE: u32 = 0o700;

/// Whatever this process creates from now on is its user's alone, unless it says otherwise: files 0600, directories
/// 0700. For the whole process, so before it has other threads.
pub fn create_privately() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// What becomes of a directory that is not there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MissingDir {
    /// It is made, with its parents.
    Create,
    /// It is an error that names the setting by which it would be made.
    Refuse(&'static str),
}

impl MissingDir {
    /// What a setting asks for.
    pub fn of(setting: &'static str, is_set: bool) -> Self {
        if is_set { Self::Create } else { Self::Refuse(setting) }
    }
}

/// Makes sure that `path` is a directory that this process can write to and nobody else can look into. One that was
/// open to others is closed, with a line in the log; one that is meant to be shared (sticky, as `/tmp` is) stays as it
/// is. `key` is the configuration key that the path came from, as `master.data_dir`. Blocks on the disk.
///
/// # Errors
/// [`ProcessError::Directory`] with the system's reason, and [`ProcessError::MissingDirectory`].
pub fn ensure_dir(path: &Path, key: &str, missing: MissingDir) -> Result<(), ProcessError> {
    let refuse = |source| ProcessError::Directory { path: path.to_owned(), key: key.to_owned(), source };
    let was_there = path.exists();
    if let MissingDir::Refuse(setting) = missing
        && std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    {
        return Err(ProcessError::MissingDirectory { path: path.to_owned(), key: key.to_owned(), setting });
    }
    std::fs::create_dir_all(path).map_err(refuse)?;
    close_to_others(path, was_there).map_err(refuse)?;
    // Asks the kernel rather than reading the mode bits: read-only file systems, ACLs and capabilities count too.
    rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK | Access::READ_OK).map_err(|errno| refuse(errno.into()))
}

fn close_to_others(path: &Path, was_there: bool) -> io::Result<()> {
    let metadata = std::fs::metadata(path)?;
    let mode = Mode::from_raw_mode(metadata.permissions().mode());
    if !metadata.is_dir() || !mode.intersects(Mode::RWXG | Mode::RWXO) {
        return Ok(());
    }
    let path_shown = path.display();
    if mode.contains(Mode::SVTX) {
        tracing::warn!("{path_shown} is shared with other users: a directory of its own would be safer");
        return Ok(());
    }
    match std::fs::set_permissions(path, Permissions::from_mode(PRIVATE)) {
        Ok(()) if was_there => {
            tracing::info!(
                "{path_shown} was open to other users (mode {:04o}) and is closed to them",
                mode.bits() & 0o7777
            );
        }
        Ok(()) => {}
        // It is somebody else's, who lets this process work in it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!("{path_shown} is open to other users, and belongs to one of them: chmod 700 {path_shown}");
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_port_names_the_key() {
        let first = bind_tcp("127.0.0.1:0", "master.listen").await.unwrap();
        let address = first.local_addr().unwrap().to_string();
        let error = bind_tcp(&address, "master.listen").await.unwrap_err();
        assert!(matches!(error, ProcessError::AddressInUse { .. }));
        let text = error.to_string();
        assert!(text.contains(&address) && text.contains("master.listen"), "{text}");
    }

    #[tokio::test]
    async fn an_address_of_nobody_names_the_key() {
        // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
        for listen in ["192.0.2.1:0", "127.0.0.1", "127.0.0.1:99999", ""] {
            let text = bind_tcp(listen, "worker.listen").await.unwrap_err().to_string();
            assert!(text.contains("cannot listen on") && text.contains("worker.listen"), "{text}");
        }
    }

    #[test]
    fn directories_are_closed_to_others_unless_they_are_to_be_shared() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        let fresh = dir.path().join("fresh");
        ensure_dir(&fresh, "worker.dirs", MissingDir::Create).unwrap();
        assert_eq!(mode(&fresh), 0o700);
        for (before, after) in [(0o755, 0o700), (0o2770, 0o700), (0o700, 0o700), (0o1777, 0o1777)] {
            let path = dir.path().join(format!("{before:o}"));
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(before)).unwrap();
            ensure_dir(&path, "worker.dirs", MissingDir::Create).unwrap();
            assert_eq!(mode(&path), after, "{before:o}");
        }
    }

    #[test]
    fn directories_are_created_or_refused_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = dir.path().join("a/b/c");
        ensure_dir(&fresh, "master.data_dir", MissingDir::Create).unwrap();
        assert!(fresh.is_dir());
        ensure_dir(&fresh, "master.data_dir", MissingDir::Create).unwrap();

        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let text = ensure_dir(&path, "worker.dirs", MissingDir::Create).unwrap_err().to_string();
            assert!(text.contains(&path.display().to_string()) && text.contains("worker.dirs"), "{text}");
        }
        // One that is to be there is not made.
        let refused = MissingDir::of("worker.create_dirs", false);
        ensure_dir(&fresh, "worker.dirs", refused).unwrap();
        let missing = dir.path().join("x/y");
        let text = ensure_dir(&missing, "worker.dirs", refused).unwrap_err().to_string();
        for part in [&missing.display().to_string(), "worker.dirs", "mount its disk", "worker.create_dirs = true"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!dir.path().join("x").exists());
        ensure_dir(&missing, "worker.dirs", MissingDir::of("worker.create_dirs", true)).unwrap();
        assert!(missing.is_dir());
        // A file system that nobody can write to, not even root.
        assert!(ensure_dir(Path::new("/proc/1"), "worker.dirs", MissingDir::Create).is_err());
    }
}

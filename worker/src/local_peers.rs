//! Which processes of this host may connect to a Unix socket of the worker: those of its user, root's, and those of a
//! group.
//!
//! The mode of the file keeps others out. Whoever comes all the same, since somebody has changed that, is looked at:
//! the kernel knows who has connected, with all groups.

#![allow(unsafe_code)]

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown};
use std::path::Path;

use cavern_conf::{accounts, schema};
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};

use crate::error::WorkerError;

/// Groups of a process for which there is room at first; few have more.
const GROUPS: usize = 32;
const GROUP_BYTES: usize = size_of::<libc::gid_t>();

/// Longest path that fits in a Unix address, without the closing zero.
const MAX_SOCKET_PATH: usize = 107;

/// Who may connect to a Unix socket. By default there is no group.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalPeers {
    group: Option<u32>,
}

impl LocalPeers {
    /// # Errors
    /// Nobody knows the group.
    pub fn of(worker: &schema::Worker) -> Result<Self, WorkerError> {
        let name = &worker.socket_group;
        if name.is_empty() {
            return Ok(Self::default());
        }
        let group = accounts::group_id(name).map_err(|reason| unusable(name, reason))?;
        Ok(Self { group: Some(group) })
    }

    /// Lets them at a socket that was bound, and nobody else.
    ///
    /// # Errors
    /// Those of the system; the user of this process may be no member of the group.
    fn open(self, path: &Path) -> Result<(), WorkerError> {
        if let Some(group) = self.group {
            chown(path, None, Some(group)).map_err(|error| {
                let reason = format!("cannot give {} to this group ({error}): make the user a member", path.display());
                unusable(&group.to_string(), reason)
            })?;
        }
        // Who may connect is handed descriptors of any block.
        let mode = if self.group.is_some() { 0o660 } else { 0o600 };
        std::fs::set_permissions(path, Permissions::from_mode(mode))
            .map_err(|source| WorkerError::Listen { address: path.display().to_string(), source })
    }

    /// Whether one of them is at the other end.
    pub fn admits(self, stream: &UnixStream) -> bool {
        let Ok(peer) = stream.peer_cred() else { return false };
        if peer.uid() == geteuid().as_raw() || peer.uid() == 0 {
            return true;
        }
        self.group
            .is_some_and(|group| peer.gid() == group || groups_of(stream).is_ok_and(|groups| groups.contains(&group)))
    }
}

fn unusable(group: &str, reason: String) -> WorkerError {
    WorkerError::Config { key: "worker.socket_group", value: group.to_owned(), reason }
}

/// The supplementary groups of the process that has connected, as they were then.
fn groups_of(stream: &UnixStream) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; GROUPS];
    loop {
        let mut bytes = libc::socklen_t::try_from(groups.len() * GROUP_BYTES).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `bytes` bytes, which is the size of `groups`, whose items may have any
        // value; it says in `bytes` how many those were, or would have been. The descriptor is open.
        let answer = unsafe {
            libc::getsockopt(
                stream.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / GROUP_BYTES;
        if answer == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel allows a process 65,536 groups.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// Binds a Unix socket for some processes of this host, in place of a file that a dead worker left there.
pub async fn bind_unix(path: &Path, peers: LocalPeers) -> Result<UnixListener, WorkerError> {
    let length = path.as_os_str().len();
    if length > MAX_SOCKET_PATH {
        return Err(WorkerError::SocketPath { path: path.to_owned(), length });
    }
    let failed = |source| WorkerError::Listen { address: path.display().to_string(), source };
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            if UnixStream::connect(path).await.is_ok() {
                return Err(WorkerError::SocketInUse(path.to_owned()));
            }
            std::fs::remove_file(path).map_err(failed)?;
        }
        Ok(_) => return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket is there"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    peers.open(path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Gid, Uid};
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

    use super::*;

    const NOBODY: u32 = 65_534;
    const GROUP: u32 = 54_321;

    fn named(group: &str) -> schema::Worker {
        schema::Worker { socket_group: group.to_owned(), ..schema::Worker::default() }
    }

    /// A connection of somebody else, who has this group and these more.
    fn connect_as(path: &Path, uid: u32, gid: u32, more: &[u32]) -> io::Result<std::os::unix::net::UnixStream> {
        let (path, more) = (path.to_owned(), more.iter().map(|group| Gid::from_raw(*group)).collect::<Vec<_>>());
        // Who a thread is ends with it.
        let connect = move || {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            set_thread_groups(&more)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
            std::os::unix::net::UnixStream::connect(path)
        };
        std::thread::spawn(connect).join().unwrap()
    }

    async fn is_admitted(listener: &UnixListener, peers: LocalPeers) -> bool {
        peers.admits(&listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn members_of_the_group_come_in_and_others_do_not() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can be somebody else");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        let path = directory.path().join("socket");
        let many: Vec<u32> = (1..200).chain([GROUP]).collect();
        for (peers, members) in
            [(LocalPeers::of(&named(&GROUP.to_string())).unwrap(), true), (LocalPeers::of(&named("")).unwrap(), false)]
        {
            let listener = bind_unix(&path, peers).await.unwrap();
            let mode = path.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, if members { 0o660 } else { 0o600 });
            let refused = |result: io::Result<_>| result.unwrap_err().kind() == io::ErrorKind::PermissionDenied;
            assert!(refused(connect_as(&path, NOBODY, NOBODY, &[]).map(drop)));
            if !members {
                assert!(refused(connect_as(&path, NOBODY, GROUP, &[GROUP]).map(drop)));
            }
            // Somebody has opened the file to everybody.
            std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
            for (gid, more, is_member) in
                [(NOBODY, &[][..], false), (NOBODY, &[GROUP + 1], false), (GROUP, &[], true), (NOBODY, &many, true)]
            {
                let connection = connect_as(&path, NOBODY, gid, more).unwrap();
                assert_eq!(is_admitted(&listener, peers).await, members && is_member, "{gid} {}", more.len());
                drop(connection);
            }
            let root = connect_as(&path, 0, 0, &[]).unwrap();
            assert!(is_admitted(&listener, peers).await);
            drop((root, listener));
            std::fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn a_group_that_nobody_knows_is_refused_by_its_setting() {
        for group in ["no-such-group-here", "-1", "4294967295", "a b"] {
            let error = LocalPeers::of(&named(group)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("worker.socket_group = \"{group}\": ")), "{error}");
        }
    }
}

//! Mounting without being root, through the setuid program `fusermount3`: it mounts, and passes the connection's
//! descriptor back over a Unix socket, which it is given as its standard input.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use cavern_net::descriptors;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::options::{MountError, MountOptions};
use crate::kernel::session::READ_MAX;

const PROGRAM: &str = "fusermount3";

/// Whether users of the mount keep it until they are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lazily {
    Yes,
    No,
}

/// Mounts, and returns the connection's descriptor.
pub fn mount(path: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|cause| MountError::NoHelper(cause.into()))?;
    let access = if options.read_only { "ro" } else { "rw" };
    let source = escaped(&options.source);
    let mut words =
        format!("{access},nosuid,nodev,noatime,fsname={source},subtype=cv,default_permissions,max_read={READ_MAX}");
    for word in [options.allow_other.then_some(",allow_other"), (!options.exec).then_some(",noexec")] {
        words.push_str(word.unwrap_or_default());
    }
    let child = Command::new(PROGRAM)
        .args(["-o", &words, "--"])
        .arg(path)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(MountError::NoHelper)?;
    // The child holds the only other end now: its exit ends the wait below. It writes less to its standard error
    // than a pipe holds.
    let device = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(MountError::NoHelper)?;
    match device {
        Ok(Some(device)) if output.status.success() => Ok(device),
        Err(cause) => Err(MountError::NoHelper(cause)),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let message = if said.trim().is_empty() { output.status.to_string() } else { said.trim().to_owned() };
            Err(MountError::Helper { path: path.to_owned(), message })
        }
    }
}

/// A value as the helper takes it in its list, which commas divide.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,")
}

/// Unmounts; fails when the mount is in use and `lazily` is `No`.
pub fn unmount(path: &Path, lazily: Lazily) -> io::Result<()> {
    let mut command = Command::new(PROGRAM);
    command.args(["-u", "-q"]);
    if lazily == Lazily::Yes {
        command.arg("-z");
    }
    let status =
        command.arg("--").arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("{PROGRAM} -u: {status}"))) }
}

fn receive_descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let (mut byte, mut passed) = ([0; 1], Vec::new());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    descriptors::receive(socket.as_fd(), &mut byte, &mut passed, &mut space)?;
    Ok(passed.pop())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> MountOptions {
        MountOptions { source: "s3://b/a,b".to_owned(), allow_other: false, exec: false, read_only: true }
    }

    #[test]
    fn a_comma_ends_no_value() {
        assert_eq!(escaped(r"s3://b/a,b\c"), r"s3://b/a\,b\\c");
    }

    #[test]
    fn the_helper_mounts_and_unmounts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        let device = match mount(&path, &options()) {
            Ok(device) => device,
            // Not installed: nothing to test.
            Err(MountError::NoHelper(_)) => return,
            Err(other) => panic!("{other}"),
        };
        let mounts = super::super::table::mounts_at(&path).unwrap();
        unmount(&path, Lazily::Yes).unwrap();
        drop(device);
        assert_eq!(mounts.len(), 1);
        assert!(mounts[0].is_ours());
        assert!(super::super::table::mounts_at(&path).unwrap().is_empty());
    }

    #[test]
    fn what_the_helper_says_reaches_the_reader() {
        let missing = Path::new("/nonexistent/cavern");
        match mount(missing, &options()) {
            Err(MountError::Helper { message, .. }) => assert!(message.contains("/nonexistent"), "{message}"),
            Err(MountError::NoHelper(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

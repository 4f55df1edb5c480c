//! A place at which an automounter waits, as systemd has one for `x-systemd.automount`.

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::io::{Errno, ioctl_fionread};
use rustix::mount::{MountFlags, mount};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;

/// An automount whose automounter is asked and does nothing: whoever waits for it waits until he is killed. Taken away
/// again with what is mounted above it, whatever happens.
pub struct Automount {
    path: PathBuf,
    /// What the kernel asks of the automounter.
    requests: OwnedFd,
    /// It leads the automounter's process group.
    leader: Child,
}

impl Automount {
    /// At a directory; `None` where the kernel has no autofs, or lets this user mount none.
    #[track_caller]
    pub fn at(path: &Path) -> Option<Self> {
        let (requests, asking) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let leader = Command::new("cat").stdin(Stdio::piped()).process_group(0).spawn().unwrap();
        let automount = Self { path: path.to_owned(), requests, leader };
        let options = format!("fd={},pgrp={},minproto=5,maxproto=5,direct", asking.as_raw_fd(), automount.group());
        let options = CString::new(options).unwrap();
        match mount("cavern-test", path, "autofs", MountFlags::empty(), options.as_c_str()) {
            Ok(()) => Some(automount),
            Err(cause @ (Errno::NODEV | Errno::PERM)) => {
                eprintln!("skipped: autofs cannot be mounted: {cause}");
                None
            }
            Err(cause) => panic!("cannot mount autofs at {}: {cause}", path.display()),
        }
    }

    /// The process group that the kernel lets pass while others wait.
    pub fn group(&self) -> i32 {
        Pid::from_child(&self.leader).as_raw_nonzero().get()
    }

    /// Whether the automounter was ever asked for the mount.
    pub fn is_asked(&self) -> bool {
        ioctl_fionread(&self.requests).unwrap() > 0
    }
}

impl Drop for Automount {
    fn drop(&mut self) {
        // Of the group: others may have to wait. Each takes the uppermost away, until nothing is mounted there.
        let umount = || Command::new("umount").arg("-l").arg(&self.path).process_group(self.group()).output();
        while umount().is_ok_and(|done| done.status.success()) {}
        let _ = self.leader.kill();
        let _ = self.leader.wait();
    }
}

//! `cv fuse reload`: finds the supervisor of a mount, and has it replace its daemon.
//!
//! A supervisor listens at an abstract Unix socket. Its name has that of the mount's device, which is unique on a host,
//! and an end that nobody can guess, since any user could take one that can be. Who looks for it finds it in the
//! kernel's list, and passes over the sockets of others. It answers with one line: `ok` and the daemon's process, or
//! the reason why not.

use std::collections::BTreeSet;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::{backoff, host};
use rustix::process::{Pid, geteuid};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

use crate::kernel::Mount;

/// Whoever asks says so at once.
const ASK_WAIT: Duration = Duration::from_secs(5);
/// A whole reload takes no longer.
const ANSWER_WAIT: Duration = Duration::from_secs(240);
const QUESTION: &[u8] = b"reload\n";
const YES: &str = "ok ";

/// Why a mount goes on as it was.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error("{} is no mount of cv fuse", .0.display())]
    NoMount(PathBuf),
    #[error(
        "the cv fuse at {} has no supervisor ({cause}): it was started with fuse.supervised = false, by an earlier \
         version, or by another user", path.display()
    )]
    NoSupervisor { path: PathBuf, cause: io::Error },
    #[error(
        "user {user} answers in the place of the cv fuse at {}, which is another's: see what processes he has",
        path.display()
    )]
    AnotherUser { path: PathBuf, user: u32 },
    #[error("the cv fuse at {} was not replaced: {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
}

/// The name of the socket of a device, which a slash and its end follow.
fn stem(device: &str) -> String {
    format!("cavern-fuse/{device}")
}

/// The abstract sockets that have such names, whoever has made them.
fn names(device: &str) -> io::Result<BTreeSet<String>> {
    let (list, stem) = (std::fs::read("/proc/net/unix")?, stem(device) + "/");
    let list = String::from_utf8_lossy(&list);
    // The name is the last of eight fields, with an @ for the NUL byte that makes it abstract.
    let name = |line: &str| Some(line.split_whitespace().nth(7)?.strip_prefix('@')?.to_owned());
    Ok(list.lines().filter_map(name).filter(|name| name.starts_with(&stem)).collect())
}

/// Connects to the supervisor of a device, which is that of the user who has mounted it; otherwise gives another user
/// who has such a socket.
async fn connect(device: &str, owner: Option<u32>) -> io::Result<Result<UnixStream, u32>> {
    let mut another = None;
    for name in names(device)? {
        // Nobody waits at a socket whose queue is full.
        let Ok(stream) = UnixStream::connect(format!("\0{name}")).await else { continue };
        let user = stream.peer_cred()?.uid();
        if owner == Some(user) {
            return Ok(Ok(stream));
        }
        another = Some(user);
    }
    another.map(Err).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
}

/// Has the daemon of a mount replaced by one of the executable that is installed now; gives its process.
///
/// # Errors
/// Nobody keeps the mount, or its supervisor says no: everything is as it was then.
pub async fn reload(mount_point: &Path) -> Result<String, ReloadError> {
    let path = mount_point.to_owned();
    let device = Mount::device_at(mount_point).ok_or_else(|| ReloadError::NoMount(path.clone()))?;
    let no_supervisor = |cause| ReloadError::NoSupervisor { path: path.clone(), cause };
    let mut stream = match connect(&device, Mount::owner_at(mount_point)).await.map_err(no_supervisor)? {
        Ok(stream) => stream,
        Err(user) => return Err(ReloadError::AnotherUser { path, user }),
    };
    let asked = async {
        stream.write_all(QUESTION).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    let answer = match timeout(ANSWER_WAIT, asked).await {
        Ok(answer) => answer.map_err(no_supervisor)?,
        Err(_late) => "its supervisor does not answer; its log says why".to_owned(),
    };
    let answer = answer.trim_end();
    match answer.strip_prefix(YES) {
        Some(process) => Ok(process.to_owned()),
        None => Err(ReloadError::Refused { path, reason: answer.to_owned() }),
    }
}

/// The supervisor's end.
#[derive(Debug)]
pub(super) struct Reloads {
    listener: UnixListener,
}

/// Somebody who waits for an answer.
#[derive(Debug)]
pub(super) struct Asked {
    stream: UnixStream,
}

impl Reloads {
    pub(super) fn listen(mount_point: &Path) -> io::Result<Self> {
        let device = Mount::device_at(mount_point);
        let device = device.ok_or_else(|| io::Error::other("the mount is not in the mount table"))?;
        let address = SocketAddr::from_abstract_name(format!("{}/{}", stem(&device), host::unique_name()))?;
        let listener = StdListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener: UnixListener::from_std(listener)? })
    }

    /// The next who may ask, and does.
    pub(super) async fn next(&self) -> Asked {
        loop {
            let Ok((mut stream, _)) = self.listener.accept().await else {
                sleep(backoff::ACCEPT.first).await;
                continue;
            };
            let own = geteuid().as_raw();
            if !stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0) {
                continue;
            }
            let mut question = [0; QUESTION.len()];
            if matches!(timeout(ASK_WAIT, stream.read_exact(&mut question)).await, Ok(Ok(_))) && question == *QUESTION {
                return Asked { stream };
            }
        }
    }
}

impl Asked {
    /// The daemon was replaced, by one of the installed executable, or by one of the supervisor's own.
    pub(super) async fn answer(self, is_installed: bool, daemon: Option<Pid>) {
        let process = daemon.map_or(0, |pid| pid.as_raw_nonzero().get());
        if is_installed {
            return self.say(&format!("{YES}{process}")).await;
        }
        let reason = "the installed executable does not serve the mount, its log says why; the one before goes on";
        self.say(reason).await;
    }

    pub(super) async fn say(mut self, line: &str) {
        // Who asked may be gone.
        let _ = self.stream.write_all(format!("{line}\n").as_bytes()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_supervisor_is_found_among_the_sockets_of_its_device() {
        let device = host::unique_name();
        let own = geteuid().as_raw();
        assert!(connect(&device, Some(own)).await.is_err());
        let bind = |name: String| StdListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        // None is one of the device.
        let _taken = ["", "0", "0/a"].map(|end| bind(stem(&device) + end));
        assert!(names(&device).unwrap().is_empty());
        let _supervisor = bind(stem(&device) + "/a");
        assert_eq!(names(&device).unwrap().into_iter().collect::<Vec<_>>(), [stem(&device) + "/a"]);
        assert!(connect(&device, Some(own)).await.unwrap().is_ok());
        assert_eq!(connect(&device, Some(own + 1)).await.unwrap().unwrap_err(), own);
    }
}

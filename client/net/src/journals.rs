//! How the worker of a host comes to keep the journal of a mount, beside the processes that serve it.
//!
//! Beside a worker's Unix socket there is a second one. Whoever serves a mount hands the journal over there, which is a
//! file of memory, with a descriptor of the process that keeps the mount; the connection stays for as long as it
//! serves. When the supervisor and the last that served are dead, and the journal does not say that all of it is made,
//! the worker has it replayed. Whoever mounts at the same place waits for that: its session ends the earlier one.
//!
//! A connection begins with one message, its length before it, and the descriptors with its first byte. The answer is
//! one byte; whatever else comes is the reason of a refusal, up to the end.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

pub use cavern_proto::journal::{Ask, Hello};
use prost::Message as _;
use rustix::net::ReturnFlags;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;

use crate::{descriptors, local_socket};

/// The first word of a journal, with the version of its layout below [`VERSION_BITS`].
pub const MAGIC: u64 = 0x6361_7665_726e_0001;
pub const VERSION_BITS: u32 = 16;
/// Where a journal says, by a word that is not 0, that nothing of it is left to be made.
pub const ENDED_AT: u64 = 32;

/// What the path of the second socket has behind that of the first.
const SUFFIX: &str = ".journals";
/// Bytes of a message at most: two paths, and what little there is beside them.
const HELLO_MAX: usize = 16 << 10;
/// The journal and the supervisor.
const DESCRIPTORS: usize = 2;
const KEPT: u8 = b'k';
const DONE: u8 = b'd';

/// The socket for journals of a worker whose Unix socket is at `worker`.
pub fn socket_path(worker: &Path) -> PathBuf {
    let mut path = OsString::from(worker);
    path.push(SUFFIX);
    path.into()
}

/// Whether a journal says that nothing of it is left to be made.
///
/// # Errors
/// It cannot be read, or is too short.
pub fn is_ended(journal: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(word(journal, ENDED_AT)? != 0)
}

/// Whether a file begins as a journal does, of whichever version.
pub fn is_journal(file: BorrowedFd<'_>) -> bool {
    word(file, 0).is_ok_and(|magic| magic >> VERSION_BITS == MAGIC >> VERSION_BITS)
}

fn word(file: BorrowedFd<'_>, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    if rustix::io::pread(file, &mut bytes, at)? != bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(u64::from_le_bytes(bytes))
}

/// A journal that a worker keeps, as long as this is there.
#[derive(Debug)]
pub struct JournalGuard {
    stream: UnixStream,
}

impl JournalGuard {
    /// Completes when the worker is gone.
    pub async fn ended(&mut self) {
        ended(&mut self.stream).await;
    }
}

/// Completes when the other end of a connection is gone.
pub async fn ended(stream: &mut UnixStream) {
    let mut byte = [0];
    while stream.read(&mut byte).await.is_ok_and(|count| count > 0) {}
}

/// Has a worker of this host keep a journal.
///
/// # Errors
/// There is none at this path, it has no room, or says no for another reason.
pub async fn hand_over(
    worker: &Path,
    hello: &Hello,
    journal: BorrowedFd<'_>,
    supervisor: BorrowedFd<'_>,
) -> io::Result<JournalGuard> {
    let mut stream = local_socket::connect(&socket_path(worker)).await?;
    send(&stream, hello, &[journal, supervisor]).await?;
    expect(&mut stream, KEPT).await?;
    Ok(JournalGuard { stream })
}

/// Completes when a worker of this host has nothing left to replay of a place. Not bounded.
///
/// # Errors
/// There is none at this path, or it has ended meanwhile.
pub async fn wait_for_replays(worker: &Path, place: &str) -> io::Result<()> {
    let mut stream = local_socket::connect(&socket_path(worker)).await?;
    let hello = Hello { ask: Ask::Wait.into(), place: place.to_owned(), ..Hello::default() };
    send(&stream, &hello, &[]).await?;
    expect(&mut stream, DONE).await
}

async fn expect(stream: &mut UnixStream, wanted: u8) -> io::Result<()> {
    let first = stream.read_u8().await?;
    if first == wanted {
        return Ok(());
    }
    let mut reason = vec![first];
    stream.take(HELLO_MAX as u64).read_to_end(&mut reason).await?;
    Err(io::Error::other(String::from_utf8_lossy(&reason).into_owned()))
}

/// The worker keeps the journal.
///
/// # Errors
/// Who asked is gone.
pub async fn answer_kept(stream: &mut UnixStream) -> io::Result<()> {
    stream.write_all(&[KEPT]).await
}

/// Nothing is left to be replayed.
///
/// # Errors
/// Who asked is gone.
pub async fn answer_done(stream: &mut UnixStream) -> io::Result<()> {
    stream.write_all(&[DONE]).await
}

/// The worker does not do what it is asked for.
///
/// # Errors
/// Who asked is gone.
pub async fn refuse(mut stream: UnixStream, reason: &str) -> io::Result<()> {
    // No sentence begins as an answer does.
    stream.write_all(format!("refused: {reason}").as_bytes()).await
}

async fn send(stream: &UnixStream, hello: &Hello, passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = hello.encode_to_vec();
    if body.len() > HELLO_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the paths are too long"));
    }
    let frame = [&(body.len() as u32).to_le_bytes()[..], &body].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let send = || descriptors::send(stream.as_fd(), &[IoSlice::new(&frame)], passed, &mut space);
    // A socket that nothing was written to yet has room for all of it.
    let is_sent = stream.async_io(Interest::WRITABLE, send).await? == frame.len();
    if is_sent { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// What a connection begins with, and the descriptors that came with it. Not bounded in time.
///
/// # Errors
/// It is nothing that this version understands.
pub async fn receive(stream: &UnixStream) -> io::Result<(Hello, Vec<OwnedFd>)> {
    let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
    loop {
        let receive = || receive_some(stream.as_fd(), &mut bytes, &mut descriptors);
        if stream.async_io(Interest::READABLE, receive).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if descriptors.len() > DESCRIPTORS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
        }
        if let Some(hello) = whole(&bytes)? {
            return Ok((hello, descriptors));
        }
    }
}

fn receive_some(socket: BorrowedFd<'_>, bytes: &mut Vec<u8>, passed: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut part = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let received = descriptors::receive(socket, &mut part, passed, &mut space)?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
    }
    bytes.extend_from_slice(&part[..received.bytes]);
    Ok(received.bytes)
}

/// The message, when all of it is there.
fn whole(bytes: &[u8]) -> io::Result<Option<Hello>> {
    let Some((length, body)) = bytes.split_first_chunk() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > HELLO_MAX || body.len() > length {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no message of this version of cv"));
    }
    if body.len() < length {
        return Ok(None);
    }
    Hello::decode(body).map(Some).map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use proptest::prelude::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[tokio::test]
    async fn a_message_arrives_with_its_descriptors() {
        let (own, other) = UnixStream::pair().unwrap();
        let name = "n".repeat(9000);
        let hello = Hello { ask: Ask::Keep.into(), place: "here".to_owned(), name, ..Hello::default() };
        let (null, zero) = (File::open("/dev/null").unwrap(), File::open("/dev/zero").unwrap());
        send(&own, &hello, &[null.as_fd(), zero.as_fd()]).await.unwrap();
        let (received, descriptors) = receive(&other).await.unwrap();
        assert_eq!((received, descriptors.len()), (hello, 2));

        let mut own = own;
        answer_kept(&mut { other }).await.unwrap();
        expect(&mut own, KEPT).await.unwrap();
        assert_eq!(expect(&mut own, KEPT).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn a_refusal_says_why() {
        let (mut own, other) = UnixStream::pair().unwrap();
        refuse(other, "no room").await.unwrap();
        assert_eq!(expect(&mut own, DONE).await.unwrap_err().to_string(), "refused: no room");
    }

    #[tokio::test]
    async fn more_descriptors_than_there_may_be_are_refused() {
        let (own, other) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let many = [null.as_fd(); 8];
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(own.as_fd(), &[IoSlice::new(b"abc")], &mut control, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(receive(&other).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_journal_is_known_by_its_first_word_and_says_when_it_has_ended() {
        let file = tempfile();
        assert!(!is_journal(file.as_fd()) && is_ended(file.as_fd()).is_err());
        rustix::io::pwrite(&file, &(MAGIC + 1).to_le_bytes(), 0).unwrap();
        rustix::io::pwrite(&file, &0_u64.to_le_bytes(), ENDED_AT).unwrap();
        assert!(is_journal(file.as_fd()) && !is_ended(file.as_fd()).unwrap());
        rustix::io::pwrite(&file, &1_u64.to_le_bytes(), ENDED_AT).unwrap();
        assert!(is_ended(file.as_fd()).unwrap());
    }

    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("journal", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_or_waited_for(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _any = whole(&bytes);
        }
    }
}

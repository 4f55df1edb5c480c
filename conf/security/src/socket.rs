//! A secured connection that is driven without waiting, as the sockets of the data plane are.
//!
//! ```text
//!   socket ─► ciphertext ─► rustls ─► plaintext ─► try_read
//!   try_write ─► rustls ─► ciphertext ─► socket
//! ```
//!
//! Between the socket and its user there are bytes of which the socket knows nothing: plaintext that nobody has taken
//! yet, which makes [`TlsSocket::ready`] return at once, and ciphertext that the socket has not taken yet, of which
//! [`TlsSocket::has_unsent`] tells. Who uses one waits for it to be writable while there is some, and calls
//! [`TlsSocket::flush`] then.
//!
//! When the certificate of the other side does not hold any more, nothing is read or written, and nobody waits.
//!
//! A stream that ends without a farewell of TLS has ended: the frames that it carries tell how long they are, so that
//! none of them is taken for whole that is not.

use std::cell::RefCell;
use std::io::{self, BufRead, IoSlice, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, BufMut, BytesMut};
use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendFlags, connect_unspec, sendmsg};
use rustls::Connection;
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;

use crate::handshake::{PeerStream, failure};
use crate::identity::{Identity, Role};
use crate::peers::PeerCertificate;
use crate::transport::{Protocol, Tls};

/// Ciphertext that is read by one system call, at most.
const READ_BYTES: usize = 256 << 10;
/// Plaintext that is encrypted before the socket has taken the ciphertext of earlier one. Four records.
const UNSENT_BYTES: usize = 64 << 10;
/// Plaintext of a record, at most, and what a record has beside it: header, type and tag.
const RECORD_BYTES: usize = 16 << 10;
const RECORD_OVERHEAD: usize = 5 + 1 + 16;

thread_local! {
    /// What is read from sockets, until it is decrypted: once for each thread, and not for each of many connections.
    static CIPHERTEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A secured connection that is driven without waiting. One task reads; any number of them write.
pub struct TlsSocket {
    stream: TcpStream,
    connection: Mutex<Connection>,
    /// Whoever has this may read from the socket.
    incoming: Mutex<Incoming>,
    /// `try_read` has something to say, whatever the socket does.
    has_input: AtomicBool,
    has_unsent: AtomicBool,
    certificate: PeerCertificate,
}

#[derive(Default)]
struct Incoming {
    /// What has been read and had no room. Mostly nothing.
    ciphertext: BytesMut,
    has_ended: bool,
}

/// What came of some ciphertext.
struct Opened {
    /// Bytes of plaintext that were appended.
    taken: usize,
    /// More than there was room for.
    has_more: bool,
    /// The other side has said that nothing follows.
    is_closed: bool,
}

cavern_conf::debug_only!(TlsSocket { stream });

impl TlsSocket {
    /// Shakes hands with a server that must be of this role. The caller bounds the time.
    ///
    /// # Errors
    /// Those of the connection, and what this side finds wrong with the other's certificate. What the other finds wrong
    /// with that of this process is told by the first read.
    pub async fn connect(tls: &Tls, stream: TcpStream, to: Role) -> io::Result<Self> {
        Self::of(tls.connect(stream, to).await?)
    }

    /// Shakes hands with a client, of whatever role. The caller bounds the time.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn accept(tls: &Tls, stream: TcpStream) -> io::Result<Self> {
        Self::of(tls.accept(stream, Protocol::Data).await?)
    }

    fn of(stream: PeerStream) -> io::Result<Self> {
        let (stream, mut connection, certificate) = stream.into_parts()?;
        connection.set_buffer_limit(Some(UNSENT_BYTES));
        Ok(Self {
            has_input: AtomicBool::new(connection.reader().into_first_chunk().is_ok()),
            has_unsent: AtomicBool::new(connection.wants_write()),
            stream,
            connection: Mutex::new(connection),
            incoming: Mutex::default(),
            certificate,
        })
    }

    /// Who is on the other side.
    pub fn peer(&self) -> &Identity {
        self.certificate.identity()
    }

    /// For whoever waits for something else than the socket.
    ///
    /// # Errors
    /// The certificate of the other side does not hold any more.
    pub fn check(&self) -> io::Result<()> {
        self.certificate.check()
    }

    /// This connection, whose events come to the runtime of the caller.
    ///
    /// # Errors
    /// Those of the system.
    pub fn into_current_runtime(self) -> io::Result<Self> {
        Ok(Self { stream: TcpStream::from_std(self.stream.into_std()?)?, ..self })
    }

    /// Waits until a read or a write may do something.
    ///
    /// # Errors
    /// Those of the system, and as [`Self::check`].
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if interest.is_readable() && self.has_input.load(Ordering::Acquire) {
            return Ok(Ready::READABLE);
        }
        tokio::select! {
            biased;
            ready = self.stream.ready(interest) => ready,
            () = self.certificate.refused() => {
                self.check()?;
                Ok(Ready::EMPTY)
            }
        }
    }

    /// Appends what has arrived, as much as the buffer has room for without growing; `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` when nothing has. What was changed on its way, or came from somebody else, ends the connection. As
    /// [`Self::check`].
    pub fn try_read(&self, buffer: &mut impl BufMut) -> io::Result<usize> {
        self.check()?;
        let room = buffer.chunk_mut().len();
        let mut incoming = self.incoming.lock();
        let Incoming { ciphertext, has_ended } = &mut *incoming;
        let mut rest = &ciphertext[..];
        let opened = self.open(&mut rest, buffer, room)?;
        let left = rest.len();
        ciphertext.advance(ciphertext.len() - left);
        if left == 0 {
            *ciphertext = BytesMut::new();
        }
        *has_ended |= opened.is_closed;
        if opened.taken > 0 || room == 0 || *has_ended {
            self.has_input.store(left > 0 || opened.has_more || *has_ended, Ordering::Release);
            return Ok(opened.taken);
        }
        self.has_input.store(false, Ordering::Release);
        CIPHERTEXT.with_borrow_mut(|read| {
            read.resize(READ_BYTES, 0);
            // Together with what is there of a record already, this fills the room.
            let wanted = (room + (room / RECORD_BYTES + 1) * RECORD_OVERHEAD).min(READ_BYTES);
            loop {
                let count = self.receive(&mut read[..wanted])?;
                let mut rest = &read[..count];
                let opened = self.open(&mut rest, buffer, room)?;
                *has_ended |= count == 0 || opened.is_closed;
                if opened.taken > 0 || *has_ended {
                    ciphertext.extend_from_slice(rest);
                    self.has_input.store(!rest.is_empty() || opened.has_more || *has_ended, Ordering::Release);
                    return Ok(opened.taken);
                }
                // It was a part of a record.
            }
        })
    }

    /// Writes as much as is encrypted and kept until the socket takes it: less than there is, mostly.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is taken. As [`Self::check`].
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check()?;
        let mut connection = self.connection.lock();
        self.send(&mut connection, SendFlags::MORE)?;
        if connection.wants_write() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let taken = connection.writer().write_vectored(slices)?;
        let more = taken < slices.iter().map(|slice| slice.len()).sum::<usize>();
        match self.send(&mut connection, if more { SendFlags::MORE } else { SendFlags::empty() }) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Whether the socket has not yet taken all that was written.
    pub fn has_unsent(&self) -> bool {
        self.has_unsent.load(Ordering::Acquire)
    }

    /// Sends what was written earlier, as far as the socket takes it; how many bytes it took.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing although there is something.
    pub fn flush(&self) -> io::Result<usize> {
        self.send(&mut self.connection.lock(), SendFlags::empty())
    }

    /// Ends the connection at once: what was written and has not arrived never will.
    ///
    /// # Errors
    /// Those of the system.
    pub fn abort(&self) -> io::Result<()> {
        Ok(connect_unspec(&self.stream)?)
    }

    /// As [`Self::flush`]. With `MORE` something follows at once, for which the kernel keeps a packet that is not full:
    /// what is encrypted at a time is a little more than the largest one.
    fn send(&self, connection: &mut Connection, flags: SendFlags) -> io::Result<usize> {
        let mut sent = 0;
        let outcome = loop {
            if !connection.wants_write() {
                break Ok(());
            }
            match connection.write_tls(&mut Sink { stream: &self.stream, flags }) {
                Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.has_unsent.store(connection.wants_write(), Ordering::Release);
        match outcome {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock || sent == 0 => Err(error),
            _ => Ok(sent),
        }
    }

    /// Decrypts until there is no more room, or no more ciphertext.
    fn open(&self, ciphertext: &mut &[u8], buffer: &mut impl BufMut, room: usize) -> io::Result<Opened> {
        let mut connection = self.connection.lock();
        let (mut taken, mut is_closed) = (0, false);
        loop {
            while taken < room {
                let mut reader = connection.reader();
                let plaintext = match reader.fill_buf() {
                    Ok(plaintext) => plaintext,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                };
                let count = plaintext.len().min(room - taken);
                if count == 0 {
                    is_closed = true;
                    break;
                }
                buffer.put_slice(&plaintext[..count]);
                reader.consume(count);
                taken += count;
            }
            if taken == room || is_closed || ciphertext.is_empty() {
                let has_more = connection.reader().into_first_chunk().is_ok();
                return Ok(Opened { taken, has_more, is_closed });
            }
            if connection.read_tls(ciphertext)? == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a record of TLS is too long"));
            }
            let outcome = connection.process_new_packets();
            if connection.wants_write() {
                // With an error this tells the other side of it; what the socket does not take now goes later.
                let _ = self.send(&mut connection, SendFlags::empty());
            }
            outcome.map_err(|error| failure(&error))?;
        }
    }

    /// One system call.
    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let (room, mut received) = (into.len(), None);
        // Less than there is room for is all that has arrived: `WouldBlock` spares the read that would say so. What
        // arrives from now on is told anew.
        let outcome = self.stream.try_io(Interest::READABLE, || {
            let count = self.stream.try_read(into)?;
            received = Some(count);
            if count > 0 && count < room { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(count) }
        });
        received.map_or(outcome, Ok)
    }
}

/// The socket, for rustls to write to.
struct Sink<'a> {
    stream: &'a TcpStream,
    flags: SendFlags,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = self.flags | SendFlags::NOSIGNAL;
        self.stream.try_io(Interest::WRITABLE, || {
            Ok(sendmsg(self.stream, slices, &mut SendAncillaryBuffer::default(), flags)?)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! One connection to a worker: many requests in flight, answered out of order.
//!
//! A request is sent by the task that makes it, straight into the socket where that has room: no wake-up of another
//! task on the way out. One task sends at a time, and takes along what others put into the outbox meanwhile, so that
//! nobody waits for a system call of somebody else's and requests of a burst share one. What does not fit into the
//! socket is left to the connection's own task. That task also reads every answer and hands it to its asker. Requests
//! in flight are bounded in bytes, as the worker asks for in its Hello. A TCP connection on which a write is not
//! answered in time is given up: what has not arrived would come behind what is written there later, over another one.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use cavern_proto::bounded::decode;
use cavern_proto::data::{self, Status};
use cavern_proto::frame::{Call, FrameHeader, FrameKind, PROTOCOL_VERSION, encode_frame};
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::frames::{Frame, FrameReader, Payload};
use super::receive_buffers::ReceiveBuffers;
use crate::error::NetError;
use crate::socket::Socket;

/// What a request costs of the bytes in flight besides its payload, so that their number is bounded too.
const REQUEST_COST_BYTES: u64 = 16 * 1024;
/// Frames and payloads that are sent by one system call, at most.
const PARTS_AT_A_TIME: usize = 16;
/// Whoever sends takes along what others have put into the outbox so many times, then the rest is the connection's own
/// task's: it has a request of its own to wait for.
const SENDS_IN_A_ROW: usize = 8;
/// Bytes in flight when the worker names no limit.
const DEFAULT_INFLIGHT_BYTES: u32 = 64 << 20;

/// An answer, with what came along.
#[derive(Debug)]
struct Answer {
    message: Bytes,
    payload: Bytes,
    descriptors: Vec<OwnedFd>,
}

/// Takes what a worker sends unasked.
pub(super) type EvictionListener = Arc<dyn Fn(u64, data::Evicted) + Send + Sync>;

#[derive(Debug)]
pub(super) struct Connection {
    worker: u64,
    address: String,
    socket: Socket,
    next_id: AtomicU64,
    /// In KiB, so that the semaphore's count cannot overflow.
    inflight: Semaphore,
    inflight_limit: u32,
    state: Mutex<State>,
    /// The own task has something to send, or finds the connection closed.
    handed_over: Notify,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<u64, Pending>,
    /// What nobody has begun to send yet, or what the socket did not take.
    outbox: VecDeque<Bytes>,
    sender: Sender,
    /// Why the connection cannot be used any more.
    closed: Option<String>,
}

/// Who sends what is in the outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sender {
    /// Whoever comes next: it is empty.
    #[default]
    Nobody,
    /// Somebody who is at it.
    Asker,
    /// The connection's own task, when the socket takes more.
    OwnTask,
}

#[derive(Debug)]
struct Pending {
    answer: FrameKind,
    payload_limit: u32,
    reply: oneshot::Sender<Result<Answer, data::Failure>>,
}

/// What has become of the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    All,
    /// The rest is the own task's.
    Part,
}

/// A greeted socket, before its task runs.
pub(super) struct Greeted {
    socket: Socket,
    reader: FrameReader,
    pub hello: data::Hello,
}

/// Sends Hello and takes the worker's. The caller bounds the time.
pub(super) async fn greet(
    socket: Socket,
    payloads: Arc<ReceiveBuffers>,
    cluster_id: &str,
    peer: &str,
    term: u64,
) -> io::Result<Greeted> {
    let hello = data::Hello {
        protocol: PROTOCOL_VERSION,
        cluster_id: cluster_id.to_owned(),
        peer: peer.to_owned(),
        term,
        ..data::Hello::default()
    };
    let frame = encode_frame(FrameKind::Hello, 0, &hello, 0);
    let mut sent = 0;
    while sent < frame.len() || socket.has_unsent() {
        let rest = &frame[sent..];
        let outcome = if rest.is_empty() { socket.flush().map(|_| 0) } else { socket.try_write(&[IoSlice::new(rest)]) };
        match outcome {
            Ok(count) => sent += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => _ = socket.ready(Interest::WRITABLE).await?,
            Err(error) => return Err(error),
        }
    }
    let mut reader = FrameReader::new(payloads);
    let no_payload = |header: &FrameHeader| match header.payload_bytes {
        0 => Ok(Payload::Keep),
        _ => Err("a greeting has no payload".to_owned()),
    };
    let answer = reader.next(&socket, no_payload).await?;
    match answer.header.kind {
        FrameKind::Hello => {
            let hello = decode::<data::Hello>(answer.message).map_err(io::Error::other)?;
            if hello.protocol != PROTOCOL_VERSION {
                let text = format!("it speaks protocol {}, not {PROTOCOL_VERSION}", hello.protocol);
                return Err(io::Error::other(text));
            }
            Ok(Greeted { socket, reader, hello })
        }
        FrameKind::Failure => {
            let failure = decode::<data::Failure>(answer.message).map_err(io::Error::other)?;
            Err(io::Error::other(failure.message))
        }
        kind => Err(io::Error::other(format!("expected a greeting, got {kind:?}"))),
    }
}

impl Connection {
    /// The connection and the future that drives it; the caller spawns that.
    pub(super) fn new(
        greeted: Greeted,
        worker: u64,
        address: String,
        evicted: Option<EvictionListener>,
        stop: CancellationToken,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + 'static) {
        let bytes = match greeted.hello.max_inflight_bytes {
            0 => DEFAULT_INFLIGHT_BYTES,
            bytes => bytes,
        };
        let inflight_limit = (bytes / 1024).max(REQUEST_COST_BYTES as u32 / 1024);
        let connection = Arc::new(Self {
            worker,
            address,
            socket: greeted.socket,
            next_id: AtomicU64::new(1),
            inflight: Semaphore::new(inflight_limit as usize),
            inflight_limit,
            state: Mutex::default(),
            handed_over: Notify::new(),
        });
        let driver = drive(connection.clone(), greeted.reader, evicted, stop);
        (connection, driver)
    }

    /// Whether requests can still be sent.
    pub(super) fn is_open(&self) -> bool {
        self.state.lock().closed.is_none()
    }

    /// Sends a request, with a payload of its own that goes out without being copied, and waits for the answer, with at
    /// most `payload_limit` bytes of payload, for `wait` at most. Dropping the future cancels the request at the
    /// worker.
    pub(super) async fn call<C: Call>(
        &self,
        request: &C,
        payload: Bytes,
        payload_limit: u32,
        wait: Duration,
    ) -> Result<(C::Reply, Bytes, Vec<OwnedFd>), NetError> {
        let late = || {
            let (worker, address, waited_ms) = (self.worker, self.address.clone(), wait.as_millis() as u64);
            NetError::WorkerDeadline { worker, address, waited_ms }
        };
        let answer = self.exchange(request, payload, payload_limit, Instant::now() + wait).await?;
        let Answer { message, payload, descriptors } = answer.ok_or_else(late)?;
        let reply = decode::<C::Reply>(message);
        let reply = reply.map_err(|error| self.failed(format!("its answer cannot be read: {error}")))?;
        Ok((reply, payload, descriptors))
    }

    /// `None` when there is no answer by then.
    async fn exchange<C: Call>(
        &self,
        request: &C,
        payload: Bytes,
        payload_limit: u32,
        until: Instant,
    ) -> Result<Option<Answer>, NetError> {
        let cost = (u64::from(payload_limit) + payload.len() as u64 + REQUEST_COST_BYTES) / 1024;
        let cost = u32::try_from(cost).unwrap_or(u32::MAX).min(self.inflight_limit);
        let Ok(share) = timeout_at(until, self.inflight.acquire_many(cost)).await else { return Ok(None) };
        let _share = share.map_err(|_closed| self.broken())?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // The pool lets no payload of more than a write's pass.
        let payload_bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let frame = encode_frame(C::KIND, id, request, payload_bytes).into();
        let (reply, answered) = oneshot::channel();
        self.send(frame, payload, Some((id, Pending { answer: C::ANSWER, payload_limit, reply })))?;
        let cancel = CancelOnDrop { connection: self, id };
        let outcome = timeout_at(until, answered).await;
        if outcome.is_err() && C::KIND == FrameKind::Write {
            self.give_up();
        }
        drop(cancel);
        match outcome {
            Ok(Ok(Ok(answer))) => Ok(Some(answer)),
            Ok(Ok(Err(failure))) => {
                Err(NetError::WorkerStatus { worker: self.worker, status: failure.status(), message: failure.message })
            }
            Ok(Err(_dropped)) => Err(self.broken()),
            Err(_elapsed) => Ok(None),
        }
    }

    /// Nothing that is on its way over a TCP connection arrives any more. Over the Unix socket, of which there is one,
    /// all arrives before what is sent later.
    fn give_up(&self) {
        if self.socket.passes_descriptors() {
            return;
        }
        Self::close(&mut self.state.lock(), "a write was not answered in time".to_owned());
        if let Err(error) = self.socket.abort() {
            tracing::debug!(worker = self.worker, "a connection ends later: {error}");
        }
        self.handed_over.notify_one();
    }

    /// Puts a frame on its way, and the request that it belongs to on record.
    fn send(&self, frame: Bytes, payload: Bytes, request: Option<(u64, Pending)>) -> Result<(), NetError> {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            drop(state);
            return Err(self.broken());
        }
        state.pending.extend(request);
        state.outbox.extend([frame, payload].into_iter().filter(|part| !part.is_empty()));
        if state.sender != Sender::Nobody {
            return Ok(());
        }
        state.sender = Sender::Asker;
        drop(state);
        match self.send_outbox() {
            Ok(Sent::All) => Ok(()),
            Ok(Sent::Part) => {
                self.handed_over.notify_one();
                Ok(())
            }
            Err(_) => {
                self.handed_over.notify_one();
                Err(self.broken())
            }
        }
    }

    /// Sends what is in the outbox, and what others put there meanwhile. The caller is the one who sends; when this
    /// returns it is nobody, or the own task. An error closes the connection.
    fn send_outbox(&self) -> io::Result<Sent> {
        let mut batch = VecDeque::new();
        let mut outcome = Ok(());
        for _ in 0..SENDS_IN_A_ROW {
            {
                let mut state = self.state.lock();
                if batch.is_empty() {
                    std::mem::swap(&mut batch, &mut state.outbox);
                } else {
                    batch.append(&mut state.outbox);
                }
                if batch.is_empty() && !self.socket.has_unsent() {
                    state.sender = Sender::Nobody;
                    return Ok(Sent::All);
                }
            }
            outcome = self.send_some(&mut batch);
            if outcome.is_err() {
                break;
            }
        }
        let mut state = self.state.lock();
        match outcome {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                Self::close(&mut state, error.to_string());
                return Err(error);
            }
            _ if state.closed.is_some() => {}
            _ => {
                batch.append(&mut state.outbox);
                state.outbox = batch;
            }
        }
        let is_all = state.outbox.is_empty() && !self.socket.has_unsent();
        state.sender = if is_all { Sender::Nobody } else { Sender::OwnTask };
        Ok(if is_all { Sent::All } else { Sent::Part })
    }

    /// One system call, mostly. Of an empty batch, what the socket has taken before and not sent.
    fn send_some(&self, batch: &mut VecDeque<Bytes>) -> io::Result<()> {
        if batch.is_empty() {
            return self.socket.flush().map(drop);
        }
        let mut parts = [IoSlice::new(&[]); PARTS_AT_A_TIME];
        for (part, bytes) in parts.iter_mut().zip(&*batch) {
            *part = IoSlice::new(bytes);
        }
        let mut sent = self.socket.try_write(&parts[..batch.len().min(PARTS_AT_A_TIME)])?;
        while let Some(first) = batch.front_mut().filter(|_| sent > 0) {
            let of_first = sent.min(first.len());
            first.advance(of_first);
            sent -= of_first;
            if first.is_empty() {
                batch.pop_front();
            }
        }
        Ok(())
    }

    /// Sends what was left to the own task, as far as the socket takes it.
    fn send_left(&self) -> io::Result<()> {
        {
            let mut state = self.state.lock();
            if state.sender == Sender::Asker {
                return Ok(());
            }
            state.sender = Sender::Asker;
        }
        self.send_outbox().map(drop)
    }

    fn has_to_send(&self) -> bool {
        match self.state.lock().sender {
            Sender::OwnTask => true,
            Sender::Asker => false,
            Sender::Nobody => self.socket.has_unsent(),
        }
    }

    fn close(state: &mut State, cause: String) {
        state.closed.get_or_insert(cause);
        state.pending.clear();
        state.outbox.clear();
    }

    fn broken(&self) -> NetError {
        let cause = self.state.lock().closed.clone();
        self.failed(cause.unwrap_or_else(|| "the connection is closed".to_owned()))
    }

    fn failed(&self, cause: String) -> NetError {
        NetError::WorkerConnection { worker: self.worker, address: self.address.clone(), cause }
    }

    /// What becomes of a frame's payload, before it is read.
    fn judge(&self, header: &FrameHeader) -> Result<Payload, String> {
        match self.state.lock().pending.get(&header.request_id) {
            Some(pending) if header.payload_bytes > pending.payload_limit => Err(format!(
                "{} bytes of payload came where {} were asked",
                header.payload_bytes, pending.payload_limit
            )),
            Some(_) => Ok(Payload::Keep),
            None => Ok(Payload::Skip),
        }
    }

    /// Hands a frame to whom it concerns. An error ends the connection.
    fn deliver(
        &self,
        frame: Frame,
        reader: &mut FrameReader,
        evicted: Option<&EvictionListener>,
    ) -> Result<(), String> {
        let Frame { header, message, payload } = frame;
        let descriptors = match header.kind {
            FrameKind::OpenReply => {
                let reply = decode::<data::OpenReply>(message.clone()).map_err(|error| error.to_string())?;
                let count = reply.items.iter().filter(|item| item.status() == Status::Ok).count();
                reader.take_descriptors(count).ok_or("an answer came without its descriptors")?
            }
            FrameKind::ReserveReply if self.socket.passes_descriptors() => {
                let reply = decode::<data::ReserveReply>(message.clone()).map_err(|error| error.to_string())?;
                let count = usize::from(reply.status() == Status::Ok);
                reader.take_descriptors(count).ok_or("an answer came without its descriptor")?
            }
            FrameKind::Evicted => {
                let blocks = decode::<data::Evicted>(message).map_err(|error| error.to_string())?;
                if let Some(listener) = evicted {
                    listener(self.worker, blocks);
                }
                return Ok(());
            }
            _ => Vec::new(),
        };
        let pending = self.state.lock().pending.remove(&header.request_id);
        if header.kind == FrameKind::Failure {
            let failure = decode::<data::Failure>(message).map_err(|error| error.to_string())?;
            return match pending {
                // The asker may have gone: its answer is then dropped here.
                Some(pending) => {
                    drop(pending.reply.send(Err(failure)));
                    Ok(())
                }
                None => Err(failure.message),
            };
        }
        match pending {
            Some(pending) if pending.answer == header.kind => {
                drop(pending.reply.send(Ok(Answer { message, payload, descriptors })));
                Ok(())
            }
            Some(pending) => Err(format!("{:?} came where {:?} was expected", header.kind, pending.answer)),
            None => Ok(()),
        }
    }
}

/// Takes a request off the record when its asker stops waiting, and cancels it at the worker.
struct CancelOnDrop<'a> {
    connection: &'a Connection,
    id: u64,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.connection.state.lock().pending.remove(&self.id).is_some() {
            let frame = encode_frame(FrameKind::Cancel, 0, &data::Cancel { request_id: self.id }, 0);
            // A connection that broke has nothing left to cancel.
            drop(self.connection.send(frame.into(), Bytes::new(), None));
        }
    }
}

async fn drive(
    connection: Arc<Connection>,
    mut reader: FrameReader,
    evicted: Option<EvictionListener>,
    stop: CancellationToken,
) {
    let cause = loop {
        let socket = &connection.socket;
        tokio::select! {
            frame = reader.next(socket, |header| connection.judge(header)) => match frame {
                Ok(frame) => if let Err(cause) = connection.deliver(frame, &mut reader, evicted.as_ref()) {
                    break cause;
                },
                Err(error) => break error.to_string(),
            },
            ready = socket.ready(Interest::WRITABLE), if connection.has_to_send() => {
                if let Err(error) = ready.and_then(|_| connection.send_left()) {
                    break error.to_string();
                }
            }
            () = connection.handed_over.notified() => if !connection.is_open() { break String::new() },
            () = stop.cancelled() => break "the client closed it".to_owned(),
        }
    };
    Connection::close(&mut connection.state.lock(), cause);
    connection.inflight.close();
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use futures::future::join_all;
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::*;
    use crate::workers::secured;

    const WAIT: Duration = Duration::from_secs(20);
    const ASKERS: u32 = 8;
    const REQUESTS: u32 = 20;

    #[derive(Clone, Copy, Debug)]
    enum Over {
        Unix,
        Tcp,
        Tls,
    }

    /// Both ends of a stream.
    async fn pair(over: Over) -> (Socket, Socket) {
        match over {
            Over::Unix => {
                let (near, far) = UnixStream::pair().unwrap();
                (Socket::Unix(near), Socket::Unix(far))
            }
            Over::Tcp => {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                (Socket::Tcp(near), Socket::Tcp(listener.accept().await.unwrap().0))
            }
            Over::Tls => {
                let (near, far) = secured::pair().await;
                (Socket::Tls(Box::new(near)), Socket::Tls(Box::new(far)))
            }
        }
    }

    /// A connection whose own task runs, and the other end.
    async fn connected(over: Over) -> (Arc<Connection>, Socket, CancellationToken) {
        let (socket, peer) = pair(over).await;
        let reader = FrameReader::new(Arc::default());
        let greeted = Greeted { socket, reader, hello: data::Hello::default() };
        let stop = CancellationToken::new();
        let (connection, own_task) = Connection::new(greeted, 1, "there".to_owned(), None, stop.clone());
        tokio::spawn(own_task);
        (connection, peer, stop)
    }

    fn payload_length(asker: u32, number: u32) -> usize {
        (asker * 30_000 + number * 7_001) as usize
    }

    /// Answers writes until the connection ends; gives the askers and the lengths of their payloads, as they came.
    async fn answer_all(socket: Socket) -> Vec<(u32, usize)> {
        let (mut reader, mut came) = (FrameReader::new(Arc::default()), Vec::new());
        while let Ok(frame) = reader.next(&socket, |_| Ok(Payload::Keep)).await {
            let request: data::WriteRequest = decode(frame.message).unwrap();
            assert!(frame.payload.iter().all(|byte| u32::from(*byte) == request.offset));
            came.push((request.offset, frame.payload.len()));
            let answer = encode_frame(FrameKind::WriteReply, frame.header.request_id, &data::WriteReply::default(), 0);
            let mut rest = &answer[..];
            while !rest.is_empty() || socket.has_unsent() {
                socket.ready(Interest::WRITABLE).await.unwrap();
                match rest {
                    [] => drop(socket.flush()),
                    _ => rest.advance(socket.try_write(&[IoSlice::new(rest)]).unwrap_or(0)),
                }
            }
        }
        came
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn what_many_askers_send_at_a_time_arrives_whole_and_in_the_order_of_each() {
        arrives_whole_and_in_order(Over::Unix).await;
        arrives_whole_and_in_order(Over::Tls).await;
    }

    async fn arrives_whole_and_in_order(over: Over) {
        let (connection, peer, stop) = connected(over).await;
        let answering = tokio::spawn(answer_all(peer));
        let ask = |asker: u32| {
            let connection = connection.clone();
            tokio::spawn(async move {
                // Polled in this order, and begun so.
                let requests = (0..REQUESTS).map(|number| {
                    let request = data::WriteRequest { offset: asker, ..data::WriteRequest::default() };
                    let payload = Bytes::from(vec![asker as u8; payload_length(asker, number)]);
                    let connection = &connection;
                    async move { connection.call(&request, payload, 0, WAIT).await.map(drop) }
                });
                join_all(requests).await.into_iter().for_each(|answered| answered.unwrap());
            })
        };
        for asking in join_all((0..ASKERS).map(ask)).await {
            asking.unwrap();
        }
        stop.cancel();
        drop(connection);
        let came = tokio::time::timeout(WAIT, answering).await.unwrap().unwrap();
        for asker in 0..ASKERS {
            let lengths: Vec<usize> = came.iter().filter(|(of, _)| *of == asker).map(|(_, length)| *length).collect();
            assert_eq!(lengths, (0..REQUESTS).map(|number| payload_length(asker, number)).collect::<Vec<_>>());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_end_of_a_connection_that_is_full_ends_all_who_wait() {
        ends_all_who_wait(Over::Unix).await;
        ends_all_who_wait(Over::Tls).await;
    }

    async fn ends_all_who_wait(over: Over) {
        let (connection, peer, _stop) = connected(over).await;
        let ask = |_| {
            let connection = connection.clone();
            let payload = Bytes::from(vec![0; 1 << 20]);
            tokio::spawn(async move {
                let request = data::WriteRequest::default();
                connection.call(&request, payload, 0, WAIT).await.map(drop)
            })
        };
        let asking: Vec<_> = (0..ASKERS).map(ask).collect();
        peer.ready(Interest::READABLE).await.unwrap();
        drop(peer);
        for asking in asking {
            let ended = tokio::time::timeout(WAIT / 2, asking).await.unwrap().unwrap();
            assert!(matches!(ended, Err(NetError::WorkerConnection { .. })), "{ended:?}");
        }
        assert!(!connection.is_open());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_on_its_way_of_a_write_that_is_not_answered_in_time_does_not_arrive() {
        let wait = Duration::from_millis(50);
        let request = data::WriteRequest::default();
        for over in [Over::Tcp, Over::Tls] {
            let (connection, peer, _stop) = connected(over).await;
            // More than the buffers of the sockets take.
            let payload = Bytes::from(vec![0; 32 << 20]);
            let ended = connection.call(&request, payload, 0, wait).await;
            assert!(matches!(ended, Err(NetError::WorkerDeadline { .. })), "{ended:?}");
            assert!(!connection.is_open());
            let end = loop {
                peer.ready(Interest::READABLE).await.unwrap();
                match peer.try_read(&mut BytesMut::with_capacity(1 << 20)) {
                    Ok(count) if count > 0 => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    end => break end.map_err(|error| error.kind()),
                }
            };
            assert_eq!(end, Err(io::ErrorKind::ConnectionReset), "{over:?}");
        }
        // A retry goes the same way, behind it.
        let (connection, _peer, _stop) = connected(Over::Unix).await;
        let ended = connection.call(&request, Bytes::new(), 0, wait).await;
        assert!(matches!(ended, Err(NetError::WorkerDeadline { .. })) && connection.is_open());
    }
}

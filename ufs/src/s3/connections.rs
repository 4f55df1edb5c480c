//! Connections for GETs of objects: whoever reads a body also drives its connection.
//!
//! The usual client has a task for each connection. A request goes to it and its answer comes back by channels, and so
//! does each piece of the body: of a small object that takes longer than all else, and each change of tasks may be one
//! of threads. Here the connection is polled by the future that waits for its answer, and by the stream of the body.
//! Nobody polls an idle connection: that it has been closed shows when it is to be used, and another one is taken.

use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::host;
use futures::future::poll_fn;
use futures::task::AtomicWaker;
use futures::{FutureExt, Stream};
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::service::Service as _;
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::{self, Handle};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::failure::Failure;
use crate::allowed::GuardedConnector;

/// A connection that finds more to do this often in a row lets others have their turn.
const POLLS_IN_A_ROW: usize = 4;

/// It connects where its guard lets it.
pub(super) type Connector = HttpsConnector<GuardedConnector>;

type Exchange = Request<Full<Bytes>>;
type Driver = http1::Connection<MaybeHttpsStream<TokioIo<TcpStream>>, Full<Bytes>>;

/// Connections to the hosts of a store. Cheap to clone; clones share the idle ones.
#[derive(Clone)]
pub(super) struct Connections(Arc<Pool>);

struct Pool {
    connector: TowerToHyperService<Connector>,
    protocol: http1::Builder,
    /// Those used last are at the end.
    idle: Mutex<Vec<Idle>>,
    idle_max: usize,
    idle_time: Duration,
    /// Closes what is idle for too long, while there is anything.
    sweep: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(sweep) = self.sweep.get_mut() {
            sweep.abort();
        }
    }
}

struct Idle {
    connection: Connection,
    since: Instant,
}

#[derive(Clone, PartialEq, Eq)]
struct Host {
    scheme: Scheme,
    authority: Authority,
}

/// A connection and what drives it.
struct Connection {
    host: Host,
    sender: SendRequest<Full<Bytes>>,
    /// `None` when it has ended.
    driver: Option<Driver>,
    wakes: Arc<Wakes>,
    waker: Waker,
    /// Which tells of its events: on another one each of them would have to wake a thread.
    runtime: runtime::Id,
}

/// A body in progress. Its connection is used again when its end was seen, and closed when it is dropped before.
pub(crate) struct DrivenBody {
    body: Incoming,
    /// `None` after the end.
    connection: Option<Connection>,
    home: Connections,
}

impl Connections {
    /// Keeps at most `idle_max` idle connections, none for longer than `idle_time`. Of a connection at most
    /// `receive_bytes` are read at a time.
    pub(super) fn new(connector: Connector, idle_max: usize, idle_time: Duration, receive_bytes: usize) -> Self {
        let mut protocol = http1::Builder::new();
        protocol.max_buf_size(receive_bytes);
        Self(Arc::new(Pool {
            connector: TowerToHyperService::new(connector),
            protocol,
            idle: Mutex::default(),
            idle_max,
            idle_time,
            sweep: Mutex::default(),
        }))
    }

    /// Sends a request that has a `Host`, to its URI. A connection that was closed while it was idle is not an error.
    pub(super) async fn send(&self, mut request: Exchange) -> Result<Response<DrivenBody>, Failure> {
        let uri = std::mem::take(request.uri_mut());
        let parts = uri.clone().into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(Failure::MalformedReply(format!("{uri} names no host")));
        };
        let host = Host { scheme, authority };
        *request.uri_mut() = parts.path_and_query.unwrap_or(PathAndQuery::from_static("/")).into();
        loop {
            let (mut connection, is_used) = match self.take_idle(&host) {
                Some(connection) => (connection, true),
                None => (self.connect(host.clone(), uri.clone()).await?, false),
            };
            match connection.exchange(request).await {
                Ok(response) => {
                    let home = self.clone();
                    return Ok(response.map(|body| DrivenBody { body, connection: Some(connection), home }));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_used => request = unsent,
                    _ => return Err(Failure::broken("the connection broke", error.into_error())),
                },
            }
        }
    }

    async fn connect(&self, host: Host, uri: Uri) -> Result<Connection, Failure> {
        let connected = self.0.connector.call(uri).await;
        let stream = connected.map_err(|error| Failure::Broken { doing: "cannot connect", source: error.into() })?;
        let made = self.0.protocol.handshake(stream).await;
        let (sender, driver) = made.map_err(|error| Failure::broken("the connection broke", error))?;
        let wakes = Arc::new(Wakes::default());
        let waker = wakes.clone().into();
        let runtime = Handle::current().id();
        Ok(Connection { host, sender, driver: Some(driver), wakes, waker, runtime })
    }

    fn take_idle(&self, host: &Host) -> Option<Connection> {
        let (now, runtime) = (Instant::now(), Handle::current().id());
        loop {
            let Idle { mut connection, since } = {
                let mut idle = self.0.idle.lock();
                let of_host = |idle: &Idle| idle.connection.host == *host;
                let at_hand = idle.iter().rposition(|idle| of_host(idle) && idle.connection.runtime == runtime);
                let found = at_hand.or_else(|| idle.iter().rposition(of_host))?;
                idle.remove(found)
            };
            if now.duration_since(since) < self.0.idle_time && connection.is_usable() {
                return Some(connection);
            }
        }
    }

    fn give_back(&self, mut connection: Connection) {
        if !connection.is_usable() {
            return;
        }
        let mut idle = self.0.idle.lock();
        if idle.len() < self.0.idle_max {
            idle.push(Idle { connection, since: Instant::now() });
        }
        drop(idle);
        let mut sweeping = self.0.sweep.lock();
        if sweeping.as_ref().is_none_or(JoinHandle::is_finished) {
            *sweeping = Some(host::spawn(sweep(Arc::downgrade(&self.0), self.0.idle_time)));
        }
    }
}

/// Closes what is idle for too long, until there is nothing.
async fn sweep(pool: Weak<Pool>, idle_time: Duration) {
    let pause = idle_time / 4;
    loop {
        tokio::time::sleep(pause).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.idle.lock();
        let now = Instant::now();
        // Before the next time they would be too old.
        let old: Vec<Idle> = idle.extract_if(.., |idle| now.duration_since(idle.since) + pause > idle_time).collect();
        let is_empty = idle.is_empty();
        drop(idle);
        drop(old);
        if is_empty {
            return;
        }
    }
}

impl Connection {
    async fn exchange(&mut self, request: Exchange) -> Result<Response<Incoming>, TrySendError<Exchange>> {
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let (driver, wakes, waker) = (&mut self.driver, &self.wakes, &self.waker);
        poll_fn(|cx| drive(driver, wakes, waker, cx, |cx| answer.as_mut().poll(cx))).await
    }

    /// Looks whether it is open and waits for a request.
    fn is_usable(&mut self) -> bool {
        let Self { sender, driver, wakes, waker, .. } = self;
        let ready = poll_fn(|cx| drive(driver, wakes, waker, cx, |cx| sender.poll_ready(cx)));
        matches!(ready.now_or_never(), Some(Ok(())))
    }
}

/// Polls a connection and then what waits for something to come out of it.
fn drive<T>(
    driver: &mut Option<Driver>,
    wakes: &Wakes,
    waker: &Waker,
    outer: &mut Context<'_>,
    mut outcome: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Poll<T> {
    wakes.outer.register(outer.waker());
    let mut inner = Context::from_waker(waker);
    for _ in 0..POLLS_IN_A_ROW {
        wakes.state.store(Wakes::POLLING, Ordering::SeqCst);
        if let Some(open) = driver
            && Pin::new(open).poll(&mut inner).is_ready()
        {
            // What it has still got of a request comes back when it is dropped.
            *driver = None;
        }
        if let Poll::Ready(outcome) = outcome(&mut inner) {
            return Poll::Ready(outcome);
        }
        let asleep =
            wakes.state.compare_exchange(Wakes::POLLING, Wakes::ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if asleep {
            return Poll::Pending;
        }
    }
    outer.waker().wake_by_ref();
    Poll::Pending
}

/// The connection and the one who drives it wake each other while they are polled. Only what happens later wakes the
/// task: a task that wakes itself is run once more, for nothing.
#[derive(Default)]
struct Wakes {
    state: AtomicU8,
    outer: AtomicWaker,
}

impl Wakes {
    const ASLEEP: u8 = 0;
    const POLLING: u8 = 1;
    const WOKEN: u8 = 2;
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(Self::WOKEN, Ordering::SeqCst) == Self::ASLEEP {
            self.outer.wake();
        }
    }
}

impl Stream for DrivenBody {
    type Item = Result<Bytes, hyper::Error>;

    /// No piece is empty.
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { body, connection, home } = &mut *self;
        let Some(Connection { driver, wakes, waker, .. }) = connection else { return Poll::Ready(None) };
        loop {
            let frame = drive(driver, wakes, waker, cx, |cx| Pin::new(&mut *body).poll_frame(cx));
            match std::task::ready!(frame) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) if !bytes.is_empty() => return Poll::Ready(Some(Ok(bytes))),
                    // Trailers say nothing that is wanted.
                    _ => {}
                },
                Some(Err(error)) => {
                    *connection = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    if let Some(connection) = connection.take() {
                        home.give_back(connection);
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }
}

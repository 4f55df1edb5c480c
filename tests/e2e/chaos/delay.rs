//! A proxy before a port of a host, which has everything arrive later.

use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cavern_tests::Namespace;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Pieces of a stream that are on their way, at most.
const ON_THE_WAY: usize = 1024;
const PIECE_BYTES: usize = 64 << 10;

/// Runs until it is dropped, and its connections with it.
pub struct Delay {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Delay {
    /// Takes connections at `port` on a host, and leads them to `to` on the same host; `by` each way.
    pub fn start(host: Namespace, port: u16, to: u16, by: Duration) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (ready, listens) = mpsc::sync_channel(1);
        let thread = thread::spawn(move || {
            host.enter();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind(("0.0.0.0", port)).await.unwrap();
                ready.send(()).unwrap();
                let mut connections = JoinSet::new();
                let accept = async {
                    while let Ok((from, _)) = listener.accept().await {
                        connections.spawn(lead(from, to, by));
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
            });
        });
        listens.recv().expect("the proxy listens");
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        let _ended = self.stop.take().map(|stop| stop.send(()));
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// A connection that breaks is closed on both sides.
async fn lead(from: TcpStream, to: u16, by: Duration) -> io::Result<()> {
    let there = TcpStream::connect(("127.0.0.1", to)).await?;
    from.set_nodelay(true)?;
    there.set_nodelay(true)?;
    let ((from_read, from_write), (there_read, there_write)) = (from.into_split(), there.into_split());
    tokio::select! {
        result = delayed(from_read, there_write, by) => result,
        result = delayed(there_read, from_write, by) => result,
    }
}

async fn delayed(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, by: Duration) -> io::Result<()> {
    let (pieces, mut arriving) = tokio::sync::mpsc::channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    let read = async {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let length = from.read(&mut piece).await?;
            piece.truncate(length);
            if length == 0 || pieces.send((Instant::now() + by, piece)).await.is_err() {
                return Ok(());
            }
        }
    };
    let write = async {
        while let Some((at, piece)) = arriving.recv().await {
            sleep_until(at).await;
            to.write_all(&piece).await?;
        }
        Ok(())
    };
    tokio::select! {
        result = read => result,
        result = write => result,
    }
}

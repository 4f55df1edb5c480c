//! How GETs share connections.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cavern_ufs::Ufs;
use futures::StreamExt;
use support::{conf, options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

const BODY_BYTES: u64 = 300_000;

/// A server of one object that keeps its connections open until it is told to close them.
struct Server {
    url: String,
    connections: Arc<AtomicUsize>,
    /// Of these, those that are not closed.
    open: watch::Receiver<usize>,
    close: Arc<Notify>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (connections, close) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let (accepted, order) = (connections.clone(), close.clone());
        let (now_open, open) = watch::channel(0);
        let now_open = Arc::new(now_open);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                accepted.fetch_add(1, Ordering::SeqCst);
                now_open.send_modify(|open| *open += 1);
                let (order, now_open) = (order.clone(), now_open.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = serve(socket) => {}
                        () = order.notified() => {}
                    }
                    now_open.send_modify(|open| *open -= 1);
                });
            }
        });
        Self { url, connections, open, close }
    }

    fn ufs(&self) -> Ufs {
        let options = options(&[("s3.endpoint_url", &self.url), ("s3.anonymous", "true")]);
        Ufs::open("s3://data", &options, &conf()).unwrap()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

async fn serve(mut socket: TcpStream) -> std::io::Result<()> {
    let body: Vec<u8> = content();
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await?);
        }
        let range = format!("bytes 0-{}/{BODY_BYTES}", BODY_BYTES - 1);
        let answer =
            format!("HTTP/1.1 206 Partial Content\r\ncontent-length: {BODY_BYTES}\r\ncontent-range: {range}\r\n\r\n");
        socket.write_all(answer.as_bytes()).await?;
        socket.write_all(&body).await?;
    }
}

fn content() -> Vec<u8> {
    (0..BODY_BYTES).map(|at| (at % 251) as u8).collect()
}

#[tokio::test]
async fn a_connection_is_used_again_when_its_body_was_read() {
    let server = Server::start().await;
    let ufs = server.ufs();
    for _ in 0..5 {
        assert!(ufs.get_bytes("a", "", 0..BODY_BYTES).await.unwrap() == content());
    }
    assert_eq!(server.connections(), 1);
    let gets = (0..4).map(|_| ufs.get_bytes("a", "", 0..BODY_BYTES));
    assert!(futures::future::try_join_all(gets).await.unwrap().iter().all(|bytes| *bytes == content()));
    assert_eq!(server.connections(), 4);
}

#[tokio::test]
async fn a_connection_that_was_closed_while_it_was_idle_is_no_failure() {
    let server = Server::start().await;
    let ufs = server.ufs();
    for number in 1..5 {
        assert!(ufs.get_bytes("a", "", 0..BODY_BYTES).await.unwrap() == content());
        assert_eq!(server.connections(), number);
        server.close.notify_waiters();
        server.open.clone().wait_for(|open| *open == 0).await.unwrap();
    }
    assert_eq!(ufs.stats().retries, 0);
}

#[tokio::test]
async fn what_is_left_of_a_body_is_never_taken_for_another() {
    let server = Server::start().await;
    let ufs = server.ufs();
    for number in 1..5 {
        let mut body = ufs.get("a", "", 0..BODY_BYTES).await.unwrap();
        assert!(body.next().await.unwrap().unwrap().starts_with(&content()[..10]));
        drop(body);
        assert!(ufs.get_bytes("a", "", 0..BODY_BYTES).await.unwrap() == content());
        // The first of the two was closed with its body.
        assert_eq!(server.connections(), number + 1);
    }
}

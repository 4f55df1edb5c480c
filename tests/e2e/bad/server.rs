//! Servers that are not what they should be: silent, babbling, or an object store that lies.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A TCP server with a thread for each connection; gone when dropped.
pub struct Server {
    pub address: String,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (stopping, serve) = (Arc::new(AtomicBool::new(false)), Arc::new(serve));
        let stop = stopping.clone();
        let thread = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let serve = serve.clone();
                thread::spawn(move || serve(stream));
            }
        });
        Self { address, stopping, thread: Some(thread) }
    }

    /// Accepts, reads, and never answers.
    pub fn silent() -> Self {
        Self::start(|mut stream| while stream.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {})
    }

    /// Answers everything with the same bytes and closes.
    pub fn saying(bytes: &'static [u8]) -> Self {
        Self::start(|mut stream| {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(bytes);
        })
    }

    /// HTTP: `answer` is given the request's head, and gives status line, headers and body. One exchange per
    /// connection.
    pub fn http(answer: impl Fn(&str) -> (String, Vec<u8>) + Send + Sync + 'static) -> Self {
        Self::start(move |mut stream| {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read(&mut byte) {
                    Ok(1) if head.len() < 64 << 10 => head.push(byte[0]),
                    _ => return,
                }
            }
            let (head, body) = answer(&String::from_utf8_lossy(&head));
            let head = format!("{}connection: close\r\n\r\n", head.replace('\n', "\r\n"));
            // A client that has gone is its own affair.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the thread from its accept.
        let _ = TcpStream::connect(&self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

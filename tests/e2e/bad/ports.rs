//! Bytes that are no protocol, on every port of every process, beside a reader that goes on.
//!
//! On each of the seven ports (master gRPC and HTTP, worker data, Unix socket and HTTP, FUSE client HTTP, object
//! store): nothing at all, one byte, random bytes of four lengths, 0xff, zeroes, an HTTP/2 preface followed by junk, an
//! HTTP/2 frame of 16 MB, a data-plane header of 4 GB, half a data-plane header, an HTTP/1 header of a megabyte, a body
//! of 2^63 bytes, a chunk of 2^64 bytes, a path out of the root. Then many connections that say nothing, or a byte:
//! afterwards each port answers again, and no process has used much memory.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{Child, Cluster, Options, Process, Status, eventually, http_get};
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

use super::CONF;

/// What garbage may cost a process in memory.
const MEMORY: u64 = 192 << 20;
const IDLE_CONNECTIONS: usize = 400;

/// A place to connect to.
#[derive(Clone, Debug)]
pub enum Port {
    Tcp(String),
    Unix(PathBuf),
}

pub trait Stream: Read + Write + Send {
    fn end(&self);
}

impl Stream for TcpStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

impl Stream for UnixStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

impl Port {
    pub fn connect(&self, patience: Duration) -> Box<dyn Stream> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address.trim_start_matches("http://")).unwrap();
                stream.set_read_timeout(Some(patience)).unwrap();
                stream.set_write_timeout(Some(patience)).unwrap();
                Box::new(stream)
            }
            Self::Unix(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(Some(patience)).unwrap();
                stream.set_write_timeout(Some(patience)).unwrap();
                Box::new(stream)
            }
        }
    }
}

/// Every port of a cluster.
pub fn ports(cluster: &Cluster) -> Vec<Port> {
    let status = &cluster.at_start;
    let tcp = |address: &String| Port::Tcp(address.clone());
    vec![
        tcp(&status.masters[0].grpc),
        tcp(&status.masters[0].http),
        tcp(&status.workers[0].data),
        Port::Unix(status.workers[0].socket.clone()),
        tcp(&status.workers[0].http),
        tcp(&status.fuse[0].http),
        tcp(&cluster.s3.endpoint),
    ]
}

/// A thread that reads a tree again and again, every time through the FUSE client, until it is stopped.
pub struct Reader {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Reader {
    pub fn start(cluster: &Cluster, below: &str, tree: &BTreeMap<String, Bytes>) -> Self {
        let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let tree: Vec<_> = tree.iter().map(|(key, content)| (cluster.path(below).join(key), content.clone())).collect();
        let (stopped, counter) = (stop.clone(), reads.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (path, content) in &tree {
                    let read = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                    assert!(read == *content, "{}: {} bytes, wrong content", path.display(), read.len());
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { stop, reads, thread }
    }

    /// Ends it; panics unless it has read, and everything it read was right.
    #[track_caller]
    pub fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        assert!(self.reads.load(Ordering::Relaxed) > 0, "nothing was read");
    }
}

fn children(status: &Status) -> Vec<&Child> {
    status.masters.iter().chain(&status.workers).chain(&status.fuse).chain([&status.s3.child]).collect()
}

/// Looks at all processes before and after.
pub struct Watched {
    before: Status,
    memory: Vec<u64>,
}

impl Watched {
    pub fn start(cluster: &Cluster) -> Self {
        let before = cluster.status();
        let memory = children(&before)
            .iter()
            .map(|child| {
                let process = Process::of(child);
                process.reset_peak();
                process.memory()
            })
            .collect();
        Self { before, memory }
    }

    /// Panics unless the same processes run, none has grown much, and none says that anything panicked.
    #[track_caller]
    pub fn finish(self, cluster: &Cluster) {
        let after = cluster.status();
        for ((one, other), memory) in children(&self.before).into_iter().zip(children(&after)).zip(self.memory) {
            assert_eq!((&one.pid, &*other.state), (&other.pid, "running"), "{}", cluster.logs());
            let peak = Process::of(other).peak_memory();
            assert!(peak < memory + MEMORY, "{}: from {memory} to {peak} bytes", other.log.display());
            let log = std::fs::read_to_string(&other.log).unwrap();
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

fn garbage() -> Vec<Vec<u8>> {
    let mut random = StdRng::seed_from_u64(1);
    let mut all: Vec<Vec<u8>> = [0, 1, 24, 4096, 300_000, 2 << 20]
        .into_iter()
        .map(|length| {
            let mut bytes = vec![0; length];
            random.fill_bytes(&mut bytes);
            bytes
        })
        .collect();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    all.extend([
        vec![0xff; 10_000],
        vec![0; 10_000],
        [&preface[..], &all[3]].concat(),
        // SETTINGS, then HEADERS of 16 MB.
        [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0xff, 0xff, 0xff, 1, 4, 0, 0, 0, 1], &[0x82; 5000]].concat(),
        // A header of the data plane: 4 GB of message, 4 GB of payload.
        [&b"CVD1\x01\0\0\0"[..], &[0; 8], &[0xff; 8]].concat(),
        b"CVD1\x01\0\0\0\0".to_vec(),
        [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 1 << 20]].concat(),
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9223372036854775807\r\n\r\n".to_vec(),
        b"PUT /bucket/k HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n".to_vec(),
        b"GET /../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
    ]);
    all
}

fn start() -> (Cluster, BTreeMap<String, Bytes>) {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 20, 30_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    (cluster, tree)
}

#[test]
fn garbage_on_any_port_ends_one_connection_and_nothing_else() {
    let (cluster, tree) = start();
    let (watched, reader) = (Watched::start(&cluster), Reader::start(&cluster, "data", &tree));
    let (ports, garbage) = (ports(&cluster), garbage());
    for port in &ports {
        for bytes in &garbage {
            let mut stream = port.connect(Duration::from_millis(300));
            // The other side may well hang up in the middle.
            let _ = stream.write_all(bytes);
            stream.end();
            let mut said = Vec::new();
            let _ = stream.take(1 << 16).read_to_end(&mut said);
            let said = String::from_utf8_lossy(&said);
            assert!(!said.contains("root:x:"), "{port:?} gave a file of the host away");
        }
    }
    reader.finish();
    watched.finish(&cluster);
    assert_eq!(ports.len() * garbage.len(), 112);
}

#[test]
fn peers_that_say_nothing_keep_nobody_out() {
    let (cluster, tree) = start();
    let mut silent = Vec::new();
    for port in ports(&cluster) {
        for number in 0..IDLE_CONNECTIONS {
            let mut stream = port.connect(Duration::from_secs(1));
            if number % 2 == 0 {
                // One byte of each protocol's first word.
                let _ = stream.write_all(if number % 4 == 0 { b"C" } else { b"P" });
            }
            silent.push(stream);
        }
    }
    // While they are there: a new client, the command line, and each health check.
    cluster.stop("fuse");
    cluster.start("fuse");
    let (watched, reader) = (Watched::start(&cluster), Reader::start(&cluster, "data", &tree));
    assert_eq!(cluster.cv(&["mount", "--json"]).json().as_array().map(Vec::len), Some(1));
    let status = cluster.status();
    for child in [&status.masters[0], &status.workers[0], &status.fuse[0]] {
        eventually("the health check answers", Duration::from_secs(20), || {
            http_get(&format!("http://{}/healthz", child.http)).ok().filter(|answer| answer.status == 200)
        });
    }
    // The master and the worker get rid of them by themselves.
    for child in [&status.masters[0], &status.workers[0]] {
        eventually("silent connections are closed", Duration::from_secs(25), || {
            let sockets = Process::of(child).descriptors();
            let sockets = sockets.iter().filter(|path| path.to_string_lossy().starts_with("socket:")).count();
            (sockets < IDLE_CONNECTIONS).then_some(())
        });
    }
    drop(silent);
    reader.finish();
    watched.finish(&cluster);
}

//! Framed TCP without a file system, a cache or checksums: what the benchmarks of reads over the network take for the
//! ceiling. The server answers requests for ranges of the files of a directory, by `sendfile` where they are long.

#![allow(clippy::print_stdout, reason = "what this program finds goes to stdout")]

use std::error::Error;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rustix::net::SendFlags;

type Failure = Box<dyn Error + Send + Sync>;

/// Of a frame, before its payload; as long as that of the data plane.
const HEADER_BYTES: usize = 24;
/// From this length on a payload is sent without being copied.
const SENDFILE_BYTES: usize = 16 << 10;

#[derive(Parser)]
#[command(about = "Sends files over framed TCP, and reads them: the ceiling of reads over the network")]
struct Options {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Serves the files below a directory until it is killed.
    Serve {
        #[arg(long)]
        listen: String,
        directory: PathBuf,
    },
    /// Reads, throws the bytes away and prints the rates as JSON.
    Read {
        #[arg(long)]
        connect: String,
        #[arg(long)]
        order: Order,
        /// Connections, each with a thread of its own.
        #[arg(long, default_value_t = 1)]
        threads: usize,
        /// Bytes of a request; of `files` all of the file.
        #[arg(long, default_value_t = 1 << 20)]
        length: u32,
        /// Requests in flight on each connection.
        #[arg(long, default_value_t = 1)]
        depth: usize,
        /// How long `random` goes on.
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    /// Each thread reads one of the longest files from its beginning to its end.
    Stream,
    /// Each thread reads anywhere in the longest file.
    Random,
    /// All files, shuffled and shared out.
    Files,
}

/// What is asked for.
#[derive(Clone, Copy)]
struct Request {
    file: u32,
    offset: u64,
    length: u32,
}

impl Request {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.file.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.offset.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let mut file = [0; 4];
        let mut offset = [0; 8];
        let mut length = [0; 4];
        file.copy_from_slice(&bytes[..4]);
        offset.copy_from_slice(&bytes[4..12]);
        length.copy_from_slice(&bytes[12..16]);
        Self { file: u32::from_le_bytes(file), offset: u64::from_le_bytes(offset), length: u32::from_le_bytes(length) }
    }
}

fn main() -> Result<(), Failure> {
    match Options::parse().role {
        Role::Serve { listen, directory } => serve(&listen, &directory),
        Role::Read { connect, order, threads, length, depth, seconds } => {
            let sizes = sizes(&mut connected(&connect)?)?;
            let plans = plans(&sizes, order, threads, length);
            let until = (order == Order::Random).then(|| Duration::from_secs_f64(seconds));
            let began = Instant::now();
            let (mut replies, mut bytes) = (0u64, 0u64);
            let parts = std::thread::scope(|scope| {
                let readers: Vec<_> =
                    plans.into_iter().map(|plan| scope.spawn(|| read(&connect, plan, depth, until))).collect();
                readers.into_iter().map(|reader| reader.join().map_err(|_| "a reader panicked")?).collect::<Vec<_>>()
            });
            for part in parts {
                let (part_replies, part_bytes) = part?;
                (replies, bytes) = (replies + part_replies, bytes + part_bytes);
            }
            let seconds = began.elapsed().as_secs_f64();
            let (replies, bytes) = (replies as f64 / seconds, bytes as f64 / seconds);
            println!("{}", serde_json::json!({ "replies_per_second": replies, "bytes_per_second": bytes }));
            Ok(())
        }
    }
}

/// All files below a directory, in the order of their paths.
fn files_below(directory: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in directory.read_dir()? {
        let path = entry?.path();
        if path.is_dir() { files_below(&path, found)? } else { found.push(path) }
    }
    Ok(())
}

fn serve(listen: &str, directory: &Path) -> Result<(), Failure> {
    let mut paths = Vec::new();
    files_below(directory, &mut paths)?;
    paths.sort();
    let files = paths.iter().map(|path| {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Ok((file, length))
    });
    let files: Arc<Vec<(File, u64)>> = Arc::new(files.collect::<io::Result<_>>()?);
    let listener = TcpListener::bind(listen)?;
    println!("listening");
    loop {
        let (stream, _) = listener.accept()?;
        let files = files.clone();
        // Ends with its client.
        std::thread::spawn(move || answer(stream, &files));
    }
}

fn answer(mut stream: TcpStream, files: &[(File, u64)]) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut sizes = (files.len() as u64).to_le_bytes().to_vec();
    sizes.extend(files.iter().flat_map(|(_, length)| length.to_le_bytes()));
    stream.write_all(&sizes)?;
    let mut request = [0; HEADER_BYTES];
    let mut frame = vec![0; HEADER_BYTES + SENDFILE_BYTES];
    loop {
        stream.read_exact(&mut request)?;
        let Request { file, offset, length } = Request::decode(&request);
        let Some((file, _)) = files.get(file as usize) else { return Err(io::ErrorKind::NotFound.into()) };
        let length = length as usize;
        if length < SENDFILE_BYTES {
            frame[..HEADER_BYTES].copy_from_slice(&request);
            file.read_exact_at(&mut frame[HEADER_BYTES..HEADER_BYTES + length], offset)?;
            stream.write_all(&frame[..HEADER_BYTES + length])?;
            continue;
        }
        rustix::net::send(&stream, &request, SendFlags::MORE | SendFlags::NOSIGNAL)?;
        let (mut at, end) = (offset, offset + length as u64);
        while at < end {
            let left = (end - at) as usize;
            if rustix::fs::sendfile(&stream, file, Some(&mut at), left)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn connected(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The lengths of the server's files, which it names first.
fn sizes(stream: &mut TcpStream) -> io::Result<Vec<u64>> {
    let mut number = [0; 8];
    stream.read_exact(&mut number)?;
    let mut size = || {
        let mut size = [0; 8];
        stream.read_exact(&mut size)?;
        Ok(u64::from_le_bytes(size))
    };
    (0..u64::from_le_bytes(number)).map(|_| size()).collect()
}

/// What each thread asks for, in this order and again from the beginning.
fn plans(sizes: &[u64], order: Order, threads: usize, length: u32) -> Vec<Vec<Request>> {
    let mut files: Vec<u32> = (0..sizes.len() as u32).collect();
    let size = |file: u32| sizes[file as usize];
    match order {
        Order::Stream => {
            files.sort_by_key(|file| std::cmp::Reverse(size(*file)));
            let pieces = |file: u32| {
                let step = u64::from(length);
                let piece = move |number: u64| {
                    let offset = number * step;
                    Request { file, offset, length: step.min(size(file) - offset) as u32 }
                };
                (0..size(file).div_ceil(step)).map(piece).collect()
            };
            files.into_iter().take(threads).map(pieces).collect()
        }
        Order::Random => {
            let Some(file) = files.into_iter().max_by_key(|file| size(*file)) else { return Vec::new() };
            let blocks = size(file) / u64::from(length);
            let reads = |thread: usize| {
                let mut random = StdRng::seed_from_u64(thread as u64);
                let offset = move |_| random.random_range(0..blocks) * u64::from(length);
                (0..1 << 16).map(offset).map(|offset| Request { file, offset, length }).collect()
            };
            (0..threads).map(reads).collect()
        }
        Order::Files => {
            files.shuffle(&mut StdRng::seed_from_u64(42));
            let whole = |file: &u32| Request { file: *file, offset: 0, length: size(*file) as u32 };
            let share = files.len().div_ceil(threads).max(1);
            files.chunks(share).map(|files| files.iter().map(whole).collect()).collect()
        }
    }
}

/// Replies and bytes of one connection: once through the plan, or for so long.
fn read(address: &str, plan: Vec<Request>, depth: usize, until: Option<Duration>) -> Result<(u64, u64), Failure> {
    let mut stream = connected(address)?;
    sizes(&mut stream)?;
    let longest = plan.iter().map(|request| request.length as usize).max().unwrap_or(0);
    let mut buffer = vec![0; HEADER_BYTES + longest];
    let (mut replies, mut bytes, began) = (0u64, 0u64, Instant::now());
    let mut requests: Box<dyn Iterator<Item = &Request>> =
        if until.is_some() { Box::new(plan.iter().cycle()) } else { Box::new(plan.iter()) };
    let mut in_flight = std::collections::VecDeque::new();
    loop {
        while in_flight.len() < depth
            && until.is_none_or(|until| began.elapsed() < until)
            && let Some(request) = requests.next()
        {
            stream.write_all(&request.encode())?;
            in_flight.push_back(request.length as usize);
        }
        let Some(length) = in_flight.pop_front() else { return Ok((replies, bytes)) };
        stream.read_exact(&mut buffer[..HEADER_BYTES + length])?;
        (replies, bytes) = (replies + 1, bytes + length as u64);
    }
}

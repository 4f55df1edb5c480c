//! How fast the data plane answers, over real sockets. Not run with the tests:
//! `cargo test --release -p cavern-worker --lib bench -- --ignored --nocapture --test-threads 1`

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use cavern_proto::data::{BlockRef, Hello, OpenRequest, ReadRequest, open_request, read_request};
use cavern_proto::frame::{FrameHeader, HEADER_BYTES, PROTOCOL_VERSION};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tokio::time::Instant;

use super::tests::{Fixture, noise};
use super::*;

const MIB: u64 = 1 << 20;
const RUN: Duration = Duration::from_secs(3);

fn block_on_workers<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(future)
}

fn hello() -> Vec<u8> {
    encode_frame(FrameKind::Hello, 0, &Hello { protocol: PROTOCOL_VERSION, ..Default::default() }, 0)
}

fn read_frame(block: &BlockRef, length: u32) -> Vec<u8> {
    let range = Some(cavern_proto::data::Range { offset: 0, length });
    let item = read_request::Item { block: Some(block.clone()), range, part: None };
    encode_frame(FrameKind::Read, 1, &ReadRequest { items: vec![item], deadline_ms: 5000 }, 0)
}

/// Replies and bytes per second of `connections` clients with `depth` requests in flight each.
fn read_rate(address: SocketAddr, frames: &[Vec<u8>], connections: usize, depth: usize) -> (f64, f64) {
    let client = |offset: usize| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(&hello()).unwrap();
        let mut buffer = vec![0; 2 << 20];
        let mut reply = |stream: &mut std::net::TcpStream| {
            let mut head = [0; HEADER_BYTES];
            stream.read_exact(&mut head).unwrap();
            let header = FrameHeader::decode(&head).unwrap();
            let rest = (header.message_bytes + header.payload_bytes) as usize;
            stream.read_exact(&mut buffer[..rest]).unwrap();
            rest
        };
        reply(&mut stream);
        let (mut next, mut replies, mut bytes) = (offset, 0u64, 0u64);
        for _ in 0..depth {
            stream.write_all(&frames[next % frames.len()]).unwrap();
            next += 1;
        }
        let started = Instant::now();
        while started.elapsed() < RUN {
            bytes += reply(&mut stream) as u64;
            replies += 1;
            stream.write_all(&frames[next % frames.len()]).unwrap();
            next += 1;
        }
        (replies as f64 / RUN.as_secs_f64(), bytes as f64 / RUN.as_secs_f64())
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..connections).map(|position| scope.spawn(move || client(position * 97))).collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    })
}

#[test]
#[ignore = "a measurement"]
fn bench_reads() {
    block_on_workers(async {
        let bench = Fixture::new("bench-reads").await;
        let small: Vec<BlockRef> =
            (0..1000).map(|value| bench.put(&format!("s{value}"), &noise(50_000), 64 * MIB)).collect();
        let large: Vec<BlockRef> =
            (0..8).map(|value| bench.put(&format!("l{value}"), &noise(1 << 20), 64 * MIB)).collect();
        let mut warm = bench.tcp().await;
        for block in small.iter().chain(&large) {
            warm.read(vec![(block.clone(), 0, u32::MAX)]).await;
        }
        let address = bench.address();
        let small: Vec<Vec<u8>> = small.iter().map(|block| read_frame(block, 50_000)).collect();
        let large: Vec<Vec<u8>> = large.iter().map(|block| read_frame(block, 1 << 20)).collect();
        tokio::task::spawn_blocking(move || {
            for (connections, depth) in [(1, 1), (1, 32), (4, 8), (32, 1)] {
                let (replies, bytes) = read_rate(address, &small, connections, depth);
                println!("50 KB reads, {connections} connections x {depth}: {replies:.0}/s, {:.2} GB/s", bytes / 1e9);
            }
            for (connections, depth) in [(1, 1), (1, 4), (4, 4)] {
                let (replies, bytes) = read_rate(address, &large, connections, depth);
                println!("1 MiB reads, {connections} connections x {depth}: {replies:.0}/s, {:.2} GB/s", bytes / 1e9);
            }
        })
        .await
        .unwrap();
        bench.end().await;
    });
}

#[test]
#[ignore = "a measurement"]
fn bench_cold_reads() {
    block_on_workers(async {
        let bench = Fixture::new("bench-cold").await;
        let bytes = noise(50_000);
        let frames: Vec<Vec<u8>> =
            (0..4000).map(|value| read_frame(&bench.put(&format!("c{value}"), &bytes, 64 * MIB), 50_000)).collect();
        let address = bench.address();
        let seconds = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            std::thread::scope(|scope| {
                for frames in frames.chunks(frames.len() / 32) {
                    scope.spawn(move || {
                        let mut stream = std::net::TcpStream::connect(address).unwrap();
                        stream.write_all(&hello()).unwrap();
                        let mut buffer = vec![0; 1 << 20];
                        for frame in std::iter::once(None).chain(frames.iter().map(Some)) {
                            if let Some(frame) = frame {
                                stream.write_all(frame).unwrap();
                            }
                            let mut head = [0; HEADER_BYTES];
                            stream.read_exact(&mut head).unwrap();
                            let header = FrameHeader::decode(&head).unwrap();
                            stream
                                .read_exact(&mut buffer[..(header.message_bytes + header.payload_bytes) as usize])
                                .unwrap();
                        }
                    });
                }
            });
            started.elapsed().as_secs_f64()
        })
        .await
        .unwrap();
        println!("50 KB cold reads from a bucket in memory, 32 connections: {:.0}/s", 4000.0 / seconds);
        bench.end().await;
    });
}

/// Opens per second of one client with `batch` blocks per request.
fn open_rate(socket: &Path, blocks: &[BlockRef], batch: usize) -> f64 {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(&hello()).unwrap();
    let mut bytes = vec![0; 65_536];
    let mut receive = |stream: &UnixStream, frames: usize| {
        let (mut gathered, mut seen, mut descriptors) = (Vec::new(), 0, Vec::<OwnedFd>::new());
        while seen < frames {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut bytes)];
            let received = rustix::net::recvmsg(stream, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    descriptors.extend(received);
                }
            }
            gathered.extend_from_slice(&bytes[..received.bytes]);
            while let Some(head) = gathered.first_chunk::<HEADER_BYTES>() {
                let total = HEADER_BYTES + FrameHeader::decode(head).unwrap().message_bytes as usize;
                if gathered.len() < total {
                    break;
                }
                gathered.drain(..total);
                seen += 1;
            }
        }
        descriptors.len()
    };
    receive(&stream, 1);
    let frames: Vec<Vec<u8>> = blocks
        .chunks(batch)
        .map(|blocks| {
            let item = |block: &BlockRef| open_request::Item { block: Some(block.clone()), want: vec![] };
            let items = blocks.iter().map(item).collect();
            encode_frame(FrameKind::Open, 1, &OpenRequest { items, deadline_ms: 5000 }, 0)
        })
        .collect();
    let (mut opened, started) = (0, Instant::now());
    for frame in frames.iter().cycle() {
        stream.write_all(frame).unwrap();
        opened += receive(&stream, 1);
        if started.elapsed() > RUN {
            break;
        }
    }
    opened as f64 / started.elapsed().as_secs_f64()
}

#[test]
#[ignore = "a measurement"]
fn bench_opens() {
    block_on_workers(async {
        let bench = Fixture::new("bench-opens").await;
        let blocks: Vec<BlockRef> =
            (0..1000).map(|value| bench.put(&format!("s{value}"), &noise(50_000), 64 * MIB)).collect();
        let mut warm = bench.unix().await;
        for blocks in blocks.chunks(100) {
            warm.open(blocks.to_vec()).await;
        }
        let socket = bench.socket().to_owned();
        tokio::task::spawn_blocking(move || {
            for batch in [1, 16, 200] {
                println!("opens, one connection, {batch} a request: {:.0}/s", open_rate(&socket, &blocks, batch));
            }
            let both = std::thread::scope(|scope| {
                let clients: Vec<_> = (0..8).map(|_| scope.spawn(|| open_rate(&socket, &blocks, 1))).collect();
                clients.into_iter().map(|client| client.join().unwrap()).sum::<f64>()
            });
            println!("opens, eight connections, 1 a request: {both:.0}/s");
        })
        .await
        .unwrap();
        bench.end().await;
    });
}

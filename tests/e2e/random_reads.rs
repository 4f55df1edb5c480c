//! What a cold read fetches from the bucket: no more than it needs when reads jump about, in few large requests when
//! they run through.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt;

use cavern_tests::{COUNTED, Cluster, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const OBJECT: u64 = 1 << 30;
const READ: u64 = 128 << 10;
const READS: u64 = 200;

fn cluster_with_object() -> Cluster {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put_sparse("bucket", "large.bin", OBJECT);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster
}

#[test]
fn random_reads_of_a_cold_object_fetch_little_more_than_they_read() {
    let cluster = cluster_with_object();
    let file = File::open(cluster.path("data/large.bin")).unwrap();
    cluster.s3.reset_stats();
    let mut random = StdRng::seed_from_u64(42);
    let mut buffer = vec![1; READ as usize];
    for _ in 0..READS {
        let offset = random.random_range(0..OBJECT / READ) * READ;
        file.read_exact_at(&mut buffer, offset).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 0), "a hole reads as zeros");
        buffer.fill(1);
    }
    drop(file);
    let (fetched, read) = (cluster.s3.bytes_out(), READS * READ);
    let amplification = fetched as f64 / read as f64;
    eprintln!("{READS} random reads of {READ} bytes fetched {amplification:.3} of what they read");
    // A few reads hit the same chunk as an earlier one.
    assert!((0.9..=1.3).contains(&amplification), "{fetched} bytes fetched for {read}");
}

#[test]
fn a_cold_stream_fetches_each_byte_once_in_large_requests() {
    let cluster = cluster_with_object();
    cluster.s3.reset_stats();
    let mut file = File::open(cluster.path("data/large.bin")).unwrap();
    let (mut buffer, mut read) = (vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer).unwrap() {
            0 => break,
            count => read += count as u64,
        }
    }
    assert_eq!(read, OBJECT);
    let (fetched, requests) = (cluster.s3.bytes_out(), cluster.s3.requests("GET"));
    eprintln!("a stream of {read} bytes: {requests} GETs, {fetched} bytes");
    assert!(fetched <= OBJECT + OBJECT / 50, "{fetched} bytes fetched for {OBJECT}");
    // 128 of the largest size (worker.fill_size_max, 8 MiB), and some while the window still grows.
    assert!(requests <= 200, "{requests} GETs");
}

//! A plain S3 client that GETs, with a fixed number of requests in flight, the objects that were made from a local
//! directory, and throws the bytes away. The baseline for cold reads through the mount.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cavern_plain_s3::PlainS3;
use clap::Parser;
use futures::{StreamExt, TryStreamExt};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

/// As in `load_img.py`: no reader of the benchmarks follows the order of the names.
const SEED: u64 = 42;

#[derive(Parser)]
#[command(about = "GETs the objects of a bucket that a directory was copied to, and prints the rates as JSON")]
struct Options {
    #[arg(long)]
    endpoint: String,
    #[arg(long)]
    access_key: String,
    #[arg(long)]
    secret_key: String,
    #[arg(long)]
    bucket: String,
    /// The directory whose files are the bucket's objects.
    #[arg(long)]
    source: PathBuf,
    /// GETs in flight.
    #[arg(long, default_value_t = 8)]
    inflight: usize,
    /// Bytes of a ranged GET; 0 for whole objects.
    #[arg(long, default_value_t = 0)]
    part: u64,
}

/// Keys and sizes of all files below `directory`.
fn objects(root: &Path, directory: &Path, found: &mut Vec<(String, u64)>) -> Result<(), Box<dyn Error>> {
    for entry in directory.read_dir()? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            objects(root, &entry.path(), found)?;
        } else {
            let path = entry.path();
            let key = path.strip_prefix(root)?.to_str().ok_or("a file name that is not UTF-8")?;
            found.push((key.to_owned(), metadata.len()));
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let client = PlainS3::new(&options.endpoint, &options.access_key, &options.secret_key)?;
    let mut found = Vec::new();
    objects(&options.source, &options.source, &mut found)?;
    found.sort_unstable();
    found.shuffle(&mut StdRng::seed_from_u64(SEED));
    let mut parts = Vec::new();
    for (key, size) in &found {
        let step = if options.part == 0 { (*size).max(1) } else { options.part };
        parts.extend((0..*size).step_by(usize::try_from(step)?).map(|start| (key, start, (start + step).min(*size))));
    }
    let (client, bucket, whole) = (&client, options.bucket.as_str(), options.part == 0);
    let start = Instant::now();
    let bytes: u64 = futures::stream::iter(parts)
        .map(|(key, from, to)| async move {
            let got =
                if whole { client.get(bucket, key).await } else { client.get_range(bucket, key, from, to - 1).await };
            got.map(|bytes| bytes.len() as u64)
        })
        .buffer_unordered(options.inflight)
        .try_fold(0, |sum, length| async move { Ok(sum + length) })
        .await?;
    let seconds = start.elapsed().as_secs_f64();
    let report = serde_json::json!({
        "objects": found.len(),
        "bytes": bytes,
        "seconds": seconds,
        "objects_per_second": found.len() as f64 / seconds,
        "bytes_per_second": bytes as f64 / seconds,
    });
    #[allow(clippy::print_stdout, reason = "the report is the program's purpose")]
    {
        println!("{report}");
    }
    Ok(())
}

//! A plain S3 client: lists a bucket, then GETs every object with a fixed number of requests in flight and throws the
//! bytes away. The baseline for cold reads through the mount.

use std::time::Instant;

use clap::Parser;
use futures::{StreamExt, TryStreamExt};
use opendal::{Operator, services};

#[derive(Parser)]
#[command(about = "GETs every object of a bucket and prints the rates as JSON")]
struct Options {
    #[arg(long)]
    endpoint: String,
    #[arg(long)]
    access_key: String,
    #[arg(long)]
    secret_key: String,
    #[arg(long)]
    bucket: String,
    /// GETs in flight.
    #[arg(long, default_value_t = 8)]
    inflight: usize,
    /// Bytes of a ranged GET; 0 for whole objects.
    #[arg(long, default_value_t = 0)]
    part: u64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    // The provider is process-wide; an endpoint over plain HTTP never uses it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let service = services::S3::default()
        .endpoint(&options.endpoint)
        .region("us-east-1")
        .access_key_id(&options.access_key)
        .secret_access_key(&options.secret_key)
        .bucket(&options.bucket)
        .disable_config_load();
    let operator = Operator::new(service)?;
    let objects: Vec<(String, u64)> = operator
        .lister_with("")
        .recursive(true)
        .await?
        .try_filter_map(|entry| async move {
            let metadata = entry.metadata();
            Ok(metadata.is_file().then(|| (entry.path().to_owned(), metadata.content_length())))
        })
        .try_collect()
        .await?;
    let parts: Vec<(&str, u64, u64)> = objects
        .iter()
        .flat_map(|(key, size)| {
            let step = if options.part == 0 { (*size).max(1) } else { options.part };
            (0..*size)
                .step_by(usize::try_from(step).unwrap_or(usize::MAX))
                .map(move |start| (key.as_str(), start, (start + step).min(*size)))
        })
        .collect();
    let start = Instant::now();
    let bytes: u64 = futures::stream::iter(parts)
        .map(|(key, from, to)| {
            let operator = &operator;
            async move { operator.read_with(key).range(from..to).await.map(|buffer| buffer.len() as u64) }
        })
        .buffer_unordered(options.inflight)
        .try_fold(0, |sum, length| async move { Ok(sum + length) })
        .await?;
    let seconds = start.elapsed().as_secs_f64();
    let report = serde_json::json!({
        "objects": objects.len(),
        "bytes": bytes,
        "seconds": seconds,
        "objects_per_second": objects.len() as f64 / seconds,
        "bytes_per_second": bytes as f64 / seconds,
    });
    #[allow(clippy::print_stdout, reason = "the report is the program's purpose")]
    {
        println!("{report}");
    }
    Ok(())
}

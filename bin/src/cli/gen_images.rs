//! `cv gen-images`.

use std::path::PathBuf;

use cavern_conf::{ByteSize, counted};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::time::Instant;

use crate::console;
use crate::error::{CliError, Context as _};
use crate::images::{LARGEST_MEAN_BYTES, Plan, SMALLEST_MEAN_BYTES};

#[derive(Args)]
#[command(after_help = "Examples:
  cv gen-images /tmp/images --count 20000 --mean-size 50KB

Images are decodable JPEGs, all different, in folders of 1,000: DIR/0003/003917.jpg. \
The same seed gives the same files.")]
pub struct GenImagesArgs {
    /// Where to write; created if it does not exist.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// How many.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    count: u64,
    /// Mean size of a file; sizes spread around it.
    #[arg(long, value_name = "SIZE", default_value = "50KB")]
    mean_size: ByteSize,
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Generated {
    directory: PathBuf,
    files: u64,
    bytes: u64,
    seconds: f64,
}

impl GenImagesArgs {
    pub fn run(self) -> Result<(), CliError> {
        let mean_bytes = self.mean_size.bytes();
        if !(SMALLEST_MEAN_BYTES..=LARGEST_MEAN_BYTES).contains(&mean_bytes) {
            let text = format!("--mean-size {} is not between 1536B and 16MiB", self.mean_size);
            return Err(CliError::Usage(text));
        }
        let style =
            ProgressStyle::with_template("{bar:40} {pos}/{len} images").context("the progress bar's template")?;
        let bar = ProgressBar::new(self.count).with_style(style);
        let started = Instant::now();
        let plan = Plan { directory: self.directory, count: self.count, mean_bytes, seed: self.seed };
        let written = plan
            .generate(|| bar.inc(1))
            .context(format_args!("cannot write images to {}", plan.directory.display()))?;
        bar.finish_and_clear();
        let result = Generated {
            directory: plan.directory,
            files: written.files,
            bytes: written.bytes,
            seconds: started.elapsed().as_secs_f64(),
        };
        console::show(self.json, &result, |Generated { directory, files, bytes, seconds }| {
            let (images, size) = (counted(*files, "image"), console::size(*bytes));
            console::line(format_args!("{images}, {size} in {seconds:.1} s, in {}", directory.display()))
        })
    }
}

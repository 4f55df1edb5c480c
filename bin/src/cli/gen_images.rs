//! `cv gen-images`: synthetic photographs for demonstrations, tests and benchmarks.
//!
//! Encoding 20,000 JPEGs honestly takes minutes of processor time. Here a few pictures of different sizes are encoded,
//! and every image is the largest of them that is not larger than it is to be, filled up with comment segments: of its
//! own number, and of random bytes. So no two are equal, each decodes, and costs little more than a copy of its bytes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use cavern_conf::{ByteSize, counted};
use clap::Args;
use image::ExtendedColorType;
use image::codecs::jpeg::JpegEncoder;
use rand::rngs::StdRng;
use rand::{Rng, RngCore as _, SeedableRng};
use serde_json::json;
use tokio::time::Instant;

use crate::console::{self, Progress};
use crate::error::{CliError, Context as _};

/// Files in one folder.
const FOLDER_FILES: u64 = 1000;

/// Below this the headers alone are larger than the image.
const SMALLEST_MEAN_BYTES: u64 = 1536;
const LARGEST_MEAN_BYTES: u64 = 16 << 20;

/// Sizes of images, by their mean.
const SMALLEST: f64 = 0.3;
const LARGEST: f64 = 2.0;
/// Of the smallest and the largest picture that are encoded, and how many times those of the one before each has. A
/// pixel takes three bytes meanwhile.
const PIXELS_MIN: f64 = 256.0;
const PIXELS_MAX: f64 = 64e6;
const PIXELS_STEP: f64 = 1.5;
const QUALITY: u8 = 80;
/// What a comment segment may have, and what stands before that: a marker and a length.
const COMMENT_BYTES_MAX: usize = 65_533;
const COMMENT_HEAD: usize = 4;

#[derive(Args)]
pub struct GenImagesArgs {
    /// Where to write; created if it does not exist.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// How many.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    count: u64,
    /// Mean size of a file; sizes spread around it, with a standard deviation of a third.
    #[arg(long, value_name = "SIZE", default_value = "50KB")]
    mean_size: ByteSize,
    /// Of the generator: equal seeds give equal files.
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
}

impl GenImagesArgs {
    pub fn run(self) -> Result<(), CliError> {
        let mean_bytes = self.mean_size.bytes();
        if !(SMALLEST_MEAN_BYTES..=LARGEST_MEAN_BYTES).contains(&mean_bytes) {
            let text = format!("--mean-size {} is not between 1536B and 16MiB", self.mean_size);
            return Err(CliError::Usage(text));
        }
        let started = Instant::now();
        let directory = self.directory.display().to_string();
        let bytes = self.generate().context(format_args!("cannot write images to {directory}"))?;
        let seconds = started.elapsed().as_secs_f64();
        if self.json {
            let view = json!({"directory": directory, "files": self.count, "bytes": bytes, "seconds": seconds});
            return console::json(&view);
        }
        let (images, size) = (counted(self.count, "image"), console::size(bytes));
        console::line(format_args!("{images}, {size} in {seconds:.1} s, in {directory}"))
    }

    /// Writes all files, on every processor. How many bytes they have.
    fn generate(&self) -> io::Result<u64> {
        let pictures = self.pictures()?;
        for folder in 0..self.count.div_ceil(FOLDER_FILES) {
            fs::create_dir_all(self.directory.join(folder_name(folder)))?;
        }
        let next = AtomicU64::new(0);
        let bytes = AtomicU64::new(0);
        let progress = Mutex::new((0, Progress::new(self.json)));
        let work = || -> io::Result<()> {
            let mut image = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.count {
                    return Ok(());
                }
                self.compose(&pictures, index, &mut image);
                fs::write(self.directory.join(file_name(index)), &image)?;
                bytes.fetch_add(image.len() as u64, Ordering::Relaxed);
                let (written, progress) = &mut *progress.lock().unwrap_or_else(PoisonError::into_inner);
                *written += 1;
                progress.show(Some((*written, self.count)), format!("{written} of {} images", self.count));
            }
        };
        let threads = thread::available_parallelism().map_or(1, |count| count.get());
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| {
                worker.join().unwrap_or_else(|_| Err(io::Error::other("a generating thread panicked")))
            })
        })?;
        Ok(bytes.into_inner())
    }

    /// Encoded pictures, the smallest first.
    fn pictures(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let mut pictures = vec![encode(PIXELS_MIN, &mut random)?];
        let (largest, mut pixels) = ((self.mean_size.bytes() as f64 * LARGEST) as usize, PIXELS_MIN * PIXELS_STEP);
        while pixels < PIXELS_MAX && pictures.iter().all(|picture| picture.len() < largest) {
            pictures.push(encode(pixels, &mut random)?);
            pixels *= PIXELS_STEP;
        }
        pictures.sort_by_key(Vec::len);
        Ok(pictures)
    }

    /// Image `index`, into `image`.
    fn compose(&self, pictures: &[Vec<u8>], index: u64, image: &mut Vec<u8>) {
        let mut random = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index);
        // Twelve uniform numbers make a good enough bell: mean 0, deviation 1.
        let bell: f64 = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        let target = (self.mean_size.bytes() as f64 * (1.0 + 0.33 * bell).clamp(SMALLEST, LARGEST)) as usize;
        let comment = format!("Cavern test image {index}, seed {}", self.seed);
        let room = target.saturating_sub(COMMENT_HEAD + comment.len());
        let picture = &pictures[pictures.partition_point(|picture| picture.len() <= room).saturating_sub(1)];
        // Behind the mark of the beginning and the JFIF header, which must come first.
        let (head, body) = picture.split_at(4 + usize::from(u16::from_be_bytes([picture[4], picture[5]])));
        image.clear();
        image.extend_from_slice(head);
        push_comment(image, comment.as_bytes());
        let mut missing = room.saturating_sub(picture.len());
        while missing > COMMENT_HEAD {
            let mut filler = vec![0; (missing - COMMENT_HEAD).min(COMMENT_BYTES_MAX)];
            random.fill_bytes(&mut filler);
            push_comment(image, &filler);
            missing -= COMMENT_HEAD + filler.len();
        }
        image.extend_from_slice(body);
    }
}

fn push_comment(image: &mut Vec<u8>, content: &[u8]) {
    let length = u16::try_from(content.len() + 2).unwrap_or(u16::MAX);
    image.extend_from_slice(&[0xff, 0xfe]);
    image.extend_from_slice(&length.to_be_bytes());
    image.extend_from_slice(content);
}

/// A sky-like gradient with waves and grain of about so many pixels, 4:3 in shape.
fn encode(pixels: f64, random: &mut StdRng) -> io::Result<Vec<u8>> {
    let width = ((pixels * 4.0 / 3.0).sqrt() as u16).max(8);
    let height = ((pixels / f64::from(width)) as u16).max(8);
    let base: [f64; 3] = std::array::from_fn(|_| random.random_range(40.0..215.0));
    let slope: [f64; 3] = std::array::from_fn(|_| random.random_range(-60.0..60.0));
    let (wave, length, phase) =
        (random.random_range(4.0..28.0), random.random_range(6.0..60.0), random.random_range(0.0..6.0));
    let mut colours = Vec::with_capacity(usize::from(width) * usize::from(height) * 3);
    let mut grain = vec![0; width.into()];
    for y in 0..height {
        random.fill_bytes(&mut grain);
        for (x, grain) in (0..width).zip(&grain) {
            let across = f64::from(x) / f64::from(width);
            let place = f64::from(x) + 2.0 * f64::from(y);
            let light = wave * f64::sin(place / length + phase) + f64::from(*grain) / 12.0 - 10.0;
            for channel in 0..3 {
                colours.push((base[channel] + slope[channel] * across + light).clamp(0.0, 255.0) as u8);
            }
        }
    }
    let mut encoded = Vec::new();
    JpegEncoder::new_with_quality(&mut encoded, QUALITY)
        .encode(&colours, width.into(), height.into(), ExtendedColorType::Rgb8)
        .map_err(io::Error::other)?;
    Ok(encoded)
}

fn folder_name(folder: u64) -> String {
    format!("{folder:04}")
}

/// Path of image `index` below the directory: `0003/003917.jpg`.
fn file_name(index: u64) -> PathBuf {
    Path::new(&folder_name(index / FOLDER_FILES)).join(format!("{index:06}.jpg"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn generate(count: u64, mean_bytes: u64, seed: u64) -> (tempfile::TempDir, u64) {
        let directory = tempfile::tempdir().unwrap();
        let (place, mean_size) = (directory.path().to_owned(), ByteSize::from_bytes(mean_bytes));
        let images = GenImagesArgs { directory: place, count, mean_size, seed, json: true };
        let written = images.generate().unwrap();
        (directory, written)
    }

    #[test]
    fn images_decode_differ_and_have_about_the_asked_size() {
        let (directory, written) = generate(120, 50_000, 7);
        let mut seen = HashSet::new();
        let mut total = 0;
        for index in 0..120 {
            let bytes = fs::read(directory.path().join(file_name(index))).unwrap();
            let image = image::load_from_memory_with_format(&bytes, image::ImageFormat::Jpeg).unwrap();
            assert!(image.width() >= 64 && image.height() >= 64, "{}×{}", image.width(), image.height());
            total += bytes.len() as u64;
            assert!(seen.insert(bytes), "image {index} equals an earlier one");
        }
        assert_eq!(written, total);
        let mean = total / 120;
        assert!((42_000..58_000).contains(&mean), "mean size {mean}");
    }

    #[test]
    fn the_seed_decides_every_byte() {
        let read = |(directory, _): (tempfile::TempDir, u64)| fs::read(directory.path().join(file_name(3))).unwrap();
        assert_eq!(read(generate(5, 4000, 1)), read(generate(5, 4000, 1)));
        assert_ne!(read(generate(5, 4000, 1)), read(generate(5, 4000, 2)));
    }

    #[test]
    fn extreme_sizes_still_decode() {
        for mean in [SMALLEST_MEAN_BYTES, 512 << 10] {
            let (directory, written) = generate(3, mean, 1);
            for index in 0..3 {
                let bytes = fs::read(directory.path().join(file_name(index))).unwrap();
                image::load_from_memory_with_format(&bytes, image::ImageFormat::Jpeg).unwrap();
            }
            let got = written / 3;
            assert!((mean / 4..mean * 4).contains(&got), "asked for {mean}, got {got}");
        }
    }
}

//! Synthetic photographs for demonstrations, tests and benchmarks: `cv gen-images`.
//!
//! Encoding 20,000 JPEGs honestly takes minutes of processor time. Here only a few hundred *strips* (8 pixels high) are
//! encoded, and every image is put together from strips with restart markers between them: a restart marker resets the
//! decoder's prediction, so the entropy-coded bytes of one strip stand for themselves (ITU T.81, E.1.4). Each image is
//! a valid baseline JPEG with its own order and number of strips and its own comment segment, so that no two are equal,
//! and costs little more than a copy of its bytes.

mod jpeg;
mod strip;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use self::strip::Palette;

/// Files in one folder.
const FOLDER_FILES: u64 = 1000;

/// Below this the headers alone are larger than the image.
pub const SMALLEST_MEAN_BYTES: u64 = 1536;
/// A JPEG has at most 65,535 lines.
pub const LARGEST_MEAN_BYTES: u64 = 16 << 20;

/// What to generate.
pub struct Plan {
    pub directory: PathBuf,
    pub count: u64,
    /// Mean size of a file; sizes spread around it (standard deviation about a third).
    pub mean_bytes: u64,
    /// The same seed gives the same files.
    pub seed: u64,
}

/// What has been written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    pub files: u64,
    pub bytes: u64,
}

impl Plan {
    /// Writes all files, on every processor, calling `written` after each.
    pub fn generate(&self, written: impl Fn() + Sync) -> io::Result<Written> {
        let palettes = strip::palettes(self.mean_bytes, self.seed)?;
        for folder in 0..self.count.div_ceil(FOLDER_FILES) {
            fs::create_dir_all(self.directory.join(folder_name(folder)))?;
        }
        let next = AtomicU64::new(0);
        let bytes = AtomicU64::new(0);
        let work = || -> io::Result<()> {
            let mut image = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.count {
                    return Ok(());
                }
                self.compose(&palettes, index, &mut image);
                fs::write(self.directory.join(file_name(index)), &image)?;
                bytes.fetch_add(image.len() as u64, Ordering::Relaxed);
                written();
            }
        };
        let threads = thread::available_parallelism().map_or(1, |count| count.get());
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| {
                worker.join().unwrap_or_else(|_| Err(io::Error::other("a generating thread panicked")))
            })
        })?;
        Ok(Written { files: self.count, bytes: bytes.into_inner() })
    }

    /// Image `index`, into `image`.
    fn compose(&self, palettes: &[Palette], index: u64, image: &mut Vec<u8>) {
        let mut random = StdRng::seed_from_u64(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index);
        let palette = &palettes[random.random_range(0..palettes.len())];
        // Twelve uniform numbers make a good enough bell: mean 0, deviation 1.
        let bell: f64 = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        let target = self.mean_bytes as f64 * (1.0 + 0.33 * bell).clamp(0.3, 2.0);
        let comment = format!("Cavern test image {index}, seed {}", self.seed);
        palette.compose(target as u64, &comment, &mut random, image);
    }
}

fn folder_name(folder: u64) -> String {
    format!("{folder:04}")
}

/// Path of image `index` below the directory: `0003/003917.jpg`.
pub fn file_name(index: u64) -> PathBuf {
    Path::new(&folder_name(index / FOLDER_FILES)).join(format!("{index:06}.jpg"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn generate(count: u64, mean_bytes: u64, seed: u64) -> (tempfile::TempDir, Written) {
        let directory = tempfile::tempdir().unwrap();
        let plan = Plan { directory: directory.path().to_owned(), count, mean_bytes, seed };
        let written = plan.generate(|| ()).unwrap();
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
        assert_eq!(written, Written { files: 120, bytes: total });
        let mean = total / 120;
        assert!((42_000..58_000).contains(&mean), "mean size {mean}");
    }

    #[test]
    fn the_seed_decides_every_byte() {
        let read =
            |(directory, _): (tempfile::TempDir, Written)| fs::read(directory.path().join(file_name(3))).unwrap();
        assert_eq!(read(generate(5, 4000, 1)), read(generate(5, 4000, 1)));
        assert_ne!(read(generate(5, 4000, 1)), read(generate(5, 4000, 2)));
    }

    #[test]
    fn extreme_sizes_still_decode() {
        for mean in [SMALLEST_MEAN_BYTES, 2 << 20] {
            let (directory, written) = generate(3, mean, 1);
            for index in 0..3 {
                let bytes = fs::read(directory.path().join(file_name(index))).unwrap();
                image::load_from_memory_with_format(&bytes, image::ImageFormat::Jpeg).unwrap();
            }
            let got = written.bytes / 3;
            assert!((mean / 4..mean * 4).contains(&got), "asked for {mean}, got {got}");
        }
    }
}

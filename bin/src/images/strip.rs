//! Strips of synthetic pictures, encoded once: the material of all images.

use std::io;

use image::ExtendedColorType;
use image::codecs::jpeg::JpegEncoder;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::jpeg::{self, Parts};

/// One palette per quality: all strips of an image share their quantization tables.
const QUALITIES: [u8; 3] = [70, 80, 88];
const STRIPS: usize = 96;
const LINES: u32 = 8;
/// Bytes that a pixel takes on average at these qualities; only the shape of the images depends on it.
const BYTES_PER_PIXEL: f64 = 0.25;
const MOST_STRIPS: u64 = 65_535 / LINES as u64;

/// Encoded strips of one width and quality.
pub struct Palette {
    parts: Parts,
    blocks: u16,
    strips: Vec<Vec<u8>>,
    mean_strip_bytes: u64,
    header_bytes: u64,
}

/// The palettes for images of this mean size, about 4:3 in shape.
pub fn palettes(mean_bytes: u64, seed: u64) -> io::Result<Vec<Palette>> {
    let pixels = mean_bytes as f64 / BYTES_PER_PIXEL;
    let blocks = ((pixels * 4.0 / 3.0).sqrt() / 8.0).round().clamp(2.0, 1024.0) as u16;
    let mut random = StdRng::seed_from_u64(seed);
    QUALITIES.iter().map(|quality| Palette::new(blocks, *quality, &mut random)).collect()
}

impl Palette {
    fn new(blocks: u16, quality: u8, random: &mut StdRng) -> io::Result<Self> {
        let mut encoded = (0..STRIPS).map(|_| encode(blocks, quality, random)).collect::<io::Result<Vec<_>>>()?;
        let strips: Vec<_> = encoded.iter_mut().map(|parts| std::mem::take(&mut parts.entropy)).collect();
        let parts = encoded.swap_remove(0);
        let mean_strip_bytes = (strips.iter().map(|strip| strip.len() + 2).sum::<usize>() / STRIPS) as u64;
        let mut empty = Vec::new();
        jpeg::write(&parts, blocks, "", std::iter::empty(), &mut empty);
        Ok(Self { parts, blocks, strips, mean_strip_bytes, header_bytes: empty.len() as u64 })
    }

    /// An image of about `target` bytes.
    pub fn compose(&self, target: u64, comment: &str, random: &mut StdRng, image: &mut Vec<u8>) {
        let body = target.saturating_sub(self.header_bytes + comment.len() as u64);
        let count = ((body + self.mean_strip_bytes / 2) / self.mean_strip_bytes).clamp(1, MOST_STRIPS);
        let picks: Vec<usize> = (0..count).map(|_| random.random_range(0..self.strips.len())).collect();
        jpeg::write(&self.parts, self.blocks, comment, picks.iter().map(|pick| &*self.strips[*pick]), image);
    }
}

/// Eight lines of a sky-like gradient with waves and grain.
fn encode(blocks: u16, quality: u8, random: &mut StdRng) -> io::Result<Parts> {
    let width = u32::from(blocks) * 8;
    let base: [f64; 3] = std::array::from_fn(|_| random.random_range(40.0..215.0));
    let slope: [f64; 3] = std::array::from_fn(|_| random.random_range(-60.0..60.0));
    let (wave, length, phase) =
        (random.random_range(4.0..28.0), random.random_range(6.0..60.0), random.random_range(0.0..6.0));
    let grain = random.random_range(6.0..16.0);
    let mut pixels = Vec::with_capacity((width * LINES * 3) as usize);
    for y in 0..LINES {
        for x in 0..width {
            let across = f64::from(x) / f64::from(width);
            let light = wave * (f64::from(x + 2 * y) / length + phase).sin() + random.random_range(-grain..grain);
            for channel in 0..3 {
                pixels.push((base[channel] + slope[channel] * across + light).clamp(0.0, 255.0) as u8);
            }
        }
    }
    let mut encoded = Vec::new();
    JpegEncoder::new_with_quality(&mut encoded, quality)
        .encode(&pixels, width, LINES, ExtendedColorType::Rgb8)
        .map_err(io::Error::other)?;
    Parts::of(&encoded)
}

//! The little of the JPEG container that is needed to take an encoded strip apart and to put strips together.

use std::io;

const SOI: u8 = 0xd8;
const EOI: u8 = 0xd9;
const SOF0: u8 = 0xc0;
const DHT: u8 = 0xc4;
const DQT: u8 = 0xdb;
const SOS: u8 = 0xda;
const DRI: u8 = 0xdd;
const APP0: u8 = 0xe0;
const COM: u8 = 0xfe;
const RST0: u8 = 0xd0;

/// An encoded image, taken apart.
pub struct Parts {
    /// Quantization and Huffman tables, as whole segments.
    pub tables: Vec<u8>,
    /// Contents of the JFIF, frame and scan headers.
    pub jfif: Vec<u8>,
    pub frame: Vec<u8>,
    pub scan: Vec<u8>,
    /// Entropy-coded bytes, padded to a byte, without the end marker.
    pub entropy: Vec<u8>,
}

impl Parts {
    /// Takes apart what the encoder has made: one frame, one scan, no restart interval.
    pub fn of(image: &[u8]) -> io::Result<Self> {
        let mut parts = Self { tables: vec![], jfif: vec![], frame: vec![], scan: vec![], entropy: vec![] };
        let mut rest = image.strip_prefix(&[0xff, SOI]).ok_or_else(unexpected)?;
        loop {
            let [0xff, marker, high, low, ..] = *rest else { return Err(unexpected()) };
            let end = 2 + usize::from(u16::from_be_bytes([high, low]));
            let segment = rest.get(..end).ok_or_else(unexpected)?;
            rest = &rest[end..];
            let content = || segment[4..].to_vec();
            match marker {
                DQT | DHT => parts.tables.extend_from_slice(segment),
                APP0 => parts.jfif = content(),
                SOF0 => parts.frame = content(),
                SOS => {
                    parts.scan = content();
                    parts.entropy = rest.strip_suffix(&[0xff, EOI]).ok_or_else(unexpected)?.to_vec();
                    return Ok(parts);
                }
                _ => (),
            }
        }
    }
}

/// Writes an image of `strips`, each `restart_blocks` 8×8 blocks wide and 8 lines high, encoded with the tables of
/// `parts`.
pub fn write<'a>(
    parts: &Parts,
    restart_blocks: u16,
    comment: &str,
    strips: impl ExactSizeIterator<Item = &'a [u8]>,
    image: &mut Vec<u8>,
) {
    let lines = u16::try_from(strips.len() * 8).unwrap_or(u16::MAX);
    let mut frame = parts.frame.clone();
    // Precision (1 byte), then the number of lines.
    frame[1..3].copy_from_slice(&lines.to_be_bytes());
    image.clear();
    image.extend_from_slice(&[0xff, SOI]);
    segment(image, APP0, &parts.jfif);
    segment(image, COM, comment.as_bytes());
    image.extend_from_slice(&parts.tables);
    segment(image, SOF0, &frame);
    segment(image, DRI, &restart_blocks.to_be_bytes());
    segment(image, SOS, &parts.scan);
    for (number, strip) in strips.enumerate() {
        if number > 0 {
            image.extend_from_slice(&[0xff, RST0 + ((number - 1) % 8) as u8]);
        }
        image.extend_from_slice(strip);
    }
    image.extend_from_slice(&[0xff, EOI]);
}

fn segment(image: &mut Vec<u8>, marker: u8, content: &[u8]) {
    let length = u16::try_from(content.len() + 2).unwrap_or(u16::MAX);
    image.extend_from_slice(&[0xff, marker]);
    image.extend_from_slice(&length.to_be_bytes());
    image.extend_from_slice(content);
}

fn unexpected() -> io::Error {
    io::Error::other("the JPEG encoder wrote an unexpected layout")
}

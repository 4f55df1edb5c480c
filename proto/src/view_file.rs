//! The object of a view behind its image: pages, which say what runs of blocks of its devices are, the index of these,
//! and the manifest at the end.

use std::ops::Range;

use bytes::Bytes;
use prost::Message as _;

use crate::record::{ViewDirectory, ViewFile, ViewIndex, ViewManifest, ViewPage};

/// Bytes of a block of a device: files begin at multiples of it.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes of a file in one run: larger ones have several.
pub const RUN_BYTES_MAX: u64 = 8 << 40;
/// Devices of a view.
pub const DEVICES_MAX: usize = 100;
/// Behind the manifest: its length, and what all of it is.
pub const TRAILER_BYTES: usize = 16;
/// Bytes of a manifest.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 10;

const MAGIC: [u8; 8] = *b"cv-view1";
/// A page that has so many bytes gets no further run.
const PAGE_BYTES: usize = 4096;
/// What a directory and a file take in a page beside what they are, at most as a rule.
const FIELD_BYTES: usize = 6;

/// Blocks that so many bytes take.
pub fn blocks_of(size: u64) -> u32 {
    u32::try_from(size.div_ceil(BLOCK_BYTES)).unwrap_or(u32::MAX)
}

/// Puts runs into pages.
#[derive(Default)]
pub struct PageBuilder {
    page: ViewPage,
    /// Of the page so far, about; 0 for one without runs.
    bytes: usize,
    /// Behind the last run.
    next_block: u32,
    index: ViewIndex,
}

impl PageBuilder {
    /// Adds a run that begins at a block of a device, behind all before it. Gives the page that is complete by that, as
    /// it is stored.
    pub fn add(&mut self, (device, block): (u32, u32), directory: &str, mut file: ViewFile) -> Option<Vec<u8>> {
        let is_complete = self.bytes >= PAGE_BYTES || self.page.device != device;
        let complete = if is_complete { self.take() } else { None };
        if self.bytes == 0 {
            self.page = ViewPage { device, first_block: block, directories: Vec::new() };
            self.next_block = block;
        }
        file.gap = block.saturating_sub(self.next_block);
        self.next_block = block.saturating_add(blocks_of(file.size));
        if self.page.directories.last().is_none_or(|last| last.key != directory) {
            self.bytes += directory.len() + FIELD_BYTES;
            self.page.directories.push(ViewDirectory { key: directory.to_owned(), files: Vec::new() });
        }
        self.bytes += file.encoded_len() + FIELD_BYTES;
        if let Some(last) = self.page.directories.last_mut() {
            last.files.push(file);
        }
        complete
    }

    /// The last page, if there is any, and the index of all.
    pub fn finish(mut self) -> (Option<Vec<u8>>, ViewIndex) {
        (self.take(), self.index)
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        if self.bytes == 0 {
            return None;
        }
        self.bytes = 0;
        let page = std::mem::take(&mut self.page);
        let encoded = page.encode_to_vec();
        self.index.first.push(position(page.device, page.first_block));
        self.index.lengths.push(u32::try_from(encoded.len()).unwrap_or(u32::MAX));
        Some(encoded)
    }
}

fn position(device: u32, block: u32) -> u64 {
    u64::from(device) << 32 | u64::from(block)
}

/// Finds pages.
#[derive(Debug)]
pub struct PageIndex {
    first: Vec<u64>,
    /// Where each page ends, in the bytes of all.
    ends: Vec<u64>,
}

impl PageIndex {
    /// `None` for what is none: pages are in order, and have `pages_bytes` together.
    pub fn new(index: ViewIndex, pages_bytes: u64) -> Option<Self> {
        let ViewIndex { first, lengths } = index;
        let ends: Vec<u64> = lengths
            .iter()
            .scan(0_u64, |end, length| {
                *end += u64::from(*length);
                Some(*end)
            })
            .collect();
        let is_good = first.len() == ends.len()
            && first.is_sorted_by(|before, after| before < after)
            && ends.last().copied().unwrap_or(0) == pages_bytes;
        is_good.then_some(Self { first, ends })
    }

    /// The page that has a block, if any has: its number, and where its bytes are among those of all pages.
    pub fn find(&self, device: u32, block: u32) -> Option<(usize, Range<u64>)> {
        let behind = self.first.partition_point(|first| *first <= position(device, block));
        let number = behind.checked_sub(1)?;
        Some((number, self.bytes_of(number)?))
    }

    /// Where the bytes of a page are; `None` behind the last one.
    pub fn bytes_of(&self, number: usize) -> Option<Range<u64>> {
        let end = *self.ends.get(number)?;
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(start..end)
    }
}

/// The runs of a page, in order: the first block of each, the key prefix of its directory, and what it is.
pub fn runs(page: &ViewPage) -> impl Iterator<Item = (u32, &str, &ViewFile)> {
    let files = page.directories.iter().flat_map(|directory| {
        let key = directory.key.as_str();
        directory.files.iter().map(move |file| (key, file))
    });
    let mut next_block = page.first_block;
    files.map(move |(key, file)| {
        let first = next_block.saturating_add(file.gap);
        next_block = first.saturating_add(blocks_of(file.size));
        (first, key, file)
    })
}

impl ViewFile {
    /// The object's ETag; empty where there is none.
    pub fn object_etag(&self) -> String {
        let md5 = <[u8; 16]>::try_from(&self.md5[..]);
        md5.map_or_else(|_none| self.etag.clone(), |md5| format!("{:032x}", u128::from_be_bytes(md5)))
    }

    pub fn set_object_etag(&mut self, etag: &str) {
        match md5_of(etag) {
            Some(md5) => (self.md5, self.etag) = (Bytes::copy_from_slice(&md5), String::new()),
            None => (self.md5, self.etag) = (Bytes::new(), etag.to_owned()),
        }
    }

    /// The object's key, in a directory of this key prefix. `None` for a name that is no text, and cannot be one.
    pub fn object_key(&self, directory: &str) -> Option<String> {
        if !self.key.is_empty() {
            return Some(self.key.clone());
        }
        std::str::from_utf8(&self.name).ok().map(|name| format!("{directory}{name}"))
    }

    /// Bytes of the file, of which this may be a part.
    pub fn whole_size(&self) -> u64 {
        self.file_size.unwrap_or(self.size)
    }
}

/// What is written in so many lower-case hexadecimal digits.
fn md5_of(digits: &str) -> Option<[u8; 16]> {
    let are_digits = digits.len() == 32 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u128::from_str_radix(digits, 16).ok().filter(|_| are_digits).map(u128::to_be_bytes)
}

/// A manifest as it is stored, with what comes behind it.
pub fn encode_manifest(manifest: &ViewManifest) -> Vec<u8> {
    let mut bytes = manifest.encode_to_vec();
    let length = bytes.len() as u64;
    bytes.extend(length.to_le_bytes());
    bytes.extend(MAGIC);
    bytes
}

/// Bytes of the manifest before a trailer; `None` for what ends no view.
pub fn manifest_bytes(trailer: &[u8; TRAILER_BYTES]) -> Option<u64> {
    let (length, magic) = trailer.split_first_chunk()?;
    let length = u64::from_le_bytes(*length);
    (magic == MAGIC && length <= MANIFEST_BYTES_MAX).then_some(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(name: usize, size: u64, etag: &str) -> ViewFile {
        let mut file = ViewFile { name: format!("file-{name:05}").into(), size, ..ViewFile::default() };
        file.set_object_etag(etag);
        file
    }

    proptest! {
        #[test]
        fn each_block_is_found_in_the_run_that_has_it(
            sizes in proptest::collection::vec((1_u64..300_000, 0_u32..3, 0_u32..40), 1..600)
        ) {
            let (mut builder, mut pages, mut placed) = (PageBuilder::default(), Vec::new(), Vec::new());
            let (mut device, mut block) = (0, 0);
            for (name, (size, gap, other)) in sizes.iter().copied().enumerate() {
                (device, block) = if other == 39 { (device + 1, 0) } else { (device, block + gap) };
                let directory = format!("d{}/", name / 7);
                pages.extend(builder.add((device, block), &directory, file(name, size, "etag-2")).unwrap_or_default());
                placed.push((device, block, name, directory));
                block += blocks_of(size);
            }
            let (last, index) = builder.finish();
            pages.extend(last.unwrap_or_default());
            let index = PageIndex::new(index, pages.len() as u64).unwrap();
            for (device, first, name, directory) in placed {
                for block in [first, first + blocks_of(sizes[name].0) - 1] {
                    let (number, bytes) = index.find(device, block).unwrap();
                    prop_assert_eq!(index.bytes_of(number), Some(bytes.clone()));
                    let page = ViewPage::decode(&pages[bytes.start as usize..bytes.end as usize]).unwrap();
                    let has_block = |start: u32, run: &ViewFile| (start..start + blocks_of(run.size)).contains(&block);
                    let (start, key, run) = runs(&page).find(|(start, _, run)| has_block(*start, run)).unwrap();
                    prop_assert_eq!((page.device, start, key), (device, first, directory.as_str()));
                    prop_assert_eq!(run.object_key(key), Some(format!("{directory}file-{name:05}")));
                    prop_assert_eq!((run.whole_size(), run.object_etag()), (sizes[name].0, "etag-2".to_owned()));
                }
            }
        }
    }

    #[test]
    fn a_file_of_a_bucket_takes_what_its_name_and_etag_take() {
        let (mut builder, mut bytes) = (PageBuilder::default(), 0);
        for name in 0..10_000_u32 {
            let etag = format!("{name:032x}");
            let added = file(name as usize, 50_000, &etag);
            assert_eq!((added.md5.len(), added.object_etag()), (16, etag));
            bytes += builder.add((0, 13 * name), "data/", added).map_or(0, |page| page.len());
        }
        let (last, index) = builder.finish();
        bytes += last.unwrap().len() + index.encoded_len();
        assert!(bytes < 10_000 * 42, "{bytes}");
    }

    #[test]
    fn an_etag_stays_as_it_is_spelt() {
        for etag in ["", "0123456789abcdef0123456789abcdef", "0123456789ABCDEF0123456789abcdef", "0123-4", "ü"] {
            let mut file = ViewFile::default();
            file.set_object_etag(etag);
            assert_eq!(file.object_etag(), etag);
        }
    }

    #[test]
    fn an_index_that_is_none_is_refused() {
        let index = |first: &[u64], lengths: &[u32]| ViewIndex { first: first.to_vec(), lengths: lengths.to_vec() };
        assert!(PageIndex::new(index(&[], &[]), 0).is_some_and(|none| none.find(0, 0).is_none()));
        assert!(PageIndex::new(index(&[0, 5], &[10, 20]), 30).is_some());
        for (broken, bytes) in [(index(&[0], &[10, 20]), 30), (index(&[5, 5], &[10, 20]), 30), (index(&[0], &[10]), 9)]
        {
            assert!(PageIndex::new(broken.clone(), bytes).is_none(), "{broken:?} {bytes}");
        }
    }

    #[test]
    fn a_manifest_is_found_by_the_end_of_its_file() {
        let manifest = ViewManifest { uri: "s3://bucket/prefix".to_owned(), ..ViewManifest::default() };
        let encoded = encode_manifest(&manifest);
        let (before, trailer) = encoded.split_last_chunk::<TRAILER_BYTES>().unwrap();
        assert_eq!(manifest_bytes(trailer), Some(before.len() as u64));
        assert_eq!(ViewManifest::decode(before).unwrap(), manifest);
        assert_eq!(manifest_bytes(&[0; TRAILER_BYTES]), None);
        let mut other = *trailer;
        other[5] = 1;
        assert_eq!(manifest_bytes(&other), None, "longer than any");
    }
}

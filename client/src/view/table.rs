//! The table of a view: what is in each block of its devices. Where its pages begin is in memory, the pages are read as
//! they are needed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use bytes::Bytes;
use cavern_proto::ContentId;
use cavern_proto::master::View;
use cavern_proto::record::{ViewFile, ViewIndex, ViewPage};
use cavern_proto::view_file::{BLOCK_BYTES, PageIndex, blocks_of, runs};
use prost::Message as _;

use crate::read::local_file::{PastEnd, read_now};

/// Pages up to this size are decoded where somebody waits for more than this page.
const PAGE_BYTES_NOW: u64 = 64 << 10;
/// No page that a master writes is larger, nor is an index: what says so is damaged, and would take memory.
const PAGE_BYTES_MAX: u64 = 256 << 20;
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Bytes of a run in memory, beside those that it has in its page.
const RUN_WEIGHT: u64 = 256;

/// Where the pages of a view are.
pub(super) struct ViewTable {
    file: File,
    index: PageIndex,
    /// Where the first one is in the file.
    start: u64,
}

/// What is in some consecutive blocks of a device.
pub(super) struct TablePage {
    page: ViewPage,
    /// In the table.
    bytes: usize,
    /// Of each run, where its bytes are those of an object: what names that, once somebody has wanted to know.
    contents: Box<[OnceLock<ContentId>]>,
}

/// A file in the blocks of a device, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct TableRun<'p> {
    /// The block that it begins at.
    pub first: u32,
    /// Key prefix of its directory.
    pub directory: &'p str,
    pub file: &'p ViewFile,
    /// See [`TablePage`].
    pub content: &'p OnceLock<ContentId>,
}

/// Bytes of a device that are of the same kind.
pub(super) struct Piece<'p> {
    /// At least 1.
    pub bytes: u64,
    /// The run, and where in it they begin; `None` for zeros.
    pub run: Option<(TableRun<'p>, u64)>,
}

impl ViewTable {
    /// Reads the index from the copy of a view. The error says what is wrong.
    pub(super) fn open(file: File, view: &View) -> Result<Self, String> {
        let start = view.image_bytes;
        let unreadable = |error: &dyn std::fmt::Display| format!("the index of its table cannot be read: {error}");
        let from = start.checked_add(view.pages_bytes).filter(|_| view.index_bytes <= INDEX_BYTES_MAX);
        let from = from.ok_or_else(|| unreadable(&"it is larger than any"))?;
        // No more than that.
        let mut encoded = vec![0; view.index_bytes as usize];
        file.read_exact_at(&mut encoded, from).map_err(|error| unreadable(&error))?;
        let index = ViewIndex::decode(&encoded[..]).map_err(|error| unreadable(&error))?;
        let index = PageIndex::new(index, view.pages_bytes).ok_or_else(|| unreadable(&"it does not fit the pages"))?;
        Ok(Self { file, index, start })
    }

    /// The number of the page that has a byte of a device, if any has. Devices count from 0 here.
    pub(super) fn find(&self, device: u32, at: u64) -> Option<usize> {
        let block = u32::try_from(at / BLOCK_BYTES).unwrap_or(u32::MAX);
        self.index.find(device, block).map(|(number, _)| number)
    }

    /// A page that is in memory of the kernel, and no large one.
    pub(super) fn load_now(&self, number: usize) -> Option<TablePage> {
        let Range { start, end } = self.index.bytes_of(number)?;
        if end - start > PAGE_BYTES_NOW {
            return None;
        }
        let read = |start: u64, bytes: &mut [u8]| {
            let is_read = read_now(&self.file, start, bytes, PastEnd::Missing);
            if is_read { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WouldBlock)) }
        };
        self.load_by(number, read).ok()?
    }

    /// `None` behind the last page. *Blocking*. The error says what is wrong.
    pub(super) fn load(&self, number: usize) -> Result<Option<TablePage>, String> {
        self.load_by(number, |start, bytes| self.file.read_exact_at(bytes, start))
    }

    fn load_by(
        &self,
        number: usize,
        read: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<Option<TablePage>, String> {
        let unreadable = |error: &dyn std::fmt::Display| format!("page {number} of its table cannot be read: {error}");
        let Some(Range { start, end }) = self.index.bytes_of(number) else { return Ok(None) };
        if end - start > PAGE_BYTES_MAX {
            return Err(unreadable(&"it is larger than any"));
        }
        let mut encoded = vec![0; (end - start) as usize];
        read(self.start + start, &mut encoded).map_err(|error| unreadable(&error))?;
        let bytes = encoded.len();
        let page = ViewPage::decode(Bytes::from(encoded)).map_err(|error| unreadable(&error))?;
        Ok(Some(TablePage::new(page, bytes)))
    }
}

impl TablePage {
    fn new(page: ViewPage, bytes: usize) -> Self {
        let contents = runs(&page).map(|_| OnceLock::new()).collect();
        Self { page, bytes, contents }
    }

    /// What it takes in memory, about: as much for each run as for some bytes of the table.
    pub(super) fn weight(&self) -> u64 {
        self.bytes as u64 + RUN_WEIGHT * self.contents.len() as u64
    }

    pub(super) fn device(&self) -> u32 {
        self.page.device
    }

    /// In the order of their blocks.
    pub(super) fn runs(&self) -> impl Iterator<Item = TableRun<'_>> {
        let found = runs(&self.page).zip(self.contents.iter());
        found.map(|((first, directory, file), content)| TableRun { first, directory, file, content })
    }
}

impl TableRun<'_> {
    /// Those that it has on its device.
    pub(super) fn blocks(&self) -> Range<u32> {
        self.first..self.first.saturating_add(blocks_of(self.file.size))
    }

    pub(super) fn has_object(&self) -> bool {
        !self.file.md5.is_empty() || !self.file.etag.is_empty() || self.file.inode == 0
    }

    /// Bytes of the object, which is all of a file of a cache-mode mount.
    pub(super) fn object_length(&self) -> u64 {
        self.file.object_size.unwrap_or(self.file.whole_size())
    }

    /// Whether all that may have to be fetched for it has no more than so many bytes: what is left of an object that
    /// was cut is in all of that.
    pub(super) fn is_up_to(&self, bytes: u64) -> bool {
        self.file.whole_size() <= bytes && (!self.has_object() || self.object_length() <= bytes)
    }
}

/// What a range of a device begins with. `page` is the one that [`ViewTable::find`] gives for its first byte.
pub(super) fn piece(page: Option<&TablePage>, device: u32, bytes: Range<u64>) -> Piece<'_> {
    let zeros = |until: u64| Piece { bytes: until.min(bytes.end) - bytes.start, run: None };
    let block_end = (bytes.start / BLOCK_BYTES + 1) * BLOCK_BYTES;
    let Some(page) = page.filter(|page| page.device() == device) else { return zeros(block_end) };
    for run in page.runs() {
        let blocks = run.blocks();
        let start = u64::from(blocks.start) * BLOCK_BYTES;
        if bytes.start < start {
            return zeros(start);
        }
        let end = start.saturating_add(run.file.size);
        if bytes.start < end {
            let (length, from) = (end.min(bytes.end) - bytes.start, bytes.start - start);
            return Piece { bytes: length, run: Some((run, from)) };
        }
        let behind = u64::from(blocks.end) * BLOCK_BYTES;
        if bytes.start < behind {
            return zeros(behind);
        }
    }
    // Where the next page begins is not known here.
    zeros(block_end)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use cavern_proto::record::ViewDirectory;
    use cavern_proto::view_file::PageBuilder;
    use proptest::prelude::*;

    use super::*;

    /// A byte of a file of a model: its name, and where it is in the file.
    type Origin = Option<(usize, u64)>;

    fn table(files: &[(u32, u32, usize, u64)]) -> (ViewTable, View) {
        let (mut builder, mut stored) = (PageBuilder::default(), b"image".to_vec());
        for (device, block, name, size) in files {
            let file = ViewFile { name: format!("{name:04}").into(), size: *size, ..ViewFile::default() };
            stored.extend(builder.add((*device, *block), "d/", file).unwrap_or_default());
        }
        let (last, index) = builder.finish();
        stored.extend(last.unwrap_or_default());
        let pages_bytes = stored.len() as u64 - 5;
        stored.extend(index.encode_to_vec());
        let index_bytes = stored.len() as u64 - 5 - pages_bytes;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&stored).unwrap();
        let view = View { image_bytes: 5, pages_bytes, index_bytes, ..View::default() };
        (ViewTable::open(file, &view).unwrap(), view)
    }

    proptest! {
        #[test]
        fn each_byte_is_of_the_file_that_was_put_there_and_all_others_are_zeros(
            // Size, blocks between, and whether another device begins.
            sizes in prop::collection::vec(
                (1_u64..40_000, prop_oneof![4 => Just(0_u32), 1 => 0_u32..9], 0_u32..60),
                1..300,
            ),
            ranges in prop::collection::vec((0_u32..3, 0_u64..3_000_000, 1_u64..200_000), 1..20),
        ) {
            let (mut files, mut device, mut block) = (Vec::new(), 0, 3);
            for (name, (size, gap, other)) in sizes.iter().copied().enumerate() {
                (device, block) = if other == 59 { (device + 1, gap) } else { (device, block + gap) };
                files.push((device, block, name, size));
                block += blocks_of(size);
            }
            let (table, _) = table(&files);
            let origin = |device: u32, at: u64| -> Origin {
                files.iter().find_map(|(of, first, name, size)| {
                    let from = at.checked_sub(u64::from(*first) * BLOCK_BYTES)?;
                    (*of == device && from < *size).then_some((*name, from))
                })
            };
            for (device, start, length) in ranges {
                let (mut at, end) = (start, start + length);
                while at < end {
                    let page = table.find(device, at).map(|number| table.load(number).unwrap().unwrap());
                    let found = piece(page.as_ref(), device, at..end);
                    prop_assert!(found.bytes >= 1 && at + found.bytes <= end);
                    for offset in [0, found.bytes / 2, found.bytes - 1] {
                        let told: Origin = found.run.as_ref().map(|(run, from)| {
                            (String::from_utf8_lossy(&run.file.name).parse().unwrap(), from + offset)
                        });
                        prop_assert_eq!(told, origin(device, at + offset), "device {} at {}", device, at + offset);
                    }
                    at += found.bytes;
                }
            }
        }
    }

    #[test]
    fn a_page_is_read_without_waiting_where_it_is_in_memory() {
        let files: Vec<_> = (0..500).map(|name| (0, 10 * name as u32, name, 30_000)).collect();
        let (table, _) = table(&files);
        let last = table.find(0, 4999 * BLOCK_BYTES).unwrap();
        assert!(last > 1);
        for number in 0..=last {
            let (now, page) = (table.load_now(number), table.load(number).unwrap().unwrap());
            assert!(now.is_none_or(|now| now.page == page.page));
        }
        assert!(table.load_now(last + 1).is_none() && table.load(last + 1).unwrap().is_none());
    }

    #[test]
    fn a_table_that_is_cut_off_or_another_is_refused() {
        let files = [(0, 0, 1, 5), (0, 2, 2, 5)];
        let (table, view) = table(&files);
        let file = || table.file.try_clone().unwrap();
        assert!(ViewTable::open(file(), &view).is_ok());
        for wrong in [
            View { pages_bytes: view.pages_bytes + 1, index_bytes: view.index_bytes - 1, ..view.clone() },
            View { index_bytes: view.index_bytes + 1, ..view.clone() },
            View { index_bytes: 0, ..view.clone() },
            View { image_bytes: 1 << 40, ..view.clone() },
            View { image_bytes: u64::MAX, ..view.clone() },
            View { index_bytes: u64::MAX, ..view.clone() },
        ] {
            assert!(ViewTable::open(file(), &wrong).is_err_and(|error| error.contains("index")), "{wrong:?}");
        }
        // A page that would take all memory is damaged.
        let index = ViewIndex { first: vec![0], lengths: vec![u32::MAX] };
        let index = PageIndex::new(index, u64::from(u32::MAX)).unwrap();
        let huge = ViewTable { file: file(), index, start: 0 };
        assert!(huge.load(0).is_err_and(|error| error.contains("larger")) && huge.load_now(0).is_none());
    }

    #[test]
    fn what_may_have_to_be_fetched_of_a_run_is_more_than_what_it_has() {
        let is_small = |file: &ViewFile| {
            let content = OnceLock::new();
            TableRun { first: 0, directory: "", file, content: &content }.is_up_to(1 << 20)
        };
        let file = ViewFile { size: 1000, inode: 7, ..ViewFile::default() };
        let mut cut = ViewFile { object_size: Some(1 << 40), valid: Some(1000), ..file.clone() };
        cut.set_object_etag("etag");
        let end = ViewFile { offset: 8 << 40, file_size: Some((8 << 40) + 1000), ..file.clone() };
        assert!(is_small(&file) && !is_small(&cut) && !is_small(&end));
        assert!(!is_small(&ViewFile { size: 2 << 20, ..ViewFile::default() }));
    }

    #[test]
    fn a_run_of_impossible_size_ends_somewhere() {
        let file = ViewFile { name: "f".into(), size: u64::MAX, ..ViewFile::default() };
        let directory = ViewDirectory { key: String::new(), files: vec![file] };
        let page = ViewPage { device: 0, first_block: 7, directories: vec![directory] };
        let page = TablePage::new(page, 20);
        let end = u64::from(u32::MAX) * BLOCK_BYTES;
        let found = piece(Some(&page), 0, end - 1..end);
        assert_eq!((found.bytes, found.run.unwrap().1), (1, end - 1 - 7 * BLOCK_BYTES));
    }
}

//! What is in the object of a view, written to a file without a name while it is read: the image, the pages of the
//! table, which take a file of their own until the image is whole, their index, and the manifest. BLAKE3 goes over all
//! but the last in the end: what is named there comes of what was written.
//!
//! Equal trees of one place give the same bytes: files lie in the devices in the order of the image, and nothing of the
//! view or of the moment is in what the hash is of.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use cavern_erofs::{
    Content, DEVICE_BLOCKS_MAX, Device, EachEntry, Error, Extent, Node, Options, Place, Times, Tree, Xattr, write_image,
};
use cavern_proto::master::{Kind, View, ViewState};
use cavern_proto::record::{ViewFile, ViewManifest};
use cavern_proto::view_file::{BLOCK_BYTES, DEVICES_MAX, PageBuilder, blocks_of, encode_manifest};
use cavern_state::StateError;
use prost::Message as _;

use super::tree::{TreeEntry, TreePage};
use crate::error::WorkError;

const LABEL: &str = "cavern";

/// Takes the pages of a tree, and makes their names and contents into an image and a table.
struct ImageSource<'a> {
    received: Receiver<TreePage>,
    directory: &'a Path,
    uuid: [u8; 16],
    /// Blocks that each device has so far.
    devices: Vec<u32>,
    table: PageBuilder,
    pages: BufWriter<File>,
    pages_bytes: u64,
}

/// Writes the object of a view that is sent page by page, of which the manifest says what is known before. Gives it
/// with the view as it is then: all but its ETag.
///
/// # Errors
/// [`WorkError::Refused`] for what no image can have, and when the disk is full.
pub(super) fn write_view(
    received: Receiver<TreePage>,
    directory: &Path,
    manifest: ViewManifest,
) -> Result<(File, View), WorkError> {
    let view = manifest.view.clone().unwrap_or_default();
    let failed = |error| disk_failure(directory, error);
    fs::create_dir_all(directory).map_err(failed)?;
    let image = tempfile::tempfile_in(directory).map_err(failed)?;
    let pages = BufWriter::new(tempfile::tempfile_in(directory).map_err(failed)?);
    let (uuid, devices, table) = (image_uuid(&manifest.uri, &view.path), Vec::new(), PageBuilder::default());
    let mut source = ImageSource { received, directory, uuid, devices, table, pages, pages_bytes: 0 };
    let root = source.receive()?.entries.pop().ok_or_else(WorkError::stopping)?;
    let most = vec![Device { blocks: DEVICE_BLOCKS_MAX, tag: [0; 64] }; DEVICES_MAX];
    let time = root.attributes.mtime;
    let options = Options { spill: directory, uuid, label: LABEL, time, times: Times::Own, devices: &most };
    let xattrs = xattrs_of(&root);
    let node = Node { id: root.id, attributes: root.attributes, xattrs: &xattrs, content: Content::Directory };
    let written = write_image(&image, &node, &mut source, &options)?;
    let ImageSource { devices, table, mut pages, mut pages_bytes, .. } = source;
    let (last, index) = table.finish();
    let last = last.unwrap_or_default();
    pages_bytes += last.len() as u64;
    let index = index.encode_to_vec();
    let complete = |mut image: File| -> io::Result<(File, View)> {
        pages.write_all(&last)?;
        let mut pages = pages.into_inner().map_err(io::IntoInnerError::into_error)?;
        pages.rewind()?;
        image.seek(SeekFrom::Start(written.image_bytes))?;
        io::copy(&mut pages, &mut image)?;
        image.write_all(&index)?;
        let index_bytes = index.len() as u64;
        let hashed = written.image_bytes + pages_bytes + index_bytes;
        let view = View {
            image_bytes: written.image_bytes,
            pages_bytes,
            index_bytes,
            hash: Bytes::copy_from_slice(&hash_of(&image, hashed)?),
            names: written.names,
            inodes: written.inodes,
            bytes: written.content_bytes,
            device_blocks: devices,
            ..view
        };
        let told = View {
            id: 0,
            state: ViewState::Ready.into(),
            store_mount_id: 0,
            key: String::new(),
            upload: String::new(),
            generation: 0,
            last_inode: 0,
            ..view.clone()
        };
        let end = encode_manifest(&ViewManifest { view: Some(told), ..manifest });
        image.seek(SeekFrom::Start(hashed))?;
        image.write_all(&end)?;
        Ok((image, View { object_bytes: hashed + end.len() as u64, ..view }))
    };
    complete(image).map_err(failed)
}

impl ImageSource<'_> {
    /// # Errors
    /// Whoever reads has ended before the end, and says why.
    fn receive(&self) -> Result<TreePage, WorkError> {
        self.received.recv().map_err(|_ended| WorkError::stopping())
    }

    fn add(&mut self, key: &str, entry: &mut TreeEntry, each: EachEntry<'_>) -> Result<(), WorkError> {
        let mut extents = Vec::new();
        for (length, file) in entry.runs.drain(..) {
            let place = file.map_or(Ok(Place::Hole), |file| self.place(key, file))?;
            extents.push(Extent { length, place });
        }
        let content = match entry.kind {
            Kind::Directory => Content::Directory,
            Kind::File | Kind::Unspecified => Content::File(&extents),
            Kind::Symlink => Content::Symlink(&entry.target),
            Kind::CharacterDevice => Content::CharacterDevice(entry.device),
            Kind::BlockDevice => Content::BlockDevice(entry.device),
            Kind::Fifo => Content::Fifo,
            Kind::Socket => Content::Socket,
        };
        let xattrs = xattrs_of(entry);
        let node = Node { id: entry.id, attributes: entry.attributes, xattrs: &xattrs, content };
        each(&entry.name, &node).map_err(|error| match error {
            Error::Entry { name, fault, .. } => {
                WorkError::Refused(format!("\"{key}{}\" cannot be in a view: {fault}", name.escape_debug()))
            }
            error => error.into(),
        })
    }

    /// Gives a run its place in a device, and the table a row of it.
    fn place(&mut self, key: &str, file: ViewFile) -> Result<Place, WorkError> {
        let (device, block) = allocate(&mut self.devices, blocks_of(file.size))?;
        if let Some(page) = self.table.add((device, block), key, file) {
            self.pages.write_all(&page).map_err(|error| disk_failure(self.directory, error))?;
            self.pages_bytes += page.len() as u64;
        }
        // A hundred at most, which count from 1 here.
        Ok(Place::Device { device: device as u16 + 1, offset: u64::from(block) * BLOCK_BYTES })
    }
}

impl Tree for ImageSource<'_> {
    type Error = WorkError;

    fn entries(&mut self, _next: u64, each: EachEntry<'_>) -> Result<(), WorkError> {
        loop {
            let page = self.receive()?;
            for mut entry in page.entries {
                self.add(&page.key, &mut entry, each)?;
            }
            if page.is_last {
                return Ok(());
            }
        }
    }

    fn devices(&self) -> Option<Vec<Device>> {
        let device = |(blocks, number): (&u32, u32)| {
            let mut tag = [0; 64];
            let name = format!("{:032x}/{number}", u128::from_be_bytes(self.uuid));
            tag[..name.len()].copy_from_slice(name.as_bytes());
            Device { blocks: *blocks, tag }
        };
        Some(self.devices.iter().zip(1..).map(device).collect())
    }
}

fn xattrs_of(entry: &TreeEntry) -> Vec<Xattr<'_>> {
    entry.xattrs.iter().map(|(name, value)| Xattr { name, value }).collect()
}

/// The next blocks of the last device, or the first ones of another: its number, from 0 on, and the first of them.
pub(super) fn allocate(devices: &mut Vec<u32>, blocks: u32) -> Result<(u32, u32), WorkError> {
    let end = devices.last().and_then(|last| last.checked_add(blocks));
    if end.is_none() {
        if devices.len() == DEVICES_MAX {
            return Err(WorkError::Refused(format!(
                "a view has at most {DEVICES_MAX} devices of 16 TiB: make several, of parts of this"
            )));
        }
        devices.push(0);
    }
    let device = devices.len() - 1;
    let first = devices[device];
    devices[device] = end.unwrap_or(blocks);
    Ok((device as u32, first))
}

/// Of a tree at this place: of the bucket, and in the namespace.
fn image_uuid(uri: &str, path: &str) -> [u8; 16] {
    let hash = blake3::Hasher::new().update(uri.as_bytes()).update(&[0]).update(path.as_bytes()).finalize();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash.as_bytes()[..16]);
    uuid
}

/// Of so many bytes, from the first on.
pub(super) fn hash_of(mut file: &File, bytes: u64) -> io::Result<[u8; 32]> {
    file.rewind()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file.take(bytes))?;
    Ok(*hasher.finalize().as_bytes())
}

/// What is said of temporary files in a directory.
pub(super) fn disk_failure(directory: &Path, error: io::Error) -> WorkError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => WorkError::Refused(format!(
            "there is no room left in {} ({error}): a view takes some 400 bytes there for each name while it is made",
            directory.display()
        )),
        _ => StateError::io(directory)(error).into(),
    }
}

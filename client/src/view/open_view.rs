//! A view that is open on this host.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use cavern_erofs::{Error as ImageError, Extent, Image, Place};
use cavern_proto::master::View;
use tokio::time::Instant;

use super::devices::{Devices, ViewParts};
use super::image::{ImageFile, would_wait};
use super::table::ViewTable;
use crate::error::ClientError;
use crate::mounts::MountView;

/// A view whose image is on this host. It stays readable when the view is deleted, as far as its contents are there.
pub struct OpenView {
    path: PathBuf,
    image: Image<ImageFile>,
    /// The same, as far as it is in memory of the kernel.
    cached: Image<ImageFile>,
    devices: Arc<Devices>,
}

impl OpenView {
    /// From a copy that was compared with its hash. *Blocking*.
    pub(super) fn new(
        view: View,
        (path, file): (PathBuf, File),
        mount: Arc<MountView>,
        parts: Arc<ViewParts>,
    ) -> Result<Self, ClientError> {
        let name = view.name.clone();
        let failed = |cause: String| ClientError::View { view: name.clone(), cause };
        let copy = || file.try_clone().map_err(|error| failed(format!("its copy cannot be opened: {error}")));
        let image =
            Image::open(ImageFile { file: copy()?, may_wait: true }).map_err(|error| failed(error.to_string()))?;
        let cached = image.by_way_of(ImageFile { file: copy()?, may_wait: false });
        let table = ViewTable::open(file, &view).map_err(failed)?;
        // No device of the image may be larger than what is answered for it.
        let mut devices = image.devices().iter().zip(&view.device_blocks);
        let has_room = devices.all(|(device, blocks)| device.blocks <= *blocks);
        if image.devices().len() != view.device_blocks.len() || image.size() > view.image_bytes || !has_room {
            let cause = "its image is not the one that was recorded: delete the view, and make it anew".to_owned();
            return Err(ClientError::View { view: view.name, cause });
        }
        Ok(Self { path, image, cached, devices: Arc::new(Devices::new(view, mount, table, parts)) })
    }

    /// Whether it is there for this client still, as far as the mount table says.
    pub(super) fn is_shown(&self) -> bool {
        !self.devices.mount.limits_users()
    }

    pub fn view(&self) -> &View {
        &self.devices.view
    }

    /// Names and attributes. *Blocking*: see [`Self::look_now`].
    pub fn image(&self) -> &Image<ImageFile> {
        &self.image
    }

    /// Finds something in the image where that takes no waiting for a disk, for event loops; else `None`.
    ///
    /// # Errors
    /// [`ClientError::View`] where the image is damaged, or cannot be read.
    pub fn look_now<T>(
        &self,
        find: impl Fn(&Self, &Image<ImageFile>) -> Result<T, ImageError>,
    ) -> Option<Result<T, ClientError>> {
        match find(self, &self.cached) {
            Err(error) if would_wait(&error) => None,
            found => Some(found.map_err(|error| self.devices.failed(error.to_string()))),
        }
    }

    /// As [`Self::look_now`], on a thread that may wait where that takes waiting.
    pub async fn look<T: Send + 'static>(
        self: &Arc<Self>,
        find: impl Fn(&Self, &Image<ImageFile>) -> Result<T, ImageError> + Send + 'static,
    ) -> Result<T, ClientError> {
        if let Some(found) = self.look_now(&find) {
            return found;
        }
        let this = self.clone();
        let found = tokio::task::spawn_blocking(move || find(&this, &this.image)).await;
        found.map_err(|_stopped| ClientError::Shutdown)?.map_err(|error| self.devices.failed(error.to_string()))
    }

    /// Where a kernel finds the image: the file has more behind it.
    pub fn image_path(&self) -> &Path {
        &self.path
    }

    /// Devices count from 1; `None` for others.
    pub fn device_bytes(&self, device: u16) -> Option<u64> {
        self.devices.bytes(device)
    }

    /// Fills a buffer with all bytes of a range within the device, for event loops; false where that takes waiting, and
    /// the buffer has nothing that counts then. Holes and ends are zeros.
    pub fn read_device_now(&self, device: u16, offset: u64, buffer: &mut [u8]) -> bool {
        let Some(device) = self.devices.holding(device, offset, buffer.len()) else { return false };
        let is_read = self.devices.fill_now(device, offset, buffer) == buffer.len();
        if is_read {
            self.count(buffer.len());
        }
        is_read
    }

    /// All bytes of a range within the device, within `client.read_timeout`, or an error that was logged with the name
    /// of the file. They stay charged to the memory budget until dropped.
    pub async fn read_device(&self, device: u16, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let extents = [Extent { length: length as u64, place: Place::Device { device, offset } }];
        self.noted(self.try_read(&extents)).await
    }

    /// Bytes of a file of the image, by its number there, fewer only at its end; as [`Self::read_device`].
    pub async fn read_file(self: &Arc<Self>, nid: u64, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let range = offset..offset.saturating_add(length as u64);
        let read = async {
            let extents = self.look(move |_, image| extents_of(image, nid, range.clone())).await?;
            self.try_read(&extents).await
        };
        self.noted(read).await
    }

    /// Counts what was read, and logs why it could not be.
    async fn noted(&self, read: impl Future<Output = Result<Bytes, ClientError>>) -> Result<Bytes, ClientError> {
        let error = match read.await {
            Ok(bytes) => {
                self.count(bytes.len());
                return Ok(bytes);
            }
            Err(error @ ClientError::View { .. }) => error,
            Err(error) => self.devices.failed(error.to_string()),
        };
        let parts = &self.devices.parts;
        parts.stats.view_errors.inc();
        if let Some(suppressed) = parts.failures.admit(self.devices.view.id) {
            tracing::warn!(suppressed, "{error}");
        }
        Err(error)
    }

    /// All of the extents, or nothing.
    async fn try_read(&self, extents: &[Extent]) -> Result<Bytes, ClientError> {
        let files = &self.devices.parts.files;
        let deadline = Instant::now() + files.limits().read;
        let length = extents.iter().map(|extent| extent.length).sum::<u64>();
        let charge = files.charge_joined(length, deadline).await?;
        let mut buffer = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        let mut rest = &mut buffer[..];
        for extent in extents {
            // No more than all of them have.
            let (part, after) = rest.split_at_mut(extent.length as usize);
            if let Place::Device { device, offset } = extent.place {
                self.devices.fill(device, offset, part, deadline).await?;
            }
            rest = after;
        }
        Ok(charge.hold(buffer))
    }

    fn count(&self, bytes: usize) {
        let stats = &self.devices.parts.stats;
        stats.view_reads.inc();
        stats.view_bytes.inc_by(bytes as u64);
    }
}

/// Where bytes of a file are: all of the range, up to its end.
fn extents_of(image: &Image<ImageFile>, nid: u64, range: Range<u64>) -> Result<Vec<Extent>, ImageError> {
    let file = image.inode(nid)?;
    let wanted = range.end.min(file.size).saturating_sub(range.start);
    let extents = image.extents(&file, range)?;
    let is_all = extents.iter().map(|extent| extent.length).sum::<u64>() == wanted;
    if is_all { Ok(extents) } else { Err(ImageError::Corrupt { nid, what: "not all of its content is anywhere" }) }
}

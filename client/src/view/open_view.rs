//! A view that is open on this host.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use cavern_erofs::{Extent, Image, Inode, Place};
use cavern_proto::master::View;
use tokio::time::Instant;

use super::devices::{Devices, ViewParts};
use super::table::ViewTable;
use crate::error::ClientError;
use crate::mounts::MountView;

/// A view whose image is on this host. It stays readable when the view is deleted, as far as its contents are there.
pub struct OpenView {
    path: PathBuf,
    image: Image<File>,
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
        let copy = file.try_clone().map_err(|error| failed(format!("its copy cannot be opened: {error}")))?;
        let image = Image::open(copy).map_err(|error| failed(error.to_string()))?;
        let table = ViewTable::open(file, &view).map_err(failed)?;
        // No device of the image may be larger than what is answered for it.
        let mut devices = image.devices().iter().zip(&view.device_blocks);
        let has_room = devices.all(|(device, blocks)| device.blocks <= *blocks);
        if image.devices().len() != view.device_blocks.len() || image.size() > view.image_bytes || !has_room {
            let cause = "its image is not the one that was recorded: delete the view, and make it anew".to_owned();
            return Err(ClientError::View { view: view.name, cause });
        }
        Ok(Self { path, image, devices: Arc::new(Devices::new(view, mount, table, parts)) })
    }

    pub fn view(&self) -> &View {
        &self.devices.view
    }

    /// Names and attributes.
    pub fn image(&self) -> &Image<File> {
        &self.image
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
        self.read(&[Extent { length: length as u64, place: Place::Device { device, offset } }]).await
    }

    /// Bytes of a file of the image, fewer only at its end; as [`Self::read_device`].
    pub async fn read_file(&self, file: &Inode, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let end = offset.saturating_add(length as u64);
        let extents = self.image.extents(file, offset..end).map_err(|error| self.devices.failed(error.to_string()))?;
        self.read(&extents).await
    }

    async fn read(&self, extents: &[Extent]) -> Result<Bytes, ClientError> {
        let error = match self.try_read(extents).await {
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

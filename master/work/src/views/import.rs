//! Views that were exported. The file comes first, and is looked at: what is in it is as its hash says, and leads to no
//! object outside of the mount that it is about. Then it is stored as it is.
//!
//! Blocks of fs-mode files are of another cluster, or are kept no more, so objects alone have the contents of such a
//! view.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_consensus::run_blocking;
use cavern_erofs::Image;
use cavern_proto::StoreUri;
use cavern_proto::master::{ImportViewRequest, View};
use cavern_proto::record::{ViewIndex, ViewManifest, ViewPage};
use cavern_proto::view_file::{DEVICES_MAX, PageIndex, TRAILER_BYTES, blocks_of, manifest_bytes, runs};
use futures::{Stream, StreamExt as _, stream};
use prost::Message;
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use super::image::{disk_failure, hash_of};
use super::{MakingProgress, ViewMaker, check_view_name};
use crate::error::WorkError;
use crate::mounts::OpenMount;
use crate::namespace::components;

/// How long the next part of a file may take to come.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are in memory while they are looked at: of an index, of which a billion files have less, or of a page.
const LOOKED_AT_MAX: u64 = 256 << 20;

impl ViewMaker {
    /// Takes in a view: `first` says as what, and has the first part of its file; `rest` has the others.
    ///
    /// # Errors
    /// [`WorkError::Invalid`] for what is no such file; [`WorkError::NotFound`] where no mount is of its bucket and
    /// prefix; those of [`Self::create`].
    pub async fn import(
        &self,
        first: ImportViewRequest,
        rest: impl Stream<Item = Result<Bytes, WorkError>> + Send,
    ) -> Result<View, WorkError> {
        let ImportViewRequest { name, path, store, data } = first;
        check_view_name(&name)?;
        let parts = stream::once(std::future::ready(Ok(data))).chain(rest);
        let file = Box::pin(self.received(parts)).await?;
        let views = self.clone();
        let looked_at = run_blocking(move || views.look_at(&file, &path).map(|found| (file, found))).await;
        let (file, (told, mount)) = looked_at.map_err(|error| WorkError::unavailable(error.to_string()))??;
        let store = self.store_of(&store, &mount)?;
        let view = View { name, mount_id: mount.id(), imported: true, ..told };
        let views = self.clone();
        self.tasks.to_the_end(async move { views.take_in(view, &store, file).await }).await
    }

    async fn take_in(&self, view: View, store: &OpenMount, file: File) -> Result<View, WorkError> {
        let _turn = self.turn().await?;
        let is_wanted = |known: &View| known.imported && known.hash == view.hash && known.mount_id == view.mount_id;
        if let Some(view) = self.known(&view.name, is_wanted).await? {
            return Ok(view);
        }
        let (view, upload) = self.begin(store, view).await?;
        let (id, nobody) = (view.id, CancellationToken::new());
        self.finish((store, &upload), id, Ok((file, view)), &MakingProgress::default(), &nobody).await
    }

    /// The parts of a file, in one without a name.
    async fn received(&self, parts: impl Stream<Item = Result<Bytes, WorkError>> + Send) -> Result<File, WorkError> {
        let (failed, directory) = (|error| disk_failure(&self.directory, error), self.directory.clone());
        let made =
            run_blocking(move || fs::create_dir_all(&directory).and_then(|()| tempfile::tempfile_in(&directory)));
        let made = made.await.map_err(|error| WorkError::unavailable(error.to_string()))?;
        let mut file = tokio::fs::File::from_std(made.map_err(failed)?);
        let mut parts = pin!(parts);
        let late = |_| WorkError::Deadline("no more of the file came for a minute: import it again".to_owned());
        while let Some(part) = tokio::time::timeout(IDLE_TIMEOUT, parts.next()).await.map_err(late)? {
            file.write_all(&part?).await.map_err(failed)?;
        }
        file.flush().await.map_err(failed)?;
        Ok(file.into_std().await)
    }

    /// What a file says of its view, if it is one and leads to no object outside of its mount, which is that of the
    /// path, or, without one, of the same bucket and prefix.
    fn look_at(&self, file: &File, path: &str) -> Result<(View, Arc<OpenMount>), WorkError> {
        let length = file.metadata().map_err(|error| disk_failure(&self.directory, error))?.len();
        let end = length.checked_sub(TRAILER_BYTES as u64).ok_or_else(|| unfit("it is too short"))?;
        let mut trailer = [0; TRAILER_BYTES];
        trailer.copy_from_slice(&read_at(file, end, TRAILER_BYTES as u64)?);
        let start = manifest_bytes(&trailer).and_then(|bytes| end.checked_sub(bytes));
        let start = start.ok_or_else(|| unfit("its end is not that of one"))?;
        let manifest: ViewManifest = decoded(file, start, end - start)?;
        let mount = match path.is_empty() {
            true => self.mount_of(&manifest.uri)?,
            false => self.mounted_at(path)?,
        };
        let told = View { object_bytes: length, ..manifest.view.unwrap_or_default() };
        let parts = [told.image_bytes, told.pages_bytes, told.index_bytes];
        if parts.into_iter().try_fold(0, u64::checked_add) != Some(start) {
            return Err(unfit("it is longer or shorter than it says"));
        }
        let hash = hash_of(file, start).map_err(|error| disk_failure(&self.directory, error))?;
        if hash[..] != told.hash[..] {
            return Err(unfit("it is not what its hash says"));
        }
        components(&told.path)?;
        check_table(file, &told, mount.ufs.prefix())?;
        Ok((told, mount))
    }

    /// The mount of a bucket and prefix.
    fn mount_of(&self, uri: &str) -> Result<Arc<OpenMount>, WorkError> {
        let wanted = StoreUri::parse(uri);
        let mounts = self.lookups.mounts.all_recorded()?;
        let mount = mounts.iter().find(|mount| StoreUri::parse(&mount.uri) == wanted);
        let none = || WorkError::NotFound(format!("no mount is of {uri}, which the view is of: mount it, or name one"));
        self.lookups.mounts.get(mount.ok_or_else(none)?.id)
    }
}

/// Whether image and table go together, and name no object outside of a prefix.
fn check_table(file: &File, told: &View, prefix: &str) -> Result<(), WorkError> {
    let View { image_bytes, pages_bytes, index_bytes, ref device_blocks, .. } = *told;
    let image = Image::open(file).map_err(|_| unfit("its image is damaged"))?;
    let are_same = image.devices().iter().map(|device| device.blocks).eq(device_blocks.iter().copied());
    if image.size() != image_bytes || device_blocks.len() > DEVICES_MAX || !are_same {
        return Err(unfit("its image is that of another"));
    }
    let damaged = || unfit("its table is damaged");
    let index: ViewIndex = decoded(file, image_bytes + pages_bytes, index_bytes)?;
    let index = PageIndex::new(index, pages_bytes).ok_or_else(damaged)?;
    for bytes in (0..).map_while(|number| index.bytes_of(number)) {
        let page: ViewPage = decoded(file, image_bytes + bytes.start, bytes.end - bytes.start)?;
        let blocks = device_blocks.get(page.device as usize).ok_or_else(damaged)?;
        for (first, key, run) in runs(&page) {
            if first.checked_add(blocks_of(run.size)).is_none_or(|end| end > *blocks) {
                return Err(damaged());
            }
            let has_object = run.inode == 0 || !run.md5.is_empty() || !run.etag.is_empty();
            if has_object && !run.object_key(key).is_some_and(|key| key.starts_with(prefix)) {
                return Err(unfit("it has objects that are not of the mount"));
            }
        }
    }
    Ok(())
}

fn decoded<M: Message + Default>(file: &File, start: u64, bytes: u64) -> Result<M, WorkError> {
    M::decode(read_at(file, start, bytes)?).map_err(|_| unfit("its table is damaged"))
}

fn read_at(file: &File, start: u64, bytes: u64) -> Result<Bytes, WorkError> {
    if bytes > LOOKED_AT_MAX {
        return Err(unfit("its table is too large"));
    }
    let mut read = vec![0; bytes as usize];
    file.read_exact_at(&mut read, start).map_err(|error| unfit(&format!("it cannot be read ({error})")))?;
    Ok(read.into())
}

fn unfit(what: &str) -> WorkError {
    WorkError::Invalid(format!("this is no view that was exported: {what}"))
}

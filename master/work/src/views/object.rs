//! The objects of views in their buckets. Their names are unique, and no listing shows them.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_consensus::run_blocking;
use cavern_proto::master::View;
use cavern_proto::record::RemoveView;
use cavern_ufs::{Metadata, MultipartUpload, PARTS_MAX, Precondition, UfsError, named};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use super::image::disk_failure;
use super::{MakingProgress, ViewMaker};
use crate::error::WorkError;
use crate::mounts::OpenMount;
use crate::namespace::components;

/// Bytes of a part of an object, and parts that are sent at a time. Each is in memory.
const PART_BYTES: u64 = 8 << 20;
const PARTS_UNDER_WAY: usize = 2;
/// How long a bucket may take to delete an object.
const DELETE_TIMEOUT: Duration = Duration::from_secs(10);

impl ViewMaker {
    /// The mount in whose bucket an object is to be: that of a path, or `own`.
    ///
    /// # Errors
    /// [`WorkError::NotFound`], and [`WorkError::Refused`] for one that is known to take none.
    pub(super) fn store_of(&self, path: &str, own: &Arc<OpenMount>) -> Result<Arc<OpenMount>, WorkError> {
        let store = if path.is_empty() { own.clone() } else { self.mounted_at(path)? };
        store.check_claimant()?;
        match store.ufs.capabilities().writes {
            true => Ok(store),
            false => Err(takes_none(&store, &"its store is only read")),
        }
    }

    pub(super) fn mounted_at(&self, path: &str) -> Result<Arc<OpenMount>, WorkError> {
        let path = format!("/{}", components(path)?.join("/"));
        let mounts = self.lookups.mounts.all_recorded()?;
        let mount = mounts.iter().find(|mount| mount.path == path);
        let not_mounted = || WorkError::NotFound(format!("{path} is not a mount: cv mount lists the mounts"));
        self.lookups.mounts.get(mount.ok_or_else(not_mounted)?.id)
    }

    /// Stores the object of a view in parts; gives its ETag. Whoever takes the view away gives up what has failed.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when the bucket takes no objects, and those of the bucket.
    pub(super) async fn store(
        &self,
        (store, upload): (&OpenMount, &MultipartUpload),
        length: u64,
        file: File,
        progress: &MakingProgress,
        gone: &CancellationToken,
    ) -> Result<String, WorkError> {
        let sent = gone.run_until_cancelled(self.send(upload, file.into(), length, progress)).await;
        sent.unwrap_or_else(|| Err(WorkError::stopping())).map_err(|error| refusal(store, error))
    }

    async fn send(
        &self,
        upload: &MultipartUpload,
        file: Arc<File>,
        length: u64,
        progress: &MakingProgress,
    ) -> Result<String, WorkError> {
        let part_bytes = length.div_ceil(PARTS_MAX).max(PART_BYTES);
        let sent = stream::iter((1..).zip(0..length.div_ceil(part_bytes))).map(|(number, index)| {
            let (file, start) = (file.clone(), index * part_bytes);
            async move {
                // A part of a file that is there, and no more than some megabytes.
                let mut bytes = vec![0; (length - start).min(part_bytes) as usize];
                let read = run_blocking(move || file.read_exact_at(&mut bytes, start).map(|()| Bytes::from(bytes)));
                let read = read.await.map_err(|error| WorkError::unavailable(error.to_string()))?;
                let body = read.map_err(|error| disk_failure(&self.directory, error))?;
                let etag = upload.part(number, &body).await?;
                progress.lock().bytes += body.len() as u64;
                Ok::<_, WorkError>(etag)
            }
        });
        let etags: Vec<String> = sent.buffered(PARTS_UNDER_WAY).try_collect().await?;
        Ok(upload.complete(&etags, Precondition::Nothing).await?)
    }

    /// Deletes what the bucket has of views that are no more.
    ///
    /// # Errors
    /// The first failure. Buckets that have failed are asked no more this time.
    pub(super) async fn delete_objects(&self, gone: Vec<View>) -> Result<(), WorkError> {
        let (mut failing, mut first) = (HashSet::new(), Ok(()));
        for view in gone {
            if failing.contains(&view.store_mount_id) {
                continue;
            }
            if let Err(error) = self.delete_object(&view).await {
                failing.insert(view.store_mount_id);
                first = first.and(Err(error));
            }
        }
        first
    }

    /// Deletes what the bucket has of a view that is no more, and forgets that. Its upload first: an earlier leader
    /// that completes it then finds it gone.
    ///
    /// # Errors
    /// Those of the bucket, after which something may be left.
    pub(super) async fn delete_object(&self, view: &View) -> Result<(), WorkError> {
        let View { name, key, etag, .. } = view;
        match self.lookups.mounts.get(view.store_mount_id) {
            Ok(store) => {
                let deleted = async {
                    if !view.upload.is_empty() {
                        store.ufs.abort_multipart(key, &view.upload).await?;
                    }
                    // One that was not finished has no ETag, and nobody else puts anything under such a name.
                    let known = Precondition::Version(etag.as_str());
                    store.ufs.delete(key, if etag.is_empty() { Precondition::Anything } else { known }).await
                };
                match tokio::time::timeout(DELETE_TIMEOUT, deleted).await {
                    Ok(Ok(())) => {}
                    Ok(Err(changed @ UfsError::VersionChanged { .. })) => {
                        tracing::warn!(view = name, "\"{key}\" is not of this cluster, and is left there: {changed}");
                    }
                    Ok(Err(error)) => return Err(error.into()),
                    Err(_) => {
                        let reason = format!("the bucket does not answer, which has \"{key}\" of a view that is gone");
                        return Err(WorkError::Deadline(reason));
                    }
                }
            }
            Err(error) if error.is_not_found() => {
                tracing::warn!(view = name, "\"{key}\" may be left in the bucket of a view that is gone: {error}");
            }
            Err(error) => return Err(error),
        }
        // Another look may have done so before.
        let _forgotten = self.proposer.propose(RemoveView { id: view.id, deleted: true }).await?;
        Ok(())
    }
}

/// Begins the object of a view, in the bucket of this mount.
///
/// # Errors
/// [`WorkError::Refused`] when the bucket takes no objects, and those of the bucket.
pub(super) async fn begin_upload(store: &OpenMount, key: &str) -> Result<MultipartUpload, WorkError> {
    let upload = store.ufs.begin_multipart(key, &named(Metadata::new())).await;
    upload.map_err(|error| refusal(store, error.into()))
}

/// What a bucket says that takes no objects.
fn refusal(store: &OpenMount, error: WorkError) -> WorkError {
    match &error {
        WorkError::Ufs(cause @ (UfsError::Denied { .. } | UfsError::NotAllowed { .. } | UfsError::Rejected { .. })) => {
            takes_none(store, cause)
        }
        _ => error,
    }
}

fn takes_none(store: &OpenMount, cause: &dyn std::fmt::Display) -> WorkError {
    let path = &store.mount.path;
    WorkError::Refused(format!(
        "the bucket of {path} takes no objects ({cause}): name a mount whose bucket does with --store PATH"
    ))
}

//! Mounts that have keys in common.
//!
//! Each fs-mode mount takes the objects under its prefix for its own, and each cache-mode mount that is written to
//! takes what it has seen of them for what they are. So of two mounts with keys in common, one would delete or replace
//! what only the bucket has of the other. Mounts that only read do no harm to each other.
//!
//! Which keys a mount has is known to whoever has its options in clear, and for a directory tree to this host alone: so
//! it is checked before the command, which does nothing when the mount table has become another meanwhile.

use std::sync::Arc;

use cavern_proto::master::{AccessMode, Mount, WriteType};
use cavern_ufs::KeySpace;

use super::open::Mounts;
use crate::error::WorkError;

impl Mounts {
    /// Compares a mount with all others. Answers the epoch of the mount table that they are in, which the command
    /// carries.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when it must not be beside one of them.
    pub(super) async fn compare_with_others(self: &Arc<Self>, wanted: &Mount) -> Result<u64, WorkError> {
        let (mounts, wanted) = (self.clone(), wanted.clone());
        let compared = tokio::task::spawn_blocking(move || {
            let (epoch, recorded) = mounts.table()?;
            // Whether it is the same mount again is for the command to say.
            if !recorded.iter().any(|mount| mount.path == wanted.path) {
                let place = KeySpace::of(&wanted.uri, &wanted.options)?;
                for mount in &recorded {
                    refuse_overlap(&wanted, &place, mount)?;
                }
            }
            Ok(epoch)
        });
        compared.await.map_err(|error| WorkError::unavailable(format!("the mounts could not be compared: {error}")))?
    }
}

/// Refuses a mount that has keys in common with another one, unless both only read.
pub(super) fn refuse_overlap(wanted: &Mount, place: &KeySpace, other: &Mount) -> Result<(), WorkError> {
    if only_reads(wanted) && only_reads(other) {
        return Ok(());
    }
    // A mount whose options make no sense any more reaches no bucket.
    if !KeySpace::of(&other.uri, &other.options).is_ok_and(|other| other.overlaps(place)) {
        return Ok(());
    }
    Err(WorkError::Refused(format!(
        "{} has keys in common with {}, which is mounted at {} in {}: the two would delete and replace each other's \
         objects. Choose another prefix for {}, or unmount {} first; only cache-mode mounts that are read-only share \
         keys",
        wanted.uri,
        other.uri,
        other.path,
        mode(other),
        wanted.path,
        other.path
    )))
}

fn only_reads(mount: &Mount) -> bool {
    mount.write_type() == WriteType::CacheMode && mount.access_mode() != AccessMode::ReadWrite
}

fn mode(mount: &Mount) -> &'static str {
    match (mount.write_type(), mount.access_mode()) {
        (WriteType::FsMode, _) => "fs-mode",
        (_, AccessMode::ReadWrite) => "cache-mode, read-write",
        _ => "cache-mode, read-only",
    }
}

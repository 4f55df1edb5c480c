//! Which cluster writes under the prefix of an fs-mode mount.
//!
//! Mounts of one cluster have no keys in common (see [`overlap`](super::overlap)). Another cluster is told by an object
//! beside all names, whose metadata name the cluster that writes there. It is put there before a mount is made, and
//! looked at for as long as the mount is there: when another cluster has taken the prefix over, this one writes and
//! deletes nothing under it any more.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::LeaderLease;
use cavern_proto::master::{Mount, WriteType};
use cavern_proto::reserved::CLAIM;
use cavern_ufs::{Metadata, Precondition, Ufs, UfsError, named};
use futures::FutureExt as _;

use super::open::{Mounts, OpenMount};
use crate::background::{BackgroundTask, Next, Pace, TaskGroup, TaskList};
use crate::error::{WorkError, if_there};

/// In its metadata: the cluster's id.
const CLUSTER: &str = "cavern-cluster";
/// Between two looks at the claims of all mounts.
const PERIOD: Duration = Duration::from_secs(60);
/// What came in between is looked at so often.
const ROUNDS: usize = 3;
/// How long an unmount waits for its claim to be given up.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Whose a prefix is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Claimant {
    Nobody,
    /// This cluster, by an object of this ETag.
    Own(String),
    Other {
        cluster_id: String,
        etag: String,
    },
    /// There is an object that is nobody's claim: somebody's file. It is left alone.
    Unknown,
}

/// Whether a prefix is taken from another cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOver {
    Never,
    Always,
}

/// Whether claiming a prefix has put an object there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claimed {
    Before,
    Now,
}

/// Other clusters can come to the buckets of a network only, and write to what others write in fs-mode only.
fn can_be_claimed(mount: &Mount) -> bool {
    mount.write_type() == WriteType::FsMode && mount.capabilities().shared
}

fn key(ufs: &Ufs) -> String {
    format!("{}{CLAIM}", ufs.prefix())
}

async fn claimant(ufs: &Ufs, own_id: &str) -> Result<Claimant, UfsError> {
    let Some(object) = if_there(ufs.head(&key(ufs)).await)? else { return Ok(Claimant::Nobody) };
    Ok(match object.metadata.get(CLUSTER) {
        Some(id) if id == own_id => Claimant::Own(object.etag),
        Some(id) => Claimant::Other { cluster_id: id.clone(), etag: object.etag },
        None => Claimant::Unknown,
    })
}

/// # Errors
/// [`UfsError::VersionChanged`] or [`UfsError::NotFound`] when somebody else was faster.
async fn put_claim(ufs: &Ufs, own_id: &str, replaces: Precondition<'_>) -> Result<(), UfsError> {
    let metadata = named(Metadata::from([(CLUSTER.to_owned(), own_id.to_owned())]));
    ufs.put(&key(ufs), &bytes::Bytes::new(), &metadata, replaces).await.map(drop)
}

/// Gives up this cluster's claim, if there is one.
async fn give_up(ufs: &Ufs, own_id: &str) -> Result<(), UfsError> {
    match claimant(ufs, own_id).await? {
        Claimant::Own(etag) => match ufs.delete(&key(ufs), Precondition::Version(&etag)).await {
            Err(UfsError::VersionChanged { .. }) => Ok(()),
            deleted => deleted,
        },
        _ => Ok(()),
    }
}

fn is_of_another(mount: &Mount, cluster_id: &str) -> String {
    format!(
        "cluster {cluster_id} writes under {}: two clusters would delete and replace each other's objects",
        mount.uri
    )
}

/// The claims of this cluster, for as long as this master leads.
#[derive(Clone)]
pub struct Claims {
    pub mounts: Arc<Mounts>,
    pub lease: LeaderLease,
    pub cluster_id: Arc<str>,
}

impl Claims {
    /// Claims the prefix of a mount that is to be made.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when it is another cluster's, and is not to be taken over.
    pub(super) async fn claim(&self, ufs: &Ufs, mount: &Mount, take_over: TakeOver) -> Result<Claimed, WorkError> {
        for _ in 0..ROUNDS {
            let found = self.claimant_unless_refused(ufs, mount, take_over).await?;
            let replaces = match &found {
                Claimant::Nobody => Precondition::Nothing,
                Claimant::Other { etag, .. } => Precondition::Version(etag),
                Claimant::Own(_) | Claimant::Unknown => return Ok(Claimed::Before),
            };
            match put_claim(ufs, &self.cluster_id, replaces).await {
                Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => {}
                put => {
                    put?;
                    return Ok(Claimed::Now);
                }
            }
        }
        Err(WorkError::Refused(format!("others claim {} at this very moment: try again", mount.uri)))
    }

    /// Whether a mount could be made that must claim its prefix.
    ///
    /// # Errors
    /// As [`Self::claim`].
    pub(super) async fn check(&self, ufs: &Ufs, mount: &Mount, take_over: TakeOver) -> Result<(), WorkError> {
        self.claimant_unless_refused(ufs, mount, take_over).await.map(drop)
    }

    async fn claimant_unless_refused(
        &self,
        ufs: &Ufs,
        mount: &Mount,
        take_over: TakeOver,
    ) -> Result<Claimant, WorkError> {
        if !can_be_claimed(mount) {
            return Ok(Claimant::Unknown);
        }
        let found = claimant(ufs, &self.cluster_id).await?;
        if let (Claimant::Other { cluster_id, .. }, TakeOver::Never) = (&found, take_over) {
            return Err(WorkError::Refused(format!(
                "{}. Unmount it there, or choose another prefix; if that cluster is no more, mount with --take-over",
                is_of_another(mount, cluster_id)
            )));
        }
        Ok(found)
    }

    /// Gives up the claim of a mount that is gone, or was not made. What cannot be given up now is in the way of other
    /// clusters, which are told what to do.
    pub(super) async fn release(&self, ufs: &Ufs, mount: &Mount) {
        if !can_be_claimed(mount) {
            return;
        }
        let given_up = tokio::time::timeout(RELEASE_TIMEOUT, give_up(ufs, &self.cluster_id)).await;
        let error = match given_up {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the bucket does not answer".to_owned(),
        };
        tracing::warn!(uri = mount.uri, "\"{}\" is left in the bucket: {error}", key(ufs));
    }

    /// Looks at the claims of all mounts.
    async fn look_at_all(&self) -> Result<Next, WorkError> {
        let mut failure = None;
        for recorded in self.mounts.all_recorded()? {
            let Ok(mount) = self.mounts.get(recorded.id) else { continue };
            if can_be_claimed(&mount.mount) && self.lease.check().is_ok() {
                failure = failure.or(self.look_at(&mount).await.err());
            }
        }
        failure.map_or(Ok(Next::Rest), |error| Err(error.into()))
    }

    /// Looks whether a prefix is still this cluster's, and claims what nobody has claimed.
    async fn look_at(&self, mount: &OpenMount) -> Result<(), UfsError> {
        match claimant(&mount.ufs, &self.cluster_id).await? {
            Claimant::Other { cluster_id, .. } => mount.set_claimant(Some(is_of_another(&mount.mount, &cluster_id))),
            Claimant::Nobody => {
                // Somebody else may have been faster, which the next look will show.
                let put = put_claim(&mount.ufs, &self.cluster_id, Precondition::Nothing).await;
                if matches!(put, Err(UfsError::VersionChanged { .. })) {
                    return Ok(());
                }
                put?;
                mount.set_claimant(None);
                if self.mounts.recorded(mount.id()).is_err_and(|error| error.is_not_found()) {
                    // It was unmounted meanwhile.
                    self.release(&mount.ufs, &mount.mount).await;
                }
            }
            Claimant::Own(_) | Claimant::Unknown => mount.set_claimant(None),
        }
        Ok(())
    }

    /// Begins to look at the claims of all mounts, from time to time.
    pub fn start(&self, background: &TaskGroup, list: &TaskList) {
        let task = BackgroundTask::new("check-claims", Pace::after(PERIOD));
        list.start(background, task, self.clone(), |claims| claims.look_at_all().boxed());
    }
}

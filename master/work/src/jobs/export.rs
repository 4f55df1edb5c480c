//! Exports: what the bucket of an fs-mode mount lacks gets there without waiting for `master.persist_delay`.
//!
//! Persistence does the work, in a hurry for as long as the job runs. The job names the changes by number, those that
//! were made before it began, and measures what is left of them; so it has nothing to remember across a restart, and
//! what is changed later is not waited for. It fails when persistence has lost hope of all that is left, and says why;
//! persistence itself goes on trying.

use std::time::Duration;

use cavern_proto::master::{Job, JobKind, WriteType};
use tokio::time::Instant;

use super::Jobs;
use super::running::RunningJob;
use crate::error::WorkError;
use crate::persist::Scope;

/// How often what is left is measured; where that takes long, it is so many times as long.
const PERIOD: Duration = Duration::from_millis(100);
const REST: u32 = 4;

impl Jobs {
    /// A job that brings all that is below a path to its bucket, with what there is to be done.
    pub(super) async fn plan_export(&self, path: &str) -> Result<Job, WorkError> {
        let scope = self.persistence.scope(path).await?;
        self.check_exportable(path, &scope).await?;
        // What sessions have answered for is exported as well.
        self.lookups.settle_mount_of(scope.inode).await?;
        let (inode, mount_id) = (scope.inode, scope.mount_id);
        let (backlog, up_to_change) = self.persistence.backlog(scope).await?;
        Ok(Job {
            kind: JobKind::Export as i32,
            inode,
            mount_id,
            up_to_change,
            files_total: backlog.items(),
            bytes_total: backlog.bytes,
            walked: true,
            ..Job::default()
        })
    }

    async fn check_exportable(&self, path: &str, scope: &Scope) -> Result<(), WorkError> {
        if scope.mount_id != 0 {
            return match self.lookups.mounts.get(scope.mount_id)?.is_fs_mode() {
                true => Ok(()),
                false => Err(WorkError::Refused(format!(
                    "{path} is in a cache-mode mount, whose bucket has everything already: export an fs-mode mount"
                ))),
            };
        }
        let top = scope.inode;
        let has_any = self.lookups.reader.read(move |tables| {
            let mounts = tables.mounts()?.into_iter().filter(|mount| mount.write_type() == WriteType::FsMode);
            let below = mounts.map(|mount| tables.is_below(mount.root_inode, top));
            Ok(below.collect::<Result<Vec<_>, _>>()?.contains(&true))
        });
        match has_any.await? {
            true => Ok(()),
            false => Err(WorkError::Refused(format!("no fs-mode mount is below {path}: there is nothing to export"))),
        }
    }

    pub(super) async fn run_export(&self, job: &RunningJob) -> Result<(), WorkError> {
        let Job { inode, mount_id, up_to_change, .. } = job.snapshot();
        let expedited = self.persistence.expedite(Scope { inode, mount_id }, up_to_change);
        loop {
            let began = Instant::now();
            let left = expedited.left().await?;
            job.left(&left);
            if left.items() == left.given_up {
                return Ok(());
            }
            tokio::time::sleep(PERIOD.max(began.elapsed() * REST)).await;
        }
    }
}

//! Lists one directory of a mount and brings the namespace in line, page by page, in bounded memory.

use std::pin::pin;

use cavern_proto::record::ListingGroup;
use cavern_ufs::{ListMode, Window, Windows};
use futures::FutureExt;

use super::adopt::WindowTail;
use super::{Flight, Listings, diff};
use crate::MasterError;
use crate::mounts::OpenMount;
use crate::state::Directory;
use crate::state::namespace::ListingCounts;

impl Listings {
    pub(super) async fn list_directory(&self, inode: u64, flight: &Flight) -> Result<ListingCounts, MasterError> {
        let directory =
            self.0.reader.read(move |tables| tables.directory(inode)).await?.ok_or_else(|| MasterError::gone(inode))?;
        if directory.mount_id == 0 {
            return Ok(ListingCounts::default());
        }
        let mount = self.0.mounts.get(directory.mount_id)?;
        if mount.is_fs_mode() && directory.record.listed_ns != 0 {
            return Ok(ListingCounts::default());
        }
        let prefix = directory.key_prefix(mount.ufs.prefix()).ok_or_else(|| MasterError::gone(inode))?;
        // Whoever still has older knowledge on its way into the log is waited for; who comes later sees this flight.
        drop(mount.gate.write().await);
        let began_ns = self.0.reader.clock().now_ns();
        flight.begin(began_ns);
        let mut lister = mount.ufs.list(&prefix, ListMode::Directory);
        let mut windows = Windows::new(prefix);
        let mut counts = ListingCounts::default();
        let mut page = self.next_page(&mount, &mut lister).await?;
        loop {
            // The next page is fetched while this one is applied. That there is none is known at once, so that a
            // directory of one page takes one proposal.
            let next = pin!(self.next_page(&mount, &mut lister));
            let mut next = next.fuse();
            let known = match &page {
                None => Some(None),
                Some(_) => (&mut next).now_or_never().transpose()?,
            };
            let window = windows.page(page.as_ref(), matches!(known, Some(None)));
            if let Some(None) = known {
                counts += match mount.is_fs_mode() {
                    true => {
                        self.adopt(&directory, &mount, window, WindowTail::Nothing { hidden: windows.hidden }).await?
                    }
                    false => self.apply_window(&directory, &mount, flight, window, began_ns).await?,
                };
                break;
            }
            let apply = async {
                match mount.is_fs_mode() {
                    true => self.adopt(&directory, &mount, window, WindowTail::Unknown).await,
                    false => self.apply_window(&directory, &mount, flight, window, 0).await,
                }
            };
            let applied;
            (page, applied) = match known {
                Some(next) => (next, apply.await?),
                None => tokio::try_join!(next, apply)?,
            };
            counts += applied;
            flight.advance();
        }
        counts.hidden = windows.hidden;
        self.0.metrics.directories.inc();
        if !windows.exists && !directory.is_mount_root() && !mount.is_fs_mode() {
            counts += self.remove_directory(&directory, &mount).await?;
        }
        Ok(counts)
    }

    /// Applies one window; with `listed_ns` the last, after which the listing is complete.
    async fn apply_window(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        flight: &Flight,
        window: Window,
        listed_ns: i64,
    ) -> Result<ListingCounts, MasterError> {
        let mut counts = ListingCounts::default();
        let (mut window, mut cursor) = (window, None);
        loop {
            let _step = flight.step.lock().await;
            let step;
            (step, window) = self.next_step(directory.inode, flight, window, cursor.take()).await?;
            let listed_ns = if step.next.is_none() { listed_ns } else { 0 };
            cursor = step.next.clone();
            if !step.is_empty() || listed_ns != 0 {
                let group = ListingGroup {
                    directory: directory.path.clone(),
                    remove: step.remove,
                    upsert: step.upsert,
                    listed_ns,
                    expect_inode: directory.inode,
                    observed_ns: 0,
                };
                counts += self.propose_listing(mount.id(), vec![group]).await?;
            }
            if cursor.is_none() {
                return Ok(counts);
            }
        }
    }

    async fn next_step(
        &self,
        inode: u64,
        flight: &Flight,
        mut window: Window,
        cursor: Option<Vec<u8>>,
    ) -> Result<(diff::Step, Window), MasterError> {
        // Names that are checked meanwhile wait for the step to be over: they need its lock.
        let newer = flight.checked_names();
        self.0
            .reader
            .read(move |tables| {
                let is_newer = |name: &[u8]| newer.contains(name);
                let step = diff::step(tables, inode, &mut window, cursor, &is_newer, &diff::is_same_version)?;
                Ok((step, window))
            })
            .await
    }

    /// Takes a directory of which the bucket has nothing any more out of its parent.
    async fn remove_directory(&self, directory: &Directory, mount: &OpenMount) -> Result<ListingCounts, MasterError> {
        let (parent, name) = (directory.record.parent, directory.record.name.clone());
        let (inode, looked_up) = (directory.inode, name.clone());
        let still_there = self.0.reader.read(move |tables| tables.dentry(parent, &looked_up)).await?;
        if still_there.is_none_or(|dentry| dentry.inode != inode) {
            return Ok(ListingCounts::default());
        }
        let above = directory.path.len().saturating_sub(1);
        let group = ListingGroup {
            directory: directory.path[..above].to_vec(),
            remove: vec![name],
            expect_inode: parent,
            ..ListingGroup::default()
        };
        self.propose_listing(mount.id(), vec![group]).await
    }
}

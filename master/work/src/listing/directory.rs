//! Lists one directory of a mount and brings the namespace in line, page by page, in bounded memory.
//!
//! What is there comes into the namespace with its page, and whoever reads the directory for the first time is given it
//! then. What is absent goes when the listing has come to its end: only then is it known that the bucket has listed in
//! the order of keys, and has left nothing for later.

use std::pin::pin;

use bytes::Bytes;
use cavern_proto::record::{ListedEntry, ListingGroup};
use cavern_state::Directory;
use cavern_state::namespace::ListingCounts;
use cavern_ufs::{Window, Windows};
use futures::FutureExt;

use super::adopt::WindowTail;
use super::{CheckReason, Flight, Listings, PORTION, diff};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// Memory for what a listing would take away at its end. What is more goes with the next listing, which follows.
const ABSENT_BYTES: usize = 64 << 20;

/// What a listing that has not come to its end would take away.
#[derive(Default)]
struct Absent {
    remove: Vec<Bytes>,
    /// Files in the places of directories.
    replace: Vec<ListedEntry>,
    bytes: usize,
    is_full: bool,
    /// The first name of all.
    first: Option<Bytes>,
}

impl Absent {
    fn add(&mut self, remove: Vec<Bytes>, replace: Vec<ListedEntry>) {
        let names = remove.iter().chain(replace.iter().map(|entry| &entry.name)).cloned();
        self.first = self.first.take().into_iter().chain(names).min();
        if self.bytes >= ABSENT_BYTES {
            self.is_full |= !remove.is_empty() || !replace.is_empty();
            return;
        }
        self.bytes += remove.iter().map(|name| size_of::<Bytes>() + name.len()).sum::<usize>();
        self.bytes += replace.iter().map(|entry| size_of::<ListedEntry>() + entry.name.len()).sum::<usize>();
        self.remove.extend(remove);
        self.replace.extend(replace);
    }

    /// Some of it; `None` when nothing is left.
    fn take(&mut self, most: usize) -> Option<(Vec<Bytes>, Vec<ListedEntry>)> {
        let remove = self.remove.split_off(self.remove.len().saturating_sub(most));
        let replace = self.replace.split_off(self.replace.len().saturating_sub(most));
        (!remove.is_empty() || !replace.is_empty()).then_some((remove, replace))
    }
}

/// What follows a window of a cache-mode directory.
enum WindowEnd<'a> {
    /// More windows: what is absent in this one goes when they were all seen.
    More(&'a mut Absent),
    /// Nothing. The directory has been listed completely at this time, unless it is 0.
    Last { listed_ns: i64 },
}

impl Listings {
    pub(super) async fn list_directory(&self, inode: u64, flight: &Flight) -> Result<ListingCounts, WorkError> {
        let directory = self.0.reader.directory(inode).await?;
        if directory.mount_id == 0 {
            return Ok(ListingCounts::default());
        }
        let mount = self.0.mounts.get(directory.mount_id)?;
        if mount.is_fs_mode() && directory.record.listed_ns != 0 {
            return Ok(ListingCounts::default());
        }
        let mut counts = ListingCounts::default();
        while !self.list_pages(&directory, &mount, flight, &mut counts).await? {}
        Ok(counts)
    }

    /// Lists the directory once, and notes what that changed; false when there was no room for all that is to go.
    async fn list_pages(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        flight: &Flight,
        counts: &mut ListingCounts,
    ) -> Result<bool, WorkError> {
        let prefix = directory.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(directory.inode))?;
        // Whoever still has older knowledge on its way into the log is waited for; who comes later sees this flight.
        drop(mount.gate.write().await);
        let began_ns = self.0.reader.clock().now_ns();
        flight.begin(began_ns);
        let mut lister = self.list(mount, &prefix);
        let (mut windows, mut absent) = (Windows::new(prefix), Absent::default());
        let mut page = self.next_page(mount, &mut lister).await?;
        let is_complete = loop {
            // The next page is fetched while this one is applied. That there is none is known at once, so that a
            // directory of one page takes one proposal.
            let next = pin!(self.next_page(mount, &mut lister));
            let mut next = next.fuse();
            let known = match &page {
                None => Some(None),
                Some(_) => (&mut next).now_or_never().transpose()?,
            };
            if page.as_ref().is_some_and(|page| page.restarts) {
                absent = Absent::default();
                mount.health.lock().in_no_order = true;
                flight.disordered();
            }
            let window = windows.page(page.as_ref(), matches!(known, Some(None)));
            if let Some(None) = known {
                if mount.is_fs_mode() {
                    let tail = WindowTail::Nothing { hidden: windows.hidden };
                    *counts += self.adopt(directory, mount, window, tail).await?;
                    break true;
                }
                let is_complete = !absent.is_full;
                *counts += self.take_away(directory, mount, flight, absent).await?;
                let listed_ns = if is_complete { began_ns } else { 0 };
                *counts += self.apply_window(directory, mount, flight, window, WindowEnd::Last { listed_ns }).await?;
                break is_complete;
            }
            let apply = async {
                if mount.is_fs_mode() {
                    let adopted = self.adopt(directory, mount, window, WindowTail::Unknown).await?;
                    flight.advance(&[], None).await;
                    return Ok(adopted);
                }
                // Where one listing was in no order, the beginning of another says nothing.
                let place = window.upto.clone().filter(|_| !mount.health.lock().in_no_order).unwrap_or_default();
                let end = WindowEnd::More(&mut absent);
                let applied = self.apply_window(directory, mount, flight, window, end).await?;
                self.advance(directory.inode, flight, &place, absent.first.as_deref()).await;
                Ok::<_, WorkError>(applied)
            };
            let applied;
            (page, applied) = match known {
                Some(next) => (next, apply.await?),
                None => tokio::try_join!(next, apply)?,
            };
            *counts += applied;
        };
        counts.hidden = windows.hidden;
        self.0.metrics.directories.inc();
        if !windows.exists && !directory.is_mount_root() && !mount.is_fs_mode() {
            *counts += self.remove_directory(directory).await?;
        }
        Ok(is_complete)
    }

    /// Lets readers go on as far as all names are known, and none is `absent` from the bucket. One that may still come
    /// would have them wait page after page, as `img` does where `img-1`, `img-2` and so on are before the `img/` that
    /// there may be: the bucket is asked.
    async fn advance(&self, inode: u64, flight: &Flight, place: &[u8], absent: Option<&[u8]>) {
        if let Some(open) = flight.advance(place, absent).await
            && Box::pin(self.refresh_name(inode, &open, CheckReason::Unknown)).await.is_ok()
        {
            flight.advance(place, absent).await;
        }
    }

    /// Applies one window.
    async fn apply_window(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        flight: &Flight,
        mut window: Window,
        mut end: WindowEnd<'_>,
    ) -> Result<ListingCounts, WorkError> {
        let (mut counts, mut cursor) = (ListingCounts::default(), None);
        loop {
            let _step = flight.step.lock().await;
            let mut step;
            (step, window) = self.next_step(directory.inode, flight, window, cursor.take()).await?;
            cursor = step.next.take();
            let listed_ns = match &mut end {
                WindowEnd::Last { listed_ns } if cursor.is_none() => *listed_ns,
                WindowEnd::Last { .. } => 0,
                WindowEnd::More(absent) => {
                    absent.add(std::mem::take(&mut step.remove), std::mem::take(&mut step.replace));
                    0
                }
            };
            if !step.is_empty() || listed_ns != 0 {
                step.upsert.append(&mut step.replace);
                let group = ListingGroup {
                    directory: directory.path.clone(),
                    remove: step.remove,
                    upsert: step.upsert,
                    listed_ns,
                    expect_inode: directory.inode,
                    observed_ns: 0,
                };
                flight.applies();
                counts += self.propose_listing(mount.id(), vec![group]).await?;
            }
            if cursor.is_none() {
                return Ok(counts);
            }
        }
    }

    /// Takes away what a listing did not have, but for names that were asked about meanwhile.
    async fn take_away(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        flight: &Flight,
        mut absent: Absent,
    ) -> Result<ListingCounts, WorkError> {
        let mut counts = ListingCounts::default();
        while let Some((mut remove, mut upsert)) = absent.take(PORTION) {
            let _step = flight.step.lock().await;
            let newer = flight.checked_names();
            remove.retain(|name| !newer.contains(name));
            upsert.retain(|entry| !newer.contains(&entry.name));
            let (directory, expect_inode) = (directory.path.clone(), directory.inode);
            let group = ListingGroup { directory, remove, upsert, expect_inode, ..ListingGroup::default() };
            flight.applies();
            counts += self.propose_listing(mount.id(), vec![group]).await?;
        }
        Ok(counts)
    }

    async fn next_step(
        &self,
        inode: u64,
        flight: &Flight,
        mut window: Window,
        cursor: Option<Vec<u8>>,
    ) -> Result<(diff::Step, Window), WorkError> {
        // Names that are checked meanwhile wait for the step to be over: they need its lock.
        let newer = flight.checked_names();
        let read = self.0.reader.read(move |tables| {
            let is_newer = |name: &[u8]| newer.contains(name);
            let step = diff::step(tables, inode, &mut window, cursor, &is_newer, &diff::is_same_version)?;
            Ok((step, window))
        });
        read.await
    }

    /// Has a directory of which the bucket had nothing looked at in its parent, which takes it out: an object may have
    /// its name, or something may have come into it since.
    async fn remove_directory(&self, directory: &Directory) -> Result<ListingCounts, WorkError> {
        let (parent, name, inode) = (directory.record.parent, directory.record.name.clone(), directory.inode);
        if !self.leads_to(parent, &name, inode).await? {
            return Ok(ListingCounts::default());
        }
        WorkError::if_found(Box::pin(self.refresh_name(parent, &name, CheckReason::Unknown)).await)?;
        let removed = u64::from(!self.leads_to(parent, &name, inode).await?);
        Ok(ListingCounts { removed, ..ListingCounts::default() })
    }

    async fn leads_to(&self, directory: u64, name: &Bytes, inode: u64) -> Result<bool, WorkError> {
        let name = name.clone();
        let dentry = self.0.reader.read(move |tables| Ok(tables.dentry(directory, &name)?)).await?;
        Ok(dentry.is_some_and(|dentry| dentry.inode == inode))
    }
}

//! The index of a mount: one flat listing of its whole prefix, which fills directories that were never listed.
//!
//! In a flat listing everything below a directory comes in one piece, so one frame per level of the current key is all
//! that must be remembered; when a directory is left behind, it is complete, and is marked as listed. Directories that
//! somebody has listed, or is just listing, are left to that. Marked are only directories that this run found empty or
//! made: elsewhere names could be left over that the bucket no longer has, and only a real listing finds those.
//!
//! A listing that [restarts](ListPage::restarts), since its bucket lists in no order, adds what was missing to the
//! directories that were marked already.
//!
//! A page that fails is asked for again, with a growing pause. A master that is restarted in the middle begins anew
//! and proposes only what is missing; so does one whose log does not take a page.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::backoff;
use cavern_proto::master::Kind;
use cavern_proto::record::command::Command;
use cavern_proto::record::{IndexRecord, InodeRecord, ListingGroup, PutIndex};
use cavern_state::records::version;
use cavern_state::{EntryVersion, Tables};
use cavern_ufs::{ListPage, Listed, Lister, is_name};
use futures::FutureExt as _;

use super::Listings;
use super::diff::listed_entry;
use crate::background::{BackgroundTask, Next, Pace};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// A directory of the current key's path.
struct Frame {
    name: Bytes,
    state: FrameState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FrameState {
    /// Empty or not there when this run came to it: ours to fill and to mark.
    Ours,
    /// Has entries from before: filled, but not marked.
    Shared,
    /// Listed already, or being listed, or below a listed directory that does not have it.
    Skipped,
}

struct Run {
    /// From the mount's root, whose name is empty.
    frames: Vec<Frame>,
    root: u64,
    began_ns: i64,
    entries: u64,
    hidden: u64,
}

/// The index of a mount, page by page.
struct Indexing {
    listings: Listings,
    mount: Arc<OpenMount>,
    /// How far it is; `None` before it begins, or begins anew.
    reached: Option<(Lister, Run)>,
    has_failed: bool,
}

impl Indexing {
    /// Takes the next page in.
    async fn step(&mut self) -> Result<Next, WorkError> {
        let Self { listings, mount, reached, has_failed } = self;
        if *has_failed {
            let current = match listings.0.mounts.get(mount.id()) {
                Err(error) if error.is_not_found() => return Ok(Next::End),
                current => current?,
            };
            // The options that it was begun with failed, and are others by now.
            if !Arc::ptr_eq(mount, &current) {
                (*mount, *reached) = (current, None);
            }
        }
        *has_failed = true;
        let begun = match reached.take() {
            None => listings.begin_index(mount).await?,
            reached => reached,
        };
        let Some((mut lister, mut run)) = begun else { return Ok(Next::End) };
        let page = match listings.next_page(mount, &mut lister).await {
            Ok(page) => page,
            Err(error) => {
                *reached = Some((lister, run));
                return Err(error);
            }
        };
        let is_last = page.is_none();
        if !listings.index_page(mount, &mut run, page).await? {
            return Ok(Next::End);
        }
        mount.set_index(!is_last, run.entries, run.hidden, 0);
        if is_last {
            return listings.finish_index(mount, &run).await.map(|()| Next::End);
        }
        (*reached, *has_failed) = (Some((lister, run)), false);
        Ok(Next::More)
    }
}

impl Listings {
    /// Indexes a mount in the background, unless that was done before.
    pub fn start_index(&self, mount: Arc<OpenMount>) {
        let task = BackgroundTask::new(format!("index {}", mount.mount.path), Pace::after(backoff::INDEX.first));
        let indexing = Indexing { listings: self.clone(), mount, reached: None, has_failed: false };
        let task = task.with_backoff(backoff::INDEX);
        self.0.background.start(&self.0.tasks, task, indexing, |indexing| indexing.step().boxed());
    }

    /// Where the index of a mount begins; `None` when it was made before.
    async fn begin_index(&self, mount: &OpenMount) -> Result<Option<(Lister, Run)>, WorkError> {
        let id = mount.id();
        if let Some(done) = self.0.reader.read(move |tables| Ok(tables.index(id)?)).await? {
            mount.set_index(false, done.entries, done.hidden_keys, 0);
            return Ok(None);
        }
        mount.set_index(true, 0, 0, 0);
        let (root, began_ns) = (mount.mount.root_inode, self.0.reader.clock().now_ns());
        let run = Run { frames: Vec::new(), root, began_ns, entries: 0, hidden: 0 };
        Ok(Some((self.list_all(mount), run)))
    }

    /// Records that a mount is indexed.
    async fn finish_index(&self, mount: &OpenMount, run: &Run) -> Result<(), WorkError> {
        let (mount_id, path, entries, hidden) = (mount.id(), &mount.mount.path, run.entries, run.hidden);
        if hidden > 0 {
            tracing::warn!(
                mount = path,
                hidden,
                "some keys cannot be file names and are not shown (see docs/semantics.md)"
            );
        }
        let finished_ns = self.0.reader.clock().now_ns();
        let index = IndexRecord { finished_ns, entries, hidden_keys: hidden, ..IndexRecord::default() };
        self.0.proposer.propose(Command::PutIndex(PutIndex { mount_id, index: Some(index) })).await?;
        tracing::info!(mount = path, entries, "the index is complete");
        Ok(())
    }

    /// Takes one page in, or the end; false when the mount is gone.
    async fn index_page(&self, mount: &OpenMount, run: &mut Run, page: Option<ListPage>) -> Result<bool, WorkError> {
        let id = mount.id();
        let prefix = mount.ufs.prefix().to_owned();
        let _gate = mount.gate.read().await;
        let listing: HashSet<u64> = self.0.flights.lock().keys().copied().collect();
        let mut taken = Run { frames: std::mem::take(&mut run.frames), ..*run };
        let groups;
        (taken, groups) = self
            .0
            .reader
            .read(move |tables| {
                if tables.mount(id)?.is_none() {
                    return Ok((taken, None));
                }
                let mut groups = Groups { tables, run: &mut taken, listing: &listing, groups: Vec::new() };
                match page {
                    Some(page) => groups.page(&page, &prefix)?,
                    None => groups.leave(0)?,
                }
                let groups = groups.groups;
                Ok((taken, Some(groups)))
            })
            .await?;
        *run = taken;
        let Some(groups) = groups else { return Ok(false) };
        if !groups.is_empty() {
            self.propose_listing(id, groups).await?;
        }
        Ok(true)
    }
}

/// What one page adds to the log.
struct Groups<'a> {
    tables: Tables<'a>,
    run: &'a mut Run,
    /// Directories that are being listed.
    listing: &'a HashSet<u64>,
    groups: Vec<ListingGroup>,
}

impl Groups<'_> {
    fn page(&mut self, page: &ListPage, prefix: &str) -> Result<(), WorkError> {
        if page.restarts {
            self.run.frames.clear();
            (self.run.entries, self.run.hidden) = (0, 0);
        }
        if self.run.frames.is_empty() {
            self.enter(Bytes::new())?;
        }
        self.run.hidden += page.hidden;
        for object in &page.objects {
            let Some(key) = object.key.strip_prefix(prefix) else { continue };
            if key.is_empty() {
                continue;
            }
            let mut names: Vec<&[u8]> = key.as_bytes().split(|byte| *byte == b'/').collect();
            let file = names.pop().filter(|name| !name.is_empty());
            // The directories above a component that cannot be shown are there all the same.
            let shown = names.iter().take_while(|name| is_name(name)).count();
            let is_hidden = shown < names.len() || file.is_some_and(|name| !is_name(name));
            self.go_to(&names[..shown])?;
            if is_hidden {
                self.run.hidden += 1;
                continue;
            }
            if let Some(name) = file {
                self.run.entries += 1;
                self.add(Bytes::copy_from_slice(name), Listed::of(object))?;
            }
        }
        Ok(())
    }

    /// Leaves directories that the key is not in, and enters those that it is in.
    fn go_to(&mut self, names: &[&[u8]]) -> Result<(), WorkError> {
        let inside = self.run.frames[1..].iter().zip(names).take_while(|(frame, name)| frame.name == **name).count();
        self.leave(inside + 1)?;
        for name in &names[inside..] {
            let name = Bytes::copy_from_slice(name);
            self.run.entries += 1;
            self.add(name.clone(), Listed::Directory)?;
            self.enter(name)?;
        }
        Ok(())
    }

    /// Keeps `depth` frames; the directories of the others are complete.
    fn leave(&mut self, depth: usize) -> Result<(), WorkError> {
        while self.run.frames.len() > depth {
            if self.run.frames.last().is_some_and(|frame| frame.state == FrameState::Ours) {
                let began_ns = self.run.began_ns;
                self.group().listed_ns = began_ns;
            }
            self.run.frames.pop();
        }
        Ok(())
    }

    fn enter(&mut self, name: Bytes) -> Result<(), WorkError> {
        let above = self.run.frames.last().map(|frame| frame.state);
        self.run.frames.push(Frame { name, state: FrameState::Skipped });
        let state = match self.current_inode()? {
            // A listed directory would have had it; a skipped one is not ours to know.
            None if above == Some(FrameState::Skipped) => FrameState::Skipped,
            None => FrameState::Ours,
            Some(inode) => match self.tables.inode(inode)? {
                _ if self.listing.contains(&inode) => FrameState::Skipped,
                Some(record) if self.is_listed(&record) => FrameState::Skipped,
                _ if self.tables.is_empty(inode)? => FrameState::Ours,
                _ => FrameState::Shared,
            },
        };
        if let Some(frame) = self.run.frames.last_mut() {
            frame.state = state;
        }
        Ok(())
    }

    /// Adds an entry to the current directory, unless it is known or the directory is not ours to fill.
    fn add(&mut self, name: Bytes, listed: Listed) -> Result<(), WorkError> {
        let state = self.run.frames.last().map(|frame| frame.state);
        if state == Some(FrameState::Skipped) {
            return Ok(());
        }
        if let Some(inode) = self.current_inode()? {
            let record = self.tables.inode(inode)?;
            if self.listing.contains(&inode) || record.is_some_and(|record| self.is_listed(&record)) {
                if let Some(frame) = self.run.frames.last_mut() {
                    frame.state = FrameState::Skipped;
                }
                return Ok(());
            }
            if self.is_known(inode, &name, &listed)? {
                return Ok(());
            }
        }
        self.group().upsert.push(listed_entry(name, listed));
        Ok(())
    }

    /// Whether others have listed a directory. One that this run has marked may lack names when the listing restarts.
    fn is_listed(&self, record: &InodeRecord) -> bool {
        record.listed_ns != 0 && record.listed_ns != self.run.began_ns
    }

    /// Whether the namespace has the entry already. A directory is never replaced by an object here: the directory may
    /// have won over it, and if it is gone, its parent's listing will say so.
    fn is_known(&self, directory: u64, name: &[u8], listed: &Listed) -> Result<bool, WorkError> {
        let Some(dentry) = self.tables.dentry(directory, name)? else { return Ok(false) };
        Ok(match listed {
            _ if dentry.kind() == Kind::Directory => true,
            Listed::Directory => false,
            Listed::File { size, mtime_ns, etag } => self.tables.inode(dentry.inode)?.is_some_and(|record| {
                record.mtime_ns == *mtime_ns && version(&record) == EntryVersion { etag: etag.clone(), size: *size }
            }),
        })
    }

    /// The inode of the current directory, if the namespace has it.
    fn current_inode(&self) -> Result<Option<u64>, WorkError> {
        let mut inode = self.run.root;
        for frame in self.run.frames.iter().skip(1) {
            match self.tables.dentry(inode, &frame.name)? {
                Some(dentry) if dentry.kind() == Kind::Directory => inode = dentry.inode,
                _ => return Ok(None),
            }
        }
        Ok(Some(inode))
    }

    /// The group of the current directory: the last one, or a new one.
    fn group(&mut self) -> &mut ListingGroup {
        let path: Vec<Bytes> = self.run.frames.iter().skip(1).map(|frame| frame.name.clone()).collect();
        if self.groups.last().is_none_or(|last| last.directory != path) {
            let observed_ns = self.run.began_ns;
            self.groups.push(ListingGroup { directory: path, observed_ns, ..ListingGroup::default() });
        }
        let last = self.groups.len() - 1;
        &mut self.groups[last]
    }
}

//! Names and inodes, as they are at one moment. Each page is of another; what it is about is judged by itself, with all
//! that it refers to.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Finding, FindingKind, Kind};
use cavern_proto::record::{DentryRecord, InodeRecord, UsageRecord};
use cavern_state::records::{is_directory, links};
use cavern_state::{Tables, schema, usage};
use cavern_work::WorkError;
use cavern_work::persist::plan;

use super::{Mounted, PAGE, Run, of_inode};

/// Where a directory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Rooted,
    /// It, or one above it, is out of the namespace, and is being deleted.
    Leaving,
    /// This one, above it or itself, is gone, or lies nowhere.
    Lost(u64),
    Loop,
}

/// What is in a directory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub entries: u64,
    pub directories: u32,
    /// What quotas go by, if that was asked for.
    pub below: UsageRecord,
}

/// Looks at inodes and names of one moment.
struct Judge<'t> {
    tables: Tables<'t>,
    mounts: Arc<Mounted>,
    /// What is below directories has been counted.
    has_usage: bool,
    /// Those that were asked about before.
    places: HashMap<u64, Place>,
    found: Vec<Finding>,
}

/// What is in a directory, by its names.
pub(super) fn count(tables: Tables<'_>, directory: u64, with_usage: bool) -> Result<Counts, WorkError> {
    let mut counts = Counts::default();
    let mut after: Option<Bytes> = None;
    if !with_usage {
        tables.scan::<()>(directory, None, |_, dentry| {
            counts.add(&dentry);
            Ok(ControlFlow::Continue(()))
        })?;
        return Ok(counts);
    }
    loop {
        let (entries, is_last) = tables.entries(directory, after.as_deref(), PAGE)?;
        let records = tables.inodes(entries.iter().map(|(_, dentry)| dentry.inode))?;
        for ((name, dentry), record) in entries.iter().zip(records) {
            counts.add(dentry);
            // It counts once, where its record says.
            let Some(record) = record.filter(|it| it.parent == directory && it.name == *name) else { continue };
            counts.add_below(UsageRecord { bytes: usage::bytes_of(&record), inodes: 1 });
            if record.kind() == Kind::Directory {
                counts.add_below(tables.usage(dentry.inode)?);
            }
        }
        if is_last {
            return Ok(counts);
        }
        after = entries.last().map(|(name, _)| name.clone());
    }
}

impl Counts {
    fn add(&mut self, dentry: &DentryRecord) {
        self.entries += 1;
        self.directories += u32::from(dentry.kind() == Kind::Directory);
    }

    /// As the figures of quotas are kept: where files are longer than can be summed up, the sum is as large as it gets.
    fn add_below(&mut self, UsageRecord { bytes, inodes }: UsageRecord) {
        self.below.bytes = self.below.bytes.saturating_add(bytes);
        self.below.inodes = self.below.inodes.saturating_add(inodes);
    }

    /// Its own name, its `.`, and the `..` of each directory in it.
    pub(super) fn links(&self) -> u32 {
        self.directories + 2
    }
}

impl<'t> Judge<'t> {
    fn new(tables: Tables<'t>, mounts: Arc<Mounted>) -> Result<Self, WorkError> {
        let has_usage = tables.counters()?.counted == usage::ALL;
        Ok(Self { tables, mounts, has_usage, places: HashMap::new(), found: Vec::new() })
    }

    fn add(&mut self, kind: FindingKind, inode: u64, detail: String) -> Result<(), WorkError> {
        self.found.push(of_inode(self.tables, kind, inode, detail)?);
        Ok(())
    }

    fn place(&mut self, directory: u64) -> Result<Place, WorkError> {
        let (mut seen, mut at) = (HashSet::new(), directory);
        let place = loop {
            if at == ROOT_INODE {
                break Place::Rooted;
            }
            if let Some(known) = self.places.get(&at) {
                break *known;
            }
            if !seen.insert(at) {
                break Place::Loop;
            }
            match self.tables.inode(at)?.map(|record| record.parent) {
                None => break Place::Lost(at),
                Some(0) if self.tables.has(schema::Orphans, at)? => break Place::Leaving,
                Some(0) => break Place::Lost(at),
                Some(parent) => at = parent,
            }
        };
        self.places.extend(seen.into_iter().map(|directory| (directory, place)));
        Ok(place)
    }

    fn inode(&mut self, inode: u64, record: &InodeRecord) -> Result<(), WorkError> {
        if record.unlinked {
            if self.tables.has(schema::Unlinked, inode)? {
                return Ok(());
            }
            let detail = "it has lost its last name, and is not among those that are to be deleted".to_owned();
            return self.add(FindingKind::NamelessInode, inode, detail);
        }
        let is_directory = is_directory(record);
        match self.place(if is_directory { inode } else { record.parent })? {
            Place::Rooted => {
                self.names_of(inode, record)?;
                if is_directory { self.counts_of(inode, record) } else { self.content_of(inode, record) }
            }
            Place::Loop if is_directory => {
                let detail = "the directories above it lead back to themselves".to_owned();
                self.add(FindingKind::ParentLoop, inode, detail)
            }
            Place::Lost(at) if at == inode || at == record.parent => {
                let detail = format!("it is in directory inode {}, which is not there", record.parent);
                self.add(FindingKind::NamelessInode, inode, detail)
            }
            // Those above it are told of.
            Place::Leaving | Place::Loop | Place::Lost(_) => Ok(()),
        }
    }

    /// Each of its names leads to it, and it has as many as it counts.
    fn names_of(&mut self, inode: u64, record: &InodeRecord) -> Result<(), WorkError> {
        if inode == ROOT_INODE {
            return Ok(());
        }
        let (tables, mut names) = (self.tables, 0);
        for item in tables.names(inode, record) {
            let (parent, name) = item?;
            names += 1;
            if tables.dentry(parent, &name)?.is_none_or(|dentry| dentry.inode != inode) {
                let name = name.escape_ascii();
                let detail = format!("its name {name} in directory inode {parent} does not lead to it");
                self.add(FindingKind::NamelessInode, inode, detail)?;
            }
        }
        let counted = links(record);
        if !is_directory(record) && counted > 1 && counted != names {
            let detail = format!("it counts {counted} names, and {names} are recorded");
            self.add(FindingKind::LinkCount, inode, detail)?;
        }
        Ok(())
    }

    /// A directory of an fs-mode mount counts right; nobody counts elsewhere.
    fn counts_of(&mut self, inode: u64, record: &InodeRecord) -> Result<(), WorkError> {
        if !self.mounts.contains_key(&record.mount_id) {
            return Ok(());
        }
        let counts = count(self.tables, inode, self.has_usage)?;
        if links(record) != counts.links() {
            let detail = format!("it counts {} links, and has {}", links(record), counts.links());
            self.add(FindingKind::LinkCount, inode, detail)?;
        }
        if let Some(counted) = record.entries.filter(|counted| *counted != counts.entries) {
            let detail = format!("it counts {counted} names, and has {}", counts.entries);
            self.add(FindingKind::EntryCount, inode, detail)?;
        }
        if self.has_usage {
            let (counted, there) = (self.tables.usage(inode)?, counts.below);
            if counted != there {
                let detail = format!(
                    "quotas count {} bytes and {} inodes below it, and there are {} and {}",
                    counted.bytes, counted.inodes, there.bytes, there.inodes
                );
                self.add(FindingKind::Usage, inode, detail)?;
            }
        }
        Ok(())
    }

    /// The bucket has it as it is under each of its names, or will be written.
    fn content_of(&mut self, inode: u64, record: &InodeRecord) -> Result<(), WorkError> {
        let tables = self.tables;
        let Some(open) = self.mounts.get(&record.mount_id).filter(|open| open.ufs.capabilities().writes).cloned()
        else {
            return Ok(());
        };
        if will_be_written(tables, inode, record)? {
            return Ok(());
        }
        let Ok(keys) = plan::keys(tables, inode, record, open.ufs.prefix())? else { return Ok(()) };
        for key in keys {
            let object = tables.object(inode, &key)?.filter(|object| !object.etag.is_empty());
            let is_there = object.is_some_and(|object| object.version == record.version);
            if !is_there || tables.noted(record.mount_id, &key)? != Some(inode) {
                let detail = format!("nothing has brought it to the bucket as it is, as \"{key}\", and nothing will");
                return self.add(FindingKind::LostIntent, inode, detail);
            }
        }
        Ok(())
    }

    fn name(&mut self, parent: u64, name: &Bytes, dentry: &DentryRecord) -> Result<(), WorkError> {
        let is_gone = match self.place(parent)? {
            Place::Leaving | Place::Loop => return Ok(()),
            Place::Lost(at) => at == parent && self.tables.inode(parent)?.is_none(),
            Place::Rooted => false,
        };
        let (inode, record) = (dentry.inode, self.tables.inode(dentry.inode)?);
        let wrong = match &record {
            _ if is_gone => "is in a directory that is gone",
            None => "leads to an inode that is gone",
            Some(record) if record.unlinked => "leads to an inode that has lost its last name",
            Some(record) if record.kind != dentry.kind => "leads to an inode of another kind",
            Some(record) if !self.is_name_of(inode, record, (parent, name))? => "leads to an inode of another name",
            Some(_) => return Ok(()),
        };
        let detail = format!("it {wrong}: {inode}");
        let directory = of_inode(self.tables, FindingKind::DanglingName, parent, detail)?;
        let path = format!("{}/{}", directory.path.trim_end_matches('/'), String::from_utf8_lossy(name));
        self.found.push(Finding { path, name: name.clone(), ..directory });
        Ok(())
    }

    fn is_name_of(&self, inode: u64, record: &InodeRecord, name: (u64, &Bytes)) -> Result<bool, WorkError> {
        if is_directory(record) || links(record) == 1 {
            return Ok((record.parent, &record.name) == name);
        }
        Ok(self.tables.has(schema::Links, (inode, (name.0, &name.1[..])))?)
    }
}

/// Whether something says that an inode is to be written to the bucket: it, or a directory above it whose new path is
/// handed on.
pub(super) fn will_be_written(tables: Tables<'_>, inode: u64, record: &InodeRecord) -> Result<bool, WorkError> {
    if tables.intent(inode)?.is_some() {
        return Ok(true);
    }
    // Those that were asked about; also where directories lie in a loop.
    let mut seen = HashSet::new();
    for name in tables.names(inode, record) {
        for above in tables.ancestors(name?.0) {
            let (at, _) = above?;
            if !seen.insert(at) {
                break;
            }
            if tables.intent(at)?.is_some_and(|intent| intent.propagates) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

impl Run<'_> {
    pub(super) async fn check_namespace(&mut self) -> Result<(), WorkError> {
        self.step("inodes");
        let mounts = self.mounts.clone();
        self.look_at_pages(move |tables, after: Option<u64>| {
            let page = tables.inodes_after(after.unwrap_or(0), PAGE)?;
            let mut judge = Judge::new(tables, mounts.clone())?;
            for (inode, record) in &page {
                judge.inode(*inode, record)?;
            }
            Ok((page.last().map(|(inode, _)| *inode), page.len(), judge.found))
        })
        .await?;
        self.step("names");
        let mounts = self.mounts.clone();
        self.look_at_pages(move |tables, after: Option<(u64, Bytes)>| {
            let after = after.as_ref().map(|(parent, name)| (*parent, &name[..]));
            let page = tables.rows_after(schema::Dentries, (), after).page(PAGE, |row| {
                let ((parent, name), dentry) = row.entry()?;
                Ok((parent, Bytes::copy_from_slice(name), dentry))
            })?;
            let mut judge = Judge::new(tables, mounts.clone())?;
            for (parent, name, dentry) in &page {
                judge.name(*parent, name, dentry)?;
            }
            Ok((page.last().map(|(parent, name, _)| (*parent, name.clone())), page.len(), judge.found))
        })
        .await
    }

    pub(super) async fn inodes_again(&self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let mut inodes: Vec<u64> = before.iter().map(|finding| finding.inode).collect();
        inodes.dedup();
        let mounts = self.mounts.clone();
        self.read(move |tables| {
            let mut judge = Judge::new(tables, mounts)?;
            for inode in inodes {
                if let Some(record) = tables.inode(inode)? {
                    judge.inode(inode, &record)?;
                }
            }
            Ok(judge.found)
        })
        .await
    }

    pub(super) async fn names_again(&self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let names: Vec<(u64, Bytes)> = before.iter().map(|finding| (finding.inode, finding.name.clone())).collect();
        let mounts = self.mounts.clone();
        self.read(move |tables| {
            let mut judge = Judge::new(tables, mounts)?;
            for (parent, name) in names {
                if let Some(dentry) = tables.dentry(parent, &name)? {
                    judge.name(parent, &name, &dentry)?;
                }
            }
            Ok(judge.found)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_any_length_are_summed_up() {
        let mut counts = Counts::default();
        for bytes in [u64::MAX, 1 << 44] {
            counts.add_below(UsageRecord { bytes, inodes: 1 });
        }
        assert_eq!(counts.below, UsageRecord { bytes: u64::MAX, inodes: 2 });
    }
}

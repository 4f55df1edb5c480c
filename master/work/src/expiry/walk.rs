//! A walk through the files that one rule governs, in bounded steps and bounded memory.
//!
//! It goes down from directory to directory, and remembers for each on its way how far it has come and which
//! directories of the last page are still to be entered. Each step sees a moment of its own: what is moved meanwhile
//! may be missed, and is an arrival then.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use bytes::Bytes;
use cavern_consensus::Clock;
use cavern_proto::master::{Kind, TtlAction};
use cavern_proto::record::command::Command;
use cavern_proto::record::{Expire, FreeContent, TtlRecord};
use cavern_state::records::{changed_ns, is_directory};
use cavern_state::tables::DEPTH_MAX;
use cavern_state::{Tables, clean_object};

use super::{Rules, is_over};
use crate::error::WorkError;

/// A file whose time is over.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Due {
    pub inode: u64,
    changed_ns: i64,
    pub command: Command,
}

/// A walk through the files that one rule governs.
pub(super) struct Walk {
    rule: TtlRecord,
    /// Directories with rules of their own, which are not entered.
    others: BTreeSet<u64>,
    /// The directory that is looked at, and those above it.
    levels: Vec<Level>,
    oldest_ns: i64,
}

struct Level {
    directory: u64,
    /// The last name of the last page.
    after: Option<Bytes>,
    /// Directories of that page that are still to be entered.
    below: Vec<u64>,
    is_read: bool,
}

impl Level {
    fn new(directory: u64) -> Self {
        Self { directory, after: None, below: Vec::new(), is_read: false }
    }
}

impl Walk {
    /// A walk that begins now; `None` for a directory that has no rule.
    pub fn new(directory: u64, rules: &Rules, now_ns: i64) -> Option<Self> {
        let rule = *rules.get(&directory)?;
        let others = rules.keys().copied().collect();
        Some(Self { rule, others, levels: vec![Level::new(directory)], oldest_ns: now_ns })
    }

    pub fn is_over(&self) -> bool {
        self.levels.is_empty()
    }

    /// The time of the last change of the oldest file that was found and not due; that of the beginning where there is
    /// none.
    pub fn oldest_ns(&self) -> i64 {
        self.oldest_ns
    }

    /// A file that was due is still there.
    pub fn leave(&mut self, due: &Due) {
        self.oldest_ns = self.oldest_ns.min(due.changed_ns);
    }

    /// Looks at `limit` names, or a few more, and gives the files among them whose time is over.
    pub fn step(&mut self, tables: Tables<'_>, limit: usize, clock: &Clock) -> Result<Vec<Due>, WorkError> {
        let (mut due, mut looked_at) = (Vec::new(), 0);
        while looked_at < limit {
            let depth = self.levels.len();
            let Some(level) = self.levels.last_mut() else { break };
            // An empty directory costs as much as a name.
            looked_at += 1;
            if let Some(directory) = level.below.pop() {
                if depth < DEPTH_MAX {
                    self.levels.push(Level::new(directory));
                }
            } else if level.is_read {
                self.levels.pop();
            } else {
                let files = level.read(tables, limit - looked_at + 1, &self.others, &mut looked_at)?;
                let directory = level.directory;
                self.look_at(tables, directory, files, clock, &mut due)?;
            }
        }
        Ok(due)
    }

    fn look_at(
        &mut self,
        tables: Tables<'_>,
        directory: u64,
        files: Vec<(Bytes, u64)>,
        clock: &Clock,
        due: &mut Vec<Due>,
    ) -> Result<(), WorkError> {
        let records = tables.inodes(files.iter().map(|(_, inode)| *inode))?;
        for ((name, inode), record) in files.into_iter().zip(records) {
            let Some(record) = record else { continue };
            // Of several names the one counts that its record has.
            let is_here = record.parent == directory && record.name == name;
            if !is_here || record.mount_id == 0 || record.unlinked || is_directory(&record) {
                continue;
            }
            let changed_ns = changed_ns(&record);
            if !is_over(changed_ns, &self.rule, clock) {
                self.oldest_ns = self.oldest_ns.min(changed_ns);
                continue;
            }
            match self.rule.action() {
                TtlAction::None => {}
                TtlAction::Delete => {
                    let expire = Expire { inode, ctime_ns: record.ctime_ns, now_ns: clock.now_ns() };
                    due.push(Due { inode, changed_ns, command: Command::Expire(expire) });
                }
                // One without blocks gets none without being changed.
                TtlAction::Free if tables.extents_of(inode, 0)?.next().transpose()?.is_none() => {}
                TtlAction::Free if clean_object(tables, inode)?.is_some() => {
                    let command = Command::FreeContent(FreeContent { inode, session: 0 });
                    due.push(Due { inode, changed_ns, command });
                }
                TtlAction::Free => self.oldest_ns = self.oldest_ns.min(changed_ns),
            }
        }
        Ok(())
    }
}

impl Level {
    /// Reads the next names, and gives those that are no directories.
    fn read(
        &mut self,
        tables: Tables<'_>,
        limit: usize,
        others: &BTreeSet<u64>,
        looked_at: &mut usize,
    ) -> Result<Vec<(Bytes, u64)>, WorkError> {
        let (mut files, mut last, mut read) = (Vec::new(), None, 0);
        let below = &mut self.below;
        let more = tables.scan(self.directory, self.after.as_deref(), |name, dentry| {
            if read == limit {
                return Ok(ControlFlow::Break(()));
            }
            read += 1;
            let name = Bytes::copy_from_slice(name);
            last = Some(name.clone());
            match dentry.kind() {
                Kind::Directory if others.contains(&dentry.inode) => {}
                Kind::Directory => below.push(dentry.inode),
                _ => files.push((name, dentry.inode)),
            }
            Ok(ControlFlow::Continue(()))
        })?;
        self.is_read = more.is_none();
        self.after = last.or(self.after.take());
        *looked_at += read;
        Ok(files)
    }
}

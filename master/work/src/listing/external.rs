//! What the bucket of an fs-mode mount has in a directory, against what is noted of the objects there: for changes that
//! others made.

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::ListedEntry;
use cavern_proto::reserved::CLAIM;
use cavern_state::Directory;
use cavern_ufs::{Listed, Lister, Window, Windows, is_name};

use super::diff::{self, listed_entry};
use super::{CheckReason, Listings};
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// A name that may have been changed by others.
#[derive(Clone, Debug)]
pub struct Difference {
    pub name: Bytes,
    /// What the bucket has.
    pub there: Option<ListedEntry>,
}

/// One listing of one directory, compared window by window.
pub struct Comparison<'a> {
    listings: &'a Listings,
    mount: &'a OpenMount,
    directory: &'a Directory,
    prefix: String,
    lister: Lister,
    windows: Windows,
    /// What is left of a window, and after which name.
    window: Option<(Window, Option<Vec<u8>>)>,
    is_listed: bool,
}

impl Listings {
    /// Begins to compare a directory of an fs-mode mount that has been listed once. `None` where its names cannot be
    /// keys.
    pub fn compare<'a>(&'a self, mount: &'a OpenMount, directory: &'a Directory) -> Option<Comparison<'a>> {
        let prefix = directory.key_prefix(mount.ufs.prefix())?;
        Some(Comparison {
            listings: self,
            mount,
            directory,
            lister: self.list(mount, &prefix),
            windows: Windows::new(prefix.clone()),
            prefix,
            window: None,
            is_listed: false,
        })
    }

    /// What the bucket has under a name now, as a listing would say it.
    pub async fn ask_now(
        &self,
        mount: &OpenMount,
        directory: &Directory,
        name: &Bytes,
    ) -> Result<Option<ListedEntry>, WorkError> {
        if !is_name(name) || std::str::from_utf8(name).is_err() {
            return Ok(None);
        }
        let listed = self.ask(mount, directory, name, CheckReason::Unknown).await?;
        Ok(listed.map(|listed| listed_entry(name.clone(), listed)))
    }
}

impl Comparison<'_> {
    /// The next names that differ; `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Vec<Difference>>, WorkError> {
        loop {
            if let Some((window, cursor)) = self.window.take() {
                let found = self.step(window, cursor).await?;
                if !found.is_empty() {
                    return Ok(Some(found));
                }
            } else if self.is_listed {
                return Ok(None);
            } else {
                let page = self.listings.next_page(self.mount, &mut self.lister).await?;
                self.is_listed = page.is_none();
                self.window = Some((self.windows.page(page.as_ref(), self.is_listed), None));
            }
        }
    }

    /// Whether the bucket had anything there, if only the directory's own object. To be asked after the end.
    pub fn exists(&self) -> bool {
        self.windows.exists
    }

    /// Keys that cannot be names.
    pub fn hidden(&self) -> u64 {
        self.windows.hidden
    }

    async fn step(&mut self, mut window: Window, cursor: Option<Vec<u8>>) -> Result<Vec<Difference>, WorkError> {
        let (directory, prefix) = (self.directory.inode, self.prefix.clone());
        let read = self.listings.0.reader.read(move |tables| {
            let is_same = |compared: &diff::MatchedName, listed: &Listed| {
                let Listed::File { etag, .. } = listed else { return Ok(false) };
                let Ok(name) = std::str::from_utf8(&compared.name) else { return Ok(false) };
                let noted = tables.object(compared.dentry.inode, &format!("{prefix}{name}"))?;
                Ok(compared.dentry.kind() != Kind::Directory && noted.is_some_and(|noted| noted.etag == *etag))
            };
            let mut step = diff::step(tables, directory, &mut window, cursor, &|_| false, &is_same)?;
            // A directory goes when it has been looked at itself: `replace` is left alone.
            let is_directory = |name: &[u8]| {
                let known = tables.dentry(directory, name)?;
                Ok::<_, WorkError>(known.is_some_and(|known| known.kind() == Kind::Directory))
            };
            for name in std::mem::take(&mut step.remove) {
                if !is_directory(&name)? {
                    step.remove.push(name);
                }
            }
            Ok((step, window))
        });
        let (step, window) = read.await?;
        self.window = step.next.map(|next| (window, Some(next)));
        let gone = step.remove.into_iter().map(|name| Difference { name, there: None });
        // What tells whose the prefix is is no file.
        let is_claim = |entry: &ListedEntry| self.directory.is_mount_root() && entry.name[..] == *CLAIM.as_bytes();
        let there = step.upsert.into_iter().filter(|entry| !is_claim(entry));
        let there = there.map(|entry| Difference { name: entry.name.clone(), there: Some(entry) });
        Ok(gone.chain(there).collect())
    }
}

//! Walks a tree of the namespace, listing what needs it, several directories at a time. The memory it takes is eight
//! bytes per directory that waits for its turn.

use std::ops::ControlFlow;

use cavern_proto::master::Kind;
use cavern_state::Directory;
use cavern_state::namespace::ListingCounts;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;

use super::Listings;
use crate::error::WorkError;

/// What a walk does to a directory before it visits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListPolicy {
    /// Lists it when it never was listed.
    Known,
    /// Lists it when it never was listed, or when its listing has reached the mount's `metadata_ttl`.
    Fresh,
    /// Lists it again.
    Refreshed,
}

/// A walk. Directories come in no particular order, each after its parent.
pub struct Walk {
    listings: Listings,
    visit: ListPolicy,
    recursive: bool,
    waiting: Vec<u64>,
    running: FuturesUnordered<BoxFuture<'static, Step>>,
}

type Step = Result<Option<(u64, ListingCounts, Vec<u64>)>, (u64, WorkError)>;

impl Walk {
    /// A walk of `root` and, if `recursive`, of everything below it.
    pub fn new(listings: Listings, root: u64, visit: ListPolicy, recursive: bool) -> Self {
        Self { listings, visit, recursive, waiting: vec![root], running: FuturesUnordered::new() }
    }

    /// The next directory, now listed, and what its listing changed; `None` after the last. An error belongs to one
    /// directory, whose id it carries; the walk goes on after it.
    pub async fn next(&mut self) -> Option<Result<(u64, ListingCounts), (u64, WorkError)>> {
        loop {
            // Half of the requests are left to others.
            while self.running.len() < self.listings.0.concurrency.div_ceil(2)
                && let Some(directory) = self.waiting.pop()
            {
                let (listings, visit, recursive) = (self.listings.clone(), self.visit, self.recursive);
                self.running.push(Box::pin(async move {
                    let result = visit_directory(&listings, directory, visit, recursive).await;
                    result.map_err(|error| (directory, error))
                }));
            }
            match self.running.next().await? {
                // It vanished while it waited.
                Ok(None) => {}
                Ok(Some((directory, counts, children))) => {
                    self.waiting.extend(children);
                    return Some(Ok((directory, counts)));
                }
                Err(failed) => return Some(Err(failed)),
            }
        }
    }
}

async fn visit_directory(
    listings: &Listings,
    inode: u64,
    visit: ListPolicy,
    recursive: bool,
) -> Result<Option<(u64, ListingCounts, Vec<u64>)>, WorkError> {
    let Some(directory) = WorkError::if_found(listings.0.reader.directory(inode).await)? else { return Ok(None) };
    let mut counts = ListingCounts::default();
    if directory.mount_id != 0 && needs_listing(listings, &directory, visit)? {
        let listed = match visit {
            ListPolicy::Known | ListPolicy::Fresh => listings.start(inode)?.ended().await,
            ListPolicy::Refreshed => listings.relist(inode).await,
        };
        let Some(listed) = WorkError::if_found(listed)? else { return Ok(None) };
        counts = listed;
    }
    let children = listings.0.reader.read(move |tables| {
        let mut children = Vec::new();
        tables.scan::<()>(inode, None, |_, dentry| {
            if recursive && dentry.kind() == Kind::Directory {
                children.push(dentry.inode);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(children)
    });
    Ok(Some((inode, counts, children.await?)))
}

fn needs_listing(listings: &Listings, directory: &Directory, visit: ListPolicy) -> Result<bool, WorkError> {
    let listed_ns = directory.record.listed_ns;
    Ok(match visit {
        _ if listed_ns == 0 => true,
        ListPolicy::Known => false,
        ListPolicy::Refreshed => true,
        ListPolicy::Fresh => {
            let ttl = listings.0.mounts.get(directory.mount_id)?.mount.listing_ttl();
            ttl.is_some_and(|ttl| listings.0.reader.is_older(listed_ns, ttl))
        }
    })
}

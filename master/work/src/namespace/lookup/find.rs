//! One look-up of a name in a directory.
//!
//! What is known of the name is answered. Where it is not known, the directory is listed first: begun, or joined, and
//! waited for as far as a page or its end; or listed anew, if its listing is older than the mount allows. A name that
//! the listing has not passed is asked of the bucket alone, as is each name that a client has changed there. Then it is
//! read again: it is known, or absent. The bucket is asked for the attributes that it keeps, where they are unknown.
//! All of this is done once more if a session returned something meanwhile, which it may have answered for.

use bytes::Bytes;
use cavern_posix::check_name;
use cavern_proto::master::{Consistency, Entry};
use cavern_proto::record::InodeRecord;
use cavern_state::Directory;

use crate::error::WorkError;
use crate::listing::{CheckReason, Progress};
use crate::mounts::OpenMount;
use crate::namespace::Lookups;
use crate::namespace::entry::name_not_found;
use crate::namespace::read_after_recall::places_of;

/// An inode, and what is known of it.
type Found = (u64, InodeRecord);

pub(super) struct Lookup<'a> {
    pub lookups: &'a Lookups,
    pub parent: u64,
    pub name: &'a Bytes,
    /// Why the bucket is asked whatever is known; `None` where what is known will do.
    pub why: Option<CheckReason>,
}

impl Lookup<'_> {
    /// # Errors
    /// [`WorkError::Deadline`] when a session does not let go, [`WorkError::Overloaded`] when they do so all the
    /// time; and those that are the answer.
    pub async fn run(&self) -> Result<Entry, WorkError> {
        let read = || async { self.lookups.with_attributes(self.find().await?, self.why).await };
        let (entry, _) = self.lookups.read_after_recall(self.parent, read, places_of).await?;
        Ok(entry)
    }

    async fn find(&self) -> Result<Entry, WorkError> {
        check_name(self.name)?;
        // Before the read: the session is notified of what changes after it.
        self.lookups.watch.watch_name(self.lookups.asker, self.parent, self.name);
        if let Some(why) = self.why {
            return self.ask_bucket(why).await;
        }
        let (directory, found) = self.lookups.read_name(self.parent, self.name).await?;
        if directory.mount_id == 0 {
            return self.known(&directory, found);
        }
        let mount = self.lookups.mounts.get(directory.mount_id)?;
        match found {
            Some(found) if mount.is_fs_mode() || directory.record.listed_ns != 0 => self.known(&directory, Some(found)),
            // Most look-ups do without these.
            found if directory.record.listed_ns == 0 => Box::pin(self.list(&directory, &mount, found)).await,
            _ => Box::pin(self.renew(&directory, &mount)).await,
        }
    }

    /// The listing of the directory begins now, and is waited for as far as its first page, or to its end.
    async fn list(&self, directory: &Directory, mount: &OpenMount, found: Option<Found>) -> Result<Entry, WorkError> {
        let asked_ns = self.lookups.reader.clock().now_ns();
        let is_known = match self.lookups.listings.start(directory.inode) {
            // Of what follows the first page the bucket would be asked name by name.
            Ok(flight) if self.lookups.listings_only => flight.ended().await.map(|_| true),
            Ok(flight) => {
                // Then it has all that was there at the time of the question.
                let is_new = flight.begins_after(asked_ns);
                match flight.first_page().await {
                    Progress::Running { known_before: Some(before) } if before > *self.name => {
                        Ok(self.may_be_absent(mount, flight.began_ns()))
                    }
                    Progress::Running { .. } | Progress::Disordered => Ok(false),
                    Progress::Ended(Ok(_)) => Ok(is_new || self.may_be_absent(mount, flight.began_ns())),
                    Progress::Ended(Err(error)) => Err(error.into()),
                }
            }
            Err(error) => Err(error),
        };
        match (is_known, found) {
            (Ok(true), _) => self.listed().await,
            (Ok(false), _) => match self.lookups.read_name(self.parent, self.name).await? {
                (directory, Some(found)) => self.known(&directory, Some(found)),
                (_, None) => self.ask_bucket(CheckReason::Unknown).await,
            },
            // What is known is served while the bucket does not answer.
            (Err(failed), Some(found)) if !failed.is_not_found() => self.known(directory, Some(found)),
            (Err(failed), _) => Err(failed),
        }
    }

    /// Whether a name may be said to be absent that a listing of this time has not had.
    fn may_be_absent(&self, mount: &OpenMount, listed_ns: i64) -> bool {
        let ttl = mount.mount.listing_ttl();
        mount.mount.consistency() != Consistency::Always
            && ttl.is_none_or(|ttl| !self.lookups.reader.is_older(listed_ns, ttl))
    }

    /// Before an absence is answered: a newer listing, if the one there is has reached its age and the bucket answers
    /// in time.
    async fn renew(&self, directory: &Directory, mount: &OpenMount) -> Result<Entry, WorkError> {
        match mount.mount.consistency() {
            Consistency::Never | Consistency::Strict => return Err(self.absent()),
            Consistency::Always if !self.lookups.listings_only => return self.ask_bucket(CheckReason::Unknown).await,
            _ => {}
        }
        let is_old =
            self.lookups.reader.is_older(directory.record.listed_ns, mount.mount.listing_ttl().unwrap_or_default());
        if !is_old || mount.is_failing() {
            return Err(self.absent());
        }
        self.lookups.relist_within_wait(directory.inode).await;
        self.listed().await
    }

    async fn ask_bucket(&self, why: CheckReason) -> Result<Entry, WorkError> {
        Box::pin(self.lookups.listings.refresh_name(self.parent, self.name, why)).await?;
        self.listed().await
    }

    /// Reads the name once more, when the namespace has what the bucket said.
    async fn listed(&self) -> Result<Entry, WorkError> {
        let (directory, found) = self.lookups.read_name(self.parent, self.name).await?;
        self.known(&directory, found)
    }

    fn known(&self, directory: &Directory, found: Option<Found>) -> Result<Entry, WorkError> {
        let (inode, record) = found.ok_or_else(|| self.absent())?;
        self.lookups.entry(directory, self.name.clone(), inode, &record)
    }

    fn absent(&self) -> WorkError {
        name_not_found(self.name)
    }
}

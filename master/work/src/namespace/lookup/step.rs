//! One look-up of a name in a directory: a state, and a step that leads to the next one.
//!
//! | state | its step |
//! |---|---|
//! | `Recall`: other sessions may hold the directory | has them let go of it |
//! | `Unread` | notes that the session sees the name, and reads it |
//! | `Unlisted`: the directory never was listed | begins its listing, or joins it, and waits for a page or its end |
//! | `BeingListed`: that page is in the namespace | reads the name again |
//! | `Listed`: the directory was listed, without the name | lists it anew, if that is too long ago for the mount |
//! | `AskBucket` | asks the bucket about the name alone |
//! | `Asked`: the bucket has said what this look-up takes | reads the name again: it is known, or absent |
//! | `Known` | asks the bucket for the attributes that it keeps, where they are unknown |
//! | `Answered` | ends, unless a session let go of something since, which it may have answered for |

use std::sync::Arc;

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
use crate::namespace::read_after_recall::{DirectoryId, ReadAfterRecall, places_of};

/// An inode, and what is known of it.
type Found = (u64, InodeRecord);

/// See the table of the module.
enum State {
    Recall,
    Unread,
    Unlisted {
        directory: Directory,
        /// What is known of the name from elsewhere.
        found: Option<Box<Found>>,
    },
    BeingListed,
    Listed {
        directory: Directory,
        mount: Arc<OpenMount>,
    },
    AskBucket(CheckReason),
    Asked,
    Known(Entry),
    Answered(Result<(Entry, DirectoryId), WorkError>),
    Done(Entry),
}

pub(super) struct Lookup<'a> {
    pub lookups: &'a Lookups,
    pub parent: u64,
    pub name: &'a Bytes,
    /// Why the bucket is asked whatever is known; `None` where what is known will do.
    pub why: Option<CheckReason>,
}

impl Lookup<'_> {
    pub async fn run(self) -> Result<Entry, WorkError> {
        let mut read = self.lookups.begin_read(self.parent).await?;
        let mut state = State::Recall;
        loop {
            state = match self.step(state, &mut read).await? {
                State::Done(entry) => return Ok(entry),
                next => next,
            };
        }
    }

    /// # Errors
    /// [`WorkError::Deadline`] when a session does not let go, [`WorkError::Overloaded`] when they do so all the
    /// time; and those that are the answer.
    async fn step(&self, state: State, read: &mut ReadAfterRecall<'_>) -> Result<State, WorkError> {
        let next = match state {
            State::Recall => {
                read.begin().await?;
                return Ok(State::Unread);
            }
            State::Unread => self.read().await,
            State::Unlisted { directory, found } => self.list(&directory, found).await,
            State::BeingListed => {
                self.read_known().await.map(|known| known.unwrap_or(State::AskBucket(CheckReason::Unknown)))
            }
            State::Listed { directory, mount } => self.renew(&directory, &mount).await,
            State::AskBucket(why) => self.ask_bucket(why).await,
            State::Asked => self.read_known().await.and_then(|known| known.ok_or_else(|| self.absent())),
            State::Known(entry) => {
                self.lookups.with_attributes(entry, self.why).await.map(|found| State::Answered(Ok(found)))
            }
            State::Answered(answer) => {
                let places = answer.as_ref().ok().map(places_of).into_iter().flatten();
                return if read.end(places).await? {
                    answer.map(|(entry, _)| State::Done(entry))
                } else {
                    Ok(State::Recall)
                };
            }
            State::Done(entry) => Ok(State::Done(entry)),
        };
        // An absence or a failure is an answer, too.
        Ok(next.unwrap_or_else(|error| State::Answered(Err(error))))
    }

    async fn read(&self) -> Result<State, WorkError> {
        check_name(self.name)?;
        // Before the read: the session is notified of what changes after it.
        self.lookups.watch.watch_name(self.lookups.asker, self.parent, self.name);
        if let Some(why) = self.why {
            return Ok(State::AskBucket(why));
        }
        let (directory, found) = self.lookups.read_name(self.parent, self.name).await?;
        if directory.mount_id == 0 {
            return found.map_or_else(|| Err(self.absent()), |found| self.known(&directory, &found));
        }
        let mount = self.lookups.mounts.get(directory.mount_id)?;
        match found {
            Some(found) if mount.is_fs_mode() || directory.record.listed_ns != 0 => self.known(&directory, &found),
            found if directory.record.listed_ns == 0 => Ok(State::Unlisted { directory, found: found.map(Box::new) }),
            _ => Ok(State::Listed { directory, mount }),
        }
    }

    /// The listing of the directory begins now, and is waited for as far as its first page, or to its end.
    async fn list(&self, directory: &Directory, found: Option<Box<Found>>) -> Result<State, WorkError> {
        let failed: WorkError = match self.lookups.listings.start(directory.inode) {
            // Of what follows the first page the bucket would be asked name by name.
            Ok(flight) if self.lookups.listings_only => match flight.ended().await {
                Ok(_) => return Ok(State::Asked),
                Err(error) => error,
            },
            Ok(flight) => match flight.first_page().await {
                Progress::Running(_) => return Ok(State::BeingListed),
                Progress::Ended(Ok(_)) => return Ok(State::Asked),
                Progress::Ended(Err(error)) => error.into(),
            },
            Err(error) => error,
        };
        match found {
            // What is known is served while the bucket does not answer.
            Some(found) if !failed.is_not_found() => self.known(directory, &found),
            _ => Err(failed),
        }
    }

    /// Before an absence is answered: a newer listing, if the one there is has reached its age and the bucket answers
    /// in time.
    async fn renew(&self, directory: &Directory, mount: &OpenMount) -> Result<State, WorkError> {
        match mount.mount.consistency() {
            Consistency::Never | Consistency::Strict => return Err(self.absent()),
            Consistency::Always if !self.lookups.listings_only => return Ok(State::AskBucket(CheckReason::Unknown)),
            _ => {}
        }
        let is_old =
            self.lookups.reader.is_older(directory.record.listed_ns, mount.mount.listing_ttl().unwrap_or_default());
        if !is_old || mount.is_failing() {
            return Err(self.absent());
        }
        self.lookups.relist_within_wait(directory.inode).await;
        Ok(State::Asked)
    }

    async fn ask_bucket(&self, why: CheckReason) -> Result<State, WorkError> {
        self.lookups.listings.refresh_name(self.parent, self.name, why).await?;
        Ok(State::Asked)
    }

    /// Reads the name once more; `None` where it is not there.
    async fn read_known(&self) -> Result<Option<State>, WorkError> {
        let (directory, found) = self.lookups.read_name(self.parent, self.name).await?;
        found.map(|found| self.known(&directory, &found)).transpose()
    }

    fn known(&self, directory: &Directory, (inode, record): &Found) -> Result<State, WorkError> {
        Ok(State::Known(self.lookups.entry(directory, self.name.clone(), *inode, record)?))
    }

    fn absent(&self) -> WorkError {
        name_not_found(self.name)
    }
}

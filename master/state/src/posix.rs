//! Changes of names and inodes in fs-mode mounts, as POSIX has them: one file per kind of change.
//!
//! What a change makes of the attributes of inodes, and what it takes to be allowed, are the rules of [`cavern_posix`],
//! which clients apply as well to what they answer for. What they are applied to is found here.
//!
//! Every change checks all that can be wrong before it writes anything, so a refusal leaves no trace (but for a lock's,
//! whose request may wait after it). Permissions are mostly not looked at here: the kernel of the caller has done that,
//! with the owner and mode that it was given. Whether the mount is there for the client is; and where it limits the
//! users of a client, [`permission`] checks each change for the user who asks.
//!
//! A mutation that comes again, because its answer was lost, is answered with the result that it had: results are kept
//! per session until the session says that it has them. One that lets too many of them gather changes nothing more
//! before it has said so.

mod acl;
mod attributes;
mod content;
mod create;
mod external;
mod held;
mod hold;
mod link;
mod lock;
mod open;
mod permission;
mod quota;
mod remove;
mod rename;
mod results;
mod ttl;
mod xattr;

use std::collections::BTreeSet;

use cavern_posix::{self as rules, PosixError};
use cavern_proto::master::mutation::Change as Kind;
use cavern_proto::master::{Attr, Consistency, Mount, Mutation, MutationResult, User, WriteType};
use cavern_proto::record::{InodeRange, InodeRecord, Mutate};
use cavern_proto::{ClientAccess, ROOT_INODE};
use rustix::io::Errno;

use super::existing;
use super::intent::{self, Reach};
use super::records::{attributes, inode_key, is_directory};
use super::transaction::{Change, Transaction};
use super::{ALL_BEFORE, Family, Outcome, next_generation, records};
use crate::error::StateError;
use permission::LimitedUser;
use results::{Known, shortened};

pub use external::take_in;
pub use hold::{ONLY_READS, forget_content, reap};
pub use link::{delete_link, put_link};
pub use lock::blocking_lock;
pub use permission::{may_access, may_have_layout};
pub use results::end_session_step;
pub use ttl::expire;

/// Why a change is refused.
#[derive(Debug)]
struct Refusal {
    errno: Errno,
    reason: String,
}

/// What keeps a change from being made: the state (reported to the caller), or a broken database.
#[derive(Debug)]
enum MutationError {
    Refused(Refusal),
    /// The bucket has names in a directory, or somewhere below it, that the namespace lacks: they must come first.
    Unlisted {
        directory: u64,
        below: bool,
    },
    /// Another session holds this directory, and may have answered for changes in it.
    Held {
        directory: u64,
    },
    Storage(StateError),
}

impl From<StateError> for MutationError {
    fn from(error: StateError) -> Self {
        Self::Storage(error)
    }
}

impl From<PosixError> for MutationError {
    fn from(error: PosixError) -> Self {
        Self::Refused(Refusal { errno: error.errno(), reason: error.to_string() })
    }
}

fn refuse<T>(errno: Errno, reason: impl Into<String>) -> Result<T, MutationError> {
    Err(MutationError::Refused(Refusal { errno, reason: reason.into() }))
}

/// Names that a directory got or lost, and those of directories among them.
#[derive(Clone, Copy, Debug, Default)]
struct EntriesChange {
    names: i64,
    directories: i32,
}

/// One mutation under way.
struct MutationContext<'t, 'd> {
    transaction: &'t mut Transaction<'d>,
    /// The session that asks; 0 for the master itself.
    session: u64,
    /// The client whose it is, if mounts may not be there for it.
    client: Option<String>,
    /// Who asks on its host, as it says.
    user: Option<User>,
    /// Whose permission the change takes, if the mount that was found limits users.
    limited: Option<LimitedUser>,
    /// It holds what this is about, and has answered for the change.
    is_answered: bool,
    now_ns: i64,
    /// What the times of inodes become.
    made_ns: i64,
    /// Owner of what is created.
    uid: u32,
    gid: u32,
    /// A mount that was found to be in fs-mode, and its root.
    mount: u32,
    mount_root: u64,
    /// What the client may do in it.
    access: ClientAccess,
    /// Replicas that it asks for.
    mount_replicas: u32,
    /// Bytes of its blocks.
    block_size: u64,
    /// Inodes whose attributes changed, in the order of their first change; the record is that of the last.
    touched: Vec<(u64, InodeRecord)>,
    /// Directories that lie elsewhere now, and with them what is in them.
    moved: Vec<u64>,
    /// Inodes that were to be held and are no longer there.
    gone: Vec<u64>,
    /// The session holds the directory that it has made.
    held: bool,
    /// Numbers that it has reserved.
    reserved: Option<InodeRange>,
}

/// Applies a mutation, or finds the result that it had when it was applied.
pub fn mutate(transaction: &mut Transaction<'_>, mutate: Mutate) -> Result<Outcome, StateError> {
    let Some(mut mutation) = mutate.mutation else { return Ok(Outcome::Refused("an empty mutation".into())) };
    let seq = mutation.seq;
    transaction.origin = mutate.session;
    let mut results = match results::find(transaction, mutate.session, seq)? {
        Known::New(results) => results,
        Known::Result(known) => {
            see_result(transaction, &mutation, &known)?;
            let waits_for = if is_of_strict(transaction, &known)? { ALL_BEFORE } else { 0 };
            return Ok(Outcome::Mutated(Box::new(known), waits_for));
        }
    };
    results.acknowledge(transaction, mutate.answered, seq, &mutate.owner)?;
    if let Some(refused) = results.refusal(&mutation) {
        results.put(transaction);
        return Ok(Outcome::Mutated(Box::new(refused), 0));
    }
    let now_ns = mutate.now_ns;
    let mut mutating = MutationContext {
        session: mutate.session,
        client: mutate.client,
        user: mutation.user.take(),
        is_answered: mutation.is_answered,
        made_ns: if mutation.made_ns == 0 { now_ns } else { mutation.made_ns },
        uid: mutation.uid,
        gid: mutation.gid,
        ..MutationContext::new(transaction, now_ns)
    };
    let sets_length = matches!(&mutation.change, Some(Kind::SetAttr(set)) if set.size.is_some());
    let done = mutating.check_session().and_then(|()| mutating.make(mutation));
    let mut result = match done {
        Ok(inode) => {
            mutating.note_intents()?;
            let (attributes, gone) = (mutating.attributes(sets_length), std::mem::take(&mut mutating.gone));
            MutationResult { inode, attributes, gone, held: mutating.held, ..MutationResult::default() }
        }
        Err(MutationError::Refused(Refusal { errno, reason })) => {
            MutationResult { errno: errno.raw_os_error(), reason, ..MutationResult::default() }
        }
        Err(MutationError::Unlisted { directory, below }) => MutationResult {
            errno: Errno::AGAIN.raw_os_error(),
            reason: format!("{} has names in the bucket that are not known yet", mutating.shown(directory)?),
            unlisted: directory,
            unlisted_below: below,
            ..MutationResult::default()
        },
        Err(MutationError::Held { directory }) => MutationResult {
            errno: Errno::AGAIN.raw_os_error(),
            reason: format!(
                "another client answers for changes in {}: have it let go first",
                mutating.shown(directory)?
            ),
            held_elsewhere: directory,
            ..MutationResult::default()
        },
        Err(MutationError::Storage(error)) => return Err(error),
    };
    result.reason = shortened(result.reason);
    let reserved = mutating.reserved.take();
    results.keep(transaction, seq, &result, reserved);
    Ok(Outcome::Mutated(Box::new(result), 0))
}

/// Notes what a session learns from a result that it had already, perhaps from another master: it is notified when that
/// changes again.
fn see_result(
    transaction: &mut Transaction<'_>,
    mutation: &Mutation,
    result: &MutationResult,
) -> Result<(), StateError> {
    match &mutation.change {
        Some(Kind::Create(create)) => transaction.seen.push((create.parent, create.name.clone())),
        Some(Kind::Link(link)) => transaction.seen.push((link.parent, link.name.clone())),
        Some(Kind::Remove(remove)) => transaction.seen.push((remove.parent, remove.name.clone())),
        Some(Kind::Rename(rename) | Kind::RenameWhiteout(rename)) => {
            transaction.seen.push((rename.parent, rename.name.clone()));
            transaction.seen.push((rename.new_parent, rename.new_name.clone()));
        }
        _ => {}
    }
    for attr in &result.attributes {
        if let Some(record) = transaction.inode(attr.inode)? {
            transaction.seen.push((record.parent, record.name));
        }
    }
    Ok(())
}

/// Whether a result that a session had already is of a strict mount: the first answer may have been waiting for others
/// when it was lost, perhaps in another term.
fn is_of_strict(transaction: &mut Transaction<'_>, result: &MutationResult) -> Result<bool, StateError> {
    let parents = transaction.seen.iter().map(|(parent, _)| *parent);
    let inodes: BTreeSet<u64> = parents.chain(result.attributes.iter().map(|attr| attr.inode)).collect();
    let mut mounts = BTreeSet::new();
    for inode in inodes {
        mounts.extend(transaction.inode(inode)?.map(|record| record.mount_id));
    }
    for mount in mounts {
        let mount = transaction.before().mount(mount)?;
        if mount.is_some_and(|mount| mount.consistency() == Consistency::Strict) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl<'t, 'd> MutationContext<'t, 'd> {
    fn new(transaction: &'t mut Transaction<'d>, now_ns: i64) -> Self {
        Self {
            transaction,
            session: 0,
            client: None,
            user: None,
            limited: None,
            is_answered: false,
            now_ns,
            made_ns: now_ns,
            uid: 0,
            gid: 0,
            mount: 0,
            mount_root: 0,
            access: ClientAccess::Full,
            mount_replicas: 1,
            block_size: 1,
            touched: Vec::new(),
            moved: Vec::new(),
            gone: Vec::new(),
            held: false,
            reserved: None,
        }
    }
}

impl MutationContext<'_, '_> {
    /// Makes a change; gives the inode that it is about.
    fn make(&mut self, mutation: Mutation) -> Result<u64, MutationError> {
        if mutation.made_ns < 0 {
            return refuse(Errno::INVAL, format!("a change that was made at {} ns", mutation.made_ns));
        }
        let session = self.session;
        match mutation.change {
            None => refuse(Errno::NOSYS, "a change of a kind that this master does not know"),
            Some(Kind::Create(create)) => self.create(create, session),
            Some(Kind::Link(link)) => self.link(&link),
            Some(Kind::Remove(remove)) => self.remove(&remove),
            Some(Kind::Rename(rename)) => self.rename(&rename),
            Some(Kind::RenameWhiteout(rename)) => self.rename_whiteout(&rename),
            Some(Kind::SetAttr(set)) => self.set_attributes(&set),
            Some(Kind::SetXattr(set)) => self.set_xattr(&set),
            Some(Kind::RemoveXattr(remove)) => self.remove_xattr(&remove),
            Some(Kind::Commit(commit)) => self.commit(&commit),
            Some(Kind::Hold(inode)) => self.hold(inode, session),
            Some(Kind::LetGo(inode)) => Ok(self.release(inode, session)),
            Some(Kind::SetHolds(set)) => self.set_holds(&set, session),
            Some(Kind::SetLock(set)) => self.set_lock(set, session),
            Some(Kind::SetQuota(set)) => self.set_quota(&set),
            Some(Kind::SetTtl(set)) => self.set_ttl(&set),
            Some(Kind::ReserveInodes(count)) => self.reserve(count),
            Some(Kind::LetGoDirectories(asked)) => self.let_go_directories(&asked),
            Some(Kind::OpenToWrite(open)) => self.open_to_write(open, session),
        }
    }

    /// What a refusal calls an inode: its path, by the first of its names, or its number where it has none.
    fn shown(&mut self, inode: u64) -> Result<String, StateError> {
        Ok(match existing::path(self.transaction, inode, ROOT_INODE)? {
            Some(path) => format!("/{}", String::from_utf8_lossy(path.strip_suffix(b"/").unwrap_or_default())),
            None => format!("inode {inode}"),
        })
    }

    /// A directory in which names may be changed.
    fn directory(&mut self, inode: u64) -> Result<InodeRecord, MutationError> {
        let record = self.inode(inode)?;
        self.check_own_directory(inode, &record)?;
        if !is_directory(&record) {
            return refuse(Errno::NOTDIR, format!("{} is not a directory", self.shown(inode)?));
        }
        if record.unlinked {
            return refuse(Errno::NOENT, format!("{} has been removed", self.shown(inode)?));
        }
        Ok(record)
    }

    /// A directory of which all names are known.
    fn whole_directory(&mut self, inode: u64) -> Result<InodeRecord, MutationError> {
        let record = self.directory(inode)?;
        if record.listed_ns == 0 {
            return Err(MutationError::Unlisted { directory: inode, below: false });
        }
        Ok(record)
    }

    /// A directory whose path changes: of it, and of all below it, all names must be known.
    fn check_whole_below(&mut self, inode: u64) -> Result<(), MutationError> {
        let Some(path) = existing::path(self.transaction, inode, self.mount_root)? else {
            return refuse(Errno::STALE, format!("directory inode {inode} is no longer there"));
        };
        match self.transaction.before().has_unlisted(self.mount, &path)? {
            true => Err(MutationError::Unlisted { directory: inode, below: true }),
            false => Ok(()),
        }
    }

    /// An inode of an fs-mode mount, which the client may change, and now.
    fn inode(&mut self, inode: u64) -> Result<InodeRecord, MutationError> {
        let record = self.lockable_inode(inode)?;
        if self.access == ClientAccess::ReadOnly {
            return refuse(Errno::ROFS, format!("{} is there for this client to be read", self.shown(inode)?));
        }
        Ok(record)
    }

    /// An inode of an fs-mode mount, which may be locked now also by whoever only reads.
    fn lockable_inode(&mut self, inode: u64) -> Result<InodeRecord, MutationError> {
        let record = self.known_inode(inode)?;
        self.check_holder(inode, &record)?;
        Ok(record)
    }

    /// An inode of an fs-mode mount that is there for the client, whoever holds its directory.
    fn known_inode(&mut self, inode: u64) -> Result<InodeRecord, MutationError> {
        let gone = || refuse(Errno::STALE, format!("inode {inode} is no longer there"));
        let Some(record) = self.transaction.inode(inode)? else { return gone() };
        let mount = match record.mount_id {
            0 => None,
            id if id == self.mount => return Ok(record),
            id => self.transaction.before().mount(id)?,
        };
        match mount {
            Some(mount) if !self.access_to(&mount).can_see() => gone(),
            Some(mount) if mount.write_type() == WriteType::FsMode => {
                self.access = self.access_to(&mount);
                self.find_limited_user(&mount);
                (self.mount, self.mount_root) = (mount.id, mount.root_inode);
                (self.mount_replicas, self.block_size) = (mount.replicas.max(1), mount.block_size.max(1));
                self.transaction.is_strict |= mount.consistency() == Consistency::Strict;
                Ok(record)
            }
            Some(mount) => refuse(Errno::ROFS, format!("{} is mounted in cache-mode", mount.path)),
            None => refuse(Errno::ROFS, format!("{} is in no mount: only mounts can be changed", self.shown(inode)?)),
        }
    }

    fn access_to(&self, mount: &Mount) -> ClientAccess {
        self.client.as_ref().map_or(ClientAccess::Full, |client| mount.access_of(client))
    }

    /// Stores an inode whose attributes changed, and has the sessions notified.
    fn put(&mut self, inode: u64, record: InodeRecord) {
        self.transaction.put_inode(inode, record.clone());
        self.touch(inode, record);
        self.transaction.changes.push(Change::Inode(inode));
    }

    fn touch(&mut self, inode: u64, record: InodeRecord) {
        match self.touched.iter_mut().find(|(known, _)| *known == inode) {
            Some((_, known)) => *known = record,
            None => self.touched.push((inode, record)),
        }
    }

    /// What the bucket has to learn of this mutation. The root of a mount has no object.
    fn note_intents(&mut self) -> Result<(), StateError> {
        self.transaction.counters.arrivals += self.moved.len() as u64;
        for (inode, record) in self.touched.iter().filter(|(inode, _)| *inode != self.mount_root) {
            if record.unlinked {
                intent::abandon(self.transaction, *inode, record.mount_id, self.now_ns)?;
            } else {
                let reach = if self.moved.contains(inode) { Reach::Below } else { Reach::Itself };
                intent::note(self.transaction, *inode, record.mount_id, reach, self.now_ns)?;
            }
        }
        Ok(())
    }

    /// Of what was changed. Who has set a length asks for no layout when nothing is left.
    fn attributes(&self, sets_length: bool) -> Vec<Attr> {
        let counters = sets_length.then_some(&self.transaction.counters);
        let attr = |(inode, record): &(u64, InodeRecord)| {
            let next_generation = counters.map_or(0, |counters| next_generation(counters, *inode, record));
            Attr { next_generation, ..attributes(*inode, record) }
        };
        self.touched.iter().map(attr).collect()
    }

    /// A directory whose entries changed: its times, and how many there are.
    fn directory_changed(&mut self, inode: u64, mut record: InodeRecord, change: EntriesChange) {
        records::change(&mut record, |attr| rules::directory_changed(attr, change.directories, self.made_ns));
        records::count_entries(&mut record, change.names);
        self.put(inode, record);
    }

    /// Marks an inode that has lost its last name, and stores it.
    fn unlink(&mut self, inode: u64, mut record: InodeRecord) -> Result<(), StateError> {
        quota::drop_quota(self.transaction, inode)?;
        ttl::drop_ttl(self.transaction, inode, &record);
        if is_directory(&record) {
            super::held::forget(self.transaction, record.mount_id, inode)?;
        }
        records::change(&mut record, |attr| rules::name_dropped(attr, self.made_ns));
        self.transaction.put_bytes(Family::Unlinked, &inode_key(inode), &[]);
        self.put(inode, record);
        self.transaction.changes.push(Change::Unlinked(inode));
        Ok(())
    }

    fn name_changed(&mut self, parent: u64, name: &bytes::Bytes, old_inode: u64, new_inode: u64) {
        let name = name.clone();
        self.transaction.changes.push(Change::Entry {
            parent,
            name,
            old_inode,
            new_inode,
            first_fill: false,
            mount_id: 0,
        });
    }
}

#[cfg(test)]
mod tests;

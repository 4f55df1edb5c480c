//! A change under way: who asks for it, the mount in which it is made, and what it did beside what it wrote.

use cavern_posix::{self as rules, Refusal};
use cavern_proto::ClientAccess;
use cavern_proto::master::{Attr, Consistency, Mount, User, UserLimits, WriteType};
use cavern_proto::record::{InodeRange, InodeRecord};
use cavern_proto::reserved::is_reserved;
use rustix::io::Errno;

use crate::change::Change;
use crate::error::{Result, StateError};
use crate::index::inodes::drop_ttl;
use crate::index::intents::{self, Reach};
use crate::index::{delegations, usage};
use crate::records::{self, attributes, is_directory, next_generation};
use crate::schema;
use crate::transaction::Transaction;

/// What keeps a change from being made: the state (reported to the caller), or a broken database.
#[derive(Debug)]
pub enum MutationError {
    /// The state does not allow it.
    Refused(Refusal),
    /// The bucket has names in a directory, or somewhere below it, that the namespace lacks: they must come first.
    Unlisted { directory: u64, below: bool },
    /// Another session holds the delegation of this directory, and may have answered for changes in it.
    Delegated { directory: u64 },
    /// The database failed.
    Storage(StateError),
}

/// A part of a change, or what keeps it from being made.
pub type Checked<T = ()> = Result<T, MutationError>;

impl From<StateError> for MutationError {
    fn from(error: StateError) -> Self {
        Self::Storage(error)
    }
}

impl From<Refusal> for MutationError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

pub fn refuse<T>(errno: Errno, reason: impl Into<String>) -> Checked<T> {
    Err(MutationError::Refused(Refusal { errno, reason: reason.into() }))
}

/// Who asks for a change, and when.
#[derive(Debug, Default)]
pub struct Caller {
    /// The session that asks; 0 for the master itself.
    pub session: u64,
    /// The client whose it is, if mounts may not be there for it.
    pub client: Option<String>,
    /// Who asks on its host, as it says.
    pub user: Option<User>,
    /// It holds what this is about, and has answered for the change.
    pub is_write_back: bool,
    /// User and group that own what is created.
    pub owner: (u32, u32),
    /// When the change is applied.
    pub now_ns: i64,
    /// What the times of inodes become.
    pub made_ns: i64,
}

/// A user whose permission a change takes.
#[derive(Clone, Debug)]
pub struct LimitedUser {
    /// As he counts here.
    pub user: User,
    pub limits: UserLimits,
}

/// What a change did beside what it wrote.
#[derive(Debug, Default)]
pub struct MutationEffects {
    /// Inodes whose attributes changed, in the order of their first change; the record is that of the last.
    pub touched: Vec<(u64, InodeRecord)>,
    /// Directories that lie elsewhere now, and with them what is in them.
    pub moved: Vec<u64>,
    /// Inodes that were to be held and are no longer there.
    pub gone: Vec<u64>,
    /// The session holds the delegation of the directory that it has made.
    pub delegated: bool,
    /// Numbers that the session has reserved.
    pub reserved: Option<InodeRange>,
    /// A length was set, and no other session may write to the file.
    pub is_alone: bool,
}

/// Names that a directory got or lost, and those of directories among them.
#[derive(Clone, Copy, Debug, Default)]
pub struct EntriesChange {
    pub names: i64,
    pub directories: i32,
}

/// One change under way.
pub struct MutationContext<'t, 'd> {
    pub tx: &'t mut Transaction<'d>,
    pub caller: Caller,
    /// The fs-mode mount of the inode that was found last; that of id 0 before.
    pub mount: Mount,
    /// What the client may do in it.
    pub access: ClientAccess,
    /// Whose permission the change takes, if the mount limits users.
    pub limited: Option<LimitedUser>,
    pub effects: MutationEffects,
}

impl<'t, 'd> MutationContext<'t, 'd> {
    /// A change of the master's own.
    pub fn new(tx: &'t mut Transaction<'d>, now_ns: i64) -> Self {
        Self::of(tx, Caller { now_ns, made_ns: now_ns, ..Caller::default() })
    }

    pub fn of(tx: &'t mut Transaction<'d>, caller: Caller) -> Self {
        let (mount, access, effects) = (Mount::default(), ClientAccess::Full, MutationEffects::default());
        Self { tx, caller, mount, access, limited: None, effects }
    }
}

impl MutationContext<'_, '_> {
    /// What a refusal calls an inode.
    pub fn shown(&self, inode: u64) -> Result<String> {
        self.tx.now().shown(inode)
    }

    /// A directory in which names may be changed.
    pub fn directory(&mut self, inode: u64) -> Checked<InodeRecord> {
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

    /// Refuses a name that the cluster keeps for an object of its own, in a directory that was found last.
    pub fn check_name_is_free(&self, directory: u64, name: &[u8]) -> Checked {
        if directory == self.mount.root_inode && is_reserved(name) {
            let name = String::from_utf8_lossy(name);
            return refuse(Errno::PERM, format!("{name} is the name of an object of the cluster's own: take another"));
        }
        Ok(())
    }

    /// A directory of which all names are known.
    pub fn fully_listed_directory(&mut self, inode: u64) -> Checked<InodeRecord> {
        let record = self.directory(inode)?;
        if record.listed_ns == 0 {
            return Err(MutationError::Unlisted { directory: inode, below: false });
        }
        Ok(record)
    }

    /// A directory whose path changes: of it, and of all below it, all names must be known.
    pub fn check_fully_listed_below(&self, inode: u64) -> Checked {
        let Some(path) = self.tx.now().path_below(inode, self.mount.root_inode)? else {
            return refuse(Errno::STALE, format!("directory inode {inode} is no longer there"));
        };
        match self.tx.before().has_unlisted(self.mount.id, &path)? {
            true => Err(MutationError::Unlisted { directory: inode, below: true }),
            false => Ok(()),
        }
    }

    /// A directory that goes: all of its names must be known, and there are none.
    pub fn check_empty(&self, inode: u64, record: &InodeRecord, otherwise: &str) -> Checked {
        if record.listed_ns == 0 {
            return Err(MutationError::Unlisted { directory: inode, below: false });
        }
        match self.tx.before().is_empty_directory(inode, record)? {
            true => Ok(()),
            false => refuse(Errno::NOTEMPTY, otherwise),
        }
    }

    /// An inode of an fs-mode mount, which the client may change, and now.
    pub fn inode(&mut self, inode: u64) -> Checked<InodeRecord> {
        let record = self.lockable_inode(inode)?;
        if self.access == ClientAccess::ReadOnly {
            return refuse(Errno::ROFS, format!("{} is there for this client to be read", self.shown(inode)?));
        }
        Ok(record)
    }

    /// An inode of an fs-mode mount, which may be locked now also by whoever only reads.
    pub fn lockable_inode(&mut self, inode: u64) -> Checked<InodeRecord> {
        let record = self.known_inode(inode)?;
        self.check_holder(inode, &record)?;
        Ok(record)
    }

    /// An inode of an fs-mode mount that is there for the client, whoever holds the delegation of its directory.
    pub fn known_inode(&mut self, inode: u64) -> Checked<InodeRecord> {
        let gone = || refuse(Errno::STALE, format!("inode {inode} is no longer there"));
        let Some(record) = self.tx.inode(inode)? else { return gone() };
        if record.mount_id != 0 && record.mount_id == self.mount.id {
            return Ok(record);
        }
        let Some(mount) = self.tx.before().mount(record.mount_id)? else {
            return refuse(Errno::ROFS, format!("{} is in no mount: only mounts can be changed", self.shown(inode)?));
        };
        let client = self.caller.client.as_ref();
        let access = client.map_or(ClientAccess::Full, |client| mount.access_of(client));
        if !access.can_see() {
            return gone();
        }
        if mount.write_type() != WriteType::FsMode {
            return refuse(Errno::ROFS, format!("{} is mounted in cache-mode", mount.path));
        }
        // What was answered by whoever held its directory was allowed then.
        let limits = client.and_then(|client| mount.limits_of(client)).filter(|_| !self.caller.is_write_back);
        let user = self.caller.user.as_ref();
        self.limited = limits.map(|limits| LimitedUser { user: limits.mapped(user), limits: limits.clone() });
        if let Some(LimitedUser { user, .. }) = &self.limited {
            self.caller.owner = (user.uid, user.gid);
        }
        if mount.consistency() == Consistency::Strict {
            self.tx.changes.strict_mount = Some(mount.id);
        }
        (self.mount, self.access) = (mount, access);
        Ok(record)
    }

    /// Refuses a change of an inode which another session may have answered for otherwise.
    pub fn check_holder(&self, inode: u64, record: &InodeRecord) -> Checked {
        if self.caller.is_write_back {
            return self.check_own(inode, record);
        }
        if self.tx.counters.delegations == 0 {
            return Ok(());
        }
        let session = self.caller.session;
        let is_other = |holder| session == 0 || holder != session;
        match self.tx.before().delegation_around(inode, record, is_other)? {
            Some(directory) => Err(MutationError::Delegated { directory }),
            None => Ok(()),
        }
    }

    /// Refuses what the session has answered for, though it does not hold the directory of an inode, nor the inode.
    pub fn check_own(&self, inode: u64, record: &InodeRecord) -> Checked {
        let is_own = |holder| holder == self.caller.session;
        if !self.caller.is_write_back || self.tx.before().delegation_around(inode, record, is_own)?.is_some() {
            return Ok(());
        }
        self.not_delegated(inode)
    }

    /// Refuses what the session has answered for in a directory whose delegation it does not hold.
    fn check_own_directory(&self, inode: u64, record: &InodeRecord) -> Checked {
        let session = Some(self.caller.session);
        if !self.caller.is_write_back || self.tx.before().holder(record.mount_id, inode)? == session {
            return Ok(());
        }
        self.not_delegated(inode)
    }

    fn not_delegated(&self, inode: u64) -> Checked {
        let (session, shown) = (self.caller.session, self.shown(inode)?);
        refuse(Errno::STALE, format!("session {session} has no delegation of {shown}, or its directory, any more"))
    }

    /// Stores an inode whose attributes changed, and has the sessions notified.
    pub fn put(&mut self, inode: u64, record: InodeRecord) {
        self.tx.update_inode(inode, record.clone());
        self.touch(inode, record);
    }

    pub fn touch(&mut self, inode: u64, record: InodeRecord) {
        match self.effects.touched.iter_mut().find(|(known, _)| *known == inode) {
            Some((_, known)) => *known = record,
            None => self.effects.touched.push((inode, record)),
        }
    }

    /// What the bucket has to learn of this change. The root of a mount has no object.
    pub fn note_intents(&mut self) -> Result {
        let (MutationEffects { touched, moved, .. }, now_ns) = (&self.effects, self.caller.now_ns);
        self.tx.counters.arrivals += moved.len() as u64;
        for (inode, record) in touched.iter().filter(|(inode, _)| *inode != self.mount.root_inode) {
            if record.unlinked {
                intents::give_up(self.tx, *inode, record.mount_id, None, now_ns)?;
            } else {
                let reach = if moved.contains(inode) { Reach::Below } else { Reach::Itself };
                intents::note(self.tx, *inode, record.mount_id, reach, now_ns)?;
            }
        }
        Ok(())
    }

    /// Of what was changed. Who has set a length asks for no layout when nothing is left.
    pub fn attributes(&self, sets_length: bool) -> Vec<Attr> {
        let counters = sets_length.then_some(&self.tx.counters);
        let attr = |(inode, record): &(u64, InodeRecord)| {
            let next_generation = counters.map_or(0, |counters| next_generation(counters, *inode, record));
            Attr { next_generation, ..attributes(*inode, record) }
        };
        self.effects.touched.iter().map(attr).collect()
    }

    /// A directory whose entries changed: its times, and how many there are.
    pub fn directory_changed(&mut self, inode: u64, mut record: InodeRecord, change: EntriesChange) {
        let made_ns = self.caller.made_ns;
        records::change(&mut record, |attr| rules::directory_changed(attr, change.directories, made_ns));
        records::count_entries(&mut record, change.names);
        self.put(inode, record);
    }

    /// Marks an inode that has lost its last name, and stores it.
    pub fn unlink(&mut self, inode: u64, mut record: InodeRecord) -> Result {
        usage::drop_quota(self.tx, inode)?;
        drop_ttl(self.tx, inode, &record);
        if is_directory(&record) {
            delegations::forget(self.tx, record.mount_id, inode)?;
        }
        records::change(&mut record, |attr| rules::name_dropped(attr, self.caller.made_ns));
        self.tx.put(schema::Unlinked, inode, &());
        self.put(inode, record);
        self.tx.notify(Change::Unlinked(inode));
        Ok(())
    }
}

//! Reads of the directories that sessions hold.

use cavern_proto::record::InodeRecord;

use super::Tables;
use crate::Family;
use crate::error::StateError;
use crate::held::HeldDirectory;
use crate::records::{
    held_by_key, held_count_key, held_key, is_directory, leading_id, parse_held_by_key, parse_held_key,
};

impl Tables<'_> {
    /// The session that holds a directory of a mount.
    pub fn holder(&self, mount_id: u32, directory: u64) -> Result<Option<u64>, StateError> {
        Ok(self.get(Family::Meta, &held_key(mount_id, directory))?.and_then(|session| leading_id(&session)))
    }

    /// The directory that counts for an inode and that such a session holds: the one that the inode is in, or the inode
    /// itself.
    pub fn held_around(
        &self,
        inode: u64,
        record: &InodeRecord,
        is_sought: impl Fn(u64) -> bool,
    ) -> Result<Option<u64>, StateError> {
        for directory in [Some(record.parent), is_directory(record).then_some(inode)].into_iter().flatten() {
            if self.holder(record.mount_id, directory)?.is_some_and(&is_sought) {
                return Ok(Some(directory));
            }
        }
        Ok(None)
    }

    /// Up to `limit` of the directories of a mount that sessions hold, in their order.
    pub fn held_in(&self, mount_id: u32, limit: usize) -> Result<Vec<HeldDirectory>, StateError> {
        self.held_between(&held_key(mount_id, 0), &held_key(mount_id, u64::MAX), limit)
    }

    /// Every directory that a session holds.
    pub fn all_held(&self) -> Result<Vec<HeldDirectory>, StateError> {
        self.held_between(&held_key(0, 0), &held_key(u32::MAX, u64::MAX), usize::MAX)
    }

    fn held_between(&self, from: &[u8], to: &[u8], limit: usize) -> Result<Vec<HeldDirectory>, StateError> {
        let held = self.records_between(Family::Meta, from, to).take(limit).map(|item| {
            let (key, session) = item?;
            let held = parse_held_key(&key).zip(leading_id(&session));
            let ((mount_id, directory), session) =
                held.ok_or_else(|| StateError::Corrupt("a directory that a session holds".into()))?;
            Ok(HeldDirectory { mount_id, directory, session })
        });
        held.collect()
    }

    /// How many directories a session holds.
    pub fn held_count(&self, session: u64) -> Result<u64, StateError> {
        let count = self.get(Family::Meta, &held_count_key(session))?;
        Ok(count.and_then(|count| leading_id(&count)).unwrap_or_default())
    }

    /// A directory, if this session holds it.
    pub fn held_by_session(&self, session: u64, directory: u64) -> Result<Option<HeldDirectory>, StateError> {
        let mount = self.get(Family::Meta, &held_by_key(session, directory))?;
        mount.map(|mount| Ok(HeldDirectory { mount_id: mount_of(&mount)?, directory, session })).transpose()
    }

    /// Up to `limit` of the directories that a session holds, in their order.
    pub fn directories_of(&self, session: u64, limit: usize) -> Result<Vec<HeldDirectory>, StateError> {
        let (from, to) = (held_by_key(session, 0), held_by_key(session, u64::MAX));
        let held = self.records_between(Family::Meta, &from, &to).take(limit).map(|item| {
            let (key, mount) = item?;
            let directory = parse_held_by_key(&key)
                .ok_or_else(|| StateError::Corrupt(format!("a directory that session {session} holds")))?;
            Ok(HeldDirectory { mount_id: mount_of(&mount)?, directory, session })
        });
        held.collect()
    }
}

fn mount_of(bytes: &[u8]) -> Result<u32, StateError> {
    let bytes = bytes.try_into().map_err(|_| StateError::Corrupt("the mount of a held directory".into()))?;
    Ok(u32::from_be_bytes(bytes))
}

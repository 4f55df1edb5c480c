//! Asks the bucket what it keeps of the attributes of one file or directory of a cache-mode mount, and records the
//! answer. Listings do not contain that.

use bytes::Bytes;
use cavern_posix::mode::{MODE_BITS, type_bits};
use cavern_proto::record::command::Command;
use cavern_proto::record::{InodeRecord, StoreAttributes, StoredAttributes};
use cavern_state::Directory;
use cavern_state::records::{etag, is_directory, is_version};
use cavern_ufs::{ObjectAttributes, ObjectMeta};

use super::{CheckReason, Listings};
use crate::error::WorkError;
use crate::mounts::OpenMount;

impl Listings {
    /// After this the namespace says of something in `place` what the bucket said after the call: one HEAD. An object
    /// that turns out to be another one by now is taken in as such.
    pub async fn look_at(
        &self,
        mount: &OpenMount,
        place: &Directory,
        name: &Bytes,
        (inode, record): (u64, &InodeRecord),
    ) -> Result<(), WorkError> {
        let prefix = place.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(place.inode))?;
        let slash = if is_directory(record) { "/" } else { "" };
        let key = format!("{prefix}{}{slash}", String::from_utf8_lossy(name));
        let object = self.head(mount, &key).await?;
        let is_current = |object: &ObjectMeta| is_version(record, &object.etag, object.size);
        if !is_directory(record) && !object.as_ref().is_some_and(is_current) {
            return self.refresh_name(place.inode, name, CheckReason::Unknown).await;
        }
        let own = object.and_then(|object| ObjectAttributes::read(&object.metadata, type_bits(record.kind())));
        let kept = own.map_or_else(StoredAttributes::default, |own| StoredAttributes {
            own: true,
            mode: own.mode & MODE_BITS,
            uid: own.uid,
            gid: own.gid,
            mtime_ns: own.mtime_ns,
        });
        let store = StoreAttributes { inode, etag: etag(record), size: record.size, stored: Some(kept) };
        self.0.proposer.propose(Command::StoreAttributes(store)).await?;
        Ok(())
    }
}

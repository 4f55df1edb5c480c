//! What shows that an object was written by this cluster, for which inode, and which version of its content it has.
//!
//! The confirmation of a write can be lost, and the object that was written over may have been a file's origin. By its
//! tag the new object is known again: it has all that the old one had, and can take its place.

use cavern_proto::record::ObjectRecord;
use cavern_ufs::ObjectMeta;

/// In the object's metadata.
pub(super) const NAME: &str = "cavern-content";
/// Name and value.
pub(super) const BYTES_MAX: usize = 128;

/// The tag of an object; `metadata` is the hash of its other metadata.
pub(super) fn of(cluster_id: &str, inode: u64, version: u64, metadata: u64) -> String {
    format!("{cluster_id}.{inode}.{version}.{metadata:x}")
}

/// What objects that were written as names of one file have in common: cluster, inode and version. Empty for what has
/// no tag.
pub(super) fn identity(object: &ObjectMeta) -> String {
    let tag = object.metadata.get(NAME).filter(|tag| tag.len() <= BYTES_MAX && tag.split('.').count() == 4);
    tag.and_then(|tag| tag.rsplit_once('.')).map(|(identity, _)| identity.to_owned()).unwrap_or_default()
}

/// What is to be noted of an object, if it is of this inode.
pub(super) fn read(object: &ObjectMeta, cluster_id: &str, inode: u64) -> Option<ObjectRecord> {
    let rest = object.metadata.get(NAME)?.strip_prefix(cluster_id)?.strip_prefix('.')?;
    let mut parts = rest.split('.');
    let (owner, version, metadata) = (parts.next()?, parts.next()?, parts.next()?);
    let (version, metadata) = (version.parse().ok()?, u64::from_str_radix(metadata, 16).ok()?);
    let is_own = owner.parse() == Ok(inode) && parts.next().is_none() && !object.etag.is_empty();
    is_own.then(|| ObjectRecord { etag: object.etag.clone(), size: object.size, version, metadata })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(tag: &str) -> ObjectMeta {
        let metadata = [(NAME.to_owned(), tag.to_owned())].into();
        ObjectMeta { key: "k".into(), size: 7, etag: "e".into(), mtime_ns: 1, metadata }
    }

    #[test]
    fn an_object_is_known_again_by_its_tag_alone() {
        let tag = of("c-1", 5, 9, u64::MAX);
        assert!(NAME.len() + of(&"c".repeat(36), u64::MAX, u64::MAX, u64::MAX).len() <= BYTES_MAX);
        let note = ObjectRecord { etag: "e".into(), size: 7, version: 9, metadata: u64::MAX };
        assert_eq!(read(&object(&tag), "c-1", 5), Some(note));
        assert_eq!(read(&object(&tag), "c-1", 6), None);
        assert_eq!(read(&object(&tag), "c-2", 5), None);
        for odd in ["", "c-1", "c-1.5", "c-1.5.9", "c-1.5.9.x", "c-1.5.-9.1", "c-1.5.9.1.1"] {
            assert_eq!(read(&object(odd), "c-1", 5), None, "{odd}");
        }
        assert_eq!(read(&ObjectMeta { metadata: Default::default(), ..object("") }, "c-1", 5), None);
    }
}

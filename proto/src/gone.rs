//! The answer of a master about an inode that is gone, by which it was asked: NOT_FOUND, with a mark. The answer about
//! a name that is not there has none: its directory is there.

use tonic::Status;
use tonic::metadata::MetadataValue;

/// Key of the metadata.
const KEY: &str = "cavern-gone";

/// See the module.
pub struct Gone;

impl Gone {
    /// `reason` is for a person.
    pub fn to_status(reason: String) -> Status {
        let mut status = Status::not_found(reason);
        status.metadata_mut().insert(KEY, MetadataValue::from_static("1"));
        status
    }

    /// Whether a status says that.
    pub fn is(status: &Status) -> bool {
        status.metadata().contains_key(KEY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_that_is_gone_is_told_from_a_name_that_is_not_there() {
        let status = Gone::to_status("inode 7 is gone".to_owned());
        assert!(Gone::is(&status) && status.code() == tonic::Code::NotFound);
        assert!(!Gone::is(&Status::not_found("no such name")));
    }
}

//! The answer of a master that does not know what becomes of a request: UNAVAILABLE, with a mark. It leads no more, or
//! is about to stop; what was asked for may be done, now or by the next one. Whoever may ask twice asks the next one.

use tonic::Status;
use tonic::metadata::MetadataValue;

/// Key of the metadata.
const KEY: &str = "cavern-unanswered";

/// See the module.
pub struct Unanswered;

impl Unanswered {
    /// `reason` is for a person.
    pub fn to_status(reason: String) -> Status {
        let mut status = Status::unavailable(reason);
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
    fn a_status_says_whether_its_master_knows_what_was_done() {
        let status = Unanswered::to_status("stopping".to_owned());
        assert!(Unanswered::is(&status) && status.code() == tonic::Code::Unavailable);
        assert!(!Unanswered::is(&Status::unavailable("the bucket does not answer")));
    }
}

//! Marks of answers of a master that their codes do not tell apart.

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

/// What an answer is marked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusDetail {
    /// An inode is gone, by which the master was asked: NOT_FOUND. The answer about a name that is not there has no
    /// mark: its directory is there.
    Gone,
    /// The master does not know what becomes of the request: UNAVAILABLE. It leads no more, or is about to stop; what
    /// was asked for may be done, now or by the next one. Whoever may ask twice asks the next one.
    Unanswered,
}

impl StatusDetail {
    /// Key of the metadata.
    fn key(self) -> &'static str {
        match self {
            Self::Gone => "cavern-gone",
            Self::Unanswered => "cavern-unanswered",
        }
    }

    fn code(self) -> Code {
        match self {
            Self::Gone => Code::NotFound,
            Self::Unanswered => Code::Unavailable,
        }
    }

    /// `reason` is for a person.
    pub fn to_status(self, reason: String) -> Status {
        let mut status = Status::new(self.code(), reason);
        status.metadata_mut().insert(self.key(), MetadataValue::from_static("1"));
        status
    }

    pub fn is_on(self, status: &Status) -> bool {
        status.metadata().contains_key(self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_tells_answers_of_the_same_code_apart() {
        for (mark, code) in [(StatusDetail::Gone, Code::NotFound), (StatusDetail::Unanswered, Code::Unavailable)] {
            let status = mark.to_status("a reason".to_owned());
            assert!(mark.is_on(&status) && status.code() == code && status.message() == "a reason");
            assert!(!mark.is_on(&Status::new(code, "a reason")));
        }
        assert!(!StatusDetail::Gone.is_on(&StatusDetail::Unanswered.to_status(String::new())));
    }
}

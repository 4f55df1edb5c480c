//! The answer of a master to what only the leader does: UNAVAILABLE, with the address of the leader as metadata where
//! it is known. Nothing of the request was done, so it can be sent to the leader.

use tonic::Status;
use tonic::metadata::MetadataValue;

/// Key of the metadata; its value is `host:port`, or empty while nobody is known to lead.
const LEADER_KEY: &str = "cavern-leader";

/// A master that does not lead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotLeading {
    /// Address of the one that does, if it is known.
    pub leader: Option<String>,
}

impl NotLeading {
    pub fn to_status(&self) -> Status {
        let (message, value) = match &self.leader {
            Some(leader) => (format!("this master does not lead, the one at {leader} does"), leader.as_str()),
            None => ("no master leads at the moment: a majority of them must be running".to_owned(), ""),
        };
        let mut status = Status::unavailable(message);
        // Addresses are of the configuration, where they were checked.
        if let Ok(value) = MetadataValue::try_from(value) {
            status.metadata_mut().insert(LEADER_KEY, value);
        }
        status
    }

    /// `None` for any other answer.
    pub fn from_status(status: &Status) -> Option<Self> {
        let leader = status.metadata().get(LEADER_KEY)?.to_str().unwrap_or_default();
        Some(Self { leader: (!leader.is_empty()).then(|| leader.to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_who_leads() {
        for leader in [None, Some("host1:7700".to_owned())] {
            let answer = NotLeading { leader };
            let status = answer.to_status();
            assert_eq!(status.code(), tonic::Code::Unavailable);
            assert_eq!(NotLeading::from_status(&status), Some(answer));
        }
        assert_eq!(NotLeading::from_status(&Status::unavailable("the bucket does not answer")), None);
    }
}

//! Who has opened which session, where connections are secured, and how many each of them has; and the certificates
//! with which their streams were opened.

use std::collections::HashMap;

use cavern_security::{Identity, PeerCertificate, Role};

use crate::error::WorkError;

/// Who has opened which session.
#[derive(Default)]
pub struct Owners {
    of: HashMap<u64, Identity>,
    /// What was shown for the last stream of each. The owner may have another certificate by now.
    certificates: HashMap<u64, PeerCertificate>,
    /// Sessions of each that has one.
    counts: HashMap<Identity, usize>,
}

impl Owners {
    pub fn get(&self, session: u64) -> Option<&Identity> {
        self.of.get(&session)
    }

    /// Whether a session is that of whoever asks, as far as it is known whose it is. Its record (empty for none) says
    /// so of one that is over and has left something, too. Whoever runs the cluster takes up what a dead mount has
    /// left: `cv local` has its certificate in the file that a replay reads.
    ///
    /// # Errors
    /// [`WorkError::Denied`] when it is somebody else's.
    pub fn check(&self, session: u64, recorded: &str, asker: Option<&Identity>) -> Result<(), WorkError> {
        let Some(asker) = asker.filter(|asker| asker.role != Role::Admin) else { return Ok(()) };
        let is_of_another = self.get(session).is_some_and(|owner| owner != asker)
            || !recorded.is_empty() && asker.to_string() != recorded;
        match is_of_another {
            true => Err(WorkError::Denied(format!("session {session} is not that of {asker}"))),
            false => Ok(()),
        }
    }

    /// A session is that of whoever comes first.
    pub fn set(&mut self, session: u64, owner: &Identity) {
        if self.of.contains_key(&session) {
            return;
        }
        self.of.insert(session, owner.clone());
        *self.counts.entry(owner.clone()).or_default() += 1;
    }

    /// A stream of a session begins, with this certificate.
    pub fn show(&mut self, session: u64, certificate: &PeerCertificate) {
        self.certificates.insert(session, certificate.clone());
    }

    /// Sessions whose last stream was opened with a certificate that is revoked now.
    pub fn revoked(&self) -> Vec<u64> {
        let revoked = self.certificates.iter().filter(|(_, certificate)| certificate.is_revoked());
        revoked.map(|(session, _)| *session).collect()
    }

    pub fn remove(&mut self, session: u64) {
        self.certificates.remove(&session);
        let Some(owner) = self.of.remove(&session) else { return };
        if let Some(count) = self.counts.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&owner);
            }
        }
    }

    /// Sessions of one, those too that may come back.
    pub fn count(&self, owner: &Identity) -> usize {
        self.counts.get(owner).copied().unwrap_or_default()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.of.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_is_recorded_as_anothers_does_not_go_on() {
        let [own, other] = ["own", "other"].map(|name| Identity::new("c", Role::Client, name).unwrap());
        let admin = Identity::new("c", Role::Admin, "admin").unwrap();
        let owners = Owners::default();
        for asker in [Some(&own), Some(&admin), None] {
            assert!(owners.check(7, &own.to_string(), asker).is_ok(), "{asker:?}");
        }
        assert!(matches!(owners.check(7, &own.to_string(), Some(&other)), Err(WorkError::Denied(_))));
        // Of before it was recorded.
        assert!(owners.check(7, "", Some(&other)).is_ok());
    }
}

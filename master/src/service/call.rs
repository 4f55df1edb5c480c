//! What all calls have in common: who asks, what of the namespace is there for them, and how they are answered.

use std::pin::Pin;
use std::sync::Arc;

use cavern_security::{Identity, PeerCertificate, RateCharge};
use cavern_work::WorkError;
use cavern_work::namespace::Lookups;
use futures::Stream;
use tonic::{Response, Status};

use super::peer::Peer;
use crate::error::MasterError;
use crate::services::Services;

/// Longest request. What is longest is a mount with all its options; and what is decoded may take a hundred times the
/// bytes that it had on the wire.
pub const REQUEST_MAX: usize = 1 << 20;
/// Longest answer.
pub const ANSWER_MAX: usize = 16 << 20;

/// What a call is answered with.
pub(super) type Answer<T> = Result<Response<T>, Status>;
/// A stream of answers.
pub(super) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the work comes to, for whoever has called.
pub(super) trait OrStatus<T> {
    fn or_status(self) -> Result<T, Status>;
}

impl<T> OrStatus<T> for Result<T, WorkError> {
    fn or_status(self) -> Result<T, Status> {
        self.map_err(|error| MasterError::from(error).to_status())
    }
}

/// Who asks, where connections are secured.
pub(super) fn asker<T>(request: &tonic::Request<T>) -> Option<&Identity> {
    request.extensions().get::<Peer>()?.identity.get()
}

/// The certificate of whoever asks, where connections are secured.
pub(super) fn shown<T>(request: &tonic::Request<T>) -> Option<&PeerCertificate> {
    request.extensions().get::<Peer>()?.certificate.get()
}

/// Refuses a call about more of something than one may be about.
pub(super) fn check_count(count: usize, what: &str, most: usize) -> Result<(), MasterError> {
    match count <= most {
        true => Ok(()),
        false => Err(WorkError::Invalid(format!("{count} {what} in one call: send at most {most}")).into()),
    }
}

impl Services {
    /// The namespace as a session of whoever asks is answered; 0 for no session.
    ///
    /// # Errors
    /// [`WorkError::Denied`] for the session of another.
    pub(super) fn asked_by<T>(&self, request: &tonic::Request<T>, session: u64) -> Result<Lookups, MasterError> {
        self.watch.check_owner(session, asker(request))?;
        let charge = request.extensions().get::<Arc<RateCharge>>().cloned();
        Ok(Lookups { asker: session, client: self.client(asker(request)), charge, ..self.lookups.clone() })
    }

    /// The name of a client that asks, if there may be mounts that are not there for all clients; empty where it has
    /// shown none. `None` for whoever sees all mounts.
    pub(crate) fn client(&self, asker: Option<&Identity>) -> Option<Arc<str>> {
        if !self.mounts.are_restricted() {
            return None;
        }
        match asker {
            Some(identity) => identity.client_name().map(Arc::from),
            None => Some(Arc::default()),
        }
    }
}

//! The gRPC face of the master. The services translate; `master.proto` says what they promise.

mod changes;
mod cluster;
mod gate;
mod guard;
mod lanes;
mod limits;
mod masters;
mod messages;
mod namespace;
mod peer;
mod roles;
mod session;

use std::pin::Pin;
use std::sync::Arc;

use cavern_proto::master::cluster_server::ClusterServer;
use cavern_proto::master::namespace_server::NamespaceServer;
use cavern_security::{Identity, MountDebt, PeerCertificate};
use futures::Stream;
use tonic::Status;

use crate::error::MasterError;
use crate::namespace::Lookups;
use crate::services::Services;

pub use gate::Gate;
pub use guard::Guarded;
pub use lanes::{Lane, Lanes, SlowThreads};
pub use limits::tenants;
pub use masters::RaftService;
pub use peer::{Peer, PeerAddress};
#[cfg(test)]
pub use roles::documented;

/// Longest request. What is longest is a mount with all its options; and what is decoded may take a hundred times the
/// bytes that it had on the wire.
const REQUEST_MAX: usize = 1 << 20;
/// Longest answer.
const ANSWER_MAX: usize = 16 << 20;

/// Who asks, where connections are secured.
fn asker<T>(request: &tonic::Request<T>) -> Option<&Identity> {
    request.extensions().get::<Peer>()?.identity.get()
}

/// The certificate of whoever asks, where connections are secured.
fn shown<T>(request: &tonic::Request<T>) -> Option<&PeerCertificate> {
    request.extensions().get::<Peer>()?.certificate.get()
}

/// Refuses a call about more of something than one may be about.
fn check_count(count: usize, what: &str, most: usize) -> Result<(), MasterError> {
    match count <= most {
        true => Ok(()),
        false => Err(MasterError::Invalid(format!("{count} {what} in one call: send at most {most}"))),
    }
}

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Services {
    /// The namespace as a session of whoever asks is answered; 0 for no session.
    ///
    /// # Errors
    /// [`MasterError::Denied`] for the session of another.
    fn asked_by<T>(&self, request: &tonic::Request<T>, session: u64) -> Result<Lookups, MasterError> {
        self.watch.check_owner(session, asker(request))?;
        let debt = request.extensions().get::<Arc<MountDebt>>().cloned();
        Ok(Lookups { client: self.client(asker(request)), debt, ..self.lookups.asked_by(session) })
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

    pub fn namespace_server(&self) -> NamespaceServer<Self> {
        let server = NamespaceServer::new(self.clone());
        server.max_decoding_message_size(REQUEST_MAX).max_encoding_message_size(ANSWER_MAX)
    }

    pub fn cluster_server(&self) -> ClusterServer<Self> {
        let server = ClusterServer::new(self.clone());
        server.max_decoding_message_size(REQUEST_MAX).max_encoding_message_size(ANSWER_MAX)
    }
}

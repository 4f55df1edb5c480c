//! The door to what only a leader does: calls go to the services of the term that there is. Without one, or while it is
//! not known that it goes on, they are answered with the address of whoever leads, and nothing is done.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use crate::leader_election::LeaderElection;
use crate::services::Services;

/// One of the services, `S`, of whatever term there is.
#[derive(Clone)]
pub struct LeaderOnly<S> {
    election: Arc<LeaderElection>,
    of: fn(Services) -> S,
}

impl<S> LeaderOnly<S> {
    pub fn new(election: &Arc<LeaderElection>, of: fn(Services) -> S) -> Self {
        Self { election: election.clone(), of }
    }
}

impl<S: NamedService> NamedService for LeaderOnly<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for LeaderOnly<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.election.term().filter(|term| term.services.lease.holds()) {
            // The generated services are always ready.
            Some(term) => Box::pin((self.of)(term.services.clone()).call(request)),
            None => {
                let answer = self.election.not_leading().to_status().into_http();
                Box::pin(async move { Ok(answer) })
            }
        }
    }
}

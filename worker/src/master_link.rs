//! Calls to the master: which of the configured masters is asked, and for how long.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cavern_proto::master::cluster_client::ClusterClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::error::WorkerError;

/// Longest call, connecting included.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The masters of the cluster, one of which is asked until it fails.
#[derive(Debug)]
pub struct MasterLink {
    clients: Vec<(String, ClusterClient<Channel>)>,
    current: AtomicUsize,
}

impl MasterLink {
    /// Nothing is connected yet: that happens with the first call, and again after every failure.
    ///
    /// # Errors
    /// An address that is none.
    pub fn new(masters: &[String]) -> Result<Self, WorkerError> {
        let client = |address: &String| {
            let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| WorkerError::Config {
                key: "cluster.masters",
                value: address.clone(),
                reason: format!("{error}: write it as \"host:port\""),
            })?;
            let channel = endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT).tcp_nodelay(true).connect_lazy();
            Ok((address.clone(), ClusterClient::new(channel)))
        };
        let clients: Vec<_> = masters.iter().map(client).collect::<Result<_, WorkerError>>()?;
        if clients.is_empty() {
            return Err(WorkerError::Config {
                key: "cluster.masters",
                value: String::new(),
                reason: "name at least one master as \"host:port\"".to_owned(),
            });
        }
        Ok(Self { clients, current: AtomicUsize::new(0) })
    }

    /// One call to the master that answered last. When that cannot be reached or does not lead, the next call goes to
    /// the next one.
    ///
    /// # Errors
    /// What the call answered; `DEADLINE_EXCEEDED` when it took longer than three seconds.
    pub async fn call<T, F>(&self, request: impl FnOnce(ClusterClient<Channel>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let current = self.current.load(Ordering::Relaxed) % self.clients.len();
        let (address, client) = &self.clients[current];
        let answer = match tokio::time::timeout(TIMEOUT, request(client.clone())).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!("master {address} did not answer within {TIMEOUT:?}"))),
        };
        if let Err(status) = &answer
            && matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded)
        {
            self.current.store(current + 1, Ordering::Relaxed);
        }
        answer
    }
}

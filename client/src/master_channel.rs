//! The way to the master.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use tonic::transport::Channel;

use crate::error::ClientError;

/// The master's services behind one reconnecting channel per master. Cheap to clone.
#[derive(Clone)]
pub struct MasterChannel {
    inner: Arc<()>,
}

/// The stubs of one master, to call inside [`MasterChannel::call`].
#[derive(Clone, Debug)]
pub struct Stubs {
    pub namespace: NamespaceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
}

impl MasterChannel {
    /// Makes the channels; connects when first used.
    pub fn new(config: &Config) -> Result<Self, ClientError> {
        let _ = config;
        Ok(Self { inner: Arc::new(()) })
    }

    /// One unary call, tried until it is answered or `client.metadata_timeout` has passed. An answer that is an
    /// error is not tried again. Fails at once while the circuit breaker is open.
    pub async fn call<T, F>(&self, name: &'static str, request: impl Fn(Stubs) -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let _ = (name, request, &self.inner);
        Err(ClientError::Shutdown)
    }

    /// As `call`, with its own deadline: for calls that take long by nature (Mount, Refresh, SubmitLoad).
    pub async fn call_within<T, F>(
        &self,
        name: &'static str,
        deadline: Duration,
        request: impl Fn(Stubs) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let _ = (name, deadline, request);
        Err(ClientError::Shutdown)
    }
}

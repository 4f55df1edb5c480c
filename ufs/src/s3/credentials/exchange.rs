//! HTTP with whoever gives credentials. What is sent and answered is secret: no error has any of it.

use std::time::Duration;

use bytes::Bytes;
use cavern_conf::schema;
use http::{Request, Response};
use http_body_util::{BodyExt, Limited};
use reqsign_core::HttpSend;
use tokio::time::timeout;

use crate::allowed::Guard;
use crate::s3::keys::KeyError;
use crate::s3::transport::Transport;

/// Longest time for one request and its answer. Where there is no cloud, nobody answers at its addresses.
const EXCHANGE: Duration = Duration::from_secs(3);

/// No credentials are longer.
const ANSWER_BYTES: usize = 256 << 10;

/// Whom credentials are asked of. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Giver {
    /// As messages name it.
    pub name: String,
    transport: Transport,
}

cavern_conf::debug_only!(Giver { name });

impl Giver {
    pub(crate) fn new(name: String, url: &str, guard: Guard, conf: &schema::Ufs) -> Result<Self, KeyError> {
        let transport = Transport::new(conf.connect_timeout.get(), 1, url.starts_with("https:"), guard);
        let transport = transport.map_err(|error| KeyError::Refused(error.to_string()))?;
        Ok(Self { name, transport })
    }

    /// A success, whole. `secrets` are in the request, and in no error.
    pub(crate) async fn ask(&self, request: Request<Bytes>, secrets: &[&str]) -> Result<Response<Bytes>, KeyError> {
        let asked = async {
            let sent = self.transport.send(request).await;
            let (parts, body) = sent.map_err(|failure| KeyError::of(&failure, &self.name, secrets))?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES).collect().await;
            let broken = |_| KeyError::Unavailable(format!("the answer of {} broke off", self.name));
            Ok(Response::from_parts(parts, body.map_err(broken)?.to_bytes()))
        };
        timeout(EXCHANGE, asked)
            .await
            .unwrap_or_else(|_| Err(KeyError::Unavailable(format!("{} has not answered for {EXCHANGE:?}", self.name))))
    }
}

/// For the providers of the signing library.
impl HttpSend for Giver {
    async fn http_send(&self, request: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
        let answer = self.ask(request, &[]).await;
        answer.map_err(|error| reqsign_core::Error::unexpected("no answer").with_source(error))
    }
}

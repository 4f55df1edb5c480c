//! The baseline: what gRPC itself costs.

use std::convert::Infallible;
use std::task::{Context, Poll};
use std::time::Duration;

use cavern_proto::master::ListWorkersRequest;
use cavern_security::Transport;
use futures::future::{BoxFuture, Ready, ready};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request, Response};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::{Channel, Server};
use tonic_prost::ProstCodec;

use crate::Failure;
use crate::client::channels;
use crate::rates::measure;

/// A message without fields.
type Empty = ListWorkersRequest;

#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "cavern.bench.Echo";
}

impl UnaryService<Empty> for Echo {
    type Response = Empty;
    type Future = Ready<Result<tonic::Response<Empty>, tonic::Status>>;

    fn call(&mut self, request: tonic::Request<Empty>) -> Self::Future {
        ready(Ok(tonic::Response::new(request.into_inner())))
    }
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let codec = ProstCodec::<Empty, Empty>::default();
        Box::pin(async move { Ok(tonic::server::Grpc::new(codec).unary(Echo, request).await) })
    }
}

/// Serves until the standard input ends.
pub async fn serve() -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    #[allow(clippy::print_stdout, reason = "whoever started it waits for the address")]
    {
        println!("{}", listener.local_addr()?);
    }
    let ended = async {
        let _ended = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    };
    let connections = TcpListenerStream::new(listener);
    Ok(Server::builder().tcp_nodelay(true).add_service(Echo).serve_with_incoming_shutdown(connections, ended).await?)
}

/// The rate of calls.
pub async fn call(address: &str, tasks: usize, time: Duration) -> Result<Value, Failure> {
    let channels = channels(address, &Transport::Plain, tasks).await?;
    let mut clients: Vec<_> = (0..tasks).map(|task| channels[task % channels.len()].clone()).collect();
    let path = PathAndQuery::from_static("/cavern.bench.Echo/Echo");
    let echo = async |channel: &mut Channel| {
        let mut grpc = tonic::client::Grpc::new(channel.clone());
        grpc.ready().await?;
        let codec = ProstCodec::<Empty, Empty>::default();
        grpc.unary(tonic::Request::new(Empty {}), path.clone(), codec).await?;
        Ok(true)
    };
    Ok(serde_json::json!({ "echo": measure(&mut clients, time, echo).await? }))
}

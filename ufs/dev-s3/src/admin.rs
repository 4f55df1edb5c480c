//! The second port: counters, fault rules, objects that take no room.
//!
//! | request | does |
//! |---|---|
//! | `GET /_dev/stats` | counters as JSON |
//! | `POST /_dev/stats/reset` | sets them to 0 |
//! | `GET /_dev/faults` | the rules in force |
//! | `POST /_dev/faults` | adds a rule (JSON object, see [`FaultRule`]) |
//! | `DELETE /_dev/faults` | removes all rules |
//! | `POST /_dev/sessions?seconds=` | how long sessions of STS that begin from now on live at most |
//! | `POST /_dev/sparse?bucket=&key=&size=` | an object of `size` zero bytes that takes no room |
//! | `GET /_dev/key-space?bucket=` | the rule of the bucket's key space, or `null` |
//! | `POST /_dev/key-space?bucket=` | a rule for it (JSON object, see [`KeySpaceRule`]); makes the bucket if need be |
//! | `DELETE /_dev/key-space?bucket=` | takes the rule away |
//! | `GET /_dev/list-profile?bucket=` | how the bucket's listings are served |
//! | `POST /_dev/list-profile?bucket=` | has them served so (JSON object, see [`ListProfile`]) until the store stops |
//! | `POST /_dev/versions?bucket=&keep=` | whether versions that are replaced or deleted are kept (`true`, `false`) |
//!
//! It is for the loopback interface, and for whoever can read the token in the file [`TOKEN`] below the root, which is
//! a new one after each start: [`HttpAccess::local`](cavern_security::HttpAccess::local) says what is refused.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use cavern_conf::process::Metrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::DevS3Error;
use crate::faults::FaultRule;
use crate::service::on_blocking_thread;
use crate::shared::Shared;
use crate::stats::StatsSnapshot;
use crate::store::{KeySpaceRule, ListProfile};

/// The file of the token.
pub(crate) const TOKEN: &str = "admin-token";

/// What a handler is given, and what it answers with.
type Given = State<Arc<Shared>>;
type Handled<T = StatusCode> = Result<T, DevS3Error>;

/// The routes.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/_dev/stats", get(stats))
        .route("/_dev/stats/reset", post(reset_stats))
        .route("/_dev/faults", get(faults).post(add_fault).delete(clear_faults))
        .route("/_dev/sessions", post(limit_sessions))
        .route("/_dev/sparse", post(put_sparse))
        .route("/_dev/key-space", get(key_space).post(set_key_space).delete(clear_key_space))
        .route("/_dev/list-profile", get(list_profile).post(set_list_profile))
        .route("/_dev/versions", post(keep_versions))
        .with_state(shared)
}

async fn stats(State(shared): Given) -> Json<StatsSnapshot> {
    Json(shared.stats.snapshot())
}

async fn reset_stats(State(shared): Given) -> StatusCode {
    shared.stats.reset();
    StatusCode::NO_CONTENT
}

async fn faults(State(shared): Given) -> Json<Vec<FaultRule>> {
    Json(shared.faults.rules())
}

async fn add_fault(State(shared): Given, Json(rule): Json<FaultRule>) -> Handled {
    shared.faults.add(rule).map(|()| StatusCode::NO_CONTENT)
}

async fn clear_faults(State(shared): Given) -> StatusCode {
    shared.faults.clear();
    StatusCode::NO_CONTENT
}

#[derive(Deserialize)]
struct SessionLife {
    seconds: u64,
}

async fn limit_sessions(State(shared): Given, Query(life): Query<SessionLife>) -> StatusCode {
    shared.keys.set_life_max(life.seconds);
    StatusCode::NO_CONTENT
}

#[derive(Deserialize)]
struct Sparse {
    bucket: String,
    key: String,
    /// Bytes.
    size: u64,
}

async fn put_sparse(State(shared): Given, Query(Sparse { bucket, key, size }): Query<Sparse>) -> Handled<Json<Value>> {
    let object = on_blocking_thread(move || shared.store.put_sparse(&bucket, &key, size)).await?;
    Ok(Json(json!({ "etag": object.etag, "size": object.size })))
}

#[derive(Deserialize)]
struct OfBucket {
    bucket: String,
}

async fn key_space(State(shared): Given, Query(of): Query<OfBucket>) -> Handled<Json<Option<KeySpaceRule>>> {
    Ok(Json(shared.store.bucket(&of.bucket)?.key_space()))
}

async fn set_key_space(State(shared): Given, Query(of): Query<OfBucket>, Json(rule): Json<KeySpaceRule>) -> Handled {
    on_blocking_thread(move || shared.store.set_key_space(&of.bucket, Some(rule))).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn clear_key_space(State(shared): Given, Query(of): Query<OfBucket>) -> Handled {
    on_blocking_thread(move || shared.store.set_key_space(&of.bucket, None)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn list_profile(State(shared): Given, Query(of): Query<OfBucket>) -> Handled<Json<ListProfile>> {
    Ok(Json(shared.store.bucket(&of.bucket)?.list_profile()))
}

async fn set_list_profile(
    State(shared): Given,
    Query(of): Query<OfBucket>,
    Json(profile): Json<ListProfile>,
) -> Handled {
    shared.store.bucket(&of.bucket)?.set_list_profile(profile);
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct KeepVersions {
    bucket: String,
    keep: bool,
}

async fn keep_versions(State(shared): Given, Query(KeepVersions { bucket, keep }): Query<KeepVersions>) -> Handled {
    on_blocking_thread(move || shared.store.bucket(&bucket)?.keep_versions(keep)).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl IntoResponse for DevS3Error {
    fn into_response(self) -> Response {
        (StatusCode::BAD_REQUEST, Json(json!({ "error": self.to_string() }))).into_response()
    }
}

/// Shows the counters at `/metrics`.
pub(crate) fn register(metrics: &Metrics, shared: &Arc<Shared>) {
    metrics.register_collector(Counters(Arc::clone(shared)));
}

struct Counters(Arc<Shared>);

impl fmt::Debug for Counters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Counters")
    }
}

impl Collector for Counters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = self.0.stats.snapshot();
        let mut requests = encoder.encode_descriptor(
            "cavern_dev_s3_requests",
            "S3 requests by operation",
            None,
            MetricType::Counter,
        )?;
        for (operation, count) in snapshot.operations {
            let counter = ConstCounter::new(count);
            counter.encode(requests.encode_family(&[("operation", operation)])?)?;
        }
        let mut counter = |name: &str, help: &str, value: u64| {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
        };
        counter("cavern_dev_s3_sent_bytes", "Bytes of answers' bodies", snapshot.bytes_out)?;
        counter("cavern_dev_s3_errors", "Answers with a status of 400 and above", snapshot.errors)?;
        counter("cavern_dev_s3_faults", "Requests that a fault rule made fail", snapshot.faults)
    }
}

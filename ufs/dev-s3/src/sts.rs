//! STS: `AssumeRole`, and what its sessions may do.
//!
//! Whoever has the store's key pair takes on any role, which may do everything; a session policy leaves of that what it
//! says ([`crate::policy`]). The store keeps nothing of a session: its secret key follows from its access key, and its
//! token says when it ends and what it may do, under a seal. So sessions outlive a restart, as those of S3 do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use cavern_conf::host;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::Extensions;
use hyper::{HeaderMap, Method, Uri};
use percent_encoding::percent_decode_str;
use ring::hmac;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::dto::{DeleteObjectsInput, TimestampFormat};
use s3s::path::S3Path;
use s3s::route::S3Route;
use s3s::{Body, S3Request, S3Response, S3Result, s3_error};
use serde::{Deserialize, Serialize};

use crate::policy::{Policy, Wanted};
use crate::service::timestamp;
use crate::store::{Store, hex, now_s};

/// What access keys of sessions begin with, as those of AWS do.
const SESSION: &str = "ASIA";
/// Longest request, and longest policy in characters.
const REQUEST_MAX: usize = 64 << 10;
const POLICY_MAX: usize = 2048;
/// Seconds that a session may live, and does where nobody says so.
const LIVES: std::ops::RangeInclusive<u64> = 900..=43_200;
const LIFE: u64 = 3600;

/// The key pair of the store, and the sessions that come of it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Keys(Arc<Inner>);

struct Inner {
    access_key: String,
    secret_key: SecretKey,
    seal: hmac::Key,
    /// Seconds that sessions live at most.
    life_max: AtomicU64,
    /// Of the last session.
    number: AtomicU64,
    store: Arc<Store>,
}

/// What a token says.
#[derive(Serialize, Deserialize)]
struct Session {
    access_key: String,
    /// In seconds since the Unix epoch.
    until_s: i64,
    policy: Option<String>,
}

/// What the rest of a request may do, once its session is known.
#[derive(Clone)]
struct Rights(Option<Arc<Policy>>);

impl Keys {
    pub(crate) fn new(access_key: String, secret_key: String, store: Arc<Store>) -> Self {
        let seal = hmac::Key::new(hmac::HMAC_SHA256, secret_key.as_bytes());
        Self(Arc::new(Inner {
            access_key,
            secret_key: secret_key.into(),
            seal,
            life_max: AtomicU64::new(*LIVES.end()),
            number: AtomicU64::new(0),
            store,
        }))
    }

    /// Sessions that begin from now on live for so many seconds at most, whatever they are asked for.
    pub(crate) fn set_life_max(&self, seconds: u64) {
        self.0.life_max.store(seconds, Ordering::Relaxed);
    }

    fn seal(&self, text: &str) -> hmac::Tag {
        hmac::sign(&self.0.seal, text.as_bytes())
    }

    /// The secret key of a session.
    fn secret_of(&self, access_key: &str) -> String {
        hex(self.seal(&format!("secret\n{access_key}")).as_ref())
    }

    /// Begins a session that ends after so many seconds: its access key, its token, and when it ends.
    fn begin(&self, policy: Option<String>, seconds: u64) -> (String, String, i64) {
        let number = self.0.number.fetch_add(1, Ordering::Relaxed);
        let access_key = format!("{SESSION}{:016X}{number:04X}", host::wall_ns());
        let until_s = now_s() + seconds as i64;
        let session = Session { access_key: access_key.clone(), until_s, policy };
        let said = BASE64_STANDARD.encode(serde_json::to_string(&session).unwrap_or_default());
        let token = format!("{said}.{}", BASE64_STANDARD.encode(self.seal(&format!("token\n{said}"))));
        (access_key, token, until_s)
    }

    /// What a session may do whose token is this.
    fn rights(&self, access_key: &str, token: Option<String>) -> S3Result<Rights> {
        let session = token.as_deref().and_then(|token| {
            let (said, seal) = token.split_once('.')?;
            let seal = BASE64_STANDARD.decode(seal).ok()?;
            hmac::verify(&self.0.seal, format!("token\n{said}").as_bytes(), &seal).ok()?;
            serde_json::from_slice::<Session>(&BASE64_STANDARD.decode(said).ok()?).ok()
        });
        let Some(session) = session.filter(|session| session.access_key == access_key) else {
            return Err(s3_error!(InvalidToken, "The token is not that of this access key."));
        };
        if now_s() >= session.until_s {
            return Err(s3_error!(ExpiredToken, "The session has ended."));
        }
        let policy = session.policy.map(|policy| Policy::parse(&policy)).transpose();
        let policy = policy.map_err(|error| s3_error!(InvalidToken, "The policy cannot be read: {error}"))?;
        Ok(Rights(policy.map(Arc::new)))
    }
}

impl Rights {
    fn check(&self, action: &str, resource: &str, prefix: Option<&str>) -> S3Result<()> {
        let resource = format!("arn:aws:s3:::{resource}");
        match &self.0 {
            Some(policy) if !policy.allows(Wanted { action, resource: &resource, prefix }) => {
                Err(s3_error!(AccessDenied, "The policy of the session does not allow {action} on {resource}."))
            }
            _ => Ok(()),
        }
    }
}

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        if access_key == self.0.access_key {
            return Ok(self.0.secret_key.clone());
        }
        if access_key.starts_with(SESSION) {
            return Ok(self.secret_of(access_key).into());
        }
        Err(s3_error!(InvalidAccessKeyId, "The access key is not the one this store was started with."))
    }
}

/// The action of an operation on objects, or on the bucket; `has_version` says whether it names one.
fn action(operation: &str, has_version: bool) -> String {
    let name = match operation {
        "GetObject" | "HeadObject" if has_version => "GetObjectVersion",
        "HeadObject" => "GetObject",
        "ListObjectVersions" => "ListBucketVersions",
        "CreateMultipartUpload" | "UploadPart" | "CompleteMultipartUpload" | "CopyObject" | "UploadPartCopy" => {
            "PutObject"
        }
        "ListParts" => "ListMultipartUploadParts",
        "ListObjects" | "ListObjectsV2" | "HeadBucket" => "ListBucket",
        "ListMultipartUploads" => "ListBucketMultipartUploads",
        "ListBuckets" => "ListAllMyBuckets",
        other => other,
    };
    format!("s3:{name}")
}

/// The value of a parameter in a query.
fn parameter(uri: &Uri, name: &str) -> Option<String> {
    uri.query()?.split('&').find_map(|pair| {
        let (found, value) = pair.split_once('=').unwrap_or((pair, ""));
        (found == name).then(|| decoded(value))
    })
}

fn decoded(text: &str) -> String {
    percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned()
}

#[async_trait::async_trait]
impl S3Access for Keys {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let Some(credentials) = cx.credentials() else {
            return Err(s3_error!(AccessDenied, "Signature is required"));
        };
        if credentials.access_key == self.0.access_key {
            return Ok(());
        }
        let token = cx.headers().get("x-amz-security-token").and_then(|token| token.to_str().ok());
        let token = token.map(str::to_owned).or_else(|| parameter(cx.uri(), "X-Amz-Security-Token"));
        let rights = self.rights(&credentials.access_key, token)?;
        let operation = cx.s3_op().name();
        let action = action(operation, parameter(cx.uri(), "versionId").is_some());
        match cx.s3_path() {
            S3Path::Root => rights.check(&action, "", None)?,
            // Each of its keys is looked at when these are known.
            S3Path::Bucket { .. } if operation == "DeleteObjects" => {}
            S3Path::Bucket { bucket } => rights.check(&action, bucket, parameter(cx.uri(), "prefix").as_deref())?,
            S3Path::Object { bucket, key } => {
                rights.check(&action, &format!("{bucket}/{key}"), None)?;
                let is_there = || self.0.store.bucket(bucket).is_ok_and(|bucket| bucket.object(key).is_ok());
                // Whoever may not list all of it does not learn what is not there.
                if action == "s3:GetObject" && !is_there() {
                    rights.check("s3:ListBucket", bucket, None)?;
                }
            }
        }
        if let Some(source) = cx.headers().get("x-amz-copy-source").and_then(|source| source.to_str().ok()) {
            let source = percent_decode_str(source).decode_utf8_lossy();
            rights.check("s3:GetObject", source.trim_start_matches('/'), None)?;
        }
        cx.extensions_mut().insert(rights);
        Ok(())
    }

    async fn delete_objects(&self, request: &mut S3Request<DeleteObjectsInput>) -> S3Result<()> {
        let Some(rights) = request.extensions.get::<Rights>() else { return Ok(()) };
        let S3Request { input, .. } = &*request;
        input
            .delete
            .objects
            .iter()
            .try_for_each(|object| rights.check("s3:DeleteObject", &format!("{}/{}", input.bucket, object.key), None))
    }
}

#[async_trait::async_trait]
impl S3Route for Keys {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, _: &mut Extensions) -> bool {
        let form = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        *method == Method::POST && uri.path() == "/" && form.starts_with("application/x-www-form-urlencoded")
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let S3Request { mut input, credentials, .. } = request;
        if credentials.is_none_or(|credentials| credentials.access_key != self.0.access_key) {
            return Err(s3_error!(AccessDenied, "Only the key pair of the store takes on roles."));
        }
        let form = input.store_all_limited(REQUEST_MAX).await;
        let form = form.map_err(|error| s3_error!(InvalidRequest, "The request cannot be read: {error}"))?;
        let form = String::from_utf8_lossy(&form).into_owned();
        let field = |name: &str| {
            form.split('&').find_map(|pair| {
                let (found, value) = pair.split_once('=')?;
                (found == name).then(|| decoded(value))
            })
        };
        if field("Action").as_deref() != Some("AssumeRole") {
            return Err(s3_error!(NotImplemented, "Of STS there is AssumeRole."));
        }
        if field("RoleArn").is_none() || field("RoleSessionName").is_none() {
            return Err(s3_error!(InvalidRequest, "A role has an ARN, and its session a name."));
        }
        let policy = field("Policy");
        if let Some(policy) = &policy {
            if policy.chars().count() > POLICY_MAX {
                return Err(s3_error!(MalformedPolicy, "The policy has more than {POLICY_MAX} characters."));
            }
            Policy::parse(policy).map_err(|error| s3_error!(MalformedPolicy, "{error}"))?;
        }
        let seconds = field("DurationSeconds").map_or(Ok(LIFE), |seconds| seconds.parse());
        let seconds = seconds.ok().filter(|seconds| LIVES.contains(seconds));
        let seconds = seconds.ok_or_else(|| s3_error!(InvalidRequest, "A session lives for 900 to 43200 seconds."))?;
        let seconds = seconds.min(self.0.life_max.load(Ordering::Relaxed));

        let (access_key, token, until_s) = self.begin(policy, seconds);
        let secret_key = self.secret_of(&access_key);
        let mut end = Vec::new();
        let formatted = timestamp(until_s).format(TimestampFormat::DateTime, &mut end);
        formatted.map_err(|error| s3_error!(InternalError, "{error}"))?;
        let end = String::from_utf8_lossy(&end);
        let answer = format!(
            "<AssumeRoleResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><AssumeRoleResult><Credentials>\
             <AccessKeyId>{access_key}</AccessKeyId><SecretAccessKey>{secret_key}</SecretAccessKey><SessionToken>\
             {token}</SessionToken><Expiration>{end}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
        );
        let mut response = S3Response::new(Body::from(answer));
        response.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/xml"));
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(root: &std::path::Path, secret: &str) -> Keys {
        Keys::new("AK".to_owned(), secret.to_owned(), Arc::new(Store::open(root).unwrap()))
    }

    #[test]
    fn a_token_is_good_for_its_session_until_that_ends() {
        let (root, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let ours = keys(root.path(), "secret");
        let (access_key, token, _) = ours.begin(None, 60);
        let code = |keys: &Keys, access_key: &str, token: &str| {
            let refused = keys.rights(access_key, Some(token.to_owned())).err();
            refused.map(|error| error.code().as_str().to_owned())
        };
        assert_eq!(code(&ours, &access_key, &token), None);
        let (another, ended, _) = ours.begin(None, 0);
        assert_eq!(code(&ours, &another, &ended).as_deref(), Some("ExpiredToken"));
        assert_eq!(code(&ours, &another, &token).as_deref(), Some("InvalidToken"));
        assert_eq!(code(&ours, &access_key, &token[1..]).as_deref(), Some("InvalidToken"));
        assert_eq!(code(&keys(other.path(), "other"), &access_key, &token).as_deref(), Some("InvalidToken"));
    }
}

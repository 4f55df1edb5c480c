//! STS: temporary credentials of a role, for those of somebody who may take it on (`AssumeRole`) or for a web identity
//! token (`AssumeRoleWithWebIdentity`).
//!
//! The providers of reqsign-aws-core 3.2 ask the endpoints of AWS over https alone, whatever `AWS_ENDPOINT_URL_STS`
//! says, while these ask any STS, as Ceph and MinIO have one. That for roles drops why a request failed, so that an
//! address which the guard does not let it reach would look like an outage.

use std::time::Duration;

use bytes::Bytes;
use cavern_conf::schema;
use http::header::{CONTENT_TYPE, HOST};
use http::uri::InvalidUri;
use http::{Request, Uri};
use percent_encoding::utf8_percent_encode;
use reqsign_aws_v4::{Credential, RequestSigner};
use reqsign_core::hash::hex_sha256;
use reqsign_core::time::Timestamp;
use reqsign_core::{Context, SignRequest};

use super::exchange::Giver;
use super::instance::Variables;
use crate::allowed::Guard;
use crate::s3::keys::KeyError;
use crate::s3::listing::{QUERY, element};
use crate::s3::options::Role;

const VERSION: &str = "2011-06-15";

/// The variable of the environment that names an STS.
pub(super) const VARIABLE: &str = "AWS_ENDPOINT_URL_STS";

/// What a session is for, and for how long: less than its role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::s3) struct Scope {
    /// JSON, as IAM has it.
    pub policy: String,
    pub life: Duration,
}

/// Where an STS is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sts {
    /// Who says so: an option, or the environment.
    pub setting: &'static str,
    pub url: String,
    pub region: String,
}

impl Sts {
    /// That of AWS in a region.
    pub(super) fn of_region(region: &str) -> Self {
        let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
        let url = format!("https://sts.{region}.amazonaws.com{suffix}");
        Self { setting: "STS", url, region: region.to_owned() }
    }

    fn giver(&self, role: &str, conf: &schema::Ufs) -> Result<Giver, KeyError> {
        let guard = Guard::new(self.setting, &self.url, &self.url, conf);
        Giver::new(format!("STS at {}, asked for {role},", self.url), &self.url, guard, conf)
    }

    /// The region that requests are signed for: the endpoint without one belongs to the first.
    fn signing_region(&self) -> &str {
        if self.url == "https://sts.amazonaws.com" { "us-east-1" } else { &self.region }
    }

    /// Takes a role on, or what a scope leaves of it, with the credentials of somebody.
    pub(super) async fn assume(
        &self,
        role: &Role,
        scope: Option<&Scope>,
        source: &Credential,
        conf: &schema::Ufs,
    ) -> Result<Credential, KeyError> {
        let giver = self.giver(&role.arn, conf)?;
        let mut fields = vec![("Action", "AssumeRole"), ("RoleArn", &role.arn), ("RoleSessionName", &role.session)];
        fields.extend(role.external_id.as_ref().map(|id| ("ExternalId", id.as_str())));
        let life = scope.map(|scope| scope.life.as_secs().to_string());
        fields.extend(life.as_ref().map(|life| ("DurationSeconds", life.as_str())));
        fields.extend(scope.map(|scope| ("Policy", scope.policy.as_str())));
        let (mut parts, body) = self.request(&fields)?.into_parts();
        // A source whose end is near is renewed by itself; what counts is whether STS takes it.
        let source = Credential { expires_in: None, ..source.clone() };
        let signer = RequestSigner::new("sts", self.signing_region());
        let signed = signer.sign_request(&Context::new(), &mut parts, Some(&source), None).await;
        let unsigned = |_| KeyError::Refused(format!("a request to {} cannot be signed", giver.name));
        signed.map_err(unsigned)?;
        let secrets = [
            role.external_id.as_deref().unwrap_or_default(),
            source.session_token.as_deref().unwrap_or_default(),
            &source.secret_access_key,
        ];
        let answer = giver.ask(Request::from_parts(parts, body), &secrets).await?;
        read(answer.body(), "AssumeRole").ok_or_else(|| KeyError::senseless(&giver.name))
    }

    fn request(&self, fields: &[(&str, &str)]) -> Result<Request<Bytes>, KeyError> {
        let mut form = format!("Version={VERSION}");
        for (name, value) in fields {
            form.push_str(&format!("&{name}={}", utf8_percent_encode(value, QUERY)));
        }
        let none = |_: http::Error| KeyError::Refused(format!("{} {} is no endpoint", self.setting, self.url));
        let uri: Uri = format!("{}/", self.url).parse().map_err(|error: InvalidUri| none(error.into()))?;
        let host = uri.authority().map_or("", |authority| authority.as_str()).to_owned();
        Request::post(uri)
            .header(HOST, host)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header("x-amz-content-sha256", hex_sha256(form.as_bytes()))
            .body(Bytes::from(form))
            .map_err(none)
    }
}

/// A token by which a role is taken on.
pub(super) struct WebIdentity {
    pub token_file: String,
    pub role: String,
    pub session: String,
}

impl WebIdentity {
    /// That of the environment, if it has one.
    pub(super) fn of(variables: Variables) -> Option<Self> {
        Some(Self {
            token_file: variables("AWS_WEB_IDENTITY_TOKEN_FILE")?,
            role: variables("AWS_ROLE_ARN")?,
            session: variables("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "cavern".to_owned()),
        })
    }

    /// Takes its role on with the token, which is read each time: it is replaced before it ends.
    pub(super) async fn assume(&self, sts: &Sts, conf: &schema::Ufs) -> Result<Credential, KeyError> {
        let giver = sts.giver(&self.role, conf)?;
        let token = tokio::fs::read_to_string(&self.token_file).await.map_err(|error| {
            let path = &self.token_file;
            KeyError::Refused(format!("the web identity token in {path} cannot be read: {error}"))
        })?;
        let token = token.trim();
        let request = sts.request(&[
            ("Action", "AssumeRoleWithWebIdentity"),
            ("RoleArn", &self.role),
            ("RoleSessionName", &self.session),
            ("WebIdentityToken", token),
        ])?;
        let answer = giver.ask(request, &[token]).await?;
        read(answer.body(), "AssumeRoleWithWebIdentity").ok_or_else(|| KeyError::senseless(&giver.name))
    }
}

/// The credentials in the answer to an action.
fn read(document: &[u8], action: &str) -> Option<Credential> {
    let (response, result) = (format!("{action}Response"), format!("{action}Result"));
    let text = |name: &str| {
        let text = element(document, &[&response, &result, "Credentials", name])?.trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    let end: Timestamp = text("Expiration")?.parse().ok()?;
    Some(Credential {
        access_key_id: text("AccessKeyId")?,
        secret_access_key: text("SecretAccessKey")?,
        session_token: Some(text("SessionToken")?),
        expires_in: Some(end),
    })
}

//! Tokens (OAuth 2.0) that requests bear, fetched, kept and renewed as the credentials of S3 are.
//!
//! Whoever sees a token can use it, where a signature is good for one request. So what a process finds in its own
//! surroundings goes to the hosts of the cloud alone, and never to an endpoint that an option names
//! ([`check_endpoint`]).

pub(crate) mod entra;
pub(crate) mod google;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::schema;
use futures::FutureExt;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request};
use percent_encoding::utf8_percent_encode;
use reqsign_aws_v4::Credential;
use reqsign_core::time::Timestamp;
use serde_json::Value;

use crate::allowed::Guard;
use crate::error::UfsError;
use crate::s3::KeyError;
use crate::s3::credentials::exchange::Giver;
use crate::s3::credentials::instance::check_allowed;
use crate::s3::credentials::patience;
use crate::s3::credentials::renewal::{Due, Fetch, Renewing};
use crate::s3::listing::QUERY;

/// A token that says nothing of its end is fetched again after so long.
const LIFE: Duration = Duration::from_secs(300);

/// Where a process finds whose its requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Variables and files of its own.
    Environment,
    /// The metadata of the instance that it runs on.
    Instance,
}

impl Source {
    /// As an option names it.
    pub(crate) fn parse(option: &str, value: &str) -> Result<Self, UfsError> {
        match value {
            "environment" => Ok(Self::Environment),
            "instance" => Ok(Self::Instance),
            _ => {
                let reason = "there is no such source of credentials";
                Err(UfsError::invalid(format!("{option}={value:?}"), reason, "write environment or instance"))
            }
        }
    }
}

/// Refuses to look for credentials in a process's surroundings for an endpoint that is none of the cloud's own, whose
/// hosts end in one of `domains` and are asked over TLS.
///
/// # Errors
/// [`UfsError::Invalid`] names the option of the endpoint, and with `instead` what to give.
pub(crate) fn check_endpoint(
    option: &str,
    endpoint: Option<&str>,
    domains: &[&str],
    instead: &str,
) -> Result<(), UfsError> {
    let is_own = |endpoint: &str| {
        let host = endpoint.strip_prefix("https://");
        host.is_some_and(|host| domains.iter().any(|domain| host.ends_with(domain)))
    };
    match endpoint {
        Some(endpoint) if !is_own(endpoint) => {
            let reason =
                "it is none of the cloud's own, and what processes find in their surroundings goes nowhere else";
            Err(UfsError::invalid(format!("{option}={endpoint}"), reason, format!("give {instead}")))
        }
        _ => Ok(()),
    }
}

/// A token that is there when a request needs one. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Bearer(Renewing);

impl Bearer {
    /// `giver` is the subject of sentences in messages. `fetch` is asked once for all who wait.
    pub(crate) fn new<F>(giver: String, conf: &schema::Ufs, fetch: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Credential, KeyError>> + Send + 'static,
    {
        let fetch: Fetch = Arc::new(move || fetch().boxed());
        Self(Renewing::new(giver, patience(conf), Due::Late, fetch))
    }

    /// Tokens of the identity of the instance, which its metadata on `host` have at `url` for whoever sends this
    /// header; `unasked` says why there is no such request.
    fn of_instance(
        host: &str,
        url: String,
        (header, value): (&'static str, &'static str),
        unasked: &'static str,
        option: &'static str,
        conf: &schema::Ufs,
    ) -> Self {
        let (name, of_process) = (format!("the instance metadata at {host}"), conf.clone());
        Self::new(name.clone(), conf, move || {
            let (name, url, conf) = (name.clone(), url.clone(), of_process.clone());
            async move {
                check_allowed(option, "instance", &conf)?;
                let giver = Giver::new(name, &url, Guard::of_own_host(&url), &conf)?;
                let request = Request::get(&url).header(header, value).body(Bytes::new());
                fetched(&giver, request.map_err(|_| KeyError::Refused(unasked.to_owned()))?, &[]).await
            }
        })
    }

    /// Has a request bear it.
    pub(crate) async fn authorize(&self, headers: &mut HeaderMap) -> Result<(), KeyError> {
        let token = self.0.credential().await?.session_token.unwrap_or_default();
        let value = HeaderValue::try_from(format!("Bearer {token}"));
        let mut value = value.map_err(|_| KeyError::senseless(self.0.giver()))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        Ok(())
    }

    /// Where it comes from, as messages name it.
    pub(crate) fn giver(&self) -> &str {
        self.0.giver()
    }

    /// The store does not take it: another one is fetched, if that may be a better one.
    pub(crate) fn give_up(&self) -> bool {
        self.0.give_up()
    }
}

/// Asks for a token. `secrets` are in the request, and in no error.
pub(crate) async fn fetched(giver: &Giver, request: Request<Bytes>, secrets: &[&str]) -> Result<Credential, KeyError> {
    let answer = giver.ask(request, secrets).await?;
    read(answer.body()).ok_or_else(|| KeyError::senseless(&giver.name))
}

/// The token of an answer, as credentials of which the session token is all.
fn read(document: &[u8]) -> Option<Credential> {
    let answer: Value = serde_json::from_slice(document).ok()?;
    let token = answer.get("access_token")?.as_str().filter(|token| !token.is_empty())?;
    // Azure's instance metadata writes the number as a text.
    let seconds = answer.get("expires_in").and_then(|life| life.as_u64().or_else(|| life.as_str()?.parse().ok()));
    // None lives longer than a day.
    let life = seconds.map_or(LIFE, |seconds| Duration::from_secs(seconds.min(86_400)));
    Some(Credential {
        access_key_id: String::new(),
        secret_access_key: String::new(),
        session_token: Some(token.to_owned()),
        expires_in: Some(Timestamp::now() + life),
    })
}

/// A form that is posted for a token.
///
/// # Errors
/// [`KeyError::Refused`] for a URL that is none.
pub(crate) fn form(url: &str, fields: &[(&str, &str)]) -> Result<Request<Bytes>, KeyError> {
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| format!("{name}={}", utf8_percent_encode(value, QUERY))).collect();
    let posted = Request::post(url).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
    posted.body(fields.join("&").into()).map_err(|_| KeyError::Refused(format!("{url} is no URL")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_and_its_end_are_read() {
        for (text, life) in [
            (r#"{"access_token":"t","expires_in":3599,"token_type":"Bearer"}"#, 3599),
            (r#"{"access_token":"t","expires_in":"3599"}"#, 3599),
            (r#"{"access_token":"t"}"#, 300),
            (r#"{"access_token":"t","expires_in":99999999999999}"#, 86_400),
        ] {
            let credential = read(text.as_bytes()).unwrap();
            assert_eq!(credential.session_token.as_deref(), Some("t"), "{text}");
            let left = credential.expires_in.unwrap().as_second() - Timestamp::now().as_second();
            assert!((life - 5..=life).contains(&left), "{text}: {left}");
        }
        for text in ["", "{}", "<html>", r#"{"access_token":""}"#, r#"{"access_token":7}"#] {
            assert!(read(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn what_a_process_finds_goes_to_the_cloud_alone() {
        let check = |endpoint| check_endpoint("gs.endpoint_url", endpoint, &[".googleapis.com"], "gs.anonymous=true");
        check(None).unwrap();
        check(Some("https://storage.googleapis.com")).unwrap();
        for endpoint in [
            "http://storage.googleapis.com",
            "https://googleapis.com.evil.org",
            "https://evilgoogleapis.com",
            "https://storage.googleapis.com:8443",
            "http://127.0.0.1:4443",
        ] {
            let refused = check(Some(endpoint)).unwrap_err().to_string();
            assert!(refused.contains(endpoint) && refused.contains("give gs.anonymous=true"), "{refused}");
        }
    }

    #[test]
    fn forms_are_encoded() {
        let request = form("https://h/token", &[("grant_type", "a:b"), ("x", "y z&+")]).unwrap();
        assert_eq!(request.body(), "grant_type=a%3Ab&x=y%20z%26%2B");
        assert!(form("no url", &[]).is_err());
    }
}

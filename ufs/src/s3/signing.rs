//! Signatures (AWS SigV4) of plain requests, with the key of the day kept.
//!
//! The key that signs is derived from the secret in four steps, and is the same all day. What has a query, is to be
//! signed in one, or has a path that the signature spells otherwise is left to the library.

use std::fmt::Write as _;

use http::header::{AUTHORIZATION, HOST};
use http::request::Parts;
use http::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, PercentEncode, utf8_percent_encode};
use reqsign_aws_v4::{Credential, RequestSigner};
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use reqsign_core::time::Timestamp;
use reqsign_core::{Context, Error, Result, SignRequest};

use super::listing::QUERY;

const SERVICE: &str = "s3";
const PAYLOAD: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

const PATH: &AsciiSet = &QUERY.remove(b'/');

/// A bucket or a key in a path, as the signature spells it: stores that verify the path as it was sent refuse every
/// other spelling, even one that HTTP takes for the same.
pub(crate) fn spelled(key: &str) -> PercentEncode<'_> {
    utf8_percent_encode(key, PATH)
}

pub(super) struct DaySigner {
    region: String,
    others: RequestSigner,
    day: Mutex<Option<Day>>,
}

/// The key of a secret and a day.
struct Day {
    secret: String,
    date: String,
    key: Vec<u8>,
}

impl DaySigner {
    pub(super) fn new(region: &str) -> Self {
        Self { region: region.to_owned(), others: RequestSigner::new(SERVICE, region), day: Mutex::default() }
    }

    /// Signs a request, with what has not ended.
    pub(super) async fn sign(&self, parts: &mut Parts, credential: &Credential) -> Result<()> {
        if is_plain(parts, credential) {
            return self.sign_at(parts, credential, Timestamp::now());
        }
        self.others.sign_request(&Context::new(), parts, Some(credential), None).await
    }

    fn key(&self, secret: &str, date: &str) -> Vec<u8> {
        let mut day = self.day.lock();
        match &*day {
            Some(known) if known.date == date && known.secret == secret => known.key.clone(),
            _ => {
                let first = hmac_sha256(format!("AWS4{secret}").as_bytes(), date.as_bytes());
                let further = [self.region.as_str(), SERVICE, "aws4_request"];
                let key = further.iter().fold(first, |key, part| hmac_sha256(&key, part.as_bytes()));
                *day = Some(Day { secret: secret.to_owned(), date: date.to_owned(), key: key.clone() });
                key
            }
        }
    }

    fn sign_at(&self, parts: &mut Parts, credential: &Credential, now: Timestamp) -> Result<()> {
        let (time, date) = (now.format_iso8601(), now.format_date());
        let value = |text: &str| HeaderValue::try_from(text).map_err(|error| Error::unexpected(error.to_string()));
        parts.headers.insert(PAYLOAD, HeaderValue::from_static(UNSIGNED));
        parts.headers.insert(DATE, value(&time)?);
        if let Some(token) = &credential.session_token {
            let mut token = value(token)?;
            token.set_sensitive(true);
            parts.headers.insert(TOKEN, token);
        }
        let mut headers: Vec<(&HeaderName, &HeaderValue)> = parts.headers.iter().collect();
        headers.sort_unstable_by_key(|(name, _)| name.as_str());
        let mut names = String::with_capacity(96);
        let mut request = String::with_capacity(512);
        // Writing to a String cannot fail.
        let _ = writeln!(request, "{}\n{}\n", parts.method, parts.uri.path());
        for (name, value) in headers {
            let value = value.to_str().map_err(|error| Error::request_invalid(error.to_string()))?;
            let _ = writeln!(request, "{}:{}", name, value.trim());
            if !names.is_empty() {
                names.push(';');
            }
            names.push_str(name.as_str());
        }
        let _ = write!(request, "\n{names}\n{UNSIGNED}");
        let scope = format!("{date}/{}/{SERVICE}/aws4_request", self.region);
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex_sha256(request.as_bytes()));
        let signature = hex_hmac_sha256(&self.key(&credential.secret_access_key, &date), text.as_bytes());
        let id = &credential.access_key_id;
        let mut authorization =
            value(&format!("AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"))?;
        authorization.set_sensitive(true);
        parts.headers.insert(AUTHORIZATION, authorization);
        Ok(())
    }
}

/// Whether a signature spells the request as it is.
fn is_plain(parts: &Parts, credential: &Credential) -> bool {
    let is_express = |host: &str| host.contains("s3express") || host.contains("--x-s3");
    let host = parts.headers.get(HOST).and_then(|host| host.to_str().ok());
    let is_spelled = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/%".contains(&byte);
    parts.uri.query().is_none()
        && parts.uri.path().bytes().all(is_spelled)
        && host.is_some_and(|host| credential.session_token.is_none() || !is_express(host))
        && parts.headers.keys_len() == parts.headers.len()
        && !parts.headers.contains_key(AUTHORIZATION)
        && !parts.headers.contains_key(PAYLOAD)
        && !parts.headers.contains_key(DATE)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn request(path: &str) -> Parts {
        let request = Request::get(format!("http://localhost:9000{path}"))
            .header(HOST, "localhost:9000")
            .header("range", "bytes=0-9")
            .header("if-match", "\"e\"");
        request.body(()).unwrap().into_parts().0
    }

    fn credential(token: Option<&str>) -> Credential {
        Credential {
            access_key_id: "AK".into(),
            secret_access_key: "secret/+=".into(),
            session_token: token.map(ToOwned::to_owned),
            expires_in: None,
        }
    }

    #[tokio::test]
    async fn signatures_are_those_of_the_library() {
        let (ours, library) = (DaySigner::new("r-1"), RequestSigner::new(SERVICE, "r-1"));
        let context = Context::new();
        for token in [None, Some("a+token=")] {
            let credential = credential(token);
            for path in ["/b/k", "/b/a%2Bb/../%C3%A9%20", "/b/(odd)!*'", "/b//x/", "/b?list-type=2&prefix=a%2F"] {
                let (by_us, by_library) = loop {
                    let (mut first, mut second) = (request(path), request(path));
                    ours.sign(&mut first, &credential).await.unwrap();
                    library.sign_request(&context, &mut second, Some(&credential), None).await.unwrap();
                    // Not when a second has begun in between.
                    if first.headers[&DATE] == second.headers[&DATE] {
                        break (first.headers, second.headers);
                    }
                };
                assert_eq!(by_us, by_library, "{path}");
            }
        }
    }

    #[test]
    fn another_day_or_secret_has_another_key() {
        let signer = DaySigner::new("r-1");
        let first = signer.key("s", "20260101");
        assert_eq!(signer.key("s", "20260101"), first);
        assert_ne!(signer.key("s", "20260102"), first);
        assert_ne!(signer.key("t", "20260101"), first);
        assert_eq!(signer.key("s", "20260101"), first);
    }
}

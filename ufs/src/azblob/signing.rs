//! Signatures with the key of an account (Shared Key): HMAC-SHA256 over the request as Azure writes it down.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use http::HeaderValue;
use http::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE, HeaderName, IF_MATCH, IF_MODIFIED_SINCE,
    IF_NONE_MATCH, IF_UNMODIFIED_SINCE, RANGE,
};
use http::request::Parts;
use percent_encoding::percent_decode_str;
use reqsign_core::hash::{base64_decode, base64_hmac_sha256};

const CONTENT_MD5: HeaderName = HeaderName::from_static("content-md5");

/// A key of an account.
pub(super) struct AccountKey {
    account: String,
    key: Vec<u8>,
}

impl AccountKey {
    /// `None` where the key is no base64.
    pub(super) fn new(account: &str, key: &str) -> Option<Self> {
        let key = base64_decode(key.trim()).ok().filter(|key| !key.is_empty())?;
        Some(Self { account: account.to_owned(), key })
    }

    /// Signs a request that has a body of so many bytes.
    ///
    /// # Errors
    /// For a header that is no text.
    pub(super) fn sign(&self, parts: &mut Parts, body_bytes: usize) -> Result<(), ()> {
        let signature = base64_hmac_sha256(&self.key, self.text(parts, body_bytes).ok_or(())?.as_bytes());
        let value = HeaderValue::try_from(format!("SharedKey {}:{signature}", self.account));
        let mut value = value.map_err(|_| ())?;
        value.set_sensitive(true);
        parts.headers.insert(AUTHORIZATION, value);
        Ok(())
    }

    /// What is signed.
    fn text(&self, parts: &Parts, body_bytes: usize) -> Option<String> {
        let header = |name: HeaderName| match parts.headers.get(name) {
            Some(value) => value.to_str().ok(),
            None => Some(""),
        };
        let length = if body_bytes == 0 { String::new() } else { body_bytes.to_string() };
        let mut text = String::new();
        // The time is in `x-ms-date`, and not in `Date`.
        for part in [
            parts.method.as_str(),
            header(CONTENT_ENCODING)?,
            header(CONTENT_LANGUAGE)?,
            length.as_str(),
            header(CONTENT_MD5)?,
            header(CONTENT_TYPE)?,
            "",
            header(IF_MODIFIED_SINCE)?,
            header(IF_MATCH)?,
            header(IF_NONE_MATCH)?,
            header(IF_UNMODIFIED_SINCE)?,
            header(RANGE)?,
        ] {
            text.push_str(part);
            text.push('\n');
        }
        let named = parts.headers.iter().map(|(name, value)| (name.as_str(), value));
        let mut named: Vec<_> = named.filter(|(name, _)| name.starts_with("x-ms-")).collect();
        named.sort_by_key(|(name, _)| place(name));
        for (name, value) in named {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name}:{}", value.to_str().ok()?.trim());
        }
        let _ = write!(text, "/{}{}", self.account, parts.uri.path());
        let pairs = parts.uri.query().into_iter().flat_map(|query| query.split('&'));
        let decoded = |part: &str| percent_decode_str(part).decode_utf8().ok().map(|text| text.into_owned());
        let mut arguments = BTreeMap::new();
        for pair in pairs {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            arguments.insert(decoded(name)?.to_ascii_lowercase(), decoded(value)?);
        }
        for (name, value) in arguments {
            let _ = write!(text, "\n{name}:{value}");
        }
        Some(text)
    }
}

/// Where a header comes among the others: Azure's order has `_` before digits and letters, and does not see `-`.
fn place(name: &str) -> String {
    name.replace('-', "").replace('_', " ")
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn a_request_is_written_down_as_azure_does() {
        let key = AccountKey::new("acct", "aHVzaA==").unwrap();
        let request = Request::put("https://acct.blob.core.windows.net/data/a%20b?comp=blocklist&BlockId=a%2Bb%3D")
            .header("x-ms-version", "2023-11-03")
            .header("x-ms-date", "Fri, 02 Jan 2026 03:04:05 GMT")
            .header("x-ms-meta-mode", " 33188 ")
            .header("x-ms-meta-m1", "1")
            .header("x-ms-meta-m_1", "2")
            .header("if-match", "\"e\"")
            .header("range", "bytes=0-9");
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(
            key.text(&parts, 7).unwrap(),
            "PUT\n\n\n7\n\n\n\n\n\"e\"\n\n\nbytes=0-9\nx-ms-date:Fri, 02 Jan 2026 03:04:05 GMT\n\
             x-ms-meta-m_1:2\nx-ms-meta-m1:1\nx-ms-meta-mode:33188\nx-ms-version:2023-11-03\n\
             /acct/data/a%20b\nblockid:a+b=\ncomp:blocklist"
        );
        assert!(key.text(&parts, 0).unwrap().starts_with("PUT\n\n\n\n"), "an empty body has no length");
        key.sign(&mut parts, 7).unwrap();
        let signed = parts.headers[AUTHORIZATION].to_str().unwrap();
        assert!(signed.starts_with("SharedKey acct:") && signed.len() == "SharedKey acct:".len() + 44, "{signed}");
    }

    #[test]
    fn what_is_no_key_is_none() {
        assert!(AccountKey::new("acct", "").is_none() && AccountKey::new("acct", "!").is_none());
        assert!(AccountKey::new("acct", " aHVzaA==\n").is_some());
    }
}

//! AWS Signature Version 4 in the `Authorization` header, the body unsigned.

use std::fmt::Write as _;

use hmac::{Hmac, KeyInit, Mac};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

/// What the embedded store and most others take when the client does not care.
const REGION: &str = "us-east-1";
const SIGNED_HEADERS: &str = "host;x-amz-content-sha256;x-amz-date";
const PAYLOAD: &str = "UNSIGNED-PAYLOAD";

#[derive(Clone)]
pub struct Signer {
    access_key: String,
    secret_key: String,
}

impl Signer {
    pub fn new(access_key: &str, secret_key: &str) -> Self {
        Self { access_key: access_key.to_owned(), secret_key: secret_key.to_owned() }
    }

    /// The headers that sign a request now. `path` and `query` are as they go over the wire.
    pub fn sign(&self, method: &str, host: &str, path: &str, query: &str) -> [(&'static str, String); 3] {
        self.sign_at(method, host, path, query, &Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string())
    }

    fn sign_at(&self, method: &str, host: &str, path: &str, query: &str, time: &str) -> [(&'static str, String); 3] {
        let day = &time[..8];
        let request = format!(
            "{method}\n{path}\n{query}\nhost:{host}\nx-amz-content-sha256:{PAYLOAD}\nx-amz-date:{time}\n\n\
             {SIGNED_HEADERS}\n{PAYLOAD}"
        );
        let scope = format!("{day}/{REGION}/s3/aws4_request");
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex(&Sha256::digest(request)));
        let key = [day, REGION, "s3", "aws4_request"]
            .iter()
            .fold(format!("AWS4{}", self.secret_key).into_bytes(), |key, part| hmac(&key, part.as_bytes()));
        let signature = hex(&hmac(&key, text.as_bytes()));
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={SIGNED_HEADERS}, Signature={signature}",
            self.access_key
        );
        [
            ("x-amz-date", time.to_owned()),
            ("x-amz-content-sha256", PAYLOAD.to_owned()),
            ("authorization", authorization),
        ]
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    #[allow(clippy::expect_used)]
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text);
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// All but unreserved characters and `/` as `%XX`, as S3 wants the path of a canonical request.
pub fn escape(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut escaped, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => escaped.push(byte.into()),
            _ => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
        escaped
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_escaped_once_and_slashes_stay() {
        assert_eq!(escape("a/../b c+%é"), "a/../b%20c%2B%25%C3%A9");
    }

    #[test]
    fn every_part_of_the_request_is_signed() {
        let signer = Signer::new("AK", "secret");
        let sign = |method, path, query, time| signer.sign_at(method, "h:1", path, query, time)[2].1.clone();
        let base = sign("GET", "/b/k", "", "20260102T030405Z");
        assert!(base.starts_with("AWS4-HMAC-SHA256 Credential=AK/20260102/us-east-1/s3/aws4_request, "));
        assert_ne!(base, sign("PUT", "/b/k", "", "20260102T030405Z"));
        assert_ne!(base, sign("GET", "/b/l", "", "20260102T030405Z"));
        assert_ne!(base, sign("GET", "/b/k", "acl=", "20260102T030405Z"));
        assert_ne!(base, sign("GET", "/b/k", "", "20260102T030406Z"));
        assert_ne!(base, Signer::new("AK", "other").sign_at("GET", "h:1", "/b/k", "", "20260102T030405Z")[2].1);
    }
}

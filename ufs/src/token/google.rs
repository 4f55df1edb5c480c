//! Tokens of Google: for the key of a service account, for a person who has logged in, and of an instance.

use std::path::PathBuf;
use std::sync::Arc;

use cavern_conf::{host, schema};
use cavern_proto::gs_options::SOURCE;
use reqsign_aws_v4::Credential;
use reqsign_core::hash::{base64_decode, base64_encode};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

use super::{Bearer, fetched, form};
use crate::allowed::Guard;
use crate::s3::KeyError;
use crate::s3::credentials::exchange::Giver;
use crate::s3::shared_files::variable;

/// What tokens are for: reading and changing objects.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";
const TOKENS: &str = "https://oauth2.googleapis.com/token";
const ASSERTION: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
/// Where a process finds credentials, and where `gcloud auth application-default login` puts them.
const FILE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
const LOGGED_IN: &str = ".config/gcloud/application_default_credentials.json";
const METADATA: &str = "metadata.google.internal";
/// Seconds that an assertion is good for.
const ASSERTION_S: i64 = 600;

/// What a file of credentials holds.
#[derive(Clone)]
pub(crate) enum KeyFile {
    ServiceAccount {
        email: String,
        key_id: String,
        key: Arc<RsaKeyPair>,
        tokens: String,
    },
    /// A person.
    Authorized {
        client: String,
        client_secret: String,
        refresh: String,
    },
}

impl KeyFile {
    /// Reads one, which may be encoded in base64. The error says what is wrong, and quotes nothing.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let text = text.trim();
        let decoded = if text.starts_with('{') { text.as_bytes().to_vec() } else { decoded(text)? };
        let file: Value = serde_json::from_slice(&decoded).map_err(|_| "it is no JSON")?;
        let text = |name: &str| file.get(name).and_then(Value::as_str).map(str::to_owned);
        match file.get("type").and_then(Value::as_str) {
            Some("service_account") => {
                let none = "it has no client_email, or no private_key that is one in PEM form";
                let pem = text("private_key").ok_or(none)?;
                let der = PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| none)?;
                let key = RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).map_err(|_| none)?;
                Ok(Self::ServiceAccount {
                    email: text("client_email").ok_or(none)?,
                    key_id: text("private_key_id").unwrap_or_default(),
                    key: Arc::new(key),
                    tokens: text("token_uri").unwrap_or_else(|| TOKENS.to_owned()),
                })
            }
            Some("authorized_user") => {
                let none = "it has no client_id, client_secret or refresh_token";
                let [client, client_secret, refresh] = ["client_id", "client_secret", "refresh_token"].map(text);
                Ok(Self::Authorized {
                    client: client.ok_or(none)?,
                    client_secret: client_secret.ok_or(none)?,
                    refresh: refresh.ok_or(none)?,
                })
            }
            _ => Err("its type is neither service_account nor authorized_user"),
        }
    }

    /// Tokens for it. `setting` is what holds it, as messages name it.
    pub(crate) fn bearer(self, setting: &'static str, conf: &schema::Ufs) -> Bearer {
        let url = self.tokens().to_owned();
        let (name, conf_) = (format!("{url} for {setting}"), conf.clone());
        Bearer::new(name.clone(), conf, move || {
            let (file, name, url, conf) = (self.clone(), name.clone(), url.clone(), conf_.clone());
            async move {
                let giver = Giver::new(name, &url, Guard::new(setting, &url, &url, &conf), &conf)?;
                file.fetch(&giver, &url).await
            }
        })
    }

    /// Who gives tokens for it.
    fn tokens(&self) -> &str {
        match self {
            Self::ServiceAccount { tokens, .. } => tokens,
            Self::Authorized { .. } => TOKENS,
        }
    }

    async fn fetch(&self, giver: &Giver, url: &str) -> Result<Credential, KeyError> {
        match self {
            Self::ServiceAccount { email, key_id, key, .. } => {
                let now = host::wall_ns() / 1_000_000_000;
                let claims = json!({
                    "iss": email, "scope": SCOPE, "aud": url, "iat": now, "exp": now + ASSERTION_S,
                });
                let assertion = signed(key, key_id, &claims)
                    .ok_or_else(|| KeyError::Refused(format!("the key of {email} signs nothing")))?;
                let request = form(url, &[("grant_type", ASSERTION), ("assertion", assertion.as_str())])?;
                fetched(giver, request, &[assertion.as_str()]).await
            }
            Self::Authorized { client, client_secret, refresh } => {
                let fields = [
                    ("grant_type", "refresh_token"),
                    ("client_id", client.as_str()),
                    ("client_secret", client_secret.as_str()),
                    ("refresh_token", refresh.as_str()),
                ];
                fetched(giver, form(url, &fields)?, &[client_secret.as_str(), refresh.as_str()]).await
            }
        }
    }
}

fn decoded(text: &str) -> Result<Vec<u8>, &'static str> {
    let lines: String = text.split_whitespace().collect();
    base64_decode(&lines).map_err(|_| "it is neither JSON nor JSON in base64")
}

/// A JSON Web Token (RFC 7519) with these claims.
fn signed(key: &RsaKeyPair, key_id: &str, claims: &Value) -> Option<String> {
    let url_safe = |bytes: &[u8]| base64_encode(bytes).trim_end_matches('=').replace('+', "-").replace('/', "_");
    let header = json!({ "alg": "RS256", "typ": "JWT", "kid": key_id });
    let text = format!("{}.{}", url_safe(header.to_string().as_bytes()), url_safe(claims.to_string().as_bytes()));
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature).ok()?;
    Some(format!("{text}.{}", url_safe(&signature)))
}

/// Tokens for what the environment of this process has: a file of credentials, which is read for each of them.
pub(crate) fn of_environment(conf: &schema::Ufs) -> Bearer {
    let conf_ = conf.clone();
    Bearer::new("the Google credentials of this process".to_owned(), conf, move || {
        let conf = conf_.clone();
        async move {
            let logged_in = || Some(std::env::home_dir()?.join(LOGGED_IN));
            let path = variable(FILE).map(PathBuf::from).or_else(logged_in).unwrap_or_default();
            let shown = path.display();
            let text = tokio::fs::read_to_string(&path).await;
            let text = text.map_err(|error| KeyError::Refused(format!("{shown} ({FILE}) cannot be read: {error}")))?;
            let file = KeyFile::parse(&text).map_err(|wrong| KeyError::Refused(format!("{shown}: {wrong}")))?;
            let url = file.tokens().to_owned();
            let giver = Giver::new(format!("{url} for {shown}"), &url, Guard::of_own_host(&url), &conf)?;
            file.fetch(&giver, &url).await
        }
    })
}

/// Tokens of the service account of this instance.
pub(crate) fn of_instance(conf: &schema::Ufs) -> Bearer {
    let host = variable("GCE_METADATA_HOST").unwrap_or_else(|| METADATA.to_owned());
    let url = format!("http://{host}/computeMetadata/v1/instance/service-accounts/default/token");
    Bearer::of_instance(&host, url, ("metadata-flavor", "Google"), "GCE_METADATA_HOST names no host", SOURCE, conf)
}

#[cfg(test)]
mod tests {
    use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};

    use super::*;

    const PEM: &str = include_str!("google/test_key.pem");

    fn service_account() -> String {
        json!({ "type": "service_account", "client_email": "a@p.iam", "private_key_id": "k1", "private_key": PEM })
            .to_string()
    }

    #[test]
    fn a_service_account_signs_for_itself() {
        for text in [service_account(), base64_encode(service_account().as_bytes())] {
            let KeyFile::ServiceAccount { email, key_id, key, tokens } = KeyFile::parse(&text).unwrap() else {
                panic!("another type")
            };
            assert_eq!((email.as_str(), key_id.as_str(), tokens.as_str()), ("a@p.iam", "k1", TOKENS));
            let token = signed(&key, &key_id, &json!({ "iss": email })).unwrap();
            let (text, signature) = token.rsplit_once('.').unwrap();
            let mut standard = signature.replace('-', "+").replace('_', "/");
            while !standard.len().is_multiple_of(4) {
                standard.push('=');
            }
            let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key.public());
            public.verify(text.as_bytes(), &base64_decode(&standard).unwrap()).unwrap();
            assert!(!token.contains(['+', '/', '=']), "{token}");
        }
    }

    #[test]
    fn what_is_no_key_is_told_without_a_word_of_it() {
        for (text, part) in [
            ("hush!", "neither JSON"),
            ("{hush", "no JSON"),
            (r#"{"type":"external_account","x":"hush"}"#, "service_account"),
            (r#"{"type":"service_account","client_email":"a","private_key":"hush"}"#, "PEM"),
            (r#"{"type":"authorized_user","client_id":"hush"}"#, "refresh_token"),
        ] {
            let Err(wrong) = KeyFile::parse(text) else { panic!("{text} is taken") };
            assert!(wrong.contains(part) && !wrong.contains("hush"), "{text}: {wrong}");
        }
    }
}

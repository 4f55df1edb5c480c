//! The options of an `azblob://` mount (`-c key=value`).
//!
//! | option | meaning | default |
//! |---|---|---|
//! | `azblob.account` | name of the storage account | none: it must be given |
//! | `azblob.endpoint_url` | `http[s]://HOST[:PORT]` | `https://ACCOUNT.blob.core.windows.net` |
//! | `azblob.credentials.key` | a key of the account | see below |
//! | `azblob.credentials.sas` | a shared access signature of the container, a query | see below |
//! | `azblob.credentials.source` | `environment` or `instance` | `environment` |
//! | `azblob.anonymous` | `true`: requests of nobody | `false` |
//!
//! At an endpoint whose host does not begin with the account's name, that is the first component of paths.
//!
//! The environment has `AZURE_STORAGE_KEY`, or `AZURE_STORAGE_SAS_TOKEN`, or an application of Entra ID:
//! `AZURE_TENANT_ID`, `AZURE_CLIENT_ID`, and `AZURE_CLIENT_SECRET` or `AZURE_FEDERATED_TOKEN_FILE` (at
//! `AZURE_AUTHORITY_HOST`). An instance has the managed identity that its metadata give tokens for, which needs
//! `ufs.instance_credentials`. What either finds goes to Azure's own endpoints alone. An empty value counts as an
//! option left out.

use std::collections::HashMap;

use cavern_conf::schema;
use cavern_proto::Scheme;
use cavern_proto::azblob_options::{ACCOUNT, ANONYMOUS, ENDPOINT, KEY, SAS, SOURCE};

use super::signing::AccountKey;
use crate::error::UfsError;
use crate::options::check_names;
use crate::s3::options::{boolean, normalize_endpoint};
use crate::s3::shared_files::variable;
use crate::token::{Bearer, Source, check_endpoint, entra};

const DOMAINS: [&str; 4] = [
    ".blob.core.windows.net",
    ".blob.storage.azure.net",
    ".blob.core.chinacloudapi.cn",
    ".blob.core.usgovcloudapi.net",
];

/// Of the process's environment.
const OWN_KEY: &str = "AZURE_STORAGE_KEY";
const OWN_SAS: &str = "AZURE_STORAGE_SAS_TOKEN";

pub(crate) struct AzblobOptions {
    account: String,
    /// Where its containers are, without a `/` at the end.
    pub account_url: String,
    credentials: Credentials,
}

cavern_conf::debug_only!(AzblobOptions { account_url });

/// Whose requests those of a mount are.
enum Credentials {
    Anonymous,
    Key(String),
    Sas(String),
    Found(Source),
}

/// What lets requests pass.
pub(super) enum Access {
    Anonymous,
    Key(AccountKey),
    /// A query.
    Sas(String),
    Bearer(Bearer),
    /// Nothing was found.
    None(&'static str),
}

impl Access {
    /// Where it comes from, as messages name it.
    pub(super) fn giver(&self) -> &str {
        match self {
            Self::Anonymous => "azblob.anonymous",
            Self::Key(_) => "azblob.credentials.key (or AZURE_STORAGE_KEY in the environment)",
            Self::Sas(_) => "azblob.credentials.sas (or AZURE_STORAGE_SAS_TOKEN in the environment)",
            Self::Bearer(bearer) => bearer.giver(),
            Self::None(_) => "azblob.credentials",
        }
    }

    /// The store does not take it: whether another one is fetched that may be better.
    pub(super) fn give_up(&self) -> bool {
        matches!(self, Self::Bearer(bearer) if bearer.give_up())
    }
}

impl AzblobOptions {
    pub(crate) fn parse(options: &HashMap<String, String>) -> Result<Self, UfsError> {
        check_names(Scheme::Azblob, options)?;
        let given = |name: &str| options.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let remedy = "give the name of the storage account: -c azblob.account=NAME";
        let account = given(ACCOUNT).ok_or_else(|| UfsError::invalid(ACCOUNT, "it is not given", remedy))?;
        if !(3..=24).contains(&account.len())
            || !account.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        {
            let reason = "the name of an account has 3 to 24 lower-case letters and digits";
            return Err(UfsError::invalid(format!("{ACCOUNT}={account:?}"), reason, "write it as Azure shows it"));
        }
        let endpoint = given(ENDPOINT).map(|value| normalize_endpoint(ENDPOINT, value)).transpose()?;
        let account_url = match &endpoint {
            None => format!("https://{account}.blob.core.windows.net"),
            Some(endpoint) if endpoint.contains(&format!("://{account}.")) => endpoint.clone(),
            Some(endpoint) => format!("{endpoint}/{account}"),
        };
        let anonymous = given(ANONYMOUS).map(|value| boolean(ANONYMOUS, value)).transpose()?.unwrap_or(false);
        let all = [(KEY, given(KEY)), (SAS, given(SAS)), (SOURCE, given(SOURCE)), (ANONYMOUS, anonymous.then_some(""))];
        let mut there = all.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let (first, second) = (there.next(), there.next());
        if let Some((name, _)) = second {
            let remedy = format!("leave all but one of {KEY}, {SAS}, {SOURCE} and {ANONYMOUS} out");
            return Err(UfsError::invalid(name, "other credentials are given too", remedy));
        }
        let credentials = match first {
            Some((KEY, key)) => Credentials::Key(key.to_owned()),
            Some((SAS, sas)) => Credentials::Sas(sas.to_owned()),
            Some((ANONYMOUS, _)) => Credentials::Anonymous,
            source => {
                let source = source.map_or(Ok(Source::Environment), |(_, value)| Source::parse(SOURCE, value))?;
                let instead = format!("{KEY}, {SAS} or {ANONYMOUS}=true");
                check_endpoint(ENDPOINT, endpoint.as_deref(), &DOMAINS, &instead)?;
                Credentials::Found(source)
            }
        };
        let options = Self { account: account.to_owned(), account_url, credentials };
        match &options.credentials {
            Credentials::Key(key) => options.key(KEY, key).map(drop)?,
            Credentials::Sas(text) => sas(SAS, text).map(drop)?,
            Credentials::Anonymous | Credentials::Found(_) => {}
        }
        Ok(options)
    }

    /// What lets requests pass in this process.
    pub(super) fn access(&self, conf: &schema::Ufs) -> Result<Access, UfsError> {
        Ok(match &self.credentials {
            Credentials::Anonymous => Access::Anonymous,
            Credentials::Key(key) => Access::Key(self.key(KEY, key)?),
            Credentials::Sas(text) => Access::Sas(sas(SAS, text)?),
            Credentials::Found(Source::Instance) => Access::Bearer(entra::of_instance(conf)),
            Credentials::Found(Source::Environment) => {
                match (variable(OWN_KEY), variable(OWN_SAS), entra::of_environment(conf)) {
                    (Some(key), ..) => Access::Key(self.key(OWN_KEY, &key)?),
                    (None, Some(text), _) => Access::Sas(sas(OWN_SAS, &text)?),
                    (None, None, Some(bearer)) => Access::Bearer(bearer),
                    (None, None, None) => Access::None(
                        "there is no AZURE_STORAGE_KEY, no AZURE_STORAGE_SAS_TOKEN and no application of Entra ID \
                         (AZURE_TENANT_ID, AZURE_CLIENT_ID and its secret or token) in the environment of this \
                         process, and no azblob.credentials",
                    ),
                }
            }
        })
    }

    /// `setting` is what holds it, as messages name it.
    fn key(&self, setting: &str, key: &str) -> Result<AccountKey, UfsError> {
        let remedy = "write a key of the account as Azure shows it";
        AccountKey::new(&self.account, key).ok_or_else(|| UfsError::invalid(setting, "it is no base64", remedy))
    }
}

/// A shared access signature, which this setting holds, as a query.
fn sas(setting: &str, text: &str) -> Result<String, UfsError> {
    let query = text.trim().trim_start_matches('?');
    let is_query = query.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#' && byte != b'"');
    if is_query && query.split('&').any(|part| part.starts_with("sig=")) {
        return Ok(query.to_owned());
    }
    Err(UfsError::invalid(setting, "it is no query with a signature (sig=…)", "write it as Azure shows it: sv=…&sig=…"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[(&str, &str)]) -> Result<AzblobOptions, UfsError> {
        let account = [(ACCOUNT, "devstoreaccount1")];
        let all = account.iter().chain(options).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        AzblobOptions::parse(&all.collect())
    }

    #[test]
    fn an_account_is_in_the_host_or_in_the_path() {
        for (endpoint, url) in [
            ("", "https://devstoreaccount1.blob.core.windows.net"),
            (
                "https://devstoreaccount1.blob.core.chinacloudapi.cn",
                "https://devstoreaccount1.blob.core.chinacloudapi.cn",
            ),
            ("http://127.0.0.1:10000/", "http://127.0.0.1:10000/devstoreaccount1"),
        ] {
            let options = parse(&[(ENDPOINT, endpoint), (ANONYMOUS, "true")]).unwrap();
            assert_eq!(options.account_url, url);
        }
        assert!(matches!(parse(&[]).unwrap().credentials, Credentials::Found(Source::Environment)));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_remedy_and_without_secrets() {
        for (options, parts) in [
            (vec![("azblob.credentials.keys", "hush")], ["no such option", KEY]),
            (vec![(ACCOUNT, "")], ["not given", "azblob.account=NAME"]),
            (vec![(ACCOUNT, "a@b")], ["3 to 24", ACCOUNT]),
            (vec![(KEY, "hush!")], ["no base64", KEY]),
            (vec![(SAS, "hush")], ["sig=", SAS]),
            (vec![(SAS, "sig=hush hush")], ["sig=", SAS]),
            (vec![(KEY, "aHVzaA=="), (SAS, "sig=hush")], ["other credentials", SAS]),
            (vec![(KEY, "aHVzaA=="), (ANONYMOUS, "true")], ["other credentials", ANONYMOUS]),
            (vec![(SOURCE, "cli")], ["no such source", "environment or instance"]),
            (vec![(ENDPOINT, "http://127.0.0.1:10000")], ["none of the cloud's own", "azblob.anonymous=true"]),
        ] {
            let answer = parse(&options);
            let message = answer.unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{options:?}: {message}");
            assert!(!message.contains("hush"), "{message}");
        }
        let kept = parse(&[(KEY, "aHVzaA==")]).unwrap();
        assert!(!format!("{kept:?}").contains("aHVz"));
    }
}

//! The options of a `gs://` mount (`-c key=value`).
//!
//! | option | meaning | default |
//! |---|---|---|
//! | `gs.endpoint_url` | `http[s]://HOST[:PORT]` | `https://storage.googleapis.com` |
//! | `gs.credentials.key` | a file of credentials (a service account's key), as JSON or that in base64 | see below |
//! | `gs.credentials.source` | `environment` or `instance` | `environment` |
//! | `gs.anonymous` | `true`: requests bear no token | `false` |
//!
//! The environment has a file of credentials: that of `GOOGLE_APPLICATION_CREDENTIALS`, or
//! `~/.config/gcloud/application_default_credentials.json`. It is of a service account, or of a person who has logged
//! in. An instance has the service account that its metadata give tokens for (`GCE_METADATA_HOST`), which needs
//! `ufs.instance_credentials`. The tokens of both go to Google's own endpoints alone. An empty value counts as an
//! option left out.

use std::collections::HashMap;

use cavern_proto::Scheme;
use cavern_proto::gs_options::{ANONYMOUS, ENDPOINT, KEY, SOURCE};

use crate::error::UfsError;
use crate::options::check_names;
use crate::s3::options::{boolean, normalize_endpoint};
use crate::token::google::KeyFile;
use crate::token::{Source, check_endpoint};

pub(crate) const GOOGLE: &str = "https://storage.googleapis.com";
const DOMAINS: [&str; 1] = [".googleapis.com"];

pub(crate) struct GsOptions {
    /// `scheme://host[:port]`, lower case, without a default port; `None` for Google's.
    pub endpoint: Option<String>,
    pub credentials: Credentials,
}

cavern_conf::debug_only!(GsOptions { endpoint });

/// Whose requests those of a mount are.
pub(crate) enum Credentials {
    Anonymous,
    Key(KeyFile),
    Found(Source),
}

impl GsOptions {
    pub(crate) fn parse(options: &HashMap<String, String>) -> Result<Self, UfsError> {
        check_names(Scheme::Gs, options)?;
        let given = |name: &str| options.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let endpoint = given(ENDPOINT).map(|value| normalize_endpoint(ENDPOINT, value)).transpose()?;
        let anonymous = given(ANONYMOUS).map(|value| boolean(ANONYMOUS, value)).transpose()?.unwrap_or(false);
        let of_several = |name: &str| {
            let remedy = format!("leave all but one of {KEY}, {SOURCE} and {ANONYMOUS} out");
            UfsError::invalid(name, "other credentials are given too", remedy)
        };
        let credentials = match (anonymous, given(KEY), given(SOURCE)) {
            (true, None, None) => Credentials::Anonymous,
            (true, ..) => return Err(of_several(ANONYMOUS)),
            (false, Some(_), Some(_)) => return Err(of_several(KEY)),
            (false, Some(text), None) => {
                let remedy = "give the JSON of a service account's key, or that in base64";
                Credentials::Key(KeyFile::parse(text).map_err(|wrong| UfsError::invalid(KEY, wrong, remedy))?)
            }
            (false, None, source) => {
                let source = source.map_or(Ok(Source::Environment), |value| Source::parse(SOURCE, value))?;
                let instead = format!("{KEY} or {ANONYMOUS}=true");
                check_endpoint(ENDPOINT, endpoint.as_deref(), &DOMAINS, &instead)?;
                Credentials::Found(source)
            }
        };
        Ok(Self { endpoint, credentials })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[(&str, &str)]) -> Result<GsOptions, UfsError> {
        GsOptions::parse(&options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn defaults_are_google_with_what_the_process_has() {
        let options = parse(&[(ENDPOINT, ""), (SOURCE, "")]).unwrap();
        assert!(options.endpoint.is_none());
        assert!(matches!(options.credentials, Credentials::Found(Source::Environment)));
        let options = parse(&[(ENDPOINT, "HTTP://h:80/"), (ANONYMOUS, "true")]).unwrap();
        assert_eq!(options.endpoint.as_deref(), Some("http://h"));
        assert!(matches!(options.credentials, Credentials::Anonymous));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_remedy_and_without_secrets() {
        for (options, parts) in [
            (vec![("gs.credentials.keys", "hush")], ["no such option", KEY]),
            (vec![(KEY, "hush")], ["base64", KEY]),
            (vec![(SOURCE, "imds")], ["no such source", "environment or instance"]),
            (vec![(ANONYMOUS, "true"), (KEY, "hush")], ["other credentials", ANONYMOUS]),
            (vec![(SOURCE, "instance"), (KEY, "hush")], ["other credentials", KEY]),
            (vec![(ENDPOINT, "http://u:hush@h"), (ANONYMOUS, "true")], ["a user or a password", ENDPOINT]),
            (vec![(ENDPOINT, "http://127.0.0.1:4443")], ["none of the cloud's own", "gs.anonymous=true"]),
            (vec![(ENDPOINT, "https://h"), (SOURCE, "instance")], ["none of the cloud's own", ENDPOINT]),
        ] {
            let message = parse(&options).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{options:?}: {message}");
            assert!(!message.contains("hush"), "{message}");
        }
    }
}

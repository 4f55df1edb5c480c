//! The options of an `s3://` mount (`-c key=value`).
//!
//! | option | meaning | default |
//! |---|---|---|
//! | `s3.endpoint_url` | `http[s]://HOST[:PORT]` | AWS, by region |
//! | `s3.region_name` | region that requests are signed for | `AWS_REGION`, `AWS_DEFAULT_REGION`, `us-east-1` |
//! | `s3.credentials.access`, `s3.credentials.secret` | key pair, both or neither | see below |
//! | `s3.credentials.session_token` | token of a temporary key pair | none |
//! | `s3.credentials.profile` | profile of the shared credentials file | see below |
//! | `s3.force.path.style` | the bucket is in the path, not in the host name | `true` with an endpoint, else `false` |
//! | `s3.anonymous` | `true`: unsigned requests | `false` |
//!
//! Without credentials in the options each process looks in its own environment: `AWS_ACCESS_KEY_ID` and companions,
//! then the shared files (`AWS_PROFILE`, `AWS_SHARED_CREDENTIALS_FILE`, `~/.aws`), then a web identity token; finding
//! none is an error at the first request. The endpoint is never taken from the environment: it is part of the store's
//! identity, which all processes must agree on. An empty value counts as an option left out.

use std::collections::HashMap;
use std::fmt;

use crate::error::UfsError;

const ENDPOINT: &str = "s3.endpoint_url";
const REGION: &str = "s3.region_name";
const ACCESS: &str = "s3.credentials.access";
const SECRET: &str = "s3.credentials.secret";
const TOKEN: &str = "s3.credentials.session_token";
const PROFILE: &str = "s3.credentials.profile";
const PATH_STYLE: &str = "s3.force.path.style";
const ANONYMOUS: &str = "s3.anonymous";

const NAMES: [&str; 8] = [ENDPOINT, REGION, ACCESS, SECRET, TOKEN, PROFILE, PATH_STYLE, ANONYMOUS];

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    Static { access: String, secret: String, session_token: Option<String> },
    Profile(String),
    Environment,
    Anonymous,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static { .. } => "Static(hidden)",
            Self::Profile(_) => "Profile(hidden)",
            Self::Environment => "Environment",
            Self::Anonymous => "Anonymous",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct S3Options {
    /// `scheme://host[:port]`, lower case, without a default port; `None` for AWS.
    pub endpoint: Option<String>,
    pub region: String,
    pub path_style: bool,
    pub credentials: Credentials,
}

impl S3Options {
    /// `environment` is asked for the region only.
    pub(crate) fn parse(
        options: &HashMap<String, String>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, UfsError> {
        let mut names: Vec<&str> = options.keys().map(String::as_str).collect();
        names.sort_unstable();
        if let Some(unknown) = names.iter().find(|name| !NAMES.contains(name)) {
            let nearest = NAMES.iter().min_by_key(|name| strsim::damerau_levenshtein(name, unknown));
            let remedy = nearest.map_or_else(String::new, |name| format!("the nearest that exists is {name}"));
            return Err(UfsError::invalid(format!("option {unknown:?}"), "s3:// has no such option", remedy));
        }
        let given = |name: &str| options.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let endpoint = given(ENDPOINT).map(normalize_endpoint).transpose()?;
        let region = given(REGION).map(str::to_owned);
        let region = region.or_else(|| environment("AWS_REGION").filter(|region| !region.is_empty()));
        let region = region.or_else(|| environment("AWS_DEFAULT_REGION").filter(|region| !region.is_empty()));
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        if !region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            let reason = "a region is made of letters, digits and hyphens";
            return Err(UfsError::invalid(format!("{REGION}={region:?}"), reason, "write for instance us-east-1"));
        }
        let path_style = given(PATH_STYLE).map(|value| boolean(PATH_STYLE, value)).transpose()?;
        let path_style = path_style.unwrap_or(endpoint.is_some());
        Ok(Self { region, path_style, credentials: credentials(given)?, endpoint })
    }
}

/// The options of a mount after a change of some. Those that are given take the place of those of their names, and an
/// empty value takes one away. Credentials do not mix: with another access key, the token or the profile of before
/// goes.
pub fn changed_options(before: &HashMap<String, String>, given: &HashMap<String, String>) -> HashMap<String, String> {
    let has = |name: &str| given.get(name).is_some_and(|value| !value.is_empty() && value != "false");
    let outdated: &[&str] = match () {
        () if has(PROFILE) || has(ANONYMOUS) => &[ACCESS, SECRET, TOKEN, PROFILE, ANONYMOUS],
        () if has(ACCESS) => &[TOKEN, PROFILE, ANONYMOUS],
        () => &[],
    };
    let mut options = before.clone();
    options.retain(|name, _| !outdated.contains(&name.as_str()));
    options.extend(given.clone());
    options.retain(|name, value| !(value.is_empty() && given.contains_key(name)));
    options
}

fn credentials<'a>(given: impl Fn(&str) -> Option<&'a str>) -> Result<Credentials, UfsError> {
    let anonymous = given(ANONYMOUS).map(|value| boolean(ANONYMOUS, value)).transpose()?.unwrap_or(false);
    let session_token = given(TOKEN).map(str::to_owned);
    let chosen = match (given(ACCESS), given(SECRET), given(PROFILE)) {
        (Some(access), Some(secret), None) => {
            Credentials::Static { access: access.to_owned(), secret: secret.to_owned(), session_token }
        }
        (Some(_), None, _) => return Err(UfsError::invalid(ACCESS, "it is given alone", format!("give {SECRET} too"))),
        (None, Some(_), _) => return Err(UfsError::invalid(SECRET, "it is given alone", format!("give {ACCESS} too"))),
        (Some(_), Some(_), Some(_)) => {
            return Err(UfsError::invalid(PROFILE, "it is given beside a key pair", "leave one of the two out"));
        }
        (None, None, _) if session_token.is_some() => {
            return Err(UfsError::invalid(TOKEN, "it is given alone", format!("give {ACCESS} and {SECRET} too")));
        }
        (None, None, Some(profile)) => Credentials::Profile(profile.to_owned()),
        (None, None, None) if anonymous => return Ok(Credentials::Anonymous),
        (None, None, None) => Credentials::Environment,
    };
    if anonymous {
        let reason = "it is true, and credentials are given too";
        return Err(UfsError::invalid(ANONYMOUS, reason, "leave one of the two out"));
    }
    Ok(chosen)
}

fn boolean(name: &str, value: &str) -> Result<bool, UfsError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(UfsError::invalid(format!("{name}={value:?}"), "it is neither true nor false", "write true or false")),
    }
}

/// `scheme://host[:port]`, so that every spelling of one endpoint gives the same store id.
fn normalize_endpoint(value: &str) -> Result<String, UfsError> {
    let wrong = |reason: &str| {
        // A URL can carry a password, so the value is not repeated.
        UfsError::invalid(ENDPOINT, reason, "write http://HOST[:PORT] or https://HOST[:PORT]")
    };
    let uri: http::Uri = value.parse().map_err(|_| wrong("it is no URL"))?;
    let authority = uri.authority().ok_or_else(|| wrong("it names no host"))?;
    if authority.as_str().contains('@') {
        return Err(wrong("it holds a user or a password"));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(wrong("it has a path or a query"));
    }
    let default_port = match uri.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return Err(wrong("its scheme is neither http nor https")),
    };
    let scheme = uri.scheme_str().unwrap_or_default();
    let host = authority.host().to_ascii_lowercase();
    if host.is_empty() {
        return Err(wrong("it names no host"));
    }
    Ok(match authority.port() {
        Some(port) if port.as_str().parse() != Ok(default_port) => {
            let port: u16 = port.as_str().parse().map_err(|_| wrong("its port is no number up to 65535"))?;
            format!("{scheme}://{host}:{port}")
        }
        // `http` accepts `host:` and non-numeric ports as "no port"; what follows the host must be nothing else.
        Some(_) => format!("{scheme}://{host}"),
        None if authority.as_str().len() == authority.host().len() => format!("{scheme}://{host}"),
        None => return Err(wrong("its port is no number up to 65535")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[(&str, &str)]) -> Result<S3Options, UfsError> {
        let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        S3Options::parse(&options, |_| None)
    }

    #[test]
    fn defaults_are_aws_with_the_environments_credentials() {
        let options = parse(&[]).unwrap();
        assert_eq!(options.endpoint, None);
        assert_eq!(options.region, "us-east-1");
        assert!(!options.path_style);
        assert_eq!(options.credentials, Credentials::Environment);
        assert!(parse(&[(ENDPOINT, "http://h:9000")]).unwrap().path_style);
        let from_environment = S3Options::parse(&HashMap::new(), |name| (name == "AWS_REGION").then(|| "eu-x".into()));
        assert_eq!(from_environment.unwrap().region, "eu-x");
    }

    #[test]
    fn other_credentials_take_the_place_of_all_of_before() {
        let of = |options: &[(&str, &str)]| -> HashMap<String, String> {
            options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let keys = [(ACCESS, "a"), (SECRET, "s")];
        let session = [(ENDPOINT, "http://h"), (ACCESS, "b"), (SECRET, "t"), (TOKEN, "u")];
        for (before, given, after) in [
            (&session[..], &keys[..], &[(ENDPOINT, "http://h"), (ACCESS, "a"), (SECRET, "s")][..]),
            (&[(PROFILE, "p")], &keys, &keys),
            (&[(ANONYMOUS, "true")], &keys, &keys),
            (&session, &[(PROFILE, "p")], &[(ENDPOINT, "http://h"), (PROFILE, "p")]),
            (&session, &[(ANONYMOUS, "true"), (ENDPOINT, "")], &[(ANONYMOUS, "true")]),
            (&keys, &[(SECRET, "other")], &[(ACCESS, "a"), (SECRET, "other")]),
            (&keys, &session[1..], &session[1..]),
            (&session, &[(TOKEN, ""), (REGION, "r")], &[session[0], session[1], session[2], (REGION, "r")]),
        ] {
            assert_eq!(changed_options(&of(before), &of(given)), of(after), "{before:?} {given:?}");
        }
    }

    #[test]
    fn spellings_of_one_endpoint_are_one() {
        for (given, normal) in [
            ("http://H.example:80/", "http://h.example"),
            ("https://h:443", "https://h"),
            ("https://h:9000/", "https://h:9000"),
            ("HTTP://127.0.0.1:09000", "http://127.0.0.1:9000"),
            ("http://[::1]:9000", "http://[::1]:9000"),
        ] {
            assert_eq!(normalize_endpoint(given).unwrap(), normal, "{given}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_remedy_and_without_secrets() {
        for (options, parts) in [
            (vec![("s3.endpoint", "x")], ["s3.endpoint_url", "no such option"]),
            (vec![("s3.credentials.acess", "hush")], ["s3.credentials.access", "nearest"]),
            (vec![(ENDPOINT, "ftp://h")], ["neither http nor https", ENDPOINT]),
            (vec![(ENDPOINT, "h:9000")], ["write http://", ENDPOINT]),
            (vec![(ENDPOINT, "http://h/path")], ["a path or a query", ENDPOINT]),
            (vec![(ENDPOINT, "http://u:hush@h")], ["a user or a password", ENDPOINT]),
            (vec![(ENDPOINT, "http://h:99999")], ["port", ENDPOINT]),
            (vec![(ENDPOINT, "")], ["", ""]),
            (vec![(REGION, "eu west")], ["letters, digits", "us-east-1"]),
            (vec![(ACCESS, "a")], ["alone", SECRET]),
            (vec![(SECRET, "hush")], ["alone", ACCESS]),
            (vec![(TOKEN, "hush")], ["alone", ACCESS]),
            (vec![(ACCESS, "a"), (SECRET, "hush"), (PROFILE, "p")], ["beside a key pair", "leave one"]),
            (vec![(ANONYMOUS, "true"), (PROFILE, "p")], ["credentials are given too", "leave one"]),
            (vec![(PATH_STYLE, "yes")], ["neither true nor false", "write true or false"]),
        ] {
            let answer = parse(&options);
            if options == [(ENDPOINT, "")] {
                assert_eq!(answer.unwrap().endpoint, None);
                continue;
            }
            let message = answer.unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{options:?}: {message}");
            assert!(!message.contains("hush"), "{message}");
        }
    }

    #[test]
    fn debug_hides_credentials() {
        let options = parse(&[(ACCESS, "hush"), (SECRET, "hush"), (TOKEN, "hush")]).unwrap();
        assert!(!format!("{options:?}").contains("hush"));
    }
}

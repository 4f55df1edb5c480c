//! The options of an `s3://` mount (`-c key=value`).
//!
//! | option | meaning | default |
//! |---|---|---|
//! | `s3.endpoint_url` | `http[s]://HOST[:PORT]` | AWS, by region |
//! | `s3.region_name` | region that requests are signed for | `AWS_REGION`, `AWS_DEFAULT_REGION`, `us-east-1` |
//! | `s3.credentials.access`, `s3.credentials.secret` | key pair, both or neither | see below |
//! | `s3.credentials.session_token` | token of a temporary key pair | none |
//! | `s3.credentials.profile` | profile of the shared files | see below |
//! | `s3.credentials.source` | `environment`, `default`, `instance`, `container` or `web_identity` | `environment` |
//! | `s3.credentials.role` | ARN of a role that is taken on with these credentials (STS `AssumeRole`) | none |
//! | `s3.credentials.external_id` | what the owner of the role wants to hear | none |
//! | `s3.credentials.role_session` | name of the role's sessions, as logs of the cloud have it | `cavern` |
//! | `s3.credentials.vended_role` | ARN of the role whose keys workers and clients get in the place of these | none |
//! | `s3.credentials.vended_duration` | how long such keys live, 15 minutes to 12 hours | `1h` |
//! | `s3.sts_endpoint_url` | `http[s]://HOST[:PORT]` that gives out the roles | see below |
//! | `s3.force.path.style` | the bucket is in the path, not in the host name | `true` with an endpoint, else `false` |
//! | `s3.anonymous` | `true`: unsigned requests | `false` |
//!
//! A mount has a key pair, a profile, or a source, from which each process gets its own:
//!
//! | source | where |
//! |---|---|
//! | `environment` | `AWS_ACCESS_KEY_ID` and companions, then the shared files, then a web identity |
//! | `default` | as `environment`, then those of the container, then those of the instance |
//! | `web_identity` | the token in `AWS_WEB_IDENTITY_TOKEN_FILE` for `AWS_ROLE_ARN` (`AWS_ROLE_SESSION_NAME`) |
//! | `instance` | metadata of the instance (IMDSv2), at `AWS_EC2_METADATA_SERVICE_ENDPOINT` if that is set |
//! | `container` | `AWS_CONTAINER_CREDENTIALS_FULL_URI` or `…_RELATIVE_URI`, as ECS and EKS set it |
//!
//! The shared files are those of `~/.aws`, or `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`, with the profile
//! `AWS_PROFILE`. A profile has keys, or a role and a `source_profile` or `credential_source`, a `credential_process`,
//! or a sign-on that was made (`aws sso login`). What is of a container or of an instance needs
//! `ufs.instance_credentials`. Finding none is an error at the first request. Those that end are renewed before they
//! do, and the shared files are read again every few minutes.
//!
//! Where keys are vended, masters alone have the mount's own credentials: [`super::vending`].
//!
//! A role comes from `s3.sts_endpoint_url`, or else from `AWS_ENDPOINT_URL_STS`, or else, for buckets of AWS, from STS
//! in the region. Web identity tokens, which whoever sees them can use, go nowhere that an option names.
//!
//! The endpoint of the bucket is never taken from the environment: it is part of the store's identity, which all
//! processes must agree on. An empty value counts as an option left out.

mod credentials;

use std::collections::HashMap;

use cavern_proto::s3_options::{
    ACCESS, ANONYMOUS, ENDPOINT, EXTERNAL_ID, PATH_STYLE, PROFILE, REGION, ROLE, ROLE_SESSION, SECRET, SOURCE,
    STS_ENDPOINT, TOKEN, VENDED_DURATION, VENDED_ROLE,
};
use cavern_proto::{Scheme, azblob_options, gs_options};

use self::credentials::OF_ROLES;
pub(crate) use self::credentials::{Credentials, Role, Source, Vended};
use crate::error::UfsError;
use crate::options::check_names;

/// All that say whose the requests are of whoever has a mount's own credentials.
const CREDENTIALS: [&str; 10] =
    [ACCESS, SECRET, TOKEN, PROFILE, SOURCE, ROLE, EXTERNAL_ID, ROLE_SESSION, STS_ENDPOINT, ANONYMOUS];

/// Of each other kind of store: what says where it is, and whose the requests are. What they send can be used by
/// whoever sees it, so none of it goes along to another place.
const OF_OTHER_STORES: [(&[&str], &[&str]); 2] = [
    (&[gs_options::ENDPOINT], &gs_options::CREDENTIALS),
    (&[azblob_options::ACCOUNT, azblob_options::ENDPOINT], &azblob_options::CREDENTIALS),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct S3Options {
    /// `scheme://host[:port]`, lower case, without a default port; `None` for AWS.
    pub endpoint: Option<String>,
    pub region: String,
    pub path_style: bool,
    pub credentials: Credentials,
    /// Whose keys workers and clients get.
    pub vended: Option<Vended>,
    /// As `endpoint`; `None` without a role, and where others say it.
    pub sts_endpoint: Option<String>,
}

impl S3Options {
    /// `environment` is asked for the region only.
    pub(crate) fn parse(
        options: &HashMap<String, String>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, UfsError> {
        check_names(Scheme::S3, options)?;
        let given = |name: &str| options.get(name).map(String::as_str).filter(|value| !value.is_empty());
        let endpoint = given(ENDPOINT).map(|value| normalize_endpoint(ENDPOINT, value)).transpose()?;
        let sts_endpoint = given(STS_ENDPOINT).map(|value| normalize_endpoint(STS_ENDPOINT, value)).transpose()?;
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
        let (credentials, vended) = credentials::parse(given)?;
        Ok(Self { region, path_style, credentials, vended, endpoint, sts_endpoint })
    }

    /// The endpoint as it is part of names: those of AWS's buckets are unique across its regions.
    pub(crate) fn identity(&self) -> &str {
        self.endpoint.as_deref().unwrap_or("https://s3.amazonaws.com")
    }

    /// Names a bucket globally.
    pub(crate) fn store_id(&self, bucket: &str) -> String {
        format!("{}/{bucket}", self.identity())
    }
}

/// The options of a mount after a change of some. Those that are given take the place of those of their names, and an
/// empty value takes one away. Credentials do not mix: with another key pair, profile or source all those of before go,
/// the role as well; with another role, or none, what belongs to the one of before. That keys are vended stays until it
/// is taken away by its own name: nobody gets the mount's own by a change of these.
pub fn changed_options(before: &HashMap<String, String>, given: &HashMap<String, String>) -> HashMap<String, String> {
    let has = |name: &str| given.get(name).is_some_and(|value| !value.is_empty() && value != "false");
    let stays = |name: &str| given.get(name).map_or(before.contains_key(name), |value| !value.is_empty());
    let outdated: &[&str] = match () {
        () if [ACCESS, PROFILE, SOURCE, ANONYMOUS].into_iter().any(has) => &CREDENTIALS,
        () if has(ROLE) => &[EXTERNAL_ID, ROLE_SESSION, STS_ENDPOINT, ANONYMOUS],
        () if given.contains_key(ROLE) => &OF_ROLES,
        () if given.contains_key(VENDED_ROLE) && !stays(ROLE) => &OF_ROLES,
        () => &[],
    };
    let is_vended = stays(VENDED_ROLE);
    let is_outdated = |name: &str| match is_vended {
        true => outdated.contains(&name) && !OF_ROLES.contains(&name),
        false => outdated.contains(&name) || name == VENDED_DURATION,
    };
    let mut options = before.clone();
    options.retain(|name, _| !is_outdated(name));
    for (places, credentials) in OF_OTHER_STORES {
        let is_moved = places
            .iter()
            .any(|place| given.get(*place).is_some_and(|value| before.get(*place).map_or("", String::as_str) != value));
        if is_moved || credentials.iter().any(|name| has(name)) {
            options.retain(|name, _| !credentials.contains(&name.as_str()));
        }
    }
    options.extend(given.clone());
    options.retain(|name, value| !(value.is_empty() && given.contains_key(name)));
    options
}

/// Whether workers and clients get keys that are vended, in the place of a mount's own.
pub fn is_vended(options: &HashMap<String, String>) -> bool {
    options.get(VENDED_ROLE).is_some_and(|role| !role.is_empty())
}

/// The options of a mount whose keys are vended, as those are told who get such keys: without credentials. `None` for
/// other mounts.
pub fn vended_options(options: &HashMap<String, String>) -> Option<HashMap<String, String>> {
    let is_told = |(name, _): &(&String, &String)| !CREDENTIALS.contains(&name.as_str());
    let told = || options.iter().filter(is_told).map(|(name, value)| (name.clone(), value.clone())).collect();
    is_vended(options).then(told)
}

pub(crate) fn boolean(name: &str, value: &str) -> Result<bool, UfsError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(UfsError::invalid(format!("{name}={value:?}"), "it is neither true nor false", "write true or false")),
    }
}

/// `scheme://host[:port]`, so that every spelling of one endpoint gives the same store id.
pub(crate) fn normalize_endpoint(name: &str, value: &str) -> Result<String, UfsError> {
    let wrong = |reason: &str| {
        // A URL can carry a password, so the value is not repeated.
        UfsError::invalid(name, reason, "write http://HOST[:PORT] or https://HOST[:PORT]")
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
    use std::time::Duration;

    use super::*;

    const ARN: &str = "arn:aws:iam::123456789012:role/train";

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
        assert_eq!(options.credentials, Credentials::Signed { source: Source::Environment, role: None });
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
        let of_role = [keys[0], keys[1], (ROLE, "r"), (EXTERNAL_ID, "e")];
        let vended = [(VENDED_ROLE, "v"), (VENDED_DURATION, "2h")];
        let of_vended = [keys[0], keys[1], vended[0], vended[1], (STS_ENDPOINT, "http://s")];
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
            (&keys, &[(SOURCE, "instance")], &[(SOURCE, "instance")]),
            (&[(SOURCE, "instance")], &keys, &keys),
            (&[(SOURCE, "container"), (ROLE, "r"), (EXTERNAL_ID, "e")], &keys, &keys),
            (&of_role, &[(PROFILE, "p")], &[(PROFILE, "p")]),
            (&of_role, &[(ROLE, "q")], &[keys[0], keys[1], (ROLE, "q")]),
            (&of_role, &[(ROLE, "")], &keys),
            (
                &of_role,
                &[(ROLE_SESSION, "s"), (EXTERNAL_ID, "")],
                &[keys[0], keys[1], (ROLE, "r"), (ROLE_SESSION, "s")],
            ),
            (&[(ANONYMOUS, "true")], &[(ROLE, "r")], &[(ROLE, "r")]),
            (&of_vended, &[(PROFILE, "p")], &[(PROFILE, "p"), vended[0], vended[1], (STS_ENDPOINT, "http://s")]),
            (&of_vended, &[(VENDED_ROLE, "")], &keys),
            (&[keys[0], keys[1], (ROLE, "r"), vended[0], (EXTERNAL_ID, "e")], &[(VENDED_ROLE, "")], &of_role),
            (&keys, &vended, &[keys[0], keys[1], vended[0], vended[1]]),
            (
                &[("gs.credentials.key", "k")],
                &[("gs.credentials.source", "instance")],
                &[("gs.credentials.source", "instance")],
            ),
            (&[("gs.credentials.key", "k")], &[("gs.endpoint_url", "http://h")], &[("gs.endpoint_url", "http://h")]),
            (
                &[("azblob.account", "a"), ("azblob.credentials.sas", "s")],
                &[("azblob.account", "a"), ("azblob.endpoint_url", "")],
                &[("azblob.account", "a"), ("azblob.credentials.sas", "s")],
            ),
            (
                &[("azblob.account", "a"), ("azblob.credentials.sas", "s")],
                &[("azblob.account", "b"), ("azblob.credentials.key", "k")],
                &[("azblob.account", "b"), ("azblob.credentials.key", "k")],
            ),
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
            assert_eq!(normalize_endpoint(ENDPOINT, given).unwrap(), normal, "{given}");
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
            (vec![(SOURCE, "imds")], ["no such source", "instance, container"]),
            (vec![(SOURCE, "instance"), (ACCESS, "a"), (SECRET, "hush")], ["beside a key pair", SOURCE]),
            (vec![(SOURCE, "instance"), (PROFILE, "p")], ["beside a profile", SOURCE]),
            (vec![(SOURCE, "instance"), (ANONYMOUS, "true")], ["credentials are given too", "leave one"]),
            (vec![(ROLE, ARN), (ANONYMOUS, "true")], ["credentials are given too", "leave one"]),
            (vec![(EXTERNAL_ID, "hush")], ["without a role", ROLE]),
            (vec![(ROLE_SESSION, "s1")], ["without a role", ROLE]),
            (vec![(STS_ENDPOINT, "http://h")], ["without a role", ROLE]),
            (vec![(ROLE, "train")], ["no ARN", "arn:aws:iam::"]),
            (vec![(VENDED_ROLE, "train")], [VENDED_ROLE, "no ARN"]),
            (vec![(VENDED_ROLE, ARN), (ANONYMOUS, "true")], ["credentials are given too", "leave one"]),
            (vec![(VENDED_DURATION, "1h")], ["without a role", VENDED_ROLE]),
            (vec![(VENDED_ROLE, ARN), (VENDED_DURATION, "14m")], ["15 minutes to 12 hours", VENDED_DURATION]),
            (vec![(VENDED_ROLE, ARN), (VENDED_DURATION, "13h")], ["15 minutes to 12 hours", VENDED_DURATION]),
            (vec![(VENDED_ROLE, ARN), (VENDED_DURATION, "soon")], ["15 minutes to 12 hours", "write for instance 1h"]),
            (vec![(ROLE, ARN), (EXTERNAL_ID, "hush hush")], ["2 to 1224", EXTERNAL_ID]),
            (vec![(ROLE, ARN), (ROLE_SESSION, "a b")], ["2 to 64", ROLE_SESSION]),
            (vec![(ROLE, ARN), (STS_ENDPOINT, "http://u:hush@h")], ["a user or a password", STS_ENDPOINT]),
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
    fn whoever_gets_vended_keys_is_told_no_others() {
        let given = [(ACCESS, "hush"), (SECRET, "hush"), (VENDED_ROLE, ARN), (EXTERNAL_ID, "hush"), (REGION, "r")];
        let given: HashMap<_, _> = given.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let told = vended_options(&given).unwrap();
        let names: std::collections::BTreeSet<&str> = told.keys().map(String::as_str).collect();
        assert_eq!(names, [VENDED_ROLE, REGION].into());
        assert_eq!(S3Options::parse(&told, |_| None).unwrap().vended.unwrap().life, Duration::from_secs(3600));
        assert_eq!(vended_options(&[(ACCESS.to_owned(), "hush".to_owned())].into()), None);
    }

    #[test]
    fn debug_hides_credentials() {
        let options = parse(&[(ACCESS, "hush"), (SECRET, "hush"), (TOKEN, "hush")]).unwrap();
        assert!(!format!("{options:?}").contains("hush"));
        let options = parse(&[(PROFILE, "p"), (ROLE, ARN), (EXTERNAL_ID, "hush")]).unwrap();
        assert!(!format!("{options:?}").contains("hush") && format!("{options:?}").contains(ARN));
    }
}

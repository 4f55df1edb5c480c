//! The options that say whose requests those of a mount are.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use cavern_conf::Interval;
use cavern_proto::s3_options::{
    ACCESS, ANONYMOUS, EXTERNAL_ID, PROFILE, ROLE, ROLE_SESSION, SECRET, SOURCE, STS_ENDPOINT, TOKEN, VENDED_DURATION,
    VENDED_ROLE,
};

use super::boolean;
use crate::error::UfsError;

/// What is said of all roles of a mount.
pub(super) const OF_ROLES: [&str; 3] = [EXTERNAL_ID, ROLE_SESSION, STS_ENDPOINT];

/// What the sessions of roles are called where nobody says so: logs of the cloud have it.
const SESSION: &str = "cavern";

/// How long keys that are vended live where nobody says so, and as AWS limits it.
const LIFE: Duration = Duration::from_secs(3600);
const LIVES: RangeInclusive<Duration> = Duration::from_secs(15 * 60)..=Duration::from_secs(12 * 3600);

/// Whose requests those of a mount are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Credentials {
    Anonymous,
    Signed {
        source: Source,
        /// Taken on with the credentials of the source.
        role: Option<Role>,
    },
}

/// Where credentials come from.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Source {
    KeyPair {
        access: String,
        secret: String,
        session_token: Option<String>,
    },
    Profile(String),
    Environment,
    /// As `Environment`, then of the container, then of the instance.
    Default,
    Instance,
    Container,
    WebIdentity,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyPair { .. } => "KeyPair(hidden)",
            Self::Profile(_) => "Profile(hidden)",
            Self::Environment => "Environment",
            Self::Default => "Default",
            Self::Instance => "Instance",
            Self::Container => "Container",
            Self::WebIdentity => "WebIdentity",
        })
    }
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Role {
    pub arn: String,
    /// What the owner of the role wants to hear from those who may take it on.
    pub external_id: Option<String>,
    pub session: String,
}

cavern_conf::debug_only!(Role { arn, session });

/// The role whose keys workers and clients get, in the place of the mount's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Vended {
    pub role: Role,
    /// How long its keys live.
    pub life: Duration,
}

/// Reads them; `given` has the values that are not empty.
pub(super) fn parse<'a>(given: impl Fn(&str) -> Option<&'a str>) -> Result<(Credentials, Option<Vended>), UfsError> {
    let anonymous = given(ANONYMOUS).map(|value| boolean(ANONYMOUS, value)).transpose()?.unwrap_or(false);
    let (source, role, vended) = (source(&given)?, role(ROLE, &given)?, vended(&given)?);
    if role.is_none()
        && vended.is_none()
        && let Some(name) = OF_ROLES.into_iter().find(|name| given(name).is_some())
    {
        return Err(UfsError::invalid(name, "it is given without a role", format!("give {ROLE} too")));
    }
    if !anonymous {
        return Ok((Credentials::Signed { source: source.unwrap_or(Source::Environment), role }, vended));
    }
    if source.is_some() || role.is_some() || vended.is_some() {
        let reason = "it is true, and credentials are given too";
        return Err(UfsError::invalid(ANONYMOUS, reason, "leave one of the two out"));
    }
    Ok((Credentials::Anonymous, None))
}

fn source<'a>(given: impl Fn(&str) -> Option<&'a str>) -> Result<Option<Source>, UfsError> {
    let alone = |name: &str, other: &str| UfsError::invalid(name, "it is given alone", format!("give {other} too"));
    let beside = |name: &str, what: &str| {
        UfsError::invalid(name, format!("it is given beside {what}"), "leave one of the two out")
    };
    let session_token = given(TOKEN).map(str::to_owned);
    let pair = match (given(ACCESS), given(SECRET)) {
        (Some(access), Some(secret)) => {
            Some(Source::KeyPair { access: access.to_owned(), secret: secret.to_owned(), session_token })
        }
        (Some(_), None) => return Err(alone(ACCESS, SECRET)),
        (None, Some(_)) => return Err(alone(SECRET, ACCESS)),
        (None, None) if session_token.is_some() => return Err(alone(TOKEN, &format!("{ACCESS} and {SECRET}"))),
        (None, None) => None,
    };
    match (pair, given(PROFILE), given(SOURCE)) {
        (Some(_), Some(_), _) => Err(beside(PROFILE, "a key pair")),
        (Some(_), _, Some(_)) => Err(beside(SOURCE, "a key pair")),
        (None, Some(_), Some(_)) => Err(beside(SOURCE, "a profile")),
        (None, Some(profile), None) => Ok(Some(Source::Profile(profile.to_owned()))),
        (None, None, Some(name)) => named(name).map(Some),
        (pair, None, None) => Ok(pair),
    }
}

fn named(name: &str) -> Result<Source, UfsError> {
    match name {
        "environment" => Ok(Source::Environment),
        "default" => Ok(Source::Default),
        "instance" => Ok(Source::Instance),
        "container" => Ok(Source::Container),
        "web_identity" => Ok(Source::WebIdentity),
        _ => {
            let remedy = "write environment, default, instance, container or web_identity";
            Err(UfsError::invalid(format!("{SOURCE}={name:?}"), "there is no such source of credentials", remedy))
        }
    }
}

fn vended<'a>(given: impl Fn(&str) -> Option<&'a str>) -> Result<Option<Vended>, UfsError> {
    let (role, life) = (role(VENDED_ROLE, &given)?, given(VENDED_DURATION));
    let Some(role) = role else {
        return match life {
            Some(_) => {
                let remedy = format!("give {VENDED_ROLE} too");
                Err(UfsError::invalid(VENDED_DURATION, "it is given without a role", remedy))
            }
            None => Ok(None),
        };
    };
    let life = match life.map(|text| (text, text.parse::<Interval>())) {
        None => LIFE,
        Some((_, Ok(life))) if LIVES.contains(&life.get()) => life.get(),
        Some((text, _)) => {
            let reason = "keys that are vended live for 15 minutes to 12 hours";
            return Err(UfsError::invalid(format!("{VENDED_DURATION}={text:?}"), reason, "write for instance 1h"));
        }
    };
    Ok(Some(Vended { role, life }))
}

/// The role that an option names, if it does.
fn role<'a>(option: &'static str, given: impl Fn(&str) -> Option<&'a str>) -> Result<Option<Role>, UfsError> {
    let Some(arn) = given(option) else { return Ok(None) };
    // As AWS limits them.
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_+=,.@-".contains(c);
    if !arn.starts_with("arn:") || !(20..=2048).contains(&arn.len()) || !arn.bytes().all(|byte| byte.is_ascii_graphic())
    {
        let remedy = "write for instance arn:aws:iam::123456789012:role/NAME";
        return Err(UfsError::invalid(format!("{option}={arn:?}"), "it is no ARN of a role", remedy));
    }
    let external_id = given(EXTERNAL_ID).map(str::to_owned);
    let is_id = |id: &String| (2..=1224).contains(&id.len()) && id.chars().all(|c| is_word(c) || c == ':' || c == '/');
    if external_id.as_ref().is_some_and(|id| !is_id(id)) {
        // The value stays out of the message: it is between the two parties.
        let reason = "it has 2 to 1224 letters, digits and characters of _+=,.@:/-";
        return Err(UfsError::invalid(EXTERNAL_ID, reason, "write it as the owner of the role gave it"));
    }
    let session = given(ROLE_SESSION).unwrap_or(SESSION).to_owned();
    if !(2..=64).contains(&session.len()) || !session.chars().all(is_word) {
        let reason = "it has 2 to 64 letters, digits and characters of _+=,.@-";
        return Err(UfsError::invalid(format!("{ROLE_SESSION}={session:?}"), reason, "write for instance training"));
    }
    Ok(Some(Role { arn: arn.to_owned(), external_id, session }))
}

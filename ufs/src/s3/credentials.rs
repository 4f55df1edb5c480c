//! Where the credentials of requests come from.
//!
//! A key pair is as it was given. All others are fetched and kept once for all requests of a bucket ([`renewal`]): of
//! the host ([`instance`]), or of the files that programs for AWS share ([`profile`]). A role is taken on with those
//! ([`sts`]). So are keys that are vended, and those that another process lends this one ([`super::vending`]).

pub(crate) mod exchange;
mod failure;
pub(crate) mod instance;
mod profile;
pub(crate) mod renewal;
mod sts;

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::schema;
use cavern_proto::s3_options::{ROLE, SOURCE, STS_ENDPOINT, VENDED_ROLE};
use futures::FutureExt;
use parking_lot::Mutex;
use reqsign_aws_v4::Credential;
use reqsign_core::time::Timestamp;

pub(super) use self::renewal::Renewing;
use self::renewal::{Due, Fetch, WeakRenewing};
pub(super) use self::sts::Scope;
use self::sts::{Sts, WebIdentity};
use super::keys::{KeyError, KeyProvider, VendedKeys};
use super::options::{Credentials, Role, S3Options, Source};
use super::shared_files::{usual_profile, variable};
use crate::error::UfsError;

/// A request waits at most so long for credentials, and not until its own time is up: what is late is told apart.
const PATIENCE: Duration = Duration::from_secs(5);

/// What signs the requests of a store. Cheap to clone.
#[derive(Clone)]
pub(super) enum Provider {
    /// As it was given.
    KeyPair(Arc<Credential>),
    Renewing(Renewing),
}

impl Provider {
    /// What a request is signed with now.
    pub(super) async fn credential(&self) -> Result<Credential, KeyError> {
        match self {
            Self::KeyPair(pair) => Ok((**pair).clone()),
            Self::Renewing(renewing) => renewing.credential().await,
        }
    }
}

/// What the handles of a store have fetched, who share it if they want the same.
#[derive(Default)]
pub(crate) struct SharedCredentials(Mutex<Vec<(Wanted, WeakRenewing)>>);

impl SharedCredentials {
    fn of(&self, wanted: Wanted) -> Renewing {
        let mut all = self.0.lock();
        all.retain(|(_, renewing)| renewing.upgrade().is_some());
        let same = all.iter().find(|(known, _)| *known == wanted);
        if let Some(renewing) = same.and_then(|(_, renewing)| renewing.upgrade()) {
            return renewing;
        }
        let renewing = wanted.renewing();
        all.push((wanted, renewing.downgrade()));
        renewing
    }
}

/// All that decides which credentials are fetched, and how.
#[derive(Clone, PartialEq)]
struct Wanted {
    source: Source,
    role: Option<(Role, Sts)>,
    /// Taken on with all that, to be handed on.
    vended: Option<(Role, Sts, Scope)>,
    /// Who exchanges web identity tokens: the environment says so, and no option.
    token_sts: Sts,
    conf: schema::Ufs,
}

impl Provider {
    /// For requests with these options; `None` for unsigned ones.
    ///
    /// # Errors
    /// [`UfsError::Invalid`] where nothing says who gives out the role.
    pub(super) fn new(
        options: &S3Options,
        conf: &schema::Ufs,
        shared: &SharedCredentials,
    ) -> Result<Option<Self>, UfsError> {
        let Credentials::Signed { source, role } = &options.credentials else { return Ok(None) };
        if let (Source::KeyPair { access, secret, session_token }, None) = (source, role) {
            return Ok(Some(Self::KeyPair(Arc::new(key_pair(access, secret, session_token.as_ref())))));
        }
        Ok(Some(Self::Renewing(shared.of(Wanted::new(options, source, role.as_ref(), conf)?))))
    }

    /// Keys of a role within a scope, which are got with the credentials that the options give.
    ///
    /// # Errors
    /// [`UfsError::Invalid`] where nothing says who gives out the role.
    pub(super) fn vended(
        options: &S3Options,
        role: &Role,
        scope: Scope,
        conf: &schema::Ufs,
        shared: &SharedCredentials,
    ) -> Result<Renewing, UfsError> {
        let Credentials::Signed { source, role: first } = &options.credentials else {
            let reason = "the requests of the mount are not signed";
            return Err(UfsError::invalid(VENDED_ROLE, reason, "leave s3.anonymous out"));
        };
        let wanted = Wanted::new(options, source, first.as_ref(), conf)?;
        let sts = sts_of_roles(VENDED_ROLE, options)?;
        Ok(shared.of(Wanted { vended: Some((role.clone(), sts, scope)), ..wanted }))
    }

    /// Keys that are lent to this process.
    pub(super) fn lent(lender: &KeyProvider, conf: &schema::Ufs) -> Self {
        let (name, lender) = (lender.name().to_owned(), lender.clone());
        let fetch: Fetch = Arc::new(move || {
            let asked = lender.ask();
            async move { credential(asked.await?) }.boxed()
        });
        Self::Renewing(Renewing::new(name, patience(conf), Due::Late, fetch))
    }
}

impl Wanted {
    fn new(options: &S3Options, source: &Source, role: Option<&Role>, conf: &schema::Ufs) -> Result<Self, UfsError> {
        let token_sts = sts_of_process(options).unwrap_or_else(|| Sts::of_region(&options.region));
        let sts = role.map(|_| sts_of_roles(ROLE, options)).transpose()?;
        let role = role.cloned().zip(sts);
        Ok(Self { source: source.clone(), role, vended: None, token_sts, conf: conf.clone() })
    }
}

/// The STS that the environment names.
fn sts_of_process(options: &S3Options) -> Option<Sts> {
    let url = variable(sts::VARIABLE)?.trim_end_matches('/').to_owned();
    Some(Sts { setting: sts::VARIABLE, url, region: options.region.clone() })
}

/// Who gives out the role that an option of a mount names.
fn sts_of_roles(option: &str, options: &S3Options) -> Result<Sts, UfsError> {
    if let Some(url) = &options.sts_endpoint {
        let (url, region) = (url.clone(), options.region.clone());
        return Ok(Sts { setting: STS_ENDPOINT, url, region });
    }
    let is_aws =
        |endpoint: &String| [".amazonaws.com", ".amazonaws.com.cn"].iter().any(|suffix| endpoint.ends_with(suffix));
    match sts_of_process(options) {
        Some(own) => Ok(own),
        None if options.endpoint.as_ref().is_none_or(is_aws) => Ok(Sts::of_region(&options.region)),
        None => {
            let reason = "nothing says who gives it out, and the bucket is not at AWS";
            let remedy = format!("give s3.sts_endpoint_url, or set {} where all processes run", sts::VARIABLE);
            Err(UfsError::invalid(option, reason, remedy))
        }
    }
}

/// A key pair of the environment of this process.
fn of_environment() -> Option<Credential> {
    let token = variable("AWS_SESSION_TOKEN");
    Some(key_pair(&variable("AWS_ACCESS_KEY_ID")?, &variable("AWS_SECRET_ACCESS_KEY")?, token.as_ref()))
}

fn key_pair(access: &str, secret: &str, session_token: Option<&String>) -> Credential {
    Credential {
        access_key_id: access.to_owned(),
        secret_access_key: secret.to_owned(),
        session_token: session_token.cloned(),
        expires_in: None,
    }
}

/// How long a request waits for credentials.
pub(crate) fn patience(conf: &schema::Ufs) -> Duration {
    PATIENCE.min(conf.request_timeout.get()).mul_f64(0.8)
}

/// Keys that were lent, as requests are signed with them.
fn credential(keys: VendedKeys) -> Result<Credential, KeyError> {
    let VendedKeys { access, secret, session_token, expires_ns } = keys;
    let end = Timestamp::from_millisecond(expires_ns / 1_000_000);
    let end = end.map_err(|_| KeyError::Refused("the keys that were lent end at no time".to_owned()))?;
    Ok(Credential { expires_in: Some(end), ..key_pair(&access, &secret, Some(&session_token)) })
}

impl Wanted {
    fn renewing(&self) -> Renewing {
        // What is handed on has to be worth it.
        let due = if self.vended.is_some() { Due::HalfLife } else { Due::Late };
        let wanted = self.clone();
        let fetch: Fetch = Arc::new(move || {
            let wanted = wanted.clone();
            async move { wanted.fetch().await }.boxed()
        });
        Renewing::new(self.giver(), patience(&self.conf), due, fetch)
    }

    /// Whoever has the last word.
    fn giver(&self) -> String {
        let role = self.vended.as_ref().map(|(role, sts, _)| (role, sts));
        match (role.or(self.role.as_ref().map(|(role, sts)| (role, sts))), &self.source) {
            (Some((role, sts)), _) => format!("STS at {}, asked for {},", sts.url, role.arn),
            (None, Source::Default) => "the environment, the container or the instance of the process".to_owned(),
            (None, Source::Instance) => "the metadata of the instance".to_owned(),
            (None, Source::Container) => "the credentials endpoint of the container".to_owned(),
            (None, Source::WebIdentity) => format!("STS at {}", self.token_sts.url),
            (None, _) => "the environment of the process".to_owned(),
        }
    }

    async fn fetch(&self) -> Result<Credential, KeyError> {
        let mut credential = self.of_source().await?;
        if let Some((role, sts)) = &self.role {
            credential = sts.assume(role, None, &credential, &self.conf).await?;
        }
        if let Some((role, sts, scope)) = &self.vended {
            credential = sts.assume(role, Some(scope), &credential, &self.conf).await?;
        }
        Ok(credential)
    }

    async fn of_source(&self) -> Result<Credential, KeyError> {
        let none = |what: &str| KeyError::Refused(format!("no usable credentials in {what}"));
        match &self.source {
            Source::KeyPair { access, secret, session_token } => Ok(key_pair(access, secret, session_token.as_ref())),
            Source::Profile(profile) => {
                let found = self.of_profile(profile).await?;
                found.ok_or_else(|| none(&format!("the profile {profile:?} of the shared files")))
            }
            Source::Environment | Source::Default => {
                if let Some(found) = of_environment() {
                    return Ok(found);
                }
                match (self.of_profile(&usual_profile(variable)).await?, WebIdentity::of(variable)) {
                    (Some(found), _) => Ok(found),
                    (None, Some(identity)) => identity.assume(&self.token_sts, &self.conf).await,
                    (None, None) if self.source == Source::Default => {
                        instance::check_allowed(SOURCE, "default", &self.conf)?;
                        let found = instance::of_host(variable, &self.conf).await;
                        found.map_err(|error| error.after("no usable credentials in the environment or shared files"))
                    }
                    (None, None) => Err(none("the options, the environment or the shared files")),
                }
            }
            Source::WebIdentity => match WebIdentity::of(variable) {
                Some(identity) => identity.assume(&self.token_sts, &self.conf).await,
                None => Err(none("the environment: AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN are not both set")),
            },
            Source::Instance => {
                instance::check_allowed(SOURCE, "instance", &self.conf)?;
                instance::of_instance(variable, &self.conf).await
            }
            Source::Container => {
                instance::check_allowed(SOURCE, "container", &self.conf)?;
                instance::of_container(variable, &self.conf).await
            }
        }
    }
}

//! Credentials of the instance or the container that a process runs in. They are those of all that runs there, so a
//! mount gets them only where the configuration of the host says so.
//!
//! Where they are asked for is up to the environment of the process. No option of a mount names it, and so it may be at
//! the link-local addresses that buckets may not be at.

use cavern_conf::schema;
use http::Uri;
use reqsign_aws_v4::{Credential, ECSCredentialProvider, IMDSv2CredentialProvider};
use reqsign_core::{Context, OsEnv, ProvideCredential};
use reqsign_file_read_tokio::TokioFileRead;

use super::exchange::Giver;
use crate::allowed::Guard;
use crate::error::UfsError;
use crate::s3::keys::KeyError;

const METADATA: &str = "http://169.254.169.254";
const METADATA_IPV6: &str = "http://[fd00:ec2::254]";
const CONTAINER: &str = "http://169.254.170.2";

const CONTAINER_VARIABLES: [&str; 2] = ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];

/// Addresses that an authorization token may be sent to without TLS: this host, ECS, and EKS.
const WITHOUT_TLS: [&str; 6] = ["127.0.0.1", "localhost", "[::1]", "169.254.170.2", "169.254.170.23", "[fd00:ec2::23]"];

/// Whether the configuration lets a mount have them, which asks for them by an option with this value.
pub(crate) fn check_allowed(option: &str, source: &str, conf: &schema::Ufs) -> Result<(), KeyError> {
    if conf.instance_credentials {
        return Ok(());
    }
    Err(KeyError::NotAllowed(UfsError::NotAllowed {
        what: format!("{option}={source}"),
        reason: "the credentials of the host would be used for whoever has the mount, which no process does unless \
                 that is allowed"
            .to_owned(),
        remedy: "if it is meant, set ufs.instance_credentials = true in the configuration of all masters, workers and \
                 clients, and start them again"
            .to_owned(),
    }))
}

/// The environment of the process.
pub(super) type Variables = fn(&str) -> Option<String>;

/// Of the container, where the environment names its endpoint, else of the instance.
pub(super) async fn of_host(variables: Variables, conf: &schema::Ufs) -> Result<Credential, KeyError> {
    if CONTAINER_VARIABLES.into_iter().any(|name| variables(name).is_some()) {
        return of_container(variables, conf).await;
    }
    of_instance(variables, conf).await
}

/// Of an instance: IMDSv2.
pub(super) async fn of_instance(variables: Variables, conf: &schema::Ufs) -> Result<Credential, KeyError> {
    if variables("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        let reason = "AWS_EC2_METADATA_DISABLED of this process's environment says that instance metadata is not used";
        return Err(KeyError::Refused(reason.to_owned()));
    }
    let is_ipv6 = variables("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE").is_some_and(|m| m.eq_ignore_ascii_case("ipv6"));
    let url = variables("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    let url = url.unwrap_or_else(|| if is_ipv6 { METADATA_IPV6 } else { METADATA }.to_owned());
    let url = url.trim_end_matches('/');
    let giver = Giver::new(format!("the instance metadata at {url}"), url, Guard::of_own_host(url), conf)?;
    // One that is new asks for a token of its own: one of before may have gone with a reboot of the instance.
    fetched(IMDSv2CredentialProvider::new().with_endpoint(url), giver).await
}

/// Of a container, as ECS and EKS Pod Identity hand them out.
pub(super) async fn of_container(variables: Variables, conf: &schema::Ufs) -> Result<Credential, KeyError> {
    let [relative, full] = CONTAINER_VARIABLES;
    let relative = variables(relative).map(|path| format!("{CONTAINER}{path}"));
    let Some(url) = relative.or_else(|| variables(full)) else {
        let reason = "neither AWS_CONTAINER_CREDENTIALS_FULL_URI nor AWS_CONTAINER_CREDENTIALS_RELATIVE_URI is in the \
                      environment of this process";
        return Err(KeyError::Refused(reason.to_owned()));
    };
    let uri: Uri = url.parse().unwrap_or_default();
    let host = uri.host().unwrap_or_default();
    let is_near = uri.scheme_str() == Some("http") && WITHOUT_TLS.contains(&host);
    if !is_near && uri.scheme_str() != Some("https") {
        let reason = format!("the host {host:?} of AWS_CONTAINER_CREDENTIALS_FULL_URI is asked over https only");
        return Err(KeyError::Refused(reason));
    }
    let giver = Giver::new(format!("the credentials endpoint at {host}"), &url, Guard::of_own_host(&url), conf)?;
    fetched(ECSCredentialProvider::new().with_endpoint(&url), giver).await
}

/// What a provider of the library gets. Its own words are left out: they may quote what it has read.
pub(super) async fn fetched(
    provider: impl ProvideCredential<Credential = Credential>,
    giver: Giver,
) -> Result<Credential, KeyError> {
    let context = Context::new().with_file_read(TokioFileRead).with_env(OsEnv).with_http_send(giver.clone());
    match provider.provide_credential(&context).await {
        Ok(Some(credential)) if !credential.access_key_id.is_empty() && !credential.secret_access_key.is_empty() => {
            Ok(credential)
        }
        Ok(_) => Err(KeyError::senseless(&giver.name)),
        Err(error) => Err(KeyError::among(&error).unwrap_or_else(|| KeyError::senseless(&giver.name))),
    }
}

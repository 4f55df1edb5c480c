//! Profiles of the shared files, as programs for AWS read them. A profile has keys, or says who gives some: another
//! profile, with whose credentials a role is taken on; a program; or the IAM Identity Center, after a sign-on.

use std::process::Stdio;

use cavern_proto::s3_options::SOURCE;
use reqsign_aws_v4::{Credential, SSOCredentialProvider};
use reqsign_core::time::Timestamp;
use serde_json::Value;
use tokio::process::Command;
use tokio::task::spawn_blocking;

use super::exchange::Giver;
use super::sts::WebIdentity;
use super::{Wanted, instance, key_pair, of_environment};
use crate::allowed::Guard;
use crate::s3::keys::KeyError;
use crate::s3::options::Role;
use crate::s3::shared_files::{Settings, SharedFiles, variable};

/// Roles that are taken on one with the other, at most.
const ROLES_MAX: usize = 5;

impl Wanted {
    /// What a profile gives; `None` where it says nothing of credentials.
    pub(super) async fn of_profile(&self, profile: &str) -> Result<Option<Credential>, KeyError> {
        let files = spawn_blocking(SharedFiles::read).await.unwrap_or_default();
        let (mut roles, mut name) = (Vec::new(), profile.to_owned());
        let found = loop {
            let settings = files.profile(&name);
            let text = |key: &str| settings.get(key).filter(|value| !value.is_empty()).cloned();
            let Some(arn) = text("role_arn") else { break self.of_settings(&settings, &files).await? };
            let wrong = |what: &str| KeyError::Refused(format!("the profile {name:?} of the shared files {what}"));
            if roles.len() == ROLES_MAX {
                return Err(wrong("is one of too many whose roles lead to each other"));
            }
            if text("mfa_serial").is_some() {
                return Err(wrong("asks for a one-time code, and nobody is here to give it"));
            }
            let session = text("role_session_name").unwrap_or_else(|| "cavern".to_owned());
            if let Some(token_file) = text("web_identity_token_file") {
                let identity = WebIdentity { token_file, role: arn, session };
                break Some(identity.assume(&self.token_sts, &self.conf).await?);
            }
            roles.push(Role { arn, external_id: text("external_id"), session });
            match (text("source_profile"), text("credential_source").as_deref()) {
                (Some(source), _) if source == name => break self.of_settings(&settings, &files).await?,
                (Some(source), _) => name = source,
                (None, Some("Environment")) => break of_environment(),
                (None, Some("Ec2InstanceMetadata")) => {
                    instance::check_allowed(SOURCE, "instance", &self.conf)?;
                    break Some(instance::of_instance(variable, &self.conf).await?);
                }
                (None, Some("EcsContainer")) => {
                    instance::check_allowed(SOURCE, "container", &self.conf)?;
                    break Some(instance::of_container(variable, &self.conf).await?);
                }
                (None, _) => return Err(wrong("has role_arn, and neither source_profile nor credential_source")),
            }
        };
        let Some(mut credential) = found else {
            let none = || KeyError::Refused(format!("no usable credentials for the role of the profile {profile:?}"));
            return if roles.is_empty() { Ok(None) } else { Err(none()) };
        };
        for role in roles.iter().rev() {
            credential = self.token_sts.assume(role, None, &credential, &self.conf).await?;
        }
        Ok(Some(credential))
    }

    /// What a profile gives without a role.
    async fn of_settings(&self, settings: &Settings, files: &SharedFiles) -> Result<Option<Credential>, KeyError> {
        let text = |key: &str| settings.get(key).filter(|value| !value.is_empty());
        if let (Some(access), Some(secret)) = (text("aws_access_key_id"), text("aws_secret_access_key")) {
            return Ok(Some(key_pair(access, secret, text("aws_session_token"))));
        }
        if let Some(command) = text("credential_process") {
            return of_program(command).await.map(Some);
        }
        if text("sso_account_id").is_some() { self.of_sign_on(settings, files).await.map(Some) } else { Ok(None) }
    }

    /// Of the IAM Identity Center, by the token that `aws sso login` has left.
    async fn of_sign_on(&self, settings: &Settings, files: &SharedFiles) -> Result<Credential, KeyError> {
        let session = settings.get("sso_session");
        let of_session = session.map(|session| files.section(&format!("sso-session {session}"))).unwrap_or_default();
        let text = |key: &str| settings.get(key).or_else(|| of_session.get(key)).cloned().unwrap_or_default();
        let region = text("sso_region");
        let url = variable("AWS_SSO_ENDPOINT").unwrap_or_else(|| format!("https://portal.sso.{region}.amazonaws.com"));
        let giver =
            Giver::new(format!("the IAM Identity Center at {url}"), &url, Guard::of_own_host(&url), &self.conf)?;
        // The file of the token is named by the session, or by the address where there is none.
        let token = session.cloned().unwrap_or_else(|| text("sso_start_url"));
        let provider = SSOCredentialProvider::new().with_start_url(token).with_region(region);
        let provider = provider.with_account_id(text("sso_account_id")).with_role_name(text("sso_role_name"));
        let signed_on = instance::fetched(provider, giver).await;
        signed_on.map_err(|error| error.after("if the sign-on has ended, `aws sso login` makes another"))
    }
}

/// What a program says on its standard output; it has the stderr of this process.
async fn of_program(command: &str) -> Result<Credential, KeyError> {
    let wrong = |what: String| KeyError::Refused(format!("the credential_process of the profile {what}"));
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let child = shell.spawn().map_err(|error| wrong(format!("cannot be started: {error}")))?;
    let output = child.wait_with_output().await.map_err(|error| wrong(format!("cannot be waited for: {error}")))?;
    if !output.status.success() {
        return Err(wrong(format!("has ended with {}", output.status)));
    }
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let text = |name: &str| said[name].as_str().filter(|text| !text.is_empty());
    let read = || {
        let expires_in = text("Expiration").map(str::parse::<Timestamp>).transpose().ok()?;
        let token = text("SessionToken").map(str::to_owned);
        let pair = key_pair(text("AccessKeyId")?, text("SecretAccessKey")?, token.as_ref());
        (said["Version"] == 1).then_some(Credential { expires_in, ..pair })
    };
    read().ok_or_else(|| wrong("gives no credentials that can be used".to_owned()))
}

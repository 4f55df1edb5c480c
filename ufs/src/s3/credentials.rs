//! Where the credentials of requests come from.

use std::fmt;

use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, EnvCredentialProvider, ProfileCredentialProvider,
};
use reqsign_core::{Context, ProvideCredential, ProvideCredentialChain, Result};

use super::options::Credentials;

/// A key pair that was given. The signing library has the same, but describes it to the log with its secret.
struct KeyPair(Credential);

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyPair(hidden)")
    }
}

impl ProvideCredential for KeyPair {
    type Credential = Credential;

    async fn provide_credential(&self, _: &Context) -> Result<Option<Credential>> {
        Ok(Some(self.0.clone()))
    }
}

/// Where credentials come from; `None` for unsigned requests. Instance metadata is never asked: off a cloud that is a
/// wait for an address that does not answer.
pub(super) fn credential_chain(credentials: &Credentials) -> Option<ProvideCredentialChain<Credential>> {
    let chain = ProvideCredentialChain::new();
    Some(match credentials {
        Credentials::Anonymous => return None,
        Credentials::Static { access, secret, session_token } => chain.push(KeyPair(Credential {
            access_key_id: access.clone(),
            secret_access_key: secret.clone(),
            session_token: session_token.clone(),
            expires_in: None,
        })),
        Credentials::Profile(profile) => chain.push(ProfileCredentialProvider::new().with_profile(profile)),
        Credentials::Environment => chain
            .push(EnvCredentialProvider::new())
            .push(ProfileCredentialProvider::new())
            .push(AssumeRoleWithWebIdentityCredentialProvider::new()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_pair_is_not_described() {
        let credential = Credential {
            access_key_id: "hush-access".to_owned(),
            secret_access_key: "hush-secret".to_owned(),
            session_token: Some("hush-token".to_owned()),
            expires_in: None,
        };
        let described = format!("{:?}", KeyPair(credential));
        assert!(!described.contains("hush"), "{described}");
    }
}

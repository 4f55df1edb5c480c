//! Tokens of Microsoft Entra ID for Azure's storage: for an application with a secret, or with a token of where it
//! runs (a workload identity), and of an instance (a managed identity).

use cavern_conf::schema;
use cavern_proto::azblob_options::SOURCE;

use super::{Bearer, fetched, form};
use crate::allowed::Guard;
use crate::s3::KeyError;
use crate::s3::credentials::exchange::Giver;
use crate::s3::shared_files::variable;

const AUTHORITY: &str = "https://login.microsoftonline.com";
const SCOPE: &str = "https://storage.azure.com/.default";
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
const METADATA: &str = "http://169.254.169.254";

/// Tokens for what the environment of this process says; `None` where it says nothing of that.
pub(crate) fn of_environment(conf: &schema::Ufs) -> Option<Bearer> {
    let (tenant, client) = (variable("AZURE_TENANT_ID")?, variable("AZURE_CLIENT_ID")?);
    let (secret, file) = (variable("AZURE_CLIENT_SECRET"), variable("AZURE_FEDERATED_TOKEN_FILE"));
    if secret.is_none() && file.is_none() {
        return None;
    }
    let authority = variable("AZURE_AUTHORITY_HOST").unwrap_or_else(|| AUTHORITY.to_owned());
    let url = format!("{}/{tenant}/oauth2/v2.0/token", authority.trim_end_matches('/'));
    let (name, conf_) = (format!("{url} for {client}"), conf.clone());
    Some(Bearer::new(name.clone(), conf, move || {
        let (name, url, conf, client) = (name.clone(), url.clone(), conf_.clone(), client.clone());
        let (secret, file) = (secret.clone(), file.clone());
        async move {
            let giver = Giver::new(name, &url, Guard::of_own_host(&url), &conf)?;
            // It is replaced before it ends, and read each time.
            let assertion = match (&secret, &file) {
                (None, Some(path)) => {
                    let unread = |error: std::io::Error| {
                        KeyError::Refused(format!("{path} (AZURE_FEDERATED_TOKEN_FILE) cannot be read: {error}"))
                    };
                    tokio::fs::read_to_string(path).await.map_err(unread)?
                }
                _ => String::new(),
            };
            let mut fields =
                vec![("grant_type", "client_credentials"), ("client_id", client.as_str()), ("scope", SCOPE)];
            match &secret {
                Some(secret) => fields.push(("client_secret", secret.as_str())),
                None => {
                    fields.extend([("client_assertion_type", ASSERTION_TYPE), ("client_assertion", assertion.trim())])
                }
            }
            let request = form(&url, &fields)?;
            fetched(&giver, request, &[secret.as_deref().unwrap_or_default(), assertion.trim()]).await
        }
    }))
}

/// Tokens of the identity of this instance: the one that `AZURE_CLIENT_ID` names, or its only one.
pub(crate) fn of_instance(conf: &schema::Ufs) -> Bearer {
    let host = variable("AZURE_POD_IDENTITY_AUTHORITY_HOST").unwrap_or_else(|| METADATA.to_owned());
    let host = host.trim_end_matches('/');
    let mut url = format!(
        "{host}/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fstorage.azure.com%2F"
    );
    if let Some(client) = variable("AZURE_CLIENT_ID") {
        url.push_str(&format!("&client_id={client}"));
    }
    let header = ("metadata", "true");
    Bearer::of_instance(host, url, header, "AZURE_CLIENT_ID is no id of an identity", SOURCE, conf)
}

//! Whom the other side of a connection has to be.
//!
//! A certificate is taken if an authority of the cluster has signed it for its use (server, client) and has not revoked
//! it, it holds now, and its identity is of this cluster; that of a server must also be of the role that the connection
//! is for. Host names are not looked at: a process is who it is, wherever it runs.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme};

use crate::certificate::identity_of;
use crate::identity::Role;
use crate::trust::{Side, Trust};

/// Of clients.
#[derive(Debug)]
pub(crate) struct Servers {
    pub trust: Arc<Trust>,
    pub cluster: String,
    pub role: Role,
}

/// Of servers.
#[derive(Debug)]
pub(crate) struct Clients {
    pub trust: Arc<Trust>,
    pub cluster: String,
    pub wanted: Wanted,
}

/// Whether a client has to show a certificate. One that it shows has to be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Always,
    IfThereIsOne,
}

/// Refuses a certificate with a reason that the log of this side has.
fn refuse(reason: String) -> Error {
    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Reason(String);
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Reason(reason)))))
}

/// What both kinds of verifiers do alike, with the algorithms of what is believed.
macro_rules! verifies_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, certificate, signature, &self.trust.algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, certificate, signature, &self.trust.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.trust.algorithms.supported_schemes()
        }
    };
}

fn check_identity(certificate: &CertificateDer<'_>, cluster: &str, role: Option<Role>) -> Result<(), Error> {
    let identity = identity_of(certificate).map_err(refuse)?;
    if identity.cluster != cluster {
        return Err(refuse(format!("{identity} is of another cluster than \"{cluster}\"")));
    }
    match role {
        Some(role) if identity.role != role => Err(refuse(format!("{identity} is no {role}"))),
        _ => Ok(()),
    }
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.trust.verify(Side::Server, end_entity, intermediates, now)?;
        check_identity(end_entity, &self.cluster, Some(self.role))?;
        Ok(ServerCertVerified::assertion())
    }

    verifies_signatures!();
}

impl ClientCertVerifier for Clients {
    fn client_auth_mandatory(&self) -> bool {
        self.wanted == Wanted::Always
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.trust.names
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.trust.verify(Side::Client, end_entity, intermediates, now)?;
        check_identity(end_entity, &self.cluster, None)?;
        Ok(ClientCertVerified::assertion())
    }

    verifies_signatures!();
}

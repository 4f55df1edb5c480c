//! Whom a process believes: the authorities of `security.ca`, but for what they have revoked.
//!
//! Each authority is asked by itself, with the lists that it has signed. Two may have the same name, as when one takes
//! the place of another: whoever looks for a list by name alone would hold that of the one against certificates of the
//! other.
//!
//! A certificate of which no list says anything is not revoked. A list whose time is over stays in force: what was
//! revoked remains so.

use std::cmp::Reverse;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, DistinguishedName, Error, RootCertStore};

use crate::certificate::read_certificates;
use crate::error::SecurityError;
use crate::revocation::{self, RevocationList, has_signed, read_lists};
use crate::transport::SERVER_NAME;

type Certificate = CertificateDer<'static>;
type List = CertificateRevocationListDer<'static>;

/// What the other side of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Client,
    Server,
}

/// The authorities that a process believes, and what they have revoked.
#[derive(Debug)]
pub(crate) struct Trust {
    pub authorities: Vec<Certificate>,
    pub lists: Vec<List>,
    /// The names of the authorities, for clients that have several certificates.
    pub names: Vec<DistinguishedName>,
    pub algorithms: WebPkiSupportedAlgorithms,
    /// When the first of the lists was to be replaced, in seconds since the epoch.
    pub next_update: Option<i64>,
    anchors: Vec<Anchor>,
}

/// One authority.
#[derive(Debug)]
struct Anchor {
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<WebPkiServerVerifier>,
    /// One that no process has.
    name: ServerName<'static>,
}

impl Trust {
    /// # Errors
    /// A reason, for a person: what is given for an authority, or for a list, is none.
    pub fn new(
        authorities: Vec<Certificate>,
        lists: Vec<List>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let mut names = Vec::new();
        let mut anchors = Vec::new();
        for authority in &authorities {
            let roots = roots(authority)?;
            names.extend(roots.subjects());
            let own = lists.iter().filter(|list| has_signed(authority, list)).cloned();
            anchors.push(Anchor::new(roots, own.collect(), provider)?);
        }
        let infos = lists.iter().map(RevocationList::of).collect::<Result<Vec<_>, _>>()?;
        let next_update = infos.iter().filter_map(|list| list.next_update).min();
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { authorities, lists, names, algorithms, next_update, anchors })
    }

    /// Whether a chain, that of the process first, leads to an authority that has not revoked it, now.
    pub fn verify(
        &self,
        side: Side,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        let mut refusal = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let mut is_right = false;
        for anchor in &self.anchors {
            match anchor.verify(side, end_entity, intermediates, now) {
                // One that stands above another knows nothing of what that one has revoked: all of them are asked.
                Ok(()) => is_right = true,
                Err(error @ Error::InvalidCertificate(CertificateError::Revoked)) => return Err(error),
                Err(error) if weight(&error) >= weight(&refusal) => refusal = error,
                Err(_) => {}
            }
        }
        if is_right { Ok(()) } else { Err(refusal) }
    }
}

/// Of several authorities, the one that knows a certificate says why it is refused.
fn weight(error: &Error) -> u8 {
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => 0,
        Error::InvalidCertificate(CertificateError::BadSignature) => 1,
        _ => 2,
    }
}

impl Anchor {
    fn new(roots: RootCertStore, mut lists: Vec<List>, provider: &Arc<CryptoProvider>) -> Result<Self, String> {
        // The first one that is about a certificate counts.
        lists.sort_by_cached_key(|list| {
            let list = revocation::parsed(list).ok();
            Reverse(list.map(|list| (list.crl_number().cloned(), list.last_update().timestamp())))
        });
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let clients = clients.with_crls(lists.clone()).allow_unknown_revocation_status().build();
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone());
        let servers = servers.with_crls(lists).allow_unknown_revocation_status().build();
        Ok(Self {
            clients: clients.map_err(|error| error.to_string())?,
            servers: servers.map_err(|error| error.to_string())?,
            name: ServerName::try_from(SERVER_NAME).map_err(|error| error.to_string())?,
        })
    }

    fn verify(
        &self,
        side: Side,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        if side == Side::Client {
            return self.clients.verify_client_cert(end_entity, intermediates, now).map(drop);
        }
        // The name is what is looked at last, and here it does not matter.
        match self.servers.verify_server_cert(end_entity, intermediates, &self.name, &[], now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(()),
            verified => verified.map(drop),
        }
    }
}

fn roots(authority: &Certificate) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone()).map_err(|error| error.to_string())?;
    Ok(roots)
}

/// The authorities of a file.
///
/// # Errors
/// The file cannot be read, or has a certificate that cannot be one of an authority.
pub(crate) fn read_authorities(path: &Path) -> Result<Vec<Certificate>, SecurityError> {
    let authorities = read_certificates("ca", path)?;
    let checked = authorities.iter().try_for_each(|authority| roots(authority).map(drop));
    checked.map_err(|reason| SecurityError::unusable("ca", path, reason))?;
    Ok(authorities)
}

/// The lists of a file, each signed by one of these authorities; none where no file is named.
///
/// # Errors
/// The file cannot be read, or has a list that cannot be used.
pub(crate) fn read_revoked(
    path: &Path,
    authorities: &[Certificate],
    provider: &Arc<CryptoProvider>,
) -> Result<Vec<List>, SecurityError> {
    if path.as_os_str().is_empty() {
        return Ok(Vec::new());
    }
    let unusable = |reason: String| SecurityError::unusable(revocation::KEY, path, reason);
    let lists = read_lists(path)?;
    for list in &lists {
        let info = RevocationList::of(list).map_err(unusable)?;
        let Some(signer) = authorities.iter().find(|authority| has_signed(authority, list)) else {
            let name = info.common_name.as_deref().unwrap_or("an authority without a name");
            return Err(unusable(format!("no authority of security.ca has signed the list of \"{name}\"")));
        };
        // What the library makes of it.
        let anchor = roots(signer).and_then(|roots| Anchor::new(roots, vec![list.clone()], provider));
        anchor.map_err(unusable)?;
    }
    Ok(lists)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
        Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
    };
    use rustls::crypto::ring;

    use super::*;

    const SERIAL: u64 = 4711;

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new([]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    fn authority(name: &str) -> CertificateParams {
        let mut params = params(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    #[test]
    fn what_an_authority_has_revoked_no_other_one_lets_in() {
        let (root_key, middle_key, key) =
            (KeyPair::generate().unwrap(), KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let (root, middle) = (authority("root"), authority("middle"));
        let root_certificate = root.self_signed(&root_key).unwrap().der().clone();
        let root = Issuer::new(root, root_key);
        let middle_certificate = middle.signed_by(&middle_key, &root).unwrap().der().clone();
        let middle = Issuer::new(middle, middle_key);
        let mut leaf = params("leaf");
        leaf.serial_number = Some(SerialNumber::from(SERIAL));
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let leaf = leaf.signed_by(&key, &middle).unwrap().der().clone();
        let now = SystemTime::now();
        let list = CertificateRevocationListParams {
            this_update: now.into(),
            next_update: (now + Duration::from_secs(3600)).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: SerialNumber::from(SERIAL),
                revocation_time: now.into(),
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&middle).unwrap().der().clone();

        let provider = Arc::new(ring::default_provider());
        let verified = |authorities: Vec<Certificate>, lists: Vec<List>| {
            let trust = Trust::new(authorities, lists, &provider).unwrap();
            trust.verify(Side::Client, &leaf, std::slice::from_ref(&middle_certificate), UnixTime::now())
        };
        let both = [root_certificate, middle_certificate.clone()];
        let turned = [both[1].clone(), both[0].clone()];
        for authorities in [both, turned] {
            assert_eq!(verified(authorities.to_vec(), Vec::new()), Ok(()));
            let refusal = verified(authorities.to_vec(), vec![list.clone()]);
            assert_eq!(refusal, Err(Error::InvalidCertificate(CertificateError::Revoked)));
        }
    }
}

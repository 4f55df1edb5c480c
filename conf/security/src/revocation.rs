//! Lists of revoked certificates (RFC 5280, section 5) as files have them: what they say, and who has signed them.

use std::path::Path;

use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use crate::certificate::{CertificateInfo, read_pem};
use crate::error::SecurityError;

/// The setting that names the file.
pub(crate) const KEY: &str = "revoked";

/// What a list says, whoever has signed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// Common name of the authority whose list it is.
    pub common_name: Option<String>,
    /// The name of that authority as its certificates have it (DER).
    issuer: Vec<u8>,
    /// Rises with each list of an authority; in decimal digits.
    pub number: Option<String>,
    /// When it was made, in seconds since the epoch.
    pub this_update: i64,
    /// When the next one was to be there, in seconds since the epoch.
    pub next_update: Option<i64>,
    pub revoked: Vec<RevokedCertificate>,
}

/// One certificate of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevokedCertificate {
    /// As [`CertificateInfo::serial`].
    pub serial: String,
    /// When it was revoked, in seconds since the epoch.
    pub since: i64,
}

impl RevocationList {
    /// All lists of a file: at least one.
    ///
    /// # Errors
    /// The file cannot be read, or has none.
    pub fn read_all(path: &Path) -> Result<Vec<Self>, SecurityError> {
        let lists = read_lists(path)?;
        let infos = lists.iter().map(Self::of).collect::<Result<_, _>>();
        infos.map_err(|reason| SecurityError::unusable(KEY, path, reason))
    }

    /// # Errors
    /// A reason, for a person: it is no list.
    pub(crate) fn of(list: &CertificateRevocationListDer<'_>) -> Result<Self, String> {
        let list = parsed(list)?;
        let common_name = list.issuer().iter_common_name().next().and_then(|name| name.as_str().ok());
        let revoked = list.iter_revoked_certificates().map(|revoked| RevokedCertificate {
            serial: revoked.raw_serial_as_string(),
            since: revoked.revocation_date.timestamp(),
        });
        Ok(Self {
            common_name: common_name.map(str::to_owned),
            issuer: list.issuer().as_raw().to_vec(),
            number: list.crl_number().map(ToString::to_string),
            this_update: list.last_update().timestamp(),
            next_update: list.next_update().map(|time| time.timestamp()),
            revoked: revoked.collect(),
        })
    }

    /// How the list has a certificate; `None` where it has not revoked it, or another authority has signed it.
    pub fn find(&self, certificate: &CertificateInfo) -> Option<&RevokedCertificate> {
        let is_own = self.issuer == certificate.issuer;
        self.revoked.iter().find(|revoked| is_own && revoked.serial == certificate.serial)
    }
}

/// # Errors
/// A reason, for a person.
pub(crate) fn parsed<'a>(list: &'a CertificateRevocationListDer<'_>) -> Result<CertificateRevocationList<'a>, String> {
    let parsed = CertificateRevocationList::from_der(list);
    parsed.map(|(_, list)| list).map_err(|error| format!("it is no certificate revocation list: {error}"))
}

/// All lists of a file as they are: at least one.
pub(crate) fn read_lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, SecurityError> {
    read_pem(KEY, path, "it has no certificate revocation list in PEM form (X509 CRL)")
}

/// Whether it is this authority that has signed a list. Others may have its name.
pub(crate) fn has_signed(authority: &CertificateDer<'_>, list: &CertificateRevocationListDer<'_>) -> bool {
    let (Ok((_, authority)), Ok(list)) = (X509Certificate::from_der(authority), parsed(list)) else { return false };
    // An authority without key usage may sign anything.
    let may_sign = authority.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.crl_sign()));
    may_sign
        && authority.subject().as_raw() == list.issuer().as_raw()
        && list.verify_signature(authority.public_key()).is_ok()
}

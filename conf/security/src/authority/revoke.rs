//! What an authority has revoked: `crl.pem` beside its certificate, which `security.revoked` of the cluster names.
//!
//! A new list has all that the one before had, and takes its place whole. It ends with the authority: a list that is
//! older than the last one is as valid as that, and hosts get each of them from whoever runs the cluster.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use cavern_conf::host;
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{FromDer, ParsedExtension, RevokedCertificate as Entry, X509Certificate};

use super::{Authority, KEY, making};
use crate::certificate::read_certificates;
use crate::error::SecurityError;
use crate::revocation::{RevocationList, has_signed, parsed, read_lists};

/// The file of the list, beside those of the authority.
const LIST: &str = "crl.pem";

/// The list of an authority after [`Authority::revoke`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocations {
    pub path: PathBuf,
    pub list: RevocationList,
    /// Certificates that were not on it before.
    pub added: usize,
}

impl Authority {
    /// Where the list of what it has revoked is, if there is one.
    pub fn list_in(directory: &Path) -> PathBuf {
        directory.join(LIST)
    }

    /// Puts certificates on the list of what the authority has revoked: the first one of each of these files. The list
    /// is made where there is none; `out` gets a copy of it.
    ///
    /// # Errors
    /// A certificate is not one that this authority has signed, or the list that is there is not its own, or cannot be
    /// replaced; nothing is changed then.
    pub fn revoke(&self, files: &[PathBuf], out: Option<&Path>) -> Result<Revocations, SecurityError> {
        let directory = self.certificate.parent().unwrap_or(Path::new("."));
        let path = Self::list_in(directory);
        // Of two that revoke at the same time, each has what the other one has revoked.
        let lock_path = directory.join(KEY);
        let _lock = locked(&lock_path).map_err(|source| SecurityError::NoAuthority { path: lock_path, source })?;
        let own = read_certificates("ca", &self.certificate)?;
        let own_info = parse(&own[0], &self.certificate)?;
        let former = if path.exists() { Some(self.former(&path, &own[0])?) } else { None };
        let former = former.as_ref().map(|list| parsed(list).map_err(|reason| refuse(&path, reason))).transpose()?;
        let before = former.as_ref().map_or(&[][..], |list| &list.tbs_cert_list.revoked_certificates[..]);
        let mut revoked: Vec<_> = before.iter().map(kept).collect();
        let now = UNIX_EPOCH + Duration::from_nanos(host::wall_ns().try_into().unwrap_or_default());
        for file in files {
            let chain = read_certificates("certificate", file)?;
            let serial = self.serial(&own_info, &chain[0], file)?;
            if revoked.iter().all(|known| known.serial_number != serial) {
                revoked.push(RevokedCertParams {
                    serial_number: serial,
                    revocation_time: now.into(),
                    reason_code: None,
                    invalidity_date: None,
                });
            }
        }
        let added = revoked.len() - before.len();
        if added > 0 || former.is_none() {
            let number = former.as_ref().and_then(|list| list.crl_number());
            let number = number.map_or_else(|| vec![1], |number| (number + 1u32).to_bytes_be());
            let end = Duration::from_secs(self.info.not_after.try_into().unwrap_or_default());
            let params = CertificateRevocationListParams {
                this_update: now.into(),
                next_update: (UNIX_EPOCH + end).into(),
                crl_number: SerialNumber::from(number),
                issuing_distribution_point: None,
                revoked_certs: revoked,
                key_identifier_method: key_identifier(&own_info),
            };
            let signed = params.signed_by(&self.issuer).map_err(making)?;
            replace(&path, signed.pem().map_err(making)?.as_bytes())?;
        }
        if let Some(out) = out {
            let text = fs::read(&path).map_err(|source| SecurityError::NoAuthority { path: path.clone(), source })?;
            replace(out, &text)?;
        }
        let list = RevocationList::read_all(&path)?.remove(0);
        Ok(Revocations { path: out.map_or(path, Path::to_owned), list, added })
    }

    /// The list that is there, which is the authority's own.
    fn former(
        &self,
        path: &Path,
        own: &CertificateDer<'_>,
    ) -> Result<CertificateRevocationListDer<'static>, SecurityError> {
        let mut lists = read_lists(path)?;
        match lists.pop().filter(|list| lists.is_empty() && has_signed(own, list)) {
            Some(list) => Ok(list),
            None => Err(refuse(
                path,
                format!(
                    "it is not the list of the authority {} alone: put it elsewhere, and revoke again what that one \
                     has revoked",
                    self.certificate.display()
                ),
            )),
        }
    }

    /// The number of a certificate that the authority may revoke.
    fn serial(
        &self,
        own: &X509Certificate<'_>,
        certificate: &CertificateDer<'_>,
        file: &Path,
    ) -> Result<SerialNumber, SecurityError> {
        let certificate = parse(certificate, file)?;
        let is_own =
            certificate.issuer() == own.subject() && certificate.verify_signature(Some(own.public_key())).is_ok();
        if !is_own {
            let authority = self.certificate.display();
            return Err(refuse(file, format!("the authority {authority} has not signed it, and cannot revoke it")));
        }
        if certificate.raw_serial() == own.raw_serial() && certificate.subject() == own.subject() {
            return Err(refuse(
                file,
                "it is the certificate of the authority, which revokes others: make another authority with `cv cert \
                 init`, and take this one out of security.ca",
            ));
        }
        Ok(SerialNumber::from_slice(certificate.raw_serial()))
    }
}

fn refuse(path: &Path, reason: impl ToString) -> SecurityError {
    SecurityError::Unrevoked { path: path.to_owned(), reason: reason.to_string() }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>, file: &Path) -> Result<X509Certificate<'a>, SecurityError> {
    let parsed = X509Certificate::from_der(certificate).map(|(_, parsed)| parsed);
    parsed.map_err(|error| refuse(file, format!("it is no certificate: {error}")))
}

/// How others tell the authority from those of the same name.
fn key_identifier(own: &X509Certificate<'_>) -> KeyIdMethod {
    let identifier = own.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(identifier) => Some(identifier.0.to_vec()),
        _ => None,
    });
    identifier.map_or(KeyIdMethod::Sha256, KeyIdMethod::PreSpecified)
}

/// What was on the list before, as it was.
fn kept(entry: &Entry<'_>) -> RevokedCertParams {
    RevokedCertParams {
        serial_number: SerialNumber::from_slice(entry.raw_serial()),
        revocation_time: entry.revocation_date.to_datetime(),
        reason_code: entry.reason_code().and_then(|(_, code)| reason(code.0)),
        invalidity_date: entry.invalidity_date().map(|(_, date)| date.to_datetime()),
    }
}

/// RFC 5280, section 5.3.1.
fn reason(code: u8) -> Option<RevocationReason> {
    Some(match code {
        1 => RevocationReason::KeyCompromise,
        2 => RevocationReason::CaCompromise,
        3 => RevocationReason::AffiliationChanged,
        4 => RevocationReason::Superseded,
        5 => RevocationReason::CessationOfOperation,
        6 => RevocationReason::CertificateHold,
        9 => RevocationReason::PrivilegeWithdrawn,
        10 => RevocationReason::AaCompromise,
        _ => return None,
    })
}

/// Until what is returned is dropped.
fn locked(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    file.lock()?;
    Ok(file)
}

/// Puts a whole file into the place of another one, or of none.
fn replace(path: &Path, content: &[u8]) -> Result<(), SecurityError> {
    let beside = path.with_extension("pem.new");
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&beside);
    let replaced = written.and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    });
    replaced.map_err(|source| SecurityError::Unwritable { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::certificate::CertificateInfo;
    use crate::identity::{Identity, Role};

    const DAY: Duration = Duration::from_secs(86_400);

    fn issue(authority: &Authority, directory: &Path, name: &str) -> PathBuf {
        let identity = Identity::new("lab", Role::Client, name).unwrap();
        authority.issue(&identity, DAY, directory, name).unwrap().certificate
    }

    #[test]
    fn a_list_grows_and_keeps_what_was_revoked_before() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(directory.path(), "lab").unwrap();
        let files = ["a", "b", "c"].map(|name| issue(&authority, directory.path(), name));
        let infos = files.clone().map(|file| CertificateInfo::read(&file).unwrap());
        let is_revoked = |list: &RevocationList| infos.clone().map(|info| list.find(&info).is_some());

        let empty = authority.revoke(&[], None).unwrap();
        assert_eq!((empty.list.number.as_deref(), empty.added), (Some("1"), 0));
        assert_eq!(is_revoked(&empty.list), [false; 3]);
        let first = authority.revoke(&files[..1], None).unwrap();
        assert_eq!((first.list.number.as_deref(), first.added), (Some("2"), 1));
        assert_eq!(is_revoked(&first.list), [true, false, false]);
        // By another process, and twice the same.
        let authority = Authority::open(directory.path()).unwrap();
        let copy = directory.path().join("copy.pem");
        let second = authority.revoke(&files[..2], Some(&copy)).unwrap();
        assert_eq!((second.list.number.as_deref(), second.added, &second.path), (Some("3"), 1, &copy));
        assert_eq!(is_revoked(&second.list), [true, true, false]);
        assert_eq!(second.list.revoked[0], first.list.revoked[0]);
        assert_eq!(second.list.next_update, Some(authority.info().not_after));
        let again = authority.revoke(&files[..1], None).unwrap();
        assert_eq!((&again.list, again.added), (&second.list, 0));
        assert_eq!(fs::read(&copy).unwrap(), fs::read(Authority::list_in(directory.path())).unwrap());
    }

    #[test]
    fn what_others_have_signed_and_the_authority_itself_are_not_revoked() {
        let [own, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        // Of the same name.
        let [authority, foreign] = [&own, &other].map(|place| Authority::create(place.path(), "lab").unwrap());
        let strange = issue(&foreign, other.path(), "a");
        let error = authority.revoke(&[strange], None).unwrap_err().to_string();
        assert!(error.contains("has not signed it"), "{error}");
        let error = authority.revoke(&[authority.certificate().to_owned()], None).unwrap_err().to_string();
        assert!(error.contains("security.ca"), "{error}");
        assert!(!Authority::list_in(own.path()).exists());

        let foreign_list = foreign.revoke(&[], None).unwrap().path;
        fs::copy(foreign_list, Authority::list_in(own.path())).unwrap();
        let error = authority.revoke(&[], None).unwrap_err().to_string();
        assert!(error.contains("crl.pem") && error.contains("not the list of the authority"), "{error}");
    }

    #[test]
    fn certificates_have_numbers_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(directory.path(), "lab").unwrap();
        let serial = |number: u32| {
            let file = issue(&authority, directory.path(), &format!("c{number}"));
            CertificateInfo::read(&file).unwrap().serial
        };
        let serials: HashSet<_> = (0..20).map(serial).collect();
        assert_eq!(serials.len(), 20);
        // Nobody guesses them: bytes in hexadecimal, with colons.
        assert!(serials.iter().all(|serial| serial.len() > 15 * 3), "{serials:?}");
    }
}

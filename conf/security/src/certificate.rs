//! Reading certificates and keys: from files, and from the other side of a connection.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cavern_conf::host;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::error::SecurityError;
use crate::identity::Identity;

/// Mode bits of a secret that others than its owner and group may read or write.
const OTHERS: u32 = 0o007;

/// Longest file with certificates, keys, or lists of revoked ones: such a list has some hundred thousand.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What a certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// `None` for that of an authority.
    pub identity: Option<Identity>,
    /// Of its subject.
    pub common_name: Option<String>,
    /// The name of whoever has signed it (DER).
    pub issuer: Vec<u8>,
    /// Its number among those of its issuer: bytes in hexadecimal, with colons.
    pub serial: String,
    /// Whether it signs others.
    pub is_authority: bool,
    /// Whether it says what it is for (server, client): which of them, whoever is shown it looks at.
    pub has_purpose: bool,
    /// When it begins and ends to hold, in seconds since the epoch.
    pub not_before: i64,
    pub not_after: i64,
}

impl CertificateInfo {
    /// # Errors
    /// A reason, for a person: it is no certificate, or names its owner as no process of a cluster.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, parsed) =
            X509Certificate::from_der(certificate).map_err(|error| format!("it is no certificate: {error}"))?;
        let names = parsed.subject_alternative_name().map_err(|error| error.to_string())?;
        let names = names.map(|extension| &extension.value.general_names[..]).unwrap_or_default();
        let mut ours = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => Some(uri.parse::<Identity>()),
            _ => None,
        });
        let identity = ours.next().transpose().map_err(|error| error.to_string())?;
        if ours.next().is_some() {
            return Err("it has several URIs: one says whose it is".to_owned());
        }
        let constraints = parsed.basic_constraints().map_err(|error| error.to_string())?;
        let validity = parsed.validity();
        let common_name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        Ok(Self {
            identity,
            common_name: common_name.map(str::to_owned),
            issuer: parsed.issuer().as_raw().to_vec(),
            serial: parsed.raw_serial_as_string(),
            has_purpose: parsed.extended_key_usage().map_err(|error| error.to_string())?.is_some(),
            is_authority: constraints.is_some_and(|constraints| constraints.value.ca),
            not_before: validity.not_before.timestamp(),
            not_after: validity.not_after.timestamp(),
        })
    }

    /// The first certificate of a file.
    ///
    /// # Errors
    /// The file cannot be read, or has none.
    pub fn read(path: &Path) -> Result<Self, SecurityError> {
        let certificates = read_certificates("certificate", path)?;
        Self::of(&certificates[0]).map_err(|reason| SecurityError::unusable("certificate", path, reason))
    }

    /// All certificates of a file: at least one.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_all(path: &Path) -> Result<Vec<Self>, SecurityError> {
        let certificates = read_certificates("certificate", path)?;
        let infos = certificates.iter().map(Self::of).collect::<Result<_, _>>();
        infos.map_err(|reason| SecurityError::unusable("certificate", path, reason))
    }

    /// For how many seconds it holds yet; negative where it has ended.
    pub fn remaining_secs(&self) -> i64 {
        self.not_after - host::wall_ns().div_euclid(1_000_000_000)
    }
}

/// The identity that a certificate states.
///
/// # Errors
/// A reason, for a person.
pub(crate) fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, String> {
    let CertificateInfo { identity, has_purpose, .. } = CertificateInfo::of(certificate)?;
    let identity = identity.ok_or("it has no URI that says whose it is (cavern://CLUSTER/ROLE/NAME)")?;
    if !has_purpose {
        return Err(format!(
            "{identity} has a certificate that does not say what it is for: its extended key usage has to be \
             clientAuth, and serverAuth as well where others connect to"
        ));
    }
    Ok(identity)
}

/// When a certificate ends to hold, in seconds since the epoch; never, for what is none.
pub(crate) fn end_of(certificate: &CertificateDer<'_>) -> i64 {
    X509Certificate::from_der(certificate).map_or(i64::MAX, |(_, parsed)| parsed.validity().not_after.timestamp())
}

/// All certificates of a file: at least one.
pub(crate) fn read_certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SecurityError> {
    read_pem(key, path, "it has no certificate in PEM form")
}

/// All of a kind that a file has in PEM form, one at least; `none` says that there is none.
pub(crate) fn read_pem<T: PemObject>(key: &'static str, path: &Path, none: &str) -> Result<Vec<T>, SecurityError> {
    let text = read(key, path)?;
    let found: Result<Vec<T>, _> = T::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| SecurityError::unusable(key, path, error))?;
    if found.is_empty() { Err(SecurityError::unusable(key, path, none)) } else { Ok(found) }
}

/// The private key of a file.
pub(crate) fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, SecurityError> {
    let text = read_secret("key", path)?;
    // The error may quote what was read.
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|_| SecurityError::unusable("key", path, "it has no private key in PEM form"))
}

/// A file that others than its owner and group may not read.
pub(crate) fn read_secret(key: &'static str, path: &Path) -> Result<Vec<u8>, SecurityError> {
    let unreadable = |source| SecurityError::Unreadable { key, path: path.to_owned(), source };
    if fs::metadata(path).map_err(unreadable)?.mode() & OTHERS != 0 {
        return Err(SecurityError::OpenKey(path.to_owned()));
    }
    read(key, path)
}

pub(crate) fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, SecurityError> {
    read_file(path).map_err(|source| SecurityError::Unreadable { key, path: path.to_owned(), source })
}

/// Reads a regular file: a FIFO could wait for ever, and a device have no end.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    // To open a FIFO is to wait already.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, KeyPair, SanType};

    use super::*;

    #[test]
    fn only_regular_files_of_some_length_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let (fifo, long) = (directory.path().join("fifo"), directory.path().join("long"));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        fs::File::create(&long).unwrap().set_len(FILE_BYTES_MAX + 1).unwrap();
        for (path, reason) in
            [(&*fifo, "no regular file"), (Path::new("/dev/zero"), "no regular file"), (&*long, "more than")]
        {
            let refused = read("ca", path).unwrap_err().to_string();
            assert!(refused.contains(reason), "{refused}");
        }
        fs::File::create(&long).unwrap().set_len(FILE_BYTES_MAX).unwrap();
        assert_eq!(read("ca", &long).unwrap().len() as u64, FILE_BYTES_MAX);
    }

    #[test]
    fn a_certificate_says_whose_it_is_and_what_for() {
        let key = KeyPair::generate().unwrap();
        let certificate = |purposes: Vec<ExtendedKeyUsagePurpose>| {
            let mut params = CertificateParams::new([]).unwrap();
            params.subject_alt_names = vec![SanType::URI("cavern://lab/worker/node1".try_into().unwrap())];
            params.extended_key_usages = purposes;
            params.self_signed(&key).unwrap().der().clone()
        };
        let of_client = identity_of(&certificate(vec![ExtendedKeyUsagePurpose::ClientAuth]));
        assert_eq!(of_client.unwrap().to_string(), "cavern://lab/worker/node1");
        let of_anything = identity_of(&certificate(Vec::new())).unwrap_err();
        assert!(of_anything.contains("extended key usage"), "{of_anything}");
    }
}

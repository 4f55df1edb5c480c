//! A certificate authority for clusters that have none: a key and a certificate in one directory, with the list of what
//! it has revoked.

mod revoke;

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use cavern_conf::host;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

use crate::certificate::CertificateInfo;
use crate::error::SecurityError;
use crate::identity::Identity;
use crate::transport::SERVER_NAME;

pub use revoke::Revocations;

/// The files of an authority. Only the certificate leaves the host that has it.
const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca-key.pem";
/// How long an authority holds: twenty years, so that for ten it can sign what holds for ten.
const AUTHORITY_HOLDS: Duration = Duration::from_secs(7300 * DAY);
const DAY: u64 = 86_400;
/// The common name of an authority is this, and the name of its cluster.
const COMMON_NAME: &str = "Cavern cluster ";
/// Clocks of a cluster may differ by as much.
const CLOCKS_DIFFER: Duration = Duration::from_secs(300);

/// Signs certificates, and revokes them.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: PathBuf,
    info: CertificateInfo,
}

/// Where a new certificate is, with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    /// Makes one, for the cluster of this name. The directory is made where it is missing.
    ///
    /// # Errors
    /// There is one already, or the directory cannot be written to; nothing is changed then.
    pub fn create(directory: &Path, cluster: &str) -> Result<Self, SecurityError> {
        make_directory(directory)?;
        let (certificate, key_path) = (directory.join(CERTIFICATE), directory.join(KEY));
        if let Some(there) = [&certificate, &key_path].into_iter().find(|path| path.exists()) {
            return Err(SecurityError::Exists(there.clone()));
        }
        let key = KeyPair::generate().map_err(making)?;
        let mut params = params(&format!("{COMMON_NAME}{cluster}"), AUTHORITY_HOLDS)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let signed = params.self_signed(&key).map_err(making)?;
        write_new(&key_path, key.serialize_pem().as_bytes(), 0o600)?;
        write_new(&certificate, signed.pem().as_bytes(), 0o644)?;
        let info = CertificateInfo::read(&certificate)?;
        Ok(Self { issuer: Issuer::new(params, key), certificate, info })
    }

    /// The one of a directory.
    ///
    /// # Errors
    /// There is none, or its files are not what they were.
    pub fn open(directory: &Path) -> Result<Self, SecurityError> {
        let (certificate, key_path) = (directory.join(CERTIFICATE), directory.join(KEY));
        let read = |path: &PathBuf| {
            fs::read_to_string(path).map_err(|source| SecurityError::NoAuthority { path: path.clone(), source })
        };
        let (certificate_text, key_text) = (read(&certificate)?, read(&key_path)?);
        // The error may quote what was read.
        let key = KeyPair::from_pem(&key_text)
            .map_err(|_| SecurityError::unusable("key", &key_path, "it has no private key in PEM form"))?;
        let info = CertificateInfo::read(&certificate)?;
        if !info.is_authority {
            return Err(SecurityError::unusable("ca", &certificate, "it is the certificate of no authority"));
        }
        let issuer = Issuer::from_ca_cert_pem(&certificate_text, key)
            .map_err(|error| SecurityError::unusable("ca", &certificate, error))?;
        Ok(Self { issuer, certificate, info })
    }

    /// The one of a directory, which must not be that of another cluster.
    ///
    /// # Errors
    /// As [`Self::open`], or it was made for a cluster of another name.
    pub fn open_of(directory: &Path, cluster: &str) -> Result<Self, SecurityError> {
        let authority = Self::open(directory)?;
        match authority.cluster().filter(|own| *own != cluster) {
            None => Ok(authority),
            Some(own) => Err(SecurityError::OtherCluster {
                directory: directory.to_owned(),
                own: own.to_owned(),
                named: cluster.to_owned(),
            }),
        }
    }

    /// Whether the files of one are all there.
    pub fn is_in(directory: &Path) -> bool {
        [CERTIFICATE, KEY].iter().all(|name| directory.join(name).exists())
    }

    /// Its certificate, which every process of the cluster is to know.
    pub fn certificate(&self) -> &Path {
        &self.certificate
    }

    /// The cluster that it was made for; `None` for one that something else has made.
    pub fn cluster(&self) -> Option<&str> {
        self.info.common_name.as_deref()?.strip_prefix(COMMON_NAME)
    }

    /// What its certificate says.
    pub fn info(&self) -> &CertificateInfo {
        &self.info
    }

    /// For how long it holds yet.
    pub fn remaining(&self) -> Duration {
        Duration::from_secs(self.info.remaining_secs().try_into().unwrap_or_default())
    }

    /// Makes a key and signs a certificate that holds from now on for so long: `NAME.pem` and `NAME-key.pem` in a
    /// directory, which is made where it is missing. What `cv` makes is called [`Identity::file_name`].
    ///
    /// # Errors
    /// Either file is there already, the directory cannot be written to, or the certificate would outlive the
    /// authority; nothing is changed then.
    pub fn issue(
        &self,
        identity: &Identity,
        holds: Duration,
        directory: &Path,
        name: &str,
    ) -> Result<Issued, SecurityError> {
        let remaining = self.remaining();
        if holds > remaining {
            let days = remaining.as_secs() / DAY;
            return Err(SecurityError::Outlives { authority: self.certificate.clone(), days });
        }
        make_directory(directory)?;
        let issued = Issued {
            certificate: directory.join(format!("{name}.pem")),
            key: directory.join(format!("{name}-key.pem")),
        };
        if let Some(there) = [&issued.certificate, &issued.key].into_iter().find(|path| path.exists()) {
            return Err(SecurityError::Exists(there.clone()));
        }
        let key = KeyPair::generate().map_err(making)?;
        let mut params = params(&identity.name, holds)?;
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into().map_err(making)?)];
        if identity.role.listens() {
            // For those who look at the name of a server, and are told this one.
            params.subject_alt_names.push(SanType::DnsName(SERVER_NAME.try_into().map_err(making)?));
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if identity.role.listens() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        // Its number is 159 bits of the hash of its key, which is new: another one for each, and nobody knows the next.
        let signed = params.signed_by(&key, &self.issuer).map_err(making)?;
        write_new(&issued.key, key.serialize_pem().as_bytes(), 0o600)?;
        write_new(&issued.certificate, signed.pem().as_bytes(), 0o644)?;
        Ok(issued)
    }
}

fn making(error: impl ToString) -> SecurityError {
    SecurityError::Making(error.to_string())
}

/// Of a certificate that holds from now on.
fn params(common_name: &str, holds: Duration) -> Result<CertificateParams, SecurityError> {
    let mut params = CertificateParams::new([]).map_err(making)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = UNIX_EPOCH + Duration::from_nanos(host::wall_ns().try_into().unwrap_or_default());
    params.not_before = (now - CLOCKS_DIFFER).into();
    params.not_after = now.checked_add(holds).ok_or_else(|| making("it would hold for too long"))?.into();
    Ok(params)
}

fn make_directory(path: &Path) -> Result<(), SecurityError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| SecurityError::Unwritable { path: path.to_owned(), source })
}

fn write_new(path: &Path, content: &[u8], mode: u32) -> Result<(), SecurityError> {
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    written.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => SecurityError::Exists(path.to_owned()),
        _ => SecurityError::Unwritable { path: path.to_owned(), source },
    })
}

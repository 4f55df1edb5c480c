//! Credentials at rest. Every option value of a mount is encrypted (ChaCha20-Poly1305) before it is proposed, so
//! neither the log nor the tables nor a snapshot holds it in clear; the key is in `data_dir/secret.key`, readable by
//! its owner only. The masters of a cluster have the same: it is made with the cluster, and handed over to each that
//! joins.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cavern_proto::master::Mount;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::MasterError;

/// Marks an encrypted value, with the version of the form.
const MARK: &str = "sealed1:";
const KEY_BYTES: usize = 32;
const FILE: &str = "secret.key";

/// The key of a cluster's secrets.
pub struct Vault {
    key: LessSafeKey,
    random: SystemRandom,
    path: PathBuf,
}

impl Vault {
    /// Reads the key, or makes one at the first start.
    ///
    /// # Errors
    /// [`MasterError::SecretKey`] for a file that is not a key.
    pub fn open(data_dir: &Path) -> Result<Self, MasterError> {
        let path = data_dir.join(FILE);
        let random = SystemRandom::new();
        let fail = |reason: &str| MasterError::SecretKey { path: path.clone(), reason: reason.to_owned() };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let mut bytes = vec![0; KEY_BYTES];
                random.fill(&mut bytes).map_err(|_| fail("the system gives no random numbers"))?;
                write_key(&path, &bytes).map_err(MasterError::io(&path))?;
                bytes
            }
            Err(error) => return Err(MasterError::io(&path)(error)),
        };
        let key = UnboundKey::new(&CHACHA20_POLY1305, &bytes);
        let key = key.map_err(|_| fail(&format!("it has {} bytes and not {KEY_BYTES}", bytes.len())))?;
        Ok(Self { key: LessSafeKey::new(key), random, path })
    }

    /// Takes the key of a cluster that this master joins. *Blocking*; the key is on disk when this returns.
    ///
    /// # Errors
    /// [`MasterError::Invalid`] for what is no key.
    pub fn adopt(data_dir: &Path, key: &[u8]) -> Result<(), MasterError> {
        if key.len() != KEY_BYTES {
            return Err(MasterError::Invalid(format!("a key of {} bytes and not {KEY_BYTES}", key.len())));
        }
        let (path, fresh) = (data_dir.join(FILE), data_dir.join("secret.key.new"));
        let adopt = || {
            let _ = fs::remove_file(&fresh);
            write_key(&fresh, key)?;
            fs::rename(&fresh, &path)?;
            fs::File::open(data_dir)?.sync_all()
        };
        adopt().map_err(MasterError::io(&path))
    }

    /// The key, for a master that joins. *Blocking*.
    pub fn key(data_dir: &Path) -> Result<Vec<u8>, MasterError> {
        let path = data_dir.join(FILE);
        fs::read(&path).map_err(MasterError::io(&path))
    }

    /// The mount with its option values encrypted.
    pub fn seal(&self, mut mount: Mount) -> Result<Mount, MasterError> {
        for (name, value) in &mut mount.options {
            *value = self.seal_value(&bound_to(&mount.path, name), value)?;
        }
        Ok(mount)
    }

    /// The mount with its option values in clear.
    pub fn unseal(&self, mut mount: Mount) -> Result<Mount, MasterError> {
        for (name, value) in &mut mount.options {
            *value = self.unseal_value(&bound_to(&mount.path, name), value)?;
        }
        Ok(mount)
    }

    fn seal_value(&self, context: &str, value: &str) -> Result<String, MasterError> {
        let fail = || MasterError::SecretKey { path: self.path.clone(), reason: "it cannot encrypt".into() };
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_| fail())?;
        let mut bytes = value.as_bytes().to_vec();
        let (nonce_used, aad) = (Nonce::assume_unique_for_key(nonce), Aad::from(context));
        self.key.seal_in_place_append_tag(nonce_used, aad, &mut bytes).map_err(|_| fail())?;
        let mut text = String::from(MARK);
        for byte in nonce.iter().chain(&bytes) {
            let _ = write!(text, "{byte:02x}");
        }
        Ok(text)
    }

    fn unseal_value(&self, context: &str, value: &str) -> Result<String, MasterError> {
        let fail =
            |reason: &str| MasterError::SecretKey { path: self.path.clone(), reason: format!("{reason} ({context})") };
        let hex = value.strip_prefix(MARK).ok_or_else(|| fail("a stored option is not encrypted"))?;
        let mut bytes = decode_hex(hex).ok_or_else(|| fail("a stored option is damaged"))?;
        if bytes.len() < NONCE_LEN {
            return Err(fail("a stored option is damaged"));
        }
        let sealed = bytes.split_off(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(&bytes).map_err(|_| fail("a stored option is damaged"))?;
        let mut sealed = sealed;
        let clear = self.key.open_in_place(nonce, Aad::from(context), &mut sealed);
        let clear = clear.map_err(|_| fail("it is not the key that a stored option was encrypted with"))?;
        String::from_utf8(clear.to_vec()).map_err(|_| fail("a stored option is damaged"))
    }
}

/// A value is bound to its place, so that swapping stored values is noticed.
fn bound_to(path: &str, name: &str) -> String {
    format!("{path}\n{name}")
}

fn write_key(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    digits.chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

/// The options as they may be shown: what could be a credential is replaced by `***`.
pub fn redact(options: &HashMap<String, String>) -> HashMap<String, String> {
    const SECRET: [&str; 6] = ["credential", "secret", "token", "password", "access", "key"];
    let shown = |(name, value): (&String, &String)| {
        let is_profile = name == "s3.credentials.profile";
        let is_secret = !is_profile && SECRET.iter().any(|word| name.to_ascii_lowercase().contains(word));
        (name.clone(), if is_secret { "***".to_owned() } else { value.clone() })
    };
    options.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mount() -> Mount {
        let options = [("s3.credentials.secret", "hush"), ("s3.endpoint_url", "http://h")];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Mount { path: "/a".into(), options, ..Mount::default() }
    }

    #[test]
    fn sealed_values_hide_the_secret_and_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let sealed = Vault::open(dir.path()).unwrap().seal(mount()).unwrap();
        assert!(!format!("{sealed:?}").contains("hush"));
        let again = Vault::open(dir.path()).unwrap();
        assert_eq!(again.unseal(sealed.clone()).unwrap(), mount());
        let mode = fs::metadata(dir.path().join("secret.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let mut moved = sealed.clone();
        moved.path = "/b".into();
        assert!(again.unseal(moved).is_err(), "a value of another mount");
        let other = tempfile::tempdir().unwrap();
        let error = Vault::open(other.path()).unwrap().unseal(sealed).unwrap_err().to_string();
        assert!(error.contains("secret.key") && !error.contains("hush"), "{error}");
        for damaged in ["", "sealed1:", "sealed1:zz", "sealed1:00", "hush"] {
            let mut mount = mount();
            mount.options.insert("x".into(), damaged.into());
            assert!(again.unseal(mount).is_err(), "{damaged}");
        }
    }

    #[test]
    fn a_master_that_joins_reads_what_the_others_have_sealed() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let sealed = Vault::open(first.path()).unwrap().seal(mount()).unwrap();
        Vault::open(second.path()).unwrap();
        Vault::adopt(second.path(), &Vault::key(first.path()).unwrap()).unwrap();
        assert_eq!(Vault::open(second.path()).unwrap().unseal(sealed).unwrap(), mount());
        let mode = fs::metadata(second.path().join("secret.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(Vault::adopt(second.path(), b"short"), Err(MasterError::Invalid(_))));
    }

    #[test]
    fn a_file_that_is_no_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret.key"), b"short").unwrap();
        assert!(matches!(Vault::open(dir.path()), Err(MasterError::SecretKey { .. })));
    }

    #[test]
    fn what_is_shown_holds_no_secret() {
        let shown = redact(&mount().options);
        assert_eq!(shown["s3.credentials.secret"], "***");
        assert_eq!(shown["s3.endpoint_url"], "http://h");
    }
}

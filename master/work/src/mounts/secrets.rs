//! Credentials at rest. Every option value of a mount is encrypted (ChaCha20-Poly1305) before it is proposed, so
//! neither the log nor the tables nor a snapshot holds it in clear. The key ([`KeyFiles`]) is in files that their owner
//! alone can read, and all masters of a cluster have it: it is made with the cluster, handed over to each that joins,
//! and changed for all of them at once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::master::Mount;
use cavern_proto::shown_option;
use cavern_security::random_bytes;
use parking_lot::{Mutex, RwLock};
use ring::aead::{Aad, NONCE_LEN, Nonce};

use super::keys::{Key, KeyDirectory, KeyFiles, hex, unusable};
use crate::error::WorkError;

/// Marks an encrypted value, with the version of the form.
const MARK: &str = "sealed1:";

/// What seals and opens the cluster's secrets.
pub struct SecretSealer {
    /// One change of the files at a time.
    changing: Mutex<KeyFiles>,
    /// What they hold. The first is the key in use.
    keys: RwLock<Vec<Key>>,
    /// The generation up to which all is forgotten that is of no use any more.
    settled: AtomicU64,
    path: PathBuf,
}

impl SecretSealer {
    /// Reads the keys, or makes one at the first start. *Blocking*.
    ///
    /// # Errors
    /// [`WorkError::SecretKey`] for a file that is not a key.
    pub fn open(directory: &KeyDirectory) -> Result<Self, WorkError> {
        let files = KeyFiles::open(directory)?;
        let (path, keys) = (files.path(), RwLock::new(files.keys.clone()));
        let (changing, settled) = (Mutex::new(files), AtomicU64::new(0));
        Ok(Self { changing, keys, settled, path })
    }

    /// The key in use, for a master that joins. *Blocking*.
    pub fn key_in_use(directory: &KeyDirectory) -> Result<Vec<u8>, WorkError> {
        Ok(KeyFiles::open(directory)?.keys.first().map(|key| key.bytes().to_vec()).unwrap_or_default())
    }

    /// The key of this id.
    ///
    /// # Errors
    /// [`WorkError::SecretKey`] when it is not here.
    pub fn key(&self, id: &[u8]) -> Result<Vec<u8>, WorkError> {
        Ok(self.held(id)?.bytes().to_vec())
    }

    /// Id and bytes of a key for this generation that nothing is sealed with yet. *Blocking*.
    pub fn prepare(&self, generation: u64) -> Result<(Vec<u8>, Vec<u8>), WorkError> {
        self.change(|files| files.prepare(generation)).map(|key| (key.id.to_vec(), key.bytes().to_vec()))
    }

    /// Takes a key that may be used from this generation on. *Blocking*; the key is on disk when this returns.
    ///
    /// # Errors
    /// [`WorkError::Invalid`] for what is no key.
    pub fn take(&self, generation: u64, key: &[u8]) -> Result<(), WorkError> {
        self.change(|files| files.take(generation, key))
    }

    /// Has the key in use that the state has since this generation, and forgets those before. Says whether there were
    /// any. *Blocking*.
    ///
    /// # Errors
    /// [`WorkError::SecretKey`] when this key is not here: nothing is forgotten then.
    pub fn settle(&self, generation: u64, id: &[u8]) -> Result<bool, WorkError> {
        let is_changed = self.change(|files| files.settle(generation, id))?;
        self.settled.fetch_max(generation, Ordering::Relaxed);
        Ok(is_changed)
    }

    /// The last generation of [`Self::settle`].
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::Relaxed)
    }

    fn change<T>(&self, change: impl FnOnce(&mut KeyFiles) -> Result<T, WorkError>) -> Result<T, WorkError> {
        let mut files = self.changing.lock();
        let changed = change(&mut files);
        // Also after a failure: what is on disk is what is known.
        *self.keys.write() = files.keys.clone();
        changed
    }

    /// The key of an id; of none, the key in use.
    fn held(&self, id: &[u8]) -> Result<Key, WorkError> {
        let keys = self.keys.read();
        let key = if id.is_empty() { keys.first() } else { keys.iter().find(|key| key.id == *id) };
        key.cloned().ok_or_else(|| unusable(&self.path, "the cluster has another one, which this master was not given"))
    }

    /// The mount with its option values encrypted with the key of this id, which the state has.
    pub fn seal(&self, id: &[u8], mut mount: Mount) -> Result<Mount, WorkError> {
        let key = self.held(id)?;
        for (name, value) in &mut mount.options {
            *value = self.seal_value(&key, &bound_to(&mount.path, name), value)?;
        }
        Ok(mount)
    }

    /// The mount with its option values in clear, whichever key they were encrypted with.
    pub fn unseal(&self, mut mount: Mount) -> Result<Mount, WorkError> {
        let keys = self.keys.read().clone();
        for (name, value) in &mut mount.options {
            *value = self.unseal_value(&keys, &bound_to(&mount.path, name), value)?;
        }
        Ok(mount)
    }

    fn seal_value(&self, key: &Key, context: &str, value: &str) -> Result<String, WorkError> {
        let fail = || unusable(&self.path, "it cannot encrypt");
        let nonce: [u8; NONCE_LEN] = random_bytes().map_err(|_| fail())?;
        let mut bytes = value.as_bytes().to_vec();
        let (nonce_used, aad) = (Nonce::assume_unique_for_key(nonce), Aad::from(context));
        key.sealing.seal_in_place_append_tag(nonce_used, aad, &mut bytes).map_err(|_| fail())?;
        Ok(format!("{MARK}{}{}", hex(&nonce), hex(&bytes)))
    }

    fn unseal_value(&self, keys: &[Key], context: &str, value: &str) -> Result<String, WorkError> {
        let fail = |reason: &str| unusable(&self.path, &format!("{reason} ({context})"));
        let hex = value.strip_prefix(MARK).ok_or_else(|| fail("a stored option is not encrypted"))?;
        let mut bytes = decode_hex(hex).ok_or_else(|| fail("a stored option is damaged"))?;
        if bytes.len() < NONCE_LEN {
            return Err(fail("a stored option is damaged"));
        }
        let sealed = bytes.split_off(NONCE_LEN);
        let open = |key: &Key| {
            let nonce = Nonce::try_assume_unique_for_key(&bytes).ok()?;
            let mut sealed = sealed.clone();
            key.sealing.open_in_place(nonce, Aad::from(context), &mut sealed).ok().map(|clear| clear.to_vec())
        };
        let clear = keys.iter().find_map(open);
        let clear = clear.ok_or_else(|| fail("it is not the key that a stored option was encrypted with"))?;
        String::from_utf8(clear).map_err(|_| fail("a stored option is damaged"))
    }
}

/// A value is bound to its place, so that swapping stored values is noticed.
fn bound_to(path: &str, name: &str) -> String {
    format!("{path}\n{name}")
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
        let is_harmless = shown_option(name, value) == *value;
        let is_secret = !is_harmless && SECRET.iter().any(|word| name.to_ascii_lowercase().contains(word));
        (name.clone(), if is_secret { "***".to_owned() } else { value.clone() })
    };
    options.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use cavern_security::KeyWrapping;
    use proptest::prelude::*;

    use super::*;

    fn directory(path: &Path) -> KeyDirectory {
        KeyDirectory::new(path.to_owned(), KeyWrapping::default())
    }

    fn mount() -> Mount {
        let options = [("s3.credentials.secret", "hush"), ("s3.endpoint_url", "http://h")];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Mount { path: "/a".into(), options, ..Mount::default() }
    }

    #[test]
    fn sealed_values_hide_the_secret_and_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let sealed = SecretSealer::open(&directory(dir.path())).unwrap().seal(&[], mount()).unwrap();
        assert!(!format!("{sealed:?}").contains("hush"));
        let again = SecretSealer::open(&directory(dir.path())).unwrap();
        assert_eq!(again.unseal(sealed.clone()).unwrap(), mount());
        let mode = fs::metadata(dir.path().join("secret.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let mut moved = sealed.clone();
        moved.path = "/b".into();
        assert!(again.unseal(moved).is_err(), "a value of another mount");
        let other = tempfile::tempdir().unwrap();
        let error = SecretSealer::open(&directory(other.path())).unwrap().unseal(sealed).unwrap_err().to_string();
        assert!(error.contains("secret.key") && !error.contains("hush"), "{error}");
        for damaged in ["", "sealed1:", "sealed1:zz", "sealed1:00", "hush"] {
            let mut mount = mount();
            mount.options.insert("x".into(), damaged.into());
            assert!(again.unseal(mount).is_err(), "{damaged}");
        }
    }

    proptest! {
        #[test]
        fn what_was_not_sealed_here_is_refused(
            text in ".{0,80}",
            hex in "[0-9a-f]{0,120}",
            at: prop::sample::Index,
            flip in 1u8..=255,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let sealer = SecretSealer::open(&directory(dir.path())).unwrap();
            let sealed = sealer.seal(&[], mount()).unwrap();
            let value = &sealed.options["s3.credentials.secret"];
            let mut bytes = value.clone().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let (flipped, cut) = (String::from_utf8_lossy(&bytes).into_owned(), value[..at].to_owned());
            for changed in [text, format!("{MARK}{hex}"), flipped, cut] {
                let mut mount = sealed.clone();
                mount.options.insert("s3.credentials.secret".into(), changed.clone());
                // A digit may be spelled in two ways.
                let is_another = |unsealed: Mount| unsealed.options["s3.credentials.secret"] != "hush";
                prop_assert!(!sealer.unseal(mount).is_ok_and(is_another), "{}", changed);
            }
        }
    }

    #[test]
    fn a_master_that_joins_reads_what_the_others_have_sealed() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let sealed = SecretSealer::open(&directory(first.path())).unwrap().seal(&[], mount()).unwrap();
        SecretSealer::open(&directory(second.path())).unwrap();
        directory(second.path()).adopt(&SecretSealer::key_in_use(&directory(first.path())).unwrap()).unwrap();
        assert_eq!(SecretSealer::open(&directory(second.path())).unwrap().unseal(sealed).unwrap(), mount());
        let mode = fs::metadata(second.path().join("secret.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(directory(second.path()).adopt(b"short"), Err(WorkError::Invalid(_))));
    }

    #[test]
    fn what_was_sealed_with_any_key_that_is_kept_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let sealer = SecretSealer::open(&directory(dir.path())).unwrap();
        let old = sealer.seal(&[], mount()).unwrap();
        let (id, key) = sealer.prepare(1).unwrap();
        let new = sealer.seal(&id, mount()).unwrap();
        assert_eq!(sealer.key(&id).unwrap(), key);
        for sealer in [&sealer, &SecretSealer::open(&directory(dir.path())).unwrap()] {
            assert_eq!(sealer.unseal(old.clone()).unwrap(), mount());
            assert_eq!(sealer.unseal(new.clone()).unwrap(), mount());
        }
        assert!(sealer.settle(1, &id).unwrap());
        for sealer in [&sealer, &SecretSealer::open(&directory(dir.path())).unwrap()] {
            assert_eq!(sealer.unseal(new.clone()).unwrap(), mount());
            assert!(sealer.unseal(old.clone()).is_err(), "its key is forgotten");
        }
        assert!(sealer.seal(&[7; 16], mount()).unwrap_err().to_string().contains("was not given"));
    }

    #[test]
    fn a_file_that_is_no_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret.key"), b"short").unwrap();
        assert!(matches!(SecretSealer::open(&directory(dir.path())), Err(WorkError::SecretKey { .. })));
    }

    #[test]
    fn what_is_shown_holds_no_secret() {
        let shown = redact(&mount().options);
        assert_eq!(shown["s3.credentials.secret"], "***");
        assert_eq!(shown["s3.endpoint_url"], "http://h");
    }
}

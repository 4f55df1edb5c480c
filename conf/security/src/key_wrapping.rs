//! What encrypts the keys that a process keeps on its disk: a key of the host, which comes from elsewhere, so that
//! whoever has the disk, or a copy of it, does not have what they protect.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};

use crate::SecurityError;

/// Bytes of a key that is encrypted with a key of the host.
pub const KEY_BYTES: usize = 32;
/// Begins a file with an encrypted key. One in clear has no more bytes than the key.
const MARK: &[u8] = b"cavern wrapped key 1\n";
/// Bytes of a key-encryption key's file, at least.
const MIN_BYTES: usize = 32;
/// It is no key that has more.
const MAX_BYTES: u64 = 64 << 10;

/// Bytes that nobody foresees.
///
/// # Errors
/// The sentence for a person: the system has none.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(_unspecified) => Err("the system gives no random numbers".to_owned()),
    }
}

/// A key-encryption key.
struct KeyEncryptionKey {
    path: PathBuf,
    sealing: LessSafeKey,
}

cavern_conf::debug_only!(KeyEncryptionKey { path });

/// The key-encryption keys of a process. Without any, keys stay in clear; there is a former one only beside a present
/// one.
#[derive(Debug, Default)]
pub struct KeyWrapping {
    /// What names the file of the current one in the configuration.
    setting: &'static str,
    /// What encrypts.
    current: Option<KeyEncryptionKey>,
    /// What may have encrypted before.
    former: Option<KeyEncryptionKey>,
}

/// The key in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Unwrapped {
    pub key: [u8; KEY_BYTES],
    /// It was not encrypted as it would be now.
    pub is_outdated: bool,
}

impl KeyWrapping {
    /// Reads the files of the current key and of the former one, each with the setting that names it; none for empty
    /// paths. *Blocking*.
    ///
    /// # Errors
    /// [`SecurityError::KeyEncryption`] for what cannot be read, is too short, or can be read by other users.
    pub fn load(current: (&'static str, &Path), former: (&'static str, &Path)) -> Result<Self, SecurityError> {
        let (setting, path) = current;
        Ok(Self {
            setting,
            current: KeyEncryptionKey::load(setting, path)?,
            former: KeyEncryptionKey::load(former.0, former.1)?,
        })
    }

    /// Of keys that tests make up, as bytes of their files.
    ///
    /// # Errors
    /// As [`Self::load`], but for files.
    pub fn of_bytes(
        setting: &'static str,
        current: Option<&[u8]>,
        former: Option<&[u8]>,
    ) -> Result<Self, SecurityError> {
        let outer = |name: &str, bytes: Option<&[u8]>| {
            bytes.map(|bytes| KeyEncryptionKey::new(setting, Path::new(name), bytes)).transpose()
        };
        Ok(Self { setting, current: outer("the current key", current)?, former: outer("the former key", former)? })
    }

    /// Whether there is a current key.
    pub fn is_there(&self) -> bool {
        self.current.is_some()
    }

    /// What a file is to hold of a key.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn wrap(&self, key: &[u8; KEY_BYTES]) -> Result<Vec<u8>, String> {
        let Some(outer) = &self.current else { return Ok(key.to_vec()) };
        let nonce: [u8; NONCE_LEN] = random_bytes()?;
        let mut sealed = key.to_vec();
        let used = Nonce::assume_unique_for_key(nonce);
        let sealing = outer.sealing.seal_in_place_append_tag(used, Aad::from(MARK), &mut sealed);
        sealing.map_err(|_| format!("{} cannot encrypt", outer.path.display()))?;
        Ok([MARK, nonce.as_slice(), sealed.as_slice()].concat())
    }

    /// The key that a file holds.
    ///
    /// # Errors
    /// Why it is none, or none that can be read here.
    pub fn unwrap(&self, file: &[u8]) -> Result<Unwrapped, String> {
        let Some(rest) = file.strip_prefix(MARK) else {
            let key = file.try_into().map_err(|_| format!("it has {} bytes and not {KEY_BYTES}", file.len()))?;
            return Ok(Unwrapped { key, is_outdated: self.current.is_some() });
        };
        if self.current.is_none() {
            let setting = if self.setting.is_empty() { "key_encryption_key" } else { self.setting };
            return Err(format!("it is encrypted: name the key for that in {setting}"));
        }
        let Some((nonce, sealed)) = rest.split_first_chunk::<NONCE_LEN>() else {
            return Err("it is cut off".to_owned());
        };
        let open = |outer: &KeyEncryptionKey| {
            let mut clear = sealed.to_vec();
            let used = Nonce::assume_unique_for_key(*nonce);
            let opened = outer.sealing.open_in_place(used, Aad::from(MARK), &mut clear).ok()?;
            <[u8; KEY_BYTES]>::try_from(&*opened).ok()
        };
        if let Some(key) = self.current.as_ref().and_then(open) {
            return Ok(Unwrapped { key, is_outdated: false });
        }
        if let Some(key) = self.former.as_ref().and_then(open) {
            return Ok(Unwrapped { key, is_outdated: true });
        }
        let tried: Vec<_> = self.current.iter().chain(&self.former).map(|outer| outer.path.display()).collect();
        let tried = tried.iter().map(ToString::to_string).collect::<Vec<_>>().join(" nor ");
        Err(format!("it was encrypted with another key than {tried}, or is damaged"))
    }
}

impl KeyEncryptionKey {
    /// `None` for the empty path.
    fn load(setting: &'static str, path: &Path) -> Result<Option<Self>, SecurityError> {
        if path.as_os_str().is_empty() {
            return Ok(None);
        }
        let failed = |reason: String| SecurityError::KeyEncryption { setting, path: path.to_owned(), reason };
        let found = fs::metadata(path).map_err(|error| failed(error.to_string()))?;
        // The group's bits also say what an access list gives to single users, as systemd does.
        if found.mode() & 0o007 != 0 {
            let reason = format!("its mode is {:o}: take it away from all users (chmod o=)", found.mode() & 0o7777);
            return Err(failed(reason));
        }
        if !found.is_file() || found.len() > MAX_BYTES {
            return Err(failed("it is no file with a key".to_owned()));
        }
        let bytes = fs::read(path).map_err(|error| failed(error.to_string()))?;
        Self::new(setting, path, &bytes).map(Some)
    }

    /// Of the bytes of its file.
    fn new(setting: &'static str, path: &Path, bytes: &[u8]) -> Result<Self, SecurityError> {
        let failed = |reason: String| SecurityError::KeyEncryption { setting, path: path.to_owned(), reason };
        if bytes.len() < MIN_BYTES {
            let reason = format!("it has {} bytes, and {MIN_BYTES} random ones are the least", bytes.len());
            return Err(failed(reason));
        }
        let key = digest(&SHA256, &[b"cavern key encryption key\n".as_slice(), bytes].concat());
        let sealing = UnboundKey::new(&CHACHA20_POLY1305, key.as_ref());
        let sealing = sealing.map_err(|_| failed("it cannot encrypt".to_owned()))?;
        Ok(Self { path: path.to_owned(), sealing: LessSafeKey::new(sealing) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const KEY: [u8; KEY_BYTES] = [5; KEY_BYTES];
    const SETTING: &str = "a.key_encryption_key";

    /// With files of these bytes, which are not kept.
    fn wrapping(directory: &Path, current: Option<&[u8]>, former: Option<&[u8]>) -> KeyWrapping {
        let file = |name: &str, bytes: Option<&[u8]>| {
            let Some(bytes) = bytes else { return PathBuf::new() };
            let path = directory.join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
            path
        };
        let (current, former) = (file("current", current), file("former", former));
        let wrapping = KeyWrapping::load((SETTING, &current), ("a.former", &former)).unwrap();
        for path in [&current, &former] {
            let _ = fs::remove_file(path);
        }
        wrapping
    }

    #[test]
    fn what_is_written_can_be_read_with_the_same_key_and_with_it_as_the_former_one() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = ([1; 32], [2; 64]);
        let with = |current: Option<&[u8]>, former: Option<&[u8]>| wrapping(dir.path(), current, former);
        let clear = with(None, None).wrap(&KEY).unwrap();
        assert_eq!(clear, KEY);
        let wrapped = with(Some(&one), None).wrap(&KEY).unwrap();
        assert!(!wrapped.windows(8).any(|window| window == &KEY[..8]));
        assert_ne!(wrapped, with(Some(&one), None).wrap(&KEY).unwrap(), "no two are the same");
        for (wrapping, file, is_outdated) in [
            (with(None, None), &clear, false),
            (with(Some(&one), None), &clear, true),
            (with(Some(&one), None), &wrapped, false),
            (with(Some(&one), Some(&two)), &wrapped, false),
            (with(Some(&two), Some(&one)), &wrapped, true),
        ] {
            assert_eq!(wrapping.unwrap(file), Ok(Unwrapped { key: KEY, is_outdated }));
        }
        let refused = |wrapping: KeyWrapping, file: &[u8], text: &str| {
            let reason = wrapping.unwrap(file).unwrap_err();
            assert!(reason.contains(text), "{reason}");
        };
        refused(with(None, None), &wrapped, SETTING);
        refused(with(Some(&two), None), &wrapped, "encrypted with another key than");
        for length in MARK.len()..wrapped.len() {
            assert!(with(Some(&one), None).unwrap(&wrapped[..length]).is_err(), "{length}");
        }
        let mut damaged = wrapped.clone();
        *damaged.last_mut().unwrap() ^= 1;
        refused(with(Some(&one), None), &damaged, "or is damaged");
        refused(with(Some(&one), None), b"short", "it has 5 bytes");
    }

    #[test]
    fn files_that_are_no_keys_are_refused_by_their_setting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kek");
        let load = |path: &Path| {
            let loaded = KeyWrapping::load((SETTING, path), ("a.former", Path::new("")));
            loaded.expect_err("it is refused").to_string()
        };
        assert!(load(&path).contains(SETTING));
        fs::write(&path, [1; 31]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(load(&path).contains("31 bytes"));
        fs::write(&path, [1; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o604)).unwrap();
        assert!(load(&path).contains("chmod o="));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(load(dir.path()).contains("no file"));
    }
}

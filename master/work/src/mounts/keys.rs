//! The keys of a cluster's secrets, as one master holds them.
//!
//! ```text
//!  secret.key              the key that the stored credentials are sealed with, as far as this master knows
//!  secret.key.GENERATION.ID one that may be used from that generation on
//! ```
//!
//! A key is on the disks of all masters before anything is sealed with it. Which one is in use is in the state: a
//! generation, which grows by one with each rotation, and the key's id, a hash of it. A master that has applied that
//! puts the key in the place of the one before, which is gone then. Until it has, it keeps both: what it has applied
//! was sealed with the old one, and what comes next may be with the new one. A key of a rotation that came to nothing
//! stays until the next one.
//!
//! The files hold the keys in clear, or encrypted with a key of the host ([`KeyWrapping`]).

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_security::{KEY_BYTES, KeyWrapping, random_bytes};
use cavern_state::StateError;
use ring::aead::{CHACHA20_POLY1305, LessSafeKey, UnboundKey};
use ring::digest::{SHA256, digest};

use crate::error::WorkError;

const FILE: &str = "secret.key";
/// Bytes of a key's id.
const ID_BYTES: usize = 16;
/// Keys that wait for their generation, at most.
const WAITING_MAX: usize = 64;

/// One key, and the file that it is in.
#[derive(Clone)]
pub struct Key {
    pub sealing: LessSafeKey,
    pub id: [u8; ID_BYTES],
    bytes: [u8; KEY_BYTES],
    /// `None` for the one in use.
    generation: Option<u64>,
}

impl Key {
    fn new(bytes: [u8; KEY_BYTES], generation: Option<u64>) -> Result<Self, String> {
        let sealing = UnboundKey::new(&CHACHA20_POLY1305, &bytes).map_err(|_| "it cannot encrypt".to_owned())?;
        let hash = digest(&SHA256, &[b"cavern secret key\n".as_slice(), &bytes].concat());
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&hash.as_ref()[..ID_BYTES]);
        Ok(Self { sealing: LessSafeKey::new(sealing), id, bytes, generation })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn file(&self) -> String {
        match self.generation {
            None => FILE.to_owned(),
            Some(generation) => format!("{FILE}.{generation}.{}", hex(&self.id)),
        }
    }
}

/// Where a master keeps its keys, and how.
#[derive(Clone)]
pub struct KeyDirectory {
    path: PathBuf,
    wrapping: Arc<KeyWrapping>,
}

impl KeyDirectory {
    pub fn new(path: PathBuf, wrapping: KeyWrapping) -> Self {
        Self { path, wrapping: Arc::new(wrapping) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the key of a cluster that this master joins in the place of the one in use. *Blocking*; it is on disk when
    /// this returns.
    ///
    /// # Errors
    /// [`WorkError::Invalid`] for what is no key.
    pub fn adopt(&self, key: &[u8]) -> Result<(), WorkError> {
        self.write(FILE, as_key(key)?)
    }

    /// Writes a key into a file that is whole or not there, in the place of what it was.
    fn write(&self, name: &str, key: &[u8; KEY_BYTES]) -> Result<(), WorkError> {
        let (path, fresh) = (self.path.join(name), self.path.join("secret.key.new"));
        let bytes = self.wrapping.wrap(key).map_err(|reason| unusable(&path, &reason))?;
        let write = || {
            let _ = fs::remove_file(&fresh);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&fresh, &path)
        };
        write().map_err(StateError::io(&path))?;
        self.sync()
    }

    /// Reads a key; its file is written anew where it is not encrypted as it would be now.
    fn read(&self, name: &str, generation: Option<u64>) -> Result<Key, WorkError> {
        let path = self.path.join(name);
        let bytes = fs::read(&path).map_err(StateError::io(&path))?;
        let unwrapped = self.wrapping.unwrap(&bytes).map_err(|reason| unusable(&path, &reason))?;
        let key = Key::new(unwrapped.key, generation).map_err(|reason| unusable(&path, &reason))?;
        if generation.is_some() && key.file() != name {
            return Err(unusable(&path, "its name is that of another key"));
        }
        if unwrapped.is_outdated {
            self.write(name, &unwrapped.key)?;
        }
        Ok(key)
    }

    fn sync(&self) -> Result<(), WorkError> {
        let synced = fs::File::open(&self.path).and_then(|directory| directory.sync_all());
        Ok(synced.map_err(StateError::io(&self.path))?)
    }
}

/// All keys of a master; the first is the one in use.
pub struct KeyFiles {
    directory: KeyDirectory,
    pub keys: Vec<Key>,
}

impl KeyFiles {
    /// Reads them; makes the first at the first start.
    ///
    /// # Errors
    /// [`WorkError::SecretKey`] for a file that is not a key.
    pub fn open(directory: &KeyDirectory) -> Result<Self, WorkError> {
        let path = directory.path.join(FILE);
        if !path.try_exists().map_err(StateError::io(&path))? {
            directory.write(FILE, &random_key(&path)?)?;
        }
        let mut keys = vec![directory.read(FILE, None)?];
        for file in fs::read_dir(&directory.path).map_err(StateError::io(&directory.path))? {
            let name = file.map_err(StateError::io(&directory.path))?.file_name().to_string_lossy().into_owned();
            if let Some(generation) = generation_in(&name) {
                keys.push(directory.read(&name, Some(generation))?);
            }
        }
        keys[1..].sort_by_key(|key| (key.generation, key.id));
        Ok(Self { directory: directory.clone(), keys })
    }

    /// Where the one in use is.
    pub fn path(&self) -> PathBuf {
        self.directory.path.join(FILE)
    }

    /// A key for this generation that nothing is sealed with yet.
    pub fn prepare(&mut self, generation: u64) -> Result<Key, WorkError> {
        let is_ready = |key: &&Key| key.generation == Some(generation);
        // That of an attempt which came to nothing will do.
        if !self.keys.iter().any(|key| is_ready(&key)) {
            self.take(generation, &random_key(&self.path())?)?;
        }
        let key = self.keys.iter().find(is_ready).cloned();
        key.ok_or_else(|| unusable(&self.path(), "the system gives no random numbers"))
    }

    /// Takes a key in that may be used from this generation on. It is on disk when this returns.
    ///
    /// # Errors
    /// [`WorkError::Invalid`] for what is no key.
    pub fn take(&mut self, generation: u64, bytes: &[u8]) -> Result<(), WorkError> {
        let key = Key::new(*as_key(bytes)?, Some(generation)).map_err(|reason| unusable(&self.path(), &reason))?;
        if self.keys.iter().any(|known| known.id == key.id) {
            return Ok(());
        }
        if self.keys.len() > WAITING_MAX {
            return Err(WorkError::Refused(format!(
                "{WAITING_MAX} keys wait in {} already, and none is used: see the log of this master",
                self.directory.path.display()
            )));
        }
        self.directory.write(&key.file(), &key.bytes)?;
        self.keys.push(key);
        Ok(())
    }

    /// What the state has is in use; whatever can be of no use any more is gone when this returns. Says whether
    /// anything was.
    ///
    /// # Errors
    /// [`WorkError::SecretKey`] when this key is not here: nothing is changed then.
    pub fn settle(&mut self, generation: u64, id: &[u8]) -> Result<bool, WorkError> {
        let before = self.keys.len();
        let Some(used) = self.keys.iter().position(|key| key.id == *id) else {
            return Err(unusable(&self.path(), "the cluster has another one, which this master was not given"));
        };
        if used != 0 {
            let (from, to) = (self.directory.path.join(self.keys[used].file()), self.path());
            fs::rename(&from, &to).map_err(StateError::io(&to))?;
            self.directory.sync()?;
            self.keys.swap(0, used);
            self.keys.remove(used);
            self.keys[0].generation = None;
        }
        let is_over = |key: &Key| key.generation.is_some_and(|of| of <= generation);
        for key in self.keys.iter().filter(|key| is_over(key)) {
            let path = self.directory.path.join(key.file());
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(StateError::io(&path)(error).into());
                }
                _ => {}
            }
        }
        if self.keys.iter().any(is_over) {
            self.directory.sync()?;
            self.keys.retain(|key| !is_over(key));
        }
        Ok(self.keys.len() < before)
    }
}

fn as_key(bytes: &[u8]) -> Result<&[u8; KEY_BYTES], WorkError> {
    let length = bytes.len();
    bytes.try_into().map_err(|_| WorkError::Invalid(format!("a key of {length} bytes and not {KEY_BYTES}")))
}

fn random_key(path: &Path) -> Result<[u8; KEY_BYTES], WorkError> {
    random_bytes().map_err(|reason| unusable(path, &reason))
}

pub(super) fn unusable(path: &Path, reason: &str) -> WorkError {
    WorkError::SecretKey { path: path.to_owned(), reason: reason.to_owned() }
}

/// The generation in the name of a key's file; `None` for any other file, and for that of the key in use.
fn generation_in(name: &str) -> Option<u64> {
    let (generation, id) = name.strip_prefix(FILE)?.strip_prefix('.')?.split_once('.')?;
    if id.len() == 2 * ID_BYTES { generation.parse().ok() } else { None }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn open(directory: &Path) -> Result<KeyFiles, WorkError> {
        KeyFiles::open(&KeyDirectory::new(directory.to_owned(), KeyWrapping::default()))
    }

    fn files(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_key_is_kept_until_another_is_used_and_no_longer() {
        let dir = tempfile::tempdir().unwrap();
        let mut keys = open(dir.path()).unwrap();
        let first = keys.keys[0].id;
        let second = keys.prepare(1).unwrap().bytes().to_vec();
        assert_eq!(keys.prepare(1).unwrap().bytes(), second, "one is enough");
        keys.take(1, &[7; KEY_BYTES]).unwrap();
        keys.take(2, &[8; KEY_BYTES]).unwrap();
        assert_eq!(files(dir.path()).len(), 4);
        // Nothing is lost by a restart, at any point.
        let mut keys = open(dir.path()).unwrap();
        assert_eq!((keys.keys[0].id, keys.keys.len()), (first, 4));
        for name in files(dir.path()) {
            let mode = fs::metadata(dir.path().join(&name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let id = keys.keys.iter().find(|key| key.bytes() == second).unwrap().id;
        for is_first in [true, false] {
            assert_eq!(keys.settle(1, &id).unwrap(), is_first);
            // That of the next generation may be given before this one is known to be used.
            assert_eq!(files(dir.path()).len(), 2);
            assert_eq!(fs::read(dir.path().join(FILE)).unwrap(), second);
            keys = open(dir.path()).unwrap();
        }
        assert!(!keys.keys.iter().any(|key| key.id == first));
        let missing = keys.settle(3, &[0; ID_BYTES]).unwrap_err().to_string();
        assert!(missing.contains("was not given") && missing.contains(FILE), "{missing}");
        assert_eq!(files(dir.path()).len(), 2, "nothing is given up for one that is not there");
        keys.take(3, &second).unwrap();
        assert_eq!(files(dir.path()).len(), 2, "it is here");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut keys = open(dir.path()).unwrap();
        assert!(matches!(keys.take(1, b"short"), Err(WorkError::Invalid(_))));
        for number in 0..WAITING_MAX {
            keys.take(1, &[u8::try_from(number).unwrap(); KEY_BYTES]).unwrap();
        }
        assert!(matches!(keys.take(1, &[200; KEY_BYTES]), Err(WorkError::Refused(_))));
        let name = files(dir.path()).pop().unwrap();
        fs::write(dir.path().join(name), [9; KEY_BYTES]).unwrap();
        assert!(matches!(open(dir.path()), Err(WorkError::SecretKey { .. })));
    }

    #[test]
    fn keys_are_encrypted_from_the_start_on_that_has_a_key_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let with = |current: Option<&[u8]>, former: Option<&[u8]>| {
            let wrapping = KeyWrapping::of_bytes("master.key_encryption_key", current, former).unwrap();
            KeyDirectory::new(dir.path().to_owned(), wrapping)
        };
        let mut keys = open(dir.path()).unwrap();
        keys.take(2, &[7; KEY_BYTES]).unwrap();
        let clear: Vec<_> = keys.keys.iter().map(|key| key.bytes().to_vec()).collect();
        let (one, two) = ([1; 32], [2; 32]);
        for (current, former) in [(&one, None), (&one, None), (&two, Some(one.as_slice())), (&two, None)] {
            let directory = with(Some(current), former);
            let keys = KeyFiles::open(&directory).unwrap();
            assert_eq!(keys.keys.iter().map(|key| key.bytes().to_vec()).collect::<Vec<_>>(), clear);
            for name in files(dir.path()) {
                let file = fs::read(dir.path().join(&name)).unwrap();
                assert!(!clear.iter().any(|key| file.windows(8).any(|window| window == &key[..8])), "{name}");
            }
        }
        // A new one, one that is put in the place of the one in use, and one that comes from elsewhere.
        let directory = with(Some(&two), None);
        let mut keys = KeyFiles::open(&directory).unwrap();
        let next = keys.prepare(3).unwrap();
        assert!(keys.settle(3, &next.id).unwrap());
        assert_eq!(KeyFiles::open(&directory).unwrap().keys[0].id, next.id);
        directory.adopt(&[9; KEY_BYTES]).unwrap();
        assert_eq!(KeyFiles::open(&directory).unwrap().keys[0].bytes(), [9; KEY_BYTES]);
        for wrong in [with(None, None), with(Some(&one), None)] {
            assert!(matches!(KeyFiles::open(&wrong), Err(WorkError::SecretKey { .. })));
        }
        assert_eq!(KeyFiles::open(&directory).unwrap().keys[0].bytes(), [9; KEY_BYTES], "nothing was changed");
    }
}

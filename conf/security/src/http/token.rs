//! The token that shows the pages of the HTTP ports, of a file that is read again when it changes.

use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::certificate::read_secret;
use crate::error::SecurityError;
use crate::files::{LOOK_AGAIN, Stamp, stamp};

/// The setting that names the file.
const KEY: &str = "http_token";
/// A shorter one could be guessed,
const LENGTH_MIN: usize = 16;
/// and a longer one has no room in a header.
const LENGTH_MAX: usize = 4096;

/// Keeps no more of the token than its hash: that is compared in constant time, whatever the lengths are.
pub struct TokenFile {
    path: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    hash: blake3::Hash,
    /// Of the file when it was last read, whether it could be used or not.
    stamp: Stamp,
    looked: Instant,
}

cavern_conf::debug_only!(TokenFile { path });

impl TokenFile {
    /// # Errors
    /// The file cannot be read, others may read it, or what is in it is no token.
    pub fn open(path: &Path) -> Result<Self, SecurityError> {
        let stamp = stamp(path).unwrap_or_default();
        let current = Current { hash: read(path)?, stamp, looked: Instant::now() };
        Ok(Self { path: path.to_owned(), current: Mutex::new(current) })
    }

    /// Whether this is the token of the file as it is. A file that cannot be used leaves the last that could be in
    /// force, and the log says so.
    pub fn is(&self, given: &[u8]) -> bool {
        let mut current = self.current.lock();
        if current.looked.elapsed() >= LOOK_AGAIN {
            current.looked = Instant::now();
            let stamp = stamp(&self.path).unwrap_or_default();
            if stamp != current.stamp {
                current.stamp = stamp;
                match read(&self.path) {
                    Ok(hash) => {
                        tracing::info!("the token of the HTTP port was replaced");
                        current.hash = hash;
                    }
                    Err(error) => tracing::warn!("the former token stays in force: {error}"),
                }
            }
        }
        // In constant time, says its documentation.
        blake3::hash(given) == current.hash
    }
}

fn read(path: &Path) -> Result<blake3::Hash, SecurityError> {
    let text = read_secret(KEY, path)?;
    let token = text.trim_ascii();
    // RFC 6750, section 2.1.
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(byte);
    if !(LENGTH_MIN..=LENGTH_MAX).contains(&token.len()) || !token.iter().all(is_allowed) {
        return Err(SecurityError::unusable(
            KEY,
            path,
            format!(
                "a token has {LENGTH_MIN} to {LENGTH_MAX} letters, digits and \"-._~+/=\", and nothing else is in the \
                 file: `openssl rand -hex 32` makes one"
            ),
        ));
    }
    Ok(blake3::hash(token))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn write(path: &Path, content: &str) {
        let beside = path.with_extension("new");
        fs::write(&beside, content).unwrap();
        fs::set_permissions(&beside, Permissions::from_mode(0o640)).unwrap();
        fs::rename(beside, path).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_token_is_that_of_the_file_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        write(&path, &format!("{TOKEN}\n"));
        let token = TokenFile::open(&path).unwrap();
        assert!(token.is(TOKEN.as_bytes()));
        for wrong in ["", "0", "0123456789abcdeF", "0123456789abcdef0", "0123456789abcdef\n"] {
            assert!(!token.is(wrong.as_bytes()), "{wrong:?}");
        }
        assert!(!format!("{token:?}").contains(TOKEN));

        // What is no token leaves the former one in force.
        let other = "fedcba9876543210";
        for (written, right, wrong) in [("short", TOKEN, "short"), (other, other, TOKEN)] {
            write(&path, written);
            tokio::time::advance(LOOK_AGAIN).await;
            assert!(token.is(right.as_bytes()) && !token.is(wrong.as_bytes()), "{written}");
        }
        fs::remove_file(&path).unwrap();
        tokio::time::advance(LOOK_AGAIN).await;
        assert!(token.is(other.as_bytes()));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_refused_and_not_quoted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let refused = || TokenFile::open(&path).unwrap_err().to_string();
        assert!(refused().contains("security.http_token"));
        for bad in ["", "secret", "0123456789 abcdef", "0123456789abcdef\n0123456789abcdef", "0123456789abcdeé"] {
            write(&path, bad);
            let error = refused();
            assert!(error.contains("security.http_token") && error.contains("openssl rand"), "{error}");
            assert!(bad.is_empty() || !error.contains(bad), "{error}");
        }
        write(&path, &"x".repeat(LENGTH_MAX + 1));
        assert!(refused().contains("openssl rand"));
        write(&path, TOKEN);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(refused().contains("chmod 600"));
    }
}

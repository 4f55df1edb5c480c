//! What a mount's record says, and how logs may show it: its options hold credentials.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use crate::master::{AccessMode, Consistency, Mount, UpdateMountRequest, VendedKeys, WriteType};
use crate::{Capabilities, Scheme};

/// In place of an option's value that is not for everybody.
pub const HIDDEN: &str = "***";

/// The value of an option as it may be shown: only what is known to be harmless, since an option that this version does
/// not know may be a secret.
pub fn shown_option(name: &str, value: &str) -> String {
    let is_shown = Scheme::ALL.into_iter().any(|scheme| scheme.shown_options().contains(&name));
    let shown = if is_shown { value } else { HIDDEN };
    shown.to_owned()
}

impl Mount {
    /// This mount, with those values of its options that may be shown.
    #[must_use]
    pub fn without_secrets(mut self) -> Self {
        for (name, value) in &mut self.options {
            *value = shown_option(name, value);
        }
        self
    }

    /// The kind of its store; `None` where its URI is of none that is known.
    pub fn scheme(&self) -> Option<Scheme> {
        Scheme::of(&self.uri)
    }

    /// What its store can do: nothing where its URI is of none that is known.
    pub fn capabilities(&self) -> Capabilities {
        self.scheme().map(Scheme::capabilities).unwrap_or_default()
    }

    /// Whether clients change what is in it, and its bucket gets that.
    pub fn is_written(&self) -> bool {
        self.write_type() == WriteType::FsMode || self.access_mode() == AccessMode::ReadWrite
    }

    /// How long a listing is fresh; `None` when it is trusted until a refresh.
    pub fn listing_ttl(&self) -> Option<Duration> {
        match self.consistency() {
            Consistency::Never | Consistency::Strict => None,
            _ => Some(Duration::from_millis(self.metadata_ttl_ms)),
        }
    }
}

/// Names of options, without their values.
struct Names<'m>(&'m HashMap<String, String>);

impl fmt::Debug for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&String> = self.0.keys().collect();
        names.sort_unstable();
        f.debug_list().entries(names).finish()
    }
}

impl fmt::Debug for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mount")
            .field("id", &self.id)
            .field("path", &self.path)
            .field("uri", &self.uri)
            .field("write_type", &self.write_type())
            .field("access_mode", &self.access_mode())
            .field("options", &Names(&self.options))
            .field("block_size", &self.block_size)
            .field("replicas", &self.replicas)
            .field("root_inode", &self.root_inode)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for UpdateMountRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpdateMountRequest")
            .field("path", &self.path)
            .field("options", &Names(&self.options))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for VendedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VendedKeys")
            .field("expires_ns", &self.expires_ns)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::master::{MountRequest, MountTable};

    #[test]
    fn what_is_shown_has_no_credentials() {
        let options = [("s3.region_name", "r"), ("s3.credentials.secret", "hush"), ("unknown", "hush")];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let shown = Mount { options, ..Mount::default() }.without_secrets().options;
        assert_eq!((shown["s3.region_name"].as_str(), shown["s3.credentials.secret"].as_str()), ("r", HIDDEN));
        assert_eq!(shown["unknown"], HIDDEN);
        assert_eq!(shown_option("s3.credentials.role", "arn:aws:iam::1:role/r"), "arn:aws:iam::1:role/r");
        assert_eq!(shown_option("s3.credentials.external_id", "hush"), HIDDEN);
    }

    #[test]
    fn what_options_hold_is_not_described() {
        let options: HashMap<String, String> = [("s3.credentials.secret".to_owned(), "hush".to_owned())].into();
        let update = UpdateMountRequest { options: options.clone(), ..UpdateMountRequest::default() };
        let mount = Mount { path: "/train".to_owned(), options, ..Mount::default() };
        let table = MountTable { mounts: vec![mount.clone()], ..MountTable::default() };
        let request = MountRequest { mount: Some(mount), ..MountRequest::default() };
        let hush = || "hush".to_owned();
        let keys =
            VendedKeys { access_key: hush(), secret_key: hush(), session_token: hush(), ..VendedKeys::default() };
        assert!(!format!("{keys:?}").contains("hush"));
        for described in [format!("{table:?}"), format!("{request:?}"), format!("{update:?}")] {
            assert!(!described.contains("hush") && described.contains("s3.credentials.secret"), "{described}");
        }
    }
}

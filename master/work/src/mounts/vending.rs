//! Keys of a mount that end, for workers and clients: the leader has STS give them out, and the mount's own credentials
//! stay with the masters.
//!
//! What somebody gets is good for the prefix of the mount, and for no more than he needs there: workers write the
//! objects of fs-mode mounts, and clients those of cache-mode mounts which they may change. All others only read.

use std::sync::Arc;

use cavern_proto::ClientAccess;
use cavern_proto::master::{Mount, VendedKeys, WriteType};
use cavern_security::Identity;
use cavern_ufs::{KeyProvider, KeyRight, KeyVendor, is_vended, vended_options};

use super::open::{Mounts, OpenMount};
use crate::error::WorkError;

impl Mounts {
    /// Whether STS gives keys for a mount that vends them, and the bucket takes these. What was given is there for the
    /// mount as long as the answer is kept.
    ///
    /// # Errors
    /// [`WorkError::Keys`], and those of the bucket.
    pub(super) async fn check_vending(&self, mount: &Mount) -> Result<Option<KeyVendor>, WorkError> {
        if !is_vended(&mount.options) {
            return Ok(None);
        }
        let Some(vendor) = self.vendor(mount)? else { return Ok(None) };
        let rights: &[KeyRight] = match mount.is_written() {
            true => &[KeyRight::Read, KeyRight::Write],
            false => &[KeyRight::Read],
        };
        for right in rights {
            let keys = vendor.keys(*right).await;
            let keys = keys.map_err(|source| WorkError::Keys { path: mount.path.clone(), source })?;
            let lender = KeyProvider::new("STS", move || std::future::ready(Ok(keys.clone())));
            self.open_vended(mount, &lender)?.check().await?;
        }
        Ok(Some(vendor))
    }
}

impl OpenMount {
    /// Keys for whoever asks, of whom nothing is known where connections are not secured.
    ///
    /// # Errors
    /// [`WorkError::Refused`] where keys are not vended, [`WorkError::NotFound`] where the mount is not there for
    /// the asker, [`WorkError::Denied`] where it is to have none, and [`WorkError::Keys`].
    pub async fn vend(&self, asker: Option<&Identity>, to_write: bool) -> Result<VendedKeys, WorkError> {
        let right = right_of(&self.mount, asker, to_write)?;
        let path = &self.mount.path;
        let Some(vendor) = self.vendor.as_ref().map_err(Arc::clone)? else {
            return Err(WorkError::Refused(format!("{path} vends no keys: s3.credentials.vended_role is not set")));
        };
        let keys = vendor.keys(right).await;
        let keys = keys.map_err(|source| WorkError::Keys { path: path.clone(), source })?;
        Ok(VendedKeys {
            access_key: keys.access,
            secret_key: keys.secret,
            session_token: keys.session_token,
            expires_ns: keys.expires_ns,
            read_only: right == KeyRight::Read,
        })
    }
}

/// A mount as workers and clients are told of it: where keys are vended, without credentials.
pub fn told(mount: Mount) -> Mount {
    match vended_options(&mount.options) {
        Some(options) => Mount { options, ..mount },
        None => mount,
    }
}

/// Which keys of a mount somebody gets.
fn right_of(mount: &Mount, asker: Option<&Identity>, to_write: bool) -> Result<KeyRight, WorkError> {
    let client = asker.map_or(Some(""), Identity::client_name);
    let is_fs_mode = mount.write_type() == WriteType::FsMode;
    let may_write = match client.map(|client| (mount.access_of(client), mount.limits_of(client))) {
        None => is_fs_mode,
        Some((ClientAccess::None, _)) => {
            return Err(WorkError::NotFound(format!("mount {} is gone", mount.id)));
        }
        Some((_, Some(_))) => {
            return Err(WorkError::Denied(format!(
                "users of this client are limited in {}: it gets no keys of the bucket, which knows no users",
                mount.path
            )));
        }
        Some((ClientAccess::ReadOnly, None)) => false,
        // A worker may ask so where nobody shows who he is.
        Some((ClientAccess::Full, None)) => mount.is_written() && (!is_fs_mode || asker.is_none()),
    };
    Ok(if to_write && may_write { KeyRight::Write } else { KeyRight::Read })
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{AccessMode, ClientRule, UserLimits};
    use cavern_security::Role;

    use super::*;

    #[test]
    fn whoever_writes_no_objects_gets_keys_that_read() {
        let rule = |name: &str, read_only, users| ClientRule {
            name: name.to_owned(),
            read_only,
            users,
            ..ClientRule::default()
        };
        let squashed = UserLimits { root_squash: true, ..UserLimits::default() };
        let clients = vec![rule("a", false, None), rule("r", true, None), rule("u", false, Some(squashed))];
        let of = |write_type: WriteType, access_mode: AccessMode| Mount {
            id: 7,
            path: "/data".to_owned(),
            write_type: write_type.into(),
            access_mode: access_mode.into(),
            clients: clients.clone(),
            ..Mount::default()
        };
        let fs_mode = of(WriteType::FsMode, AccessMode::Unspecified);
        let written = of(WriteType::CacheMode, AccessMode::ReadWrite);
        let read = of(WriteType::CacheMode, AccessMode::Unspecified);
        let (client, worker) = (|name: &str| (Role::Client, name.to_owned()), (Role::Worker, "w".to_owned()));
        for (mount, (role, name), expected) in [
            (&fs_mode, worker.clone(), KeyRight::Write),
            (&written, worker.clone(), KeyRight::Read),
            (&read, worker, KeyRight::Read),
            (&fs_mode, client("a"), KeyRight::Read),
            (&written, client("a"), KeyRight::Write),
            (&read, client("a"), KeyRight::Read),
            (&fs_mode, client("r"), KeyRight::Read),
            (&written, client("r"), KeyRight::Read),
        ] {
            let identity = Identity::new("c", role, &name).unwrap();
            assert_eq!(right_of(mount, Some(&identity), true).unwrap(), expected, "{identity} {mount:?}");
            assert_eq!(right_of(mount, Some(&identity), false).unwrap(), KeyRight::Read, "{identity} {mount:?}");
        }
        let refused = |name: &str| {
            let identity = Identity::new("c", Role::Client, name).unwrap();
            right_of(&written, Some(&identity), false).unwrap_err()
        };
        assert!(refused("nobody").is_not_found());
        assert!(matches!(refused("u"), WorkError::Denied(_)));
        // Without names a mount with rules is there for nobody, and any other for whoever asks.
        assert!(right_of(&fs_mode, None, true).unwrap_err().is_not_found());
        let open = Mount { clients: Vec::new(), ..fs_mode };
        assert_eq!(right_of(&open, None, true).unwrap(), KeyRight::Write);
    }

    #[test]
    fn where_keys_are_vended_the_masters_tell_no_others() {
        let options = [
            ("s3.credentials.secret", "hush"),
            ("s3.credentials.access", "hush"),
            ("s3.credentials.vended_role", "arn:aws:iam::123456789012:role/train"),
        ];
        let of = |options: &[(&str, &str)]| Mount {
            options: options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            ..Mount::default()
        };
        assert!(told(of(&options)).options.values().all(|value| value != "hush"));
        assert_eq!(told(of(&options[..2])), of(&options[..2]));
    }
}

//! What a listing says of a directory of an fs-mode mount, on its way into the namespace.

use bytes::Bytes;
use cavern_proto::master::Existing;
use cavern_proto::record::AdoptListing;
use cavern_proto::reserved::{CLAIM, PRESERVED};
use cavern_state::Directory;
use cavern_state::namespace::ListingCounts;
use cavern_ufs::{Listed, Window};

use super::Listings;
use super::diff::listed_entry;
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// Entries of one command.
pub const ENTRIES: usize = 250;

/// What follows a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowTail {
    /// Perhaps more names.
    Unknown,
    /// The directory ends here; so many of its keys cannot be names.
    Nothing { hidden: u64 },
}

impl Listings {
    /// Takes a window into a directory that was never listed.
    pub(super) async fn adopt(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        window: Window,
        rest: WindowTail,
    ) -> Result<ListingCounts, WorkError> {
        let marker = window.marker.unwrap_or_default();
        let names: Vec<_> = window.names.into_iter().collect();
        if names.is_empty() && marker.is_empty() && rest == WindowTail::Unknown {
            return Ok(ListingCounts::default());
        }
        self.propose_adoption(directory, mount, names, marker, rest).await
    }

    /// Takes names into a directory; `marker` is the ETag of the object that stands for it.
    pub(super) async fn propose_adoption(
        &self,
        directory: &Directory,
        mount: &OpenMount,
        mut names: Vec<(Bytes, Listed)>,
        marker: String,
        rest: WindowTail,
    ) -> Result<ListingCounts, WorkError> {
        let key_prefix = directory.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(directory.inode))?;
        if directory.is_mount_root() {
            // What this cluster keeps there for itself goes by itself.
            let preserved = format!("{PRESERVED}{}-", self.0.cluster_id);
            names.retain(|(name, _)| !name.starts_with(preserved.as_bytes()) && &name[..] != CLAIM.as_bytes());
        }
        let (complete, hidden) = match rest {
            WindowTail::Unknown => (false, 0),
            WindowTail::Nothing { hidden } => (true, hidden),
        };
        let mut entries: Vec<_> = names.into_iter().map(|(name, listed)| listed_entry(name, listed)).collect();
        if mount.mount.existing() == Existing::Recovered {
            entries = self.recover(mount, &key_prefix, entries).await?;
        }
        let part = self.0.default_attributes.of(AdoptListing {
            mount_id: mount.id(),
            directory: directory.inode,
            key_prefix,
            now_ns: self.0.reader.clock().now_ns(),
            ..AdoptListing::default()
        });
        let mut commands = Vec::new();
        while entries.len() > ENTRIES {
            let rest = entries.split_off(ENTRIES);
            commands.push(AdoptListing { entries, ..part.clone() });
            entries = rest;
        }
        commands.push(AdoptListing { entries, marker, complete, hidden, ..part });
        self.propose_portions(commands).await
    }
}

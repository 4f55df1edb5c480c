//! Files that take the place of what has a name, whole: whoever looks sees the old file or the new one.
//!
//! Into a bucket a file goes as one object anyway. In an fs-mode mount it is written under another name,
//! `.NAME.PID.partial`, synced, and renamed to its own; what an interrupted program leaves behind is named so.

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::NAME_MAX;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveName, RenameName};

use super::open::{NewFile, check_changeable};
use super::{Effects, File};
use crate::error::ClientError;
use crate::metadata::Node;
use crate::session::Client;

/// A file that is not there yet. To be finished, or abandoned.
pub struct Replacement<'c> {
    client: &'c Client,
    file: File,
    /// Where it is to be renamed.
    rename: Option<RenameName>,
}

impl Client {
    /// Begins a file that is to take the place of whatever has its name.
    ///
    /// # Errors
    /// `EROFS` in mounts that are only read; `EEXIST` in a bucket if a file of this name is being written here.
    pub async fn replace(&self, directory: &Arc<Node>, new: NewFile<'_>) -> Result<Replacement<'_>, ClientError> {
        check_changeable(directory)?;
        if directory.is_in_writable_bucket() {
            let file = self.replace_object(directory, new.name)?;
            return Ok(Replacement { client: self, file, rename: None });
        }
        let (parent, name) = (directory.inode, partial_name(new.name));
        let file = self.create(directory, NewFile { name: &name, ..new }).await?.file;
        let new_name = Bytes::copy_from_slice(new.name);
        let rename = RenameName { parent, name, new_parent: parent, new_name, ..RenameName::default() };
        Ok(Replacement { client: self, file, rename: Some(rename) })
    }
}

impl Replacement<'_> {
    /// What is to be written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The file is complete: it is durable, and has its name, when this returns. Otherwise nothing of it is left.
    pub async fn finish(self) -> Result<Effects, ClientError> {
        let finished = async {
            let effects = self.file.sync().await?;
            match self.rename.clone() {
                Some(rename) => {
                    let listing = Some(rename.new_parent);
                    self.client.metadata().change(Change::Rename(rename), 0, 0).await?;
                    Ok(Effects { listing })
                }
                None => Ok(effects),
            }
        };
        let finished = finished.await;
        if finished.is_err() {
            self.abandon().await;
        }
        finished
    }

    /// What has the name stays.
    pub async fn abandon(self) {
        if let Some(RenameName { parent, name, .. }) = self.rename {
            let remove = RemoveName { parent, name, directory: false };
            // The reason to give up is what counts.
            if let Err(error) = self.client.metadata().change(Change::Remove(remove), 0, 0).await {
                tracing::debug!("a file that is not complete stays: {error}");
            }
        }
    }
}

/// A name for a file that is not complete yet, which fits into a directory as well.
fn partial_name(name: &[u8]) -> Bytes {
    let end = format!(".{}.partial", std::process::id());
    let kept = name.len().min(NAME_MAX - 1 - end.len());
    [b".", &name[..kept], end.as_bytes()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_incomplete_files_are_names() {
        let short = partial_name(b"model.pt");
        assert!(short.starts_with(b".model.pt.") && short.ends_with(b".partial"), "{short:?}");
        assert!(partial_name(&[b'x'; NAME_MAX]).len() <= NAME_MAX);
    }
}

//! Permissions, owner, times and length: of files and directories of either mode, and of files that are being written.

use std::sync::Arc;

use cavern_posix::mode::{ACCESS_BITS, MODE_BITS};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, SetAttr, Time, User};
use rustix::io::Errno;

use super::Effects;
use super::open::check_changeable;
use crate::error::ClientError;
use crate::metadata::Node;
use crate::session::Client;
use crate::staged::{StagedFile, StagedFiles};

/// How files of buckets look that keep no attributes of their own.
#[derive(Clone, Copy, Debug)]
pub struct BucketDefaults {
    pub uid: u32,
    pub gid: u32,
    /// Permission bits.
    pub file_mode: u32,
    pub dir_mode: u32,
}

impl BucketDefaults {
    /// Permissions of what is of this kind.
    pub fn permissions(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Directory => self.dir_mode,
            Kind::Symlink => ACCESS_BITS,
            _ => self.file_mode,
        }
    }

    /// Permissions, user and group of what is in a cache-mode mount.
    pub fn of(&self, node: &Node) -> (u32, u32, u32) {
        if node.has_own_attributes() {
            return (node.mode & MODE_BITS, node.uid, node.gid);
        }
        (self.permissions(node.kind), self.uid, self.gid)
    }
}

/// Attributes to be set, and on whose behalf.
#[derive(Clone, Copy, Debug)]
pub struct AttributeChange<'a> {
    pub set: SetAttr,
    pub uid: u32,
    pub gid: u32,
    /// As for [`File::write`](super::File::write): who cuts a file has written to it.
    pub writer: Option<u64>,
    /// The thread that will try again by the name where that leads to another inode by then; 0 for nobody.
    pub thread: u32,
    /// By whom that is checked, where the mount limits users.
    pub user: Option<&'a User>,
    pub defaults: &'a BucketDefaults,
}

impl Client {
    /// Whether something of a bucket looks already as it is to look: that is no change, which programs that copy rely
    /// on. What is being written is never taken for that.
    pub fn has_attributes(&self, node: &Node, set: &SetAttr, defaults: &BucketDefaults) -> bool {
        !StagedFiles::is_staged(node.inode) && looks_so(node, set, defaults)
    }

    /// Sets attributes, after everything that was written here before, so that a time that is set stays; gives the node
    /// as it is then.
    ///
    /// # Errors
    /// `EROFS` of what can only be read, `EOPNOTSUPP` for what a bucket cannot keep. `Stale` where the length of an
    /// object is to be another: its name leads to a file that can be cut by then.
    pub async fn set_attributes(
        &self,
        node: &Arc<Node>,
        new: AttributeChange<'_>,
    ) -> Result<(Arc<Node>, Effects), ClientError> {
        let AttributeChange { set, uid, gid, thread, user, defaults, .. } = new;
        if StagedFiles::is_staged(node.inode) {
            let file = self.staged().get(node.inode).ok_or_else(|| ClientError::Stale(node.to_string()))?;
            let done = set_staged(&file, &new).await;
            self.staged().thread_arrived(&file, thread);
            return done.map(|effects| (file.node(), effects));
        }
        if looks_so(node, &set, defaults) {
            return Ok((Arc::clone(node), Effects::default()));
        }
        check_changeable(node)?;
        let changed = if node.is_in_writable_bucket() {
            if set.size.is_some() {
                self.staged().begin(node, Some(thread))?;
                return Err(ClientError::Stale(node.to_string()));
            }
            let set = with_defaults(node, set, defaults);
            self.staged().change(node, &Change::SetAttr(set), (uid, gid)).await?
        } else {
            // The master does not know all that was written here yet.
            let is_uncommitted = || self.contents().get(node.inode).is_some_and(|file| !file.is_committed());
            if set.size.is_some() || is_uncommitted() {
                self.contents().open(node).await?.set_attributes(set, (uid, gid), user).await?
            } else {
                self.metadata().change_by(Change::SetAttr(set), (uid, gid), user.cloned()).await?
            }
        };
        let attr = changed.attr_of(node.inode);
        let attr =
            attr.ok_or_else(|| ClientError::Invalid(format!("{node}: the master says nothing of what was set")))?;
        let listing = node.is_directory().then_some(node.inode);
        Ok((Arc::new(node.with_attributes(attr)), Effects { listing }))
    }
}

async fn set_staged(file: &Arc<StagedFile>, new: &AttributeChange<'_>) -> Result<Effects, ClientError> {
    let AttributeChange { set, defaults, .. } = new;
    let is_changed = if let Some(size) = set.size {
        if set.kill_privileges {
            file.kill_privileges();
        }
        file.set_size(size, new.writer).await?;
        true
    } else if looks_so(&file.node(), set, defaults) {
        false
    } else if file.keeps_attributes() {
        file.set_attributes(set, defaults.of(&file.node()))?;
        true
    } else {
        touch(file, set, defaults)?
    };
    // With nobody who has it open, no close would come.
    if !is_changed || file.is_open() {
        return Ok(Effects::default());
    }
    file.commit().await?;
    Ok(Effects { listing: Some(file.node().parent) })
}

/// Sets nothing but times, to that of now; whether that asks for anything.
fn touch(file: &StagedFile, set: &SetAttr, defaults: &BucketDefaults) -> Result<bool, ClientError> {
    let is_now = |time: &Option<Time>| time.is_none_or(|time| time.now);
    let times_are_now = (set.atime.is_some() || set.mtime.is_some()) && is_now(&set.atime) && is_now(&set.mtime);
    let node = file.node();
    let others = if times_are_now { SetAttr { atime: None, mtime: None, ..*set } } else { *set };
    if !looks_so(&node, &others, defaults) {
        let reason = format!(
            "{node}: an object has neither permissions nor an owner, and the time when it was written; mount the \
             bucket with --attributes keep to have them kept"
        );
        return Err(ClientError::Refused { errno: Errno::OPNOTSUPP.raw_os_error(), reason });
    }
    let is_touched = times_are_now && !file.is_dirty();
    if is_touched {
        file.touch();
    }
    Ok(is_touched)
}

/// Whether a file or a directory of a bucket looks as it is to look.
fn looks_so(node: &Node, set: &SetAttr, defaults: &BucketDefaults) -> bool {
    let (mode, uid, gid) = defaults.of(node);
    let is_time = |time: Option<Time>| time.is_none_or(|time| !time.now && time.ns == node.mtime_ns);
    node.is_in_writable_bucket()
        && set.size.is_none()
        && set.mode.is_none_or(|set| set == mode)
        && set.uid.is_none_or(|set| set == uid)
        && set.gid.is_none_or(|set| set == gid)
        && (node.keeps_attributes() || is_time(set.atime))
        && is_time(set.mtime)
        && !(set.kill_privileges && node.has_own_attributes())
}

/// What is not set of a file whose bucket is to keep attributes from now on stays as it looks.
fn with_defaults(node: &Node, set: SetAttr, defaults: &BucketDefaults) -> SetAttr {
    if !node.keeps_attributes() || node.has_own_attributes() {
        return set;
    }
    let (mode, uid, gid) = defaults.of(node);
    SetAttr { mode: set.mode.or(Some(mode)), uid: set.uid.or(Some(uid)), gid: set.gid.or(Some(gid)), ..set }
}

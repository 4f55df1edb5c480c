//! What suits a mount that shows nothing but a data set: a part of one cache-mode mount that nobody writes to.
//!
//! Mounts of the namespace do not lie in each other, so nothing else appears there later. The kernel then need not ask
//! for what such a mount never has: it refuses changes by itself, knows that its reads change no access time, has no
//! extended attributes to look for, and opens files without a question where the bucket is never asked whether there is
//! another version.

use cavern_client::{MountView, Node};
use cavern_conf::schema::{Choice, Fuse};
use cavern_proto::master::Consistency;

/// Decides what the configuration leaves open about how a mount is made that shows what is below `root`; whether the
/// kernel may refuse every change.
pub(crate) fn settle(fuse: &mut Fuse, root: &Node) -> bool {
    let data_set = root.mount.as_deref().filter(|mount| !mount.is_fs_mode() && !mount.has_writable_bucket());
    // Both need the OPEN.
    let needs_open = fuse.direct || fuse.passthrough == Choice::On;
    let is_final = data_set.map(MountView::consistency) == Some(Consistency::Never);
    fuse.no_open = fuse.no_open.or(is_final && !needs_open).into();
    fuse.xattrs = fuse.xattrs.or(data_set.is_none()).into();
    // Without opens no caller could get the error that a file cannot be written.
    data_set.is_some() || fuse.no_open == Choice::On
}

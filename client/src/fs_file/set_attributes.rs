//! Other attributes for a file whose content may have changed here: another length among them.

use cavern_conf::Failpoint;
use cavern_proto::master::SetAttr;
use cavern_proto::master::mutation::Change;
use rustix::io::Errno;
use tokio::time::Instant;

use super::layout::Layout;
use super::write::too_large;
use super::{FILE_BYTES_MAX, FsFile};
use crate::error::ClientError;
use crate::metadata::Changed;

impl FsFile {
    /// Sets attributes after everything that was written before, so that a time that is set stays. No write of this
    /// client runs meanwhile.
    pub async fn set_attributes(&self, set: SetAttr, uid: u32, gid: u32) -> Result<Changed, ClientError> {
        self.behind.drain().await;
        let _alone = self.gate.write().await;
        let deadline = Instant::now() + self.shared.timeout;
        match set.size {
            Some(size) if size > FILE_BYTES_MAX => return Err(too_large()),
            // Only a file that grows has something to be zeroed.
            Some(size) if size > 0 => {
                while let Err(error) = self.zero_behind_end(size, deadline).await {
                    self.fall_back_to_origin_exclusive(error, deadline).await?;
                }
            }
            _ => {}
        }
        match (self.commit_exclusive().await, set.size) {
            // Only what stays must have room.
            (Err(error), Some(size)) if error.errno() == Errno::DQUOT.raw_os_error() => {
                if let Some(layout) = self.state.lock().layout.as_mut() {
                    layout.give_up_beyond(size, self.block_size());
                }
                self.note();
                self.commit_exclusive().await?;
            }
            (committed, _) => committed?,
        }
        Failpoint::CutBegun.pass();
        let changed = self.shared.metadata.change(Change::SetAttr(set), uid, gid).await?;
        Failpoint::CutAnswered.pass();
        if let (Some(size), Some(attr)) = (set.size, changed.attr_of(self.inode)) {
            let mut state = self.state.lock();
            let super::State { layout, seen, blocks, .. } = &mut *state;
            match layout {
                Some(layout) => {
                    let before = layout.version();
                    if layout.cut(attr, self.block_size()) {
                        self.shared.pages.advance(self.inode, before, attr.version);
                    } else {
                        // Somebody else has changed it, too.
                        *seen = u64::MAX;
                        self.shared.pages.forget(self.inode);
                    }
                }
                // Nothing of it is left.
                None if size == 0 => {
                    *layout = Some(Layout::without_blocks(attr));
                    *seen = self.kept.changes();
                    self.shared.pages.forget(self.inode);
                }
                None => self.shared.pages.forget(self.inode),
            }
            if let Some(layout) = layout {
                blocks.retain(|index, _| layout.block(*index).is_some());
            }
        }
        self.note();
        Ok(changed)
    }
}

//! COPY_FILE_RANGE between files whose bytes need not leave this process. Any other pair of files is answered
//! `EOPNOTSUPP`, and the kernel copies it by READ and WRITE. What a file loses by being changed, the kernel has asked
//! for before: see [`privileges`](super::privileges).

use std::sync::Arc;

use super::parts::Inner;
use crate::kernel::{CopyRange, Reply};

impl Inner {
    pub(super) fn copy_file_range(self: &Arc<Self>, range: CopyRange, reply: Reply) {
        let (Some(from), Some(to)) = (self.files.handles.get(range.from_fh), self.files.handles.get(range.to_fh))
        else {
            return reply.error(libc::EOPNOTSUPP);
        };
        if !to.file.can_copy_from(&from.file) {
            return reply.error(libc::EOPNOTSUPP);
        }
        let this = Arc::clone(self);
        reply.defer_until_interrupted(move |reply, interrupted| async move {
            let copied = to.file.copy_from(&from.file, range.from, range.to, range.length, &interrupted).await;
            this.changed_by(to.how.node);
            this.answer_with("copy_file_range", copied, reply, |copied, reply| reply.copied(copied, range.count));
        });
    }
}

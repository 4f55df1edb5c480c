//! LSEEK: `SEEK_DATA` and `SEEK_HOLE`.

use std::sync::Arc;

use cavern_client::Seek;

use super::parts::Inner;
use crate::kernel::Reply;

impl Inner {
    pub(super) fn lseek(self: &Arc<Self>, fh: u64, offset: u64, whence: u32, reply: Reply) {
        let what = match whence.cast_signed() {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(libc::EINVAL),
        };
        let Some(handle) = self.files.handles.get(fh) else { return reply.error(self.files.lost.errno(fh)) };
        if let Some(found) = handle.file.seek_now(offset, what) {
            return answer_found(found, reply);
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let found = handle.file.seek(offset, what).await;
            this.answer_with("lseek", found, reply, answer_found);
        });
    }
}

fn answer_found(found: Option<u64>, reply: Reply) {
    match found {
        Some(at) => reply.at(at),
        None => reply.error(libc::ENXIO),
    }
}

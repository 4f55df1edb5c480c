//! COPY_FILE_RANGE between files of fs-mode mounts. Any other pair of files is copied by the kernel, by READ and WRITE, as
//! `EOPNOTSUPP` tells it.

use std::sync::Arc;

use cavern_client::{ClientError, Content};
use cavern_proto::master::SetAttr;
use tokio_util::sync::CancellationToken;

use super::Inner;
use crate::kernel::{Caller, CopyRange, Reply};

impl Inner {
    pub(super) fn copy_file_range(self: &Arc<Self>, caller: Caller, range: CopyRange, reply: Reply) {
        let (Some(from), Some(to)) = (self.content_of(range.from_fh), self.content_of(range.to_fh)) else {
            return reply.error(libc::EOPNOTSUPP);
        };
        let this = Arc::clone(self);
        reply.carry_out_until_interrupted(move |reply, interrupted| async move {
            match this.copy_content(caller, (&from, &to), range, &interrupted).await {
                Ok(copied) => reply.copied(copied, range.count),
                Err(error) => this.failures.answer(reply, "copy_file_range", &error),
            }
        });
    }

    async fn copy_content(
        &self,
        caller: Caller,
        (from, to): (&Content, &Content),
        range: CopyRange,
        interrupted: &CancellationToken,
    ) -> Result<u64, ClientError> {
        // Here the kernel does not say who may keep such bits, as it does of a WRITE: whoever is not root may not.
        if caller.uid != 0 && self.may_have_privileges(to.inode()) {
            let set = SetAttr { inode: to.inode(), kill_privileges: true, ..SetAttr::default() };
            to.set_attributes(set, 0, 0).await?;
        }
        to.copy_from(from, range.from, range.to, range.length, interrupted).await
    }
}

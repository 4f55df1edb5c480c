//! TMPFILE: files of fs-mode mounts without a name (`O_TMPFILE`).
//!
//! The master knows such a file as one that has lost its name: the session holds it while it is open here, and no
//! bucket hears of it. LINK gives it a name, if it was not opened with `O_EXCL`.

use std::sync::Arc;

use cavern_client::{ClientError, FsFile, Node};
use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, Naming};
use rustix::io::Errno;

use super::Inner;
use super::changes::ChangeRequest;
use super::content::created;
use crate::kernel::{Caller, Reply};

impl Inner {
    pub(super) fn tmpfile(
        self: &Arc<Self>,
        kernel_parent: u64,
        caller: Caller,
        (mode, umask): (u32, u32),
        flags: u32,
        reply: Reply,
    ) {
        let flags = flags.cast_signed();
        let naming = if flags & libc::O_EXCL == 0 { Naming::Nameless } else { Naming::NamelessForEver };
        let create = CreateInode {
            mode: mode & 0o7777,
            umask,
            naming: naming.into(),
            ..self.new_inode(kernel_parent, b"", Kind::File)
        };
        let change = Change::Create(create);
        let attempt = ChangeRequest { operation: "tmpfile", on: kernel_parent, with: None, caller, change };
        if let Some(errno) = self.cached_refusal(&attempt) {
            return reply.error(errno);
        }
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            match this.create_nameless(attempt).await {
                Ok((node, content)) => {
                    Failpoint::CreateAnswered.pass();
                    this.answer_created(&node, content, flags, reply);
                }
                Err(error) => this.failures.answer(reply, "tmpfile", &error),
            }
        });
    }

    async fn create_nameless(&self, attempt: ChangeRequest) -> Result<(Node, Arc<FsFile>), ClientError> {
        let directory = self.node(attempt.on).await?;
        if directory.is_in_writable_bucket() {
            let reason = format!("{directory}: what has no name cannot be an object");
            return Err(ClientError::Refused { errno: Errno::OPNOTSUPP.raw_os_error(), reason });
        }
        let (directory, changed) = self.make(attempt).await?;
        let attr = created(&changed)?;
        let node = Node::nameless(attr, directory.mount.clone());
        let content = self.client.contents().open_nameless(&node, attr)?;
        Ok((node, content))
    }
}

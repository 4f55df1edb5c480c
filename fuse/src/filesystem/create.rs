//! CREATE and TMPFILE: files that are made and opened at once.
//!
//! A file without a name (`O_TMPFILE`) is known to the master as one that has lost its name: the session holds it while
//! it is open here, and it is written to no bucket. LINK gives it a name, if it was not opened with `O_EXCL`.

use std::sync::Arc;

use cavern_client::{CreatedFile, NewFile};
use cavern_conf::Failpoint;

use super::Inner;
use super::changes::refusal;
use crate::kernel::{Caller, Delivery, Reply};

impl Inner {
    pub(super) fn create(
        self: &Arc<Self>,
        kernel_parent: u64,
        caller: Caller,
        name: &[u8],
        (mode, umask): (u32, u32),
        flags: u32,
        reply: Reply,
    ) {
        if let Some(errno) = self.known_node(kernel_parent).and_then(|directory| refusal(&directory)) {
            return reply.error(errno);
        }
        let (this, name, flags) = (Arc::clone(self), name.to_vec(), flags.cast_signed());
        reply.run_uninterruptible(move |reply| async move {
            let new = new_file(&name, (mode, umask), caller, flags);
            let created = match this.node(kernel_parent).await {
                Ok(directory) => {
                    let user = this.judged_user(&directory, caller).await;
                    this.client.create(&directory, NewFile { user: user.as_ref(), ..new }).await
                }
                Err(error) => Err(error),
            };
            match created {
                Ok(created) => this.answer_created(created, flags, reply),
                // Somebody else was faster: the kernel looks again, and opens what it finds if the caller may do so.
                Err(error) if error.errno() == libc::EEXIST && !new.is_exclusive => reply.error(libc::ESTALE),
                Err(error) => {
                    // It may have been made, and not opened.
                    this.invalidations.listings().changed_here(this.root.to_namespace(kernel_parent));
                    this.failures.answer(reply, "create", &error);
                }
            }
        });
    }

    pub(super) fn tmpfile(
        self: &Arc<Self>,
        kernel_parent: u64,
        caller: Caller,
        permissions: (u32, u32),
        flags: u32,
        reply: Reply,
    ) {
        if let Some(errno) = self.known_node(kernel_parent).and_then(|directory| refusal(&directory)) {
            return reply.error(errno);
        }
        let (this, flags) = (Arc::clone(self), flags.cast_signed());
        reply.run_uninterruptible(move |reply| async move {
            let created = match this.node(kernel_parent).await {
                Ok(directory) => {
                    let user = this.judged_user(&directory, caller).await;
                    let new = NewFile { user: user.as_ref(), ..new_file(b"", permissions, caller, flags) };
                    this.client.create_nameless(&directory, new).await
                }
                Err(error) => Err(error),
            };
            match created {
                Ok(created) => this.answer_created(created, flags, reply),
                Err(error) => this.failures.answer(reply, "tmpfile", &error),
            }
        });
    }

    fn answer_created(&self, created: CreatedFile, flags: i32, reply: Reply) {
        let CreatedFile { node, file, effects } = created;
        // Before the answer: the kernel may open the directory as soon as it has it.
        self.take_in(effects);
        Failpoint::CreateAnswered.pass();
        let entry = self.entry_of(&node);
        let open_flags = self.open_flags(&node, &file, flags);
        let number = self.enter(file, None, &reply);
        if reply.created(&entry, number, open_flags) == Delivery::Refused {
            self.closed(number);
        }
    }
}

fn new_file(name: &[u8], (mode, umask): (u32, u32), caller: Caller, flags: i32) -> NewFile<'_> {
    let Caller { uid, gid, thread, .. } = caller;
    let (mode, is_exclusive) = (mode & 0o7777, flags & libc::O_EXCL != 0);
    NewFile { name, mode, umask, uid, gid, is_exclusive, thread, user: None }
}

//! CREATE and TMPFILE: files that are made and opened at once.
//!
//! A file without a name (`O_TMPFILE`) is known to the master as one that has lost its name: the session holds it while
//! it is open here, and it is written to no bucket. LINK gives it a name, if it was not opened with `O_EXCL`.
//!
//! The kernel sends CREATE when it has found no name. Somebody else may make the file meanwhile. The answer is `ESTALE`
//! then, with which the kernel looks again, but once only: where files come and go all the time, as those do that
//! programs use for locks, it would not get hold of one. So the owner of the file gets it opened here, as the kernel
//! would: of him it is certain that he may do so.

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Access, ClientError, CreatedFile, Effects, NewFile, Node, Opened};
use cavern_conf::Failpoint;
use cavern_proto::master::Kind;
use tokio::time::Instant;

use super::changes::refusal;
use super::open::{access, appends};
use super::open_nodes::{Conflict, IoMode, OpenIntent};
use super::parts::Inner;
use crate::kernel::{Caller, Delivery, Reply};

/// For how long a file is made, or else opened, that others make and remove all the time.
const CONTENDED: Duration = Duration::from_secs(5);

impl Inner {
    pub(super) fn create(
        self: &Arc<Self>,
        kernel_parent: u64,
        name: &[u8],
        (mode, umask): (u32, u32),
        flags: u32,
        reply: Reply,
    ) {
        if let Some(errno) = self.known_node(kernel_parent).and_then(|directory| refusal(&directory)) {
            return reply.error(errno);
        }
        let (this, name, flags, caller) = (Arc::clone(self), name.to_vec(), flags.cast_signed(), reply.caller());
        reply.run_uninterruptible(move |reply| async move {
            let new = new_file(&name, (mode, umask), caller, flags);
            let created = async {
                let directory = this.node(kernel_parent).await?;
                let user = this.limited_user(&directory, caller).await;
                let new = NewFile { user: user.as_ref(), ..new };
                this.create_or_open(&directory, new, caller, flags).await
            };
            match created.await {
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

    /// Makes a file, or opens what others have made meanwhile; `EEXIST` where the kernel is to decide about that.
    async fn create_or_open(
        self: &Arc<Self>,
        directory: &Node,
        new: NewFile<'_>,
        caller: Caller,
        flags: i32,
    ) -> Result<CreatedFile, ClientError> {
        let deadline = Instant::now() + CONTENDED;
        loop {
            let exists = match self.client.create(directory, new).await {
                Err(error) if error.errno() == libc::EEXIST && !new.is_exclusive => error,
                answer => return answer,
            };
            let opened = match self.client.shown_here(directory.inode, new.name) {
                Some(node) => self.open_made(node, caller, flags).await,
                None => match self.client.metadata().lookup_anew(directory.inode, new.name).await {
                    Ok(node) => self.open_made(node, caller, flags).await,
                    Err(error) => Err(error),
                },
            };
            match opened {
                Ok(Some(opened)) => return Ok(opened),
                // Gone again.
                Err(error) if error.errno() == libc::ENOENT || error.is_version_gone() => {}
                Err(error) => return Err(error),
                Ok(None) => return Err(exists),
            }
            if Instant::now() >= deadline {
                return Err(exists);
            }
        }
    }

    /// Opens a file that somebody else has made, if it is certain that the kernel would.
    async fn open_made(
        self: &Arc<Self>,
        node: Arc<Node>,
        caller: Caller,
        flags: i32,
    ) -> Result<Option<CreatedFile>, ClientError> {
        if !self.is_owner_who_may_open(&node, caller, flags) {
            if node.is_fs_mode() {
                self.files.retries.expect(Some(&node));
            }
            return Ok(None);
        }
        let (mut node, file) = match self.client.open(&node, access(flags), caller.thread).await? {
            Opened::File(file) => (node, file),
            Opened::Redirected(node) => match self.client.open(&node, access(flags), caller.thread).await? {
                Opened::File(file) => (node, file),
                Opened::Redirected(_) => return Ok(None),
            },
        };
        // A version of an object is opened as the kernel reads it otherwise.
        if file.version_node().is_some() {
            return Ok(None);
        }
        if flags & libc::O_TRUNC != 0 {
            node = self.cut(&node, caller).await?;
        }
        Ok(Some(CreatedFile { node, file, effects: Effects::default() }))
    }

    fn is_owner_who_may_open(&self, node: &Node, Caller { uid, .. }: Caller, flags: i32) -> bool {
        let (mode, owner) = match node.is_fs_mode() {
            true => (node.mode, node.uid),
            false => {
                let (mode, owner, _) = self.attr_defaults.bucket.of(node);
                (mode, owner)
            }
        };
        let reads = flags & libc::O_ACCMODE != libc::O_WRONLY;
        let wanted = if reads { 0o400 } else { 0 } | if access(flags) == Access::Write { 0o200 } else { 0 };
        node.kind == Kind::File && !node.limits_users() && uid == owner && mode & wanted == wanted
    }

    pub(super) fn tmpfile(self: &Arc<Self>, kernel_parent: u64, permissions: (u32, u32), flags: u32, reply: Reply) {
        if let Some(errno) = self.known_node(kernel_parent).and_then(|directory| refusal(&directory)) {
            return reply.error(errno);
        }
        let (this, flags, caller) = (Arc::clone(self), flags.cast_signed(), reply.caller());
        reply.run_uninterruptible(move |reply| async move {
            let created = async {
                let directory = this.node(kernel_parent).await?;
                let user = this.limited_user(&directory, caller).await;
                let new = NewFile { user: user.as_ref(), ..new_file(b"", permissions, caller, flags) };
                this.client.create_nameless(&directory, new).await
            };
            let created = created.await;
            this.answer_with("tmpfile", created, reply, |created, reply| this.answer_created(created, flags, reply));
        });
    }

    fn answer_created(&self, created: CreatedFile, flags: i32, reply: Reply) {
        let CreatedFile { node, file, effects } = created;
        // Before the answer: the kernel may open the directory as soon as it has it.
        self.apply_effects(effects);
        Failpoint::CreateAnswered.pass();
        let how = if node.is_fs_mode() { self.written_by_requests(&node) } else { IoMode::default() };
        let mut entry = self.entry_of(&node);
        // The one that the handle is entered for, whichever is the newest by now.
        entry.nodeid = how.node.unwrap_or(entry.nodeid);
        let open_flags = self.open_flags(&node, &file, flags) | how.open_flags;
        // What was made just now has its end here; of what others have made the kernel may believe another.
        let appends = appends(flags) && file.opened_to_append();
        let number = self.enter(file, how, appends, &reply);
        if reply.created(&entry, number, open_flags) == Delivery::Refused {
            self.files.closed(number);
        }
    }
}

impl Inner {
    /// Enters a handle of a file that is written to from the beginning. The kernel has no handle of it yet, unless
    /// others have made it.
    fn written_by_requests(&self, node: &Node) -> IoMode {
        loop {
            let kernel_node = self.root.to_kernel(node.inode);
            match self.files.nodes.opened(kernel_node, OpenIntent::Both, self.root.aliases(), |_| None) {
                Ok(how) => return how,
                Err(Conflict) => self.supersede(kernel_node, node),
            }
        }
    }
}

fn new_file(name: &[u8], (mode, umask): (u32, u32), caller: Caller, flags: i32) -> NewFile<'_> {
    let Caller { uid, gid, thread, .. } = caller;
    let (mode, is_exclusive) = (mode & 0o7777, flags & libc::O_EXCL != 0);
    NewFile { name, mode, umask, uid, gid, is_exclusive, thread, user: None }
}

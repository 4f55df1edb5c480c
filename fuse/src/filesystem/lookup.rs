//! LOOKUP: a name in a directory.

use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Access, CachedLookup, ClientError, Node, Opened};
use cavern_proto::NAME_MAX;
use cavern_proto::master::Kind;

use super::attributes::FORGOTTEN_SOON;
use super::estale_retry::LookupHint;
use super::export::Handle;
use super::parts::Inner;
use crate::kernel::Reply;
use crate::kernel::abi::{EntryOut, ROOT_NODE};
use crate::trace::Target;

/// Replacements of an object that one lookup follows at most.
const REPLACEMENTS: usize = 8;

impl Inner {
    pub(super) fn lookup(self: &Arc<Self>, kernel_parent: u64, name: &[u8], reply: Reply) {
        if name.len() > NAME_MAX {
            return reply.error(libc::ENAMETOOLONG);
        }
        if let Some(handle) = Handle::of_name(name) {
            return self.lookup_handle(kernel_parent, handle, reply);
        }
        if self.root.is_inner(kernel_parent, name) {
            return self.lookup_inner_root(reply);
        }
        let parent = self.root.to_namespace(kernel_parent);
        if let Some(node) = self.client.shown_here(parent, name) {
            self.files.retries.writer_arrived(reply.caller().thread);
            return self.show(&node, reply);
        }
        let expecting = self.files.retries.expecting(parent, name, reply.caller().thread);
        if expecting != LookupHint::Nothing {
            let (this, name) = (Arc::clone(self), name.to_vec());
            let reply = self.traced_lookup(parent, &name, reply);
            return reply.defer(move |reply| async move {
                match expecting {
                    LookupHint::Writer => this.write_by_name(kernel_parent, &name, reply).await,
                    _ => this.open_by_name(kernel_parent, &name, reply).await,
                }
            });
        }
        let changes = self.invalidations.listings().changes();
        let is_kept = match self.client.metadata().cached_lookup(parent, name) {
            CachedLookup::Hit(node) if self.is_checked_by_lookup(&node) => {
                let this = Arc::clone(self);
                return reply.defer(move |reply| async move { this.check(&node, reply).await });
            }
            CachedLookup::Hit(node) => {
                self.show(&node, reply);
                !node.is_strict()
            }
            CachedLookup::Negative => self.show_absence(parent, name, reply),
            CachedLookup::Miss => {
                let (this, name) = (Arc::clone(self), name.to_vec());
                let reply = self.traced_lookup(parent, &name, reply);
                return reply.defer(move |reply| async move { this.ask_for_name(kernel_parent, &name, reply).await });
            }
        };
        if is_kept {
            self.repeat_if_changed(changes, kernel_parent, name);
        }
    }

    /// The directory that is shown in place of the root: asked for once, and there for as long as the mount.
    fn lookup_inner_root(self: &Arc<Self>, reply: Reply) {
        self.with_node(ROOT_NODE, "lookup", reply, |this, node, reply| {
            let entry_valid = u64::from(u32::MAX);
            reply.entry(&EntryOut { entry_valid, ..this.entry_of(node) });
        });
    }

    fn traced_lookup(&self, parent: u64, name: &[u8], reply: Reply) -> Reply {
        reply.traced(&self.trace.requests, Target { inode: parent, name: name.to_vec(), ..Target::default() })
    }

    /// The lookup before the second open of a path: see [`EstaleRetries`](super::estale_retry::EstaleRetries). It
    /// follows replacements until it has opened a version, which the kernel then finds open.
    async fn open_by_name(self: &Arc<Self>, kernel_parent: u64, name: &[u8], reply: Reply) {
        let parent = self.root.to_namespace(kernel_parent);
        for _ in 0..REPLACEMENTS {
            let node = match self.client.metadata().cached_lookup(parent, name) {
                CachedLookup::Hit(node) => node,
                CachedLookup::Miss => match self.client.metadata().lookup(parent, name).await {
                    Ok(node) => node,
                    Err(_) => break,
                },
                CachedLookup::Negative => break,
            };
            if node.kind != Kind::File {
                break;
            }
            match self.client.open_to_read(&node).await {
                Ok(file) => {
                    // With `consistency = always` every open asks for itself.
                    if !node.is_always_checked() {
                        self.files.retries.keep(&node, file);
                    }
                    return self.show(&node, reply);
                }
                Err(error) if error.is_version_gone() => {}
                // It shows again when it is opened.
                Err(_) => break,
            }
        }
        self.ask_for_name(kernel_parent, name, reply).await;
    }

    /// The lookup before the second open of a path for writing. What it finds is made one that can be written to,
    /// whatever becomes of the object meanwhile.
    async fn write_by_name(self: &Arc<Self>, kernel_parent: u64, name: &[u8], reply: Reply) {
        let thread = reply.caller().thread;
        match self.redirect_name(self.root.to_namespace(kernel_parent), name, thread).await {
            Some(node) => {
                self.files.retries.writer_arrived(thread);
                self.show(&node, reply);
            }
            None => self.ask_for_name(kernel_parent, name, reply).await,
        }
    }

    /// Has a name lead to a file that can be written to, which a thread is about to open; `None` where that cannot be,
    /// or need not.
    pub(super) async fn redirect_name(&self, parent: u64, name: &[u8], thread: u32) -> Option<Arc<Node>> {
        for _ in 0..REPLACEMENTS {
            let node = self.client.metadata().lookup(parent, name).await.ok().filter(|node| node.kind == Kind::File)?;
            match self.client.open(&node, Access::Write, thread).await {
                Ok(Opened::Redirected(node)) => return Some(node),
                Ok(Opened::File(file)) => {
                    self.files.retries.keep(&node, file);
                    return Some(node);
                }
                Err(error) if error.is_version_gone() => {}
                Err(_) => return None,
            }
        }
        None
    }

    async fn ask_for_name(&self, kernel_parent: u64, name: &[u8], reply: Reply) {
        let parent = self.root.to_namespace(kernel_parent);
        let mut changes = self.invalidations.listings().changes();
        let is_kept = match self.client.metadata().lookup(parent, name).await {
            Ok(node) => {
                // Changes until now are known to the node's trust; the absence of a name knows none.
                changes = self.invalidations.listings().changes();
                self.show(&node, reply);
                !node.is_strict()
            }
            Err(ClientError::NotFound(_)) => self.show_absence(parent, name, reply),
            Err(error) => match self.virtual_child(parent, name) {
                // Whoever wants to know why no master answers must find it.
                Some(entry) => return reply.entry(&entry),
                None => return self.failures.answer(reply, "lookup", &error),
            },
        };
        if is_kept {
            self.repeat_if_changed(changes, kernel_parent, name);
        }
    }

    /// Answers with what a name leads to.
    fn show(&self, node: &Node, reply: Reply) {
        self.files.retries.note_name(node);
        reply.entry(&self.entry_of(node));
    }

    /// Answers that a name leads nowhere; whether the kernel keeps that.
    fn show_absence(&self, parent: u64, name: &[u8], reply: Reply) -> bool {
        if let Some(entry) = self.virtual_child(parent, name) {
            reply.entry(&entry);
            return false;
        }
        let absence = self.absence(parent, name);
        reply.no_entry(absence);
        !absence.is_zero()
    }

    /// Without opens it is the lookup of a name that `consistency = always` makes ask the bucket.
    pub(super) fn is_checked_by_lookup(&self, node: &Node) -> bool {
        self.files.has_no_open() && !node.is_directory() && node.is_always_checked()
    }

    async fn check(&self, node: &Node, reply: Reply) {
        match self.client.metadata().current(node).await {
            Ok(current) => self.show(&current, reply),
            Err(ClientError::NotFound(_)) => reply.no_entry(Duration::ZERO),
            Err(error) => self.failures.answer(reply, "lookup", &error),
        }
    }

    /// An invalidation that came while we answered may have reached the kernel before the answer did.
    fn repeat_if_changed(&self, changes: u64, kernel_parent: u64, name: &[u8]) {
        if self.invalidations.listings().changes() != changes {
            self.invalidations.repeat_entry(kernel_parent, name);
        }
    }

    /// How long the kernel may believe that the name does not exist.
    fn absence(&self, parent: u64, name: &[u8]) -> Duration {
        let trust = self.client.metadata().trust_absence(parent);
        let absence = self.attr_defaults.negative_timeout.min(trust);
        if absence > FORGOTTEN_SOON && !self.root.remembers(parent, name) { FORGOTTEN_SOON } else { absence }
    }
}

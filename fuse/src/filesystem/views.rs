//! Views of the cluster, below `.views` in the root of the mount: for programs, and for the kernel's EROFS.
//!
//! ```text
//! .views/NAME         the tree of a view, from its image
//! .views/NAME@image   a link to the image, a file of this host
//! .views/NAME@1 …     its devices, which have the contents: as many as there are, for root
//! ```
//!
//! A listing shows the trees alone: whoever searches all files is not to read the devices. Nothing is kept about a file
//! but its node id, which has the id of the view and a number in it. So what the kernel has open outlives the process
//! that serves it, and where the kernel opens files by itself nothing is missing.
//!
//! EROFS takes a short answer for the end of a device and fills up with zeros: so a read is answered wholly, or with
//! `EIO`.
//!
//! What is in a view never changes, so the kernel keeps it. Names of views it keeps for a second, since a view that was
//! deleted may be made anew. A mount of a part of the namespace shows the views of that part.
//!
//! Images are files of this host: an event loop looks into them as far as they are in memory, and leaves the rest to
//! threads that may wait for a disk.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_client::view::{ImageFile, OpenView};
use cavern_client::{Access, ClientError};
use cavern_conf::host;
use cavern_erofs::{DirectoryEntry as ImageEntry, Error as ImageError, Image, Inode, Kind, Place};
use cavern_proto::master::View;
use cavern_proto::view_file::DEVICES_MAX;
use cavern_proto::{CHUNK_BYTES, NAME_MAX, ROOT_INODE};

use super::attr_defaults::{blocks, time};
use super::directory::ReaddirKind;
use super::export::Handle;
use super::open::access;
use super::parts::Inner;
use super::virtual_entries::list;
use super::xattr::{is_kept, is_listed};
use crate::kernel::abi::{Attr, AttrOut, EntryOut, ROOT_NODE, fopen};
use crate::kernel::directory::{Added, DirectoryEntry};
use crate::kernel::{DirectoryPage, Operation, READ_MAX, Reply};
use crate::trace::Target;

pub(super) const DIRECTORY_NAME: &[u8] = b".views";

/// Node ids of views have this bit, and the id of the view before a number of so many bits.
const BIT: u64 = 1 << 63;
const NUMBER_BITS: u32 = 40;
/// The number of the link to the image; devices have their own, from 1 on.
const IMAGE: u64 = 0;
/// Numbers from here on are inodes of the image, the first one its root.
const FIRST_INODE: u64 = 128;

/// Seconds for which the kernel believes what does not change, and the names of views.
const FOR_LONG: u64 = 365 * 86_400;
const NAME_VALID: u64 = 1;

/// A file of a view, or the directory of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ViewNode {
    /// 0 for the directory of all.
    view: u32,
    number: u64,
}

impl ViewNode {
    const TOP: Self = Self { view: 0, number: FIRST_INODE };

    /// Of a node id with the bit.
    pub(super) fn of(node: u64) -> Self {
        Self { view: ((node & !BIT) >> NUMBER_BITS) as u32, number: node & ((1 << NUMBER_BITS) - 1) }
    }

    fn id(self) -> u64 {
        BIT | u64::from(self.view) << NUMBER_BITS | self.number
    }

    /// An inode of the same view.
    fn inode(self, number: u64) -> Result<Self, ImageError> {
        let is_inode = (FIRST_INODE..1 << NUMBER_BITS).contains(&number);
        let what = "it has the number of something else";
        if is_inode { Ok(Self { number, ..self }) } else { Err(ImageError::Corrupt { nid: number, what }) }
    }

    fn is_inode(self) -> bool {
        self.number >= FIRST_INODE
    }

    fn device(self) -> Option<u16> {
        u16::try_from(self.number).ok().filter(|device| (1..FIRST_INODE).contains(&u64::from(*device)))
    }

    /// Whether a name leads to it directly from `.views`.
    fn is_named(self) -> bool {
        self.number <= FIRST_INODE
    }
}

/// The view that a name of `.views` is of, and the number in it.
fn parsed(name: &[u8]) -> Option<(&str, u64)> {
    let name = std::str::from_utf8(name).ok().filter(|name| !name.starts_with('.'))?;
    match name.split_once('@') {
        None => Some((name, FIRST_INODE)),
        Some((view, "image")) => Some((view, IMAGE)),
        Some((view, text)) => {
            let device = text.parse().ok().filter(|device: &u64| device.to_string() == text)?;
            (1..=DEVICES_MAX as u64).contains(&device).then_some((view, device))
        }
    }
}

/// Bytes from an offset to an end, of so many that are asked for.
fn rest(end: u64, offset: u64, length: usize) -> usize {
    usize::try_from(end.saturating_sub(offset)).map_or(length, |left| left.min(length))
}

/// Whether a path of the namespace is another one, or below it.
fn is_within(path: &str, top: &str) -> bool {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    top.split('/').filter(|name| !name.is_empty()).all(|name| names.next() == Some(name))
}

/// Reads where nothing has to be waited for, up to the end.
fn read_now(view: &OpenView, node: ViewNode, offset: u64, into: &mut [u8]) -> Option<usize> {
    if let Some(device) = node.device() {
        let length = rest(view.device_bytes(device)?, offset, into.len());
        return (length == 0 || view.read_device_now(device, offset, &mut into[..length])).then_some(length);
    }
    let asked = into.len();
    let found = view.look_now(|_, image| {
        let file = image.inode(node.number)?;
        let length = rest(file.size, offset, asked);
        Ok((length, image.extents(&file, offset..offset.saturating_add(length as u64))?))
    });
    let (length, extents) = found?.ok()?;
    let mut left = &mut into[..length];
    for extent in extents {
        let (part, behind) = left.split_at_mut_checked(usize::try_from(extent.length).ok()?)?;
        let is_read = match extent.place {
            Place::Hole => {
                part.fill(0);
                true
            }
            // No view has contents in its image.
            Place::Device { device: 0, .. } => false,
            Place::Device { device, offset } => view.read_device_now(device, offset, part),
        };
        if !is_read {
            return None;
        }
        left = behind;
    }
    left.is_empty().then_some(length)
}

impl Inner {
    /// `.views` itself, as a lookup finds it.
    pub(super) fn views_entry(&self) -> EntryOut {
        EntryOut { entry_valid: FOR_LONG, ..self.view_entry(ViewNode::TOP, self.views_attr()) }
    }

    fn views_attr(&self) -> Attr {
        self.own_attr(ViewNode::TOP.id(), libc::S_IFDIR | 0o555, 2)
    }

    /// The attributes of what a mount has of its own.
    pub(super) fn own_attr(&self, ino: u64, mode: u32, nlink: u32) -> Attr {
        let owner = &self.attr_defaults.bucket;
        Attr { nlink, uid: owner.uid, gid: owner.gid, ..attr_of(ino, mode, 0, time(host::wall_ns())) }
    }

    fn view_entry(&self, node: ViewNode, attr: Attr) -> EntryOut {
        EntryOut {
            nodeid: node.id(),
            generation: self.generations.of(ROOT_INODE),
            entry_valid: if node.is_named() { NAME_VALID } else { FOR_LONG },
            attr_valid: FOR_LONG,
            attr,
            ..EntryOut::default()
        }
    }

    /// Answers whatever is asked of one of these nodes.
    pub(super) fn serve_view(
        self: &Arc<Self>,
        node: ViewNode,
        operation: Operation<'_>,
        reply: Reply,
        payload: &mut [u8],
    ) {
        match operation {
            Operation::Lookup { name } if name.len() > NAME_MAX => reply.error(libc::ENAMETOOLONG),
            Operation::Lookup { name } if node == ViewNode::TOP => self.lookup_view(name, reply),
            Operation::Lookup { name } => self.lookup_in_view(node, name, reply),
            Operation::Getattr => self.stat_view(node, reply, |attributes, reply| reply.attr(attributes)),
            Operation::Statx => self.stat_view(node, reply, |attributes, reply| reply.statx(attributes, None)),
            Operation::Open { flags } if access(flags.cast_signed()) == Access::Write => {
                reply.error(libc::EROFS);
            }
            // There is nothing to be closed.
            Operation::Open { .. } => {
                let is_kept = node.is_inode() && !self.features.direct;
                let how = if is_kept { fopen::KEEP_CACHE } else { fopen::DIRECT_IO };
                let _ = reply.opened(0, how | fopen::NOFLUSH);
            }
            Operation::Opendir if node == ViewNode::TOP => {
                let _ = reply.opened(0, 0);
            }
            Operation::Opendir => {
                let _ = reply.opened(0, fopen::CACHE_DIR | fopen::KEEP_CACHE);
            }
            Operation::Read { offset, size, .. } => self.read_view(node, offset, size, reply, payload),
            Operation::Readdir { offset, size, .. } => self.list_view(node, offset, size, ReaddirKind::Names, reply),
            Operation::Readdirplus { offset, size, .. } => {
                self.list_view(node, offset, size, ReaddirKind::Entries, reply);
            }
            Operation::Readlink if node != ViewNode::TOP => self.with_image(
                node,
                reply,
                move |view, image| match node.number {
                    IMAGE => Ok(view.image_path().as_os_str().as_encoded_bytes().to_vec()),
                    number => image.target(&image.inode(number)?),
                },
                |_, target, reply| reply.bytes(&target),
            ),
            Operation::Getxattr { name, size } if self.has_xattrs(node) && is_kept(name, self.features.posix_acl) => {
                let name = name.to_vec();
                self.with_xattrs_of_view(node, reply, move |xattrs, reply| {
                    match xattrs.iter().find(|(known, _)| *known == name) {
                        Some((_, value)) => reply.xattr(value, size),
                        None => reply.error(libc::ENODATA),
                    }
                });
            }
            Operation::Listxattr { size } if self.has_xattrs(node) => {
                let posix_acl = self.features.posix_acl;
                self.with_xattrs_of_view(node, reply, move |xattrs, reply| {
                    let shown = xattrs.into_iter().map(|(name, _)| name);
                    let shown = shown.filter(|name| is_listed(name, reply.caller(), posix_acl));
                    let names: Vec<u8> = shown.flat_map(|name| [name, vec![0]].concat()).collect();
                    reply.xattr(&names, size);
                });
            }
            operation => self.serve_unchangeable(operation, reply),
        }
    }

    /// Whether a view is of something in the part of the namespace that is mounted here.
    fn shows(&self, view: &View) -> bool {
        let path = || self.client.views().path(view).unwrap_or_default();
        self.root.path() == "/" || is_within(&path(), self.root.path())
    }

    /// A view that is open in this process, and shown here.
    fn opened_view(&self, id: u32) -> Option<Arc<OpenView>> {
        self.client.views().opened(id).filter(|view| self.shows(view.view()))
    }

    async fn open_view(&self, id: u32) -> Result<Arc<OpenView>, ClientError> {
        let view = self.client.views().open_id(id).await?;
        if self.shows(view.view()) { Ok(view) } else { Err(ClientError::NotFound(format!("view {id}"))) }
    }

    /// Has something found in the image of the view of a node: at once where that takes no waiting.
    fn with_image<T: Send + 'static>(
        self: &Arc<Self>,
        node: ViewNode,
        reply: Reply,
        find: impl Fn(&OpenView, &Image<ImageFile>) -> Result<T, ImageError> + Send + 'static,
        answer: impl FnOnce(&Self, T, Reply) + Send + 'static,
    ) {
        if let Some(view) = self.opened_view(node.view)
            && let Some(found) = view.look_now(&find)
        {
            return self.answer_with("view", found, reply, |found, reply| answer(self, found, reply));
        }
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let found = async { this.open_view(node.view).await?.look(find).await };
            match found.await {
                Err(ClientError::NotFound(_)) => reply.error(libc::ESTALE),
                found => this.answer_with("view", found, reply, |found, reply| answer(&this, found, reply)),
            }
        });
    }

    /// Logs what the client has not logged.
    fn log_failed(&self, view: u32, cause: &dyn Display) {
        let name = self.view_name(view);
        self.failures.log("view", libc::EIO, &format_args!("view {name} cannot be read: {cause}"));
    }

    /// As a person knows it.
    fn view_name(&self, id: u32) -> String {
        self.client.views().opened(id).map_or_else(|| format!("number {id}"), |view| view.view().name.clone())
    }

    fn lookup_view(self: &Arc<Self>, name: &[u8], reply: Reply) {
        if Handle::of_name(name) == Some(Handle::Itself) {
            return reply.entry(&self.views_entry());
        }
        let Some((name, number)) = parsed(name) else { return reply.error(libc::ENOENT) };
        let (this, name) = (Arc::clone(self), name.to_owned());
        reply.defer(move |reply| async move {
            let found = async {
                let (views, none) = (this.client.views(), || ClientError::NotFound(name.clone()));
                let view = Some(views.named(&name).await?).filter(|view| this.shows(view)).ok_or_else(none)?;
                let view = views.open(&view).await?;
                let node = ViewNode { view: view.view().id, number };
                if node.device().is_some_and(|device| view.device_bytes(device).is_none()) {
                    return Err(none());
                }
                let attr = view.look(move |view, image| attr_in_view(view, image, node)).await?;
                Ok(this.view_entry(node, attr))
            };
            match found.await {
                Err(ClientError::NotFound(_)) => reply.error(libc::ENOENT),
                found => this.answer_with("view", found, reply, |entry, reply| reply.entry(&entry)),
            }
        });
    }

    fn lookup_in_view(self: &Arc<Self>, node: ViewNode, name: &[u8], reply: Reply) {
        match Handle::of_name(name) {
            Some(Handle::Itself) => {
                return self.with_image(
                    node,
                    reply,
                    move |view, image| attr_in_view(view, image, node),
                    move |this, attr, reply| reply.entry(&this.view_entry(node, attr)),
                );
            }
            Some(Handle::Parent) if node.is_named() => return reply.entry(&self.views_entry()),
            _ if !node.is_inode() => return reply.error(libc::ENOTDIR),
            _ => {}
        }
        let name = name.to_vec();
        self.with_image(
            node,
            reply,
            move |_, image| match image.lookup(&image.inode(node.number)?, &name)? {
                Some(inode) => Ok(Some((node.inode(inode.nid)?, inode))),
                None => Ok(None),
            },
            |this, found, reply| match found {
                Some((node, inode)) => reply.entry(&this.view_entry(node, attr_of_inode(node, &inode))),
                None => reply.no_entry(Duration::from_secs(FOR_LONG)),
            },
        );
    }

    fn stat_view(
        self: &Arc<Self>,
        node: ViewNode,
        reply: Reply,
        answer: impl FnOnce(&AttrOut, Reply) + Send + 'static,
    ) {
        let attributes = |attr| AttrOut { attr_valid: FOR_LONG, attr, ..AttrOut::default() };
        if node == ViewNode::TOP {
            return answer(&attributes(self.views_attr()), reply);
        }
        self.with_image(
            node,
            reply,
            move |view, image| attr_in_view(view, image, node),
            move |_, attr, reply| answer(&attributes(attr), reply),
        );
    }

    fn list_view(self: &Arc<Self>, node: ViewNode, offset: u64, size: u32, kind: ReaddirKind, reply: Reply) {
        if node == ViewNode::TOP {
            return self.list_views(offset, size, kind, reply);
        }
        let this = Arc::clone(self);
        self.with_image(
            node,
            reply,
            move |_, image| this.page_of_view(image, node, offset, size, kind),
            |_, page, reply| reply.bytes(page.as_bytes()),
        );
    }

    /// The trees, in the order of their ids: what comes and goes meanwhile moves no other.
    fn list_views(self: &Arc<Self>, offset: u64, size: u32, kind: ReaddirKind, reply: Reply) {
        let this = Arc::clone(self);
        reply.defer(move |reply| async move {
            let views = this.client.views().list().await;
            this.answer_with("readdir", views, reply, |views, reply| {
                let above = [(1, &b"."[..], ViewNode::TOP.id(), libc::S_IFDIR), (2, b"..", ROOT_NODE, libc::S_IFDIR)];
                let mut entries: Vec<_> = above.into_iter().collect();
                entries.extend(views.iter().filter(|view| this.shows(view)).map(|view| {
                    let root = ViewNode { view: view.id, number: FIRST_INODE };
                    (u64::from(view.id) + 2, view.name.as_bytes(), root.id(), libc::S_IFDIR)
                }));
                entries.sort_unstable();
                list(entries.into_iter(), offset, size, kind, reply);
            });
        });
    }

    fn page_of_view(
        &self,
        image: &Image<ImageFile>,
        node: ViewNode,
        offset: u64,
        size: u32,
        kind: ReaddirKind,
    ) -> Result<DirectoryPage, ImageError> {
        let mut page = DirectoryPage::new(READ_MAX.min(size as usize));
        let (directory, mut failed) = (image.inode(node.number)?, None);
        image.read_directory(&directory, offset, &mut |found| {
            match self.add_of_view(&mut page, image, (node, &directory), found, kind) {
                Ok(Added::Yes) => return ControlFlow::Continue(()),
                Ok(Added::Full) => {}
                Err(cause) => failed = Some(cause),
            }
            ControlFlow::Break(())
        })?;
        failed.map_or(Ok(page), Err)
    }

    fn add_of_view(
        &self,
        page: &mut DirectoryPage,
        image: &Image<ImageFile>,
        (above, directory): (ViewNode, &Inode),
        found: &ImageEntry<'_>,
        kind: ReaddirKind,
    ) -> Result<Added, ImageError> {
        let (node, mode) = (above.inode(found.nid)?, u32::from(found.kind.mode()));
        let entry = DirectoryEntry { ino: node.id(), next_offset: found.next, mode, name: found.name };
        if kind == ReaddirKind::Names {
            return Ok(page.add(entry));
        }
        if Handle::of_name(found.name).is_some() {
            return Ok(page.add_plus(&EntryOut::default(), entry));
        }
        // Of a directory it is to be known that it leads back.
        let inode = match found.kind {
            Kind::Directory => image.lookup(directory, found.name)?,
            _ => Some(image.inode(found.nid)?).filter(|inode| inode.kind == found.kind),
        };
        let what = "it is not of the kind that its name says";
        let inode = inode.ok_or(ImageError::Corrupt { nid: found.nid, what })?;
        Ok(page.add_plus(&self.view_entry(node, attr_of_inode(node, &inode)), entry))
    }

    fn has_xattrs(&self, node: ViewNode) -> bool {
        self.features.xattrs && node.is_inode() && node != ViewNode::TOP
    }

    fn with_xattrs_of_view(
        self: &Arc<Self>,
        node: ViewNode,
        reply: Reply,
        answer: impl FnOnce(Vec<(Vec<u8>, Vec<u8>)>, Reply) + Send + 'static,
    ) {
        self.with_image(
            node,
            reply,
            move |_, image| image.xattrs(&image.inode(node.number)?),
            move |_, xattrs, reply| answer(xattrs, reply),
        );
    }

    fn read_view(self: &Arc<Self>, node: ViewNode, offset: u64, size: u32, reply: Reply, payload: &mut [u8]) {
        let length = payload.len().min(size as usize);
        let into = &mut payload[..length];
        let read = self.opened_view(node.view).and_then(|view| read_now(&view, node, offset, into));
        if let Some(read) = read {
            return reply.bytes(&into[..read]);
        }
        let which = node.device().map_or_else(String::new, |device| format!("@{device}"));
        let name = format!(".views/{}{which}", self.view_name(node.view)).into_bytes();
        let inode = self.root.to_namespace(ROOT_NODE);
        let target = Target { inode, name, range: Some((offset, length)), ..Target::default() };
        let (this, reply) = (Arc::clone(self), reply.traced(&self.trace.requests, target));
        let task = move |reply: Reply| async move {
            match this.read_waiting(node, offset, length).await {
                Some(bytes) => reply.bytes(&bytes),
                None => reply.error(libc::EIO),
            }
        };
        reply.begin(task);
    }

    /// All bytes of a range, up to the end; `None` where that is logged, or has been.
    async fn read_waiting(&self, node: ViewNode, offset: u64, length: usize) -> Option<Bytes> {
        let failed = |cause: &dyn Display| self.log_failed(node.view, cause);
        let view = self.open_view(node.view).await.map_err(|error| failed(&error)).ok()?;
        // The client logs its own errors.
        let Some(device) = node.device() else { return view.read_file(node.number, offset, length).await.ok() };
        let Some(bytes) = view.device_bytes(device) else {
            failed(&format_args!("it has no device {device}"));
            return None;
        };
        match rest(bytes, offset, length) {
            0 => Some(Bytes::new()),
            length => view.read_device(device, offset, length).await.ok(),
        }
    }
}

/// Of what has a file's look and no more.
fn attr_of(ino: u64, mode: u32, size: u64, (seconds, nanoseconds): (u64, u32)) -> Attr {
    Attr {
        ino,
        size,
        blocks: blocks(None, size),
        atime: seconds,
        mtime: seconds,
        ctime: seconds,
        atimensec: nanoseconds,
        mtimensec: nanoseconds,
        ctimensec: nanoseconds,
        mode,
        nlink: 1,
        blksize: CHUNK_BYTES,
        ..Attr::default()
    }
}

fn attr_of_inode(node: ViewNode, inode: &Inode) -> Attr {
    let attributes = &inode.attributes;
    let mode = u32::from(inode.kind.mode() | attributes.permissions);
    let time = (attributes.mtime.seconds.cast_unsigned(), attributes.mtime.nanoseconds);
    Attr {
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: inode.device_number(),
        ..attr_of(node.id(), mode, inode.size, time)
    }
}

/// Who reads a device reads all files, whatever their modes: it is root's.
fn attr_in_view(view: &OpenView, image: &Image<ImageFile>, node: ViewNode) -> Result<Attr, ImageError> {
    let made = time(view.view().created_ns);
    if node.number == IMAGE {
        let length = view.image_path().as_os_str().len() as u64;
        return Ok(attr_of(node.id(), libc::S_IFLNK | 0o777, length, made));
    }
    if let Some(device) = node.device() {
        let what = "there is no such device";
        let bytes = view.device_bytes(device).ok_or(ImageError::Corrupt { nid: node.number, what })?;
        return Ok(attr_of(node.id(), libc::S_IFREG | 0o400, bytes, made));
    }
    Ok(attr_of_inode(node, &image.inode(node.number)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_says_of_which_view_it_is_and_what_of_it() {
        let device = ViewNode { view: (1 << 23) - 2, number: DEVICES_MAX as u64 };
        let inode = ViewNode { view: 7, number: (1 << NUMBER_BITS) - 1 };
        for node in [ViewNode::TOP, device, inode, ViewNode { view: 1, number: IMAGE }] {
            assert_eq!(ViewNode::of(node.id()), node);
            assert!(node.id() >= BIT && node.id() < u64::MAX - 15, "{node:?}");
        }
        assert_eq!((device.device(), inode.device(), ViewNode::TOP.device()), (Some(100), None, None));
        assert!(!device.is_inode() && inode.is_inode() && device.is_named() && !inode.is_named());
        assert_eq!(inode.inode(FIRST_INODE).unwrap(), ViewNode { view: 7, number: FIRST_INODE });
        // No image has a file with the node of a device.
        for number in [0, 1, FIRST_INODE - 1, 1 << NUMBER_BITS] {
            assert!(inode.inode(number).is_err(), "{number}");
        }
    }

    #[test]
    fn a_name_is_that_of_a_tree_an_image_or_a_device() {
        for (name, found) in [
            ("a", Some(("a", FIRST_INODE))),
            ("a.b-1@image", Some(("a.b-1", IMAGE))),
            ("a@1", Some(("a", 1))),
            ("a@100", Some(("a", 100))),
            ("a@0", None),
            ("a@101", None),
            ("a@01", None),
            ("a@+1", None),
            ("a@", None),
            ("a@1@2", None),
            (".a", None),
            ("..", None),
        ] {
            assert_eq!(parsed(name.as_bytes()), found, "{name}");
        }
        assert_eq!(parsed(b"\xff"), None);
    }

    #[test]
    fn a_mount_of_a_part_of_the_namespace_shows_the_views_of_that_part() {
        for (path, top) in [("/a/b", "/"), ("/a/b", "/a"), ("/a", "/a/"), ("/a/b/c", "//a/b"), ("/", "/")] {
            assert!(is_within(path, top), "{path} in {top}");
        }
        for (path, top) in [("/a", "/a/b"), ("/ab", "/a"), ("/b/a", "/a"), ("/", "/a"), ("", "/a")] {
            assert!(!is_within(path, top), "{path} in {top}");
        }
    }

    #[test]
    fn a_read_ends_where_its_file_does() {
        assert_eq!((rest(10, 4, 100), rest(10, 4, 5), rest(10, 10, 5), rest(10, 11, 5)), (6, 5, 0, 0));
        assert_eq!((rest(u64::MAX, 0, usize::MAX), rest(u64::MAX, 1, 7)), (usize::MAX, 7));
    }
}

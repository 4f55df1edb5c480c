//! Opening and making files: here, and nowhere else, it is decided what stands behind a file.

use std::sync::Arc;

use bytes::Bytes;
use cavern_posix::mode::MODE_BITS;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, CreateInode, Kind, Naming, User};
use rustix::io::Errno;

use super::{Backing, Effects, File, StagedHandle};
use crate::error::ClientError;
use crate::metadata::{Changed, Node};
use crate::session::Client;
use crate::staged::{Creation, StagedFile, StagedFiles};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Or to be cut.
    Write,
}

/// What an open comes to.
pub enum Opened {
    File(File),
    /// An inode of a bucket's mount is one version of an object, for ever, and whoever reads it must not see what is
    /// written now: so its name has come to lead to this node on this client, which is to be opened in its place.
    Redirected(Arc<Node>),
}

/// A file to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewFile<'a> {
    /// Empty for one without a name.
    pub name: &'a [u8],
    /// Permission bits, and those of them that are not to be set.
    pub mode: u32,
    pub umask: u32,
    pub uid: u32,
    pub gid: u32,
    /// `O_EXCL`: nothing may be there before; of a file without a name, it never gets one.
    pub is_exclusive: bool,
    /// Who makes it, and opens what is there if somebody else has been faster; 0 for nobody in particular.
    pub thread: u32,
    /// By whom that is checked, where the mount limits users.
    pub user: Option<&'a User>,
}

/// A file that has been made, open.
pub struct CreatedFile {
    pub node: Arc<Node>,
    pub file: File,
    pub effects: Effects,
}

impl From<Backing> for File {
    fn from(backing: Backing) -> Self {
        Self { backing }
    }
}

impl Client {
    /// Opens a file without asking anybody; `None`: use `open`. The thread is the one that will open what the name
    /// leads to if this one is redirected.
    pub fn open_cached(&self, node: &Arc<Node>, access: Access, thread: u32) -> Option<Result<Opened, ClientError>> {
        if StagedFiles::is_staged(node.inode) {
            return Some(self.open_staged(node, thread));
        }
        if node.is_directory() {
            return Some(Err(ClientError::IsADirectory(node.to_string())));
        }
        if access == Access::Write
            && let Err(error) = check_changeable(node)
        {
            return Some(Err(error));
        }
        if node.is_fs_mode() {
            let file = self.contents().open_cached(node)?;
            return Some(Ok(Opened::File(Backing::FsFile(file).into())));
        }
        if access == Access::Write {
            return Some(self.begin_to_write(node, thread));
        }
        let file = self.files().open_cached(node)?;
        Some(Ok(Opened::File(Backing::Object(file).into())))
    }

    /// Opens a file. A small object is made present, so that a version that is gone shows here as `Stale`; the name
    /// leads to the new version by then. Bounded by `client.read_timeout`, and each question to the master by
    /// `client.metadata_timeout`.
    ///
    /// # Errors
    /// `EROFS` for writing to what can only be read.
    pub async fn open(&self, node: &Arc<Node>, access: Access, thread: u32) -> Result<Opened, ClientError> {
        if let Some(opened) = self.open_cached(node, access, thread) {
            return opened;
        }
        let backing = if node.is_fs_mode() {
            Backing::FsFile(self.contents().open(node).await?)
        } else {
            Backing::Object(self.files().open(node).await?)
        };
        Ok(Opened::File(backing.into()))
    }

    /// Opens a file to be written, and to be read perhaps, in a mount that limits users: the master says whether the
    /// user may do so, and takes what is written then, whatever becomes of the file's mode.
    ///
    /// # Errors
    /// Those of [`Client::open`], and `EACCES`.
    pub async fn open_to_write(&self, node: &Arc<Node>, read: bool, user: User) -> Result<Opened, ClientError> {
        if node.is_directory() {
            return Err(ClientError::IsADirectory(node.to_string()));
        }
        check_changeable(node)?;
        let file = self.contents().open(node).await?;
        file.open_to_write(read, user).await?;
        Ok(Opened::File(Backing::FsFile(file).into()))
    }

    /// Opens a file to be read, in a mount that limits users. Of one who counts as himself the kernel has said that he
    /// may do so; of others the master is asked.
    ///
    /// # Errors
    /// Those of [`Client::open`], and `EACCES`.
    pub async fn open_to_read_by(&self, node: &Arc<Node>, user: &User, thread: u32) -> Result<Opened, ClientError> {
        self.metadata().check_readable(node, user).await?;
        let opened = self.open(node, Access::Read, thread).await?;
        if let Opened::File(File { backing: Backing::FsFile(file) }) = &opened {
            file.is_opened_by(user);
        }
        Ok(opened)
    }

    /// Opens a file to be read.
    pub async fn open_to_read(&self, node: &Arc<Node>) -> Result<File, ClientError> {
        match self.open(node, Access::Read, 0).await? {
            Opened::File(file) => Ok(file),
            Opened::Redirected(node) => Err(ClientError::Stale(node.to_string())),
        }
    }

    /// Opens a file that the process before had open. For whom is not known any more where the mount limits users:
    /// masters are asked in the name of its owner.
    pub async fn open_again(&self, node: &Arc<Node>) -> Result<File, ClientError> {
        let file = self.open_to_read(node).await?;
        if let (Backing::FsFile(content), true) = (&file.backing, node.limits_users()) {
            content.is_opened_by(&node.owner());
        }
        Ok(file)
    }

    /// A handle of a version of an object without any question: whether it is still there shows at a read. `None` of
    /// other files.
    pub fn open_unchecked(&self, node: &Arc<Node>) -> Option<File> {
        if node.is_fs_mode() || StagedFiles::is_staged(node.inode) {
            return None;
        }
        Some(Backing::Object(self.files().handle(node).ok()?).into())
    }

    /// Whether a failed open of a node is counted and logged by the client, which knows what it tried.
    pub fn logs_failed_open(&self, node: &Node) -> bool {
        !node.is_fs_mode() && !StagedFiles::is_staged(node.inode)
    }

    fn open_staged(&self, node: &Node, thread: u32) -> Result<Opened, ClientError> {
        let file = self.staged().get(node.inode).ok_or_else(|| ClientError::Stale(node.to_string()))?;
        let handle = StagedHandle::open(self.staged().clone(), file, thread);
        Ok(Opened::File(Backing::Staged(Arc::new(handle)).into()))
    }

    fn begin_to_write(&self, node: &Arc<Node>, thread: u32) -> Result<Opened, ClientError> {
        self.metadata().check_change(node)?;
        let file = self.staged().begin(node, Some(thread))?;
        Ok(Opened::Redirected(file.node()))
    }

    /// Makes a file in a directory, and opens it. The bucket of a cache-mode mount has it when it is flushed.
    ///
    /// # Errors
    /// `EEXIST` if something of that name is there. Of a bucket, and if the file was not to be exclusive, the thread is
    /// expected to open what is there for writing.
    pub async fn create(&self, directory: &Node, new: NewFile<'_>) -> Result<CreatedFile, ClientError> {
        check_changeable(directory)?;
        if directory.is_in_writable_bucket() {
            self.metadata().check_change(directory)?;
            let creation = if new.is_exclusive { Creation::Exclusive } else { Creation::Replacing };
            let file = self.staged().create(directory, new.name, creation, new.thread).await?;
            file.set_new_attributes(directory, &new_inode(directory, new, Naming::Named), (new.uid, new.gid));
            let node = file.node();
            return Ok(CreatedFile { node, file: self.made_staged(file), effects: Effects::default() });
        }
        let changed = self.create_inode(directory, new, Naming::Named).await?;
        let attr = made(&changed)?;
        let node = match &changed.node {
            Some(node) => Arc::clone(node),
            None => Arc::new(Node::nameless(attr, directory.mount.clone())),
        };
        let file = self.contents().open_new(&node, attr, new.user).await?;
        let effects = Effects { listing: Some(directory.inode) };
        Ok(CreatedFile { node, file: Backing::FsFile(file).into(), effects })
    }

    /// Begins a file that takes the place of the object that has its name when it is flushed.
    pub(super) fn replace_object(&self, directory: &Node, name: &[u8]) -> Result<File, ClientError> {
        Ok(self.made_staged(self.staged().replace(directory, name)?))
    }

    fn made_staged(&self, file: Arc<StagedFile>) -> File {
        // It has been counted as open since it was made.
        Backing::Staged(Arc::new(StagedHandle { files: self.staged().clone(), file })).into()
    }

    /// Makes a file without a name (`O_TMPFILE`): it is gone with the last who has it open, unless it gets a name.
    ///
    /// # Errors
    /// `EOPNOTSUPP` in buckets.
    pub async fn create_nameless(&self, directory: &Node, new: NewFile<'_>) -> Result<CreatedFile, ClientError> {
        check_changeable(directory)?;
        if directory.is_in_writable_bucket() {
            let reason = format!("{directory}: what has no name cannot be an object");
            return Err(ClientError::Refused { errno: Errno::OPNOTSUPP.raw_os_error(), reason });
        }
        let naming = if new.is_exclusive { Naming::NamelessForEver } else { Naming::Nameless };
        let changed = self.create_inode(directory, new, naming).await?;
        let attr = made(&changed)?;
        let node = Arc::new(Node::nameless(attr, directory.mount.clone()));
        let file = self.contents().open_nameless(&node, attr, new.user)?;
        Ok(CreatedFile { node, file: Backing::FsFile(file).into(), effects: Effects::default() })
    }

    async fn create_inode(&self, directory: &Node, new: NewFile<'_>, naming: Naming) -> Result<Changed, ClientError> {
        let create = Change::Create(new_inode(directory, new, naming));
        self.metadata().change_by(create, (new.uid, new.gid), new.user.cloned()).await
    }
}

fn new_inode(directory: &Node, new: NewFile<'_>, naming: Naming) -> CreateInode {
    CreateInode {
        parent: directory.inode,
        name: Bytes::copy_from_slice(new.name),
        kind: Kind::File.into(),
        mode: new.mode & MODE_BITS,
        umask: new.umask,
        naming: naming.into(),
        ..CreateInode::default()
    }
}

/// Refuses a change of something that is only read, or above the mounts.
pub(crate) fn check_changeable(node: &Node) -> Result<(), ClientError> {
    if node.can_be_changed() {
        return Ok(());
    }
    Err(ClientError::Refused { errno: Errno::ROFS.raw_os_error(), reason: format!("{node} cannot be changed") })
}

/// The attributes of what a change has made.
fn made(changed: &Changed) -> Result<&Attr, ClientError> {
    let attr = changed.attr_of(changed.result.inode);
    attr.ok_or_else(|| ClientError::Invalid("the master says nothing of what was created".into()))
}

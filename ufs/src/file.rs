//! `file:///DIRECTORY`: a directory tree as a bucket. Keys are paths below the directory; a key that ends in `/` does
//! not exist, an empty directory is only seen as a prefix of its parent. Symbolic links are followed within the tree,
//! though a listing of everything goes down no linked directory, and nothing but regular files is an object: see
//! [`tree`]. What else has a name counts as hidden.
//!
//! The directory must lie in one of `ufs.file_roots`, and be the same on every host, as a network file system is. The
//! ETag is made of modification time, size and inode, and is checked before and after each piece is read: a file that
//! is replaced by a rename is always noticed, one that is overwritten in place within the time stamp's granularity
//! (some milliseconds) may not be.

mod tree;

use std::collections::BinaryHeap;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::{Capabilities, Scheme};
use futures::{FutureExt, future, stream};
use rustix::io::Errno;
use tokio::task::spawn_blocking;

use self::tree::{Found, Tree};
use crate::allowed::FileRoots;
use crate::error::{Denial, Operation, Request, UfsError};
use crate::object::{ListMode, ObjectMeta};
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, ObjectStore, StorePage};

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub(crate) struct FileStore {
    root: Arc<Path>,
    allowed: FileRoots,
    label: Arc<str>,
}

impl FileStore {
    /// The tree of a directory that must lie in one of those of `allowed`.
    pub(crate) fn new(directory: &str, label: &Arc<str>, allowed: FileRoots) -> Self {
        Self { root: PathBuf::from(directory).into(), allowed, label: label.clone() }
    }

    /// Whether a path below the directory spells a key: none with `..` does.
    fn is_path(key: &str) -> bool {
        let legal = |name: &str| !name.is_empty() && name != "." && name != ".." && !name.contains('\0');
        key.split('/').all(legal)
    }

    fn failed(&self, operation: Operation, key: &str, error: std::io::Error) -> UfsError {
        let request = Request::new(operation, &self.label, key);
        // A link leads out of the tree, or in a circle.
        if matches!(Errno::from_io_error(&error), Some(Errno::XDEV | Errno::LOOP)) {
            return UfsError::NotFound { request };
        }
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => UfsError::NotFound { request },
            ErrorKind::PermissionDenied => {
                let remedy = "check who this process runs as, and what owners and modes let him do there";
                UfsError::denied_for(Denial::Credentials, request, error.to_string(), remedy)
            }
            ErrorKind::Unsupported => UfsError::Rejected { request, reason: error.to_string() },
            _ => UfsError::Unavailable { request, reason: error.to_string() },
        }
    }

    /// The open tree, which is where it may be: a link on the way to it may have become another since.
    fn tree(&self, operation: Operation, key: &str) -> Result<Tree, UfsError> {
        let opened = Tree::open(&self.root);
        if !self.allowed.have_all() {
            let real = match &opened {
                Ok(tree) => tree.path().map_err(|error| self.failed(operation, key, error))?,
                // Whether it is there is nobody's business unless it may be.
                Err(_) => self.root.to_path_buf(),
            };
            if !self.allowed.have(&real) {
                return Err(self.allowed.refusal(&self.root));
            }
        }
        opened.map_err(|error| match operation {
            Operation::List => UfsError::NoBucket { request: Request::new(operation, &self.label, key) },
            _ => self.failed(operation, key, error),
        })
    }

    /// An object, to be read.
    fn open(&self, key: &str) -> Result<(File, ObjectMeta), UfsError> {
        let operation = Operation::Get;
        if !Self::is_path(key) {
            return Err(UfsError::NotFound { request: Request::new(operation, &self.label, key) });
        }
        let opened = self.tree(operation, key)?.file(key);
        let (file, metadata) = opened.map_err(|error| self.failed(operation, key, error))?;
        Ok((file, described(key.to_owned(), &metadata)))
    }

    fn stat(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let operation = Operation::Head;
        let missing = || UfsError::NotFound { request: Request::new(operation, &self.label, key) };
        if !Self::is_path(key) {
            return Err(missing());
        }
        let metadata = self.tree(operation, key)?.look(key).map_err(|error| self.failed(operation, key, error))?;
        if metadata.is_file() { Ok(described(key.to_owned(), &metadata)) } else { Err(missing()) }
    }

    fn list(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        let tree = self.tree(Operation::List, request.prefix)?;
        let mut page = Page {
            answer: StorePage::default(),
            after: request.token,
            limit: request.limit,
            last_listed: None,
            hidden: 0,
        };
        let directory = request.prefix.strip_suffix('/');
        // A prefix is empty or ends in `/`.
        let is_complete = match directory.is_none_or(Self::is_path) {
            true => self.walk(&tree, request.prefix, request.mode, &mut page)?,
            false => true,
        };
        if is_complete {
            page.answer.page.hidden += page.hidden;
        }
        Ok(page.answer)
    }

    /// Adds what lies under a prefix, in key order. False when the page is full. Of a large directory no more than a
    /// page is held at a time, and only what may be on it is asked for its attributes.
    fn walk(&self, tree: &Tree, prefix: &str, mode: ListMode, page: &mut Page<'_>) -> Result<bool, UfsError> {
        let mut done: Option<String> = None;
        loop {
            let (keys, more) = self.next_keys(tree, prefix, mode, page, done.as_deref())?;
            for key in &keys {
                let goes_on = match (key.ends_with('/'), mode) {
                    // What vanished meanwhile is not there.
                    (false, _) => match tree.look(key) {
                        Ok(metadata) if metadata.is_file() => page.object(described(key.clone(), &metadata)),
                        _ => true,
                    },
                    (true, ListMode::Directory) => page.prefix(key.clone()),
                    (true, ListMode::Recursive) => self.walk(tree, key, mode, page)?,
                };
                if !goes_on {
                    return Ok(false);
                }
            }
            if !more {
                return Ok(true);
            }
            done = keys.into_iter().next_back();
        }
    }

    /// The first keys under a prefix that the page may need and that come after `done`, in order: those of directories
    /// end in `/`. And whether there are more.
    fn next_keys(
        &self,
        tree: &Tree,
        prefix: &str,
        mode: ListMode,
        page: &mut Page<'_>,
        done: Option<&str>,
    ) -> Result<(Vec<String>, bool), UfsError> {
        let failed = |error| self.failed(Operation::List, prefix, error);
        let directory = match tree.directory(prefix.trim_end_matches('/')).map_err(failed) {
            Ok(directory) => directory,
            Err(UfsError::NotFound { .. }) => return Ok((Vec::new(), false)),
            Err(error) => return Err(error),
        };
        // Counted once, not again with every look at the directory.
        let is_first = done.is_none() && page.after.is_none_or(|after| !after.starts_with(prefix));
        // One more than a page, to see that there is another page.
        let most = page.limit.saturating_add(1);
        let (mut keys, mut more) = (BinaryHeap::new(), false);
        for name in directory.names().map_err(failed)? {
            let (name, found) = name.map_err(failed)?;
            let is_directory = match (found, mode) {
                (Found::Object, _) => false,
                (Found::Directory, _) | (Found::LinkedDirectory, ListMode::Directory) => true,
                // It could lead back up for ever.
                (Found::LinkedDirectory, ListMode::Recursive) | (Found::Nothing, _) => continue,
                (Found::Other, _) => {
                    page.hidden += u64::from(is_first);
                    continue;
                }
            };
            let Some(name) = name else {
                page.hidden += u64::from(is_first);
                continue;
            };
            let key = format!("{prefix}{name}{}", if is_directory { "/" } else { "" });
            let is_listed = match (is_directory, mode) {
                (true, ListMode::Recursive) => page.is_past(&key),
                _ => page.after.is_some_and(|after| *key <= *after),
            };
            if is_listed || done.is_some_and(|done| *key <= *done) {
                continue;
            }
            keys.push(key);
            if keys.len() > most {
                keys.pop();
                more = true;
            }
        }
        Ok((keys.into_sorted_vec(), more))
    }

    fn piece(&self, file: &File, key: &str, etag: &str, range: Range<u64>) -> Result<Bytes, UfsError> {
        // At most PIECE.
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let read = file.read_exact_at(&mut bytes, range.start);
        let metadata = file.metadata().map_err(|error| self.failed(Operation::Get, key, error))?;
        match read {
            Ok(()) if version(&metadata) == etag => Ok(bytes.into()),
            Err(error) if error.kind() != ErrorKind::UnexpectedEof => Err(self.failed(Operation::Get, key, error)),
            _ => Err(self.changed(key, etag, "the file was written to while it was read")),
        }
    }

    fn changed(&self, key: &str, etag: &str, reason: &str) -> UfsError {
        UfsError::version_changed(Request::new(Operation::Get, &self.label, key), etag, reason)
    }

    /// Runs file calls off the async threads.
    async fn blocking<T: Send + 'static>(
        &self,
        operation: Operation,
        key: &str,
        call: impl FnOnce(&Self) -> Result<T, UfsError> + Send + 'static,
    ) -> Result<T, UfsError> {
        let store = self.clone();
        spawn_blocking(move || call(&store)).await.unwrap_or_else(|stopped| {
            let request = Request::new(operation, &self.label, key);
            Err(UfsError::Unavailable { request, reason: stopped.to_string() })
        })
    }
}

fn version(metadata: &Metadata) -> String {
    format!("{:x}-{:x}-{:x}-{:x}", metadata.mtime(), metadata.mtime_nsec(), metadata.size(), metadata.ino())
}

fn described(key: String, metadata: &Metadata) -> ObjectMeta {
    let mtime_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
    ObjectMeta { key, size: metadata.size(), etag: version(metadata), mtime_ns, metadata: Default::default() }
}

/// A page being filled.
struct Page<'a> {
    answer: StorePage,
    /// Last entry of the page before.
    after: Option<&'a str>,
    limit: usize,
    /// Last entry of this page.
    last_listed: Option<String>,
    /// Names met since that entry that are no objects: they count with the next entry of the listing, once.
    hidden: u64,
}

impl Page<'_> {
    /// Whether everything under this prefix was listed on earlier pages.
    fn is_past(&self, prefix: &str) -> bool {
        self.after.is_some_and(|after| after > prefix && !after.starts_with(prefix))
    }

    /// False when the entry was listed before, or else makes room for it; `None` when there is none.
    fn admit(&mut self, entry: &str) -> Option<bool> {
        if self.after.is_some_and(|after| entry <= after) {
            return Some(false);
        }
        if self.answer.page.objects.len() + self.answer.page.prefixes.len() == self.limit {
            self.answer.next = self.last_listed.take();
            return None;
        }
        self.last_listed = Some(entry.to_owned());
        self.answer.page.hidden += std::mem::take(&mut self.hidden);
        Some(true)
    }

    fn object(&mut self, object: ObjectMeta) -> bool {
        let admitted = self.admit(&object.key);
        if admitted == Some(true) {
            self.answer.page.objects.push(object);
        }
        admitted.is_some()
    }

    fn prefix(&mut self, prefix: String) -> bool {
        let admitted = self.admit(&prefix);
        if admitted == Some(true) {
            self.answer.page.prefixes.push(prefix);
        }
        admitted.is_some()
    }
}

impl ObjectStore for FileStore {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        let (prefix, mode, limit) = (request.prefix.to_owned(), request.mode, request.limit);
        let token = request.token.map(str::to_owned);
        self.blocking(Operation::List, request.prefix, move |store| {
            store.list(ListRequest { prefix: &prefix, mode, start_after: None, token: token.as_deref(), limit })
        })
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        let owned = key.to_owned();
        let call = move |store: &Self| store.stat(&owned);
        self.blocking(Operation::Head, key, call).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        async move {
            let owned = key.to_owned();
            let opened = self.blocking(Operation::Get, key, move |store| store.open(&owned)).await;
            let (file, meta) = opened?;
            if !etag.is_empty() && meta.etag != etag {
                return Err(self.changed(key, etag, "another version has replaced it"));
            }
            if range.end > meta.size {
                return Err(self.changed(key, etag, "it ends before the range does"));
            }
            let etag = meta.etag.clone();
            let rest = RemainingFile { store: self.clone(), file: Arc::new(file), meta, range };
            Ok(Body { etag, stream: ByteStream::new(stream::unfold(rest, RemainingFile::next)) })
        }
        .boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        let reason = "a directory tree is read only for Cavern: mount s3:// to write".to_owned();
        let request = Request::new(request.operation(), &self.label, request.key);
        future::ready(Err(UfsError::Rejected { request, reason })).boxed()
    }

    fn capabilities(&self) -> Capabilities {
        Scheme::File.capabilities()
    }
}

/// What is still to be read of a file.
struct RemainingFile {
    store: FileStore,
    file: Arc<File>,
    meta: ObjectMeta,
    range: Range<u64>,
}

impl RemainingFile {
    async fn next(mut self) -> Option<(Result<Bytes, UfsError>, Self)> {
        if self.range.is_empty() {
            return None;
        }
        let piece = self.range.start..self.range.end.min(self.range.start + PIECE);
        self.range.start = piece.end;
        let (file, key, etag) = (self.file.clone(), self.meta.key.clone(), self.meta.etag.clone());
        let read = move |store: &FileStore| store.piece(&file, &key, &etag, piece);
        let item = self.store.blocking(Operation::Get, &self.meta.key, read).await;
        if item.is_err() {
            self.range.start = self.range.end;
        }
        Some((item, self))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use cavern_conf::schema::Ufs;

    use super::*;
    use crate::store::model;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pages_add_up_to_the_files(
            keys in proptest::collection::btree_set("([a-c][-.0]?/){0,2}[a-d][-.0]?", 0..20),
            prefix in "([a-c][-.0]?/)?",
            limit in 1_usize..8,
        ) {
            let root = tempfile::tempdir().unwrap();
            let mut written = BTreeSet::new();
            for key in keys {
                let path = root.path().join(&key);
                // A name cannot be a file and a directory at once; the first wins.
                if std::fs::create_dir_all(path.parent().unwrap()).is_ok() && std::fs::write(path, "x").is_ok() {
                    written.insert(key);
                }
            }
            let roots = FileRoots::new(&Ufs { file_roots: vec!["/".into()], ..Ufs::default() });
            let store = FileStore::new(root.path().to_str().unwrap(), &"file://model".into(), roots);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let listed = runtime.block_on(model::listed(&store, &prefix, ListMode::Recursive, limit));
            prop_assert_eq!(listed, model::entries(&written, &prefix, ListMode::Recursive));
            let listed = runtime.block_on(model::listed(&store, &prefix, ListMode::Directory, limit));
            // A directory may have been made for a file that could not be.
            let listed: Vec<_> = listed.into_iter().filter(|entry| !entry.ends_with('/')
                || written.iter().any(|key| key.starts_with(entry))).collect();
            prop_assert_eq!(listed, model::entries(&written, &prefix, ListMode::Directory));
        }
    }
}

//! What a directory shows, but for what file systems are free to choose.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

#[derive(Debug, PartialEq, Eq)]
pub struct Shown {
    kind: &'static str,
    mode: u32,
    owner: (u32, u32),
    links: u64,
    /// Of files and symbolic links.
    size: u64,
    target: Option<PathBuf>,
    xattrs: BTreeMap<String, Vec<u8>>,
    content: u64,
    /// The first path, in their order, of the same inode.
    first: PathBuf,
}

pub fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

pub fn kind_of(kind: fs::FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "directory",
        kind if kind.is_symlink() => "symlink",
        kind if kind.is_fifo() => "fifo",
        kind if kind.is_file() => "file",
        _ => "other",
    }
}

/// Everything below a directory. A name that goes meanwhile, by another mount's doing, is not shown.
pub fn tree(top: &Path) -> BTreeMap<PathBuf, Shown> {
    let mut paths = Vec::new();
    collect(top, &mut paths);
    paths.sort();
    let mut first = HashMap::new();
    let shown = paths.into_iter().filter_map(|path| {
        let below = path.strip_prefix(top).unwrap().to_owned();
        let data = path.symlink_metadata().ok()?;
        let kind = kind_of(data.file_type());
        let content = if kind == "file" { hash(&fs::read(&path).ok()?) } else { 0 };
        let shown = Shown {
            kind,
            mode: data.mode() & 0o7777,
            owner: (data.uid(), data.gid()),
            links: data.nlink(),
            size: if kind == "directory" { 0 } else { data.len() },
            target: fs::read_link(&path).ok(),
            xattrs: xattrs(&path),
            content,
            first: first.entry(data.ino()).or_insert_with(|| below.clone()).clone(),
        };
        Some((below, shown))
    });
    shown.collect()
}

fn collect(directory: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.symlink_metadata().is_ok_and(|data| data.is_dir()) {
            collect(&path, paths);
        }
        paths.push(path);
    }
}

fn xattrs(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut list = [0u8; 4096];
    let length = rustix::fs::llistxattr(path, &mut list[..]).unwrap_or(0);
    let names = list[..length].split(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
    let values = names.filter_map(|name| {
        let (name, mut value) = (String::from_utf8(name.to_vec()).unwrap(), [0u8; 4096]);
        let length = rustix::fs::lgetxattr(path, &name, &mut value[..]).ok()?;
        Some((name, value[..length].to_vec()))
    });
    values.collect()
}

//! What may be found after a crash.
//!
//! A change of names that was answered is there; one that was under way is there or not, as a whole. Of a file's
//! content, what was synced is there; of what was written afterwards any part may be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::bucket::Objects;

/// Directories, and files by their number, below the top.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Names {
    pub directories: BTreeSet<String>,
    pub files: BTreeMap<String, usize>,
}

/// Contents that a file may have: first what was synced, last what was written last.
pub struct Versions(Vec<Vec<u8>>);

impl Versions {
    pub fn last(&self) -> &[u8] {
        self.0.last().expect("there is at least one")
    }

    /// Writes that are not synced.
    pub fn pending(&self) -> usize {
        self.0.len() - 1
    }

    pub fn push(&mut self, content: Vec<u8>) {
        self.0.push(content);
    }

    /// The last one is on disk.
    pub fn settle(&mut self) {
        self.0.drain(..self.0.len() - 1);
    }

    fn admits(&self, content: &[u8]) -> bool {
        let is_length = self.0.iter().any(|version| version.len() == content.len());
        let may_be = |at: usize, byte: u8| {
            // Where one version ends another may have made room: zeros until its bytes are there.
            self.0.iter().any(|version| version.get(at).map_or(byte == 0, |there| *there == byte))
        };
        is_length && content.iter().enumerate().all(|(at, byte)| may_be(at, *byte))
    }
}

/// The files of a directory as they should be.
pub struct Model {
    pub top: PathBuf,
    pub names: Names,
    /// The names when the change that is under way has been made.
    pub after: Option<Names>,
    pub files: Vec<Versions>,
}

/// How a crash has dealt with what was not answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Nobody who writes has died: all of it is there.
    All,
    /// The client has died: any of it may be missing.
    Any,
}

impl Model {
    pub fn new(top: PathBuf) -> Self {
        Self { top, names: Names::default(), after: None, files: Vec::new() }
    }

    /// A file of no bytes.
    pub fn new_file(&mut self) -> usize {
        self.files.push(Versions(vec![Vec::new()]));
        self.files.len() - 1
    }

    /// Looks at every name and byte; what was open before is settled as it is found.
    #[track_caller]
    pub fn check(&mut self, when: &str, rest: Rest) {
        let mut found = (BTreeSet::new(), BTreeMap::new());
        walk(&self.top, "", &mut found);
        let (directories, contents) = found;
        let is_content = |file: &usize, content: &Vec<u8>| match rest {
            Rest::All => self.files[*file].last() == content,
            Rest::Any => self.files[*file].admits(content),
        };
        let why_not = |names: &Names| -> Option<String> {
            if names.directories != directories || !names.files.keys().eq(contents.keys()) {
                return Some(format!("the names {names:?} are {directories:?} {:?}", contents.keys()));
            }
            let wrong = names.files.iter().find(|(name, file)| !is_content(file, &contents[*name]));
            wrong.map(|(name, file)| {
                let versions: Vec<usize> = self.files[*file].0.iter().map(Vec::len).collect();
                format!("{name} has other bytes; {} of them, versions have {versions:?}", contents[name].len())
            })
        };
        let why = why_not(&self.names);
        if let Some(why) = why {
            let also = self.after.as_ref().map(&why_not);
            assert!(also == Some(None), "{when}: {why}; or {also:?}");
            self.names = self.after.take().expect("it was compared");
        }
        self.after = None;
    }

    /// Does once more what may have been lost, as a program does that finds its file unfinished.
    pub fn redo(&mut self) {
        for (name, file) in &self.names.files {
            let versions = &mut self.files[*file];
            if versions.pending() > 0 {
                let file = fs::OpenOptions::new().write(true).open(self.top.join(name)).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, versions.last(), 0).unwrap();
                file.set_len(versions.last().len() as u64).unwrap();
                file.sync_all().unwrap();
                versions.settle();
            }
        }
    }

    /// What the bucket is to have, below a prefix.
    pub fn objects(&self, prefix: &str) -> Objects {
        let directories = self.names.directories.iter().map(|name| (format!("{prefix}{name}/"), Bytes::new()));
        let content = |file: &usize| Bytes::copy_from_slice(self.files[*file].last());
        directories
            .chain(self.names.files.iter().map(|(name, file)| (format!("{prefix}{name}"), content(file))))
            .collect()
    }
}

pub fn walk(top: &Path, below: &str, found: &mut (BTreeSet<String>, BTreeMap<String, Vec<u8>>)) {
    for entry in fs::read_dir(top.join(below)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = if below.is_empty() { name } else { format!("{below}/{name}") };
        let path = top.join(&name);
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            found.0.insert(name.clone());
            walk(top, &name, found);
        } else {
            found.1.insert(name, fs::read(&path).unwrap());
        }
    }
}

//! What must be there: all that was acknowledged, once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rand::Rng;
use rand::rngs::StdRng;

/// The names that one program has made, and what they lead to. Paths are below the directory of the round.
#[derive(Default)]
pub struct Model {
    names: BTreeMap<String, usize>,
    nodes: Vec<Node>,
    /// A call on these failed, so they, and what is below them, may be there or not.
    pub uncertain: BTreeSet<String>,
}

#[derive(Clone)]
pub struct Node {
    pub kind: Kind,
    pub mode: u32,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File(Vec<u8>),
    Symlink(String),
}

/// What a name shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub kind: &'static str,
    mode: u32,
    /// Names of a file; 0 for others.
    links: u64,
    pub content: Digest,
}

/// Length and hash of a file, or of the target of a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(usize, u64);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        Self(bytes.len(), hasher.finish())
    }
}

impl Node {
    fn shown(&self, links: u64) -> Shown {
        let (kind, links, content): (_, _, &[u8]) = match &self.kind {
            Kind::Directory => ("directory", 0, &[]),
            Kind::File(content) => ("file", links, content),
            Kind::Symlink(target) => ("symlink", 0, target.as_bytes()),
        };
        Shown { kind, mode: self.mode, links, content: Digest::of(content) }
    }
}

impl Model {
    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn add(&mut self, name: &str, kind: Kind, mode: u32) {
        self.nodes.push(Node { kind, mode });
        let before = self.names.insert(name.to_owned(), self.nodes.len() - 1);
        assert_eq!(before, None, "{name} is new");
    }

    pub fn link(&mut self, from: &str, to: &str) {
        self.names.insert(to.to_owned(), self.names[from]);
    }

    pub fn remove(&mut self, name: &str) {
        self.names.remove(name).unwrap();
    }

    /// Of a directory with all that is below it. What `to` was is replaced.
    pub fn rename(&mut self, from: &str, to: &str) {
        let names: Vec<String> = self.names.keys().filter(|name| is_below(name, from)).cloned().collect();
        for name in names {
            let node = self.names.remove(&name).unwrap();
            self.names.insert(format!("{to}{}", &name[from.len()..]), node);
        }
    }

    /// Whether both are names of one file.
    pub fn is_same(&self, one: &str, other: &str) -> bool {
        self.names.get(one) == self.names.get(other)
    }

    pub fn node(&mut self, name: &str) -> &mut Node {
        &mut self.nodes[self.names[name]]
    }

    /// What a name must show.
    pub fn shown(&self, name: &str) -> Shown {
        let node = self.names[name];
        let links = self.names.values().filter(|other| **other == node).count() as u64;
        self.nodes[node].shown(links)
    }

    /// Any name of such a kind.
    pub fn pick(&self, random: &mut StdRng, wanted: impl Fn(&Kind) -> bool) -> Option<String> {
        let names: Vec<&String> =
            self.names.iter().filter(|(_, node)| wanted(&self.nodes[**node].kind)).map(|(name, _)| name).collect();
        (!names.is_empty()).then(|| names[random.random_range(0..names.len())].clone())
    }

    /// Whether nothing is below a directory.
    pub fn is_empty(&self, directory: &str) -> bool {
        self.names.keys().filter(|name| is_below(name, directory)).count() == 1
            && !self.uncertain.iter().any(|name| is_below(name, directory))
    }

    /// Names right below a directory.
    pub fn children(&self, directory: &str) -> BTreeSet<String> {
        let below = |name: &String| name.strip_prefix(directory)?.strip_prefix('/').map(str::to_owned);
        self.names.keys().filter_map(below).filter(|name| !name.contains('/')).collect()
    }

    /// Whether a directory is known as a whole.
    pub fn is_certain(&self, directory: &str) -> bool {
        !self.uncertain.iter().any(|name| is_below(name, directory) || is_below(directory, name))
    }

    /// Knows no more what a name is, nor any other name of what it was, nor what is below.
    pub fn doubt(&mut self, name: &str) {
        let node = self.names.get(name).copied();
        let names = self.names.iter().filter(|(other, at)| is_below(other, name) || Some(**at) == node);
        // Links from below to elsewhere have a doubtful count.
        let nodes: BTreeSet<usize> = names.map(|(_, node)| *node).collect();
        let doubtful: Vec<String> =
            self.names.iter().filter(|(_, node)| nodes.contains(node)).map(|(name, _)| name.clone()).collect();
        for name in doubtful {
            self.names.remove(&name);
            self.uncertain.insert(name);
        }
        self.uncertain.insert(name.to_owned());
    }

    pub fn all(&self) -> BTreeMap<String, Shown> {
        self.names.keys().map(|name| (name.clone(), self.shown(name))).collect()
    }
}

pub fn is_below(name: &str, directory: &str) -> bool {
    name.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What a path shows.
pub fn look(path: &Path) -> io::Result<Shown> {
    let data = path.symlink_metadata()?;
    let (kind, links, content) = match data.file_type() {
        kind if kind.is_dir() => ("directory", 0, vec![]),
        kind if kind.is_symlink() => ("symlink", 0, fs::read_link(path)?.as_os_str().as_bytes().to_vec()),
        kind if kind.is_file() => ("file", data.nlink(), fs::read(path)?),
        kind => panic!("{} is {kind:?}", path.display()),
    };
    assert!(kind != "file" || content.len() as u64 == data.len(), "{}: st_size and what is read", path.display());
    Ok(Shown { kind, mode: data.mode() & 0o7777, links, content: Digest::of(&content) })
}

/// Everything below a directory.
pub fn walk(top: &Path) -> io::Result<BTreeMap<String, Shown>> {
    let mut found = BTreeMap::new();
    walk_into(top, "", &mut found)?;
    Ok(found)
}

fn walk_into(top: &Path, below: &str, found: &mut BTreeMap<String, Shown>) -> io::Result<()> {
    for entry in fs::read_dir(top.join(below))? {
        let name = entry?.file_name().into_string().unwrap();
        let name = if below.is_empty() { name } else { format!("{below}/{name}") };
        let shown = look(&top.join(&name))?;
        if shown.kind == "directory" {
            walk_into(top, &name, found)?;
        }
        found.insert(name, shown);
    }
    Ok(())
}

/// What distinguishes two trees, but for what may be or not; `None` when nothing does.
pub fn difference<T: PartialEq + std::fmt::Debug>(
    expected: &BTreeMap<String, T>,
    found: &BTreeMap<String, T>,
    uncertain: &BTreeSet<String>,
) -> Option<String> {
    let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    let is_certain = |name: &str| !uncertain.iter().any(|doubtful| is_below(name, doubtful));
    let differs = |name: &&&String| is_certain(name) && expected.get(**name) != found.get(**name);
    let differing: Vec<String> = names
        .iter()
        .filter(differs)
        .map(|name| format!("{name}: expected {:?}, found {:?}", expected.get(*name), found.get(*name)))
        .collect();
    let shown = differing.iter().take(10).cloned().collect::<Vec<_>>().join("\n  ");
    (!differing.is_empty()).then(|| format!("{} of {} names differ:\n  {shown}", differing.len(), names.len()))
}

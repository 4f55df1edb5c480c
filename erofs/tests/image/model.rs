//! A tree in memory, which gives itself to be written and compares itself with an image.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

use cavern_erofs::{
    Attributes, Content, Device, EachEntry, Error, Extent, Image, Inode, Kind, Node, Options, Place, ReadAt, Summary,
    Times, Timestamp, Tree, Xattr, write_image,
};

pub const TIME: Timestamp = Timestamp { seconds: 1_700_000_000, nanoseconds: 5 };

#[derive(Clone, Debug)]
pub enum What {
    Directory(BTreeMap<Vec<u8>, usize>),
    File(Vec<Extent>),
    Symlink(Vec<u8>),
    CharacterDevice(u32),
    BlockDevice(u32),
    Fifo,
    Socket,
}

#[derive(Clone, Debug)]
pub struct Thing {
    pub attributes: Attributes,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub what: What,
}

/// The first one is the root; directories know the others by their index.
#[derive(Clone, Debug)]
pub struct Model {
    pub things: Vec<Thing>,
}

pub fn devices() -> Vec<Device> {
    let device = |blocks, name: &[u8]| {
        let mut tag = [0; 64];
        tag[..name.len()].copy_from_slice(name);
        Device { blocks, tag }
    };
    vec![device(64, b"dev1"), device(u32::MAX, b"dev2")]
}

impl Thing {
    pub fn new(permissions: u16, what: What) -> Self {
        let links = if matches!(what, What::Directory(_)) { 2 } else { 1 };
        let attributes = Attributes { permissions, uid: 0, gid: 0, links, mtime: TIME };
        Self { attributes, xattrs: BTreeMap::new(), what }
    }

    fn content(&self) -> Content<'_> {
        match &self.what {
            What::Directory(_) => Content::Directory,
            What::File(extents) => Content::File(extents),
            What::Symlink(target) => Content::Symlink(target),
            What::CharacterDevice(number) => Content::CharacterDevice(*number),
            What::BlockDevice(number) => Content::BlockDevice(*number),
            What::Fifo => Content::Fifo,
            What::Socket => Content::Socket,
        }
    }

    pub fn size(&self) -> Option<u64> {
        match &self.what {
            What::Directory(_) => None,
            What::File(extents) => Some(extents.iter().map(|extent| extent.length).sum()),
            What::Symlink(target) => Some(target.len() as u64),
            _ => Some(0),
        }
    }
}

impl Model {
    pub fn new() -> Self {
        Self { things: vec![Thing::new(0o755, What::Directory(BTreeMap::new()))] }
    }

    pub fn add(&mut self, directory: usize, name: &[u8], thing: Thing) -> usize {
        let index = self.things.len();
        let is_directory = matches!(thing.what, What::Directory(_));
        self.things.push(thing);
        self.link(directory, name, index);
        self.things[directory].attributes.links += u32::from(is_directory);
        index
    }

    pub fn link(&mut self, directory: usize, name: &[u8], index: usize) {
        assert!(self.names_mut(directory).insert(name.to_vec(), index).is_none());
    }

    pub fn names(&self, directory: usize) -> &BTreeMap<Vec<u8>, usize> {
        let What::Directory(names) = &self.things[directory].what else { panic!("{directory} is no directory") };
        names
    }

    fn names_mut(&mut self, directory: usize) -> &mut BTreeMap<Vec<u8>, usize> {
        let What::Directory(names) = &mut self.things[directory].what else { panic!("{directory} is no directory") };
        names
    }

    fn with_node<T>(&self, index: usize, with: impl FnOnce(&Node<'_>) -> T) -> T {
        let thing = &self.things[index];
        let xattrs: Vec<_> = thing.xattrs.iter().map(|(name, value)| Xattr { name, value }).collect();
        let (attributes, content) = (thing.attributes, thing.content());
        with(&Node { id: index as u64, attributes, xattrs: &xattrs, content })
    }

    pub fn write(&self, image: &File, spill: &Path) -> Result<Summary, Error> {
        self.write_with(image, spill, Times::Own)
    }

    pub fn write_with(&self, image: &File, spill: &Path, times: Times) -> Result<Summary, Error> {
        let devices = devices();
        let options = Options { spill, uuid: [b'u'; 16], label: "view", time: TIME, times, devices: &devices };
        self.with_node(0, |root| write_image(image, root, &mut &*self, &options))
    }

    /// Begins with more and larger devices than there turn out to be.
    fn write_growing(&self, image: &File, spill: &Path) -> Result<Summary, Error> {
        let most = vec![Device { blocks: u32::MAX, tag: [0; 64] }; 100];
        let options = Options { spill, uuid: [b'u'; 16], label: "view", time: TIME, times: Times::Own, devices: &most };
        self.with_node(0, |root| write_image(image, root, &mut Growing(self), &options))
    }

    /// Of its image.
    pub fn bytes(&self) -> Vec<u8> {
        Self::bytes_of(|image, spill| self.write(image, spill))
    }

    /// Of its image, the devices of which were not known in the beginning.
    pub fn growing_bytes(&self) -> Vec<u8> {
        Self::bytes_of(|image, spill| self.write_growing(image, spill))
    }

    fn bytes_of(write: impl FnOnce(&File, &Path) -> Result<Summary, Error>) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let summary = write(&File::create(&path).unwrap(), directory.path()).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(bytes.len() as u64, summary.image_bytes);
        bytes
    }

    pub fn assert_same<R: ReadAt>(&self, image: &Image<R>) {
        let root = image.root().unwrap();
        let mut numbers = HashMap::from([(0, root.nid)]);
        self.assert_same_below(image, 0, &root, root.nid, &mut numbers);
    }

    fn assert_same_below<R: ReadAt>(
        &self,
        image: &Image<R>,
        index: usize,
        inode: &Inode,
        parent: u64,
        numbers: &mut HashMap<usize, u64>,
    ) {
        let thing = &self.things[index];
        assert_eq!(*numbers.entry(index).or_insert(inode.nid), inode.nid, "several inodes of {index}");
        assert_eq!((inode.kind, inode.attributes), (thing.content().kind(), thing.attributes));
        assert_eq!(image.inode(inode.nid).unwrap(), *inode);
        assert_eq!(image.xattrs(inode).unwrap().into_iter().collect::<BTreeMap<_, _>>(), thing.xattrs);
        if let Some(size) = thing.size() {
            assert_eq!(inode.size, size);
        }
        match &thing.what {
            What::Directory(names) => {
                let listed = listed(image, inode).unwrap();
                let dots = [(b".".to_vec(), inode.nid), (b"..".to_vec(), parent)];
                let mut wanted: Vec<Vec<u8>> =
                    names.keys().cloned().chain(dots.clone().map(|(name, _)| name)).collect();
                wanted.sort();
                assert_eq!(listed.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>(), wanted);
                for (name, nid, kind) in listed {
                    let found = image.lookup(inode, &name).unwrap().unwrap();
                    assert_eq!((found.nid, found.kind), (nid, kind));
                    match dots.iter().find(|(dot, _)| *dot == name) {
                        Some((_, dot)) => assert_eq!(nid, *dot),
                        None => self.assert_same_below(image, names[&name], &found, inode.nid, numbers),
                    }
                }
                for missing in [&b"no such name"[..], b"", b"/", b"\xff\xff"] {
                    assert_eq!(image.lookup(inode, missing).unwrap().is_some(), names.contains_key(missing));
                }
            }
            What::File(extents) => {
                assert_eq!(image.extents(inode, 0..u64::MAX).unwrap(), joined(extents));
                let part = inode.size / 3..inode.size / 2;
                let length: u64 = image.extents(inode, part.clone()).unwrap().iter().map(|extent| extent.length).sum();
                assert_eq!(length, part.end - part.start);
            }
            What::Symlink(target) => assert_eq!(image.target(inode).unwrap(), *target),
            What::CharacterDevice(number) | What::BlockDevice(number) => assert_eq!(inode.device_number(), *number),
            What::Fifo | What::Socket => assert_eq!(inode.device_number(), 0),
        }
    }
}

impl Tree for &Model {
    type Error = Error;

    fn entries(&mut self, directory: u64, each: EachEntry<'_>) -> Result<(), Error> {
        for (name, &index) in self.names(directory as usize) {
            self.with_node(index, |node| each(&name[..], node))?;
        }
        Ok(())
    }
}

/// Says in the end which devices there are.
struct Growing<'a>(&'a Model);

impl Tree for Growing<'_> {
    type Error = Error;

    fn entries(&mut self, directory: u64, each: EachEntry<'_>) -> Result<(), Error> {
        let mut model = self.0;
        model.entries(directory, each)
    }

    fn devices(&self) -> Option<Vec<Device>> {
        Some(devices())
    }
}

/// Asked for in pieces, as a kernel does.
pub fn listed<R: ReadAt>(image: &Image<R>, directory: &Inode) -> Result<Vec<(Vec<u8>, u64, Kind)>, Error> {
    let (mut listed, mut from) = (Vec::new(), 0);
    loop {
        let mut piece = Vec::new();
        image.read_directory(directory, from, &mut |entry| {
            piece.push((entry.name.to_vec(), entry.nid, entry.kind, entry.next));
            if piece.len() < 7 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        let Some(last) = piece.last() else { return Ok(listed) };
        assert!(last.3 > from);
        from = last.3;
        listed.extend(piece.into_iter().map(|(name, nid, kind, _)| (name, nid, kind)));
    }
}

/// Extents that continue one another as one.
pub fn joined(extents: &[Extent]) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for extent in extents.iter().filter(|extent| extent.length > 0) {
        let expected = joined.last().map(|last| match last.place {
            Place::Hole => Place::Hole,
            Place::Device { device, offset } => Place::Device { device, offset: offset + last.length },
        });
        match joined.last_mut().filter(|_| expected == Some(extent.place)) {
            Some(last) => last.length += extent.length,
            None => joined.push(*extent),
        }
    }
    joined
}

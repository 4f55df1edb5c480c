//! What others make of our images, and we of theirs: the kernel, `fsck.erofs` and `mkfs.erofs`, where they are here.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use cavern_erofs::{Extent, Image, Inode, Kind, Place, ReadAt};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::golden::small_tree;
use super::model::{Model, Thing, What, devices, listed};
use super::round_trip::any_model;

/// An image with its devices, in a directory of its own.
struct OnDisk {
    directory: tempfile::TempDir,
    image: PathBuf,
    devices: Vec<PathBuf>,
}

impl OnDisk {
    fn new(model: &Model) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        model.write(&File::create(&image).unwrap(), directory.path()).unwrap();
        let known = devices();
        let devices = known.iter().enumerate().map(|(index, device)| {
            let path = directory.path().join(format!("device{}", index + 1));
            let file = File::create(&path).unwrap();
            file.set_len((u64::from(device.blocks) * 4096).min(64 << 30)).unwrap();
            // Of each block that the models use its number, and the device's.
            for block in 0..1200_u64.min(device.blocks.into()) {
                file.write_all_at(&pattern(index as u16 + 1, block), block * 4096).unwrap();
            }
            path
        });
        let devices = devices.collect();
        Self { directory, image, devices }
    }

    fn option(&self) -> String {
        let named: Vec<_> = self.devices.iter().map(|path| format!("device={}", path.display())).collect();
        named.join(",")
    }
}

fn pattern(device: u16, block: u64) -> Vec<u8> {
    let word = ((u64::from(device) << 48) | block).to_le_bytes();
    word.repeat(512)
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Mounts without a loop device, as views are; nothing where this host does not.
fn mounted(on_disk: &OnDisk) -> Option<Mounted> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root mounts");
        return None;
    }
    let place = on_disk.directory.path().join("mount");
    fs::create_dir(&place).unwrap();
    let options = CString::new(on_disk.option()).unwrap();
    match mount(&on_disk.image, &place, "erofs", MountFlags::RDONLY, Some(options.as_c_str())) {
        Ok(()) => Some(Mounted(place)),
        Err(error @ (rustix::io::Errno::NODEV | rustix::io::Errno::NOTBLK | rustix::io::Errno::PERM)) => {
            eprintln!("skipped: this kernel mounts no EROFS out of a file: {error}");
            None
        }
        Err(error) => panic!("mount: {error}"),
    }
}

/// Compares by what programs see.
fn assert_seen(path: &Path, model: &Model, index: usize) {
    let (thing, seen) = (&model.things[index], fs::symlink_metadata(path).unwrap());
    let attributes = thing.attributes;
    let shown = (seen.mode() & 0o7777, seen.uid(), seen.gid(), seen.nlink(), seen.mtime(), seen.mtime_nsec());
    let wanted = (
        u32::from(attributes.permissions),
        attributes.uid,
        attributes.gid,
        u64::from(attributes.links),
        attributes.mtime.seconds,
        i64::from(attributes.mtime.nanoseconds),
    );
    assert_eq!(shown, wanted, "{}", path.display());
    if let Some(size) = thing.size() {
        assert_eq!(seen.len(), size, "{}", path.display());
    }
    for (name, value) in &thing.xattrs {
        let mut buffer = vec![0; 1 << 16];
        let length = rustix::fs::lgetxattr(path, &name[..], &mut buffer[..]).unwrap();
        assert!(buffer[..length] == value[..], "{}", path.display());
    }
    let kind = seen.file_type();
    match &thing.what {
        What::Directory(names) => {
            let mut found: Vec<_> =
                fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect();
            found.sort();
            assert_eq!(found, names.keys().cloned().collect::<Vec<_>>(), "{}", path.display());
            for (name, &index) in names {
                assert_seen(&path.join(std::ffi::OsStr::from_bytes(name)), model, index);
            }
        }
        What::File(extents) => assert_content(&File::open(path).unwrap(), extents, path),
        What::Symlink(target) => assert_eq!(fs::read_link(path).unwrap().as_os_str().as_bytes(), &target[..]),
        What::CharacterDevice(_) => assert!(kind.is_char_device()),
        What::BlockDevice(_) => assert!(kind.is_block_device()),
        What::Fifo => assert!(kind.is_fifo()),
        What::Socket => assert!(kind.is_socket()),
    }
}

/// The first and the last block of each extent.
fn assert_content(file: &File, extents: &[Extent], path: &Path) {
    let mut start = 0;
    for extent in extents.iter().filter(|extent| extent.length > 0) {
        let last = (extent.length - 1) / 4096 * 4096;
        for within in [0, last] {
            let expected = match extent.place {
                Place::Hole => vec![0; 4096],
                Place::Device { device, offset } if offset + within < 1200 * 4096 => {
                    pattern(device, (offset + within) / 4096)
                }
                Place::Device { .. } => vec![0; 4096],
            };
            let mut found = vec![0; (extent.length - within).min(4096) as usize];
            FileExt::read_exact_at(file, &mut found, start + within).unwrap();
            assert!(found == expected[..found.len()], "{} at {}", path.display(), start + within);
        }
        start += extent.length;
    }
}

/// Trees by rule: the same at each run.
fn models(count: usize) -> Vec<Model> {
    let mut runner = TestRunner::deterministic();
    let any = any_model(200);
    let generated = (0..count).map(|_| any.new_tree(&mut runner).unwrap().current()).collect::<Vec<_>>();
    [vec![small_tree(), Model::new()], generated].concat()
}

#[test]
fn the_kernel_shows_the_tree() {
    for mut model in models(6) {
        for thing in &mut model.things {
            // Beyond that the kernel's arithmetic is its own affair. Access lists of no meaning have it refuse access.
            thing.attributes.mtime.seconds %= 1 << 33;
            thing.xattrs.retain(|name, _| !name.starts_with(b"system."));
            // The kernel shows users' attributes of nothing else, whatever is there.
            if !matches!(thing.what, What::File(_) | What::Directory(_)) {
                thing.xattrs.retain(|name, _| !name.starts_with(b"user."));
            }
        }
        let on_disk = OnDisk::new(&model);
        let Some(mounted) = mounted(&on_disk) else { return };
        assert_seen(&mounted.0, &model, 0);
    }
}

/// Whether there is such a program; its own failure is the test's.
fn ran(command: &mut Command) -> bool {
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: no {}: install erofs-utils", command.get_program().display());
            false
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

#[test]
fn fsck_finds_nothing() {
    for model in models(6) {
        let on_disk = OnDisk::new(&model);
        let named = on_disk.devices.iter().map(|path| format!("--device={}", path.display()));
        if !ran(Command::new("fsck.erofs").args(named).arg(&on_disk.image)) {
            return;
        }
    }
}

/// Kind, permissions, size and target of all below a directory, by their paths.
fn described<R: ReadAt>(image: &Image<R>, directory: &Inode, path: &Path, all: &mut BTreeMap<PathBuf, String>) {
    for (name, _, kind) in listed(image, directory).unwrap() {
        if name == b"." || name == b".." {
            continue;
        }
        let path = path.join(std::ffi::OsStr::from_bytes(&name));
        let inode = image.lookup(directory, &name).unwrap().unwrap();
        let target = if kind == Kind::Symlink { image.target(&inode).unwrap() } else { Vec::new() };
        let size = if kind == Kind::Directory { 0 } else { inode.size };
        let length: u64 = image.extents(&inode, 0..u64::MAX).unwrap().iter().map(|extent| extent.length).sum();
        assert_eq!(length, if kind == Kind::File { size } else { 0 });
        let permissions = inode.attributes.permissions;
        let line = format!("{kind:?} {permissions:o} {size} {}", target.escape_ascii());
        assert!(all.insert(path.clone(), line).is_none());
        if kind == Kind::Directory {
            described(image, &inode, &path, all);
        }
    }
}

/// The same tree by `mkfs.erofs`, with contents in the image, and by us.
#[test]
fn mkfs_makes_the_same_tree() {
    let directory = tempfile::tempdir().unwrap();
    let (tree, theirs) = (directory.path().join("tree"), directory.path().join("image"));
    fs::create_dir(&tree).unwrap();
    let mut model = Model::new();
    let mut places = vec![(0, tree.clone())];
    for number in 0..12 {
        let (below, path) = places[number / 3].clone();
        let name = format!("directory {number}");
        let index = model.add(below, name.as_bytes(), Thing::new(0o750, What::Directory(BTreeMap::new())));
        let path = path.join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o750)).unwrap();
        for file in 0..number * 30 {
            let name = format!("{file:04}.file");
            let length = file as u64 * 97;
            let what = What::File(vec![Extent { length, place: Place::Device { device: 2, offset: 0 } }]);
            model.add(index, name.as_bytes(), Thing::new(0o640, what));
            fs::write(path.join(&name), vec![7; length as usize]).unwrap();
            fs::set_permissions(path.join(&name), PermissionsExt::from_mode(0o640)).unwrap();
        }
        let target = "t".repeat(number * 300 + 1);
        model.add(index, b"link", Thing::new(0o777, What::Symlink(target.clone().into_bytes())));
        symlink(target, path.join("link")).unwrap();
        places.push((index, path));
    }
    if !ran(Command::new("mkfs.erofs").arg(&theirs).arg(&tree)) {
        return;
    }
    let all_of = |image: &dyn ReadAt| {
        let (image, mut all) = (Image::open(image).unwrap(), BTreeMap::new());
        described(&image, &image.root().unwrap(), Path::new(""), &mut all);
        all
    };
    let ours = model.bytes();
    assert_eq!(all_of(&File::open(theirs).unwrap()), all_of(&ours));
}

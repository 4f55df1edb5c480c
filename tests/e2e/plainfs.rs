//! `plainfs --writable`, the baseline of the benchmarks of writing, is a file system that programs work on; that of
//! `plainfs --replaced` leads openers to the next version.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cavern_tests::eventually;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
const FILES: usize = 300;

/// A directory, and what `plainfs` shows of it.
struct Plain {
    directory: TempDir,
    server: Child,
}

impl Plain {
    fn up() -> Self {
        Self::up_with(&["--writable"], &[])
    }

    /// With files, by name and length.
    fn up_with(options: &[&str], files: &[(&str, usize)]) -> Self {
        let directory = TempDir::new().unwrap();
        let program = env!("CARGO_BIN_EXE_plainfs");
        let (source, mount) = (directory.path().join("source"), directory.path().join("mount"));
        fs::create_dir(&source).unwrap();
        fs::create_dir(&mount).unwrap();
        for (name, length) in files {
            fs::write(source.join(name), vec![0; *length]).unwrap();
        }
        let outside = mount.metadata().unwrap().dev();
        let mut server = Command::new(program);
        server.args(options).args([&source, &mount]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let server = server.spawn();
        let server = server.unwrap_or_else(|error| panic!("{program} does not start: {error}"));
        let plain = Self { directory, server };
        eventually("it is mounted", PATIENCE, || (mount.metadata().ok()?.dev() != outside).then_some(()));
        plain
    }

    fn source(&self) -> PathBuf {
        self.directory.path().join("source")
    }

    fn mount(&self) -> PathBuf {
        self.directory.path().join("mount")
    }

    /// Has a file replaced; the answer.
    fn replace(&mut self, name: &str) -> String {
        writeln!(self.server.stdin.as_mut().unwrap(), "{name}").unwrap();
        let mut answer = String::new();
        BufReader::new(self.server.stdout.as_mut().unwrap()).read_line(&mut answer).unwrap();
        answer
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // It unmounts when it ends; a test that failed may have something open there.
        let _ = kill_process(Pid::from_child(&self.server), Signal::TERM);
        let _ = unmount(self.mount(), UnmountFlags::DETACH);
        let _ = self.server.wait();
    }
}

fn run(program: &str, arguments: &[&Path]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Every entry below, in the order of names: path, mode, owner, time of change, and content or target.
fn tree(top: &Path) -> Vec<(PathBuf, u32, u32, i64, Vec<u8>)> {
    let (mut found, mut rest) = (Vec::new(), vec![top.to_owned()]);
    while let Some(directory) = rest.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let content = if metadata.is_dir() {
                rest.push(path.clone());
                Vec::new()
            } else if metadata.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            let name = path.strip_prefix(top).unwrap().to_owned();
            found.push((name, metadata.mode(), metadata.uid(), metadata.mtime(), content));
        }
    }
    found.sort();
    found
}

#[test]
fn a_tree_goes_in_and_comes_out_the_same() {
    let plain = Plain::up();
    let outside = plain.directory.path().join("outside");
    for number in 0..FILES {
        let file = outside.join(format!("{}/below", number % 7)).join(format!("file{number}"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let content = (0..number * 97).map(|place| (place * (number + 1) % 251) as u8).collect::<Vec<_>>();
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(if number % 2 == 0 { 0o640 } else { 0o755 })).unwrap();
        let time = UNIX_EPOCH + Duration::from_secs(1_000_000 + number as u64);
        File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    }
    // More than one request of the kernel.
    fs::write(outside.join("large"), vec![7; 5 << 20]).unwrap();
    symlink("0/below/file0", outside.join("link")).unwrap();
    std::os::unix::fs::chown(outside.join("1"), Some(1234), Some(1234)).unwrap();
    let expected = tree(&outside);

    let (archive, mount) = (plain.directory.path().join("archive.tar"), plain.mount());
    run("tar", &["-cf".as_ref(), &archive, "-C".as_ref(), &outside, ".".as_ref()]);
    fs::create_dir(mount.join("extracted")).unwrap();
    run("tar", &["-xpf".as_ref(), &archive, "-C".as_ref(), &mount.join("extracted")]);
    assert!(tree(&mount.join("extracted")) == expected, "what tar extracts, through the mount");
    assert!(tree(&plain.source().join("extracted")) == expected, "what tar extracts, in the source");

    run("cp", &["-a".as_ref(), &mount.join("extracted"), &mount.join("copied")]);
    assert!(tree(&mount.join("copied")) == expected, "what cp copies, through the mount");
    assert!(tree(&plain.source().join("copied")) == expected, "what cp copies, in the source");

    run("rm", &["-r".as_ref(), &mount.join("extracted"), &mount.join("copied")]);
    assert_eq!(tree(&mount), []);
    assert_eq!(tree(&plain.source()), []);
}

#[test]
fn names_change_under_open_files() {
    let plain = Plain::up();
    let mount = plain.mount();
    let read = |name: &str| fs::read_to_string(mount.join(name)).unwrap();
    for name in ["old", "new", "gone", "first"] {
        fs::write(mount.join(name), format!("content of {name}")).unwrap();
    }

    // One file takes the name of another that is open.
    let mut replaced = File::open(mount.join("new")).unwrap();
    fs::rename(mount.join("old"), mount.join("new")).unwrap();
    assert_eq!(read("new"), "content of old");
    assert!(!mount.join("old").exists());
    let mut text = String::new();
    replaced.read_to_string(&mut text).unwrap();
    assert_eq!(text, "content of new");

    // A file without a name is read and written until it is closed; one that takes its name is another.
    let mut nameless = OpenOptions::new().read(true).write(true).open(mount.join("gone")).unwrap();
    fs::remove_file(mount.join("gone")).unwrap();
    fs::write(mount.join("gone"), "another").unwrap();
    nameless.write_all(b"CONTENT").unwrap();
    nameless.set_len(10).unwrap();
    nameless.seek(SeekFrom::Start(0)).unwrap();
    text.clear();
    nameless.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), nameless.metadata().unwrap().len()), ("CONTENT of", 10));
    assert_eq!(nameless.metadata().unwrap().nlink(), 0);
    assert_eq!(read("gone"), "another");

    // Two names of one file, the older of which goes.
    fs::hard_link(mount.join("first"), mount.join("second")).unwrap();
    assert_eq!(mount.join("first").metadata().unwrap().nlink(), 2);
    fs::remove_file(mount.join("first")).unwrap();
    fs::write(mount.join("second"), "through the second").unwrap();
    assert_eq!(mount.join("second").metadata().unwrap().nlink(), 1);
    assert_eq!(read("second"), "through the second");

    // A directory moves with an open file in it, and with what is known of its names.
    fs::create_dir_all(mount.join("here/below")).unwrap();
    let file = File::create(mount.join("here/below/file")).unwrap();
    fs::create_dir(mount.join("there")).unwrap();
    fs::rename(mount.join("here"), mount.join("there/moved")).unwrap();
    file.write_all_at(b"written after the move", 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(read("there/moved/below/file"), "written after the move");
    assert_eq!(fs::read_to_string(plain.source().join("there/moved/below/file")).unwrap(), "written after the move");
    let refused = fs::remove_dir(mount.join("there/moved")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::DirectoryNotEmpty);
}

#[test]
fn attributes_and_sizes_are_those_of_the_file_beneath() {
    let plain = Plain::up();
    let (shown, beneath) = (plain.mount().join("file"), plain.source().join("file"));
    fs::write(&shown, "0123456789").unwrap();
    let mut appended = OpenOptions::new().append(true).open(&shown).unwrap();
    for _ in 0..100 {
        appended.write_all(b"more").unwrap();
    }
    assert_eq!(shown.metadata().unwrap().len(), 410);
    OpenOptions::new().write(true).open(&shown).unwrap().set_len(3).unwrap();
    appended.write_all(b"end").unwrap();
    assert_eq!(fs::read_to_string(&shown).unwrap(), "012end");
    drop(File::options().write(true).truncate(true).open(&shown).unwrap());
    assert_eq!(shown.metadata().unwrap().len(), 0);
    let exists = OpenOptions::new().write(true).create_new(true).open(&shown).unwrap_err();
    assert_eq!(exists.kind(), std::io::ErrorKind::AlreadyExists);

    let time = SystemTime::UNIX_EPOCH - Duration::from_millis(1_500);
    appended.set_modified(time).unwrap();
    fs::set_permissions(&shown, fs::Permissions::from_mode(0o4711)).unwrap();
    std::os::unix::fs::chown(&shown, Some(12), Some(34)).unwrap();
    for path in [&shown, &beneath] {
        let found = path.metadata().unwrap();
        assert_eq!(found.modified().unwrap(), time, "{}", path.display());
        // A change of the owner takes the set-user-ID bit away.
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o711, 12, 34), "{}", path.display());
    }

    // What another user makes is that user's.
    fs::set_permissions(plain.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(plain.mount().join("of-all")).unwrap();
    fs::set_permissions(plain.mount().join("of-all"), fs::Permissions::from_mode(0o777)).unwrap();
    let command = "umask 027; echo mine > of-all/file && mkdir of-all/folder && cat of-all/file";
    let as_other = Command::new("setpriv")
        .args(["--reuid", "1234", "--regid", "1234", "--clear-groups", "sh", "-c", command])
        .current_dir(plain.mount())
        .output()
        .unwrap();
    assert!(as_other.status.success(), "{}", String::from_utf8_lossy(&as_other.stderr));
    for (name, mode) in [("of-all/file", 0o640), ("of-all/folder", 0o750)] {
        let found = plain.source().join(name).metadata().unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (mode, 1234, 1234), "{name}");
    }
}

#[test]
fn openers_are_led_to_the_next_version_without_an_open() {
    const LENGTH: usize = 50_000;
    let mut plain = Plain::up_with(&["--no-open", "--replaced"], &[("file", LENGTH)]);
    let path = plain.mount().join("file");
    let content = |number: u64| number.to_le_bytes().repeat(LENGTH / 8);
    let first = File::open(&path).unwrap();
    for number in 1..=20 {
        assert_eq!(plain.replace("file"), format!("{number}\n"));
        assert!(fs::read(&path).unwrap() == content(number), "version {number}");
    }

    // What was open before, and is not in the kernel's pages, is not there any more.
    let error = first.read_exact_at(&mut vec![0; LENGTH], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::STALE.raw_os_error()), "{error}");
}

//! Writing to cache-mode mounts: the bucket has, byte for byte, what programs wrote when their close returns, and
//! nothing of what failed.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use cavern_tests::{COUNTED, Cluster, Options, eventually};
use http::{HeaderMap, Method};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
use serde_json::json;

use crate::bucket::{Bucket, Objects, assert_same};

const PATIENCE: Duration = Duration::from_secs(60);

fn mounted_with(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "top/old/file", vec![b'o'; 300_000]);
    cluster.mount("s3://bucket/top", "/data", &["--access-mode", "read_write"]);
    cluster
}

fn mounted() -> Cluster {
    mounted_with(Options::default())
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

#[track_caller]
fn assert_object(cluster: &Cluster, key: &str, content: &[u8]) {
    let object = cluster.s3.get("bucket", key);
    assert!(object == content, "{key}: {} bytes where {} are wanted", object.len(), content.len());
}

fn objects(entries: &[(&str, &[u8])]) -> Objects {
    entries.iter().map(|(key, content)| ((*key).to_owned(), bytes::Bytes::copy_from_slice(content))).collect()
}

/// Uploads in parts that were begun and neither completed nor aborted.
pub fn uploads(cluster: &Cluster) -> usize {
    let client = cluster.s3.client();
    let list = client.send(Method::GET, "bucket", "", "uploads=", HeaderMap::new(), bytes::Bytes::new());
    let answer = cluster.s3.run(list);
    String::from_utf8_lossy(&answer.body).matches("<UploadId>").count()
}

#[test]
fn files_are_objects_when_their_close_returns() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    let large = noise(1, (9 << 20) + 12_345);
    fs::write(at("small"), "hello").unwrap();
    assert_object(&cluster, "top/small", b"hello");
    fs::write(at("empty"), "").unwrap();
    fs::create_dir(at("new")).unwrap();
    fs::write(at("new/large"), &large).unwrap();
    assert_object(&cluster, "top/new/large", &large);
    assert!(fs::read(at("new/large")).unwrap() == large);
    // The object of a directory keeps it when it is empty.
    let bucket = Bucket::of(&cluster, "bucket");
    let old = [b'o'; 300_000];
    let mut expected = objects(&[
        ("top/empty", b""),
        ("top/new/", b""),
        ("top/new/large", &large),
        ("top/old/file", &old),
        ("top/small", b"hello"),
    ]);
    assert_same("after writing", &bucket.objects(), &expected);

    // Replaced, cut and removed.
    fs::write(at("small"), "another text").unwrap();
    assert_eq!(fs::read(at("small")).unwrap(), b"another text");
    OpenOptions::new().write(true).open(at("new/large")).unwrap().set_len(9 << 20).unwrap();
    fs::remove_file(at("empty")).unwrap();
    fs::remove_file(at("old/file")).unwrap();
    assert!(at("old").is_dir() && fs::read_dir(at("old")).unwrap().next().is_none());
    expected.remove("top/empty");
    expected.remove("top/old/file");
    expected.extend(objects(&[
        ("top/small", b"another text"),
        ("top/old/", b""),
        ("top/new/large", &large[..9 << 20]),
    ]));
    assert_same("after replacing", &bucket.objects(), &expected);

    assert_eq!(errno(fs::remove_dir(at("new"))), Errno::NOTEMPTY);
    assert_eq!(errno(fs::remove_dir(at("small"))), Errno::NOTDIR);
    assert_eq!(errno(fs::remove_file(at("new"))), Errno::ISDIR);
    assert_eq!(errno(fs::create_dir(at("new"))), Errno::EXIST);
    assert_eq!(errno(File::create_new(at("small"))), Errno::EXIST);
    assert_eq!(errno(fs::remove_file(at("empty"))), Errno::NOENT);
    fs::remove_dir(at("old")).unwrap();
    fs::remove_dir_all(at("new")).unwrap();
    assert_same("after removing", &bucket.objects(), &objects(&[("top/small", b"another text")]));
    assert_eq!(uploads(&cluster), 0);
}

#[test]
fn a_large_file_is_sent_while_it_is_written_and_shows_at_once_when_it_is_closed() {
    let cluster = mounted_with(Options { more_mounts: vec!["other"], ..Options::default() });
    let path = cluster.path("data/large");
    let other = cluster.directory().join("other/data/large");
    let content = noise(2, 100 << 20);
    let mut file = File::create(&path).unwrap();
    for (number, piece) in content.chunks(1 << 20).enumerate() {
        file.write_all(piece).unwrap();
        // A program that is started gets the descriptor, and closes it: that is no word about the file.
        if number % 40 == 20 {
            assert!(Command::new("true").status().unwrap().success());
        }
    }
    eventually("parts are sent before the close", PATIENCE, || (cluster.s3.requests("PUT") > 3).then_some(()));
    // Whoever writes sees it; whoever else looks does not.
    assert_eq!(fs::metadata(&path).unwrap().len(), content.len() as u64);
    let mut read = vec![0; 3 << 20];
    File::open(&path).unwrap().read_exact_at(&mut read, 5 << 20).unwrap();
    assert!(read == content[5 << 20..8 << 20]);
    assert!(!other.exists());
    // A second look at what was sent already.
    file.seek(SeekFrom::Start(100)).unwrap();
    file.write_all(b"header").unwrap();
    drop(file);
    let mut expected = content;
    expected[100..106].copy_from_slice(b"header");
    assert_object(&cluster, "top/large", &expected);
    assert_eq!(uploads(&cluster), 0);
    assert!(fs::read(&path).unwrap() == expected);
    eventually("another mount sees it", PATIENCE, || other.exists().then_some(()));
    assert!(fs::read(&other).unwrap() == expected);
}

#[test]
fn files_of_more_than_may_be_staged_are_written() {
    let conf = "[client]\nstaging_size = \"64MiB\"\n".to_owned();
    let cluster = mounted_with(Options { conf, ..Options::default() });
    let content = noise(3, 150 << 20);
    let path = cluster.path("data/large");
    let mut file = File::create(&path).unwrap();
    for piece in content.chunks(1 << 20) {
        file.write_all(piece).unwrap();
    }
    // What is on its way can neither be read nor changed.
    let reader = File::open(&path).unwrap();
    let refused = |result: io::Result<()>| result.err().and_then(|error| Errno::from_io_error(&error));
    let places = (0..150).map(|mib| mib << 20);
    let written = places.clone().filter_map(|at| refused(file.write_all_at(&content[at..=at], at as u64)));
    assert_eq!(written.collect::<HashSet<_>>(), HashSet::from([Errno::NOSPC]));
    let read = places.filter_map(|at| refused(reader.read_exact_at(&mut [0], at as u64)));
    assert_eq!(read.collect::<HashSet<_>>(), HashSet::from([Errno::IO]));
    file.sync_all().unwrap();
    let staged = cluster.status().fuse[0].metric("cavern_client_staged_bytes").unwrap();
    assert!(staged <= 32 << 20, "what the bucket has makes room: {staged} bytes are staged");
    assert_object(&cluster, "top/large", &content);
    // Then it can.
    file.write_all_at(b"header", 0).unwrap();
    drop(file);
    let mut expected = content;
    expected[..6].copy_from_slice(b"header");
    assert_object(&cluster, "top/large", &expected);
}

#[test]
fn whatever_is_done_to_a_file_the_bucket_has_its_bytes() {
    let cluster = mounted();
    let path = cluster.path("data/old/file");
    let mut model = vec![b'o'; 300_000];
    let mut random = StdRng::seed_from_u64(4);
    // Appended.
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
    model.extend(b"more");
    assert_object(&cluster, "top/old/file", &model);
    // Written here and there, cut, and lengthened, in several openings.
    for round in 0..8 {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).append(round % 4 == 3).open(&path).unwrap();
        for _ in 0..12 {
            let at = random.random_range(0..400_000);
            match random.random_range(0..4) {
                0 => {
                    file.set_len(at as u64).unwrap();
                    model.resize(at, 0);
                }
                1 if round % 4 != 3 => {
                    let piece = noise(random.random(), random.random_range(1..50_000));
                    model.resize(model.len().max(at + piece.len()), 0);
                    model[at..at + piece.len()].copy_from_slice(&piece);
                    file.write_all_at(&piece, at as u64).unwrap();
                }
                2 => {
                    let piece = noise(random.random(), 1000);
                    model.extend(&piece);
                    (&file).seek(SeekFrom::End(0)).unwrap();
                    (&file).write_all(&piece).unwrap();
                }
                _ => {
                    let mut read = vec![0; 10_000];
                    let length = file.read_at(&mut read, at as u64).unwrap();
                    let end = (at + 10_000).min(model.len());
                    assert!(read[..length] == model[at.min(end)..end], "round {round}: {length} bytes at {at}");
                }
            }
        }
        drop(file);
        assert_object(&cluster, "top/old/file", &model);
        assert!(fs::read(&path).unwrap() == model, "round {round}");
    }
    // By its name alone.
    fs::write(cluster.path("data/cut"), &model).unwrap();
    assert!(Command::new("truncate").args(["-s", "1000"]).arg(cluster.path("data/cut")).status().unwrap().success());
    assert_object(&cluster, "top/cut", &model[..1000]);
    assert_eq!(fs::metadata(cluster.path("data/cut")).unwrap().len(), 1000);
}

#[test]
fn what_is_written_to_a_mapping_reaches_the_bucket() {
    let cluster = mounted();
    let path = cluster.path("data/old/file");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = 300_000;
    #[expect(unsafe_code, reason = "a mapping is memory that others may change")]
    // SAFETY: the file is that long, nobody cuts it, and the slice ends before the mapping does.
    unsafe {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), length, flags, MapFlags::SHARED, &file, 0).unwrap();
        let bytes = std::slice::from_raw_parts_mut(mapped.cast::<u8>(), length);
        assert!(bytes.iter().all(|byte| *byte == b'o'));
        bytes[200_000..200_004].copy_from_slice(b"here");
        rustix::mm::msync(mapped, length, MsyncFlags::SYNC).unwrap();
        bytes[7] = b'X';
        rustix::mm::munmap(mapped, length).unwrap();
    }
    drop(file);
    let mut expected = vec![b'o'; length];
    expected[200_000..200_004].copy_from_slice(b"here");
    expected[7] = b'X';
    eventually("the bucket has what was mapped", PATIENCE, || {
        (cluster.s3.get("bucket", "top/old/file") == expected).then_some(())
    });
}

#[test]
fn several_descriptors_and_names_that_go_are_as_they_are_locally() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    // A shell that several programs write for.
    let script = "{ echo one; cat /dev/null; /bin/echo two; } > \"$1\"; /bin/echo three >> \"$1\"";
    assert!(Command::new("sh").args(["-c", script, "sh"]).arg(at("log")).status().unwrap().success());
    assert_object(&cluster, "top/log", b"one\ntwo\nthree\n");

    // Whoever has a version open reads that to its end.
    let mut reader = File::open(at("log")).unwrap();
    fs::write(at("log"), "new").unwrap();
    let mut old = String::new();
    reader.read_to_string(&mut old).unwrap();
    assert_eq!(old, "one\ntwo\nthree\n");
    assert_eq!(fs::read_to_string(at("log")).unwrap(), "new");

    // A file that is removed while it is written never appears; nor does it come back.
    let mut file = File::create(at("gone")).unwrap();
    file.write_all(b"bytes").unwrap();
    assert!(at("gone").exists());
    fs::remove_file(at("gone")).unwrap();
    assert!(!at("gone").exists());
    file.write_all(b"more").unwrap();
    drop(file);
    let log = OpenOptions::new().append(true).open(at("log")).unwrap();
    (&log).write_all(b"x").unwrap();
    fs::remove_file(at("log")).unwrap();
    drop(log);
    let old = [b'o'; 300_000];
    assert_same("after removing", &Bucket::of(&cluster, "bucket").objects(), &objects(&[("top/old/file", &old)]));
}

#[test]
fn lines_that_several_append_are_all_there() {
    let cluster = mounted_with(Options { more_mounts: vec!["other"], ..Options::default() });
    let (one, other) = (cluster.path("data"), cluster.directory().join("other/data"));
    // Each opens and closes the file for each line, and all of them at the same time.
    let script = "for turn in 1 2 3 4 5; do echo line >> \"$1\" || exit 1; done";
    let start = |file: usize| {
        Command::new("sh").args(["-c", script, "sh"]).arg(one.join(format!("lines{file}"))).spawn().unwrap()
    };
    for _ in 0..4 {
        let shells: Vec<_> = (0..24).map(|shell| start(shell / 4)).collect();
        assert!(shells.into_iter().all(|mut shell| shell.wait().unwrap().success()));
        for file in 0..6 {
            assert_object(&cluster, &format!("top/lines{file}"), "line\n".repeat(20).as_bytes());
            fs::remove_file(one.join(format!("lines{file}"))).unwrap();
        }
    }

    // In turn on two mounts, each as soon as it sees what the other has written.
    let mut lines = String::new();
    for turn in 0..12 {
        let here = if turn % 2 == 0 { &one } else { &other }.join("lines");
        eventually("the lines of the other", PATIENCE, || {
            (fs::read_to_string(&here).unwrap_or_default() == lines).then_some(())
        });
        let mut file = OpenOptions::new().append(true).create(true).open(&here).unwrap();
        file.write_all(b"line\n").unwrap();
        file.sync_all().unwrap();
        lines += "line\n";
    }
    assert_object(&cluster, "top/lines", lines.as_bytes());
}

#[test]
fn large_objects_are_changed_with_little_memory() {
    for budget in ["1MiB", "4MiB"] {
        let conf = format!("[client]\nmemory_budget = '{budget}'\nreadahead_max = '1MiB'\n");
        let cluster = mounted_with(Options { conf, ..Options::default() });
        let mut content = noise(7, 12 << 20);
        cluster.s3.put("bucket", "top/old/large", content.clone());
        cluster.cv(&["refresh", "/data/old"]);
        // All but this byte comes from the old object, while the new one is on its way.
        let file = OpenOptions::new().write(true).open(cluster.path("data/old/large")).unwrap();
        let last = content.len() - 1;
        content[last] ^= 1;
        file.write_all_at(&content[last..], last as u64).unwrap();
        file.sync_all().unwrap();
        drop(file);
        assert_object(&cluster, "top/old/large", &content);
    }
}

#[test]
fn what_buckets_cannot_keep_is_refused() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    let file = at("old/file");
    let earlier = fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
    let attempts: Vec<(&str, io::Result<()>)> = vec![
        ("link", fs::hard_link(&file, at("new"))),
        ("symlink", symlink("target", at("new"))),
        ("chmod", fs::set_permissions(&file, fs::Permissions::from_mode(0o600))),
        ("chown", std::os::unix::fs::chown(&file, Some(1), Some(1))),
        ("utimes", File::open(&file).and_then(|file| file.set_times(earlier))),
        ("setxattr", rustix::fs::setxattr(&file, "user.x", b"1", XattrFlags::empty()).map_err(io::Error::from)),
        ("mkfifo", mkfifo(&at("new"))),
        ("fallocate", OpenOptions::new().write(true).open(&file).and_then(|file| fallocate(&file))),
    ];
    for (what, result) in attempts {
        assert_eq!(errno(result), Errno::OPNOTSUPP, "{what}");
    }
    // To set what is so already is no change.
    let metadata = fs::metadata(&file).unwrap();
    fs::set_permissions(&file, metadata.permissions()).unwrap();
    File::open(&file).unwrap().set_times(fs::FileTimes::new().set_modified(metadata.modified().unwrap())).unwrap();
    assert_eq!(errno(fs::create_dir(cluster.path("new"))), Errno::ROFS);
    assert_eq!(errno(fs::write(at(&"n".repeat(256)), "")), Errno::NAMETOOLONG);
    assert_eq!(errno(fs::write(at("").join(OsStr::from_bytes(b"\xff")), "")), Errno::ILSEQ);
    cluster.s3.put("bucket", "seen/old/file", "old");
    cluster.mount("s3://bucket/seen", "/seen", &[]);
    assert_eq!(errno(fs::write(cluster.path("seen/new"), "")), Errno::ROFS);
    assert_eq!(errno(fs::write(cluster.path("seen/old/file"), "")), Errno::ROFS);
}

fn mkfifo(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)?)
}

fn fallocate(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, 1 << 20)?)
}

#[test]
fn a_write_that_fails_leaves_what_was_there() {
    // What fails is tried again for as long as a read may take.
    let conf = "[ufs]\nretries = 1\nrequest_timeout = \"2s\"\n[client]\nread_timeout = \"4s\"\n".to_owned();
    let cluster = mounted_with(Options { conf, ..Options::default() });
    let at = |path: &str| cluster.path("data").join(path);
    fs::write(at("kept"), "old").unwrap();
    let large = noise(5, 40 << 20);
    // The bucket refuses: close says so, and nothing appears.
    cluster.s3.add_fault(&json!({ "kind": "503", "operations": ["PUT", "UploadPart"] }));
    assert_not_copied(&cluster, &at("new"), b"bytes");
    assert_not_copied(&cluster, &at("large"), &large);
    assert_not_copied(&cluster, &at("kept"), b"new");
    cluster.s3.clear_faults();
    let old = [b'o'; 300_000];
    let expected = objects(&[("top/kept", b"old"), ("top/old/file", &old)]);
    let bucket = Bucket::of(&cluster, "bucket");
    assert_same("after failing", &bucket.objects(), &expected);
    // The kernel sends the RELEASE of the files a moment later.
    let are_gone = || !at("new").exists() && !at("large").exists();
    eventually("what failed is given up", PATIENCE, || {
        (are_gone() && fs::read(at("kept")).is_ok_and(|read| read == b"old")).then_some(())
    });
    eventually("the parts are given up", PATIENCE, || (uploads(&cluster) == 0).then_some(()));
    let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
    assert!(log.contains("PUT \"top/new\""), "{log}");

    // A client that is killed in the middle of it leaves the old object.
    let mut file = OpenOptions::new().write(true).truncate(true).open(at("kept")).unwrap();
    file.write_all(&large).unwrap();
    cluster.kill("fuse");
    drop(file);
    assert_same("after the kill", &bucket.objects(), &expected);
    cluster.start("fuse");
    eventually("the mount is back", PATIENCE, || fs::read(at("kept")).is_ok_and(|read| read == b"old").then_some(()));
    fs::write(at("kept"), "new").unwrap();
    assert_object(&cluster, "top/kept", b"new");
}

/// Copies a file there as programs do, which look at what close answers.
#[track_caller]
fn assert_not_copied(cluster: &Cluster, to: &Path, content: &[u8]) {
    let from = cluster.directory().join("from");
    fs::write(&from, content).unwrap();
    let copied = Command::new("cp").arg(from).arg(to).output().unwrap();
    let said = String::from_utf8_lossy(&copied.stderr);
    assert!(!copied.status.success() && said.contains("Input/output error"), "{}: {said}", to.display());
}

#[test]
fn mounts_see_what_others_closed_and_an_exclusive_file_is_made_once() {
    let cluster = mounted_with(Options { more_mounts: vec!["other"], ..Options::default() });
    let (one, other) = (cluster.path("data"), cluster.directory().join("other/data"));
    assert!(!other.join("new").exists());
    fs::write(one.join("new"), "first").unwrap();
    let reads = |path: &str, content: &str| {
        eventually(&format!("{path} is {content}"), PATIENCE, || {
            fs::read(other.join(path)).is_ok_and(|read| read == content.as_bytes()).then_some(())
        });
    };
    reads("new", "first");
    fs::write(one.join("new"), "second").unwrap();
    reads("new", "second");
    fs::remove_file(one.join("new")).unwrap();
    eventually("it is gone", PATIENCE, || (!other.join("new").exists()).then_some(()));
    fs::create_dir(one.join("directory")).unwrap();
    eventually("a directory", PATIENCE, || other.join("directory").is_dir().then_some(()));

    // Both make the same file; the one that closes it first has it.
    let first = File::create_new(one.join("lock")).unwrap();
    let second = File::create_new(other.join("lock")).unwrap();
    (&first).write_all(b"first").unwrap();
    (&second).write_all(b"second").unwrap();
    first.sync_all().unwrap();
    assert_eq!(errno(second.sync_all()), Errno::EXIST);
    drop(second);
    assert_object(&cluster, "top/lock", b"first");

    // What was taken from the old content must not undo what another has written since.
    let appended = OpenOptions::new().append(true).open(one.join("old/file")).unwrap();
    (&appended).write_all(b"tail").unwrap();
    fs::write(other.join("old/file"), "replaced").unwrap();
    assert_eq!(errno(appended.sync_all()), Errno::IO);
    drop(appended);
    assert_object(&cluster, "top/old/file", b"replaced");
}

#[test]
fn what_was_written_is_read_without_asking_the_bucket() {
    let cluster = mounted_with(Options {
        workers: 3,
        more_mounts: vec!["other"],
        conf: COUNTED.to_owned(),
        ..Options::default()
    });
    let other = cluster.directory().join("other/data");
    // More than a block, at several workers; and small ones, one of them changed.
    let large = noise(7, (65 << 20) + 12_345);
    fs::write(cluster.path("data/large"), &large).unwrap();
    fs::write(cluster.path("data/small"), "small").unwrap();
    fs::write(cluster.path("data/changed"), vec![b'c'; 500_000]).unwrap();
    OpenOptions::new().append(true).open(cluster.path("data/changed")).unwrap().write_all(b"more").unwrap();
    let changed = [&[b'c'; 500_000][..], b"more"].concat();
    for (name, content) in [("large", &large[..]), ("small", b"small"), ("changed", &changed)] {
        eventually(&format!("{name} shows"), PATIENCE, || {
            fs::metadata(other.join(name)).is_ok_and(|file| file.len() == content.len() as u64).then_some(())
        });
        for mount in [&cluster.path("data"), &other] {
            assert!(fs::read(mount.join(name)).unwrap() == content, "{name}");
        }
    }
    assert_eq!(cluster.s3.requests("GET"), 0);
}

#[test]
fn renames_copy_first_and_delete_then() {
    let cluster = mounted_with(Options { more_mounts: vec!["other"], ..Options::default() });
    let at = |path: &str| cluster.path("data").join(path);
    let other = cluster.directory().join("other/data");
    let bucket = Bucket::of(&cluster, "bucket");
    let old = [b'o'; 300_000];
    fs::write(at("a"), "one").unwrap();
    fs::rename(at("a"), at("b")).unwrap();
    assert_eq!((fs::read(at("b")).unwrap(), at("a").exists()), (b"one".to_vec(), false));
    assert_same("a file", &bucket.objects(), &objects(&[("top/b", b"one"), ("top/old/file", &old)]));
    fs::write(at("c"), "two").unwrap();
    let no_replace = rustix::fs::RenameFlags::NOREPLACE;
    let renamed = rustix::fs::renameat_with(rustix::fs::CWD, at("c"), rustix::fs::CWD, at("b"), no_replace);
    assert_eq!(renamed, Err(Errno::EXIST));
    fs::rename(at("c"), at("b")).unwrap();
    assert_eq!(fs::read(at("b")).unwrap(), b"two");
    eventually("the other mount sees it", PATIENCE, || {
        (fs::read(other.join("b")).is_ok_and(|read| read == b"two") && !other.join("c").exists()).then_some(())
    });

    // Whoever has it open goes on writing to it under its new name.
    let mut log = OpenOptions::new().append(true).open(at("b")).unwrap();
    log.write_all(b", three").unwrap();
    fs::rename(at("b"), at("log")).unwrap();
    log.write_all(b", four").unwrap();
    drop(log);
    eventually("what was written last", PATIENCE, || {
        (cluster.s3.get("bucket", "top/log") == "two, three, four").then_some(())
    });
    assert!(!at("b").exists());

    // A directory, with all that is in it; and over an empty one.
    fs::create_dir_all(at("d/empty")).unwrap();
    for number in 0..40 {
        fs::write(at(&format!("d/{number}")), number.to_string()).unwrap();
    }
    fs::write(at("d/empty/deep"), "deep").unwrap();
    assert_eq!(errno(fs::rename(at("d"), at("d/empty/x"))), Errno::INVAL);
    assert_eq!(errno(fs::rename(at("d"), at("old"))), Errno::NOTEMPTY);
    assert_eq!(errno(fs::rename(at("d"), at("log"))), Errno::NOTDIR);
    assert_eq!(errno(fs::rename(at("log"), at("d"))), Errno::ISDIR);
    fs::create_dir(at("e")).unwrap();
    fs::rename(at("d"), at("e")).unwrap();
    assert!(!at("d").exists());
    assert_eq!(fs::read(at("e/empty/deep")).unwrap(), b"deep");
    assert_eq!(fs::read_dir(at("e")).unwrap().count(), 41);
    let names = |objects: Objects| objects.into_keys().filter(|key| !key.starts_with("top/old")).collect::<Vec<_>>();
    let mut expected: Vec<String> = (0..40).map(|number| format!("top/e/{number}")).collect();
    expected.extend(["top/e/", "top/e/empty/", "top/e/empty/deep", "top/log"].map(str::to_owned));
    expected.sort();
    assert_eq!(names(bucket.objects()), expected);
    eventually("the other mount sees the directory", PATIENCE, || {
        (fs::read(other.join("e/39")).is_ok_and(|read| read == b"39") && !other.join("d").exists()).then_some(())
    });

    // A client that is killed in the middle of it: every file is under one of its names at least.
    kill_while_renaming(&cluster, &at("e"), &at("f"), "COPY");
    let objects = bucket.objects();
    for number in 0..40 {
        let is_at = |directory: &str| {
            objects.get(&format!("top/{directory}/{number}")).is_some_and(|object| *object == number.to_string())
        };
        assert!(is_at("e") || is_at("f"), "{number}");
    }
}

/// Renames a directory of some forty objects at a store that leaves every fourth request of one kind without an answer:
/// the rename does not end. Kills the client when it has sent half of them, more than are under way at a time.
fn kill_while_renaming(cluster: &Cluster, from: &Path, to: &Path, kind: &str) {
    cluster.s3.reset_stats();
    cluster.s3.add_fault(&json!({ "kind": "hang", "error_rate": 0.25, "operations": [kind] }));
    let (old, new) = (from.to_owned(), to.to_owned());
    let renaming = std::thread::spawn(move || fs::rename(old, new));
    eventually("the rename is under way", PATIENCE, || (cluster.s3.requests(kind) > 20).then_some(()));
    cluster.kill("fuse");
    assert!(renaming.join().unwrap().is_err());
    cluster.s3.clear_faults();
}

/// Kills the client while it renames a directory, and begins anew.
fn interrupt_rename(cluster: &Cluster, from: &Path, to: &Path, kind: &str) {
    kill_while_renaming(cluster, from, to, kind);
    cluster.start("fuse");
    eventually("the mount is back", PATIENCE, || from.is_dir().then_some(()));
    // What is known of both directories is what the interrupted rename has left.
    cluster.cv(&["refresh", "/data"]);
    assert!(fs::read_dir(to).unwrap().next().is_some());
}

#[test]
fn an_interrupted_rename_of_a_directory_is_made_again() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    let bucket = Bucket::of(&cluster, "bucket");
    let below = |directory: &str| bucket.objects_below(&format!("top/{directory}/"));
    let tree = |directory: &str| -> Objects {
        let files = (0..40).map(|number| (number.to_string(), number.to_string()));
        let others = [("", ""), ("deep/", ""), ("deep/file", "deep")];
        let others = others.map(|(name, content)| (name.to_owned(), content.to_owned()));
        files.chain(others).map(|(name, content)| (format!("top/{directory}/{name}"), content.into())).collect()
    };
    let assert_renamed = |from: &str, to: &str| {
        assert_same(&format!("the new name {to}"), &below(to), &tree(to));
        assert_same(&format!("the old name {from}"), &below(from), &Objects::new());
        assert!(!at(from).exists());
        assert_eq!(fs::read_dir(at(to)).unwrap().count(), 41);
        assert_eq!(fs::read(at(to).join("deep/file")).unwrap(), b"deep");
        let marker = bucket.runtime.block_on(bucket.ufs.head(&format!("top/{to}/"))).unwrap();
        assert_eq!(marker.metadata.keys().collect::<Vec<_>>(), ["cavern-write"], "as mkdir has made it");
    };
    fs::create_dir_all(at("a/deep")).unwrap();
    fs::write(at("a/deep/file"), "deep").unwrap();
    (0..40).for_each(|number| fs::write(at(&format!("a/{number}")), number.to_string()).unwrap());
    fs::create_dir(at("unrelated")).unwrap();
    fs::write(at("unrelated/file"), "unrelated").unwrap();

    // While it copied.
    interrupt_rename(&cluster, &at("a"), &at("b"), "COPY");
    assert_same("nothing is deleted yet", &below("a"), &tree("a"));
    assert!(below("b").len() < tree("b").len());
    assert_eq!(errno(fs::rename(at("unrelated"), at("b"))), Errno::NOTEMPTY);
    let (cwd, no_replace) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    assert_eq!(rustix::fs::renameat_with(cwd, at("a"), cwd, at("b"), no_replace), Err(Errno::EXIST));
    fs::rename(at("a"), at("b")).unwrap();
    assert_renamed("a", "b");

    // While it deleted.
    interrupt_rename(&cluster, &at("b"), &at("c"), "DELETE");
    assert_same("all is copied", &below("c"), &tree("c"));
    let left = below("b");
    assert!(left.contains_key("top/b/") && left.len() < tree("b").len(), "{} objects are left", left.len());
    fs::rename(at("b"), at("c")).unwrap();
    assert_renamed("b", "c");

    // Somebody has changed meanwhile what was copied: both are kept.
    interrupt_rename(&cluster, &at("c"), &at("d"), "COPY");
    cluster.s3.put("bucket", "top/d/0", "changed");
    assert_eq!(errno(fs::rename(at("c"), at("d"))), Errno::NOTEMPTY);
    assert_same("nothing is lost", &below("c"), &tree("c"));
    assert_object(&cluster, "top/d/0", b"changed");
    // Until somebody has decided which one is wanted.
    cluster.s3.delete("bucket", "top/d/0");
    fs::rename(at("c"), at("d")).unwrap();
    assert_renamed("c", "d");

    // Between its last two requests: the marker was copied, and is all that is left of the old directory.
    let marker = bucket.runtime.block_on(bucket.ufs.head("top/d/")).unwrap();
    bucket.runtime.block_on(bucket.ufs.copy(&marker, "top/e/")).unwrap();
    cluster.cv(&["refresh", "/data"]);
    fs::rename(at("e"), at("d")).unwrap();
    assert_renamed("e", "d");
}

#[test]
fn what_the_store_does_not_copy_is_renamed_too() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    let large = vec![b'l'; 9 << 20];
    fs::create_dir_all(at("from/empty")).unwrap();
    fs::write(at("from/large"), &large).unwrap();
    fs::write(at("file"), "file").unwrap();
    cluster.s3.add_fault(&json!({ "kind": "403", "operations": ["COPY"] }));
    fs::rename(at("file"), at("renamed")).unwrap();
    fs::rename(at("from"), at("to")).unwrap();
    assert_eq!(fs::read(at("renamed")).unwrap(), b"file");
    assert!(fs::read(at("to/large")).unwrap() == large);
    let expected: [(&str, &[u8]); 4] =
        [("top/renamed", b"file"), ("top/to/", b""), ("top/to/empty/", b""), ("top/to/large", &large)];
    let mut bucket = Bucket::of(&cluster, "bucket").objects();
    bucket.retain(|key, _| !key.starts_with("top/old/"));
    assert_same("a store without copies", &bucket, &objects(&expected));
    let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
    assert_eq!(log.matches("what the store does not copy is read and written by this host").count(), 1, "{log}");
}

/// The kernel has what is below it under inodes that are gone with the old keys.
#[test]
fn what_is_below_a_directory_is_found_as_soon_as_that_was_renamed() {
    let cluster = mounted();
    for round in 0..30 {
        let at = |path: &str| cluster.path("data").join(path.replace("N", &round.to_string()));
        fs::create_dir_all(at("fromN/deep/deeper")).unwrap();
        fs::write(at("fromN/deep/deeper/file"), "content").unwrap();
        assert_eq!(fs::read(at("fromN/deep/deeper/file")).unwrap(), b"content");
        fs::create_dir(at("toN")).unwrap();
        fs::rename(at("fromN"), at("toN")).unwrap();
        assert_eq!(fs::read(at("toN/deep/deeper/file")).unwrap(), b"content", "round {round}");
        fs::write(at("toN/deep/deeper/more"), "more").unwrap();
        assert_eq!(fs::read_dir(at("toN/deep/deeper")).unwrap().count(), 2, "round {round}");
        assert!(!at("fromN").exists(), "round {round}");
    }
}

#[test]
fn what_the_bucket_has_and_no_listing_yet_is_not_replaced() {
    let cluster = mounted();
    let at = |path: &str| cluster.path("data").join(path);
    fs::write(at("mine"), "mine").unwrap();
    fs::create_dir(at("tree")).unwrap();
    fs::write(at("tree/leaf"), "leaf").unwrap();
    assert_eq!(fs::read_dir(at("")).unwrap().count(), 3);
    let bucket = Bucket::of(&cluster, "bucket");
    let others = ["a", "b", "c", "d/leaf", "e", "f/leaf", "g/leaf", "h", "i/leaf", "j", "k", "l", "m/leaf"];
    others.iter().for_each(|key| drop(cluster.s3.put("bucket", &format!("top/{key}"), *key)));
    let expected = bucket.objects();

    let no_replace = |from: &str, to: &str| {
        let cwd = rustix::fs::CWD;
        rustix::fs::renameat_with(cwd, at(from), cwd, at(to), rustix::fs::RenameFlags::NOREPLACE).unwrap_err()
    };
    assert_eq!(no_replace("mine", "a"), Errno::EXIST);
    assert_eq!(errno(File::create_new(at("b"))), Errno::EXIST);
    assert_eq!(errno(fs::create_dir(at("c"))), Errno::EXIST);
    assert_eq!(errno(fs::create_dir(at("d"))), Errno::EXIST);
    let (regular, mode) = (rustix::fs::FileType::RegularFile, rustix::fs::Mode::RWXU);
    assert_eq!(rustix::fs::mknodat(rustix::fs::CWD, at("e"), regular, mode, 0), Err(Errno::EXIST));
    assert_eq!(errno(fs::rename(at("mine"), at("f"))), Errno::ISDIR);
    assert_eq!(errno(fs::rename(at("tree"), at("g"))), Errno::NOTEMPTY);
    assert_eq!(errno(fs::rename(at("tree"), at("h"))), Errno::NOTDIR);
    assert_eq!(no_replace("tree", "i"), Errno::EXIST);
    assert_eq!(errno(symlink("mine", at("j"))), Errno::OPNOTSUPP);
    assert_eq!(errno(fs::hard_link(at("mine"), at("k"))), Errno::OPNOTSUPP);
    Command::new("mv").arg("-n").arg(at("mine")).arg(at("l")).status().unwrap();
    assert_eq!(errno(File::create_new(at("m"))), Errno::EXIST);
    assert_same("after all of them", &bucket.objects(), &expected);
    assert_eq!(fs::read(at("a")).unwrap(), b"a");
    assert_eq!(fs::read(at("d/leaf")).unwrap(), b"d/leaf");
}

#[test]
fn the_command_line_changes_the_bucket() {
    let cluster = mounted();
    let source = cluster.directory().join("source");
    fs::create_dir_all(source.join("deep")).unwrap();
    fs::write(source.join("deep/large"), noise(9, 10 << 20)).unwrap();
    fs::write(source.join("small"), "small").unwrap();
    let source = source.to_str().unwrap();
    cluster.cv(&["fs", "put", source, "/data/put"]);
    assert_object(&cluster, "top/put/deep/large", &noise(9, 10 << 20));
    cluster.cv(&["fs", "put", &format!("{source}/small"), "/data/put/deep/large"]);
    assert_object(&cluster, "top/put/deep/large", b"small");
    cluster.cv(&["fs", "mkdir", "-p", "/data/new/below"]);
    cluster.cv(&["fs", "touch", "/data/new/file", "/data/put/small"]);
    cluster.cv(&["fs", "mv", "/data/put", "/data/new/below"]);
    let bucket = Bucket::of(&cluster, "bucket");
    let old = [b'o'; 300_000];
    let expected = objects(&[
        ("top/new/", b""),
        ("top/new/below/", b""),
        ("top/new/below/put/", b""),
        ("top/new/below/put/deep/", b""),
        ("top/new/below/put/deep/large", b"small"),
        ("top/new/below/put/small", b"small"),
        ("top/new/file", b""),
        ("top/old/file", &old),
    ]);
    assert_same("after the commands", &bucket.objects(), &expected);
    let refused = cluster.try_cv(&["fs", "chmod", "600", "/data/new/file"]);
    assert!(refused.code == 1 && refused.stderr.contains("a bucket cannot keep this"), "{refused:?}");
    cluster.cv(&["fs", "rm", "-r", "/data/new"]);
    assert_same("after removing", &bucket.objects(), &objects(&[("top/old/file", &old)]));
}

#[test]
fn programs_copy_trees_there() {
    let cluster = mounted();
    let source = cluster.directory().join("source");
    for (path, length) in [("a", 10), ("b/c", 70_000), ("b/empty", 0), ("b/d/large", 12 << 20)] {
        let path = source.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, noise(length as u64, length)).unwrap();
    }
    let shell = |script: &str| {
        let output = Command::new("sh").args(["-ec", script, "sh"]).arg(&source).arg(cluster.path("data")).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    };
    shell("cp -r \"$1\" \"$2/cp\" && diff -r \"$1\" \"$2/cp\"");
    shell(
        "mkdir \"$2/tar\" && tar -C \"$1\" -c . | tar -C \"$2/tar\" -xm --no-same-owner && diff -r \"$1\" \"$2/tar\"",
    );
    shell("mv \"$2/cp/b\" \"$2/moved\" && diff -r \"$1/b\" \"$2/moved\" && test ! -e \"$2/cp/b\"");
    shell("rm -r \"$2/cp\" \"$2/tar\"");
    let names: Vec<String> = Bucket::of(&cluster, "bucket").objects().into_keys().collect();
    let left = ["top/moved/", "top/moved/c", "top/moved/d/", "top/moved/d/large", "top/moved/empty", "top/old/file"];
    assert_eq!(names, left);
}

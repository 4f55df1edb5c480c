//! Blocks that are encrypted on the disks of workers.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "what is on the disk tells nobody of this sentence";

/// A file with a key-encryption key.
fn key(directory: &Path, name: &str, byte: u8) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, [byte; 32]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    path
}

/// Whether the sentence is in a file below a directory.
fn is_told_below(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().map(Result::unwrap).any(|entry| match entry.file_type().unwrap() {
        kind if kind.is_dir() => is_told_below(&entry.path()),
        kind => kind.is_file() && is_told_in(&File::open(entry.path()).unwrap()),
    })
}

/// Whether the sentence is in a file. Its holes, which blocks of small files mostly are, are not read.
fn is_told_in(file: &File) -> bool {
    let mut at = 0;
    loop {
        let begin = match seek(file, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => return false,
            Err(error) => panic!("{error}"),
        };
        at = seek(file, SeekFrom::Hole(begin)).unwrap();
        let mut bytes = vec![0; (at - begin) as usize];
        file.read_exact_at(&mut bytes, begin).unwrap();
        if bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes()) {
            return true;
        }
    }
}

/// Data of both modes is read and changed in a cluster whose worker encrypts, survives its death, and is not on its
/// disk.
#[test]
fn what_workers_keep_is_encrypted_and_read_as_it_was_written() {
    let keys = tempfile::tempdir().unwrap();
    let (one, two) = (key(keys.path(), "one", 1), key(keys.path(), "two", 2));
    let conf = format!("[master]\npersist_delay = \"100ms\"\n[worker]\nkey_encryption_key = \"{}\"\n", one.display());
    let cluster = Cluster::up(Options { workers: 1, more_mounts: vec!["second"], conf, ..Options::default() });
    let tree = cluster.seed("bucket", "objects/", 20, 70_001);
    cluster.s3.put("bucket", "objects/secret", SECRET.repeat(10_000));
    cluster.mount("s3://bucket/objects", "/objects", &[]);
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let disk = cluster.at_start.workers[0].dirs[0].clone();

    let mut expected = SECRET.repeat(50_000).into_bytes();
    let mut file = File::options().read(true).write(true).create_new(true).open(cluster.path("fs/file")).unwrap();
    file.write_all(&expected).unwrap();
    for at in [0, 3, 17, 4095, 131_071, 1_000_000, expected.len() - 5] {
        file.write_all_at(b"other", at as u64).unwrap();
        expected[at..at + 5].copy_from_slice(b"other");
    }
    // A hole within, one at the end, and what is cut off and comes back as zeros.
    let mut punch = Command::new("fallocate");
    punch.args(["-p", "-o", "5001", "-l", "300007"]).arg(cluster.path("fs/file"));
    assert!(punch.status().unwrap().success());
    expected[5001..305_008].fill(0);
    let end = expected.len();
    file.set_len(end as u64 - 1003).unwrap();
    file.set_len(end as u64 + 1_000_000).unwrap();
    expected[end - 1003..].fill(0);
    expected.resize(end + 1_000_000, 0);
    file.sync_all().unwrap();
    for number in 0..200 {
        fs::write(cluster.path(format!("fs/{number}")), format!("{SECRET} {number}")).unwrap();
    }
    drop(file);

    let second = |path: &str| cluster.at_start.fuse[1].mount_point.join(path);
    let check = || {
        cluster.assert_tree("objects", "objects/", &tree);
        assert!(fs::read(cluster.path("objects/secret")).unwrap() == SECRET.repeat(10_000).into_bytes());
        for path in [cluster.path("fs/file"), second("fs/file")] {
            assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
        }
        for number in 0..200 {
            assert_eq!(fs::read_to_string(second(&format!("fs/{number}"))).unwrap(), format!("{SECRET} {number}"));
        }
    };
    check();
    assert!(!cluster.at_start.workers[0].socket.exists(), "nobody is handed files");

    // Nothing is in the caches of clients and kernels, and the worker has verified nothing yet.
    cluster.kill("worker0");
    assert!(!is_told_below(&disk));
    cluster.stop("fuse");
    cluster.start("worker0");
    cluster.start("fuse");
    eventually("the worker serves", PATIENCE, || fs::read(cluster.path("fs/0")).ok());
    check();

    // With another key, and without the former one, it does not start; and has changed nothing by trying.
    fs::rename(&one, keys.path().join("former")).unwrap();
    fs::rename(&two, &one).unwrap();
    cluster.stop("worker0");
    let refused = cluster.try_cv(&["local", "start", "worker0", "--dir", &cluster.directory().display().to_string()]);
    assert!(refused.code != 0, "{}", refused.stdout);
    let log = fs::read_to_string(cluster.directory().join("log/worker0.log")).unwrap();
    assert!(log.contains("encrypted with another key than"), "{log}");
    fs::rename(&one, keys.path().join("two")).unwrap();
    fs::rename(keys.path().join("former"), &one).unwrap();
    cluster.start("worker0");
    eventually("the worker serves", PATIENCE, || fs::read(cluster.path("fs/0")).ok());
    check();

    // What is written to the bucket is in clear there, as it is for whoever reads it.
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(&cluster.s3.get("bucket", "fs/7")[..], format!("{SECRET} 7").as_bytes());
    assert!(cluster.s3.get("bucket", "fs/file") == expected);
}

//! `fuse.passthrough_fs_mode`: what the kernel reads by itself, and that it reads the right bytes, whoever changes the
//! file and by whatever means.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{FlockOperation, flock, sendfile};
use rustix::io::Errno;

use crate::client_restart::{content, replace_by_death, up};

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

/// Two mounts of this host, of blocks of 1 MiB.
fn mounted(options: Options, more: &[&str]) -> (Cluster, [PathBuf; 2]) {
    let conf = "[fuse]\npassthrough_fs_mode = true\n".to_owned();
    let cluster = up(Options { more_mounts: vec!["second"], conf, ..options });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[&["--block-size", "1MiB"][..], more].concat());
    let second = cluster.at_start.fuse[1].mount_point.join("fs");
    let first = cluster.path("fs");
    (cluster, [first, second])
}

/// Opens of the first mount whose reads the kernel serves by itself.
fn passed_through(cluster: &Cluster) -> u64 {
    cluster.at_start.fuse[0].metric("cavern_fuse_passthrough_opens").unwrap_or_default()
}

/// Whether an open of a file on the first mount is one of these.
fn by_kernel(cluster: &Cluster, path: &Path) -> Option<File> {
    let before = passed_through(cluster);
    let file = File::open(path).unwrap();
    (passed_through(cluster) > before).then_some(file)
}

/// A file of the first mount that has been at rest for long enough, open, and read by the kernel itself.
fn open_by_kernel(cluster: &Cluster, path: &Path) -> File {
    eventually("the kernel reads the file by itself", PATIENCE, || by_kernel(cluster, path))
}

fn whole(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; 4 * MIB];
    let mut at = 0;
    loop {
        match file.read_at(&mut bytes[at..], at as u64).unwrap() {
            0 => break,
            read => at += read,
        }
    }
    bytes.truncate(at);
    bytes
}

/// As a mapping shows it.
fn mapped(path: &Path) -> Vec<u8> {
    let script = "import mmap, sys; f = open(sys.argv[1], 'rb'); \
                  sys.stdout.buffer.write(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:])";
    let output = Command::new("python3").args(["-c", script]).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// As it goes from its pages to another file.
fn spliced(file: &File) -> Vec<u8> {
    let mut copy = tempfile::tempfile().unwrap();
    let mut at = 0;
    while sendfile(&copy, file, Some(&mut at), MIB).unwrap() > 0 {}
    let mut bytes = Vec::new();
    copy.rewind().unwrap();
    copy.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Opened once more, by what somebody has open.
fn opened_again(file: &File, options: &OpenOptions) -> std::io::Result<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn to_write() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    options
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

#[test]
fn files_of_one_block_are_read_by_the_kernel_to_their_end_and_no_further() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let sizes = [0, 1, 4095, 4096, 50_000, MIB, MIB + 1];
    for (number, size) in sizes.into_iter().enumerate() {
        fs::write(first.join(size.to_string()), content(number, size)).unwrap();
    }
    for (number, size) in sizes.into_iter().enumerate() {
        let (path, expected) = (first.join(size.to_string()), content(number, size));
        let file = if (1..=MIB).contains(&size) {
            open_by_kernel(&cluster, &path)
        } else {
            assert!(by_kernel(&cluster, &path).is_none(), "{size} bytes are in no block, or in two");
            File::open(&path).unwrap()
        };
        let read = whole(&file);
        assert!(read == expected, "{size} bytes, {} read", read.len());
        assert_eq!((file.metadata().unwrap().len(), fs::metadata(&path).unwrap().len()), (size as u64, size as u64));
        assert!(fs::read(second.join(size.to_string())).unwrap() == expected);
        if size > 0 {
            assert!(mapped(&path) == expected, "a mapping of {size} bytes");
        }
    }
}

#[test]
fn what_is_written_in_its_place_shows_to_who_has_the_file_open() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let (path, there) = (first.join("file"), second.join("file"));
    let mut expected = content(1, 50_000);
    fs::write(&path, &expected).unwrap();
    let open = open_by_kernel(&cluster, &path);
    for writer in [&path, &there] {
        let written = OpenOptions::new().write(true).open(writer).unwrap();
        written.write_all_at(b"in the middle", 20_000).unwrap();
        expected[20_000..20_013].copy_from_slice(b"in the middle");
        assert!(whole(&open) == expected);
        drop(written);
        let mut appended = OpenOptions::new().append(true).open(writer).unwrap();
        appended.write_all(b"at the end").unwrap();
        expected.extend_from_slice(b"at the end");
        assert!(whole(&open) == expected);
        drop(appended);
        eventually("its length is known here", PATIENCE, || {
            (fs::metadata(&path).unwrap().len() == expected.len() as u64).then_some(())
        });
        assert!(fs::read(&path).unwrap() == expected && mapped(&path) == expected);

        // Cut, and longer again.
        let cut = OpenOptions::new().write(true).open(writer).unwrap();
        cut.set_len(30_000).unwrap();
        expected.truncate(30_000);
        assert!(whole(&open) == expected, "{} bytes", whole(&open).len());
        cut.set_len(50_000).unwrap();
        expected.resize(50_000, 0);
        assert!(whole(&open) == expected, "what was cut off does not come back");
        drop(cut);
        expected[..4].copy_from_slice(b"over");
        OpenOptions::new().write(true).open(writer).unwrap().write_all_at(b"over", 0).unwrap();
        assert!(whole(&open) == expected);
    }
    // It is at rest, and ends where it should.
    drop(open);
    assert!(whole(&open_by_kernel(&cluster, &path)) == expected);
}

#[test]
fn writers_of_a_file_that_the_kernel_reads_by_itself_are_seen_by_everybody() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(2, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert_eq!(reader.metadata().unwrap().ino(), writer.metadata().unwrap().ino(), "programs see one inode");
    writer.write_all_at(b"written", 100).unwrap();
    expected[100..107].copy_from_slice(b"written");
    let others = [File::open(&path).unwrap(), OpenOptions::new().read(true).write(true).open(&path).unwrap()];
    for file in [&reader, &writer].into_iter().chain(&others) {
        assert!(whole(file) == expected);
    }
    assert!(by_kernel(&cluster, &path).is_none(), "nobody is to map it for writing beside that");
    // By a mapping, which is written back by the time that msync(2) has returned.
    let script = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); \
                  m[200:206] = b'mapped'; m.flush()";
    assert!(Command::new("python3").args(["-c", script]).arg(&path).status().unwrap().success());
    expected[200..206].copy_from_slice(b"mapped");
    assert!(whole(&reader) == expected && whole(&others[0]) == expected);
    reader.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    eventually("the kernel knows of it by the other node", PATIENCE, || {
        (fs::metadata(&path).unwrap().mode() & 0o777 == 0o640).then_some(())
    });
    drop((writer, others));
    eventually("the other mount sees all of it", PATIENCE, || {
        (fs::read(second.join("file")).unwrap() == expected).then_some(())
    });
    drop(reader);
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn who_only_writes_is_in_nobodys_way() {
    let (cluster, [first, _]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(12, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    // By a descriptor, too: no name is to be looked up again.
    for writer in [to_write().open(&path).unwrap(), opened_again(&reader, &to_write()).unwrap()] {
        writer.write_all_at(b"written", 100).unwrap();
        expected[100..107].copy_from_slice(b"written");
        let follows = by_kernel(&cluster, &path).expect("whoever reads reads on so");
        assert!(whole(&reader) == expected && whole(&follows) == expected);
        writer.write_all_at(b"longer", expected.len() as u64).unwrap();
        expected.extend_from_slice(b"longer");
        assert!(whole(&reader) == expected && whole(&follows) == expected);
        assert_eq!(fs::metadata(&path).unwrap().len(), expected.len() as u64);
        fs::write(&path, &expected[..200]).unwrap();
        assert!(whole(&reader) == expected[..200]);
        fs::write(&path, &expected).unwrap();
    }
    assert!(whole(&reader) == expected && mapped(&path) == expected);
}

#[test]
fn a_file_that_is_emptied_and_written_anew_is_read_in_its_place() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    fs::write(&path, content(3, 50_000)).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    for (number, size) in [(4, 60_000), (5, 10_000), (6, 0), (7, 30_000)] {
        let after = content(number, size);
        fs::write(second.join("file"), &after).unwrap();
        let read = whole(&reader);
        assert!(read == after, "{size} bytes, {} read", read.len());
        eventually("its length is known here", PATIENCE, || {
            (fs::metadata(&path).unwrap().len() == size as u64).then_some(())
        });
        assert!(fs::read(&path).unwrap() == after);
        // Under a lock nobody reads what was there before.
        flock(&reader, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(whole(&reader) == after);
        flock(&reader, FlockOperation::Unlock).unwrap();
    }
    drop(reader);
    assert!(by_kernel(&cluster, &path).is_none(), "who locks a file counts on what he reads");
    // Lengthened, it has zeros, whatever there was.
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.set_len(0).unwrap();
    file.write_all_at(b"later", 20_000).unwrap();
    assert!(whole(&file) == [vec![0; 20_000], b"later".to_vec()].concat());
    file.set_len(0).unwrap();
    file.set_len(40_000).unwrap();
    assert!(whole(&file) == vec![0; 40_000]);
}

#[test]
fn a_file_that_gets_another_block_is_opened_as_it_is_now() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let (before, after) = (content(3, 50_000), content(4, 60_000));
    fs::write(&path, &before).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    // Emptied while somebody else may write to it.
    let other = to_write().open(second.join("file")).unwrap();
    other.write_all_at(&before[..10], 0).unwrap();
    fs::write(&path, &after).unwrap();
    eventually("whoever opens it sees what it is now", PATIENCE, || (fs::read(&path).unwrap() == after).then_some(()));
    assert!(mapped(&path) == after, "also a mapping");
    assert_eq!(reader.metadata().unwrap().len(), 60_000);
    assert!(whole(&reader) == before, "who has had it open reads to its end what it was");
    let again = opened_again(&reader, OpenOptions::new().read(true)).unwrap();
    assert!(whole(&again) == after, "who opens what he has open sees what it is");
    // Under a lock nobody is to read what was there before.
    assert_eq!(errno(flock(&reader, FlockOperation::NonBlockingLockShared).map_err(Into::into)), Errno::IO);
    let fresh = File::open(&path).unwrap();
    flock(&fresh, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(whole(&fresh) == after);
}

#[test]
fn a_file_that_grows_beyond_its_block_is_read_to_the_end_of_that() {
    let (cluster, [first, _]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(13, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    let more = content(14, 3 * MIB / 2);
    OpenOptions::new().append(true).open(&path).unwrap().write_all(&more).unwrap();
    expected.extend_from_slice(&more);
    assert!(whole(&reader) == expected[..MIB]);
    assert!(fs::read(&path).unwrap() == expected && mapped(&path) == expected);
    // So is a length that nothing was written for.
    fs::write(first.join("sparse"), b"first").unwrap();
    let reader = open_by_kernel(&cluster, &first.join("sparse"));
    to_write().open(first.join("sparse")).unwrap().set_len(2 * MIB as u64).unwrap();
    assert!(whole(&reader) == [b"first".to_vec(), vec![0; MIB - 5]].concat());
}

#[test]
fn the_nodes_of_a_file_show_the_same_whichever_it_is_changed_by() {
    let (cluster, [first, _]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(15, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // By the node that the name has led to before, past what the kernel reads by itself.
    let before = opened_again(&reader, OpenOptions::new().read(true)).unwrap();
    assert!(spliced(&before) == expected && whole(&writer) == expected);
    writer.write_all_at(b"by the newest", 100).unwrap();
    expected[100..113].copy_from_slice(b"by the newest");
    assert!(whole(&before) == expected);
    eventually("its pages are forgotten", PATIENCE, || (spliced(&before) == expected).then_some(()));

    let by_first = opened_again(&reader, &to_write()).unwrap();
    by_first.write_all_at(b"by the first", 200).unwrap();
    by_first.write_all_at(b"longer", expected.len() as u64).unwrap();
    expected[200..212].copy_from_slice(b"by the first");
    expected.extend_from_slice(b"longer");
    assert_eq!(writer.metadata().unwrap().len(), expected.len() as u64);
    eventually("its pages are forgotten", PATIENCE, || (whole(&writer) == expected).then_some(()));
    assert!(whole(&reader) == expected && mapped(&path) == expected);
    by_first.set_len(1000).unwrap();
    by_first.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    let shown = writer.metadata().unwrap();
    assert_eq!((shown.len(), shown.mode() & 0o777), (1000, 0o640));
    fs::hard_link(&path, first.join("link")).unwrap();
    assert_eq!((reader.metadata().unwrap().nlink(), writer.metadata().unwrap().nlink()), (2, 2));
    assert!(whole(&reader) == expected[..1000]);
}

#[test]
fn a_removed_file_is_read_on_by_who_has_it_open() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let expected = content(5, 50_000);
    fs::write(first.join("file"), &expected).unwrap();
    let reader = open_by_kernel(&cluster, &first.join("file"));
    fs::remove_file(second.join("file")).unwrap();
    eventually("the name is gone", PATIENCE, || (!first.join("file").exists()).then_some(()));
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    assert!(whole(&reader) == expected);
    eventually("it has no name", PATIENCE, || (reader.metadata().unwrap().nlink() == 0).then_some(()));
}

#[test]
fn a_file_that_only_the_bucket_has_is_read_by_requests() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(11, 50_000);
    fs::write(&path, &expected).unwrap();
    drop(open_by_kernel(&cluster, &path));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    cluster.cv(&["fs", "free", "/fs/file"]);
    // What is as old, and has a block.
    fs::write(first.join("other"), &expected).unwrap();
    drop(open_by_kernel(&cluster, &first.join("other")));
    assert!(by_kernel(&cluster, &path).is_none());
    assert!(fs::read(&path).unwrap() == expected && mapped(&path) == expected);
    to_write().open(second.join("file")).unwrap().write_all_at(b"written", 9).unwrap();
    expected[9..16].copy_from_slice(b"written");
    eventually("whoever opens it sees that", PATIENCE, || (fs::read(&path).unwrap() == expected).then_some(()));
    assert!(whole(&open_by_kernel(&cluster, &path)) == expected);
}

#[test]
fn a_replica_that_was_given_up_is_read_by_nobody_who_opens_the_file() {
    let (cluster, [first, second]) = mounted(Options { workers: 2, ..Options::default() }, &["--replicas", "2"]);
    let path = first.join("file");
    let mut expected = content(6, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    assert!(whole(&reader) == expected);
    for worker in ["worker0", "worker1"] {
        cluster.kill(worker);
        OpenOptions::new().write(true).open(second.join("file")).unwrap().write_all_at(worker.as_bytes(), 100).unwrap();
        expected[100..107].copy_from_slice(worker.as_bytes());
        cluster.start(worker);
        eventually("what was written is seen", PATIENCE, || (fs::read(&path).unwrap() == expected).then_some(()));
        eventually("the block is at two workers again", 2 * PATIENCE, || {
            let shown = cluster.cv(&["fs", "blocks", "/fs/file", "--json"]).json();
            let replicas = shown.as_array().unwrap();
            let is_there = |replica: &serde_json::Value| !replica["path"].as_str().unwrap().is_empty();
            (replicas.len() == 2 && replicas.iter().all(is_there)).then_some(())
        });
        assert!(fs::read(&path).unwrap() == expected);
    }
    drop(reader);
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn a_cut_that_a_worker_did_not_get_shows_nothing_of_what_was_cut_off() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(7, 50_000);
    fs::write(&path, &expected).unwrap();
    drop(open_by_kernel(&cluster, &path));
    cluster.kill("worker0");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    cluster.start("worker0");
    expected.truncate(10_000);
    for shown in [&path, &second.join("file")] {
        eventually("it is as long as it is", PATIENCE, || (fs::read(shown).unwrap() == expected).then_some(()));
        assert!(mapped(shown) == expected);
    }
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.set_len(20_000).unwrap();
    expected.resize(20_000, 0);
    assert!(whole(&file) == expected, "nor does it come back");
    drop(file);
    // As long as it has more than the file the kernel does not read it by itself.
    fs::write(first.join("other"), &expected).unwrap();
    drop(open_by_kernel(&cluster, &first.join("other")));
    assert!(by_kernel(&cluster, &path).is_none() && fs::read(&path).unwrap() == expected);
    let rewritten = content(10, 70_000);
    fs::write(&path, &rewritten).unwrap();
    assert!(whole(&open_by_kernel(&cluster, &path)) == rewritten);
}

#[test]
fn what_the_kernel_reads_by_itself_outlives_the_process_that_serves_the_mount() {
    let (cluster, [first, second]) = mounted(Options::default(), &[]);
    let path = first.join("file");
    let mut expected = content(8, 50_000);
    fs::write(&path, &expected).unwrap();
    let reader = open_by_kernel(&cluster, &path);
    let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    replace_by_death(&cluster);
    writer.write_all_at(b"later", 300).unwrap();
    expected[300..305].copy_from_slice(b"later");
    for file in [&reader, &writer, &File::open(&path).unwrap()] {
        assert!(whole(file) == expected);
    }
    flock(&reader, FlockOperation::NonBlockingLockShared).unwrap();
    drop(writer);
    let appending = opened_again(&reader, OpenOptions::new().append(true)).unwrap();
    replace_by_death(&cluster);
    assert!(whole(&reader) == expected && fs::read(&path).unwrap() == expected);
    // The kernel goes by the file of the block as long as anybody has it open who was told so.
    drop(reader);
    replace_by_death(&cluster);
    File::open(&path).unwrap();
    (&appending).write_all(b"at the end").unwrap();
    expected.extend_from_slice(b"at the end");
    drop(appending);
    eventually("it is there", PATIENCE, || (fs::read(second.join("file")).unwrap() == expected).then_some(()));
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    assert!(whole(&direct) == expected);
}

#[test]
fn a_strict_mount_is_read_by_requests_alone() {
    let (cluster, [first, _]) = mounted(Options::default(), &["--consistency", "strict"]);
    fs::write(first.join("strict"), content(9, 1000)).unwrap();
    cluster.mount_fs_mode("s3://bucket/other", "/other", &[]);
    fs::write(cluster.path("other/file"), content(9, 1000)).unwrap();
    drop(open_by_kernel(&cluster, &cluster.path("other/file")));
    let before = passed_through(&cluster);
    let mut bytes = Vec::new();
    File::open(first.join("strict")).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(bytes == content(9, 1000) && passed_through(&cluster) == before);
}

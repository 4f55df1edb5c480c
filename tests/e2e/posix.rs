//! What a mount of cache mode is to programs: attributes, what it refuses and with which errno, mmap, direct I/O,
//! locks, extended attributes. The sentences of `docs/semantics.md` that no other test proves.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::fs::{FlockOperation, XattrFlags};
use rustix::io::Errno;

use crate::fs_mode_lease::Stopped;

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

fn mounted(conf: &str) -> Cluster {
    let cluster = Cluster::up(Options { conf: conf.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "top/dir/file", vec![b'f'; 300_000]);
    cluster.s3.put("bucket", "top/other", "other");
    cluster.mount("s3://bucket/top", "/data", &[]);
    cluster
}

#[test]
fn attributes_are_those_of_the_object_and_of_the_configuration() {
    let before = SystemTime::now();
    let cluster = mounted("[fuse]\nuid = 1234\ngid = 2345\nfile_mode = 0o440\ndir_mode = 0o750\n");
    let file = fs::metadata(cluster.path("data/dir/file")).unwrap();
    assert_eq!((file.len(), file.blocks(), file.nlink()), (300_000, 300_000_u64.div_ceil(512), 1));
    assert_eq!((file.uid(), file.gid(), file.permissions().mode()), (1234, 2345, 0o100440));
    assert_eq!((file.atime(), file.ctime()), (file.mtime(), file.mtime()));
    let second = Duration::from_secs(1);
    assert!(file.modified().unwrap() + second > before && file.modified().unwrap() < SystemTime::now() + second);
    let directory = fs::metadata(cluster.path("data/dir")).unwrap();
    assert_eq!((directory.nlink(), directory.permissions().mode(), directory.uid()), (2, 0o40750, 1234));
    // An inode number is that of the version, the same for every look and every listing.
    let listed = fs::read_dir(cluster.path("data/dir")).unwrap().next().unwrap().unwrap();
    assert_eq!(std::os::unix::fs::DirEntryExt::ino(&listed), file.ino());
    cluster.stop("fuse");
    cluster.start("fuse");
    assert_eq!(fs::metadata(cluster.path("data/dir/file")).unwrap().ino(), file.ino());

    let space = rustix::fs::statvfs(cluster.mount_point()).unwrap();
    assert_eq!((space.f_namemax, space.f_files), (255, 0));
    assert!(space.f_blocks > 0 && space.f_bavail <= space.f_blocks);
}

#[test]
fn the_size_of_the_file_system_follows_what_workers_have() {
    let cluster = Cluster::up(Options { conf: "[master]\nheartbeat = \"200ms\"\n".to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let used = || {
        let space = rustix::fs::statvfs(cluster.mount_point()).unwrap();
        (space.f_blocks - space.f_bfree) * space.f_frsize
    };
    assert!(used() < 1 << 20, "{}", used());
    fs::write(cluster.path("fs/file"), vec![1; 8 << 20]).unwrap();
    eventually("what was written counts", Duration::from_secs(60), || (used() >= 8 << 20).then_some(()));
    // Nobody waits long for a master that stands still.
    let masters = &cluster.status().masters[0];
    let _stopped = Stopped::new(masters);
    let path = cluster.mount_point().to_owned();
    within("an answer", Duration::from_secs(30), move || rustix::fs::statvfs(path).unwrap());
}

#[test]
fn whatever_would_change_something_is_refused() {
    let cluster = mounted("");
    let (file, directory) = (cluster.path("data/dir/file"), cluster.path("data/dir"));
    let new = cluster.path("data/new");
    let attempts: Vec<(&str, io::Result<()>)> = vec![
        ("open for writing", OpenOptions::new().write(true).open(&file).map(drop)),
        ("append", OpenOptions::new().append(true).open(&file).map(drop)),
        ("truncate", OpenOptions::new().write(true).truncate(true).open(&file).map(drop)),
        ("create", File::create(&new).map(drop)),
        ("mkdir", fs::create_dir(&new)),
        ("unlink", fs::remove_file(&file)),
        ("rmdir", fs::remove_dir(&directory)),
        ("rename", fs::rename(&file, &new)),
        ("link", fs::hard_link(&file, &new)),
        ("symlink", symlink("target", &new)),
        ("chmod", fs::set_permissions(&file, fs::Permissions::from_mode(0o600))),
        ("chown", std::os::unix::fs::chown(&file, Some(1), Some(1))),
        ("utimes", utimes(&file)),
        ("setxattr", rustix::fs::setxattr(&file, "user.x", b"1", XattrFlags::empty()).map_err(io::Error::from)),
        ("removexattr", rustix::fs::removexattr(&file, "user.cavern.key").map_err(io::Error::from)),
        ("mkfifo", mkfifo(&new)),
        ("mkdir above the mounts", fs::create_dir(cluster.path("new"))),
        ("rmdir of a mount", fs::remove_dir(cluster.path("data"))),
    ];
    for (what, result) in attempts {
        assert_eq!(errno(result), Errno::ROFS, "{what}");
    }
    assert_eq!(fs::read(&file).unwrap(), vec![b'f'; 300_000]);
    assert_eq!(cluster.s3.get("bucket", "top/other"), "other");
}

fn utimes(path: &Path) -> io::Result<()> {
    let times = fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
    File::open(path)?.set_times(times)
}

fn mkfifo(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)?)
}

#[test]
fn files_are_mapped_read_directly_locked_and_described() {
    let cluster = mounted("");
    let path = cluster.path("data/dir/file");

    // grep maps nothing these days; python does.
    let script = "import \
        mmap,sys\nf=open(sys.argv[1],'rb')\nm=mmap.mmap(f.fileno(),0,mmap.MAP_PRIVATE,mmap.PROT_READ)\n\
                  assert m[:]==b'f'*300000\nm=mmap.mmap(f.fileno(),0,mmap.MAP_SHARED,mmap.PROT_READ)\nassert \
                  m[299999:]==b'f'\n";
    let mapped = Command::new("python3").args(["-c", script]).arg(&path).stdin(Stdio::null()).output().unwrap();
    assert!(mapped.status.success(), "{}", String::from_utf8_lossy(&mapped.stderr));

    let direct =
        OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(&path).unwrap();
    let mut bytes = vec![0; 1000];
    // Neither place nor length need be aligned.
    direct.read_exact_at(&mut bytes, 299_000).unwrap();
    assert!(bytes.iter().all(|byte| *byte == b'f'));

    // Locks are this mount's: two descriptors exclude each other.
    let (one, two) = (File::open(&path).unwrap(), File::open(&path).unwrap());
    rustix::fs::flock(&one, FlockOperation::LockExclusive).unwrap();
    assert_eq!(rustix::fs::flock(&two, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
    drop(one);
    rustix::fs::flock(&two, FlockOperation::NonBlockingLockExclusive).unwrap();
    // Nobody can write, so whoever may read is in nobody's way.
    rustix::fs::fcntl_lock(&two, FlockOperation::NonBlockingLockShared).unwrap();
    assert_eq!(rustix::fs::fcntl_lock(&two, FlockOperation::NonBlockingLockExclusive), Err(Errno::BADF));
    rustix::fs::fcntl_lock(&two, FlockOperation::Unlock).unwrap();

    let attribute = |path: &Path, name: &str| {
        let mut value = vec![0; 1024];
        let length = rustix::fs::getxattr(path, name, &mut value)?;
        value.truncate(length);
        Ok::<_, Errno>(String::from_utf8(value).unwrap())
    };
    assert_eq!(attribute(&path, "user.cavern.key").unwrap(), "top/dir/file");
    assert_eq!(attribute(&path, "user.cavern.mount").unwrap(), "/data");
    assert_eq!(attribute(&path, "user.cavern.etag").unwrap().len(), 32);
    assert_eq!(attribute(&path, "user.cavern.content_id").unwrap().len(), 32);
    let directory = cluster.path("data/dir");
    assert_eq!(attribute(&directory, "user.cavern.key").unwrap(), "top/dir/");
    assert_eq!(attribute(&directory, "user.cavern.etag"), Err(Errno::NODATA));
    assert_eq!(attribute(&path, "user.other"), Err(Errno::NODATA));
    assert_eq!(attribute(&cluster.path(""), "user.cavern.mount"), Err(Errno::NODATA));

    assert_eq!(errno(fs::read(&directory)), Errno::ISDIR);
    assert_eq!(errno(fs::read_dir(&path).map(drop)), Errno::NOTDIR);
    assert_eq!(errno(fs::metadata(path.join("below"))), Errno::NOTDIR);
    assert_eq!(errno(fs::read_link(&path)), Errno::INVAL);
    assert_eq!(errno(File::open(cluster.path("data/nowhere"))), Errno::NOENT);
    direct.sync_all().unwrap();
}

//! Files of fs-mode mounts without a name (`O_TMPFILE`): they behave as local ones, get a name by a link, and leave
//! nothing behind.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(60);

fn mounted(options: Options) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"100ms\"\n{}", options.conf);
    let cluster = Cluster::up(Options { conf, ..options });
    cluster.s3.create_bucket("bucket");
    // Where names are held, blocks of files that stayed empty are at the worker for a while.
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--names", "synced"]);
    cluster
}

fn nameless(directory: &Path, mode: u32, more: OFlags) -> Result<File, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | more;
    rustix::fs::openat(CWD, directory, flags, Mode::from_raw_mode(mode)).map(File::from)
}

/// By the two ways that there are.
fn link(file: &File, to: &Path, by_path: bool) -> Result<(), Errno> {
    if by_path {
        let from = format!("/proc/self/fd/{}", file.as_raw_fd());
        return rustix::fs::linkat(CWD, from, CWD, to, AtFlags::SYMLINK_FOLLOW);
    }
    rustix::fs::linkat(file, "", CWD, to, AtFlags::EMPTY_PATH)
}

/// Bytes of blocks of files, at all workers.
fn data_bytes(cluster: &Cluster) -> u64 {
    cluster.status().workers.iter().map(|worker| worker.metric("cavern_worker_data_bytes").unwrap()).sum()
}

fn gone(cluster: &Cluster) {
    eventually("what has no name is gone", PATIENCE, || (data_bytes(cluster) == 0).then_some(()));
}

fn shown(file: &File) -> (u32, u32, u32, u64, u64) {
    let data = file.metadata().unwrap();
    (data.mode(), data.uid(), data.gid(), data.nlink(), data.len())
}

/// What a program sees that makes such files in a directory.
fn deeds(directory: &Path) -> Vec<String> {
    let mut seen = Vec::new();
    for (number, by_path) in [false, true].into_iter().enumerate() {
        let file = nameless(directory, 0o6640, OFlags::empty()).unwrap();
        seen.push(format!("made {:?}", shown(&file)));
        file.write_all_at(b"content", 3).unwrap();
        rustix::fs::fsetxattr(&file, "user.a", b"1", rustix::fs::XattrFlags::empty()).unwrap();
        file.set_permissions(Permissions::from_mode(0o604)).unwrap();
        file.set_len(8).unwrap();
        seen.push(format!("changed {:?} {}", shown(&file), fs::read_dir(directory).unwrap().count()));
        let (to, more) = (directory.join(format!("n{number}")), directory.join(format!("m{number}")));
        seen.push(format!("linked {:?} {:?}", link(&file, &to, by_path), shown(&file)));
        seen.push(format!("again {:?} {:?}", link(&file, &more, by_path), shown(&file)));
        seen.push(format!("there {:?}", link(&file, &to, by_path)));
        file.write_all_at(b"after", 8).unwrap();
        seen.push(format!("read {:?}", fs::read(&to).unwrap()));
        for name in [&to, &more] {
            fs::remove_file(name).unwrap();
            seen.push(format!("removed {:?}", shown(&file)));
        }
        seen.push(format!("too late {:?}", link(&file, &to, by_path)));
        let unlinkable = nameless(directory, 0o600, OFlags::EXCL).unwrap();
        seen.push(format!("O_EXCL {:?} {:?}", link(&unlinkable, &to, by_path), shown(&unlinkable)));
    }
    seen.push(format!("to read {:?}", {
        let flags = OFlags::TMPFILE | OFlags::RDONLY;
        rustix::fs::openat(CWD, directory, flags, Mode::from_raw_mode(0o600)).map(drop)
    }));
    seen.push(format!("in a file {:?}", {
        fs::write(directory.join("file"), "").unwrap();
        nameless(&directory.join("file"), 0o600, OFlags::empty()).map(drop)
    }));
    seen.push(format!("by a user {}", {
        let script = "import os\ntry: print(os.fstat(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o666)).st_uid)\n\
            except OSError as error: print(error.errno)";
        use std::os::unix::process::CommandExt as _;
        let done = Command::new("python3").args(["-c", script]).current_dir(directory).uid(65_534).output().unwrap();
        String::from_utf8(done.stdout).unwrap()
    }));
    seen
}

#[test]
fn files_without_names_are_what_they_are_locally() {
    let cluster = mounted(Options::default());
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    for (mode, gid) in [(0o755, 0), (0o2777, 55), (0o1777, 0)] {
        let (ours, theirs) = (cluster.path(format!("fs/{mode}")), local.path().join(mode.to_string()));
        for directory in [&ours, &theirs] {
            fs::create_dir(directory).unwrap();
            chown(directory, None, Some(gid)).unwrap();
            fs::set_permissions(directory, Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(deeds(&ours), deeds(&theirs), "in a directory of mode {mode:o}");
    }
    gone(&cluster);
    // Above the mounts, and in a mount of objects, there are no such files.
    cluster.mount_from(&cluster.bucket_options(), "s3://bucket/objects", "/objects", &["--access-mode", "read_write"]);
    assert_eq!(nameless(&cluster.path("objects"), 0o600, OFlags::empty()).map(drop), Err(Errno::OPNOTSUPP));
    assert_eq!(nameless(cluster.mount_point(), 0o600, OFlags::empty()).map(drop), Err(Errno::ROFS));
    drop(nameless(&cluster.path("fs"), 0o600, OFlags::empty()).unwrap());
}

#[test]
fn the_bucket_hears_of_them_when_they_get_a_name() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let keys = || Bucket::of(&cluster, "bucket").objects().into_keys().collect::<Vec<_>>();
    let file = nameless(&cluster.path("fs"), 0o600, OFlags::empty()).unwrap();
    file.write_all_at(&[7; 100_000], 0).unwrap();
    file.sync_all().unwrap();
    fs::write(cluster.path("fs/other"), "other").unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(keys(), ["fs/other"]);
    link(&file, &cluster.path("fs/named"), false).unwrap();
    let there = cluster.at_start.fuse[1].mount_point.join("fs/named");
    eventually("it is on the other mount", PATIENCE, || (fs::read(&there).ok()? == [7; 100_000]).then_some(()));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(Bucket::of(&cluster, "bucket").objects()["fs/named"], vec![7; 100_000]);
    drop(file);
    assert_eq!(fs::metadata(cluster.path("fs/named")).unwrap().nlink(), 1);
}

#[test]
fn they_outlive_a_killed_master_and_end_with_their_client() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let make = || {
        let file = nameless(&cluster.path("fs"), 0o600, OFlags::empty()).unwrap();
        file.write_all_at(&[7; 300_000], 0).unwrap();
        file.sync_all().unwrap();
        file
    };
    let (file, second) = (make(), make());
    cluster.kill("master");
    cluster.start("master");
    link(&file, &cluster.path("fs/named"), true).unwrap();
    assert_eq!(fs::read(cluster.path("fs/named")).unwrap(), [7; 300_000]);
    let mut read = [0; 3];
    second.read_exact_at(&mut read, 299_997).unwrap();
    assert_eq!(read, [7; 3]);
    drop(second);
    fs::remove_file(cluster.path("fs/named")).unwrap();
    drop(file);
    gone(&cluster);

    // Mounted again: the session of the one before has ended. Otherwise it ends with its lease.
    for is_mounted_again in [true, false] {
        let file = make();
        assert!(data_bytes(&cluster) > 0);
        cluster.kill("fuse0");
        if is_mounted_again {
            cluster.start("fuse0");
        }
        gone(&cluster);
        let dead: io::Error = file.metadata().unwrap_err();
        assert_eq!(Errno::from_io_error(&dead), Some(Errno::NOTCONN));
    }
}

#[test]
fn default_lists_umask_and_quotas_are_as_for_files_with_names() {
    let cluster = mounted(Options::default());
    let directory = cluster.path("fs/d");
    fs::create_dir(&directory).unwrap();
    // user::rwx user:5:rwx group::r-x mask::rwx other::---
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in
        [(1, 7, u32::MAX), (2, 7, 5), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 0, u32::MAX)]
    {
        list.extend(u16::to_le_bytes(tag));
        list.extend(u16::to_le_bytes(permissions));
        list.extend(id.to_le_bytes());
    }
    let name = "system.posix_acl_default";
    rustix::fs::setxattr(&directory, name, &list, rustix::fs::XattrFlags::empty()).unwrap();
    let named = File::create(directory.join("named")).unwrap();
    let without = nameless(&directory, 0o666, OFlags::empty()).unwrap();
    assert_eq!(without.metadata().unwrap().mode(), named.metadata().unwrap().mode());
    let access = |file: &File| {
        let mut value = [0; 100];
        let length = rustix::fs::fgetxattr(file, "system.posix_acl_access", &mut value[..]).unwrap();
        value[..length].to_vec()
    };
    assert_eq!(access(&without), access(&named));

    // What has no name does not count, but there must be room for it, as for what is linked.
    cluster.cv(&["fs", "quota", "set", "/fs/d", "--bytes", "2MiB", "--inodes", "2"]);
    without.write_all_at(&vec![1; 2 << 20], 0).unwrap();
    without.sync_all().unwrap();
    assert_eq!(link(&without, &directory.join("large"), false), Err(Errno::DQUOT));
    without.set_len(1 << 20).unwrap();
    link(&without, &directory.join("large"), false).unwrap();
    assert_eq!(nameless(&directory, 0o600, OFlags::empty()).map(drop), Err(Errno::DQUOT));
    let quotas = cluster.cv(&["fs", "quota", "get", "/fs/d", "--json"]).json();
    let lists = 2 * ("system.posix_acl_access".len() + access(&named).len());
    assert_eq!((&quotas[0]["bytes"], &quotas[0]["inodes"]), (&((1 << 20) + lists).into(), &2.into()));
}

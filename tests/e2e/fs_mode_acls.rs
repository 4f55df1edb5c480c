//! POSIX access lists of fs-mode mounts: as on a local file system, heeded by the kernel on every mount, kept by
//! copies.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
/// Of no particular user or group.
const NO_ID: u32 = u32::MAX;
/// For an invalidation to reach another mount.
const PATIENCE: Duration = Duration::from_secs(60);

fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

/// A list as the kernel spells it: tags, permissions, ids.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn random_acl(random: &mut StdRng) -> Vec<u8> {
    let mut right = || random.random_range(0..8);
    let [owner, user, group, named, mask, others] = [right(), right(), right(), right(), right(), right()];
    let mut entries = vec![(1, owner | 6, NO_ID)];
    let (has_user, has_group) = (random.random(), random.random());
    entries.extend(if has_user { Some((2, user, 1000)) } else { None });
    entries.push((4, group, NO_ID));
    entries.extend(if has_group { Some((8, named, 2000)) } else { None });
    entries.extend((has_user || has_group || random.random()).then_some((0x10, mask, NO_ID)));
    entries.push((0x20, others, NO_ID));
    acl(&entries)
}

fn get(path: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = [0; 4096];
    let length = rustix::fs::lgetxattr(path, name, &mut value)?;
    Ok(value[..length].to_vec())
}

fn set(path: &Path, name: &str, value: &[u8]) -> Result<(), Errno> {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty())
}

#[test]
fn lists_behave_as_on_a_local_file_system() {
    let cluster = mounted(Options::default());
    // Not /tmp, which may have no access lists.
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let tops = [cluster.path("fs"), local.path().to_owned()];
    // Before any file has a list, whoever asks for a default list is told that there are none at all.
    let first = cluster.path("fs/first");
    fs::write(&first, "").unwrap();
    set(&first, ACCESS, &acl(&[(1, 6, NO_ID), (2, 4, 1000), (4, 0, NO_ID), (0x10, 4, NO_ID), (0x20, 0, NO_ID)]))
        .unwrap();
    let mut random = StdRng::seed_from_u64(20);
    for number in 0..300 {
        let name = ["a", "b", "a/c", "b/c", "a/c/d"][random.random_range(0..5)];
        let (choice, value, mode) =
            (random.random_range(0..8), random_acl(&mut random), random.random_range(0..0o1000));
        let mask = [0o000, 0o022, 0o077][random.random_range(0..3)];
        let answers = tops.each_ref().map(|top| {
            let path = top.join(name);
            let shell = |script: String| {
                let made = Command::new("sh").args(["-c", &script]).current_dir(top).stderr(Stdio::null()).status();
                format!("{}", made.unwrap().success())
            };
            match choice {
                0 => shell(format!("umask {mask:03o}; mkdir {name}")),
                1 => shell(format!("umask {mask:03o}; set -C; : > {name}")),
                2 => format!("{:?}", set(&path, ACCESS, &value)),
                3 | 4 => format!("{:?}", set(&path, DEFAULT, &value)),
                5 => {
                    let changed = fs::set_permissions(&path, fs::Permissions::from_mode(mode | 0o700));
                    format!("{:?}", changed.map_err(|error| error.raw_os_error()))
                }
                6 => format!("{:?}", rustix::fs::removexattr(&path, [ACCESS, DEFAULT][usize::from(mode & 1 == 0)])),
                _ => {
                    let mut names = [0; 256];
                    let length = rustix::fs::llistxattr(&path, &mut names).unwrap_or(0);
                    let names = String::from_utf8_lossy(&names[..length]).into_owned();
                    let mut names: Vec<&str> = names.split('\0').filter(|name| *name != "security.selinux").collect();
                    names.sort_unstable();
                    format!("{names:?}")
                }
            }
        });
        assert_eq!(answers[0], answers[1], "step {number}: {choice} on {name}");
        let shown = tops.each_ref().map(|top| {
            let path = top.join(name);
            let mode = fs::metadata(&path).map(|data| data.permissions().mode()).map_err(|error| error.raw_os_error());
            (mode, get(&path, ACCESS), get(&path, DEFAULT))
        });
        assert_eq!(shown[0], shown[1], "step {number}: {choice} on {name}");
    }
}

/// Runs a command as another user, in a directory that this user could not find by its path.
fn as_user(uid: u32, directory: &Path, script: &str) -> bool {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("cd /proc/self/fd/0/. && {script}")]);
    command.stdin(File::open(directory).unwrap()).stdout(Stdio::null()).stderr(Stdio::null());
    command.uid(uid).gid(uid).status().unwrap().success()
}

#[test]
fn the_list_of_the_mount_point_is_asked_for_once_whoever_comes_by() {
    let cluster = mounted(Options::default());
    fs::set_permissions(cluster.path("fs"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(cluster.path("fs/file"), "a line\n").unwrap();
    let read = |times: u32| format!("for n in $(seq {times}); do read line < fs/file || exit 1; done");
    let asked = || cluster.status().fuse[0].metric("cavern_fuse_requests_total{operation=\"xattr\"").unwrap();
    assert!(as_user(1000, cluster.mount_point(), &read(1)));
    let before = asked();
    assert!(as_user(1000, cluster.mount_point(), &read(100)));
    // The kernel asks again for what it knows no more, as when somebody has dropped its caches.
    assert!(asked() - before < 10, "{} questions for a hundred reads", asked() - before);
    // The root is one directory, whichever way it is looked at.
    let [root, above] = ["", "fs/.."].map(|path| fs::metadata(cluster.path(path)).unwrap().ino());
    assert_eq!((root, above), (1, 1));
    let listed = fs::read_dir(cluster.mount_point()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(listed.collect::<Vec<_>>(), ["fs"]);
}

#[test]
fn whoever_a_list_names_may_do_as_it_says_on_every_mount() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let top = cluster.path("fs");
    let other = cluster.at_start.fuse[1].mount_point.join("fs");
    fs::set_permissions(&top, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(top.join("secret"), "for user 1000").unwrap();
    fs::set_permissions(top.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    eventually("the other mount has it", PATIENCE, || other.join("secret").exists().then_some(()));
    for directory in [&top, &other] {
        assert!(!as_user(1000, directory, "cat secret") && !as_user(1001, directory, "cat secret"));
    }
    let named =
        |user, mask| acl(&[(1, 6, NO_ID), (2, user, 1000), (4, 0, NO_ID), (0x10, mask, NO_ID), (0x20, 0, NO_ID)]);
    set(&top.join("secret"), ACCESS, &named(4, 7)).unwrap();
    assert_eq!(fs::metadata(top.join("secret")).unwrap().mode() & 0o777, 0o670);
    assert!(as_user(1000, &top, "cat secret") && !as_user(1001, &top, "cat secret"));
    assert!(!as_user(1000, &top, "echo x >> secret"));
    // The other mount has asked before; it is notified.
    eventually("the other mount heeds it", PATIENCE, || as_user(1000, &other, "cat secret").then_some(()));
    assert!(!as_user(1001, &other, "cat secret"));
    set(&other.join("secret"), ACCESS, &named(7, 3)).unwrap();
    eventually("the mask takes reading away", PATIENCE, || (!as_user(1000, &top, "cat secret")).then_some(()));
    assert!(as_user(1000, &top, "echo x >> secret"));
    fs::set_permissions(top.join("secret"), fs::Permissions::from_mode(0o640)).unwrap();
    assert!(as_user(1000, &top, "cat secret") && !as_user(1000, &top, "echo x >> secret"), "chmod sets the mask");

    // A shared directory: what anybody makes in it is for all that its list names.
    fs::create_dir(top.join("shared")).unwrap();
    let all = [(1, 7, NO_ID), (2, 7, 1000), (2, 7, 1001), (4, 0, NO_ID), (0x10, 7, NO_ID), (0x20, 0, NO_ID)];
    set(&top.join("shared"), ACCESS, &acl(&all)).unwrap();
    set(&top.join("shared"), DEFAULT, &acl(&all)).unwrap();
    assert!(as_user(1000, &top, "umask 077 && mkdir shared/d && echo one > shared/d/f"));
    assert!(as_user(1001, &top, "cat shared/d/f && echo two >> shared/d/f && touch shared/d/g"));
    assert!(!as_user(1002, &top, "ls shared"));
    assert_eq!(fs::read_to_string(top.join("shared/d/f")).unwrap(), "one\ntwo\n");
    eventually("the same on the other mount", PATIENCE, || as_user(1001, &other, "cat shared/d/g").then_some(()));
}

#[test]
fn lists_are_copied_checked_and_kept() {
    let cluster = mounted(Options::default());
    let top = cluster.path("fs");
    fs::create_dir(top.join("d")).unwrap();
    fs::write(top.join("d/f"), "content").unwrap();
    let list = acl(&[(1, 6, NO_ID), (2, 4, 1000), (4, 0, NO_ID), (0x10, 4, NO_ID), (0x20, 0, NO_ID)]);
    set(&top.join("d/f"), ACCESS, &list).unwrap();
    set(&top.join("d"), DEFAULT, &list).unwrap();
    let copied = Command::new("cp").args(["-a", "d", "copy"]).current_dir(&top).status().unwrap();
    assert!(copied.success());
    assert_eq!(
        (get(&top.join("copy/f"), ACCESS), get(&top.join("copy"), DEFAULT)),
        (Ok(list.clone()), Ok(list.clone()))
    );
    let printed = cluster.cv(&["fs", "getfattr", "-n", ACCESS, "/fs/d/f"]).stdout;
    assert!(printed.contains("system.posix_acl_access=0s"), "{printed}");

    // What is no list, and what has none.
    assert_eq!(set(&top.join("d/f"), ACCESS, &list[..list.len() - 4]), Err(Errno::INVAL));
    assert_eq!(set(&top.join("d/f"), DEFAULT, &list), Err(Errno::ACCESS));
    let unmasked = acl(&[(1, 6, NO_ID), (2, 4, 1000), (4, 0, NO_ID), (0x20, 0, NO_ID)]);
    assert_eq!(set(&top.join("d/f"), ACCESS, &unmasked), Err(Errno::INVAL));
    std::os::unix::fs::symlink("d/f", top.join("link")).unwrap();
    let through_cv = cluster.try_cv(&["fs", "setfattr", "-n", ACCESS, "-v", "0x02000000", "/fs/link"]);
    assert!(through_cv.code == 1 && through_cv.stderr.contains("symlink"), "{through_cv:?}");

    // Neither master nor client forgets them.
    cluster.kill("master");
    cluster.start("master");
    assert_eq!(get(&top.join("d/f"), ACCESS), Ok(list.clone()));
    cluster.stop("fuse");
    cluster.start("fuse");
    assert_eq!((get(&top.join("d/f"), ACCESS), get(&top.join("d"), DEFAULT)), (Ok(list.clone()), Ok(list)));
}

#[test]
fn a_bucket_in_cache_mode_has_no_lists() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "p/object", "content");
    cluster.mount("s3://bucket/p", "/data", &[]);
    let object = cluster.path("data/object");
    assert_eq!(get(&object, ACCESS), Err(Errno::NODATA));
    let list = acl(&[(1, 6, NO_ID), (2, 4, 1000), (4, 0, NO_ID), (0x10, 4, NO_ID), (0x20, 0, NO_ID)]);
    assert_eq!(set(&object, ACCESS, &list), Err(Errno::ROFS));
    assert!(as_user(1000, &cluster.path("data"), "cat object"), "whoever does not own it reads it");
    let read: io::Result<String> = fs::read_to_string(object);
    assert_eq!(read.unwrap(), "content");
}

#[test]
fn a_client_that_is_told_so_leaves_lists_alone() {
    let conf = "[fuse]\nposix_acl = false\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let file = cluster.path("fs/f");
    fs::write(&file, "").unwrap();
    let list = acl(&[(1, 6, NO_ID), (4, 4, NO_ID), (0x20, 4, NO_ID)]);
    assert_eq!(set(&file, ACCESS, &list), Err(Errno::OPNOTSUPP));
    assert_eq!(get(&file, ACCESS), Err(Errno::OPNOTSUPP));
    set(&file, "user.other", b"value").unwrap();
    assert_eq!(get(&file, "user.other").unwrap(), b"value");
}

//! Set-user-ID and set-group-ID bits and capabilities of files of fs-mode mounts: they go with writes and new owners as
//! on a local file system, whatever way the bytes take.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::XattrFlags;

/// A user without rights, and his group.
const USER: u32 = 65_534;

/// What a shell of the user does to the file.
const DEEDS: [(&str, &str); 6] = [
    ("appends", "echo x >> file"),
    ("opens it for both and writes", "exec 3<> file; echo x >&3"),
    ("writes past the pages", "dd if=/dev/zero of=file bs=4096 count=1 oflag=direct conv=notrunc status=none"),
    (
        "copies to it from a file",
        "python3 -c 'import os; r = os.open(\"file\", os.O_RDONLY); w = os.open(\"file\", os.O_WRONLY); \
         os.copy_file_range(r, w, 100, 0, 200)'",
    ),
    ("cuts it by opening it", ": > file"),
    ("cuts it", "truncate -s 3 file"),
];

/// The mode of a file of the user after each deed of his, and after he and root have done what they may.
fn modes(directory: &Path) -> Vec<(String, u32)> {
    let file = directory.join("file");
    let mode = || fs::metadata(&file).unwrap().mode() & 0o7777;
    let mut modes = Vec::new();
    for before in [0o6777, 0o4755, 0o2775, 0o2765, 0o1777] {
        let again = || {
            let _ = fs::remove_file(&file);
            fs::write(&file, vec![7; 5000]).unwrap();
            chown(&file, Some(USER), Some(USER)).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(before)).unwrap();
        };
        for (deed, script) in DEEDS {
            again();
            let done = Command::new("sh").args(["-c", script]).current_dir(directory).uid(USER).gid(USER).status();
            assert!(done.unwrap().success(), "{script}");
            modes.push((format!("{before:o}: the user {deed}"), mode()));
        }
        again();
        let (from, to) = (File::open(&file).unwrap(), File::options().write(true).open(&file).unwrap());
        assert_eq!(rustix::fs::copy_file_range(&from, Some(&mut 0), &to, Some(&mut 100), 50), Ok(50));
        modes.push((format!("{before:o}: root copies to it"), mode()));
        fs::write(&file, b"by root").unwrap();
        modes.push((format!("{before:o}: root writes"), mode()));
        chown(&file, Some(1), None).unwrap();
        modes.push((format!("{before:o}: root gives it away"), mode()));
        again();
        chown(&file, None, Some(1)).unwrap();
        modes.push((format!("{before:o}: root gives it to a group"), mode()));
    }
    let below = directory.join("below");
    fs::create_dir(&below).unwrap();
    fs::set_permissions(&below, Permissions::from_mode(0o6775)).unwrap();
    chown(&below, Some(1), Some(1)).unwrap();
    modes.push(("a directory is given away".into(), fs::metadata(&below).unwrap().mode() & 0o7777));
    modes
}

#[test]
fn privileges_of_a_file_go_as_they_do_locally() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let mounted = cluster.path("fs/open");
    let local = tempfile::tempdir().unwrap();
    fs::create_dir(&mounted).unwrap();
    for directory in [&*mounted, local.path()] {
        fs::set_permissions(directory, Permissions::from_mode(0o777)).unwrap();
    }
    assert_eq!(modes(&mounted), modes(local.path()));

    // cap_net_raw, effective and permitted.
    let file = mounted.join("file");
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    fs::set_permissions(&file, Permissions::from_mode(0o777)).unwrap();
    rustix::fs::setxattr(&file, "user.kept", b"1", XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(&file, "security.capability", &capability, XattrFlags::empty()).unwrap();
    let done = Command::new("sh").args(["-c", "echo x >> file"]).current_dir(&mounted).uid(USER).gid(USER).status();
    assert!(done.unwrap().success());
    let mut value = [0; 64];
    let asked = rustix::fs::getxattr(&file, "security.capability", &mut value);
    assert_eq!(asked, Err(rustix::io::Errno::NODATA));
    assert_eq!(rustix::fs::getxattr(&file, "user.kept", &mut value), Ok(1));
}

/// Users by the options of setpriv(1); the file is [`USER`]'s and his group's.
const WRITERS: [(&str, &[&str]); 5] = [
    ("root", &[]),
    ("the owner", &["--reuid=65534", "--regid=65534", "--clear-groups"]),
    ("another", &["--reuid=1000", "--regid=1000", "--clear-groups"]),
    ("one whose group it is", &["--reuid=1000", "--regid=65534", "--clear-groups"]),
    ("one who is in the group", &["--reuid=1000", "--regid=1000", "--groups=65534"]),
];

/// What each of them does to the file.
const CHANGES: [(&str, &str); 11] = [
    ("appends", "echo x >> file"),
    ("writes to pages", "exec 3<> file; echo x >&3"),
    ("writes past the pages", "dd if=/dev/zero of=file bs=4096 count=1 oflag=direct conv=notrunc status=none"),
    ("cuts it by opening it", ": > file"),
    ("cuts it", "truncate -s 3 file"),
    ("lengthens it", "truncate -s 30000 file"),
    ("allocates", "fallocate -l 20000 file"),
    ("allocates beyond its end", "fallocate -n -o 8192 -l 8192 file"),
    ("punches a hole", "fallocate -p -o 0 -l 4096 file"),
    (
        "writes to a mapping",
        "python3 -c 'import mmap, os; m = mmap.mmap(os.open(\"file\", os.O_RDWR), 4096); m[0] = 1; m.flush()'",
    ),
    (
        "copies within it",
        "python3 -c 'import os; r = os.open(\"file\", os.O_RDONLY); w = os.open(\"file\", os.O_WRONLY); \
         os.copy_file_range(r, w, 100, 0, 200)'",
    ),
];

/// Permissions, as stat(1) prints them when it is asked for nothing else, and whether there is a capability.
fn privileges(file: &Path) -> String {
    let printed = Command::new("stat").args(["-c", "%a"]).arg(file).output().unwrap();
    let asked = rustix::fs::getxattr(file, "security.capability", &mut [0; 64]);
    format!("{}{}", String::from_utf8(printed.stdout).unwrap().trim(), if asked.is_ok() { ", able" } else { "" })
}

/// What a file in the directory has right after each change, and soon on another mount.
fn outcomes(directory: &Path, elsewhere: Option<&Path>) -> Vec<String> {
    // cap_net_raw, effective and permitted.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let file = directory.join("file");
    let mut outcomes = Vec::new();
    for mode in [0o6777, 0o6666, 0o2767] {
        for (writer, options) in WRITERS {
            for (change, script) in CHANGES {
                let _ = fs::remove_file(&file);
                fs::write(&file, vec![7; 10_000]).unwrap();
                chown(&file, Some(USER), Some(USER)).unwrap();
                fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
                rustix::fs::setxattr(&file, "security.capability", &capability, XattrFlags::empty()).unwrap();
                let done =
                    Command::new("setpriv").args(options).args(["sh", "-c", script]).current_dir(directory).status();
                let (done, after) = (done.unwrap().success(), privileges(&file));
                if let Some(elsewhere) = elsewhere {
                    let seen = || (privileges(&elsewhere.join("file")) == after).then_some(());
                    eventually(&format!("{after} after {writer} {change} {mode:o}"), Duration::from_secs(30), seen);
                }
                let done = if done { "" } else { " (refused)" };
                outcomes.push(format!("{mode:o}: {writer} {change}{done}: {after}"));
            }
        }
    }
    outcomes
}

#[test]
fn whoever_changes_a_file_by_whatever_means_leaves_it_with_what_he_leaves_locally() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let mounts = [cluster.path("fs/open"), cluster.at_start.fuse[1].mount_point.join("fs/open")];
    let local = tempfile::tempdir().unwrap();
    let places: [PathBuf; 2] = [mounts[0].clone(), local.path().join("open")];
    for place in &places {
        fs::create_dir(place).unwrap();
        fs::set_permissions(place, Permissions::from_mode(0o777)).unwrap();
    }
    fs::set_permissions(local.path(), Permissions::from_mode(0o755)).unwrap();
    let [mounted, local] = [outcomes(&places[0], Some(&mounts[1])), outcomes(&places[1], None)];
    let others: Vec<_> = mounted.iter().zip(&local).filter(|(mounted, local)| mounted != local).collect();
    assert!(others.is_empty(), "other than locally: {others:#?}");
}

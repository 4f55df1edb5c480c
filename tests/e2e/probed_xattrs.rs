//! What `ls -l` asks each file for, and most have not: labels, which it asks for once for all while no file has one,
//! and access lists, of which the kernel keeps for each file that it has none. As soon as one has any, whoever asks
//! finds it, on every mount.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::fs::XattrFlags;
use rustix::io::Errno;

const LABEL: &str = "security.selinux";
const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
/// For a client to have the mount table, and for an invalidation to reach another mount.
const PATIENCE: Duration = Duration::from_secs(30);
const FILES: usize = 100;
/// Requests of a pass that asks nothing for each name: once for each attribute, and a few until it is known that there
/// are none.
const ONCE: u64 = 8;
/// And of one that asks for the access list of each name, since the kernel has read the directory anew.
const LISTS: u64 = FILES as u64 + ONCE;

/// Values by attribute and path.
type Found = BTreeMap<(&'static str, PathBuf), Vec<u8>>;

/// The value of an attribute; `None` where there is none. `is_there` becomes false when the device has no such thing.
fn asked(path: &Path, name: &str, is_there: &mut bool) -> Option<Vec<u8>> {
    if !*is_there {
        return None;
    }
    let mut value = [0; 1024];
    match rustix::fs::lgetxattr(path, name, &mut value[..]) {
        Ok(length) => Some(value[..length].to_vec()),
        Err(Errno::NODATA) => None,
        Err(Errno::OPNOTSUPP) => {
            *is_there = false;
            None
        }
        Err(error) => panic!("{name} of {}: {error}", path.display()),
    }
}

/// Goes through a tree as `ls -lR` of the GNU coreutils 9.1 does, which asks for the label and the lists of each
/// file, until it is told that there are none on the device. Gives what it has found, by attribute and path.
fn listed(top: &Path) -> Found {
    let (mut labels, mut lists, mut found) = (true, true, Found::new());
    let mut waiting = vec![top.to_owned()];
    while let Some(path) = waiting.pop() {
        let is_directory = fs::symlink_metadata(&path).unwrap().is_dir();
        let shown = path.strip_prefix(top).unwrap();
        let mut take = |name, is_there: &mut bool| {
            let value = asked(&path, name, is_there);
            value.map(|value| found.insert((name, shown.to_owned()), value)).is_some()
        };
        take(LABEL, &mut labels);
        if !take(ACCESS, &mut lists) && is_directory {
            take(DEFAULT, &mut lists);
        }
        if is_directory {
            waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    found
}

/// `user::rw-`, `user:1000:r--`, `group::---`, `mask::r--`, `other::---`.
fn list() -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    let entries = [(1u16, 6u16, u32::MAX), (2, 4, 1000), (4, 0, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

struct Fixture {
    cluster: Cluster,
    /// The directory of each mount.
    tops: [PathBuf; 2],
}

impl Fixture {
    fn new(consistency: &[&str]) -> Self {
        let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
        cluster.s3.create_bucket("bucket");
        cluster.mount_fs_mode("s3://bucket/fs", "/fs", consistency);
        let tops = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
        Self { cluster, tops }
    }

    fn requests(&self, mount: usize) -> u64 {
        let sample = "cavern_fuse_requests_total{operation=\"xattr\"";
        self.cluster.status().fuse[mount].metric(sample).unwrap_or_default()
    }

    /// Makes files of which nobody has asked for anything.
    fn make(&self, directory: &str) {
        let directory = self.tops[0].join(directory);
        fs::create_dir(&directory).unwrap();
        (0..FILES).for_each(|number| fs::write(directory.join(number.to_string()), "x").unwrap());
    }

    /// Goes through a directory on a mount, with how many requests that took.
    fn pass(&self, mount: usize, directory: &str) -> (Found, u64) {
        let before = self.requests(mount);
        let found = listed(&self.tops[mount].join(directory));
        (found, self.requests(mount) - before)
    }

    /// Waits until a pass asks for no label of each name.
    fn settled(&self, mount: usize, directory: &str) {
        eventually("a pass asks once for all", PATIENCE, || {
            let (found, requests) = self.pass(mount, directory);
            assert_eq!(found.len(), 0);
            (requests <= LISTS).then_some(())
        });
    }
}

#[test]
fn a_listing_asks_once_for_all_until_a_file_has_what_it_asks_for() {
    let fixture = Fixture::new(&["--consistency", "strict"]);
    fixture.make("known");
    for mount in [0, 1] {
        fixture.settled(mount, "known");
    }
    // Nor does it for files of which the kernel has never asked.
    fixture.make("new");
    for mount in [1, 0] {
        let (found, requests) = fixture.pass(mount, "new");
        assert!(found.is_empty() && requests <= LISTS, "{requests} requests");
    }
    // Other attributes are nobody's concern.
    set(&fixture.tops[0].join("known/3"), "user.colour", b"blue");
    assert!(fixture.pass(1, "known").1 <= LISTS);

    // What is answered is to be seen by everybody, at once: the mount is strict.
    set(&fixture.tops[0].join("known/5"), ACCESS, &list());
    let of_list = BTreeMap::from([((ACCESS, PathBuf::from("5")), list())]);
    for mount in [1, 0] {
        assert_eq!(fixture.pass(mount, "known").0, of_list, "mount {mount}");
    }
    set(&fixture.tops[1].join("known/7"), LABEL, b"system_u:object_r:etc_t:s0");
    for mount in [0, 1] {
        let found = fixture.pass(mount, "known").0;
        assert_eq!(found.len(), 2, "mount {mount}: {found:?}");
        assert_eq!(found[&(LABEL, PathBuf::from("7"))], b"system_u:object_r:etc_t:s0");
    }
    // There may be more of them, and of what nobody has there is none.
    let absent = |name: &str| rustix::fs::lgetxattr(fixture.tops[1].join("new/1"), name, &mut [0; 64][..]);
    assert_eq!(absent(LABEL), Err(Errno::NODATA));
    let is_refused = || (absent("security.capability") == Err(Errno::OPNOTSUPP)).then_some(());
    eventually("the mount table is here again", PATIENCE, is_refused);
    assert_eq!(absent(LABEL), Err(Errno::NODATA));
}

#[test]
fn one_list_among_many_files_costs_nothing_more_when_the_kernel_has_seen_them() {
    let fixture = Fixture::new(&[]);
    fixture.make("d");
    fixture.settled(1, "d");
    set(&fixture.tops[0].join("d/5"), ACCESS, &list());
    let of_list = BTreeMap::from([((ACCESS, PathBuf::from("5")), list())]);
    assert_eq!(fixture.pass(0, "d").0, of_list, "right after it was set here");
    eventually("the other mount shows it", PATIENCE, || (fixture.pass(1, "d").0 == of_list).then_some(()));
    // The kernel keeps of each file that it has no list, and no file has a label.
    eventually("nothing is asked for each name", PATIENCE, || {
        let (found, requests) = fixture.pass(1, "d");
        assert_eq!(found, of_list);
        (requests <= ONCE).then_some(())
    });
    rustix::fs::removexattr(fixture.tops[0].join("d/5"), ACCESS).unwrap();
    eventually("it is gone", PATIENCE, || fixture.pass(1, "d").0.is_empty().then_some(()));
}

#[test]
fn programs_give_the_first_file_what_no_file_has() {
    let fixture = Fixture::new(&[]);
    fixture.make("d");
    fixture.settled(0, "d");
    let top = &fixture.tops[0];
    let run = |command: &str| {
        let done = std::process::Command::new("sh").args(["-c", command]).current_dir(top.join("d")).output().unwrap();
        let (printed, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success() && errors.is_empty(), "{command}: {errors}");
        printed.into_owned()
    };
    // Copies and archives of what has none say nothing of that.
    run("cp -a 1 copied && cp -a . ../whole && rm -r ../whole");
    run("tar --xattrs --acls -cf ../archive.tar 1 2");
    run("test -z \"$(ls -l 1 | grep -F '+')\"");
    // Both are read before they are set.
    run("setfacl -d -m u:1000:rx . && setfacl -m u:1000:r 1");
    assert!(run("getfacl -cn 1").contains("user:1000:r--"));
    assert!(run("getfacl -cdn .").contains("user:1000:r-x"));
    run("test -n \"$(ls -l 1 | grep -F '+')\"");
}

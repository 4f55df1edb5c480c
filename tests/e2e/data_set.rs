//! A mount that shows a data set alone: the kernel asks for nothing that it does not have.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cavern_tests::{Cluster, Options, PartMount};
use rustix::fs::{StatVfsMountFlags, XattrFlags, lgetxattr, setxattr, statvfs};
use rustix::io::Errno;

fn attribute(path: &Path, name: &str) -> Result<String, Errno> {
    let mut value = vec![0; 1000];
    let length = lgetxattr(path, name, &mut value[..])?;
    value.truncate(length);
    Ok(String::from_utf8(value).unwrap())
}

#[test]
fn a_data_set_by_itself_is_listed_and_read_without_questions_about_what_it_never_has() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 100, 50_000);
    cluster.mount("s3://bucket", "/final", &["--consistency", "never"]);
    cluster.mount("s3://bucket", "/fresh", &[]);
    let [finished, fresh] = ["/final", "/fresh"].map(|path| PartMount::of(&cluster, path, &[]));
    let file = tree.keys().next().unwrap();
    for part in [&finished, &fresh] {
        assert!(part.is_read_only());
        for _ in 0..2 {
            for (path, content) in &tree {
                let path = part.path.join(path);
                assert_eq!(fs::metadata(&path).unwrap().len(), content.len() as u64);
                assert_eq!(attribute(&path, "security.selinux"), Err(Errno::OPNOTSUPP));
                assert!(fs::read(&path).unwrap() == *content, "{}", path.display());
            }
        }
        // Once, or twice where two threads asked at a time.
        assert!((1..=2).contains(&part.requests("xattr")), "{}", part.requests("xattr"));
        let refused = OpenOptions::new().write(true).open(part.path.join(file)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    }
    // Where the bucket may have another version, whoever opens a file is led to it.
    assert!(finished.requests("open") <= 4 && finished.requests("release") == 0);
    assert!(fresh.requests("open") >= 200, "{}", fresh.requests("open"));
    cluster.s3.put("bucket", file, "another version");
    cluster.cv(&["refresh", "/fresh"]);
    assert_eq!(fs::read(fresh.path.join(file)).unwrap(), b"another version");

    for part in [&finished, &fresh] {
        part.replace_daemon();
        let path = part.path.join(tree.keys().nth(1).unwrap());
        assert!(fs::read(&path).unwrap() == tree[tree.keys().nth(1).unwrap()]);
        assert_eq!(attribute(&path, "user.cavern.key"), Err(Errno::OPNOTSUPP));
        assert!(part.is_read_only());
    }
    // The mount of all else is not affected.
    assert_eq!(attribute(&cluster.path("final").join(file), "user.cavern.mount").as_deref(), Ok("/final"));
    assert!(!statvfs(cluster.mount_point()).unwrap().f_flag.contains(StatVfsMountFlags::RDONLY));
}

#[test]
fn what_is_asked_for_is_what_a_mount_has_and_what_can_be_written_has_all_of_it() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 10, 50_000);
    cluster.s3.create_bucket("other");
    cluster.mount("s3://bucket", "/final", &["--consistency", "never"]);
    cluster.mount_fs_mode("s3://other/fs", "/fs", &[]);
    let asked = [("CV_FUSE__NO_OPEN", "false"), ("CV_FUSE__XATTRS", "true")];
    let part = PartMount::of(&cluster, "/final", &asked);
    let file = part.path.join(tree.keys().next().unwrap());
    for _ in 0..20 {
        drop(File::open(&file).unwrap());
    }
    assert!(part.requests("open") >= 20, "{}", part.requests("open"));
    assert_eq!(attribute(&file, "user.cavern.mount").as_deref(), Ok("/final"));

    let part = PartMount::of(&cluster, "/fs", &[]);
    assert!(!part.is_read_only());
    let file = part.path.join("file");
    fs::write(&file, "written").unwrap();
    setxattr(&file, "user.kept", b"so", XattrFlags::empty()).unwrap();
    assert_eq!(attribute(&cluster.path("fs/file"), "user.kept").as_deref(), Ok("so"));
    assert_eq!(fs::metadata(&file).unwrap().ino(), fs::metadata(cluster.path("fs/file")).unwrap().ino());
    drop(part);
    let part = PartMount::of(&cluster, "/fs", &[("CV_FUSE__XATTRS", "false")]);
    assert_eq!(attribute(&part.path.join("file"), "user.kept"), Err(Errno::OPNOTSUPP));
}

//! Views: what the mount showed when they were made, by FUSE and by the kernel's EROFS, on this cluster and another.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Deref;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Finished, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::{Value, json};

use crate::client_restart::content;

const PATIENCE: Duration = Duration::from_secs(30);
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 4;
/// Of statfs(2).
const EROFS: u64 = 0xe0f5_e1e2;

/// A cluster whose copies of views go with it.
pub struct WithViews {
    pub cluster: Cluster,
    pub staging: tempfile::TempDir,
}

impl Deref for WithViews {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl WithViews {
    /// `conf` may begin with lines of `[client]`, without its head.
    pub fn up(options: Options) -> Self {
        // On a disk: the kernel mounts no images from memory.
        let staging = tempfile::tempdir_in("/var/tmp").unwrap();
        let conf = options.conf.strip_prefix("[client]\n").unwrap_or(&options.conf);
        let conf = format!("[client]\nstaging_directory = \"{}\"\n{conf}", staging.path().display());
        Self { cluster: Cluster::up(Options { conf, ..options }), staging }
    }

    /// Mounts a bucket at `/data`, all of which is in the namespace then.
    pub fn mount_indexed(&self, uri: &str) {
        self.mount(uri, "/data", &["--index", "--metadata-ttl", "1d"]);
    }

    pub fn create(&self, path: &str, name: &str) -> Value {
        self.cv(&["view", "create", path, name, "--json"]).json()
    }

    /// Where `cv fuse` shows a view.
    pub fn shown(&self, name: &str) -> PathBuf {
        self.path(".views").join(name)
    }

    /// What a client has logged so far.
    pub fn log_of_fuse(&self) -> String {
        fs::read_to_string(&self.at_start.fuse[0].log).unwrap()
    }
}

/// A view that the kernel has mounted.
pub struct KernelView(pub PathBuf);

impl KernelView {
    /// Mounts a view at a directory of its own; `None` where the kernel of this host cannot.
    pub fn mount(cluster: &WithViews, name: &str) -> Option<Self> {
        let directory = cluster.directory().join(format!("kernel-{name}"));
        fs::create_dir_all(&directory).unwrap();
        let mount_point = cluster.mount_point().to_str().unwrap();
        let arguments = ["view", "mount", name, directory.to_str().unwrap(), "--mount-point", mount_point];
        let mounted = cluster.try_cv(&arguments);
        let cannot = ["CAP_SYS_ADMIN", "modprobe erofs", "6.14", "CONFIG_EROFS_FS_BACKED_BY_FILE"];
        if mounted.code != 0 && cannot.iter().any(|why| mounted.stderr.contains(why)) {
            eprintln!("skipped: {}", mounted.stderr);
            return None;
        }
        assert_eq!(mounted.code, 0, "{mounted:?}");
        Some(Self(directory))
    }
}

impl Drop for KernelView {
    fn drop(&mut self) {
        let _ = unmount(self.0.as_path(), UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
}

/// What programs see of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    mode: u32,
    owner: (u32, u32),
    /// Directories have sizes and links of their own, wherever they are.
    size: u64,
    links: u64,
    mtime: (i64, i64),
    device: u64,
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// All of a file, without what the kernel has of it.
pub fn read_anew(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let mut read = Vec::new();
    file.read_to_end(&mut read)?;
    Ok(read)
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    // Objects say by these where they are from, and views where they are themselves.
    let names = names.filter(|name| !name.starts_with(b"user.cavern."));
    let value = |name: &[u8]| {
        let mut value = vec![0; 1 << 16];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        value[..length].to_vec()
    };
    names.map(|name| (name.to_vec(), value(name))).collect()
}

/// What is below a directory, by path.
pub fn seen(top: &Path) -> BTreeMap<PathBuf, Seen> {
    let (mut found, mut waiting) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            let (path, metadata) = (entry.path(), fs::symlink_metadata(entry.path()).unwrap());
            let kind = metadata.file_type();
            assert_eq!(entry.file_type().unwrap(), kind, "{}", path.display());
            let content = match kind {
                _ if kind.is_file() => read_anew(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
                _ if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                _ => Vec::new(),
            };
            let is_device = kind.is_char_device() || kind.is_block_device();
            let seen = Seen {
                mode: metadata.mode(),
                owner: (metadata.uid(), metadata.gid()),
                size: if kind.is_dir() { 0 } else { metadata.size() },
                links: if kind.is_dir() { 0 } else { metadata.nlink() },
                mtime: (metadata.mtime(), metadata.mtime_nsec()),
                device: if is_device { metadata.rdev() } else { 0 },
                content,
                xattrs: xattrs(&path),
            };
            if kind.is_dir() {
                waiting.push(path.clone());
            }
            assert!(found.insert(path.strip_prefix(top).unwrap().to_owned(), seen).is_none(), "{}", path.display());
        }
    }
    found
}

/// Compares trees, and names what differs.
#[track_caller]
pub fn assert_same(what: &str, found: &BTreeMap<PathBuf, Seen>, expected: &BTreeMap<PathBuf, Seen>) {
    let differs = |path: &&PathBuf| found.get(*path) != expected.get(*path);
    let all = expected.keys().chain(found.keys().filter(|path| !expected.contains_key(*path)));
    let told = |path: &PathBuf| {
        let of = |tree: &BTreeMap<PathBuf, Seen>| tree.get(path).map(|seen| Seen { content: vec![], ..seen.clone() });
        format!("{}: {:?} in place of {:?}", path.display(), of(found), of(expected))
    };
    let wrong: Vec<_> = all.filter(differs).map(told).collect();
    assert!(wrong.is_empty(), "{what}: {} paths, such as {:#?}", wrong.len(), &wrong[..wrong.len().min(5)]);
}

fn errno<T: std::fmt::Debug>(answer: io::Result<T>) -> Option<Errno> {
    Errno::from_io_error(&answer.unwrap_err())
}

/// Objects of many sizes, also such as have to do with blocks and pages.
fn seed(cluster: &Cluster, bucket: &str) {
    cluster.seed(bucket, "many/", 150, 20_000);
    let sizes = [0, 1, 4095, 4096, 4097, 131_072, 1 << 20, (1 << 20) + 1, 3_500_000];
    for (number, size) in sizes.into_iter().enumerate() {
        cluster.s3.put(bucket, &format!("sizes/{number}"), content(number, size));
    }
    for name in [" space ", "a+b%20c", "é", "deep/er/file", &"n".repeat(255)] {
        cluster.s3.put(bucket, &format!("odd/{name}"), name.to_owned());
    }
}

fn view_names(cluster: &WithViews) -> Vec<String> {
    let list = cluster.cv(&["view", "list", "--json"]).json();
    list.as_array().unwrap().iter().map(|view| view["name"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn refused(finished: &Finished, code: i32, fragments: &[&str]) {
    assert_eq!(finished.code, code, "{finished:?}");
    for fragment in fragments {
        assert!(finished.stderr.contains(fragment), "no {fragment:?} in {finished:?}");
    }
}

#[test]
fn a_view_is_what_the_mount_shows_by_fuse_and_by_the_kernel() {
    let cluster = WithViews::up(Options { workers: 2, conf: COUNTED.to_owned(), ..Options::default() });
    seed(&cluster, "bucket");
    cluster.mount_indexed("s3://bucket");
    let expected = seen(&cluster.path("data"));
    assert!(expected.len() > 160, "{}", expected.len());
    let view = cluster.create("/data", "v1");
    assert_eq!((&view["name"], &view["path"], &view["names"]), (&json!("v1"), &json!("/data"), &json!(expected.len())));
    assert_same("FUSE", &seen(&cluster.shown("v1")), &expected);
    let kernel = KernelView::mount(&cluster, "v1");
    if let Some(kernel) = &kernel {
        assert_same("EROFS", &seen(&kernel.0), &expected);
        // What was read is the kernel's.
        assert_same("EROFS, from its pages", &seen(&kernel.0), &expected);
    }
    // Names cost the bucket nothing.
    cluster.s3.reset_stats();
    for top in [Some(cluster.shown("v1")), kernel.as_ref().map(|kernel| kernel.0.clone())].into_iter().flatten() {
        let found = Command::new("find").arg(&top).arg("-printf").arg("%P %m %s %T@\n").output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        assert_eq!(String::from_utf8_lossy(&found.stdout).lines().count(), expected.len() + 1);
        for (program, option) in [("ls", "-lR"), ("du", "-a")] {
            let listed = Command::new(program).arg(option).arg(&top).output().unwrap();
            assert!(listed.status.success(), "{program}: {}", String::from_utf8_lossy(&listed.stderr));
        }
        assert_eq!(errno(fs::metadata(top.join("none"))), Some(Errno::NOENT));
        assert_eq!(errno(fs::metadata(top.join("sizes/1/none"))), Some(Errno::NOTDIR));
    }
    // Nor does it cost more to open files.
    assert_same("FUSE, once more", &seen(&cluster.shown("v1")), &expected);
    assert_eq!((cluster.s3.requests("HEAD"), cluster.s3.requests("LIST")), (0, 0));

    // `.views` is in no listing, and has the trees in its own.
    let names = |path: &Path| -> Vec<_> {
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(cluster.mount_point()), ["data"]);
    assert_eq!(names(&cluster.path(".views")), ["v1"]);
    let image = fs::read_link(cluster.shown("v1@image")).unwrap();
    assert!(image.starts_with(cluster.staging.path()) && fs::metadata(&image).unwrap().len() > 0);
    let device = fs::metadata(cluster.shown("v1@1")).unwrap();
    assert_eq!((device.mode(), device.uid(), device.len() % 4096), (0o100_400, 0, 0));
    for none in ["v1@0", "v1@2", "v1@image2", "v2", ".v1"] {
        assert_eq!(errno(fs::symlink_metadata(cluster.shown(none))), Some(Errno::NOENT), "{none}");
    }
    // Reads of any part are of the object; what cannot be asked of a view is refused.
    let (large, expected_large) = (File::open(cluster.shown("v1/sizes/8")).unwrap(), content(8, 3_500_000));
    let mut random = StdRng::seed_from_u64(8);
    for _ in 0..200 {
        let (offset, length) = (random.random_range(0..3_600_000), random.random_range(1..200_000));
        let mut read = vec![7; length];
        let count = large.read_at(&mut read, offset as u64).unwrap();
        let end = expected_large.len().min(offset + count);
        assert!(read[..count] == expected_large[offset.min(end)..end], "{length} bytes at {offset}");
    }
    let file = cluster.shown("v1/sizes/1");
    let changes: [(&str, io::Result<()>); 6] = [
        ("write", fs::write(&file, "x")),
        ("remove", fs::remove_file(&file)),
        ("make", fs::write(cluster.shown("v1/new"), "x")),
        ("make beside", fs::create_dir(cluster.shown("v9"))),
        ("mode", fs::set_permissions(&file, fs::Permissions::from_mode(0o600))),
        ("rename", fs::rename(&file, cluster.shown("v1/other"))),
    ];
    for (what, answer) in changes {
        assert_eq!(errno(answer), Some(Errno::ROFS), "{what}");
    }
}

#[test]
fn a_view_is_made_listed_and_deleted_by_its_name() {
    let cluster = WithViews::up(Options::default());
    seed(&cluster, "bucket");
    cluster.mount_indexed("s3://bucket");
    assert!(cluster.cv(&["view", "list"]).stdout.contains("there are no views"));
    let first = cluster.create("/data/many", "a");
    // Asked again, it is there already; the same contents have the same hash.
    assert_eq!(cluster.create("/data/many", "a")["id"], first["id"]);
    let second = cluster.create("/data/many", "b.2_x-y");
    assert_eq!((second["id"] == first["id"], &second["hash"]), (false, &first["hash"]));
    assert_ne!(cluster.create("/data/sizes", "c")["hash"], first["hash"]);
    refused(&cluster.try_cv(&["view", "create", "/data", "a"]), FAILED, &["a"]);
    for name in [".a", "a/b", "", "a@1", &"n".repeat(65)] {
        refused(&cluster.try_cv(&["view", "create", "/data", name]), USAGE, &[]);
    }
    refused(&cluster.try_cv(&["view", "create", "/none", "d"]), NOT_FOUND, &["/none"]);
    refused(&cluster.try_cv(&["view", "create", "/", "d"]), FAILED, &["mount"]);
    for command in ["describe", "delete"] {
        refused(&cluster.try_cv(&["view", command, "d"]), NOT_FOUND, &["d"]);
    }
    assert_eq!(view_names(&cluster), ["a", "b.2_x-y", "c"]);
    let described = cluster.cv(&["view", "describe", "a"]).stdout;
    let hash = first["hash"].as_str().unwrap();
    assert!(hash.len() == 64 && described.contains(hash) && described.contains("/data/many"), "{described}");

    // A mount that has views stays.
    refused(&cluster.try_cv(&["umount", "/data"]), FAILED, &["a", "b.2_x-y", "c"]);
    let key = first["key"].as_str().unwrap();
    let is_stored = || cluster.s3.run(async { Ok(cluster.s3.client().get("bucket", key).await.is_ok()) });
    assert!(is_stored() && cluster.shown("a").is_dir());
    // Nor does any listing show how they are stored.
    cluster.cv(&["refresh", "/data"]);
    assert!(fs::read_dir(cluster.path("data")).unwrap().all(|entry| entry.unwrap().file_name() != *key));
    cluster.cv(&["view", "delete", "a"]);
    assert!(!is_stored());
    eventually("the view is gone", PATIENCE, || (!cluster.shown("a").exists()).then_some(()));
    assert_eq!(view_names(&cluster), ["b.2_x-y", "c"]);
    // Another one of this name is another one.
    cluster.create("/data/sizes", "a");
    eventually("the other one is shown", PATIENCE, || cluster.shown("a/8").exists().then_some(()));
    for name in ["a", "b.2_x-y", "c"] {
        cluster.cv(&["view", "delete", name]);
    }
    cluster.cv(&["umount", "/data"]);
}

#[test]
fn a_view_is_of_what_the_bucket_has_now_where_that_is_asked_for() {
    let cluster = WithViews::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "file", "first");
    cluster.mount_indexed("s3://bucket");
    assert_eq!(fs::read(cluster.path("data/file")).unwrap(), b"first");
    cluster.s3.put("bucket", "file", "the second");
    cluster.s3.put("bucket", "new", "new");
    let known = cluster.create("/data", "known");
    assert_eq!(known["names"], 1);
    cluster.cv(&["view", "create", "/data", "now", "--at", "now"]);
    assert_eq!(fs::read(cluster.shown("now/file")).unwrap(), b"the second");
    assert_eq!(fs::read(cluster.shown("now/new")).unwrap(), b"new");
}

#[test]
fn a_view_of_a_bucket_that_takes_nothing_is_stored_in_another_one() {
    let cluster = WithViews::up(Options::default());
    for bucket in ["bucket", "other"] {
        seed(&cluster, bucket);
    }
    cluster.mount_indexed("s3://bucket");
    cluster.mount("s3://other", "/other", &["--index"]);
    for operation in ["PUT", "MULTIPART"] {
        cluster.s3.add_fault(&json!({"kind": "403", "operations": [operation]}));
    }
    refused(&cluster.try_cv(&["view", "create", "/data", "v"]), FAILED, &["/data", "--store"]);
    assert!(view_names(&cluster).is_empty());
    cluster.s3.clear_faults();
    let view = cluster.cv(&["view", "create", "/data", "v", "--store", "/other", "--json"]).json();
    assert_ne!(view["mount_id"], view["store_mount_id"]);
    assert_same("FUSE", &seen(&cluster.shown("v")), &seen(&cluster.path("data")));
}

/// A program of erofs-utils, where it is installed.
fn ran(command: &mut Command) -> bool {
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: no {}: `bin/setup --tests` installs it", command.get_program().display());
            false
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

#[test]
fn erofs_utils_find_nothing_wrong_and_make_the_same_tree() {
    let cluster = WithViews::up(Options::default());
    seed(&cluster, "bucket");
    // Version 1.5 of theirs knows no names as long as names can be.
    cluster.s3.delete("bucket", &format!("odd/{}", "n".repeat(255)));
    cluster.mount_indexed("s3://bucket");
    cluster.create("/data", "v");
    let image = fs::read_link(cluster.shown("v@image")).unwrap();
    let device = format!("--device={}", cluster.shown("v@1").display());
    if !ran(Command::new("fsck.erofs").arg(device).arg(image)) {
        return;
    }
    // The same tree with its contents in the image. What objects say of themselves is in no view.
    let theirs = cluster.staging.path().join("theirs");
    assert!(ran(Command::new("mkfs.erofs").arg("-x-1").arg(&theirs).arg(cluster.path("data"))));
    let Some(kernel) = KernelView::mount(&cluster, "v") else { return };
    let place = KernelView(cluster.directory().join("theirs"));
    fs::create_dir(&place.0).unwrap();
    mount(theirs.as_path(), place.0.as_path(), "erofs", MountFlags::RDONLY, None::<&std::ffi::CStr>).unwrap();
    assert_same("mkfs.erofs", &seen(&kernel.0), &seen(&place.0));
}

#[test]
fn a_view_that_was_exported_is_imported_by_another_cluster_and_outlives_the_first_one() {
    let (first, second) = (WithViews::up(Options::default()), WithViews::up(Options::default()));
    seed(&first, "bucket");
    first.mount_indexed("s3://bucket");
    let view = first.create("/data", "v");
    let expected = seen(&first.path("data"));
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("v.view");
    let file = file.to_str().unwrap();
    first.cv(&["view", "export", "v", file]);
    let exported = fs::read(file).unwrap();
    assert_eq!(exported.len() as u64, view["object_bytes"].as_u64().unwrap());

    let unmounted = second.try_cv(&["view", "import", file, "w"]);
    assert!([FAILED, NOT_FOUND].contains(&unmounted.code) && unmounted.stderr.contains("bucket"), "{unmounted:?}");
    second.mount_from(&first.bucket_options(), "s3://bucket", "/elsewhere", &["--index"]);
    let imported = second.cv(&["view", "import", file, "w", "--json"]).json();
    assert_eq!((&imported["hash"], &imported["imported"]), (&view["hash"], &json!(true)));
    assert_same("imported", &seen(&second.shown("w")), &expected);

    // What is no such file, or was changed on its way, is not taken in.
    let broken = place.path().join("broken");
    let mut changed = exported.clone();
    changed[exported.len() / 2] ^= 1;
    for content in [vec![], b"not a view".to_vec(), exported[..exported.len() - 1].to_vec(), changed] {
        fs::write(&broken, content).unwrap();
        refused(&second.try_cv(&["view", "import", broken.to_str().unwrap(), "broken"]), USAGE, &[]);
    }
    refused(&second.try_cv(&["view", "import", "/none/v.view", "x"]), FAILED, &["/none/v.view"]);
    assert_eq!(view_names(&second), ["w"]);

    first.cv(&["view", "delete", "v"]);
    first.cv(&["umount", "/data"]);
    second.stop("fuse");
    for entry in fs::read_dir(second.staging.path()).unwrap() {
        // The copies of this host.
        let _ = fs::remove_dir_all(entry.unwrap().path());
    }
    second.start("fuse");
    assert_same("of its own object", &seen(&second.shown("w")), &expected);
}

#[test]
fn views_of_mounts_that_are_not_there_for_a_client_are_not_there_either() {
    let options = Options { secure: true, more_mounts: vec!["second"], ..Options::default() };
    let cluster = WithViews::up(options);
    seed(&cluster, "bucket");
    cluster.mount_indexed("s3://bucket");
    cluster.create("/data", "v");
    let second = cluster.at_start.fuse[1].mount_point.join(".views");
    assert!(second.join("v/sizes").is_dir());
    let rules = ["mount", "update", "/data", "--client", "fuse0"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    eventually("the view is hidden from the other client", PATIENCE, || {
        (fs::read_dir(&second).unwrap().count() == 0 && !second.join("v").exists()).then_some(())
    });
    assert!(read_anew(&cluster.shown("v/sizes/8")).unwrap() == content(8, 3_500_000));

    // Who is a client, or looks only, makes and deletes none.
    let certificates = cluster.directory().join("certificates");
    let directory = certificates.to_str().unwrap();
    cluster.cv(&["cert", "issue", "viewer", "bob", "--dir", directory, "--out", directory]);
    for who in ["client-fuse0", "viewer-bob"] {
        let run = |arguments: &[&str]| {
            let mut command = cluster.command(arguments);
            command.env("CV_SECURITY__CERTIFICATE", certificates.join(format!("{who}.pem")));
            command.env("CV_SECURITY__KEY", certificates.join(format!("{who}-key.pem")));
            command.output().unwrap()
        };
        for arguments in [&["view", "create", "/data", "w"][..], &["view", "delete", "v"]] {
            let tried = run(arguments);
            let said = String::from_utf8_lossy(&tried.stderr).into_owned();
            assert!(!tried.status.success() && said.contains("it takes a certificate of the role"), "{who}: {said}");
        }
        let listed = run(&["view", "list", "--json"]);
        assert!(listed.status.success() && String::from_utf8_lossy(&listed.stdout).contains("\"v\""), "{who}");
    }
}

#[test]
fn views_are_shown_where_the_kernel_opens_files_by_itself() {
    let cluster = WithViews::up(Options { conf: "[fuse]\nno_open = true\n".to_owned(), ..Options::default() });
    seed(&cluster, "bucket");
    cluster.mount_indexed("s3://bucket");
    cluster.create("/data", "v");
    let expected = seen(&cluster.path("data"));
    assert_same("FUSE", &seen(&cluster.shown("v")), &expected);
    if let Some(kernel) = KernelView::mount(&cluster, "v") {
        assert_same("EROFS", &seen(&kernel.0), &expected);
    }
}

#[test]
fn a_view_is_mounted_where_the_mount_shows_it_until_that_ends() {
    let cluster = WithViews::up(Options::default());
    seed(&cluster, "bucket");
    cluster.mount_indexed("s3://bucket");
    cluster.create("/data", "v");
    let Some(elsewhere) = KernelView::mount(&cluster, "v") else { return };
    let mount_point = cluster.mount_point().to_str().unwrap();
    let shown = cluster.shown("v");
    let cv = |arguments: &[&str]| cluster.try_cv(&[&["view"][..], arguments, &["--mount-point", mount_point]].concat());
    refused(&cv(&["mount", "none"]), NOT_FOUND, &["none"]);
    refused(&cv(&["mount", "v", "/none/at/all"]), FAILED, &["/none/at/all"]);
    let missing = cluster.try_cv(&["view", "mount", "v", "--mount-point", cluster.directory().to_str().unwrap()]);
    refused(&missing, FAILED, &["--mount-point"]);
    assert_eq!(cv(&["mount", "v"]).code, 0);
    refused(&cv(&["mount", "v"]), FAILED, &["already"]);
    let kind = |path: &Path| rustix::fs::statfs(path).unwrap().f_type as u64;
    assert_eq!((kind(&shown), kind(&elsewhere.0)), (EROFS, EROFS));
    assert!(read_anew(&shown.join("sizes/8")).unwrap() == content(8, 3_500_000));
    // In use it stays.
    let open = File::open(shown.join("sizes/8")).unwrap();
    refused(&cv(&["umount", "v"]), FAILED, &["umount --lazy"]);
    drop(open);
    eventually("it can be unmounted", PATIENCE, || (cv(&["umount", "v"]).code == 0).then_some(()));
    refused(&cv(&["umount", "v"]), FAILED, &["no view is mounted"]);
    assert_ne!(kind(&shown), EROFS);
    assert_eq!(cv(&["umount", elsewhere.0.to_str().unwrap()]).code, 0);
    assert_eq!(fs::read_dir(&elsewhere.0).unwrap().count(), 0);

    // It goes with the mount that it lies in.
    assert_eq!(cv(&["mount", "v"]).code, 0);
    cluster.stop("fuse");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(mount_point), "{table}");
    cluster.start("fuse");
    assert!(read_anew(&shown.join("sizes/8")).unwrap() == content(8, 3_500_000));

    // Also where nobody serves the way to it any more.
    assert_eq!(cv(&["mount", "v"]).code, 0);
    assert_eq!(kind(&shown), EROFS);
    cluster.kill("fuse");
    cluster.start("fuse");
    assert_ne!(kind(&shown), EROFS);
    assert!(read_anew(&shown.join("sizes/8")).unwrap() == content(8, 3_500_000));
}

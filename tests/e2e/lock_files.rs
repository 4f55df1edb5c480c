//! Files that several programs make, write and remove all the time, as those that they use for locks.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use cavern_tests::{Cluster, Options};

const ROUNDS: usize = 500;

/// Opens or makes the file `argv[1]`, and removes it, in the name of a user who may not open that of another; says
/// whose file it was, and what was refused.
const TURNS_OF_ANOTHER: &str = r#"
import os, sys, time
os.setuid(12345)
done, rounds, deadline = set(), 0, time.monotonic() + 60
while (rounds < 400 or "own" not in done) and time.monotonic() < deadline:
    rounds += 1
    try:
        file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
        done.add("own" if os.fstat(file).st_uid == 12345 else "foreign")
        os.close(file)
        os.unlink(sys.argv[1])
    except OSError as error:
        done.add(error.strerror)
print(sorted(done))
"#;

/// What a program did that was refused, unless the other may have been faster.
fn turns(path: &Path, cuts: bool) -> Vec<String> {
    let mut refused = Vec::new();
    let mut note =
        |call: &str, result: io::Result<()>| refused.extend(result.err().map(|error| format!("{call}: {error}")));
    for _ in 0..ROUNDS {
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(cuts).open(path);
        match opened {
            Ok(mut file) => note("write", file.write_all(b"mine")),
            Err(error) => note("open", Err(error)),
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => note("unlink", removed),
        }
    }
    refused
}

#[test]
fn a_file_that_others_make_and_remove_is_opened_or_made() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/data", "/data", &[]);
    cluster.mount_fs_mode("s3://bucket/strict", "/strict", &["--consistency", "strict"]);
    let second = cluster.directory().join("second");
    for (mount, cuts) in [("data", false), ("data", true), ("strict", false)] {
        let programs: Vec<_> = [cluster.path(mount), second.join(mount)]
            .map(|directory: PathBuf| directory.join("lock"))
            .map(|path| thread::spawn(move || turns(&path, cuts)))
            .into();
        let refused: Vec<_> = programs.into_iter().flat_map(|program| program.join().unwrap()).collect();
        assert!(refused.is_empty(), "in {mount}, cuts {cuts}: {} of {refused:?}", refused.len());
    }
}

#[test]
fn what_somebody_else_makes_meanwhile_is_opened_with_his_permission_alone() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/data", "/data", &[]);
    let second = cluster.directory().join("second/data");
    fs::set_permissions(cluster.path("data"), fs::Permissions::from_mode(0o777)).unwrap();
    let path = second.join("lock");
    let other = thread::spawn(move || {
        let output = Command::new("python3").args(["-c", TURNS_OF_ANOTHER]).arg(path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    });
    let path = cluster.path("data/lock");
    while !other.is_finished() {
        drop(OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path));
        let _ = fs::remove_file(&path);
    }
    let done = other.join().unwrap();
    assert!(done.contains("own") && !done.contains("foreign") && !done.contains("Error"), "{done}");
}

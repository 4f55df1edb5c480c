//! What a client that was stopped for longer than its lease still believes: nothing.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(30);

/// What a process sees of the directory. It waits for as long as the mount is stopped and has no answer.
fn looks(directory: &Path) -> thread::JoinHandle<(u32, u64, bool, bool, Vec<String>)> {
    let directory = directory.to_owned();
    thread::spawn(move || {
        let file = fs::metadata(directory.join("file")).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let exists = |name: &str| directory.join(name).exists();
        (file.mode() & 0o777, file.len(), exists("gone"), exists("new"), names)
    })
}

#[test]
fn a_client_that_was_stopped_for_longer_than_its_lease_believes_nothing_of_before() {
    let conf = "[master]\nsession_lease = \"2s\"\n[client]\nmetadata_timeout = \"30s\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (here, there) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
    for (name, content) in [("file", "before"), ("gone", "")] {
        fs::write(here.join(name), content).unwrap();
    }
    // Its kernel knows names and attributes, and has the pages of a file that stays open.
    let file = File::open(here.join("file")).unwrap();
    let read = |file: &File| {
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes.into()).unwrap()
    };
    assert_eq!(read(&file), "before");
    let before = looks(&here).join().unwrap();
    assert_eq!(before, (0o644, 6, true, false, vec!["file".to_owned(), "gone".to_owned()]));
    let locked = Command::new("flock").arg("-Fx").arg(here.join("file")).args(["sleep", "1000"]).spawn().unwrap();
    let locked = Killed(locked);
    let is_locked =
        || !Command::new("flock").arg("-xn").arg(there.join("file")).arg("true").status().unwrap().success();
    eventually("it is locked", PATIENCE, || is_locked().then_some(()));

    let stopped = &cluster.at_start.fuse[0];
    cluster.signal(stopped, Signal::STOP);
    eventually("the lock is free", PATIENCE, || (!is_locked()).then_some(()));
    fs::write(there.join("file"), "after!").unwrap();
    fs::set_permissions(there.join("file"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(there.join("gone")).unwrap();
    fs::write(there.join("new"), "").unwrap();
    File::options().write(true).open(there.join("file")).unwrap().set_len(7).unwrap();

    let seen = looks(&here);
    thread::sleep(Duration::from_millis(300));
    cluster.signal(stopped, Signal::CONT);
    assert_eq!(seen.join().unwrap(), (0o600, 7, false, true, vec!["file".to_owned(), "new".to_owned()]));
    eventually("pages of before are gone", PATIENCE, || (read(&file) == "after!").then_some(()));
    drop(locked);
}

/// A process that is ended with its owner.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

//! kill -9 of the FUSE client: it shows in the status, and the same mount point is mounted again at once.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually};
use rustix::process::Signal;

/// A process whose working directory is in the mount.
struct Inside(Child);

impl Inside {
    fn of(directory: &Path) -> Self {
        // `cat` waits for an end of its input, which comes when this is dropped, if not before.
        let cat = Command::new("cat").current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        Self(cat.unwrap())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_status_says_so_and_the_mount_point_can_be_used_again_at_once() {
    let cluster = Cluster::up(Options { ..Options::default() });
    let seeded = cluster.seed("bucket", "", 50, 20_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &seeded);
    // In use: an open file, and a process whose working directory lies in the mount.
    let (first, _) = seeded.first_key_value().unwrap();
    let mut open = File::open(cluster.path("data").join(first)).unwrap();
    let inside = Inside::of(&cluster.path("data"));

    // Not through cv: a crash is seen by whoever looks.
    cluster.signal(&cluster.status().fuse[0], Signal::KILL);
    eventually("the crash is reported", Duration::from_secs(5), || {
        (cluster.status().fuse[0].state == "crashed").then_some(())
    });
    let table = cluster.cv(&["local", "status", "--dir", cluster.directory().to_str().unwrap()]).stdout;
    let line = table.lines().find(|line| line.starts_with("fuse0")).unwrap();
    assert!(line.contains("crashed") && line.contains("signal 9"), "{table}");
    let status = cluster.cv(&["local", "status", "--json", "--dir", cluster.directory().to_str().unwrap()]).json();
    assert!(status["fuse"][0]["pid"].is_null(), "{status}");
    // What was open fails, and does not hang.
    assert!(open.read(&mut [0; 1 << 16]).is_err() || fs::read_dir(cluster.path("data")).is_err());

    let began = Instant::now();
    cluster.start("fuse");
    cluster.assert_tree("data", "", &seeded);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?} until the mount was back", began.elapsed());
    assert_eq!(cluster.status().fuse[0].state, "running");
    drop(inside);

    // Over and over: no layer of dead mounts is left.
    for _ in 0..3 {
        cluster.kill("fuse");
        cluster.start("fuse");
    }
    let mount_point = cluster.mount_point().to_str().unwrap().to_owned();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(table.lines().filter(|line| line.split(' ').nth(4) == Some(&mount_point)).count(), 1, "{table}");
    cluster.assert_tree("data", "", &seeded);
}

//! Many open files, with and without names, and a master that is killed meanwhile.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

const OPEN: usize = 15_000;
/// Every so many files have content.
const WITH_CONTENT: usize = 30;
const PATIENCE: Duration = Duration::from_secs(120);

/// Calls that go on while the master is away: names that are made and removed, and files that are open.
fn use_it(directory: PathBuf, open: Arc<Vec<File>>, done: Arc<AtomicBool>, rounds: Arc<AtomicUsize>) {
    let mut at = 0;
    while !done.load(Ordering::Relaxed) {
        let name = directory.join("made");
        fs::write(&name, "").unwrap();
        fs::remove_file(&name).unwrap();
        for _ in 0..50 {
            open[at % OPEN].metadata().unwrap();
            at += 61;
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn content(number: usize) -> String {
    format!("content of file {number}")
}

fn unlink(directory: &Path, numbers: impl Iterator<Item = usize>) {
    numbers.for_each(|number| fs::remove_file(directory.join(number.to_string())).unwrap());
}

#[test]
fn fifteen_thousand_open_files_outlive_a_killed_master_without_an_error() {
    cavern_conf::process::raise_descriptor_limit();
    // The lease is the usual one. What a change may wait is not the point here, on a machine that is busy.
    let conf = "[client]\nmetadata_timeout = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket", "/data", &[]);
    let directory = cluster.path("data/many");
    fs::create_dir(&directory).unwrap();
    let open: Arc<Vec<File>> = Arc::new(
        (0..OPEN)
            .map(|number| {
                let path = directory.join(number.to_string());
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
                if number % WITH_CONTENT == 0 {
                    file.write_all_at(content(number).as_bytes(), 0).unwrap();
                }
                file
            })
            .collect(),
    );
    unlink(&directory, (0..OPEN).step_by(3));

    let (done, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let users: Vec<_> = (0..2)
        .map(|number| {
            let mine = directory.join(format!("user{number}"));
            fs::create_dir(&mine).unwrap();
            let (open, done, rounds) = (open.clone(), done.clone(), rounds.clone());
            thread::spawn(move || use_it(mine, open, done, rounds))
        })
        .collect();
    cluster.kill("master");
    cluster.start("master");
    let before = rounds.load(Ordering::Relaxed);
    eventually("calls are answered again", PATIENCE, || (rounds.load(Ordering::Relaxed) > before + 4).then_some(()));
    unlink(&directory, (1..OPEN).step_by(3));
    done.store(true, Ordering::Relaxed);
    users.into_iter().for_each(|user| user.join().unwrap());

    // What nobody has open is deleted, so the master has decided about the rest, too: root, mount, three directories.
    let inodes = || cluster.at_start.masters[0].metric("cavern_master_inodes");
    eventually("what is closed is gone", PATIENCE, || (inodes()? == OPEN as u64 + 5).then_some(()));
    for (number, file) in open.iter().enumerate() {
        let attributes = file.metadata().unwrap_or_else(|error| panic!("file {number}: {error}"));
        assert_eq!(attributes.nlink(), u64::from(number % 3 == 2), "file {number}");
        if number % WITH_CONTENT == 0 {
            let mut bytes = vec![0; content(number).len()];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, content(number).as_bytes());
        }
    }
    drop(open);
    eventually("what had no name is gone", PATIENCE, || (inodes()? == OPEN as u64 / 3 + 5).then_some(()));
}

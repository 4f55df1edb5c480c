//! A master whose directory is an older copy: what it does not know any more does not come up in what is made later.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

#[test]
fn no_byte_of_a_file_that_a_restored_master_has_lost_is_in_one_that_is_made_later() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    fs::write(cluster.path("fs/before"), "before").unwrap();
    let data = cluster.directory().join("master0");
    let copy = cluster.directory().join("copy-of-master");
    let copied = |from: &Path, to: &Path| {
        assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    };
    cluster.stop("fuse");
    cluster.stop("master");
    copied(&data, &copy);
    cluster.start("master");
    cluster.start("fuse");
    for number in 0..4 {
        let lost = File::create(cluster.path(format!("fs/lost{number}"))).unwrap();
        lost.write_all_at(&vec![b'l'; 2 * MIB], 0).unwrap();
        lost.sync_all().unwrap();
    }
    cluster.stop("fuse");
    cluster.stop("master");
    fs::remove_dir_all(&data).unwrap();
    copied(&copy, &data);
    cluster.start("master");
    cluster.start("fuse");
    assert_eq!(fs::read(cluster.path("fs/before")).unwrap(), b"before");
    let bucket = Bucket::of(&cluster, "bucket");
    for number in 0..6 {
        let path = cluster.path(format!("fs/fresh{number}"));
        let fresh = File::create(&path).unwrap();
        fresh.write_all_at(b"tail", 900_000).unwrap();
        fresh.write_all_at(b"tail", (MIB + 900_000) as u64).unwrap();
        fresh.sync_all().unwrap();
        let mut expected = vec![0; MIB + 900_004];
        expected[900_000..900_004].copy_from_slice(b"tail");
        expected[MIB + 900_000..].copy_from_slice(b"tail");
        assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
        let key = format!("fs/fresh{number}");
        eventually("the bucket has it", PATIENCE, || {
            bucket.objects().get(&key).is_some_and(|object| *object == expected).then_some(())
        });
    }
}

//! A healthy cluster has nothing to warn of.

use std::fs;

use cavern_tests::{Cluster, Options};

const IMAGES: usize = 2000;

#[test]
fn a_healthy_cluster_logs_no_warning_and_no_error() {
    assert_quiet(false);
}

#[test]
fn nor_does_one_whose_connections_are_secured() {
    assert_quiet(true);
}

fn assert_quiet(secure: bool) {
    let cluster = Cluster::up(Options { workers: 2, more_mounts: vec!["second"], secure, ..Options::default() });
    let source = cluster.directory().join("images");
    let (source, place) = (source.to_str().unwrap(), cluster.directory().to_str().unwrap());
    cluster.cv(&["gen-images", source, "--count", &IMAGES.to_string(), "--mean-size", "20KB"]);
    cluster.cv(&["local", "seed", source, "s3://images", "--dir", place]);
    cluster.mount("s3://images", "/images", &[]);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    // Small files get blocks before they are made, and those that are not needed go back when the client ends.
    for number in 0..20 {
        fs::write(cluster.path("fs").join(number.to_string()), [0; 4096]).unwrap();
    }

    // Cold, warm in the kernel, and warm in the workers only, with new clients.
    for round in 0..3 {
        if round == 2 {
            for fuse in ["fuse0", "fuse1"] {
                cluster.stop(fuse);
                cluster.start(fuse);
            }
        }
        for fuse in &cluster.at_start.fuse {
            let mut files = 0;
            for folder in fs::read_dir(fuse.mount_point.join("images")).unwrap() {
                for file in fs::read_dir(folder.unwrap().path()).unwrap() {
                    let file = file.unwrap();
                    assert_eq!(fs::read(file.path()).unwrap().len() as u64, file.metadata().unwrap().len());
                    files += 1;
                }
            }
            assert_eq!(files, IMAGES);
        }
    }
    for command in [
        &["load", "/images", "--watch"][..],
        &["refresh", "/images"],
        &["fs", "du", "/images"],
        &["fs", "free", "/images"],
        &["fs", "cat", "/fs/0"],
        &["persist", "wait", "/fs"],
        &["report"],
        &["umount", "/images"],
    ] {
        cluster.cv(command);
    }
    for child in ["fuse0", "fuse1", "worker0", "worker1", "master", "s3"] {
        cluster.stop(child);
    }

    let status = cluster.status();
    for child in status.masters.iter().chain(&status.workers).chain(&status.fuse).chain([&status.s3.child]) {
        let log = fs::read_to_string(&child.log).unwrap();
        assert!(log.contains(" INFO "), "{} is no log: {log}", child.log.display());
        let loud = log.lines().find(|line| [" WARN ", " ERROR ", "panicked"].iter().any(|word| line.contains(word)));
        assert_eq!(loud, None, "in {}", child.log.display());
        // Nor does it report what is none of an operator's business: the library of the log, and each command that was
        // given.
        let noise = log.lines().find(|line| line.contains("openraft") || line.contains("client=\"cv\""));
        assert_eq!(noise, None, "in {}", child.log.display());
    }
}

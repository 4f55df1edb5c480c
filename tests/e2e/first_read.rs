//! A bucket is mounted and read: cold from the bucket, warm without it.

use std::fs;

use cavern_tests::{COUNTED, Cluster, Options};

#[test]
fn files_read_as_the_bucket_has_them_and_warm_reads_leave_it_alone() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "some/prefix/", 200, 50_000);
    cluster.mount("s3://bucket/some/prefix", "/data", &[]);

    cluster.s3.reset_stats();
    let listed: usize =
        (0..2).map(|folder| fs::read_dir(cluster.path(format!("data/{folder:04}"))).unwrap().count()).sum();
    assert_eq!(listed, 200);
    cluster.assert_tree("data", "some/prefix/", &tree);
    assert_eq!(cluster.s3.requests("HEAD"), 0);
    assert_eq!(cluster.s3.requests("GET"), 200, "one GET for each cold file");

    // A new FUSE client has nothing in the kernel's caches nor in its own: this is the worker's store.
    cluster.stop("fuse");
    cluster.start("fuse");
    cluster.s3.reset_stats();
    cluster.assert_tree("data", "some/prefix/", &tree);
    assert_eq!(cluster.s3.requests("GET"), 0);
    assert_eq!(cluster.s3.requests("HEAD"), 0);

    let report = cluster.cv(&["report", "--json"]).json();
    assert_eq!(report["mounts"][0]["path"], "/data");
    assert!(!report.to_string().contains(&cluster.s3.secret_key), "the report shows the secret key");
}

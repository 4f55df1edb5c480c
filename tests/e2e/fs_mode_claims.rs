//! One prefix of a bucket, and two clusters that would both write there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, Options, eventually};

use crate::bucket::{Bucket, CLAIM};

const PATIENCE: Duration = Duration::from_secs(30);

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn is_claimed(cluster: &Cluster) -> bool {
    let bucket = Bucket::of(cluster, "bucket");
    bucket.runtime.block_on(bucket.ufs.head(&format!("fs/{CLAIM}"))).is_ok()
}

fn cluster_id(cluster: &Cluster) -> String {
    cluster.cv(&["report", "--json"]).json()["cluster_id"].as_str().unwrap().to_owned()
}

/// `cv mount` of the bucket of one cluster at another one.
fn mount(cluster: &Cluster, bucket_of: &Cluster, more: &[&str]) -> Finished {
    let options = bucket_of.bucket_options();
    let mut arguments = vec!["mount", "s3://bucket/fs", "/fs", "--write-type", "fs-mode"];
    arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
    arguments.extend(more);
    cluster.try_cv(&arguments)
}

#[test]
fn a_prefix_has_one_cluster_that_writes_there_and_another_takes_it_over_knowingly() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let (first, second) = (
        Cluster::up(Options { conf: conf.clone(), ..Options::default() }),
        Cluster::up(Options { conf, ..Options::default() }),
    );
    first.s3.create_bucket("bucket");
    first.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    fs::write(first.path("fs/file"), "first").unwrap();
    first.cv(&["persist", "wait", "/fs", "--timeout", "30s"]);
    assert!(is_claimed(&first));
    assert_eq!(names(&first.path("fs")), ["file".to_owned()].into());

    let first_id = cluster_id(&first);
    for more in [&["--check"][..], &[]] {
        let refused = mount(&second, &first, more);
        assert_eq!(refused.code, 1, "{more:?}: {refused:?}");
        for word in [first_id.as_str(), "s3://bucket/fs", "--take-over"] {
            assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
        }
    }
    assert_eq!(second.cv(&["mount", "--json"]).json().as_array().unwrap().len(), 0);
    let taken = mount(&second, &first, &["--take-over"]);
    assert_eq!(taken.code, 0, "{taken:?}");
    let shown = second.path("fs/file");
    eventually("the file is there", PATIENCE, || (fs::read(&shown).ok()? == b"first").then_some(()));
    second.cv(&["refresh", "/fs"]);
    assert_eq!(names(&second.path("fs")), ["file".to_owned()].into());

    // A leader looks whose the prefix is when it begins.
    first.stop("master");
    first.start("master");
    let second_id = cluster_id(&second);
    eventually("the first cluster has found out", PATIENCE, || {
        fs::read_to_string(&first.at_start.masters[0].log).unwrap().contains(&second_id).then_some(())
    });
    fs::write(first.path("fs/file"), "no more").unwrap();
    fs::write(first.path("fs/other"), "no more").unwrap();
    let waited = first.try_cv(&["persist", "wait", "/fs", "--timeout", "2s"]);
    assert_eq!(waited.code, 1, "{waited:?}");
    let error = first.cv(&["mount", "--json"]).json()[0]["status"]["last_error"].as_str().unwrap().to_owned();
    assert!(error.contains(&second_id), "{error}");
    fs::write(second.path("fs/file"), "second").unwrap();
    second.cv(&["persist", "wait", "/fs", "--timeout", "30s"]);
    assert_eq!(first.s3.get("bucket", "fs/file"), "second");
    assert_eq!(fs::read(first.path("fs/file")).unwrap(), b"no more");

    // Nothing of the other cluster's goes with the mount here, and what was claimed there is free afterwards.
    first.cv(&["umount", "/fs", "--discard"]);
    assert!(is_claimed(&first));
    assert_eq!(first.s3.get("bucket", "fs/file"), "second");
    second.cv(&["umount", "/fs"]);
    assert!(!is_claimed(&first));
    let again = mount(&first, &first, &[]);
    assert_eq!(again.code, 0, "{again:?}");
    eventually("the file is there again", PATIENCE, || {
        (fs::read(first.path("fs/file")).ok()? == b"second").then_some(())
    });
}

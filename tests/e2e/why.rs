//! `cv why`: where the time of a read goes.

use std::fs;

use cavern_tests::{COUNTED, Cluster, Options};
use serde_json::{Value, json};

const USAGE: i32 = 2;
const UNREACHABLE: i32 = 3;
const NOT_FOUND: i32 = 4;

#[track_caller]
fn why(cluster: &Cluster, path: &str) -> Value {
    let found = cluster.cv(&["why", path, "--json"]).json();
    assert_eq!(found["path"], path, "{found}");
    let advice = found["advice"].as_str().unwrap();
    let shown = cluster.cv(&["why", path]).stdout;
    assert!(!advice.is_empty() && shown.starts_with(&format!("{path}: ")), "{shown}");
    found
}

/// Milliseconds of a stage, of all steps.
#[track_caller]
fn waited(found: &Value, stage: &str) -> f64 {
    found["steps"].as_array().unwrap().iter().map(|step| step[stage].as_f64().unwrap()).sum()
}

#[track_caller]
fn says(found: &Value, expected: &str) {
    assert!(found["advice"].as_str().unwrap().contains(expected), "{found}");
}

#[track_caller]
fn refused(cluster: &Cluster, path: &str, code: i32, fragments: &[&str]) {
    let finished = cluster.try_cv(&["why", path]);
    assert_eq!((finished.code, finished.stdout.as_str()), (code, ""), "{finished:?}");
    for fragment in fragments {
        assert!(finished.stderr.contains(fragment), "{fragment:?} is not in {finished:?}");
    }
}

#[test]
fn it_says_where_the_bytes_of_an_object_are_and_what_that_costs() {
    // A worker that is killed counts as live for as long as the test takes.
    let conf = format!("[master]\nworker_timeout = \"60s\"\n{COUNTED}");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("objects");
    cluster.s3.put("objects", "dir/cold.bin", vec![1; 3 << 20]);
    cluster.s3.put("objects", "direct.bin", vec![1; 300_000]);
    cluster.s3.put("objects", "empty", "");
    cluster.mount("s3://objects", "/data", &[]);

    cluster.s3.add_fault(&json!({"latency_ms": 300, "operations": ["GET"]}));
    let found = cluster.cv(&["why", cluster.path("data/dir/cold.bin").to_str().unwrap(), "--json"]).json();
    assert_eq!((&found["path"], &found["mode"]), (&json!("/data/dir/cold.bin"), &json!("cache-mode")), "{found}");
    assert_eq!((&found["key"], &found["size"]), (&json!("dir/cold.bin"), &json!(3 << 20)), "{found}");
    assert_eq!(found["workers"][0]["chunks_present"], 0, "nothing of it was there before: {found}");
    assert_eq!((&found["workers"][0]["route"], &found["workers"][0]["chunks"]), (&json!("local"), &json!(24)));
    assert!(found["filled_bytes"].as_u64().unwrap() >= 1 << 20, "{found}");
    assert!(waited(&found, "fetch") >= 290.0 && waited(&found, "bucket") == 0.0, "{found}");
    assert!(waited(&found, "metadata") > 0.0, "{found}");
    says(&found, "`cv load /data/dir/cold.bin`");
    cluster.s3.clear_faults();

    cluster.cv(&["load", "/data/dir", "--watch"]);
    let found = why(&cluster, "/data/dir/cold.bin");
    assert_eq!((&found["filled_bytes"], &found["workers"][0]["chunks_present"]), (&json!(0), &json!(24)), "{found}");
    assert_eq!(found["sources"]["bucket_bytes"], 0, "{found}");
    assert!(found["sources"]["descriptor_bytes"].as_u64().unwrap() >= 1 << 20, "{found}");

    let found = why(&cluster, "/data/empty");
    assert_eq!((&found["size"], &found["workers"]), (&json!(0), &json!([])), "{found}");
    says(&found, "the file is empty");

    refused(&cluster, "/data/none", NOT_FOUND, &["/data/none"]);
    refused(&cluster, cluster.path("data/none").to_str().unwrap(), NOT_FOUND, &["/data/none"]);
    refused(&cluster, "/data/dir", USAGE, &["/data/dir is a directory", "cv fs ls /data/dir"]);

    cluster.kill("worker0");
    let found = why(&cluster, "/data/direct.bin");
    assert_eq!(found["sources"]["bucket_bytes"], 300_000, "{found}");
    assert!(waited(&found, "bucket") > 0.0, "{found}");
    assert!(found["workers"][0]["error"].is_string(), "{found}");
    says(&found, "cv node list");

    cluster.kill("master");
    refused(&cluster, "/data/direct.bin", UNREACHABLE, &["no master answers", "--master"]);
}

#[test]
fn it_knows_workers_elsewhere_and_files_of_fs_mode_mounts() {
    let conf = format!("{COUNTED}local_descriptors = false\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    fs::write(cluster.path("fs/file"), vec![5; 2_000_000]).unwrap();
    std::os::unix::fs::symlink("file", cluster.path("fs/link")).unwrap();
    fs::File::create(cluster.path("fs/sparse")).unwrap().set_len(1_000_000).unwrap();
    let found = why(&cluster, "/fs/file");
    assert_eq!((&found["mode"], &found["size"], &found["blocks"]), (&json!("fs-mode"), &json!(2_000_000), &json!(1)));
    assert_eq!((&found["workers"][0]["route"], &found["workers"][0]["first"]), (&json!("remote"), &json!(true)));
    assert!(found["sources"]["network_bytes"].as_u64().unwrap() >= 1 << 20, "{found}");
    assert!(waited(&found, "network") > 0.0, "{found}");
    says(&found, "another host");
    let found = why(&cluster, "/fs/sparse");
    assert_eq!(found["blocks"], 0, "{found}");
    refused(&cluster, "/fs/link", USAGE, &["symbolic link to file"]);
}

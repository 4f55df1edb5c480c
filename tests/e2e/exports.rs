//! `cv export`: what the bucket of an fs-mode mount lacks gets there now, through everything that happens meanwhile.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{Cluster, Options, eventually};
use serde_json::{Value, json};

use crate::bucket::{Bucket, Objects};
use crate::running::{Running, counts, lines};

const PATIENCE: Duration = Duration::from_secs(60);
const FILES: usize = 60;
const FILE_BYTES: usize = 30_000;

/// Nothing reaches the bucket by itself while a test runs.
fn mounted() -> Cluster {
    let conf = "[master]\npersist_delay = \"1h\"\n".to_owned();
    let cluster = Cluster::up(Options { workers: 2, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

/// Makes a directory with files below the mount; gives what the bucket is to have of it.
fn fill(cluster: &Cluster, directory: &str) -> Objects {
    fs::create_dir(cluster.path("fs").join(directory)).unwrap();
    let mut expected = Objects::from([(format!("fs/{directory}/"), Bytes::new())]);
    for number in 0..FILES {
        let name = format!("{directory}/f{number:02}");
        let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at * 31 + number) as u8).collect();
        fs::write(cluster.path("fs").join(&name), &content).unwrap();
        expected.insert(format!("fs/{name}"), content.into());
    }
    expected
}

fn objects(cluster: &Cluster) -> Objects {
    Bucket::of(cluster, "bucket").objects()
}

#[track_caller]
fn assert_bucket(cluster: &Cluster, expected: &Objects) {
    let there = objects(cluster);
    assert_eq!(there.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert!(there == *expected, "an object has other content than its file");
}

fn job(cluster: &Cluster, id: u64) -> Value {
    // Its exit code reports the job's end.
    cluster.try_cv(&["job", "status", &id.to_string(), "--json"]).json()
}

fn begin(cluster: &Cluster, path: &str) -> u64 {
    cluster.cv(&["export", path, "--json"]).json()["id"].as_u64().unwrap()
}

fn metric(cluster: &Cluster, name: &str) -> Option<u64> {
    cluster.status().masters[0].metric(name)
}

#[test]
fn an_export_makes_the_bucket_equal_at_once_and_leaves_the_rest_alone() {
    let cluster = mounted();
    let mut expected = fill(&cluster, "run");
    fill(&cluster, "other");
    symlink("f00", cluster.path("fs/run/link")).unwrap();
    expected.insert("fs/run/link".to_owned(), Bytes::from_static(b"f00"));
    assert!(objects(&cluster).is_empty());

    let last = lines(&cluster.cv(&["export", "/fs/run", "--watch", "--json"])).pop().unwrap();
    let (files, bytes) = (FILES as u64 + 2, (FILES * FILE_BYTES) as u64);
    assert_eq!(counts(&last), [files, files, bytes, bytes, 0]);
    assert_eq!((&last["kind"], &last["state"], &last["path"]), (&json!("export"), &json!("done"), &json!("/fs/run")));
    assert_bucket(&cluster, &expected);

    // What is changed, renamed and removed comes with the next one; in words this time.
    fs::write(cluster.path("fs/run/f01"), b"changed").unwrap();
    fs::remove_file(cluster.path("fs/run/f02")).unwrap();
    fs::rename(cluster.path("fs/run"), cluster.path("fs/done")).unwrap();
    fs::remove_dir_all(cluster.path("fs/other")).unwrap();
    let mut expected: Objects =
        expected.into_iter().map(|(key, content)| (key.replace("fs/run/", "fs/done/"), content)).collect();
    expected.insert("fs/done/f01".to_owned(), Bytes::from_static(b"changed"));
    expected.remove("fs/done/f02");
    let said = cluster.cv(&["export", "/fs", "--watch"]).stdout;
    assert!(said.lines().last().unwrap().contains("export /fs done: "), "{said}");
    assert_bucket(&cluster, &expected);
    let nothing = lines(&cluster.cv(&["export", "/", "--watch", "--json"])).pop().unwrap();
    assert_eq!((counts(&nothing), &nothing["state"]), ([0; 5], &json!("done")));

    let list = cluster.cv(&["job", "list", "--json"]).json();
    let shown: Vec<_> = list.as_array().unwrap().iter().map(|job| (&job["kind"], &job["state"])).collect();
    assert_eq!(shown, [(&json!("export"), &json!("done")); 3]);
    let ended = |kind: &str| format!("cavern_master_jobs_ended_total{{kind=\"{kind}\",state=\"done\"}}");
    assert_eq!((metric(&cluster, &ended("export")), metric(&cluster, &ended("load"))), (Some(3), Some(0)));
    assert_eq!(metric(&cluster, "cavern_master_jobs_running{kind=\"export\"}"), Some(0));
    let refused = cluster.try_cv(&["job", "retry", "1"]);
    assert!(refused.code == 1 && refused.stderr.contains("is done"), "{refused:?}");
}

#[test]
fn an_export_that_the_bucket_refuses_fails_with_the_reason_and_is_tried_again() {
    let cluster = mounted();
    let expected = fill(&cluster, "run");
    cluster.s3.add_fault(&json!({"kind": "403", "operations": ["PUT"]}));
    let failed = cluster.try_cv(&["export", "/fs", "--watch", "--json"]);
    let last = lines(&failed).pop().unwrap();
    let files = FILES as u64 + 1;
    assert_eq!((failed.code, counts(&last)[..2].to_vec(), &last["state"]), (1, vec![files, 0], &json!("failed")));
    assert_eq!(last["errors"], files);
    assert!(last["last_error"].as_str().unwrap().contains("denied"), "{last}");
    assert!(failed.stderr.contains("cv job retry 1"), "{}", failed.stderr);
    assert_eq!(cluster.try_cv(&["job", "wait", "1"]).code, 1);
    assert!(objects(&cluster).is_empty());

    // What fails for a moment costs no error.
    cluster.s3.clear_faults();
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["PUT"], "key_prefix": "fs/run/f0", "count": 5}));
    let again = lines(&cluster.cv(&["job", "retry", "1", "--watch", "--json"])).pop().unwrap();
    assert_eq!((&again["state"], &again["retry_of"], &again["id"]), (&json!("done"), &json!(1), &json!(2)));
    assert_eq!(counts(&again)[..2], [files, files]);
    assert_bucket(&cluster, &expected);
    assert_eq!(job(&cluster, 1)["state"], "failed");
    let failures = "cavern_master_jobs_ended_total{kind=\"export\",state=\"failed\"}";
    assert_eq!(metric(&cluster, failures), Some(1));
}

#[test]
fn a_killed_master_goes_on_with_an_export_and_the_watch_with_it() {
    let cluster = mounted();
    let expected = fill(&cluster, "run");
    // Slow enough to be caught in the middle.
    cluster.s3.add_fault(&json!({"latency_ms": 3000, "operations": ["PUT"]}));
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["PUT"], "key_prefix": "fs/run/f5"}));
    let watch = Running::start(&cluster, &["export", "/fs/run", "--watch", "--json"]);
    eventually("some of it is in the bucket", PATIENCE, || {
        let job = cluster.cv(&["job", "list", "--json"]).json()[0].clone();
        (job["files_done"].as_u64()? > 0).then_some(())
    });
    cluster.kill("master");
    watch.says("waiting for a master");
    cluster.start("master");
    watch.says("a master answers again");
    let after = job(&cluster, 1);
    assert_eq!((&after["state"], &after["files_total"]), (&json!("running"), &json!(FILES + 1)), "{after}");
    assert!(after["files_done"].as_u64().unwrap() <= FILES as u64 - 9, "ten of them are refused: {after}");
    cluster.s3.clear_faults();
    let ended = watch.finish();
    assert_eq!(ended.code, 0, "{ended:?}");
    let last = lines(&ended).pop().unwrap();
    let (files, bytes) = (FILES as u64 + 1, (FILES * FILE_BYTES) as u64);
    assert_eq!((counts(&last), &last["state"]), ([files, files, bytes, bytes, 0], &json!("done")));
    assert_bucket(&cluster, &expected);
}

#[test]
fn a_cancelled_export_leaves_the_rest_to_the_usual_pace_and_stays_cancelled() {
    let cluster = mounted();
    let expected = fill(&cluster, "run");
    fill(&cluster, "other");
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["PUT"]}));
    let id = begin(&cluster, "/fs/other");
    eventually("an error is reported", PATIENCE, || {
        let job = job(&cluster, id);
        job["last_error"].as_str().is_some_and(|error| error.contains("unavailable")).then_some(())
    });
    assert_eq!(metric(&cluster, "cavern_master_jobs_running{kind=\"export\"}"), Some(1));
    let watch = Running::start(&cluster, &["job", "wait", &id.to_string()]);
    watch.says("running");
    let cancelled = cluster.cv(&["job", "cancel", &id.to_string(), "--json"]).json();
    assert_eq!((&cancelled["state"], &cancelled["files_done"]), (&json!("cancelled"), &json!(0)));
    let ended = watch.finish();
    assert!(ended.code == 1 && ended.stderr.contains("was cancelled"), "{ended:?}");
    cluster.kill("master");
    cluster.start("master");
    assert_eq!(job(&cluster, id)["state"], "cancelled");

    // Nobody hurries it any more; another part is exported meanwhile.
    cluster.s3.clear_faults();
    cluster.cv(&["export", "/fs/run", "--watch"]);
    assert_bucket(&cluster, &expected);
    let behind = cluster.cv(&["persist", "status", "/fs/other", "--json"]).json();
    assert_eq!(behind["files"], FILES as u64 + 1);
    let again = lines(&cluster.cv(&["job", "retry", &id.to_string(), "--watch", "--json"])).pop().unwrap();
    assert_eq!((&again["state"], &again["path"]), (&json!("done"), &json!("/fs/other")));
    assert_eq!(objects(&cluster).len(), 2 * (FILES + 1));
}

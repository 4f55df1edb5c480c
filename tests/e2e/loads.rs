//! `cv load`: what it counts, what it reports while it runs, and what becomes of it when something goes wrong.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{COUNTED, Cluster, Options, eventually};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::running::{Running, counts, lines};

const PATIENCE: Duration = Duration::from_secs(60);

/// Slows every GET down, so that a job is seen at work.
fn slow_down(cluster: &Cluster, latency_ms: u64) {
    cluster.s3.add_fault(&json!({"latency_ms": latency_ms, "operations": ["GET"]}));
}

fn job(cluster: &Cluster, id: u64) -> Value {
    // Its exit code reports the job's end.
    cluster.try_cv(&["job", "status", &id.to_string(), "--json"]).json()
}

#[test]
fn totals_are_those_of_the_bucket_and_what_is_cached_is_not_fetched_again() {
    let cluster = Cluster::up(Options { workers: 2, conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 300, 20_000);
    cluster.s3.put("bucket", "empty", "");
    cluster.s3.put("bucket", "blocks", vec![9; (2 << 20) + 1]);
    let bytes = tree.values().map(|content| content.len() as u64).sum::<u64>() + (2 << 20) + 1;
    cluster.mount("s3://bucket", "/data", &["--block-size", "1MiB"]);

    slow_down(&cluster, 1000);
    let loaded = cluster.cv(&["load", "/data", "--watch", "--json"]);
    cluster.s3.clear_faults();
    let said = lines(&loaded);
    let (last, progress) = said.split_last().unwrap();
    assert_eq!((counts(last), &last["state"]), ([302, 302, bytes, bytes, 0], &json!("done")));
    assert_eq!(
        (&last["bytes_fetched"], &last["walked"], &last["path"]),
        (&json!(bytes), &json!(true), &json!("/data"))
    );
    assert!(!progress.is_empty() && progress.iter().all(|line| line["state"] == "running"), "{}", loaded.stdout);
    let done: Vec<u64> = progress.iter().map(|line| line["bytes_done"].as_u64().unwrap()).collect();
    assert!(done.is_sorted() && done.iter().all(|done| *done <= bytes), "{done:?}");
    assert_eq!(cluster.s3.requests("HEAD"), 0);

    // All of it is where readers look for it.
    cluster.s3.reset_stats();
    cluster.assert_tree("data", "", &tree);
    assert_eq!(cluster.s3.requests("GET"), 0);

    // For people: the same in words. Nothing is fetched the second time.
    let again = cluster.cv(&["load", "/data", "--watch"]);
    let line = again.stdout.lines().last().unwrap();
    assert!(line.contains("/data done: 302/302 files") && line.contains("(0 B fetched)"), "{line}");
    assert_eq!(cluster.s3.requests("GET"), 0);

    // Part of it; and the list of all.
    let folder = cluster.cv(&["load", "/data/0001", "--json"]).json();
    let id = folder["id"].as_u64().unwrap();
    let ended = lines(&cluster.cv(&["job", "wait", &id.to_string(), "--json"])).pop().unwrap();
    let below = tree.range("0001/".to_owned().."0002/".to_owned()).map(|(_, content)| content.len() as u64).sum();
    assert_eq!(counts(&ended), [100, 100, below, below, 0]);
    let file = lines(&cluster.cv(&["load", "/data/blocks", "--watch", "--json"])).pop().unwrap();
    assert_eq!(counts(&file), [1, 1, (2 << 20) + 1, (2 << 20) + 1, 0]);
    let list = cluster.cv(&["job", "list", "--json"]).json();
    let states: Vec<_> = list.as_array().unwrap().iter().map(|job| job["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["done"; 4]);
}

#[test]
fn what_changed_is_loaded_after_the_next_listing_and_until_then_counted_as_errors() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 50, 20_000);
    let length = |key: &str| tree[key].len() as u64;
    let all: u64 = tree.values().map(|content| content.len() as u64).sum();
    cluster.mount("s3://bucket", "/trusted", &["--consistency", "never"]);
    cluster.mount("s3://bucket", "/young", &["--metadata-ttl", "1s"]);
    for mount in ["/trusted", "/young"] {
        assert_eq!(cluster.cv(&["fs", "du", "-s", mount, "--json"]).json()[0]["files"], 50);
    }

    let (replaced, deleted) = (["0000/000001.bin", "0000/000002.bin"], "0000/000003.bin");
    for key in replaced {
        cluster.s3.put("bucket", key, "another");
    }
    cluster.s3.delete("bucket", deleted);
    let gone = length(replaced[0]) + length(replaced[1]) + length(deleted);

    // The listing is trusted until a refresh: three objects are not what it says.
    let stale = cluster.try_cv(&["load", "/trusted", "--watch", "--json"]);
    let last = lines(&stale).pop().unwrap();
    assert_eq!((stale.code, counts(&last)), (1, [50, 47, all, all - gone, 3]), "{stale:?}");
    assert_eq!(last["state"], "failed");
    assert!(stale.stderr.contains("3 errors") && stale.stderr.contains("cv refresh"), "{}", stale.stderr);
    let id = last["id"].to_string();
    assert_eq!(cluster.try_cv(&["job", "status", &id]).code, 1);
    assert_eq!(cluster.cv(&["refresh", "/trusted", "--json"]).json()["changed"], 2);
    let fresh = lines(&cluster.cv(&["load", "/trusted", "--watch", "--json"])).pop().unwrap();
    let now = all - gone + 2 * 7;
    assert_eq!(counts(&fresh), [49, 49, now, now, 0]);
    assert_eq!(fresh["bytes_fetched"], 2 * 7);

    // A listing that is older than its mount allows is made anew by the job itself. One object more is new to it.
    cluster.s3.put("bucket", "new/object", "new one");
    eventually("the listing has its age", PATIENCE, || {
        let age = cluster.cv(&["fs", "stat", "/young", "--json"]).json()["listing_age_ms"].as_u64().unwrap();
        (age > 1000).then_some(())
    });
    let young = lines(&cluster.cv(&["load", "/young", "--watch", "--json"])).pop().unwrap();
    assert_eq!(counts(&young), [50, 50, now + 7, now + 7, 0]);
    assert_eq!(young["bytes_fetched"], 7, "two mounts of a bucket share their blocks");
}

/// A bucket of 400 small files, mounted at `/data`, which are read slowly from now on; and their bytes in all.
fn slow_bucket() -> (Cluster, BTreeMap<String, Bytes>, u64) {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 400, 5000);
    let bytes = tree.values().map(|content| content.len() as u64).sum();
    cluster.mount("s3://bucket", "/data", &[]);
    slow_down(&cluster, 1000);
    (cluster, tree, bytes)
}

#[test]
fn a_killed_master_is_waited_for_and_the_job_goes_on() {
    let (cluster, tree, bytes) = slow_bucket();
    let load = Running::start(&cluster, &["load", "/data", "--watch", "--json"]);
    eventually("some files are loaded", PATIENCE, || {
        let list = cluster.cv(&["job", "list", "--json"]).json();
        (list[0]["files_done"].as_u64()? > 0).then_some(())
    });
    // And the rest is not before the master is there again.
    cluster.s3.add_fault(&json!({"kind": "hang", "operations": ["GET"]}));
    cluster.kill("master");
    // By the first failure, not when the search for another master is over.
    load.says("the connection to the master broke");
    load.says("waiting for a master");
    cluster.start("master");
    load.says("a master answers again");
    cluster.s3.clear_faults();
    let loaded = load.finish();
    assert_eq!(loaded.code, 0, "{loaded:?}");
    let last = lines(&loaded).pop().unwrap();
    assert_eq!((counts(&last), &last["state"]), ([400, 400, bytes, bytes, 0], &json!("done")));
    cluster.s3.reset_stats();
    cluster.assert_tree("data", "", &tree);
    assert_eq!(cluster.s3.requests("GET"), 0);
}

#[test]
fn an_interrupt_cancels_the_job_that_the_command_began() {
    let cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "", 1000, 5000);
    cluster.mount("s3://bucket", "/data", &[]);
    slow_down(&cluster, 1000);
    for (number, signal) in [(1, Signal::INT), (2, Signal::TERM)] {
        cluster.cv(&["fs", "free", "/data"]);
        let load = Running::start(&cluster, &["load", "/data", "--watch"]);
        load.says("running");
        load.signal(signal);
        let ended = load.finish();
        assert_eq!(ended.code, 1, "{ended:?}");
        assert!(ended.stdout.lines().last().unwrap().contains("/data cancelled"), "{ended:?}");
        assert!(ended.stderr.contains("was cancelled"), "{ended:?}");
        let job = job(&cluster, number);
        assert_eq!((&job["state"], &job["errors"]), (&json!("cancelled"), &json!(0)));
        assert!(job["files_done"].as_u64() < Some(1000), "{job}");
    }

    // One that somebody else began goes on.
    cluster.cv(&["fs", "free", "/data"]);
    let id = cluster.cv(&["load", "/data", "--json"]).json()["id"].as_u64().unwrap();
    let watch = Running::start(&cluster, &["job", "wait", &id.to_string()]);
    watch.says("running");
    watch.signal(Signal::INT);
    let ended = watch.finish();
    assert!(ended.code == 1 && ended.stderr.contains("goes on"), "{ended:?}");
    assert_eq!(job(&cluster, id)["state"], "running");

    // Cancelled from elsewhere: its watcher learns of it, and a restarted master does not begin anew.
    let watch = Running::start(&cluster, &["job", "wait", &id.to_string()]);
    let cancelled = cluster.cv(&["job", "cancel", &id.to_string(), "--json"]).json();
    assert_eq!(cancelled["state"], "cancelled");
    let ended = watch.finish();
    assert!(ended.code == 1 && ended.stderr.contains("was cancelled"), "{ended:?}");
    cluster.kill("master");
    cluster.start("master");
    assert_eq!(job(&cluster, id)["state"], "cancelled");
}

#[test]
fn a_bucket_that_fails_for_a_moment_costs_no_error_and_one_that_stays_away_is_told_of() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 100, 5000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.s3.add_fault(&json!({"kind": "503", "error_rate": 0.5, "operations": ["GET"], "count": 60}));
    let last = lines(&cluster.cv(&["load", "/data", "--watch", "--json"])).pop().unwrap();
    assert_eq!(counts(&last)[..2], [100, 100]);
    assert_eq!(last["errors"], 0);

    cluster.cv(&["fs", "free", "/data"]);
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["GET"], "key_prefix": "0000/00000"}));
    let failed = cluster.try_cv(&["load", "/data", "--watch", "--json"]);
    let last = lines(&failed).pop().unwrap();
    assert_eq!((failed.code, counts(&last)[..2].to_vec(), last["errors"].as_u64()), (1, vec![100, 90], Some(10)));
    assert!(last["last_error"].as_str().unwrap().starts_with("0000/00000"), "{last}");
    cluster.s3.clear_faults();
    let last = lines(&cluster.cv(&["load", "/data", "--watch", "--json"])).pop().unwrap();
    let missing: usize = tree.iter().filter(|(key, _)| key.starts_with("0000/00000")).map(|(_, one)| one.len()).sum();
    assert_eq!(last["bytes_fetched"], missing);
}

#[test]
fn files_of_fs_mode_mounts_that_only_the_bucket_has_are_loaded() {
    let conf = format!("[master]\npersist_delay = \"100ms\"\n{COUNTED}");
    let cluster = Cluster::up(Options { workers: 2, conf, ..Options::default() });
    let existing = cluster.seed("bucket", "fs/old/", 50, 20_000);
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    let large: Vec<u8> = (0..(3 << 20) + 77u32).map(|number| (number / 7) as u8).collect();
    fs::create_dir(cluster.path("fs/new")).unwrap();
    fs::write(cluster.path("fs/new/large"), &large).unwrap();
    fs::write(cluster.path("fs/new/kept"), b"kept").unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(cluster.cv(&["fs", "free", "/fs/new/large", "--json"]).json()["files"], 1);

    cluster.s3.reset_stats();
    let last = lines(&cluster.cv(&["load", "/fs", "--watch", "--json"])).pop().unwrap();
    let old: u64 = existing.values().map(|content| content.len() as u64).sum();
    let fetched = old + large.len() as u64;
    assert_eq!(counts(&last), [52, 52, fetched + 4, fetched + 4, 0]);
    assert_eq!(
        (&last["bytes_fetched"], &last["state"], &last["kind"]),
        (&json!(fetched), &json!("done"), &json!("load"))
    );
    assert!(cluster.s3.requests("GET") > 0);
    cluster.s3.reset_stats();
    cluster.assert_tree("fs/old", "fs/old/", &existing);
    assert!(fs::read(cluster.path("fs/new/large")).unwrap() == large);
    assert_eq!(fs::read(cluster.path("fs/new/kept")).unwrap(), b"kept");
    assert_eq!(cluster.s3.requests("GET"), 0, "all of it is at the workers");
    let again = lines(&cluster.cv(&["load", "/fs/new/large", "--watch", "--json"])).pop().unwrap();
    assert_eq!((counts(&again)[..2].to_vec(), &again["bytes_fetched"]), (vec![1, 1], &json!(0)));
}

/// Writes a list of paths, and gives its name.
fn list_of(cluster: &Cluster, name: &str, paths: impl Iterator<Item = String>) -> String {
    let list = cluster.directory().join(name);
    fs::write(&list, paths.map(|path| path + "\n").collect::<String>()).unwrap();
    list.to_str().unwrap().to_owned()
}

#[test]
fn a_list_is_loaded_and_looked_at_and_what_was_interrupted_goes_on() {
    let cluster = Cluster::up(Options { workers: 2, conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 1000, 5000);
    cluster.mount("s3://bucket", "/data", &[]);
    let wanted: Vec<&String> = tree.keys().filter(|key| key.as_str() < "0007/").collect();
    let bytes: u64 = wanted.iter().map(|key| tree[*key].len() as u64).sum();
    let list = list_of(&cluster, "list", wanted.iter().map(|key| format!("/data/{key}")));

    let cold = cluster.try_cv(&["load", "--files-from", &list, "--check", "--json"]);
    let last = lines(&cold).pop().unwrap();
    assert_eq!((cold.code, counts(&last), &last["kind"]), (1, [700, 0, bytes, 0, 0], &json!("check")), "{cold:?}");
    assert_eq!(cluster.s3.requests("GET"), 0, "a check loads nothing");

    slow_down(&cluster, 1000);
    let load = Running::start(&cluster, &["load", "--files-from", &list, "--json"]);
    eventually("it has begun", PATIENCE, || (cluster.s3.requests("GET") > 10).then_some(()));
    load.signal(Signal::INT);
    let interrupted = load.finish();
    assert!(interrupted.code == 1 && interrupted.stderr.contains("interrupted"), "{interrupted:?}");
    assert!(interrupted.stderr.contains("the same command goes on"), "{interrupted:?}");
    eventually("what was under way is there", PATIENCE, || {
        let check = cluster.try_cv(&["load", "--files-from", &list, "--check", "--json"]);
        (lines(&check).pop()?["files_done"].as_u64()? > 0).then_some(())
    });
    cluster.s3.clear_faults();
    let loaded = lines(&cluster.cv(&["load", "--files-from", &list, "--json"])).pop().unwrap();
    assert_eq!(counts(&loaded), [700, 700, bytes, bytes, 0]);
    assert_eq!((&loaded["paths"], &loaded["paths_done"]), (&json!(700), &json!(700)));
    assert!(loaded["bytes_fetched"].as_u64().unwrap() < bytes, "it began from the start: {loaded}");
    assert_eq!((cluster.s3.requests("GET"), cluster.s3.requests("HEAD")), (700, 0), "each object once");

    let warm = cluster.cv(&["load", "--files-from", &list, "--check"]);
    let line = warm.stdout.lines().last().unwrap();
    assert!(line.contains("100.0 % cached") && line.contains("700 of 700 files as a whole"), "{line}");
    let part = cluster.try_cv(&["load", "/data", "--check", "--json"]);
    let last = lines(&part).pop().unwrap();
    assert_eq!((part.code, counts(&last)[..2].to_vec()), (1, vec![1000, 700]), "{part:?}");
    assert!(part.stderr.contains("300 files not cached"), "{part:?}");

    // What leads nowhere is an error, and the rest is loaded.
    let odd = ["/data/nowhere", "/data/0007/000700.bin"].map(str::to_owned);
    let odd = list_of(&cluster, "odd", odd.into_iter());
    let failed = cluster.try_cv(&["load", "--files-from", &odd, "--json"]);
    assert_eq!((failed.code, counts(&lines(&failed).pop().unwrap())[1]), (1, 1), "{failed:?}");
    assert!(failed.stderr.contains("/data/nowhere"), "{failed:?}");
    let wrong = list_of(&cluster, "wrong", ["/data/0007/000700.bin", "data"].map(str::to_owned).into_iter());
    let refused = cluster.try_cv(&["load", "--files-from", &wrong]);
    assert!(refused.code == 2 && refused.stderr.contains("line 2"), "{refused:?}");
    assert_eq!(cluster.cv(&["job", "list", "--json"]).json(), json!([]), "none of it is a job");

    let dropped = cluster.cv(&["load", "--files-from", &list, "--evict", "--json"]).json();
    assert_eq!((&dropped["files"], &dropped["missing_paths"]), (&json!(700), &json!(0)));
    let gone = cluster.try_cv(&["load", "--files-from", &list, "--check", "--json"]);
    assert_eq!((gone.code, counts(&lines(&gone).pop().unwrap())[1]), (1, 0), "{gone:?}");
}

#[test]
fn a_killed_master_is_waited_for_and_a_list_goes_on() {
    let (cluster, tree, bytes) = slow_bucket();
    let list = list_of(&cluster, "list", tree.keys().map(|key| format!("/data/{key}")));
    let load = Running::start(&cluster, &["load", "--files-from", &list, "--json"]);
    eventually("it has begun", PATIENCE, || (cluster.s3.requests("GET") > 10).then_some(()));
    cluster.kill("master");
    load.says("waiting for a master");
    cluster.start("master");
    load.says("a master answers again");
    cluster.s3.clear_faults();
    let loaded = load.finish();
    assert_eq!(loaded.code, 0, "{loaded:?}");
    assert_eq!(counts(&lines(&loaded).pop().unwrap()), [400, 400, bytes, bytes, 0]);
    cluster.s3.reset_stats();
    cluster.assert_tree("data", "", &tree);
    assert_eq!(cluster.s3.requests("GET"), 0);
}

#[test]
fn names_alone_are_loaded_by_listings_and_no_content() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 300, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let last = lines(&cluster.cv(&["load", "/data", "--metadata-only", "--watch", "--json"])).pop().unwrap();
    assert_eq!((counts(&last), &last["kind"]), ([300, 300, 0, 0, 0], &json!("load_metadata")));
    assert!(cluster.s3.requests("LIST") > 0);
    assert_eq!((cluster.s3.requests("GET"), cluster.s3.requests("HEAD")), (0, 0));
    cluster.s3.reset_stats();
    for (key, content) in &tree {
        assert_eq!(fs::metadata(cluster.path("data").join(key)).unwrap().len(), content.len() as u64);
    }
    assert_eq!(cluster.s3.requests("LIST"), 0, "the names were known");
    let list = list_of(&cluster, "list", tree.keys().map(|key| format!("/data/{key}")));
    let listed = lines(&cluster.cv(&["load", "--files-from", &list, "--metadata-only", "--json"])).pop().unwrap();
    assert_eq!(counts(&listed), [300, 300, 0, 0, 0]);
    assert_eq!(["GET", "HEAD"].map(|kind| cluster.s3.requests(kind)), [0, 0]);
}

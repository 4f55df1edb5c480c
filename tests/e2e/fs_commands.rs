//! `cv fs`, `cv report`, `cv node` and `cv refresh`: that their figures are true.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, Options, eventually};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(30);
const NOT_FOUND: i32 = 4;
/// A file takes whole units of the disk.
const UNIT: u64 = 4096;
const CHUNK: u64 = 128 << 10;

/// A cluster with a small tree at /data; keys with their contents and ETags.
fn small_tree() -> (Cluster, BTreeMap<&'static str, (String, String)>) {
    let cluster = Cluster::up(Options { workers: 2, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    let mut tree = BTreeMap::new();
    for (key, bytes) in [("a/one", 1), ("a/two", 5000), ("a/deep/three", 300_000), ("b/four", 0), ("five", 70_000)] {
        let content: String = ('a'..='z').cycle().take(bytes).collect();
        let etag = cluster.s3.put("bucket", &format!("p/{key}"), content.clone());
        tree.insert(key, (content, etag));
    }
    cluster.mount("s3://bucket/p", "/data", &[]);
    (cluster, tree)
}

#[test]
fn du_counts_what_is_below_names_that_are_no_text_in_the_total() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    for (name, bytes) in [(&b"\xff"[..], 5), (&b"plain"[..], 7)] {
        let directory = cluster.path("fs").join(OsStr::from_bytes(name));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), vec![0u8; bytes]).unwrap();
    }
    let sizes = |said: &Finished| {
        let views: Vec<Value> = serde_json::from_str(&said.stdout).unwrap();
        views.iter().map(|view| (view["path"].as_str().unwrap().to_owned(), view["bytes"].clone())).collect::<Vec<_>>()
    };
    let expected = [("/fs/plain".to_owned(), json!(7)), ("/fs".to_owned(), json!(12))];
    let said = eventually("all is counted", PATIENCE, || {
        let said = cluster.cv(&["fs", "du", "/fs", "--json"]);
        (sizes(&said) == expected).then_some(said)
    });
    assert!(said.stderr.contains("not UTF-8"), "{said:?}");
}

#[test]
fn commands_end_on_files_whose_listing_is_old() {
    const TTL: Duration = Duration::from_millis(200);
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "a/one", "content");
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "200ms"]);
    assert_eq!(fs::read_to_string(cluster.path("data/a/one")).unwrap(), "content");
    let scratch = tempfile::tempdir().unwrap();
    let copy = scratch.path().join("one").to_str().unwrap().to_owned();
    for command in [
        &["fs", "blocks", "/data/a/one"][..],
        &["fs", "cat", "/data/a/one"],
        &["fs", "get", "/data/a/one", &copy],
        &["fs", "head", "/data/a/one"],
        &["fs", "stat", "/data/a/one"],
        &["fs", "tail", "/data/a/one"],
        &["fs", "free", "/data/a/one"],
        &["fs", "getfattr", "/data/a/one"],
        &["fs", "quota", "get", "/data/a"],
        &["fs", "ttl", "get", "/data/a/one"],
    ] {
        let listed = std::time::Instant::now();
        eventually("every listing is old", PATIENCE, || (listed.elapsed() > 2 * TTL).then_some(()));
        let mut running = cluster.command(command);
        let mut running = running.stdout(std::process::Stdio::null()).spawn().unwrap();
        let ended = eventually(&command.join(" "), PATIENCE, || running.try_wait().unwrap());
        // What is in cache-mode may be refused, with the reason.
        let is_refused = ["free", "getfattr", "quota", "ttl"].contains(&command[1]);
        assert!(ended.success() || is_refused, "{command:?}: {ended}");
    }
    assert_eq!(fs::read_to_string(copy).unwrap(), "content");
}

fn lines(finished: &Finished) -> Vec<Value> {
    finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn listings_and_attributes_are_those_of_the_bucket() {
    let (cluster, tree) = small_tree();
    assert_eq!(cluster.cv(&["fs", "ls", "/"]).stdout, "data/\n");
    assert_eq!(cluster.cv(&["fs", "ls", "/data"]).stdout, "a/\nb/\nfive\n");
    assert_eq!(cluster.cv(&["fs", "ls", "/data/five"]).stdout, "five\n");
    let long = cluster.cv(&["fs", "ls", "-l", "/data"]).stdout;
    let long: Vec<Vec<&str>> = long.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((long[2][0], long[2][1], long[2][3]), ("-rw-r--r--", "70000", "five"), "{long:?}");

    let all = lines(&cluster.cv(&["fs", "ls", "-R", "--json", "/data"]));
    let mut paths: Vec<_> = all.iter().map(|entry| entry["path"].as_str().unwrap()).collect();
    paths.sort_unstable();
    let expected = ["a", "a/deep", "a/deep/three", "a/one", "a/two", "b", "b/four", "five"];
    assert_eq!(paths, expected.map(|path| format!("/data/{path}")));
    for entry in &all {
        let key = entry["path"].as_str().unwrap().strip_prefix("/data/").unwrap();
        let Some((content, etag)) = tree.get(key) else {
            assert_eq!(entry["kind"], "directory");
            continue;
        };
        let found = (&entry["kind"], &entry["size"], &entry["etag"]);
        assert_eq!(found, (&json!("file"), &json!(content.len()), &json!(etag)), "{key}");
    }

    let stat = lines(&cluster.cv(&["fs", "stat", "--json", "/data/a/two", "/data/a"]));
    assert_eq!(
        (&stat[0]["key"], &stat[0]["size"], &stat[0]["etag"]),
        (&json!("p/a/two"), &json!(5000), &json!(tree["a/two"].1))
    );
    assert_eq!((&stat[1]["key"], &stat[1]["kind"]), (&json!("p/a/"), &json!("directory")));
    use std::os::unix::fs::MetadataExt as _;
    let shown = fs::metadata(cluster.path("data/a/two")).unwrap();
    assert_eq!(json!(shown.ino()), stat[0]["inode"], "the mount and the command speak of one inode");
    let said = cluster.cv(&["fs", "stat", "/data/a/two"]).stdout;
    assert!(said.contains("size      5000") && said.contains("key       p/a/two"), "{said}");
    // What was found before is printed, and the exit code says that something is missing.
    let some = cluster.try_cv(&["fs", "stat", "--json", "/data/five", "/data/none"]);
    assert_eq!((some.code, lines(&some).len()), (NOT_FOUND, 1), "{some:?}");
    for command in ["ls", "stat", "cat", "get", "du", "blocks", "free"] {
        let finished = cluster.try_cv(&["fs", command, "/data/a/none"]);
        assert_eq!((finished.code, finished.stdout.as_str()), (NOT_FOUND, ""), "cv fs {command}: {finished:?}");
        assert!(finished.stderr.contains("/data/a/none"), "cv fs {command}: {}", finished.stderr);
    }
}

#[test]
fn bytes_come_out_as_they_are_stored() {
    let (cluster, tree) = small_tree();
    assert_eq!(cluster.cv(&["fs", "cat", "/data/five"]).stdout, tree["five"].0);
    let both = cluster.cv(&["fs", "cat", "/data/a/two", "/data/b/four", "/data/a/one"]).stdout;
    assert_eq!(both, format!("{}{}", tree["a/two"].0, tree["a/one"].0));
    let partly = cluster.try_cv(&["fs", "cat", "/data/a/one", "/data/none"]);
    assert_eq!((partly.code, partly.stdout.as_str()), (NOT_FOUND, "a"), "{partly:?}");

    let target = cluster.directory().join("copies");
    fs::create_dir(&target).unwrap();
    let to = |name: &str| target.join(name).to_str().unwrap().to_owned();
    let copied = cluster.cv(&["fs", "get", "/data", &to("all"), "--json"]).json();
    let bytes: usize = tree.values().map(|(content, _)| content.len()).sum();
    assert_eq!(copied, json!({"files": 5, "bytes": bytes}));
    for (key, (content, _)) in &tree {
        assert_eq!(fs::read_to_string(target.join("all").join(key)).unwrap(), *content, "{key}");
    }
    cluster.cv(&["fs", "get", "/data/five", &to("")]);
    cluster.cv(&["fs", "get", "/data/five", &to("named")]);
    for name in ["five", "named"] {
        assert_eq!(fs::read_to_string(to(name)).unwrap(), tree["five"].0);
    }
    // Nothing half copied is left behind, and a place that is not there is named.
    let refused = cluster.try_cv(&["fs", "get", "/data/five", &to("none/five")]);
    assert!(refused.code == 1 && refused.stderr.contains("none/five"), "{refused:?}");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 3);
}

#[test]
fn usage_is_the_sum_of_the_objects() {
    fn row(path: &str, directories: u64, files: u64, bytes: u64) -> serde_json::Value {
        json!({"path": path, "directories": directories, "files": files, "bytes": bytes})
    }
    let (cluster, _) = small_tree();
    assert_eq!(cluster.cv(&["fs", "du", "/data/five", "--json"]).json(), json!([row("/data/five", 0, 1, 70_000)]));
    let expected = [
        row("/data/a", 2, 3, 305_001),
        row("/data/b", 1, 1, 0),
        row("/data/five", 0, 1, 70_000),
        row("/data", 4, 5, 375_001),
    ];
    assert_eq!(cluster.cv(&["fs", "du", "/data", "--json"]).json(), json!(expected));
    assert_eq!(cluster.cv(&["fs", "du", "-s", "/data", "--json"]).json(), json!([expected[3]]));
    let said = cluster.cv(&["fs", "du", "/data"]).stdout;
    let total: Vec<&str> = said.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(total, ["4", "5", "366.21", "KiB", "/data"], "{said}");
    assert_eq!(cluster.cv(&["fs", "du", "-s", "/", "--json"]).json()[0]["bytes"], 375_001);
}

#[test]
fn blocks_capacity_and_hits_follow_what_is_cached() {
    let (cluster, tree) = small_tree();
    let report = || cluster.cv(&["report", "--json"]).json();
    let disks = || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let disks = nodes.as_array().unwrap().iter().flat_map(|node| node["disks"].as_array().unwrap().clone());
        Value::from_iter(disks)
    };
    let sum = |rows: &Value, field: &str| {
        rows.as_array().unwrap().iter().map(|row| row[field].as_u64().unwrap()).sum::<u64>()
    };
    let empty = report();
    assert_eq!((&empty["cache"]["used_bytes"], &empty["cache"]["blocks"]), (&json!(0), &json!(0)));
    assert_eq!(empty["cache"]["hit_ratio"], Value::Null, "nothing was read");
    assert_eq!(sum(&disks(), "used_bytes"), 0);
    assert_eq!(cluster.cv(&["fs", "blocks", "/data/a/deep/three", "--json"]).json(), json!([]));

    // Cold: every byte is fetched first.
    for (key, (content, _)) in &tree {
        assert_eq!(fs::read_to_string(cluster.path("data").join(key)).unwrap(), *content);
    }
    let bytes: u64 = tree.values().map(|(content, _)| content.len() as u64).sum();
    let units: u64 = tree.values().map(|(content, _)| (content.len() as u64).next_multiple_of(UNIT)).sum();
    let cold = eventually("the report has the cold reads", PATIENCE, || {
        let report = report();
        (report["cache"]["miss_bytes"].as_u64()? >= bytes).then_some(report)
    });
    let cache = &cold["cache"];
    let figures = ["used_bytes", "blocks", "miss_bytes", "ufs_bytes", "ufs_requests", "hit_bytes"];
    let figures = figures.map(|field| cache[field].as_u64().unwrap());
    assert_eq!(figures, [units, 4, bytes, bytes, 4, 0], "{cache}");
    assert_eq!(cache["hit_ratio"], 0.0);
    let disks = disks();
    assert_eq!(sum(&disks, "used_bytes"), units);
    assert_eq!(json!(sum(&disks, "capacity_bytes")), cache["capacity_bytes"]);

    // Where the blocks are, chunk by chunk.
    let blocks = cluster.cv(&["fs", "blocks", "/data/a/deep/three", "--json"]).json();
    let block = &blocks[0];
    let chunks = 300_000_u64.div_ceil(CHUNK);
    assert_eq!(blocks.as_array().unwrap().len(), 1);
    assert_eq!(
        (&block["length"], &block["chunks"], &block["chunks_present"]),
        (&json!(300_000), &json!(chunks), &json!(chunks))
    );
    assert_eq!(block["first"], true);
    assert_eq!(fs::read_to_string(block["path"].as_str().unwrap()).unwrap(), tree["a/deep/three"].0);
    let nodes = cluster.cv(&["node", "list", "--json"]).json();
    let nodes = nodes.as_array().unwrap();
    assert!(nodes.iter().any(|node| node["id"] == block["worker"] && node["data"] == block["data"]), "{nodes:?}");
    assert_eq!(cluster.cv(&["fs", "blocks", "/data/b/four", "--json"]).json(), json!([]));

    // Warm, by a client that has nothing: every byte is a hit.
    cluster.stop("fuse");
    cluster.start("fuse");
    for key in tree.keys() {
        fs::read(cluster.path("data").join(key)).unwrap();
    }
    let warm = eventually("the report has the warm reads", PATIENCE, || {
        let report = report();
        (report["cache"]["hit_bytes"].as_u64()? >= bytes).then_some(report)
    });
    let figures = ["hit_bytes", "miss_bytes", "ufs_requests"].map(|field| warm["cache"][field].as_u64().unwrap());
    assert_eq!((figures, &warm["cache"]["hit_ratio"]), ([bytes, bytes, 4], &json!(0.5)));
    assert_eq!(sum(&warm["workers"], "hit_bytes"), bytes);
    let said = cluster.cv(&["report"]).stdout;
    assert!(said.contains("hits      50.0 % of bytes"), "{said}");

    // Freed: a part, then all of it, then nothing.
    let freed = cluster.cv(&["fs", "free", "/data/a", "--json"]).json();
    let below = [1, 5000, 300_000_u64].map(|bytes| bytes.next_multiple_of(UNIT)).iter().sum::<u64>();
    assert_eq!((&freed["files"], &freed["blocks"], &freed["bytes"]), (&json!(3), &json!(3), &json!(below)));
    assert!(["unpersisted_files", "open_files", "unsupported_files"].iter().all(|kept| freed[kept] == 0), "{freed}");
    assert_eq!(cluster.cv(&["fs", "free", "/data", "--json"]).json()["blocks"], 1);
    assert_eq!(cluster.cv(&["fs", "free", "/data", "--json"]).json()["blocks"], 0);
    eventually("the report has an empty cache", PATIENCE, || {
        let report = report();
        (report["cache"]["used_bytes"] == 0 && report["cache"]["blocks"] == 0).then_some(())
    });
    assert!(!fs::exists(block["path"].as_str().unwrap()).unwrap());
    assert_eq!(fs::read_to_string(cluster.path("data/five")).unwrap(), tree["five"].0);
}

#[test]
fn background_tasks_are_listed_with_their_last_error() {
    const TASKS: [&str; 13] = [
        "persist-files",
        "delete-objects",
        "free-blocks",
        "make-room",
        "measure-backlog",
        "repair-replicas",
        "free-strays",
        "count-unavailable",
        "check-claims",
        "tick",
        "end-sessions",
        "reap",
        "expire-files",
    ];
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let task = |name: &str| {
        let tasks = cluster.cv(&["report", "--tasks", "--json"]).json();
        tasks.as_array().unwrap().iter().find(|task| task["name"] == name).cloned()
    };
    for name in TASKS {
        eventually(name, PATIENCE, || (task(name)?["runs"].as_u64()? > 0).then_some(()));
    }
    assert_eq!(task("check-claims").unwrap()["last_error"], Value::Null);

    // A leader looks at the claims when it begins.
    let fault = json!({"kind": "403", "operations": ["HeadObject"], "key_prefix": "fs/.cavern-cluster"});
    cluster.s3.add_fault(&fault);
    cluster.stop("master");
    cluster.start("master");
    // For a moment, again and again, it is tried once more.
    let failed = eventually("the task has failed", PATIENCE, || {
        let task = task("check-claims")?;
        (task["errors"].as_u64()? > 0 && task["state"] == "backing off").then_some(task)
    });
    let error = failed["last_error"].as_str().unwrap();
    assert!(error.contains("fs/.cavern-cluster"), "{error}");
    let said = eventually("a person is told the same", PATIENCE, || {
        let said = cluster.cv(&["report", "--tasks"]).stdout;
        let line = said.lines().find(|line| line.starts_with("check-claims "))?;
        (line.contains(" backing off ") && line.ends_with(error)).then_some(said)
    });
    assert_eq!(said.lines().filter(|line| line.starts_with("tick ")).count(), 1, "{said}");
}

#[test]
fn workers_are_listed_with_their_state_and_reports_with_their_mounts() {
    let (cluster, _) = small_tree();
    let states = || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let mut states: Vec<_> =
            nodes.as_array().unwrap().iter().map(|node| (node["data"].clone(), node["state"].clone())).collect();
        states.sort_by_key(|(data, _)| data.to_string());
        states
    };
    let at = |worker: usize, state: &str| (json!(cluster.at_start.workers[worker].data), json!(state));
    let sorted = |mut states: Vec<(Value, Value)>| {
        states.sort_by_key(|(data, _)| data.to_string());
        states
    };
    assert_eq!(states(), sorted(vec![at(0, "live"), at(1, "live")]));
    let report = cluster.cv(&["report", "--json"]).json();
    let mount = &report["mounts"][0];
    assert_eq!((&mount["path"], &mount["uri"]), (&json!("/data"), &json!("s3://bucket/p")));
    assert_eq!(report["workers"].as_array().unwrap().len(), 2);
    assert_eq!(report["sessions"], 1, "the FUSE client");

    cluster.kill("worker1");
    eventually("the killed worker is lost", PATIENCE, || {
        (states() == sorted(vec![at(0, "live"), at(1, "lost")])).then_some(())
    });
    let said = cluster.cv(&["node", "list"]).stdout;
    assert!(
        said.lines().any(|line| line.contains("lost") && line.contains(&cluster.at_start.workers[1].data)),
        "{said}"
    );
    let freed = cluster.cv(&["fs", "free", "/data", "--json"]).json();
    assert_eq!((&freed["files"], &freed["lost_workers"]), (&json!(4), &json!(1)), "what it has stays");
    let said = cluster.cv(&["fs", "free", "/data"]).stdout;
    assert!(said.contains("not asked: 1 lost worker"), "{said}");
    cluster.start("worker1");
    eventually("it is back", PATIENCE, || (states() == sorted(vec![at(0, "live"), at(1, "live")])).then_some(()));
    assert_eq!(cluster.cv(&["fs", "free", "/data", "--json"]).json()["lost_workers"], 0);
}

#[test]
fn a_refresh_counts_what_it_changed() {
    let (cluster, _) = small_tree();
    eventually("the mount has been indexed", PATIENCE, || {
        let mount = cluster.cv(&["mount", "--json"]).json();
        (mount[0]["status"]["indexed_entries"] == 8 && mount[0]["status"]["indexing"] == false).then_some(())
    });
    let refresh = |arguments: &[&str]| {
        let report = cluster.cv(&[&["refresh", "--json"], arguments].concat()).json();
        ["directories", "entries", "added", "changed", "removed", "hidden"].map(|field| report[field].as_u64().unwrap())
    };
    assert_eq!(refresh(&["/data"]), [4, 8, 0, 0, 0, 0]);
    cluster.s3.put("bucket", "p/a/one", "changed");
    cluster.s3.put("bucket", "p/c/new", "new");
    cluster.s3.put("bucket", "p/c//hidden", "hidden");
    cluster.s3.delete("bucket", "p/b/four");
    assert_eq!(refresh(&["/data", "--shallow"]), [1, 3, 1, 0, 1, 0], "c came, b went");
    assert_eq!(refresh(&["/data"]), [4, 8, 1, 1, 0, 1]);
    assert_eq!(cluster.cv(&["refresh", "/data/a/one"]).code, 0);
    assert_eq!(cluster.cv(&["fs", "cat", "/data/a/one", "/data/c/new"]).stdout, "changednew");
    assert_eq!(cluster.try_cv(&["refresh", "/data/b/four"]).code, NOT_FOUND);
}

#[test]
fn a_file_of_an_fs_mode_mount_is_as_long_as_it_is_and_says_whether_the_bucket_has_it() {
    let conf = "[master]\npersist_delay = \"100ms\"\n[ufs]\nretries = 0\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    fs::write(cluster.path("fs/small"), vec![7; 3 << 20]).unwrap();
    let blocks = cluster.cv(&["fs", "blocks", "/fs/small", "--json"]).json();
    let chunks = (3 << 20) / CHUNK;
    assert_eq!(
        (&blocks[0]["length"], &blocks[0]["chunks"], &blocks[0]["chunks_present"]),
        (&json!(3 << 20), &json!(chunks), &json!(chunks)),
        "{blocks}"
    );
    let said = cluster.cv(&["fs", "blocks", "/fs/small"]).stdout;
    assert!(said.contains("3.00 MiB") && !said.contains("64.00 MiB"), "{said}");

    let stat = |path: &str| {
        let said = cluster.cv(&["fs", "stat", path]).stdout;
        let bucket =
            said.lines().find_map(|line| line.trim().strip_prefix("bucket")).map(|text| text.trim().to_owned());
        assert!(!said.contains("listed"), "{said}");
        (bucket.unwrap_or_default(), lines(&cluster.cv(&["fs", "stat", path, "--json"])).remove(0))
    };
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let (said, report) = stat("/fs/small");
    assert_eq!((said.as_str(), &report["bucket"]["persisted"]), ("has it", &json!(true)), "{report}");
    assert_eq!(stat("/fs").0, "has everything below");

    cluster.stop("s3");
    fs::write(cluster.path("fs/late"), "late").unwrap();
    let (said, report) = eventually("the failure is reported", PATIENCE, || {
        let (said, report) = stat("/fs/late");
        // It is looked at twice, and the first look is the earlier one.
        said.contains("; the last error: ").then_some((said, report))
    });
    assert!(said.starts_with("lacks the last change, waiting for "), "{said}");
    assert_ne!(report["bucket"]["last_error"], "", "{report}");
    assert_eq!((&report["bucket"]["persisted"], &report["bucket"]["files"]), (&json!(false), &json!(1)), "{report}");
    assert!(stat("/fs").0.starts_with("lacks 1 file, 0 objects to delete, waiting"), "{:?}", stat("/fs"));
    assert_eq!(stat("/fs/small").0, "has it", "another file's failure is none of its own");
    // One is not several.
    assert!(cluster.cv(&["persist", "status", "/fs"]).stdout.starts_with("/fs: 1 file (4 B) to write, 0 objects"));
    let used = cluster.cv(&["fs", "du", "/fs/late"]).stdout;
    assert_eq!(used.split_whitespace().skip(4).collect::<Vec<_>>(), ["0", "1", "4", "B", "/fs/late"]);
    cluster.start("s3");
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
}

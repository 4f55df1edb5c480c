//! Indexes of cache-mode mounts: the namespace has the bucket key by key, whatever the store refuses, whichever master
//! dies, and whatever has changed since, while programs read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use cavern_ufs::ListMode;
use serde_json::{Value, json};

use crate::bucket::Bucket;
use crate::running::lines;

const PATIENCE: Duration = Duration::from_secs(60);
/// What a call may wait is not the point here, on a machine that is busy.
const CONF: &str = "[client]\nread_timeout = \"60s\"\nmetadata_timeout = \"60s\"\n";
const BUCKET: &str = "rule";

/// Files with their sizes, by their keys.
type Files = BTreeMap<String, u64>;

fn cluster(masters: usize) -> Cluster {
    Cluster::up(Options { masters, conf: CONF.to_owned(), ..Options::default() })
}

/// So many objects, and files of one directory; 0 for all in one.
fn rule(keys: u64, files: u64) -> Value {
    json!({"keys": keys, "files_per_directory": files, "name_bytes": 30, "size_min": 1, "size_max": 100_000})
}

/// Mounts the bucket at `/data`, where nobody lists what the index has listed.
fn mount(cluster: &Cluster, more: &[&str]) {
    cluster.mount(&format!("s3://{BUCKET}"), "/data", &[&["--metadata-ttl", "1d"], more].concat());
}

/// How the only mount fares.
fn status(cluster: &Cluster) -> Value {
    cluster.cv(&["mount", "--json"]).json()[0]["status"].clone()
}

fn in_bucket(cluster: &Cluster) -> Files {
    let bucket = Bucket::of(cluster, BUCKET);
    bucket.runtime.block_on(async {
        let (mut files, mut lister) = (Files::new(), bucket.ufs.list("", ListMode::Recursive));
        while let Some(page) = lister.next_page().await.unwrap() {
            files.extend(page.objects.into_iter().map(|object| (object.key, object.size)));
        }
        files
    })
}

/// The files below a directory, each there once.
fn names(top: &Path) -> BTreeSet<String> {
    let (mut names, mut waiting) = (BTreeSet::new(), vec![top.to_owned()]);
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                waiting.push(entry.path());
                continue;
            }
            let name = entry.path().strip_prefix(top).unwrap().to_str().unwrap().to_owned();
            assert!(names.insert(name), "{} is there twice", entry.path().display());
        }
    }
    names
}

/// The mount shows what the bucket has.
#[track_caller]
fn assert_equal(cluster: &Cluster) {
    let (there, top) = (in_bucket(cluster), cluster.path("data"));
    let shown: Files = names(&top)
        .into_iter()
        .map(|name| {
            let size = fs::metadata(top.join(&name)).unwrap().len();
            (name, size)
        })
        .collect();
    let other: Vec<_> = there.iter().filter(|(key, size)| shown.get(*key) != Some(*size)).take(10).collect();
    let left_over: Vec<_> = shown.keys().filter(|key| !there.contains_key(*key)).take(10).collect();
    assert!(
        other.is_empty() && left_over.is_empty(),
        "of {} objects missing, or of another size, {other:?}; left over {left_over:?}",
        there.len()
    );
}

/// The same, and nothing had to be listed for that.
#[track_caller]
fn assert_known(cluster: &Cluster) {
    cluster.s3.set_list_profile(BUCKET, &json!({}));
    let _shown = names(&cluster.path("data"));
    let lists = cluster.s3.requests("LIST");
    assert_equal(cluster);
    let asked = cluster.s3.requests("LIST") - lists;
    let pages = in_bucket(cluster).len().div_ceil(1000) as u64;
    assert!(asked <= pages, "{asked} pages were listed, of which {pages} tell what is in the bucket");
}

#[test]
fn an_index_has_all_of_a_bucket_flat_and_in_directories() {
    for files in [0, 100] {
        let cluster = cluster(1);
        cluster.s3.set_key_space(BUCKET, &rule(6000, files));
        cluster.s3.set_list_profile(BUCKET, &json!({"latency_ms": 20}));
        mount(&cluster, &["--index"]);
        let lists = cluster.s3.requests("LIST");
        assert_eq!(status(&cluster)["indexing"], false);
        names(&cluster.path("data"));
        assert_eq!(cluster.s3.requests("LIST"), lists, "all directories are complete");
        assert_known(&cluster);
    }
}

/// In how many ranges the only index so far was listed, as the only master's log says.
fn ranges(cluster: &Cluster) -> u64 {
    let log = fs::read_to_string(cluster.directory().join("log/master0.log")).unwrap();
    let line = log.lines().find(|line| line.contains("the index is complete")).unwrap_or_else(|| panic!("{log}"));
    let (_, ranges) = line.split_once(" ranges=").unwrap_or_else(|| panic!("{line}"));
    ranges.split(' ').next().unwrap().parse::<u64>().unwrap()
}

#[test]
fn a_flat_bucket_whose_names_end_in_hashes_is_listed_in_several_ranges() {
    let cluster = cluster(1);
    // As img/00000123-0123456789abcdef.
    cluster.s3.set_key_space(BUCKET, &json!({"keys": 40_000, "name_bytes": 25, "suffix": ""}));
    cluster.s3.set_list_profile(BUCKET, &json!({"latency_ms": 20}));
    mount(&cluster, &["--index"]);
    assert!(ranges(&cluster) > 1, "all was listed in one range");
    assert_known(&cluster);
}

#[test]
fn an_index_slows_down_for_a_store_that_refuses_and_says_how_far_it_is() {
    const KEYS: u64 = 12_000;
    let cluster = cluster(1);
    cluster.s3.set_key_space(BUCKET, &rule(KEYS, 400));
    cluster.s3.set_list_profile(BUCKET, &json!({"pages_per_second": 3}));
    mount(&cluster, &[]);
    let said = lines(&cluster.cv(&["index", "/data", "--watch", "--json"]));
    let (last, progress) = said.split_last().unwrap();
    assert_eq!((&last["path"], &last["indexing"]), (&json!("/data"), &json!(false)));
    let entries = |line: &Value| line["entries"].as_u64().unwrap();
    assert!(entries(last) >= KEYS, "{last}");
    assert!(!progress.is_empty() && progress.iter().all(|line| line["indexing"] == true), "{said:?}");
    assert!(progress.iter().all(|line| line["streams"].is_u64() && entries(line) <= entries(last)), "{said:?}");
    assert!(progress.iter().map(entries).is_sorted(), "{said:?}");
    let stats = cluster.s3.stats();
    assert!(stats["errors"].as_u64().unwrap() > 0, "nothing was refused: {stats}");
    // Who is refused does not ask again at once, nor as many at a time.
    assert!(cluster.s3.requests("LIST") < 200, "{stats}");
    // The last index says how much there is.
    let again = lines(&cluster.cv(&["index", "/data", "--watch", "--json"]));
    let tells = |line: &Value| {
        line["eta_seconds"].as_u64() > Some(0) && line["expected_entries"].as_u64() >= Some(entries(last))
    };
    assert!(again.iter().any(tells), "no line says how long it takes: {again:?}");
    assert_known(&cluster);
    // People are told in words.
    let words = cluster.cv(&["index", "/data", "--watch"]).stdout;
    assert!(words.lines().last().unwrap().starts_with("/data is indexed: "), "{words}");
}

#[test]
fn an_index_whose_leader_is_killed_has_all_of_the_bucket() {
    const KEYS: u64 = 20_000;
    let cluster = cluster(3);
    cluster.s3.set_key_space(BUCKET, &rule(KEYS, 250));
    cluster.s3.set_list_profile(BUCKET, &json!({"latency_ms": 50, "pages_per_second": 2}));
    mount(&cluster, &[]);
    for least in [1500, 6000] {
        eventually("a part is indexed", PATIENCE, || {
            let status = status(&cluster);
            let is_over = status["indexing"] == false && status["indexed_entries"].as_u64() >= Some(KEYS);
            assert!(!is_over, "the index was over before the leader could be killed: {status}");
            (status["indexed_entries"].as_u64() >= Some(least)).then_some(())
        });
        // It gets no further before all masters are there again.
        cluster.s3.add_fault(&json!({"kind": "hang", "operations": ["LIST"]}));
        let killed = cluster.kill_leader();
        cluster.leader_other_than(killed);
        cluster.start(&format!("master{killed}"));
        cluster.masters_agree();
        cluster.s3.clear_faults();
    }
    cluster.s3.set_list_profile(BUCKET, &json!({}));
    eventually("the index is complete", PATIENCE, || {
        let status = status(&cluster);
        let is_over = status["indexing"] == false && status["indexed_entries"].as_u64() >= Some(KEYS);
        is_over.then_some(())
    });
    assert_equal(&cluster);
}

/// Ends what runs beside a test, whatever became of that.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_new_index_applies_what_has_changed_while_programs_read() {
    for files in [300, 0] {
        let cluster = cluster(1);
        cluster.s3.set_key_space(BUCKET, &rule(6000, files));
        mount(&cluster, &["--index"]);
        let before = in_bucket(&cluster);
        let mut changed = rule(6000, files);
        changed["changes"] = json!({"seed": 7, "modified": 0.05, "deleted": 0.1, "added": 0.05});
        cluster.s3.set_key_space(BUCKET, &changed);
        let after = in_bucket(&cluster);
        let staying: Vec<&String> = before.keys().filter(|key| after.contains_key(*key)).collect();
        assert!(staying.len() < before.len() && staying.len() < after.len());
        cluster.s3.set_list_profile(BUCKET, &json!({"latency_ms": 100}));
        let (top, is_over) = (cluster.path("data"), AtomicBool::new(false));
        let looks = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut looks = 0;
                while looks == 0 || !is_over.load(Ordering::Acquire) {
                    let shown = names(&top);
                    let missing: Vec<_> = staying.iter().filter(|key| !shown.contains(**key)).take(10).collect();
                    assert!(missing.is_empty(), "look {looks}: {missing:?}");
                    looks += 1;
                }
                looks
            });
            let over = Over(&is_over);
            cluster.cv(&["index", "/data", "--watch"]);
            drop(over);
            reader.join().unwrap()
        });
        eprintln!("{looks} looks at {} files while they were compared", staying.len());
        assert_known(&cluster);
    }
}

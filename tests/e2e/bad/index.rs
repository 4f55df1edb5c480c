//! A worker's index that is damaged while the worker is down. The blocks of cache-mode are a cache: the worker starts
//! all the same, with what can be believed, sets a damaged index aside, says so in one line, and readers get the right
//! bytes. Who it is (`worker.json`) is not guessed: without sense in it the worker refuses, and says what to do.
//!
//! `CURRENT` emptied, deleted, garbled; the manifest cut, deleted, garbled; a table cut, emptied, deleted, garbled; the
//! log garbled, cut; the index replaced by a file; `worker.json` cut; one of another format.

use std::fs;
use std::path::{Path, PathBuf};

use cavern_tests::{Cluster, Options};

use super::{CONF, assert_read, assert_sentence, cut, files, refusal, restart_fuse, scribble, start_worker};

/// What the worker makes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// The index is renamed, the cache starts empty.
    SetAside,
    /// What is still readable is believed: less, but nothing wrong.
    Less,
}

type Damage = (&'static str, Outcome, fn(&Path));

fn half(path: &Path) {
    cut(path, fs::metadata(path).unwrap().len() / 2);
}

fn garble(path: &Path) {
    let length = fs::metadata(path).unwrap().len() as usize;
    fs::write(path, b"garbage!".repeat(length / 8 + 1)).unwrap();
}

/// The last file of a kind.
fn last(index: &Path, part: &str) -> PathBuf {
    let mut found = files(index, |name| name.contains("MANIFEST") || name.ends_with(".sst") || name.ends_with(".log"));
    found.retain(|path| path.to_str().unwrap().contains(part));
    found.pop().unwrap_or_else(|| panic!("no {part} in {}", index.display()))
}

const DAMAGES: [Damage; 12] = [
    ("CURRENT emptied", Outcome::SetAside, |index| cut(&index.join("CURRENT"), 0)),
    ("CURRENT deleted", Outcome::SetAside, |index| fs::remove_file(index.join("CURRENT")).unwrap()),
    ("CURRENT garbled", Outcome::SetAside, |index| fs::write(index.join("CURRENT"), "garbage\n").unwrap()),
    ("the manifest cut", Outcome::Less, |index| half(&last(index, "MANIFEST"))),
    ("the manifest deleted", Outcome::SetAside, |index| fs::remove_file(last(index, "MANIFEST")).unwrap()),
    ("the manifest garbled", Outcome::SetAside, |index| garble(&last(index, "MANIFEST"))),
    ("a table cut", Outcome::SetAside, |index| half(&last(index, ".sst"))),
    ("a table emptied", Outcome::SetAside, |index| cut(&last(index, ".sst"), 0)),
    ("a table deleted", Outcome::SetAside, |index| fs::remove_file(last(index, ".sst")).unwrap()),
    ("a table garbled", Outcome::SetAside, |index| garble(&last(index, ".sst"))),
    ("the log garbled", Outcome::Less, |index| garble(&last(index, ".log"))),
    ("a file in its place", Outcome::SetAside, |index| {
        fs::remove_dir_all(index).unwrap();
        fs::write(index, "no index").unwrap();
    }),
];

#[test]
fn a_damaged_index_costs_the_cache_and_nothing_else() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 10, 30_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let worker = &cluster.at_start.workers[0];
    let (directory, index) = (&worker.dirs[0], worker.dirs[0].join("index"));
    let kept = || {
        fs::read_dir(directory)
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_name().to_str().unwrap().starts_with("index.damaged"))
            .count()
    };

    for (what, outcome, damage) in DAMAGES {
        restart_fuse(&cluster);
        assert_read(&cluster, "data", &tree);
        let (log_before, kept_before) = (fs::metadata(&worker.log).unwrap().len() as usize, kept());
        if what == "the log garbled" {
            // An orderly end leaves nothing in it.
            cluster.kill("worker0");
        } else {
            cluster.stop("worker0");
        }
        damage(&index);
        start_worker(&cluster);
        assert_read(&cluster, "data", &tree);
        let log = fs::read_to_string(&worker.log).unwrap().split_off(log_before);
        assert!(!log.contains("panicked"), "{what}: {log}");
        let said = log.lines().filter(|line| line.contains("the block index is damaged: set aside")).count();
        let set_aside = kept() - kept_before;
        eprintln!("{what}: {set_aside} set aside");
        match outcome {
            Outcome::SetAside => assert_eq!((said, set_aside), (1, 1), "{what}: {log}"),
            Outcome::Less => assert_eq!(said, set_aside, "{what}: {log}"),
        }
        // It serves from its cache again.
        restart_fuse(&cluster);
        cluster.s3.reset_stats();
        assert_read(&cluster, "data", &tree);
        assert_eq!(cluster.s3.requests("GET"), 0, "{what}: {log}");
    }
}

#[test]
fn a_worker_that_cannot_tell_who_it_is_refuses_and_changes_nothing() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 5, 30_000);
    cluster.mount("s3://bucket", "/data", &[]);
    assert_read(&cluster, "data", &tree);
    let identity = cluster.at_start.workers[0].dirs[0].join("worker.json");
    cluster.stop("worker0");
    let whole = fs::read_to_string(&identity).unwrap();
    let free = "127.0.0.1:0";
    for (what, text, fragment) in [
        ("cut", &whole[..whole.len() / 2], "delete it to start"),
        ("of another format", &whole.replace("\"format\": 1", "\"format\": 7"), "matching version"),
    ] {
        fs::write(&identity, text).unwrap();
        let said = refusal(&cluster, "worker", &[("CV_WORKER__LISTEN", free), ("CV_WORKER__HTTP_LISTEN", free)]);
        assert_sentence(what, &said, &[fragment]);
        assert_eq!(fs::read_to_string(&identity).unwrap(), text, "{what}");
    }
    // Garbled bytes in the middle of the text are damage as well, and what was there is there again with the file.
    scribble(&identity);
    let said = refusal(&cluster, "worker", &[("CV_WORKER__LISTEN", free), ("CV_WORKER__HTTP_LISTEN", free)]);
    assert_sentence("garbled", &said, &["worker.json"]);
    fs::write(&identity, &whole).unwrap();
    start_worker(&cluster);
    cluster.s3.reset_stats();
    assert_read(&cluster, "data", &tree);
    assert_eq!(cluster.s3.requests("GET"), 0, "{}", cluster.logs());
}

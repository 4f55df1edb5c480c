//! A master's database that is damaged while the master is down: the master refuses to start, in one sentence, and
//! changes nothing. It never begins with an empty or an older namespace by itself. The files put back, everything is
//! there.
//!
//! `CURRENT` deleted, emptied, garbled; the manifest cut, deleted, garbled; the log cut, deleted, garbled in the
//! middle; a table cut, deleted; the whole database deleted, emptied; the key of the credentials cut. A torn record at
//! the end of the log, as a crash leaves it, is no damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

use super::{CONF, assert_sentence, copy_tree, cut, files, refusal, scribble};

type Damage = (&'static str, &'static str, fn(&Path));

fn last(directory: &Path, part: &str) -> PathBuf {
    let mut found = files(&directory.join("db"), |name| !name.starts_with("LOG"));
    found.retain(|path| path.file_name().unwrap().to_str().unwrap().contains(part));
    // Logs that are empty hold nothing to damage.
    found.retain(|path| fs::metadata(path).unwrap().len() > 0);
    found.pop().unwrap_or_else(|| panic!("no {part} in {}", directory.display()))
}

fn half(path: &Path) {
    cut(path, fs::metadata(path).unwrap().len() / 2);
}

/// What is wrong, what the sentence says, and how it comes about.
const DAMAGES: [Damage; 14] = [
    ("CURRENT deleted", "is no database", |dir| fs::remove_file(dir.join("db/CURRENT")).unwrap()),
    ("CURRENT emptied", "CURRENT", |dir| cut(&dir.join("db/CURRENT"), 0)),
    ("CURRENT garbled", "CURRENT", |dir| fs::write(dir.join("db/CURRENT"), "garbage").unwrap()),
    ("the manifest cut", "db", |dir| half(&last(dir, "MANIFEST"))),
    ("the manifest deleted", "MANIFEST", |dir| fs::remove_file(last(dir, "MANIFEST")).unwrap()),
    ("the manifest garbled", "db", |dir| scribble(&last(dir, "MANIFEST"))),
    ("the log cut", "db", |dir| cut(&last(dir, ".log"), 100)),
    ("the log emptied", "db", |dir| cut(&last(dir, ".log"), 0)),
    ("the log deleted", "db", |dir| fs::remove_file(last(dir, ".log")).unwrap()),
    ("the log garbled", "was acknowledged", |dir| scribble(&last(dir, ".log"))),
    ("a table cut", "Corruption", |dir| half(&last(dir, ".sst"))),
    ("a table deleted", "db", |dir| fs::remove_file(last(dir, ".sst")).unwrap()),
    ("all deleted", "shows that a master has worked here", |dir| fs::remove_dir_all(dir.join("db")).unwrap()),
    ("the key cut", "secret.key", |dir| cut(&dir.join("secret.key"), 7)),
];

/// Everything in a directory but the lock, by path.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let all = files(directory, |name| name != "lock" && !name.starts_with("LOG"));
    all.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn a_damaged_database_is_refused_and_left_as_it_is() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 30, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    // A second start writes tables.
    cluster.stop("master");
    cluster.start("master");
    cluster.cv(&["refresh", "/data"]);
    cluster.cv(&[
        "mount",
        "s3://bucket",
        "/again",
        "--write-type",
        "cache_mode",
        "-c",
        &cluster.bucket_options()[0],
        "-c",
        &cluster.bucket_options()[2],
        "-c",
        &cluster.bucket_options()[3],
    ]);
    // What is recorded of them, apart from how far an index is.
    let recorded = || {
        let mut mounts = cluster.cv(&["mount", "--json"]).json();
        mounts.as_array_mut().unwrap().iter_mut().for_each(|mount| mount["status"] = serde_json::Value::Null);
        mounts
    };
    let mounts = recorded();
    // No loss beyond the mark can be detected; the mark follows within a second.
    let applied = cluster.cv(&["report", "--json"]).json()["applied_index"].as_u64().unwrap();
    eventually("the high-water mark follows", Duration::from_secs(10), || {
        let mark = fs::read_to_string(cluster.directory().join("master0/high-water")).ok()?;
        (mark.split(' ').next()?.parse::<u64>().ok()? >= applied).then_some(())
    });
    // As a crash leaves it.
    cluster.kill("master");
    let whole = cluster.directory().join("master0");
    let damaged = cluster.directory().join("damaged");
    let free = "127.0.0.1:0";
    for (what, fragment, damage) in DAMAGES {
        copy_tree(&whole, &damaged);
        damage(&damaged);
        let before = contents(&damaged);
        let place = damaged.to_str().unwrap();
        let environment =
            [("CV_MASTER__LISTEN", free), ("CV_MASTER__HTTP_LISTEN", free), ("CV_MASTER__DATA_DIR", place)];
        let said = refusal(&cluster, "master", &environment);
        eprintln!("{what}: {said}");
        assert_sentence(what, &said, &[fragment, place, "restore"]);
        if what != "the key cut" {
            assert!(said.contains("nothing was changed"), "{what}: {said}");
            let after = contents(&damaged);
            assert!(before == after, "{what}: {:?} became {:?}", before.keys(), after.keys());
        }
        fs::remove_dir_all(&damaged).unwrap();
    }

    // What was being written when the master died.
    let log = last(&whole, ".log");
    cut(&log, fs::metadata(&log).unwrap().len() - 5);
    cluster.start("master");
    assert_eq!(recorded(), mounts);
    cluster.assert_tree("data", "", &tree);
    cluster.assert_tree("again", "", &tree);
    let listed = cluster.cv(&["fs", "ls", "-R", "/data"]).stdout;
    assert!(tree.keys().all(|key| listed.contains(key.rsplit('/').next().unwrap())), "{listed}");
}

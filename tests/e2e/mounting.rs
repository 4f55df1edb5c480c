//! The mount table: mounts that go, mounts that must not be beside each other, and mounts that change while they are in
//! use.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, Options, eventually, within};
use serde_json::{Value, json};

use crate::bucket::Bucket;

const PATIENCE: Duration = Duration::from_secs(60);

fn cluster_with(persist_delay: &str) -> Cluster {
    let conf = format!("[master]\npersist_delay = \"{persist_delay}\"\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster
}

/// Writes a file, and knows that it has been taken.
fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[test]
fn what_was_acknowledged_is_in_the_bucket_when_its_mount_goes() {
    // By itself the bucket would follow too late.
    let cluster = cluster_with("1h");
    for round in 0..4 {
        let path = format!("/fs{round}");
        cluster.mount_fs_mode(&format!("s3://bucket/round{round}"), &path, &[]);
        let directory = cluster.path(&path[1..]);
        let fifth = directory.join("f00004");
        let writer = thread::spawn(move || {
            let mut acknowledged = Vec::new();
            for number in 0.. {
                let name = format!("f{number:05}");
                if write_synced(&directory.join(&name), name.as_bytes()).is_err() {
                    break;
                }
                acknowledged.push(name);
                if number % 10 == 9 {
                    // A mount that is changed all the time stays. Longer and longer, until it is long enough.
                    thread::sleep(Duration::from_millis(20 + number * 7 % 200 + number));
                }
            }
            acknowledged
        });
        eventually("something is written", PATIENCE, || fifth.exists().then_some(()));
        eventually("the mount goes", PATIENCE, || {
            let umount = cluster.try_cv(&["umount", &path]);
            assert!(umount.code == 0 || umount.stderr.contains("--discard"), "{umount:?}");
            (umount.code == 0).then_some(())
        });
        let acknowledged = within("the writer's end", PATIENCE, move || writer.join().unwrap());
        let objects = Bucket::of(&cluster, "bucket").objects();
        for name in &acknowledged {
            let there = objects.get(&format!("round{round}/{name}"));
            assert_eq!(there.map(|content| &content[..]), Some(name.as_bytes()), "of {}", acknowledged.len());
        }
    }
}

#[test]
fn a_mount_stays_while_one_of_its_files_is_being_written() {
    let cluster = cluster_with("100ms");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let at = |name: &str| cluster.path("fs").join(name);
    let open = |path: &str| OpenOptions::new().append(true).open(cluster.path(path)).unwrap();
    write_synced(&at("file"), b"one").unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let mut file = open("fs/file");
    file.write_all(b" two").unwrap();
    let refused = cluster.try_cv(&["umount", "/fs"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    for part in ["/fs has open files that have been written to (1)", "--discard"] {
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    }
    // It is as it was.
    write_synced(&at("other"), b"other").unwrap();
    file.write_all(b" three").unwrap();
    file.sync_all().unwrap();
    drop(file);
    cluster.cv(&["umount", "/fs"]);
    assert_eq!(cluster.s3.get("bucket", "fs/file"), "one two three");
    assert_eq!(cluster.s3.get("bucket", "fs/other"), "other");

    // A writer that is not waited for, and writes on, gets an error.
    cluster.mount_fs_mode("s3://bucket/fs", "/again", &[]);
    let mut file = open("again/file");
    file.write_all(b" four").unwrap();
    cluster.cv(&["umount", "/again", "--discard"]);
    within("an answer after the mount is gone", PATIENCE, move || {
        file.write_all(b" five").and_then(|()| file.sync_all()).unwrap_err()
    });
    // What was written before may have been uploaded before the mount was gone.
    let kept = cluster.s3.get("bucket", "fs/file");
    assert!(kept == "one two three" || kept == "one two three four", "{kept:?}");
}

// ---------------------------------------------------------------------------------------- keys in common

/// `cv mount` of a URI at an endpoint of the cluster's store.
fn mount(cluster: &Cluster, endpoint: &str, uri: &str, path: &str, more: &[&str]) -> Finished {
    let mut options = cluster.bucket_options();
    options[0] = format!("s3.endpoint_url={endpoint}");
    let mut arguments = vec!["mount", uri, path];
    arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
    arguments.extend(more);
    cluster.try_cv(&arguments)
}

#[test]
fn a_mount_of_a_prefix_without_objects_says_so() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "train/one", "one");
    let endpoint = cluster.s3.endpoint.clone();
    let mounted = |uri: &str, path: &str, mode: &[&str]| {
        let mounted = mount(&cluster, &endpoint, uri, path, mode);
        assert_eq!(mounted.code, 0, "{mounted:?}");
        mounted
    };
    let says_so =
        |mounted: &Finished, uri: &str| mounted.stderr.contains(&format!("nothing is there yet under {uri}:"));
    for (number, mode) in [READ_ONLY, FS_MODE].into_iter().enumerate() {
        // One that has been mistyped.
        let uri = format!("s3://bucket/tain{number}");
        let checked = mounted(&uri, "/mistyped", &[mode, &["--check"]].concat());
        assert!(says_so(&checked, &uri), "{checked:?}");
        let mistyped = mounted(&uri, &format!("/mistyped{number}"), &[mode, &["--json"]].concat());
        assert!(says_so(&mistyped, &uri) && mistyped.json()["uri"] == json!(uri), "{mistyped:?}");
        let right = mounted("s3://bucket/train", "/right", mode);
        assert_eq!(right.stderr, "", "{right:?}");
        cluster.cv(&["umount", "/right"]);
    }
    // It is there already.
    assert_eq!(mounted("s3://bucket/tain0", "/mistyped0", READ_ONLY).stderr, "");
}

const FS_MODE: &[&str] = &["--write-type", "fs_mode"];
const READ_ONLY: &[&str] = &["--write-type", "cache_mode"];
const READ_WRITE: &[&str] = &["--write-type", "cache_mode", "--access-mode", "read_write"];

#[test]
fn a_listing_ends_with_its_mount() {
    let conf = "[ufs]\nrequest_timeout = \"300s\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    cluster.seed("bucket", "", 3, 100);
    cluster.mount("s3://bucket", "/m", &[]);
    let listings = || cluster.status().masters[0].metric("cavern_master_listings").unwrap();
    eventually("the index is complete", PATIENCE, || (listings() == 0).then_some(()));
    cluster.s3.add_fault(&json!({ "latency_ms": 300_000, "operations": ["LIST"] }));
    let mut refresh = cluster.command(&["refresh", "/m"]).spawn().unwrap();
    eventually("it is listed", PATIENCE, || (listings() == 1).then_some(()));
    cluster.cv(&["umount", "/m"]);
    eventually("nothing is listed any more", PATIENCE, || (listings() == 0).then_some(()));
    refresh.wait().unwrap();
    cluster.s3.clear_faults();
}

#[test]
fn mounts_with_keys_in_common_are_refused_unless_both_only_read() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    let endpoint = cluster.s3.endpoint.clone();
    assert_eq!(mount(&cluster, &endpoint, "s3://bucket/p/q", "/one", FS_MODE).code, 0);
    let refused = |endpoint: &str, uri: &str, mode: &[&str], other: &str| {
        for check in [&[][..], &["--check"]] {
            let refused = mount(&cluster, endpoint, uri, "/two", &[mode, check].concat());
            assert_eq!(refused.code, 1, "{uri} {mode:?}: {refused:?}");
            // Named as it is kept: schemes have no case.
            for part in [uri.trim_end_matches('/').replace("S3:", "s3:").as_str(), other, "unmount"] {
                assert!(refused.stderr.contains(part), "{uri} {mode:?}: {}", refused.stderr);
            }
        }
    };
    for uri in
        ["s3://bucket/p/q", "s3://bucket/p/q/", "S3://bucket/p/q", "s3://bucket/p", "s3://bucket", "s3://bucket/p/q/r"]
    {
        refused(&endpoint, uri, FS_MODE, "/one");
    }
    refused(&endpoint, "s3://bucket/p/q", READ_ONLY, "/one");
    refused(&endpoint, "s3://bucket/p", READ_WRITE, "/one");
    let port = endpoint.rsplit_once(':').unwrap().1;
    for endpoint in
        [format!("HTTP://127.0.0.1:{port}/"), format!("http://LOCALHOST:{port}"), format!("http://localhost.:{port}")]
    {
        refused(&endpoint, "s3://bucket/p/q", FS_MODE, "/one");
    }
    // A name that begins alike is another one.
    assert_eq!(mount(&cluster, &endpoint, "s3://bucket/p/qq", "/beside", FS_MODE).code, 0);
    // The same mount again is nothing new.
    assert_eq!(mount(&cluster, &endpoint, "s3://bucket/p/q", "/one", FS_MODE).code, 0);

    for (uri, path) in
        [("s3://bucket/read", "/read"), ("s3://bucket/read", "/again"), ("s3://bucket/read/below", "/below")]
    {
        assert_eq!(mount(&cluster, &endpoint, uri, path, READ_ONLY).code, 0);
    }
    refused(&endpoint, "s3://bucket/read", READ_WRITE, "mounted at /");
    refused(&endpoint, "s3://bucket/read", FS_MODE, "mounted at /");

    // Of several at the same time, one is.
    let mounted = thread::scope(|scope| {
        let attempts: Vec<_> = (0..6)
            .map(|number| {
                let uri = ["s3://bucket/new", "s3://bucket/new/below", "s3://bucket/new/"][number % 3];
                let mut arguments = vec!["mount".to_owned(), uri.to_owned(), format!("/new{number}")];
                arguments.extend(FS_MODE.iter().map(ToString::to_string));
                for option in cluster.bucket_options() {
                    arguments.extend(["-c".to_owned(), option]);
                }
                let mut command = cluster.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
                scope.spawn(move || command.output().unwrap().status.success())
            })
            .collect();
        attempts.into_iter().map(|attempt| attempt.join().unwrap()).filter(|mounted| *mounted).count()
    });
    let mounts = cluster.cv(&["mount", "--json"]).json();
    let new = |mount: &&Value| mount["uri"].as_str().unwrap().starts_with("s3://bucket/new");
    assert_eq!((mounted, mounts.as_array().unwrap().iter().filter(new).count()), (1, 1), "{mounts}");
    cluster.cv(&["umount", "/one"]);
    assert_eq!(mount(&cluster, &endpoint, "s3://bucket/p/q/r", "/two", FS_MODE).code, 0);
}

// ------------------------------------------------------------------------------------------- other options

#[test]
fn options_and_credentials_of_mounts_in_use_are_changed() {
    let mut cluster = cluster_with("100ms");
    let object = |number: u8| vec![number; 3 << 20];
    for number in 0..3 {
        cluster.s3.put("bucket", &format!("objects/{number}"), object(number));
    }
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster.mount("s3://bucket/objects", "/objects", &["--metadata-ttl", "1h"]);
    fs::write(cluster.path("fs/freed"), object(7)).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    cluster.cv(&["fs", "free", "/fs/freed"]);
    assert_eq!(fs::read(cluster.path("objects/0")).unwrap(), object(0));
    let mut open = OpenOptions::new().append(true).open(cluster.path("fs/freed")).unwrap();

    cluster.change_secret_key("another-secret");
    fs::write(cluster.path("fs/new"), object(8)).unwrap();
    let behind = cluster.try_cv(&["persist", "wait", "/fs", "--timeout", "1s"]);
    assert_eq!(behind.code, 1, "{behind:?}");
    let before = cluster.cv(&["mount", "--json"]).json();
    let options =
        |views: &Value| views.as_array().unwrap().iter().map(|view| view["options"].clone()).collect::<Vec<_>>();
    let wrong = cluster.try_cv(&["mount", "update", "/fs", "-c", "s3.credentials.secret=mistaken-one"]);
    assert!(wrong.code == 1 && !wrong.stderr.contains("mistaken-one"), "{wrong:?}");
    for path in ["/fs", "/objects"] {
        cluster.cv(&["mount", "update", path, "-c", "s3.credentials.secret=another-secret"]);
    }
    assert_eq!(options(&cluster.cv(&["mount", "--json"]).json()), options(&before));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    let content = |key: &str| cluster.s3.get("bucket", key);
    assert!(content("fs/new") == object(8));
    // Workers and clients go on with what they have open, and read what only the bucket has.
    for (path, wanted) in [("fs/freed", object(7)), ("objects/1", object(1))] {
        let path = cluster.path(path);
        eventually("the bucket is read with the new key", PATIENCE, || {
            let path = path.clone();
            let read = within("an answer", PATIENCE, move || fs::read(path));
            read.is_ok_and(|read| read == wanted).then_some(())
        });
    }
    open.write_all(b"end").unwrap();
    open.sync_all().unwrap();
    drop(open);
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(content("fs/freed") == [object(7), b"end".to_vec()].concat());

    // Freshness.
    assert!(cluster.path("objects").is_dir());
    cluster.s3.put("bucket", "objects/later", "later");
    assert!(!cluster.path("objects/later").exists());
    cluster.cv(&["mount", "update", "/objects", "--metadata-ttl", "1s"]);
    eventually("the new freshness holds", PATIENCE, || cluster.path("objects/later").exists().then_some(()));

    // What a mount is stays.
    for (arguments, code, part) in [
        (&["/fs", "--write-type", "cache_mode"][..], 2, "unexpected argument '--write-type'"),
        (&["/fs", "--block-size", "1MiB"], 2, "unexpected argument '--block-size'"),
        (&["/fs"], 2, "say what is to change"),
        (&["/fs", "--metadata-ttl", "1m"], 2, "the namespace is the truth"),
        (&["/none", "-c", "s3.region_name=x"], 4, "/none"),
        (&["/fs", "-c", "s3.region=x"], 2, "s3.region_name"),
        (&["/objects", "--ttl", "1ms", "-c", "s3.endpoint_url=http://127.0.0.1:1"], 3, "127.0.0.1:1"),
    ] {
        let refused = cluster.try_cv(&[&["mount", "update"], arguments].concat());
        assert!(refused.code == code && refused.stderr.contains(part), "{arguments:?}: {refused:?}");
    }
    cluster.kill("master");
    cluster.start("master");
    let after = cluster.cv(&["mount", "--json"]).json();
    assert_eq!(
        (&after[1]["path"], &after[1]["metadata_ttl_ms"], &after[1]["ttl_ms"]),
        (&json!("/objects"), &json!(1000), &json!(0))
    );
    write_synced(&cluster.path("fs/last"), b"last").unwrap();
    cluster.cv(&["umount", "/fs"]);
    assert_eq!(content("fs/last"), "last");
}

//! Keys that masters vend: what they are good for, who gets them, and when they end.

use std::os::unix::fs::FileExt as _;

use cavern_proto::master::{VendKeysRequest, VendedKeys};
use cavern_ufs::{ListMode, Precondition, UfsError};
use rustix::fs::Advice;
use serde_json::json;

use super::*;
use crate::bucket::Bucket;

const ROLE: &str = "arn:aws:iam::123456789012:role/any";

/// Between two requests of those that go on for a time.
const PACE: Duration = Duration::from_millis(45);

/// The arguments that mount a part of the cluster's bucket, with keys that are vended.
fn arguments(cluster: &Cluster, uri: &str, path: &str, more: &[&str]) -> Vec<String> {
    let mut options = cluster.bucket_options();
    options.push(format!("s3.credentials.vended_role={ROLE}"));
    options.push("s3.credentials.vended_duration=15m".to_owned());
    options.push(format!("s3.sts_endpoint_url={}", cluster.s3.endpoint));
    let options = options.into_iter().flat_map(|option| ["-c".to_owned(), option]);
    let arguments = ["mount", uri, path].into_iter().chain(more.iter().copied()).map(str::to_owned);
    arguments.chain(options).collect()
}

/// Mounts it, and waits until it is there. Answers what the command has said.
fn mount(cluster: &Cluster, uri: &str, path: &str, more: &[&str]) -> String {
    let arguments = arguments(cluster, uri, path, more);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let said = cluster.cv(&arguments).stdout;
    let shown = cluster.path(path.trim_start_matches('/'));
    eventually("the mount is there", PATIENCE, || shown.is_dir().then_some(()));
    said
}

fn vend(cluster: &Cluster, somebody: &Somebody, mount_id: u32, to_write: bool) -> Result<VendedKeys, Status> {
    let mut calls = ClusterClient::new(somebody.channel(cluster));
    Ok(somebody.answer(calls.vend_keys(VendKeysRequest { mount_id, to_write }))?.into_inner())
}

/// The bucket, for whoever has these keys.
fn bucket_with(cluster: &Cluster, keys: &VendedKeys) -> Bucket {
    let options = [
        format!("s3.endpoint_url={}", cluster.s3.endpoint),
        format!("s3.credentials.access={}", keys.access_key),
        format!("s3.credentials.secret={}", keys.secret_key),
        format!("s3.credentials.session_token={}", keys.session_token),
    ];
    Bucket::open(&options, "bucket")
}

/// Whether these keys read a key, and whether they write beside it. All else is an error.
fn rights(bucket: &Bucket, key: &str) -> (bool, bool) {
    let is_allowed = |what: &str, answer: Result<(), UfsError>| match answer {
        Ok(()) => true,
        Err(UfsError::Denied { .. }) => false,
        Err(error) => panic!("{what}: {error}"),
    };
    let Bucket { runtime, ufs } = bucket;
    let (beside, body) = (format!("{key}.new"), bytes::Bytes::from_static(b"evil"));
    let read = runtime.block_on(ufs.head(key)).map(drop);
    let written = runtime.block_on(ufs.put(&beside, &body, &Default::default(), Precondition::Anything)).map(drop);
    (is_allowed("HEAD", read), is_allowed("PUT", written))
}

#[test]
fn vended_keys_are_good_for_a_prefix_and_the_mounts_own_stay_with_the_masters() {
    let directory = tempfile::tempdir().unwrap();
    let audit = directory.path().join("audit");
    let conf = format!("[master]\naudit_log = \"{}\"\n", audit.display());
    let cluster = Cluster::up(Options { secure: true, conf, ..Options::default() });
    let tree = cluster.seed("bucket", "data/", 3, 50_000);
    cluster.s3.put("bucket", "other/key", "not for them");
    let writes = ["--write-type", "cache-mode", "--access-mode", "read-write"];
    let said = mount(&cluster, "s3://bucket/data", "/data", &writes);
    assert!(said.contains(&format!("keys are vended of {ROLE}: until 2")), "{said}");
    mount(&cluster, "s3://bucket/work", "/work", &["--write-type", "fs-mode"]);

    // With them the client writes objects in cache-mode, and the worker reads these, and writes those of fs-mode.
    cluster.assert_tree("data", "data/", &tree);
    fs::write(cluster.path("data/made"), "by the client").unwrap();
    assert_eq!(cluster.s3.get("bucket", "data/made"), "by the client");
    fs::write(cluster.path("work/f"), "by the worker").unwrap();
    cluster.cv(&["persist", "wait", "/work", "--timeout", "30s"]);
    assert_eq!(cluster.s3.get("bucket", "work/f"), "by the worker");

    let [client, worker, admin] = [Role::Client, Role::Worker, Role::Admin].map(|role| Somebody::of(&cluster, role));
    let mut calls = ClusterClient::new(admin.channel(&cluster));
    let mounts = admin.answer(calls.list_mounts(ListMountsRequest {})).unwrap().into_inner().mounts;
    let id = |path: &str| mounts.iter().find(|mount| mount.path == path).unwrap().id;
    let (data, work) = (id("/data"), id("/work"));
    for somebody in [&client, &worker] {
        let mut calls = ClusterClient::new(somebody.channel(&cluster));
        let told = somebody.answer(calls.get_credentials(ListMountsRequest {})).unwrap().into_inner().mounts;
        assert_eq!(told.len(), 2);
        let own = [&cluster.s3.access_key, &cluster.s3.secret_key];
        assert!(told.iter().flat_map(|mount| mount.options.values()).all(|value| !own.contains(&value)), "{told:?}");
    }
    let inside = [("data/0000/000000.bin", data), ("work/f", work)];
    for (somebody, mount, may_write) in
        [(&client, data, true), (&client, work, false), (&worker, data, false), (&worker, work, true)]
    {
        let keys = vend(&cluster, somebody, mount, true).unwrap();
        assert_eq!(keys.read_only, !may_write);
        let bucket = bucket_with(&cluster, &keys);
        for (key, of) in inside {
            let expected = if of == mount { (true, may_write) } else { (false, false) };
            assert_eq!(rights(&bucket, key), expected, "{key} of {of} with keys of {mount}");
        }
        assert_eq!(rights(&bucket, "other/key"), (false, false));
        let listed = bucket.runtime.block_on(bucket.ufs.list("", ListMode::Recursive).next_page());
        assert!(matches!(listed, Err(UfsError::Denied { .. })), "{listed:?}");
    }

    // Rules about clients count for keys as well.
    cluster.cv(&["mount", "update", "/data", "--client", "fuse0", "--client", "attacker=ro"]);
    let keys = vend(&cluster, &client, data, true).unwrap();
    assert!(keys.read_only);
    assert_eq!(rights(&bucket_with(&cluster, &keys), "data/0000/000000.bin"), (true, false));
    cluster.cv(&["mount", "update", "/data", "--client", "fuse0"]);
    assert_eq!(vend(&cluster, &client, data, false).unwrap_err().code(), Code::NotFound);
    cluster.cv(&["mount", "update", "/work", "--client", "fuse0", "--client", "attacker=root_squash"]);
    let limited = vend(&cluster, &client, work, false).err();
    assert_denied("keys where users are limited", limited, "users of this client are limited in /work");
    assert_denied("keys for an admin", vend(&cluster, &admin, data, false).err(), "may not call VendKeys");

    // What was given out is in the audit log, and the keys are in none.
    let audited = fs::read_to_string(&audit).unwrap();
    for subject in ["keys to write /data", "keys to read /work"] {
        let is_it = |line: &str| line.contains("VendKeys") && line.contains(subject) && line.contains("attacker");
        assert!(audited.lines().any(is_it), "{subject}: {audited}");
    }
    let logs = fs::read_dir(cluster.directory().join("log")).unwrap().map(|log| log.unwrap().path());
    for log in logs.chain([audit]) {
        let text = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
        for secret in [&keys.secret_key, &keys.session_token, &cluster.s3.secret_key] {
            assert!(!text.contains(secret.as_str()), "{}", log.display());
        }
    }
}

#[test]
fn vended_keys_are_renewed_while_requests_go_on() {
    const TIME: Duration = Duration::from_secs(9);
    let cluster = up();
    let tree = cluster.seed("bucket", "data/", 300, 2_000);
    cluster.s3.limit_sessions(4);
    mount(&cluster, "s3://bucket/data", "/data", &["--write-type", "cache-mode"]);
    let before = cluster.s3.assumed_roles();
    let began = std::time::Instant::now();
    let mut read = 0;
    // None of them is cached.
    for (key, content) in &tree {
        let path = cluster.path("data").join(key.strip_prefix("data/").unwrap());
        assert!(fs::read(&path).unwrap() == *content, "{key}: {}", cluster.logs());
        read += 1;
        if began.elapsed() > TIME {
            break;
        }
        std::thread::sleep(PACE);
    }
    assert!(read > 20, "{read}");
    let assumed = cluster.s3.assumed_roles() - before;
    assert!((2..=9).contains(&assumed), "{assumed} in {:?}", began.elapsed());
}

/// A cluster whose clients do not wait for buckets.
fn up_impatient() -> Cluster {
    let conf = "[client]\nbucket_timeout = \"2s\"\nread_timeout = \"3s\"\n".to_owned();
    Cluster::up(Options { secure: true, conf, ..Options::default() })
}

#[test]
fn without_masters_vended_keys_end_and_what_is_cached_is_served() {
    const SIZE: u64 = 1 << 34;
    const MIB: u64 = 1 << 20;
    let cluster = up_impatient();
    cluster.s3.create_bucket("bucket");
    cluster.s3.put_sparse("bucket", "data/large", SIZE);
    cluster.s3.limit_sessions(4);
    mount(&cluster, "s3://bucket/data", "/data", &["--write-type", "cache-mode", "--block-size", "1MiB"]);
    let file = fs::File::open(cluster.path("data/large")).unwrap();
    let mut byte = [1];
    let mut read = |offset: u64| file.read_exact_at(&mut byte, offset);
    file.read_exact_at(&mut vec![1; MIB as usize], 0).unwrap();
    cluster.kill("master");
    // Each of them is in a block of its own, far from the last.
    let mut next = MIB;
    eventually("the keys have ended", PATIENCE * 3, || {
        next += 8 * MIB;
        std::thread::sleep(PACE);
        let error = read(next).err()?;
        assert_ne!(error.kind(), std::io::ErrorKind::UnexpectedEof);
        Some(())
    });
    let log = fs::read_to_string(&cluster.at_start.workers[0].log).unwrap();
    let is_said = |line: &str| line.contains("those of before have ended") && line.contains("keys of /data");
    assert!(log.lines().any(is_said), "{log}");
    // Of the worker, and not of the kernel.
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    read(900_000).unwrap();

    cluster.start("master");
    next += 8 * MIB;
    eventually("there are keys again", PATIENCE * 3, || read(next).is_ok().then_some(()));
}

#[test]
fn an_sts_that_gives_no_keys_is_named_with_the_mount() {
    let cluster = up_impatient();
    let tree = cluster.seed("bucket", "data/", 300, 2_000);
    // The first succeeds when the master knows of such mounts.
    mount(&cluster, "s3://bucket/first", "/first", &["--write-type", "cache-mode"]);
    let fault = |kind: &str| cluster.s3.add_fault(&json!({ "kind": kind, "operations": ["AssumeRole"] }));
    fault("403");
    let arguments = self::arguments(&cluster, "s3://bucket/data", "/data", &["--write-type", "cache-mode"]);
    let refused = cluster.try_cv(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let sts = format!("STS at {}, asked for {ROLE},", cluster.s3.endpoint);
    for part in ["no keys of /data", &sts, "403", "AccessDenied"] {
        assert!(refused.code != 0 && refused.stderr.contains(part), "{refused:?}");
    }
    assert!(!cluster.path("data").exists());
    let long = format!("s3://bucket/{}", "p".repeat(1000));
    let arguments = self::arguments(&cluster, &long, "/long", &["--write-type", "cache-mode"]);
    let refused = cluster.try_cv(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(refused.code != 0 && refused.stderr.contains("2048"), "{refused:?}");

    // Later, in use.
    cluster.s3.clear_faults();
    cluster.s3.limit_sessions(3);
    mount(&cluster, "s3://bucket/data", "/data", &["--write-type", "cache-mode"]);
    let shown = |command: &str| cluster.cv(&[command]).stdout;
    assert!(shown("mount").contains(&format!("/data: keys are vended of {ROLE}: until 2")), "{}", shown("mount"));
    fault("503");
    let mut objects = tree.keys();
    // What is said after one more object was asked for, which is in no cache, and may be read or not.
    let mut report = || {
        let key = objects.next()?;
        let _read = fs::read(cluster.path("data").join(key.strip_prefix("data/")?));
        Some(shown("report"))
    };
    let is_failing = |said: &String| said.contains("no new keys are given out");
    let said = eventually("the failure is shown", PATIENCE * 2, || report().filter(is_failing));
    assert!(said.contains(&sts) && said.contains("503") && said.contains("keys failing"), "{said}");
    cluster.s3.clear_faults();
    eventually("keys are given out again", PATIENCE * 2, || report().filter(|said| !is_failing(said)));
}

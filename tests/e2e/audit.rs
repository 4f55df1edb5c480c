//! The audit log of a master: whoever does something to the cluster, and whoever is refused it, has a line in it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(10);

/// The lines of an operation.
fn lines(log: &Path, operation: &str) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["operation"] == operation).collect()
}

#[test]
fn whatever_is_done_to_a_cluster_has_a_line_with_who_did_it() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("audit-master");
    let worker_log = directory.path().join("audit-worker");
    let conf =
        format!("[master]\naudit_log = \"{}\"\n[worker]\naudit_log = \"{}\"\n", log.display(), worker_log.display());
    let cluster = Cluster::up(Options { secure: true, conf, ..Options::default() });
    let line = |operation: &str| {
        let mut lines = lines(&log, operation);
        lines.pop().unwrap_or_else(|| panic!("no line about {operation}"))
    };
    let role = |line: &Value| line["identity"].as_str().unwrap().split('/').nth(3).unwrap().to_owned();
    let registered = line("RegisterWorker");
    assert_eq!((role(&registered).as_str(), &registered["result"]), ("worker", &"ok".into()));

    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let mounted = line("Mount");
    assert_eq!((role(&mounted).as_str(), &mounted["result"]), ("admin", &"ok".into()));
    assert_eq!(mounted["subject"], "s3://bucket/fs at /fs");
    eventually("the client has asked for the credentials", PATIENCE, || {
        let of_clients = |line: &Value| role(line) == "client" && line["result"] == "ok";
        lines(&log, "GetCredentials").iter().any(of_clients).then_some(())
    });
    let failed = cluster.try_cv(&["mount", "file:///no/such/directory", "/other", "--write-type", "cache-mode"]);
    assert!(failed.code == 1 && failed.stderr.contains("/no/such/directory"), "{failed:?}");
    assert!(line("Mount")["result"].as_str().unwrap().contains("/no/such/directory"), "{}", line("Mount"));

    cluster.cv(&["fs", "quota", "set", "/fs", "--bytes", "1GiB"]);
    let quota = line("SetQuota");
    assert!(quota["subject"].as_str().unwrap().ends_with("bytes: 1073741824, inodes: no limit"), "{quota}");
    assert_eq!((role(&quota).as_str(), &quota["result"]), ("admin", &"ok".into()));
    cluster.cv(&["fs", "ttl", "set", "/fs", "30d", "--action", "delete"]);
    let ttl = line("SetTtl");
    assert!(ttl["subject"].as_str().unwrap().ends_with("after 2592000 s: delete"), "{ttl}");
    cluster.cv(&["refresh", "/fs"]);
    assert_eq!((&line("Refresh")["subject"], &line("Refresh")["result"]), (&"/fs".into(), &"ok".into()));
    cluster.cv(&["load", "/fs"]);
    let loaded = line("SubmitLoad");
    assert_eq!((role(&loaded).as_str(), &loaded["subject"], &loaded["result"]), ("admin", &"/fs".into(), &"ok".into()));
    for (arguments, operation) in [(["job", "cancel", "99"], "CancelJob"), (["job", "retry", "99"], "RetryJob")] {
        assert_ne!(cluster.try_cv(&arguments).code, 0, "{operation}");
        let asked = line(operation);
        assert_eq!((role(&asked).as_str(), &asked["subject"]), ("admin", &"job 99".into()));
        assert_ne!(asked["result"], "ok", "{asked}");
    }

    // By one that may not, whose mount goes on.
    let certificates = cluster.directory().join("certificates");
    let as_client = |arguments: &[&str]| {
        let mut command = cluster.command(arguments);
        command.env("CV_SECURITY__CERTIFICATE", certificates.join("client-fuse0.pem"));
        command.env("CV_SECURITY__KEY", certificates.join("client-fuse0-key.pem"));
        command.output().unwrap()
    };
    let lift = ["fs", "quota", "set", "/fs", "--bytes", "9GiB"];
    let attempts: [(&[&str], &str); 3] = [
        (&["umount", "/fs"], "Unmount"),
        (&lift, "SetQuota"),
        (&["fs", "ttl", "set", "/fs", "1s", "--action", "delete"], "SetTtl"),
    ];
    for (arguments, operation) in attempts {
        assert!(!as_client(arguments).status.success(), "{operation}");
        let refusal = line(operation);
        assert_eq!(role(&refusal), "client");
        let result = refusal["result"].as_str().unwrap();
        assert!(result.contains("it takes a certificate of the role"), "{refusal}");
        assert!(result.contains("admin"), "{refusal}");
    }
    let quota = cluster.cv(&["fs", "quota", "get", "/fs", "--json"]).json();
    assert_eq!(quota[0]["max_bytes"], 1 << 30, "{quota}");
    // With a rule that lets it, it may.
    let rules = ["mount", "update", "/fs", "--client", "fuse0=rw,quotas"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    let lifted = as_client(&lift);
    assert!(lifted.status.success(), "{}", String::from_utf8_lossy(&lifted.stderr));
    assert_eq!((role(&line("SetQuota")).as_str(), &line("SetQuota")["result"]), ("client", &"ok".into()));
    fs::write(cluster.path("fs/file"), [7; 10_000]).unwrap();
    fs::remove_file(cluster.path("fs/file")).unwrap();
    let freed = eventually("the worker has freed the block", PATIENCE * 6, || lines(&worker_log, "Free").pop());
    assert_eq!(
        (role(&freed).as_str(), &freed["subject"], &freed["result"]),
        ("master", &"1 blocks".into(), &"ok".into())
    );

    cluster.cv(&["umount", "/fs"]);
    let unmounted = line("Unmount");
    assert_eq!((role(&unmounted).as_str(), &unmounted["subject"]), ("admin", &"/fs".into()));

    // What clients do in the namespace is not in it, nor anything that is secret.
    assert!(["Resolve", "Mutate", "Unlink"].iter().all(|operation| lines(&log, operation).is_empty()));
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains(&cluster.s3.secret_key), "a secret");
}

#[test]
fn names_that_clients_take_away_have_lines_if_that_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("audit-master");
    let conf = format!("[master]\naudit_log = \"{}\"\naudit_deletes = true\n", log.display());
    let cluster = Cluster::up(Options { secure: true, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let at = |path: &str| cluster.path("fs").join(path);
    fs::create_dir_all(at("d/e")).unwrap();
    let inode = |path: &str| fs::metadata(at(path)).unwrap().ino();
    let (top, below) = (inode(""), inode("d"));
    for number in 0..20 {
        fs::write(at(&format!("d/f{number}")), "x").unwrap();
    }
    fs::write(at("d/\"quoted\""), "x").unwrap();
    fs::rename(at("d/f0"), at("moved")).unwrap();
    for number in 1..20 {
        fs::remove_file(at(&format!("d/f{number}"))).unwrap();
    }
    fs::remove_file(at("d/\"quoted\"")).unwrap();
    assert!(fs::remove_file(at("d/f1")).is_err() && fs::remove_dir(at("d")).is_err());
    fs::remove_dir(at("d/e")).unwrap();
    let subjects = |operation: &str| -> BTreeSet<String> {
        let lines = lines(&log, operation);
        for line in &lines {
            let client = line["identity"].as_str().unwrap().contains("/client/fuse0");
            assert!(client && line["result"] == "ok" && !line["peer"].as_str().unwrap().is_empty(), "{line}");
        }
        lines.iter().map(|line| line["subject"].as_str().unwrap().to_owned()).collect()
    };
    // Names may be answered before the master has them.
    eventually("the last change has its line", PATIENCE, || (!subjects("Rmdir").is_empty()).then_some(()));
    let mut removed: BTreeSet<String> = (1..20).map(|number| format!("inode {below}: f{number}")).collect();
    removed.insert(format!("inode {below}: \"quoted\""));
    assert_eq!(subjects("Unlink"), removed);
    assert_eq!(subjects("Rmdir"), [format!("inode {below}: e")].into());
    assert_eq!(subjects("Rename"), [format!("inode {below}: f0 to inode {top}: moved")].into());
}

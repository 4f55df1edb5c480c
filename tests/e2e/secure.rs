//! A cluster whose processes show each other certificates: everything works as without them, and for nobody else.

use std::fs;
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};

const PATIENCE: Duration = Duration::from_secs(60);
/// No files of `[security]`, whatever the configuration has.
const PLAIN: [(&str, &str); 5] = [
    ("CV_SECURITY__CA", ""),
    ("CV_SECURITY__CERTIFICATE", ""),
    ("CV_SECURITY__KEY", ""),
    // These go with them.
    ("CV_SECURITY__REVOKED", ""),
    ("CV_SECURITY__HTTP_TOKEN", ""),
];
/// As from a worker on another host.
const REMOTE: &str = "[client]\nlocal_descriptors = false\n";

fn directory(cluster: &Cluster) -> &str {
    cluster.directory().to_str().unwrap()
}

/// What `cv` says to a cluster with other files than those of its configuration.
fn with(cluster: &Cluster, environment: &[(&str, &str)], arguments: &[&str]) -> (Option<i32>, String) {
    let mut command: Command = cluster.command(arguments);
    command.envs(environment.iter().copied());
    let output = within("a command ends", PATIENCE, move || command.output().unwrap());
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), said)
}

/// Writes and reads both kinds of mounts, through the mount and by the command line.
fn reads_and_writes(cluster: &Cluster) {
    let tree = cluster.seed("bucket", "read/", 60, 300_000);
    cluster.mount("s3://bucket/read", "/read", &[]);
    cluster.mount_fs_mode("s3://bucket/kept", "/kept", &[]);
    cluster.assert_tree("read", "read/", &tree);
    let content: Vec<u8> = (0..5_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::create_dir(cluster.path("kept/folder")).unwrap();
    fs::write(cluster.path("kept/folder/file"), &content).unwrap();
    assert!(fs::read(cluster.path("kept/folder/file")).unwrap() == content);
    cluster.cv(&["persist", "wait", "/kept", "--timeout", "60s"]);
    assert!(cluster.s3.get("bucket", "kept/folder/file") == content, "the bucket has other bytes");
    cluster.mount("s3://bucket/sent", "/sent", &["--access-mode", "read_write"]);
    fs::write(cluster.path("sent/file"), &content).unwrap();
    assert!(fs::read(cluster.path("sent/file")).unwrap() == content);
    assert!(cluster.s3.get("bucket", "sent/file") == content, "the bucket has other bytes");
    // Of the workers again, and of the bucket.
    cluster.stop("fuse");
    cluster.start("fuse");
    cluster.assert_tree("read", "read/", &tree);
    cluster.cv(&["fs", "free", "/read"]);
    cluster.cv(&["load", "/read", "--watch"]);
    cluster.assert_tree("read", "read/", &tree);
    assert!(fs::read(cluster.path("kept/folder/file")).unwrap() == content);
}

#[test]
fn a_secured_cluster_reads_and_writes_on_its_own_host_and_from_others() {
    for conf in [String::new(), REMOTE.to_owned()] {
        let cluster = Cluster::up(Options { workers: 2, secure: true, conf, ..Options::default() });
        reads_and_writes(&cluster);
        let status = cluster.status();
        for child in status.masters.iter().chain(&status.workers).chain(&status.fuse) {
            let log = fs::read_to_string(&child.log).unwrap();
            assert!(!log.contains("security.insecure") && !log.contains("panicked"), "{log}");
            // Its certificate holds for ten years.
            let end = child.metric("cavern_certificate_expires_seconds").unwrap();
            assert!(end > 2_000_000_000, "{end}");
        }
    }
}

#[test]
fn masters_and_workers_that_come_later_have_certificates_as_well_and_it_stays_secured() {
    let cluster = Cluster::up(Options { secure: true, ..Options::default() });
    let place = directory(&cluster);
    let tree = cluster.seed("bucket", "", 10, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.cv(&["local", "up", "--dir", place, "--masters", "3", "--workers", "2"]);
    let status = cluster.cv(&["local", "status", "--dir", place, "--json"]).json();
    assert_eq!(status["secure"], true, "{status}");
    // By the command line, which has a certificate.
    eventually("three masters vote", PATIENCE, || {
        let group = cluster.cv(&["raft", "status", "--json"]).json();
        (group["voters"] == 3 && group["answering"] == 3 && group["leader"].is_u64()).then_some(())
    });
    cluster.assert_tree("data", "", &tree);
    assert_eq!(cluster.cv(&["node", "list", "--json"]).json().as_array().unwrap().len(), 2);
    cluster.cv(&["secrets", "rotate"]);
    cluster.cv(&["local", "down", "--dir", place]);
    cluster.cv(&["local", "up", "--dir", place]);
    cluster.assert_tree("data", "", &tree);

    let plain = Cluster::up(Options::default());
    let changed = plain.try_cv(&["local", "up", "--dir", directory(&plain), "--secure"]);
    assert!(changed.code == 2 && changed.stderr.contains("made without --secure"), "{changed:?}");
}

#[test]
fn who_has_no_certificate_or_one_of_another_role_is_refused_in_a_sentence() {
    let cluster = Cluster::up(Options { secure: true, ..Options::default() });
    // The cause, and not that of masters that elect one of them.
    let plain = "the master speaks TLS: is [security] missing in the configuration here?";
    for command in [["node", "list"], ["fs", "ls"]] {
        let (code, said) = with(&cluster, &PLAIN, &command);
        assert!(code == Some(3) && said.contains(plain) && !said.contains("a majority"), "{code:?} {said}");
    }

    // That of the client may look at files, and at nothing of the cluster.
    let certificates = cluster.directory().join("certificates");
    let path = |name: &str| certificates.join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("client-fuse0.pem"), path("client-fuse0-key.pem"));
    let client = [("CV_SECURITY__CERTIFICATE", certificate.as_str()), ("CV_SECURITY__KEY", key.as_str())];
    let (code, said) = with(&cluster, &client, &["fs", "ls", "/"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = with(&cluster, &client, &["umount", "/data"]);
    assert!(code == Some(1) && said.contains("admin"), "{code:?} {said}");

    // That of a worker serves no mount, and says so at once; nor does it fill the log of the master.
    let (certificate, key) = (path("worker-worker0.pem"), path("worker-worker0-key.pem"));
    let mount_point = cluster.directory().join("other");
    let worker = [
        ("CV_SECURITY__CERTIFICATE", certificate.as_str()),
        ("CV_SECURITY__KEY", key.as_str()),
        ("CV_FUSE__MOUNT_POINT", mount_point.to_str().unwrap()),
        ("CV_FUSE__HTTP_LISTEN", "127.0.0.1:0"),
    ];
    let (code, said) = with(&cluster, &worker, &["fuse"]);
    assert!(code == Some(1) && said.contains("Watch: it takes a certificate of the role client"), "{code:?} {said}");
    let log = fs::read_to_string(&cluster.at_start.masters[0].log).unwrap();
    let refusals = log.lines().filter(|line| line.contains("may not call Watch")).count();
    assert!((1..20).contains(&refusals), "{refusals} lines");

    // Of an authority that nobody knows, though it has the name of this cluster.
    let foreign = tempfile::tempdir().unwrap();
    let foreign = foreign.path().to_str().unwrap();
    cluster.cv(&["cert", "init", "--dir", foreign]);
    cluster.cv(&["cert", "issue", "admin", "x", "--dir", foreign]);
    let files = ["ca.pem", "admin-x.pem", "admin-x-key.pem"].map(|name| format!("{foreign}/{name}"));
    let names = ["CV_SECURITY__CA", "CV_SECURITY__CERTIFICATE", "CV_SECURITY__KEY"];
    let foreign = names.into_iter().zip(files.iter().map(String::as_str));
    // The list of the cluster is none of this authority.
    let foreign: Vec<(&str, &str)> = [("CV_SECURITY__REVOKED", "")].into_iter().chain(foreign).collect();
    let (code, said) = with(&cluster, &foreign, &["node", "list"]);
    assert!(code == Some(3) && said.contains("certificate") && !said.contains("a majority"), "{code:?} {said}");
    // A right one, with an authority that does not know the master.
    let (code, said) = with(&cluster, &foreign[..2], &["node", "list"]);
    assert!(code == Some(3) && said.contains("certificate"), "{code:?} {said}");
    // It goes on for everybody else.
    cluster.cv(&["node", "list"]);
}

#[test]
fn certificates_are_replaced_while_everything_goes_on() {
    let cluster = Cluster::up(Options { secure: true, conf: REMOTE.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 20, 100_000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data", "", &tree);
    let certificates = cluster.directory().join("certificates");
    let fuse = cluster.at_start.fuse[0].clone();
    let end = || fuse.metric("cavern_certificate_expires_seconds");
    let before = end().unwrap();
    // The master, the worker, and the command line itself.
    let report = cluster.cv(&["report", "--json"]).json();
    let roles: Vec<_> = report["certificates"].as_array().unwrap().iter().map(|shown| &shown["role"]).collect();
    assert_eq!(roles, ["master", "worker", "admin"], "{report}");
    assert!(report["certificates"].as_array().unwrap().iter().all(|shown| shown["ends_soon"] == false), "{report}");
    assert!(!cluster.cv(&["report"]).stdout.contains("WARNING"));
    let new = tempfile::tempdir().unwrap();
    let (authority, out) = (certificates.to_str().unwrap(), new.path().to_str().unwrap());
    for (role, name) in [("master", "master0"), ("worker", "worker0"), ("client", "fuse0"), ("admin", "local")] {
        cluster.cv(&["cert", "issue", role, name, "--dir", authority, "--out", out, "--days", "20"]);
        for ending in [".pem", "-key.pem"] {
            let file = format!("{role}-{name}{ending}");
            // In the same file system, so that it is replaced by a rename.
            let beside = certificates.join(format!("{file}.new"));
            fs::copy(new.path().join(&file), &beside).unwrap();
            fs::rename(beside, certificates.join(&file)).unwrap();
        }
    }
    eventually("the new certificate is in force", PATIENCE, || end().filter(|end| *end < before));
    // Each process looks by itself.
    let report = eventually("all new certificates are in force", PATIENCE, || {
        let report = cluster.cv(&["report", "--json"]).json();
        let are_new = report["certificates"].as_array()?.iter().all(|shown| shown["ends_soon"] == true);
        are_new.then_some(report)
    });
    let worker = report["certificates"].as_array().unwrap().iter().find(|shown| shown["role"] == "worker").unwrap();
    // Whole days: within the second in which they were made all are left.
    assert!(worker["name"] == "worker0" && matches!(worker["days_left"].as_u64(), Some(19 | 20)), "{worker}");
    assert!(worker["address"] == cluster.at_start.workers[0].data.as_str() && worker["ends_soon"] == true, "{worker}");
    let said = cluster.cv(&["report"]).stdout;
    assert!(
        said.contains("WARNING   3 certificates end within 30 days") && said.contains(" days: replace it"),
        "{said}"
    );
    cluster.cv(&["fs", "free", "/data"]);
    cluster.assert_tree("data", "", &tree);
    // New connections all around.
    for child in ["worker0", "master", "fuse"] {
        cluster.stop(child);
        cluster.start(child);
    }
    eventually("the worker is live again", PATIENCE, || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        (nodes[0]["state"] == "live").then_some(())
    });
    cluster.assert_tree("data", "", &tree);
}

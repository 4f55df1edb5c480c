//! `cv doctor` names what is wrong with a host and with a cluster, and its exit code says so.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use cavern_tests::{Automount, Cluster, Finished, Options, eventually};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

/// Level and sentence of each finding of a check.
fn found(doctor: &Finished, check: &str) -> Vec<(String, String)> {
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let report = doctor.json();
    let all = report["findings"].as_array().unwrap().iter();
    for finding in all.clone().filter(|finding| finding["level"] != "ok") {
        assert!(["what", "why", "todo"].iter().all(|key| !text(finding, key).is_empty()), "{finding}");
    }
    all.filter(|finding| finding["check"] == check).map(|one| (text(one, "level"), text(one, "what"))).collect()
}

/// That a check has a finding of this level which says so, and the exit code that goes with it.
#[track_caller]
fn assert_found(doctor: &Finished, check: &str, level: &str, fragment: &str) {
    let of_check = found(doctor, check);
    let is_told = |(found, what): &(String, String)| found == level && what.contains(fragment);
    assert!(of_check.iter().any(is_told), "{check}: {of_check:?} does not say {fragment:?}");
    let codes = match level {
        "error" => 2..=2,
        "warning" => 1..=2,
        _ => 0..=2,
    };
    assert!(codes.contains(&doctor.code) && !doctor.stderr.contains("panicked"), "{doctor:?}");
}

/// A host that is as it should be, for changes of its configuration.
struct Host {
    place: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        for name in ["master", "worker", "staged", "mnt"] {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        Self { place }
    }

    fn path(&self, name: &str) -> String {
        self.place.path().join(name).to_str().unwrap().to_owned()
    }

    /// `cv doctor` on it alone, with these settings in the place of its own (`section.key`, TOML).
    #[track_caller]
    fn doctor(&self, roles: &str, changes: &[(&str, String)]) -> Finished {
        let quoted = |text: String| format!("{text:?}");
        let mut settings = vec![
            ("master.listen", quoted("127.0.0.1:0".to_owned())),
            ("master.http_listen", quoted("127.0.0.1:0".to_owned())),
            ("master.data_dir", quoted(self.path("master"))),
            ("worker.listen", quoted("127.0.0.1:0".to_owned())),
            ("worker.http_listen", quoted("127.0.0.1:0".to_owned())),
            ("worker.dirs", format!("[{:?}]", format!("[SSD]{}", self.path("worker")))),
            ("client.staging_directory", quoted(self.path("staged"))),
            ("fuse.http_listen", quoted("127.0.0.1:0".to_owned())),
            ("fuse.mount_point", quoted(self.path("mnt"))),
        ];
        settings.retain(|(key, _)| changes.iter().all(|(changed, _)| changed != key));
        settings.extend(changes.iter().cloned());
        let lines: Vec<String> = settings.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        let conf = self.path("cluster.toml");
        fs::write(&conf, sections(&lines)).unwrap();
        Cluster::alone(&["doctor", "--offline", "--json", "--conf", &conf, "--role", roles], &[])
    }
}

/// A file with `section.key = value` lines as sections.
fn sections(lines: &[String]) -> String {
    let mut names: Vec<&str> = lines.iter().filter_map(|line| Some(line.split_once('.')?.0)).collect();
    names.sort_unstable();
    names.dedup();
    let of = |name: &str| -> String {
        let own = lines.iter().filter_map(|line| line.strip_prefix(name)?.strip_prefix('.'));
        format!("[{name}]\n{}", own.collect::<String>())
    };
    names.into_iter().map(of).collect()
}

#[test]
fn each_misconfiguration_of_a_host_is_named() {
    let host = Host::new();
    let all = "master,worker,fuse";
    let good = host.doctor(all, &[]);
    for check in ["configuration", "directory", "port", "masters-same", "paths-overlap", "disk-size", "mount-point"] {
        let wrong: Vec<_> = found(&good, check).into_iter().filter(|(level, _)| level != "ok").collect();
        assert_eq!(wrong, [], "{check}");
    }
    assert_eq!(found(&good, "directory").len(), 3, "{good:?}");
    assert_eq!(fs::read_dir(host.path("worker")).unwrap().count(), 0, "nothing is left in a directory");

    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("{:?}", held.local_addr().unwrap().to_string());
    fs::write(host.path("file"), "x").unwrap();
    let dirs = |specs: &[String]| format!("{specs:?}");
    let other = host.path("other");
    fs::create_dir(&other).unwrap();
    let worker = host.path("worker");
    let masters = r#"["localhost:7700", "127.0.0.1:7700", "127.0.0.1:7702"]"#.to_owned();
    for (role, key, value, check, level, fragment) in [
        (all, "fuse.thread", "2".to_owned(), "configuration", "error", "fuse.thread"),
        ("worker", "worker.listen", "\"0.0.0.0:0\"".to_owned(), "configuration", "error", "other hosts can come in"),
        ("worker", "cluster.masters", masters, "masters-same", "error", "localhost:7700"),
        ("master", "master.data_dir", format!("{:?}", host.path("mnt/m")), "paths-overlap", "error", "mnt/m"),
        ("master", "master.data_dir", format!("{:?}", host.path("none")), "directory", "error", "No such file"),
        ("master", "master.data_dir", format!("{:?}", host.path("file")), "directory", "error", "Not a directory"),
        ("worker", "worker.dirs", dirs(&[format!("[SSD:900TB]{worker}")]), "disk-size", "error", "may take"),
        (
            "worker",
            "worker.dirs",
            dirs(&[format!("[SSD]{worker}"), format!("[SSD]{other}")]),
            "disk-shared",
            "warning",
            "on one disk",
        ),
        ("worker", "worker.listen", taken.clone(), "port", "error", "worker.listen"),
        ("master", "master.http_listen", "\"192.0.2.1:7701\"".to_owned(), "configuration", "error", "192.0.2.1"),
        ("fuse", "fuse.mount_point", format!("{:?}", host.path("file")), "mount-point", "error", "Not a directory"),
        ("fuse", "client.memory_budget", "\"100TB\"".to_owned(), "memory", "error", "may take"),
    ] {
        assert_found(&host.doctor(role, &[(key, value)]), check, level, fragment);
    }
    fs::write(host.path("mnt/file"), "x").unwrap();
    assert_found(&host.doctor("fuse", &[]), "mount-point", "warning", "has files");
    let insecure = [("security.insecure", "true".to_owned()), ("master.http_listen", "\"192.0.2.1:7701\"".to_owned())];
    let elsewhere = host.doctor("master", &insecure);
    assert_found(&elsewhere, "port", "error", "nobody can listen at 192.0.2.1:7701");
    assert_found(&elsewhere, "security", "warning", "security.insecure");
    // Credentials that nobody would use.
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "hush")];
    let refused = Cluster::alone(&["doctor", "--offline", "--credentials-env"], &keys);
    assert!(refused.code == 2 && refused.stdout.is_empty() && refused.stderr.contains("--bucket"), "{refused:?}");
}

#[test]
fn an_idle_automount_is_left_alone() {
    let host = Host::new();
    symlink(host.path("worker"), host.path("link")).unwrap();
    let at = |name: &str| Automount::at(Path::new(&host.path(name)));
    let (Some(blocks), Some(mount_point)) = (at("worker"), at("mnt")) else { return };
    for directory in ["worker", "link/below"] {
        let dirs = format!("[{:?}]", format!("[SSD]{}", host.path(directory)));
        let looked = host.doctor("worker,fuse", &[("worker.dirs", dirs)]);
        assert_found(&looked, "directory", "note", "is idle");
        assert_found(&looked, "mount-point", "ok", "is idle");
        assert!(!blocks.is_asked() && !mount_point.is_asked(), "{directory}: {looked:?}");
    }
}

#[test]
fn certificates_that_do_not_fit_are_named() {
    let host = Host::new();
    let authority = |name: &str| {
        let made = Cluster::alone(&["cert", "init", "--dir", &host.path(name)], &[]);
        assert_eq!(made.code, 0, "{made:?}");
        host.path(&format!("{name}/ca.pem"))
    };
    let (own, other) = (authority("own"), authority("other"));
    let issued = Cluster::alone(&["cert", "issue", "client", "node1", "--dir", &host.path("own"), "--days", "10"], &[]);
    assert_eq!(issued.code, 0, "{issued:?}");
    let key = host.path("own/client-node1-key.pem");
    let doctor = |role: &str, ca: &str| {
        let files = [ca.to_owned(), host.path("own/client-node1.pem"), key.clone()];
        let names = ["security.ca", "security.certificate", "security.key"];
        let changes: Vec<_> = names.into_iter().zip(files.map(|path| format!("{path:?}"))).collect();
        host.doctor(role, &changes)
    };
    let good = doctor("fuse", &own);
    assert_found(&good, "certificate-chain", "ok", "cavern://cavern/client/node1");
    assert_found(&good, "certificate-role", "ok", "client");
    assert_found(&good, "certificate-expiry", "warning", "ends soon");
    assert_found(&doctor("fuse", &other), "certificate-chain", "error", "refuse");
    assert_found(&doctor("master", &own), "certificate-role", "error", "takes one of the role master");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    assert_found(&doctor("fuse", &own), "security", "error", "can be read by everybody");
    fs::remove_file(&key).unwrap();
    assert_found(&doctor("fuse", &own), "security", "error", "client-node1-key.pem");
}

#[test]
fn a_cluster_is_well_until_something_of_it_is_not() {
    let mut cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "", 3, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let place = cluster.directory().to_str().unwrap().to_owned();
    let doctor = |cluster: &Cluster, more: &[&str]| {
        let doctor = cluster.try_cv(&[&["doctor", "--json", "--local", place.as_str()][..], more].concat());
        assert!(!doctor.stdout.contains(&cluster.s3.secret_key), "{doctor:?}");
        doctor
    };
    // The time of a worker is known with its first heartbeat.
    let well = eventually("all clocks are known", PATIENCE, || {
        let doctor = doctor(&cluster, &[]);
        let is_known = found(&doctor, "clock").iter().any(|(_, what)| what.contains("2 members"));
        is_known.then_some(doctor)
    });
    for (check, fragment) in [
        ("configuration", "good"),
        ("mount-point", "answers"),
        ("port", "`cv worker` listens"),
        ("masters", "majority"),
        ("workers", "1 worker live"),
        ("versions", "all are of version"),
        ("clock", "2 members"),
        ("clock-store", "s3://bucket"),
        ("bucket-list", "/data"),
        ("bucket-get", "/data"),
    ] {
        assert_found(&well, check, "ok", fragment);
        let wrong: Vec<_> = found(&well, check).into_iter().filter(|(level, _)| level != "ok").collect();
        assert_eq!(wrong, [], "{check}");
    }
    let shown = cluster.try_cv(&["doctor", "--local", &place]).stdout;
    assert!(shown.contains("bucket-list") && shown.lines().all(|line| !line.trim().is_empty()), "{shown}");

    // One that need not be mounted, and what is put into it.
    let options = cluster.bucket_options();
    let mut other: Vec<&str> = options.iter().flat_map(|option| ["-c", option.as_str()]).collect();
    let before = cluster.s3.requests("PUT");
    let none = doctor(&cluster, &[&["--bucket", "s3://nothing"][..], &other].concat());
    assert_found(&none, "bucket-list", "error", "no such bucket");
    other.push("--write");
    let written = doctor(&cluster, &[&["--bucket", "s3://bucket/below"][..], &other].concat());
    assert_found(&written, "bucket-put", "ok", "s3://bucket/below");
    assert!(cluster.s3.requests("PUT") > before);

    cluster.change_secret_key("another-secret-key-of-the-same-store");
    assert_found(&doctor(&cluster, &[]), "bucket-list", "error", "denied");
    cluster.stop("worker0");
    eventually("the lost worker is named", PATIENCE, || {
        let doctor = doctor(&cluster, &[]);
        let is_lost = found(&doctor, "workers").iter().any(|(level, what)| level == "warning" && what.contains("lost"));
        is_lost.then(|| assert_found(&doctor, "workers", "error", "no worker is live"))
    });
    cluster.stop("master");
    assert_found(&doctor(&cluster, &[]), "masters", "error", "no master answers");
    // Without a cluster there is nothing to be missed.
    assert_eq!(found(&doctor(&cluster, &["--offline"]), "masters"), []);
}

#[test]
fn a_secured_cluster_is_looked_at_with_the_certificate_of_whoever_looks() {
    let cluster = Cluster::up(Options { secure: true, ..Options::default() });
    cluster.seed("bucket", "", 1, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let place = cluster.directory().to_str().unwrap();
    let admin = cluster.try_cv(&["doctor", "--json", "--local", place]);
    assert_found(&admin, "certificate-chain", "ok", "/admin/");
    assert_found(&admin, "workers", "ok", "1 worker live");
    assert_eq!(found(&admin, "certificate-members"), []);
    assert_found(&admin, "bucket-list", "note", "were not asked from here");
    // That of the client is given what it needs for the bucket.
    let certificates = cluster.directory().join("certificates");
    let mut client = cluster.command(&["doctor", "--json", "--local", place]);
    client.env("CV_SECURITY__CERTIFICATE", certificates.join("client-fuse0.pem"));
    client.env("CV_SECURITY__KEY", certificates.join("client-fuse0-key.pem"));
    let output = client.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    let client = Finished { code, stdout: text(output.stdout), stderr: text(output.stderr) };
    assert_found(&client, "bucket-list", "ok", "/data");
    assert_found(&client, "workers", "ok", "1 worker live");
}

//! What keeps a process from starting is said in one sentence, with an exit code.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Output};

use cavern_tests::{Cluster, Options, cv_path};

/// Runs a process of the cluster that must refuse to start, and answers its sentence.
#[track_caller]
fn refusal(cluster: &Cluster, role: &str, environment: &[(&str, &str)], in_namespace: Option<&str>) -> String {
    // One that starts all the same is ended, and fails the test with exit code 0 or 124.
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "20"]);
    if let Some(preparation) = in_namespace {
        let script = format!("{preparation} && exec \"$@\"");
        command.args(["unshare", "--mount", "--propagation", "private", "sh", "-ec", &script, "sh"]);
    }
    command.arg(cv_path()).arg(role).arg("--conf").arg(&cluster.at_start.conf);
    command.env("CV_LOG__LEVEL", "error").envs(environment.iter().copied());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert_eq!(status.code(), Some(1), "cv {role} with {environment:?}: {stdout}{stderr}");
    assert!(!stdout.contains("ready") && !stderr.contains("panicked"), "{stdout}{stderr}");
    let lines: Vec<_> = stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("cv: "), "not one sentence: {stderr}");
    eprintln!("{stderr}");
    lines[0].to_owned()
}

#[test]
fn what_keeps_a_process_from_starting_is_said_in_one_sentence() {
    let cluster = Cluster::up(Options::default());
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let free = "127.0.0.1:0";
    let master =
        [("CV_MASTER__LISTEN", free), ("CV_MASTER__HTTP_LISTEN", free), ("CV_MASTER__DATA_DIR", &path("master"))];
    let dirs = format!("[\"[SSD:1GiB]{}\"]", path("worker"));
    let worker = [("CV_WORKER__LISTEN", free), ("CV_WORKER__HTTP_LISTEN", free), ("CV_WORKER__DIRS", &dirs)];
    let fuse = [("CV_FUSE__HTTP_LISTEN", free), ("CV_FUSE__MOUNT_POINT", &path("mnt"))];
    fs::create_dir(path("mnt")).unwrap();
    let with = |of: &[(&'static str, &str)], key: &'static str, value: &str| -> Vec<(&'static str, String)> {
        let others = of.iter().filter(|(name, _)| *name != key).map(|(name, value)| (*name, (*value).to_owned()));
        others.chain([(key, value.to_owned())]).collect()
    };
    let refused = |role: &str, environment: Vec<(&'static str, String)>, in_namespace: Option<&str>| {
        let environment: Vec<_> = environment.iter().map(|(key, value)| (*key, value.as_str())).collect();
        refusal(&cluster, role, &environment, in_namespace)
    };

    // Directories that are not there: their disks may not be mounted.
    for (role, of, place) in [("master", &master[..], path("master")), ("worker", &worker, path("worker"))] {
        let said = refused(role, with(of, "CV_FUSE__THREADS", "1"), None);
        assert!(said.contains(&place) && said.contains("mount its disk"), "{role}: {said}");
        assert!(!fs::exists(&place).unwrap(), "{role} has made {place}");
    }
    let master = [&master[..], &[("CV_MASTER__CREATE_DIR", "true")]].concat();
    let worker = [&worker[..], &[("CV_WORKER__CREATE_DIRS", "true")]].concat();

    // Ports that another process has.
    for (role, of, key) in [
        ("master", &master[..], "CV_MASTER__LISTEN"),
        ("master", &master, "CV_MASTER__HTTP_LISTEN"),
        ("worker", &worker, "CV_WORKER__LISTEN"),
        ("worker", &worker, "CV_WORKER__HTTP_LISTEN"),
        ("fuse", &fuse, "CV_FUSE__HTTP_LISTEN"),
    ] {
        let said = refused(role, with(of, key, &taken), None);
        assert!(said.contains(&taken), "{role}, {key}: {said}");
    }

    // Directories on a file system that takes no writes.
    let read_only = format!("mkdir -p {0} && mount -t tmpfs -o ro none {0}", path("ro"));
    let below = path("ro/data");
    let said = refused("master", with(&master, "CV_MASTER__DATA_DIR", &below), Some(&read_only));
    assert!(said.contains(&below) && said.contains("Read-only"), "{said}");
    let said =
        refused("worker", with(&worker, "CV_WORKER__DIRS", &format!("[\"[SSD:1GiB]{below}\"]")), Some(&read_only));
    assert!(said.contains(&below) && said.contains("Read-only"), "{said}");
    let said = refused("fuse", with(&fuse, "CV_FUSE__MOUNT_POINT", &below), Some(&read_only));
    assert!(said.contains(&below), "{said}");

    // Directories in use by the cluster itself.
    let used = cluster.directory().join("master0");
    let said = refused("master", with(&master, "CV_MASTER__DATA_DIR", used.to_str().unwrap()), None);
    assert!(said.contains(used.to_str().unwrap()) && said.contains("another master"), "{said}");
    let used = cluster.at_start.workers[0].dirs[0].to_str().unwrap();
    let said = refused("worker", with(&worker, "CV_WORKER__DIRS", &format!("[\"[SSD:1GiB]{used}\"]")), None);
    assert!(said.contains(used) && said.contains("another worker"), "{said}");
    let said = refused("fuse", with(&fuse, "CV_FUSE__MOUNT_POINT", cluster.mount_point().to_str().unwrap()), None);
    assert!(said.contains(cluster.mount_point().to_str().unwrap()), "{said}");
    fs::write(path("file"), "").unwrap();
    let said = refused("fuse", with(&fuse, "CV_FUSE__MOUNT_POINT", &path("file")), None);
    assert!(said.contains(&path("file")) && said.contains("not a directory"), "{said}");

    // The kernel's side of FUSE: no device, and one that is none.
    let said = refused("fuse", with(&fuse, "CV_FUSE__PATH", "/"), Some("mount -t tmpfs none /dev"));
    assert!(said.contains("/dev/fuse is missing"), "{said}");
    let said = refused("fuse", with(&fuse, "CV_FUSE__PATH", "/"), Some("mount --bind /dev/null /dev/fuse"));
    assert!(said.contains("/dev/fuse") || said.contains(&path("mnt")), "{said}");

    // Nothing to show, and nobody to ask.
    let said = refused("fuse", with(&fuse, "CV_FUSE__PATH", "/nowhere"), None);
    assert!(said.contains("/nowhere"), "{said}");
    // Nobody listens there who asks for any port.
    let nobody = "127.0.0.1:1";
    let mut without = with(&fuse, "CV_CLUSTER__MASTERS", &format!("[\"{nobody}\"]"));
    without.push(("CV_CLIENT__METADATA_TIMEOUT", "1s".to_owned()));
    let said = refused("fuse", without, None);
    assert!(said.contains(nobody), "{said}");

    // None of this has disturbed the cluster, or left a mount.
    assert_eq!(cluster.status().masters[0].state, "running");
    assert!(fs::read_dir(cluster.mount_point()).is_ok());
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(scratch.path().to_str().unwrap()), "{table}");
}

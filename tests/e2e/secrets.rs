//! What must not be seen by others: credentials of buckets, and what files have that only some may read.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Options, eventually};

const PATIENCE: Duration = Duration::from_secs(60);
const TOKEN: &str = "a-session-token-that-nobody-may-see";
/// The user `nobody`.
const OTHER: u32 = 65534;

/// All files below a directory, the directory itself and its folders too; mounts are left out.
fn everything(below: &Path) -> Vec<PathBuf> {
    let mut all = vec![below.to_owned()];
    if below.is_dir() && !below.is_symlink() {
        for entry in fs::read_dir(below).unwrap() {
            all.extend(everything(&entry.unwrap().path()));
        }
    }
    all
}

/// What the cluster's processes keep, and what they have said.
fn kept(cluster: &Cluster) -> Vec<PathBuf> {
    let status = cluster.status();
    let folders = ["run", "log"].map(|folder| cluster.directory().join(folder));
    let disks = status.workers.iter().flat_map(|worker| worker.dirs.clone());
    let masters = fs::read_dir(cluster.directory()).unwrap().map(|entry| entry.unwrap().path());
    let masters = masters.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("master"));
    let mut roots: Vec<PathBuf> = folders.into_iter().chain(disks).chain(masters).chain([status.s3.root]).collect();
    roots.retain(|root| root.exists());
    roots.iter().flat_map(|root| everything(root)).collect()
}

fn contains(path: &Path, needle: &str) -> bool {
    let bytes = fs::read(path).unwrap_or_default();
    bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
}

#[test]
fn no_log_has_a_secret_at_any_level_and_no_file_has_one_in_clear() {
    for level in ["debug", "trace"] {
        let conf = format!("[log]\nlevel = \"{level}\"\n[master]\npersist_delay = \"20ms\"\n");
        let cluster = Cluster::up(Options { workers: 2, conf, ..Options::default() });
        cluster.seed("bucket", "read/", 3, 2000);
        let token = format!("s3.credentials.session_token={TOKEN}");
        cluster.mount("s3://bucket/read", "/read", &["-c", &token]);
        cluster.mount_fs_mode("s3://bucket/kept", "/kept", &["-c", &token]);
        for entry in fs::read_dir(cluster.path("read/0000")).unwrap() {
            fs::read(entry.unwrap().path()).unwrap();
        }
        fs::write(cluster.path("kept/file"), vec![7; 100_000]).unwrap();
        cluster.cv(&["persist", "wait", "/kept", "--timeout", "60s"]);
        let mut shown = String::new();
        for command in [&["mount"][..], &["mount", "--json"], &["report"], &["report", "--json"], &["refresh", "/read"]]
        {
            let finished = cluster.cv(command);
            shown.push_str(&finished.stdout);
            shown.push_str(&finished.stderr);
        }
        // One that is refused is described as well.
        let mut refused = vec!["mount", "s3://none", "/none", "--write-type", "cache_mode", "-c", &token];
        let options = cluster.bucket_options();
        refused.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        let finished = cluster.try_cv(&refused);
        assert_ne!(finished.code, 0);
        shown.push_str(&finished.stderr);
        cluster.stop("master");
        cluster.start("master");
        cluster.cv(&["umount", "/kept"]);

        let logs = everything(&cluster.directory().join("log"));
        assert!(logs.iter().any(|log| contains(log, "DEBUG")), "the logs are of level {level}");
        for secret in [cluster.s3.secret_key.as_str(), TOKEN] {
            assert!(!shown.contains(secret), "{shown}");
            for path in kept(&cluster) {
                assert!(!path.is_file() || !contains(&path, secret), "{level}: {}", path.display());
            }
        }
    }
}

#[test]
fn the_keys_on_the_disks_of_masters_are_encrypted_with_one_from_elsewhere() {
    let elsewhere = tempfile::tempdir().unwrap();
    let outer = elsewhere.path().join("outer");
    fs::write(&outer, [3; 32]).unwrap();
    fs::set_permissions(&outer, fs::Permissions::from_mode(0o400)).unwrap();
    let conf = format!("[master]\nkey_encryption_key = \"{}\"\n", outer.display());
    let cluster = Cluster::up(Options { masters: 3, conf, ..Options::default() });
    let tree = cluster.seed("bucket", "", 5, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    // The first makes the key, the others get it, and all of them another one.
    for rotated in [false, true] {
        if rotated {
            cluster.cv(&["secrets", "rotate"]);
        }
        let is_key = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("secret.key");
        let keys: Vec<PathBuf> = kept(&cluster).into_iter().filter(is_key).collect();
        assert!(keys.len() >= 3, "{keys:?}");
        for key in keys {
            assert!(contains(&key, "cavern wrapped key") || !key.exists(), "{}", key.display());
        }
    }
    cluster.stop("fuse");
    for master in ["master0", "master1", "master2"] {
        cluster.stop(master);
        cluster.start(master);
    }
    cluster.start("fuse");
    cluster.assert_tree("data", "", &tree);
}

/// What a command of another user says.
fn as_other(program: &str, path: &Path) -> (bool, String) {
    let output = Command::new(program).arg(path).uid(OTHER).gid(OTHER).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn what_processes_keep_is_their_users_alone_and_is_closed_at_the_next_start() {
    let cluster = Cluster::up(Options { workers: 1, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    // The way to the mount is open to everybody.
    fs::set_permissions(cluster.directory(), fs::Permissions::from_mode(0o755)).unwrap();
    let (public, private) = (cluster.path("fs/public"), cluster.path("fs/private"));
    for (path, mode) in [(&public, 0o644), (&private, 0o600)] {
        fs::write(path, "content").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    assert_eq!(as_other("cat", &public), (true, "content".to_owned()));
    assert!(!as_other("cat", &private).0);
    let block = |path: &str| {
        let shown = cluster.try_cv(&["fs", "blocks", path, "--json"]);
        (shown.code == 0).then(|| PathBuf::from(shown.json()[0]["path"].as_str().unwrap()))
    };
    let mut looked_at = 0;
    for path in kept(&cluster) {
        // Logs of the database and staged uploads come and go.
        let metadata = match path.symlink_metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata.unwrap(),
        };
        assert_eq!(metadata.permissions().mode() & 0o077, 0, "{}", path.display());
        looked_at += 1;
    }
    assert!(looked_at > 10, "only {looked_at} files and directories are kept");
    let socket = cluster.at_start.workers[0].socket.symlink_metadata().unwrap();
    assert!(socket.file_type().is_socket() && socket.permissions().mode() & 0o077 == 0);
    assert!(!as_other("cat", &block("/fs/private").unwrap()).0);

    // As an earlier version left it.
    let disk = cluster.at_start.workers[0].dirs[0].clone();
    for child in ["worker0", "master"] {
        cluster.stop(child);
    }
    for path in everything(&disk) {
        let mode = if path.is_dir() { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(disk.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    for child in ["master", "worker0"] {
        cluster.start(child);
    }
    // The worker is known again when it has registered.
    let block = eventually("the block is known again", PATIENCE, || block("/fs/private").filter(|path| path.exists()));
    assert_eq!(fs::read_to_string(&private).unwrap(), "content");
    assert!(!as_other("cat", &block).0);
    assert!(contains(&cluster.at_start.workers[0].log, "was open to other users"));
}

#[test]
fn credentials_of_a_mount_are_on_no_command_line() {
    let cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "p/", 1, 1000);
    let (access, secret) = (cluster.s3.access_key.clone(), cluster.s3.secret_key.clone());
    let endpoint = format!("s3.endpoint_url={}", cluster.s3.endpoint);
    let file = |name: &str, text: String| {
        let path = cluster.directory().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let plain = file("plain", format!("s3.credentials.access={access}\ns3.credentials.secret={secret}\n"));
    let wrong = file("wrong", format!("AWS_ACCESS_KEY_ID={access}\nAWS_SECRET_KEY={secret}\n"));
    let keys = |access: &str, secret: &str| format!("aws_access_key_id = {access}\naws_secret_access_key = {secret}\n");
    let profiles = file("profiles", format!("[default]\n{}[right]\n{}", keys("x", "x"), keys(&access, &secret)));
    let mount = |number: usize, more: &[&str]| {
        let path = format!("/m{number}");
        let mut arguments = vec!["mount", "s3://bucket/p", &path, "--write-type", "cache_mode", "-c", &endpoint];
        arguments.extend(more);
        let mut command = cluster.command(&arguments);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_")) {
            command.env_remove(name);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let run = |mut command: Command, input: &str| {
        let mut child = command.spawn().unwrap();
        // One that reads nothing may have ended.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!printed.contains(&secret), "{printed}");
        (output.status.code(), printed)
    };
    let pair = [("AWS_ACCESS_KEY_ID", access.as_str()), ("AWS_SECRET_ACCESS_KEY", secret.as_str())];
    let input = format!("export AWS_ACCESS_KEY_ID={access}\nexport AWS_SECRET_ACCESS_KEY='{secret}'\n");
    let mut with_environment = mount(2, &["--credentials-env"]);
    with_environment.envs(pair);
    let mut with_shared = mount(4, &["--credentials-profile", "right"]);
    with_shared.env("AWS_SHARED_CREDENTIALS_FILE", &profiles);
    for (command, input) in [
        (mount(0, &["--credentials-file", &plain]), ""),
        (mount(1, &["--credentials-file", "-"]), input.as_str()),
        (with_environment, ""),
        (mount(3, &["--credentials-file", &profiles, "--credentials-profile", "right"]), ""),
        (with_shared, ""),
    ] {
        let done = run(command, input);
        assert_eq!(done.0, Some(0), "{}", done.1);
    }
    for (command, says) in [
        (mount(9, &["--credentials-env"]), "AWS_ACCESS_KEY_ID"),
        (mount(9, &["--credentials-file", &wrong]), "line 2"),
        (mount(9, &["--credentials-file", &profiles]), "access denied"),
        (mount(9, &["--credentials-file", &profiles, "--credentials-profile", "none"]), "[none]"),
        (mount(9, &["--credentials-file", &plain, "-c", "s3.credentials.access=x"]), "given twice"),
        (mount(9, &["--credentials-file", &plain, "--credentials-env"]), "cannot be used with"),
    ] {
        let refused = run(command, "");
        assert!(refused.0 != Some(0) && refused.1.contains(says), "{says}: {}", refused.1);
    }
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    let open = run(mount(5, &["--credentials-file", &plain]), "");
    assert!(open.0 == Some(0) && open.1.contains("chmod 600"), "{}", open.1);
    let mounts = cluster.cv(&["mount", "--json"]).json();
    assert_eq!(mounts.as_array().unwrap().len(), 6);
    let help = cluster.cv(&["mount", "--help"]).stdout;
    for option in ["s3.credentials.session_token", "s3.credentials.profile", "s3.anonymous", "--credentials-file"] {
        assert!(help.contains(option), "{option}");
    }
}

/// The files of a master that hold keys, and what is in them.
fn keys(cluster: &Cluster, master: usize) -> Vec<(String, Vec<u8>)> {
    let directory = cluster.directory().join(format!("master{master}"));
    let names = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = names.filter(|name| name.starts_with("secret.key"));
    names.map(|name| (name.clone(), fs::read(directory.join(name)).unwrap())).collect()
}

#[test]
fn a_new_key_is_in_use_everywhere_or_nowhere_whoever_dies_meanwhile() {
    let conf = "[client]\nread_timeout = \"60s\"\nmetadata_timeout = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { masters: 3, conf, failpoints: true, ..Options::default() });
    cluster.seed("bucket", "d/", 5, 1000);
    cluster.mount("s3://bucket/d", "/d", &[]);
    // A client has entries of its own when its session goes on with the next leader.
    cluster.stop("fuse0");
    cluster.masters_agree();
    let mut before = keys(&cluster, 0);
    // Before the log has the command; while the masters take it in; and when all of them have, but for the answer.
    for point in [Failpoint::LogAppend, Failpoint::CommandApplying, Failpoint::EntryAnswered] {
        cluster.arm(point, 1);
        let rotated = cluster.try_cv(&["secrets", "rotate"]);
        assert!(cluster.has_died_at(point), "{point:?}: {rotated:?}");
        let died = eventually("the end of a master is known", PATIENCE, || {
            cluster.status().masters.iter().position(|master| master.state == "crashed")
        });
        if rotated.code != 0 {
            // The next leader was asked, and one was missing there.
            assert!(point != Failpoint::EntryAnswered && rotated.stderr.contains("cv raft remove"), "{rotated:?}");
        }
        cluster.start(&format!("master{died}"));
        cluster.masters_agree();
        if rotated.code != 0 {
            cluster.cv(&["secrets", "rotate"]);
        }
        let new = eventually("all have forgotten the old key", PATIENCE, || {
            let all = [0, 1, 2].map(|master| keys(&cluster, master));
            (all[0].len() == 1 && all[0] != before && all.iter().all(|keys| *keys == all[0])).then(|| all[0].clone())
        });
        before = new;
        // Each can lead and open the credentials, also after a restart.
        for master in 0..3 {
            let name = format!("master{master}");
            cluster.stop(&name);
            cluster.start(&name);
            cluster.masters_agree();
            if cluster.leader() != master {
                let id = || Some(cluster.groups()[master].as_ref()?.node_id.to_string());
                let id = eventually("the master answers", PATIENCE, id);
                cluster.cv(&["raft", "transfer", &id]);
            }
            cluster.masters_agree();
            assert!(cluster.cv(&["refresh", "/d"]).stdout.contains("/d:"), "{point:?}");
        }
    }
    // One that is away is named.
    let away = (cluster.leader() + 1) % 3;
    cluster.stop(&format!("master{away}"));
    let refused = cluster.try_cv(&["secrets", "rotate"]);
    assert!(refused.code == 1 && refused.stderr.contains("has not got the new key"), "{refused:?}");
    cluster.start(&format!("master{away}"));
}

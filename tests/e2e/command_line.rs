//! What a person gets to see when something is wrong: one clear sentence, the right exit code, and nothing changed.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const UNREACHABLE: i32 = 3;
const NOT_FOUND: i32 = 4;
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `cv` and checks the exit code and that stderr has every fragment.
#[track_caller]
fn refused(cluster: &Cluster, arguments: &[&str], code: i32, fragments: &[&str]) {
    let finished = cluster.try_cv(arguments);
    let command = arguments.join(" ");
    assert_eq!(finished.code, code, "cv {command}: {finished:?}");
    assert!(!finished.stderr.contains("panicked"), "cv {command}: {}", finished.stderr);
    for fragment in fragments {
        assert!(finished.stderr.contains(fragment), "cv {command} does not say {fragment:?}: {}", finished.stderr);
    }
}

#[test]
fn commands_that_make_no_sense_are_refused_with_the_reason() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 2, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let place = cluster.directory().to_str().unwrap();

    refused(&cluster, &["frobnicate"], USAGE, &["frobnicate"]);
    refused(&cluster, &["fs", "lss", "/"], USAGE, &["ls"]);
    refused(&cluster, &["mount", "s3://bucket"], USAGE, &["<PATH>"]);
    refused(&cluster, &["mount", "s3://bucket", "/x"], USAGE, &["--write-type cache-mode", "--write-type fs-mode"]);
    let mount = |more: &[&'static str]| {
        let mut arguments = vec!["mount", "s3://bucket", "/x", "--write-type", "cache_mode"];
        arguments.extend(more);
        arguments
    };
    refused(&cluster, &mount(&["-c", "no-equal-sign"]), USAGE, &["key=value"]);
    refused(&cluster, &mount(&["-c", "s3.region_name=a", "-c", "s3.region_name=b"]), USAGE, &["given twice"]);
    refused(&cluster, &mount(&["-c", "s3.endpoint_ulr=http://h"]), USAGE, &["s3.endpoint_ulr", "s3.endpoint_url"]);
    refused(&cluster, &mount(&["--block-size", "64"]), USAGE, &["64MiB"]);
    refused(&cluster, &mount(&["--block-size", "100KiB"]), USAGE, &["block"]);
    refused(&cluster, &mount(&["--metadata-ttl", "60 s"]), USAGE, &["60 s"]);
    refused(&cluster, &mount(&["--consistency", "sometimes"]), USAGE, &["always", "never"]);
    refused(&cluster, &mount(&["--replicas", "0"]), USAGE, &["--replicas"]);
    refused(&cluster, &mount(&["--replicas", "5"]), USAGE, &["1..=4"]);

    refused(&cluster, &["fs", "stat", "relative"], USAGE, &["relative"]);
    refused(&cluster, &["fs", "stat", "/data/../data"], USAGE, &[".."]);
    refused(&cluster, &["fs", "stat", "/data/none"], NOT_FOUND, &["/data/none"]);
    refused(&cluster, &["fs", "cat", "/data"], USAGE, &["is a directory"]);
    refused(&cluster, &["fs", "cat", "/data/none"], NOT_FOUND, &["/data/none"]);
    refused(&cluster, &["fs", "get", "/"], USAGE, &["TARGET"]);
    refused(&cluster, &["load", "/none"], NOT_FOUND, &["/none"]);
    refused(&cluster, &["load"], USAGE, &["PATH"]);
    refused(&cluster, &["export", "/none"], NOT_FOUND, &["/none"]);
    refused(&cluster, &["export", "/data"], FAILED, &["/data", "cache-mode"]);
    refused(&cluster, &["export", "/"], FAILED, &["no fs-mode mount"]);
    for command in ["status", "wait", "cancel", "retry"] {
        refused(&cluster, &["job", command, "99"], NOT_FOUND, &["99", "cv job list"]);
    }
    refused(&cluster, &["view", "create", "/data"], USAGE, &["NAME"]);
    refused(&cluster, &["view", "create", "/data", "v", "--at", "noon"], USAGE, &["now"]);
    refused(&cluster, &["view", "create", "/none", "v"], NOT_FOUND, &["/none"]);
    refused(&cluster, &["view", "create", "/data", "a@b"], USAGE, &["a@b"]);
    for command in ["describe", "delete"] {
        refused(&cluster, &["view", command, "none"], NOT_FOUND, &["none", "cv view list"]);
    }
    refused(&cluster, &["view", "import", "/nonexistent.view", "v"], FAILED, &["/nonexistent.view"]);
    refused(&cluster, &["view", "mount", "v", "--mount-point", place], FAILED, &["--mount-point"]);
    refused(&cluster, &["view", "mount", "a/b", "/mnt"], USAGE, &["a/b"]);
    refused(&cluster, &["view", "umount", "/nonexistent/view"], FAILED, &["no view is mounted"]);
    refused(&cluster, &["refresh", "/none"], NOT_FOUND, &["none is not there"]);
    refused(&cluster, &["umount", "/none"], NOT_FOUND, &["/none"]);
    refused(&cluster, &["gen-images", "/tmp/never", "--mean-size", "10B"], USAGE, &["--mean-size"]);
    refused(&cluster, &["local", "status", "--dir", "/nonexistent/dir"], NOT_FOUND, &["cv local up"]);
    refused(&cluster, &["local", "stop", "wroker", "--dir", place], USAGE, &["wroker"]);
    refused(&cluster, &["local", "stop", "worker3", "--dir", place], NOT_FOUND, &["worker3", "worker0"]);
    refused(&cluster, &["local", "seed", "/nonexistent", "s3://bucket", "--dir", place], FAILED, &["/nonexistent"]);
    refused(&cluster, &["local", "seed", "/tmp", "bucket", "--dir", place], USAGE, &["s3://"]);
    refused(&cluster, &["report", "--master", "127.0.0.1:1"], UNREACHABLE, &["127.0.0.1:1", "--master"]);
    // A port that speaks something else.
    refused(&cluster, &["report", "--master", &cluster.at_start.masters[0].http], UNREACHABLE, &["master"]);

    refused(&cluster, &["report", "--master", "localhost"], USAGE, &["localhost", "has no port: write HOST:PORT"]);
    // What is a file is named, wherever the change is refused.
    for command in [&["fs", "mkdir", "/data/0000/000000.bin/x"][..], &["fs", "rm", "/data/0000/000000.bin/x"]] {
        refused(&cluster, command, FAILED, &["/data/0000/000000.bin is not a directory"]);
    }
    for command in [&["quota", "set", "/data", "--bytes", "1GiB"][..], &["quota", "get", "/data"]] {
        let command = [&["fs"], command].concat();
        refused(&cluster, &command, FAILED, &["quotas exist in fs-mode mounts only", "/data"]);
    }
    refused(&cluster, &["fs", "ttl", "set", "/data", "1d", "--action", "free"], FAILED, &["fs-mode mounts only"]);

    cluster.assert_tree("data", "", &tree);
    let mounts = cluster.cv(&["mount", "--json"]).json();
    assert_eq!(mounts.as_array().map(Vec::len), Some(1), "{mounts}");
}

#[test]
fn a_path_of_this_host_is_told_from_one_of_the_namespace() {
    let cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "", 1, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let there = cluster.path("data/0000").to_str().unwrap().to_owned();
    let says = "is a path of this host: in the namespace it is /data/0000";
    for command in ["ls", "stat", "cat", "blocks", "du"] {
        refused(&cluster, &["fs", command, &there], NOT_FOUND, &[&there, says]);
    }
    for command in ["load", "refresh", "umount"] {
        refused(&cluster, &[command, &there], NOT_FOUND, &[&there, says]);
    }
    let mount_point = cluster.mount_point().to_str().unwrap();
    refused(&cluster, &["fs", "ls", mount_point], NOT_FOUND, &["in the namespace it is /"]);
    refused(&cluster, &["fs", "ls", "/proc/self"], NOT_FOUND, &["/proc/self is a path of this host", "cv fs ls /"]);
    let conf = cluster.at_start.conf.to_str().unwrap();
    let other = cluster.try_cv(&["fs", "ls", "/none", "--conf", conf]);
    assert!(other.code == NOT_FOUND && !other.stderr.contains("of this host"), "{other:?}");
}

#[test]
fn what_has_two_spellings_is_taken_in_both_and_what_is_good_is_named() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    let place = cluster.directory().to_str().unwrap();
    for (mode, path) in [("fs-mode", "/a"), ("fs_mode", "/b"), ("cache-mode", "/c"), ("cache_mode", "/d")] {
        let uri = format!("s3://bucket{path}");
        let options = cluster.bucket_options();
        let mut command = vec!["mount", &uri, path, "--write-type", mode, "--ttl", "2h", "--dir", place];
        command.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        cluster.cv(&command);
    }
    cluster.mount("s3://bucket/e", "/e", &["--access-mode", "read-write", "--ttl", "7200000ms"]);
    cluster.mount("s3://bucket/f", "/f", &["--access-mode", "read_write"]);
    let mounts = cluster.cv(&["mount", "--json", "--local", place]).json();
    let shown = |field: &str| -> Vec<String> {
        mounts.as_array().unwrap().iter().map(|mount| mount[field].to_string().replace('"', "")).collect()
    };
    assert_eq!(shown("write_type"), ["fs_mode", "fs_mode", "cache_mode", "cache_mode", "cache_mode", "cache_mode"]);
    assert_eq!(shown("access_mode")[2..], ["read_only", "read_only", "read_write", "read_write"]);
    assert_eq!(shown("ttl_ms"), ["7200000", "7200000", "7200000", "7200000", "7200000", "0"]);
    cluster.cv(&["local", "status", "--local", place]);

    let conf = cluster.at_start.conf.to_str().unwrap();
    let checked = cluster.cv(&["conf", "check", "--conf", conf]).stdout;
    assert!(checked.contains(conf) && checked.contains("is good"), "{checked}");
    let checked = cluster.command(&["conf", "check"]).env("CV_LOG__LEVEL", "debug").output().unwrap();
    let checked = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.contains(conf) && checked.contains("CV_LOG__LEVEL"), "{checked}");

    // Whose credentials count is said where this shell has some, and where the mount has none.
    cluster.s3.put("bucket", "x/object", "object");
    let options = cluster.bucket_options();
    let mount = |options: &[String]| {
        let mut arguments = vec!["mount", "s3://bucket/x", "/x", "--write-type", "fs-mode", "--check"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        let tried = cluster.command(&arguments).env("AWS_ACCESS_KEY_ID", "of-this-shell").output().unwrap();
        String::from_utf8(tried.stderr).unwrap()
    };
    let printed = mount(&options[..2]);
    assert!(printed.contains("AWS_ACCESS_KEY_ID") && printed.contains("the master and the workers"), "{printed}");
    assert!(!printed.contains("of-this-shell"), "{printed}");
    assert_eq!(mount(&options), "");
}

#[test]
fn one_failing_mount_leaves_the_table_as_it_is_and_its_keys_are_nowhere() {
    let cluster = Cluster::up(Options::default());
    cluster.seed("bucket", "", 1, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let table = || -> Vec<String> {
        let lines = cluster.cv(&["mount"]).stdout.lines().map(str::to_owned).collect::<Vec<_>>();
        assert!(lines[0].starts_with("PATH") && lines[1].starts_with("/data"), "{lines:?}");
        lines
    };
    eventually("the bucket has been indexed", PATIENCE, || {
        let before = table();
        (before.len() == 2 && before[1].contains(" ok ")).then_some(())
    });
    cluster.stop("s3");
    cluster.try_cv(&["refresh", "/data"]);
    let error = cluster.cv(&["mount", "--json"]).json()[0]["status"]["last_error"].as_str().unwrap().to_owned();
    assert!(error.contains("127.0.0.1"), "{error}");
    let after = table();
    assert!(after[1].contains(" failing ") && !after[1].contains(&error), "{after:?}");
    assert_eq!(after[2..].join("\n"), format!("/data: {error}"));
    let report = cluster.cv(&["report"]).stdout;
    assert!(report.lines().any(|line| line == format!("/data: {error}")), "{report}");
    for command in [&["mount"][..], &["mount", "--json"], &["report"], &["report", "--json"]] {
        let said = cluster.cv(command).stdout;
        assert!(said.contains(&cluster.s3.endpoint), "{command:?}: {said}");
        let keys = [&cluster.s3.access_key, &cluster.s3.secret_key];
        assert!(!keys.iter().any(|key| said.contains(key.as_str())), "{command:?}: {said}");
    }
}

#[test]
fn a_mount_is_verified_before_it_is_recorded() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    let good = cluster.bucket_options();
    let mount = |uri: &str, path: &str, options: &[String], code: i32, fragments: &[&str]| {
        let mut arguments = vec!["mount", uri, path, "--write-type", "cache_mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        refused(&cluster, &arguments, code, fragments);
    };
    let with = |index: usize, option: &str| {
        let mut options = good.clone();
        options[index] = option.to_owned();
        options
    };
    mount("s3://missing", "/data", &good, FAILED, &["s3://missing", "no such bucket"]);
    mount("s3://bucket", "/data", &with(2, "s3.credentials.access=nobody"), FAILED, &["access denied"]);
    mount("s3://bucket", "/data", &with(3, "s3.credentials.secret=wrong"), FAILED, &["SignatureDoesNotMatch"]);
    mount("s3://bucket", "/data", &with(0, "s3.endpoint_url=http://127.0.0.1:1"), UNREACHABLE, &["127.0.0.1:1"]);
    mount("s3://bucket", "relative", &good, USAGE, &["relative"]);
    mount("gopher://bucket", "/data", &good, USAGE, &["gopher"]);
    assert_eq!(cluster.cv(&["mount", "--json"]).json(), serde_json::json!([]));

    let check = |options: &[String]| {
        let mut arguments = vec!["mount", "s3://bucket", "/data", "--write-type", "cache_mode", "--check"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        cluster.try_cv(&arguments).code
    };
    assert_eq!((check(&good), check(&with(3, "s3.credentials.secret=wrong"))), (0, FAILED));
    assert_eq!(cluster.cv(&["mount", "--json"]).json(), serde_json::json!([]), "--check records nothing");

    cluster.mount("s3://bucket", "/data", &[]);
    mount("s3://bucket/other", "/data", &good, FAILED, &["/data"]);
    let listed = cluster.cv(&["mount"]).stdout + &cluster.cv(&["mount", "--json"]).stdout;
    assert!(listed.contains("s3://bucket") && !listed.contains(&cluster.s3.secret_key), "{listed}");
    cluster.cv(&["umount", "/data"]);
    assert_eq!(cluster.cv(&["mount", "--json"]).json(), serde_json::json!([]));
}

#[test]
fn a_process_that_cannot_start_says_what_is_in_its_way() {
    let cluster = Cluster::up(Options::default());
    let status = cluster.status();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::create_dir(directory.path().join("w")).unwrap();
    let start = |role: &str, conf: &str, code: i32, fragments: &[&str]| {
        let path = directory.path().join(format!("{role}.toml"));
        std::fs::write(&path, conf).unwrap();
        refused(&cluster, &[role, "--conf", path.to_str().unwrap()], code, fragments);
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let place = directory.path().display();
    let free = "127.0.0.1:0";

    let master = |listen: &str, data: &str| {
        format!("[master]\nlisten = \"{listen}\"\nhttp_listen = \"{free}\"\ndata_dir = \"{data}\"\n")
    };
    start("master", &master(&address, &format!("{place}/m")), FAILED, &[&address, "in use"]);
    start("master", &master(free, &file.display().to_string()), FAILED, &[&file.display().to_string()]);
    let running = status.masters[0].log.parent().unwrap().parent().unwrap().join("master0");
    start("master", &master(free, &running.display().to_string()), FAILED, &["master0"]);
    let worker = |listen: &str, dir: &str| {
        format!("[worker]\nlisten = \"{listen}\"\nhttp_listen = \"{free}\"\ndirs = [\"[SSD]{dir}\"]\n")
    };
    start("worker", &worker(&address, &format!("{place}/w")), FAILED, &[&address, "in use"]);
    start("worker", &worker(free, &file.display().to_string()), FAILED, &[&file.display().to_string()]);
    let fuse = |mount_point: &str| {
        let masters = &status.masters[0].grpc;
        format!(
            "[cluster]\nmasters = [\"{masters}\"]\n[fuse]\nhttp_listen = \"{free}\"\nmount_point = \"{mount_point}\"\n"
        )
    };
    start("fuse", &fuse(&file.display().to_string()), FAILED, &[&file.display().to_string()]);
    start("worker", "[worker]\nlisten = 5\n", USAGE, &["worker.toml", "listen"]);
    start("worker", "[wroker]\n", USAGE, &["wroker", "worker"]);
    start("master", "[master]\nheartbeat = \"10 seconds\"\n", USAGE, &["master.toml", "heartbeat"]);
    start("master", "[log]\nlevel = \"louder\"\n", USAGE, &["level"]);
    start("fuse", "[client]\nmemory_budget = \"64MIB\"\n", USAGE, &["MiB"]);
    start("fuse", "what is this", USAGE, &["fuse.toml"]);
    refused(&cluster, &["conf", "check", "--conf", "/nonexistent.toml"], USAGE, &["/nonexistent.toml"]);
    refused(&cluster, &["dev-s3", "--root", "/tmp/never", "--listen", &address], FAILED, &[&address]);
    refused(&cluster, &["dev-s3", "--root", file.to_str().unwrap(), "--listen", free], FAILED, &["file"]);
}

#[test]
fn garbage_on_every_port_disturbs_nobody() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 20, 30_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let status = cluster.status();
    let mut random = StdRng::seed_from_u64(1);
    let ports = [
        &status.masters[0].grpc,
        &status.masters[0].http,
        &status.workers[0].data,
        &status.workers[0].http,
        &status.fuse[0].http,
        &cluster.s3.endpoint,
    ];
    for address in ports {
        let address = address.trim_start_matches("http://");
        for length in [0, 1, 24, 4096, 300_000] {
            let mut garbage = vec![0; length];
            random.fill_bytes(&mut garbage);
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
            // The other side may well hang up in the middle.
            let _ = stream.write_all(&garbage);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read(&mut [0; 1024]);
        }
    }
    cluster.assert_tree("data", "", &tree);
    let after = cluster.status();
    let pids = |status: &cavern_tests::Status| {
        let children = status.masters.iter().chain(&status.workers).chain(&status.fuse).chain([&status.s3.child]);
        children.map(|child| child.pid).collect::<Vec<_>>()
    };
    assert_eq!(pids(&status), pids(&after), "a process has ended");
}

#[test]
fn two_clusters_live_side_by_side() {
    let one = Cluster::up(Options::default());
    let other = Cluster::up(Options::default());
    let tree = one.seed("bucket", "", 5, 1000);
    let other_tree = other.seed("bucket", "", 7, 2000);
    one.mount("s3://bucket", "/data", &[]);
    other.mount("s3://bucket", "/data", &[]);
    one.assert_tree("data", "", &tree);
    other.assert_tree("data", "", &other_tree);
    drop(one);
    other.assert_tree("data", "", &other_tree);
}

#[test]
fn names_give_a_terminal_no_commands_and_a_pipe_gets_them_as_they_are() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "data/\u{1b}[2Jcleared", "x");
    cluster.mount("s3://bucket", "/m", &[]);
    let list = ["fs", "ls", "/m/data"];
    assert!(cluster.cv(&list).stdout.contains("\u{1b}[2Jcleared"));
    let command = cluster.command(&list);
    let words: Vec<&str> =
        [command.get_program()].into_iter().chain(command.get_args()).flat_map(|it| it.to_str()).collect();
    for words in [words.clone(), [&words[..], &["-l"]].concat()] {
        let mut terminal = std::process::Command::new("script");
        terminal.args(["-qec", &words.join(" "), "/dev/null"]).env("CV_CONF", cluster.status().conf);
        let shown = terminal.stdin(std::process::Stdio::null()).output().unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout);
        assert!(shown.contains("\\u{1b}[2Jcleared") && !shown.contains('\u{1b}'), "{shown:?}");
    }
}

//! `cv fuse s3://…`: a bucket as a directory of one host, by one command or by mount(8), and while its processes die.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_tests::{Automount, COUNTED, Cluster, Finished, Options, cv_path, eventually, within};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, getpgid, getpgrp, kill_process};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(30);
/// What is promised of a bucket that cannot be had: the process has two seconds of these for itself.
const REFUSED_WITHIN: Duration = Duration::from_secs(10);
const FIRST_BYTE_WITHIN: Duration = Duration::from_secs(5);
const SEEDED: usize = 20;

/// The store of a cluster that is otherwise left alone.
fn store() -> (Cluster, BTreeMap<String, Bytes>) {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "train/", SEEDED, 50_000);
    (cluster, seeded)
}

/// A mount of its own; all of it is gone with this.
struct Mounted<'c> {
    cluster: &'c Cluster,
    mount_point: PathBuf,
    cache: PathBuf,
}

impl<'c> Mounted<'c> {
    fn new(cluster: &'c Cluster, name: &str) -> Self {
        let top = cluster.directory().with_file_name(name);
        Self { cluster, mount_point: top.join("mnt"), cache: top.join("cache") }
    }

    /// `cv` with what programs for AWS find in their environment.
    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("CV_")) {
            command.env_remove(key);
        }
        let s3 = &self.cluster.s3;
        command.env("AWS_ACCESS_KEY_ID", &s3.access_key).env("AWS_SECRET_ACCESS_KEY", &s3.secret_key);
        command.env("AWS_ENDPOINT_URL", &s3.endpoint).env("AWS_REGION", "us-east-1");
        command.env("CV_CLIENT__HEDGE_PERCENT", "0").env("CV_MASTER__PERSIST_DELAY", "100ms");
        command.env("HOME", self.cache.parent().unwrap());
        command.args(arguments).stdin(Stdio::null());
        command
    }

    fn fuse(&self, uri: &str, more: &[&str]) -> Command {
        let cache = format!("{}:1GiB", self.cache.display());
        let arguments = ["fuse", uri, self.mount_point.to_str().unwrap(), "--cache", &cache];
        self.command(&cv_path(), &[&arguments[..], more].concat())
    }

    fn try_start(&self, uri: &str, more: &[&str]) -> Finished {
        finish(self.fuse(uri, more))
    }

    #[track_caller]
    fn start(&self, uri: &str, more: &[&str]) {
        let finished = self.try_start(uri, more);
        assert_eq!(finished.code, 0, "{finished:?}\n{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.cache.join("cv.log")).unwrap_or_default()
    }

    fn path(&self, below: &str) -> PathBuf {
        self.mount_point.join(below)
    }

    /// The processes of the mount, with what each is.
    fn processes(&self) -> Vec<(&'static str, i32)> {
        let roles = [("daemon", "--daemon"), ("supervisor", "--beside"), ("backend", "--backend")];
        let role = |line: &str| roles.iter().find(|(_, mark)| line.contains(mark)).map_or("other", |(role, _)| *role);
        let mut processes: Vec<_> = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
                line.contains(self.cache.to_str()?).then(|| (role(&line), pid))
            })
            .collect();
        processes.sort_unstable();
        processes
    }

    fn process(&self, wanted: &str) -> Option<i32> {
        self.processes().into_iter().find(|(role, _)| *role == wanted).map(|(_, pid)| pid)
    }

    /// The process groups of these.
    fn groups(&self) -> Vec<i32> {
        let group = |(_, pid)| getpgid(Pid::from_raw(pid)).unwrap().as_raw_nonzero().get();
        self.processes().into_iter().map(group).collect()
    }

    fn is_mounted(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_here = |line: &str| line.split(' ').nth(4) == self.mount_point.to_str();
        table.lines().any(|line| is_here(line) && line.contains(" - fuse.cv "))
    }

    fn reads(&self, seeded: &BTreeMap<String, Bytes>) -> bool {
        let at = self.mount_point.clone();
        let seeded = seeded.clone();
        within("reads of the mount", PATIENCE, move || {
            let mut files = seeded.iter();
            files.all(|(key, content)| {
                let below = key.strip_prefix("train/").unwrap();
                fs::read(at.join(below)).is_ok_and(|read| read == *content)
            })
        })
    }

    /// `umount`, and all of it is over.
    #[track_caller]
    fn umount(&self) {
        self.unmount();
        self.expect_end();
    }

    /// `umount` by itself.
    #[track_caller]
    fn unmount(&self) {
        // The kernel closes the last files a moment after their readers.
        eventually("it is unmounted", PATIENCE, || unmount(&self.mount_point, UnmountFlags::NOFOLLOW).ok());
    }

    #[track_caller]
    fn expect_end(&self) {
        eventually("every process ends", PATIENCE, || self.processes().is_empty().then_some(()));
        assert!(!self.is_mounted());
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // Whatever the test has come to; each starts others again.
        let _ = unmount(&self.mount_point, UnmountFlags::DETACH);
        for _ in 0..100 {
            let processes = self.processes();
            if processes.is_empty() {
                break;
            }
            for (_, pid) in processes {
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
            let _ = unmount(&self.mount_point, UnmountFlags::DETACH);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn finish(mut command: Command) -> Finished {
    let output = within("a command ends", PATIENCE * 2, move || command.output().unwrap());
    Finished {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn a_bucket_is_a_directory_by_one_command_to_be_read_and_umount_ends_all_of_it() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "one");
    let (key, content) = seeded.first_key_value().unwrap();
    let began = Instant::now();
    let started = mounted.try_start("s3://bucket/train", &[]);
    let mut first = [0];
    File::open(mounted.path(&key["train/".len()..])).unwrap().read_exact(&mut first).unwrap();
    let taken = began.elapsed();
    assert!(taken < FIRST_BYTE_WITHIN && first[0] == content[0], "{taken:?}");
    assert!(
        started.code == 0 && started.stdout.contains("read-only") && started.stdout.contains("umount"),
        "{started:?}"
    );
    assert!(mounted.reads(&seeded));

    // To be read, by whoever has mounted it, under the name of the bucket.
    let refused = fs::write(mounted.path("new"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(mounted.mount_point.to_str().unwrap())).unwrap();
    assert!(line.contains(" fuse.cv s3://bucket/train ") && !line.contains("allow_other"), "{line}");

    // Nobody else sees, or reaches, what it is made of.
    assert_eq!(mounted.cache.metadata().unwrap().mode() & 0o777, 0o700);
    let roles: Vec<&str> = mounted.processes().into_iter().map(|(role, _)| role).collect();
    assert_eq!(roles, ["backend", "daemon", "supervisor"]);
    let conf = fs::read_to_string(mounted.cache.join("cluster.toml")).unwrap();
    let master = conf.lines().find_map(|line| line.strip_prefix("masters = [\"")).unwrap().trim_end_matches("\"]");
    assert!(master.starts_with("127.0.0.1:"), "{master}");
    let plain = Cluster::alone(&["mount", "--master", master], &[]);
    assert_ne!(plain.code, 0, "{plain:?}");
    let conf = mounted.cache.join("cluster.toml");
    let listed = finish(mounted.command(&cv_path(), &["mount", "--json", "--conf", conf.to_str().unwrap()]));
    assert!(listed.json()[0]["uri"] == "s3://bucket/train" && !listed.stdout.contains(&cluster.s3.secret_key));

    // The same cache has one mount at a time, whose end nobody waits for.
    let (cache, by) = (mounted.cache.display(), format!("in use by the mount at {}", mounted.mount_point.display()));
    for place in [&mounted.mount_point, &mounted.mount_point.with_file_name("elsewhere")] {
        let cache = format!("{cache}:1GiB");
        let arguments = ["fuse", "s3://bucket/train", place.to_str().unwrap(), "--cache", &cache];
        let refused = finish(mounted.command(&cv_path(), &arguments));
        assert!(refused.code == 1 && refused.stderr.contains(&by), "{refused:?}");
        assert!(!refused.stderr.contains("waiting"), "{refused:?}");
    }
    mounted.umount();
}

#[test]
fn a_mount_that_is_made_again_waits_for_the_end_of_the_one_before() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "again");
    mounted.start("s3://bucket/train", &[]);
    let backend = mounted.process("backend").unwrap();
    let signal = |signal| kill_process(Pid::from_raw(backend).unwrap(), signal).unwrap();
    // It cannot end yet.
    signal(Signal::STOP);
    mounted.unmount();
    let mut again = mounted.fuse("s3://bucket/train", &[]).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(again.stderr.take().unwrap());
    lines.read_line(&mut said).unwrap();
    signal(Signal::CONT);
    let by = format!("by the mount at {} (process ", mounted.mount_point.display());
    let says = |part: &str| said.contains(part);
    assert!(says(&by) && says(&backend.to_string()) && says("waiting for its end"), "{said}");
    let status = within("it is mounted", PATIENCE, move || again.wait().unwrap());
    assert!(status.success(), "{}", mounted.log());
    assert!(mounted.reads(&seeded));
    mounted.umount();
}

#[test]
fn who_mounts_by_hand_where_an_automounter_waits_does_not_ask_it() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "by-hand");
    fs::create_dir_all(&mounted.mount_point).unwrap();
    let Some(automount) = Automount::at(&mounted.mount_point) else { return };
    mounted.start("s3://bucket/train", &[]);
    // What signals the caller's group, or the automounter's, does not end it.
    let (groups, own) = (mounted.groups(), getpgrp().as_raw_nonzero().get());
    assert!(groups.len() == 3 && !groups.contains(&own) && !groups.contains(&automount.group()), "{groups:?}");
    assert!(mounted.reads(&seeded));
    mounted.umount();
    assert!(!automount.is_asked());
}

#[test]
fn who_mounts_for_an_automounter_is_let_pass_while_others_wait() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "automounted");
    fs::create_dir_all(&mounted.mount_point).unwrap();
    let Some(automount) = Automount::at(&mounted.mount_point) else { return };
    let mut visitor = Command::new("ls");
    visitor.arg(&mounted.mount_point).stdout(Stdio::null()).stderr(Stdio::null());
    let visitor = Foreground(visitor.spawn().unwrap());
    eventually("the automounter is asked", PATIENCE, || automount.is_asked().then_some(()));
    // As the automounter starts it.
    let mut command = mounted.fuse("s3://bucket/train", &[]);
    command.process_group(automount.group());
    let started = finish(command);
    assert_eq!(started.code, 0, "{started:?}\n{}", mounted.log());
    assert_eq!(mounted.groups(), [automount.group(); 3]);
    // Nobody tells the kernel that it is mounted. Once nobody waits for that, others are let pass as well.
    drop(visitor);
    assert!(mounted.reads(&seeded));
    mounted.umount();
}

#[test]
fn a_second_start_with_the_same_cache_asks_the_bucket_for_nothing_that_was_read() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "warm");
    mounted.start("s3://bucket/train", &[]);
    assert!(mounted.reads(&seeded));
    mounted.umount();
    for more in [&[][..], &["-o", "rw"]] {
        cluster.s3.reset_stats();
        mounted.start("s3://bucket/train", more);
        assert!(mounted.reads(&seeded));
        assert_eq!((cluster.s3.requests("GET"), cluster.s3.requests("HEAD")), (0, 0), "{more:?}");
        // At the addresses of before, so that the master has the worker at once.
        assert!(!mounted.log().contains("is not taken in"), "{}", mounted.log());
        mounted.umount();
    }
}

#[test]
fn a_mount_is_written_where_that_is_asked_for_and_the_bucket_has_it_in_the_end() {
    let (cluster, _) = store();
    let mounted = Mounted::new(&cluster, "written");
    mounted.start("s3://bucket/train", &["-o", "rw"]);
    fs::write(mounted.path("new"), "cache-mode").unwrap();
    assert_eq!(cluster.s3.get("bucket", "train/new"), "cache-mode");
    mounted.umount();
    // Another bucket in the same cache, and another mode.
    mounted.start("s3://bucket/work", &["--write-type", "fs-mode"]);
    fs::create_dir(mounted.path("folder")).unwrap();
    fs::write(mounted.path("folder/file"), "fs-mode").unwrap();
    mounted.umount();
    assert_eq!(cluster.s3.get("bucket", "work/folder/file"), "fs-mode");
    mounted.start("s3://bucket/work", &["--write-type", "fs-mode"]);
    assert_eq!(fs::read_to_string(mounted.path("folder/file")).unwrap(), "fs-mode");
    mounted.umount();
}

#[test]
fn a_mount_that_is_made_again_waits_for_what_its_bucket_lacks() {
    let (cluster, _) = store();
    let mounted = Mounted::new(&cluster, "lacking");
    let ending = mounted.cache.join("ending");
    mounted.start("s3://bucket/work", &["--write-type", "fs-mode"]);
    cluster.s3.add_fault(&json!({"kind": "503", "operations": ["PUT"]}));
    fs::write(mounted.path("file"), "late").unwrap();
    assert!(!ending.exists());
    mounted.unmount();
    // Whoever comes now does not give up after ten seconds.
    eventually("its end has begun", PATIENCE, || ending.exists().then_some(()));
    let again = mounted.fuse("s3://bucket/work", &["--write-type", "fs-mode"]).stderr(Stdio::piped()).spawn();
    let mut again = Foreground(again.unwrap());
    let mut lines = BufReader::new(again.0.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("waiting for its end")));
    cluster.s3.clear_faults();
    let status = eventually("it is mounted", PATIENCE * 2, || again.0.try_wait().unwrap());
    assert!(status.success(), "{}", mounted.log());
    assert_eq!(cluster.s3.get("bucket", "work/file"), "late");
    assert_eq!(fs::read_to_string(mounted.path("file")).unwrap(), "late");
    assert!(!ending.exists());
    mounted.umount();
}

#[test]
fn several_mounts_of_a_host_do_not_know_each_other() {
    let (cluster, seeded) = store();
    let (one, other) = (Mounted::new(&cluster, "one"), Mounted::new(&cluster, "other"));
    let started = [&one, &other].map(|mounted| mounted.fuse("s3://bucket/train", &[]).spawn().unwrap());
    for mut started in started {
        assert!(within("it is mounted", PATIENCE, move || started.wait().unwrap()).success());
    }
    assert!(one.reads(&seeded) && other.reads(&seeded));
    one.umount();
    assert!(other.reads(&seeded));
    other.umount();
}

#[test]
fn each_process_may_be_killed_and_the_mount_is_back() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "killed");
    mounted.start("s3://bucket/train", &[]);
    assert!(mounted.reads(&seeded));
    // After a while each of the two that start each other again has been started by the other.
    for role in ["backend", "daemon", "supervisor", "backend", "supervisor", "supervisor", "backend"] {
        let killed = eventually(&format!("there is a {role}"), PATIENCE, || mounted.process(role));
        kill_process(Pid::from_raw(killed).unwrap(), Signal::KILL).unwrap();
        eventually(&format!("all is back after the {role}"), PATIENCE, || {
            let now = mounted.processes();
            let roles: Vec<&str> = now.iter().map(|(role, _)| *role).collect();
            let is_back = roles == ["backend", "daemon", "supervisor"] && now.iter().all(|(_, pid)| *pid != killed);
            (is_back && mounted.reads(&seeded)).then_some(())
        });
    }
    mounted.umount();
    mounted.start("s3://bucket/train", &[]);
    assert!(mounted.reads(&seeded));
    mounted.umount();
}

#[test]
fn a_bucket_that_cannot_be_had_is_told_in_time_and_nothing_is_started() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "refused");
    // It takes connections, and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", listener.local_addr().unwrap());
    for (uri, variable, value, code, part) in [
        ("s3://bucket/train", "AWS_ENDPOINT_URL", "http://127.0.0.1:1", 3, "--wait"),
        ("s3://bucket/train", "AWS_ENDPOINT_URL", silent.as_str(), 3, "s3://bucket"),
        ("s3://no-such-bucket", "AWS_REGION", "us-east-1", 4, "no such bucket"),
        ("s3://bucket/train", "AWS_SECRET_ACCESS_KEY", "mistaken", 1, "access denied"),
        // Nor does the instance say anything.
        ("s3://bucket/train", "AWS_ACCESS_KEY_ID", "", 3, "no usable credentials in the environment or shared files"),
        ("bucket/train", "AWS_REGION", "us-east-1", 2, "s3://BUCKET"),
    ] {
        let mut command = mounted.fuse(uri, &[]);
        command.env_remove("AWS_EC2_METADATA_DISABLED").env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &silent);
        command.env(variable, value);
        let began = Instant::now();
        let refused = finish(command);
        assert!(began.elapsed() < REFUSED_WITHIN, "{uri} {variable}: {:?}", began.elapsed());
        assert!(refused.code == code && refused.stderr.contains(part), "{uri} {variable}={value}: {refused:?}");
        assert!(!refused.stderr.contains("mistaken"), "{refused:?}");
        assert!(mounted.processes().is_empty() && !mounted.cache.exists());
    }

    // Who has patience waits.
    cluster.stop("s3");
    let mut waiting = mounted.fuse("s3://bucket/train", &["--wait"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 4];
    waiting.stderr.take().unwrap().read_exact(&mut said).unwrap();
    cluster.start("s3");
    let status = within("it is mounted", PATIENCE, move || waiting.wait().unwrap());
    assert!(status.success() && mounted.reads(&seeded), "{}", mounted.log());
    mounted.umount();
}

#[test]
fn doctor_looks_at_a_mount_and_at_a_bucket_as_cv_fuse_finds_them() {
    let (cluster, _) = store();
    let mounted = Mounted::new(&cluster, "looked-at");
    mounted.start("s3://bucket/train", &[]);
    let conf = mounted.cache.join("cluster.toml");
    let doctor = |arguments: &[&str]| mounted.command(&cv_path(), &[&["doctor", "--json"][..], arguments].concat());
    // Levels and sentences of a check.
    let told = |looked: &Finished, check: &str| -> Vec<(String, String)> {
        assert!(!looked.stdout.contains(&cluster.s3.secret_key), "{looked:?}");
        let report = looked.json();
        let of_check = report["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == check);
        of_check.map(|one| (one["level"].as_str().unwrap().to_owned(), one.to_string())).collect()
    };
    let looked = finish(doctor(&["--conf", conf.to_str().unwrap()]));
    for check in
        ["configuration", "port", "directory", "masters", "workers", "mount-point", "bucket-list", "bucket-get"]
    {
        let found = told(&looked, check);
        assert!(!found.is_empty() && found.iter().all(|(level, _)| level == "ok"), "{check}: {found:?}");
    }
    let own = |text: &str| text.contains(mounted.cache.to_str().unwrap());
    assert_eq!(told(&looked, "directory").iter().filter(|(_, text)| own(text)).count(), 2, "{looked:?}");

    // Where no cluster is configured, none is missed.
    let looked = finish(doctor(&[]));
    assert_eq!((told(&looked, "masters"), told(&looked, "directory")), (vec![], vec![]), "{looked:?}");
    assert!(told(&looked, "configuration").iter().any(|(level, text)| level == "note" && own(text)), "{looked:?}");
    let looked = finish(doctor(&["--bucket", "s3://bucket/train"]));
    assert_eq!(told(&looked, "bucket-get").len(), 1, "{looked:?}");
    assert_eq!(told(&looked, "bucket-get")[0].0, "ok", "{looked:?}");
    let mut mistaken = doctor(&["--bucket", "s3://bucket/train"]);
    mistaken.env("AWS_SECRET_ACCESS_KEY", "mistaken");
    let refused = finish(mistaken);
    assert!(refused.code == 2 && told(&refused, "bucket-list")[0].1.contains("denied"), "{refused:?}");
    mounted.umount();
}

#[test]
fn what_keeps_the_mount_from_being_made_is_told_with_its_cause() {
    let (cluster, _) = store();
    let mounted = Mounted::new(&cluster, "file");
    fs::create_dir_all(mounted.mount_point.parent().unwrap()).unwrap();
    fs::write(&mounted.mount_point, "a file").unwrap();
    let refused = mounted.try_start("s3://bucket/train", &[]);
    assert!(refused.code != 0 && refused.stderr.contains(mounted.mount_point.to_str().unwrap()), "{refused:?}");
    mounted.expect_end();
    // Somebody else has a mount there: it stays.
    fs::remove_file(&mounted.mount_point).unwrap();
    mounted.start("s3://bucket/train", &[]);
    let (mount_point, cache) = (mounted.mount_point.clone(), mounted.cache.with_file_name("other"));
    let other = Mounted { cluster: &cluster, mount_point, cache };
    let refused = other.try_start("s3://bucket/train", &[]);
    assert!(refused.code == 1 && refused.stderr.contains("another cv fuse serves"), "{refused:?}");
    eventually("every process of the other ends", PATIENCE, || other.processes().is_empty().then_some(()));
    assert!(mounted.is_mounted());
    mounted.umount();
}

/// Ends with its test.
struct Foreground(Child);

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn in_the_foreground_it_stays_and_signals_unmount() {
    let (cluster, seeded) = store();
    for signal in [Signal::TERM, Signal::INT] {
        let mounted = Mounted::new(&cluster, "foreground");
        let mut foreground = Foreground(mounted.fuse("s3://bucket/train", &["-f"]).spawn().unwrap());
        eventually("it is mounted", PATIENCE, || mounted.is_mounted().then_some(()));
        assert!(mounted.reads(&seeded));
        kill_process(Pid::from_child(&foreground.0), signal).unwrap();
        let status = eventually("it ends", PATIENCE, || foreground.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(0));
        mounted.expect_end();
    }
}

#[test]
fn a_host_becomes_the_first_of_a_cluster_with_all_that_it_has_cached() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "joins");
    mounted.start("s3://bucket/train", &[]);
    assert!(mounted.reads(&seeded));
    mounted.umount();

    // As docs/one-host.md has it, in a directory of the test.
    let top = mounted.cache.with_file_name("cluster");
    let path = |name: &str| top.join(name).to_str().unwrap().to_owned();
    fs::create_dir(&top).unwrap();
    for name in ["master", "worker"] {
        fs::rename(mounted.cache.join(name), top.join(name)).unwrap();
    }
    let cv = |arguments: &[&str]| {
        let mut command = mounted.command(&cv_path(), arguments);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_")) {
            command.env_remove(name);
        }
        for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"] {
            command.env_remove(name);
        }
        command
    };
    let run = |arguments: &[&str]| {
        let done = finish(cv(arguments));
        assert_eq!(done.code, 0, "{arguments:?}: {done:?}");
        done
    };
    let (authority, certificates, conf) = (path("authority"), path("certificates"), path("cluster.toml"));
    run(&["cert", "init", "--dir", &authority]);
    for (role, name) in [("admin", "host"), ("master", "host"), ("worker", "worker0"), ("client", "host")] {
        run(&["cert", "issue", role, name, "--dir", &authority, "--out", &certificates]);
    }
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [master, worker] = listeners.each_ref().map(|listener| listener.local_addr().unwrap().to_string());
    drop(listeners);
    let text = format!(
        "[cluster]\nmasters = [{master:?}]\n\
         [security]\nca = {:?}\ncertificate = {:?}\nkey = {:?}\n\
         [master]\nlisten = {master:?}\nhttp_listen = \"127.0.0.1:0\"\ndata_dir = {:?}\n\
         [worker]\nlisten = {worker:?}\nhttp_listen = \"127.0.0.1:0\"\ndirs = [{:?}]\n\
         [fuse]\nhttp_listen = \"127.0.0.1:0\"\nmount_point = {:?}\n\
         [ufs]\nendpoints = [\"127.0.0.1\"]\n",
        path("authority/ca.pem"),
        path("certificates/admin-host.pem"),
        path("certificates/admin-host-key.pem"),
        path("master"),
        format!("[SSD]{}", path("worker")),
        path("mnt"),
    );
    fs::write(&conf, text).unwrap();
    // Its processes have the directory in their command lines.
    let member = Mounted { cluster: &cluster, mount_point: top.join("mnt"), cache: top.clone() };
    let begin = |role: &str, certificate: &str| {
        let log = File::create(top.join(format!("{role}.log"))).unwrap();
        let mut command = cv(&[role, "--conf", &conf]);
        command.env("CV_SECURITY__CERTIFICATE", path(&format!("certificates/{certificate}.pem")));
        command.env("CV_SECURITY__KEY", path(&format!("certificates/{certificate}-key.pem")));
        Foreground(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    };
    let _servers = [("master", "master-host"), ("worker", "worker-worker0")].map(|(role, own)| begin(role, own));
    let nodes = eventually("the worker is live", PATIENCE, || {
        let listed = finish(cv(&["node", "list", "--json", "--conf", &conf]));
        let nodes = (listed.code == 0).then(|| listed.json())?;
        (nodes[0]["state"] == "live" && nodes[0]["data"] == worker.as_str()).then_some(nodes)
    });
    assert_eq!(nodes.as_array().unwrap().len(), 1, "{nodes}");
    let keys =
        format!("AWS_ACCESS_KEY_ID={}\nAWS_SECRET_ACCESS_KEY={}\n", cluster.s3.access_key, cluster.s3.secret_key);
    fs::write(path("keys"), keys).unwrap();
    run(&["mount", "update", "/bucket", "--credentials-file", &path("keys"), "--conf", &conf]);
    let _client = begin("fuse", "client-host");
    cluster.s3.reset_stats();
    eventually("the bucket is there", PATIENCE, || member.path("bucket").exists().then_some(()));
    for (key, content) in &seeded {
        let file = member.path("bucket").join(&key["train/".len()..]);
        assert!(fs::read(&file).unwrap() == *content, "{}", file.display());
    }
    assert_eq!(cluster.s3.requests("GET"), 0);
}

#[test]
fn mount_8_mounts_by_the_options_of_fstab() {
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "fstab");
    let helper = mounted.cache.with_file_name("mount.cavern");
    fs::create_dir_all(helper.parent().unwrap()).unwrap();
    symlink(cv_path(), &helper).unwrap();
    let mount_point = mounted.mount_point.to_str().unwrap();
    let mount = |options: &str, flags: &[&str]| {
        let options = format!("{options},cache={}:1GiB", mounted.cache.display());
        let arguments = [&["s3://bucket/train", mount_point][..], flags, &["-o", &options]].concat();
        finish(mounted.command(&helper, &arguments))
    };
    // As mount(8) calls it, for a line with `user,noauto,nofail,_netdev,x-systemd.automount,uid=1234`.
    let fstab = "rw,noexec,nosuid,nodev,user,noauto,nofail,_netdev,x-systemd.automount,uid=1234,allow_other";
    let fake = mount(fstab, &["-f"]);
    assert!(fake.code == 0 && !mounted.is_mounted(), "{fake:?}");
    let wrong = mount("rw,nofial", &[]);
    assert!(wrong.code == 2 && wrong.stderr.contains("nofial"), "{wrong:?}");

    let done = mount(fstab, &["-n", "-v"]);
    assert_eq!(done.code, 0, "{done:?}\n{}", mounted.log());
    assert!(mounted.reads(&seeded));
    let flags = statvfs(&mounted.mount_point).unwrap().f_flag;
    assert!(flags.contains(StatVfsMountFlags::RDONLY), "nobody has said that it is to be written");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(mount_point)).unwrap();
    assert!(line.contains("noexec") && line.contains("allow_other"), "{line}");
    assert_eq!(mounted.path(&seeded.keys().next().unwrap()["train/".len()..]).metadata().unwrap().uid(), 1234);
    mounted.umount();

    let done = mount("rw,write_type=cache-mode,umask=077", &[]);
    assert_eq!(done.code, 0, "{done:?}\n{}", mounted.log());
    fs::write(mounted.path("by-fstab"), "x").unwrap();
    assert_eq!(mounted.path("by-fstab").metadata().unwrap().mode() & 0o777, 0o600);
    mounted.umount();
}

#[test]
fn a_user_mounts_for_himself_through_fusermount3() {
    const USER: u32 = 65_534;
    let (cluster, seeded) = store();
    let mounted = Mounted::new(&cluster, "user");
    let top = mounted.cache.parent().unwrap();
    fs::create_dir_all(&mounted.mount_point).unwrap();
    for path in [top, &mounted.mount_point] {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    }
    // Whoever he is may run it.
    let program = top.join("cv");
    fs::copy(cv_path(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let cache = format!("{}:1GiB", mounted.cache.display());
    let as_user = |arguments: &[&str]| {
        let mut command = mounted.command(&program, arguments);
        command.uid(USER).gid(USER).current_dir("/");
        finish(command)
    };
    let mount_point = mounted.mount_point.to_str().unwrap();
    let started = as_user(&["fuse", "s3://bucket/train", mount_point, "--cache", &cache]);
    assert_eq!(started.code, 0, "{started:?}\n{}", mounted.log());
    let (key, content) = seeded.first_key_value().unwrap();
    let file = mounted.path(&key["train/".len()..]);
    // Not even root looks into it.
    assert!(File::open(&file).is_err());
    let mut reader = Command::new("cat");
    let read = reader.arg(&file).uid(USER).gid(USER).output().unwrap();
    assert!(read.status.success() && read.stdout == *content, "{read:?}");
    let mut helper = Command::new("fusermount3");
    let unmounted = helper.args(["-u", mount_point]).uid(USER).gid(USER).output().unwrap();
    assert!(unmounted.status.success(), "{unmounted:?}");
    mounted.expect_end();
}

//! What holds a mount, when it is ended, unmounted, given other executables, or asked for more than it has room for.

use std::fs::{self, File, Permissions};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, Options, Process, cv_path, eventually, number};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde_json::json;

use crate::client_restart::{content, daemon, kill_daemon, replace_by_death, up};

const PATIENCE: Duration = Duration::from_secs(30);

/// As soon as somebody serves the mount.
pub fn reload(cluster: &Cluster) -> Finished {
    eventually("the mount is served", PATIENCE, || {
        let reloaded = cluster.try_cv(&["fuse", "reload", "--mount-point", cluster.mount_point().to_str().unwrap()]);
        (!reloaded.stderr.contains("not served at the moment")).then_some(reloaded)
    })
}

/// `major:minor` of the mount.
pub fn device(cluster: &Cluster) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut mounts = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    mounts.find(|fields| Path::new(fields[4]) == cluster.mount_point()).map(|fields| fields[2].to_owned())
}

fn is_mounted(cluster: &Cluster) -> bool {
    device(cluster).is_some()
}

/// Another user, who has taken abstract names of sockets, as many as are free.
struct Squatter {
    process: Child,
    taken: usize,
}

impl Squatter {
    /// `full` has the queue of each socket full.
    fn of(names: impl IntoIterator<Item = String>, full: bool) -> Self {
        const SCRIPT: &str = r"
import socket, sys
kept, taken, full = [], 0, sys.argv[1] == 'true'
for name in sys.argv[2:]:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind('\0' + name)
    except OSError:
        continue
    listening.listen(1 if full else 100)
    kept.append(listening)
    taken += 1
    while full:
        waiting = socket.socket(socket.AF_UNIX)
        waiting.setblocking(False)
        kept.append(waiting)
        try:
            waiting.connect('\0' + name)
        except BlockingIOError:
            break
print(taken, flush=True)
sys.stdin.read()
";
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, &full.to_string()]).args(names).current_dir("/").uid(65_534).gid(65_534);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut said).unwrap();
        Self { process, taken: said.trim().parse().unwrap() }
    }
}

impl Drop for Squatter {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        // It has nothing to wait for any more.
        let _ = self.process.wait();
    }
}

fn is_gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

/// Puts an executable in the place of another, as an upgrade does.
pub fn install(at: &Path, content: &[u8]) {
    let new = at.with_extension("new");
    fs::write(&new, content).unwrap();
    fs::set_permissions(&new, Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, at).unwrap();
}

#[test]
fn an_executable_that_does_not_serve_or_is_gone_costs_no_mount() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("cv");
    fs::copy(cv_path(), &program).unwrap();
    let cluster = up(Options { program: Some(program.clone()), ..Options::default() });
    let seeded = cluster.seed("objects", "", 5, 20_000);
    cluster.mount("s3://objects", "/data", &[]);
    let mut open = File::open(cluster.path("data").join(seeded.keys().next().unwrap())).unwrap();

    install(&program, b"#!/bin/sh\nexit 1\n");
    let refused = reload(&cluster);
    assert!(refused.code == 1 && refused.stderr.contains("does not serve the mount"), "{refused:?}");
    replace_by_death(&cluster);
    // Nor does one that is no program at all, or is not there.
    install(&program, b"\0");
    let refused = reload(&cluster);
    assert!(refused.code == 1 && refused.stderr.contains("does not serve the mount"), "{refused:?}");
    fs::remove_file(&program).unwrap();
    replace_by_death(&cluster);
    replace_by_death(&cluster);
    cluster.assert_tree("data", "", &seeded);

    install(&program, &fs::read(cv_path()).unwrap());
    let (reloaded, served) = (reload(&cluster), daemon(&cluster).unwrap());
    assert_eq!(reloaded.code, 0, "{reloaded:?}");
    assert!(reloaded.stdout.contains(&format!("is served by process {served} now")), "{reloaded:?}");
    assert_eq!(fs::read_link(format!("/proc/{served}/exe")).unwrap(), program);
    // A symbolic link to the mount point is as good.
    let link = directory.path().join("mount");
    symlink(cluster.mount_point(), &link).unwrap();
    let reloaded = cluster.try_cv(&["fuse", "reload", "--mount-point", link.to_str().unwrap()]);
    assert_eq!(reloaded.code, 0, "{reloaded:?}");
    let mut read = Vec::new();
    open.read_to_end(&mut read).unwrap();
    assert!(read == *seeded.values().next().unwrap());
}

#[test]
fn what_many_programs_ask_for_while_daemons_die_is_done_once() {
    let cluster = up(Options { ..Options::default() });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let (is_over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for program in 0..24 {
            let (is_over, done, top) = (&is_over, &done, cluster.path("fs").join(format!("program{program}")));
            scope.spawn(move || {
                fs::create_dir(&top).unwrap();
                let mut round = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let (one, other) = (top.join(format!("one{round}")), top.join(format!("other{round}")));
                    let said = || format!("{} after {} rounds", one.display(), done.load(Ordering::Relaxed));
                    fs::create_dir(&one).unwrap_or_else(|error| panic!("mkdir {}: {error}", said()));
                    fs::rename(&one, &other).unwrap_or_else(|error| panic!("rename {}: {error}", said()));
                    File::create_new(&one).unwrap_or_else(|error| panic!("create {}: {error}", said()));
                    fs::remove_dir(&other).unwrap_or_else(|error| panic!("rmdir {}: {error}", said()));
                    fs::remove_file(&one).unwrap_or_else(|error| panic!("unlink {}: {error}", said()));
                    round += 1;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..10 {
            let before = done.load(Ordering::Relaxed);
            replace_by_death(&cluster);
            eventually("programs go on", PATIENCE, || (done.load(Ordering::Relaxed) > before + 100).then_some(()));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    eprintln!("{} rounds", done.into_inner());
}

#[test]
fn event_loops_that_were_added_are_kept_too() {
    let cluster = up(Options::default());
    let conf = fs::read_to_string(&cluster.at_start.conf).unwrap();
    let more = conf.replacen("\nthreads = 2\n", "\nthreads = 6\n", 1);
    assert_ne!(conf, more);
    fs::write(&cluster.at_start.conf, more).unwrap();
    let reloaded = reload(&cluster);
    assert_eq!(reloaded.code, 0, "{reloaded:?}");
    let devices = || {
        let fuse = &cluster.status().fuse[0];
        let of = |process: Process| process.descriptors().iter().filter(|path| **path == *"/dev/fuse").count();
        (of(Process::of(fuse)), of(Process::supervisor_of(fuse)))
    };
    assert_eq!(devices(), (6, 6));
    replace_by_death(&cluster);
    // The next one is there a moment before it has them.
    eventually("the next has all of them", PATIENCE, || (devices() == (6, 6)).then_some(()));
}

#[test]
fn whoever_unmounts_ends_supervisor_and_daemon() {
    let cluster = up(Options::default());
    let seeded = cluster.seed("objects", "", 3, 5000);
    let key = seeded.keys().next().unwrap();
    let mount_point = cluster.mount_point().to_str().unwrap().to_owned();
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).arg(&mount_point).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
    };
    let send = |pid: i32, signal| kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    let supervisor = || cluster.status().fuse[0].pid.unwrap();
    let ends: [(&str, &dyn Fn()); 6] = [
        ("fusermount3 -u", &|| run("fusermount3", &["-u"])),
        ("umount -l", &|| run("umount", &["-l"])),
        ("SIGTERM for the supervisor", &|| send(supervisor(), Signal::TERM)),
        ("SIGINT for the supervisor", &|| send(supervisor(), Signal::INT)),
        ("SIGTERM for the daemon", &|| send(daemon(&cluster).unwrap(), Signal::TERM)),
        ("umount while no daemon lives", &|| {
            // Another one is not started before the supervisor goes on. umount(8) would ask the mount something.
            let fuse = cluster.status().fuse.swap_remove(0);
            let (supervisor, daemon) = (Process::supervisor_of(&fuse), Process::of(&fuse));
            supervisor.signal(Signal::STOP);
            daemon.signal(Signal::KILL);
            let unmounted = rustix::mount::unmount(cluster.mount_point(), UnmountFlags::NOFOLLOW);
            supervisor.signal(Signal::CONT);
            unmounted.unwrap();
        }),
    ];
    cluster.mount("s3://objects", "/data", &[]);
    let group = |pid: i32| rustix::process::getpgid(Pid::from_raw(pid)).unwrap();
    for (what, end) in ends {
        let served = eventually("the mount is served", PATIENCE, || daemon(&cluster));
        assert_ne!(group(served), group(supervisor()), "an interrupt at the terminal is for the supervisor alone");
        assert!(File::open(cluster.path("data").join(key)).is_ok(), "{what}");
        end();
        let ended = eventually(&format!("all is over after {what}"), PATIENCE, || {
            Some(cluster.status().fuse.swap_remove(0)).filter(|fuse| fuse.state != "running")
        });
        assert_eq!(ended.state, "stopped", "{what}: {}", fs::read_to_string(&ended.log).unwrap());
        assert!(is_gone(served) && !is_mounted(&cluster), "{what}");
        cluster.start("fuse");
    }
    cluster.assert_tree("data", "", &seeded);
}

#[test]
fn a_mount_that_another_namespace_has_a_copy_of_ends_there_too() {
    let cluster = up(Options::default());
    let seeded = cluster.seed("objects", "", 3, 5000);
    cluster.mount("s3://objects", "/data", &[]);
    cluster.assert_tree("data", "", &seeded);
    let mut elsewhere = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It is in its namespace when it says so.
    elsewhere.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    cluster.signal(&cluster.status().fuse[0], Signal::TERM);
    let ended = eventually("the mount ends", PATIENCE / 2, || {
        Some(cluster.status().fuse.swap_remove(0)).filter(|fuse| fuse.state != "running")
    });
    elsewhere.kill().unwrap();
    elsewhere.wait().unwrap();
    let log = fs::read_to_string(&ended.log).unwrap();
    assert!(ended.state == "stopped" && log.contains("left in another mount namespace"), "{log}");
    assert!(!is_mounted(&cluster));
}

#[test]
fn names_of_sockets_that_others_have_taken_keep_no_mount_from_being_reloaded() {
    // As far as they can be guessed.
    let guessed = Squatter::of((1..400).map(|minor| format!("cavern-fuse/0:{minor}")), false);
    assert!(guessed.taken > 0);
    let cluster = up(Options::default());
    let device = device(&cluster).unwrap();
    // They come before the supervisor's, whose name ends with 32 digits.
    for (end, full) in [("0", false), ("00", true)] {
        let squatter = Squatter::of([format!("cavern-fuse/{device}/{end}")], full);
        assert_eq!(squatter.taken, 1);
        let reloaded = reload(&cluster);
        assert_eq!(reloaded.code, 0, "{reloaded:?}");
    }
}

#[test]
fn a_mount_that_ends_while_no_daemon_lives_loses_nothing() {
    let cluster =
        up(Options { workers: 2, conf: "[client]\nlocal_descriptors = false\n".into(), ..Options::default() });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--replicas", "2"]);
    for round in 0..4 {
        let name = format!("file{round}");
        let file = File::create(cluster.path("fs").join(&name)).unwrap();
        file.write_all_at(&content(round, 300_000), 0).unwrap();
        kill_daemon(&cluster);
        // It reaches the supervisor before the next daemon serves, or after that.
        cluster.signal(&cluster.status().fuse[0], Signal::TERM);
        let ended = eventually("all is over", PATIENCE, || {
            Some(cluster.status().fuse.swap_remove(0)).filter(|fuse| fuse.state != "running")
        });
        assert_eq!(ended.state, "stopped", "{}", fs::read_to_string(&ended.log).unwrap());
        assert!(!is_mounted(&cluster));
        drop(file);
        cluster.start("fuse");
        let read = fs::read(cluster.path("fs").join(&name)).unwrap();
        assert!(read == content(round, 300_000), "round {round}: {} bytes", read.len());
    }
}

#[test]
fn what_is_unmounted_in_the_cluster_while_no_daemon_lives_is_gone_and_the_rest_stays() {
    let cluster = up(Options::default());
    let seeded = cluster.seed("objects", "", 3, 20_000);
    cluster.mount("s3://objects", "/data", &[]);
    cluster.mount("s3://objects", "/other", &[]);
    let key = seeded.keys().next().unwrap();
    let open = |below: &str| File::open(cluster.path(below).join(key)).unwrap();
    let (mut kept, mut gone) = (open("data"), open("other"));
    let supervisor = cluster.status().fuse.swap_remove(0);
    cluster.signal(&supervisor, Signal::STOP);
    kill_daemon(&cluster);
    let umount = cluster.try_cv(&["umount", "/other"]);
    cluster.signal(&supervisor, Signal::CONT);
    assert_eq!(umount.code, 0, "{umount:?}");
    // The kernel trusts what it knows until the next daemon tells it otherwise.
    let gone_from_sight = eventually("it is gone", PATIENCE, || cluster.path("other").metadata().err());
    assert_eq!(gone_from_sight.raw_os_error(), Some(libc::ENOENT));
    let mut read = Vec::new();
    kept.read_to_end(&mut read).unwrap();
    assert!(read == seeded[key]);
    // The kernel may have the file whole; what it has not is an error at once.
    if gone.read_to_end(&mut Vec::new()).is_err() {
        eprintln!("the open file gives an error");
    }
    drop(gone);
    cluster.assert_tree("data", "", &seeded);
}

#[test]
fn each_mount_of_a_host_has_its_own_supervisor_and_reloads_come_one_by_one() {
    let cluster = up(Options { more_mounts: vec!["second"], ..Options::default() });
    let seeded = cluster.seed("objects", "", 5, 20_000);
    cluster.mount("s3://objects", "/data", &[]);
    let daemons = || cluster.status().fuse.iter().map(|fuse| fuse.daemon().unwrap()).collect::<Vec<_>>();
    let before = daemons();
    thread::scope(|scope| {
        let asked: Vec<_> = (0..3).map(|_| scope.spawn(|| reload(&cluster))).collect();
        for asked in asked {
            let reloaded = asked.join().unwrap();
            assert_eq!(reloaded.code, 0, "{reloaded:?}");
        }
    });
    let after = daemons();
    assert!(before[0] != after[0] && before[1] == after[1], "{before:?} {after:?}");
    kill_process(Pid::from_raw(after[1]).unwrap(), Signal::KILL).unwrap();
    let second = &cluster.at_start.fuse[1].mount_point;
    for (key, content) in &seeded {
        assert!(fs::read(second.join("data").join(key)).unwrap() == *content);
    }
    assert_eq!(daemons()[0], after[0]);
    cluster.assert_tree("data", "", &seeded);
}

#[test]
fn many_open_files_are_open_again_and_take_little_memory() {
    let count = usize::try_from(number("CAVERN_OPEN", 3000)).unwrap();
    let limits = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limits.maximum, ..limits }).unwrap();
    let cluster = up(Options { ..Options::default() });
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let said = |what: &str| {
        let fuse = cluster.status().fuse.swap_remove(0);
        let (supervisor, daemon) = (Process::supervisor_of(&fuse).memory(), Process::of(&fuse).memory());
        eprintln!("{what}: supervisor {} KiB, daemon {} KiB", supervisor >> 10, daemon >> 10);
        supervisor
    };
    said("at rest");
    let path = |number: usize| cluster.path("fs").join(format!("d{}", number % 50)).join(format!("f{number}"));
    for number in 0..50 {
        fs::create_dir(path(number).parent().unwrap()).unwrap();
    }
    let files: Vec<_> = (0..count)
        .map(|number| {
            let file = File::options().create_new(true).read(true).write(true).open(path(number)).unwrap();
            file.write_all_at(format!("content {number}").as_bytes(), 0).unwrap();
            file
        })
        .collect();
    said("files open");
    let began = std::time::Instant::now();
    replace_by_death(&cluster);
    for (number, file) in files.iter().enumerate() {
        let expected = format!("content {number}");
        let mut read = vec![0; expected.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(String::from_utf8_lossy(&read), expected);
        file.write_all_at(b"and more", expected.len() as u64).unwrap();
    }
    eprintln!("all of {count} files read and written {:?} after the death", began.elapsed());
    let supervisor = said("after the death");
    assert!(supervisor < 32 << 20, "{supervisor}");
    drop(files);
    for number in [0, count / 2, count - 1] {
        assert_eq!(fs::read_to_string(path(number)).unwrap(), format!("content {number}and more"));
    }
}

#[test]
fn files_that_the_kernel_reads_by_itself_outlive_the_death_of_the_daemon() {
    let cluster = up(Options { conf: "[fuse]\npassthrough = true\n".to_owned(), ..Options::default() });
    let seeded = cluster.seed("objects", "", 4, 500_000);
    cluster.mount("s3://objects", "/data", &[]);
    cluster.assert_tree("data", "", &seeded);
    let reads = || cluster.at_start.fuse[0].metric("cavern_fuse_requests_total{operation=\"read\"").unwrap_or_default();
    let all = |file: &File, length: usize| {
        let mut read = vec![0; length];
        file.read_exact_at(&mut read, 0).unwrap();
        read
    };
    let asked = reads();
    let open = || seeded.keys().map(|key| File::open(cluster.path("data").join(key)).unwrap()).collect::<Vec<_>>();
    let before = open();
    for (file, content) in before.iter().zip(seeded.values()) {
        assert!(all(file, content.len()) == *content);
    }
    assert_eq!(reads(), asked, "the kernel reads by itself");
    for _ in 0..2 {
        replace_by_death(&cluster);
        // Beside handles of before, which the kernel wants to have the same backing file.
        let after = open();
        for ((one, other), content) in before.iter().zip(&after).zip(seeded.values()) {
            assert!(all(one, content.len()) == *content && all(other, content.len()) == *content);
        }
        assert_eq!(reads(), 0, "the kernel reads by itself");
    }
    drop(before);
    cluster.assert_tree("data", "", &seeded);
}

#[test]
fn a_daemon_that_cannot_end_holds_nobody_up() {
    let conf = "[client]\nread_timeout = \"60s\"\nhedge_percent = 0\n\
                [ufs]\nrequest_timeout = \"30s\"\nio_timeout = \"30s\"\n"
        .to_owned();
    let cluster = up(Options { conf, more_mounts: vec!["other"], ..Options::default() });
    cluster.s3.put("bucket", "fs/file", content(3, 100_000));
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    let before = eventually("the mount is served", PATIENCE, || daemon(&cluster));
    let other = cluster.at_start.fuse[1].mount_point.join("fs");
    eventually("the file is there on both", PATIENCE, || {
        (cluster.path("fs/file").exists() && other.join("file").exists()).then_some(())
    });
    // The bucket holds back what the file's pages wait for.
    cluster.s3.add_fault(&json!({ "kind": "hang", "operations": ["GET"] }));
    thread::scope(|scope| {
        let reading = scope.spawn(|| fs::read(cluster.path("fs/file")));
        // The kernel is told of this, and waits for the page that is being read.
        let mut mode = 0o600;
        eventually("a thread of the daemon waits in the kernel", PATIENCE, || {
            mode ^= 0o040;
            fs::set_permissions(other.join("file"), Permissions::from_mode(mode)).unwrap();
            let threads = fs::read_dir(format!("/proc/{before}/task")).unwrap();
            let stat = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            threads.filter_map(Result::ok).any(|thread| stat(thread).contains("(fuse-notify) D")).then_some(())
        });
        replace_by_death(&cluster);
        assert!(!is_gone(before), "it cannot end");
        fs::write(cluster.path("fs/new"), "others go on").unwrap();
        assert!(!reading.is_finished() && !is_gone(before));
        cluster.s3.clear_faults();
        assert!(reading.join().unwrap().unwrap() == content(3, 100_000));
    });
    eventually("the one before has ended", PATIENCE, || is_gone(before).then_some(()));
    assert_eq!(fs::read_to_string(other.join("new")).unwrap(), "others go on");
}

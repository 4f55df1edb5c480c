//! `cv local`: what it starts, what it says of it, and what is left when it is down.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cavern_tests::{Child, Cluster, Options, cv_path, eventually, http_get};
use rustix::process::{Pid, Signal, kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn status_follows_the_children_and_each_can_be_stopped_killed_and_started() {
    let cluster = Cluster::up(Options { workers: 2, more_mounts: vec!["second"], ..Options::default() });
    let status = cluster.status();
    assert_eq!((status.masters.len(), status.workers.len(), status.fuse.len()), (1, 2, 2));
    assert!(status.mounted && status.mount_point.ends_with("mnt") && status.fuse[1].mount_point.ends_with("second"));
    for child in status.masters.iter().chain(&status.workers).chain(&status.fuse) {
        assert_eq!(child.state, "running", "{child:?}");
        let health = http_get(&format!("http://{}/healthz", child.http)).unwrap();
        assert_eq!(health.status, 200, "{}", health.body);
        let metrics = http_get(&format!("http://{}/metrics", child.http)).unwrap();
        assert!(metrics.status == 200 && metrics.body.contains("# TYPE"), "{}", metrics.body);
    }
    assert!(status.workers.iter().all(|worker| worker.dirs.iter().all(|dir| dir.is_dir())));

    cluster.kill("worker1");
    assert_eq!(cluster.status().workers[1].state, "crashed");
    cluster.start("worker1");
    let worker = &cluster.status().workers[1];
    assert_eq!((worker.state.as_str(), &worker.data), ("running", &status.workers[1].data));
    assert_ne!(worker.pid, status.workers[1].pid);

    // Not through cv: a crash is seen by whoever looks.
    cluster.signal(&status.fuse[0], Signal::KILL);
    eventually("the crash is reported", PATIENCE, || (cluster.status().fuse[0].state == "crashed").then_some(()));
    cluster.start("fuse");
    assert!(fs::read_dir(cluster.mount_point()).is_ok());

    cluster.stop("master");
    assert_eq!(cluster.status().masters[0].state, "stopped");
    cluster.start("master0");
    assert_eq!(cluster.try_cv(&["local", "stop", "worker7", "--dir", cluster.directory().to_str().unwrap()]).code, 4);
}

#[test]
fn down_leaves_nothing_behind_and_up_goes_on_where_it_was() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 3, 1000);
    cluster.mount("s3://bucket", "/data", &[]);
    let directory = cluster.directory().to_str().unwrap();
    let before = cluster.status();
    cluster.cv(&["local", "down", "--dir", directory]);
    let after = cluster.status();
    assert!(!after.mounted);
    for child in [&before.masters[0], &before.workers[0], &before.fuse[0], &before.s3.child] {
        assert!(!fs::exists(format!("/proc/{}", child.pid.unwrap())).unwrap(), "{child:?} is still there");
    }
    for child in [&after.masters[0], &after.workers[0], &after.fuse[0], &after.s3.child] {
        assert_eq!((child.state.as_str(), child.pid), ("stopped", None));
    }
    assert_eq!(left_behind(&cluster), [""; 0]);
    cluster.cv(&["local", "down", "--dir", directory]);
    cluster.cv(&["local", "up", "--dir", directory]);
    cluster.assert_tree("data", "", &tree);
}

/// Processes, mounts, sockets and tokens of a cluster.
fn left_behind(cluster: &Cluster) -> Vec<String> {
    let place = cluster.directory().to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let line = fs::read_to_string(entry.ok()?.path().join("cmdline")).ok()?.replace('\0', " ");
        line.contains(place).then_some(line)
    });
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mounts = mounts.lines().filter(|line| line.contains(place)).map(str::to_owned);
    let files = ["run", "worker0/disk0", "s3"]
        .into_iter()
        .flat_map(|folder| fs::read_dir(cluster.directory().join(folder)).unwrap().map(|entry| entry.unwrap()));
    let files = files.filter(|entry| entry.file_type().unwrap().is_socket() || entry.file_name() == "admin-token");
    processes.chain(mounts).chain(files.map(|entry| entry.path().display().to_string())).collect()
}

/// Not even what serves a mount, or replays what one has left, when those that it belongs to were killed.
#[test]
fn down_ends_what_was_left_by_children_that_were_killed() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster.kill("master");
    let path = cluster.path("fs/file");
    // It may wait for a master that does not come.
    let writer = std::thread::spawn(move || drop(fs::write(path, "x")));
    cluster.kill("fuse");
    cluster.kill("worker");
    cluster.kill("s3");
    cluster.cv(&["local", "down", "--dir", cluster.directory().to_str().unwrap()]);
    assert_eq!(left_behind(&cluster), [""; 0]);
    writer.join().unwrap();
}

#[test]
fn a_failing_child_is_shown_with_its_log_and_nothing_stays() {
    let cluster = Cluster::up(Options::default());
    let directory = cluster.directory().to_str().unwrap();
    cluster.cv(&["local", "down", "--dir", directory]);
    // Somebody else has the worker's port by now.
    let taken = std::net::TcpListener::bind(&cluster.at_start.workers[0].data).unwrap();
    let up = cluster.try_cv(&["local", "up", "--dir", directory]);
    assert_eq!(up.code, 1, "{up:?}");
    let address = taken.local_addr().unwrap().to_string();
    assert!(up.stderr.contains("worker0 ended with exit code 1") && up.stderr.contains(&address), "{}", up.stderr);
    let status = cluster.status();
    assert!(!status.mounted && status.masters[0].state == "stopped" && status.s3.child.state == "stopped");
}

#[test]
fn a_master_that_does_not_answer_is_waited_for_no_longer_than_told() {
    let cluster = Cluster::up(Options::default());
    let (place, master) = (cluster.directory().to_str().unwrap(), &cluster.at_start.masters[0]);
    cluster.signal(master, Signal::STOP);
    let up = cluster.try_cv(&["local", "up", "--dir", place, "--timeout", "2"]);
    cluster.signal(master, Signal::CONT);
    assert_eq!(up.code, 1, "{up:?}");
    assert!(up.stderr.contains("the master knows 0 of 1 workers after 2 s"), "{}", up.stderr);
    cluster.cv(&["local", "up", "--dir", place]);
    assert_eq!(cluster.status().masters[0].pid, master.pid, "what ran before is not stopped");
}

#[test]
fn a_wrong_configuration_starts_nothing() {
    let cluster = Cluster::up(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let conf = directory.path().join("wrong.toml");
    fs::write(&conf, "[worker]\nmemory_budgett = \"1GiB\"\n").unwrap();
    let place = directory.path().join("cluster");
    let up = cluster.try_cv(&["local", "up", "--dir", place.to_str().unwrap(), "--conf", conf.to_str().unwrap()]);
    assert_eq!(up.code, 2, "{up:?}");
    assert!(up.stderr.contains("wrong.toml") && up.stderr.contains("memory_budget"), "{}", up.stderr);
    assert!(!place.exists());
}

#[test]
fn a_configuration_that_was_named_holds_for_later_starts_and_what_runs_with_another_is_told() {
    // Where a control group limits memory, one child more would otherwise change what each of them may have.
    const LIMIT: &str = "resource_limit = \"256m\"\n";
    let conf = |readahead: &str| {
        format!("[master]\n{LIMIT}[worker]\n{LIMIT}[client]\n{LIMIT}readahead_max = \"{readahead}\"\n")
    };
    let cluster = Cluster::up(Options { conf: conf("3MiB"), ..Options::default() });
    let place = cluster.directory().to_str().unwrap();
    let up = |more: &[&str]| {
        let mut command = cluster.command(&[&["local", "up", "--dir", place], more].concat());
        let output = command.env_remove("CV_CONF").output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let holds = |line: &str| fs::read_to_string(cluster.directory().join("cluster.toml")).unwrap().contains(line);
    cluster.cv(&["local", "down", "--dir", place]);
    let (code, said) = up(&[]);
    assert!(code == Some(0) && said.contains("conf.toml, as before"), "{code:?} {said}");
    assert!(holds("readahead_max = \"3MiB\""));

    let other = cluster.directory().with_file_name("other.toml");
    fs::write(&other, conf("5MiB")).unwrap();
    let (code, said) = up(&["--conf", other.to_str().unwrap()]);
    assert!(code == Some(0) && said.contains("master0, worker0, fuse0 go on"), "{code:?} {said}");
    assert!(holds("readahead_max = \"5MiB\""));
    let (code, said) = up(&["--workers", "2"]);
    assert!(code == Some(0) && said.contains("other.toml, as before") && !said.contains("go on"), "{code:?} {said}");

    fs::remove_file(&other).unwrap();
    let (code, said) = up(&[]);
    assert!(code == Some(2) && said.contains("other.toml") && said.contains("another with --conf"), "{code:?} {said}");
    assert!(holds("readahead_max = \"5MiB\""));
}

#[test]
fn what_ends_by_itself_is_started_again_and_what_was_stopped_is_not() {
    let cluster = Cluster::up(Options { restart: true, ..Options::default() });
    let seeded = cluster.seed("bucket", "", 5, 20_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let before = cluster.status();
    let children = |status: &cavern_tests::Status| -> Vec<Child> {
        [&status.s3.child, &status.masters[0], &status.workers[0], &status.fuse[0]].into_iter().cloned().collect()
    };
    for (number, child) in children(&before).iter().enumerate() {
        assert!(child.supervised && child.restarts == 0, "{child:?}");
        cluster.signal(child, Signal::KILL);
        let again = eventually("it is started again", PATIENCE, || {
            let now = children(&cluster.status()).swap_remove(number);
            (now.state == "running" && now.pid != child.pid && now.restarts == 1).then_some(now)
        });
        assert!(again.supervised, "{again:?}");
    }
    // The dead mount made way for the new one.
    let read = || {
        seeded.iter().all(|(key, content)| fs::read(cluster.path("data").join(key)).is_ok_and(|read| read == *content))
    };
    eventually("the mount can be used", PATIENCE, || read().then_some(()));
    let mount_point = cluster.mount_point().to_str().unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(mounts.lines().filter(|line| line.split(' ').nth(4) == Some(mount_point)).count(), 1, "{mounts}");
    let place = cluster.directory().to_str().unwrap();
    let table = cluster.cv(&["local", "status", "--dir", place]).stdout;
    let line = table.lines().find(|line| line.starts_with("worker0")).unwrap();
    assert!(line.contains("restarts: 1") && line.contains("killed by signal 9"), "{table}");

    // On purpose: nobody starts it.
    cluster.kill("worker0");
    cluster.stop("fuse0");
    for _ in 0..20 {
        let now = cluster.status();
        let (worker, fuse) = (&now.workers[0], &now.fuse[0]);
        assert_eq!((worker.state.as_str(), worker.next_try_ms, worker.supervised), ("crashed", None, false));
        assert_eq!((fuse.state.as_str(), fuse.next_try_ms, fuse.supervised), ("stopped", None, false));
    }
    cluster.start("worker0");
    cluster.start("fuse0");
    assert_eq!(cluster.status().workers[0].restarts, 0);

    // Nor a child to which another process sends SIGTERM, and which ends.
    cluster.signal(&cluster.status().workers[0], Signal::TERM);
    eventually("it is stopped", PATIENCE, || {
        let worker = cluster.status().workers.swap_remove(0);
        (worker.state == "stopped" && !worker.supervised).then_some(())
    });
}

#[test]
fn a_child_that_cannot_start_is_tried_less_and_less_often_until_it_can() {
    let cluster = Cluster::up(Options { restart: true, ..Options::default() });
    let worker = cluster.status().workers.swap_remove(0);
    // As soon as it is dead, somebody else has its port; it may come back once or twice before.
    let taken = eventually("the port is taken", PATIENCE, || {
        if let Some(pid) = cluster.status().workers[0].pid.and_then(Pid::from_raw) {
            let _gone = kill_process(pid, Signal::KILL);
        }
        TcpListener::bind(&worker.data).ok()
    });
    let late = eventually("the pauses grow", PATIENCE, || {
        let worker = cluster.status().workers.swap_remove(0);
        (worker.next_try_ms? > 1000 && worker.restarts > 2).then_some(worker)
    });
    assert!(late.state == "crashed" && late.pid.is_none(), "{late:?}");
    drop(taken);
    eventually("it is back", PATIENCE, || (cluster.status().workers[0].state == "running").then_some(()));

    // One that is waited for is started at once by hand, and stopped at once.
    cluster.kill("worker0");
    let taken = TcpListener::bind(&worker.data).unwrap();
    let place = cluster.directory().to_str().unwrap();
    let start = cluster.try_cv(&["local", "start", "worker0", "--dir", place]);
    assert!(start.code == 1 && start.stderr.contains("while starting"), "{start:?}");
    let worker = cluster.status().workers.swap_remove(0);
    assert!(worker.state == "crashed" && !worker.supervised && worker.next_try_ms.is_none(), "{worker:?}");
    drop(taken);
    cluster.start("worker0");
}

#[test]
fn a_supervisor_that_is_killed_leaves_its_child_at_work_and_up_takes_it_over() {
    let cluster = Cluster::up(Options { restart: true, ..Options::default() });
    let place = cluster.directory().to_str().unwrap();
    let before = cluster.status().workers.swap_remove(0);
    let supervisor_of = |child: &Child| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.pid.unwrap())).unwrap();
        Pid::from_raw(stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()).unwrap()
    };
    kill_process(supervisor_of(&before), Signal::KILL).unwrap();
    let alone = eventually("the loss is seen", PATIENCE, || {
        let worker = cluster.status().workers.swap_remove(0);
        (!worker.supervised).then_some(worker)
    });
    assert_eq!((alone.state.as_str(), alone.pid), ("running", before.pid));
    assert!(cluster.cv(&["local", "status", "--dir", place]).stdout.contains("the supervisor of a child is gone"));
    cluster.cv(&["local", "up", "--dir", place, "--restart", "on-failure"]);
    let kept = cluster.status().workers.swap_remove(0);
    assert!(kept.supervised && kept.pid == before.pid, "{kept:?}");
    cluster.signal(&kept, Signal::KILL);
    let again = eventually("it is started again", PATIENCE, || {
        let worker = cluster.status().workers.swap_remove(0);
        (worker.state == "running" && worker.pid != before.pid).then_some(worker)
    });
    // Both at once: up starts it.
    kill_process(supervisor_of(&again), Signal::KILL).unwrap();
    cluster.signal(&again, Signal::KILL);
    eventually("it is gone", PATIENCE, || (cluster.status().workers[0].state == "crashed").then_some(()));
    cluster.cv(&["local", "up", "--dir", place]);
    let worker = cluster.status().workers.swap_remove(0);
    assert!(worker.state == "running" && worker.supervised, "{worker:?}");
}

fn local(arguments: &[&str], directory: &Path) -> (i32, String) {
    let mut command = Command::new(cv_path());
    command.env_remove("CV_CONF").arg("local").args(arguments).arg("--dir").arg(directory);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.code().unwrap_or(-1), text)
}

#[test]
fn purge_removes_what_the_cluster_made_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let (foreign, own, outside) =
        (place.path().join("foreign"), place.path().join("own"), place.path().join("outside"));
    for directory in [&foreign, &outside] {
        fs::create_dir(directory).unwrap();
        fs::write(directory.join("thesis.tex"), "mine").unwrap();
    }

    // Whose directory that is cannot be known: nothing is started there, and nothing written.
    let (code, text) = local(&["up"], &foreign);
    assert!(code == 2 && text.contains("thesis.tex") && text.contains("--dir"), "{text}");
    let (code, text) = local(&["down", "--purge"], &foreign);
    assert!(code == 0 && text.contains("no local cluster"), "{text}");
    assert_eq!(fs::read_dir(&foreign).unwrap().count(), 1);

    // What comes to lie there later is not the cluster's either.
    let (code, text) = local(&["up"], &own);
    assert_eq!(code, 0, "{text}");
    fs::write(own.join("notes"), "mine").unwrap();
    symlink(&outside, own.join("worker0/outside")).unwrap();
    let (code, text) = local(&["down", "--purge"], &own);
    assert!(
        code == 0 && text.contains("notes") && text.contains(&format!("removing {}", own.join("worker0").display())),
        "{text}"
    );
    let left: Vec<_> = fs::read_dir(&own).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!((left, fs::read_to_string(own.join("notes")).unwrap()), (vec!["notes".into()], "mine".to_owned()));
    assert_eq!(fs::read_to_string(outside.join("thesis.tex")).unwrap(), "mine");

    // What was there before stays, empty as it is; what was not goes.
    fs::remove_file(own.join("notes")).unwrap();
    for is_new in [false, true] {
        if is_new {
            fs::remove_dir(&own).unwrap();
        }
        let (code, text) = local(&["up"], &own);
        assert_eq!(code, 0, "{text}");
        let (code, text) = local(&["down", "--purge"], &own);
        assert_eq!((code, own.exists()), (0, !is_new), "{text}");
    }
}

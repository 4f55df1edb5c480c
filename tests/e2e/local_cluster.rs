//! `cv local`: what it starts, what it says of it, and what is left when it is down.

use std::fs;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, http_get};
use rustix::process::Signal;

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
    eventually("the crash is reported", Duration::from_secs(5), || {
        (cluster.status().fuse[0].state == "crashed").then_some(())
    });
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
    cluster.cv(&["local", "down", "--dir", directory]);
    cluster.cv(&["local", "up", "--dir", directory]);
    cluster.assert_tree("data", "", &tree);
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

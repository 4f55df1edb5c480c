//! Commands whose answer is lost with the master that led: they are asked for again, at the next one, and are done
//! once.

use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_tests::{Cluster, Finished, Options, eventually};

const PATIENCE: Duration = Duration::from_secs(60);
/// What a call may wait is not the point here, on a machine that is busy.
const CONF: &str = "[client]\nread_timeout = \"60s\"\nmetadata_timeout = \"60s\"\n";

fn masters() -> Cluster {
    let conf = CONF.to_owned();
    Cluster::up(Options { masters: 3, workers: 2, conf, failpoints: true, ..Options::default() })
}

/// Runs a command while the leader dies when it is done, and before it says so.
#[track_caller]
fn unanswered(cluster: &Cluster, arguments: &[&str]) -> Finished {
    let leader = cluster.leader();
    cluster.arm(Failpoint::EntryAnswered, 1);
    let finished = cluster.cv(arguments);
    assert!(cluster.has_died_at(Failpoint::EntryAnswered), "{arguments:?} was answered by the first: {finished:?}");
    cluster.leader_other_than(leader);
    let crashed = || (cluster.status().masters[leader].state == "crashed").then_some(());
    eventually("its end is known", PATIENCE, crashed);
    cluster.start(&format!("master{leader}"));
    cluster.masters_agree();
    finished
}

#[test]
fn commands_whose_answer_is_lost_with_the_leader_are_done_once() {
    let cluster = masters();
    cluster.seed("bucket", "d/", 20, 2000);
    // A client has entries of its own when its session goes on with the next leader.
    cluster.stop("fuse0");
    cluster.masters_agree();
    let options = cluster.bucket_options();
    let mut mount = vec!["mount", "s3://bucket/d", "/d", "--write-type", "cache-mode"];
    mount.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
    let mounted = unanswered(&cluster, &mount);
    assert!(mounted.stdout.contains("is mounted at /d"), "{mounted:?}");
    let mounts = cluster.cv(&["mount", "--json"]).json();
    assert_eq!(mounts.as_array().unwrap().len(), 1, "{mounts}");

    let loaded = unanswered(&cluster, &["load", "/d", "--json"]).json();
    let jobs = cluster.cv(&["job", "list", "--json"]).json();
    let ids: Vec<_> = jobs.as_array().unwrap().iter().map(|job| job["id"].clone()).collect();
    assert_eq!(ids, [loaded["id"].clone()], "{jobs}");
    let ended = cluster.cv(&["job", "wait", &loaded["id"].to_string(), "--json"]);
    assert!(ended.stdout.contains("\"done\""), "{ended:?}");

    let updated = unanswered(&cluster, &["mount", "update", "/d", "--ttl", "7s"]);
    assert!(updated.stdout.contains("has the new options"), "{updated:?}");

    let drained = unanswered(&cluster, &["node", "drain", "2"]);
    assert!(drained.stdout.contains("worker 2 is empty"), "{drained:?}");
    let removed = unanswered(&cluster, &["node", "remove", "2"]);
    assert!(removed.stdout.contains("worker 2 is removed"), "{removed:?}");

    let unmounted = unanswered(&cluster, &["umount", "/d"]);
    assert!(unmounted.stdout.contains("s3://bucket/d is no longer mounted at /d"), "{unmounted:?}");
    let again = cluster.try_cv(&["umount", "/d"]);
    assert_eq!(again.code, 4, "{again:?}");
}

/// All commands look for the next leader, whoever they were speaking to.
#[test]
fn commands_that_read_find_the_next_leader() {
    let cluster = masters();
    cluster.seed("bucket", "d/", 20, 2000);
    cluster.mount("s3://bucket/d", "/d", &[]);
    let commands: [&[&str]; 8] = [
        &["mount"],
        &["fs", "ls", "-R", "/d"],
        &["fs", "stat", "/d"],
        &["fs", "du", "/d"],
        &["job", "list"],
        &["node", "list"],
        &["refresh", "/d"],
        &["report"],
    ];
    let killed = cluster.kill_leader();
    let running: Vec<_> = commands
        .iter()
        .map(|arguments| {
            let mut command = cluster.command(arguments);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            (arguments, command.spawn().unwrap())
        })
        .collect();
    for (arguments, child) in running {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "cv {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    cluster.start(&format!("master{killed}"));
    let agree = || cluster.groups().iter().all(Option::is_some).then_some(());
    eventually("all answer", PATIENCE, agree);
}

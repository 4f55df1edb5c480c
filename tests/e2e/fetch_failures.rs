//! A worker that the bucket refuses: reads go on without it, and whoever runs the cluster is told.

use std::fs;
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, eventually};
use rustix::io::Errno;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_worker_that_cannot_fetch_warns_once_and_is_named_until_it_can() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    for name in ["one", "two", "three"] {
        cluster.s3.put("bucket", name, name);
    }
    cluster.mount("s3://bucket", "/data", &[]);
    let data = cluster.path("data");
    let worker_log = &cluster.at_start.workers[0].log;
    let lines = |level: &str, part: &str| {
        let log = fs::read_to_string(worker_log).unwrap();
        log.lines().filter(|line| line.contains(level) && line.contains(part)).count()
    };
    let mount_status = || -> Value { cluster.cv(&["report", "--json"]).json()["mounts"][0]["status"].clone() };
    let fault = |key: &str, count: Option<u32>| {
        let rule = json!({
            "kind": "RequestTimeTooSkewed", "operations": ["GetObject"], "key_prefix": key, "count": count
        });
        cluster.s3.add_fault(&rule);
    };

    // The first request for an object is the worker's, the second the client's own.
    for name in ["one", "two"] {
        fault(name, Some(1));
        assert_eq!(fs::read_to_string(data.join(name)).unwrap(), name);
    }
    let failure = eventually("the worker is named", PATIENCE, || {
        let status = mount_status();
        (status["failing_workers"] == 1).then(|| status["fetch_failures"][0].clone())
    });
    assert_eq!(failure["worker"], cluster.cv(&["node", "list", "--json"]).json()[0]["id"], "{failure}");
    let message = failure["message"].as_str().unwrap();
    for part in ["s3://bucket", "clocks", "RequestTimeTooSkewed", "NTP"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("credentials"), "{message}");
    for command in [&["report"][..], &["mount"]] {
        let said = cluster.cv(command).stdout;
        let named = said.lines().any(|line| line.starts_with("/data: worker ") && line.contains("NTP"));
        assert!(named && said.contains(" ok, 1 worker failing"), "{command:?}: {said}");
    }

    // Where the client fares no better, programs are refused as by a bucket that knows no such credentials.
    fault("three", None);
    let refused = fs::read(data.join("three")).unwrap_err();
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::ACCESS), "{refused}");
    assert_eq!((lines(" WARN ", "cannot fetch"), lines(" WARN ", "")), (1, 1), "{}", cluster.logs());
    assert_eq!(lines(" INFO ", "succeed again"), 0, "{}", cluster.logs());

    cluster.s3.clear_faults();
    assert_eq!(cluster.cv(&["fs", "cat", "/data/three"]).stdout, "three");
    eventually("nothing is reported any more", PATIENCE, || {
        let status = mount_status();
        (status["failing_workers"] == 0 && status["fetch_failures"] == json!([])).then_some(())
    });
    assert_eq!((lines(" WARN ", ""), lines(" INFO ", "succeed again")), (1, 1), "{}", cluster.logs());
}

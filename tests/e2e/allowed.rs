//! Mounts lead where the configuration of masters, workers and clients lets them, and nowhere else.

use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

fn mounts(cluster: &Cluster) -> Vec<Value> {
    cluster.cv(&["mount", "--json"]).json().as_array().unwrap().clone()
}

fn mounted_at(cluster: &Cluster) -> Vec<String> {
    mounts(cluster).iter().map(|mount| mount["path"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn refused(cluster: &Cluster, arguments: &[&str], parts: &[&str]) {
    let before = mounts(cluster);
    let answer = cluster.try_cv(arguments);
    assert_ne!(answer.code, 0, "{arguments:?}: {answer:?}");
    for part in parts {
        assert!(answer.stderr.contains(part), "{arguments:?}: {part} is not in {answer:?}");
    }
    let options = |mounts: &[Value]| mounts.iter().map(|mount| mount["options"].clone()).collect::<Vec<_>>();
    let after = mounts(cluster);
    assert_eq!((after.len(), options(&after)), (before.len(), options(&before)), "{arguments:?}");
}

#[test]
fn endpoints_of_this_host_and_its_link_are_refused_unless_they_are_listed() {
    let cluster = Cluster::up(Options { endpoints: vec![], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "key", "content");
    cluster.s3.put("bucket", "other", "more");
    // Its own store is.
    cluster.mount("s3://bucket", "/data", &[]);
    assert_eq!(fs::read(cluster.path("data/key")).unwrap(), b"content");

    // A service that listens for this host alone.
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    service.set_nonblocking(true).unwrap();
    let port = service.local_addr().unwrap().port();
    let anonymous = "s3.anonymous=true";
    for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "0x7f.1"] {
        let option = format!("s3.endpoint_url=http://{host}:{port}");
        let mount = ["mount", "s3://bucket", "/evil", "--write-type", "cache_mode", "-c", &option, "-c", anonymous];
        refused(&cluster, &mount, &[host, "ufs.endpoints", "address"]);
        refused(&cluster, &["mount", "update", "/data", "-c", &option], &[host, "ufs.endpoints", "address"]);
    }
    for endpoint in ["http://169.254.169.254", "http://[fe80::1]", "http://[fd00:ec2::254]"] {
        let option = format!("s3.endpoint_url={endpoint}");
        let mount = ["mount", "s3://latest", "/evil", "--write-type", "fs_mode", "-c", &option, "-c", anonymous];
        refused(&cluster, &mount, &[endpoint, "ufs.endpoints", "address"]);
    }
    let asked = service.accept().map(|(_, from)| from);
    assert!(asked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "the service was asked");
    assert_eq!(mounted_at(&cluster), ["/data"]);
    assert_eq!(cluster.cv(&["fs", "cat", "/data/other"]).stdout, "more");
}

#[test]
fn directory_trees_lie_in_the_directories_that_are_listed() {
    let top = tempfile::tempdir().unwrap();
    let (open, closed) = (top.path().join("open"), top.path().join("closed"));
    for directory in [&open, &closed] {
        fs::create_dir_all(directory.join("tree")).unwrap();
        fs::write(directory.join("tree/file"), "content").unwrap();
    }
    symlink(&closed, open.join("way-out")).unwrap();
    let conf = format!("[ufs]\nfile_roots = [\"{}\"]\n", open.display());
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let mount = |directory: &str| format!("file://{directory}");
    let open = open.to_str().unwrap();
    fs::write(top.path().join("open/tree/unread"), "content").unwrap();
    let tree = mount(&format!("{open}/tree"));
    cluster.cv(&["mount", &tree, "/open", "--write-type", "cache_mode", "--consistency", "always"]);
    eventually("the mount appears", PATIENCE, || cluster.path("open/file").exists().then_some(()));
    assert_eq!(fs::read_to_string(cluster.path("open/file")).unwrap(), "content");

    let closed = closed.to_str().unwrap();
    for directory in
        ["/etc", closed, &format!("{closed}/nothing"), &format!("{open}/way-out"), &format!("{open}/way-out/tree")]
    {
        let arguments = ["mount", &mount(directory), "/evil", "--write-type", "cache_mode"];
        refused(&cluster, &arguments, &[directory, "ufs.file_roots"]);
    }
    assert_eq!(mounted_at(&cluster), ["/open"]);

    // What was allowed is no more: everybody goes on, and says why.
    let conf = fs::read_to_string(&cluster.at_start.conf).unwrap();
    let other = conf.replace(&format!("file_roots = [\"{open}\"]"), "file_roots = [\"/nowhere\"]");
    assert_ne!(conf, other, "{conf}");
    for child in ["fuse0", "worker0", "master0"] {
        cluster.stop(child);
    }
    fs::write(&cluster.at_start.conf, other).unwrap();
    for child in ["master0", "worker0", "fuse0"] {
        cluster.start(child);
    }
    let path = cluster.path("open/unread");
    let read = within("an answer", PATIENCE, move || fs::read(path));
    assert!(read.is_err(), "{read:?}");
    let said = eventually("the mount says what is wrong", PATIENCE, || {
        let error = mounts(&cluster)[0]["status"]["last_error"].as_str().unwrap_or_default().to_owned();
        (!error.is_empty()).then_some(error)
    });
    assert!(said.contains("ufs.file_roots") && said.contains("/nowhere"), "{said}");
    let status = cluster.status();
    let mut children = status.masters.iter().chain(&status.workers).chain(&status.fuse);
    assert!(children.all(|child| child.state == "running" && child.restarts == 0), "{status:?}");
}

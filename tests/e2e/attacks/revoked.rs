//! A certificate that is revoked while a mount is served with it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cavern_tests::{PartMount, within};
use rustix::fs::{FlockOperation, flock};

use super::*;

/// Connections are looked at once in a second; a session has its lease after that.
const SHUT_OUT: Duration = Duration::from_secs(20);
/// More than any of the mount's requests may take.
const ANSWERED: Duration = Duration::from_secs(60);

#[test]
fn a_mount_whose_certificate_is_revoked_is_cut_off_and_what_it_had_locked_is_free() {
    // Reads come from the worker's port, each of them anew.
    let conf = "[client]\nlocal_descriptors = false\nmetadata_timeout = \"2s\"\nchange_timeout = \"3s\"\n\
                read_timeout = \"5s\"\n[fuse]\ndirect = true\n";
    let options = Options { secure: true, more_mounts: vec!["second"], conf: conf.to_owned(), ..Options::default() };
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let (work, second) = (cluster.path("work"), cluster.at_start.fuse[1].mount_point.join("work"));
    // Another client has the same name, and a certificate of its own.
    let certificates = cluster.directory().join("certificates");
    let elsewhere = tempfile::tempdir().unwrap();
    let identity = Identity::new(&name_of(&cluster), Role::Client, "fuse0").unwrap();
    let authority = Authority::open(&certificates).unwrap();
    let renewed = authority.issue(&identity, DAY, elsewhere.path(), "renewed").unwrap();
    let [certificate, key] = [&renewed.certificate, &renewed.key].map(|path| path.to_str().unwrap());
    let part =
        PartMount::of(&cluster, "/work", &[("CV_SECURITY__CERTIFICATE", certificate), ("CV_SECURITY__KEY", key)]);

    let locked = File::create(work.join("locked")).unwrap();
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    let own = File::create(part.path.join("own")).unwrap();
    flock(&own, FlockOperation::LockExclusive).unwrap();
    let [others, others_own] = ["locked", "own"]
        .map(|name| eventually("the other mount sees it", PATIENCE, || File::open(second.join(name)).ok()));
    let try_lock = |file: &File| flock(file, FlockOperation::NonBlockingLockExclusive);
    assert!(try_lock(&others).is_err() && try_lock(&others_own).is_err());
    fs::write(work.join("content"), vec![7; 4 << 20]).unwrap();
    let content = File::open(work.join("content")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let reader = thread::spawn({
        let stop = stop.clone();
        move || {
            let mut buffer = vec![0; 1 << 20];
            while !stop.load(Ordering::Relaxed) {
                // At first it reads, and then nobody is asked what.
                let _read = content.read_at(&mut buffer, 0);
            }
        }
    });
    let (master, worker) = (&cluster.at_start.masters[0], &cluster.at_start.workers[0]);
    eventually("the worker is read from", PATIENCE, || {
        worker.metric("cavern_worker_client_connections{").filter(|connections| *connections > 0)
    });

    let stolen = certificates.join("client-fuse0.pem");
    let directory = certificates.to_str().unwrap();
    cluster.cv(&["cert", "revoke", stolen.to_str().unwrap(), "--dir", directory]);
    eventually("the lock is free", SHUT_OUT, || try_lock(&others).ok());
    for child in [master, worker] {
        let line = format!("the connection of {identity} is closed: its certificate is revoked");
        eventually("the connections are closed", PATIENCE, || {
            let is_counted = child.metric("cavern_peer_connections_closed_total{reason=\"revoked\"}")? > 0;
            (is_counted && fs::read_to_string(&child.log).unwrap().contains(&line)).then_some(())
        });
    }
    let refused = work.join("refused");
    assert!(within("a change is answered", ANSWERED, move || File::create(refused).is_err()));
    // The other one goes on as if nothing had happened.
    assert!(try_lock(&others_own).is_err(), "its lock is its own");
    fs::write(part.path.join("new"), "written").unwrap();
    eventually("what it writes is there", PATIENCE, || {
        (fs::read(second.join("new")).ok()? == b"written").then_some(())
    });
    stop.store(true, Ordering::Relaxed);
    within("a read is answered", ANSWERED, move || reader.join()).unwrap();
}

//! Worker and master stop answering (SIGSTOP): no system call on the mount outlives its deadline, each can be ended by
//! a signal, what is cached is served, and all heals by itself.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::blocked::Blocked;
use crate::readers::{Readers, shown_at};

/// What an answer may come too late by, on a busy machine.
const SLACK: Duration = Duration::from_millis(1500);

/// A process that a signal should end is gone within this time, though the deadlines are most of a minute away.
const AT_ONCE: Duration = Duration::from_secs(3);
/// What a program that handles the signal waits more.
const PATIENCE: Duration = Duration::from_secs(1);
/// For a shell whose `$0` is the file.
const DIRECT_READ: &str = "exec dd if=\"$0\" of=/dev/null bs=256k iflag=direct";

fn seeded(conf: &str) -> (Cluster, std::collections::BTreeMap<String, bytes::Bytes>) {
    let cluster = Cluster::up(Options { conf: conf.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "warm/", 200, 50_000);
    cluster.s3.put("bucket", "cold/small", vec![1; 10_000]);
    cluster.s3.put("bucket", "cold/large", vec![1; 8 << 20]);
    cluster.s3.put("bucket", "cold/dark-small", vec![1; 10_000]);
    cluster.s3.put("bucket", "cold/dark-large", vec![1; 8 << 20]);
    for unknown in ["a", "b", "c"] {
        cluster.s3.put("bucket", &format!("unknown/{unknown}/file"), "content");
    }
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.assert_tree("data/warm", "warm/", &seeded);
    assert_eq!(fs::read_dir(cluster.path("data/cold")).unwrap().count(), 4);
    assert_eq!(fs::read_dir(cluster.path("data/unknown")).unwrap().count(), 3);
    (cluster, seeded)
}

fn freeze(cluster: &Cluster, signal: Signal) {
    let status = cluster.status();
    cluster.signal(&status.masters[0], signal);
    cluster.signal(&status.workers[0], signal);
}

fn freeze_bucket(cluster: &Cluster, signal: Signal) {
    cluster.signal(&cluster.status().s3.child, signal);
}

#[test]
fn no_system_call_outlives_its_deadline_and_all_heals() {
    const READ_TIMEOUT: Duration = Duration::from_secs(4);
    const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
    let (cluster, seeded) = seeded(
        "[client]\nread_timeout = \"4s\"\nbucket_timeout = \"4s\"\nworker_timeout = \"1s\"\nmetadata_timeout = \"2s\"\n\
         change_timeout = \"2s\"\n\
         outage_lookups = \"never\"\n",
    );
    let tree = shown_at(&cluster.path("data/warm"), "warm/", &seeded);
    let open = File::open(cluster.path("data/cold/large")).unwrap();

    freeze(&cluster, Signal::STOP);
    let path = |below: &str| cluster.path("data").join(below);

    // What needs neither: cached data, names and attributes.
    within("the cached files", METADATA_TIMEOUT * 5, {
        let tree = tree.clone();
        move || Readers::start(4, &tree).finish()
    });
    let known =
        timed("stat of a known file", METADATA_TIMEOUT, path("cold/small"), |path| fs::metadata(path).map(drop));
    assert!(known.is_ok(), "{known:?}");
    let listed = timed("ls of a known directory", METADATA_TIMEOUT, path("cold"), |path| fs::read_dir(path).map(drop));
    assert!(listed.is_ok(), "{listed:?}");
    let statfs = timed("statfs", METADATA_TIMEOUT, path(""), |path| Ok(rustix::fs::statfs(path).map(drop)?));
    assert!(statfs.is_ok(), "{statfs:?}");
    let xattr = timed("getxattr", METADATA_TIMEOUT, path("cold/small"), |path| {
        Ok(rustix::fs::getxattr(path, "user.cavern.etag", &mut [0_u8; 64][..]).map(drop)?)
    });
    assert!(xattr.is_ok(), "{xattr:?}");

    // What needs the master fails, and in time; many at once take no longer.
    let stat =
        timed("stat of an unknown file", METADATA_TIMEOUT, path("unknown/a/file"), |path| fs::metadata(path).map(drop));
    assert_eq!(errno(&stat), Some(Errno::IO), "{stat:?}");
    let ls = timed("ls of an unknown directory", METADATA_TIMEOUT, path("unknown/b"), |path| {
        fs::read_dir(path)?.try_for_each(|entry| entry.map(drop))
    });
    assert_eq!(errno(&ls), Some(Errno::IO), "{ls:?}");
    let many: Vec<_> = (0..64)
        .map(|number| {
            let path = path(&format!("unknown/c/{number}"));
            std::thread::spawn(move || timed("stat", METADATA_TIMEOUT, path, |path| fs::metadata(path).map(drop)))
        })
        .collect();
    for stat in many {
        assert_eq!(errno(&stat.join().unwrap()), Some(Errno::IO));
    }

    // What needs the worker comes from the bucket.
    let read =
        timed("read of an uncached small file", READ_TIMEOUT, path("cold/small"), |path| fs::read(path).map(drop));
    assert!(read.is_ok(), "{read:?}");
    let read =
        timed("read of an open file", READ_TIMEOUT, path(""), move |_| open.read_exact_at(&mut [0; 4096], 6 << 20));
    assert!(read.is_ok(), "{read:?}");
    let tail = timed("pread of a large file", READ_TIMEOUT * 2, path("cold/large"), |path| {
        File::open(path)?.read_exact_at(&mut [0; 4096], 3 << 20)
    });
    assert!(tail.is_ok(), "{tail:?}");

    // With the bucket silent too, nothing is left to ask: EIO, and in time.
    freeze_bucket(&cluster, Signal::STOP);
    for dark in ["cold/dark-small", "cold/dark-large"] {
        let read = timed(&format!("read of {dark}"), READ_TIMEOUT, path(dark), |path| fs::read(path).map(drop));
        assert_eq!(errno(&read), Some(Errno::IO), "{dark}: {read:?}");
    }
    freeze_bucket(&cluster, Signal::CONT);

    freeze(&cluster, Signal::CONT);
    let healing = Instant::now();
    for unknown in ["a", "b", "c"] {
        let path = path(&format!("unknown/{unknown}/file"));
        eventually(&format!("{} heals", path.display()), Duration::from_secs(10), || {
            let path = path.clone();
            within("a read", READ_TIMEOUT * 2, move || fs::read(path)).ok().filter(|read| read == b"content")
        });
    }
    eprintln!("healed after {:?}", healing.elapsed());
    // And the worker is used again.
    cluster.s3.put("bucket", "unknown/new/file", "content");
    eventually("a new file appears", Duration::from_secs(60), || {
        cluster.try_cv(&["refresh", "/data"]);
        fs::read(path("unknown/new/file")).ok()
    });
    Readers::start(4, &tree).finish();
}

#[test]
fn a_signal_ends_every_waiting_system_call() {
    // A master that was silent for half a lease is asked nothing any more, and nobody would wait.
    let (cluster, _) = seeded(
        "[master]\nsession_lease = \"60s\"\n\
         [client]\nread_timeout = \"60s\"\nworker_timeout = \"50s\"\nmetadata_timeout = \"60s\"\n",
    );
    // Open already: here it is the read that waits.
    freeze(&cluster, Signal::STOP);
    freeze_bucket(&cluster, Signal::STOP);
    let path = |below: &str| cluster.path("data").join(below);
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let blocked = [
            ("open", Blocked::start(&["cat"], &path("cold/small"))),
            ("read", Blocked::start(&["cat"], &path("cold/large"))),
            ("read with O_DIRECT", Blocked::start(&["sh", "-c", DIRECT_READ], &path("cold/large"))),
            ("stat", Blocked::start(&["stat"], &path("unknown/a/file"))),
            ("ls", Blocked::start(&["ls"], &path("unknown/b"))),
        ];
        for (call, blocked) in blocked {
            // dd handles SIGINT: it says how much it has copied.
            let is_handled = signal == Signal::INT && call == "read with O_DIRECT";
            let limit = if is_handled { PATIENCE + AT_ONCE } else { AT_ONCE };
            let took = blocked.dies_of(signal);
            eprintln!("{call}: ended {took:?} after {signal:?}");
            assert!(took < limit, "{call}: ended {took:?} after {signal:?}");
        }
    }
    // A signal that a program handles reaches it a little later: Python turns it into KeyboardInterrupt. Not so in a
    // read that waits for a page: there the kernel, on any file system, lets only fatal signals through.
    for (call, file) in [("open(p, 0)", "cold/small"), ("stat(p)", "unknown/a/file")] {
        // Some calls are retried by Python after the handler ran, others end with InterruptedError: both were
        // interrupted.
        let program = format!(
            "import os, sys\np = sys.argv[1]\ntry:\n    os.{call}\nexcept InterruptedError:\n    raise \
             KeyboardInterrupt"
        );
        let took = Blocked::start_asking(&["python3", "-c", &program], &path(file)).dies_of(Signal::INT);
        eprintln!("Python, {call}: ended {took:?} after SIGINT");
        assert!(took < PATIENCE + AT_ONCE, "Python, {call}: ended {took:?} after SIGINT");
    }
    freeze_bucket(&cluster, Signal::CONT);
    freeze(&cluster, Signal::CONT);
    for file in ["cold/small", "cold/large", "unknown/a/file", "unknown/b/file"] {
        let path = path(file);
        eventually(&format!("{file} heals"), Duration::from_secs(20), || {
            let path = path.clone();
            within("a read", Duration::from_secs(60), move || fs::read(path)).ok()
        });
    }
}

/// Runs one system call, or few, and panics when it takes longer than its deadline.
fn timed<T: Send + 'static>(
    what: &str,
    deadline: Duration,
    path: PathBuf,
    call: impl FnOnce(PathBuf) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (result, took) = within(what, deadline + SLACK, move || {
        let began = Instant::now();
        (call(path), began.elapsed())
    });
    eprintln!("{what}: {took:?}");
    result
}

fn errno<T>(result: &io::Result<T>) -> Option<Errno> {
    result.as_ref().err().and_then(Errno::from_io_error)
}

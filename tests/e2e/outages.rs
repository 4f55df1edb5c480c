//! No master answers: mounts in cache-mode go on being read, from caches and from the bucket, and all is as the masters
//! have it when they are back.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirEntryExt as _, FileExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::io::Errno;

const PATIENCE: Duration = Duration::from_secs(60);
/// `client.metadata_timeout`, as it is by default.
const TIMEOUT: Duration = Duration::from_secs(5);
/// No call that can be answered waits so long once the outage is known.
const PROMPT: Duration = Duration::from_millis(2500);
const TTL: Duration = Duration::from_secs(2);
const READ_ONLY: &[&str] = &["--metadata-ttl", "2s"];
/// Inodes of the namespace are below.
const OUTAGE_INODES: u64 = 1 << 61;
/// Whom no file belongs to.
const NOBODY: u32 = 65_534;

fn up(conf: &str) -> Cluster {
    Cluster::up(Options { conf: conf.to_owned(), ..Options::default() })
}

/// Of the first client.
fn metric(cluster: &Cluster, name: &str) -> u64 {
    cluster.at_start.fuse[0].metric(name).unwrap_or_default()
}

/// Kills the only master, and waits until that is known to be no election.
fn lose_the_master(cluster: &Cluster) {
    cluster.kill("master");
    outage_begins(cluster);
}

fn outage_begins(cluster: &Cluster) {
    eventually("the outage begins", PATIENCE, || (metric(cluster, "cavern_client_master_outage ") == 1).then_some(()));
}

fn outage_ends(cluster: &Cluster) {
    eventually("the outage ends", PATIENCE, || (metric(cluster, "cavern_client_master_outage ") == 0).then_some(()));
}

/// One call or few, that must be answered at once.
#[track_caller]
fn prompt<T: Send + 'static>(
    path: impl Into<PathBuf>,
    call: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let path = path.into();
    let what = path.display().to_string();
    let (answer, took) = within(&what, PATIENCE, move || {
        let began = Instant::now();
        (call(&path), began.elapsed())
    });
    assert!(took < PROMPT, "{what}: {took:?}");
    answer
}

fn names(path: &Path) -> io::Result<Vec<OsString>> {
    let mut names = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn errno<T: std::fmt::Debug>(answer: io::Result<T>) -> Option<Errno> {
    Errno::from_io_error(&answer.unwrap_err())
}

#[test]
fn without_masters_read_only_mounts_are_read_from_caches_and_from_the_bucket() {
    let cluster = up("");
    let seeded = cluster.seed("bucket", "warm/", 30, 50_000);
    let put = |key: &str, content: &str| drop(cluster.s3.put("bucket", key, content.to_owned()));
    for name in ["replaced", "deleted", "stays"] {
        put(&format!("seen/{name}"), "first");
    }
    for name in ["one", "two", "deep/er/file"] {
        put(&format!("unknown/{name}"), name);
    }
    let odd = [" space ", "a+b%20c", "é", "both/below", "marker/", "a-b", "a"];
    odd.iter().for_each(|name| put(&format!("odd/{name}"), "odd"));
    for key in ["odd/both", "odd/a//hidden", "odd/."] {
        put(key, "hidden");
    }
    let large: Vec<u8> = (0..8_u32 << 20).map(|byte| (byte / 4096) as u8).collect();
    cluster.s3.put("bucket", "unknown/large", large.clone());
    cluster.mount("s3://bucket", "/data", READ_ONLY);
    cluster.mount("s3://bucket", "/twin", READ_ONLY);
    cluster.s3.create_bucket("written");
    cluster.s3.put("written", "known", "first");
    cluster.s3.put("written", "unknown", "first");
    cluster.mount("s3://written", "/written", &["--access-mode", "read_write"]);

    let data = cluster.path("data");
    cluster.assert_tree("data/warm", "warm/", &seeded);
    assert_eq!(names(&data.join("seen")).unwrap(), ["deleted", "replaced", "stays"]);
    let seen = fs::metadata(data.join("seen/stays")).unwrap().ino();
    assert_eq!(fs::read(cluster.path("written/known")).unwrap(), b"first");
    assert_eq!(errno(fs::metadata(data.join("nothing"))), Some(Errno::NOENT));
    lose_the_master(&cluster);

    // What is cached.
    within("the cached files", PATIENCE, {
        let (seeded, data) = (seeded.clone(), data.clone());
        move || {
            for (key, content) in &seeded {
                assert!(fs::read(data.join(key)).unwrap() == *content, "{key}");
            }
        }
    });
    let still = prompt(data.join("seen/stays"), |path| fs::metadata(path)).unwrap();
    assert_eq!(still.ino(), seen);
    assert_eq!(prompt(data.join("seen"), names).unwrap(), ["deleted", "replaced", "stays"]);

    // What nobody has looked up: by name, and by a listing.
    let deep = data.join("unknown/deep/er/file");
    assert_eq!(prompt(&deep, |path| fs::read(path)).unwrap(), b"deep/er/file");
    let inode = prompt(&deep, |path| fs::metadata(path)).unwrap().ino();
    assert!(inode >= OUTAGE_INODES, "{inode}");
    assert_eq!(prompt(data.join("unknown"), names).unwrap(), ["deep", "large", "one", "two"]);
    assert_eq!(prompt(data.join("unknown/two"), |path| fs::read(path)).unwrap(), b"two");
    for name in ["none", "unknown/none", "none/below"] {
        assert_eq!(errno(prompt(data.join(name), |path| fs::metadata(path))), Some(Errno::NOENT), "{name}");
    }
    let through_a_file = prompt(data.join("unknown/one/below"), |path| fs::metadata(path));
    assert_eq!(errno(through_a_file), Some(Errno::NOTDIR));
    let changed = prompt(data.join("unknown/new"), |path| fs::write(path, "x"));
    assert_eq!(errno(changed), Some(Errno::ROFS));
    let twin = prompt(cluster.path("twin/unknown/two"), |path| Ok((fs::read(path)?, fs::metadata(path)?.ino())));
    let (content, twin) = twin.unwrap();
    assert_eq!(content, b"two");
    assert_ne!(fs::metadata(data.join("unknown/two")).unwrap().ino(), twin, "another mount");
    let shown = ["a", "a+b%20c", "a-b", "both", "marker", " space ", "é"];
    let mut shown = shown.map(OsString::from);
    shown.sort();
    assert_eq!(prompt(data.join("odd"), names).unwrap(), shown);
    for (name, is_directory) in [("a", true), ("a-b", false), ("both", true), ("marker", true), (" space ", false)] {
        let node = prompt(data.join("odd").join(name), |path| fs::metadata(path)).unwrap();
        assert_eq!(node.is_dir(), is_directory, "{name}");
    }
    assert_eq!(prompt(data.join("odd/a+b%20c"), |path| fs::read(path)).unwrap(), b"odd");
    let long = prompt(data.join("unknown").join("x".repeat(256)), |path| fs::metadata(path));
    assert_eq!(errno(long), Some(Errno::NAMETOOLONG));
    let other = Command::new("cat").arg(data.join("unknown/one")).uid(NOBODY).gid(NOBODY).output().unwrap();
    assert_eq!((other.status.code(), other.stdout.as_slice()), (Some(0), &b"one"[..]), "another user");

    // The bucket goes on changing: no old bytes, and no error but that something is not there.
    put("seen/replaced", "the second");
    cluster.s3.delete("bucket", "seen/deleted");
    assert_eq!(prompt(data.join("seen/replaced"), |path| fs::read(path)).unwrap(), b"the second");
    assert_eq!(errno(prompt(data.join("seen/deleted"), |path| fs::read(path))), Some(Errno::NOENT));
    put("unknown/one", "another");
    put("unknown/three", "three");
    cluster.s3.delete("bucket", "unknown/two");
    eventually("what was found is asked again", TTL + PATIENCE, || {
        (names(&data.join("unknown")).unwrap() == ["deep", "large", "one", "three"]).then_some(())
    });
    eventually("a new version shows", TTL + PATIENCE, || {
        (prompt(data.join("unknown/one"), |path| fs::read(path)).unwrap() == b"another").then_some(())
    });

    // Others do as they did.
    assert_eq!(prompt(cluster.path("written/known"), |path| fs::read(path)).unwrap(), b"first");
    for refused in ["written/unknown", "written/new"] {
        let path = cluster.path(refused);
        let began = Instant::now();
        let answer = within(refused, PATIENCE, move || fs::File::create(path));
        assert_eq!(errno(answer), Some(Errno::IO), "{refused}");
        assert!(began.elapsed() < TIMEOUT * 2, "{refused}: {:?}", began.elapsed());
    }

    // They come back, and nothing breaks that is open.
    let open = File::open(data.join("unknown/large")).unwrap();
    let directory = File::open(data.join("unknown/deep")).unwrap();
    let mut head = vec![0; 4096];
    open.read_exact_at(&mut head, 0).unwrap();
    cluster.start("master");
    outage_ends(&cluster);
    let mut content = vec![0; large.len()];
    open.read_exact_at(&mut content, 0).unwrap();
    assert!(content == large);
    assert_eq!(names(Path::new(&format!("/proc/self/fd/{}", directory.as_raw_fd()))).unwrap(), ["er"]);
    eventually("inodes are those of the master", PATIENCE, || {
        let names = ["unknown", "unknown/deep/er/file", "unknown/one", "seen/replaced", "odd/a"];
        let inodes = names.map(|name| fs::metadata(data.join(name)).unwrap().ino());
        inodes.iter().all(|inode| *inode < OUTAGE_INODES).then_some(())
    });
    // Not while a new listing brings a new version.
    eventually("listings show the same inodes", PATIENCE, || {
        let mut entries = fs::read_dir(data.join("unknown")).unwrap().map(Result::unwrap);
        entries.all(|entry| entry.ino() == fs::metadata(entry.path()).unwrap().ino()).then_some(())
    });
    put("unknown/four", "four");
    eventually("new objects are seen", TTL + PATIENCE, || {
        // The kernel keeps a listing; a name that it does not know has the listing renewed.
        assert_eq!(errno(fs::metadata(data.join("unknown/none"))), Some(Errno::NOENT));
        (names(&data.join("unknown")).unwrap() == ["deep", "four", "large", "one", "three"]).then_some(())
    });
    assert_eq!(fs::read(data.join("seen/replaced")).unwrap(), b"the second");
    assert_eq!(fs::read(data.join("unknown/one")).unwrap(), b"another");
    assert_eq!(errno(fs::read(data.join("unknown/two"))), Some(Errno::NOENT));
    fs::write(cluster.path("written/new"), "new").unwrap();
    let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
    for line in ["no master answers (", "a master answers again: "] {
        assert_eq!(log.matches(line).count(), 1, "{line}");
    }
    assert_eq!(metric(&cluster, "cavern_client_master_outages_total "), 1);
}

#[test]
fn the_first_calls_after_the_masters_died_get_no_error() {
    let cluster = up("[client]\nmetadata_timeout = \"10s\"\n");
    cluster.s3.create_bucket("bucket");
    for number in 0..8 {
        cluster.s3.put("bucket", &format!("{number}/file"), "content");
    }
    cluster.mount("s3://bucket", "/data", READ_ONLY);
    cluster.kill("master");
    let calls: Vec<_> = (0..8)
        .map(|number| {
            let path = cluster.path(format!("data/{number}"));
            std::thread::spawn(move || {
                let began = Instant::now();
                let answer = if number < 4 { fs::read(path.join("file")) } else { names(&path).map(|_| Vec::new()) };
                (number, answer, began.elapsed())
            })
        })
        .collect();
    for call in calls {
        let (number, answer, took) = call.join().unwrap();
        eprintln!("call {number}: {took:?}");
        assert!(answer.is_ok() && took < TIMEOUT * 2, "call {number}: {answer:?} after {took:?}");
    }
    cluster.start("master");
}

#[test]
fn without_masters_a_large_directory_is_listed_page_by_page() {
    const FILES: usize = 5000;
    let cluster = up("");
    cluster.s3.create_bucket("bucket");
    let mut expected: Vec<OsString> = (0..FILES).map(|number| format!("file-{number:05}").into()).collect();
    for name in &expected {
        cluster.s3.put("bucket", &format!("large/{}", name.to_str().unwrap()), "x");
    }
    // Where the bucket has it is behind all of them.
    cluster.s3.put("bucket", "large/file/below", "x");
    expected.push("file".into());
    expected.sort();
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    lose_the_master(&cluster);
    for _ in 0..2 {
        let listed = within("a listing", PATIENCE, {
            let path = cluster.path("data/large");
            move || names(&path).unwrap()
        });
        assert!(listed == expected, "{} of {}", listed.len(), expected.len());
    }
    cluster.start("master");
    outage_ends(&cluster);
    assert!(names(&cluster.path("data/large")).unwrap() == expected);
}

#[test]
fn mounts_that_are_written_to_are_asked_of_their_bucket_where_that_is_wanted() {
    let cluster = up("[client]\noutage_lookups = \"cache-mode\"\n");
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "dir/file", "content");
    cluster.mount("s3://bucket", "/data", &["--access-mode", "read_write"]);
    lose_the_master(&cluster);
    assert_eq!(prompt(cluster.path("data/dir/file"), |path| fs::read(path)).unwrap(), b"content");
    let refused: [fn(&Path) -> io::Result<()>; 4] = [
        |path| fs::write(path.join("new"), "x"),
        |path| fs::OpenOptions::new().append(true).open(path.join("file")).map(drop),
        |path| fs::create_dir(path.join("made")),
        |path| fs::remove_file(path.join("file")),
    ];
    for (number, call) in refused.into_iter().enumerate() {
        let answer = prompt(cluster.path("data/dir"), call);
        assert_eq!(errno(answer), Some(Errno::IO), "call {number}");
    }
    cluster.start("master");
    outage_ends(&cluster);
    fs::write(cluster.path("data/dir/new"), "new").unwrap();
    fs::write(cluster.path("data/dir/file"), "other").unwrap();
    assert_eq!(cluster.s3.get("bucket", "dir/new"), "new");
    assert_eq!(cluster.s3.get("bucket", "dir/file"), "other");
    assert_eq!(names(&cluster.path("data/dir")).unwrap(), ["file", "new"]);
}

#[test]
fn an_election_is_no_outage_and_the_end_of_all_masters_is_one() {
    let conf = "[client]\nmetadata_timeout = \"60s\"\n".to_owned();
    let cluster = Cluster::up(Options { masters: 3, conf, ..Options::default() });
    cluster.s3.create_bucket("bucket");
    for number in 0..200 {
        cluster.s3.put("bucket", &format!("{number}/file"), "content");
    }
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    cluster.masters_agree();
    let killed = cluster.kill_leader();
    for number in 0..100 {
        assert_eq!(fs::read(cluster.path(format!("data/{number}/file"))).unwrap(), b"content");
    }
    cluster.leader_other_than(killed);
    assert_eq!(metric(&cluster, "cavern_client_master_outages_total "), 0);
    assert_eq!(metric(&cluster, "cavern_client_outage_lookups_total "), 0);

    let others: Vec<usize> = (0..3).filter(|number| *number != killed).collect();
    // Of two that are left, one is no majority.
    cluster.kill(&format!("master{}", others[0]));
    outage_begins(&cluster);
    cluster.kill(&format!("master{}", others[1]));
    for number in 100..150 {
        let path = cluster.path(format!("data/{number}/file"));
        assert_eq!(prompt(path, |path| fs::read(path)).unwrap(), b"content");
    }
    (0..3).for_each(|number| cluster.start(&format!("master{number}")));
    outage_ends(&cluster);
    eventually("inodes are those of the masters", PATIENCE, || {
        let inode = fs::metadata(cluster.path("data/120/file")).unwrap().ino();
        (inode < OUTAGE_INODES).then_some(())
    });
    assert_eq!(fs::read(cluster.path("data/199/file")).unwrap(), b"content");
}

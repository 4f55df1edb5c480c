//! `memory://` and `file://` keep the same promises as a bucket.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::num::NonZeroU64;
use std::time::Duration;

use cavern_conf::schema;
use cavern_ufs::{Faults, ListMode, MemoryBucket, Ufs, UfsError};
use support::{conf, hasty, keys, options, pages};

#[tokio::test]
async fn memory_is_a_bucket() {
    let bucket = MemoryBucket::named("memory-is-a-bucket");
    let ufs = Ufs::open("memory://memory-is-a-bucket/p", &options(&[]), &conf()).unwrap();
    assert_eq!((ufs.store_id(), ufs.prefix()), ("memory://memory-is-a-bucket", "p/"));
    ufs.check().await.unwrap();
    let etag = bucket.put("p/a", "hello");
    bucket.put("p/d/x", "");
    bucket.put("p/d/y", "");
    bucket.put("q", "");
    let page = &pages(&ufs, "p/", ListMode::Directory).await[0];
    assert_eq!((page.objects.len(), page.objects[0].etag.as_str(), page.objects[0].size), (1, etag.as_str(), 5));
    assert_eq!(page.prefixes, ["p/d/"]);
    assert_eq!(keys(&ufs, "p/", ListMode::Recursive).await, ["p/a", "p/d/x", "p/d/y"]);
    assert_eq!(ufs.get_bytes("p/a", &etag, 1..4).await.unwrap(), "ell");
    bucket.put("p/a", "hello");
    assert!(matches!(ufs.get_bytes("p/a", &etag, 1..4).await, Err(UfsError::VersionChanged { .. })));
    assert!(bucket.delete("p/a"));
    assert!(matches!(ufs.head("p/a").await, Err(UfsError::NotFound { .. })));
}

#[tokio::test]
async fn long_listings_come_in_pages() {
    let bucket = MemoryBucket::named("long-listings");
    for n in 0..2500 {
        bucket.put(&format!("d/{n:05}"), "");
        bucket.put(&format!("e{n:05}/x"), "");
    }
    let ufs = Ufs::open("memory://long-listings", &options(&[]), &conf()).unwrap();
    let found = pages(&ufs, "d/", ListMode::Directory).await;
    assert_eq!(found.iter().map(|page| page.objects.len()).collect::<Vec<_>>(), [1000, 1000, 500]);
    let found = pages(&ufs, "", ListMode::Directory).await;
    assert_eq!(found.iter().map(|page| page.prefixes.len()).collect::<Vec<_>>(), [1000, 1000, 501]);
    assert_eq!(keys(&ufs, "", ListMode::Recursive).await.len(), 5000);
}

#[tokio::test]
async fn files_are_objects() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    std::fs::create_dir_all(dir.join("d/deep")).unwrap();
    std::fs::write(dir.join(" spaced "), "hello").unwrap();
    std::fs::write(dir.join("d-first"), "").unwrap();
    std::fs::write(dir.join("d/x"), vec![3; 3_000_000]).unwrap();
    std::fs::write(dir.join("d/deep/y"), "y").unwrap();
    std::os::unix::fs::symlink(dir, dir.join("d/loop")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.join("dangling")).unwrap();
    let uri = format!("file://{}", dir.display());
    let ufs = Ufs::open(&uri, &options(&[]), &conf()).unwrap();
    ufs.check().await.unwrap();

    let top = &pages(&ufs, "", ListMode::Directory).await[0];
    assert_eq!(top.prefixes, ["d/"]);
    assert_eq!(top.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), [" spaced ", "d-first"]);
    assert_eq!(keys(&ufs, "", ListMode::Recursive).await, [" spaced ", "d-first", "d/deep/y", "d/x"]);
    assert!(keys(&ufs, "none/", ListMode::Recursive).await.is_empty());

    let x = ufs.head("d/x").await.unwrap();
    assert_eq!(ufs.get_bytes("d/x", &x.etag, 1..2_999_999).await.unwrap(), vec![3; 2_999_998]);
    // Replaced by a rename, as careful writers do, with the same size and time.
    let times = std::fs::metadata(dir.join("d/x")).unwrap().modified().unwrap();
    std::fs::write(dir.join("new"), vec![4; 3_000_000]).unwrap();
    std::fs::File::options().write(true).open(dir.join("new")).unwrap().set_modified(times).unwrap();
    std::fs::rename(dir.join("new"), dir.join("d/x")).unwrap();
    assert!(matches!(ufs.get_bytes("d/x", &x.etag, 0..10).await, Err(UfsError::VersionChanged { .. })));
    assert!(matches!(ufs.get_bytes("d/x", "", 0..3_000_001).await, Err(UfsError::VersionChanged { .. })));
    for key in ["../etc/passwd", "d/../../x", "/etc/passwd", "d", "d/", "", "d//x", "none"] {
        assert!(matches!(ufs.get_bytes(key, "", 0..1).await, Err(UfsError::NotFound { .. })), "{key}");
    }
    drop(root);
    assert!(matches!(ufs.check().await, Err(UfsError::NoBucket { .. })));
}

#[tokio::test]
async fn nothing_in_a_tree_is_waited_for_or_leads_out_of_it() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = root.path();
    std::fs::create_dir_all(dir.join("d/deep")).unwrap();
    std::fs::create_dir(outside.path().join("dir")).unwrap();
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    std::fs::write(outside.path().join("dir/secret"), "secret").unwrap();
    std::fs::write(dir.join("d/x"), "x").unwrap();
    let out = format!("../{}", outside.path().file_name().unwrap().to_str().unwrap());
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, dir.join(name)).unwrap();
    link("../d/x", "d/within");
    link("d", "linked");
    link(&format!("{out}/secret"), "out");
    link(&format!("{out}/dir"), "out-dir");
    link(outside.path().join("secret").to_str().unwrap(), "absolute");
    link("/proc/self/cwd", "magic");
    link("circle", "circle");
    link("nowhere", "dangling");
    let fifo = |name: &str| {
        let mode = rustix::fs::Mode::from_raw_mode(0o644);
        rustix::fs::mknodat(rustix::fs::CWD, dir.join(name), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    };
    fifo("d/fifo");
    fifo("d/deep/fifo");
    let socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).unwrap();
    let ufs = Ufs::open(&format!("file://{}", dir.display()), &options(&[]), &conf()).unwrap();

    let top = &pages(&ufs, "", ListMode::Directory).await[0];
    assert_eq!(top.prefixes, ["d/", "linked/"]);
    assert_eq!((top.objects.len(), top.hidden), (0, 6), "the socket and five links");
    let d = &pages(&ufs, "d/", ListMode::Directory).await[0];
    assert_eq!(d.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["d/within", "d/x"]);
    assert_eq!((d.prefixes.as_slice(), d.hidden), (&["d/deep/".to_owned()][..], 1));
    let all = &pages(&ufs, "", ListMode::Recursive).await[0];
    assert_eq!((all.objects.len(), all.hidden), (2, 8));
    assert_eq!(keys(&ufs, "linked/", ListMode::Recursive).await, ["linked/within", "linked/x"]);
    for prefix in ["out-dir/", "magic/", "circle/", "d/x/"] {
        assert!(keys(&ufs, prefix, ListMode::Recursive).await.is_empty(), "{prefix}");
    }
    for key in ["d/within", "linked/x"] {
        let etag = ufs.head(key).await.unwrap().etag;
        assert_eq!(ufs.get_bytes(key, &etag, 0..1).await.unwrap(), "x", "{key}");
    }
    // More than there are threads that may block.
    let fifos = futures::future::join_all((0..1000).map(|_| ufs.get_bytes("d/fifo", "", 0..1)));
    assert!(fifos.await.iter().all(|read| matches!(read, Err(UfsError::NotFound { .. }))));
    for key in ["d/fifo", "socket", "out", "out-dir/secret", "absolute", "circle", "dangling", "magic/x"] {
        assert!(matches!(ufs.head(key).await, Err(UfsError::NotFound { .. })), "{key}");
        assert!(matches!(ufs.get_bytes(key, "", 0..1).await, Err(UfsError::NotFound { .. })), "{key}");
    }
    drop(socket);
}

#[tokio::test]
async fn a_tree_lies_in_an_allowed_directory() {
    let top = tempfile::tempdir().unwrap();
    let path = |name: &str| top.path().join(name);
    for directory in ["in/tree", "outside", "inside"] {
        std::fs::create_dir_all(path(directory)).unwrap();
        std::fs::write(path(directory).join("x"), "x").unwrap();
    }
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, path(name)).unwrap();
    link("../outside", "in/out");
    link("in/tree", "way");
    link("in", "linked");
    let of = |root: &str, directory: &str| {
        let conf = schema::Ufs { file_roots: vec![path(root)], ..conf() };
        Ufs::open(&format!("file://{}", path(directory).display()), &options(&[]), &conf).unwrap()
    };
    for (root, directory) in [
        ("in", "in/tree"),
        ("in", "in"),
        ("in/tree", "in/tree"),
        ("in", "way"),
        ("linked", "in/tree"),
        ("linked", "linked/tree"),
        ("way", "way"),
    ] {
        let ufs = of(root, directory);
        ufs.check().await.unwrap();
        assert!(keys(&ufs, "", ListMode::Recursive).await.iter().any(|key| key.ends_with('x')), "{root} {directory}");
    }
    for (root, directory) in [
        ("in", "outside"),
        ("in", "inside"),
        ("in", "in/out"),
        ("in/tree", "in"),
        ("linked", "outside"),
        ("none", "outside"),
        // Nobody learns that it is not there.
        ("in", "nowhere"),
    ] {
        let ufs = of(root, directory);
        let refused = ufs.check().await.unwrap_err().to_string();
        assert!(refused.contains("ufs.file_roots"), "{root} {directory}: {refused}");
        assert!(matches!(ufs.head("x").await, Err(UfsError::NotAllowed { .. })), "{root} {directory}");
        assert!(matches!(ufs.get_bytes("x", "", 0..1).await, Err(UfsError::NotAllowed { .. })), "{root} {directory}");
    }
    assert!(matches!(of("in", "in/nothing").check().await, Err(UfsError::NoBucket { .. })));

    // What lay within leads out by now.
    let ufs = of("in", "in/tree");
    ufs.check().await.unwrap();
    std::fs::rename(path("in/tree"), path("in/former")).unwrap();
    link("../outside", "in/tree");
    assert!(matches!(ufs.get_bytes("x", "", 0..1).await, Err(UfsError::NotAllowed { .. })));
    let nothing = Ufs::open(&format!("file://{}", path("in").display()), &options(&[]), &schema::Ufs::default());
    let refused = nothing.unwrap().check().await.unwrap_err().to_string();
    assert!(refused.contains("no directory may be mounted here"), "{refused}");
}

#[tokio::test]
async fn what_is_no_object_is_counted_once_however_many_pages_there_are() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path();
    for n in 0..30 {
        let folder = dir.join(format!("{n:02}"));
        std::fs::create_dir(&folder).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.join("socket")).unwrap();
        // Some folders have nothing else.
        for file in 0..n % 3 * 50 {
            std::fs::write(folder.join(format!("{file:03}")), "").unwrap();
        }
    }
    let ufs = Ufs::open(&format!("file://{}", dir.display()), &options(&[]), &conf()).unwrap();
    let found = pages(&ufs, "", ListMode::Recursive).await;
    assert_eq!(found.iter().map(|page| page.objects.len()).collect::<Vec<_>>(), [1000, 500]);
    assert_eq!(found.iter().map(|page| page.hidden).sum::<u64>(), 30);
}

#[tokio::test]
async fn injected_faults_are_retried_and_counted() {
    let bucket = MemoryBucket::named("injected-faults");
    let content: Vec<u8> = (0..100_000_u32).map(|n| (n % 249) as u8).collect();
    let etag = bucket.put("k", content.clone());
    let ufs = Ufs::open("memory://injected-faults", &options(&[]), &schema::Ufs { retries: 5, ..conf() }).unwrap();
    let every = |n| NonZeroU64::new(n);
    let delay = Duration::from_millis(1);
    let flaky = ufs.with_faults(Faults { fail_every: every(2), cut_every: every(2), delay });
    for _ in 0..20 {
        assert!(flaky.get_bytes("k", &etag, 0..100_000).await.unwrap() == content);
    }
    assert!(ufs.stats().retries >= 20, "{:?}", ufs.stats());
    let dead = ufs.with_faults(Faults { fail_every: every(1), ..Faults::default() });
    assert!(matches!(dead.check().await, Err(UfsError::Unavailable { .. })));
}

#[tokio::test]
async fn an_answer_that_is_late_by_design_is_late() {
    let ufs = Ufs::open("memory://late", &options(&[]), &hasty()).unwrap();
    let slow = ufs.with_faults(Faults { delay: Duration::from_secs(60), ..Faults::default() });
    assert!(matches!(slow.check().await, Err(UfsError::Deadline { .. })));
}

#[test]
fn options_of_another_scheme_are_refused() {
    for uri in ["memory://x", "file:///tmp"] {
        let error = Ufs::open(uri, &options(&[("s3.region_name", "x")]), &conf()).unwrap_err().to_string();
        assert!(error.contains("s3.region_name") && error.contains("has no options"), "{error}");
    }
}

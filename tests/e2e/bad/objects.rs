//! Buckets that lie: readers get the bytes of the version that they opened, or an error, never anything else; and what
//! is right beside it goes on being served.
//!
//! The store behind the cluster: a body cut short once, again and again; answers of 503; connections reset; an object
//! replaced by a shorter one, by a longer one, and deleted, between its listing and the read. A store that lies by
//! itself: an object shorter and longer than listed, one without a version, one that is another version than asked for,
//! bytes of another range; listings that are garbage, that never end, that name sizes that are none; an error page. A
//! store that has one more page for each that is taken, listed to a bound, or until it is unmounted.

use std::fs;
use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_tests::{Cluster, Options, eventually};
use rustix::io::Errno;
use serde_json::json;

use super::server::Server;
use super::{CONF, read};

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

#[test]
fn a_store_that_fails_in_the_middle_gives_right_bytes_or_an_error() {
    let conf = CONF.replace("[client]\n", "[client]\nread_timeout = \"3s\"\nbucket_timeout = \"3s\"\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let tree = cluster.seed("bucket", "", 12, 300_000);
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    let (keys, contents): (Vec<_>, Vec<_>) = tree.iter().unzip();
    let path = |index: usize| cluster.path("data").join(keys[index]);
    assert_eq!(fs::read_dir(cluster.path("data/0000")).unwrap().count(), tree.len());

    // Mended by trying again.
    for (index, kind) in ["short_body", "503", "reset"].into_iter().enumerate() {
        cluster.s3.add_fault(&json!({ "kind": kind, "operations": ["GET"], "count": 1 }));
        assert!(read(path(index)).unwrap() == *contents[index], "{kind} once");
        cluster.s3.clear_faults();
    }
    // Not mended: an error, with its cause in a line; and right again as soon as the store is.
    for (index, kind) in (3..).zip(["short_body", "503", "reset"]) {
        cluster.s3.add_fault(&json!({ "kind": kind, "operations": ["GET"] }));
        let before = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap().len();
        let error = read(path(index)).unwrap_err();
        assert_eq!(errno(&error), Some(Errno::IO), "{kind}: {error}");
        let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap().split_off(before);
        let name = keys[index].rsplit('/').next().unwrap();
        let told = |what: &str| log.lines().filter(|line| line.contains(name) && line.contains(what)).count();
        // That it waits, and that it waited in vain.
        assert_eq!((told("reads wait for the bucket"), told("read failed"), told("")), (1, 1, 2), "{kind}: {log}");
        cluster.s3.clear_faults();
        eventually("it is readable again", Duration::from_secs(10), || {
            read(path(index)).ok().map(|bytes| assert!(bytes == *contents[index], "{kind}"))
        });
    }
    // Changed since the listing, which nobody has refreshed: the new version, whole.
    for (index, content) in [(6, Bytes::from_static(b"short")), (7, Bytes::from(vec![9; 900_000])), (8, Bytes::new())] {
        cluster.s3.put("bucket", keys[index], content.clone());
        let bytes = eventually("the new version", Duration::from_secs(10), || match read(path(index)) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                assert_eq!(errno(&error), Some(Errno::STALE), "{error}");
                None
            }
        });
        assert!(bytes == content, "{}: {} bytes", keys[index], bytes.len());
    }
    cluster.s3.delete("bucket", keys[9]);
    let error = read(path(9)).unwrap_err();
    assert!(matches!(errno(&error), Some(Errno::NOENT | Errno::STALE)), "{error}");
    // A listing that is cut off changes nothing of what is known.
    cluster.s3.add_fault(&json!({ "kind": "short_body", "operations": ["LIST"] }));
    let refresh = cluster.try_cv(&["refresh", "/data"]);
    assert!(refresh.code != 0 && refresh.stderr.lines().count() == 1, "{refresh:?}");
    for index in [0, 10, 11] {
        assert!(read(path(index)).unwrap() == *contents[index]);
    }
    cluster.s3.clear_faults();
    cluster.cv(&["refresh", "/data"]);
    assert!(!path(9).exists());
}

fn listing(entries: &[(&str, &str, &str)], more: &str) -> Vec<u8> {
    let mut xml = format!("<?xml version=\"1.0\"?><ListBucketResult>{more}");
    for (key, size, etag) in entries {
        xml.push_str(&format!(
            "<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>{etag}\
             <Size>{size}</Size></Contents>"
        ));
    }
    xml.push_str("</ListBucketResult>");
    xml.into_bytes()
}

const WHOLE: &str = "<IsTruncated>false</IsTruncated>";
const TAGGED: &str = "<ETag>&quot;v1&quot;</ETag>";

/// What the lying store has. The file `good` is as it should be.
fn answer(head: &str, garbled: bool) -> (String, Vec<u8>) {
    let ok = |body: Vec<u8>| {
        (format!("HTTP/1.1 200 OK\ncontent-type: application/xml\ncontent-length: {}\n", body.len()), body)
    };
    let part = |etag: &str, range: &str, body: &[u8]| {
        let head = format!(
            "HTTP/1.1 206 Partial Content\n{etag}content-range: bytes {range}\ncontent-length: {}\n",
            body.len()
        );
        (head, body.to_vec())
    };
    let line = head.lines().next().unwrap_or_default();
    if line.contains("list-type=2") {
        return match line {
            _ if garbled => ok(b"<ListBucketResult><Contents><Key>a</K".to_vec()),
            _ if line.contains("/endless") => ok(listing(
                &[("a", "1", TAGGED)],
                "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>",
            )),
            _ if line.contains("/sizes") => ok(listing(
                &[("good", "4", TAGGED), ("negative", "-1", TAGGED), ("huge", "99999999999999999999", TAGGED)],
                WHOLE,
            )),
            _ => ok(listing(
                &[
                    ("good", "4", TAGGED),
                    ("short", "4", TAGGED),
                    ("long", "4", TAGGED),
                    ("untagged", "4", ""),
                    ("other", "4", TAGGED),
                    ("range", "4", TAGGED),
                    ("page", "4", TAGGED),
                ],
                WHOLE,
            )),
        };
    }
    let tag = "etag: \"v1\"\n";
    match line.split(' ').nth(1).and_then(|path| path.rsplit('/').next()).unwrap_or_default() {
        "good" => part(tag, "0-3/4", b"good"),
        "short" => part(tag, "0-3/4", b"go"),
        "long" => part(tag, "0-3/4", b"goodgoodgood"),
        "untagged" => part("", "0-3/4", b"good"),
        "other" => part("etag: \"v2\"\n", "0-3/4", b"evil"),
        "range" => part(tag, "10-13/40", b"evil"),
        "page" => ok(b"<html>evil</html>".to_vec()),
        _ => ("HTTP/1.1 404 Not Found\ncontent-length: 0\n".to_owned(), vec![]),
    }
}

#[test]
fn a_store_that_lies_is_not_believed() {
    let conf = CONF.replace("[client]\n", "[client]\nread_timeout = \"3s\"\nbucket_timeout = \"3s\"\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let garbled = Arc::new(AtomicBool::new(false));
    let switch = garbled.clone();
    let server = Server::http(move |head| answer(head, switch.load(Ordering::Relaxed)));
    let options = [format!("s3.endpoint_url={}", server.url()), "s3.anonymous=true".to_owned()];
    let mount = |bucket: &str| {
        let uri = format!("s3://{bucket}");
        let path = format!("/{bucket}");
        let mut arguments = vec!["mount", &uri, &path, "--write-type", "cache_mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        let finished = cluster.try_cv(&arguments);
        assert!(!finished.stderr.contains("panicked"), "{finished:?}");
        finished
    };
    assert_eq!(mount("lies").code, 0);
    let path = |name: &str| cluster.path("lies").join(name);
    eventually("the mount appears", Duration::from_secs(10), || {
        read(path("good")).ok().filter(|bytes| bytes == b"good")
    });
    for name in ["short", "long", "other", "range", "page"] {
        let error = read(path(name)).unwrap_err();
        assert!(matches!(errno(&error), Some(Errno::IO | Errno::STALE)), "{name}: {error}");
    }
    // Without a version there is nothing to hold it against; what the bucket says is taken, or refused, but not made
    // up.
    match read(path("untagged")) {
        Ok(bytes) => assert_eq!(bytes, b"good"),
        Err(error) => assert!(matches!(errno(&error), Some(Errno::IO | Errno::STALE | Errno::NOENT)), "{error}"),
    }
    // Listings.
    garbled.store(true, Ordering::Relaxed);
    let refresh = cluster.try_cv(&["refresh", "/lies"]);
    assert!(refresh.code != 0 && refresh.stderr.lines().count() == 1, "{refresh:?}");
    assert_eq!(read(path("good")).unwrap(), b"good", "what is known goes on being served");
    let refused = mount("garbled");
    assert!(refused.code != 0 && refused.stderr.contains("XML"), "{refused:?}");
    garbled.store(false, Ordering::Relaxed);
    for bucket in ["endless", "sizes"] {
        let mounted = mount(bucket);
        eprintln!("{bucket}: {mounted:?}");
        let refresh = cavern_tests::within("a refresh", Duration::from_secs(30), {
            let conf = cluster.at_start.conf.clone();
            let path = format!("/{bucket}");
            move || {
                std::process::Command::new(cavern_tests::cv_path())
                    .args(["refresh", &path])
                    .env("CV_CONF", conf)
                    .output()
            }
        });
        let refresh = refresh.unwrap();
        eprintln!("{bucket}: {}", String::from_utf8_lossy(&refresh.stderr));
        // An object without a size that a file can have is hidden, and those beside it are not.
        let shown = String::from_utf8_lossy(&refresh.stdout);
        let hidden = shown.contains("1 directory, 1 entry") && shown.contains("2 keys hidden");
        assert_eq!((refresh.status.success(), hidden), (bucket == "sizes", bucket == "sizes"), "{bucket}: {refresh:?}");
    }
    assert_eq!(read(path("good")).unwrap(), b"good");
    for child in cluster.status().masters.iter().chain(&cluster.at_start.workers).chain(&cluster.at_start.fuse) {
        let log = fs::read_to_string(&child.log).unwrap();
        assert!(!log.contains("panicked"), "{log}");
    }
    assert_eq!(cluster.status().masters[0].state, "running");
}

/// Keys of a page of the store that has always one more.
const PAGE: u64 = 500;

fn next_of_many(head: &str) -> (String, Vec<u8>) {
    let line = head.lines().next().unwrap_or_default();
    let token = line.split("continuation-token=").nth(1).and_then(|rest| rest.split(['&', ' ']).next());
    let first: u64 = token.and_then(|token| token.parse().ok()).unwrap_or_default();
    let keys: Vec<String> = (first..first + PAGE).map(|number| format!("k{number:012}")).collect();
    let entries: Vec<_> = keys.iter().map(|key| (key.as_str(), "1", TAGGED)).collect();
    let next = first + PAGE;
    let more = format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{next}</NextContinuationToken>");
    let body = listing(&entries, &more);
    (format!("HTTP/1.1 200 OK\ncontent-type: application/xml\ncontent-length: {}\n", body.len()), body)
}

#[test]
fn a_store_that_lists_for_ever_has_an_end() {
    let conf = format!("{CONF}[master]\nlisting_entries = 5000\nindex_entries = 8000\n");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let server = Server::http(move |head| {
        count.fetch_add(1, Ordering::Relaxed);
        next_of_many(head)
    });
    let endpoint = format!("s3.endpoint_url={}", server.url());
    let options = ["--write-type", "cache-mode", "-c", &endpoint, "-c", "s3.anonymous=true"];
    cluster.cv(&[&["mount", "s3://bottomless", "/bottomless"], &options[..]].concat());
    let shown = || cluster.cv(&["mount", "--json"]).stdout;
    eventually("the index has come to its end", Duration::from_secs(30), || {
        let shown = shown();
        (shown.contains("more than 8000 entries") && shown.contains("raise master.index_entries")).then_some(())
    });
    let refresh = cluster.try_cv(&["refresh", "/bottomless"]);
    assert_ne!(refresh.code, 0, "{refresh:?}");
    for part in ["bottomless", "more than 5000 entries", "raise master.listing_entries"] {
        assert!(refresh.stderr.contains(part), "{part}: {refresh:?}");
    }
    // One page each more than there may be, and what a mount and a client ask for by themselves.
    let asked = asked.load(Ordering::Relaxed);
    assert!(asked < 4 * (8000 + 5000) / PAGE, "{asked} requests");
}

/// Whoever unmounts a bucket takes its credentials away: what lists it ends.
#[test]
fn a_bucket_that_is_unmounted_while_it_is_listed_is_asked_nothing_more() {
    const QUIET: Duration = Duration::from_secs(1);
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let counted = Arc::new(AtomicU64::new(0));
    let asked = || counted.load(Ordering::Relaxed);
    let server = Server::http({
        let counted = counted.clone();
        move |head| {
            counted.fetch_add(1, Ordering::Relaxed);
            next_of_many(head)
        }
    });
    let endpoint = format!("s3.endpoint_url={}", server.url());
    let options = ["--write-type", "cache-mode", "-c", &endpoint, "-c", "s3.anonymous=true"];
    cluster.cv(&[&["mount", "s3://bottomless", "/bottomless"], &options[..]].concat());
    let mut refresh = cluster.command(&["refresh", "/bottomless"]);
    let mut refresh = refresh.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let before = asked();
    eventually("it is listed", Duration::from_secs(10), || (asked() > before + 20).then_some(()));
    cluster.cv(&["umount", "/bottomless"]);
    let ended = cavern_tests::within("the refresh ends", Duration::from_secs(10), move || refresh.wait());
    assert!(!ended.unwrap().success());
    let (mut last, mut since) = (asked(), Instant::now());
    eventually("nothing more is asked", Duration::from_secs(10), || {
        if asked() != last {
            (last, since) = (asked(), Instant::now());
        }
        (since.elapsed() > QUIET).then_some(())
    });
}

//! `cv mount` and `cv umount` with arguments that cannot be right: an exit code, one sentence that names what is wrong,
//! and a mount table that is as it was.
//!
//! Credentials: wrong secret, unknown access key, access key alone, secret alone, credentials beside `s3.anonymous`,
//! none where they are needed. Endpoints: a closed port, one that accepts and is silent, one that says garbage, one
//! that is a web page, no URL, another scheme, a path, a password, a port out of range. Buckets: missing, too short,
//! upper case, illegal characters, none, a prefix with `//` or `..`, another scheme. Options: unknown, no boolean, a
//! region of odd characters, a value of 9 KB, seventy of them. Paths: the root, relative, `..`, a name of 256 bytes, 4
//! KB, 1,100 deep, in another mount, above another mount, on a mount, on a file. And unmounting what is not there.

use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};

use super::server::Server;
use super::{CONF, assert_sentence};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const UNREACHABLE: i32 = 3;
const NOT_FOUND: i32 = 4;

#[test]
fn mounts_that_cannot_be_are_refused_with_the_reason_and_change_nothing() {
    let cluster = Cluster::up(Options { conf: CONF.to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 3, 1000);
    cluster.s3.create_bucket("other");
    cluster.mount("s3://bucket", "/data/set", &[]);
    let before = eventually("the index is complete", Duration::from_secs(10), || {
        let mounts = cluster.cv(&["mount", "--json"]).json();
        (mounts[0]["status"]["indexing"] == false).then_some(mounts)
    });
    // Of those that no test gets which asks for any port.
    let closed = "127.0.0.1:1";
    let (silent, garbage) = (Server::silent(), Server::saying(b"\x16\x03\x01 this is no HTTP\r\n\r\n"));
    let page = Server::http(|_| ("HTTP/1.1 200 OK\ncontent-type: text/html\n".to_owned(), b"<html></html>".to_vec()));

    let refused = |uri: &str, path: &str, options: &[String], code: i32, fragments: &[&str]| {
        let mut arguments = vec!["mount", uri, path, "--write-type", "cache_mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        let finished = cluster.try_cv(&arguments);
        let what = format!("mount {uri:.40} {path:.40} {:.200}", options.join(" "));
        assert_eq!(finished.code, code, "{what}: {finished:?}");
        assert_sentence(&what, &finished.stderr, fragments);
        assert!(!finished.stderr.contains(&cluster.s3.secret_key), "{what}: {}", finished.stderr);
        assert_eq!(cluster.cv(&["mount", "--json"]).json(), before, "{what}");
    };
    let good = cluster.bucket_options();
    let with = |index: usize, option: &str| {
        let mut options = good.clone();
        options[index] = option.to_owned();
        options
    };
    let and = |option: String| good.iter().cloned().chain([option]).collect::<Vec<_>>();
    let without = |index: usize| {
        let mut options = good.clone();
        options.remove(index);
        options
    };
    let endpoint = |url: &str| with(0, &format!("s3.endpoint_url={url}"));

    // Credentials.
    refused("s3://bucket", "/x", &with(3, "s3.credentials.secret=wrong"), FAILED, &["SignatureDoesNotMatch"]);
    refused("s3://bucket", "/x", &with(2, "s3.credentials.access=nobody"), FAILED, &["access denied"]);
    refused("s3://bucket", "/x", &without(3), USAGE, &["s3.credentials.access", "s3.credentials.secret"]);
    refused("s3://bucket", "/x", &without(2), USAGE, &["s3.credentials.secret", "s3.credentials.access"]);
    refused("s3://bucket", "/x", &and("s3.anonymous=true".to_owned()), USAGE, &["s3.anonymous"]);
    let anonymous = [good[0].clone(), "s3.anonymous=true".to_owned()];
    refused("s3://bucket", "/x", &anonymous, FAILED, &["access denied"]);

    // Endpoints.
    refused("s3://bucket", "/x", &endpoint(&format!("http://{closed}")), UNREACHABLE, &[closed]);
    refused("s3://bucket", "/x", &endpoint(&silent.url()), UNREACHABLE, &[&silent.address]);
    refused("s3://bucket", "/x", &endpoint(&garbage.url()), UNREACHABLE, &[&garbage.address]);
    refused("s3://bucket", "/x", &endpoint(&page.url()), UNREACHABLE, &["no ListBucketResult"]);
    refused("s3://bucket", "/x", &endpoint("what is this"), USAGE, &["s3.endpoint_url"]);
    refused("s3://bucket", "/x", &endpoint("ftp://h"), USAGE, &["s3.endpoint_url", "http"]);
    refused("s3://bucket", "/x", &endpoint("http://h/path"), USAGE, &["s3.endpoint_url", "path"]);
    refused("s3://bucket", "/x", &endpoint("http://me:hush@h"), USAGE, &["s3.endpoint_url", "password"]);
    refused("s3://bucket", "/x", &endpoint("http://h:70000"), USAGE, &["s3.endpoint_url"]);

    // Buckets and prefixes.
    refused("s3://missing", "/x", &good, FAILED, &["s3://missing", "no such bucket"]);
    refused("s3://bk", "/x", &good, FAILED, &["s3://bk"]);
    refused("s3://BUCKET", "/x", &good, FAILED, &["s3://BUCKET"]);
    refused("s3://buck et", "/x", &good, USAGE, &["buck et"]);
    refused("s3://", "/x", &good, USAGE, &["names no bucket"]);
    refused("s3://bucket/a//b", "/x", &good, USAGE, &["//"]);
    refused("s3://bucket/../b", "/x", &good, USAGE, &[".."]);
    refused("gopher://bucket", "/x", &good, USAGE, &["gopher", "s3://"]);

    // Options.
    refused("s3://bucket", "/x", &and("s3.credentials.acess=a".to_owned()), USAGE, &["s3.credentials.access"]);
    refused("s3://bucket", "/x", &and("s3.force.path.style=maybe".to_owned()), USAGE, &["true or false"]);
    refused("s3://bucket", "/x", &with(1, "s3.region_name=a b"), USAGE, &["s3.region_name"]);
    refused("s3://bucket", "/x", &and(format!("s3.credentials.profile={}", "x".repeat(9000))), USAGE, &["bytes"]);
    let many: Vec<_> = (0..70).map(|number| format!("option{number}=x")).collect();
    refused("s3://bucket", "/x", &many, USAGE, &["options"]);

    // Paths.
    refused("s3://other", "/", &good, USAGE, &["root"]);
    refused("s3://other", "relative", &good, USAGE, &["relative"]);
    refused("s3://other", "/a/../b", &good, USAGE, &[".."]);
    refused("s3://other", &format!("/{}", "n".repeat(256)), &good, USAGE, &["255"]);
    refused("s3://other", &"/abc".repeat(1100), &good, USAGE, &["4096"]);
    refused("s3://other", &"/a".repeat(1100), &good, USAGE, &["1024"]);
    refused("s3://other", "/data/set/inner", &good, FAILED, &["/data/set"]);
    refused("s3://other", "/data", &good, FAILED, &["/data"]);
    refused("s3://other", "/data/set", &good, FAILED, &["/data/set", "s3://bucket"]);
    refused("s3://other", "/data/set/0000/000000.bin", &good, FAILED, &["/data/set"]);

    for (path, code, fragment) in [
        ("/", USAGE, "root"),
        ("relative", USAGE, "relative"),
        ("/none", NOT_FOUND, "/none"),
        ("/data", NOT_FOUND, "/data"),
        ("/data/set/0000", NOT_FOUND, "/data/set/0000"),
    ] {
        let finished = cluster.try_cv(&["umount", path]);
        assert_eq!(finished.code, code, "umount {path}: {finished:?}");
        assert_sentence(path, &finished.stderr, &[fragment]);
    }
    assert_eq!(cluster.cv(&["mount", "--json"]).json(), before);
    cluster.assert_tree("data/set", "", &tree);
}

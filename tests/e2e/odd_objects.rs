//! Keys that no file system would have made, and objects of odd sizes: each has its outcome in `docs/semantics.md`, and
//! none keeps anybody from the rest.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bytes::Bytes;
use cavern_tests::{COUNTED, Cluster, Options};
use rustix::io::Errno;

fn mounted(keys: impl IntoIterator<Item = impl AsRef<str>>) -> Cluster {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    for key in keys {
        // The content is the key: what is read says what was opened.
        cluster.s3.put("bucket", key.as_ref(), Bytes::copy_from_slice(key.as_ref().as_bytes()));
    }
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    cluster
}

/// Runs a program on the mounted bucket; it must succeed and have nothing to complain about.
#[track_caller]
fn runs(cluster: &Cluster, program: &str, arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(cluster.path("data")).stdin(Stdio::null()).env("LC_ALL", "C.UTF-8");
    let output = command.output().unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && complaints.is_empty(),
        "{program} {arguments:?}: {} {complaints}",
        output.status
    );
    output.stdout
}

/// Every listing of everything succeeds; answers what `find` finds, relative to the mount.
#[track_caller]
fn tree(cluster: &Cluster) -> BTreeSet<String> {
    runs(cluster, "ls", &[]);
    runs(cluster, "ls", &["-laR"]);
    runs(cluster, "du", &["-a"]);
    let found = runs(cluster, "find", &[".", "-mindepth", "1", "-printf", "%P\\0"]);
    let found = String::from_utf8(found).unwrap();
    found.split_terminator('\0').map(str::to_owned).collect()
}

/// The keys and the directories above them.
fn expected<'a>(keys: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    let mut tree = BTreeSet::new();
    for key in keys {
        tree.insert(key.trim_end_matches('/').to_owned());
        tree.extend(key.match_indices('/').map(|(end, _)| key[..end].to_owned()));
    }
    tree
}

#[track_caller]
fn hidden(cluster: &Cluster) -> u64 {
    cluster.cv(&["refresh", "/data", "--json"]).json()["hidden"].as_u64().unwrap()
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

#[test]
fn names_of_any_characters_are_the_keys_byte_for_byte() {
    let keys = [
        " leading",
        "trailing ",
        "in side",
        "two  spaces",
        " ",
        "caf\u{e9}",
        "cafe\u{301}",
        "日本/語",
        "🦀",
        "%41",
        "A",
        "100%",
        "%2F",
        "a+b",
        "a b",
        "quote\"",
        "quote'",
        "`$HOME`",
        "new\nline",
        "cr\r",
        "tab\t",
        "\u{1}control",
        "\u{7f}",
        "back\\slash",
        "*?[x]",
        "-rf",
        "--help",
        "~",
        "&amp;",
        "<xml>",
        "semi;colon",
        "#hash",
        "?query=1&b=2",
        "=",
        ":",
        "...",
        "..a",
        ".hidden",
        "a.",
        "dir with space/and +%20/file",
        "\u{202e}rtl",
        "\u{fffd}",
        "\u{fffe}",
        "z\u{200b}ero",
    ];
    let cluster = mounted(keys);
    assert_eq!(tree(&cluster), expected(keys));
    for key in keys {
        let path = cluster.path("data").join(key);
        let read = fs::read(&path).unwrap_or_else(|error| panic!("{key:?}: {error}"));
        assert_eq!(String::from_utf8(read).unwrap(), key);
        assert_eq!(fs::metadata(&path).unwrap().len(), key.len() as u64);
    }
    assert_eq!(hidden(&cluster), 0);
    assert_eq!(cluster.s3.requests("HEAD"), 0);
    for key in ["caf\u{e9}", "cafe\u{301}", "a+b", "%41", "日本/語", " leading", "trailing ", "back\\slash"] {
        assert_eq!(cluster.cv(&["fs", "cat", &format!("/data/{key}")]).stdout, key);
    }
    // What would be another spelling elsewhere is another name here.
    for missing in ["CAF\u{c9}", "a%20b", "a%2Bb", "leading", "trailing"] {
        assert_eq!(errno(fs::metadata(cluster.path("data").join(missing))), Errno::NOENT);
    }
}

#[test]
fn keys_that_cannot_be_paths_are_hidden_and_counted() {
    let long = "x".repeat(256);
    let umlauts = "ü".repeat(128);
    let shown = ["plain", "slashes/inside", "dots/inside", "lo/ng/inside"];
    let hiding = [
        "slashes//b".to_owned(),
        "/rooted".to_owned(),
        "//".to_owned(),
        "dots/./x".to_owned(),
        "dots/../plain".to_owned(),
        "dots/.".to_owned(),
        "..".to_owned(),
        "./a".to_owned(),
        "end/..".to_owned(),
        long.clone(),
        format!("lo/{long}"),
        format!("lo/{long}/below"),
        format!("lo/{umlauts}"),
    ];
    let cluster = mounted(shown.into_iter().map(str::to_owned).chain(hiding.clone()));
    let mut visible = expected(shown);
    // Its only key cannot be shown; the directory can.
    visible.insert("end".to_owned());
    assert_eq!(tree(&cluster), visible);
    for key in shown {
        assert_eq!(fs::read(cluster.path("data").join(key)).unwrap(), key.as_bytes(), "{key}");
    }
    // Entries of listings: `//` and `/rooted` are one in the root (`/`), the two below `lo/xxx…` are an object and a
    // prefix.
    assert_eq!(hidden(&cluster), hiding.len() as u64 - 1);
    let mounts = cluster.cv(&["mount", "--json"]).json();
    assert!(mounts.to_string().contains(&format!("\"hidden_keys\":{}", hiding.len())), "{mounts}");
    // They are not reached by another way either: the kernel resolves these itself.
    assert_eq!(fs::read(cluster.path("data/dots/../plain")).unwrap(), b"plain");
    assert_eq!(fs::read(cluster.path("data/slashes//inside")).unwrap(), b"slashes/inside");
    assert_eq!(errno(fs::read(cluster.path("data/slashes//b"))), Errno::NOENT);
    assert_eq!(errno(fs::metadata(cluster.path("data").join(&long))), Errno::NAMETOOLONG);
    assert_eq!(errno(fs::metadata(cluster.path("data/lo").join(&umlauts))), Errno::NAMETOOLONG);
}

#[test]
fn names_of_255_bytes_are_shown() {
    let ascii = "x".repeat(255);
    let umlauts = format!("{}x", "ü".repeat(127));
    let both = format!("{}/{umlauts}", "d".repeat(255));
    let keys = [ascii.as_str(), umlauts.as_str(), both.as_str()];
    let cluster = mounted(keys);
    assert_eq!(tree(&cluster), expected(keys));
    for key in keys {
        assert_eq!(fs::read(cluster.path("data").join(key)).unwrap(), key.as_bytes());
    }
}

#[test]
fn a_key_with_a_slash_at_its_end_is_a_directory() {
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "marker/", Bytes::new());
    cluster.s3.put("bucket", "full/", "content of a marker is not shown");
    cluster.s3.put("bucket", "full/file", "file");
    cluster.s3.put("bucket", "prefix/", Bytes::new());
    cluster.s3.put("bucket", "prefix/inner/", Bytes::new());
    cluster.mount("s3://bucket", "/data", &["--metadata-ttl", "1h"]);
    assert_eq!(tree(&cluster), expected(["marker/", "full/file", "prefix/inner/"]));
    for (directory, entries) in [("marker", 0), ("full", 1), ("prefix", 1), ("prefix/inner", 0)] {
        let path = cluster.path("data").join(directory);
        assert!(fs::metadata(&path).unwrap().is_dir(), "{directory}");
        assert_eq!(fs::read_dir(&path).unwrap().count(), entries, "{directory}");
    }
    assert_eq!(errno(fs::read(cluster.path("data/full"))), Errno::ISDIR);
    assert_eq!(hidden(&cluster), 0);
    // A mount whose prefix has nothing but its own marker is an empty directory.
    cluster.mount("s3://bucket/marker", "/empty", &[]);
    assert_eq!(fs::read_dir(cluster.path("empty")).unwrap().count(), 0);
}

#[test]
fn a_directory_wins_over_an_object_of_the_same_name() {
    // `a-` and `a.b` sort between `a` and `a/`.
    let cluster = mounted(["a", "a-", "a.b", "a/b", "z/y", "z"]);
    assert_eq!(tree(&cluster), expected(["a-", "a.b", "a/b", "z/y"]));
    for directory in ["a", "z"] {
        assert!(fs::metadata(cluster.path("data").join(directory)).unwrap().is_dir());
    }
    for key in ["a-", "a.b", "a/b", "z/y"] {
        assert_eq!(fs::read(cluster.path("data").join(key)).unwrap(), key.as_bytes());
    }
    // Without the keys below it, the object shows; and the other way round.
    cluster.s3.delete("bucket", "a/b");
    cluster.s3.put("bucket", "a-/below", "a-/below");
    cluster.cv(&["refresh", "/data"]);
    assert_eq!(tree(&cluster), expected(["a", "a-/below", "a.b", "z/y"]));
    assert_eq!(fs::read(cluster.path("data/a")).unwrap(), b"a");
    assert_eq!(fs::read(cluster.path("data/a-/below")).unwrap(), b"a-/below");
}

#[test]
fn deep_and_long_keys_are_paths() {
    let deep = format!("{}file", "d/".repeat(300));
    // 1,024 bytes, the longest key of S3: 512 components.
    let longest = format!("{}ab", "e/".repeat(511));
    let wide = [&"w".repeat(255)[..]; 4].join("/");
    assert_eq!((longest.len(), wide.len()), (1024, 1023));
    let keys = [deep.as_str(), longest.as_str(), wide.as_str()];
    let cluster = mounted(keys);
    for key in keys {
        assert_eq!(fs::read(cluster.path("data").join(key)).unwrap(), key.as_bytes());
        assert_eq!(cluster.cv(&["fs", "cat", &format!("/data/{key}")]).stdout, key);
    }
    assert_eq!(tree(&cluster), expected(keys));
    let counted = cluster.cv(&["refresh", "/data", "--json"]).json();
    assert_eq!((&counted["added"], &counted["removed"], &counted["hidden"]), (&0.into(), &0.into(), &0.into()));
}

#[test]
fn an_empty_object_is_an_empty_file_and_asks_the_bucket_nothing() {
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "empty", Bytes::new());
    cluster.mount("s3://bucket", "/data", &[]);
    let path = cluster.path("data/empty");
    cluster.s3.reset_stats();
    assert_eq!((fs::read(&path).unwrap().len(), fs::metadata(&path).unwrap().blocks()), (0, 0));
    assert_eq!(runs(&cluster, "cat", &["empty"]), b"");
    assert_eq!((cluster.s3.requests("GET"), cluster.s3.requests("HEAD")), (0, 0));
}

#[test]
fn an_object_of_5_gib_is_read_anywhere() {
    const SIZE: u64 = 5 << 30;
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.s3.put_sparse("bucket", "sparse", SIZE);
    cluster.mount("s3://bucket", "/data", &[]);
    let path = cluster.path("data/sparse");
    assert_eq!(fs::metadata(&path).unwrap().len(), SIZE);
    let file = File::open(&path).unwrap();
    let mut buffer = vec![1; 70_000];
    // The ends of the file, of blocks (64 MiB), and of what 31 and 32 bits can count.
    for end in [70_000, 64 << 20, (64 << 20) + 35_000, 1 << 31, (1 << 31) + 35_000, 1 << 32, (1 << 32) + 1, SIZE] {
        buffer.fill(1);
        let at = end - buffer.len() as u64;
        file.read_exact_at(&mut buffer, at).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 0), "at {at}");
    }
    assert_eq!(file.read_at(&mut buffer, SIZE - 10).unwrap(), 10);
    assert_eq!(file.read_at(&mut buffer, SIZE).unwrap(), 0);
    assert_eq!(file.read_at(&mut buffer, SIZE + (1 << 40)).unwrap(), 0);
    assert_eq!(runs(&cluster, "tail", &["-c", "3", "sparse"]), [0; 3]);
    assert!(cluster.s3.bytes_out() < 1 << 30, "{} bytes for a few reads", cluster.s3.bytes_out());
}

#[test]
fn an_odd_key_does_not_hide_its_neighbours_in_a_long_listing() {
    // Pages of a thousand entries, with an odd one at each of their borders.
    let cluster = Cluster::up(Options::default());
    cluster.s3.create_bucket("bucket");
    let plain: Vec<String> = (0..2100).map(|number| format!("dir/{number:05}")).collect();
    for key in &plain {
        cluster.s3.put("bucket", key, "x");
    }
    for odd in ["dir//00998", "dir/00999\n", "dir/01000/", "dir/./x", "dir/01998 ", "dir/01999/below", "dir/../x"] {
        cluster.s3.put("bucket", odd, "odd");
    }
    cluster.mount("s3://bucket", "/data", &[]);
    let mut visible = expected(plain.iter().map(String::as_str));
    visible.extend(expected(["dir/00999\n", "dir/01000/", "dir/01998 ", "dir/01999/below"]));
    assert_eq!(tree(&cluster), visible);
    let names: BTreeSet<PathBuf> =
        fs::read_dir(cluster.path("data/dir")).unwrap().map(|entry| entry.unwrap().file_name().into()).collect();
    assert!(names.contains(Path::new(OsStr::from_bytes(b"00999\n"))) && names.len() == plain.len() + 2);
}

//! Whole trees of images from two object stores, the embedded one and that of moto, looked at with the usual tools:
//! `find`, `ls -lR`, `du`, `sha256sum`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use cavern_tests::{COUNTED, Cluster, Moto, Options, number};

/// Images in the embedded store, and in that of moto, which answers a few hundred requests a second; in folders of a
/// thousand. `CAVERN_IMAGES` and `CV_TEST_MOTO_IMAGES` say other numbers.
const IMAGES: u64 = 6000;
const MOTO_IMAGES: u64 = 1200;

#[test]
fn a_tree_of_images_is_that_of_the_bucket_and_costs_no_head() {
    let of_environment = |name: &str, otherwise: u64| number(name, otherwise) as usize;
    let image_count = of_environment("CAVERN_IMAGES", IMAGES);
    let moto_images = of_environment("CV_TEST_MOTO_IMAGES", MOTO_IMAGES);
    let cluster = Cluster::up(Options { conf: COUNTED.to_owned(), ..Options::default() });
    let images = |count: usize| {
        let directory = cluster.directory().join(format!("images-{count}"));
        let path = directory.to_str().unwrap();
        cluster.cv(&["gen-images", path, "--count", &count.to_string(), "--mean-size", "50KB"]);
        directory
    };
    let source = images(image_count);
    let place = cluster.directory().to_str().unwrap();
    cluster.cv(&["local", "seed", source.to_str().unwrap(), "s3://images/train", "--dir", place]);
    cluster.mount("s3://images/train", "/embedded", &[]);
    cluster.s3.reset_stats();
    assert_same(&source, &cluster.path("embedded"), image_count);
    let counted = ["HEAD", "GET"].map(|kind| cluster.s3.requests(kind));
    assert_eq!(counted, [0, image_count as u64], "HEAD and GET requests: {}", cluster.s3.stats());

    let source = images(moto_images);
    let moto = Moto::serve("images", &source);
    cluster.mount_from(&moto.bucket_options(), "s3://images", "/moto", &[]);
    moto.reset_requests();
    assert_same(&source, &cluster.path("moto"), moto_images);
    let counted = ["HEAD", "GET"].map(|kind| moto.requests(kind));
    assert_eq!(counted, [0, moto_images as u64], "HEAD and GET requests");
}

/// Panics unless the trees have the same names, sizes and bytes, of `files` files.
#[track_caller]
fn assert_same(source: &Path, shown: &Path, files: usize) {
    let began = Instant::now();
    let names = "find . -printf '%y %P %s\n' | sed 's/^d \\(.*\\) .*/d \\1/' | LC_ALL=C sort";
    let found = run(shown, names);
    assert_eq!(found.lines().filter(|line| line.starts_with('f')).count(), files);
    assert_lines(&found, &run(source, names));
    let listing_seconds = began.elapsed().as_secs_f64();
    // Kind, size and name; of a directory its size is the file system's own matter, and so are the blocks behind
    // `total`.
    let listing = "LC_ALL=C ls -lR | awk '/^-/ { print \"-\", $5, $9 } /^d/ { print \"d\", $9 } /^\\./ { print }'";
    let listed = run(shown, listing);
    assert_eq!(listed.lines().filter(|line| line.starts_with('-')).count(), files);
    assert_lines(&listed, &run(source, listing));
    // Of files alone, as above.
    let used = "du -ab . | grep '\\.jpg$' | LC_ALL=C sort -k 2";
    let counted = run(shown, used);
    assert_eq!(counted.lines().count(), files);
    assert_lines(&counted, &run(source, used));

    let began = Instant::now();
    let sums = "find . -type f -print0 | xargs -0 -P 8 -n 50 sha256sum | LC_ALL=C sort -k 2";
    let read = run(shown, sums);
    let seconds = began.elapsed().as_secs_f64();
    assert_eq!(read.lines().count(), files);
    assert_lines(&read, &run(source, sums));
    eprintln!(
        "{}: find {listing_seconds:.2} s, {files} files cold with sha256sum {seconds:.1} s, {:.0} files/s",
        shown.display(),
        files as f64 / seconds
    );
}

/// Compares line by line, so that a difference is reported in one line.
#[track_caller]
fn assert_lines(shown: &str, source: &str) {
    let mut pairs = shown.lines().zip(source.lines());
    if let Some((shown, source)) = pairs.find(|(shown, source)| shown != source) {
        panic!("{shown:?} is shown, {source:?} is what was stored");
    }
    assert_eq!(shown.lines().count(), source.lines().count());
}

/// What a pipeline of the shell prints, run in `directory`; every part of it must succeed.
#[track_caller]
fn run(directory: &Path, pipeline: &str) -> String {
    let mut command = Command::new("bash");
    command.arg("-c").arg(format!("set -o pipefail; {pipeline}")).current_dir(directory).stdin(Stdio::null());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{pipeline}: {:?} {stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

//! `fuse.no_open`: the kernel opens and closes by itself, and what is read is the same.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rustix::io::Errno;

const PATIENCE: Duration = Duration::from_secs(30);

/// Requests of a kind that the kernel has sent.
fn requests(cluster: &Cluster, operation: &str) -> u64 {
    let sample = format!("cavern_fuse_requests_total{{operation=\"{operation}\"");
    cluster.at_start.fuse[0].metric(&sample).unwrap_or_default()
}

#[test]
fn files_are_read_without_open_and_release_and_from_pages_without_any_request() {
    let cluster = Cluster::up(Options { conf: "[fuse]\nno_open = true\n".to_owned(), ..Options::default() });
    let tree = cluster.seed("bucket", "", 100, 50_000);
    let large: Vec<u8> = (0..9_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    cluster.s3.create_bucket("other");
    cluster.s3.put("other", "large", large.clone());
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.mount("s3://other", "/other", &["--consistency", "always"]);

    cluster.assert_tree("data", "", &tree);
    let cold = ["open", "release", "read"].map(|operation| requests(&cluster, operation));
    assert!(cold[0] <= 4 && cold[1] == 0, "{cold:?}: only the first opens are asked, at most one for each event loop");
    assert!(cold[2] >= 100);
    // The kernel may have taken a page back meanwhile.
    eventually("every page is the kernel's", PATIENCE, || {
        let before = requests(&cluster, "read");
        cluster.assert_tree("data", "", &tree);
        (requests(&cluster, "read") == before).then_some(())
    });

    // A large file: streamed, and at random from several handles.
    let path = cluster.path("other/large");
    assert!(fs::read(&path).unwrap() == large);
    let handles = [File::open(&path).unwrap(), File::open(&path).unwrap()];
    for (number, at) in (0..100).map(|number| (number, number * 89_989 % 8_000_000)) {
        let mut bytes = vec![0; 1000];
        handles[number % 2].read_exact_at(&mut bytes, at as u64).unwrap();
        assert!(bytes == large[at..at + 1000], "at {at}");
    }

    // What is always checked is checked by the lookup.
    cluster.s3.put("other", "large", "another version");
    assert_eq!(fs::read(&path).unwrap(), b"another version");
    cluster.s3.delete("other", "large");
    assert_eq!(fs::read(&path).unwrap_err().kind(), io::ErrorKind::NotFound);

    let file = cluster.path("data").join(tree.keys().next().unwrap());
    let refused = OpenOptions::new().write(true).open(file).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
}

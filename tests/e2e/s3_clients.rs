//! Standard S3 clients and the embedded object store: what they write the mount shows, and what they ask is answered.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use cavern_tests::{Cluster, Finished, Options, outside_command, python};

fn run(mut command: Command) -> Finished {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}: run bin/setup --tests"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Finished { code: output.status.code().unwrap_or(-1), stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

#[test]
fn boto3_finds_what_it_knows_of_s3() {
    let cluster = Cluster::up(Options::default());
    let mut command = python("s3_boto3.py");
    command.env("S3_ENDPOINT", &cluster.s3.endpoint);
    command.env("S3_ACCESS_KEY", &cluster.s3.access_key).env("S3_SECRET_KEY", &cluster.s3.secret_key);
    let finished = run(command);
    assert!(finished.code == 0 && finished.stderr.contains("Ran 12 tests"), "{}", finished.stderr);
}

#[test]
fn rclone_copies_checks_and_deletes_and_the_mount_follows() {
    let cluster = Cluster::up(Options::default());
    let source = cluster.directory().join("source");
    let mut tree = BTreeMap::new();
    for (name, size) in [("a/one.bin", 1), ("a/two é+.bin", 50_000), ("b/c/empty", 0), ("large.bin", 12 << 20)] {
        let content: Vec<u8> = (0..size).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::create_dir_all(source.join(name).parent().unwrap()).unwrap();
        fs::write(source.join(name), &content).unwrap();
        tree.insert(name, content);
    }
    let conf = cluster.directory().join("rclone.conf");
    fs::write(
        &conf,
        format!(
            "[cavern]\ntype = s3\nprovider = Other\nendpoint = {}\naccess_key_id = {}\nsecret_access_key = {}\n\
             upload_cutoff = 5Mi\nchunk_size = 5Mi\n",
            cluster.s3.endpoint, cluster.s3.access_key, cluster.s3.secret_key
        ),
    )
    .unwrap();
    let try_rclone = |arguments: &[&str]| {
        let mut command = outside_command("rclone");
        command.arg("--config").arg(&conf).args(["--retries", "1"]).args(arguments);
        run(command)
    };
    let rclone = |arguments: &[&str]| {
        let finished = try_rclone(arguments);
        assert_eq!(finished.code, 0, "rclone {}: {}", arguments.join(" "), finished.stderr);
        finished
    };
    let local = source.to_str().unwrap();

    rclone(&["mkdir", "cavern:photos"]);
    rclone(&["copy", local, "cavern:photos/train"]);
    let parts = cluster.s3.stats()["operations"]["UploadPart"].as_u64();
    assert_eq!(parts, Some(3), "12 MiB in parts of 5 MiB");
    rclone(&["check", local, "cavern:photos/train"]);
    rclone(&["check", "--download", local, "cavern:photos/train"]);
    let listed = rclone(&["lsjson", "-R", "--files-only", "cavern:photos/train"]).json();
    let listed: BTreeMap<&str, u64> = (listed.as_array().unwrap().iter())
        .map(|entry| (entry["Path"].as_str().unwrap(), entry["Size"].as_u64().unwrap()))
        .collect();
    assert_eq!(listed, tree.iter().map(|(name, content)| (*name, content.len() as u64)).collect());
    assert_eq!(rclone(&["cat", "--offset", "10", "--count", "5", "cavern:photos/train/large.bin"]).code, 0);

    cluster.mount("s3://photos", "/photos", &[]);
    let assert_shown = |folder: &str, tree: &BTreeMap<&str, Vec<u8>>| {
        for (name, content) in tree {
            let read = fs::read(cluster.path("photos").join(folder).join(name)).unwrap();
            assert!(read == *content, "{name}: {} bytes, wrong content", read.len());
        }
    };
    assert_shown("train", &tree);

    // Copied by the store itself, moved, changed, deleted: each time the mount has it after a refresh.
    rclone(&["copy", "cavern:photos/train", "cavern:photos/copy"]);
    assert_eq!(cluster.s3.requests("COPY"), 4);
    rclone(&["moveto", "cavern:photos/copy/a/one.bin", "cavern:photos/copy/a/uno.bin"]);
    fs::write(source.join("a/one.bin"), "another").unwrap();
    fs::remove_file(source.join("b/c/empty")).unwrap();
    assert_eq!(try_rclone(&["check", local, "cavern:photos/train"]).code, 1, "they differ");
    rclone(&["sync", local, "cavern:photos/train"]);
    rclone(&["check", local, "cavern:photos/train"]);
    cluster.cv(&["refresh", "/photos"]);
    let mut copy = tree.clone();
    let moved = copy.remove("a/one.bin").unwrap();
    copy.insert("a/uno.bin", moved);
    assert_shown("copy", &copy);
    assert!(!cluster.path("photos/copy/a/one.bin").exists());
    tree.insert("a/one.bin", b"another".to_vec());
    tree.remove("b/c/empty");
    assert_shown("train", &tree);
    assert!(!cluster.path("photos/train/b").exists());

    rclone(&["delete", "cavern:photos/copy"]);
    rclone(&["purge", "cavern:photos/train"]);
    cluster.cv(&["refresh", "/photos"]);
    assert_eq!(names(&cluster.path("photos")), 0);
    rclone(&["rmdir", "cavern:photos"]);
    assert_eq!(rclone(&["lsd", "cavern:"]).stdout, "");
}

fn names(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

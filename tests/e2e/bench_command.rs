//! `cv bench`: that it counts what it does, says what went wrong, and leaves nothing behind. Speed is not looked at.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cavern_tests::{Cluster, Options, cv_path, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 4;

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(cv_path());
    command.arg("bench").args(arguments).stdin(Stdio::null());
    command
}

/// Exit code, stdout, stderr.
#[track_caller]
fn ran(arguments: &[&str]) -> (i32, String, String) {
    let output = bench(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The report of a run that succeeds.
#[track_caller]
fn report(arguments: &[&str]) -> Value {
    let (code, stdout, stderr) = ran(&[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "cv bench {arguments:?}: {stdout}{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["failures"], 0, "{report}");
    report
}

#[track_caller]
fn refused(arguments: &[&str], expected: i32, fragments: &[&str]) {
    let (code, stdout, stderr) = ran(arguments);
    assert_eq!((code, stdout.as_str()), (expected, ""), "cv bench {arguments:?}: {stderr}");
    for fragment in fragments {
        assert!(stderr.contains(fragment), "cv bench {arguments:?} does not say {fragment:?}: {stderr}");
    }
}

/// Operations that succeeded, by kind, of each round and side in the order in which they were run.
fn counts(report: &Value) -> Vec<(u64, String, Vec<u64>)> {
    let rounds = report["rounds"].as_array().unwrap().iter();
    let count = |round: &Value| {
        let operations = round["operations"].as_array().unwrap().iter();
        operations.map(|operation| operation["count"].as_u64().unwrap()).collect()
    };
    rounds
        .map(|round| (round["round"].as_u64().unwrap(), round["side"].as_str().unwrap().to_owned(), count(round)))
        .collect()
}

/// What two rounds on both sides give, where each does the same.
fn two_rounds(each: &[u64]) -> Vec<(u64, String, Vec<u64>)> {
    [(1, "target"), (1, "baseline"), (2, "baseline"), (2, "target")]
        .map(|(round, side)| (round, side.to_owned(), each.to_vec()))
        .to_vec()
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort_unstable();
    found
}

/// A directory with five files in two folders, and an empty one beside it.
fn two_directories() -> (tempfile::TempDir, String, String) {
    let top = tempfile::tempdir().unwrap();
    let (target, baseline) = (top.path().join("target"), top.path().join("baseline"));
    fs::create_dir_all(target.join("one/two")).unwrap();
    fs::create_dir(&baseline).unwrap();
    for (path, bytes) in [("a", 10), ("one/b", 200_000), ("one/c", 0), ("one/two/d", 3_000_000), ("one/two/e", 1)] {
        fs::write(target.join(path), vec![7; bytes]).unwrap();
    }
    let text = |path: PathBuf| path.into_os_string().into_string().unwrap();
    (top, text(target), text(baseline))
}

/// Copies what is in a directory into another.
fn copy(from: &str, to: &str) {
    assert!(Command::new("cp").arg("-r").arg(format!("{from}/.")).arg(to).status().unwrap().success());
}

#[test]
fn reads_of_plain_directories_are_counted() {
    let (top, target, baseline) = two_directories();
    let both = ["--baseline", baseline.as_str(), "--rounds", "2"];
    let differs = [&["files", &target][..], &both].concat();
    refused(&differs, FAILED, &["5 files missing, or of another size (a, one/b, one/c, …)", &target, "cp -r"]);

    copy(&target, &baseline);
    let files = report(&[&differs[..], &["--threads", "2", "--cache", "drop"]].concat());
    assert_eq!(counts(&files), two_rounds(&[5]));
    assert_eq!(files["rounds"][0]["operations"][0]["bytes"], 3_200_011);
    assert_eq!((&files["arguments"][1], &files["arguments"][2]), (&json!("files"), &json!(target)));
    assert!(files["work"].as_str().unwrap().ends_with("by 2 threads, 2 rounds in turn, seed 42"), "{files}");
    assert!(files["summary"][0]["ratio"].as_f64().unwrap() > 0.0 && files["machine"]["kernel"].is_string(), "{files}");

    let stream = report(&[&["stream", &target, "--streams", "2"][..], &both].concat());
    assert_eq!((counts(&stream), &stream["summary"][0]["unit"]), (two_rounds(&[4]), &json!("GiB/s")));
    let random = report(&[&["random", &target, "--threads", "3", "--count", "50"][..], &both].concat());
    assert_eq!(counts(&random), two_rounds(&[50]));
    let list = report(&[&["list", &target][..], &both].concat());
    assert_eq!(counts(&list), two_rounds(&[7, 7]));

    // A baseline that has become another one is seen.
    fs::write(Path::new(&baseline).join("more"), "").unwrap();
    refused(&differs, FAILED, &["1 file that should not be there (more)"]);
    fs::write(Path::new(&baseline).join("one/b"), "short").unwrap();
    refused(&differs, FAILED, &["1 file missing, or of another size (one/b)"]);
    assert_eq!(entries(top.path()).len(), 2);
}

#[test]
fn what_is_written_into_plain_directories_is_counted_and_goes_again() {
    let (top, target, baseline) = two_directories();
    let before = entries(Path::new(&target));
    let both = ["--baseline", baseline.as_str(), "--rounds", "2"];
    let meta = report(&[&["meta", &target, "--count", "7", "--threads", "3"][..], &both].concat());
    assert_eq!(counts(&meta), two_rounds(&[7; 5]));
    let kinds: Vec<_> = meta["summary"].as_array().unwrap().iter().map(|row| row["operation"].clone()).collect();
    assert_eq!(kinds, ["create", "stat", "open", "rename", "unlink"]);
    let ingest = ["ingest", &target, "--count", "9", "--size", "3KB", "--fsync"];
    let ingest = report(&[&ingest[..], &both].concat());
    assert_eq!(counts(&ingest), two_rounds(&[9]));
    assert_eq!(ingest["rounds"][3]["operations"][0]["bytes"], 27_000);
    let large = ["ingest", &target, "--count", "2", "--size", "2500KB", "--threads", "2"];
    let large = report(&[&large[..], &both].concat());
    assert_eq!((counts(&large), &large["summary"][1]["unit"]), (two_rounds(&[2]), &json!("MiB/s")));
    assert_eq!((entries(Path::new(&target)), entries(Path::new(&baseline))), (before, vec![]));
    assert_eq!(entries(top.path()).len(), 2);
}

#[test]
fn a_person_gets_a_table_and_a_picture() {
    let (top, target, baseline) = two_directories();
    let picture = top.path().join("bench.svg");
    let picture = picture.to_str().unwrap();
    copy(&target, &baseline);
    let run = ["files", &target, "--baseline", &baseline, "--rounds", "1", "--seed", "9", "--svg", picture];
    let (code, stdout, stderr) = ran(&run);
    assert_eq!((code, stderr.as_str()), (0, ""));
    for fragment in
        ["target ", &target, "baseline ", "5 files with", "seed 9", "--cache keep", "files/s", "P99", "RATIO"]
    {
        assert!(stdout.contains(fragment), "{fragment:?}: {stdout}");
    }
    let drawn = fs::read_to_string(picture).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n") && drawn.contains(&target), "{drawn}");
    refused(&run, USAGE, &["bench.svg is there already"]);
    assert_eq!(fs::read_to_string(picture).unwrap(), drawn);
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_reason() {
    let (top, target, baseline) = two_directories();
    let none = top.path().join("none");
    let none = none.to_str().unwrap();
    refused(&["files", none], NOT_FOUND, &[none, "No such file"]);
    refused(&["meta", &target, "--baseline", none], NOT_FOUND, &[none]);
    refused(&["files", &baseline], FAILED, &["there is no file below", &baseline]);
    refused(&["files", &format!("{target}/a")], USAGE, &["/a is not a directory"]);
    refused(&["meta", &target, "--baseline", &format!("{target}/one")], USAGE, &["not apart"]);
    refused(&["files", &target, "--rounds", "0"], USAGE, &["--rounds"]);
    refused(&["stream", &target, "--streams", "9"], FAILED, &["only 4 files with any bytes, for 9 streams"]);
    refused(&["random", &target, "--block", "0"], USAGE, &["--block"]);
    refused(&["random", &target, "--block", "2MiB"], FAILED, &["one/two/d", "3000000 bytes"]);
    refused(&["files", &target, "--svg", &format!("{none}/a.svg")], NOT_FOUND, &["there is no directory"]);
    refused(&["meta", "/proc/self", "--count", "1"], FAILED, &["cannot make a directory in /proc/self"]);
}

/// Files of the kernel have a size of zero, and content: each is read, and none counts.
#[test]
fn reads_of_another_length_are_no_success() {
    let source = Path::new("/proc/sys/fs/inotify");
    let files = fs::read_dir(source).unwrap().count() as u64;
    let (code, stdout, stderr) = ran(&["files", source.to_str().unwrap(), "--rounds", "2", "--json"]);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, report["failures"].as_u64().unwrap()), (FAILED, 2 * files), "{stderr}");
    assert_eq!(counts(&report)[0].2, [0]);
    assert!(stderr.contains("was listed with 0") && stderr.contains("operations failed"), "{stderr}");
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    for (workload, signal) in [("ingest", Signal::INT), ("meta", Signal::TERM)] {
        let top = tempfile::tempdir().unwrap();
        let place = top.path().to_str().unwrap();
        let mut command = bench(&[workload, place, "--count", "20000", "--rounds", "1000", "--threads", "2"]);
        if workload == "ingest" {
            command.args(["--size", "1B"]);
        }
        let mut running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("it writes files", PATIENCE, || {
            let made = entries(top.path()).pop()?;
            let first = fs::read_dir(made.join("w1")).ok()?.next()?;
            first.is_ok().then_some(())
        });
        kill_process(Pid::from_raw(running.id() as i32).unwrap(), signal).unwrap();
        eventually("it ends", PATIENCE, || running.try_wait().unwrap());
        let output = running.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.signal(), output.status.code()), (None, Some(FAILED)), "{workload}: {said}");
        assert!(said.contains("interrupted") && output.stdout.is_empty(), "{workload}: {said}");
        assert_eq!(entries(top.path()), Vec::<PathBuf>::new(), "{workload}");
    }
}

#[test]
fn mounts_are_measured_beside_a_copy() {
    let cluster = Cluster::up(Options::default());
    let tree = cluster.seed("bucket", "", 12, 5000);
    cluster.mount("s3://bucket", "/data", &[]);
    cluster.s3.create_bucket("work");
    cluster.mount_fs_mode("s3://work", "/work", &[]);
    let (data, work) = (cluster.path("data"), cluster.path("work"));
    let local = cluster.directory().join("baseline");
    fs::create_dir(&local).unwrap();
    let [data, work, local] = [&data, &work, &local].map(|path| path.to_str().unwrap());
    copy(data, local);
    let both = ["--baseline", local, "--rounds", "2"];

    let files = report(&[&["files", data, "--cache", "drop"][..], &both].concat());
    assert_eq!(counts(&files), two_rounds(&[12]));
    assert_eq!(files["target"]["file_system"], "fuse.cv");
    let bytes: usize = tree.values().map(|content| content.len()).sum();
    assert_eq!(files["rounds"][0]["operations"][0]["bytes"], bytes);
    let random = ["random", data, "--count", "20", "--block", "1KiB", "--cache", "drop"];
    assert_eq!(counts(&report(&[&random[..], &both].concat())), two_rounds(&[20]));
    assert_eq!(counts(&report(&[&["list", data][..], &both].concat())), two_rounds(&[13, 13]));
    refused(&["meta", data], FAILED, &["cannot make", "--access-mode read-write"]);
    // A path that is not there is one of this host: nothing is said of the namespace.
    let (code, _, stderr) = ran(&["files", &format!("{data}/none")]);
    assert!(code == NOT_FOUND && !stderr.contains("namespace"), "{code}: {stderr}");

    let meta = report(&[&["meta", work, "--count", "6", "--threads", "2"][..], &both].concat());
    assert_eq!(counts(&meta), two_rounds(&[6; 5]));
    let ingest = report(&[&["ingest", work, "--count", "6", "--size", "5KB", "--fsync"][..], &both].concat());
    assert_eq!(counts(&ingest), two_rounds(&[6]));
    let large = ["ingest", work, "--count", "1", "--threads", "1", "--size", "3MiB", "--fsync"];
    assert_eq!(counts(&report(&[&large[..], &both].concat())), two_rounds(&[1]));
    assert_eq!(entries(Path::new(work)), Vec::<PathBuf>::new());
    assert_eq!(entries(Path::new(local)).len(), 1, "the copy stays");
    cluster.assert_tree("data", "", &tree);
}

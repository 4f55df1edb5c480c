//! Programs that others have written, on two mounts of an fs-mode bucket: what `tests/programs/run.py` does, but
//! quickly.

use std::path::Path;

use cavern_tests::{Cluster, Options, cv_path, outside_command};

/// Runs programs by their names in `docs/programs.md`.
#[track_caller]
fn run(names: &[&str]) {
    let conf = "[master]\npersist_delay = \"200ms\"\n".to_owned();
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/run.py");
    let mut command = outside_command("python3");
    command.arg(script).arg("--cluster").arg(cluster.directory()).arg("--quick").args(names);
    command.env("CV_BIN", cv_path());
    let done = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{}\n{stdout}{stderr}", done.status);
    eprint!("{}", stdout.rsplit("\n\n").next().unwrap_or_default());
}

#[test]
fn a_database_is_whole_after_its_client_was_killed() {
    run(&["sqlite"]);
}

#[test]
fn a_server_of_databases_and_its_client_are_killed_under_load() {
    run(&["postgres"]);
}

#[test]
fn trees_go_there_and_back_and_are_built_and_seen_elsewhere() {
    run(&["tar", "rsync", "make", "checkpoint"]);
}

#[test]
fn a_bucket_that_is_gone_or_says_nothing_is_noticed_by_no_program() {
    run(&["unreachable", "stopped"]);
}

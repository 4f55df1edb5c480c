//! Commands that run beside a test, and jobs as they report them.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use cavern_tests::{Cluster, Finished, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// A `cv` that runs beside the test, with its output in files.
pub struct Running {
    process: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Running {
    pub fn start(cluster: &Cluster, arguments: &[&str]) -> Self {
        let file = |name: &str| cluster.directory().join(format!("{}.{name}", arguments[0]));
        let (stdout, stderr) = (file("stdout"), file("stderr"));
        let mut command = cluster.command(arguments);
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        Self { process: command.spawn().unwrap(), stdout, stderr }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.process.id() as i32).unwrap(), signal).unwrap();
    }

    /// Waits until one of its outputs has `text`.
    #[track_caller]
    pub fn says(&self, text: &str) {
        eventually(&format!("cv says {text:?}"), PATIENCE, || {
            let said = [&self.stdout, &self.stderr].map(|path| fs::read_to_string(path).unwrap()).concat();
            said.contains(text).then_some(())
        });
    }

    #[track_caller]
    pub fn finish(mut self) -> Finished {
        let status = eventually("cv ends", PATIENCE, || self.process.try_wait().unwrap());
        assert_eq!(status.signal(), None);
        let read = |path: &PathBuf| fs::read_to_string(path).unwrap();
        Finished { code: status.code().unwrap(), stdout: read(&self.stdout), stderr: read(&self.stderr) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Every line of JSON, the last one being the end of the job.
pub fn lines(finished: &Finished) -> Vec<Value> {
    finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The fields of a job that count something.
pub fn counts(job: &Value) -> [u64; 5] {
    ["files_total", "files_done", "bytes_total", "bytes_done", "errors"].map(|field| job[field].as_u64().unwrap())
}

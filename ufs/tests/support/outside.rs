//! Stores that are not ours: what `tests/outside_store.py` runs. `bin/setup --stores` installs them.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// It ends with its value, or with the test's process.
pub struct Outside {
    /// `http://host:port`.
    pub endpoint: String,
    process: Child,
}

impl Outside {
    /// Serves one bucket, in memory.
    pub fn serve(store: &str, bucket: &str) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/outside_store.py");
        let mut command = Command::new("python3");
        // The pipe is closed when nobody needs the store any more, however that comes.
        command.arg(script).args([store, bucket]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let endpoint = line.trim().to_owned();
        assert!(endpoint.starts_with("http://"), "{store} does not start: run bin/setup --stores");
        Self { endpoint, process }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

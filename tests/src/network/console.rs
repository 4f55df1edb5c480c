//! A shell that runs commands for the test.
//!
//! A process that is started by the test itself has a copy of every file that is open there, for a moment, and closes
//! them all: if one of them is on a mount that does not answer, it waits for that. The shell is started before any file
//! is open, and so have its children none.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

pub struct Console {
    shell: Mutex<Shell>,
    /// What the running command prints.
    printed: [PathBuf; 2],
}

struct Shell {
    process: Child,
    lines: ChildStdin,
    codes: BufReader<ChildStdout>,
}

impl Console {
    /// `command` runs what is added to it.
    pub fn start(mut command: Command, directory: &Path) -> Self {
        command.args(["sh", "-s"]).current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (lines, codes) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let shell = Mutex::new(Shell { process, lines, codes });
        Self { shell, printed: ["console.out", "console.err"].map(|name| directory.join(name)) }
    }

    /// Runs a command, one at a time; what it printed, or all of that where it failed.
    pub fn run(&self, command: &str) -> Result<String, String> {
        let mut shell = self.shell.lock().unwrap_or_else(PoisonError::into_inner);
        let [out, err] = self.printed.each_ref().map(|path| quoted(path.to_str().unwrap()));
        writeln!(shell.lines, "{command} >{out} 2>{err} </dev/null; echo $?").unwrap();
        let mut code = String::new();
        shell.codes.read_line(&mut code).unwrap();
        let [out, err] = self.printed.each_ref().map(|path| fs::read(path).unwrap_or_default());
        let [out, err] = [out, err].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if code.trim() == "0" { Ok(out) } else { Err(format!("{out}{err}")) }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let shell = self.shell.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ended = shell.process.kill();
        let _ended = shell.process.wait();
    }
}

/// One word of a command.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

//! The keeper: parent of one child, and the only one who learns how it ends.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::child::{Exit, ProcessId, RunRecord};

/// Runs this executable with `arguments` in a session of its own, its output appended to `log`; keeps `run` up to date;
/// returns when the child has ended. The environment is handed on.
pub fn keep(run: &Path, log: &Path, arguments: &[String]) -> io::Result<()> {
    // Away from the caller's terminal, so that its Ctrl-C does not end the cluster.
    rustix::process::setsid()?;
    let output = OpenOptions::new().create(true).append(true).open(log)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let process = ProcessId::of(i32::try_from(child.id()).map_err(io::Error::other)?);
    let mut record = match process {
        Ok(process) => RunRecord { process, exit: None },
        // Ended before it could be looked at; its number is still reserved, since nobody has waited for it.
        Err(_) => RunRecord {
            process: ProcessId { pid: child.id() as i32, start_ticks: 0, boot_id: String::new() },
            exit: None,
        },
    };
    record.store(run)?;
    let status = child.wait()?;
    record.exit = Some(match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, signal) => Exit::Signal(signal.unwrap_or_default()),
    });
    record.store(run)
}

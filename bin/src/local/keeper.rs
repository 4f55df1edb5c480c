//! The keeper: parent of one child, and the only one who learns how it ends.

use std::fs::{OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use cavern_conf::process;

use super::child::{Exit, ProcessId, RunRecord};

/// Runs this executable with `arguments` in a session of its own, its output appended to `log`; keeps `run` up to date;
/// returns when the child has ended. The environment is handed on.
pub fn keep(run: &Path, log: &Path, arguments: &[String]) -> io::Result<()> {
    // Away from the caller's terminal, so that its Ctrl-C does not end the cluster.
    rustix::process::setsid()?;
    // The child, its log and what it keeps are its user's alone, the log of an earlier version too.
    process::create_privately();
    let output = OpenOptions::new().create(true).append(true).open(log)?;
    output.set_permissions(Permissions::from_mode(0o600))?;
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

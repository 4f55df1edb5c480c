use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a process cannot start. Each text is one sentence: the thing, the cause, the configuration key to change.
#[derive(Debug, Error)]
pub enum ProcessError {
    #[error("{address} is already in use by another process: stop that one, or choose another address with {key}")]
    AddressInUse { address: String, key: String },
    #[error("cannot listen on {address} ({source}): choose an address of this host, as host:port, with {key}")]
    Bind { address: String, key: String, source: io::Error },
    #[error("cannot use the directory {} ({source}): make it writable, or choose another with {key}", path.display())]
    Directory { path: PathBuf, key: String, source: io::Error },
    #[error(
        "the directory {} ({key}) is not there: mount its disk, or make it; {setting} = true has it made",
        path.display()
    )]
    MissingDirectory { path: PathBuf, key: String, setting: &'static str },
    #[error(
        "log.level \"{level}\" is not a level or a list of directives ({reason}): write it as \"info\" or \
         \"info,cavern_worker=debug\""
    )]
    LogLevel { level: String, reason: String },
    #[error("logging is already set up in this process")]
    LoggingTwice,
}

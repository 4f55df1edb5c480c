//! Why a command did not succeed, and the exit code that says so to a script.

use std::fmt;
use std::io;
use std::process::ExitCode;

use cavern_client::ClientError;
use cavern_conf::ConfigError;
use cavern_net::NetError;
use cavern_net::master::innermost;
use cavern_security::SecurityError;
use thiserror::Error;
use tonic::Code;

/// One sentence for the person, one exit code for the script.
#[derive(Debug, Error)]
pub enum CliError {
    /// Exit code 1: the command was understood and tried, and failed.
    #[error("{0}")]
    Failed(String),
    /// Exit code 2: the command line or the configuration is wrong.
    #[error("{0}")]
    Usage(String),
    /// Exit code 3: a process that is needed cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    /// Exit code 4: the thing that was named does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Exit code 1 or 2: something is not as it should be, or not everything could be looked at; what was found was
    /// shown.
    #[error("{text}")]
    Found { text: String, code: u8 },
    /// Whoever read our output has gone (`cv fs ls / | head`): nothing to say, exit code 0.
    #[error("the reader of the output has gone")]
    OutputClosed,
}

impl CliError {
    /// Names a path, which is said before a cause that does not know what the path is.
    pub fn of(mut self, path: &str) -> Self {
        if let Self::Failed(text) | Self::Usage(text) | Self::Unreachable(text) | Self::NotFound(text) = &mut self
            && !text.contains(path)
        {
            *text = format!("{path}: {text}");
        }
        self
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::OutputClosed => 0,
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::NotFound(_) => 4,
            Self::Found { code, .. } => *code,
        })
    }
}

/// The one place where an answer of the master becomes a sentence.
impl From<tonic::Status> for CliError {
    fn from(status: tonic::Status) -> Self {
        if let Some(cause) = std::error::Error::source(&status) {
            // Not the master's words: the connection to it broke.
            return Self::Unreachable(format!("the connection to the master broke: {}", innermost(cause)));
        }
        let message = if status.message().is_empty() {
            format!("the master answered {:?} without saying why: see its log", status.code())
        } else {
            status.message().to_owned()
        };
        match status.code() {
            Code::NotFound => Self::NotFound(message),
            Code::InvalidArgument | Code::OutOfRange => Self::Usage(message),
            // What answers in the place of a bucket, and is none, is as good as no answer.
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown => Self::Unreachable(message),
            _ => Self::Failed(message),
        }
    }
}

impl From<NetError> for CliError {
    fn from(error: NetError) -> Self {
        match error {
            NetError::Gone(message) => Self::NotFound(message),
            NetError::Master { code, message } => tonic::Status::new(code, message).into(),
            NetError::MasterUnavailable { masters, cause } => Self::Unreachable(format!(
                "no master answers ({masters}: {cause}): is it running, and does it want a certificate ([security])? \
                 Name another with --master, --conf or --local"
            )),
            NetError::MasterDeadline { .. } => Self::Unreachable(error.to_string()),
            NetError::Invalid(text) => Self::Usage(text),
            NetError::WorkerConnection { .. }
            | NetError::WorkerDeadline { .. }
            | NetError::WorkerStatus { .. }
            | NetError::Corrupt { .. }
            | NetError::UnknownWorker(_) => Self::Failed(error.to_string()),
        }
    }
}

/// The one place where an error of the client becomes an exit code.
impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::NotFound(_) | ClientError::Stale(_) => Self::NotFound(error.to_string()),
            ClientError::Net(error) => error.clone().into(),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<SecurityError> for CliError {
    fn from(error: SecurityError) -> Self {
        let text = error.to_string();
        match error {
            SecurityError::NoAuthority { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Self::NotFound(text)
            }
            SecurityError::Identity { .. } | SecurityError::OtherCluster { .. } | SecurityError::Outlives { .. } => {
                Self::Usage(text)
            }
            _ => Self::Failed(text),
        }
    }
}

/// Says what was being done when something failed.
pub trait Context<T> {
    /// `Failed` with "`what`: cause".
    fn context(self, what: impl fmt::Display) -> Result<T, CliError>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T, CliError> {
        self.map_err(|error| CliError::Failed(format!("{what}: {error}")))
    }
}

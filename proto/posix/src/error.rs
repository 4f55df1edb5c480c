//! Refusals, each with its errno.

use cavern_proto::NAME_MAX;
use rustix::io::Errno;

/// Why the rules of this crate refuse something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PosixError {
    #[error("a name of {0} bytes: {max} are the most", max = NAME_MAX)]
    NameTooLong(usize),
    #[error("{0:?} cannot be a name: write 1 to {max} bytes without NUL and '/', but neither . nor ..", max = NAME_MAX)]
    NoName(String),
    #[error("only a file can be without a name")]
    Nameless,
    #[error("{} is no id of a user or group", u32::MAX)]
    NoId,
    #[error("an inode of no kind")]
    NoKind,
    #[error("a symlink that leads nowhere")]
    NoTarget,
    #[error("a symlink's target of {0} bytes")]
    TargetTooLong(usize),
    #[error("only a symlink has a target")]
    NoSymlink,
    #[error("{0} is no access list")]
    NoAcl(String),
    #[error("a symlink has no access list")]
    SymlinkAcl,
    #[error("only a directory has a default access list")]
    DefaultAcl,
    #[error("user {uid} is not the one who {what}")]
    NotTheOne { uid: u32, what: &'static str },
}

impl PosixError {
    /// As the system call answers it.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NameTooLong(_) | Self::TargetTooLong(_) => Errno::NAMETOOLONG,
            Self::NoName(_) | Self::Nameless | Self::NoId | Self::NoKind | Self::NoSymlink | Self::NoAcl(_) => {
                Errno::INVAL
            }
            Self::NoTarget => Errno::NOENT,
            Self::SymlinkAcl => Errno::OPNOTSUPP,
            Self::DefaultAcl => Errno::ACCESS,
            Self::NotTheOne { .. } => Errno::PERM,
        }
    }
}

//! A worker's cache directories as the configuration spells them: `[SSD:1TB]/nvme0`.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use crate::rules::is_absolute_and_plain;
use crate::schema::Worker;
use crate::units::{ByteSize, UnitError};

named_values! {
    /// What kind of storage a directory lies on, from the fastest to the slowest.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Tier {
        Mem = "MEM",
        Ssd = "SSD",
        Hdd = "HDD",
    }
}

/// One cache directory of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirSpec {
    pub tier: Tier,
    /// What the worker may fill; `None` for what the file system has.
    pub capacity: Option<ByteSize>,
    /// Absolute, without `.` and `..`.
    pub path: PathBuf,
}

impl Display for DirSpec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.capacity {
            Some(capacity) => write!(out, "[{}:{capacity}]{}", self.tier, self.path.display()),
            None => write!(out, "[{}]{}", self.tier, self.path.display()),
        }
    }
}

/// Why a text names no cache directory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DirError {
    #[error("\"{0}\" has no tier in front: write it as \"[SSD:1TB]/path\" or \"[SSD]/path\"")]
    NoTier(String),
    #[error("\"{text}\" has the unknown tier \"{tier}\": the tiers are MEM, SSD, HDD, as in \"[SSD:1TB]/path\"")]
    UnknownTier { text: String, tier: String },
    #[error("the capacity in \"{text}\" {cause}")]
    Capacity { text: String, cause: UnitError },
    #[error("the capacity in \"{0}\" is zero: leave it out to use what the file system has")]
    NoCapacity(String),
    #[error("the path in \"{0}\" must be absolute and without \".\" or \"..\", as in \"[SSD:1TB]/path\"")]
    Path(String),
    #[error("\"{first}\" and \"{second}\" lie in one another: each directory must be one of its own")]
    Overlap { first: DirSpec, second: DirSpec },
}

impl FromStr for DirSpec {
    type Err = DirError;

    fn from_str(text: &str) -> Result<Self, DirError> {
        let text_owned = || text.to_owned();
        let (head, path) = text
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
            .ok_or_else(|| DirError::NoTier(text_owned()))?;
        let (tier, capacity) = match head.split_once(':') {
            Some((tier, capacity)) => (tier, Some(capacity)),
            None => (head, None),
        };
        let tier = Tier::ALL
            .into_iter()
            .find(|known| known.name() == tier)
            .ok_or_else(|| DirError::UnknownTier { text: text_owned(), tier: tier.to_owned() })?;
        let capacity = match capacity.map(str::parse::<ByteSize>) {
            Some(Err(cause)) => return Err(DirError::Capacity { text: text_owned(), cause }),
            Some(Ok(size)) if size.bytes() == 0 => return Err(DirError::NoCapacity(text_owned())),
            Some(Ok(size)) => Some(size),
            None => None,
        };
        let path = Path::new(path);
        if !is_absolute_and_plain(path) {
            return Err(DirError::Path(text_owned()));
        }
        // Rebuilt from its components, so that "/a//b/" and "/a/b" are the same directory.
        Ok(Self { tier, capacity, path: path.components().collect() })
    }
}

impl Worker {
    /// The cache directories, in the order of the file.
    ///
    /// # Errors
    /// The first entry that is malformed, or that equals, contains or lies inside an earlier one.
    pub fn dir_specs(&self) -> Result<Vec<DirSpec>, DirError> {
        let mut specs: Vec<DirSpec> = Vec::with_capacity(self.dirs.len());
        for text in &self.dirs {
            let spec: DirSpec = text.parse()?;
            let overlaps = |other: &&DirSpec| other.path.starts_with(&spec.path) || spec.path.starts_with(&other.path);
            if let Some(first) = specs.iter().find(overlaps) {
                return Err(DirError::Overlap { first: first.clone(), second: spec });
            }
            specs.push(spec);
        }
        Ok(specs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(dirs: &[&str]) -> Worker {
        Worker { dirs: dirs.iter().map(|&dir| dir.to_owned()).collect(), ..Worker::default() }
    }

    #[test]
    fn directories_parse_and_print_back() {
        for text in ["[MEM:8GB]/dev/shm/cv", "[SSD:1TB]/nvme0", "[HDD]/data/with space/and:colon]x"] {
            let spec: DirSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
        }
        let spec: DirSpec = "[SSD:1TB]/nvme0//x/".parse().unwrap();
        let expected = ByteSize::from_bytes(1_000_000_000_000);
        assert_eq!(spec, DirSpec { tier: Tier::Ssd, capacity: Some(expected), path: PathBuf::from("/nvme0/x") });
    }

    #[test]
    fn malformed_directories_say_what_would_be_right() {
        let cases = [
            ("/nvme0", "write it as \"[SSD:1TB]/path\""),
            ("[SSD:1TB/nvme0", "no tier"),
            ("", "no tier"),
            ("[NVME:1TB]/nvme0", "the tiers are MEM, SSD, HDD"),
            ("[ssd]/nvme0", "the tiers are MEM, SSD, HDD"),
            ("[SSD:]/nvme0", "is empty"),
            ("[SSD:1]/nvme0", "has no unit"),
            ("[SSD:1tb]/nvme0", "did you mean \"TB\"?"),
            ("[SSD:0B]/nvme0", "is zero"),
            ("[SSD]nvme0", "must be absolute"),
            ("[SSD]/a/../b", "must be absolute and without"),
            ("[SSD]/a/./b", "must be absolute and without"),
            ("[SSD]", "must be absolute"),
        ];
        for (text, expected) in cases {
            let error = text.parse::<DirSpec>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn directories_may_not_overlap() {
        assert_eq!(worker(&["[SSD]/a", "[SSD]/ab", "[HDD]/b/a"]).dir_specs().unwrap().len(), 3);
        for dirs in [["[SSD]/a", "[HDD:1TB]/a/"], ["[SSD]/a", "[SSD]/a/b"], ["[SSD]/a/b", "[SSD]/a"]] {
            assert!(matches!(worker(&dirs).dir_specs(), Err(DirError::Overlap { .. })), "{dirs:?}");
        }
    }
}

//! A worker's cache directories as the configuration spells them: `[SSD:1TB]/nvme0`.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::rules::is_absolute_and_plain;
use crate::schema::Worker;
use crate::units::ByteSize;

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

impl FromStr for DirSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tiered = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (head, path) = tiered.ok_or_else(|| {
            format!("\"{text}\" has no tier in front: write it as \"[SSD:1TB]/path\" or \"[SSD]/path\"")
        })?;
        let (tier, capacity) = head.split_once(':').map_or((head, None), |(tier, size)| (tier, Some(size)));
        let known = Tier::ALL.into_iter().find(|known| known.name() == tier);
        let tier = known.ok_or_else(|| {
            format!("\"{text}\" has the unknown tier \"{tier}\": the tiers are MEM, SSD, HDD, as in \"[SSD:1TB]/path\"")
        })?;
        let capacity = capacity.map(str::parse::<ByteSize>).transpose();
        let capacity = capacity.map_err(|cause| format!("the capacity in \"{text}\" {cause}"))?;
        if capacity.is_some_and(|size| size.bytes() == 0) {
            return Err(format!("the capacity in \"{text}\" is zero: leave it out to use what the file system has"));
        }
        let path = Path::new(path);
        if !is_absolute_and_plain(path) {
            return Err(format!(
                "the path in \"{text}\" must be absolute and without \".\" or \"..\", as in \"[SSD:1TB]/path\""
            ));
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
    pub fn dir_specs(&self) -> Result<Vec<DirSpec>, String> {
        let mut specs: Vec<DirSpec> = Vec::with_capacity(self.dirs.len());
        for text in &self.dirs {
            let spec: DirSpec = text.parse()?;
            let overlaps = |other: &&DirSpec| other.path.starts_with(&spec.path) || spec.path.starts_with(&other.path);
            if let Some(first) = specs.iter().find(overlaps) {
                return Err(format!(
                    "\"{first}\" and \"{spec}\" lie in one another: each directory must be one of its own"
                ));
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
            let error = text.parse::<DirSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn directories_may_not_overlap() {
        assert_eq!(worker(&["[SSD]/a", "[SSD]/ab", "[HDD]/b/a"]).dir_specs().unwrap().len(), 3);
        for dirs in [["[SSD]/a", "[HDD:1TB]/a/"], ["[SSD]/a", "[SSD]/a/b"], ["[SSD]/a/b", "[SSD]/a"]] {
            let error = worker(&dirs).dir_specs().unwrap_err();
            assert!(error.contains("lie in one another"), "{dirs:?}: {error}");
        }
    }
}

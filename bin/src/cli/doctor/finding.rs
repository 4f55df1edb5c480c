//! What `cv doctor` says of one thing: how bad it is, what was found, why that matters, and what to do.

use clap::ValueEnum;
use serde::Serialize;

/// How bad it is. Only errors and warnings change the exit code.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    /// Works, and could work better.
    Note,
    /// Works now, or in part.
    Warning,
    /// Something does not work.
    Error,
}

impl Level {
    /// As scripts have it.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// What a finding is about. The names are for scripts; the table in `docs/doctor.md` has a line for each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    Configuration,
    MastersSame,
    MasterAddress,
    PathsOverlap,
    FuseDevice,
    FuseHelper,
    FuseAllowOther,
    FuseLimits,
    Kernel,
    Passthrough,
    OpenFiles,
    MountPoint,
    Erofs,
    ViewMount,
    Directory,
    FileSystem,
    DiskShared,
    DiskSize,
    DiskSpace,
    DiskSync,
    DiskSpeed,
    HolePunching,
    Memory,
    Port,
    Security,
    CertificateChain,
    CertificateExpiry,
    CertificateRole,
    CertificateMembers,
    Masters,
    MasterIdentity,
    Workers,
    WorkerReachable,
    Versions,
    Clock,
    ClockStore,
    BucketList,
    BucketGet,
    BucketPut,
    BucketMembers,
    Unfinished,
}

impl Check {
    /// As scripts have it: `disk-size`.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    pub level: Level,
    pub check: Check,
    pub what: String,
    /// This and what to do are empty where nothing is wrong.
    pub why: String,
    pub todo: String,
}

impl Finding {
    pub fn new(
        level: Level,
        check: Check,
        what: impl Into<String>,
        why: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        Self { level, check, what: what.into(), why: why.into(), todo: todo.into() }
    }

    pub fn ok(check: Check, what: impl Into<String>) -> Self {
        Self::new(Level::Ok, check, what, "", "")
    }

    pub fn error(check: Check, what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::new(Level::Error, check, what, why, todo)
    }

    pub fn warning(check: Check, what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::new(Level::Warning, check, what, why, todo)
    }

    pub fn note(check: Check, what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::new(Level::Note, check, what, why, todo)
    }
}

/// For tests: level and check of each finding that is not `Ok`, and that each says why it matters and what to do.
#[cfg(test)]
pub fn wrong(findings: &[Finding]) -> Vec<(Level, Check)> {
    let wrong = findings.iter().filter(|finding| finding.level > Level::Ok);
    let told = |finding: &Finding| !finding.what.is_empty() && !finding.why.is_empty() && !finding.todo.is_empty();
    wrong.inspect(|finding| assert!(told(finding), "{finding:?}")).map(|found| (found.level, found.check)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_documentation_has_a_line_for_each_check() {
        let text = include_str!("../../../../docs/doctor.md");
        let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let rows: BTreeSet<String> = rows.map(str::to_owned).collect();
        let known: BTreeSet<String> = Check::value_variants().iter().map(|check| check.name()).collect();
        assert_eq!(rows, known);
        // What scripts are given is what people are shown.
        for check in Check::value_variants() {
            assert_eq!(serde_json::to_value(check).unwrap(), check.name());
        }
    }
}

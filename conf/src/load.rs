//! From a file and the environment to a configuration that is whole and consistent.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::budget::{self, Budget, Budgets, ProcessLimits};
use crate::check;
use crate::demand;
use crate::error::{ConfigError, Problem, SettingSource};
use crate::exposure::{self, Role};
use crate::host_limits::HostLimits;
use crate::rules::Rules;
use crate::schema::Config;
use crate::settings::{self, Schema, line_of};

/// The file that every process reads when no other is named.
const INSTALLED: &str = "/etc/cavern/cluster.toml";

/// A configuration and where each of its values came from.
#[derive(Clone, Debug, Default)]
pub struct Effective {
    pub config: Config,
    /// The file that was read, if any.
    pub file: Option<PathBuf>,
    /// By `section.key`; what is not in it is the default.
    origins: BTreeMap<String, SettingSource>,
    /// What somebody has set.
    given: toml::Table,
    host: HostLimits,
    /// In the order of [`Role::ALL`].
    limits: [ProcessLimits; 3],
}

impl Config {
    /// The configuration of this process: see [`Effective::load`].
    ///
    /// # Errors
    /// As [`Effective::load`].
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        Effective::load(path).map(|effective| effective.config)
    }

    /// Refuses impossible combinations in a configuration that was put together by a program.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] with all of them.
    pub fn check(&self) -> Result<(), ConfigError> {
        Rules::hold(|_| SettingSource::Default, |rules| check::check(self, rules))
    }
}

impl Effective {
    /// Reads the configuration: `path` (the flag `--conf`), else the file that `CV_CONF` names, else
    /// `/etc/cavern/cluster.toml` if there is one, else the defaults; then the environment's `CV_SECTION__KEY` on top.
    /// What nobody has set and follows the limits of its process does so with those of this one. Reads the process's
    /// environment and blocks on the disk.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] for a file that was asked for and cannot be read; [`ConfigError::Rejected`] with
    /// everything that is unknown, malformed or impossible.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let (path, named_by) = locate(path, std::env::var_os("CV_CONF"));
        let file = match std::fs::read(&path) {
            Ok(bytes) => Some((path, bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && path == Path::new(INSTALLED) => None,
            Err(source) => return Err(ConfigError::Unreadable { path, named_by, source }),
        };
        Self::compose_on(HostLimits::here(), file, std::env::vars_os())
    }

    /// The configuration of this file's content (if any) and these environment variables, on a host that nobody has
    /// looked at: [`HostLimits::default`].
    ///
    /// # Errors
    /// [`ConfigError::Rejected`].
    pub fn compose(
        file: Option<(PathBuf, Vec<u8>)>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        Self::compose_on(HostLimits::default(), file, environment)
    }

    /// Composes what [`Self::compose`] does, for processes that may use what `host` has.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`].
    pub fn compose_on(
        host: HostLimits,
        file: Option<(PathBuf, Vec<u8>)>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let schema = Schema::new();
        let mut problems = Vec::new();
        let mut given = Vec::new();
        let mut path = None;
        if let Some((file, bytes)) = file {
            match str::from_utf8(&bytes) {
                Ok(text) => given = settings::from_file(&file, text, &schema, &mut problems),
                Err(error) => {
                    let good = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
                    let origin = SettingSource::File { path: file.clone(), line: line_of(&good, good.len()) };
                    let message = "this line is not UTF-8 text: save the file as UTF-8".to_owned();
                    problems.push(Problem { origin, key: String::new(), message });
                }
            }
            path = Some(file);
        }
        // Later settings win: the environment over the file.
        given.extend(settings::from_environment(environment, &schema, &mut problems));
        let mut sections = toml::Table::new();
        let mut origins = BTreeMap::new();
        for setting in given {
            let name = format!("{}.{}", setting.section, setting.key);
            let Some(keys) = budget::keys_of(&mut sections, &setting.section) else { continue };
            if setting.is_auto() {
                origins.remove(&name);
                keys.remove(&setting.key);
            } else {
                origins.insert(name, setting.origin);
                keys.insert(setting.key, setting.value);
            }
        }
        let mut effective = Self { file: path, origins, given: sections, host, ..Self::default() };
        if let Err(problem) = effective.follow_limits(1) {
            problems.push(problem);
            return Err(ConfigError::Rejected(problems));
        }
        // Values that were refused are at their defaults here: what would be said about those is said for nothing.
        if !problems.is_empty() {
            return Err(ConfigError::Rejected(problems));
        }
        effective.hold(|rules| check::check(&effective.config, rules))?;
        Ok(effective)
    }

    /// Makes the configuration of what was set, and of what follows the limits of processes, so many of which share
    /// what the control group of this one may have.
    fn follow_limits(&mut self, processes: usize) -> Result<(), Problem> {
        let mut sections = self.given.clone();
        self.origins.retain(|_, origin| origin.is_set());
        for (role, found) in Role::ALL.into_iter().zip(&mut self.limits) {
            let mut limit = budget::limit_in(&sections, role);
            if processes > 1 && limit.memory.is_none() {
                limit.memory = Some(self.host.memory_of_one(processes));
                if let Some(keys) = budget::keys_of(&mut sections, budget::section_of(role)) {
                    keys.insert("resource_limit".to_owned(), toml::Value::String(limit.to_string()));
                }
            }
            *found = ProcessLimits::of(role, limit, &self.host);
            let origin = SettingSource::Limits(found.origin.clone());
            let filled = budget::fill(&mut sections, role, found.limits);
            self.origins.extend(filled.into_iter().map(|key| (key, origin.clone())));
        }
        // Each value was checked alone, so what fails is a key that the schema ties to another.
        let config = Config::deserialize(sections).map_err(|error| Problem {
            origin: SettingSource::Default,
            key: String::new(),
            message: error.message().to_owned(),
        })?;
        let budgets = Budgets::each(|role| Budget::of(role, self.limits[role as usize].limits));
        self.config = Config { budgets, ..config };
        Ok(())
    }

    /// Has so many processes share what a control group lets this one have: each gets a `resource_limit` where nobody
    /// has set one for its memory. Without such a group each takes what it would by itself.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] for what was set and has no room then.
    pub fn share_memory(&mut self, processes: usize) -> Result<(), ConfigError> {
        if self.host.memory_by.is_none() {
            return Ok(());
        }
        self.follow_limits(processes).map_err(|problem| ConfigError::Rejected(vec![problem]))?;
        self.hold(|rules| check::check(&self.config, rules))
    }

    /// Refuses what has the process of this role take more memory than this host lets it.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] with all of it.
    pub fn check_limits(&self, role: Role) -> Result<(), ConfigError> {
        self.hold(|rules| demand::check_on(&self.host, &self.config, role, rules))
    }

    /// Bytes that the process of this role takes at most, by its settings.
    pub fn demand(&self, role: Role) -> u64 {
        let (parts, beside) = demand::demand(&self.config, role, self.limits[role as usize].limits.memory);
        parts.iter().fold(beside, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// What the process of this role may use, who says so, and what follows that beside the settings; for people.
    pub fn describe_limits(&self, role: Role) -> String {
        self.limits[role as usize].describe(role)
    }

    /// Writes that to the log.
    pub fn log_limits(&self, role: Role) {
        tracing::info!("this process has {}", self.describe_limits(role));
    }

    /// The variables of the environment that set something, in the order of the keys.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.origins.values().filter_map(|origin| match origin {
            SettingSource::Environment(variable) => Some(variable.as_str()),
            SettingSource::Default | SettingSource::Limits(_) | SettingSource::File { .. } => None,
        })
    }

    /// Refuses addresses at which nobody else reaches the process of this role, and those at which everybody does
    /// though nobody has said that this is meant.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] with all of them.
    pub fn check_reach(&self, role: Role) -> Result<(), ConfigError> {
        self.hold(|rules| exposure::check(&self.config, role, rules))
    }

    /// Says in the log if the process of this role lets other hosts in without asking who they are.
    pub fn warn_if_open(&self, role: Role) {
        exposure::warn_if_open(&self.config, role);
    }

    fn hold(&self, check: impl FnOnce(&mut Rules<'_>)) -> Result<(), ConfigError> {
        Rules::hold(|key| self.origin(key), check)
    }

    /// Where the value of `section.key` came from.
    pub fn origin(&self, key: &str) -> SettingSource {
        self.origins.get(key).cloned().unwrap_or(SettingSource::Default)
    }
}

/// Which file to read, and who named it.
fn locate(flag: Option<&Path>, variable: Option<OsString>) -> (PathBuf, &'static str) {
    match (flag, variable.filter(|value| !value.is_empty())) {
        (Some(path), _) => (path.to_owned(), "named by --conf"),
        (None, Some(path)) => (PathBuf::from(path), "named by CV_CONF"),
        (None, None) => (PathBuf::from(INSTALLED), "the installed one"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_the_variable_over_the_installed_file() {
        let flag = Some(Path::new("/a"));
        assert_eq!(locate(flag, Some("/b".into())), (PathBuf::from("/a"), "named by --conf"));
        assert_eq!(locate(None, Some("/b".into())), (PathBuf::from("/b"), "named by CV_CONF"));
        for unset in [None, Some(OsString::new())] {
            assert_eq!(locate(None, unset), (PathBuf::from("/etc/cavern/cluster.toml"), "the installed one"));
        }
    }
}

//! From a file and the environment to a configuration that is whole and consistent.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::check;
use crate::error::{ConfigError, Problem, SettingSource};
use crate::exposure::{self, Role};
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
        let problems = check::check(self, |_| SettingSource::Default);
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Rejected(problems)) }
    }
}

impl Effective {
    /// Reads the configuration: `path` (the flag `--conf`), else the file that `CV_CONF` names, else
    /// `/etc/cavern/cluster.toml` if there is one, else the defaults; then the environment's `CV_SECTION__KEY` on top.
    /// Reads the process's environment and blocks on the disk.
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
        Self::compose(file, std::env::vars_os())
    }

    /// The configuration of this file's content (if any) and these environment variables.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`].
    pub fn compose(
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
            origins.insert(format!("{}.{}", setting.section, setting.key), setting.origin);
            let section = sections.entry(setting.section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
            if let toml::Value::Table(keys) = section {
                keys.insert(setting.key, setting.value);
            }
        }
        let config = match Config::deserialize(sections) {
            Ok(config) => config,
            // Each value was checked alone, so this is a key that the schema ties to another.
            Err(error) => {
                let message = error.message().to_owned();
                problems.push(Problem { origin: SettingSource::Default, key: String::new(), message });
                return Err(ConfigError::Rejected(problems));
            }
        };
        let effective = Self { config, file: path, origins };
        // Values that were refused are at their defaults here: what would be said about those is said for nothing.
        if problems.is_empty() {
            problems = check::check(&effective.config, |key| effective.origin(key));
        }
        if problems.is_empty() { Ok(effective) } else { Err(ConfigError::Rejected(problems)) }
    }

    /// The variables of the environment that set something, in the order of the keys.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.origins.values().filter_map(|origin| match origin {
            SettingSource::Environment(variable) => Some(variable.as_str()),
            SettingSource::Default | SettingSource::File { .. } => None,
        })
    }

    /// Refuses addresses at which nobody else reaches the process of this role, and those at which everybody does
    /// though nobody has said that this is meant.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] with all of them.
    pub fn check_reach(&self, role: Role) -> Result<(), ConfigError> {
        let problems = check::check_reach(&self.config, role, |key| self.origin(key));
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Rejected(problems)) }
    }

    /// Says in the log if the process of this role lets other hosts in without asking who they are.
    pub fn warn_if_open(&self, role: Role) {
        exposure::warn_if_open(&self.config, role);
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

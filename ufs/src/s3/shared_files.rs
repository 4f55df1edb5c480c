//! The files that programs for AWS share: `~/.aws/config` and `~/.aws/credentials`, or those that `AWS_CONFIG_FILE` and
//! `AWS_SHARED_CREDENTIALS_FILE` name. They have profiles, and these say where a bucket is
//! ([`found_options`]) and with whose credentials it is asked ([`super::credentials`]).

use std::collections::HashMap;
use std::path::PathBuf;

use cavern_proto::s3_options::{ENDPOINT, REGION};

/// What a section says; what is indented below a key is named `KEY.INNER`.
pub(super) type Settings = HashMap<String, String>;

/// Both files, as far as they are there.
#[derive(Default)]
pub(super) struct SharedFiles {
    config: String,
    credentials: String,
}

impl SharedFiles {
    /// Those of this process. *Blocks* on the disk.
    pub(super) fn read() -> Self {
        let read = |named_by: &str, usual: &str| {
            let named = variable(named_by).unwrap_or_else(|| format!("~/.aws/{usual}"));
            let path = match named.strip_prefix("~/") {
                Some(below) => std::env::home_dir()?.join(below),
                None => PathBuf::from(&named),
            };
            Some(String::from_utf8_lossy(&std::fs::read(path).ok()?).into_owned())
        };
        Self {
            config: read("AWS_CONFIG_FILE", "config").unwrap_or_default(),
            credentials: read("AWS_SHARED_CREDENTIALS_FILE", "credentials").unwrap_or_default(),
        }
    }

    /// What both say of a profile, the file of credentials first; nothing where neither knows it.
    pub(super) fn profile(&self, name: &str) -> Settings {
        let mut settings = match name {
            "default" => self.section(name),
            _ => self.section(&format!("profile {name}")),
        };
        settings.extend(section(&self.credentials, name));
        settings
    }

    /// A section of `~/.aws/config`.
    pub(super) fn section(&self, name: &str) -> Settings {
        section(&self.config, name)
    }
}

/// A variable of the environment; an empty one is none.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The profile that holds where none is named.
pub(super) fn usual_profile(variable: impl Fn(&str) -> Option<String>) -> String {
    variable("AWS_PROFILE").unwrap_or_else(|| "default".to_owned())
}

/// Those options of a bucket that programs for AWS find by themselves: region and endpoint, in the environment, then in
/// this profile of the shared files, or in that of `AWS_PROFILE`, or in the default one. *Blocks* on the disk.
pub fn found_options(profile: Option<&str>) -> Vec<(&'static str, String)> {
    found(&SharedFiles::read(), profile, variable)
}

fn found(
    files: &SharedFiles,
    profile: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let mut settings = files.profile(&profile.map_or_else(|| usual_profile(&variable), str::to_owned));
    let services = settings.get("services").map(|services| files.section(&format!("services {services}")));
    let any_of = |names: [&str; 2]| names.into_iter().find_map(&variable);
    let region = any_of(["AWS_REGION", "AWS_DEFAULT_REGION"]).or_else(|| settings.remove("region"));
    let endpoint = any_of(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
        .or_else(|| services?.remove("s3.endpoint_url"))
        .or_else(|| settings.remove("endpoint_url"))
        .filter(|_| variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS").is_none_or(|value| value != "true"));
    [(REGION, region), (ENDPOINT, endpoint)].into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn section(text: &str, wanted: &str) -> Settings {
    let (mut is_wanted, mut outer, mut settings) = (false, String::new(), Settings::new());
    for line in text.lines() {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if let Some((name, _)) = content.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            is_wanted = name.split_whitespace().eq(wanted.split_whitespace());
            continue;
        }
        let Some((key, value)) = content.split_once('=').filter(|_| is_wanted) else { continue };
        let mut key = key.trim().to_ascii_lowercase();
        if line.starts_with([' ', '\t']) {
            key = format!("{outer}.{key}");
        } else {
            outer.clone_from(&key);
        }
        settings.insert(key, value.trim().to_owned());
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[default]\nregion = eu-west-1\n# a remark\n[profile lab]\nRegion=lab-1\nservices = of-lab\n\
                          endpoint_url = http://other:1\n[services of-lab]\ndynamodb =\n  endpoint_url = http://d:1\n\
                          s3 =\n  endpoint_url = http://lab:9000\n";

    fn options<const N: usize>(pairs: [(&'static str, &str); N]) -> HashMap<&'static str, String> {
        pairs.into_iter().map(|(name, value)| (name, value.to_owned())).collect()
    }

    fn found_in(profile: Option<&str>, environment: &[(&str, &str)]) -> HashMap<&'static str, String> {
        let variable = |name: &str| {
            let mut known = environment.iter().filter(|(known, _)| *known == name);
            known.next().map(|(_, value)| (*value).to_owned())
        };
        let credentials = "[other]\nregion = other-1\n".to_owned();
        let files = SharedFiles { config: CONFIG.to_owned(), credentials };
        found(&files, profile, variable).into_iter().collect()
    }

    #[test]
    fn the_environment_goes_before_the_profile() {
        assert_eq!(found_in(None, &[]), options([(REGION, "eu-west-1")]));
        let lab = options([(REGION, "lab-1"), (ENDPOINT, "http://lab:9000")]);
        assert_eq!(found_in(Some("lab"), &[]), lab);
        assert_eq!(found_in(None, &[("AWS_PROFILE", "lab")]), lab);
        assert_eq!(found_in(Some("other"), &[]), options([(REGION, "other-1")]));
        assert_eq!(found_in(Some("none"), &[]), options([]));
        let all = [("AWS_PROFILE", "lab"), ("AWS_REGION", "y-1"), ("AWS_ENDPOINT_URL", "http://a")];
        assert_eq!(found_in(None, &all), options([(REGION, "y-1"), (ENDPOINT, "http://a")]));
        let ignoring = [("AWS_PROFILE", "lab"), ("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")];
        assert_eq!(found_in(None, &ignoring), options([(REGION, "lab-1")]));
    }
}

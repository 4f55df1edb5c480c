//! Region and endpoint where programs for AWS find them: in the environment, then in the profile of the shared files.
//!
//! Credentials are found by each process for itself (`ufs/src/s3/credentials.rs`), so that those that change are seen.

use std::collections::HashMap;
use std::path::PathBuf;

use cavern_proto::s3_options::{ENDPOINT, REGION};

/// A variable of the environment; an empty one is none.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// One of the shared files, named by a variable or in `~/.aws`.
pub fn read(named_by: &str, usual: &str) -> Option<String> {
    let named = variable(named_by).map(PathBuf::from);
    let path = named.or_else(|| std::env::home_dir().map(|home| home.join(".aws").join(usual)))?;
    std::fs::read_to_string(path).ok()
}

/// The options of a bucket that are found; of this profile, or of `AWS_PROFILE`, or of the default one.
pub fn found(
    profile: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
    read: impl Fn(&str, &str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let profile = profile.map(str::to_owned).or_else(|| variable("AWS_PROFILE"));
    let profile = profile.unwrap_or_else(|| "default".to_owned());
    let config = read("AWS_CONFIG_FILE", "config").unwrap_or_default();
    let mut settings = section(&read("AWS_SHARED_CREDENTIALS_FILE", "credentials").unwrap_or_default(), &profile);
    let name = if profile == "default" { profile } else { format!("profile {profile}") };
    settings.extend(section(&config, &name));
    let services = settings.get("services").map(|services| section(&config, &format!("services {services}")));
    let mut of_services = services.unwrap_or_default();
    let region = ["AWS_REGION", "AWS_DEFAULT_REGION"].into_iter().find_map(&variable);
    let region = region.or_else(|| settings.remove("region"));
    let is_ignored = variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS").is_some_and(|value| value == "true");
    let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"].into_iter().find_map(&variable);
    let endpoint = endpoint.or_else(|| of_services.remove("s3.endpoint_url"));
    let endpoint = endpoint.or_else(|| settings.remove("endpoint_url")).filter(|_| !is_ignored);
    let options = [(REGION, region), (ENDPOINT, endpoint)];
    options.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// What a section of a file says; what is indented below a key is named `KEY.INNER`.
fn section(text: &str, wanted: &str) -> HashMap<String, String> {
    let (mut is_wanted, mut outer, mut settings) = (false, String::new(), HashMap::new());
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
        let key = if line.starts_with([' ', '\t']) {
            format!("{outer}.{}", key.trim())
        } else {
            key.trim().clone_into(&mut outer);
            outer.clone()
        };
        settings.insert(key, value.trim().to_owned());
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[default]\nregion = eu-west-1\n# a remark\n[profile lab]\nregion=lab-1\nservices = of-lab\n\
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
        let read = |named_by: &str, _: &str| match named_by {
            "AWS_CONFIG_FILE" => Some(CONFIG.to_owned()),
            _ => Some("[other]\nregion = other-1\n".to_owned()),
        };
        found(profile, variable, read).into_iter().collect()
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

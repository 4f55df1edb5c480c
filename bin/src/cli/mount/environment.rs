//! Whose environment counts: a bucket is read by the master and the workers, with the credentials that *they* find.

use cavern_proto::master::Mount;
use cavern_proto::{Scheme, s3_options};

use crate::console;

/// Variables in which a shell has credentials of S3.
const VARIABLES: [&str; 3] = ["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"];

/// Says so on stderr where this command's environment has credentials, and the mount has none of its own.
pub fn warn_if_unused(mount: &Mount, is_set: impl Fn(&str) -> bool) {
    if let Some(variable) = unused(mount, is_set) {
        console::remark(format_args!(
            "{variable} of this command's environment is not used: it is the master and the workers that read the \
             bucket, and without -c s3.credentials.… each of them takes what its own environment has; \
             --credentials-env and --credentials-profile give them yours"
        ));
    }
}

fn unused(mount: &Mount, is_set: impl Fn(&str) -> bool) -> Option<&'static str> {
    if mount.scheme() != Some(Scheme::S3) || mount.options.keys().any(|name| s3_options::names_credentials(name)) {
        return None;
    }
    VARIABLES.into_iter().find(|name| is_set(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_credentials_that_nobody_will_use_are_spoken_of() {
        let mount = |uri: &str, option: &str| Mount {
            uri: uri.into(),
            options: [(option.to_owned(), "x".to_owned())].into(),
            ..Mount::default()
        };
        let profile = |name: &str| name == "AWS_PROFILE";
        assert_eq!(unused(&mount("s3://b", "s3.region_name"), profile), Some("AWS_PROFILE"));
        assert_eq!(unused(&mount("s3://b", "s3.region_name"), |_| false), None);
        assert_eq!(unused(&mount("s3://b", "s3.credentials.access"), profile), None);
        assert_eq!(unused(&mount("s3://b", "s3.anonymous"), profile), None);
        assert_eq!(unused(&mount("file:///b", "s3.region_name"), profile), None);
    }
}

//! What is wrong with the files of `[security]`, before a process needs them.

use cavern_conf::Config;

use crate::certificate::{read_certificates, read_key};
use crate::error::SecurityError;
use crate::http::TokenFile;
use crate::revocation::read_lists;
use crate::transport::Transport;

/// All that a process of this host would refuse of the files that `[security]` names: each by itself, or one beside
/// the others. Nothing where connections are in clear.
pub fn check_files(config: &Config) -> Vec<SecurityError> {
    let files = &config.security;
    if !files.is_on() {
        return Vec::new();
    }
    let each = [
        read_certificates("ca", &files.ca).err(),
        read_certificates("certificate", &files.certificate).err(),
        read_key(&files.key).err(),
        (!files.revoked.as_os_str().is_empty()).then(|| read_lists(&files.revoked).err()).flatten(),
    ];
    let mut problems: Vec<_> = each.into_iter().flatten().collect();
    if problems.is_empty() {
        problems.extend(Transport::of(config).err());
    }
    if !files.http_token.as_os_str().is_empty() {
        problems.extend(TokenFile::open(&files.http_token).err());
    }
    problems
}

//! Names of the options of `s3://` mounts; their meaning is in `ufs/src/s3/options.rs`.

pub const ENDPOINT: &str = "s3.endpoint_url";
pub const REGION: &str = "s3.region_name";
pub const PATH_STYLE: &str = "s3.force.path.style";
pub const ANONYMOUS: &str = "s3.anonymous";
pub const ACCESS: &str = "s3.credentials.access";
pub const SECRET: &str = "s3.credentials.secret";
pub const TOKEN: &str = "s3.credentials.session_token";
pub const PROFILE: &str = "s3.credentials.profile";
pub const SOURCE: &str = "s3.credentials.source";
pub const ROLE: &str = "s3.credentials.role";
pub const EXTERNAL_ID: &str = "s3.credentials.external_id";
pub const ROLE_SESSION: &str = "s3.credentials.role_session";
pub const VENDED_ROLE: &str = "s3.credentials.vended_role";
pub const VENDED_DURATION: &str = "s3.credentials.vended_duration";
pub const STS_ENDPOINT: &str = "s3.sts_endpoint_url";

/// What all names begin with.
pub const PREFIX: &str = "s3.";

pub const ALL: [&str; 15] = [
    ENDPOINT,
    REGION,
    PATH_STYLE,
    ACCESS,
    SECRET,
    TOKEN,
    PROFILE,
    SOURCE,
    ROLE,
    EXTERNAL_ID,
    ROLE_SESSION,
    VENDED_ROLE,
    VENDED_DURATION,
    STS_ENDPOINT,
    ANONYMOUS,
];

/// Those whose values are no secrets.
pub(super) const SHOWN: [&str; 11] = [
    ENDPOINT,
    REGION,
    PATH_STYLE,
    ANONYMOUS,
    PROFILE,
    SOURCE,
    ROLE,
    ROLE_SESSION,
    VENDED_ROLE,
    VENDED_DURATION,
    STS_ENDPOINT,
];

/// Whether an option says with whose credentials the store is asked.
pub fn names_credentials(name: &str) -> bool {
    name.starts_with("s3.credentials.") || name == ANONYMOUS
}

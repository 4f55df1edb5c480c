//! What the environment says of how much a test does.

/// The number in a variable; `default` where there is none.
#[track_caller]
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

//! What a rule is, and those that several values have in common.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use crate::error::{ConfigError, Problem, SettingSource};
use crate::units::{ByteSize, Interval};

/// Ten years: a longer timeout is a slip of the unit.
const LONGEST: Interval = Interval::secs(10 * 365 * 86_400);
/// Threads and requests in flight beyond this are a slip of the finger.
const MOST: usize = 65_536;

/// What a page of a listing has.
const FEWEST_ENTRIES: u64 = 1000;

/// The rules of one configuration, and which of them it breaks. `origin` says where the value of a `section.key` came
/// from.
pub(crate) struct Rules<'a> {
    origin: &'a dyn Fn(&str) -> SettingSource,
    problems: Vec<Problem>,
}

impl Rules<'_> {
    /// Refuses a configuration that breaks one of the rules that `check` holds it to.
    ///
    /// # Errors
    /// [`ConfigError::Rejected`] with all of them.
    pub(crate) fn hold(
        origin: impl Fn(&str) -> SettingSource,
        check: impl FnOnce(&mut Rules<'_>),
    ) -> Result<(), ConfigError> {
        let mut rules = Rules { origin: &origin, problems: Vec::new() };
        check(&mut rules);
        if rules.problems.is_empty() { Ok(()) } else { Err(ConfigError::Rejected(rules.problems)) }
    }

    /// Notes a problem of `keys` unless `holds`.
    pub(crate) fn require(&mut self, holds: bool, keys: &[&str], message: impl FnOnce() -> String) {
        if holds {
            return;
        }
        let set = keys.iter().find(|key| (self.origin)(key).is_set());
        if let Some(key) = set.or(keys.first()) {
            self.problems.push(Problem { origin: (self.origin)(key), key: (*key).to_owned(), message: message() });
        }
    }

    /// Whether somebody has set one of these.
    pub(crate) fn any_is_set(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| (self.origin)(key).is_set())
    }

    /// Notes what is wrong with a value.
    pub(crate) fn refuse(&mut self, key: &str, message: String) {
        self.require(false, &[key], || message);
    }

    pub(crate) fn cluster_name(&mut self, key: &str, name: &str) {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        self.require((1..=64).contains(&name.len()) && name.chars().all(plain), &[key], || {
            format!("\"{}\" must be 1 to 64 letters, digits, \"-\", \"_\" or \".\"", name.escape_debug())
        });
    }

    pub(crate) fn listen_address(&mut self, key: &str, address: &str) {
        self.require(is_host_port(address, Port::AnyOrFree), &[key], || {
            format!(
                "\"{address}\" is not an address to listen on: write host:port, as \"0.0.0.0:7700\" (port 0: a \
                 free one)"
            )
        });
    }

    /// An address that others are given, or none.
    pub(crate) fn advertised(&mut self, key: &str, address: &str, example: &str) {
        self.require(address.is_empty() || is_host_port(address, Port::Given), &[key], || {
            format!("\"{address}\" is not an address: write host:port, as \"{example}\", or leave it empty")
        });
    }

    /// Two ports of one process.
    pub(crate) fn distinct(&mut self, keys: [&str; 2], first: &str, second: &str) {
        let free = first.ends_with(":0");
        self.require(first != second || free, &[keys[1], keys[0]], || {
            format!("\"{second}\" is the address of {} and of {}: give each a port of its own", keys[0], keys[1])
        });
    }

    pub(crate) fn absolute(&mut self, key: &str, path: &impl AsRef<Path>) {
        let path = path.as_ref();
        self.require(is_absolute_and_plain(path), &[key], || {
            format!("\"{}\" must be an absolute path without \".\" or \"..\", as \"/var/lib/cavern\"", path.display())
        });
    }

    /// A path, or none.
    pub(crate) fn absolute_if_set(&mut self, key: &str, path: &Path) {
        if is_set(path) {
            self.absolute(key, &path);
        }
    }

    pub(crate) fn all_absolute(&mut self, key: &str, paths: &[PathBuf]) {
        for path in paths {
            self.absolute(key, path);
        }
    }

    /// Where an audit log goes.
    pub(crate) fn audit_log(&mut self, key: &str, target: &str) {
        let is_known = ["", "log"].contains(&target) || is_absolute_and_plain(Path::new(target));
        self.require(is_known, &[key], || {
            format!(
                "\"{target}\" is no place for an audit log: write an absolute path without \".\" or \"..\", as \
                 \"/var/log/cavern/audit-master\", or \"log\""
            )
        });
    }

    pub(crate) fn positive(&mut self, key: &str, interval: &Interval) {
        self.require(!interval.is_zero() && *interval <= LONGEST, &[key], || {
            format!("\"{interval}\" must be more than zero and at most ten years, as \"5s\"")
        });
    }

    pub(crate) fn at_most_ten_years(&mut self, key: &str, interval: &Interval) {
        self.require(*interval <= LONGEST, &[key], || format!("\"{interval}\" must be at most ten years, as \"60s\""));
    }

    /// So long at least, and ten years at most.
    pub(crate) fn lasting(&mut self, key: &str, interval: &Interval, least: Interval, example: &str) {
        self.require((least..=LONGEST).contains(interval), &[key], || {
            format!("\"{interval}\" must be at least \"{least}\", as \"{example}\"")
        });
    }

    pub(crate) fn count(&mut self, key: &str, value: &usize) {
        self.within(key, value, 1..=MOST, "");
    }

    /// `more` is what the message ends with.
    pub(crate) fn within<T: PartialOrd + Display>(
        &mut self,
        key: &str,
        value: &T,
        range: RangeInclusive<T>,
        more: &str,
    ) {
        self.require(range.contains(value), &[key], || {
            format!("{value} must be from {} to {}{more}", range.start(), range.end())
        });
    }

    /// `instead` says how to do without.
    pub(crate) fn some(&mut self, key: &str, value: &usize, instead: &str) {
        self.require(*value > 0, &[key], || format!("must be at least 1; {instead}"));
    }

    /// Entries of a listing.
    pub(crate) fn entries(&mut self, key: &str, most: &u64) {
        self.require(*most >= FEWEST_ENTRIES, &[key], || {
            format!("{most} must be at least {FEWEST_ENTRIES}: a page of a listing has as many")
        });
    }

    pub(crate) fn fraction(&mut self, key: &str, fraction: &f64) {
        self.require(*fraction > 0.0 && *fraction <= 1.0, &[key], || {
            format!("{fraction} must be a fraction above 0 and at most 1, as 0.95")
        });
    }

    /// Of a user or a group.
    pub(crate) fn id_or_own(&mut self, key: &str, id: &i64) {
        // The largest 32-bit number is -1 to the kernel, and means nobody.
        self.require((-1..i64::from(u32::MAX)).contains(id), &[key], || {
            format!("{id} must be an id from 0 to {}, or -1 for the process's own", u32::MAX - 1)
        });
    }

    pub(crate) fn permissions(&mut self, key: &str, mode: &u32) {
        self.require(*mode <= 0o777, &[key], || {
            format!("0o{mode:o} must be permissions from 0o000 to 0o777, with the prefix 0o, as 0o644")
        });
    }

    pub(crate) fn at_least(&mut self, key: &str, value: &ByteSize, least: ByteSize) {
        self.require(*value >= least, &[key], || format!("\"{value}\" must be at least \"{least}\""));
    }

    /// Nothing stands for something, and few are too few for a reason.
    pub(crate) fn nothing_or(&mut self, key: &str, value: &ByteSize, least: ByteSize, [zero, reason]: [&str; 2]) {
        self.require(value.bytes() == 0 || *value >= least, &[key], || {
            format!("\"{value}\" must be \"0B\", for {zero}, or at least \"{least}\": {reason}")
        });
    }

    /// `small` must not exceed `large`.
    pub(crate) fn ordered<T: PartialOrd + Display>(
        &mut self,
        (small_key, small): (&str, T),
        (large_key, large): (&str, T),
    ) {
        self.require(small <= large, &[small_key, large_key], || {
            format!("{small_key} (\"{small}\") must be at most {large_key} (\"{large}\")")
        });
    }
}

/// Whether a setting names a path.
pub(crate) fn is_set(path: &Path) -> bool {
    !path.as_os_str().is_empty()
}

/// Whether a path starts at the root and goes only down.
pub(crate) fn is_absolute_and_plain(path: &Path) -> bool {
    // `components` hides the "." between other components, so the text is asked too.
    let hidden_dot = path.to_str().is_some_and(|text| text.split('/').any(|component| component == "."));
    path.is_absolute() && !hidden_dot && path.components().all(|component| component != Component::ParentDir)
}

/// Which ports an address may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    /// One that others can reach: not 0.
    Given,
    /// 0 stands for any free one.
    AnyOrFree,
}

/// The host and the port of `host:port`.
pub(crate) fn parts(address: &str) -> (&str, &str) {
    address.rsplit_once(':').unwrap_or((address, ""))
}

/// `host:port`, the host a name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn is_host_port(address: &str, port: Port) -> bool {
    let Some((host, number)) = address.rsplit_once(':') else { return false };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let host_good = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.len() <= 253 && host.chars().all(plain),
    };
    let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse::<u16>().ok().filter(|number| digits && (*number > 0 || port == Port::AnyOrFree));
    host_good && number.is_some()
}

//! What a rule is, and those that several values have in common.

use std::path::Path;

use crate::dirs::is_absolute_and_plain;
use crate::error::{Problem, SettingSource};
use crate::units::{ByteSize, Interval};

/// Ten years: a longer timeout is a slip of the unit.
pub(crate) const LONGEST: Interval = Interval::secs(10 * 365 * 86_400);
/// Threads and requests in flight beyond this are a slip of the finger.
const MOST: usize = 65_536;

/// The rules of one configuration, and which of them it breaks. `origin` says where the value of a `section.key` came
/// from.
pub(crate) struct Rules<'a> {
    origin: &'a dyn Fn(&str) -> SettingSource,
    problems: Vec<Problem>,
}

impl<'a> Rules<'a> {
    pub(crate) fn new(origin: &'a dyn Fn(&str) -> SettingSource) -> Self {
        Self { origin, problems: Vec::new() }
    }

    pub(crate) fn into_problems(self) -> Vec<Problem> {
        self.problems
    }

    /// Notes a problem of `keys` unless `holds`.
    pub(crate) fn require(&mut self, holds: bool, keys: &[&str], message: impl FnOnce() -> String) {
        if holds {
            return;
        }
        let set = keys.iter().find(|key| (self.origin)(key) != SettingSource::Default);
        if let Some(key) = set.or(keys.first()) {
            self.problems.push(Problem { origin: (self.origin)(key), key: (*key).to_owned(), message: message() });
        }
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

    pub(crate) fn absolute(&mut self, key: &str, path: &Path) {
        self.require(is_absolute_and_plain(path), &[key], || {
            format!("\"{}\" must be an absolute path without \".\" or \"..\", as \"/var/lib/cavern\"", path.display())
        });
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

    pub(crate) fn positive(&mut self, key: &str, interval: Interval) {
        self.require(!interval.is_zero() && interval <= LONGEST, &[key], || {
            format!("\"{interval}\" must be more than zero and at most ten years, as \"5s\"")
        });
    }

    pub(crate) fn at_most_ten_years(&mut self, key: &str, interval: Interval) {
        self.require(interval <= LONGEST, &[key], || format!("\"{interval}\" must be at most ten years, as \"60s\""));
    }

    pub(crate) fn count(&mut self, key: &str, value: usize) {
        self.require((1..=MOST).contains(&value), &[key], || format!("{value} must be from 1 to {MOST}"));
    }

    pub(crate) fn at_least(&mut self, key: &str, value: ByteSize, least: ByteSize) {
        self.require(value >= least, &[key], || format!("\"{value}\" must be at least \"{least}\""));
    }

    /// `small` must not exceed `large`.
    pub(crate) fn ordered<T: PartialOrd + std::fmt::Display>(
        &mut self,
        (small_key, small): (&str, T),
        (large_key, large): (&str, T),
    ) {
        self.require(small <= large, &[small_key, large_key], || {
            format!("{small_key} (\"{small}\") must be at most {large_key} (\"{large}\")")
        });
    }
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

//! Whether the addresses of a cluster fit each other: who is named to others must listen where these can come.
//!
//! One file serves all hosts, but not every host runs everything: a laptop whose file names nothing but the master is
//! right. So these rules hold for the process that listens, when it starts, and for `cv conf check`, which knows of no
//! process. An address is of this host alone if it is `localhost`, in 127.0.0.0/8 or `::1`; other names may lead
//! anywhere, and count as reachable.
//!
//! Where other hosts can come they are asked who they are ([`schema::Security`](crate::schema::Security)), unless the
//! configuration says that nobody needs to be.

use std::net::{IpAddr, Ipv4Addr};

use crate::rules::{Rules, parts};
use crate::schema::Config;

named_values! {
    /// A process that listens, named as it is started: `cv master`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Role {
        Master = "master",
        Worker = "worker",
        Fuse = "fuse",
    }
}

impl Role {
    /// Where it listens for other processes, if it does, and the key that says so.
    fn listen(self, config: &Config) -> Option<(&'static str, &str)> {
        match self {
            Self::Master => Some(("master.listen", &config.master.listen)),
            Self::Worker => Some(("worker.listen", &config.worker.listen)),
            Self::Fuse => None,
        }
    }

    /// Where it shows metrics and health.
    fn http_listen(self, config: &Config) -> (&'static str, &str) {
        match self {
            Self::Master => ("master.http_listen", &config.master.http_listen),
            Self::Worker => ("worker.http_listen", &config.worker.http_listen),
            Self::Fuse => ("fuse.http_listen", &config.fuse.http_listen),
        }
    }
}

/// Who can come to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ListenScope {
    /// This host alone.
    Host,
    /// It stands for all addresses of the host that listens, and for none that could be connected to.
    Wildcard,
    Anybody,
}

fn scope(address: &str) -> ListenScope {
    let (host, _) = parts(address);
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    match plain.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => ListenScope::Host,
        Ok(ip) if ip.is_unspecified() => ListenScope::Wildcard,
        Ok(IpAddr::V6(ip)) if ip.to_ipv4_mapped().is_some_and(|ip: Ipv4Addr| ip.is_loopback()) => ListenScope::Host,
        Err(_) if plain.eq_ignore_ascii_case("localhost") || plain.to_ascii_lowercase().ends_with(".localhost") => {
            ListenScope::Host
        }
        _ => ListenScope::Anybody,
    }
}

/// Whether the address stands for all addresses of a host.
pub(crate) fn is_wildcard(address: &str) -> bool {
    scope(address) == ListenScope::Wildcard
}

/// Refuses a list of masters of which some lead every host to itself and some to another host.
pub(crate) fn check_masters(masters: &[String], rules: &mut Rules<'_>) {
    let first = |wanted: ListenScope| masters.iter().find(|master| scope(master) == wanted);
    if let (Some(own), Some(other)) = (first(ListenScope::Host), first(ListenScope::Anybody)) {
        rules.require(false, &["cluster.masters"], || {
            format!(
                "\"{own}\" leads each host to itself, but \"{other}\" is one for several hosts: name each master as \
                 other hosts reach it"
            )
        });
    }
}

pub(crate) fn check(config: &Config, role: Role, rules: &mut Rules<'_>) {
    match role {
        Role::Master => check_master(config, rules),
        Role::Worker => check_worker(config, rules),
        Role::Fuse => {}
    }
    if let Some((key, address)) = open_listener(config, role) {
        rules.require(config.security.insecure, &[key], || {
            format!(
                "with \"{address}\" other hosts can come in, and without [security] nobody is asked who he is: name \
                 the three files of [security], which `cv cert` makes, or set security.insecure = true where everybody \
                 who reaches the port may do everything"
            )
        });
    }
    let (key, address) = role.http_listen(config);
    rules.require(config.security.insecure || !is_open(config, address), &[key], || {
        format!(
            "with \"{address}\" other hosts can read metrics, and without [security] nobody is asked who he is: name \
             the three files of [security], which `cv cert` makes, or set security.insecure = true where everybody who \
             reaches the port may read them"
        )
    });
}

/// The address, with its key, at which whoever comes from another host is let in without being asked who he is.
fn open_listener(config: &Config, role: Role) -> Option<(&'static str, &str)> {
    role.listen(config).filter(|(_, address)| is_open(config, address))
}

fn is_open(config: &Config, address: &str) -> bool {
    !config.security.is_on() && scope(address) != ListenScope::Host
}

/// Says in the log what it means that a process of this role lets other hosts in without asking who they are
/// (`security.insecure`).
pub(crate) fn warn_if_open(config: &Config, role: Role) {
    if let Some((key, address)) = open_listener(config, role) {
        tracing::warn!(address, key, "security.insecure is set: whoever reaches this port may do everything");
    }
}

fn check_master(config: &Config, rules: &mut Rules<'_>) {
    let masters = &config.cluster.masters;
    let (listen, advertise) = (config.master.listen.as_str(), config.master.advertise.as_str());
    let named = masters.iter().map(|master| ("cluster.masters", master.as_str()));
    for (key, address) in named.chain([("master.advertise", advertise)]) {
        rules.require(!is_wildcard(address), &[key], || {
            format!(
                "\"{address}\" stands for all addresses of a host, and nobody can connect to that: name the host of \
                 the master"
            )
        });
    }
    // All of the list are of this host alone, or none is.
    let Some(first) = masters.first() else { return };
    rules.require(
        advertise.is_empty() || scope(first) != ListenScope::Anybody || scope(advertise) != ListenScope::Host,
        &["master.advertise", "cluster.masters"],
        || {
            format!(
                "cluster.masters names \"{first}\", so that the cluster has several hosts, but master.advertise \
                 \"{advertise}\" leads each of them to itself: name this host, or leave it empty"
            )
        },
    );
    let (key, named) =
        if advertise.is_empty() { ("cluster.masters", first.as_str()) } else { ("master.advertise", advertise) };
    let port = parts(named).1;
    rules.require(
        scope(named) != ListenScope::Anybody || scope(listen) != ListenScope::Host,
        &["master.listen", key],
        || {
            format!(
                "{key} names \"{named}\", but with master.listen \"{listen}\" no other host reaches the master: set \
                 master.listen to \"0.0.0.0:{port}\""
            )
        },
    );
    rules.require(
        scope(named) != ListenScope::Host || scope(listen) != ListenScope::Anybody,
        &[key, "master.listen"],
        || {
            format!(
                "{key} names \"{named}\", but with master.listen \"{listen}\" the master is not there: name \
                 \"{listen}\" in {key}, or set master.listen to \"0.0.0.0:{port}\""
            )
        },
    );
}

fn check_worker(config: &Config, rules: &mut Rules<'_>) {
    let worker = &config.worker;
    let (listen, advertise) = (worker.listen.as_str(), worker.advertise.as_str());
    let port = parts(listen).1;
    // A master on another host: the cluster has several.
    let away = config.cluster.masters.iter().find(|master| scope(master) != ListenScope::Host);
    if advertise.is_empty() {
        if let Some(master) = away {
            rules.require(scope(listen) != ListenScope::Host, &["worker.listen", "cluster.masters"], || {
                format!(
                    "cluster.masters names \"{master}\", so that the cluster has several hosts, but with \
                     worker.listen \"{listen}\" no other host reaches this worker: set worker.listen to \
                     \"0.0.0.0:{port}\""
                )
            });
        }
        return;
    }
    rules.require(!is_wildcard(advertise), &["worker.advertise"], || {
        format!(
            "\"{advertise}\" stands for all addresses of a host, and nobody can connect to that: name this host, \
            or leave it empty"
        )
    });
    if let Some(master) = away {
        rules.require(scope(advertise) != ListenScope::Host, &["worker.advertise", "cluster.masters"], || {
            format!(
                "cluster.masters names \"{master}\", so that the cluster has several hosts, but worker.advertise \
                 \"{advertise}\" leads each of them to itself: name this host, or leave it empty"
            )
        });
    }
    rules.require(
        scope(advertise) != ListenScope::Anybody || scope(listen) != ListenScope::Host,
        &["worker.listen", "worker.advertise"],
        || {
            format!(
                "worker.advertise names \"{advertise}\", but with worker.listen \"{listen}\" no other host reaches \
                 this worker: set worker.listen to \"0.0.0.0:{port}\""
            )
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whom_an_address_lets_in() {
        for address in [
            "127.0.0.1:1",
            "127.9.9.9:1",
            "localhost:1",
            "LOCALHOST:1",
            "x.localhost:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert_eq!(scope(address), ListenScope::Host, "{address}");
        }
        for address in ["0.0.0.0:1", "[::]:1"] {
            assert_eq!(scope(address), ListenScope::Wildcard, "{address}");
        }
        for address in ["10.0.0.1:1", "node7:1", "localhost.example:1", "[fd00::1]:1"] {
            assert_eq!(scope(address), ListenScope::Anybody, "{address}");
        }
    }

    #[test]
    fn who_listens_for_other_hosts_asks_who_they_are_or_is_open() {
        let mut config = Config::default();
        assert_eq!([Role::Master, Role::Worker].map(|role| open_listener(&config, role)), [None, None]);
        // A rule of its own.
        config.master.http_listen = "0.0.0.0:7701".to_owned();
        config.master.listen = "0.0.0.0:7700".to_owned();
        config.worker.listen = "[::]:7710".to_owned();
        assert_eq!(open_listener(&config, Role::Master), Some(("master.listen", "0.0.0.0:7700")));
        assert_eq!(open_listener(&config, Role::Worker), Some(("worker.listen", "[::]:7710")));
        config.security.insecure = true;
        assert!(open_listener(&config, Role::Master).is_some(), "that it may be does not close it");
        config.security.ca = "/etc/ca.pem".into();
        assert_eq!([Role::Master, Role::Worker].map(|role| open_listener(&config, role)), [None, None]);
    }
}

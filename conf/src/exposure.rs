//! Whether the addresses of a cluster fit each other: who is named to others must listen where these can come.
//!
//! One file serves all hosts, but not every host runs everything: a laptop whose file names nothing but the master is
//! right. So these rules hold for the process that listens, when it starts, and for `cv conf check`, which knows of no
//! process. An address is of this host alone if it is `localhost`, in 127.0.0.0/8 or `::1`; other names may lead
//! anywhere, and count as reachable.

use std::net::{IpAddr, Ipv4Addr};

use crate::rules::Rules;
use crate::schema::Config;

/// A process that others connect to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Master,
    Worker,
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

/// The host and the port of `host:port`.
fn parts(address: &str) -> (&str, &str) {
    address.rsplit_once(':').unwrap_or((address, ""))
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

pub(crate) fn check(config: &Config, role: Role, rules: &mut Rules<'_>) {
    // There is one: more are refused before.
    let Some(master) = config.cluster.masters.first() else { return };
    match role {
        Role::Master => check_master(config, master, rules),
        Role::Worker => check_worker(config, master, rules),
    }
}

fn check_master(config: &Config, named: &str, rules: &mut Rules<'_>) {
    let listen = config.master.listen.as_str();
    let port = parts(named).1;
    rules.require(scope(named) != ListenScope::Wildcard, &["cluster.masters"], || {
        format!(
            "\"{named}\" stands for all addresses of a host, and nobody can connect to that: name the host of the \
            master"
        )
    });
    let keys = &["master.listen", "cluster.masters"];
    rules.require(scope(named) != ListenScope::Anybody || scope(listen) != ListenScope::Host, keys, || {
        format!(
            "cluster.masters names \"{named}\", but with master.listen \"{listen}\" no other host reaches the master: \
             set master.listen to \"0.0.0.0:{port}\""
        )
    });
    rules.require(
        scope(named) != ListenScope::Host || scope(listen) != ListenScope::Anybody,
        &["cluster.masters", "master.listen"],
        || {
            format!(
                "cluster.masters names \"{named}\", but with master.listen \"{listen}\" the master is not there: name \
             \"{listen}\" in cluster.masters, or set master.listen to \"0.0.0.0:{port}\""
            )
        },
    );
}

fn check_worker(config: &Config, master: &str, rules: &mut Rules<'_>) {
    let worker = &config.worker;
    let (listen, advertise) = (worker.listen.as_str(), worker.advertise.as_str());
    let port = parts(listen).1;
    if advertise.is_empty() {
        rules.require(
            scope(master) == ListenScope::Host || scope(listen) != ListenScope::Host,
            &["worker.listen", "cluster.masters"],
            || {
                format!(
                    "cluster.masters names \"{master}\", so that the cluster has several hosts, but with worker.listen \
                 \"{listen}\" no other host reaches this worker: set worker.listen to \"0.0.0.0:{port}\""
                )
            },
        );
        return;
    }
    rules.require(scope(advertise) != ListenScope::Wildcard, &["worker.advertise"], || {
        format!(
            "\"{advertise}\" stands for all addresses of a host, and nobody can connect to that: name this host, \
            or leave it empty"
        )
    });
    rules.require(
        scope(master) == ListenScope::Host || scope(advertise) != ListenScope::Host,
        &["worker.advertise", "cluster.masters"],
        || {
            format!(
                "cluster.masters names \"{master}\", so that the cluster has several hosts, but worker.advertise \
                 \"{advertise}\" leads each of them to itself: name this host, or leave it empty"
            )
        },
    );
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
}

//! Which of several masters this process is. One file serves all hosts, so that it cannot say so itself.
//!
//! An address is of this host if a socket can be bound to it, whatever interfaces there are. Names are resolved for
//! that, so this is done when a master starts and not when the configuration is checked, which must not need a network.

use std::net::{IpAddr, ToSocketAddrs as _, UdpSocket};

use crate::exposure::is_wildcard;
use crate::rules::parts;
use crate::schema::Config;

impl Config {
    /// The address under which clients and other masters reach the master of this process: `master.advertise`, or the
    /// entry of `cluster.masters` that is this one. Blocks on the lookup of names.
    ///
    /// # Errors
    /// The sentence for whoever wrote the configuration, if no entry is this master, or several are.
    pub fn master_address(&self) -> Result<String, String> {
        if !self.master.advertise.is_empty() {
            return Ok(self.master.advertise.clone());
        }
        own_entry(&self.cluster.masters, &self.master.listen, is_own_host)
    }

    /// Whether a master is to run on this host: `master.advertise` or an entry of `cluster.masters` leads to it. Blocks
    /// on the lookup of names.
    pub fn is_master_host(&self) -> bool {
        let mut named = self.cluster.masters.iter().chain([&self.master.advertise]);
        named.any(|address| !address.is_empty() && is_own_host(parts(address).0))
    }
}

/// Whether it is the name of this host, or a socket can be bound to an address of it.
fn is_own_host(host: &str) -> bool {
    let own = rustix::system::uname();
    own.nodename().to_string_lossy().eq_ignore_ascii_case(host) || addresses(host).into_iter().any(is_local)
}

/// The entry of `masters` that leads to a master of this host that listens on `listen`.
fn own_entry(masters: &[String], listen: &str, is_own_host: impl Fn(&str) -> bool) -> Result<String, String> {
    if let [only] = masters {
        return Ok(only.clone());
    }
    if let Some(equal) = masters.iter().find(|master| *master == listen) {
        return Ok(equal.clone());
    }
    let (listen_host, listen_port) = parts(listen);
    let is_own = |master: &&String| {
        let (host, port) = parts(master);
        let leads_here = || match is_wildcard(listen) {
            true => is_own_host(host),
            // An address of this host, and perhaps the name of it: what others call it may be a third thing.
            false => addresses(host).iter().any(|address| addresses(listen_host).contains(address)),
        };
        port == listen_port && leads_here()
    };
    let own: Vec<&String> = masters.iter().filter(is_own).collect();
    let advice = "set master.advertise to the address under which the other masters reach this one";
    match own[..] {
        [own] => Ok(own.clone()),
        [] => Err(format!(
            "none of cluster.masters ({}) is this master, which listens on \"{listen}\": {advice}",
            quoted(masters.iter())
        )),
        _ => Err(format!(
            "{} of cluster.masters all lead to this host, with the port of master.listen \"{listen}\": {advice}",
            quoted(own.into_iter())
        )),
    }
}

fn quoted<'a>(addresses: impl Iterator<Item = &'a String>) -> String {
    addresses.map(|address| format!("\"{address}\"")).collect::<Vec<_>>().join(", ")
}

/// What a host of the configuration stands for; nothing for a name that nobody knows.
fn addresses(host: &str) -> Vec<IpAddr> {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    (plain, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect()).unwrap_or_default()
}

/// Nothing is sent. Where the kernel lets anybody bind any address (`ip_nonlocal_bind`) all are local, and the caller
/// finds several entries that are.
fn is_local(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masters(entries: [&str; 3]) -> Vec<String> {
        entries.map(str::to_owned).to_vec()
    }

    #[test]
    fn a_host_of_a_master_knows_that_it_is_one() {
        let is_host = |master: &str, advertise: &str| {
            let mut config = Config::default();
            config.cluster.masters = vec![master.to_owned()];
            config.master.advertise = advertise.to_owned();
            config.is_master_host()
        };
        let own = rustix::system::uname().nodename().to_string_lossy().to_uppercase();
        assert!(is_host("127.0.0.1:7700", "") && is_host("[::1]:1", "") && is_host(&format!("{own}:7700"), ""));
        // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
        assert!(!is_host("192.0.2.1:7700", "") && is_host("192.0.2.1:7700", "127.0.0.1:7700"));
    }

    #[test]
    fn the_entry_of_this_host_is_found() {
        let three = masters(["node1:7700", "node2:7700", "node3:7700"]);
        let on_node2 = |host: &str| host == "node2";
        assert_eq!(own_entry(&three, "0.0.0.0:7700", on_node2).unwrap(), "node2:7700");
        assert_eq!(own_entry(&three, "[::]:7700", on_node2).unwrap(), "node2:7700");
        assert_eq!(own_entry(&three, "node3:7700", |_| false).unwrap(), "node3:7700");
        // On one host it is the port that tells.
        let here = masters(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]);
        assert_eq!(own_entry(&here, "0.0.0.0:3", |_| true).unwrap(), "127.0.0.1:3");
        assert_eq!(own_entry(&here, "127.0.0.1:2", |_| false).unwrap(), "127.0.0.1:2");
        // Spelled otherwise.
        assert_eq!(
            own_entry(&masters(["[::1]:7", "127.0.0.1:7", "[::1]:8"]), "127.0.0.1:7", |_| false).unwrap(),
            "127.0.0.1:7"
        );
        assert_eq!(
            own_entry(&masters(["[0:0::1]:7", "127.0.0.1:7", "[::1]:8"]), "[::1]:7", |_| false).unwrap(),
            "[0:0::1]:7"
        );
        // The only one is it, wherever it listens.
        assert_eq!(own_entry(&["elsewhere:7700".to_owned()], "127.0.0.1:0", |_| false).unwrap(), "elsewhere:7700");
    }

    #[test]
    fn what_cannot_be_told_is_said_with_the_entries() {
        let three = masters(["node1:7700", "node2:7700", "node3:7700"]);
        for (listen, is_own) in [("0.0.0.0:7700", false), ("0.0.0.0:7701", true)] {
            let error = own_entry(&three, listen, |_| is_own).unwrap_err();
            assert!(error.starts_with("none of cluster.masters (\"node1:7700\", \"node2:7700\","), "{error}");
            assert!(error.contains(listen) && error.contains("set master.advertise"), "{error}");
        }
        let error = own_entry(&three, "0.0.0.0:7700", |host| host != "node2").unwrap_err();
        assert!(error.starts_with("\"node1:7700\", \"node3:7700\" of cluster.masters all lead"), "{error}");
    }

    #[test]
    fn addresses_of_this_host_are_told_from_others() {
        for host in ["127.0.0.1", "127.8.8.8", "localhost"] {
            assert!(addresses(host).into_iter().any(is_local), "{host}");
        }
        // Reserved for documentation (RFC 5737): no host has it.
        assert!(!addresses("203.0.113.1").into_iter().any(is_local));
        assert_eq!(addresses("[::1]"), ["::1".parse::<IpAddr>().unwrap()]);
        assert!(addresses("no-such-host.invalid").is_empty());
    }

    #[test]
    fn an_advertised_address_needs_no_entry() {
        let mut config = Config::default();
        assert_eq!(config.master_address().unwrap(), "127.0.0.1:7700");
        config.master.advertise = "node4:7700".to_owned();
        assert_eq!(config.master_address().unwrap(), "node4:7700");
        config.master.advertise.clear();
        config.cluster.masters = masters(["localhost:7700", "203.0.113.1:7700", "203.0.113.2:7700"]);
        config.master.listen = "0.0.0.0:7700".to_owned();
        assert_eq!(config.master_address().unwrap(), "localhost:7700");
    }
}

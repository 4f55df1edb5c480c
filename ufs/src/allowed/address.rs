//! Addresses that lead to the host itself, or to what is there for it alone.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const INSTANCE_METADATA: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// What is wrong with an address that no process connects to by itself.
pub(super) fn reserved(address: IpAddr) -> Option<&'static str> {
    let address = match address {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => match address {
            Ipv6Addr::LOCALHOST => return Some("a loopback address"),
            Ipv6Addr::UNSPECIFIED => return Some("an unspecified address"),
            INSTANCE_METADATA => return Some("the address of a cloud's instance metadata"),
            address if address.is_unicast_link_local() => return Some("a link-local address"),
            address => embedded(address)?,
        },
    };
    match address {
        address if address.is_loopback() => Some("a loopback address"),
        address if address.is_link_local() => Some("a link-local address"),
        // All of "this network" (RFC 1122), whose first address leads to loopback.
        address if address.octets()[0] == 0 => Some("an unspecified address"),
        _ => None,
    }
}

/// The IPv4 address within an IPv6 one, as far as there are conventions that lead there.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let low = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match address.segments() {
        // Mapped, compatible, and translated.
        [0, 0, 0, 0, 0, 0xffff, a, b] | [0, 0, 0, 0, 0, 0, a, b] | [0, 0, 0, 0, 0xffff, 0, a, b] => Some(low(a, b)),
        // NAT64, and its local prefix.
        [0x64, 0xff9b, 0, 0, 0, 0, a, b] | [0x64, 0xff9b, 1, _, _, _, a, b] => Some(low(a, b)),
        // 6to4.
        [0x2002, a, b, ..] => Some(low(a, b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_address_leads_to() {
        for (address, word) in [
            ("127.0.0.1", "loopback"),
            ("127.255.0.9", "loopback"),
            ("169.254.169.254", "link-local"),
            ("169.254.0.1", "link-local"),
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("::1", "loopback"),
            ("::", "unspecified"),
            ("fe80::1", "link-local"),
            ("febf::1", "link-local"),
            ("fd00:ec2::254", "instance metadata"),
            ("::ffff:127.0.0.1", "loopback"),
            ("::ffff:169.254.169.254", "link-local"),
            ("::ffff:0.0.0.0", "unspecified"),
            ("::127.0.0.1", "loopback"),
            ("::ffff:0:127.0.0.1", "loopback"),
            ("64:ff9b::169.254.169.254", "link-local"),
            ("64:ff9b:1::127.0.0.1", "loopback"),
            ("2002:7f00:1::", "loopback"),
            ("2002:a9fe:a9fe::1", "link-local"),
        ] {
            let found = reserved(address.parse().unwrap());
            assert!(found.is_some_and(|found| found.contains(word)), "{address}: {found:?}");
        }
        for address in [
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "128.0.0.1",
            "169.253.255.255",
            "169.255.0.0",
            "52.216.1.1",
            "fd00::1",
            "fec0::1",
            "2001:db8::1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "2002:a00:1::",
        ] {
            assert_eq!(reserved(address.parse().unwrap()), None, "{address}");
        }
    }
}

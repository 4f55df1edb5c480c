//! Free ports for the children.
//!
//! They are taken from below the range that the kernel gives to outgoing connections (32,768 and up on Linux), so that
//! a child that was stopped finds its port still free when it starts again. While a cluster starts, its ports are set
//! aside: a socket without a file is named after each, so that another `cv local up` does not choose it before the
//! child listens there.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

use cavern_conf::host;
use rand::Rng;

use crate::error::{CliError, Context as _};

const RANGE: std::ops::Range<u16> = 12_000..32_000;
const ATTEMPTS: usize = 1000;

/// Hands out each port once, as long as it lives.
#[derive(Default)]
pub struct FreePorts {
    set_aside: Vec<UnixListener>,
}

impl FreePorts {
    /// `127.0.0.1:PORT` that nobody listens on at this moment.
    pub fn address(&mut self) -> Result<String, CliError> {
        self.find().context("cannot find a port for a child")
    }

    fn find(&mut self) -> io::Result<String> {
        for _ in 0..ATTEMPTS {
            let port = host::random().random_range(RANGE);
            let name = SocketAddr::from_abstract_name(format!("cavern-port-{port}"))?;
            let Ok(set_aside) = UnixListener::bind_addr(&name) else { continue };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                self.set_aside.push(set_aside);
                return Ok(format!("127.0.0.1:{port}"));
            }
        }
        Err(io::Error::other(format!("no free port between {} and {}", RANGE.start, RANGE.end)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn what_is_set_aside_is_given_to_nobody_else() {
        let mut ports = FreePorts::default();
        let name = |address: &str| {
            let port = address.rsplit(':').next().unwrap();
            SocketAddr::from_abstract_name(format!("cavern-port-{port}")).unwrap()
        };
        let address = ports.address().unwrap();
        assert!(UnixListener::bind_addr(&name(&address)).is_err());
        drop(ports);
        assert!(UnixListener::bind_addr(&name(&address)).is_ok());
    }

    #[test]
    fn no_port_is_given_twice_nor_while_taken() {
        let mut ports = FreePorts::default();
        let addresses: HashSet<String> = (0..100).map(|_| ports.address().unwrap()).collect();
        assert_eq!(addresses.len(), 100);
        let held: Vec<_> = addresses.iter().map(|address| TcpListener::bind(address).unwrap()).collect();
        let other = FreePorts::default().address().unwrap();
        assert!(!addresses.contains(&other));
        drop(held);
    }
}

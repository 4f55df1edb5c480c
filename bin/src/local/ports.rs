//! Free ports for the children.
//!
//! They are taken from below the range that the kernel gives to outgoing connections (32,768 and up on Linux), so that a
//! child that was stopped finds its port still free when it starts again.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, TcpListener};

use rand::Rng;

const RANGE: std::ops::Range<u16> = 12_000..32_000;
const ATTEMPTS: usize = 1000;

/// Hands out each port once.
#[derive(Default)]
pub struct FreePorts {
    given: HashSet<u16>,
}

impl FreePorts {
    /// `127.0.0.1:PORT` that nobody listens on at this moment.
    pub fn address(&mut self) -> io::Result<String> {
        for _ in 0..ATTEMPTS {
            let port = rand::rng().random_range(RANGE);
            if !self.given.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                self.given.insert(port);
                return Ok(format!("127.0.0.1:{port}"));
            }
        }
        Err(io::Error::other(format!("no free port between {} and {}", RANGE.start, RANGE.end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

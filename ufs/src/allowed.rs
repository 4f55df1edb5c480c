//! Where a mount may lead. Whoever mounts names a URI, and masters, workers and clients open it with the rights of
//! their own process, from their own place in the network: what only that place can reach is out of bounds, unless the
//! configuration lists it (`ufs.endpoints`, `ufs.file_roots`).
//!
//! Of an S3 endpoint it is the address that counts: loopback, link-local and unspecified ones, that of the metadata of
//! a cloud's instances, and all of these within IPv6. It is looked at for each connection, where that is made
//! ([`GuardedConnector`]), and not in the text of an endpoint: a name may lead elsewhere by now, a bucket's name may
//! become part of the host, and what `2130706433` and `0x7f.1` are depends on who reads them.
//!
//! Of a directory tree it is the directory's real path that counts ([`FileRoots`]).
//!
//! A store that may not be reached can be opened all the same, and refuses each request: there may be a mount of it,
//! made when the configuration was another.

mod address;
mod guard;
mod roots;

pub(crate) use guard::{Guard, GuardedConnector, not_allowed};
pub(crate) use roots::FileRoots;

//! Who the processes of a Cavern cluster are to each other, and how they speak.
//!
//! With `[security]` in the configuration every connection between processes is TLS 1.3, and both sides show a
//! certificate that an authority of the cluster has signed. What a certificate says is an [`Identity`]: the cluster, a
//! [`Role`] and a name. [`Transport`] makes the connections, with the files as they are now: replaced ones hold for the
//! next connection, and an open one ends when the certificate of the other side does not hold any more. [`Authority`]
//! is what signs and revokes, for clusters that have none. What a process shows over HTTP it shows to whom
//! [`HttpAccess`] lets in. Keys that they keep on their disks are encrypted by [`KeyWrapping`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod audit;
mod authority;
mod certificate;
mod check;
mod error;
mod expiry;
mod files;
mod handshake;
mod handshake_slots;
mod http;
mod identity;
mod key_wrapping;
mod peers;
mod revocation;
mod socket;
mod tenants;
mod transport;
mod trust;
mod verify;

pub use audit::{AuditLog, Audited};
pub use authority::{Authority, Issued, Revocations};
pub use certificate::CertificateInfo;
pub use check::check_files;
pub use error::SecurityError;
pub use handshake::PeerStream;
pub use handshake_slots::{HandshakeSlot, HandshakeSlots};
pub use http::{HttpAccess, HttpServer};
pub use identity::{Identity, Role};
pub use key_wrapping::{KEY_BYTES, KeyWrapping, Unwrapped, random_bytes};
pub use peers::PeerCertificate;
pub use revocation::{RevocationList, RevokedCertificate};
pub use socket::TlsSocket;
pub use tenants::{
    Counts, Limit, MountRates, OverLimit, Rate, RateCharge, Tenant, TenantCall, TenantCollector, TenantConnection,
    TenantLimits, Tenants,
};
pub use transport::{Protocol, Tls, Transport};

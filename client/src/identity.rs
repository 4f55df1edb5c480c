//! The name of a client.

/// Who a client is, to the master.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// For lists and logs.
    pub name: String,
    /// What only one client can be at a time, as a mount point of a host, or nothing: a client that dies there and
    /// comes back ends what it left behind, locks above all, at once.
    pub place: String,
}

impl From<&str> for Identity {
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), place: String::new() }
    }
}

//! What a certificate says of its owner: `cavern://CLUSTER/ROLE/NAME`, as a URI among its alternative names.

use std::fmt::{self, Display};
use std::str::FromStr;

use crate::error::SecurityError;

const SCHEME: &str = "cavern://";
/// Longest name of a process, as of a cluster.
const NAME_MAX: usize = 64;

cavern_conf::named_values! {
    /// What a process is for, named as in a certificate. Who may do what is told of roles.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Role {
        Master = "master",
        Worker = "worker",
        /// `cv fuse`, and programs that read and write.
        Client = "client",
        /// The command line of whoever looks at the cluster.
        Viewer = "viewer",
        /// That of whoever operates it: mounts, jobs, workers.
        Operator = "operator",
        /// That of whoever runs it: all that people do, also with its masters and their keys.
        Admin = "admin",
    }
}

impl Role {
    /// Whether it is the command line of somebody, and no process that serves.
    pub fn is_of_person(self) -> bool {
        matches!(self, Self::Viewer | Self::Operator | Self::Admin)
    }

    /// Whether others connect to it, if only to its HTTP port.
    pub fn listens(self) -> bool {
        !self.is_of_person()
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| format!("\"{text}\" is no role: master, worker, client, viewer, operator or admin"))
    }
}

/// Whose certificate it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub cluster: String,
    pub role: Role,
    /// 1 to 64 letters, digits, `-`, `_` or `.`.
    pub name: String,
}

impl Identity {
    /// # Errors
    /// [`SecurityError::Identity`]: the cluster or the name cannot stand in a certificate.
    pub fn new(cluster: &str, role: Role, name: &str) -> Result<Self, SecurityError> {
        format!("{SCHEME}{cluster}/{role}/{name}").parse()
    }

    /// The name of a client, which rules of mounts are about; `None` for the other roles, which no rule bounds.
    pub fn client_name(&self) -> Option<&str> {
        (self.role == Role::Client).then_some(self.name.as_str())
    }

    /// What its files are called, before their endings: a master and a worker of one host have different ones.
    pub fn file_name(&self) -> String {
        format!("{}-{}", self.role, self.name)
    }
}

impl Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{SCHEME}{}/{}/{}", self.cluster, self.role, self.name)
    }
}

impl FromStr for Identity {
    type Err = SecurityError;

    fn from_str(text: &str) -> Result<Self, SecurityError> {
        let refused = |reason| SecurityError::Identity { text: text.escape_debug().to_string(), reason };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| refused("another scheme"))?;
        let [cluster, role, name] = rest.split('/').collect::<Vec<_>>()[..] else {
            return Err(refused("other parts than these three"));
        };
        if !is_plain(cluster) || !is_plain(name) {
            return Err(refused("names have 1 to 64 letters, digits, \"-\", \"_\" or \".\""));
        }
        let role =
            role.parse().map_err(|_| refused("the roles are master, worker, client, viewer, operator and admin"))?;
        Ok(Self { cluster: cluster.to_owned(), role, name: name.to_owned() })
    }
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_a_process_and_what_does_not() {
        for role in Role::ALL {
            let identity = Identity::new("cavern", role, "node-7.lab").unwrap();
            assert_eq!(identity.to_string(), format!("cavern://cavern/{role}/node-7.lab"));
            assert_eq!(identity.to_string().parse::<Identity>().unwrap(), identity);
            assert_eq!(identity.client_name(), (role == Role::Client).then_some("node-7.lab"));
        }
        let long = format!("cavern://c/client/{}", "n".repeat(65));
        for bad in [
            "",
            "cavern://",
            "spiffe://c/client/n",
            "cavern://c/client",
            "cavern://c/client/n/x",
            "cavern://c/root/n",
            "cavern:///client/n",
            "cavern://c/client/",
            "cavern://c/client/a b",
            "cavern://c/Client/n",
            "cavern://c/client/n?x",
            "CAVERN://c/client/n",
            &long,
        ] {
            let error = bad.parse::<Identity>().unwrap_err().to_string();
            assert!(error.contains("cavern://CLUSTER/ROLE/NAME"), "{bad}: {error}");
        }
    }
}

//! The processes that a host is to run, each with the configuration that it reads.

use cavern_conf::{Config, Effective, Role};

use crate::error::CliError;
use crate::local::Cluster;

/// One of them.
#[derive(Clone, Debug)]
pub struct Process {
    pub role: Role,
    pub effective: Effective,
}

impl Process {
    pub fn config(&self) -> &Config {
        &self.effective.config
    }
}

/// # Errors
/// The sentence for whoever wrote it.
pub fn parse(text: &str) -> Result<Role, String> {
    let role = Role::ALL.into_iter().find(|role| role.name() == text);
    role.ok_or_else(|| "a host runs master, worker or fuse".to_owned())
}

/// Those of a host with this configuration: of the roles that are asked for, or else a worker and a client, and a
/// master where the configuration says that one is here. Blocks on the lookup of names.
pub fn of_host(effective: &Effective, asked: &[Role]) -> Vec<Process> {
    let is_here = |role: &Role| match asked {
        [] => *role != Role::Master || effective.config.is_master_host(),
        asked => asked.contains(role),
    };
    let process = |role| Process { role, effective: effective.clone() };
    Role::ALL.into_iter().filter(is_here).map(process).collect()
}

/// Those of a cluster of `cv local`, which gives each of them addresses and directories of its own: of the roles that
/// are asked for, or else all.
///
/// # Errors
/// Its configuration cannot be read.
pub fn of_local(cluster: &Cluster, asked: &[Role]) -> Result<Vec<Process>, CliError> {
    let mut processes = Vec::new();
    for child in cluster.children() {
        let role = parse(child.role.command()).ok().filter(|role| asked.is_empty() || asked.contains(role));
        let Some(role) = role else { continue };
        processes.push(Process { role, effective: cluster.conf_of(child)? });
    }
    Ok(processes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_runs_what_is_asked_for_and_a_master_where_it_is_named() {
        let mut effective = Effective::defaults();
        let roles = |effective: &Effective, asked: &[Role]| -> Vec<Role> {
            of_host(effective, asked).iter().map(|process| process.role).collect()
        };
        assert_eq!(roles(&effective, &[]), Role::ALL);
        effective.config.cluster.masters = vec!["192.0.2.1:7700".to_owned()];
        assert_eq!(roles(&effective, &[]), [Role::Worker, Role::Fuse]);
        assert_eq!(roles(&effective, &[Role::Fuse, Role::Master]), [Role::Master, Role::Fuse]);
        assert_eq!(["master", "worker", "fuse"].map(|text| parse(text).unwrap()), Role::ALL);
        assert!(parse("dev-s3").is_err());
    }
}

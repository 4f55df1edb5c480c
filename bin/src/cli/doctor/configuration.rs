//! What is wrong with the configuration itself: what the processes would refuse, in their words, and what they cannot
//! know since it is about several of them.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;

use cavern_conf::{Effective, Role};

use super::finding::{Check, Finding};
use super::place::Place;
use super::process::Process;
use crate::cli::conf::source;

/// Of a configuration that is refused: a line of its error for each problem.
pub fn refused(text: &str) -> Vec<Finding> {
    let why = "no process starts with it, and what depends on it was not looked at";
    let problem = |line: &str| {
        Finding::error(Check::Configuration, line, why, "correct it: `cv conf show --defaults` has all keys and values")
    };
    text.lines().map(problem).collect()
}

/// Of a host of which nothing says what it runs. `mounts` are the directories of mounts of one host.
pub fn without(mounts: &[PathBuf]) -> Vec<Finding> {
    let mut found = vec![Finding::note(
        Check::Configuration,
        "no cluster is configured: no file is named, and there is no /etc/cavern/cluster.toml",
        "what `cv fuse URI DIR` needs of this host was looked at, and nothing else",
        "name a bucket with --bucket, a configuration with --conf, or with --role what is to run here",
    )];
    found.extend(mounts.iter().map(|directory| {
        let name = directory.display();
        let todo = format!("look at it with `cv doctor --conf {name}/cluster.toml`");
        let what = format!("a mount of `cv fuse` has its cache in {name}");
        Finding::note(Check::Configuration, what, "it has a configuration of its own", todo)
    }));
    found
}

/// What the processes of this host would refuse, and what does not fit together. Blocks on the lookup of names.
pub fn look(effective: &Effective, processes: &[Process]) -> Vec<Finding> {
    let mut found = Vec::new();
    for process in processes {
        let role = process.role.name();
        let checks = [process.effective.check_reach(process.role), process.effective.check_limits(process.role)];
        for error in checks.into_iter().filter_map(Result::err) {
            found.extend(error.problems().iter().map(|problem| {
                let why = format!("`cv {role}` does not start");
                Finding::error(Check::Configuration, problem.to_string(), why, "correct the key that is named")
            }));
        }
        let mount_point = &process.config().fuse.mount_point;
        found.extend(Place::of(process).iter().filter_map(|place| place.judge_overlap(mount_point)));
        if process.role == Role::Master {
            found.extend(process.config().master_address().err().map(|cause| {
                let todo = "set master.advertise on this host, or `--role` where no master is to run here";
                Finding::error(Check::MasterAddress, cause, "the master does not know which of the group it is", todo)
            }));
        }
    }
    let masters = effective.config.cluster.masters.iter().map(|master| (master.clone(), addresses(master)));
    found.extend(masters_same(&masters.collect::<Vec<_>>()));
    if found.is_empty() {
        found.push(Finding::ok(Check::Configuration, format!("{}: the configuration is good", source(effective))));
    }
    found
}

fn addresses(master: &str) -> Vec<SocketAddr> {
    master.to_socket_addrs().map(Iterator::collect).unwrap_or_default()
}

/// Masters of the list that lead to one and the same, or nowhere.
fn masters_same(masters: &[(String, Vec<SocketAddr>)]) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, (master, own)) in masters.iter().enumerate() {
        if own.is_empty() {
            found.push(Finding::error(
                Check::MastersSame,
                format!("cluster.masters names \"{master}\", and no address is known by that name"),
                "nobody on this host reaches that master",
                "add the name to DNS or /etc/hosts, or correct it",
            ));
        }
        let same = masters[..at].iter().find(|(_, earlier)| earlier.iter().any(|address| own.contains(address)));
        if let Some((earlier, _)) = same {
            found.push(Finding::error(
                Check::MastersSame,
                format!("cluster.masters names one master twice: as \"{earlier}\" and as \"{master}\""),
                "a group of so many masters cannot begin, or counts one of them twice for a majority",
                "give each master an address of its own",
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use cavern_conf::{Config, HostLimits};

    use super::super::finding::{Level, wrong};
    use super::*;

    fn process(role: Role, change: impl FnOnce(&mut Config)) -> Process {
        let mut effective = Effective::defaults();
        change(&mut effective.config);
        Process { role, effective }
    }

    fn told(process: Process) -> Vec<(Level, Check)> {
        wrong(&look(&process.effective.clone(), &[process]))
    }

    #[test]
    fn each_line_of_a_refusal_is_a_finding() {
        let found = refused("cluster.toml:3: fuse.thread: no such key\ncluster.toml:9: log.level: no");
        assert_eq!(wrong(&found), [(Level::Error, Check::Configuration); 2]);
        assert!(found[0].what.contains("cluster.toml:3"), "{found:?}");
    }

    #[test]
    fn a_host_without_a_cluster_is_told_how_to_look_at_its_mounts() {
        let found = without(&["/var/cache/cavern/a".into()]);
        assert_eq!(wrong(&found), [(Level::Note, Check::Configuration); 2]);
        assert!(found[1].todo.contains("--conf /var/cache/cavern/a/cluster.toml"), "{found:?}");
    }

    #[test]
    fn what_no_process_could_start_with_is_named() {
        assert_eq!(told(process(Role::Worker, |_| {})), []);
        let open = process(Role::Worker, |config| config.worker.listen = "0.0.0.0:7710".to_owned());
        assert_eq!(told(open), [(Level::Error, Check::Configuration)]);
        let small = HostLimits { memory: 1 << 30, ..HostLimits::default() };
        let file = ("cluster.toml".into(), b"[worker]\nmemory_budget = \"2GiB\"\n".to_vec());
        let effective = Effective::compose_on(small, Some(file), []).unwrap();
        assert_eq!(told(Process { role: Role::Worker, effective }), [(Level::Error, Check::Configuration)]);
        let elsewhere = process(Role::Master, |config| {
            config.cluster.masters = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"].map(str::to_owned).to_vec();
        });
        assert_eq!(told(elsewhere), [(Level::Error, Check::MasterAddress)]);
        for role in Role::ALL {
            let hidden = process(role, |config| {
                config.master.data_dir = "/mnt/cavern/master".into();
                config.worker.dirs = vec!["[SSD]/mnt/cavern/worker".to_owned()];
                config.client.staging_directory = "/mnt/cavern".into();
            });
            assert_eq!(told(hidden), [(Level::Error, Check::PathsOverlap)], "{role:?}");
        }
    }

    #[test]
    fn a_master_that_is_named_twice_is_known_by_its_address() {
        let master = |name: &str, address: &str| (name.to_owned(), vec![address.parse().unwrap()]);
        let one = master("node1:7700", "10.0.0.1:7700");
        assert_eq!(wrong(&masters_same(&[one.clone(), master("node2:7700", "10.0.0.2:7700")])), []);
        let twice = masters_same(&[one.clone(), master("10.0.0.1:7700", "10.0.0.1:7700")]);
        assert_eq!(wrong(&twice), [(Level::Error, Check::MastersSame)]);
        assert!(twice[0].what.contains("node1:7700"), "{twice:?}");
        let unknown = masters_same(&[one, ("node9:7700".to_owned(), Vec::new())]);
        assert_eq!(wrong(&unknown), [(Level::Error, Check::MastersSame)]);
    }
}

//! The ports at which the processes of this host listen: free, theirs, or somebody else's.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::Path;

use cavern_conf::Role;

use super::finding::{Check, Finding};
use super::process::Process;

/// The state of a socket that listens, in /proc/net/tcp.
const LISTENING: &str = "0A";

/// An address of the configuration at which a process listens.
pub struct Listener {
    key: &'static str,
    role: Role,
    address: String,
}

impl Listener {
    /// Those of a process, but for ports that the system chooses.
    pub fn of(process: &Process) -> Vec<Self> {
        let config = process.config();
        let addresses = match process.role {
            Role::Master => {
                vec![("master.listen", &config.master.listen), ("master.http_listen", &config.master.http_listen)]
            }
            Role::Worker => {
                vec![("worker.listen", &config.worker.listen), ("worker.http_listen", &config.worker.http_listen)]
            }
            Role::Fuse => vec![("fuse.http_listen", &config.fuse.http_listen)],
        };
        let chosen = addresses.into_iter().filter(|(_, address)| !address.ends_with(":0"));
        chosen.map(|(key, address)| Self { key, role: process.role, address: address.clone() }).collect()
    }

    /// *Blocking*, also on the lookup of names.
    pub fn look(&self) -> Finding {
        self.judge(&Port::at(&self.address))
    }

    fn judge(&self, port: &Port) -> Finding {
        let (check, role) = (Check::Port, self.role.name());
        let place = format!("{} ({})", self.address, self.key);
        let (what, todo) = match port {
            Port::Free => return Finding::ok(check, format!("{place} is free: no `cv {role}` runs there")),
            Port::Taken(holders) if holders.iter().any(|holder| is_ours(holder, role)) => {
                return Finding::ok(check, format!("`cv {role}` listens at {place}"));
            }
            Port::Taken(holders) if holders.is_empty() => {
                let what = format!("{place} is in use, by a process that this user may not see");
                let todo = "run this as root, or as the user of that process, to be told which it is";
                return Finding::note(check, what, format!("it should be `cv {role}`"), todo);
            }
            Port::Taken(holders) => {
                let programs: Vec<String> = holders.iter().map(|holder| shown(holder)).collect();
                (format!("{place} is taken by {}", programs.join(", ")), "stop that program, or choose another address")
            }
            Port::Refused(cause) => (
                format!("nobody can listen at {place}: {cause}"),
                "choose an address that `ip address` shows, or 0.0.0.0, and a port above 1023",
            ),
        };
        Finding::error(check, what, format!("`cv {role}` does not start"), todo)
    }
}

/// Who has a port.
#[derive(PartialEq, Eq, Debug)]
enum Port {
    Free,
    /// The command lines of who listens there, as far as this user may see them.
    Taken(Vec<Vec<String>>),
    /// Nobody can listen there: why.
    Refused(String),
}

impl Port {
    /// Looks, by listening for a moment.
    fn at(address: &str) -> Self {
        match TcpListener::bind(address) {
            Ok(_) => Self::Free,
            Err(cause) if cause.kind() == io::ErrorKind::AddrInUse => Self::Taken(holders(address)),
            Err(cause) => Self::Refused(cause.to_string()),
        }
    }
}

/// Whether this is the command line of a process of that role; for a mount of one host, `cv fuse` is all of them.
fn is_ours(command: &[String], role: &str) -> bool {
    let [program, argument, words @ ..] = command else { return false };
    let is_one_host = || argument == "fuse" && words.iter().any(|word| word == "--backend" || word.contains("://"));
    Path::new(program).file_name().is_some_and(|name| name == "cv") && (argument == role || is_one_host())
}

/// A program, with the role of one of ours, and without other arguments: they may have secrets.
fn shown(command: &[String]) -> String {
    let role = Role::ALL.into_iter().map(Role::name).find(|role| is_ours(command, role));
    role.map_or_else(|| command[0].clone(), |role| format!("`cv {role}`"))
}

/// The command lines of the processes that listen at the port of an address.
fn holders(address: &str) -> Vec<Vec<String>> {
    let Some(port) = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok()) else { return Vec::new() };
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let sockets: HashSet<String> = tables.iter().flat_map(|table| listening(table, port)).collect();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    let has_one = |process: &Path| {
        let mut open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        open.any(|file| fs::read_link(file.path()).is_ok_and(|link| sockets.contains(&*link.to_string_lossy())))
    };
    let command = |process: &Path| {
        let bytes = fs::read(process.join("cmdline")).ok()?;
        let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        Some(words.collect::<Vec<_>>()).filter(|words| !words[0].is_empty())
    };
    processes.filter(|process| has_one(process)).filter_map(|process| command(&process)).collect()
}

/// The sockets of a table of /proc/net that listen at a port, as descriptors name them: `socket:[4711]`.
fn listening(table: &str, port: u16) -> Vec<String> {
    let port = format!(":{port:04X}");
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_wanted = fields.get(1)?.ends_with(&port) && *fields.get(3)? == LISTENING;
        is_wanted.then(|| fields.get(9).map(|inode| format!("socket:[{inode}]"))).flatten()
    };
    table.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use cavern_conf::Effective;

    use super::super::finding::{Level, wrong};
    use super::*;

    fn listener(role: Role) -> Listener {
        Listener::of(&Process { role, effective: Effective::defaults() }).remove(0)
    }

    fn told(port: &Port) -> Vec<(Level, Check)> {
        wrong(&[listener(Role::Master).judge(port)])
    }

    #[test]
    fn a_port_that_another_program_has_is_named_with_it() {
        let command = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let taken = |words: &[&str]| Port::Taken(vec![command(words)]);
        assert_eq!(told(&Port::Free), []);
        assert_eq!(told(&taken(&["/usr/bin/cv", "master", "--conf", "x"])), []);
        assert_eq!(told(&taken(&["cv", "fuse", "--backend", "/var/cache/cavern/x"])), []);
        for other in [&["cv", "worker"][..], &["cv", "fuse", "--conf", "x"]] {
            assert_eq!(told(&taken(other)), [(Level::Error, Check::Port)]);
        }
        let other = taken(&["/usr/sbin/nginx", "--password=hush"]);
        assert_eq!(told(&other), [(Level::Error, Check::Port)]);
        let what = listener(Role::Master).judge(&other).what;
        assert!(what.contains("/usr/sbin/nginx") && what.contains("master.listen") && !what.contains("hush"), "{what}");
        assert_eq!(told(&Port::Taken(Vec::new())), [(Level::Note, Check::Port)]);
        assert_eq!(told(&Port::Refused("no".to_owned())), [(Level::Error, Check::Port)]);
    }

    #[test]
    fn ports_are_looked_at_as_they_are() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = held.local_addr().unwrap().to_string();
        let Port::Taken(holders) = Port::at(&address) else { panic!("it is free") };
        let own = std::env::args().next().unwrap();
        assert!(holders.iter().any(|command| command[0] == own), "{holders:?}");
        // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
        assert!(matches!(Port::at("192.0.2.1:7700"), Port::Refused(_)));
        let keys: Vec<&str> = Role::ALL
            .iter()
            .flat_map(|role| Listener::of(&Process { role: *role, effective: Effective::defaults() }))
            .map(|listener| listener.key)
            .collect();
        let all = ["master.listen", "master.http_listen", "worker.listen", "worker.http_listen", "fuse.http_listen"];
        assert_eq!(keys, all);
    }

    #[test]
    fn sockets_are_found_in_the_kernels_table() {
        let line = |state: &str, inode| format!("0: 0100007F:1E14 0:0 {state} 0:0 0:0 0 0 0 {inode} 1\n");
        let table = format!("sl local_address rem_address st\n{}{}", line("0A", 4711), line("01", 4712));
        assert_eq!(listening(&table, 7700), ["socket:[4711]"]);
        assert!(listening(&table, 7701).is_empty());
    }
}

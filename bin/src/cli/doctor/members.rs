//! The other processes of the cluster: whether they can be reached, belong together, and know the same.

use std::time::Duration;

use cavern_conf::{Config, counted};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{ListWorkersRequest, Worker, WorkerState};
use cavern_proto::raft::Group;
use cavern_security::{Role, Transport};
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use tokio::net::TcpStream;

use super::certificates;
use super::clocks::{self, Clock};
use super::finding::{Check, Finding, Level};
use crate::cli::connect::word;
use crate::error::CliError;
use crate::group::{Dial, GroupView, MasterRole, Survey};

/// Connections at a time.
const CONNECTIONS: usize = 64;
const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");

/// What masters and workers say of themselves and of each other.
pub async fn look(config: &Config) -> Vec<Finding> {
    // What is wrong with the files is told elsewhere.
    let Ok(dial) = Dial::of(config) else { return Vec::new() };
    let survey = Survey::take(&config.cluster.masters, &dial).await;
    if let Some(causes) = survey.silence() {
        return vec![silent(&causes)];
    }
    let view = survey.view();
    let mut found = judge_group(&view);
    found.extend(judge_identities(&survey.groups().map(|(_, group)| group).collect::<Vec<_>>()));
    let mut workers = Vec::new();
    if view.leader.is_some() {
        match workers_of(config).await {
            Ok(known) => {
                found.extend(judge_workers(&known));
                workers = known;
            }
            Err(error) => {
                let what = format!("the masters do not tell of the workers: {error}");
                let todo = "see `cv node list`, and the log of the master that leads";
                found.push(Finding::warning(Check::Workers, what, "they are not looked at", todo));
            }
        }
    }
    let versions = view.masters.iter().filter_map(|master| Some((master.name(), master.version.clone()?)));
    let versions = versions.chain(workers.iter().map(|worker| (name(worker), worker.version.clone())));
    found.push(judge_versions(OWN_VERSION, &versions.collect::<Vec<_>>()));
    let live: Vec<&Worker> = workers.iter().filter(|worker| worker.state() == WorkerState::Live).collect();
    found.extend(reach(&live, dial.wait).await);
    found.extend(clocks::judge(&clocks_of(&dial, &view, &live).await));
    if let Transport::Tls(tls) = &dial.transport {
        let masters = view.masters.iter().filter(|master| master.answers());
        let masters = masters.map(|master| (Role::Master, master.address.clone()));
        let members = masters.chain(live.iter().map(|worker| (Role::Worker, worker.data_address.clone())));
        found.extend(certificates::of_members(tls, members.collect(), &dial).await);
    }
    found
}

fn name(worker: &Worker) -> String {
    format!("worker {} at {}", worker.id, worker.data_address)
}

async fn workers_of(config: &Config) -> Result<Vec<Worker>, CliError> {
    let masters = MasterChannel::connect(config).await?;
    let ask = async |mut master: Stubs| master.cluster.list_workers(ListWorkersRequest {}).await;
    Ok(masters.ask_unary(ask).await?.workers)
}

fn silent(causes: &str) -> Finding {
    Finding::error(
        Check::Masters,
        format!("no master answers: {causes}"),
        "names can be neither looked up nor changed; what is cached is read on",
        "start the masters, and see that no firewall is between; `--offline` looks at this host alone",
    )
}

/// What the group as a whole lacks, and what is wrong with its members.
fn judge_group(view: &GroupView) -> Vec<Finding> {
    let summary = view.summary();
    let mut found = vec![match (view.majority, view.leader) {
        (true, Some(_)) => Finding::ok(Check::Masters, summary),
        (true, None) => {
            Finding::error(Check::Masters, summary, "changes wait for a leader", "see `cv raft status`, and their logs")
        }
        (false, _) => Finding::error(
            Check::Masters,
            summary,
            "nothing can be changed without a majority, so that two halves never differ",
            "start the masters that do not answer, or see why this host does not reach them",
        ),
    }];
    for master in &view.masters {
        let Some(cause) = &master.error else { continue };
        let (level, check, why, todo) = match master.role {
            MasterRole::Unreachable => (
                Level::Warning,
                Check::Masters,
                "one more that fails may stop the group",
                "start it, or take it out with `cv raft remove`",
            ),
            MasterRole::Empty | MasterRole::Stranger => (
                Level::Error,
                Check::MasterIdentity,
                "it is none of the group, though somebody counts on it",
                "see `cv raft status`, and docs/hosts.md, \"Replace a master\"",
            ),
            // Of an older version.
            MasterRole::Leader | MasterRole::Follower | MasterRole::Learner => (
                Level::Warning,
                Check::Versions,
                "what is new in the log is not used before all know it",
                "upgrade it: docs/hosts.md, \"Upgrade\"",
            ),
        };
        found.push(Finding::new(level, check, format!("{}: {cause}", master.name()), why, todo));
    }
    found
}

/// Masters that have one number: they call themselves by different addresses, so that each is a process of its own.
fn judge_identities(answers: &[&Group]) -> Vec<Finding> {
    let mut found = Vec::new();
    for (at, group) in answers.iter().enumerate().filter(|(_, group)| group.node_id != 0) {
        let is_same = |earlier: &&&Group| {
            (earlier.cluster_id.as_str(), earlier.node_id) == (group.cluster_id.as_str(), group.node_id)
                && earlier.address != group.address
        };
        if let Some(earlier) = answers[..at].iter().find(is_same) {
            found.push(Finding::error(
                Check::MasterIdentity,
                format!("the masters at {} and {} both are master {}", earlier.address, group.address, group.node_id),
                "one has a copy of the other's directory: both vote as one, and acknowledged changes may be lost",
                "stop the copy now, empty its master.data_dir, and take it in with `cv raft add`",
            ));
        }
    }
    found
}

fn judge_workers(workers: &[Worker]) -> Vec<Finding> {
    let is_live = |worker: &&Worker| worker.state() == WorkerState::Live;
    let live = workers.iter().filter(is_live).count();
    let mut found = vec![match live {
        0 => Finding::error(
            Check::Workers,
            "no worker is live",
            "nothing is cached, and files of fs-mode mounts have no content to be written to",
            "start `cv worker` on the hosts that have disks, and see its log",
        ),
        _ => Finding::ok(Check::Workers, format!("{} live", counted(live as u64, "worker"))),
    }];
    for worker in workers {
        let who = name(worker);
        if !is_live(&worker) {
            found.push(Finding::warning(
                Check::Workers,
                format!("{who} is {}", word(worker.state().as_str_name(), "WORKER_STATE_")),
                "what only it has cannot be read, and its part of the cache is missing",
                "start it, or take it out with `cv node remove`",
            ));
        }
        for disk in worker.disks.iter().filter(|disk| !disk.healthy) {
            found.push(Finding::error(
                Check::Workers,
                format!("{who} has given up the directory {}: {}", disk.path, disk.error),
                "its blocks are read from elsewhere, or from the bucket",
                "replace the disk: docs/hosts.md, \"Replace a disk, or a whole worker\"",
            ));
        }
    }
    found
}

/// `versions` are names of members with theirs.
fn judge_versions(own: &str, versions: &[(String, String)]) -> Finding {
    let others: Vec<String> = versions
        .iter()
        .filter(|(_, version)| version != own && !version.is_empty())
        .map(|(who, version)| format!("{who} is {version}"))
        .collect();
    if others.is_empty() {
        return Finding::ok(Check::Versions, format!("all are of version {own}, as this command is"));
    }
    Finding::warning(
        Check::Versions,
        format!("{}; this command is {own}", others.join(", ")),
        "two versions that follow each other work together, while an upgrade lasts",
        "finish the upgrade: docs/hosts.md, \"Upgrade\"",
    )
}

/// Whether this host reaches the workers: what clients of it read goes there.
async fn reach(live: &[&Worker], wait: Duration) -> Vec<Finding> {
    let tried = stream::iter(live.iter().map(|worker| worker.data_address.clone())).map(|address: String| async move {
        let cause = match tokio::time::timeout(wait, TcpStream::connect(&address)).await {
            Ok(connected) => connected.err()?.to_string(),
            Err(_) => format!("no answer within {} ms", wait.as_millis()),
        };
        Some(unreachable(&address, &cause))
    });
    let tried: Vec<Option<Finding>> = tried.buffered(CONNECTIONS).collect().await;
    tried.into_iter().flatten().collect()
}

fn unreachable(address: &str, cause: &str) -> Finding {
    Finding::error(
        Check::WorkerReachable,
        format!("the worker at {address} is live, and this host does not reach it: {cause}"),
        "clients here read what it has from other workers, or from the bucket",
        "see name and address (worker.advertise) and that no firewall is between: its port is for all hosts",
    )
}

/// The clocks of the masters that answer, and of the workers by that of the leader, whom they tell.
async fn clocks_of(dial: &Dial, view: &GroupView, live: &[&Worker]) -> Vec<Clock> {
    let masters = view.masters.iter().filter(|master| master.answers());
    let asked = masters.map(|master| async move {
        let clock = Clock::of_master(dial, &master.address, master.name()).await?;
        Some((master.id, clock))
    });
    let asked: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
    let leader = asked.iter().find(|(id, _)| view.leader.is_some() && *id == view.leader);
    let of_worker = |worker: &&Worker| Some(leader?.1.of_worker(name(worker), worker.clock_ahead_ms?));
    let workers: Vec<Clock> = live.iter().filter_map(of_worker).collect();
    asked.into_iter().map(|(_, clock)| clock).chain(workers).collect()
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::DiskReport;

    use super::super::finding::wrong;
    use super::*;
    use crate::group::MasterView;

    fn master(id: u64, role: MasterRole, error: Option<&str>) -> MasterView {
        MasterView {
            id: Some(id),
            address: format!("m{id}:1"),
            role,
            votes: true,
            term: None,
            log_index: None,
            committed_index: None,
            applied_index: None,
            snapshot_index: None,
            matched_index: None,
            version: None,
            feature_version: None,
            error: error.map(str::to_owned),
        }
    }

    fn told(leader: Option<u64>, answering: usize, masters: Vec<MasterView>) -> Vec<(Level, Check)> {
        let (voters, majority) = (masters.len(), answering * 2 > masters.len());
        let view = GroupView { cluster_id: "c".to_owned(), leader, voters, answering, majority, masters };
        wrong(&judge_group(&view))
    }

    #[test]
    fn a_group_that_cannot_work_and_members_that_are_none_are_named() {
        use MasterRole::{Empty, Follower, Leader, Stranger, Unreachable};

        let group = |last, error| vec![master(1, Leader, None), master(2, Follower, None), master(3, last, error)];
        assert_eq!(told(Some(1), 3, group(Follower, None)), []);
        assert_eq!(told(Some(1), 2, group(Unreachable, Some("refused"))), [(Level::Warning, Check::Masters)]);
        for role in [Empty, Stranger] {
            assert_eq!(told(Some(1), 2, group(role, Some("other"))), [(Level::Error, Check::MasterIdentity)]);
        }
        assert_eq!(told(Some(1), 3, group(Follower, Some("older"))), [(Level::Warning, Check::Versions)]);
        assert_eq!(told(None, 3, group(Follower, None)), [(Level::Error, Check::Masters)]);
        assert_eq!(told(None, 1, group(Follower, None)), [(Level::Error, Check::Masters)]);
        assert_eq!(wrong(&[silent("m1:1: refused")]), [(Level::Error, Check::Masters)]);
    }

    #[test]
    fn two_masters_with_one_number_are_named() {
        let group = |cluster: &str, node_id, address: &str| Group {
            cluster_id: cluster.to_owned(),
            node_id,
            address: address.to_owned(),
            ..Group::default()
        };
        let told = |answers: &[Group]| wrong(&judge_identities(&answers.iter().collect::<Vec<_>>()));
        let one = group("c", 1, "a:1");
        assert_eq!(told(&[one.clone(), group("c", 2, "b:1"), one.clone(), Group::default(), Group::default()]), []);
        assert_eq!(told(&[one.clone(), group("d", 1, "b:1")]), [], "of another cluster");
        assert_eq!(told(&[one, group("c", 1, "b:1")]), [(Level::Error, Check::MasterIdentity)]);
    }

    #[test]
    fn workers_that_are_gone_or_have_lost_a_disk_are_named() {
        let worker = |state: WorkerState, healthy| Worker {
            state: state.into(),
            disks: vec![DiskReport { healthy, error: "I/O error".to_owned(), ..DiskReport::default() }],
            ..Worker::default()
        };
        let (live, lost) = (worker(WorkerState::Live, true), worker(WorkerState::Lost, true));
        assert_eq!(wrong(&judge_workers(std::slice::from_ref(&live))), []);
        assert_eq!(wrong(&judge_workers(&[])), [(Level::Error, Check::Workers)]);
        assert_eq!(wrong(&judge_workers(&[live.clone(), lost.clone()])), [(Level::Warning, Check::Workers)]);
        let none = [(Level::Error, Check::Workers), (Level::Warning, Check::Workers)];
        assert_eq!(wrong(&judge_workers(&[lost])), none);
        let failed = worker(WorkerState::Live, false);
        assert_eq!(wrong(&judge_workers(&[live, failed])), [(Level::Error, Check::Workers)]);
        assert_eq!(wrong(&[unreachable("node1:7710", "refused")]), [(Level::Error, Check::WorkerReachable)]);
    }

    #[test]
    fn members_of_another_version_are_named() {
        let of = |version: &str| vec![("worker 1".to_owned(), version.to_owned())];
        assert_eq!(wrong(&[judge_versions("0.2.0", &of("0.2.0"))]), []);
        let other = judge_versions("0.2.0", &of("0.1.0"));
        assert_eq!(wrong(std::slice::from_ref(&other)), [(Level::Warning, Check::Versions)]);
        assert!(other.what.contains("worker 1 is 0.1.0"), "{other:?}");
    }
}

//! What several masters of a local cluster need beside being started: one that comes later is taken in by the others,
//! and one that must wait for others is not waited for.

use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

use cavern_conf::Interval;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::raft::{AddMasterRequest, Group};

use super::record::Cluster;
use crate::error::{CliError, Context as _};
use crate::group::{Dial, GroupView, MasterRole, Survey, remark_unaware};
use crate::runtime::block_on;

/// For a connection to a master of this host, and for its answer.
const ANSWER: Duration = Duration::from_millis(250);

/// What each master answers.
pub fn survey(cluster: &Cluster) -> Result<Survey, CliError> {
    let mut dial = Dial::of(&cluster.conf()?)?;
    dial.wait = ANSWER;
    let addresses: Vec<String> = cluster.masters.iter().map(|master| master.grpc.clone()).collect();
    block_on(async { Ok(Survey::take(&addresses, &dial).await) })
}

/// The group as its masters show it, where there are several.
pub fn group(cluster: &Cluster) -> Result<Option<GroupView>, CliError> {
    if cluster.masters.len() < 2 { Ok(None) } else { survey(cluster).map(|survey| Some(survey.view())) }
}

/// What the master with this number does in its group.
pub fn role(view: &GroupView, cluster: &Cluster, number: usize) -> Option<MasterRole> {
    let address = &cluster.masters.get(number)?.grpc;
    view.masters.iter().find(|master| master.address == *address).map(|master| master.role)
}

/// Has the group take in a master that came later, while somebody else looks how far that is.
pub struct TakingIn {
    number: usize,
    /// How long no master may answer the request.
    patience: Duration,
    /// What becomes of the request, while it is under way.
    asked: Option<Receiver<Result<Group, CliError>>>,
}

impl TakingIn {
    pub fn of(number: usize, patience: Duration) -> Self {
        Self { number, patience, asked: None }
    }

    /// Says whether the master is a member: if not, the leader is at it, or there is none yet, or the master does not
    /// answer.
    ///
    /// # Errors
    /// Why the leader does not take it in.
    pub fn look(&mut self, cluster: &Cluster) -> Result<bool, CliError> {
        let Some(master) = cluster.masters.get(self.number) else { return Ok(true) };
        let mut refused = None;
        if let Some(asked) = &self.asked {
            match asked.try_recv() {
                Err(TryRecvError::Empty) => return Ok(false),
                // The thread is gone.
                Err(TryRecvError::Disconnected) => {}
                Ok(Ok(group)) => remark_unaware(&group),
                Ok(Err(error)) => refused = Some(error),
            }
            self.asked = None;
        }
        let survey = survey(cluster)?;
        let view = survey.view();
        let is_member = view.masters.iter().any(|view| view.address == master.grpc && view.id.is_some() && view.votes);
        // An earlier request has gone on without the one who sent it.
        if is_member {
            return Ok(true);
        }
        if let Some(error) = refused {
            return Err(error);
        }
        if survey.leader_address().is_none() || !matches!(survey.answer(&master.grpc), Some(Ok(_))) {
            return Ok(false);
        }
        let request = AddMasterRequest { address: master.grpc.clone() };
        let (answer, asked) = mpsc::sync_channel(1);
        let mut config = cluster.conf()?;
        config.client.metadata_timeout = Interval::secs(self.patience.as_secs());
        let ask = move || {
            // Asked again, the leader goes on, or has nothing left to do.
            let added = block_on(async {
                let masters = MasterChannel::for_command(&config)?;
                let add = async |mut leader: Stubs| leader.raft.add_master(request.clone()).await;
                Ok(masters.ask_unary(add).await?)
            });
            // Nobody listens any more who has given up.
            let _ = answer.send(added);
        };
        thread::Builder::new().name("take-in".to_owned()).spawn(ask).context("cannot start a thread")?;
        self.asked = Some(asked);
        Ok(false)
    }
}

/// Why a master that runs cannot become ready by itself; `None` for one that can, or does not answer yet.
pub fn waits_for(cluster: &Cluster, number: usize) -> Result<Option<String>, CliError> {
    let Some(master) = cluster.masters.get(number).filter(|_| cluster.masters.len() > 1) else { return Ok(None) };
    let survey = survey(cluster)?;
    let Some(Ok(own)) = survey.answer(&master.grpc) else { return Ok(None) };
    let (view, place) = (survey.view(), cluster.directory.display());
    let is_member = view.masters.iter().any(|view| view.address == master.grpc && view.id.is_some());
    Ok(match (own.cluster_id.is_empty(), is_member) {
        (false, _) if view.majority => None,
        (false, _) => Some(format!("it waits for others ({})", view.summary())),
        // One that has lost its data: it is about to end, and says why.
        (true, true) => None,
        (true, false) if view.voters > 0 => {
            Some(format!("it is empty and waits to be taken in: `cv raft add {} --local {place}`", master.grpc))
        }
        (true, false) if view.masters.iter().any(|view| view.role == MasterRole::Unreachable) => {
            Some("it waits for the other masters, to begin a group with them".to_owned())
        }
        (true, false) => None,
    })
}

//! `cv raft`: the group of masters, and who belongs to it.

use cavern_conf::{Config, Interval, backoff};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::NotLeading;
use cavern_proto::raft::{
    AddMasterRequest, GetGroupRequest, Group, MakeSnapshotRequest, Member, RemoveMasterRequest, TransferLeadRequest,
};
use clap::{Args, Subcommand};
use serde::Serialize;
use tokio::time::Instant;
use tonic::{Response, Status};

use super::connect::{ClusterArgs, ResultArgs, master_address};
use crate::console::{self, Progress, or_dash};
use crate::error::CliError;
use crate::group::{Dial, GroupView, MasterView, Survey, leads, remark_unaware};

/// An election takes a part of this.
const ELECTION_PATIENCE: Interval = Interval::secs(10);

#[derive(Subcommand)]
pub enum RaftCommand {
    /// Show the masters: who leads, who answers, how far each of them is.
    #[command(after_help = "Examples:
  cv raft status
  cv raft status --json | jq .majority

Every master is asked by itself, so this works while none leads. LOG is the end of the log that a master has, APPLIED \
what of it is in its namespace, MATCHED what the leader knows to be on its disk.")]
    Status(ResultArgs),
    /// Take another master in.
    #[command(after_help = "Examples:
  cv raft add node4:7700

The new master runs already, with an empty master.data_dir and with the others in its cluster.masters. Returns when \
it has the namespace, clients and workers know it, and it votes; the others serve meanwhile. One master becomes a \
group of three by two of these.")]
    Add(AddArgs),
    /// Take a master out.
    #[command(after_help = "Examples:
  cv raft remove 3

For one that is lost for good, or before its host is taken away. Stop it then: its directory belongs to no group any \
more. Refused where those that are left would have no majority that answers.")]
    Remove(RemoveArgs),
    /// Have another master lead.
    #[command(after_help = "Examples:
  cv raft transfer          the one that is furthest
  cv raft transfer 2

Before the leader's host is restarted, say: the others do not wait for an election then.")]
    Transfer(TransferArgs),
    /// Have a master make a snapshot of its namespace now and cut its log.
    #[command(after_help = "Examples:
  cv raft snapshot                     the one that leads
  cv raft snapshot --on node2:7700")]
    Snapshot(SnapshotArgs),
}

#[derive(Args)]
pub struct AddArgs {
    /// Address of the new master's gRPC port, as the other masters and all clients reach it.
    #[arg(value_name = "HOST:PORT", value_parser = master_address)]
    address: String,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Args)]
pub struct RemoveArgs {
    /// Number of the master, as `cv raft status` has it.
    #[arg(value_name = "ID")]
    id: u64,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Args)]
pub struct TransferArgs {
    /// Number of the master that is to lead, as `cv raft status` has it [default: the one that is furthest].
    #[arg(value_name = "ID")]
    id: Option<u64>,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Args)]
pub struct SnapshotArgs {
    /// Which master [default: the one that leads].
    #[arg(long, value_name = "HOST:PORT", value_parser = master_address)]
    on: Option<String>,
    #[command(flatten)]
    result: ResultArgs,
}

/// What a change of the group has come to.
#[derive(Serialize)]
struct ChangeView {
    leader: u64,
    members: Vec<MemberView>,
    /// Who may not know a master that was taken in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unaware: Vec<String>,
}

#[derive(Serialize)]
struct MemberView {
    id: u64,
    address: String,
    votes: bool,
}

#[derive(Serialize)]
struct SnapshotView {
    address: String,
    snapshot_index: u64,
    last_index: u64,
}

impl RaftCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Status(args) => status(&args).await,
            Self::Add(args) => args.run().await,
            Self::Remove(args) => args.run().await,
            Self::Transfer(args) => args.run().await,
            Self::Snapshot(args) => args.run().await,
        }
    }
}

/// Asks the masters of a configuration; at least one of them answers.
async fn ask(config: &Config, dial: &Dial) -> Result<Survey, CliError> {
    let survey = Survey::take(&config.cluster.masters, dial).await;
    match survey.silence() {
        None => Ok(survey),
        Some(causes) => Err(CliError::Unreachable(format!(
            "no master answers ({causes}): is one running? Name another with --master, --conf or --local"
        ))),
    }
}

/// A group that has a leader, and how to reach that.
struct Led {
    survey: Survey,
    view: GroupView,
    leader: String,
    dial: Dial,
    masters: MasterChannel,
}

impl Led {
    /// Waits for an election where there may be one.
    async fn find(cluster: &ClusterArgs) -> Result<Self, CliError> {
        let mut config = cluster.config()?;
        let dial = Dial::of(&config)?;
        // Whoever has lost an answer waits for an election, too.
        config.client.metadata_timeout = config.client.metadata_timeout.max(ELECTION_PATIENCE);
        let (mut backoff, deadline) = (backoff::MASTER.begin(), Instant::now() + ELECTION_PATIENCE.get());
        loop {
            let survey = ask(&config, &dial).await?;
            let view = survey.view();
            if let Some(leader) = survey.leader_address().map(str::to_owned) {
                let masters = MasterChannel::for_command(&config)?;
                masters.begin_at(&leader);
                return Ok(Self { survey, view, leader, dial, masters });
            }
            if !view.majority || !backoff.wait_before(deadline).await {
                return Err(CliError::Unreachable(format!(
                    "no master leads ({}): see `cv raft status`",
                    view.summary()
                )));
            }
        }
    }

    /// The member with this number.
    fn member(&self, id: u64) -> Result<&MasterView, CliError> {
        self.view.member(id).ok_or_else(|| {
            CliError::NotFound(format!("there is no master {id} in this group: it has {}", self.view.listed()))
        })
    }

    /// The group as its leader has it.
    fn group(&self) -> Group {
        self.survey.answer(&self.leader).and_then(Result::ok).cloned().unwrap_or_default()
    }

    /// Has the leader change the group. A request of which the answer is lost is sent again only where the group is not
    /// as it is to become.
    async fn change(
        &self,
        is_done: impl Fn(&Group) -> bool,
        mut request: impl AsyncFnMut(Stubs) -> Result<Response<Group>, Status>,
    ) -> Result<Group, CliError> {
        let mut may_be_done = false;
        let change = async |mut master: Stubs| {
            if may_be_done {
                let found = master.raft.get_group(GetGroupRequest {}).await?;
                if leads(found.get_ref()) && is_done(found.get_ref()) {
                    return Ok(found);
                }
            }
            // Also where the answer is not waited for, since another master leads.
            let was_sent = std::mem::replace(&mut may_be_done, true);
            let answer = request(master).await;
            if let Err(status) = &answer
                && NotLeading::from_status(status).is_some()
            {
                may_be_done = was_sent;
            }
            answer
        };
        let answer = self.masters.ask_unary(change).await;
        answer.map_err(|error| {
            let is_lost = may_be_done && error.is_master_silent();
            match CliError::from(error) {
                CliError::Unreachable(cause) if is_lost => {
                    CliError::Unreachable(format!("{cause}. Whether the group has changed, `cv raft status` shows"))
                }
                error => error,
            }
        })
    }

    /// Has another master lead: the one with this number, or for 0 the one that is furthest.
    async fn transfer(&self, node_id: u64) -> Result<Group, CliError> {
        let request = TransferLeadRequest { node_id };
        let is_done =
            |group: &Group| if node_id == 0 { Some(group.leader) != self.view.leader } else { group.leader == node_id };
        self.change(is_done, async |mut master: Stubs| master.raft.transfer_lead(request).await).await
    }
}

async fn status(args: &ResultArgs) -> Result<(), CliError> {
    let config = args.cluster.config()?;
    args.show(&ask(&config, &Dial::of(&config)?).await?.view(), print)
}

fn print(view: &GroupView) -> Result<(), CliError> {
    let row = |master: &MasterView| {
        let [term, log, applied] = [master.term, master.log_index, master.applied_index].map(or_dash);
        let (role, address) = (master.role.as_str().to_owned(), master.address.clone());
        [or_dash(master.id), role, address, term, log, applied, or_dash(master.matched_index)]
    };
    let heading = ["MASTER", "ROLE", "ADDRESS", "TERM", "LOG", "APPLIED", "MATCHED"];
    console::table_cut(heading, view.masters.iter().map(row))?;
    console::line(view.summary())?;
    for master in &view.masters {
        if let Some(error) = &master.error {
            console::line(format_args!("{}: {error}", master.name()))?;
        }
    }
    Ok(())
}

impl AddArgs {
    async fn run(self) -> Result<(), CliError> {
        let led = Led::find(&self.result.cluster).await?;
        let given = self.address.as_str();
        let joining = Survey::take(std::slice::from_ref(&self.address), &led.dial).await;
        let new = match joining.answer(given) {
            Some(Ok(group)) => group,
            Some(Err(cause)) => {
                return Err(CliError::Unreachable(format!(
                    "no master answers at {given} ({cause}): start it there with an empty master.data_dir, then add it"
                )));
            }
            None => return Err(CliError::Failed(format!("{given} was not asked"))),
        };
        // What it calls itself is what the others and all clients are told.
        let address = if new.address.is_empty() { given } else { new.address.as_str() };
        let is_of_this = new.cluster_id == led.view.cluster_id;
        let member = match is_of_this {
            true => led.view.member(new.node_id),
            false => led.view.masters.iter().find(|view| view.id.is_some() && view.address == address),
        };
        match member {
            Some(member) if is_of_this && member.votes => {
                return say(&self.result, &led.group(), format!("{} is a member already", member.name()));
            }
            // It was being taken in when something went wrong: the leader goes on with it.
            Some(_) if is_of_this => {}
            Some(member) => {
                let id = member.id.unwrap_or_default();
                return Err(CliError::Failed(format!(
                    "{} is a member already, but the one that runs there has lost its data: take it out first with \
                     `cv raft remove {id}`, then add it",
                    member.name()
                )));
            }
            // It was given its place, and nothing else yet.
            None if is_of_this && new.members.is_empty() => {}
            None if !new.cluster_id.is_empty() => {
                let whose = if is_of_this { "this group, which it left".to_owned() } else { new.cluster_id.clone() };
                return Err(CliError::Failed(format!(
                    "the master at {address} is not empty: it has data of the cluster {whose}. Stop it, move its \
                     master.data_dir away, start it again, then add it"
                )));
            }
            None => {}
        }
        let mut progress = Progress::new_unless(self.result.json)?;
        progress.show(None, format!("{address} is given the namespace"))?;
        // Asked again, the leader goes on, or has nothing left to do.
        let request = AddMasterRequest { address: address.to_owned() };
        let add = async |mut master: Stubs| master.raft.add_master(request.clone()).await;
        let group = led.change(|_| false, add).await?;
        drop(progress);
        let id = group.members.iter().find(|member| member.address == address).map_or(0, |member| member.node_id);
        remark_unaware(&group);
        say(&self.result, &group, format!("{address} is master {id}, and votes"))
    }
}

impl RemoveArgs {
    async fn run(self) -> Result<(), CliError> {
        let led = Led::find(&self.result.cluster).await?;
        let name = led.member(self.id)?.name();
        let (voters, answering) = led.view.without(self.id);
        if voters == 0 {
            return Err(CliError::Failed(format!("{name} is the only one: without it there is no cluster")));
        }
        if answering * 2 <= voters {
            return Err(CliError::Failed(format!(
                "without {name} {answering} of {voters} voting masters would answer, which is no majority, and nothing \
                 could be changed any more: start the others first, see `cv raft status`"
            )));
        }
        // A leader that takes itself out would leave the others to an election.
        if led.view.leader == Some(self.id) {
            let group = led.transfer(0).await?;
            let next = group.members.iter().find(|member| member.node_id == group.leader);
            next.inspect(|next| led.masters.begin_at(&next.address));
        }
        let request = RemoveMasterRequest { node_id: self.id };
        // Its number is never used again.
        let is_done = |group: &Group| group.members.iter().all(|member| member.node_id != self.id);
        let group = led.change(is_done, async |mut master: Stubs| master.raft.remove_master(request).await).await?;
        say(&self.result, &group, format!("{name} is removed: stop it if it still runs"))
    }
}

impl TransferArgs {
    async fn run(self) -> Result<(), CliError> {
        let led = Led::find(&self.result.cluster).await?;
        if led.view.voters == 1 {
            return Err(CliError::Failed("the group has one voting master: there is none that could lead".to_owned()));
        }
        if let Some(id) = self.id {
            let member = led.member(id)?;
            let name = member.name();
            if !member.answers() {
                let cause = member.error.clone().unwrap_or_default();
                return Err(CliError::Unreachable(format!(
                    "{name} does not answer ({cause}) and cannot lead: start it, or name another of {}",
                    led.view.listed()
                )));
            }
            if !member.votes {
                return Err(CliError::Failed(format!(
                    "{name} is still being taken in and cannot lead yet: see `cv raft status`"
                )));
            }
            // One that leads already is no failure, but the leader would have nothing to do.
            if self.id == led.view.leader {
                return say(&self.result, &led.group(), format!("{name} leads already"));
            }
        }
        let group = led.transfer(self.id.unwrap_or_default()).await?;
        say(&self.result, &group, format!("master {} leads", group.leader))
    }
}

impl SnapshotArgs {
    async fn run(self) -> Result<(), CliError> {
        let (address, dial) = match self.on {
            Some(address) => (address, Dial::of(&self.result.cluster.config()?)?),
            None => Led::find(&self.result.cluster).await.map(|led| (led.leader, led.dial))?,
        };
        let mut master = dial.connect(&address).await.map_err(|cause| {
            CliError::Unreachable(format!("the master at {address} does not answer ({cause}): is it running?"))
        })?;
        let group = master.raft.make_snapshot(MakeSnapshotRequest {}).await?.into_inner();
        let (snapshot_index, last_index) = (group.snapshot_index, group.last_index);
        self.result.show(&SnapshotView { address, snapshot_index, last_index }, |view| {
            let SnapshotView { address, snapshot_index, .. } = view;
            console::line(format_args!("the master at {address} has a snapshot of all up to entry {snapshot_index}"))
        })
    }
}

/// Says what a change has come to.
fn say(args: &ResultArgs, group: &Group, text: String) -> Result<(), CliError> {
    let view = |Member { node_id, address, votes, .. }: &Member| MemberView {
        id: *node_id,
        address: address.clone(),
        votes: *votes,
    };
    let (members, unaware) = (group.members.iter().map(view).collect(), group.unaware.clone());
    args.show(&ChangeView { leader: group.leader, members, unaware }, |_| console::line(text))
}

#[cfg(test)]
mod tests {
    use cavern_proto::StatusMark;

    use super::*;

    /// What a change comes to that its master answers so, while no other can be reached.
    async fn changed(answer: Status) -> String {
        let mut config = Config::default();
        config.cluster.masters = vec!["127.0.0.1:1".to_owned()];
        config.client.metadata_timeout = Interval::millis(200);
        let dial = Dial::of(&config).unwrap();
        let survey = Survey::take(&[], &dial).await;
        let (view, masters) = (survey.view(), MasterChannel::for_command(&config).unwrap());
        let led = Led { survey, view, leader: String::new(), dial, masters };
        let error = led.change(|_| false, async |_: Stubs| Err(answer.clone())).await.unwrap_err();
        assert!(matches!(error, CliError::Unreachable(_)), "{error:?}");
        error.to_string()
    }

    #[tokio::test]
    async fn only_a_lost_answer_leaves_open_whether_the_group_has_changed() {
        let remark = "Whether the group has changed";
        let lost = changed(StatusMark::Unanswered.to_status("it leads no more".to_owned())).await;
        assert!(lost.contains("it leads no more") && lost.contains(remark), "{lost}");
        let unled = changed(NotLeading { leader: None }.to_status()).await;
        assert!(unled.contains("no master leads") && !unled.contains(remark), "{unled}");
        let refused = changed(Status::deadline_exceeded("master 2 did not take the lead")).await;
        assert_eq!(refused, "master 2 did not take the lead");
    }
}

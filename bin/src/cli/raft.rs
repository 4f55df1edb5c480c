//! `cv raft`: the group of masters, and who belongs to it. `cv secrets`: the key that they share.

use cavern_conf::{Config, Interval, backoff, counted};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::NotLeading;
use cavern_proto::raft::{
    AddMasterRequest, GetGroupRequest, Group, MakeSnapshotRequest, Member, RemoveMasterRequest, RotateSecretsReply,
    RotateSecretsRequest, TransferLeadershipRequest,
};
use clap::Subcommand;
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::{Response, Status};

use super::connect::{ClusterArgs, ResultArgs, master_address, new_request_id, rpc};
use crate::console::{self, Progress, or_dash};
use crate::error::CliError;
use crate::group::{Dial, GroupView, MasterView, Survey, leads, remark_unaware};

/// An election takes a part of this.
const ELECTION_PATIENCE: Interval = Interval::secs(10);

#[derive(Subcommand)]
pub enum RaftCommand {
    /// Show the masters: who leads, who answers, how far each of them is.
    Status,
    /// Take another master in.
    Add {
        /// Address of the new master's gRPC port, as the other masters and all clients reach it.
        #[arg(value_name = "HOST:PORT", value_parser = master_address)]
        address: String,
    },
    /// Take a master out.
    Remove {
        /// Number of the master, as `cv raft status` has it.
        id: u64,
    },
    /// Have another master lead.
    Transfer {
        /// Number of the master that is to lead, as `cv raft status` has it [default: the one that is furthest].
        id: Option<u64>,
    },
    /// Have a master make a snapshot of its namespace now and cut its log.
    Snapshot {
        /// Which master [default: the one that leads].
        #[arg(long, value_name = "HOST:PORT", value_parser = master_address)]
        on: Option<String>,
    },
}

impl RaftCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        match self {
            Self::Status => status(result).await,
            Self::Add { address } => add(&address, result).await,
            Self::Remove { id } => remove(id, result).await,
            Self::Transfer { id } => transfer(id, result).await,
            Self::Snapshot { on } => snapshot(on, result).await,
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
struct GroupLeader {
    survey: Survey,
    view: GroupView,
    leader: String,
    dial: Dial,
    masters: MasterChannel,
}

impl GroupLeader {
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
        let is_done =
            |group: &Group| if node_id == 0 { Some(group.leader) != self.view.leader } else { group.leader == node_id };
        self.change(is_done, rpc!(raft.transfer_leadership(TransferLeadershipRequest { node_id }))).await
    }
}

async fn status(result: &ResultArgs) -> Result<(), CliError> {
    let config = result.cluster.config()?;
    let view = ask(&config, &Dial::of(&config)?).await?.view();
    result.show(&view, || print(&view))
}

fn print(view: &GroupView) -> Result<(), CliError> {
    let row = |master: &MasterView| {
        let [term, log, applied] = [master.term, master.log_index, master.applied_index].map(or_dash);
        let (role, address) = (master.role.name(), master.address.clone());
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

async fn add(given: &str, result: &ResultArgs) -> Result<(), CliError> {
    let led = GroupLeader::find(&result.cluster).await?;
    let new = led.dial.ask(given).await.map_err(|cause| {
        CliError::Unreachable(format!(
            "no master answers at {given} ({cause}): start it there with an empty master.data_dir, then add it"
        ))
    })?;
    // What it calls itself is what the others and all clients are told.
    let address = if new.address.is_empty() { given } else { new.address.as_str() };
    if let Some(member) = member_at(&led.view, address, &new)?.filter(|member| member.votes) {
        let group = led.survey.answer(&led.leader).and_then(Result::ok).cloned().unwrap_or_default();
        return say(result, &group, format!("{} is a member already", member.name()));
    }
    // The leader goes on with one that was being taken in when something went wrong.
    let mut progress = Progress::new(result.json);
    progress.show(None, format!("{address} is given the namespace"));
    // Asked again, the leader goes on, or has nothing left to do.
    let request = AddMasterRequest { address: address.to_owned() };
    let group = led.change(|_| false, rpc!(raft.add_master(request))).await?;
    drop(progress);
    let id = group.members.iter().find(|member| member.address == address).map_or(0, |member| member.node_id);
    remark_unaware(&group);
    say(result, &group, format!("{address} is master {id}, and votes"))
}

/// The member that has an address, where a master has answered so.
///
/// # Errors
/// Another one has the address of the member, or it has lost its data.
fn member_at<'v>(view: &'v GroupView, address: &str, answer: &Group) -> Result<Option<&'v MasterView>, CliError> {
    let member = view.masters.iter().find(|view| view.id.is_some() && view.address == address);
    match member {
        Some(member) if answer.cluster_id != view.cluster_id => Err(CliError::Failed(format!(
            "{} is a member already, but the one that runs there has lost its data: take it out first with `cv raft \
             remove {}`, then add it",
            member.name(),
            member.id.unwrap_or_default()
        ))),
        member => Ok(member),
    }
}

async fn remove(id: u64, result: &ResultArgs) -> Result<(), CliError> {
    let led = GroupLeader::find(&result.cluster).await?;
    let (voters, answering) = led.view.without(id);
    // The leader itself hears only after a while that one is gone.
    if voters > 0 && answering * 2 <= voters {
        return Err(CliError::Failed(format!(
            "without master {id} {answering} of {voters} voting masters would answer, which is no majority, and \
             nothing could be changed any more: start the others first, see `cv raft status`"
        )));
    }
    // A leader that takes itself out would leave the others to an election.
    if led.view.leader == Some(id) && voters > 0 {
        let group = led.transfer(0).await?;
        let next = group.members.iter().find(|member| member.node_id == group.leader);
        next.inspect(|next| led.masters.begin_at(&next.address));
    }
    // Its number is never used again.
    let is_done = |group: &Group| group.members.iter().all(|member| member.node_id != id);
    let group = led.change(is_done, rpc!(raft.remove_master(RemoveMasterRequest { node_id: id }))).await?;
    say(result, &group, format!("master {id} is removed: stop it if it still runs"))
}

async fn transfer(id: Option<u64>, result: &ResultArgs) -> Result<(), CliError> {
    let led = GroupLeader::find(&result.cluster).await?;
    let is_silent = |view: &&MasterView| view.id.is_some() && view.id == id && !view.answers();
    if let Some(member) = led.view.masters.iter().find(is_silent) {
        let (name, cause) = (member.name(), member.error.as_deref().unwrap_or_default());
        return Err(CliError::Unreachable(format!(
            "{name} does not answer ({cause}) and cannot lead: start it, or name another, see `cv raft status`"
        )));
    }
    let group = led.transfer(id.unwrap_or_default()).await?;
    let already = if led.view.leader == Some(group.leader) { " already" } else { "" };
    say(result, &group, format!("master {} leads{already}", group.leader))
}

async fn snapshot(on: Option<String>, result: &ResultArgs) -> Result<(), CliError> {
    let (address, dial) = match on {
        Some(address) => (address, Dial::of(&result.cluster.config()?)?),
        None => GroupLeader::find(&result.cluster).await.map(|led| (led.leader, led.dial))?,
    };
    let mut master = dial.connect(&address).await.map_err(|cause| {
        CliError::Unreachable(format!("the master at {address} does not answer ({cause}): is it running?"))
    })?;
    let Group { snapshot_index, last_index, .. } =
        master.raft.make_snapshot(MakeSnapshotRequest {}).await?.into_inner();
    let view = json!({"address": address, "snapshot_index": snapshot_index, "last_index": last_index});
    result.show(&view, || {
        console::line(format_args!("the master at {address} has a snapshot of all up to entry {snapshot_index}"))
    })
}

/// Says what a change has come to.
fn say(result: &ResultArgs, group: &Group, text: String) -> Result<(), CliError> {
    let view = |member: &Member| json!({"id": member.node_id, "address": member.address, "votes": member.votes});
    let members: Vec<Value> = group.members.iter().map(view).collect();
    // Those that may not know a master that was taken in.
    let view = json!({"leader": group.leader, "members": members, "unaware": group.unaware});
    result.show(&view, || console::line(text))
}

/// `cv secrets rotate`: another key that the masters encrypt the credentials of buckets with.
pub async fn rotate(result: &ResultArgs) -> Result<(), CliError> {
    let request = RotateSecretsRequest { request_id: new_request_id() };
    let RotateSecretsReply { generation, mounts, behind } =
        result.cluster.call(rpc!(raft.rotate_secrets(request))).await?;
    // How often the key was changed; mounts whose credentials have it; masters that have not forgotten the old one yet.
    let view = json!({"generation": generation, "mounts": mounts, "behind": behind});
    result.show(&view, || {
        let mounts = counted(mounts, "mount");
        console::line(format_args!("there is a new key, and the credentials of {mounts} have it"))?;
        behind.iter().try_for_each(|id| {
            console::line(format_args!("master {id} forgets the old key when it has caught up: see `cv raft status`"))
        })
    })
}

#[cfg(test)]
mod tests {
    use cavern_proto::StatusDetail;

    use super::*;

    /// What a change comes to that its master answers so, while no other can be reached.
    async fn changed(answer: Status) -> String {
        let mut config = Config::default();
        config.cluster.masters = vec!["127.0.0.1:1".to_owned()];
        config.client.metadata_timeout = Interval::millis(200);
        let dial = Dial::of(&config).unwrap();
        let survey = Survey::take(&[], &dial).await;
        let (view, masters) = (survey.view(), MasterChannel::for_command(&config).unwrap());
        let led = GroupLeader { survey, view, leader: String::new(), dial, masters };
        let error = led.change(|_| false, async |_: Stubs| Err(answer.clone())).await.unwrap_err();
        assert!(matches!(error, CliError::Unreachable(_)), "{error:?}");
        error.to_string()
    }

    #[tokio::test]
    async fn a_member_that_has_lost_its_data_is_not_added_whether_it_votes_or_not() {
        let dial = Dial::of(&Config::default()).unwrap();
        // Nobody listens there.
        let mut view = Survey::take(&["127.0.0.1:1".to_owned()], &dial).await.view();
        view.cluster_id = "c".to_owned();
        let answer = |cluster_id: &str| Group { cluster_id: cluster_id.to_owned(), ..Group::default() };
        assert_eq!(member_at(&view, "127.0.0.1:1", &answer("")).unwrap(), None, "it is none");
        for (id, votes) in [(2, false), (3, true)] {
            (view.masters[0].id, view.masters[0].votes) = (Some(id), votes);
            assert_eq!(member_at(&view, "127.0.0.1:1", &answer("c")).unwrap(), Some(&view.masters[0]));
            assert_eq!(member_at(&view, "127.0.0.1:2", &answer("")).unwrap(), None);
            let refused = member_at(&view, "127.0.0.1:1", &answer("")).unwrap_err().to_string();
            assert!(refused.contains("lost its data") && refused.contains(&format!("remove {id}")), "{refused}");
        }
    }

    #[tokio::test]
    async fn only_a_lost_answer_leaves_open_whether_the_group_has_changed() {
        let remark = "Whether the group has changed";
        let lost = changed(StatusDetail::Unanswered.to_status("it leads no more".to_owned())).await;
        assert!(lost.contains("it leads no more") && lost.contains(remark), "{lost}");
        let unled = changed(NotLeading { leader: None }.to_status()).await;
        assert!(unled.contains("no master leads") && !unled.contains(remark), "{unled}");
        let refused = changed(Status::deadline_exceeded("master 2 did not take the lead")).await;
        assert_eq!(refused, "master 2 did not take the lead");
    }
}

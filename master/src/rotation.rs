//! A new key for the cluster's secrets ([`SecretSealer`]).
//!
//! 1. The leader makes a key, and gives it to all masters of the group. Each answers when it is on its disk. While one
//!    of them does not answer, nothing goes on: whoever leads later must be able to read the credentials, also when all
//!    others are gone by then. So there is no moment at which a key is used that some master lacks.
//! 2. One command has all credentials in the state sealed anew, says that the key is in use from then on, and moves the
//!    epoch of the mount table, so that a mount which was sealed with the old key meanwhile is looked at again.
//! 3. Each master that has applied it forgets the old key: at once when the leader asks, or by itself within a second.
//!
//! When it breaks off before the command, the old key is in use, and the new one waits, unused. After that the new one
//! is, and is everywhere. The group does not change meanwhile: this is one of its changes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_consensus::{Consensus, PeerConnector};
use cavern_net::master::innermost;
use cavern_proto::raft::{Member, RotateSecretsReply, SettleKeysRequest, TakeKeyRequest, Target};
use cavern_proto::record::{SealSecrets, SealedOptions, SecretsRecord};
use cavern_state::outcome::Repeatable;
use cavern_state::{CurrentDatabase, Tables};
use cavern_work::mounts::SecretSealer;
use cavern_work::{Request, WorkError};
use futures::future::join_all;
use prost::Message as _;
use tokio::time::Instant;
use tonic::Code;

use crate::blocking::blocking;
use crate::bootstrap::Bootstrap;
use crate::error::MasterError;
use crate::services::Services;

/// For a master to have a key on its disk, or to apply what the leader has applied and forget one.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two looks whether that is applied.
const POLL: Duration = Duration::from_millis(20);

/// Gives the cluster's secrets another key, once. Answers how many mounts are sealed with it, and which masters have
/// not forgotten the old one yet.
///
/// # Errors
/// [`WorkError::Refused`] while a master does not answer: nothing has changed then.
pub async fn rotate(
    request: &Request,
    services: &Services,
    consensus: &Consensus,
    sealer: &Arc<SecretSealer>,
    database: &CurrentDatabase,
) -> Result<RotateSecretsReply, MasterError> {
    let mut reply = match request.answer(&services.lookups.reader).await? {
        Some(before) => rotated_before(&before.reply)?,
        None => use_new_key(request, services, consensus, sealer).await?,
    };
    settle(sealer, database).await?;
    let others = others(consensus);
    let forgotten = others.iter().map(|(member, target)| {
        let request = SettleKeysRequest { target: Some(target.clone()), generation: reply.generation };
        async move {
            let mut calls = consensus.connector.calls(&member.address)?;
            let answer = tokio::time::timeout(ANSWER * 2, calls.settle_keys(request)).await;
            Ok::<_, MasterError>(answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.into_inner().settled)))
        }
    });
    let forgotten = join_all(forgotten).await;
    let is_behind = |settled: &Result<bool, MasterError>| !settled.as_ref().is_ok_and(|settled| *settled);
    let behind = others.iter().zip(&forgotten).filter(|(_, settled)| is_behind(settled));
    reply.behind = behind.map(|((member, _), _)| member.node_id).collect();
    Ok(reply)
}

fn rotated_before(reply: &Bytes) -> Result<RotateSecretsReply, WorkError> {
    let reply = RotateSecretsReply::decode(reply.as_ref()).ok().filter(|reply| reply.generation > 0);
    reply.ok_or_else(|| WorkError::Invalid("this request's id is that of another one".into()))
}

async fn use_new_key(
    request: &Request,
    services: &Services,
    consensus: &Consensus,
    sealer: &Arc<SecretSealer>,
) -> Result<RotateSecretsReply, MasterError> {
    let reader = &services.lookups.reader;
    let generation = reader.read(|tables| Ok(tables.secrets()?)).await?.generation + 1;
    let preparing = sealer.clone();
    let (id, key) = blocking(move || Ok(preparing.prepare(generation)?)).await?;
    let given = others(consensus);
    let given = given
        .iter()
        .map(|(member, target)| give(&consensus.connector, member, target.clone(), (generation, key.clone().into())));
    join_all(given).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    loop {
        let (epoch, mounts, secrets) =
            reader.read(|tables| Ok((tables.counters()?.mounts_epoch, tables.mounts()?, tables.secrets()?))).await?;
        if secrets.generation + 1 != generation {
            return Err(WorkError::Refused("the key was changed by somebody else meanwhile".into()).into());
        }
        let mut sealed = Vec::new();
        for mount in mounts {
            let mount = sealer.seal(&id, sealer.unseal(mount)?)?;
            sealed.push(SealedOptions { mount_id: mount.id, options: mount.options });
        }
        let reply = RotateSecretsReply { generation, mounts: sealed.len() as u64, behind: Vec::new() };
        let seal = SealSecrets { mounts_epoch: epoch, generation, key_id: id.clone().into(), sealed };
        let seal = request.command_with(seal, &reply);
        match services.proposer.propose(seal).await? {
            Repeatable::First(true) => {
                tracing::info!(generation, mounts = reply.mounts, "the cluster's secrets have a new key");
                return Ok(reply);
            }
            Repeatable::Repeated(before) => return Ok(rotated_before(&before.reply)?),
            // A mount has come, gone or changed.
            Repeatable::First(false) => {}
        }
    }
}

/// All other masters of the group, those that do not vote yet included.
fn others(consensus: &Consensus) -> Vec<(Member, Target)> {
    let group = consensus.group();
    let others = group.members.into_iter().filter(|member| member.node_id != group.node_id);
    let target = |member: &Member| Target { cluster_id: group.cluster_id.clone(), node_id: member.node_id };
    others.map(|member| (member.clone(), target(&member))).collect()
}

/// Gives a master a key, which is on its disk when this returns. One that is just starting is waited for.
async fn give(
    connector: &PeerConnector,
    member: &Member,
    target: Target,
    (generation, key): (u64, Bytes),
) -> Result<(), MasterError> {
    let Member { node_id, address, .. } = member;
    let request = TakeKeyRequest { target: Some(target), generation, key };
    let (mut calls, deadline) = (connector.calls(address)?, Instant::now() + ANSWER);
    let cause = loop {
        let status = match tokio::time::timeout_at(deadline, calls.take_key(request.clone())).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(status)) => status,
            Err(_elapsed) => break "it does not answer".to_owned(),
        };
        if status.code() != Code::Unavailable || Instant::now() + POLL >= deadline {
            break innermost(&status);
        }
        tokio::time::sleep(POLL).await;
    };
    let reason = format!(
        "master {node_id} at {address} has not got the new key ({cause}), and each must have it before it is used: \
         start that master, or take it out with `cv raft remove {node_id}`, and try again; the old key is in use as \
         before"
    );
    Err(WorkError::Refused(reason).into())
}

/// Gives a master that joins the key in use, unless it is the one that was made with the cluster, which came with its
/// place: it may have got that place before the key was changed.
///
/// # Errors
/// [`WorkError::Refused`] when it does not take it.
pub async fn give_to_joining(
    services: &Services,
    bootstrap: &Bootstrap,
    target: Target,
    address: &str,
) -> Result<(), MasterError> {
    let SecretsRecord { generation, key_id } = services.lookups.reader.read(|tables| Ok(tables.secrets()?)).await?;
    if generation == 0 {
        return Ok(());
    }
    let member = Member { node_id: target.node_id, address: address.to_owned(), ..Member::default() };
    give(&bootstrap.connector, &member, target, (generation, bootstrap.sealer()?.key(&key_id)?.into())).await
}

/// Forgets what is of no use any more by what is applied here. Answers the generation that is.
pub async fn settle(sealer: &Arc<SecretSealer>, database: &CurrentDatabase) -> Result<u64, MasterError> {
    let SecretsRecord { generation, key_id } = Tables::new(&database.get()).secrets()?;
    if generation > 0 && sealer.settled() != generation {
        let sealer = sealer.clone();
        if blocking(move || Ok(sealer.settle(generation, &key_id)?)).await? {
            tracing::info!(generation, "the keys of the cluster's secrets before this generation are forgotten");
        }
    }
    Ok(generation)
}

/// Forgets former keys once that generation is applied. False when it is not for a while.
pub async fn settle_from(
    sealer: &Arc<SecretSealer>,
    database: &CurrentDatabase,
    generation: u64,
) -> Result<bool, MasterError> {
    let began = Instant::now();
    while settle(sealer, database).await? < generation {
        if began.elapsed() > ANSWER {
            return Ok(false);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(true)
}

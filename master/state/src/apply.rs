//! From commands to changes. A command never fails for what it asks: a refusal is an [`Outcome`], returned to the
//! proposer and the same on every replica. Only a broken database, and a command of a newer version, are errors, and
//! they stop the state machine.

use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{BeginHistory, Command, InitCluster, PutIndex};

use super::namespace::{apply_listing, create_root};
use super::orphans::reap;
use super::tables::{CLUSTER_KEY, index_key};
use super::transaction::Transaction;
use super::{
    Family, Outcome, existing, extent, feature_version, intent, kept, lost, mount, origin, posix, registry, requests,
    restored, usage,
};
use crate::error::StateError;

/// Numbers of inodes that are left out at a time, at most.
const INODES_SKIPPED_MAX: u64 = 1 << 40;
/// From here on numbers are those that clients give.
const INODES_MAX: u64 = 1 << 61;
/// No history begins with later generations than this: each file has a quarter of all left.
pub const GENERATIONS_MAX: u32 = 3 << 30;

/// Applies one command to a transaction of its own: part of what a command does reads the tables as they were before
/// the transaction.
pub fn apply(transaction: &mut Transaction<'_>, command: Command) -> Result<Outcome, StateError> {
    let outcome = apply_changes(transaction, command)?;
    usage::account(transaction)?;
    Ok(outcome)
}

pub(super) fn apply_changes(transaction: &mut Transaction<'_>, command: Command) -> Result<Outcome, StateError> {
    match command.command {
        // Whatever it does, the masters that know it do it: this one would be another from here on.
        None => Err(StateError::UnknownCommand),
        Some(Kind::Init(init)) => init_cluster(transaction, &init),
        Some(Kind::Listing(listing)) => Ok(Outcome::Listed(apply_listing(transaction, &listing)?)),
        Some(Kind::PutWorker(put)) => registry::put_worker(transaction, &put),
        Some(Kind::WorkerState(set)) => registry::set_worker_state(transaction, &set),
        Some(Kind::PutJob(job)) => registry::put_job(transaction, job),
        Some(Kind::ReapOrphans(limit)) => Ok(Outcome::StepProgress(reap(transaction, &limit)?)),
        Some(Kind::PutIndex(index)) => put_index(transaction, &index),
        Some(Kind::Mutate(mutate)) => posix::mutate(transaction, mutate),
        Some(Kind::EndSessionStep(step)) => posix::end_session_step(transaction, &step),
        Some(Kind::Expire(expire)) => posix::expire(transaction, &expire),
        Some(Kind::ReapUnlinked(inode)) => posix::reap(transaction, inode),
        Some(Kind::SpreadIntent(spread)) => intent::spread(transaction, &spread),
        Some(Kind::BeginObjects(begin)) => intent::begin(transaction, &begin),
        Some(Kind::Persisted(persisted)) => intent::persisted(transaction, persisted),
        Some(Kind::Deleted(deleted)) => intent::deleted(transaction, &deleted),
        Some(Kind::Freed(freed)) => intent::freed(transaction, &freed),
        Some(Kind::JoinReplica(join)) => extent::join(transaction, &join),
        Some(Kind::SettleReplica(settle)) => extent::settle(transaction, &settle),
        Some(Kind::DropBlocks(step)) => extent::drop_truncated_step(transaction, &step),
        Some(Kind::DropLost(lost)) => lost::drop_lost(transaction, lost),
        Some(Kind::StraysFreed(freed)) => Ok(extent::strays_freed(transaction, &freed)),
        Some(Kind::FreeContent(inode)) => origin::free(transaction, inode, 0),
        Some(Kind::FreeOwnContent(own)) => origin::free(transaction, own.inode, own.session),
        Some(Kind::BeginParking(begin)) => intent::begin_parking(transaction, &begin),
        Some(Kind::MoveOrigin(moved)) => origin::move_to(transaction, moved),
        Some(Kind::AdoptListing(listing)) => Ok(Outcome::Listed(existing::adopt(transaction, listing)?)),
        Some(Kind::TakeInObject(taken)) => Ok(Outcome::TakenIn(posix::take_in(transaction, &taken)?)),
        Some(Kind::KeepAttributes(keep)) => kept::keep(transaction, keep),
        Some(Kind::CountUsage(step)) => usage::count(transaction, &step),
        Some(Kind::RemoveMount(remove)) => mount::remove(transaction, &remove),
        Some(Kind::AttachMount(attach)) => mount::attach(transaction, attach),
        Some(Kind::UpdateMount(update)) => mount::update(transaction, update),
        Some(Kind::DrainWorker(drain)) => registry::drain_worker(transaction, &drain),
        Some(Kind::RemoveWorker(remove)) => registry::remove_worker(transaction, &remove),
        Some(Kind::GiveUpReplicas(given_up)) => extent::give_up(transaction, &given_up),
        Some(Kind::ReserveMasterId(largest)) => Ok(registry::reserve_master_id(transaction, largest)),
        Some(Kind::RaiseFeatureVersion(version)) => raise_feature_version(transaction, version),
        Some(Kind::SkipInodes(count)) => Ok(skip_inodes(transaction, count)),
        Some(Kind::BeginHistory(begin)) => Ok(begin_history(transaction, begin)),
        Some(Kind::SealSecrets(seal)) => mount::seal(transaction, seal),
        Some(Kind::Once(once)) => requests::once(transaction, *once),
    }
}

/// The masters that know less than this stop here.
fn raise_feature_version(transaction: &mut Transaction<'_>, version: u32) -> Result<Outcome, StateError> {
    feature_version::check(version, transaction.known)?;
    let counters = &mut transaction.counters;
    counters.feature_version = counters.feature_version.max(version);
    Ok(Outcome::Done)
}

/// Leaves numbers of inodes out, as long as there are enough of them.
fn skip_inodes(transaction: &mut Transaction<'_>, count: u64) -> Outcome {
    let counters = &mut transaction.counters;
    if count <= INODES_SKIPPED_MAX && counters.inode <= INODES_MAX - INODES_SKIPPED_MAX {
        counters.inode += count;
    }
    Outcome::Done
}

/// Blocks that are made for what is there have other names from now on than any that may have been made before.
fn begin_history(transaction: &mut Transaction<'_>, begin: BeginHistory) -> Outcome {
    let counters = &mut transaction.counters;
    let next_generation = counters.next_generation.saturating_add(begin.generations).min(GENERATIONS_MAX);
    (counters.history, counters.history_after) = (begin.id, begin.after);
    (counters.next_generation, counters.old_inodes) = (next_generation, counters.inode);
    Outcome::Done
}

/// Gives a new cluster its id, its feature version and its root directory; does nothing to an old one.
fn init_cluster(transaction: &mut Transaction<'_>, init: &InitCluster) -> Result<Outcome, StateError> {
    if transaction.before().cluster_id()?.is_some() {
        return Ok(Outcome::Done);
    }
    if init.feature_version == 0 {
        return Err(StateError::FormerState);
    }
    create_root(transaction, init.now_ns)?;
    transaction.put_bytes(Family::Meta, CLUSTER_KEY, init.cluster_id.as_bytes());
    raise_feature_version(transaction, init.feature_version)
}

fn put_index(transaction: &mut Transaction<'_>, put: &PutIndex) -> Result<Outcome, StateError> {
    // An index that is at its end may have got more to do meanwhile.
    if let Some(index) = &put.index
        && transaction.before().mount(put.mount_id)?.is_some()
        && !transaction.before().has_unlisted(put.mount_id, &[])?
    {
        transaction.put(Family::Meta, &index_key(put.mount_id), index);
        if index.finished_ns != 0 {
            restored::forget_identities(transaction, put.mount_id);
        }
    }
    Ok(Outcome::Done)
}

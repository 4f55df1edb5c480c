//! From commands to changes. A command never fails for what it asks: a refusal is an [`Outcome`], returned to the
//! proposer and the same on every replica. Only a broken database, and a command of a newer version, are errors, and
//! they stop the state machine.

use cavern_proto::master::{FreedContent, Mount, MutationResult, RefreshFate};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{BeginHistory, Command, InitCluster, PutIndex, RequestRecord};

use super::namespace::{ListingCounts, apply_listing, create_root};
use super::orphans::{StepProgress, reap};
use super::tables::{CLUSTER_KEY, index_key};
use super::transaction::Transaction;
use super::{Family, existing, extent, intent, kept, lost, mount, origin, posix, registry, requests, restored, usage};
use crate::{MasterError, feature_version};

/// Instead of the number of a change: the answer was made before, and waits for all changes of strict mounts that are
/// waited for.
pub const ALL_BEFORE: u64 = u64::MAX;
/// Numbers of inodes that are left out at a time, at most.
const INODES_SKIPPED_MAX: u64 = 1 << 40;
/// From here on numbers are those that clients give.
const INODES_MAX: u64 = 1 << 61;
/// No history begins with later generations than this: each file has a quarter of all left.
pub const GENERATIONS_MAX: u32 = 3 << 30;

/// What a command did.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Done,
    /// The mount as it is recorded now, or as it was before it was removed.
    Mount(Box<Mount>),
    /// Another mount has the path.
    MountExists(Box<Mount>),
    NoSuchMount,
    /// Something has been changed since the proposer looked, who looks again.
    OutOfDate,
    Listed(ListingCounts),
    Worker {
        id: u64,
        epoch: u64,
    },
    Job(u64),
    MasterId(u64),
    StepProgress(StepProgress),
    /// Whether any inodes are left to be counted.
    Counted {
        more: bool,
    },
    /// The result, and the number of the change that its answer waits for (see [`ChangeListener`]), or [`ALL_BEFORE`],
    /// or 0.
    ///
    /// [`ChangeListener`]: crate::raft::ChangeListener
    Mutated(Box<MutationResult>, u64),
    /// Whether the inode still has a name: what has none is not written to the bucket.
    Began {
        is_named: bool,
    },
    Freed(FreedContent),
    /// Lost blocks of a file are given up. The file went back to what its bucket has; otherwise they are zeros.
    LostDropped {
        reverted: bool,
    },
    /// What others changed, taken in or not.
    TakenIn(RefreshFate),
    /// It was done before, when it was asked for under the same id.
    Repeated(Box<RequestRecord>),
    /// A session holds this directory, which must be recalled first.
    Held(u64),
    /// The state does not allow it; a sentence for the one who asked.
    Refused(String),
    /// It is not for the one who asked.
    Denied(String),
}

/// Applies one command to a transaction of its own: part of what a command does reads the tables as they were before
/// the transaction.
pub fn apply(transaction: &mut Transaction<'_>, command: Command) -> Result<Outcome, MasterError> {
    let outcome = apply_changes(transaction, command)?;
    usage::account(transaction)?;
    Ok(outcome)
}

pub(super) fn apply_changes(transaction: &mut Transaction<'_>, command: Command) -> Result<Outcome, MasterError> {
    match command.command {
        // Whatever it does, the masters that know it do it: this one would be another from here on.
        None => Err(MasterError::UnknownCommand),
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
fn raise_feature_version(transaction: &mut Transaction<'_>, version: u32) -> Result<Outcome, MasterError> {
    feature_version::check(version)?;
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

/// Gives a new cluster its id and its root directory; does nothing to an old one.
fn init_cluster(transaction: &mut Transaction<'_>, init: &InitCluster) -> Result<Outcome, MasterError> {
    if transaction.before().cluster_id()?.is_none() {
        create_root(transaction, init.now_ns)?;
        transaction.put_bytes(Family::Meta, CLUSTER_KEY, init.cluster_id.as_bytes());
    }
    Ok(Outcome::Done)
}

fn put_index(transaction: &mut Transaction<'_>, put: &PutIndex) -> Result<Outcome, MasterError> {
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

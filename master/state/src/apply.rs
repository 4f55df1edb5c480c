//! From commands to changes. A command never fails for what it asks: a refusal is an [`Outcome`], returned to the
//! proposer and the same on every replica. Only a broken database, and a command of a newer version, are errors, and
//! they stop the state machine.

use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{BeginHistory, Command, InitCluster, Once};

use crate::commands::{
    existing, external, lost, mend, mount, mutate, namespace, orphans, persist, registry, replicas, requests, results,
    views,
};
use crate::error::{Result, StateError};
use crate::feature_version;
use crate::index::usage;
use crate::index::views::ID_MAX;
use crate::outcome::Outcome;
pub use crate::records::GENERATIONS_MAX;
use crate::schema;
use crate::transaction::Transaction;

/// Numbers of inodes that are left out at a time, at most.
const INODES_SKIPPED_MAX: u64 = 1 << 40;
/// Of ids of views that are left, one part in so many is left out at a time, at most.
const VIEWS_PART: u32 = 64;
/// From here on numbers are those that clients give.
const INODES_MAX: u64 = 1 << 61;

/// Applies one command to a transaction of its own: part of what a command does reads the tables as they were before
/// the transaction.
pub fn apply(tx: &mut Transaction<'_>, command: Command) -> Result<Outcome> {
    let outcome = apply_changes(tx, command)?;
    usage::account(tx)?;
    Ok(outcome)
}

fn apply_changes(tx: &mut Transaction<'_>, command: Command) -> Result<Outcome> {
    match command.command {
        // Whatever it does, the masters that know it do it: this one would be another from here on.
        None => Err(StateError::UnknownCommand),
        Some(Kind::Init(init)) => init_cluster(tx, &init),
        Some(Kind::Listing(listing)) => namespace::apply_listing(tx, &listing).map(Outcome::Listed),
        Some(Kind::PutWorker(put)) => registry::put_worker(tx, &put),
        Some(Kind::WorkerState(set)) => registry::set_worker_state(tx, &set),
        Some(Kind::PutJob(job)) => registry::put_job(tx, job),
        Some(Kind::ReapOrphans(limit)) => orphans::reap(tx, &limit).map(Outcome::StepProgress),
        Some(Kind::PutIndex(index)) => namespace::put_index(tx, &index),
        Some(Kind::Mutate(mutate)) => mutate::mutate(tx, mutate),
        Some(Kind::EndSessionStep(step)) => results::end_session_step(tx, &step).map(Outcome::StepProgress),
        Some(Kind::Expire(expire)) => mutate::expire(tx, &expire),
        Some(Kind::ReapUnlinked(inode)) => orphans::reap_unlinked(tx, inode).map(Outcome::StepProgress),
        Some(Kind::PropagateIntent(spread)) => persist::propagate(tx, &spread),
        Some(Kind::BeginObjects(begin)) => persist::begin(tx, &begin),
        Some(Kind::Persisted(persisted)) => persist::persisted(tx, persisted),
        Some(Kind::Deleted(deleted)) => persist::deleted(tx, &deleted),
        Some(Kind::Freed(freed)) => persist::freed(tx, &freed),
        Some(Kind::JoinReplica(join)) => replicas::join(tx, &join),
        Some(Kind::SettleReplica(settle)) => replicas::settle(tx, &settle),
        Some(Kind::DropBlocks(step)) => replicas::drop_truncated_step(tx, &step).map(Outcome::StepProgress),
        Some(Kind::DropLost(lost)) => lost::drop_lost(tx, lost),
        Some(Kind::StraysFreed(freed)) => Ok(replicas::strays_freed(tx, &freed)),
        Some(Kind::FreeContent(free)) => persist::free_content(tx, free).map(Outcome::Freed),
        Some(Kind::PreserveObject(begin)) => persist::preserve_object(tx, &begin),
        Some(Kind::MoveOrigin(moved)) => persist::move_origin(tx, moved),
        Some(Kind::AdoptListing(listing)) => existing::adopt(tx, listing).map(Outcome::Listed),
        Some(Kind::ImportExternalChange(taken)) => external::import_external_change(tx, &taken).map(Outcome::Imported),
        Some(Kind::StoreAttributes(keep)) => namespace::store_attributes(tx, keep),
        Some(Kind::CountUsage(step)) => usage::count(tx, &step).map(|more| Outcome::Counted { more }),
        Some(Kind::RemoveMount(remove)) => mount::remove(tx, &remove),
        Some(Kind::AttachMount(attach)) => mount::attach(tx, attach),
        Some(Kind::UpdateMount(update)) => mount::update(tx, update),
        Some(Kind::DrainWorker(drain)) => registry::drain_worker(tx, &drain),
        Some(Kind::RemoveWorker(remove)) => registry::remove_worker(tx, &remove),
        Some(Kind::GiveUpReplicas(given_up)) => replicas::give_up(tx, &given_up),
        Some(Kind::ReserveMasterId(largest)) => Ok(registry::reserve_master_id(tx, largest)),
        Some(Kind::RaiseFeatureVersion(version)) => raise_feature_version(tx, version),
        Some(Kind::SkipInodes(count)) => Ok(skip_inodes(tx, count)),
        Some(Kind::BeginHistory(begin)) => Ok(begin_history(tx, begin)),
        Some(Kind::SealSecrets(seal)) => mount::seal(tx, seal),
        Some(Kind::Mend(fault)) => mend::mend(tx, fault),
        Some(Kind::BeginView(begin)) => views::begin(tx, begin),
        Some(Kind::FreezeView(freeze)) => views::freeze(tx, &freeze),
        Some(Kind::FinishView(finish)) => views::finish(tx, finish),
        Some(Kind::RemoveView(remove)) => views::remove(tx, &remove),
        Some(Kind::ReleaseKept(release)) => views::release(tx, &release),
        Some(Kind::Once(request)) => once(tx, *request),
    }
}

/// Applies a command, unless it was applied under this id before.
fn once(tx: &mut Transaction<'_>, once: Once) -> Result<Outcome> {
    let Once { request, reply, command } = once;
    if let Some(record) = tx.before().request(&request)? {
        return Ok(Outcome::Repeated(Box::new(record)));
    }
    let outcome = apply_changes(tx, command.map_or_else(Command::default, |command| *command))?;
    requests::remember(tx, request, reply, &outcome)?;
    Ok(outcome)
}

/// The masters that know less than this stop here.
fn raise_feature_version(tx: &mut Transaction<'_>, version: u32) -> Result<Outcome> {
    feature_version::check(version, tx.known)?;
    tx.counters.feature_version = tx.counters.feature_version.max(version);
    Ok(Outcome::Done)
}

/// Leaves numbers of inodes out, as long as there are enough of them.
fn skip_inodes(tx: &mut Transaction<'_>, count: u64) -> Outcome {
    if count <= INODES_SKIPPED_MAX && tx.counters.inode <= INODES_MAX - INODES_SKIPPED_MAX {
        tx.counters.inode += count;
    }
    Outcome::Done
}

/// Blocks that are made for what is there have other names from now on than any that may have been made before, and
/// views other ids: kernels know files of a view by its id.
fn begin_history(tx: &mut Transaction<'_>, begin: BeginHistory) -> Outcome {
    let counters = &mut tx.counters;
    counters.view = last_view(counters.view, begin.generations);
    let next_generation = counters.next_generation.saturating_add(begin.generations).min(GENERATIONS_MAX);
    (counters.history, counters.history_after) = (begin.id, begin.after);
    (counters.next_generation, counters.old_inodes) = (next_generation, counters.inode);
    Outcome::Done
}

/// The last id of a view when some are left out, as `many` chooses: a part of those that are left, at most.
fn last_view(last: u32, many: u32) -> u32 {
    let left = ID_MAX.saturating_sub(last);
    last + many % (left / VIEWS_PART + 1)
}

/// Gives a new cluster its id, its feature version and its root directory; does nothing to an old one.
fn init_cluster(tx: &mut Transaction<'_>, init: &InitCluster) -> Result<Outcome> {
    if tx.before().cluster_id()?.is_some() {
        return Ok(Outcome::Done);
    }
    if init.feature_version == 0 {
        return Err(StateError::FormerState);
    }
    namespace::create_root(tx, init.now_ns)?;
    tx.put(schema::ClusterId, (), &init.cluster_id);
    raise_feature_version(tx, init.feature_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_views_that_are_left_out_are_never_all() {
        assert_eq!((last_view(7, 0), last_view(7, 5), last_view(ID_MAX, u32::MAX)), (7, 12, ID_MAX));
        let mut last = 0;
        for _ in 0..500 {
            let next = last_view(last, u32::MAX / 3);
            assert!((last..=ID_MAX).contains(&next));
            last = next;
        }
        assert!(last < ID_MAX - 1000, "{last}");
    }
}

//! Mutations: what sessions change in fs-mode mounts.
//!
//! A mutation that comes again, because its answer was lost, is answered with the result that it had: results are kept
//! per session until the session says that it has them. One that lets too many of them gather changes nothing more
//! before it has said so.

use std::collections::BTreeSet;
use std::time::Duration;

use cavern_posix::Refusal;
use cavern_proto::master::mutation::Change as Kind;
use cavern_proto::master::{AcquireStep, Consistency, Mutation, MutationResult, RemoveName, TtlAction};
use cavern_proto::record::{Expire, InodeRecord, Mutate};
use rustix::io::Errno;

use super::results::{self, Known, shortened};
use crate::change::DelegationChange;
use crate::error::Result;
use crate::outcome::{ALL_BEFORE, Outcome};
use crate::posix::context::{Caller, Checked, MutationContext, MutationEffects, MutationError, refuse};
use crate::records::{changed_ns, is_directory};
use crate::schema;
use crate::tables::Tables;
use crate::transaction::Transaction;

/// A change that says to have been made later than this after the master's clock was made then: so far clocks of hosts
/// may differ, and nothing is kept from a time to live, which counts from the last change.
const AHEAD_MAX_NS: i64 = 300_000_000_000;

/// Applies a mutation, or finds the result that it had when it was applied.
pub fn mutate(tx: &mut Transaction<'_>, mutate: Mutate) -> Result<Outcome> {
    let Some(mut mutation) = mutate.mutation else { return Outcome::refused("an empty mutation") };
    let (seq, now_ns) = (mutation.seq, mutate.now_ns);
    tx.changes.origin = mutate.session;
    if let Some(Kind::AcquireDelegation(asked)) = &mutation.change
        && asked.step() == AcquireStep::Grant
    {
        tx.changes.delegations.push(DelegationChange::Decided(asked.inode));
    }
    let mut results = match results::find(tx, mutate.session, seq)? {
        Known::New(results) => results,
        Known::Result(known) => {
            watch_result(tx, &mutation, &known)?;
            let waits_for = if is_of_strict(tx, &known)? { ALL_BEFORE } else { 0 };
            return Ok(Outcome::Mutated(Box::new(known), waits_for));
        }
    };
    results.acknowledge(tx, mutate.answered, seq, &mutate.owner)?;
    if let Some(refused) = results.refusal(&mutation) {
        results.put(tx);
        return Ok(Outcome::Mutated(Box::new(refused), 0));
    }
    let caller = Caller {
        session: mutate.session,
        client: mutate.client,
        user: mutation.user.take(),
        is_write_back: mutation.is_write_back,
        owner: (mutation.uid, mutation.gid),
        now_ns,
        made_ns: if mutation.made_ns == 0 { now_ns } else { mutation.made_ns.min(now_ns.saturating_add(AHEAD_MAX_NS)) },
    };
    let mut mutating = MutationContext::of(tx, caller);
    let sets_length = matches!(&mutation.change, Some(Kind::SetAttr(set)) if set.size.is_some());
    let mut result = match make(&mut mutating, mutation) {
        Ok(inode) => {
            mutating.note_intents()?;
            let (attributes, gone) = (mutating.attributes(sets_length), std::mem::take(&mut mutating.effects.gone));
            let MutationEffects { delegated, is_alone, .. } = mutating.effects;
            MutationResult { inode, attributes, gone, delegated, is_alone, ..MutationResult::default() }
        }
        Err(error) => refused(&mutating, error)?,
    };
    result.reason = shortened(result.reason);
    let reserved = mutating.effects.reserved;
    results.keep(tx, seq, &result, reserved);
    Ok(Outcome::Mutated(Box::new(result), 0))
}

/// What a session is told of a change that was not made.
fn refused(mutating: &MutationContext<'_, '_>, error: MutationError) -> Result<MutationResult> {
    let again = |reason| MutationResult { errno: Errno::AGAIN.raw_os_error(), reason, ..MutationResult::default() };
    Ok(match error {
        MutationError::Refused(Refusal { errno, reason }) => {
            MutationResult { errno: errno.raw_os_error(), reason, ..MutationResult::default() }
        }
        MutationError::Unlisted { directory, below } => {
            let reason = format!("{} has names in the bucket that are not known yet", mutating.shown(directory)?);
            MutationResult { unlisted: directory, unlisted_below: below, ..again(reason) }
        }
        MutationError::Delegated { directory } => {
            let shown = mutating.shown(directory)?;
            let reason = format!("another client answers for changes in {shown}: have it let go first");
            MutationResult { delegated_elsewhere: directory, ..again(reason) }
        }
        MutationError::Storage(error) => return Err(error),
    })
}

/// Makes a change; gives the inode that it is about.
fn make(mutating: &mut MutationContext<'_, '_>, mutation: Mutation) -> Checked<u64> {
    mutating.check_session()?;
    if mutation.made_ns < 0 {
        return refuse(Errno::INVAL, format!("a change that was made at {} ns", mutation.made_ns));
    }
    match mutation.change {
        None => refuse(Errno::NOSYS, "a change of a kind that this master does not know"),
        Some(Kind::Create(create)) => mutating.create(&create),
        Some(Kind::Link(link)) => mutating.link(&link),
        Some(Kind::Remove(remove)) => mutating.remove(&remove),
        Some(Kind::Rename(rename)) => mutating.rename(&rename),
        Some(Kind::RenameWhiteout(rename)) => mutating.rename_whiteout(&rename),
        Some(Kind::SetAttr(set)) => mutating.set_attributes(&set),
        Some(Kind::SetXattr(set)) => mutating.set_xattr(&set),
        Some(Kind::RemoveXattr(remove)) => mutating.remove_xattr(&remove),
        Some(Kind::Commit(commit)) => mutating.commit(&commit),
        Some(Kind::AddOpenRef(inode)) => mutating.add_open_ref(inode),
        Some(Kind::DropOpenRef(inode)) => Ok(mutating.release(inode)),
        Some(Kind::SetOpenRefs(set)) => mutating.set_open_refs(&set),
        Some(Kind::SetLock(set)) => mutating.set_lock(set),
        Some(Kind::SetQuota(set)) => mutating.set_quota(&set),
        Some(Kind::SetTtl(set)) => mutating.set_ttl(&set),
        Some(Kind::ReserveInodes(count)) => mutating.reserve(count),
        Some(Kind::ReturnDelegations(asked)) => mutating.return_delegations(&asked),
        Some(Kind::OpenToWrite(open)) => mutating.open_to_write(open),
        Some(Kind::AcquireDelegation(asked)) => mutating.acquire_delegation(&asked),
    }
}

/// Notes what a session learns from a result that it had already, perhaps from another master: it is notified when that
/// changes again.
fn watch_result(tx: &mut Transaction<'_>, mutation: &Mutation, result: &MutationResult) -> Result {
    let mut seen = Vec::new();
    match &mutation.change {
        Some(Kind::Create(create)) => seen.push((create.parent, create.name.clone())),
        Some(Kind::Link(link)) => seen.push((link.parent, link.name.clone())),
        Some(Kind::Remove(remove)) => seen.push((remove.parent, remove.name.clone())),
        Some(Kind::Rename(rename) | Kind::RenameWhiteout(rename)) => {
            seen.push((rename.parent, rename.name.clone()));
            seen.push((rename.new_parent, rename.new_name.clone()));
        }
        _ => {}
    }
    for attr in &result.attributes {
        seen.extend(tx.inode(attr.inode)?.map(|record| (record.parent, record.name)));
    }
    tx.changes.seen.extend(seen);
    Ok(())
}

/// Whether a result that a session had already is of a strict mount: the first answer may have been waiting for others
/// when it was lost, perhaps in another term.
fn is_of_strict(tx: &Transaction<'_>, result: &MutationResult) -> Result<bool> {
    let parents = tx.changes.seen.iter().map(|(parent, _)| *parent);
    let inodes: BTreeSet<u64> = parents.chain(result.attributes.iter().map(|attr| attr.inode)).collect();
    let mut mounts = BTreeSet::new();
    for inode in inodes {
        mounts.extend(tx.inode(inode)?.map(|record| record.mount_id));
    }
    for mount in mounts {
        let mount = tx.before().mount(mount)?;
        if mount.is_some_and(|mount| mount.consistency() == Consistency::Strict) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes the first name of a file whose time is over, and that nobody has changed since it was looked at, nor writes
/// to. Since then the rules may have become others, and a directory above it may have been moved.
pub fn expire(tx: &mut Transaction<'_>, expire: &Expire) -> Result<Outcome> {
    let is_as_seen =
        |record: &InodeRecord| !record.unlinked && !is_directory(record) && record.ctime_ns == expire.ctime_ns;
    let Some(record) = tx.inode(expire.inode)?.filter(is_as_seen) else {
        return Outcome::refused("the file has changed");
    };
    if tx.before().is_written_by_others(expire.inode, 0)? {
        return Outcome::refused("somebody writes to the file");
    }
    if !is_expired(tx.before(), &record, expire.now_ns)? {
        return Outcome::refused("no rule removes the file by now");
    }
    let remove = RemoveName { parent: record.parent, name: record.name, directory: false };
    let mut mutating = MutationContext::new(tx, expire.now_ns);
    match mutating.remove(&remove) {
        Ok(_) => {
            mutating.note_intents()?;
            Ok(Outcome::Done)
        }
        Err(MutationError::Refused(Refusal { reason, .. })) => Outcome::refused(reason),
        Err(MutationError::Unlisted { .. }) => Outcome::refused("not all names of its directory are known yet"),
        Err(MutationError::Delegated { directory }) => Ok(Outcome::Delegated(directory)),
        Err(MutationError::Storage(error)) => Err(error),
    }
}

/// Whether the nearest rule above a file has it removed by this time.
fn is_expired(tables: Tables<'_>, record: &InodeRecord, now_ns: i64) -> Result<bool> {
    let age = Duration::from_nanos(u64::try_from(now_ns.saturating_sub(changed_ns(record))).unwrap_or(0));
    for directory in tables.above(record.parent)? {
        if let Some(rule) = tables.get(schema::Ttls, directory)? {
            return Ok(rule.action() == TtlAction::Delete && age >= Duration::from_secs(rule.seconds));
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests;

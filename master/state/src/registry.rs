//! The worker table, the list of jobs, and the ids of masters.

use bytes::Bytes;
use cavern_proto::master::{Job, JobState, Worker, WorkerState};
use cavern_proto::record::{DrainWorker, PutWorker, RemoveWorker, SetWorkerState, WorkerRecord};

use super::Outcome;
use super::database::Family;
use super::tables::removed_key;
use super::transaction::{Change, Transaction};
use crate::error::StateError;

/// Ended jobs that are kept.
const ENDED_JOBS_KEPT: usize = 100;

/// Registers a worker, or renews what is known of it. The uuid decides who it is; a new uuid at a known address is a
/// worker that lost its disks, and the old one leaves the table. Neither is done for another owner than that of the
/// worker which is known. The epoch moves only when what others see has changed.
pub fn put_worker(transaction: &mut Transaction<'_>, put: &PutWorker) -> Result<Outcome, StateError> {
    let Some(mut worker) = put.worker.clone() else { return Ok(Outcome::Refused("the worker is missing".into())) };
    if let Some(id) = transaction.before().removed_worker(&put.uuid)? {
        return Ok(Outcome::Refused(format!(
            "the worker at {} was worker {id}, which was removed with `cv node remove`, so that nothing leads to what \
             its directories hold any more: to join as a new worker, move them away, and start it with empty ones",
            worker.data_address
        )));
    }
    (worker.state, worker.draining) = (WorkerState::Live as i32, false);
    let known = transaction.before().workers()?;
    let (mut changed, mut adopted, mut id, mut owner) = (false, false, 0, put.owner.clone());
    let replaces = |uuid: &Bytes, old: &Worker| *uuid == put.uuid || old.data_address == worker.data_address;
    let mut replaced =
        known.iter().filter(|record| record.worker.as_ref().is_some_and(|old| replaces(&record.uuid, old)));
    if let Some(reason) = replaced.find_map(|record| refusal_of_owner(record, &put.owner)) {
        return Ok(Outcome::Denied(reason));
    }
    for record in known {
        let WorkerRecord { uuid, worker: Some(old), owner: registered } = record else { continue };
        if uuid == put.uuid {
            id = old.id;
            (worker.id, worker.draining) = (id, old.draining);
            changed |= old != worker;
            if owner.is_empty() {
                owner = registered;
            } else if registered.is_empty() {
                adopted = true;
            }
        } else if old.data_address == worker.data_address {
            transaction.delete(Family::Worker, &old.id.to_be_bytes());
            changed = true;
        }
    }
    if id == 0 {
        transaction.counters.worker += 1;
        id = transaction.counters.worker;
        worker.id = id;
        changed = true;
    }
    if changed || adopted {
        let record = WorkerRecord { uuid: put.uuid.clone(), worker: Some(worker), owner };
        transaction.put(Family::Worker, &id.to_be_bytes(), &record);
    }
    if changed {
        next_epoch(transaction);
    }
    Ok(Outcome::Worker { id, epoch: transaction.counters.workers_epoch })
}

/// Why it is not for `asker` to speak for a worker, if it is not: it was registered under another name. Whoever has no
/// name, where connections are not secured, speaks for all.
pub fn refusal_of_owner(record: &WorkerRecord, asker: &str) -> Option<String> {
    let WorkerRecord { worker: Some(worker), owner, .. } = record else { return None };
    let is_of_another = !owner.is_empty() && !asker.is_empty() && owner != asker;
    is_of_another.then(|| {
        let Worker { id, data_address, .. } = worker;
        format!(
            "worker {id} at {data_address} has registered with the certificate \"{owner}\", and this one is \
             \"{asker}\": give it one of that name (`cv cert issue worker {owner}`), or take it out with `cv node \
             remove {id}`"
        )
    })
}

/// Gives a master an id that none has had: one that was removed may still be running somewhere.
pub fn reserve_master_id(transaction: &mut Transaction<'_>, largest: u64) -> Outcome {
    let Some(id) = transaction.counters.master.max(largest).checked_add(1) else {
        return Outcome::Refused("there are no ids of masters left".into());
    };
    transaction.counters.master = id;
    Outcome::MasterId(id)
}

/// Marks a worker live or lost.
pub fn set_worker_state(transaction: &mut Transaction<'_>, set: &SetWorkerState) -> Result<Outcome, StateError> {
    let Some(mut record) = transaction.before().worker(set.worker_id)? else { return Ok(Outcome::Done) };
    if let Some(worker) = record.worker.as_mut()
        && worker.state != set.state
    {
        worker.state = set.state;
        transaction.put(Family::Worker, &set.worker_id.to_be_bytes(), &record);
        next_epoch(transaction);
    }
    Ok(Outcome::Done)
}

/// Has a worker emptied, or ends that. One worker at least goes on taking blocks.
pub fn drain_worker(transaction: &mut Transaction<'_>, drain: &DrainWorker) -> Result<Outcome, StateError> {
    let id = drain.worker_id;
    let Some(mut record) = transaction.before().worker(id)? else { return Ok(unknown(id)) };
    let Some(worker) = record.worker.as_mut().filter(|worker| worker.draining != drain.draining) else {
        return Ok(Outcome::Done);
    };
    let others = transaction.before().workers()?.into_iter().filter_map(|record| record.worker);
    let mut takers = others.filter(|other| other.id != id && other.state() == WorkerState::Live && !other.draining);
    if drain.draining && takers.next().is_none() {
        return Ok(Outcome::Refused(format!(
            "no other live worker could take the blocks of worker {id}: start another one first, see `cv node list`"
        )));
    }
    worker.draining = drain.draining;
    transaction.put(Family::Worker, &id.to_be_bytes(), &record);
    next_epoch(transaction);
    Ok(Outcome::Done)
}

/// Takes a worker out of the table for good: its uuid is refused from now on.
pub fn remove_worker(transaction: &mut Transaction<'_>, remove: &RemoveWorker) -> Result<Outcome, StateError> {
    let id = remove.worker_id;
    let before = transaction.before();
    let Some(record) = before.worker(id)? else { return Ok(unknown(id)) };
    if !remove.with_replicas && !before.replicas_at(id, None, 1)?.is_empty() {
        return Ok(Outcome::Refused(format!(
            "worker {id} has got blocks meanwhile, or is still to free some: try again"
        )));
    }
    transaction.delete(Family::Worker, &id.to_be_bytes());
    transaction.put_bytes(Family::Meta, &removed_key(&record.uuid), &id.to_be_bytes());
    next_epoch(transaction);
    Ok(Outcome::Done)
}

fn unknown(id: u64) -> Outcome {
    Outcome::Refused(format!("there is no worker {id}: see `cv node list`"))
}

/// Stores a job, under a new id when it has none, and forgets the oldest of too many ended ones.
pub fn put_job(transaction: &mut Transaction<'_>, mut job: Job) -> Result<Outcome, StateError> {
    if job.id == 0 {
        transaction.counters.job += 1;
        job.id = transaction.counters.job;
        let ended = transaction.before().jobs()?.into_iter().filter(|job| job.state() != JobState::Running);
        let ended: Vec<u64> = ended.map(|job| job.id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_JOBS_KEPT)) {
            transaction.delete(Family::Job, &id.to_be_bytes());
        }
    }
    transaction.put(Family::Job, &job.id.to_be_bytes(), &job);
    Ok(Outcome::Job(job.id))
}

fn next_epoch(transaction: &mut Transaction<'_>) {
    transaction.counters.workers_epoch += 1;
    transaction.changes.push(Change::Workers(transaction.counters.workers_epoch));
}

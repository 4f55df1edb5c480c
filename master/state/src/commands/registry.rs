//! The worker table, the list of jobs, and the ids of masters.

use bytes::Bytes;
use cavern_proto::master::{Job, JobState, Worker, WorkerState};
use cavern_proto::record::{DrainWorker, PutWorker, RemoveWorker, SetWorkerState, WorkerRecord};

use crate::change::Change;
use crate::error::Result;
use crate::outcome::Outcome;
use crate::schema;
use crate::transaction::Transaction;

/// Ended jobs that are kept.
const ENDED_JOBS_MAX: usize = 100;

/// Registers a worker, or renews what is known of it. The uuid decides who it is; a new uuid at a known address is a
/// worker that lost its disks, and the old one leaves the table. Neither is done for another owner than that of the
/// worker which is known; nor does an owner have any number of them. The epoch moves only when what others see has
/// changed.
pub fn put_worker(tx: &mut Transaction<'_>, put: &PutWorker) -> Result<Outcome> {
    let Some(mut worker) = put.worker.clone() else { return Outcome::refused("the worker is missing") };
    if let Some(id) = tx.before().get(schema::RemovedWorkers, &put.uuid[..])? {
        return Outcome::refused(format!(
            "the worker at {} was worker {id}, which was removed with `cv node remove`, so that nothing leads to what \
             its directories hold any more: to join as a new worker, move them away, and start it with empty ones",
            worker.data_address
        ));
    }
    (worker.state, worker.draining) = (WorkerState::Live as i32, false);
    let known = tx.before().workers()?;
    let (mut changed, mut adopted, mut id, mut owner) = (false, false, 0, put.owner.clone());
    let replaces = |uuid: &Bytes, old: &Worker| *uuid == put.uuid || old.data_address == worker.data_address;
    let mut replaced =
        known.iter().filter(|record| record.worker.as_ref().is_some_and(|old| replaces(&record.uuid, old)));
    if let Some(reason) = replaced.find_map(|record| refusal_of_owner(record, &put.owner)) {
        return Ok(Outcome::Denied(reason));
    }
    if let Some(reason) = refusal_of_one_more(&known, put, &worker.data_address) {
        return Outcome::refused(reason);
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
            tx.delete(schema::Workers, old.id);
            changed = true;
        }
    }
    if id == 0 {
        tx.counters.worker += 1;
        id = tx.counters.worker;
        worker.id = id;
        changed = true;
    }
    if changed || adopted {
        let record = WorkerRecord { uuid: put.uuid.clone(), worker: Some(worker), owner };
        tx.put(schema::Workers, id, &record);
    }
    if changed {
        next_epoch(tx);
    }
    Ok(Outcome::Worker { id, epoch: tx.counters.workers_epoch })
}

/// Why a worker that is not known does not join those of its owner, if these are as many as there may be.
fn refusal_of_one_more(known: &[WorkerRecord], put: &PutWorker, address: &str) -> Option<String> {
    let PutWorker { owner, owner_max, .. } = put;
    let is_known = known.iter().any(|record| record.uuid == put.uuid);
    if is_known || owner.is_empty() || *owner_max == 0 {
        return None;
    }
    let of_owner = known.iter().filter(|record| record.owner == *owner).filter_map(|record| record.worker.as_ref());
    let others: Vec<u64> = of_owner.filter(|old| old.data_address != address).map(|old| old.id).collect();
    let first = others.first().filter(|_| others.len() >= *owner_max as usize)?;
    Some(format!(
        "{} workers have registered with the certificate \"{owner}\", and master.workers_per_certificate allows \
         {owner_max}: give the one at {address} a certificate of another name (`cv cert issue worker NAME`), take out \
         those that are gone (see `cv node list`, and `cv node remove {first}`), or raise the setting",
        others.len()
    ))
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
pub fn reserve_master_id(tx: &mut Transaction<'_>, largest: u64) -> Outcome {
    let Some(id) = tx.counters.master.max(largest).checked_add(1) else {
        return Outcome::Refused("there are no ids of masters left".into());
    };
    tx.counters.master = id;
    Outcome::MasterId(id)
}

/// Marks a worker live or lost.
pub fn set_worker_state(tx: &mut Transaction<'_>, set: &SetWorkerState) -> Result<Outcome> {
    let Some(mut record) = tx.before().worker(set.worker_id)? else { return Ok(Outcome::Done) };
    if let Some(worker) = record.worker.as_mut()
        && worker.state != set.state
    {
        worker.state = set.state;
        tx.put(schema::Workers, set.worker_id, &record);
        next_epoch(tx);
    }
    Ok(Outcome::Done)
}

/// Has a worker emptied, or ends that. One worker at least goes on taking blocks.
pub fn drain_worker(tx: &mut Transaction<'_>, drain: &DrainWorker) -> Result<Outcome> {
    let id = drain.worker_id;
    let Some(mut record) = tx.before().worker(id)? else { return Ok(unknown(id)) };
    let Some(worker) = record.worker.as_mut().filter(|worker| worker.draining != drain.draining) else {
        return Ok(Outcome::Done);
    };
    let others = tx.before().workers()?.into_iter().filter_map(|record| record.worker);
    let mut takers = others.filter(|other| other.id != id && other.state() == WorkerState::Live && !other.draining);
    if drain.draining && takers.next().is_none() {
        return Outcome::refused(format!(
            "no other live worker could take the blocks of worker {id}: start another one first, see `cv node list`"
        ));
    }
    worker.draining = drain.draining;
    tx.put(schema::Workers, id, &record);
    next_epoch(tx);
    Ok(Outcome::Done)
}

/// Takes a worker out of the table for good: its uuid is refused from now on.
pub fn remove_worker(tx: &mut Transaction<'_>, remove: &RemoveWorker) -> Result<Outcome> {
    let id = remove.worker_id;
    let before = tx.before();
    let Some(record) = before.worker(id)? else { return Ok(unknown(id)) };
    if !remove.with_replicas && !before.replicas_at(id, None, 1)?.is_empty() {
        return Outcome::refused(format!("worker {id} has got blocks meanwhile, or is still to free some: try again"));
    }
    tx.delete(schema::Workers, id);
    tx.put(schema::RemovedWorkers, &record.uuid[..], &id);
    next_epoch(tx);
    Ok(Outcome::Done)
}

fn unknown(id: u64) -> Outcome {
    Outcome::Refused(format!("there is no worker {id}: see `cv node list`"))
}

/// Stores a job, under a new id when it has none, and forgets the oldest of too many ended ones.
pub fn put_job(tx: &mut Transaction<'_>, mut job: Job) -> Result<Outcome> {
    if job.id == 0 {
        tx.counters.job += 1;
        job.id = tx.counters.job;
        let ended = tx.before().jobs()?.into_iter().filter(|job| job.state() != JobState::Running);
        let ended: Vec<u64> = ended.map(|job| job.id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_JOBS_MAX)) {
            tx.delete(schema::Jobs, *id);
        }
    }
    tx.put(schema::Jobs, job.id, &job);
    Ok(Outcome::Job(job.id))
}

fn next_epoch(tx: &mut Transaction<'_>) {
    tx.counters.workers_epoch += 1;
    tx.notify(Change::Workers(tx.counters.workers_epoch));
}

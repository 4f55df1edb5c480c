//! The worker table and the list of jobs.

use cavern_proto::master::{Job, JobState, WorkerState};
use cavern_proto::record::{PutWorker, SetWorkerState, WorkerRecord};

use super::Outcome;
use super::database::Family;
use super::transaction::{Change, Transaction};
use crate::MasterError;

/// Ended jobs that are kept.
const ENDED_JOBS_KEPT: usize = 100;

/// Registers a worker, or renews what is known of it. The uuid decides who it is; a new uuid at a known address is a worker
/// that lost its disks, and the old one leaves the table. The epoch moves only when something has changed.
pub fn put_worker(transaction: &mut Transaction<'_>, put: &PutWorker) -> Result<Outcome, MasterError> {
    let Some(mut worker) = put.worker.clone() else { return Ok(Outcome::Refused("the worker is missing".into())) };
    worker.state = WorkerState::Live as i32;
    let known = transaction.before().workers()?;
    let (mut changed, mut id) = (false, 0);
    for record in known {
        let Some(old) = record.worker else { continue };
        if record.uuid == put.uuid {
            id = old.id;
            worker.id = id;
            changed |= old != worker;
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
    if changed {
        let record = WorkerRecord { uuid: put.uuid.clone(), worker: Some(worker) };
        transaction.put(Family::Worker, &id.to_be_bytes(), &record);
        next_epoch(transaction);
    }
    Ok(Outcome::Worker { id, epoch: transaction.counters.workers_epoch })
}

/// Marks a worker live or lost.
pub fn set_worker_state(transaction: &mut Transaction<'_>, set: &SetWorkerState) -> Result<Outcome, MasterError> {
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

/// Stores a job, under a new id when it has none, and forgets the oldest of too many ended ones.
pub fn put_job(transaction: &mut Transaction<'_>, mut job: Job) -> Result<Outcome, MasterError> {
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

//! The link to the master: registration, heartbeats, and what the replies ask for.
//!
//! A worker serves whether the master is there or not. When it comes back, or has forgotten this worker, the worker
//! registers again; when its mounts have changed, the table is fetched.

use std::time::Duration;

use cavern_conf::{backoff, host};
use cavern_net::NetError;
use cavern_net::master::Stubs;
use cavern_proto::master::{HeartbeatRequest, RegisterWorkerRequest, Worker, WorkerCounters};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::{info, warn};

use crate::error::WorkerError;
use crate::parts::WorkerParts;

/// Bounds of what the master may ask for as heartbeat interval.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(60));

/// Keeps the master informed.
#[derive(Debug)]
pub struct Heartbeat {
    pub parts: WorkerParts,
    /// What is published of this worker, and does not change: where it can be reached.
    pub worker: Worker,
}

impl Heartbeat {
    /// Runs until `stop`.
    ///
    /// # Errors
    /// What only a person can mend: the master belongs to another cluster than the data directories, or refuses this
    /// worker, as it does one that was removed; or a directory cannot be written to.
    pub async fn run(self, stop: CancellationToken) -> Result<(), WorkerError> {
        // While the master is away, one line says so, not one per attempt.
        let mut away = false;
        let mut interval = None;
        while !stop.is_cancelled() {
            let attempt = async {
                match interval {
                    None => self.register().await.map(|every| (Some(every), every)),
                    Some(every) => self.beat(every).await,
                }
            };
            let Some(result) = stop.run_until_cancelled(attempt).await else { break };
            let pause = match result {
                Ok((registered, pause)) => {
                    if std::mem::take(&mut away) {
                        info!("the master is back");
                    }
                    interval = registered;
                    pause
                }
                Err(WorkerError::Master(error)) => {
                    if !std::mem::replace(&mut away, true) {
                        match &error {
                            NetError::Master { code: Code::AlreadyExists, message } => {
                                warn!("this worker is not taken in, and asks again: {message}");
                            }
                            error => warn!("cannot reach the master; serving goes on without it: {error}"),
                        }
                    }
                    let pause = backoff::HEARTBEAT.pause(0);
                    interval.map_or(pause, |every| every.min(pause))
                }
                Err(fatal) => return Err(fatal),
            };
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Gives the heartbeat interval that the master asks for.
    ///
    /// # Errors
    /// [`WorkerError::Master`] when the master gives no answer; all others are for a person to mend.
    async fn register(&self) -> Result<Duration, WorkerError> {
        let (uuid, _, cluster_id) = self.parts.stores.table.identity();
        let request = RegisterWorkerRequest { uuid: uuid.to_vec().into(), cluster_id, worker: Some(self.worker_now()) };
        let ask = |mut stubs: Stubs| {
            let request = request.clone();
            async move { stubs.cluster.register_worker(request).await }
        };
        let reply = self.parts.master.try_call("RegisterWorker", ask).await;
        let reply = match reply {
            Ok(reply) => reply,
            // The leader's own word. A master that does not lead, or not any more, gives no answer at all.
            Err(NetError::Master { code: Code::FailedPrecondition, message: reason }) => {
                return Err(WorkerError::Refused { reason });
            }
            Err(error) => return Err(error.into()),
        };
        self.parts.master.note_group(reply.group_epoch, &reply.masters);
        let (table, id, cluster_id) = (self.parts.stores.table.clone(), reply.worker_id, reply.cluster_id.clone());
        tokio::task::spawn_blocking(move || table.join_cluster(id, &cluster_id)).await??;
        self.parts.membership.set(reply.worker_id, &reply.cluster_id);
        info!(
            worker_id = reply.worker_id,
            cluster = reply.cluster_id,
            epoch = reply.epoch,
            "registered with the master"
        );
        Ok(Duration::from_millis(u64::from(reply.heartbeat_ms)).clamp(INTERVALS.0, INTERVALS.1))
    }

    /// Gives the interval of what comes next, `None` for a registration, and the pause before it.
    async fn beat(&self, every: Duration) -> Result<(Option<Duration>, Duration), WorkerError> {
        let past = self.parts.membership.past();
        let Worker { used_bytes, capacity_bytes, blocks, disks, counters, data_address, .. } = self.worker_now();
        let request = HeartbeatRequest {
            worker_id: self.parts.membership.worker_id(),
            used_bytes,
            capacity_bytes,
            blocks,
            disks,
            counters,
            group_epoch: self.parts.master.group_epoch(),
            data_address,
            fetch_failures: self.parts.mounts.failures.report(),
            known: past.told,
            kept_blocks: past.kept.0,
            kept_bytes: past.kept.1,
            wall_ns: 0,
            hits: self.parts.mounts.hits.all(),
        };
        let ask = |mut stubs: Stubs| {
            let request = HeartbeatRequest { wall_ns: host::wall_ns(), ..request.clone() };
            async move { stubs.cluster.heartbeat(request).await }
        };
        let reply = self.parts.master.try_call("Heartbeat", ask).await?;
        self.parts.master.note_group(reply.group_epoch, &reply.masters);
        self.parts.membership.heard_of(reply.term);
        if reply.register {
            info!("the master does not know this worker: registering again");
            return Ok((None, Duration::ZERO));
        }
        if reply.is_rolled_back && !past.is_lost {
            warn!("the masters lack what they told before: blocks that no file has are kept until this worker ends");
        }
        self.parts.membership.told(reply.term, reply.applied, reply.is_rolled_back);
        self.parts.mounts.refresh_to(reply.mounts_epoch).await?;
        // The master waits to hear that others than this worker knew have been taken in.
        Ok((Some(every), if reply.masters.is_empty() { every } else { Duration::ZERO }))
    }

    /// What is published of this worker, with what has changed since it began.
    fn worker_now(&self) -> Worker {
        let (disks, metrics) = (self.parts.stores.table.usage(), &self.parts.metrics);
        let counters = WorkerCounters {
            hit_bytes: metrics.hit_bytes.get(),
            miss_bytes: metrics.miss_bytes.get(),
            ufs_bytes: metrics.ufs_bytes.get(),
            ufs_requests: metrics.ufs_requests.get(),
            evicted_blocks: metrics.evicted_blocks.get(),
            corrupt_chunks: metrics.corrupt_chunks.get(),
            hits: metrics.hits.get(),
            misses: metrics.misses.get(),
        };
        Worker {
            capacity_bytes: disks.iter().filter(|disk| disk.healthy).map(|disk| disk.capacity_bytes).sum(),
            used_bytes: disks.iter().map(|disk| disk.used_bytes).sum(),
            blocks: disks.iter().map(|disk| disk.blocks).sum(),
            disks,
            counters: Some(counters),
            ..self.worker.clone()
        }
    }
}

//! The `Cluster` service.

use std::time::Duration;

use cavern_proto::ClientAccess;
use cavern_proto::master::cluster_server::Cluster;
use cavern_proto::master::{
    AccessMode, ClaimList, ClusterStatus, DrainWorkerRequest, FsckProgress, FsckRequest, GetJobRequest, HeartbeatReply,
    HeartbeatRequest, HistoryPosition, IndexMountRequest, Job, JobKind, JobList, KeyStatus, ListClaimsRequest,
    ListJobsRequest, ListMountsRequest, ListUnavailableRequest, ListWorkersRequest, LoadFilesRequest, LostAction,
    Mount, MountReply, MountRequest, MountStatus, MountTable, PersistStatus, PersistStatusRequest, RegisterWorkerReply,
    RegisterWorkerRequest, RemoveWorkerReply, RemoveWorkerRequest, ResolveLostReply, ResolveLostRequest, StatusRequest,
    SubmitExportRequest, SubmitLoadRequest, UnavailableFiles, UnmountReply, UnmountRequest, UpdateMountRequest,
    VendKeysRequest, VendedKeys, WatchEvent, WatchRequest, WorkerBlocks, WorkerBlocksRequest, WorkerTable,
};
use cavern_security::{Identity, Role};
use cavern_state::Tables;
use cavern_ufs::Contents;
use cavern_work::mounts::changes::{DetachPolicy, MountPolicy};
use cavern_work::mounts::{TakeOver, redact, told};
use cavern_work::sessions::{self, Before};
use cavern_work::{Request, WorkError};
use futures::StreamExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Streaming};

use super::call::{Answer, Answers, OrStatus as _, asker, check_count, shown};
use super::guard::is_about;
use super::session::SessionService;
use crate::error::MasterError;
use crate::services::Services;

/// Events handed to the transport before the client takes them; what waits longer stays in the session's queue.
const EVENTS_AHEAD: usize = 64;

/// Files that one answer lists at most.
const LISTED_MAX: u32 = 1000;

/// Paths of one list that is loaded.
const PATHS_MAX: usize = 1000;

/// Failing workers that the status of a mount names at most.
const FETCH_FAILURES_SHOWN: usize = 16;

/// How long a new stream may take to say who it is.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// Bytes of the name of a client's place; a longer one is none.
const PLACE_MAX: usize = 8192;

#[tonic::async_trait]
impl Cluster for Services {
    type WatchStream = Answers<WatchEvent>;

    async fn watch(&self, request: tonic::Request<Streaming<WatchRequest>>) -> Answer<Self::WatchStream> {
        let owner = asker(&request).cloned();
        let certificate = shown(&request).cloned();
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE, incoming.next()).await.ok().flatten();
        let unnamed = || WorkError::Invalid("the first message of a session names the client".into());
        let WatchRequest {
            client,
            session: earlier,
            place,
            knows_inodes,
            applied_seq,
            has_changed,
            mounts_settled,
            ..
        } = first.ok_or_else(unnamed).or_status()??;
        let recorded = self.lookups.reader.read(move |tables| Ok(tables.session(earlier)?)).await.or_status()?;
        let (owner, certificate) = (owner.as_ref(), certificate.as_ref());
        let before = Before {
            session: earlier,
            is_recorded: recorded.as_ref().is_some_and(|record| !record.is_ending),
            recorded_owner: recorded.as_ref().map_or("", |record| record.owner.as_str()),
            knows_inodes,
            applied_seq,
            has_changed,
            owner,
            certificate,
        };
        let session = self.watch.open(&client, before).or_status()?;
        self.rollbacks.heard_client((client.as_str(), owner), applied_seq, self.consensus.progress().0);
        let id = session.id();
        if mounts_settled != 0 {
            self.watch.mounts_settled(id, mounts_settled);
        }
        if !place.is_empty() && place.len() <= PLACE_MAX {
            // What the one before had locked is free before the new one asks for it.
            if let Some(over) = self.watch.supersede_client(&place, id).await {
                sessions::end(&self.proposer, &self.lookups.reader, over).await.or_status()?;
                self.watch.forget(over);
            }
        }
        let (answers, stream) = mpsc::channel(EVENTS_AHEAD);
        self.tasks.spawn(SessionService::new(self.clone(), session.stream_id()).serve(incoming, session, answers));
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn register_worker(&self, request: tonic::Request<RegisterWorkerRequest>) -> Answer<RegisterWorkerReply> {
        is_about(&request, |asked| {
            asked.worker.as_ref().map_or_else(String::new, |worker| worker.data_address.clone())
        });
        let asker = asker(&request).cloned();
        let (worker_id, epoch) = self.workers.register(request.into_inner(), asker.as_ref()).await.or_status()?;
        let (cluster_id, heartbeat_ms) = (self.cluster_id.to_string(), self.heartbeat_ms);
        let (group_epoch, masters) = self.consensus.masters_unless_known(0);
        let reply = RegisterWorkerReply { worker_id, cluster_id, epoch, heartbeat_ms, group_epoch, masters };
        Ok(Response::new(reply))
    }

    async fn heartbeat(&self, request: tonic::Request<HeartbeatRequest>) -> Answer<HeartbeatReply> {
        let asker = asker(&request).cloned();
        let request = request.into_inner();
        let (group_epoch, masters) = self.consensus.masters_unless_known(request.group_epoch);
        let is_known = self.workers.heartbeat(request.clone(), asker.as_ref()).await.or_status()?;
        let applied_index = self.consensus.progress().0;
        let counters = self.lookups.reader.read(|tables| Ok(tables.counters()?)).await.or_status()?;
        let is_rolled_back = is_known && self.rollbacks.heard_worker(&request, &counters, applied_index);
        Ok(Response::new(HeartbeatReply {
            workers_epoch: counters.workers_epoch,
            mounts_epoch: counters.mounts_epoch,
            register: !is_known,
            group_epoch,
            term: self.term,
            masters,
            applied: Some(HistoryPosition { history: counters.history, applied_index }),
            is_rolled_back,
        }))
    }

    async fn list_claims(&self, request: tonic::Request<ListClaimsRequest>) -> Answer<ClaimList> {
        let asker = asker(&request).cloned();
        Ok(Response::new(self.repair.claims(request.into_inner(), asker).await.or_status()?))
    }

    async fn list_workers(&self, request: tonic::Request<ListWorkersRequest>) -> Answer<WorkerTable> {
        let mut table = self.workers.table().or_status()?;
        if asker(&request).and_then(Identity::client_name).is_some() {
            // Clients reach workers by their addresses; where their files are is for those who look at the cluster.
            for disk in table.workers.iter_mut().flat_map(|worker| &mut worker.disks) {
                disk.path.clear();
                disk.error.clear();
            }
        }
        Ok(Response::new(table))
    }

    async fn mount(&self, request: tonic::Request<MountRequest>) -> Answer<MountReply> {
        is_about(&request, |asked| {
            asked.mount.as_ref().map_or_else(String::new, |mount| format!("{} at {}", mount.uri, mount.path))
        });
        let is_secured = asker(&request).is_some();
        let MountRequest { mount, check_only, request_id, take_over } = request.into_inner();
        let mount = mount.unwrap_or_default();
        check_named(is_secured, mount.is_restricted())?;
        let take_over = if take_over { TakeOver::Always } else { TakeOver::Never };
        let policy = if check_only { MountPolicy::Check(take_over) } else { MountPolicy::Record(take_over) };
        let request = Request::new(request_id).or_status()?;
        let (mount, contents) = self.mount_changes.mount_once(&request, mount, policy).await.or_status()?;
        let is_empty = contents == Some(Contents::Nothing);
        let keys = self.key_status(&mount);
        Ok(Response::new(MountReply { mount: Some(mount.without_secrets()), is_empty, keys }))
    }

    async fn unmount(&self, request: tonic::Request<UnmountRequest>) -> Answer<UnmountReply> {
        is_about(&request, |asked| asked.path.clone());
        let UnmountRequest { path, discard, request_id } = request.into_inner();
        let unwritten = if discard { DetachPolicy::Discard } else { DetachPolicy::Keep };
        let request = Request::new(request_id).or_status()?;
        let mount = self.mount_changes.unmount_once(&request, &path, unwritten).await.or_status()?;
        Ok(Response::new(UnmountReply { mount: Some(mount.without_secrets()) }))
    }

    async fn update_mount(&self, request: tonic::Request<UpdateMountRequest>) -> Answer<MountReply> {
        is_about(&request, |asked| asked.path.clone());
        let is_secured = asker(&request).is_some();
        let request = request.into_inner();
        check_named(is_secured, request.clients.as_ref().is_some_and(|clients| !clients.rules.is_empty()))?;
        let mount = self.mount_changes.update(request).await.or_status()?;
        let keys = self.key_status(&mount);
        Ok(Response::new(MountReply { mount: Some(mount.without_secrets()), keys, ..MountReply::default() }))
    }

    async fn index_mount(&self, request: tonic::Request<IndexMountRequest>) -> Answer<MountReply> {
        is_about(&request, |asked| asked.path.clone());
        let mount = self.mount_changes.index(&request.get_ref().path).await.or_status()?;
        Ok(Response::new(MountReply { mount: Some(mount.without_secrets()), ..MountReply::default() }))
    }

    async fn list_mounts(&self, request: tonic::Request<ListMountsRequest>) -> Answer<MountTable> {
        // Where nobody shows who he is, whoever runs the cluster still sees what is mounted.
        let client = asker(&request).and_then(|asker| self.client(Some(asker)));
        let mut table = self.mount_table(client.as_deref())?;
        self.add_fetch_failures(&mut table)?;
        let mounts = table.mounts.into_iter().map(Mount::without_secrets).collect();
        Ok(Response::new(MountTable { mounts, ..table }))
    }

    async fn get_credentials(&self, request: tonic::Request<ListMountsRequest>) -> Answer<MountTable> {
        let table = self.mount_table(self.client(asker(&request)).as_deref())?;
        Ok(Response::new(MountTable { mounts: table.mounts.into_iter().map(told).collect(), ..table }))
    }

    async fn vend_keys(&self, request: tonic::Request<VendKeysRequest>) -> Answer<VendedKeys> {
        let asker = asker(&request).cloned();
        let VendKeysRequest { mount_id, to_write } = *request.get_ref();
        let open = self.mounts.get(mount_id).or_status()?;
        let what = if to_write { "write" } else { "read" };
        is_about(&request, |_| format!("keys to {what} {}", open.mount.path));
        Ok(Response::new(open.vend(asker.as_ref(), to_write).await.or_status()?))
    }

    async fn submit_load(&self, request: tonic::Request<SubmitLoadRequest>) -> Answer<Job> {
        is_about(&request, |asked| asked.path.clone());
        let SubmitLoadRequest { path, request_id, metadata_only } = request.into_inner();
        let kind = if metadata_only { JobKind::LoadMetadata } else { JobKind::Load };
        let request = Request::new(request_id).or_status()?;
        Ok(Response::new(self.jobs.submit_once(&request, kind, &path, 0).await.or_status()?))
    }

    type LoadFilesStream = Answers<Job>;

    async fn load_files(&self, request: tonic::Request<LoadFilesRequest>) -> Answer<Self::LoadFilesStream> {
        is_about(&request, |asked| {
            let first = asked.paths.first().map_or("nothing", String::as_str);
            format!("{first} and {} others", asked.paths.len().saturating_sub(1))
        });
        let request = request.into_inner();
        check_count(request.paths.len(), "paths", PATHS_MAX)?;
        let jobs = self.jobs.clone();
        Ok(Response::new(self.answer_in_parts(move |answers| async move {
            jobs.load_files(request.kind(), request.paths, &answers).await.map(Some)
        })))
    }

    async fn submit_export(&self, request: tonic::Request<SubmitExportRequest>) -> Answer<Job> {
        is_about(&request, |asked| asked.path.clone());
        let SubmitExportRequest { path, request_id } = request.into_inner();
        let request = Request::new(request_id).or_status()?;
        Ok(Response::new(self.jobs.submit_once(&request, JobKind::Export, &path, 0).await.or_status()?))
    }

    async fn get_job(&self, request: tonic::Request<GetJobRequest>) -> Answer<Job> {
        Ok(Response::new(self.jobs.get(request.into_inner().id).await.or_status()?))
    }

    async fn list_jobs(&self, _: tonic::Request<ListJobsRequest>) -> Answer<JobList> {
        Ok(Response::new(JobList { jobs: self.jobs.list().await.or_status()? }))
    }

    async fn cancel_job(&self, request: tonic::Request<GetJobRequest>) -> Answer<Job> {
        is_about(&request, |asked| format!("job {}", asked.id));
        Ok(Response::new(self.jobs.cancel(request.into_inner().id).await.or_status()?))
    }

    async fn retry_job(&self, request: tonic::Request<GetJobRequest>) -> Answer<Job> {
        is_about(&request, |asked| format!("job {}", asked.id));
        let GetJobRequest { id, request_id } = request.into_inner();
        let request = Request::new(request_id).or_status()?;
        Ok(Response::new(self.jobs.retry_once(&request, id).await.or_status()?))
    }

    async fn get_persist_status(&self, request: tonic::Request<PersistStatusRequest>) -> Answer<PersistStatus> {
        let lookups = self.asked_by(&request, 0)?;
        let only_looks = asker(&request).is_some_and(|asker| asker.role == Role::Viewer);
        let PersistStatusRequest { path, up_to_change, settle } = request.into_inner();
        let mount = lookups.check_path_access(&path).or_status()?;
        // Nobody lets go of anything for whoever may not change it, nor is anything brought to the bucket sooner.
        let is_heeded = !only_looks && lookups.check_refresh(mount.as_ref()).is_ok();
        if settle && is_heeded {
            let scope = self.persistence.scope(&path).await.or_status()?;
            lookups.settle_mount_of(scope.inode).await.or_status()?;
        }
        let status = match up_to_change {
            0 => self.persistence.status(&path, u64::MAX).await,
            up_to if is_heeded => self.persistence.awaited_status(&path, up_to).await,
            up_to => self.persistence.status(&path, up_to).await,
        };
        Ok(Response::new(status.or_status()?))
    }

    async fn resolve_lost(&self, request: tonic::Request<ResolveLostRequest>) -> Answer<ResolveLostReply> {
        is_about(&request, |asked| asked.path.clone());
        self.asked_by(&request, 0)?.check_path_access(&request.get_ref().path).or_status()?;
        let (action, path) = (request.get_ref().action(), request.into_inner().path);
        if action == LostAction::Drop {
            // What clients have answered for these files is made first.
            let scope = self.persistence.scope(&path).await.or_status()?;
            self.lookups.recall_mount_of(scope.inode).await.or_status()?;
        }
        Ok(Response::new(self.persistence.resolve_lost(&path, action).await.or_status()?))
    }

    async fn drain_worker(&self, request: tonic::Request<DrainWorkerRequest>) -> Answer<WorkerBlocks> {
        is_about(&request, |asked| format!("worker {}", asked.worker_id));
        let DrainWorkerRequest { worker_id, undo } = request.into_inner();
        Ok(Response::new(self.repair.drain(worker_id, !undo).await.or_status()?))
    }

    async fn get_worker_blocks(&self, request: tonic::Request<WorkerBlocksRequest>) -> Answer<WorkerBlocks> {
        Ok(Response::new(self.repair.blocks_of(request.into_inner().worker_id).await.or_status()?))
    }

    async fn remove_worker(&self, request: tonic::Request<RemoveWorkerRequest>) -> Answer<RemoveWorkerReply> {
        is_about(&request, |asked| format!("worker {}", asked.worker_id));
        let RemoveWorkerRequest { worker_id, force, request_id } = request.into_inner();
        let request = Request::new(request_id).or_status()?;
        Ok(Response::new(self.repair.remove_once(&request, worker_id, force).await.or_status()?))
    }

    async fn list_unavailable(&self, request: tonic::Request<ListUnavailableRequest>) -> Answer<UnavailableFiles> {
        let ListUnavailableRequest { limit, inode } = request.into_inner();
        if inode != 0 {
            let extents = self.repair.unavailable_blocks(inode).await.or_status()?;
            let (files, blocks) = (u64::from(!extents.is_empty()), extents.len() as u64);
            return Ok(Response::new(UnavailableFiles { files, blocks, extents, ..UnavailableFiles::default() }));
        }
        let limit = limit.min(LISTED_MAX) as usize;
        let unavailable = self.repair.unavailable(limit).await.or_status()?;
        let (lost_files, lost) = self.persistence.lost(limit).await.or_status()?;
        Ok(Response::new(UnavailableFiles { lost_files, lost, ..unavailable }))
    }

    type FsckStream = Answers<FsckProgress>;

    async fn fsck(&self, request: tonic::Request<FsckRequest>) -> Answer<Self::FsckStream> {
        is_about(&request, |asked| asked.path.clone());
        let (fsck, request) = (self.fsck.clone(), request.into_inner());
        Ok(Response::new(self.answer_in_parts(move |answers| async move {
            let progress = fsck.run(request, &answers).await?;
            Ok(Some(FsckProgress { done: true, ..progress }))
        })))
    }

    async fn status(&self, request: tonic::Request<StatusRequest>) -> Answer<ClusterStatus> {
        let StatusRequest { activity } = request.into_inner();
        let (epoch, mounts) = self.mounts.table().or_status()?;
        let shown = |mount: Mount| Mount { options: redact(&mount.options), ..mount };
        let mut mounts =
            MountTable { epoch, mounts: mounts.into_iter().map(shown).collect(), status: self.mounts.status() };
        self.add_fetch_failures(&mut mounts)?;
        let (applied_index, leader, _) = self.consensus.progress();
        let inodes = self.lookups.reader.read(|tables: Tables<'_>| Ok(tables.counters()?.inodes)).await.or_status()?;
        Ok(Response::new(ClusterStatus {
            cluster_id: self.cluster_id.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leader,
            applied_index,
            inodes,
            sessions: self.watch.sessions(),
            workers: Some(self.workers.table().or_status()?),
            mounts: Some(mounts),
            jobs: self.jobs.list().await.or_status()?,
            rollbacks: self.rollbacks.all(),
            tasks: self.background.statuses(),
            clients: if activity { self.watch.clients() } else { Vec::new() },
            hits: if activity { self.workers.hits().or_status()? } else { Vec::new() },
            backlogs: if activity { self.persistence.backlogs() } else { Vec::new() },
        }))
    }
}

impl Services {
    /// How the keys of a mount that is recorded fare, where they are vended.
    fn key_status(&self, mount: &Mount) -> Option<KeyStatus> {
        // One that was only checked has no number.
        self.mounts.get(mount.id).ok()?.key_status()
    }

    /// The mounts, with credentials, as they are there for a client; all of them for `None`.
    fn mount_table(&self, client: Option<&str>) -> Result<MountTable, MasterError> {
        let (epoch, mut mounts) = self.mounts.table()?;
        let mut status = self.mounts.status();
        if let Some(client) = client {
            mounts = mounts.into_iter().filter_map(|mount| as_seen_by(client, mount)).collect();
            status.retain(|status| mounts.iter().any(|mount| mount.id == status.mount_id));
        }
        Ok(MountTable { epoch, mounts, status })
    }

    /// Adds to the status of each mount of a table what workers cannot fetch from it.
    fn add_fetch_failures(&self, table: &mut MountTable) -> Result<(), MasterError> {
        let MountTable { mounts, status, .. } = table;
        for failure in self.workers.fetch_failures()? {
            let mount_id = failure.mount_id;
            if !mounts.iter().any(|mount| mount.id == mount_id) {
                continue;
            }
            let index = status.iter().position(|status| status.mount_id == mount_id).unwrap_or_else(|| {
                status.push(MountStatus { mount_id, ..MountStatus::default() });
                status.len() - 1
            });
            let status = &mut status[index];
            status.failing_workers += 1;
            if status.fetch_failures.len() < FETCH_FAILURES_SHOWN {
                status.fetch_failures.push(failure);
            }
        }
        Ok(())
    }
}

/// A mount as it is there for a client, if it is: one that is only read, or of which users are checked, gets no
/// credentials, with which it could do more in the bucket. Keys that are vended are asked for by themselves.
fn as_seen_by(client: &str, mount: Mount) -> Option<Mount> {
    let access = mount.access_of(client);
    let users = mount.limits_of(client).cloned();
    let mount = if users.is_some() { mount.without_secrets() } else { mount };
    let mount = Mount { clients: Vec::new(), users, ..mount };
    match access {
        ClientAccess::None => None,
        ClientAccess::ReadOnly => Some(Mount { access_mode: AccessMode::ReadOnly as i32, ..mount.without_secrets() }),
        ClientAccess::Full => Some(mount),
    }
}

/// Refuses rules about clients where these have no names.
fn check_named(is_secured: bool, has_rules: bool) -> Result<(), MasterError> {
    if is_secured || !has_rules {
        return Ok(());
    }
    let reason = "clients have names only where connections are secured: set [security] first (docs/security.md)";
    Err(WorkError::Refused(reason.into()).into())
}

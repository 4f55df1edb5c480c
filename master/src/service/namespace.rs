//! The `Namespace` service.

use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::{
    CheckHoldsReply, CheckHoldsRequest, Entry, FreeContentReply, FreeContentRequest, GetInodeRequest, GetLayoutRequest,
    GetLockReply, GetLockRequest, GetQuotasRequest, GetTtlsRequest, GetXattrsRequest, Kind, Layout, LookupRequest,
    MakeListedReply, MakeListedRequest, MutateReply, MutateRequest, Quotas, ReadDirPage, ReadDirRequest,
    RefreshProgress, RefreshRequest, ResolveRequest, RevalidateRequest, TouchReply, TouchRequest, Ttls, UsageProgress,
    UsageRequest, Xattr, Xattrs, touch_reply,
};
use cavern_proto::record::FreeOwnContent;
use cavern_proto::record::command::Command;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::changes::CALLS_AHEAD;
use super::{Answers, Services};
use crate::MasterError;
use crate::listing::{ListPolicy, Walk, Why};
use crate::persist::RefreshMode;
use crate::state::namespace::ListingCounts;
use crate::state::records::attributes;
use crate::state::{Directory, Outcome, blocking_lock};

/// Entries of one page of a directory.
const PAGE_ENTRIES: usize = 1000;
/// Pages that wait for a slow reader.
const PAGES_AHEAD: usize = 2;
/// While a directory's first listing runs, an empty page is sent so often: the asker knows that it goes on.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Directories of one `Touch`.
const TOUCH_MAX: usize = 10_000;
/// Files of one `FreeContent`.
const FREES_MAX: usize = 1000;
/// Inodes of one `CheckHolds`.
const HOLDS_MAX: usize = 10_000;
/// How often progress is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

#[tonic::async_trait]
impl Namespace for Services {
    async fn resolve(&self, request: Request<ResolveRequest>) -> Result<Response<Entry>, Status> {
        Ok(Response::new(self.lookups.resolve(&request.into_inner().path).await?))
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<Entry>, Status> {
        let LookupRequest { parent, name } = request.into_inner();
        Ok(Response::new(self.lookups.lookup(parent, &name).await?))
    }

    async fn get_inode(&self, request: Request<GetInodeRequest>) -> Result<Response<Entry>, Status> {
        Ok(Response::new(self.lookups.get_inode(request.into_inner().inode).await?))
    }

    type ReadDirStream = Answers<ReadDirPage>;

    async fn read_dir(&self, request: Request<ReadDirRequest>) -> Result<Response<Self::ReadDirStream>, Status> {
        let request = request.into_inner();
        let (answers, stream) = mpsc::channel(PAGES_AHEAD);
        let services = self.clone();
        self.watch.mark_seen(request.inode);
        // Before the stream begins: an inode that is gone is the answer to the call itself.
        let inode = request.inode;
        let directory = self.lookups.listings.read(move |tables| tables.directory(inode)).await?;
        let directory = directory.ok_or_else(|| MasterError::NotFound(format!("inode {inode} is no longer there")))?;
        self.tasks.spawn(async move {
            let result = tokio::select! {
                result = services.stream_directory(request, directory, &answers) => result,
                () = services.stop.cancelled() => Err(MasterError::Consensus("the master is stopping".into())),
                () = answers.closed() => return,
            };
            if let Err(error) = result {
                // Who is gone does not miss the reason.
                let _ = answers.send(Err(error.to_status())).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn touch(&self, request: Request<TouchRequest>) -> Result<Response<TouchReply>, Status> {
        let TouchRequest { directories, wait, session } = request.into_inner();
        if directories.len() > TOUCH_MAX {
            let reason = format!("{} directories in one call: send at most {TOUCH_MAX}", directories.len());
            return Err(MasterError::Invalid(reason).into());
        }
        for directory in &directories {
            self.watch.mark_seen(*directory);
        }
        let touched = self.lookups.touch(&directories, wait).await?;
        let directories = touched.into_iter().map(|touched| touch_reply::Directory {
            inode: touched.inode,
            listing_age_ms: touched.age_ms,
            gone: touched.gone,
        });
        // After the ages were read: every change that made them is numbered by now.
        Ok(Response::new(TouchReply { directories: directories.collect(), event_seq: self.watch.told(session) }))
    }

    async fn revalidate(&self, request: Request<RevalidateRequest>) -> Result<Response<Entry>, Status> {
        let RevalidateRequest { parent, name, written } = request.into_inner();
        let why = if written { Why::Written } else { Why::Unknown };
        Ok(Response::new(self.lookups.revalidate(parent, &name, why).await?))
    }

    type RefreshStream = Answers<RefreshProgress>;

    async fn refresh(&self, request: Request<RefreshRequest>) -> Result<Response<Self::RefreshStream>, Status> {
        let RefreshRequest { path, recursive, dry_run } = request.into_inner();
        let (answers, stream) = mpsc::channel(PAGES_AHEAD);
        let services = self.clone();
        self.tasks.spawn(async move {
            let result = tokio::select! {
                result = services.run_refresh(&path, (recursive, dry_run), &answers) => result,
                () = services.stop.cancelled() => Err(MasterError::Consensus("the master is stopping".into())),
                () = answers.closed() => return,
            };
            let last = result.map(|progress| RefreshProgress { done: true, ..progress });
            let _ = answers.send(last.map_err(Status::from)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    type MutateStream = Answers<MutateReply>;

    async fn mutate(&self, request: Request<Streaming<MutateRequest>>) -> Result<Response<Self::MutateStream>, Status> {
        let (answers, stream) = mpsc::channel(CALLS_AHEAD);
        let services = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = services.serve_changes(request.into_inner(), &answers) => {}
                () = services.stop.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_xattrs(&self, request: Request<GetXattrsRequest>) -> Result<Response<Xattrs>, Status> {
        let GetXattrsRequest { inode } = request.into_inner();
        let xattrs = self.lookups.listings.read(move |tables| {
            let Some(record) = tables.inode(inode)? else { return Ok(None) };
            Ok(Some(if record.has_xattrs { tables.xattrs(inode)? } else { Vec::new() }))
        });
        let xattrs = xattrs.await?.ok_or_else(|| MasterError::NotFound(format!("inode {inode} is no longer there")))?;
        let xattrs = xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect();
        Ok(Response::new(Xattrs { xattrs }))
    }

    async fn get_layout(&self, request: Request<GetLayoutRequest>) -> Result<Response<Layout>, Status> {
        let GetLayoutRequest { inode } = request.into_inner();
        let layout = self.lookups.listings.read(move |tables| {
            let Some(record) = tables.inode(inode)? else { return Ok(None) };
            let block_size = tables.mount(record.mount_id)?.map_or(0, |mount| mount.block_size);
            let (attr, extents) = (Some(attributes(inode, &record)), tables.extents(inode, 0)?);
            Ok(Some(Layout { attr, block_size, extents, origin: record.origin }))
        });
        let layout = layout.await?;
        Ok(Response::new(layout.ok_or_else(|| MasterError::NotFound(format!("inode {inode} is no longer there")))?))
    }

    async fn free_content(&self, request: Request<FreeContentRequest>) -> Result<Response<FreeContentReply>, Status> {
        let FreeContentRequest { inodes, session } = request.into_inner();
        if inodes.len() > FREES_MAX {
            let reason = format!("{} files in one call: send at most {FREES_MAX}", inodes.len());
            return Err(MasterError::Invalid(reason).into());
        }
        let free = |inode| match session {
            0 => Command::FreeContent(inode),
            session => Command::FreeOwnContent(FreeOwnContent { inode, session }),
        };
        let outcomes = self.proposer.propose_all(inodes.into_iter().map(free)).await?;
        let results = outcomes.into_iter().map(|outcome| match outcome {
            Outcome::Freed(freed) => Ok(freed),
            other => Err(MasterError::Refused(format!("dropping blocks was answered by {other:?}"))),
        });
        Ok(Response::new(FreeContentReply { results: results.collect::<Result<_, _>>()? }))
    }

    async fn get_lock(&self, request: Request<GetLockRequest>) -> Result<Response<GetLockReply>, Status> {
        let request = request.into_inner();
        let lock = self.lookups.listings.read(move |tables| {
            blocking_lock(tables, request.inode, request.kind(), &request.lock.unwrap_or_default())
        });
        Ok(Response::new(GetLockReply { lock: lock.await? }))
    }

    async fn check_holds(&self, request: Request<CheckHoldsRequest>) -> Result<Response<CheckHoldsReply>, Status> {
        let request = request.into_inner();
        let inodes = request.open.len() + request.held.len();
        if inodes > HOLDS_MAX {
            let reason = format!("{inodes} inodes in one call: send at most {HOLDS_MAX}");
            return Err(MasterError::Invalid(reason).into());
        }
        // What is not read here yet will be told to the session, whose stream is open.
        Ok(Response::new(self.lookups.listings.read(move |tables| tables.check_holds(&request)).await?))
    }

    async fn make_listed(&self, request: Request<MakeListedRequest>) -> Result<Response<MakeListedReply>, Status> {
        let MakeListedRequest { inode, recursive } = request.into_inner();
        Ok(Response::new(self.lookups.make_listed(inode, recursive).await?))
    }

    async fn get_ttls(&self, request: Request<GetTtlsRequest>) -> Result<Response<Ttls>, Status> {
        let GetTtlsRequest { inode } = request.into_inner();
        Ok(Response::new(self.lookups.listings.read(move |tables| tables.ttls(inode)).await?))
    }

    async fn get_quotas(&self, request: Request<GetQuotasRequest>) -> Result<Response<Quotas>, Status> {
        let GetQuotasRequest { inode } = request.into_inner();
        Ok(Response::new(self.lookups.listings.read(move |tables| tables.quotas(inode)).await?))
    }

    type UsageStream = Answers<UsageProgress>;

    async fn usage(&self, request: Request<UsageRequest>) -> Result<Response<Self::UsageStream>, Status> {
        let UsageRequest { path } = request.into_inner();
        let (answers, stream) = mpsc::channel(PAGES_AHEAD);
        let services = self.clone();
        self.tasks.spawn(async move {
            let result = tokio::select! {
                result = services.run_usage(&path, &answers) => result,
                () = services.stop.cancelled() => Err(MasterError::Consensus("the master is stopping".into())),
                () = answers.closed() => return,
            };
            let last = result.map(|progress| UsageProgress { done: true, ..progress });
            let _ = answers.send(last.map_err(Status::from)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

impl Services {
    async fn stream_directory(
        &self,
        request: ReadDirRequest,
        directory: Directory,
        answers: &mpsc::Sender<Result<ReadDirPage, Status>>,
    ) -> Result<(), MasterError> {
        let inode = request.inode;
        let directory = self.make_listed(directory, answers).await?;
        let mut first = Some(self.lookups.directory_entry(&directory)?);
        let mut left =
            if request.limit == 0 { usize::MAX } else { usize::try_from(request.limit).unwrap_or(usize::MAX) };
        let mut after = (!request.after_name.is_empty()).then_some(request.after_name);
        loop {
            // Before the read: what changes after it has a greater number.
            let event_seq = self.watch.told(request.session);
            let (from, count) = (after.clone(), left.min(PAGE_ENTRIES));
            let (page, end) =
                self.lookups.listings.read(move |tables| tables.page(inode, from.as_deref(), count)).await?;
            after = page.last().map(|(name, _, _)| name.clone()).or(after);
            left -= page.len();
            let entries = page.into_iter();
            let entries =
                entries.map(|(name, inode, record)| self.lookups.page_entry(&directory, name, inode, &record));
            let page = ReadDirPage { directory: first.take(), entries: entries.collect(), end, event_seq };
            let is_last = end || left == 0;
            if answers.send(Ok(page)).await.is_err() || is_last {
                return Ok(());
            }
        }
    }

    /// Waits for the first listing of a directory that has none. An old listing is served as it is: the client knows
    /// its age.
    async fn make_listed(
        &self,
        directory: Directory,
        answers: &mpsc::Sender<Result<ReadDirPage, Status>>,
    ) -> Result<Directory, MasterError> {
        if directory.mount_id == 0 || directory.record.listed_ns != 0 {
            return Ok(directory);
        }
        let inode = directory.inode;
        let flight = self.lookups.listings.start(inode, None)?.flight();
        while tokio::time::timeout(KEEP_ALIVE, flight.ended()).await.is_err() {
            let waiting = ReadDirPage {
                directory: Some(self.lookups.directory_entry(&directory)?),
                event_seq: self.watch.seq(),
                ..ReadDirPage::default()
            };
            if answers.send(Ok(waiting)).await.is_err() {
                break;
            }
        }
        flight.ended().await?;
        let listed = self.lookups.listings.read(move |tables| tables.directory(inode)).await?;
        listed.ok_or_else(|| MasterError::NotFound(format!("inode {inode} is no longer there")))
    }

    async fn run_refresh(
        &self,
        path: &str,
        (recursive, dry_run): (bool, bool),
        answers: &mpsc::Sender<Result<RefreshProgress, Status>>,
    ) -> Result<RefreshProgress, MasterError> {
        let mut progress = RefreshProgress::default();
        if let Some((directory, name)) = self.fs_mode_target(path).await? {
            let run = if dry_run { RefreshMode::DryRun } else { RefreshMode::Apply };
            progress = self.persistence.refresh(directory, name.clone(), recursive, run, answers).await?;
            if name.is_some() && progress.added + progress.pending + progress.conflicts == 0 {
                // Unless it was there before, it is nowhere.
                self.lookups.resolve(path).await?;
            }
            self.watch.wait_acknowledged(self.watch.seq()).await;
            return Ok(progress);
        }
        if dry_run {
            let reason =
                format!("{path} is in no fs-mode mount: what its bucket has is shown by a refresh, or after a while");
            return Err(MasterError::Invalid(reason));
        }
        let (directory, name) = self.refresh_target(path).await?;
        match name {
            Some(name) => {
                self.lookups.listings.check_name(directory, &name, Why::Unknown).await?;
                progress.entries = 1;
            }
            None => {
                let mut walk = Walk::new(self.lookups.listings.clone(), directory, ListPolicy::Refreshed, recursive);
                let mut told = tokio::time::Instant::now();
                let mut failure = None;
                while let Some(visited) = walk.next().await {
                    match visited {
                        Ok((inode, counts)) => self.count_refreshed(inode, counts, &mut progress).await?,
                        Err((_, error)) => failure = failure.or(Some(error)),
                    }
                    if told.elapsed() >= PROGRESS_INTERVAL {
                        told = tokio::time::Instant::now();
                        let _ = answers.send(Ok(progress.clone())).await;
                    }
                }
                if let Some(error) = failure {
                    return Err(error);
                }
            }
        }
        self.watch.wait_acknowledged(self.watch.seq()).await;
        Ok(progress)
    }

    /// The directory of an fs-mode mount that a path leads to, or the directory above it and the name in it.
    async fn fs_mode_target(&self, path: &str) -> Result<Option<(u64, Option<Bytes>)>, MasterError> {
        let (entry, name) = match self.lookups.resolve(path).await {
            Ok(entry) if entry.attr.unwrap_or_default().kind() == Kind::Directory => (entry, None),
            Ok(entry) => (self.lookups.get_inode(entry.parent).await?, Some(entry.name)),
            Err(error) if error.is_not_found() => {
                let (above, name) = path.trim_end_matches('/').rsplit_once('/').ok_or(error)?;
                let above = self.lookups.resolve(if above.is_empty() { "/" } else { above }).await?;
                (above, Some(Bytes::copy_from_slice(name.as_bytes())))
            }
            Err(error) => return Err(error),
        };
        let is_fs_mode = entry.mount_id != 0 && self.mounts.get(entry.mount_id)?.is_fs_mode();
        Ok(is_fs_mode.then_some((entry.attr.unwrap_or_default().inode, name)))
    }

    /// The directory to refresh, or the directory and the one name in it.
    async fn refresh_target(&self, path: &str) -> Result<(u64, Option<Bytes>), MasterError> {
        let entry = match self.lookups.resolve(path).await {
            Ok(entry) => entry,
            Err(error) if error.is_not_found() => {
                // It may have appeared in the bucket since: the directory above knows, once it is asked.
                let (above, name) = path.trim_end_matches('/').rsplit_once('/').ok_or(error)?;
                let above = self.lookups.resolve(if above.is_empty() { "/" } else { above }).await?;
                let name = Bytes::copy_from_slice(name.as_bytes());
                let parent = above.attr.unwrap_or_default().inode;
                let found = self.lookups.revalidate(parent, &name, Why::Unknown).await;
                found.map_err(|error| match error.is_not_found() {
                    true => MasterError::NotFound(format!("{path} is not there, and its bucket does not have it")),
                    false => error,
                })?
            }
            Err(error) => return Err(error),
        };
        let attr = entry.attr.unwrap_or_default();
        Ok(match attr.kind() {
            Kind::Directory => (attr.inode, None),
            _ => (entry.parent, Some(entry.name)),
        })
    }

    async fn count_refreshed(
        &self,
        inode: u64,
        counts: ListingCounts,
        progress: &mut RefreshProgress,
    ) -> Result<(), MasterError> {
        progress.directories += 1;
        progress.added += counts.added;
        progress.changed += counts.changed;
        progress.removed += counts.removed;
        progress.hidden += counts.hidden;
        progress.entries += self
            .lookups
            .listings
            .read(move |tables| {
                let mut entries = 0;
                tables.scan::<()>(inode, None, |_, _| {
                    entries += 1;
                    Ok(std::ops::ControlFlow::Continue(()))
                })?;
                Ok(entries)
            })
            .await?;
        Ok(())
    }

    async fn run_usage(
        &self,
        path: &str,
        answers: &mpsc::Sender<Result<UsageProgress, Status>>,
    ) -> Result<UsageProgress, MasterError> {
        let entry = self.lookups.resolve(path).await?;
        let attr = entry.attr.unwrap_or_default();
        if attr.kind() != Kind::Directory {
            return Ok(UsageProgress { files: 1, bytes: attr.size, ..UsageProgress::default() });
        }
        let mut progress = UsageProgress::default();
        let mut walk = Walk::new(self.lookups.listings.clone(), attr.inode, ListPolicy::Known, true);
        let mut told = tokio::time::Instant::now();
        while let Some(visited) = walk.next().await {
            let (inode, _) = visited.map_err(|(_, error)| error)?;
            progress.directories += 1;
            let mut after: Option<Bytes> = None;
            loop {
                let from = after.take();
                let listings = &self.lookups.listings;
                let (page, end) =
                    listings.read(move |tables| tables.page(inode, from.as_deref(), PAGE_ENTRIES)).await?;
                let files = page.iter().filter(|(_, _, record)| record.kind() == Kind::File);
                for (_, _, record) in files {
                    progress.files += 1;
                    progress.bytes += record.size;
                }
                after = page.last().map(|(name, _, _)| name.clone());
                if end || after.is_none() {
                    break;
                }
            }
            if told.elapsed() >= PROGRESS_INTERVAL {
                told = tokio::time::Instant::now();
                let _ = answers.send(Ok(progress)).await;
            }
        }
        Ok(progress)
    }
}

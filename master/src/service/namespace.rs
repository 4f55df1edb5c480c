//! The `Namespace` service.

use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::{
    Attr, CheckAccessReply, CheckAccessRequest, CheckOpenRefsReply, CheckOpenRefsRequest, Entry, Extent,
    FreeContentReply, FreeContentRequest, FreedContent, GetInodeRequest, GetLayoutRequest, GetLockReply,
    GetLockRequest, GetQuotasRequest, GetTtlsRequest, GetXattrsRequest, Kind, Layout, Lock, LookupRequest,
    MakeListedReply, MakeListedRequest, MutateReply, MutateRequest, Quotas, ReadDirPage, ReadDirRequest, RecallReply,
    RecallRequest, RefreshListingsReply, RefreshListingsRequest, RefreshProgress, RefreshRequest, ResolveRequest,
    RestoreWatchesReply, RestoreWatchesRequest, RevalidateRequest, Ttls, UsageProgress, UsageRequest, Xattr, Xattrs,
};
use cavern_proto::record::InodeRecord;
use cavern_security::Identity;
use cavern_state::outcome::FreeContent;
use cavern_state::records::attributes;
use cavern_state::{Directory, Tables, blocking_lock, next_generation};
use cavern_work::WorkError;
use cavern_work::listing::CheckReason;
use cavern_work::namespace::Lookups;
use cavern_work::namespace::pages::Listing;
use cavern_work::persist::refresh::RefreshMode;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Streaming};

use super::call::{Answer, Answers, OrStatus as _, asker, check_count};
use super::changes::CALLS_AHEAD;
use super::guard::{AuditedCall, is_about};
use super::limits;
use crate::services::Services;

/// Pages that wait for a slow reader.
const PAGES_AHEAD: usize = 2;
/// Directories of one `RefreshListings`.
const REFRESH_MAX: usize = 10_000;
/// Files of one `FreeContent`.
const FREES_MAX: usize = 1000;
/// Blocks of a file that are read at once, and not on the blocking pool.
const FEW_EXTENTS: usize = 64;
/// Layouts that are answered beside the one that is asked for.
const PREFETCH_MAX: usize = 256;
/// Inodes of one `CheckOpenRefs`, and places of one `RestoreWatches`.
const OPEN_REFS_MAX: usize = 10_000;

impl Services {
    /// Refuses to drop blocks for a client that may only read. What no worker that is there has any more it may let go
    /// of, to read it in the bucket.
    async fn check_free(&self, lookups: &Lookups, inodes: &[u64], session: u64) -> Result<(), WorkError> {
        let checked = lookups.check_mount_change(inodes).await;
        if session == 0 || checked.is_ok() {
            return checked;
        }
        for inode in inodes {
            if !self.repair.has_unreachable_blocks(*inode).await? {
                return checked;
            }
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Namespace for Services {
    async fn resolve(&self, request: Request<ResolveRequest>) -> Answer<Entry> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let ResolveRequest { path, .. } = request.into_inner();
        Ok(Response::new(lookups.resolve(&path).await.or_status()?))
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Answer<Entry> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let LookupRequest { parent, name, .. } = request.into_inner();
        Ok(Response::new(lookups.lookup(parent, &name).await.or_status()?))
    }

    async fn get_inode(&self, request: Request<GetInodeRequest>) -> Answer<Entry> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        Ok(Response::new(lookups.get_inode(request.into_inner().inode).await.or_status()?))
    }

    type ReadDirStream = Answers<ReadDirPage>;

    async fn read_dir(&self, request: Request<ReadDirRequest>) -> Answer<Self::ReadDirStream> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let tenant = limits::tenant(&request);
        let request = request.into_inner();
        // Before the stream begins: an inode that is gone is the answer to the call itself.
        let (inode, session) = (request.inode, request.session);
        let read = || {
            self.watch.watch_directory(session, inode);
            lookups.reader.read(move |tables| Ok(tables.directory(inode)?))
        };
        let place = |found: &Option<Directory>| found.iter().map(|directory| directory.record.parent).collect();
        let directory = lookups.read_after_recall(inode, read, place).await.or_status()?;
        let directory = directory.ok_or(WorkError::Gone(inode)).or_status()?;
        let listing = Listing::of(tenant, lookups.operations_in(directory.mount_id), directory.mount_id);
        let taken = listing.clone();
        let pages = self.answer_in_parts(move |answers| async move {
            lookups.send_pages(request, directory, &listing, &answers).await?;
            Ok(None)
        });
        let pages = pages.map(move |page| {
            let _until_the_end = &taken;
            page
        });
        Ok(Response::new(Box::pin(pages)))
    }

    async fn refresh_listings(&self, request: Request<RefreshListingsRequest>) -> Answer<RefreshListingsReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        limits::count_more(&request, request.get_ref().directories.len().min(REFRESH_MAX));
        let RefreshListingsRequest { directories, wait, session } = request.into_inner();
        check_count(directories.len(), "directories", REFRESH_MAX)?;
        let directories = lookups.refresh_listings(&directories, wait).await.or_status()?;
        // After the ages were read: every change that made them is numbered by now.
        Ok(Response::new(RefreshListingsReply { directories, event_seq: self.watch.last_queued_seq(session) }))
    }

    async fn revalidate(&self, request: Request<RevalidateRequest>) -> Answer<Entry> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let RevalidateRequest { parent, name, written, below, .. } = request.into_inner();
        let why = match (written, below) {
            (false, _) => CheckReason::Unknown,
            (true, false) => CheckReason::Written,
            (true, true) => CheckReason::WrittenBelow,
        };
        Ok(Response::new(lookups.revalidate(parent, &name, why).await.or_status()?))
    }

    type RefreshStream = Answers<RefreshProgress>;

    async fn refresh(&self, request: Request<RefreshRequest>) -> Answer<Self::RefreshStream> {
        let lookups = self.asked_by(&request, 0)?;
        is_about(&request, |asked| asked.path.clone());
        let tenant = limits::tenant(&request);
        let RefreshRequest { path, recursive, dry_run } = request.into_inner();
        let mount = lookups.check_path_access(&path).or_status()?;
        let may_change = lookups.check_refresh(mount.as_ref());
        // Nobody lets go of anything for whoever may not change it.
        let may_recall = may_change.is_ok();
        if !dry_run {
            may_change.or_status()?;
        }
        let services = self.clone();
        Ok(Response::new(self.answer_in_parts(move |answers| async move {
            let _turn = limits::walk(tenant).await;
            let recalling = may_recall.then_some(&lookups);
            let run = services.run_refresh(&path, (recursive, dry_run), recalling, &answers);
            let progress = Box::pin(run).await?;
            Ok(Some(RefreshProgress { done: true, ..progress }))
        })))
    }

    type MutateStream = Answers<MutateReply>;

    async fn mutate(&self, request: Request<Streaming<MutateRequest>>) -> Answer<Self::MutateStream> {
        let (answers, stream) = mpsc::channel(CALLS_AHEAD);
        let (services, asker, audited) = (self.clone(), asker(&request).cloned(), AuditedCall::of(&request));
        let tenant = limits::tenant(&request);
        let calls = request.into_inner();
        self.tasks.spawn(async move {
            let client = (asker.as_ref(), tenant.as_ref());
            tokio::select! {
                () = services.serve_changes(calls, client, audited.as_ref(), &answers) => {}
                () = services.stop.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn get_xattrs(&self, request: Request<GetXattrsRequest>) -> Answer<Xattrs> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let GetXattrsRequest { inode, .. } = request.into_inner();
        let read = || {
            lookups.reader.read(move |tables| {
                let Some(record) = tables.inode(inode)? else { return Ok(None) };
                let xattrs = if record.xattr_bytes > 0 { tables.xattrs(inode)? } else { Vec::new() };
                Ok(Some((record.parent, xattrs)))
            })
        };
        let place = |found: &Option<(u64, Vec<_>)>| found.iter().map(|(parent, _)| *parent).collect();
        let found = lookups.read_after_recall(inode, read, place).await.or_status()?;
        let (_, xattrs) = found.ok_or(WorkError::Gone(inode)).or_status()?;
        let xattrs = xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect();
        Ok(Response::new(Xattrs { xattrs }))
    }

    async fn check_access(&self, request: Request<CheckAccessRequest>) -> Answer<CheckAccessReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let CheckAccessRequest { inode, user, wanted, .. } = request.into_inner();
        let read = || async {
            let above = lookups.reader.read(move |tables| Ok(tables.above(inode)?)).await?;
            Ok((above, lookups.may_access(inode, user.as_ref(), wanted).await?))
        };
        // Whoever holds one of them may have answered that it has another mode.
        let (_, allowed) = lookups.read_after_recall(inode, read, |(above, _)| above.clone()).await.or_status()?;
        Ok(Response::new(CheckAccessReply { allowed }))
    }

    async fn get_layout(&self, request: Request<GetLayoutRequest>) -> Answer<Layout> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let GetLayoutRequest { inode, prefetch, user, .. } = request.into_inner();
        check_count(prefetch.len(), "files", PREFETCH_MAX)?;
        let read = || async {
            let (record, layout) = layout(&lookups, inode).await?;
            lookups.check_layout(inode, user.as_ref()).await?;
            let prefetch = lookups.readable(prefetch.clone(), user.as_ref()).await?;
            let prefetch = prefetch_layouts(&lookups, record.parent, &prefetch).await?;
            Ok((record, Layout { prefetch, ..layout }))
        };
        // Those beside it are in the same directory.
        let place = |(record, _): &(InodeRecord, Layout)| vec![record.parent];
        let (_, layout) = lookups.read_after_recall(inode, read, place).await.or_status()?;
        Ok(Response::new(layout))
    }

    async fn free_content(&self, request: Request<FreeContentRequest>) -> Answer<FreeContentReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        is_about(&request, |asked| format!("{} files", asked.inodes.len()));
        let FreeContentRequest { inodes, session } = request.into_inner();
        check_count(inodes.len(), "files", FREES_MAX)?;
        let hidden = lookups.hidden(&inodes).await.or_status()?;
        let visible: Vec<u64> = inodes.iter().copied().filter(|inode| !hidden.contains(inode)).collect();
        self.check_free(&lookups, &visible, session).await.or_status()?;
        let free = |inode| FreeContent { inode, session };
        let mut freed = self.proposer.propose_all(visible.into_iter().map(free)).await?.into_iter();
        let results = inodes.iter().map(|inode| match hidden.contains(inode) {
            // As what is nowhere has nothing to be freed.
            true => FreedContent::default(),
            false => freed.next().unwrap_or_default(),
        });
        Ok(Response::new(FreeContentReply { results: results.collect() }))
    }

    async fn get_lock(&self, request: Request<GetLockRequest>) -> Answer<GetLockReply> {
        let GetLockRequest { inode, lock, .. } = request.get_ref();
        let (inode, kind, lock) = (*inode, request.get_ref().kind(), lock.unwrap_or_default());
        let lookups = self.asked_by(&request, lock.session)?;
        let read = || {
            lookups.reader.read(move |tables| {
                let parent = tables.inode(inode)?.map_or(0, |record| record.parent);
                Ok((parent, blocking_lock(tables, inode, kind, &lock)?))
            })
        };
        let (_, found) = lookups.read_after_recall(inode, read, |(parent, _)| vec![*parent]).await.or_status()?;
        // Whose it is, is nobody else's business.
        let shown = |found: Lock| match found.session == lock.session {
            true => found,
            false => Lock { session: 0, owner: 0, pid: 0, ..found },
        };
        Ok(Response::new(GetLockReply { lock: found.map(shown) }))
    }

    async fn check_open_refs(&self, request: Request<CheckOpenRefsRequest>) -> Answer<CheckOpenRefsReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let count = request.get_ref().open.len() + request.get_ref().referenced.len();
        limits::count_more(&request, count.min(OPEN_REFS_MAX));
        let mut request = request.into_inner();
        check_count(count, "inodes", OPEN_REFS_MAX)?;
        let asked: Vec<u64> = request.open.iter().chain(&request.referenced).copied().collect();
        let hidden = lookups.hidden(&asked).await.or_status()?;
        request.open.retain(|inode| !hidden.contains(inode));
        request.referenced.retain(|inode| !hidden.contains(inode));
        // Before the read: the session is notified of names that are lost after it.
        self.watch.watch_inodes(request.session, request.open.iter().chain(&request.referenced).copied());
        let mut reply = lookups.reader.read(move |tables| Ok(tables.check_open_refs(&request)?)).await.or_status()?;
        reply.gone.extend(hidden);
        Ok(Response::new(reply))
    }

    async fn restore_watches(&self, request: Request<RestoreWatchesRequest>) -> Answer<RestoreWatchesReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let count = request.get_ref().directories.len() + request.get_ref().inodes.len();
        limits::count_more(&request, count.min(OPEN_REFS_MAX));
        let RestoreWatchesRequest { session, mut directories, mut inodes, complete } = request.into_inner();
        check_count(count, "places", OPEN_REFS_MAX)?;
        for places in [&mut directories, &mut inodes] {
            let hidden = lookups.hidden(places).await.or_status()?;
            places.retain(|inode| !hidden.contains(inode));
        }
        self.watch.watch_inodes(session, inodes);
        self.watch.watch_directories(session, directories);
        if complete {
            self.watch.watches_restored(session);
        }
        Ok(Response::new(RestoreWatchesReply {}))
    }

    async fn make_listed(&self, request: Request<MakeListedRequest>) -> Answer<MakeListedReply> {
        let lookups = self.asked_by(&request, 0)?;
        let tenant = limits::tenant(&request).filter(|_| request.get_ref().recursive);
        let MakeListedRequest { inode, recursive } = request.into_inner();
        lookups.check_mount_access(inode).await.or_status()?;
        let Ok(_turn) = tokio::time::timeout(lookups.refresh_wait, limits::walk(tenant)).await else {
            return Ok(Response::new(MakeListedReply::default()));
        };
        Ok(Response::new(lookups.make_listed(inode, recursive).await.or_status()?))
    }

    async fn recall(&self, request: Request<RecallRequest>) -> Answer<RecallReply> {
        let lookups = self.asked_by(&request, request.get_ref().session)?;
        let client = asker(&request).and_then(Identity::client_name).map(str::to_owned);
        let RecallRequest { inode, whole_mount, session } = request.into_inner();
        if whole_mount {
            lookups.recall_whole_mount(inode, client.as_deref()).await.or_status()?;
        } else if lookups.hidden(&[inode]).await.or_status()?.is_empty() {
            // Nobody holds what is gone by now, which is no error: its change is asked for once more.
            lookups.recalls.recall(inode, session).await.or_status()?;
        }
        Ok(Response::new(RecallReply {}))
    }

    async fn get_ttls(&self, request: Request<GetTtlsRequest>) -> Answer<Ttls> {
        let lookups = self.asked_by(&request, 0)?;
        let GetTtlsRequest { inode } = request.into_inner();
        check_one_directory(&lookups, inode).await.or_status()?;
        Ok(Response::new(lookups.reader.read(move |tables| Ok(tables.ttls(inode)?)).await.or_status()?))
    }

    async fn get_quotas(&self, request: Request<GetQuotasRequest>) -> Answer<Quotas> {
        let lookups = self.asked_by(&request, 0)?;
        let GetQuotasRequest { inode } = request.into_inner();
        check_one_directory(&lookups, inode).await.or_status()?;
        Ok(Response::new(lookups.reader.read(move |tables| Ok(tables.quotas(inode)?)).await.or_status()?))
    }

    type UsageStream = Answers<UsageProgress>;

    async fn usage(&self, request: Request<UsageRequest>) -> Answer<Self::UsageStream> {
        let lookups = self.asked_by(&request, 0)?;
        let tenant = limits::tenant(&request);
        let UsageRequest { path } = request.into_inner();
        Ok(Response::new(self.answer_in_parts(move |answers| async move {
            let _turn = limits::walk(tenant).await;
            let progress = lookups.usage(&path, &answers).await?;
            Ok(Some(UsageProgress { done: true, ..progress }))
        })))
    }
}

impl Services {
    /// Does what sends the parts of an answer, and sends the last one that it gives, or why it failed. It is given up
    /// when nobody takes the parts any more.
    pub(super) fn answer_in_parts<T, W>(&self, work: impl FnOnce(mpsc::Sender<Result<T, WorkError>>) -> W) -> Answers<T>
    where
        T: Send + 'static,
        W: Future<Output = Result<Option<T>, WorkError>> + Send + 'static,
    {
        let (answers, parts) = mpsc::channel(PAGES_AHEAD);
        let (work, stop) = (work(answers.clone()), self.stop.clone());
        self.tasks.spawn(async move {
            let result = tokio::select! {
                result = work => result,
                () = stop.cancelled() => Err(WorkError::stopping()),
                () = answers.closed() => return,
            };
            if let Some(last) = result.transpose() {
                // Who is gone does not miss it.
                let _gone = answers.send(last).await;
            }
        });
        Box::pin(ReceiverStream::new(parts).map(|part| part.or_status()))
    }

    /// Brings a path up to date with its bucket, whichever of the two is the truth.
    async fn run_refresh(
        &self,
        path: &str,
        (recursive, dry_run): (bool, bool),
        recalling: Option<&Lookups>,
        answers: &mpsc::Sender<Result<RefreshProgress, WorkError>>,
    ) -> Result<RefreshProgress, WorkError> {
        if let Some((directory, name)) = self.lookups.fs_mode_target(path).await? {
            if let Some(lookups) = recalling {
                lookups.recall_mount_of(directory).await?;
            }
            let run = if dry_run { RefreshMode::DryRun } else { RefreshMode::Apply };
            let refresh = self.persistence.refresh(directory, name.clone(), recursive, run, answers);
            let progress = Box::pin(refresh).await?;
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
            return Err(WorkError::Invalid(reason));
        }
        self.lookups.refresh(path, recursive, answers).await
    }
}

/// Refuses what is about all directories (0) to whoever does not see all of them.
async fn check_one_directory(lookups: &Lookups, inode: u64) -> Result<(), WorkError> {
    if inode == 0 && lookups.client.is_some() {
        let reason =
            "where mounts are not there for all clients, only an admin is told of all of them: name a directory";
        return Err(WorkError::Denied(reason.into()));
    }
    lookups.check_mount_access(inode).await
}

/// A file as it is, with all of its blocks.
async fn layout(lookups: &Lookups, inode: u64) -> Result<(InodeRecord, Layout), WorkError> {
    let gone = || WorkError::Gone(inode);
    let seen = lookups.read_watched_inode(inode, move |tables, record| {
        let extents = tables.few_extents(inode, record, FEW_EXTENTS)?;
        extents.map(|extents| layout_of(tables, inode, record, extents)).transpose()
    });
    let (record, layout) = seen.await?.ok_or_else(gone)?;
    if let Some(layout) = layout {
        return Ok((record, layout));
    }
    let all = lookups.reader.read(move |tables| {
        let Some(record) = tables.inode(inode)? else { return Ok(None) };
        let layout = layout_of(tables, inode, &record, tables.extents(inode, 0)?)?;
        Ok(Some((record, layout)))
    });
    all.await?.ok_or_else(gone)
}

/// Those of some files that are in this directory and have few blocks.
async fn prefetch_layouts(lookups: &Lookups, parent: u64, inodes: &[u64]) -> Result<Vec<Layout>, WorkError> {
    let mut layouts = Vec::with_capacity(inodes.len());
    for inode in inodes.iter().copied() {
        let seen = lookups.read_watched_inode(inode, move |tables, record| {
            if record.parent != parent || record.kind() != Kind::File {
                return Ok(None);
            }
            let extents = tables.few_extents(inode, record, FEW_EXTENTS)?;
            extents.map(|extents| layout_of(tables, inode, record, extents)).transpose()
        });
        // It was there a moment ago.
        layouts.extend(WorkError::if_found(seen.await)?.flatten().and_then(|(_, layout)| layout));
    }
    Ok(layouts)
}

fn layout_of(tables: Tables<'_>, inode: u64, record: &InodeRecord, extents: Vec<Extent>) -> Result<Layout, WorkError> {
    let next_generation = next_generation(&tables.counters()?, inode, record);
    Ok(Layout {
        attr: Some(Attr { next_generation, ..attributes(inode, record) }),
        block_size: tables.mount(record.mount_id)?.map_or(0, |mount| mount.block_size),
        extents,
        origin: record.origin.clone(),
        ends_marked: true,
        prefetch: Vec::new(),
    })
}

//! The steps from a request to a view.
//!
//! 1. What was never listed below the path is listed, or everything anew, where that is asked for. Of an fs-mode mount
//!    all that sessions have answered for is made.
//! 2. The upload of the object is begun, and with it the view, in the log: from here on no block of an fs-mode mount is
//!    freed.
//! 3. A snapshot of the tables is taken, and read into an image ([`super::tree`], [`super::image`]). Of an fs-mode
//!    mount all that it may show is frozen meanwhile, and every client says that it writes to nothing of that. Until
//!    all have said so, whoever would change something of it waits.
//! 4. The object is stored, and the view is shown.
//!
//! Whoever has asked may go away: nothing is left of what was not shown by then.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use bytes::Bytes;
use cavern_conf::host;
use cavern_consensus::run_blocking;
use cavern_proto::master::{CreateViewRequest, Entry, Kind, View, ViewProgress, ViewState, ViewStep};
use cavern_proto::record::{BeginView, FinishView, FreezeView, ViewManifest};
use cavern_proto::reserved::VIEW;
use cavern_ufs::MultipartUpload;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::image::write_view;
use super::object::begin_upload;
use super::tree::{PAGES_AHEAD, ReadEnd, TreeReader, TreeSource};
use super::{MakingProgress, ViewMaker, check_view_name};
use crate::background::report;
use crate::error::WorkError;
use crate::listing::walk::{ListPolicy, Walk};
use crate::mounts::OpenMount;
use crate::namespace::components;

/// How often what was found to be unlisted is listed.
const ROUNDS: usize = 5;

impl ViewMaker {
    /// Makes a view, and says now and then how far that is. What is there already as it is asked for is the answer.
    ///
    /// # Errors
    /// [`WorkError::AlreadyExists`] when the name is another one's, [`WorkError::Refused`] when the path cannot be
    /// frozen, when the bucket takes no objects, and when a client does not settle; those of the bucket.
    pub async fn create(
        &self,
        request: CreateViewRequest,
        answers: &mpsc::Sender<Result<ViewProgress, WorkError>>,
    ) -> Result<View, WorkError> {
        check_view_name(&request.name)?;
        let gone = self.tasks.stop.child_token();
        let _asked = gone.clone().drop_guard();
        let (views, progress) = (self.clone(), Arc::<MakingProgress>::default());
        let making = {
            let progress = progress.clone();
            async move { Box::pin(views.make(request, &progress, &gone)).await }
        };
        tokio::select! {
            made = self.tasks.to_the_end(making) => made,
            () = report(answers, || progress.lock().clone()) => Err(WorkError::stopping()),
        }
    }

    async fn make(
        &self,
        request: CreateViewRequest,
        progress: &Arc<MakingProgress>,
        gone: &CancellationToken,
    ) -> Result<View, WorkError> {
        let path = format!("/{}", components(&request.path)?.join("/"));
        let _turn = unless(gone, self.turn()).await?;
        let is_wanted = |view: &View| view.path == path && !view.imported;
        if let Some(view) = unless(gone, self.known(&request.name, is_wanted)).await? {
            return Ok(view);
        }
        let (mount, store, source) = unless(gone, Box::pin(self.prepare(&request, &path, progress))).await?;
        let view = View { name: request.name, path, mount_id: mount.id(), ..View::default() };
        let (view, upload) = self.begin(&store, view).await?;
        let id = view.id;
        let made = unless(gone, self.frozen(&mount, source, view, progress)).await;
        self.finish((&*store, &upload), id, made, progress, gone).await
    }

    /// Brings what is to be frozen up to date, as far as that is asked for. Gives its mount, the one in whose bucket
    /// the object is to be, and what is frozen.
    async fn prepare(
        &self,
        request: &CreateViewRequest,
        path: &str,
        progress: &MakingProgress,
    ) -> Result<(Arc<OpenMount>, Arc<OpenMount>, TreeSource), WorkError> {
        let Entry { attr, mount_id, .. } = self.lookups.resolve(path).await?;
        let attr = attr.unwrap_or_default();
        if attr.kind() != Kind::Directory || mount_id == 0 {
            return Err(WorkError::Refused(format!(
                "{path} is no directory of a mount: a view is of a mount, or of a directory in one"
            )));
        }
        let mount = self.lookups.mounts.get(mount_id)?;
        self.check_indexed(&mount).await?;
        let store = self.store_of(&request.store, &mount)?;
        let source = TreeSource {
            top: attr.inode,
            mount_id,
            root_inode: mount.mount.root_inode,
            is_fs_mode: mount.is_fs_mode(),
            block_size: mount.mount.block_size,
            prefix: mount.ufs.prefix().to_owned(),
            looks: request.clone(),
        };
        match (source.is_fs_mode, request.fresh) {
            (true, true) => {
                return Err(WorkError::Invalid(format!(
                    "{path} is in an fs-mode mount, whose namespace is the truth: leave --at now out"
                )));
            }
            (true, false) => self.lookups.recalls.recall_mount(mount_id).await?,
            (false, true) => self.list(source.top, ListPolicy::Refreshed, progress).await?,
            (false, false) => {}
        }
        Ok((mount, store, source))
    }

    /// Refuses a mount of which not all names are known.
    async fn check_indexed(&self, mount: &OpenMount) -> Result<(), WorkError> {
        let id = mount.id();
        let index = self.lookups.reader.read(move |tables| Ok(tables.index(id)?)).await?;
        let is_indexed = match index {
            Some(index) => index.began_ns == 0 && index.finished_ns != 0,
            // Nothing was there before.
            None => mount.is_fs_mode(),
        };
        if is_indexed {
            return Ok(());
        }
        let path = &mount.mount.path;
        Err(WorkError::Refused(format!("{path} is being indexed: wait for that (cv index {path} --watch)")))
    }

    async fn list(&self, top: u64, policy: ListPolicy, progress: &MakingProgress) -> Result<(), WorkError> {
        *progress.lock() = ViewProgress { step: ViewStep::Listing.into(), ..ViewProgress::default() };
        let mut walk = Walk::new(self.lookups.listings.clone(), top, policy, true);
        while let Some(visited) = walk.next().await {
            let (_, counts) = visited.map_err(|(_, error)| error)?;
            progress.lock().names += 1 + counts.added;
        }
        Ok(())
    }

    /// Records that a view is being made, whose object is to be in the bucket of this mount, with the upload of that
    /// object, which has no parts yet: whatever becomes of this master, the next one gives it up.
    pub(super) async fn begin(&self, store: &OpenMount, view: View) -> Result<(View, MultipartUpload), WorkError> {
        let uuid = host::random_id();
        let key = format!("{}{VIEW}{:032x}", store.ufs.prefix(), u128::from_be_bytes(uuid));
        let upload = begin_upload(store, &key).await?;
        let view = View {
            state: ViewState::Creating.into(),
            store_mount_id: store.id(),
            key,
            upload: upload.id().to_owned(),
            uuid: Bytes::copy_from_slice(&uuid),
            created_ns: self.lookups.reader.clock().now_ns(),
            ..view
        };
        let begun = self.proposer.propose(BeginView { view: Some(view) }).await;
        match begun.map_err(WorkError::from).and_then(|begun| begun.map_err(WorkError::Refused)) {
            Ok(view) => Ok((*view, upload)),
            Err(error) => {
                // Where it is recorded all the same, it is taken away as one that was not finished.
                let _given_up = upload.abort().await;
                Err(error)
            }
        }
    }

    /// What is frozen, in a file; with the view as it is then.
    async fn frozen(
        &self,
        mount: &OpenMount,
        source: TreeSource,
        view: View,
        progress: &Arc<MakingProgress>,
    ) -> Result<(File, View), WorkError> {
        let source = Arc::new(source);
        for _ in 0..ROUNDS {
            if let Some(made) = self.image(mount, &source, &view, progress).await? {
                return Ok(made);
            }
            self.list(source.top, ListPolicy::Known, progress).await?;
        }
        Err(WorkError::Refused(format!(
            "directories that nobody has listed come up below {} all the time: try again when that is over",
            view.path
        )))
    }

    /// Reads and writes at the same time, and has frozen what is read. `None` when something of it was never listed.
    async fn image(
        &self,
        mount: &OpenMount,
        source: &Arc<TreeSource>,
        view: &View,
        progress: &Arc<MakingProgress>,
    ) -> Result<Option<(File, View)>, WorkError> {
        *progress.lock() = ViewProgress { step: ViewStep::Reading.into(), ..ViewProgress::default() };
        let (pages, received) = sync_channel(PAGES_AHEAD);
        let (taken, is_taken) = oneshot::channel();
        let given_up = CancellationToken::new();
        let _given_up = given_up.clone().drop_guard();
        let read = {
            let (source, progress, given_up) = (source.clone(), progress.clone(), given_up.clone());
            self.lookups
                .reader
                .read(move |tables| TreeReader::new(tables, &source, pages, &progress, given_up).run(taken))
        };
        let manifest = ViewManifest {
            view: Some(view.clone()),
            cluster_id: self.cluster_id.to_string(),
            uri: mount.mount.uri.clone(),
            write_type: mount.mount.write_type,
            block_size: mount.mount.block_size,
        };
        let directory = self.directory.clone();
        let write = async {
            let written = run_blocking(move || write_view(received, &directory, manifest)).await;
            if source.is_fs_mode {
                progress.lock().step = ViewStep::Settling.into();
            }
            written.map_err(|error| WorkError::unavailable(error.to_string()))?
        };
        let freeze = async {
            if !source.is_fs_mode || is_taken.await.is_err() {
                return Ok(());
            }
            let frozen = self.freeze(view).await;
            if frozen.is_err() {
                given_up.cancel();
            }
            frozen
        };
        let (read, written, frozen) = tokio::join!(read, write, freeze);
        frozen?;
        match read? {
            ReadEnd::All => written.map(Some),
            ReadEnd::Unlisted => Ok(None),
            ReadEnd::GivenUp => Err(written.err().unwrap_or_else(WorkError::stopping)),
        }
    }

    /// Returns when no client writes to anything that is frozen.
    async fn freeze(&self, view: &View) -> Result<(), WorkError> {
        // Whoever is on his way to another stream is waited for before anybody is kept from writing.
        self.settled(view.mount_id).await?;
        let freeze = |settled: bool| self.proposer.propose(FreezeView { id: view.id, settled });
        let _frozen = freeze(false).await?.map_err(WorkError::Refused)?;
        self.settled(view.mount_id).await?;
        let _settled = freeze(true).await?.map_err(WorkError::Refused)?;
        Ok(())
    }

    /// Returns when every client that may change a mount goes by the mount table as it is now.
    async fn settled(&self, mount_id: u32) -> Result<(), WorkError> {
        let epoch = self.lookups.reader.read(|tables| Ok(tables.counters()?.mounts_epoch)).await?;
        self.lookups.watch.wait_settled(mount_id, epoch).await
    }

    /// Stores what was made, and shows it. Nothing is left of what could not be: where the log does not say so, the
    /// next look takes it away, of this master or of a later one.
    pub(super) async fn finish(
        &self,
        store: (&OpenMount, &MultipartUpload),
        id: u32,
        made: Result<(File, View), WorkError>,
        progress: &MakingProgress,
        gone: &CancellationToken,
    ) -> Result<View, WorkError> {
        let shown = async {
            let (file, view) = made?;
            progress.lock().step = ViewStep::Storing.into();
            let etag = self.store(store, view.object_bytes, file, progress, gone).await?;
            let view = Some(View { etag, state: ViewState::Ready.into(), ..view });
            let shown = self.proposer.propose(FinishView { view }).await?;
            Ok::<View, WorkError>(*shown.map_err(WorkError::Refused)?)
        };
        let shown = shown.await;
        match &shown {
            Ok(View { name, path, names, .. }) => tracing::info!(view = name, path, names, "a view is there"),
            Err(error) => {
                tracing::info!("a view could not be made: {error}");
                if let Err(error) = self.take_away(id).await {
                    tracing::warn!("what was begun of a view is left for now: {error}");
                }
            }
        }
        shown
    }
}

/// Something that is given up when whoever has asked for it is gone.
async fn unless<T>(gone: &CancellationToken, work: impl Future<Output = Result<T, WorkError>>) -> Result<T, WorkError> {
    gone.run_until_cancelled(work).await.unwrap_or_else(|| Err(WorkError::stopping()))
}

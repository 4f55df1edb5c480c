//! Views of the cluster, as this process finds and opens them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cavern_conf::schema;
use cavern_net::master::Stubs;
use cavern_net::{MasterChannel, WorkerPool};
use cavern_proto::master::{GetViewRequest, ListViewsRequest, View};
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::copies::{Copies, CopyDraft, copied_bytes};
use super::devices::ViewParts;
use super::fetch::fetch;
use super::open_view::OpenView;
use crate::error::ClientError;
use crate::read::Files;
use crate::single_flight::SingleFlight;
use crate::stats::Stats;
use crate::tables::Tables;

/// How old the list may be.
const LIST_FRESH: Duration = Duration::from_secs(1);
/// A large file that nobody has read for so long, or twice as long, is closed.
const IDLE: Duration = Duration::from_secs(30);

/// Views of the cluster, read by this process. Cheap to clone.
#[derive(Clone)]
pub struct Views(Arc<Inner>);

struct Inner {
    tables: Arc<Tables>,
    parts: Arc<ViewParts>,
    /// `client.staging_directory`.
    staging: PathBuf,
    list: Mutex<Option<(Instant, Arc<[View]>)>>,
    listing: SingleFlight<(), Result<Arc<[View]>, ClientError>>,
    open: RwLock<HashMap<u32, Arc<OpenView>>>,
    opening: SingleFlight<u32, Result<Arc<OpenView>, ClientError>>,
}

impl Views {
    pub(crate) fn new(
        master: MasterChannel,
        tables: Arc<Tables>,
        files: Files,
        pool: Arc<WorkerPool>,
        stats: Arc<Stats>,
        conf: &schema::Client,
    ) -> Self {
        Self(Arc::new(Inner {
            tables,
            parts: Arc::new(ViewParts::new(master, files, pool, stats)),
            staging: conf.staging_directory.clone(),
            list: Mutex::default(),
            listing: SingleFlight::default(),
            open: RwLock::default(),
            opening: SingleFlight::default(),
        }))
    }

    /// Those that are there for this client, by name; at most a second old. While no master answers: those whose copies
    /// are on this host.
    pub async fn list(&self) -> Result<Arc<[View]>, ClientError> {
        let known = self.0.list.lock().clone();
        if let Some((asked, views)) = known
            && asked.elapsed() < LIST_FRESH
        {
            return Ok(views);
        }
        let this = self.clone();
        self.0.listing.join((), async move { this.list_anew().await }).await
    }

    async fn list_anew(&self) -> Result<Arc<[View]>, ClientError> {
        let since = Instant::now();
        let views: Arc<[View]> = match self.ask_list().await {
            Ok(views) => {
                self.forget_all_but(&views);
                views.into()
            }
            Err(error) if error.is_master_silent() => self.known_here().await?.into(),
            Err(error) => return Err(error),
        };
        *self.0.list.lock() = Some((since, views.clone()));
        Ok(views)
    }

    async fn ask_list(&self) -> Result<Vec<View>, ClientError> {
        let ask = |mut stubs: Stubs| async move { stubs.views.list_views(ListViewsRequest {}).await };
        Ok(self.0.parts.master.try_call("ListViews", ask).await?.views)
    }

    async fn known_here(&self) -> Result<Vec<View>, ClientError> {
        let mut views = self.on_disk(Copies::all).await?;
        let mounts = self.0.tables.mounts();
        views.retain(|view| mounts.get(view.mount_id).is_some_and(|mount| !mount.limits_users()));
        views.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(views)
    }

    /// Views that are gone are opened anew, from their copies, by whoever still shows them.
    fn forget_all_but(&self, views: &[View]) {
        let is_gone = |id: &u32| !views.iter().any(|view| view.id == *id);
        let gone: Vec<u32> = self.0.open.read().keys().copied().filter(is_gone).collect();
        for id in gone {
            // Dropped after the lock.
            let _gone = self.0.open.write().remove(&id);
        }
    }

    async fn ask(&self, request: GetViewRequest) -> Result<View, ClientError> {
        let ask = |mut stubs: Stubs| {
            let request = request.clone();
            async move { stubs.views.get_view(request).await }
        };
        Ok(self.0.parts.master.try_call("GetView", ask).await?)
    }

    /// A view by its name, also one that has just been made. One that is open here is found as long as no master says
    /// that it is gone.
    ///
    /// # Errors
    /// [`ClientError::NotFound`] where there is none for this client.
    pub async fn named(&self, name: &str) -> Result<View, ClientError> {
        let listed = match self.list().await {
            Ok(views) => views.iter().find(|view| view.name == name).cloned(),
            Err(error) => {
                let open = self.0.open.read().values().find(|open| open.view().name == name).cloned();
                Some(open.ok_or(error)?.view().clone())
            }
        };
        match listed {
            Some(view) => Ok(view),
            None => self.ask(GetViewRequest { name: name.to_owned(), id: 0 }).await,
        }
    }

    /// Where in the namespace of this cluster a view was made, or has its objects; `None` where its mount is not known.
    pub fn path(&self, view: &View) -> Option<String> {
        if !view.imported {
            return Some(view.path.clone());
        }
        self.0.tables.mounts().get(view.mount_id).map(|mount| mount.path().to_owned())
    }

    /// With its image on this host: fetched and verified where it is not there. One fetch at a time for all who wait.
    pub async fn open(&self, view: &View) -> Result<Arc<OpenView>, ClientError> {
        // Somebody may have tidied up where copies are, and this one's name is to lead to it.
        if let Some(open) = self.opened(view.id)
            && tokio::fs::try_exists(open.image_path()).await.unwrap_or(true)
        {
            return Ok(open);
        }
        let (this, view) = (self.clone(), view.clone());
        self.0.opening.join(view.id, async move { this.open_copy(view).await }).await
    }

    /// By the id in a node that a kernel knows: from this host's copy without a master, else as [`Self::open`].
    pub async fn open_id(&self, id: u32) -> Result<Arc<OpenView>, ClientError> {
        if let Some(open) = self.opened(id) {
            return Ok(open);
        }
        let view = match self.on_disk(move |copies| copies.load(id)).await? {
            Some((view, _)) => view,
            None => self.ask(GetViewRequest { name: String::new(), id }).await?,
        };
        self.open(&view).await
    }

    /// Without waiting.
    pub fn opened(&self, id: u32) -> Option<Arc<OpenView>> {
        self.0.open.read().get(&id).filter(|open| open.is_shown()).cloned()
    }

    async fn open_copy(&self, view: View) -> Result<Arc<OpenView>, ClientError> {
        let id = view.id;
        let mount = self.0.tables.mount(view.mount_id).await?;
        if mount.limits_users() {
            let text = format!("the view {} is not there for a client whose users are limited", view.name);
            return Err(ClientError::NotFound(text));
        }
        let known = self.on_disk(move |copies| Ok((copies.path(id), copies.load(id)?))).await?;
        let copy = match known {
            (path, Some((record, file))) if record.hash == view.hash => (path, file),
            (path, _) => (path, self.fetch_copy(&view).await?),
        };
        let parts = self.0.parts.clone();
        let opened = tokio::task::spawn_blocking(move || OpenView::new(view, copy, mount, parts)).await;
        let opened = Arc::new(opened.map_err(|_stopped| ClientError::Shutdown)??);
        self.0.open.write().insert(id, opened.clone());
        Ok(opened)
    }

    async fn fetch_copy(&self, view: &View) -> Result<File, ClientError> {
        let (id, mount) = (view.id, self.0.tables.mount(view.store_mount_id).await?);
        let (file, draft) = self.on_disk(move |copies| copies.begin(id).and_then(CopyDraft::opened)).await?;
        fetch(&self.0.parts.files, mount, view, copied_bytes(view), file, &mut |_| {}).await?;
        self.0.parts.stats.view_fetches.inc();
        let view = view.clone();
        self.on_disk(move |copies| copies.keep(&draft, &view)).await
    }

    /// Writes the whole object, verified, to a file: `cv view export`. `progress` is told how many bytes there are.
    pub async fn export(&self, view: &View, to: File, mut progress: impl Fn(u64) + Send) -> Result<(), ClientError> {
        let mount = self.0.tables.mount(view.store_mount_id).await?;
        fetch(&self.0.parts.files, mount, view, view.object_bytes, to, &mut progress).await
    }

    /// Removes copies of views that are no more. Not while another process of this host shows them.
    pub async fn sweep(&self) {
        let swept = async {
            let there: HashSet<u32> = self.ask_list().await?.iter().map(|view| view.id).collect();
            self.on_disk(move |copies| copies.sweep(&there)).await
        };
        if let Err(error) = swept.await {
            tracing::debug!("copies of views stay as they are: {error}");
        }
    }

    /// Closes large files that are read no more, now and then, until `stop`: they keep the space of blocks that workers
    /// have evicted.
    pub(crate) async fn close_idle(&self, stop: CancellationToken) {
        let handles = &self.0.parts.handles;
        while stop.run_until_cancelled(tokio::time::sleep(IDLE)).await.is_some() {
            handles.retain(|_, (_, is_used)| is_used.swap(false, Ordering::Relaxed));
        }
    }

    /// Has something done with the copies on this host, on a thread that may wait.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Copies) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ClientError> {
        let (staging, cluster_id) = (self.0.staging.clone(), self.0.parts.pool.cluster_id());
        let done = tokio::task::spawn_blocking(move || work(&Copies::new(&staging, &cluster_id)?)).await;
        let failed = |error: io::Error| {
            let directory = self.0.staging.display();
            let cause = format!("{error} (copies of views are in {directory}, client.staging_directory)");
            ClientError::View { view: "on this host".to_owned(), cause }
        };
        done.map_err(|_stopped| ClientError::Shutdown)?.map_err(failed)
    }
}

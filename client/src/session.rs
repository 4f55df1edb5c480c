//! The whole client of one process.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, backoff};
use cavern_net::master::MasterChannel;
use cavern_net::{NetError, Placement, WorkerPool};
use cavern_posix::xattr::UNLISTED;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, User};
use cavern_security::Transport;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::ClientError;
use crate::file::File;
use crate::fs_file::{OpenFileTable, UncommittedAttr};
use crate::identity::Identity;
use crate::journal::Journal;
use crate::metadata::{Changed, InvalidationSink, Metadata, Node, OpenInode};
use crate::mounts::Mounts;
use crate::read::Files;
use crate::staged::StagedFiles;
use crate::stats::Stats;
use crate::tables::Tables;
use crate::view::Views;

/// What a client goes on from, whose process has died.
pub struct Predecessor {
    /// Where it wrote down what is left to be done.
    pub journal: Arc<Journal>,
    /// Inodes of fs-mode mounts that are open.
    pub open: Vec<u64>,
    /// Called before the first event arrives.
    pub begin: Box<dyn FnOnce(&Metadata) + Send>,
}

/// Metadata and files of a cluster, with the tasks that keep them current.
pub struct Client {
    master: MasterChannel,
    tables: Arc<Tables>,
    metadata: Metadata,
    files: Files,
    contents: OpenFileTable,
    staged: StagedFiles,
    views: Views,
    pool: Arc<WorkerPool>,
    stats: Arc<Stats>,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// Inodes that were open in the process before, until they are opened here.
    inherited: Mutex<Vec<OpenInode>>,
}

impl Client {
    /// Connects and returns when the mount table and the worker table are known; fails when no master answers within
    /// `client.metadata_timeout`. `who` names the client to the master. `sink` is notified of every invalidation.
    pub async fn connect(
        config: &Config,
        who: impl Into<Identity>,
        sink: Arc<dyn InvalidationSink>,
    ) -> Result<Arc<Self>, ClientError> {
        Self::connect_with(config, who, sink, None, None).await
    }

    /// Connects a client that has successors, and perhaps one before it: it takes up that one's session, and what was
    /// open there stays. What it had not finished is finished by [`Self::recover`].
    pub async fn connect_with(
        config: &Config,
        who: impl Into<Identity>,
        sink: Arc<dyn InvalidationSink>,
        journal: Option<Arc<Journal>>,
        predecessor: Option<Predecessor>,
    ) -> Result<Arc<Self>, ClientError> {
        let who = who.into();
        let stats = Arc::new(Stats::default());
        let master = MasterChannel::new(config)?;
        let transport = Transport::of(config).map_err(NetError::from)?;
        let pool = WorkerPool::new(&config.client, transport, &who.name);
        let tables = Arc::new(Tables::new(master.clone(), pool.clone(), &config.ufs));
        let metadata = Metadata::new(master.clone(), tables.clone(), stats.clone(), config, journal.clone());
        let files = Files::new(metadata.clone(), pool.clone(), stats.clone(), config);
        let contents = OpenFileTable::new(metadata.clone(), files.clone(), pool.clone(), stats.clone(), &config.client);
        let staged = StagedFiles::new(metadata.clone(), files.clone(), pool.clone(), stats.clone(), &config.client);
        let views =
            Views::new(master.clone(), tables.clone(), files.clone(), pool.clone(), stats.clone(), &config.client);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let client = Arc::new(Self {
            master,
            tables,
            metadata,
            files,
            contents,
            staged,
            views,
            pool,
            stats,
            tasks: tasks.clone(),
            stop: stop.clone(),
            inherited: Mutex::default(),
        });
        if let Some(journal) = &journal {
            client.staged.begin_epoch(journal.epoch());
        }
        let is_new_place = predecessor.is_none() && !who.place.is_empty();
        if let Some(predecessor) = predecessor {
            // Before the first event: what is open must be held before its removal is acknowledged.
            let open: Vec<_> = predecessor.open.iter().map(|inode| client.metadata.keep_held(*inode)).collect();
            *client.inherited.lock() = open;
            (predecessor.begin)(&client.metadata);
        }
        // The tables come before the session, so that the first entry finds its mount; the session's events report
        // changes.
        client.tables.fetch().await?;
        if is_new_place {
            // The session that begins here ends the one before.
            client.await_replays(&who.place).await;
        }
        // Before there is a session: whoever has waited for one finds what the process before had asked for.
        let sending = client.metadata.send_changes(stop.clone());
        let outages = (client.metadata.clone(), sink.clone(), stop.clone());
        tasks.spawn(async move { outages.0.follow_outages(outages.1, outages.2).await });
        let watch = (client.metadata.clone(), who, stop.clone());
        tasks.spawn(async move { watch.0.watch(watch.1, sink, watch.2).await });
        tasks.spawn(sending);
        let fresh = (client.metadata.clone(), stop.clone());
        tasks.spawn(async move { fresh.0.run_refresher(fresh.1).await });
        let current = (client.tables.clone(), client.metadata.clone(), stop.clone());
        tasks.spawn(async move {
            current.0.run_updater(current.2, |mounts| current.1.mounts_replaced(mounts)).await;
        });
        let sweep = (client.files.clone(), stop.clone());
        tasks.spawn(async move { sweep.0.sweep(sweep.1).await });
        let idle = (client.views.clone(), stop.clone());
        tasks.spawn(async move { idle.0.close_idle(idle.1).await });
        let sweep = (client.staged.clone(), stop);
        tasks.spawn(async move { sweep.0.sweep(sweep.1).await });
        if let Err(error) = client.metadata.session_begins().await {
            // That ends the session, which another process is to have.
            if journal.is_none() {
                client.shutdown().await;
            }
            return Err(error);
        }
        Ok(client)
    }

    /// Finishes what the process before was at: changes that had no answer, and what was written and not committed.
    /// Gives the files of which something was written, which are to be dropped when the others are open again.
    pub async fn recover(&self) -> Vec<File> {
        self.metadata.replayed().await;
        self.contents.recover().await.files.into_iter().map(File::of_content).collect()
    }

    /// Brings what was written to where the process after this one finds it; the reason why that cannot be.
    pub async fn prepare_to_be_replaced(&self) -> Result<(), String> {
        let staged = self.staged.written();
        if staged > 0 {
            return Err(format!(
                "{staged} files of cache-mode mounts are being written: try again when they are closed"
            ));
        }
        self.hand_in().await;
        Ok(())
    }

    /// Has the master know what was written and answered, as far as that can be had now.
    async fn hand_in(&self) {
        // What cannot be committed now is by the next process, if there is one.
        self.contents.commit_all().await;
        // So is what cannot be made.
        let _made = self.metadata.flush_write_back().await;
    }

    /// Has the master know all that was written and answered, by a process that is about to end without a successor.
    /// Nothing is answered before the master has it from now on. Not bounded.
    pub async fn leave(&self) {
        self.metadata.stop_write_back();
        self.hand_in().await;
    }

    /// Commits files of which the process before had written something, and that nobody has open here, until `stop`.
    pub async fn settle(&self, written: Vec<File>, stop: CancellationToken) {
        let mut backoff = backoff::COMMIT.begin();
        let settled = async {
            while written.iter().any(File::is_dirty) {
                self.contents.commit_all().await;
                backoff.wait().await;
            }
        };
        let _stopped = stop.run_until_cancelled(settled).await;
    }

    /// Everything that was open in the process before is open here.
    pub fn recovered(&self) {
        let inherited = std::mem::take(&mut *self.inherited.lock());
        drop(inherited);
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Versions of objects, to be read.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// Contents of files of fs-mode mounts.
    pub(crate) fn contents(&self) -> &OpenFileTable {
        &self.contents
    }

    /// Files of cache-mode mounts that are being written, and changes of names there.
    pub(crate) fn staged(&self) -> &StagedFiles {
        &self.staged
    }

    /// Views, which no path of the namespace leads to.
    pub fn views(&self) -> &Views {
        &self.views
    }

    pub fn master(&self) -> &MasterChannel {
        &self.master
    }

    pub fn pool(&self) -> &Arc<WorkerPool> {
        &self.pool
    }

    /// The mounts as of the last table.
    pub fn mounts(&self) -> Arc<Mounts> {
        self.tables.mounts()
    }

    /// Has the worker table tell how full the workers are now, or were a moment ago. Waits for no master that is away.
    pub async fn renew_workers(&self) {
        self.tables.renew_workers().await;
    }

    /// The workers as of the last table; for `statfs` and placement.
    pub fn workers(&self) -> Arc<Placement> {
        self.pool.placement()
    }

    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Makes a change where it is to be made: in the bucket of a cache-mode mount that is written to, else at the
    /// master. What is refused is [`ClientError::Refused`] with the errno.
    pub async fn change(&self, change: Change, uid: u32, gid: u32) -> Result<Changed, ClientError> {
        match changed_inode(&change) {
            Some(inode) => self.change_on(&self.metadata.node(inode).await?, change, (uid, gid), None).await,
            None => self.metadata.change(change, uid, gid).await,
        }
    }

    /// Makes a change for a caller that knows the directory, or else the inode, that it is made on; and who asks for
    /// it, where that is checked ([`MountView::limits_users`](crate::MountView::limits_users)).
    pub async fn change_on(
        &self,
        on: &Arc<Node>,
        change: Change,
        owner: (u32, u32),
        user: Option<User>,
    ) -> Result<Changed, ClientError> {
        if on.is_in_writable_bucket() {
            self.metadata.check_change(on)?;
            if let Change::Rename(rename) = &change
                && let Some(target) = self.metadata.cached_node(rename.new_parent)
            {
                self.metadata.check_change(&target)?;
            }
            return Box::pin(self.staged.change(on, &change, owner)).await;
        }
        self.metadata.change_by(change, owner, user).await
    }

    /// A node that is known here.
    pub fn cached_node(&self, inode: u64) -> Option<Arc<Node>> {
        if StagedFiles::is_staged(inode) {
            return self.staged.get(inode).map(|file| file.node());
        }
        self.metadata.cached_node(inode)
    }

    /// A node, asking the master where it is not known here. `Stale` when it is gone.
    pub async fn node(&self, inode: u64) -> Result<Arc<Node>, ClientError> {
        if StagedFiles::is_staged(inode) {
            let gone = || ClientError::Stale(format!("inode {inode}, which was written here,"));
            return self.staged.get(inode).map(|file| file.node()).ok_or_else(gone);
        }
        self.metadata.node(inode).await
    }

    /// What a name leads to on this client, if that is not what the namespace says: a file that the bucket does not
    /// have as it is, or one that somebody is about to open for writing.
    pub fn shown_here(&self, parent: u64, name: &[u8]) -> Option<Arc<Node>> {
        self.staged.shown(parent, name).map(|file| file.node())
    }

    /// How long a kernel may trust an answer about a node: about what is being written here, or about attributes that
    /// the bucket was not there to be asked for, not at all.
    pub fn trust(&self, node: &Node) -> Duration {
        let is_passing = StagedFiles::is_staged(node.inode) || node.lacks_attributes();
        if is_passing { Duration::ZERO } else { self.metadata.trust(node) }
    }

    /// What was written here of a file that the master does not know yet, or did not when it told of this node.
    pub fn uncommitted(&self, node: &Node) -> Option<UncommittedAttr> {
        let posix = node.posix().filter(|_| node.kind == Kind::File)?;
        self.contents.get(node.inode)?.unsettled(posix.version)
    }

    /// Makes what is written to files that stay open known, every few seconds, until `stop`: others see it, the bucket
    /// gets it, and it outlives this process.
    pub async fn run_committer(&self, stop: CancellationToken) {
        stop.run_until_cancelled(self.contents.run_committer()).await;
    }

    /// Whether anything is mounted in the namespace whose inodes have attributes, locks and quotas of their own.
    pub fn has_posix_mounts(&self) -> bool {
        self.mounts().iter().any(|mount| mount.is_fs_mode())
    }

    /// Whether a file may have an attribute which programs ask each file for, by its bit of
    /// [`cavern_posix::xattr::probed`]. True where that is not certain: without a lease, and while the mount table is
    /// on its way.
    pub fn may_have_probed(&self, probed: u32) -> bool {
        let is_certain = self.tables.has_current_mounts() && self.metadata.has_session();
        !is_certain || self.mounts().probed_xattrs() & (probed | UNLISTED) != 0
    }

    /// A file has been given such an attribute here: whoever asks any file for it next may find one, before the master
    /// announces so.
    pub fn note_probed(&self, probed: u32) {
        if self.mounts().probed_xattrs() & probed != probed {
            self.tables.refetch_mounts();
        }
    }

    /// Whether anything that can be changed is mounted in the namespace.
    pub fn has_writable(&self) -> bool {
        self.mounts().iter().any(|mount| mount.is_fs_mode() || mount.has_writable_bucket())
    }

    /// Stops every task and connection. Calls in flight fail; so do later ones that need the network.
    pub async fn shutdown(&self) {
        self.metadata.end_close_grace(Duration::ZERO);
        self.contents.return_blocks(Duration::ZERO).await;
        let made = self.metadata.flush_write_back().await;
        match (made, self.metadata.journal()) {
            (Ok(()), Some(journal)) => journal.end(),
            // Whoever keeps it finds what the master does not have.
            (Err(_), Some(journal)) => journal.freeze(),
            (_, None) => {}
        }
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.staged.shutdown().await;
        self.files.shutdown().await;
        self.pool.shutdown().await;
        self.master.shutdown().await;
    }
}

/// The directory, or else the inode, that a change is made on, where buckets may have it.
fn changed_inode(change: &Change) -> Option<u64> {
    match change {
        Change::Create(create) => Some(create.parent),
        Change::Link(link) => Some(link.parent),
        Change::Remove(remove) => Some(remove.parent),
        Change::Rename(rename) | Change::RenameWhiteout(rename) => Some(rename.parent),
        Change::SetAttr(set) => Some(set.inode),
        Change::SetXattr(set) => Some(set.inode),
        Change::RemoveXattr(remove) => Some(remove.inode),
        _ => None,
    }
}

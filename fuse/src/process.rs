//! The life of `cv fuse`: connect, mount, serve, unmount.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use cavern_client::{Client, File, Identity, InvalidationSink as _, Journal, Metadata, Node, Predecessor};
use cavern_conf::process::{Metrics, ProcessError, raise_descriptor_limit, ready};
use cavern_conf::schema::Choice;
use cavern_conf::{Config, host, schema};
use cavern_proto::journal::MountRecord;
use cavern_security::{AuditLog, HttpAccess, HttpServer, Transport};
use parking_lot::Mutex;
use prost::Message as _;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdFlags, Signal, getpid, kill_process};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::data_set;
use crate::error::FuseError;
use crate::filesystem::{EarlierHandles, Namespace, asks_for_passthrough};
use crate::invalidation::{Inodes, Invalidations, NotifierThread};
use crate::journal_at_worker;
use crate::kernel::channel::fall_silent;
use crate::kernel::mount::Unmounted;
use crate::kernel::{Agreement, Connection, Mount, MountOptions, Session, SessionOptions, StagedMount};
use crate::metrics::MountCollector;
use crate::mount_journal::{apply_mount, record_of_mount, recorded_mount};
use crate::root::{INNER_NAME, Root};
use crate::supervisor::{Kind, Link, Message, SupervisedMount};

/// How long requests in flight may take to end when the mount is in use at shutdown.
const DRAIN: Duration = Duration::from_secs(2);
/// The kernel closes the connection of a mount that is gone everywhere within this time.
const COPIES_WAIT: Duration = Duration::from_secs(1);
/// The kernel sends what was under way again at once; whoever is not back by then waits for nothing.
const RESENT_WITHIN: Duration = Duration::from_secs(30);
/// For the master to make what was answered, when the supervisor is dead.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The daemon of a supervisor that was killed may have the port for a moment still.
const PORT_WAIT: Duration = Duration::from_secs(2);
/// Between two attempts to unmount, since the kernel closes the last files a moment after close(2), and two attempts to
/// have the port.
const RETRY: Duration = Duration::from_millis(20);

/// Serves `fuse.path` at `fuse.mount_point` until `stop`, or until somebody unmounts it; unmounts and returns.
///
/// # Errors
/// What keeps the mount from being made: the port, the master, the path, the mount point, the device.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), FuseError> {
    live(config, stop, None).await
}

/// Serves the mount as the daemon of a supervisor, which is at the other end of the standard input: mounts if it is the
/// first of them, and goes on where the one before was otherwise.
///
/// # Errors
/// Those of [`run`]; and what the one before has left cannot be read.
pub async fn run_supervised(config: Config, stop: CancellationToken) -> Result<(), FuseError> {
    // The supervisor's death is ours at once, until `outlive_supervisor`.
    let supervisor = die_with_parent(Some(Signal::KILL)).and_then(|()| parent()).map_err(FuseError::Supervisor)?;
    let link = Link::of_standard_input().map_err(FuseError::Supervisor)?;
    let begin = link.receive().await.map_err(FuseError::Supervisor)?;
    let Some(Message { kind: Kind::Begin, descriptors, .. }) = begin else {
        return Err(FuseError::Supervisor(io::Error::other("it is gone")));
    };
    let mut descriptors = descriptors.into_iter();
    let memory = descriptors.next().ok_or_else(|| FuseError::Supervisor(io::Error::other("it has no journal")))?;
    let journal = Journal::open(memory).map_err(FuseError::Journal)?;
    let kept = SupervisedDaemon { supervisor, link, journal: journal.clone(), descriptors: descriptors.collect() };
    let served = live(config, stop, Some(kept)).await;
    // Whatever is let go of from here on is for the next.
    journal.freeze();
    served
}

/// What the daemon of a supervisor has.
struct SupervisedDaemon {
    supervisor: OwnedFd,
    link: Link,
    journal: Arc<Journal>,
    /// The port and the devices, if there is a mount.
    descriptors: Vec<OwnedFd>,
}

/// A mount that the process before has left.
struct Inherited {
    mount: MountRecord,
    connection: Arc<Connection>,
    handles: EarlierHandles,
}

async fn live(mut config: Config, stop: CancellationToken, kept: Option<SupervisedDaemon>) -> Result<(), FuseError> {
    fit_descriptor_cache(&mut config);
    let transport = Transport::of(&config)?;
    let access = HttpAccess::of(&config.security, &transport, &AuditLog::default())?;
    let (mut http, mut inherited) = (None, None);
    let (supervisor, link, journal) = match kept {
        None => (None, None, None),
        Some(SupervisedDaemon { supervisor, link, journal, descriptors }) => {
            let mut descriptors = descriptors.into_iter();
            if let Some(port) = descriptors.next() {
                let mount = recorded_mount(&journal).ok_or_else(|| nothing_left("how the mount was made"))?;
                apply_mount(&mount, &mut config.fuse);
                let agreement = Agreement { minor: mount.minor, flags: mount.flags };
                http = Some(HttpServer::of(port).map_err(FuseError::Supervisor)?);
                let connection = Arc::new(Connection::new(descriptors.collect(), agreement)?);
                let handles = EarlierHandles::of(&journal);
                inherited = Some(Inherited { mount, connection, handles });
            }
            (Some(supervisor), Some(link), Some(journal))
        }
    };
    let http = match http {
        Some(http) => http,
        None => bind(&config.fuse.http_listen, if journal.is_some() { PORT_WAIT } else { Duration::ZERO }).await?,
    };
    let invalidations = Invalidations::new();
    let began: Began = Arc::default();
    let predecessor = inherited.as_ref().zip(journal.as_ref()).map(|(inherited, journal)| {
        let (root, connection) = (root_of(&inherited.mount), Arc::clone(&inherited.connection));
        let (invalidations, began) = (Arc::clone(&invalidations), Arc::clone(&began));
        let begin = move |metadata: &Metadata| {
            let notifier = invalidations.attach(connection.notifier(), Arc::clone(&root), inodes(metadata));
            // Whatever the kernel has is out of date until events arrive again.
            invalidations.reset();
            *began.lock() = Some(notifier.map(|notifier| (root, notifier)));
        };
        Predecessor { journal: Arc::clone(journal), open: inherited.handles.kept(), begin: Box::new(begin) }
    });
    let sink = Arc::clone(&invalidations) as _;
    let goes_on = predecessor.is_some();
    let who = identity(&config);
    let client = Client::connect_with(&config, who.clone(), sink, journal.clone(), predecessor).await?;
    let mut keeping = None;
    if let (Some(supervisor), Some(journal)) = (supervisor, &journal) {
        let other = supervisor.try_clone().map_err(FuseError::Supervisor)?;
        outlive_supervisor(supervisor, &client).map_err(FuseError::Thread)?;
        let journal = Arc::clone(journal);
        keeping = Some(host::spawn(journal_at_worker::run(Arc::clone(&client), journal, other, who)));
    }
    let process = Process { config: &config, transport, access, client: &client, invalidations, link, journal, began };
    let served = process.serve(http, inherited, stop).await;
    // The session is left to the next process, if this one could not go on with it.
    if served.is_ok() || !goes_on {
        client.shutdown().await;
    }
    if let Some(keeping) = keeping {
        // What is not made by now is by somebody else.
        keeping.abort();
        let _aborted = keeping.await;
    }
    served
}

fn die_with_parent(signal: Option<Signal>) -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(signal)?)
}

/// Can be read when the parent is dead.
fn parent() -> io::Result<OwnedFd> {
    let parent = rustix::process::getppid().ok_or_else(|| io::Error::other("it is gone"))?;
    Ok(rustix::process::pidfd_open(parent, PidfdFlags::empty())?)
}

/// Has this process die soon after its supervisor. What was answered is made first, and nothing is answered meanwhile:
/// there may be no worker that keeps the journal, too.
/// The mount is left as it is, dead: nobody is to take for it what lies below.
fn outlive_supervisor(supervisor: OwnedFd, client: &Arc<Client>) -> io::Result<()> {
    let (client, runtime) = (Arc::downgrade(client), Handle::current());
    let wait = move || {
        while poll(&mut [PollFd::new(&supervisor, PollFlags::IN)], None).is_err() {}
        fall_silent();
        warn!("the supervisor is gone: what was answered is made, and this process ends");
        if let Some(client) = client.upgrade() {
            let made = runtime.block_on(async { tokio::time::timeout(LAST_WORDS, client.leave()).await });
            if made.is_err() {
                warn!("the master does not answer: what was answered last is left to the worker of this host");
            }
        }
        let _ = kill_process(getpid(), Signal::KILL);
    };
    std::thread::Builder::new().name("parent-watch".to_owned()).spawn(wait)?;
    die_with_parent(None)
}

/// Binds the port, if that can be done within a while.
async fn bind(listen: &str, patience: Duration) -> Result<HttpServer, ProcessError> {
    let deadline = tokio::time::Instant::now() + patience;
    loop {
        match HttpServer::bind(listen).await {
            Err(ProcessError::AddressInUse { .. }) if tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(RETRY).await;
            }
            bound => return bound,
        }
    }
}

/// The notifier of a mount that was there, and its root.
type Began = Arc<Mutex<Option<io::Result<(Arc<Root>, NotifierThread)>>>>;

fn root_of(mount: &MountRecord) -> Arc<Root> {
    let root = Root::new(&mount.path, mount.root);
    if mount.is_inside {
        root.move_inside();
    }
    Arc::new(root)
}

fn nothing_left(what: &str) -> FuseError {
    FuseError::Journal(io::Error::other(format!("it does not say {what}")))
}

/// A process that serves a mount.
struct Process<'p> {
    config: &'p Config,
    transport: Transport,
    access: HttpAccess,
    client: &'p Arc<Client>,
    invalidations: Arc<Invalidations>,
    /// To the supervisor, if there is one.
    link: Option<Link>,
    journal: Option<Arc<Journal>>,
    began: Began,
}

impl Process<'_> {
    async fn serve(
        &self,
        http: HttpServer,
        inherited: Option<Inherited>,
        stop: CancellationToken,
    ) -> Result<(), FuseError> {
        let (config, client, invalidations) = (self.config, self.client, &self.invalidations);
        let begun = self.began.lock().take();
        let mut fuse = config.fuse.clone();
        let (root, begun, read_only) = match begun {
            Some(begun) => {
                let (root, notifier) = begun.map_err(FuseError::Thread)?;
                (root, Some(notifier), false)
            }
            None => {
                let node = find_root(client, &fuse.path).await?;
                let read_only = data_set::settle(&mut fuse, &node);
                (Arc::new(Root::new(&fuse.path, node.inode)), None, read_only)
            }
        };
        // Handles name the cluster.
        client.metadata().in_session().await?;
        let shared = Arc::clone(invalidations);
        let (journal, shown) = (self.journal.clone(), Arc::clone(&root));
        let namespace = Arc::new(Namespace::new(Arc::clone(client), shown, shared, &fuse, journal));
        let is_first = inherited.is_none();
        let (mount, session, written) = match inherited {
            Some(inherited) => self.go_on(inherited, &namespace, &http).await?,
            None => {
                let (mount, session) = begin(&fuse, read_only, &root, Arc::clone(&namespace)).await?;
                (mount, session, Vec::new())
            }
        };
        let notifier = match begun {
            Some(notifier) => notifier,
            None => invalidations
                .attach(session.connection.notifier(), Arc::clone(&root), inodes(client.metadata()))
                .map_err(FuseError::Thread)?,
        };
        if is_first {
            self.note_mount(&fuse, &mount, &session, &root)?;
            let held = SupervisedMount { path: mount.path().to_owned(), is_by_root: mount.is_by_root() };
            self.hand_over(&held, session.connection.agreement(), session.connection.descriptors(), &http).await?;
            if let Some(journal) = &self.journal {
                journal.thaw();
            }
        }
        let usage = namespace.usage();
        let sweeping = CancellationToken::new();
        let sweeper = host::spawn(namespace.sweep(sweeping.clone()));
        let committer = host::spawn(namespace.commit(sweeping.clone()));
        let (settling, stop_settling) = (Arc::clone(client), sweeping.clone());
        let settler = host::spawn(async move { settling.settle(written, stop_settling).await });
        let (with_views, stop_clearing) = (Arc::clone(client), sweeping.clone());
        let clearer = host::spawn(async move {
            // A process that goes on shows what the one before has shown.
            if is_first {
                let _stopped = stop_clearing.run_until_cancelled(with_views.views().sweep()).await;
            }
        });
        let most = config.fuse.max_background.div_ceil(2).into();
        let mover = host::spawn(invalidations.keep_moving(most, sweeping.clone()));

        let metrics = Metrics::new("fuse");
        metrics.register_collector(MountCollector {
            in_flight: Arc::clone(&session.in_flight),
            invalidations: Arc::clone(invalidations),
            usage: Box::new(usage),
        });
        self.transport.register_metrics(&metrics);
        metrics.with_registry(|registry| client.stats().register(registry.sub_registry_with_prefix("cavern")));
        let ended = session.ended.clone();
        let address = http.local_addr();
        let http_stop = CancellationToken::new();
        let gone = ended.clone();
        let health =
            move || if gone.is_cancelled() { Err("the kernel's connection is gone".to_owned()) } else { Ok(()) };
        let web = host::spawn(http.serve(self.access.clone(), Router::new(), metrics, health, http_stop.clone()));

        let mount_point = mount.path().display().to_string();
        let minor = session.connection.agreement().minor;
        info!(mount_point, path = config.fuse.path, minor, "{}", if is_first { "mounted" } else { "served again" });
        if is_first {
            ready("fuse", &[("mount_point", mount_point.clone()), ("http", address.to_string())]);
        }
        self.say(Kind::Ready, "").await;
        let forget = tokio::time::sleep(RESENT_WITHIN);
        tokio::pin!(forget);
        let mut has_forgotten = is_first;
        loop {
            tokio::select! {
                () = stop.cancelled() => {
                    info!(mount_point, "stopping");
                    break;
                }
                () = ended.cancelled() => {
                    warn!(mount_point, "unmounted by somebody else: stopping");
                    break;
                }
                () = &mut forget, if !has_forgotten => {
                    has_forgotten = true;
                    namespace.forget_earlier();
                }
                () = self.supervisor_asks() => {}
            }
        }
        end(mount, session, notifier).await;
        sweeping.cancel();
        http_stop.cancel();
        for task in [sweeper, committer, settler, clearer, mover, web] {
            if let Err(panicked) = task.await {
                warn!(%panicked, "a task ended early");
            }
        }
        Ok(())
    }

    /// Takes up what the process before has left.
    async fn go_on(
        &self,
        inherited: Inherited,
        namespace: &Arc<Namespace>,
        http: &HttpServer,
    ) -> Result<(Mount, Session, Vec<File>), FuseError> {
        let Inherited { mount: record, connection, handles } = inherited;
        let written = self.client.recover().await;
        namespace.restore(handles, &connection).await;
        self.client.recovered();
        // The notifier has clones of its channel, and nothing else of the connection.
        let mut connection = Arc::into_inner(connection).ok_or_else(|| nothing_left("who else uses the connection"))?;
        let held = SupervisedMount { path: PathBuf::from(record.mount_point), is_by_root: record.is_by_root };
        let options = session_options(&self.config.fuse);
        // A request that was read from a descriptor of which the supervisor has none would end with this process.
        if connection.widen(options.threads) {
            self.hand_over(&held, connection.agreement(), connection.descriptors(), http).await?;
        }
        if let Some(journal) = &self.journal {
            journal.thaw();
        }
        namespace.give_back();
        // Whatever was under way comes once more. Before the first request is read: it would come twice.
        if let Err(cause) = connection.notifier().resend() {
            warn!(%cause, "the kernel does not send again what was under way");
        }
        let session = Session::go_on(connection, &options, Arc::clone(namespace), Handle::current())?;
        // Not before: a mount that is dropped is taken away, and another process may do better.
        Ok((Mount::adopt(held.path, held.is_by_root, record.device), session, written))
    }

    /// Leaves to the next process how the mount was made.
    fn note_mount(&self, fuse: &schema::Fuse, mount: &Mount, session: &Session, root: &Root) -> Result<(), FuseError> {
        let Some(journal) = &self.journal else { return Ok(()) };
        let record = record_of_mount(fuse, session.connection.agreement(), mount, root);
        match journal.mount.put(&record.encode_to_vec()) {
            // It stays for as long as the mount.
            Some(slot) => std::mem::forget(slot),
            None => return Err(nothing_left("how the mount was made")),
        }
        Ok(())
    }

    /// Leaves to the supervisor the port and the devices.
    async fn hand_over<'a>(
        &self,
        held: &SupervisedMount,
        agreement: Agreement,
        devices: impl Iterator<Item = BorrowedFd<'a>>,
        http: &'a HttpServer,
    ) -> Result<(), FuseError> {
        let Some(link) = &self.link else { return Ok(()) };
        if !agreement.has_resend() {
            warn!("this kernel sends no request again (Linux 6.9 and later): the mount ends with this process");
            return Ok(());
        }
        let mut descriptors = vec![http.descriptor()];
        descriptors.extend(devices);
        link.send(Kind::Keep, &held.text(), &descriptors).await.map_err(FuseError::Supervisor)
    }

    async fn say(&self, kind: Kind, text: &str) {
        if let Some(link) = &self.link
            && let Err(cause) = link.send(kind, text, &[]).await
        {
            warn!(%cause, "the supervisor of the mount cannot be reached");
        }
    }

    /// Answers what the supervisor asks for. Waits for ever where there is none.
    async fn supervisor_asks(&self) {
        let Some(link) = &self.link else { return std::future::pending().await };
        match link.receive().await {
            Ok(Some(Message { kind: Kind::Replace, .. })) => {
                let reason = self.client.prepare_to_be_replaced().await.err().unwrap_or_default();
                self.say(Kind::Replace, &reason).await;
            }
            Ok(Some(_)) => {}
            // See `outlive_supervisor`.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

fn inodes(metadata: &Metadata) -> Inodes {
    let (known, referred) = (metadata.clone(), metadata.clone());
    Inodes {
        open: Box::new(move || known.open_inodes()),
        forgotten: Box::new(move |inode| referred.no_longer_referenced(inode)),
    }
}

/// Leaves a quarter of the descriptors that the process may have to sockets, open files, and what waits to be closed.
fn fit_descriptor_cache(config: &mut Config) {
    let limit = usize::try_from(raise_descriptor_limit()).unwrap_or(usize::MAX);
    let (asked, most) = (config.client.descriptor_cache, (limit / 4 * 3).max(1));
    if asked > most {
        info!(asked, most, limit, "client.descriptor_cache is more than the limit of open files allows: using less");
        config.client.descriptor_cache = most;
    }
}

/// What the master shows of this client in its list of sessions, and the mount point, of this boot of this host and of
/// this mount namespace, where no other client can be.
fn identity(config: &Config) -> Identity {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mount_point = config.fuse.mount_point.display();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let namespace = std::fs::read_link("/proc/self/ns/mnt");
    let place = match (boot, namespace) {
        (Ok(boot), Ok(namespace)) => format!("{}:{}:{mount_point}", boot.trim(), namespace.display()),
        // Without /proc nobody can say so.
        _ => String::new(),
    };
    Identity { name: format!("{host}:{mount_point}"), place }
}

async fn find_root(client: &Client, path: &str) -> Result<Arc<Node>, FuseError> {
    let node =
        client.metadata().resolve(path).await.map_err(|cause| FuseError::Path { path: path.to_owned(), cause })?;
    if node.is_directory() { Ok(node) } else { Err(FuseError::NotADirectory { path: path.to_owned() }) }
}

/// Mounts and greets the kernel, both of which block.
async fn begin(
    fuse: &schema::Fuse,
    read_only: bool,
    root: &Arc<Root>,
    namespace: Arc<Namespace>,
) -> Result<(Mount, Session), FuseError> {
    let (fuse, root) = (fuse.clone(), Arc::clone(root));
    let runtime = Handle::current();
    let begun = spawn_blocking(move || {
        let options =
            MountOptions { source: fuse.source.clone(), allow_other: fuse.allow_other, exec: fuse.exec, read_only };
        let asked = session_options(&fuse);
        // Only with access lists is there something to be gained.
        let staged = if asked.posix_acl { StagedMount::make(&fuse.mount_point, &options)? } else { None };
        let (mount, session) = match staged {
            Some((staged, device)) => {
                root.move_inside();
                let session = Session::start(device, &asked, namespace, runtime)?;
                let (mount, is_inside) = staged.attach(INNER_NAME)?;
                if !is_inside {
                    root.stay_outside();
                }
                (mount, session)
            }
            None => {
                let (mount, device) = Mount::make(&fuse.mount_point, &options)?;
                (mount, Session::start(device, &asked, namespace, runtime)?)
            }
        };
        let readahead = fuse.kernel_readahead.bytes();
        if asked.passthrough && fuse.passthrough == Choice::On && !session.connection.agreement().has_passthrough() {
            warn!("this kernel has no passthrough (Linux 6.9 and later): reads go through cv fuse");
        }
        mount.set_read_ahead(if fuse.direct { 0 } else { readahead });
        Ok((mount, session))
    });
    begun.await.unwrap_or_else(|panicked| Err(FuseError::Thread(io::Error::other(panicked))))
}

/// What is asked of the kernel.
fn session_options(fuse: &schema::Fuse) -> SessionOptions {
    let has_opens = fuse.no_open != Choice::On;
    SessionOptions {
        threads: fuse.threads,
        max_background: fuse.max_background,
        max_readahead: u32::try_from(fuse.kernel_readahead.bytes()).unwrap_or(u32::MAX),
        async_dio: has_opens,
        // Without closes nobody would know when they end.
        locks: has_opens,
        posix_acl: fuse.posix_acl && fuse.xattrs != Choice::Off,
        passthrough: asks_for_passthrough(fuse),
    }
}

/// Lets requests in flight end, answers what is left, takes the mount away and waits for every thread.
async fn end(mut mount: Mount, session: Session, notifier: NotifierThread) {
    let (in_flight, ended) = (Arc::clone(&session.in_flight), session.ended.clone());
    // The kernel gives the number of the device to others as soon as the mount is gone.
    let control = mount.control();
    let mount_point = mount.path().display().to_string();
    let mut unmounted = unmount(&mut mount).await;
    let deadline = tokio::time::Instant::now() + DRAIN;
    while unmounted == Unmounted::Busy && tokio::time::Instant::now() < deadline {
        // With nothing in flight it is open files and working directories that hold the mount: no use to wait long.
        let settled = in_flight.waiting() == 0;
        tokio::time::sleep(RETRY).await;
        unmounted = unmount(&mut mount).await;
        if settled && in_flight.waiting() == 0 {
            break;
        }
    }
    in_flight.close(libc::EIO).await;
    if unmounted == Unmounted::Busy {
        warn!(mount_point, "the mount is in use: it is taken away, and open files fail from now on");
    }
    // A thread of its own, which keeps no runtime from ending.
    let (done, joined) = tokio::sync::oneshot::channel();
    let wait = move || {
        drop(mount);
        session.join();
        drop(notifier);
        // Nobody waits any more for what cannot be ended.
        let _ = done.send(());
    };
    if let Err(cause) = std::thread::Builder::new().name("unmount".to_owned()).spawn(wait) {
        warn!(%cause, "the threads of the mount are not waited for");
    }
    // The kernel ends the connection when the last mount of it goes, and other mount namespaces may have copies.
    if tokio::time::timeout(COPIES_WAIT, ended.cancelled()).await.is_err() {
        match tokio::task::block_in_place(|| control.abort()) {
            Ok(true) => {
                warn!(
                    mount_point,
                    "the mount was left in another mount namespace, or to open files: it is ended there"
                );
            }
            // The event loops are about to find out.
            Ok(false) => {}
            Err(cause) => {
                // The kernel ends it when the last descriptor of it goes, with this process and its supervisor.
                warn!(mount_point, %cause, "the kernel's connection cannot be ended: its requests are left unanswered");
                return;
            }
        }
    }
    // An error where a thread has panicked, which has said so.
    let _ended = joined.await;
}

async fn unmount(mount: &mut Mount) -> Unmounted {
    // An unmount is either possible at once or refused; views that are mounted below are looked up by way of the mount.
    tokio::task::block_in_place(|| mount.unmount())
}

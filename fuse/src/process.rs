//! The life of `cv fuse`: connect, mount, serve, unmount.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use cavern_client::{Client, Identity};
use cavern_conf::process::{HttpServer, Metrics, raise_descriptor_limit, ready};
use cavern_conf::{Config, host};
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::error::FuseError;
use crate::filesystem::Namespace;
use crate::invalidation::{Inodes, Invalidations, NotifierThread};
use crate::kernel::mount::Unmounted;
use crate::kernel::{Mount, MountOptions, Session, SessionOptions};
use crate::metrics::MountCollector;
use crate::root::Root;

/// How long requests in flight may take to end when the mount is in use at shutdown.
const DRAIN: Duration = Duration::from_secs(2);
/// Between two attempts to unmount: the kernel closes the last files a moment after close(2).
const RETRY: Duration = Duration::from_millis(20);

/// Serves `fuse.path` at `fuse.mount_point` until `stop`, or until somebody unmounts it; unmounts and returns.
///
/// # Errors
/// What keeps the mount from being made: the port, the master, the path, the mount point, the device.
pub async fn run(mut config: Config, stop: CancellationToken) -> Result<(), FuseError> {
    fit_descriptor_cache(&mut config);
    let http = HttpServer::bind(&config.fuse.http_listen).await?;
    let invalidations = Invalidations::new();
    let client = Client::connect(&config, identity(&config), Arc::clone(&invalidations) as _).await?;
    let served = serve(&config, http, &client, invalidations, stop).await;
    client.shutdown().await;
    served
}

async fn serve(
    config: &Config,
    http: HttpServer,
    client: &Arc<Client>,
    invalidations: Arc<Invalidations>,
    stop: CancellationToken,
) -> Result<(), FuseError> {
    let root = find_root(client, &config.fuse.path).await?;
    // Handles name the cluster.
    client.metadata().in_session().await?;
    let shared = Arc::clone(&invalidations);
    let namespace = Arc::new(Namespace::new(Arc::clone(client), Arc::clone(&root), shared, &config.fuse));
    let usage = namespace.usage();
    let sweeping = CancellationToken::new();
    let sweeper = host::spawn(namespace.sweep(sweeping.clone()));
    let committer = host::spawn(namespace.commit(sweeping.clone()));
    let (mount, session) = begin(config, namespace).await?;
    let notifier = invalidations.attach(session.notifier(), root, inodes(client)).map_err(FuseError::Thread)?;
    let mover = host::spawn(invalidations.keep_moving(config.fuse.max_background.div_ceil(2).into(), sweeping.clone()));

    let metrics = Metrics::new("fuse");
    metrics.register_collector(MountCollector {
        observation: session.observation(),
        in_flight: session.in_flight(),
        invalidations,
        usage: Box::new(usage),
    });
    metrics.with_registry(|registry| client.stats().register(registry.sub_registry_with_prefix("cavern")));
    let ended = session.ended();
    let address = http.local_addr();
    let http_stop = CancellationToken::new();
    let gone = ended.clone();
    let health = move || if gone.is_cancelled() { Err("the kernel's connection is gone".to_owned()) } else { Ok(()) };
    let web = host::spawn(http.serve(Router::new(), metrics, health, http_stop.clone()));

    let mount_point = mount.path().display().to_string();
    info!(mount_point, path = config.fuse.path, minor = session.agreement().minor, "mounted");
    ready("fuse", &[("mount_point", mount_point.clone()), ("http", address.to_string())]);
    tokio::select! {
        () = stop.cancelled() => info!(mount_point, "stopping"),
        () = ended.cancelled() => warn!(mount_point, "unmounted by somebody else: stopping"),
    }
    end(mount, session, notifier).await;
    sweeping.cancel();
    http_stop.cancel();
    finish(sweeper).await;
    finish(committer).await;
    finish(mover).await;
    finish(web).await;
    Ok(())
}

fn inodes(client: &Client) -> Inodes {
    let (known, referred) = (client.metadata().clone(), client.metadata().clone());
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

async fn find_root(client: &Client, path: &str) -> Result<Arc<Root>, FuseError> {
    let node =
        client.metadata().resolve(path).await.map_err(|cause| FuseError::Path { path: path.to_owned(), cause })?;
    if !node.is_directory() {
        return Err(FuseError::NotADirectory { path: path.to_owned() });
    }
    Ok(Arc::new(Root::new(path, node.inode)))
}

/// Mounts and greets the kernel, both of which block.
async fn begin(config: &Config, namespace: Arc<Namespace>) -> Result<(Mount, Session), FuseError> {
    let fuse = config.fuse.clone();
    let runtime = Handle::current();
    let begun = spawn_blocking(move || {
        // Without opens no caller could get the error that a file cannot be written.
        let options = MountOptions { allow_other: fuse.allow_other, read_only: fuse.no_open };
        let (mount, device) = Mount::make(&fuse.mount_point, &options)?;
        let readahead = fuse.kernel_readahead.bytes();
        let options = SessionOptions {
            threads: fuse.threads,
            max_background: fuse.max_background,
            max_readahead: u32::try_from(readahead).unwrap_or(u32::MAX),
            async_dio: !fuse.no_open,
            // Without closes nobody would know when they end.
            locks: !fuse.no_open,
            posix_acl: fuse.posix_acl,
            passthrough: fuse.passthrough && !fuse.direct,
        };
        let session = Session::start(device, &options, namespace, runtime)?;
        if options.passthrough && !session.agreement().has_passthrough() {
            warn!("this kernel has no passthrough (Linux 6.9 and later): reads go through cv fuse");
        }
        mount.set_read_ahead(if fuse.direct { 0 } else { readahead });
        Ok((mount, session))
    });
    begun.await.unwrap_or_else(|panicked| Err(FuseError::Thread(std::io::Error::other(panicked))))
}

/// Lets requests in flight end, answers what is left, takes the mount away and waits for every thread.
async fn end(mut mount: Mount, session: Session, notifier: NotifierThread) {
    let in_flight = session.in_flight();
    let mut unmounted = mount.unmount();
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
        warn!(mount_point = %mount.path().display(), "the mount is in use: it is taken away, and open files fail from \
            now on");
    }
    let joined = spawn_blocking(move || {
        drop(mount);
        session.join();
        notifier.stop();
    });
    finish(joined).await;
}

async fn unmount(mount: &mut Mount) -> Unmounted {
    // Never waits for this file system: an unmount is either possible at once or refused.
    tokio::task::block_in_place(|| mount.unmount())
}

async fn finish(task: JoinHandle<()>) {
    if let Err(panicked) = task.await {
        warn!(%panicked, "a task ended early");
    }
}

//! What one client may have of the master, and how fast it may go on.
//!
//! Nothing that all clients share is held while a call waits for the rate of its client, or for its turn: it has not
//! been decoded by then.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::schema;
use cavern_consensus::ProposalPermit;
use cavern_proto::master::MutateRequest;
use cavern_security::{Limit, RateCharge, Tenant, TenantCall, TenantLimits, Tenants};
use cavern_work::namespace::Lookups;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, SemaphorePermit};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http;

use super::peer::Peer;
use super::{messages, roles};

/// Calls of one client that are worked on at a time: as many as a kernel has under way for a mount.
const TURNS: usize = 256;
/// Changes of one client that wait for their entry of the log, or are in one: two entries, so that one is filled while
/// the other is written, and what others change waits for no more than these.
const CHANGES: usize = 512;
/// While other clients change something, too: what an entry of one client takes to be applied is what they wait.
const CHANGES_AMONG_OTHERS: usize = 16;
/// Listings of one client that are under way, until their last page has been taken. Each has up to two pages of a
/// thousand names in memory, and what is on its way.
const LISTINGS: usize = 64;
/// Pages of one client that are read at a time, each on a thread of its own: the processors are for others, too.
const PAGES: usize = 2;
/// Walks of one client through all that is below a directory at a time: each reads on many threads, for as long as it
/// takes.
const WALKS: usize = 2;
/// A call waits no longer for the rate of its client: whoever asked has given up by then.
const RATE_PATIENCE: Duration = Duration::from_secs(10);
/// A call of a client is answered within this time, from its first byte on: nobody waits longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Calls that may take any time, since they wait for other clients, for buckets or for workers. They are not many, and
/// keep no other call waiting.
const PATIENT: [&str; 3] = ["MakeListed", "FreeContent", "Recall"];

/// The clients of a master.
pub fn tenants(conf: &schema::Master) -> Tenants {
    Tenants::new(TenantLimits {
        connections: Limit { most: conf.client_connections, setting: "master.client_connections" },
        calls: Limit { most: conf.client_calls, setting: "master.client_calls" },
        per_second: Limit { most: conf.client_operations_per_second, setting: "master.client_operations_per_second" },
        turns: TURNS,
        room: CHANGES,
        // Those of workers.
        requests: 0,
        disk_turns: 0,
        streams: LISTINGS,
        parts: PAGES,
        walks: WALKS,
        writers: conf.client_sessions,
        messages: messages::ROOM_KIB,
    })
}

/// Makes a call of a client, at its time, and counts it until its answer has been taken. It is answered when it owes
/// nothing any more for what it has done in a mount.
pub(super) async fn make(
    charge: &RateCharge,
    path: &str,
    call: TenantCall,
    answer: impl Future<Output = http::Response<Body>>,
) -> http::Response<Body> {
    let tenant = charge.tenant();
    let method = roles::method(path);
    let (is_patient, is_stream) = (PATIENT.contains(&method), method == "Mutate");
    let stream = if is_stream { tenant.writers.clone().try_acquire_owned().ok() } else { None };
    if is_stream && stream.is_none() {
        tenant.counts.add_refusal();
        let (client, most) = (tenant.identity(), tenant.limits().writers);
        let reason =
            format!("{client} has {most} streams of changes already, as many as master.client_sessions allows");
        return Status::resource_exhausted(reason).into_http();
    }
    let answered = async {
        let turn = begin(tenant, path, is_patient).await?;
        let answer = answer.await;
        // Others of the tenant may be in mounts where they owe nothing.
        drop(turn);
        pay(charge).await?;
        Ok(answer)
    };
    let answered = if is_patient {
        answered.await
    } else {
        let late = |_| Err(Status::deadline_exceeded("the call was not sent, or not answered, within a minute"));
        tokio::time::timeout(CALL_TIMEOUT, answered).await.unwrap_or_else(late)
    };
    let answer = answered.unwrap_or_else(|refusal| refusal.into_http());
    answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _until_the_end = (&call, &stream);
            frame
        }))
    })
}

/// Waits for what a call owes. It has changed nothing: what would have to wait for too long is not answered.
async fn pay(charge: &RateCharge) -> Result<(), Status> {
    let wait = charge.wait();
    let tenant = charge.tenant();
    if wait > RATE_PATIENCE {
        let (mount_id, most) = charge.give_up().unwrap_or_default();
        tenant.counts.add_refusal();
        let client = tenant.identity();
        return Err(Status::resource_exhausted(format!(
            "{client} asks for more than the {most} operations in a second that its rule of mount {mount_id} allows: \
             ask for less at a time, or have an admin raise them (cv mount update --client)"
        )));
    }
    tenant.counts.wait(wait).await;
    Ok(())
}

/// Waits for the rate, if it is a call of the namespace, and for a turn.
async fn begin<'a>(tenant: &'a Tenant, path: &str, is_patient: bool) -> Result<Option<SemaphorePermit<'a>>, Status> {
    let method = roles::method(path);
    // A session is bounded as such, and says who it is at leisure.
    if method == "Watch" {
        return Ok(None);
    }
    // Each change is an operation, not the stream that they come in.
    if roles::is_of_namespace(path) && method != "Mutate" {
        tenant.counts.add_operations(1);
        wait_for_rate(tenant).await?;
    }
    if is_patient {
        return Ok(None);
    }
    // It is never closed.
    Ok(tenant.turns.acquire().await.ok())
}

async fn wait_for_rate(tenant: &Tenant) -> Result<(), Status> {
    let unused = Unused { tenant, operations: 1 };
    let wait = tenant.rate.take(1);
    if wait > RATE_PATIENCE {
        tenant.counts.add_refusal();
        let Limit { most, setting } = tenant.limits().per_second;
        let client = tenant.identity();
        return Err(Status::resource_exhausted(format!(
            "{client} asks for more than the {most} operations in a second that {setting} allows: ask for less at a \
             time, or raise {setting}"
        )));
    }
    tenant.counts.wait(wait).await;
    unused.are_used();
    Ok(())
}

/// Operations that were taken, until they are used: a call that is given up has used none.
struct Unused<'a> {
    tenant: &'a Tenant,
    operations: usize,
}

impl Unused<'_> {
    fn are_used(mut self) {
        self.operations = 0;
    }
}

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        self.tenant.rate.give_back(self.operations as u64);
    }
}

/// The client that asks, where connections are secured.
pub(super) fn tenant<T>(request: &tonic::Request<T>) -> Option<Arc<Tenant>> {
    request.extensions().get::<Peer>()?.tenant().ok()?.cloned()
}

/// A call is about so many things more than one: later calls wait for those.
pub(super) fn count_more<T>(request: &tonic::Request<T>, more: usize) {
    if let Some(tenant) = tenant(request) {
        tenant.charge(more);
    }
    if let Some(charge) = request.extensions().get::<Arc<RateCharge>>() {
        charge.is_about_more(more);
    }
}

/// A turn for a walk of a client; others than clients need none.
pub(super) async fn walk(tenant: Option<Arc<Tenant>>) -> Option<OwnedSemaphorePermit> {
    // It is never closed.
    tenant?.walks.clone().acquire_owned().await.ok()
}

/// Changes that wait for the rate of their client, and for its part of the log.
pub(super) type Waiting = Pin<Box<dyn Future<Output = (MutateRequest, Option<ProposalPermit>)> + Send>>;

/// Gives changes of a client back when it is their time, which is also that of what it has done in their mounts.
pub(super) fn changes(tenant: Arc<Tenant>, lookups: Lookups, call: MutateRequest) -> Waiting {
    Box::pin(async move {
        let changes = call.mutations.len();
        tenant.counts.add_operations(changes);
        let unused = Unused { tenant: &tenant, operations: changes };
        // What cannot be read is said when they are made.
        let in_mounts = lookups.pace(&tenant, &call.mutations).await.unwrap_or_default();
        let wait = tenant.rate.take(changes as u64).max(in_mounts);
        tenant.counts.wait(wait).await;
        unused.are_used();
        let each = if tenant.record_change() { CHANGES / CHANGES_AMONG_OTHERS } else { 1 };
        // What is more than all takes all. It is never closed.
        let room = tenant.room.clone().acquire_many_owned((changes * each).min(CHANGES) as u32).await.ok();
        (call, room.map(Arc::new))
    })
}

/// Those that wait; never, where none do.
pub(super) async fn admitted(waiting: &mut Option<Waiting>) -> (MutateRequest, Option<ProposalPermit>) {
    let Some(changes) = waiting else { return std::future::pending().await };
    let admitted = changes.await;
    *waiting = None;
    admitted
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use cavern_security::{Identity, Role};
    use http_body_util::Full;

    use super::*;

    #[tokio::test]
    async fn a_client_has_so_many_streams_of_changes() {
        let conf = schema::Master { client_sessions: 2, ..schema::Master::default() };
        let tenants = tenants(&conf);
        let tenant = tenants.admit(&Identity::new("c", Role::Client, "n").unwrap()).unwrap().unwrap();
        let open = async |method: &str| {
            // Nobody has taken it.
            let answer = async { http::Response::new(Body::new(Full::new(Bytes::from_static(b"an answer")))) };
            let path = format!("/cavern.master.v1.Namespace/{method}");
            make(&RateCharge::of((*tenant).clone()), &path, tenant.call().unwrap(), answer).await
        };
        let refusal = |answer: &http::Response<Body>| Status::from_header_map(answer.headers());
        let (first, second) = (open("Mutate").await, open("Mutate").await);
        assert!(refusal(&first).is_none() && refusal(&second).is_none());
        let refused = refusal(&open("Mutate").await).unwrap();
        assert!(refused.code() == tonic::Code::ResourceExhausted && refused.message().contains("client_sessions"));
        assert!(refusal(&open("Lookup").await).is_none(), "other calls are not meant");
        drop(first);
        assert!(refusal(&open("Mutate").await).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn calls_of_all_services_take_turns_and_sessions_do_not() {
        let tenants = tenants(&schema::Master::default());
        let tenant = tenants.admit(&Identity::new("c", Role::Client, "n").unwrap()).unwrap().unwrap();
        let _turns = tenant.turns.acquire_many(TURNS as u32).await.unwrap();
        for (path, waits) in [
            ("/cavern.master.v1.Namespace/Lookup", true),
            ("/cavern.master.v1.Cluster/ListWorkers", true),
            ("/cavern.raft.v1.Raft/GetGroup", true),
            ("/cavern.master.v1.Cluster/Watch", false),
        ] {
            let answer = async { http::Response::new(Body::empty()) };
            let charge = RateCharge::of((*tenant).clone());
            let made = make(&charge, path, tenant.call().unwrap(), answer);
            assert_eq!(tokio::time::timeout(Duration::from_secs(1), made).await.is_err(), waits, "{path}");
        }
    }
}

//! Who may call what: one table, and nothing that is not in it.
//!
//! A call comes from the [`Peer`] at the other end of its connection. Where connections are secured, that has shown in
//! what role it is part of the cluster; elsewhere everybody may do everything.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use cavern_conf::process::LogLimit;
use cavern_security::{Identity, Role};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

use super::peer::Peer;

use Role::{Admin, Client, Master, Worker};

/// Whoever reads and writes.
const USERS: &[Role] = &[Client, Admin];
const OPERATORS: &[Role] = &[Admin];
const MASTERS: &[Role] = &[Master];
const WORKERS: &[Role] = &[Worker];
/// Whoever needs to know where the others are.
const EVERYBODY: &[Role] = &[Master, Worker, Client, Admin];

/// Methods of a service, and the roles that may call them.
type Methods = &'static [(&'static str, &'static [Role])];

/// Each service.
const TABLE: &[(&str, Methods)] = &[
    (
        "cavern.master.v1.Namespace",
        &[
            ("Resolve", USERS),
            ("Lookup", USERS),
            ("GetInode", USERS),
            ("ReadDir", USERS),
            ("Touch", USERS),
            ("Revalidate", USERS),
            ("Refresh", USERS),
            ("Usage", USERS),
            ("Mutate", USERS),
            ("CheckHolds", USERS),
            ("Remember", USERS),
            ("GetXattrs", USERS),
            ("GetLayout", USERS),
            ("FreeContent", USERS),
            ("GetLock", USERS),
            ("MakeListed", USERS),
            ("Recall", USERS),
            ("GetQuotas", USERS),
            ("GetTtls", USERS),
        ],
    ),
    (
        "cavern.master.v1.Cluster",
        &[
            ("Watch", USERS),
            ("RegisterWorker", WORKERS),
            ("Heartbeat", WORKERS),
            ("ListWorkers", EVERYBODY),
            ("ListClaims", WORKERS),
            ("Mount", OPERATORS),
            ("Unmount", OPERATORS),
            ("UpdateMount", OPERATORS),
            ("ListMounts", &[Worker, Client, Admin]),
            // Workers fetch from buckets, and clients where no worker does.
            ("GetCredentials", &[Worker, Client]),
            ("SubmitLoad", OPERATORS),
            ("SubmitExport", OPERATORS),
            ("GetJob", OPERATORS),
            ("ListJobs", OPERATORS),
            ("CancelJob", OPERATORS),
            ("RetryJob", OPERATORS),
            ("GetPersistStatus", USERS),
            ("DrainWorker", OPERATORS),
            ("GetWorkerBlocks", OPERATORS),
            ("RemoveWorker", OPERATORS),
            ("ListUnavailable", OPERATORS),
            ("Status", OPERATORS),
        ],
    ),
    (
        "cavern.raft.v1.Raft",
        &[
            ("Append", MASTERS),
            ("Vote", MASTERS),
            ("PreVote", MASTERS),
            ("HandOver", MASTERS),
            ("OfferSnapshot", MASTERS),
            ("SendSnapshot", MASTERS),
            ("GetGroup", EVERYBODY),
            ("Join", MASTERS),
            ("TakeKey", MASTERS),
            ("SettleKeys", MASTERS),
            ("AddMaster", OPERATORS),
            ("RemoveMaster", OPERATORS),
            ("TransferLead", OPERATORS),
            ("RotateSecrets", OPERATORS),
            ("MakeSnapshot", OPERATORS),
        ],
    ),
];

/// The roles that may call the method of a path, `/SERVICE/METHOD`; none where there is no such method.
fn callers(path: &str) -> &'static [Role] {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else { return &[] };
    let methods = TABLE.iter().find(|(name, _)| *name == service).map_or(&[][..], |(_, methods)| methods);
    methods.iter().find(|(name, _)| *name == method).map_or(&[], |(_, roles)| roles)
}

fn check(path: &str, identity: &Identity) -> Result<(), Status> {
    let roles = callers(path);
    if roles.contains(&identity.role) {
        return Ok(());
    }
    let method = path.rsplit('/').next().unwrap_or_default();
    let allowed = roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ");
    Err(Status::permission_denied(if allowed.is_empty() {
        format!("{identity} asks for {method}, which nobody may")
    } else {
        format!("{identity} may not call {method}: it takes a certificate of the role {allowed}")
    }))
}

/// A service whose callers have shown that they may call it.
#[derive(Clone)]
pub struct Guarded<S> {
    service: S,
    /// Who was refused.
    refusals: Arc<LogLimit<Identity>>,
}

impl<S> Guarded<S> {
    pub fn new(service: S) -> Self {
        Self { service, refusals: Arc::default() }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let permitted = match request.extensions().get::<Peer>() {
            Some(Peer { secured: false, .. }) => Ok(()),
            Some(peer) => match peer.identity.get() {
                Some(identity) => check(path, identity).inspect_err(|refused| {
                    if let Some(suppressed) = self.refusals.admit(identity.clone()) {
                        tracing::warn!(peer = %peer.address, suppressed, "refused: {}", refused.message());
                    }
                }),
                None => Err(Status::unauthenticated("the connection has no identity")),
            },
            None => Err(Status::unauthenticated("it is not known where the call comes from")),
        };
        match permitted {
            Ok(()) => Box::pin(self.service.call(request)),
            Err(refused) => Box::pin(async move { Ok(refused.into_http()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn every_method_has_its_callers_and_the_table_has_no_others() {
        let files = FileDescriptorSet::decode(cavern_proto::FILE_DESCRIPTORS).unwrap().file;
        let mut methods = Vec::new();
        for file in &files {
            for service in &file.service {
                for method in &service.method {
                    methods.push(format!("/{}.{}/{}", file.package(), service.name(), method.name()));
                }
            }
        }
        for method in &methods {
            assert!(!callers(method).is_empty(), "{method} is not in the table");
        }
        let entries: usize = TABLE.iter().map(|(_, methods)| methods.len()).sum();
        assert_eq!(entries, methods.len());
    }

    #[test]
    fn what_is_not_in_the_table_nobody_may_call() {
        for path in ["", "/", "/a", "/a/b", "cavern.raft.v1.Raft/Vote", "/cavern.raft.v1.Raft/vote", "//Vote"] {
            assert!(callers(path).is_empty(), "{path}");
        }
    }

    #[test]
    fn a_role_may_do_what_is_its_own_and_is_told_what_the_rest_takes() {
        let may = |role, path: &str| check(path, &Identity::new("c", role, "n").unwrap());
        assert!(may(Client, "/cavern.master.v1.Namespace/Mutate").is_ok());
        assert!(may(Worker, "/cavern.master.v1.Cluster/Heartbeat").is_ok());
        for (role, path, needed) in [
            (Client, "/cavern.master.v1.Cluster/Mount", "admin"),
            (Client, "/cavern.master.v1.Cluster/RegisterWorker", "worker"),
            (Worker, "/cavern.master.v1.Namespace/Mutate", "client or admin"),
            (Admin, "/cavern.raft.v1.Raft/TakeKey", "master"),
        ] {
            let refused = may(role, path).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::PermissionDenied);
            assert!(refused.message().ends_with(&format!("of the role {needed}")), "{}", refused.message());
        }
    }
}

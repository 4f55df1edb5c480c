//! Who may call what: one table, and nothing that is not in it.
//!
//! Where connections are secured, whoever calls has shown in what role it is part of the cluster; elsewhere everybody
//! may do everything.

use cavern_security::{Identity, Role};
use tonic::Status;

use super::call::REQUEST_MAX;
use Audit::{Audited, Unaudited};
use Role::{Admin, Client, Master, Operator, Viewer, Worker};

/// Whoever reads and writes.
const USERS: &[Role] = &[Client, Admin];
/// Whoever looks at the cluster, and changes nothing.
const VIEWERS: &[Role] = &[Viewer, Operator, Admin];
/// Whoever operates it.
const OPERATORS: &[Role] = &[Operator, Admin];
/// Whoever says which masters there are, and with which keys.
const ADMINS: &[Role] = &[Admin];
const MASTERS: &[Role] = &[Master];
const WORKERS: &[Role] = &[Worker];
/// Whoever needs to know where the others are.
const EVERYBODY: &[Role] = &[Master, Worker, Client, Viewer, Operator, Admin];

/// Whether the audit log has a call. What clients change in the namespace is not in it, but for quotas and times to
/// live.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Audit {
    Audited,
    Unaudited,
}

/// Methods of a service, and the roles that may call them.
type Methods = &'static [(&'static str, &'static [Role], Audit)];

/// Each service.
const TABLE: &[(&str, Methods)] = &[
    (
        "cavern.master.v1.Namespace",
        &[
            ("Resolve", USERS, Unaudited),
            ("Lookup", USERS, Unaudited),
            ("GetInode", USERS, Unaudited),
            ("ReadDir", USERS, Unaudited),
            ("RefreshListings", USERS, Unaudited),
            ("Revalidate", USERS, Unaudited),
            ("Refresh", &[Client, Operator, Admin], Audited),
            ("Usage", USERS, Unaudited),
            ("Mutate", USERS, Unaudited),
            ("CheckOpenRefs", USERS, Unaudited),
            ("RestoreWatches", USERS, Unaudited),
            ("GetXattrs", USERS, Unaudited),
            ("CheckAccess", USERS, Unaudited),
            ("GetLayout", USERS, Unaudited),
            ("FreeContent", USERS, Audited),
            ("GetLock", USERS, Unaudited),
            ("MakeListed", USERS, Unaudited),
            ("Recall", USERS, Unaudited),
            ("GetQuotas", USERS, Unaudited),
            ("GetTtls", USERS, Unaudited),
        ],
    ),
    (
        "cavern.master.v1.Cluster",
        &[
            ("Watch", USERS, Unaudited),
            ("RegisterWorker", WORKERS, Audited),
            ("Heartbeat", WORKERS, Unaudited),
            ("ListWorkers", EVERYBODY, Unaudited),
            ("ListClaims", WORKERS, Unaudited),
            ("Mount", OPERATORS, Audited),
            ("Unmount", OPERATORS, Audited),
            ("UpdateMount", OPERATORS, Audited),
            ("IndexMount", OPERATORS, Audited),
            ("ListMounts", &[Worker, Client, Viewer, Operator, Admin], Unaudited),
            // Workers fetch from buckets, and clients where no worker does.
            ("GetCredentials", &[Worker, Client], Audited),
            ("VendKeys", &[Worker, Client], Audited),
            ("SubmitLoad", OPERATORS, Audited),
            ("LoadFiles", OPERATORS, Audited),
            ("SubmitExport", OPERATORS, Audited),
            ("GetJob", VIEWERS, Unaudited),
            ("ListJobs", VIEWERS, Unaudited),
            ("CancelJob", OPERATORS, Audited),
            ("RetryJob", OPERATORS, Audited),
            ("GetPersistStatus", &[Client, Viewer, Operator, Admin], Unaudited),
            ("ResolveLost", OPERATORS, Audited),
            ("DrainWorker", OPERATORS, Audited),
            ("GetWorkerBlocks", VIEWERS, Unaudited),
            ("RemoveWorker", OPERATORS, Audited),
            ("ListUnavailable", VIEWERS, Unaudited),
            ("Fsck", ADMINS, Audited),
            ("Status", VIEWERS, Unaudited),
        ],
    ),
    (
        "cavern.master.v1.Views",
        &[
            ("CreateView", OPERATORS, Audited),
            ("ImportView", OPERATORS, Audited),
            ("ListViews", &[Client, Viewer, Operator, Admin], Unaudited),
            ("GetView", &[Client, Viewer, Operator, Admin], Unaudited),
            ("DeleteView", OPERATORS, Audited),
            ("LocateBlocks", USERS, Unaudited),
        ],
    ),
    (
        "cavern.raft.v1.Raft",
        &[
            ("Append", MASTERS, Unaudited),
            ("Vote", MASTERS, Unaudited),
            ("PreVote", MASTERS, Unaudited),
            ("HandOver", MASTERS, Unaudited),
            ("OfferSnapshot", MASTERS, Unaudited),
            ("SendSnapshot", MASTERS, Unaudited),
            ("GetGroup", EVERYBODY, Unaudited),
            ("Join", MASTERS, Audited),
            ("TakeKey", MASTERS, Audited),
            ("SettleKeys", MASTERS, Audited),
            ("AddMaster", ADMINS, Audited),
            ("RemoveMaster", ADMINS, Audited),
            ("TransferLeadership", OPERATORS, Audited),
            ("RotateSecrets", ADMINS, Audited),
            ("MakeSnapshot", OPERATORS, Audited),
        ],
    ),
];

/// Bytes of what others than masters ask the group of masters for: it takes large messages of masters, and others send
/// ids, an address and no lists.
const ASK_MASTERS_MAX: usize = 64 << 10;

/// The method of a path, `/SERVICE/METHOD`.
pub(super) fn method(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Whether the path is that of a method of the namespace, or of views: what clients may do at their rates.
pub(super) fn is_of_namespace(path: &str) -> bool {
    ["/cavern.master.v1.Namespace/", "/cavern.master.v1.Views/"].into_iter().any(|service| path.starts_with(service))
}

/// The longest message that it may send for the call of a path, in bytes; `None` for a master, who is asked for no less
/// than the service takes.
pub(super) fn message_max(path: &str, identity: &Identity) -> Option<usize> {
    match identity.role {
        Master => None,
        _ if path.starts_with("/cavern.raft.v1.Raft/") => Some(ASK_MASTERS_MAX),
        _ => Some(REQUEST_MAX),
    }
}

pub(super) fn is_audited(method: &str) -> bool {
    let mut methods = TABLE.iter().flat_map(|(_, methods)| *methods);
    methods.any(|(name, _, audit)| *name == method && *audit == Audited)
}

/// The roles that may call the method of a path, `/SERVICE/METHOD`; none where there is no such method.
fn callers(path: &str) -> &'static [Role] {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else { return &[] };
    let methods = TABLE.iter().find(|(name, _)| *name == service).map_or(&[][..], |(_, methods)| methods);
    methods.iter().find(|(name, ..)| *name == method).map_or(&[], |(_, roles, _)| roles)
}

/// Whether it may make the call.
///
/// # Errors
/// `PERMISSION_DENIED`, with the roles that may.
pub(super) fn check_role(path: &str, identity: &Identity) -> Result<(), Status> {
    let roles = callers(path);
    if roles.contains(&identity.role) {
        return Ok(());
    }
    let method = method(path);
    let allowed = roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ");
    Err(Status::permission_denied(if allowed.is_empty() {
        format!("{identity} asks for {method}, which nobody may")
    } else {
        format!("{identity} may not call {method}: it takes a certificate of the role {allowed}")
    }))
}

/// What docs/decisions/0039-calls-and-frames.md says of calls: method, roles, what they are checked by, and where.
#[cfg(test)]
pub fn documented() -> Vec<[&'static str; 4]> {
    let text = include_str!("../../../docs/decisions/0039-calls-and-frames.md");
    let section = text.split("\n## ").find(|section| section.starts_with("Calls")).unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`'));
        [(); 4].map(|()| cells.next().unwrap_or_default())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::FileDescriptorSet;
    use prost_types::field_descriptor_proto::{Label, Type};

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
        let audited = methods.iter().filter(|path| is_audited(method(path)));
        assert_eq!(audited.count(), 29);
        let entries: usize = TABLE.iter().map(|(_, methods)| methods.len()).sum();
        assert_eq!(entries, methods.len());
    }

    #[test]
    fn each_call_is_documented_with_who_may_and_by_what_it_is_judged() {
        let files = FileDescriptorSet::decode(cavern_proto::FILE_DESCRIPTORS).unwrap().file;
        let rows = documented();
        let mut methods = 0;
        for file in &files {
            for service in &file.service {
                for method in &service.method {
                    methods += 1;
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    let row = rows.iter().find(|row| row[0] == method.name());
                    let row = row.unwrap_or_else(|| panic!("{path} has no row in docs/decisions/0039"));
                    let may = |role: &Role| check_role(&path, &Identity::new("c", *role, "n").unwrap()).is_ok();
                    let may: Vec<&str> = Role::ALL.into_iter().filter(may).map(Role::name).collect();
                    assert_eq!(row[1], may.join(", "), "{path}");
                    assert!(["mount", "session", "worker", "role"].contains(&row[2]), "{row:?}");
                    assert!(!row[3].is_empty(), "{row:?}");
                }
            }
        }
        assert_eq!(rows.len(), methods, "there are rows of what is no call");
        // Of what clients ask for, nothing else is the same for all.
        let of_role = rows.iter().filter(|row| row[2] == "role" && row[1].contains("client")).map(|row| row[0]);
        assert_eq!(of_role.collect::<Vec<_>>(), ["ListWorkers", "GetGroup"]);
    }

    /// Each element of a list of messages, which takes two bytes on the wire, may take hundreds in memory.
    #[test]
    fn what_clients_may_send_has_no_lists_of_messages_but_those_that_are_counted() {
        let files = FileDescriptorSet::decode(cavern_proto::FILE_DESCRIPTORS).unwrap().file;
        let named = |path: &str| {
            files.iter().find_map(|file| {
                let name = path.strip_prefix(&format!(".{}.", file.package()))?;
                file.message_type.iter().find(|message| message.name() == name)
            })
        };
        let (mut reached, mut lists) = (Vec::new(), Vec::new());
        for file in &files {
            for service in &file.service {
                let of_clients = service.method.iter().filter(|method| {
                    callers(&format!("/{}.{}/{}", file.package(), service.name(), method.name())).contains(&Client)
                });
                reached.extend(of_clients.map(|method| method.input_type().to_owned()));
            }
        }
        assert!(reached.len() > 20, "{reached:?}");
        let mut next = 0;
        while let Some(path) = reached.get(next) {
            next += 1;
            let message = named(path).unwrap_or_else(|| panic!("{path} is not declared"));
            for field in message.field.iter().filter(|field| field.r#type() == Type::Message) {
                if field.label() == Label::Repeated {
                    lists.push(format!("{}.{}={}", message.name(), field.name(), field.number()));
                }
                if !reached.iter().any(|known| known == field.type_name()) {
                    reached.push(field.type_name().to_owned());
                }
            }
        }
        lists.sort();
        assert_eq!(lists, ["CommitContent.made=3", "MutateRequest.mutations=2"], "see cavern_proto::bounded");
    }

    #[test]
    fn the_methods_of_the_namespace_are_those_of_its_service() {
        let (service, methods) = TABLE[0];
        assert!(methods.iter().all(|(method, ..)| is_of_namespace(&format!("/{service}/{method}"))));
        assert!(!is_of_namespace("/cavern.master.v1.Cluster/Watch"));
    }

    #[test]
    fn masters_alone_send_the_group_long_messages() {
        let most = |role, path: &str| message_max(path, &Identity::new("c", role, "n").unwrap());
        assert_eq!(most(Master, "/cavern.raft.v1.Raft/Append"), None);
        for role in Role::ALL.into_iter().filter(|role| *role != Master) {
            assert_eq!(most(role, "/cavern.raft.v1.Raft/GetGroup"), Some(ASK_MASTERS_MAX), "{role:?}");
            assert_eq!(most(role, "/cavern.master.v1.Cluster/ListWorkers"), Some(REQUEST_MAX), "{role:?}");
        }
    }

    #[test]
    fn what_is_not_in_the_table_nobody_may_call() {
        for path in ["", "/", "/a", "/a/b", "cavern.raft.v1.Raft/Vote", "/cavern.raft.v1.Raft/vote", "//Vote"] {
            assert!(callers(path).is_empty(), "{path}");
        }
    }

    #[test]
    fn a_role_may_do_what_is_its_own_and_is_told_what_the_rest_takes() {
        let may = |role, path: &str| check_role(path, &Identity::new("c", role, "n").unwrap());
        assert!(may(Client, "/cavern.master.v1.Namespace/Mutate").is_ok());
        assert!(may(Worker, "/cavern.master.v1.Cluster/Heartbeat").is_ok());
        assert!(may(Viewer, "/cavern.master.v1.Cluster/Status").is_ok());
        assert!(may(Operator, "/cavern.master.v1.Cluster/Mount").is_ok());
        for (role, path, needed) in [
            (Client, "/cavern.master.v1.Cluster/Mount", "operator or admin"),
            (Viewer, "/cavern.master.v1.Cluster/Unmount", "operator or admin"),
            (Viewer, "/cavern.master.v1.Namespace/Resolve", "client or admin"),
            (Operator, "/cavern.master.v1.Namespace/Mutate", "client or admin"),
            (Client, "/cavern.master.v1.Views/CreateView", "operator or admin"),
            (Operator, "/cavern.master.v1.Views/LocateBlocks", "client or admin"),
            (Operator, "/cavern.raft.v1.Raft/AddMaster", "admin"),
            (Operator, "/cavern.raft.v1.Raft/RotateSecrets", "admin"),
            (Operator, "/cavern.master.v1.Cluster/GetCredentials", "worker or client"),
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

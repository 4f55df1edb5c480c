//! Who may send what: one table, and nothing that is not in it.
//!
//! Where connections are secured, whoever connects over TCP has shown in what role it is part of the cluster. Who comes
//! over the Unix socket has not, and is a process of the worker's user or of root: it may do what clients may, and
//! gives no orders.

use std::fmt;

use cavern_proto::data::{FreeRequest, Status, SyncRequest};
use cavern_proto::frame::FrameKind;
use cavern_security::{Identity, Role};

use crate::request_error::Refusal;

use Role::{Admin, Client, Master, Worker};

/// Whoever reads and writes files: `cv fs put` does so for an administrator.
const USERS: &[Role] = &[Client, Admin];

/// Who is at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// Connections are not secured: everybody may do everything.
    Anybody,
    /// A process of this host, over the Unix socket, where other connections are secured.
    SameHost,
    Known(Identity),
}

impl fmt::Display for Peer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anybody => out.write_str("whoever is connected"),
            Self::SameHost => out.write_str("a process of this host"),
            Self::Known(identity) => identity.fmt(out),
        }
    }
}

/// The roles that may send a frame. None for what workers send.
pub(super) fn senders(kind: FrameKind) -> &'static [Role] {
    match kind {
        FrameKind::Hello | FrameKind::Cancel => &[Master, Worker, Client, Admin],
        FrameKind::Query => &[Master, Worker, Client, Admin],
        FrameKind::Read | FrameKind::Sync => &[Worker, Client, Admin],
        FrameKind::Open | FrameKind::Corrupt | FrameKind::Reserve | FrameKind::Write => USERS,
        FrameKind::Fill => &[Master, Client, Admin],
        // See `Peer::check_free`.
        FrameKind::Free => &[Master, Admin],
        FrameKind::Persist | FrameKind::Copy | FrameKind::Inspect => &[Master],
        _ => &[],
    }
}

/// Whether it is an order of a master's: it is not carried out for one that leads no more.
pub(super) fn is_order(kind: FrameKind) -> bool {
    matches!(kind, FrameKind::Free | FrameKind::Persist | FrameKind::Copy | FrameKind::Inspect)
}

impl Peer {
    /// What it has shown, where connections are secured.
    pub(super) fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Known(identity) => Some(identity),
            Self::Anybody | Self::SameHost => None,
        }
    }

    /// Whether it may send such a frame.
    ///
    /// # Errors
    /// It may not.
    pub(super) fn check_role(&self, kind: FrameKind) -> Result<(), Refusal> {
        let allowed = senders(kind);
        match self {
            Self::Anybody => Ok(()),
            Self::SameHost if is_order(kind) => Err(denied(format!(
                "{self} asks for {kind:?} over the Unix socket: it takes a connection over TCP, and a certificate of \
                 the role {}",
                names(allowed)
            ))),
            Self::SameHost => Ok(()),
            Self::Known(identity) if allowed.contains(&identity.role) => Ok(()),
            Self::Known(_) if allowed.is_empty() => Err(denied(format!("{self} sends {kind:?}, which workers send"))),
            Self::Known(_) => {
                let roles = names(allowed);
                Err(denied(format!("{self} may not ask for {kind:?}: it takes a certificate of the role {roles}")))
            }
        }
    }

    /// Whether it may free these blocks: those of files go for good, at the word of masters only.
    ///
    /// # Errors
    /// As [`Self::check_role`].
    pub(super) fn check_free(&self, request: &FreeRequest) -> Result<(), Refusal> {
        if self.may_lead() || request.blocks.iter().all(|block| !block.data) {
            return Ok(());
        }
        Err(denied(format!("{self} may not free blocks of files: it takes a certificate of the role {Master}")))
    }

    /// Whether it may have these blocks synced: of those that could not be synced through a descriptor tells who may
    /// have one.
    ///
    /// # Errors
    /// As [`Self::check_role`].
    pub(super) fn check_sync(&self, request: &SyncRequest) -> Result<(), Refusal> {
        match self {
            Self::Known(identity) if identity.role == Worker && !request.failed.is_empty() => Err(denied(format!(
                "{self} has no descriptors of another worker's blocks, and no failed syncs of them"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether what it says that an object of a bucket holds is taken for true, and shown to others. Nothing compares
    /// it with the bucket; whoever comes over the Unix socket could change the worker's files as well.
    pub(super) fn is_believed(&self) -> bool {
        matches!(self, Self::Anybody | Self::SameHost)
    }

    /// Whether it is told where the files of blocks are: clients of other hosts reach blocks through the worker, and
    /// those who look at the cluster see which file a block is in.
    pub(super) fn may_see_paths(&self) -> bool {
        !matches!(self, Self::Known(Identity { role: Client, .. }))
    }

    /// Whether it may be a master that leads.
    pub(super) fn may_lead(&self) -> bool {
        match self {
            Self::Anybody => true,
            Self::SameHost => false,
            Self::Known(identity) => identity.role == Master,
        }
    }
}

fn denied(message: String) -> Refusal {
    Refusal::new(Status::PermissionDenied, message)
}

fn names(roles: &[Role]) -> String {
    roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ")
}

/// What docs/decisions/0039-calls-and-frames.md says of frames: kind, roles, what they are checked by, and where.
#[cfg(test)]
pub(super) fn documented() -> Vec<[&'static str; 4]> {
    let text = include_str!("../../../docs/decisions/0039-calls-and-frames.md");
    let section = text.split("\n## ").find(|section| section.starts_with("Frames")).unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`'));
        [(); 4].map(|()| cells.next().unwrap_or_default())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use cavern_proto::data::BlockRef;

    use super::*;

    fn known(role: Role) -> Peer {
        Peer::Known(Identity::new("c", role, "n").unwrap())
    }

    #[test]
    fn each_request_has_its_senders_and_no_answer_has_any() {
        for kind in FrameKind::ALL {
            let name = format!("{kind:?}");
            let is_sent_by_workers = name.ends_with("Reply") || ["Evicted", "Failure"].contains(&&name[..]);
            assert_eq!(senders(kind).is_empty(), is_sent_by_workers, "{name}");
            for role in Role::ALL {
                assert_eq!(known(role).check_role(kind).is_ok(), senders(kind).contains(&role), "{name} by {role}");
            }
            assert!(Peer::Anybody.check_role(kind).is_ok());
            assert_eq!(Peer::SameHost.check_role(kind).is_err(), is_order(kind), "{name}");
        }
    }

    #[test]
    fn each_frame_is_documented_with_who_may_send_it() {
        let rows = documented();
        assert_eq!(rows.len(), FrameKind::ALL.len());
        for kind in FrameKind::ALL {
            let row = rows.iter().find(|row| row[0] == format!("{kind:?}"));
            let row = row.unwrap_or_else(|| panic!("{kind:?} has no row in docs/decisions/0039"));
            let may: Vec<_> = Role::ALL.into_iter().filter(|role| known(*role).check_role(kind).is_ok()).collect();
            assert_eq!(row[1], if may.is_empty() { "—".to_owned() } else { names_in(&may) }, "{kind:?}");
            assert_eq!(row[2] == "term", is_order(kind), "{kind:?}");
            assert_eq!(row[2] == "nobody", may.is_empty(), "{kind:?}");
            assert!(["mount", "role", "term", "nobody"].contains(&row[2]) && !row[3].is_empty(), "{row:?}");
        }
    }

    fn names_in(roles: &[Role]) -> String {
        roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn nobody_of_another_host_is_believed() {
        assert!(Peer::Anybody.is_believed() && Peer::SameHost.is_believed());
        assert!(Role::ALL.into_iter().all(|role| !known(role).is_believed()));
    }

    #[test]
    fn clients_of_other_hosts_are_told_of_no_files() {
        assert!(Peer::Anybody.may_see_paths() && Peer::SameHost.may_see_paths());
        assert!(Role::ALL.into_iter().all(|role| known(role).may_see_paths() == (role != Client)));
    }

    #[test]
    fn orders_are_those_of_masters() {
        let by_clients: Vec<_> =
            FrameKind::ALL.into_iter().filter(|kind| known(Client).check_role(*kind).is_ok()).collect();
        assert!(by_clients.iter().all(|kind| !is_order(*kind)), "{by_clients:?}");
        let refused = known(Client).check_role(FrameKind::Free).unwrap_err();
        assert_eq!(refused.status, Status::PermissionDenied);
        assert_eq!(
            refused.message,
            "cavern://c/client/n may not ask for Free: it takes a certificate of the role master or admin"
        );
        let of = |data| FreeRequest { blocks: vec![BlockRef::default(), BlockRef { data, ..BlockRef::default() }] };
        assert!(known(Admin).check_free(&of(false)).is_ok() && known(Admin).check_free(&of(true)).is_err());
        assert!(known(Master).check_free(&of(true)).is_ok() && Peer::Anybody.check_free(&of(true)).is_ok());
    }

    #[test]
    fn failed_syncs_are_told_by_those_who_have_descriptors() {
        let failed = SyncRequest { failed: vec![BlockRef::default()], ..SyncRequest::default() };
        assert!(known(Worker).check_sync(&failed).is_err());
        assert!(known(Worker).check_sync(&SyncRequest::default()).is_ok());
        assert!([Client, Admin].into_iter().all(|role| known(role).check_sync(&failed).is_ok()));
        assert!(Peer::SameHost.check_sync(&failed).is_ok());
    }
}

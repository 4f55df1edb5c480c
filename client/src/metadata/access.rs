//! What users may open whom the masters take for others than this host does.

use cavern_net::master::Stubs;
use cavern_posix::mode::READ;
use cavern_proto::master::{CheckAccessRequest, User};
use rustix::io::Errno;

use super::{Metadata, Node};
use crate::error::ClientError;
use crate::stages::Stage;

impl Metadata {
    /// Has the master say whether a user may read a file or a directory whom it takes for another one than the kernel
    /// does. Of one who counts as himself, the kernel has said so.
    ///
    /// # Errors
    /// `EACCES` where he may not.
    pub async fn check_readable(&self, node: &Node, user: &User) -> Result<(), ClientError> {
        if !node.squashes(user) {
            return Ok(());
        }
        let _asked = Stage::Metadata.begin();
        let inode = node.inode;
        self.inner.settled(inode).await?;
        let answer = self.inner.master.call_patiently("CheckAccess", |mut stubs: Stubs| {
            let (session, user) = (self.inner.lease.session(), Some(user.clone()));
            let request = CheckAccessRequest { inode, user, wanted: READ, session };
            async move { stubs.namespace.check_access(request).await }
        });
        match answer.await.map_err(ClientError::from) {
            Err(ClientError::NotFound(_)) => Err(ClientError::Stale(format!("inode {inode}"))),
            Ok(reply) if !reply.allowed => {
                let reason = format!("user {} counts as one who may not open inode {inode}", user.uid);
                Err(ClientError::Refused { errno: Errno::ACCESS.raw_os_error(), reason })
            }
            answer => answer.map(drop),
        }
    }
}

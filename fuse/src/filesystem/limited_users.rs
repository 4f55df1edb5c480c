//! Who asks for what, in mounts where masters judge that (`docs/security.md`): the kernel knows nothing of it, and has
//! decided by whoever the user is on this host.

use cavern_client::{ClientError, Node};
use cavern_proto::master::User;

use super::parts::Inner;
use crate::kernel::{Caller, Credentials};

impl Inner {
    /// The user by whom something is checked in the mount of a node, if users are limited there.
    pub(super) async fn limited_user(&self, node: &Node, caller: Caller) -> Option<User> {
        if node.limits_users() { Some(Credentials::of(caller).await.into_user(caller)) } else { None }
    }

    /// Has the master say whether somebody may read a directory whom it takes for another one than the kernel does.
    ///
    /// # Errors
    /// `EACCES` where he may not.
    pub(super) async fn check_readable(&self, node: &Node, caller: Caller) -> Result<(), ClientError> {
        match self.limited_user(node, caller).await {
            Some(user) => self.client.metadata().check_readable(node, &user).await,
            None => Ok(()),
        }
    }
}

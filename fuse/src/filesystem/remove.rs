//! UNLINK and RMDIR.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::Failpoint;
use cavern_proto::master::RemoveName;
use cavern_proto::master::mutation::Change;

use super::changes::ChangeRequest;
use super::parts::Inner;
use crate::kernel::Reply;

impl Inner {
    pub(super) fn remove(self: &Arc<Self>, on: u64, (name, directory): (&[u8], bool), reply: Reply) {
        let operation = if directory { "rmdir" } else { "unlink" };
        let remove = RemoveName { parent: self.root.to_namespace(on), name: Bytes::copy_from_slice(name), directory };
        let attempt = ChangeRequest { operation, on, with: None, change: Change::Remove(remove) };
        self.attempt(attempt, reply, |_, _, _, reply| {
            Failpoint::RemoveAnswered.pass();
            reply.done()
        });
    }
}

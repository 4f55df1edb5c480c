//! RENAME and RENAME2.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RenameMode, RenameName};

use super::Inner;
use super::changes::ChangeRequest;
use crate::kernel::{Caller, Reply};

/// What the flags of renameat2(2) ask for; `None` for what is not known, and for what excludes itself.
fn mode_of(flags: u32) -> Option<RenameMode> {
    match flags {
        0 => Some(RenameMode::Replace),
        libc::RENAME_NOREPLACE => Some(RenameMode::NoReplace),
        libc::RENAME_EXCHANGE => Some(RenameMode::Exchange),
        _ => None,
    }
}

impl Inner {
    pub(super) fn rename(
        self: &Arc<Self>,
        caller: Caller,
        (kernel_parent, name): (u64, &[u8]),
        (new_kernel_parent, new_name): (u64, &[u8]),
        flags: u32,
        reply: Reply,
    ) {
        let Some(mode) = mode_of(flags) else { return reply.error(libc::EINVAL) };
        let rename = RenameName {
            parent: self.root.to_namespace(kernel_parent),
            name: Bytes::copy_from_slice(name),
            new_parent: self.root.to_namespace(new_kernel_parent),
            new_name: Bytes::copy_from_slice(new_name),
            mode: mode.into(),
        };
        let with = (new_kernel_parent != kernel_parent).then_some(new_kernel_parent);
        let moved = [(rename.parent, rename.name.clone()), (rename.new_parent, rename.new_name.clone())];
        let change = Change::Rename(rename);
        let attempt = ChangeRequest { operation: "rename", on: kernel_parent, with, caller, change };
        self.attempt(attempt, reply, move |this, _, _, reply| {
            moved.iter().for_each(|(parent, name)| this.second_opens.forget_name(*parent, name));
            Failpoint::RenameAnswered.pass();
            reply.done()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_are_not_known_are_refused() {
        assert_eq!(mode_of(0), Some(RenameMode::Replace));
        assert_eq!(mode_of(libc::RENAME_EXCHANGE), Some(RenameMode::Exchange));
        for flags in [libc::RENAME_WHITEOUT, libc::RENAME_EXCHANGE | libc::RENAME_NOREPLACE, 1 << 31] {
            assert_eq!(mode_of(flags), None);
        }
    }
}

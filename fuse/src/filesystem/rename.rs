//! RENAME and RENAME2.

use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RenameMode, RenameName};

use super::changes::ChangeRequest;
use super::parts::Inner;
use crate::kernel::Reply;

/// What becomes of the old name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OldName {
    Moves,
    /// A whiteout takes its place.
    IsWhitedOut,
}

/// What the flags of renameat2(2) ask for; `None` for what is not known, and for what excludes itself.
fn asked(flags: u32) -> Option<(RenameMode, OldName)> {
    let old_name = if flags & libc::RENAME_WHITEOUT == 0 { OldName::Moves } else { OldName::IsWhitedOut };
    match (flags & !libc::RENAME_WHITEOUT, old_name) {
        (0, _) => Some((RenameMode::Replace, old_name)),
        (libc::RENAME_NOREPLACE, _) => Some((RenameMode::NoReplace, old_name)),
        (libc::RENAME_EXCHANGE, OldName::Moves) => Some((RenameMode::Exchange, old_name)),
        _ => None,
    }
}

impl Inner {
    pub(super) fn rename(
        self: &Arc<Self>,
        (kernel_parent, name): (u64, &[u8]),
        (new_kernel_parent, new_name): (u64, &[u8]),
        flags: u32,
        reply: Reply,
    ) {
        let Some((mode, old_name)) = asked(flags) else { return reply.error(libc::EINVAL) };
        let rename = RenameName {
            parent: self.root.to_namespace(kernel_parent),
            name: Bytes::copy_from_slice(name),
            new_parent: self.root.to_namespace(new_kernel_parent),
            new_name: Bytes::copy_from_slice(new_name),
            mode: mode.into(),
        };
        let with = (new_kernel_parent != kernel_parent).then_some(new_kernel_parent);
        let moved = [(rename.parent, rename.name.clone()), (rename.new_parent, rename.new_name.clone())];
        let change = match old_name {
            OldName::Moves => Change::Rename(rename),
            OldName::IsWhitedOut => Change::RenameWhiteout(rename),
        };
        let attempt = ChangeRequest { operation: "rename", on: kernel_parent, with, change };
        self.attempt(attempt, reply, move |this, _, _, reply| {
            moved.iter().for_each(|(parent, name)| this.files.retries.forget_name(*parent, name));
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
        let (exchange, whiteout) = (libc::RENAME_EXCHANGE, libc::RENAME_WHITEOUT);
        assert_eq!(asked(0), Some((RenameMode::Replace, OldName::Moves)));
        assert_eq!(asked(exchange), Some((RenameMode::Exchange, OldName::Moves)));
        assert_eq!(asked(whiteout), Some((RenameMode::Replace, OldName::IsWhitedOut)));
        assert_eq!(asked(whiteout | libc::RENAME_NOREPLACE), Some((RenameMode::NoReplace, OldName::IsWhitedOut)));
        for flags in [whiteout | exchange, exchange | libc::RENAME_NOREPLACE, 1 << 31] {
            assert_eq!(asked(flags), None);
        }
    }
}

//! FALLOCATE: room, zeros and holes.

use std::sync::Arc;

use cavern_client::Allocation;

use super::parts::Inner;
use crate::kernel::Reply;

/// What the mode of fallocate(2) asks for; `None` for what no file here can do.
fn allocation(mode: u32) -> Option<Allocation> {
    const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
    const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP_SIZE;
    const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
    const ZERO_RANGE_KEEP: u32 = ZERO_RANGE | KEEP_SIZE;
    let (zero, reserve, grow) = match mode {
        0 => (false, true, true),
        KEEP_SIZE => (false, true, false),
        PUNCH_HOLE => (true, false, false),
        ZERO_RANGE => (true, true, true),
        ZERO_RANGE_KEEP => (true, true, false),
        _ => return None,
    };
    Some(Allocation { zero, reserve, grow })
}

impl Inner {
    pub(super) fn fallocate(self: &Arc<Self>, fh: u64, offset: u64, length: u64, mode: u32, reply: Reply) {
        let Some(handle) = self.files.handles.get(fh) else { return reply.error(self.files.lost.errno(fh)) };
        let Some(end) = offset.checked_add(length).filter(|_| length > 0) else { return reply.error(libc::EINVAL) };
        let Some(how) = allocation(mode) else { return reply.error(libc::EOPNOTSUPP) };
        let this = Arc::clone(self);
        reply.run_uninterruptible(move |reply| async move {
            let allocated = handle.file.allocate(offset..end, how).await;
            this.changed_by(handle.how.node);
            this.answer_done("fallocate", allocated, reply);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_keeps_the_length_and_asks_for_no_room() {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let is = |mode: i32| allocation(mode.cast_unsigned()).map(|how| (how.zero, how.reserve, how.grow));
        assert_eq!(is(hole), Some((true, false, false)));
        assert_eq!((is(0), is(libc::FALLOC_FL_KEEP_SIZE)), (Some((false, true, true)), Some((false, true, false))));
        assert_eq!(is(libc::FALLOC_FL_ZERO_RANGE), Some((true, true, true)));
        assert_eq!((is(libc::FALLOC_FL_PUNCH_HOLE), is(libc::FALLOC_FL_COLLAPSE_RANGE)), (None, None));
    }
}

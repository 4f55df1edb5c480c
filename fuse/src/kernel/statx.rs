//! The answer to STATX, made of what GETATTR is answered with.

use super::abi::{Attr, AttrOut, Statx, StatxOut, StatxTime, statx};

const SECOND_NS: i64 = 1_000_000_000;

impl StatxOut {
    /// `born_ns` in nanoseconds since the epoch, where that is known.
    pub(super) fn new(attr_out: &AttrOut, born_ns: Option<i64>) -> Self {
        let Attr { ino, size, blocks, nlink, uid, gid, blksize, .. } = attr_out.attr;
        let attr = &attr_out.attr;
        let (rdev_major, rdev_minor) = device(attr.rdev);
        let stat = Statx {
            mask: statx::BASIC_STATS | born_ns.map_or(0, |_| statx::BTIME),
            blksize,
            nlink,
            uid,
            gid,
            // File type and permissions.
            mode: (attr.mode & 0xffff) as u16,
            ino,
            size,
            blocks,
            atime: time(attr.atime, attr.atimensec),
            btime: born_ns.map_or_else(StatxTime::default, born),
            ctime: time(attr.ctime, attr.ctimensec),
            mtime: time(attr.mtime, attr.mtimensec),
            rdev_major,
            rdev_minor,
            ..Statx::default()
        };
        Self { attr_valid: attr_out.attr_valid, attr_valid_nsec: attr_out.attr_valid_nsec, stat, ..Self::default() }
    }
}

fn time(seconds: u64, nanoseconds: u32) -> StatxTime {
    StatxTime { seconds: seconds.cast_signed(), nanoseconds, reserved: 0 }
}

fn born(ns: i64) -> StatxTime {
    // Between 0 and a second.
    let nanoseconds = ns.rem_euclid(SECOND_NS) as u32;
    StatxTime { seconds: ns.div_euclid(SECOND_NS), nanoseconds, reserved: 0 }
}

/// Major and minor number of a device as the kernel encodes it.
fn device(rdev: u32) -> (u32, u32) {
    ((rdev & 0xfff00) >> 8, rdev & 0xff | (rdev >> 12) & 0xfff00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_getattr_says_and_the_birth_if_that_is_known() {
        let attr =
            Attr { ino: 7, mode: 0o100_644, mtime: u64::MAX, mtimensec: 5, rdev: 0x1234_5678, ..Attr::default() };
        let attr_out = AttrOut { attr_valid: 3, attr_valid_nsec: 4, dummy: 0, attr };
        let unborn = StatxOut::new(&attr_out, None);
        assert_eq!((unborn.attr_valid, unborn.attr_valid_nsec, unborn.stat.mask), (3, 4, statx::BASIC_STATS));
        assert_eq!((unborn.stat.ino, unborn.stat.mode, unborn.stat.mtime.seconds), (7, 0o100_644, -1));
        assert_eq!((unborn.stat.rdev_major, unborn.stat.rdev_minor), (0x456, 0x12378));
        let born = StatxOut::new(&attr_out, Some(-1)).stat;
        assert_eq!((born.mask & statx::BTIME, born.btime.seconds, born.btime.nanoseconds), (0x800, -1, 999_999_999));
    }
}

//! Owner and permissions of objects of which nothing says whose they are.

use cavern_conf::schema::Fuse;
use cavern_proto::record::TakeInObject;

/// Owner and permissions of what the bucket says nothing of.
#[derive(Clone, Copy, Debug)]
pub struct Looks {
    pub uid: u32,
    pub gid: u32,
    pub file_mode: u32,
    pub dir_mode: u32,
}

impl Looks {
    /// As objects of cache-mode mounts have them.
    pub fn new(conf: &Fuse) -> Self {
        Self {
            uid: u32::try_from(conf.uid).unwrap_or_else(|_| rustix::process::geteuid().as_raw()),
            gid: u32::try_from(conf.gid).unwrap_or_else(|_| rustix::process::getegid().as_raw()),
            file_mode: conf.file_mode & 0o7777,
            dir_mode: conf.dir_mode & 0o7777,
        }
    }

    /// Gives an object that comes in by itself its looks.
    pub fn of_object(self, taken: TakeInObject) -> TakeInObject {
        let Self { uid, gid, file_mode, dir_mode } = self;
        TakeInObject { uid, gid, file_mode, dir_mode, ..taken }
    }
}

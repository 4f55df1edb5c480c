//! Owner and permissions of objects of which nothing says whose they are.

use cavern_conf::schema::Fuse;
use cavern_proto::record::AdoptListing;

/// Owner and permissions of what the bucket says nothing of.
#[derive(Clone, Copy, Debug)]
pub struct DefaultAttributes {
    uid: u32,
    gid: u32,
    file_mode: u32,
    dir_mode: u32,
}

impl DefaultAttributes {
    /// As objects of cache-mode mounts have them.
    pub fn new(conf: &Fuse) -> Self {
        Self {
            uid: u32::try_from(conf.uid).unwrap_or_else(|_| rustix::process::geteuid().as_raw()),
            gid: u32::try_from(conf.gid).unwrap_or_else(|_| rustix::process::getegid().as_raw()),
            file_mode: conf.file_mode & 0o7777,
            dir_mode: conf.dir_mode & 0o7777,
        }
    }

    /// Gives what comes in its looks.
    pub fn of(self, listing: AdoptListing) -> AdoptListing {
        let Self { uid, gid, file_mode, dir_mode } = self;
        AdoptListing { uid, gid, file_mode, dir_mode, ..listing }
    }
}

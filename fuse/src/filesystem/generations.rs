//! Generations of inodes, which file handles are made of besides numbers: see [`export`](super::export).

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use cavern_client::is_of_this_process;
use cavern_proto::ContentId;

/// Generations of inodes. The kernel keeps 32 bits of them.
#[derive(Clone, Copy, Debug)]
pub struct Generations {
    of_cluster: u32,
    of_process: u32,
}

impl Generations {
    pub fn new(cluster_id: &str) -> Self {
        let [a, b, c, d, ..] = *ContentId::of_inode(cluster_id, 0, 0, 0).as_bytes();
        let of_process = RandomState::new().build_hasher().finish() as u32;
        Self { of_cluster: u32::from_be_bytes([a, b, c, d]), of_process }
    }

    /// That of an inode.
    pub fn of(self, inode: u64) -> u64 {
        u64::from(if is_of_this_process(inode) { self.of_process } else { self.of_cluster })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_stands_for_the_cluster_or_the_process() {
        let [first, second] = [Generations::new("a"), Generations::new("a")];
        assert_eq!(first.of_cluster, second.of_cluster);
        assert_ne!(first.of_cluster, Generations::new("b").of_cluster);
        assert_ne!(first.of_process, second.of_process, "in one process out of four billion they are");
    }
}

//! What this client has read and written in a mount, for whoever looks at the cluster.

use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::master::ClientActivity;

use crate::mounts::Mounts;

/// Of one mount, since it was first seen. What a kernel reads by itself is not in it.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Activity {
    pub fn has_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn has_written(&self, bytes: usize) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Mounts {
    /// What was read and written in each of them, as the master is told.
    pub(crate) fn activity(&self) -> ClientActivity {
        let mut all = ClientActivity::default();
        for mount in self.iter() {
            let Activity { reads, read_bytes, writes, written_bytes } = mount.activity();
            all.mount_ids.push(mount.id());
            all.reads.push(reads.load(Ordering::Relaxed));
            all.read_bytes.push(read_bytes.load(Ordering::Relaxed));
            all.writes.push(writes.load(Ordering::Relaxed));
            all.written_bytes.push(written_bytes.load(Ordering::Relaxed));
        }
        all
    }
}

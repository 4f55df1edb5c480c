//! Tells a master that goes on with a session what is cached and open here, so that it knows of which changes to notify
//! this client.

use cavern_conf::backoff;
use cavern_proto::master::RestoreWatchesRequest;

use super::parts::Inner;

/// Directories, and inodes, named at a time.
const AT_A_TIME: usize = 8192;

impl Inner {
    /// Says all of it, tried until the master has answered: bounded by the stream, which whoever calls this must
    /// follow.
    pub(super) async fn restore_watches(&self, session: u64) {
        // Whatever comes later was asked for in the stream that there is.
        let mut directories = self.names.cache.directories();
        directories.extend(self.names.directories.inodes());
        let directories: Vec<u64> = directories.into_iter().collect();
        let inodes: Vec<u64> = self.open.inodes.all().into_iter().map(|(inode, _)| inode).collect();
        let of_directories = directories.chunks(AT_A_TIME).map(|part| (part.to_vec(), Vec::new()));
        let of_inodes = inodes.chunks(AT_A_TIME).map(|part| (Vec::new(), part.to_vec()));
        let parts: Vec<(Vec<u64>, Vec<u64>)> = of_directories.chain(of_inodes).collect();
        for (directories, inodes) in parts {
            self.say(RestoreWatchesRequest { session, directories, inodes, complete: false }).await;
        }
        self.say(RestoreWatchesRequest { session, complete: true, ..RestoreWatchesRequest::default() }).await;
    }

    async fn say(&self, request: RestoreWatchesRequest) {
        let mut backoff = backoff::MASTER.begin();
        loop {
            match ask!(self, "RestoreWatches", restore_watches, request.clone()).await {
                Ok(_) => return,
                Err(error) => tracing::debug!("what is cached here is said again: {error}"),
            }
            backoff.wait().await;
        }
    }
}

//! Tells a master that goes on with a session what is cached and open here, so that it knows of which changes to notify
//! this client.

use cavern_conf::backoff;
use cavern_proto::master::RememberRequest;

use super::parts::Inner;

/// Directories, and inodes, named at a time.
const AT_A_TIME: usize = 8192;

impl Inner {
    /// Says all of it, tried until the master has answered: bounded by the stream, which whoever calls this must
    /// follow.
    pub(super) async fn remember(&self, session: u64) {
        // Whatever comes later was asked for in the stream that there is.
        let mut directories = self.names.cache.directories();
        directories.extend(self.names.directories.inodes());
        let directories: Vec<u64> = directories.into_iter().collect();
        let inodes: Vec<u64> = self.open.inodes.all().into_iter().map(|(inode, _)| inode).collect();
        for part in directories.chunks(AT_A_TIME) {
            self.say(RememberRequest { session, directories: part.to_vec(), ..RememberRequest::default() }).await;
        }
        for part in inodes.chunks(AT_A_TIME) {
            self.say(RememberRequest { session, inodes: part.to_vec(), ..RememberRequest::default() }).await;
        }
        self.say(RememberRequest { session, complete: true, ..RememberRequest::default() }).await;
    }

    async fn say(&self, request: RememberRequest) {
        let mut backoff = backoff::MASTER.begin();
        loop {
            match ask!(self, "Remember", remember, request.clone()).await {
                Ok(_) => return,
                Err(error) => tracing::debug!("what is cached here is said again: {error}"),
            }
            backoff.wait().await;
        }
    }
}

//! Files that stay open for a while when the last program has closed them.
//!
//! Whoever opens a file that was there, writes to it and closes it, as one does with a log, mostly does so again. What
//! is known of the file by then, its blocks, and the master's promise to drop none of them, need not be asked for
//! again if it has stayed open. Only in directories delegated to the session: what stays is let go of before these are.
//! It is as open as any that a program has open, and is closed when nobody comes back in time, when many others stay,
//! and when it loses its last name.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::parts::{Inner, Metadata};

/// Files that stay open at most; the one that was closed first makes room.
const CLOSE_GRACE_MAX: usize = 64;

/// What keeps a file open.
type Content = Arc<dyn Any + Send + Sync>;

/// Those that stay, in the order in which they were closed last.
#[derive(Default)]
pub(super) struct CloseGraceList(Mutex<VecDeque<GraceEntry>>);

struct GraceEntry {
    inode: u64,
    since: Instant,
    _content: Content,
}

impl CloseGraceList {
    fn add(&self, inode: u64, content: Content) {
        let close_grace = GraceEntry { inode, since: Instant::now(), _content: content };
        let mut files = self.0.lock();
        let before = files.iter().position(|file| file.inode == inode).and_then(|place| files.remove(place));
        let surplus = (files.len() == CLOSE_GRACE_MAX).then(|| files.pop_front());
        files.push_back(close_grace);
        drop(files);
        // Closing it may take other locks.
        drop((before, surplus));
    }

    /// A file has no name any more.
    pub(super) fn end(&self, inode: u64) {
        self.end_those(|file| file.inode == inode);
    }

    /// Whether there were any.
    fn end_those(&self, is_over: impl Fn(&GraceEntry) -> bool) -> bool {
        let mut files = self.0.lock();
        let (over, rest): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut *files).into_iter().partition(is_over);
        *files = rest;
        // Closing them takes other locks.
        drop(files);
        let were_any = !over.is_empty();
        drop(over);
        were_any
    }
}

impl Metadata {
    /// Keeps a file open that is being closed, if it has its name, and that in a directory that is held.
    pub(crate) fn add_to_close_grace(&self, inode: u64, content: Content) {
        if !self.is_delegated(inode) {
            return;
        }
        let inner = &self.inner;
        inner.open.close_grace.add(inode, content);
        // After it has its place: who removes it from now on, or returns the directory, finds it there.
        if !inner.names.has_name(inode) || !self.is_delegated(inode) {
            inner.open.close_grace.end(inode);
        }
    }

    /// Closes those that were closed so long ago.
    pub(crate) fn end_close_grace(&self, after: Duration) {
        let now = Instant::now();
        self.inner.open.close_grace.end_those(|file| now.saturating_duration_since(file.since) >= after);
    }
}

impl Inner {
    /// Closes all that stay, and lets go of what was held for them: before others see what is in their directories.
    pub(super) fn end_close_grace(&self) {
        if self.open.close_grace.end_those(|_| true) {
            self.release_closed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_last_to_be_closed_stay_until_they_are_removed_or_nobody_comes_back() {
        let close_grace = CloseGraceList::default();
        let content = |number: u64| -> Arc<u64> { Arc::new(number) };
        let all: Vec<_> = (0..CLOSE_GRACE_MAX as u64 + 1).map(content).collect();
        for (number, content) in all[..CLOSE_GRACE_MAX].iter().enumerate() {
            close_grace.add(number as u64, content.clone());
        }
        close_grace.add(0, all[0].clone());
        tokio::time::advance(Duration::from_secs(1)).await;
        close_grace.add(CLOSE_GRACE_MAX as u64, all[CLOSE_GRACE_MAX].clone());
        let stays = |number: usize| Arc::strong_count(&all[number]) == 2;
        assert_eq!(
            [stays(0), stays(1), stays(2), stays(CLOSE_GRACE_MAX)],
            [true, false, true, true],
            "the oldest has gone"
        );
        close_grace.end(2);
        close_grace.end(2);
        assert!(!stays(2) && stays(3));
        let now = Instant::now();
        close_grace.end_those(|file| now - file.since >= Duration::from_secs(1));
        assert_eq!((stays(0), stays(CLOSE_GRACE_MAX)), (false, true));
        assert!(close_grace.end_those(|_| true) && !close_grace.end_those(|_| true) && !stays(CLOSE_GRACE_MAX));
    }
}

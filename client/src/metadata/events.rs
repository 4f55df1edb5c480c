//! What the events of the master do to what is known here.

use cavern_proto::master::WatchEvent;
use cavern_proto::master::watch_event::Event;

use super::open_files::ChangedContents;
use super::parts::Inner;
use super::sink::InvalidationSink;

impl Inner {
    /// Takes one event in and hands it to the sink; whether that has something to pass on.
    pub(super) fn apply_event(&self, sink: &dyn InvalidationSink, event: WatchEvent) -> bool {
        let Some(what) = event.event else { return false };
        // A stream that goes on waits for what the sink was given in the one before, and may not have passed on yet.
        let passes_on = matches!(what, Event::Reset(_) | Event::Resumed(_) | Event::Entry(_) | Event::InodeChanged(_));
        match what {
            Event::Reset(reset) => {
                self.tables.set_cluster_id(&reset.cluster_id);
                self.begin_anew(reset.session, event.seq);
                sink.reset();
            }
            Event::Resumed(resumed) => {
                self.resume(resumed.session);
                sink.resumed();
            }
            Event::Entry(changed) => {
                self.names.entry_changed(&changed);
                self.stats.invalidations.inc();
                let directory = self.names.directories.get(changed.parent);
                let kept = directory.is_none_or(|directory| !directory.is_strict());
                sink.entry(changed.parent, &changed.name, changed.old_inode, changed.new_inode, kept);
            }
            Event::InodeChanged(inode) => {
                self.names.forget_inode(inode);
                self.open.content_changed(inode);
                if let Some(directory) = self.names.directories.get(inode) {
                    directory.drop_pages();
                }
                self.stats.invalidations.inc();
                sink.inode(inode);
            }
            // Nothing that the kernel has is another by that. It must not be waited for either: it may have pages of a
            // write that waits for this.
            Event::LayoutChanged(inode) => self.open.content_changed(inode),
            Event::WorkersEpoch(epoch) => self.tables.workers_changed(epoch),
            Event::MountsEpoch(epoch) => self.tables.mounts_changed(epoch),
            Event::Unlinked(inode) => {
                self.open.forget_gone(&[inode]);
                self.names.forget_inode(inode);
            }
            Event::Recall(directory) => self.recalled(directory),
            Event::LockGranted(waiter) => self.locks.granted(waiter, self.lease.session()),
            Event::Tick(_) => {}
        }
        passes_on
    }

    /// A stream begins, or something was missed: nothing that was known counts.
    fn begin_anew(&self, session: u64, seq: u64) {
        if self.enter_session(session) && self.log.delegates_directories {
            // What is cached of them goes, and the master has it that they are held.
            self.log.return_all();
        } else {
            self.log.end_delegations();
        }
        self.names.clear();
        self.open.all_contents_changed();
        self.lease.restart(session, seq);
        self.locks.ask_again();
        self.stats.watch_resets.inc();
    }

    /// The stream goes on after the last event that was taken in.
    fn resume(&self, session: u64) {
        let is_same = self.enter_session(session);
        // Answers to what was asked before are not kept: nobody watches over them.
        self.names.recent.reset();
        if !is_same {
            self.open.inodes.all_changed();
            self.log.end_delegations();
        }
        // The master is told what is cached and open here, and not what was.
        self.open.forget_contents(ChangedContents::All);
        if self.lease.resume(session) {
            self.locks.ask_again();
        }
        self.stats.watch_resumptions.inc();
    }

    /// Whatever is asked for from now on is asked for in this session; whether it is the one before.
    fn enter_session(&self, session: u64) -> bool {
        self.tables.everything_changed();
        let is_same = self.lease.session() == session;
        self.lease.begin(session);
        if let Some(journal) = &self.log.journal {
            journal.note_changes(session, 0);
        }
        is_same
    }
}

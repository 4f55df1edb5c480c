//! What is known of an open file, under one lock; and whether the master may drop blocks of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_proto::master::{Origin, User};

use super::block::OpenBlock;
use super::layout::Layout;
use crate::read::OpenFile;

/// What is known of the content of a file, and what of it is open.
#[derive(Default)]
pub(super) struct Known {
    pub layout: Layout,
    pub blocks: HashMap<u32, Arc<OpenBlock>>,
    /// Its first block, as long as it does not need one.
    pub granted: Option<OpenBlock>,
    pub origin: Option<OpenOrigin>,
}

/// What is known of an open file.
#[derive(Default)]
pub(super) struct State {
    /// `None` until it is needed.
    pub known: Option<Known>,
    /// How often somebody else had changed the inode when the layout was asked for.
    pub seen: u64,
    /// The gaps in the events of the inode by then.
    pub gaps: Option<u64>,
    /// See `Layout.ends_marked` of the master.
    pub ends_marked: bool,
    /// Why something that was written is lost; returned once.
    pub lost: Option<String>,
    /// It was there when it was opened: by the first who has it open, or by another one since.
    pub was_there: bool,
    /// Who was the last to open it, and to open it to be written, where the mount limits users.
    pub opener: Option<User>,
    pub writer: Option<User>,
}

/// An origin that is open here.
#[derive(Clone)]
pub(super) struct OpenOrigin {
    pub origin: Origin,
    pub file: Arc<OpenFile>,
}

/// Whether the master may drop blocks of a file: those that it knows, unless they are held.
#[derive(Debug, Default)]
pub(super) struct OpenRef {
    is_taken: AtomicBool,
    /// A commit without a hold has begun: the master may know blocks. Set while nobody writes.
    is_committed_unreferenced: AtomicBool,
}

impl State {
    pub(super) fn layout(&self) -> Option<&Layout> {
        self.known.as_ref().map(|known| &known.layout)
    }

    pub(super) fn layout_mut(&mut self) -> Option<&mut Layout> {
        self.known.as_mut().map(|known| &mut known.layout)
    }

    /// The master is asked before the next look.
    pub(super) fn outdate(&mut self) {
        self.seen = u64::MAX;
    }
}

impl OpenOrigin {
    /// Whether it is still this one, cut or not.
    pub(super) fn is(&self, origin: &Origin) -> bool {
        (&self.origin.key, &self.origin.etag, self.origin.length) == (&origin.key, &origin.etag, origin.length)
    }
}

impl OpenRef {
    pub(super) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Acquire)
    }

    pub(super) fn taken(&self) {
        self.is_taken.store(true, Ordering::Release);
    }

    pub(super) fn dropped(&self) {
        self.is_taken.store(false, Ordering::Release);
    }

    pub(super) fn committed_unreferenced(&self) {
        self.is_committed_unreferenced.store(true, Ordering::Release);
    }

    /// Whether the master may drop blocks: it knows some, or is about to, and they are not held.
    pub(super) fn exposes(&self, layout: &Layout) -> bool {
        !self.is_taken() && (self.is_committed_unreferenced.load(Ordering::Acquire) || layout.has_committed())
    }
}

//! What handles in a process share, found by a name for as long as one of them has it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

pub(crate) struct Registry<T>(Mutex<BTreeMap<String, Weak<T>>>);

impl<T> Registry<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// What has this name, made if nobody has it.
    pub(crate) fn of(&self, name: &str, make: impl FnOnce() -> T) -> Arc<T> {
        let mut all = self.0.lock();
        if let Some(shared) = all.get(name).and_then(Weak::upgrade) {
            return shared;
        }
        all.retain(|_, shared| shared.strong_count() > 0);
        let shared = Arc::new(make());
        all.insert(name.to_owned(), Arc::downgrade(&shared));
        shared
    }
}

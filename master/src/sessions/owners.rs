//! Who has opened which session, where connections are secured, and how many each of them has.

use std::collections::HashMap;

use cavern_security::Identity;

/// See the module.
#[derive(Default)]
pub struct Owners {
    of: HashMap<u64, Identity>,
    /// Sessions of each that has one.
    counts: HashMap<Identity, usize>,
}

impl Owners {
    pub fn get(&self, session: u64) -> Option<&Identity> {
        self.of.get(&session)
    }

    /// A session is that of whoever comes first.
    pub fn set(&mut self, session: u64, owner: &Identity) {
        if self.of.contains_key(&session) {
            return;
        }
        self.of.insert(session, owner.clone());
        *self.counts.entry(owner.clone()).or_default() += 1;
    }

    pub fn remove(&mut self, session: u64) {
        let Some(owner) = self.of.remove(&session) else { return };
        if let Some(count) = self.counts.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&owner);
            }
        }
    }

    /// Sessions of one, those too that may come back.
    pub fn count(&self, owner: &Identity) -> usize {
        self.counts.get(owner).copied().unwrap_or_default()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.of.len()
    }
}

//! What the operations in the log are about, so that who reads or answers something knows whether one of them may still
//! change it; and what came to nothing though it was answered.

use std::collections::{BTreeSet, HashMap};

use super::operation::{Answer, Operation};

/// Losses that are remembered for whoever asks; of more only some are told.
const LOSSES_MAX: usize = 65_536;

/// The inodes that operations in the log are about.
#[derive(Debug, Default)]
pub(in crate::metadata) struct AffectedInodes {
    /// Of those that were answered here,
    answered: Counts,
    /// and of those that were asked for.
    asked: Counts,
    /// Of the latter, those that take names from what is there, or give it others.
    moving: Counts,
    /// Numbered operations, ever, and those of them that are neither made nor lost nor undone: what was answered,
    begun: u64,
    unmade: BTreeSet<u64>,
    /// and unlocks that nobody need wait for.
    unlocks: BTreeSet<u64>,
    /// How many had begun with the last of them that was about more than the bytes of a file that the session holds.
    named: u64,
    /// Why something that was answered is lost, by what it was about.
    losses: HashMap<u64, String>,
}

/// How many operations are about each inode; 0 for any.
#[derive(Debug, Default)]
struct Counts(HashMap<u64, u32>);

impl Counts {
    fn add(&mut self, inodes: &[u64]) {
        inodes.iter().for_each(|inode| *self.0.entry(*inode).or_default() += 1);
    }

    fn remove(&mut self, inodes: &[u64]) {
        for inode in inodes {
            if let Some(count) = self.0.get_mut(inode) {
                *count -= 1;
                if *count == 0 {
                    self.0.remove(inode);
                }
            }
        }
    }

    fn touch(&self, inodes: &[u64]) -> bool {
        let has = |inode: &u64| self.0.contains_key(inode);
        !self.0.is_empty() && (has(&0) || inodes.iter().any(has))
    }
}

impl AffectedInodes {
    /// The number of the next operation whose end somebody may wait for.
    pub fn next_number(&self) -> u64 {
        self.begun
    }

    pub(super) fn enter(&mut self, operation: &Operation) {
        let counts = if operation.answered.is_some() { &mut self.answered } else { &mut self.asked };
        counts.add(&operation.inodes);
        if operation.is_moving() {
            self.moving.add(&operation.inodes);
        }
        if let Some(number) = operation.number {
            self.begun = number + 1;
            self.unmade_like(operation).insert(number);
            self.is_named_up_to(operation);
        }
    }

    /// A sync of names waits for an operation, unless it is about bytes or locks alone.
    pub(super) fn is_named_up_to(&mut self, operation: &Operation) {
        let is_named = operation.answered.is_some() && !operation.is_overwrite();
        if let Some(number) = operation.number.filter(|_| is_named) {
            self.named = self.named.max(number + 1);
        }
    }

    /// It is undone, or at its end.
    pub(super) fn leave(&mut self, operation: &Operation) {
        let counts = if operation.answered.is_some() { &mut self.answered } else { &mut self.asked };
        counts.remove(&operation.inodes);
        if operation.is_moving() {
            self.moving.remove(&operation.inodes);
        }
        if let Some(number) = operation.number {
            self.unmade_like(operation).remove(&number);
        }
    }

    /// Where those are counted that are of the kind of an operation.
    fn unmade_like(&mut self, operation: &Operation) -> &mut BTreeSet<u64> {
        if operation.answered.is_some() { &mut self.unmade } else { &mut self.unlocks }
    }

    /// Nothing of it came to be, though it was answered.
    pub(super) fn lose(&mut self, operation: &Operation, answer: &Answer) {
        let Some(error) = answer.as_ref().err().filter(|_| operation.mutation.is_write_back) else { return };
        for inode in &operation.inodes {
            if self.losses.len() < LOSSES_MAX {
                self.losses.entry(*inode).or_insert_with(|| error.cause());
            }
        }
    }

    /// Whether all that is known here of these is as it will be: nothing about them was asked for without an answer.
    pub fn is_certain(&self, inodes: &[u64]) -> bool {
        !self.asked.touch(inodes)
    }

    /// Whether these are where they are known to be, and will be.
    pub fn is_in_place(&self, inodes: &[u64]) -> bool {
        !self.moving.touch(inodes)
    }

    /// Whether something that was answered about this inode is not made yet.
    pub fn is_unsettled(&self, inode: u64) -> bool {
        self.answered.touch(&[inode])
    }

    /// Whether there is but one such operation.
    pub fn is_last_of(&self, inode: u64) -> bool {
        self.answered.0.get(&inode).is_none_or(|count| *count <= 1)
    }

    /// Whether any of so many that have begun was answered and is not made.
    pub fn has_unmade(&self, begun: u64) -> bool {
        self.unmade.first().is_some_and(|first| *first < begun)
    }

    /// How many are waited for until all that was answered is made; `None` when it is.
    pub fn unmade(&self) -> Option<u64> {
        self.has_unmade(self.begun).then_some(self.begun)
    }

    /// How many are waited for until all that was answered about more than bytes is made; `None` when it is.
    pub fn named_unmade(&self) -> Option<u64> {
        self.has_unmade(self.named).then_some(self.named)
    }

    /// Whether any of so many that have begun is not made, be it an unlock that nobody waits for.
    pub fn has_any_unmade(&self, begun: u64) -> bool {
        self.has_unmade(begun) || self.unlocks.first().is_some_and(|first| *first < begun)
    }

    /// How many are waited for until these, too, are made; `None` when they are.
    pub fn any_unmade(&self) -> Option<u64> {
        self.has_any_unmade(self.begun).then_some(self.begun)
    }

    pub fn has_loss(&self, inode: u64) -> bool {
        self.losses.contains_key(&inode)
    }

    /// Why something is lost that was answered about this inode; said once.
    pub fn take_loss(&mut self, inode: u64) -> Option<String> {
        self.losses.remove(&inode)
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::mutation::Change;
    use cavern_proto::master::{MutationResult, RemoveName, SetLock};

    use super::super::operation::{Changed, LocalResult};
    use super::*;
    use crate::error::ClientError;

    fn asked(inodes: &[u64], change: Change) -> Operation {
        Operation { inodes: inodes.to_vec(), ..Operation::new(change, (0, 0)) }
    }

    fn answered(affected: &mut AffectedInodes, inodes: &[u64], is_overwrite: bool) -> Operation {
        let answer = LocalResult { result: MutationResult::default(), is_overwrite, upgrade: None };
        let mut operation = asked(inodes, Change::AddOpenRef(1));
        operation.mutation.is_write_back = true;
        (operation.answered, operation.number) = (Some(Box::new(answer)), Some(affected.next_number()));
        affected.enter(&operation);
        operation
    }

    #[test]
    fn what_is_asked_for_makes_the_rest_uncertain_until_it_is_answered() {
        let mut affected = AffectedInodes::default();
        let some = asked(&[5, 6], Change::AddOpenRef(1));
        affected.enter(&some);
        assert!(affected.is_certain(&[7]) && !affected.is_certain(&[7, 6]));
        let anything = asked(&[0], Change::AddOpenRef(1));
        affected.enter(&anything);
        assert!(!affected.is_certain(&[7]) && affected.is_in_place(&[5, 7]));
        let moving = asked(&[7], Change::Remove(RemoveName::default()));
        affected.enter(&moving);
        assert!(!affected.is_in_place(&[5, 7]) && affected.is_in_place(&[5]));
        [some, anything, moving].iter().for_each(|operation| affected.leave(operation));
        assert!(affected.is_certain(&[5, 6, 7]) && affected.is_in_place(&[7]));
        assert!(affected.asked.0.is_empty() && affected.moving.0.is_empty() && affected.unmade().is_none());
    }

    #[test]
    fn what_is_answered_is_unmade_until_its_end_and_a_loss_is_told_once() {
        let mut affected = AffectedInodes::default();
        let [first, second] = [vec![5], vec![5, 6]].map(|inodes| answered(&mut affected, &inodes, false));
        assert!(affected.is_unsettled(5) && !affected.is_unsettled(7));
        assert!(!affected.is_last_of(5) && affected.is_last_of(6));
        assert_eq!(affected.unmade(), Some(2));
        let lost = Err(ClientError::OutcomeUnknown { cause: "the session is over".to_owned() });
        affected.lose(&first, &lost);
        affected.leave(&first);
        assert!(affected.has_unmade(2) && !affected.has_unmade(1));
        // One that came later is over before: it was undone.
        let undone = answered(&mut affected, &[], true);
        affected.leave(&undone);
        assert_eq!(affected.unmade(), Some(3));
        affected.lose(&second, &Ok(Changed::new(MutationResult::default(), None, 1, 0)));
        affected.leave(&second);
        assert_eq!(affected.unmade(), None);
        assert_eq!((affected.take_loss(6), affected.take_loss(5).as_deref()), (None, Some("the session is over")));
        assert_eq!(affected.take_loss(5), None, "it is said once");
    }

    #[test]
    fn what_is_about_bytes_alone_need_not_be_waited_for() {
        let mut affected = AffectedInodes::default();
        let [named, bytes] = [false, true].map(|is_overwrite| answered(&mut affected, &[5], is_overwrite));
        assert_eq!(affected.named_unmade(), Some(1));
        affected.leave(&named);
        assert_eq!(affected.named_unmade(), None);
        affected.leave(&bytes);
        let later = [true, false].map(|is_overwrite| answered(&mut affected, &[5], is_overwrite));
        assert_eq!(affected.named_unmade(), Some(4), "in the order of all");
        later.iter().for_each(|operation| affected.leave(operation));
        assert_eq!(affected.named_unmade(), None);
    }

    #[test]
    fn an_unlock_is_waited_for_by_nobody_who_waits_for_what_was_answered() {
        let mut affected = AffectedInodes::default();
        let number = Some(affected.next_number());
        let unlock = Operation { number, ..Operation::must_deliver(Change::SetLock(SetLock::default())) };
        affected.enter(&unlock);
        assert_eq!((affected.unmade(), affected.any_unmade()), (None, Some(1)));
        // Nor when something that was answered behind it is undone.
        let undone = answered(&mut affected, &[5], false);
        assert_eq!((affected.unmade(), affected.named_unmade()), (Some(2), Some(2)));
        affected.leave(&undone);
        assert_eq!((affected.unmade(), affected.named_unmade(), affected.any_unmade()), (None, None, Some(2)));
        affected.leave(&unlock);
        assert_eq!(affected.any_unmade(), None);
    }
}

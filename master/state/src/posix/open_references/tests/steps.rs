//! Two sessions that do anything whatever.

use proptest::prelude::*;

use super::*;

/// What one of two sessions does: in a directory, by its number among those there are, with a letter.
#[derive(Clone, Debug)]
enum Step {
    Make { at: (usize, u8), kind: Kind, hold: bool },
    Remove { at: (usize, u8), directory: bool },
    Rename { from: (usize, u8), to: (usize, u8) },
    Link { from: (usize, u8), to: (usize, u8) },
    Chmod { at: (usize, u8) },
    Acquire { at: usize },
    LetGo { at: usize },
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0usize..6, 0u8..4);
    let kind = prop::sample::select(vec![Kind::File, Kind::Directory, Kind::Directory]);
    prop_oneof![
        8 => (place(), kind, any::<bool>()).prop_map(|(at, kind, hold)| Step::Make { at, kind, hold }),
        3 => (place(), any::<bool>()).prop_map(|(at, directory)| Step::Remove { at, directory }),
        4 => (place(), place()).prop_map(|(from, to)| Step::Rename { from, to }),
        2 => (place(), place()).prop_map(|(from, to)| Step::Link { from, to }),
        2 => place().prop_map(|at| Step::Chmod { at }),
        3 => (0usize..6).prop_map(|at| Step::Acquire { at }),
        2 => (0usize..6).prop_map(|at| Step::LetGo { at }),
        1 => Just(Step::End),
    ]
}

impl Fixture {
    /// Every directory of the mount.
    fn directories(&self) -> Vec<u64> {
        let all = self.tables().inodes_after(0, usize::MAX).unwrap();
        let is_shown = |record: &InodeRecord| record.mount_id != 0 && is_directory(record) && !record.unlinked;
        all.into_iter().filter(|(_, record)| is_shown(record)).map(|(inode, _)| inode).collect()
    }

    fn change_of(&self, step: Step) -> Change {
        let all = self.directories();
        let place = |(at, letter): (usize, u8)| (all[at % all.len()], char::from(b'a' + letter).to_string());
        let found = |(at, text): (u64, String)| {
            self.tables().dentry(at, text.as_bytes()).unwrap().map_or(0, |dentry| dentry.inode)
        };
        match step {
            Step::Make { at, kind, hold } => {
                let (parent, text) = place(at);
                Change::Create(CreateInode { delegate: hold, ..creation(parent, &text, kind) })
            }
            Step::Remove { at, directory } => {
                let (parent, text) = place(at);
                remove(parent, &text, directory)
            }
            Step::Rename { from, to } => {
                let ((from, old), (to, new)) = (place(from), place(to));
                rename((from, &old), (to, &new))
            }
            Step::Link { from, to } => {
                let (parent, text) = place(to);
                Change::Link(LinkInode { inode: found(place(from)), parent, name: name(&text) })
            }
            Step::Chmod { at } => chmod(found(place(at))),
            Step::Acquire { at } => wish(place((at, 0)).0, AcquireStep::Grant),
            Step::LetGo { at } => let_go(&[place((at, 0)).0]),
            Step::End => unreachable!(),
        }
    }

    /// What was made changes nothing that another session holds, and nothing of what was answered for that this one
    /// does not; what was refused leaves nothing behind.
    fn check_step(&mut self, session: u64, step: Step, is_write_back: bool) {
        let (state, shown) = (self.dump(), format!("{step:?} by {session}, answered: {is_write_back}"));
        let records = self.tables().inodes_after(0, usize::MAX).unwrap();
        let holders: Vec<DirectoryDelegation> = self.tables().all_delegations().unwrap();
        let holder = |directory| holders.iter().find(|held| held.directory == directory).map(|held| held.session);
        let change = self.change_of(step);
        let asked = if let Change::AcquireDelegation(asked) = &change { asked.inode } else { 0 };
        let result = self.mutate(session, Mutation { change: Some(change), is_write_back, ..Mutation::default() });
        if result.errno != 0 {
            assert!(self.dump() == state, "{shown} has left something behind");
            let other = holder(result.delegated_elsewhere).filter(|holder| *holder != session);
            assert_eq!(other.is_some(), result.delegated_elsewhere != 0, "{shown}");
            return;
        }
        let is_in_asked = |held: &DirectoryDelegation| {
            records.iter().any(|(inode, record)| *inode == held.directory && record.parent == asked)
        };
        let mut others = holders.iter().filter(|held| held.session != session);
        assert!(!result.delegated || !others.any(is_in_asked), "{shown}: another session holds one in it");
        for attr in &result.attributes {
            let Some((inode, record)) = records.iter().find(|(inode, _)| *inode == attr.inode) else { continue };
            let around = [holder(record.parent), holder(*inode)];
            let is_own = |held: &Option<u64>| *held == Some(session);
            assert!(around.iter().all(|held| held.is_none() || is_own(held)), "{shown}: inode {inode}");
            assert!(!is_write_back || around.iter().any(is_own), "{shown}: inode {inode}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn whatever_two_sessions_do_neither_changes_what_the_other_holds(
        steps in prop::collection::vec((any::<bool>(), step(), prop::bool::weighted(0.3)), 0..60),
    ) {
        let mut bench = Fixture::new();
        for (is_other, step, is_write_back) in steps {
            let session = if is_other { OTHER } else { HOLDER };
            if let Step::End = step {
                bench.run(Kinds::EndSessionStep(EndSessionStep { session, limit: 10_000, part: 0, now_ns: NOW }));
                prop_assert!(bench.tables().all_delegations().unwrap().iter().all(|held| held.session != session));
            } else {
                bench.check_step(session, step, is_write_back);
            }
        }
    }
}

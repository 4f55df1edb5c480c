use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const FILE: u64 = 5;
const END: u64 = u64::MAX;

fn everything(owner: u64) -> Vec<Unlock> {
    vec![Unlock { owner, bytes: None }]
}

fn answer(asked: Asked, is_granted: bool) -> Vec<Unlock> {
    let mut unlocks = Vec::new();
    asked.answered(is_granted, |unlock| unlocks.push(unlock));
    unlocks
}

fn lock(descriptions: &Arc<Descriptions>, handle: u64, owner: u64, bytes: (u64, u64)) {
    assert_eq!(answer(descriptions.ask(FILE, handle, owner, bytes), true), []);
}

fn release(descriptions: &Descriptions, handle: u64) -> Vec<Unlock> {
    let mut unlocks = Vec::new();
    descriptions.closing(handle);
    descriptions.released(handle, |unlock| unlocks.push(unlock));
    unlocks
}

#[test]
fn a_release_leaves_alone_what_a_process_has_locked_through_another_descriptor() {
    let (descriptions, process) = (Arc::new(Descriptions::default()), 100);
    lock(&descriptions, 1, process, (0, END));
    descriptions.flushed(FILE, 1, process);
    lock(&descriptions, 2, process, (0, END));
    assert_eq!(release(&descriptions, 1), []);
    // A child that had inherited it closes what it never locked.
    lock(&descriptions, 3, process, (10, 20));
    descriptions.flushed(FILE, 3, 101);
    assert_eq!(
        release(&descriptions, 2),
        [(0, 9), (21, END)].map(|bytes| Unlock { owner: process, bytes: Some(bytes) })
    );
    assert_eq!(release(&descriptions, 3), everything(process), "without a FLUSH, as after a failure");
    assert!(descriptions.state.lock().owned.is_empty() && descriptions.state.lock().inodes.is_empty());
}

#[test]
fn the_next_description_of_the_same_number_keeps_what_it_has_locked() {
    let (descriptions, number) = (Arc::new(Descriptions::default()), 100);
    lock(&descriptions, 1, number, (0, 9));
    lock(&descriptions, 2, number, (5, 20));
    assert_eq!(release(&descriptions, 1), [Unlock { owner: number, bytes: Some((0, 4)) }]);
    // It asks while the earlier one is released.
    lock(&descriptions, 3, number, (30, 40));
    let asked = descriptions.ask(FILE, 2, number, (35, 50));
    assert_eq!(release(&descriptions, 3), [Unlock { owner: number, bytes: Some((30, 34)) }]);
    assert_eq!(answer(asked, false), [Unlock { owner: number, bytes: Some((35, 40)) }]);
    assert_eq!(release(&descriptions, 2), everything(number));
}

/// The RELEASE of one and the request of the next may be read by two event loops.
#[test]
fn nobody_asks_for_a_lock_between_the_end_of_another_and_its_unlock() {
    let (descriptions, number) = (Arc::new(Descriptions::default()), 100);
    let mut unlocked = 0;
    let mut unlock_alone = |_: Unlock| {
        assert!(descriptions.state.is_locked(), "the next could lock what is unlocked after that");
        unlocked += 1;
    };
    lock(&descriptions, 1, number, (0, 9));
    descriptions.closing(1);
    // What it does until it is released may take long; the next has got the same lock meanwhile.
    lock(&descriptions, 2, number, (0, 9));
    descriptions.released(1, &mut unlock_alone);
    let asked = descriptions.ask(FILE, 3, number, (0, 9));
    descriptions.released(2, &mut unlock_alone);
    asked.answered(false, &mut unlock_alone);
    lock(&descriptions, 4, number, (0, 9));
    descriptions.released(4, &mut unlock_alone);
    assert_eq!(unlocked, 2, "of what was asked for in vain, and of the last");
}

#[tokio::test]
async fn who_meets_with_a_lock_of_what_is_being_closed_looks_again() {
    let descriptions = Arc::new(Descriptions::default());
    let moment = || tokio::time::Instant::now() + Duration::from_secs(20);
    lock(&descriptions, 1, 100, (0, 9));
    assert!(!descriptions.look().is_outdated(FILE, 2, moment()).await, "nothing was closed");
    descriptions.flushed(FILE, 1, 7);
    let mut look = descriptions.look();
    let (is_outdated, _) = tokio::join!(look.is_outdated(FILE, 2, moment()), async { release(&descriptions, 1) });
    assert!(is_outdated);
    assert!(!look.is_outdated(FILE, 2, moment()).await);
    // Released between the question and its answer.
    let mut look = descriptions.look();
    descriptions.ask_flock(FILE, 3);
    assert!(descriptions.closing(3));
    assert_eq!(release(&descriptions, 3), []);
    assert!(look.is_outdated(FILE, 2, moment()).await);
    assert!(!look.is_outdated(FILE, 2, moment()).await);
}

#[derive(Clone, Debug)]
enum Step {
    Lock { handle: u64, owner: u64, start: u64, length: u64 },
    Unlock { owner: u64, start: u64, length: u64 },
    Flush { handle: u64, process: u64 },
    Release { handle: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let (handle, owner, start, length) = (1u64..4, 10u64..13, 0u64..16, 0u64..8);
    prop_oneof![
        4 => (handle.clone(), owner.clone(), start.clone(), length.clone())
            .prop_map(|(handle, owner, start, length)| Step::Lock { handle, owner, start, length }),
        2 => (owner.clone(), start, length).prop_map(|(owner, start, length)| Step::Unlock { owner, start, length }),
        1 => (handle.clone(), owner).prop_map(|(handle, process)| Step::Flush { handle, process }),
        1 => handle.prop_map(|handle| Step::Release { handle }),
    ]
}

proptest! {
    /// Against a map from bytes and owners to the handles through which they were locked last.
    #[test]
    fn a_release_ends_what_was_locked_last_through_it(steps in prop::collection::vec(step(), 0..60)) {
        let descriptions = Arc::new(Descriptions::default());
        let mut model = HashMap::<(u64, u64), u64>::new();
        for step in steps {
            match step {
                Step::Lock { handle, owner, start, length } => {
                    lock(&descriptions, handle, owner, (start, start + length));
                    model.extend((start..=start + length).map(|byte| ((owner, byte), handle)));
                }
                Step::Unlock { owner, start, length } => {
                    descriptions.unlocked(FILE, owner, (start, start + length));
                    model.retain(|(known, byte), _| *known != owner || !(start..=start + length).contains(byte));
                }
                Step::Flush { handle, process } => {
                    descriptions.flushed(FILE, handle, process);
                    model.retain(|(owner, _), _| *owner != process);
                }
                Step::Release { handle } => {
                    let mut unlocked: Vec<_> = release(&descriptions, handle)
                        .into_iter()
                        .flat_map(|unlock| {
                            let (start, end) = unlock.bytes.unwrap_or((0, 30));
                            (start..=end).map(move |byte| (unlock.owner, byte))
                        })
                        .filter(|key| model.contains_key(key))
                        .collect();
                    unlocked.sort_unstable();
                    let mut expected: Vec<_> =
                        model.iter().filter(|(_, through)| **through == handle).map(|(key, _)| *key).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(unlocked, expected);
                    model.retain(|_, through| *through != handle);
                }
            }
        }
    }
}

//! Where a part of a key space is cut into two, when nothing is known of it but how far it was listed.
//!
//! Keys are strings of characters, which sort as their bytes do. A cut needs no key of that name: whoever cuts asks the
//! store for what lies behind it, and learns by that whether there is anything. So the first guess need not be good:
//! the second is made of what the first has told.

/// A code point that most keys have nothing behind.
const HIGH: u32 = 0x7f;
/// One that most keys have nothing before.
const LOW: u32 = 0x20;

/// A string behind `low` and before `high` (`None` for no end); `None` where none is found.
///
/// Between two keys that differ in a character with others in between, it has the one in the middle. Where there is
/// none in between, a character of what `low` has of its own, in the middle of that, is put up half of the way to the
/// last; where there is no end, the first is. Only the first `reach` characters of `low` are put up: of those behind
/// them the next page alone has all that there are.
pub(super) fn midpoint(low: &str, high: Option<&str>, reach: usize) -> Option<String> {
    let lower: Vec<char> = low.chars().collect();
    let upper: Vec<char> = high.unwrap_or_default().chars().collect();
    let same = lower.iter().zip(&upper).take_while(|(one, other)| one == other).count();
    let found = middle(&lower, &upper, same).or_else(|| {
        let own = if high.is_none() { 0 } else { same + 1 };
        // Or one behind it, or before it: a last character has nothing behind it.
        let end = reach.min(lower.len());
        let half = if high.is_none() { 0 } else { own + end.saturating_sub(own) / 2 };
        let behind = (half..end).chain((own..half.min(end)).rev());
        behind.filter_map(|at| follower(&lower, at)).next().or_else(|| longer(low).filter(|_| reach > lower.len()))
    })?;
    (found.as_str() > low && high.is_none_or(|high| found.as_str() < high)).then_some(found)
}

/// What has a character in the middle where both differ.
fn middle(lower: &[char], upper: &[char], same: usize) -> Option<String> {
    let end = u32::from(*upper.get(same)?);
    let begin = lower.get(same).map_or(LOW, |first| u32::from(*first));
    let between = begin.checked_add(end)? / 2;
    let between = char::from_u32(between).filter(|_| between > begin && between < end)?;
    Some(lower[..same].iter().copied().chain([between]).collect())
}

/// What has a later character at a place, half of the way to the last.
fn follower(lower: &[char], at: usize) -> Option<String> {
    let here = u32::from(*lower.get(at)?);
    let next = if here < HIGH { (here + HIGH).div_ceil(2) } else { here + 1 };
    let next = char::from_u32(next).filter(|_| next != HIGH)?;
    Some(lower[..at].iter().copied().chain([next]).collect())
}

/// How many characters two keys of a listing have in common, and the first one in which they differ.
pub(super) fn reach(one: &str, next: &str) -> usize {
    one.chars().zip(next.chars()).take_while(|(one, next)| one == next).count() + 1
}

fn longer(low: &str) -> Option<String> {
    Some(format!("{low}{}", char::from_u32(u32::midpoint(LOW, HIGH))?))
}

/// About which part of what lies between two keys lies before `at`; `None` where there is no end to go by.
pub(super) fn fraction(low: &str, high: Option<&str>, at: &str) -> Option<f64> {
    let high = high?;
    let same = low.bytes().zip(high.bytes()).take_while(|(one, other)| one == other).count();
    let place = |key: &str| {
        let bytes = key.as_bytes().iter().skip(same).take(6);
        bytes.fold((0.0, 1.0), |(sum, unit), byte| (sum + unit / 256.0 * f64::from(*byte), unit / 256.0)).0
    };
    let (begin, end, at) = (place(low), place(high), place(at));
    (end > begin).then(|| ((at - begin) / (end - begin)).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_cut_lies_between(low in "\\PC{0,6}|[a-c/]{0,6}", high in "\\PC{0,6}|[a-c/]{1,6}") {
            if let Some(cut) = midpoint(&low, None, usize::MAX) {
                prop_assert!(cut > low);
            }
            if low < high && let Some(cut) = midpoint(&low, Some(&high), usize::MAX) {
                prop_assert!(low < cut && cut < high, "{cut:?}");
            }
        }

        #[test]
        fn fractions_grow_with_the_keys(keys in prop::collection::btree_set("[a-f]{1,5}", 3..20)) {
            let keys: Vec<_> = keys.into_iter().collect();
            let (low, high) = (&keys[0], &keys[keys.len() - 1]);
            let parts: Vec<_> = keys.iter().map(|at| fraction(low, Some(high), at).unwrap()).collect();
            prop_assert!(parts.is_sorted() && parts[0] == 0.0 && parts[parts.len() - 1] == 1.0, "{parts:?}");
            prop_assert_eq!(fraction(low, None, high), None);
        }
    }

    /// Cuts what is left of the longest part until there are so many, as the index does, and counts the questions.
    fn cut_up(keys: &BTreeSet<String>, parts: usize) -> (Vec<usize>, usize) {
        let count = |low: &str, high: Option<&str>| {
            keys.iter().filter(|key| key.as_str() > low && high.is_none_or(|high| key.as_str() <= high)).count()
        };
        let first = keys.first().unwrap().clone();
        let (mut cut, mut asked) = (vec![(first, None::<String>, None::<String>)], 0);
        while cut.len() < parts && asked < 40 * parts {
            asked += 1;
            let at = (0..cut.len()).max_by_key(|at| count(&cut[*at].0, cut[*at].1.as_deref())).unwrap();
            let (low, high, empty_behind) = cut[at].clone();
            let Some(middle) = midpoint(&low, empty_behind.as_deref().or(high.as_deref()), usize::MAX) else { break };
            if count(&middle, high.as_deref()) == 0 {
                cut[at].2 = Some(middle);
            } else {
                cut[at] = (low, Some(middle.clone()), None);
                cut.push((middle, high, empty_behind));
            }
        }
        (cut.iter().map(|(low, high, _)| count(low, high.as_deref())).collect(), asked)
    }

    #[test]
    fn names_with_numbers_are_cut_into_parts_of_a_size_in_few_questions() {
        for form in ["img-{}.jpg", "data/train/{}", "{}"] {
            let keys: BTreeSet<_> = (0..20_000).map(|number| form.replace("{}", &format!("{number:08}"))).collect();
            let (sizes, asked) = cut_up(&keys, 16);
            let largest = sizes.iter().max().unwrap();
            assert!(sizes.len() == 16 && *largest <= 4_000, "{form}: {sizes:?}");
            assert!(asked <= 60, "{form}: {asked} questions");
        }
    }

    /// The page that is asked for beside a guess passes it, unless it is far enough ahead.
    #[test]
    fn names_whose_ends_say_nothing_are_cut_ahead_of_the_next_page() {
        const PAGE: usize = 1000;
        let end = |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let forms: [&dyn Fn(u64) -> String; 3] =
            [&|number| format!("img/{number:08}-{}", end(number)), &|number| format!("{number:012}.bin"), &end];
        for form in forms {
            let keys: Vec<_> = (0..100_000).map(form).collect::<BTreeSet<_>>().into_iter().collect();
            let (mut before, mut empty_behind) = (String::new(), None::<String>);
            let is_cut = (PAGE..keys.len() / 2).step_by(PAGE).any(|place| {
                let position = &keys[place - 1];
                let guess = midpoint(position, empty_behind.as_deref(), reach(&before, position));
                before.clone_from(position);
                let Some(guess) = guess else { return false };
                match keys.partition_point(|key| *key <= guess) {
                    all if all == keys.len() => empty_behind = Some(guess),
                    behind => return behind > place + PAGE,
                }
                false
            });
            assert!(is_cut, "{}", keys[0]);
        }
    }
}

//! Rounds on the target and the baseline in turn, so that what the machine does meanwhile meets both.

use std::path::Path;

use super::sides::Sides;
use super::stop::Stop;
use super::tally::Phase;
use super::workload::Workload;
use crate::error::CliError;

/// Which of the directories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Target,
    Baseline,
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Self::Target => "target",
            Self::Baseline => "baseline",
        }
    }
}

/// What one side gave in one round.
pub struct Round {
    /// From 0.
    pub number: u32,
    pub side: Side,
    pub phases: Vec<Phase>,
}

/// The sides of a round, in its order: each time another one is the first.
fn order(sides: &Sides, number: u32) -> Vec<(Side, &Path)> {
    let mut order = vec![(Side::Target, sides.target.as_path())];
    order.extend(sides.baseline.as_deref().map(|baseline| (Side::Baseline, baseline)));
    if number % 2 == 1 {
        order.reverse();
    }
    order
}

/// Runs all rounds; `begins` is told of each before it is run.
///
/// # Errors
/// What a round says, or that somebody has asked to stop.
pub fn run(
    workload: &dyn Workload,
    sides: &Sides,
    rounds: u32,
    stop: &Stop,
    mut begins: impl FnMut(u32, Side) -> Result<(), CliError>,
) -> Result<Vec<Round>, CliError> {
    let mut done = vec![];
    for number in 0..rounds {
        for (side, directory) in order(sides, number) {
            begins(number, side)?;
            workload.before(directory)?;
            stop.check()?;
            let phases = workload.round(directory, number, stop)?;
            stop.check()?;
            done.push(Round { number, side, phases });
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Noted(Mutex<Vec<(PathBuf, Option<u32>)>>);

    impl Workload for Noted {
        fn before(&self, directory: &Path) -> Result<(), CliError> {
            self.0.lock().unwrap().push((directory.to_owned(), None));
            Ok(())
        }

        fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
            self.0.lock().unwrap().push((directory.to_owned(), Some(round)));
            if round == 7 {
                stop.ask();
            }
            Ok(vec![])
        }
    }

    #[test]
    fn the_sides_take_turns_and_each_is_first_every_other_time() {
        let sides = Sides { target: "t".into(), baseline: Some("b".into()) };
        let workload = Noted::default();
        let mut begun = vec![];
        let rounds = run(&workload, &sides, 3, &Stop::default(), |number, side| {
            begun.push((number, side));
            Ok(())
        })
        .unwrap();
        use Side::{Baseline, Target};
        let expected = [(0, Target), (0, Baseline), (1, Baseline), (1, Target), (2, Target), (2, Baseline)];
        assert_eq!(begun, expected);
        assert_eq!(rounds.iter().map(|round| (round.number, round.side)).collect::<Vec<_>>(), expected);
        let noted = workload.0.into_inner().unwrap();
        let paths = ["t", "b", "b", "t", "t", "b"].map(PathBuf::from);
        assert!(noted.chunks(2).zip(&paths).all(|(pair, path)| pair[0].0 == *path && pair[1].0 == *path));
        assert!(noted.chunks(2).all(|pair| pair[0].1.is_none() && pair[1].1.is_some()));
    }

    #[test]
    fn what_was_interrupted_has_no_result() {
        let sides = Sides { target: "t".into(), baseline: None };
        let workload = Noted::default();
        assert!(run(&workload, &sides, 9, &Stop::default(), |_, _| Ok(())).is_err());
        assert_eq!(workload.0.into_inner().unwrap().len(), 16);
    }
}

//! Rounds on the target and the baseline in turn, so that what the machine does meanwhile meets both.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::measure::Phase;
use super::tree::{Match, Tree};
use crate::error::{CliError, Context as _};

/// What is done in a round. Operations that fail are in the tallies of the phases; an error is what makes the round as
/// a whole fail.
pub type Workload = Box<dyn Fn(&Turn<'_>) -> Result<Vec<Phase>, CliError>>;

/// A round on one of the directories.
pub struct Turn<'a> {
    pub directory: &'a Path,
    /// Of the round, from 0.
    pub round: u32,
    pub seed: u64,
    pub stop: &'a Stop,
}

impl Turn<'_> {
    /// What is random for one purpose in this round, and on both sides the same.
    pub fn random(&self, purpose: usize) -> StdRng {
        let mut seed = [0; 32];
        let parts = [self.seed, self.round.into(), purpose as u64];
        seed.chunks_exact_mut(8).zip(parts).for_each(|(bytes, part)| bytes.copy_from_slice(&part.to_le_bytes()));
        StdRng::from_seed(seed)
    }
}

/// Asked for by SIGINT or SIGTERM. Workers look at it between operations.
#[derive(Default)]
pub struct Stop(AtomicBool);

impl Stop {
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// # Errors
    /// When it has been asked for.
    pub fn check(&self) -> Result<(), CliError> {
        if self.is_asked() { Err(CliError::Failed("interrupted: there is no result".to_owned())) } else { Ok(()) }
    }
}

/// The target and, if there is one, the baseline.
pub struct Sides {
    pub target: PathBuf,
    pub baseline: Option<PathBuf>,
}

impl Sides {
    /// # Errors
    /// When one of them is no directory, or they are not apart.
    pub fn new(target: PathBuf, baseline: Option<PathBuf>) -> Result<Self, CliError> {
        let place = existing(&target)?;
        if let Some(baseline) = &baseline {
            let other = existing(baseline)?;
            if place.starts_with(&other) || other.starts_with(&place) {
                let text = format!(
                    "{} and the baseline {} are not apart: name two directories of which none is in the other",
                    target.display(),
                    baseline.display()
                );
                return Err(CliError::Usage(text));
            }
        }
        Ok(Self { target, baseline })
    }

    /// Sees that the baseline has the files of a tree, which the target has.
    ///
    /// # Errors
    /// When it has not.
    pub fn match_baseline(&self, tree: &Tree, how: Match, stop: &Stop) -> Result<(), CliError> {
        let Some(baseline) = &self.baseline else { return Ok(()) };
        let Some(difference) = tree.difference(&Tree::walk(baseline, stop)?, how) else { return Ok(()) };
        let (baseline, target) = (baseline.display(), self.target.display());
        Err(CliError::Failed(format!(
            "{baseline} has not the files of {target}: {difference}. Copy them into an empty directory: cp -r \
             {target}/. DIR"
        )))
    }
}

/// The path of a directory without symbolic links.
fn existing(path: &Path) -> Result<PathBuf, CliError> {
    let attributes = fs::metadata(path).map_err(|error| {
        let text = format!("cannot measure {}: {error}", path.display());
        if error.kind() == std::io::ErrorKind::NotFound { CliError::NotFound(text) } else { CliError::Failed(text) }
    })?;
    if !attributes.is_dir() {
        return Err(CliError::Usage(format!("{} is not a directory: name the one that it is in", path.display())));
    }
    path.canonicalize().context(format_args!("cannot find out what {} is", path.display()))
}

cavern_conf::named_values! {
    /// Which of the directories.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Side {
        Target = "target",
        Baseline = "baseline",
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
    workload: &Workload,
    sides: &Sides,
    (rounds, seed): (u32, u64),
    stop: &Stop,
    mut begins: impl FnMut(u32, Side),
) -> Result<Vec<Round>, CliError> {
    let mut done = vec![];
    for number in 0..rounds {
        for (side, directory) in order(sides, number) {
            begins(number, side);
            stop.check()?;
            let phases = workload(&Turn { directory, round: number, seed, stop })?;
            stop.check()?;
            done.push(Round { number, side, phases });
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn directories_are_apart() {
        let top = tempfile::tempdir().unwrap();
        let place = |name: &str| top.path().join(name);
        fs::create_dir_all(place("a/in")).unwrap();
        fs::create_dir(place("b")).unwrap();
        std::os::unix::fs::symlink(place("a"), place("link")).unwrap();
        assert!(Sides::new(place("a"), Some(place("b"))).is_ok());
        for other in ["a", "a/in", "link", "b/../a/in"] {
            let refused = Sides::new(place("a"), Some(place(other))).err().unwrap().to_string();
            assert!(refused.contains("not apart"), "{other}: {refused}");
        }
        fs::write(place("file"), "").unwrap();
        let refused = |path: &str| Sides::new(place(path), None).err().unwrap();
        assert!(matches!(refused("none"), CliError::NotFound(text) if text.contains("/none")));
        assert!(matches!(refused("file"), CliError::Usage(text) if text.contains("is not a directory")));
    }

    /// Where and in which rounds it was run.
    type Noted = Arc<Mutex<Vec<(PathBuf, u32)>>>;

    /// Notes where it was run, and asks to stop in round 7.
    fn noting() -> (Workload, Noted) {
        let noted = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&noted);
        let workload: Workload = Box::new(move |turn| {
            notes.lock().unwrap().push((turn.directory.to_owned(), turn.round));
            if turn.round == 7 {
                turn.stop.ask();
            }
            Ok(vec![])
        });
        (workload, noted)
    }

    #[test]
    fn the_sides_take_turns_and_each_is_first_every_other_time() {
        let sides = Sides { target: "t".into(), baseline: Some("b".into()) };
        let (workload, noted) = noting();
        let mut begun = vec![];
        let begins = |number, side| begun.push((number, side));
        let rounds = run(&workload, &sides, (3, 42), &Stop::default(), begins).unwrap();
        use Side::{Baseline, Target};
        let expected = [(0, Target), (0, Baseline), (1, Baseline), (1, Target), (2, Target), (2, Baseline)];
        assert_eq!(begun, expected);
        assert_eq!(rounds.iter().map(|round| (round.number, round.side)).collect::<Vec<_>>(), expected);
        let paths = [("t", 0), ("b", 0), ("b", 1), ("t", 1), ("t", 2), ("b", 2)];
        assert_eq!(*noted.lock().unwrap(), paths.map(|(path, round)| (PathBuf::from(path), round)));
    }

    #[test]
    fn what_was_interrupted_has_no_result() {
        let sides = Sides { target: "t".into(), baseline: None };
        let (workload, noted) = noting();
        assert!(run(&workload, &sides, (9, 42), &Stop::default(), |_, _| ()).is_err());
        assert_eq!(noted.lock().unwrap().len(), 8);
    }
}

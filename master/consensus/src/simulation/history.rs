//! What happened in a run, and whether that may have happened.
//!
//! The log is the order of the changes, so the question is not whether there is an order, but whether this one explains
//! everything: what each change was answered with, that none was answered without being in the log, and that what was
//! over before something else began is before it in the log, too. A read has no place in the log: it must be explained
//! by the namespace as it was after one of the changes, which is no earlier than any that was answered before the read
//! began, nor than what an earlier read has seen, and no later than any that began after the read was over. Reads are
//! given the earliest place that explains them, in the order in which they ended: an earlier place leaves later reads
//! every choice that a later one does.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cavern_proto::master::mutation::Change;
use cavern_proto::record::Mutate;
use cavern_proto::record::command::Command as Kind;

use super::model::{Model, Seen};
use crate::types::{LogId, NodeId};

/// What a client asks.
#[derive(Clone, Debug)]
pub enum Asked {
    Change { session: u64, seq: u64, change: Change },
    Lookup { parent: u64, name: String },
    Stat { inode: u64 },
    List { directory: u64 },
}

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The inode, or the errno.
    Changed(Result<u64, i32>),
    Seen(Option<Seen>),
    Names(Vec<(String, u64)>),
}

/// One question, with the moments of it and of its answer: later ones have greater numbers.
#[derive(Clone, Debug)]
pub struct Call {
    pub client: u64,
    pub asked: Asked,
    pub began: u64,
    pub began_ms: u64,
    pub answer: Option<(u64, Told)>,
}

/// The calls of a run, and what was applied.
#[derive(Default)]
pub struct History {
    pub calls: Vec<Call>,
    moment: u64,
    /// The log as masters have applied it.
    pub log: BTreeMap<u64, (LogId, Vec<Kind>)>,
    /// What was found out at once.
    pub violations: Vec<String>,
    /// Terms that could not begin.
    pub false_starts: usize,
    /// Snapshots of other masters that were begun to be taken in, and those that have taken the place of a state.
    pub installations: (usize, usize),
    /// What happened, one line each.
    pub lines: Vec<String>,
}

impl History {
    fn next_moment(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// A call begins; its number.
    pub fn begin(&mut self, client: u64, asked: Asked, now_ms: u64) -> usize {
        let began = self.next_moment();
        self.lines.push(format!("{now_ms:6} client {client} asks {asked:?}"));
        self.calls.push(Call { client, asked, began, began_ms: now_ms, answer: None });
        self.calls.len() - 1
    }

    /// It is answered.
    pub fn end(&mut self, call: usize, told: Told, now_ms: u64) {
        let moment = self.next_moment();
        let call = &mut self.calls[call];
        self.lines.push(format!("{now_ms:6} client {} was told {told:?} (asked at {})", call.client, call.began_ms));
        call.answer = Some((moment, told));
    }

    /// A master applies an entry.
    pub fn applied(&mut self, by: NodeId, log_id: LogId, commands: Vec<Kind>) {
        match self.log.get(&log_id.index) {
            None => drop(self.log.insert(log_id.index, (log_id, commands))),
            Some((known, of_others)) if *known == log_id && *of_others == commands => {}
            Some((known, of_others)) => {
                let violation = format!(
                    "master {by} applies {log_id}, {commands:?}, where another has applied {known}, {of_others:?}"
                );
                self.violations.push(violation);
            }
        }
    }

    /// What this history cannot be explained by, with the namespace as it is at the end.
    pub fn judge(&self, first: Model) -> Result<Model, String> {
        if let Some(violation) = self.violations.first() {
            return Err(violation.clone());
        }
        let mut judge = Judge::new(first, self)?;
        judge.changes(&self.calls)?;
        judge.reads(&self.calls)?;
        Ok(judge.states.pop().expect("there is a first"))
    }
}

/// The log as the judge reads it.
struct Judge {
    /// The namespace before the first change, and after each.
    states: Vec<Model>,
    /// Which of these is the first that has a change, and what the change did.
    places: HashMap<(u64, u64), (usize, Result<u64, i32>)>,
    /// Moments of answers of changes, with the place of the last change that was answered by then.
    answered: BTreeMap<u64, usize>,
    /// Moments of begins, with the place of the first change of those that began then or later.
    begun: BTreeMap<u64, usize>,
}

impl Judge {
    fn new(first: Model, history: &History) -> Result<Self, String> {
        let (mut states, mut places) = (vec![first], HashMap::new());
        for kind in history.log.values().flat_map(|(_, commands)| commands) {
            let Kind::Mutate(Mutate { session, now_ns, mutation: Some(mutation), .. }) = kind else { continue };
            let key = (*session, mutation.seq);
            if places.contains_key(&key) {
                continue;
            }
            let change = mutation.change.as_ref().ok_or("a change without content is in the log")?;
            let mut state = states.last().expect("there is a first").clone();
            let result = state.apply(*session, mutation.seq, change, *now_ns);
            places.insert(key, (states.len(), result));
            states.push(state);
        }
        Ok(Self { states, places, answered: BTreeMap::new(), begun: BTreeMap::new() })
    }

    /// Whether each change has its place, its answer, and its order in real time.
    fn changes(&mut self, calls: &[Call]) -> Result<(), String> {
        let mut asked = BTreeSet::new();
        for call in calls {
            let Asked::Change { session, seq, .. } = &call.asked else { continue };
            asked.insert((*session, *seq));
            let place = self.places.get(&(*session, *seq));
            if let Some((place, _)) = place {
                self.begun.insert(call.began, *place);
            }
            let Some((moment, told)) = &call.answer else { continue };
            let Some((place, result)) = place else {
                return Err(format!("{call:?} was answered and is not in the log"));
            };
            if *told != Told::Changed(*result) {
                return Err(format!("{call:?} must have been answered with {result:?}"));
            }
            self.answered.insert(*moment, *place);
        }
        if let Some(unasked) = self.places.keys().find(|key| !asked.contains(*key)) {
            return Err(format!("nobody has asked for change {unasked:?}, which is in the log"));
        }
        let mut newest = 0;
        for place in self.answered.values_mut() {
            newest = newest.max(*place);
            *place = newest;
        }
        let mut oldest = usize::MAX;
        for place in self.begun.values_mut().rev() {
            oldest = oldest.min(*place);
            *place = oldest;
        }
        // No change that began later is before one that was answered.
        for (moment, newest) in &self.answered {
            if let Some((_, oldest)) = self.begun.range(moment..).next()
                && oldest <= newest
            {
                return Err(format!("change {oldest} of the log began after change {newest} was answered"));
            }
        }
        Ok(())
    }

    /// Whether each read can be explained.
    fn reads(&self, calls: &[Call]) -> Result<(), String> {
        let ended = calls.iter().filter_map(|call| Some((call.answer.as_ref()?, call)));
        let reads: BTreeMap<u64, _> = ended
            .filter(|(_, call)| !matches!(call.asked, Asked::Change { .. }))
            .map(|((moment, told), call)| (*moment, (told, call)))
            .collect();
        // Moments at which reads ended, with the latest place that one of them was given by then.
        let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
        for (moment, (told, call)) in reads {
            let last_before = |places: &BTreeMap<u64, usize>| places.range(..call.began).next_back().map(|(_, at)| *at);
            let least = last_before(&self.answered).unwrap_or(0).max(last_before(&seen).unwrap_or(0));
            let end = self.begun.range(moment..).next().map_or(self.states.len(), |(_, place)| *place);
            let explains = |at: &usize| answer(&self.states[*at], &call.asked) == *told;
            let Some(place) = (least..end).find(explains) else {
                let elsewhere: Vec<usize> = (0..self.states.len()).filter(explains).collect();
                return Err(format!(
                    "{call:?} must have seen one of the states {least}..{end}, and not what is in {elsewhere:?}"
                ));
            };
            let latest = seen.last_key_value().map_or(0, |(_, latest)| *latest);
            seen.insert(moment, place.max(latest));
        }
        Ok(())
    }
}

/// What a read is to be told.
fn answer(state: &Model, asked: &Asked) -> Told {
    match asked {
        Asked::Lookup { parent, name } => Told::Seen(state.lookup(*parent, name)),
        Asked::Stat { inode } => Told::Seen(state.inode(*inode)),
        Asked::List { directory } => Told::Names(state.names(*directory)),
        Asked::Change { .. } => unreachable!("a change is no read"),
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{CreateInode, Kind as InodeKind, Mutation};

    use super::*;
    use crate::types::log_id;

    const ROOT: u64 = 2;

    fn first() -> Model {
        let root = Seen { inode: ROOT, is_directory: true, mode: 0o755, ctime_ns: 0, is_named: true };
        Model::new(root, ROOT)
    }

    fn create(name: &str) -> Change {
        let (kind, name) = (InodeKind::File as i32, name.to_owned().into());
        Change::Create(CreateInode { parent: ROOT, name, kind, ..CreateInode::default() })
    }

    fn change(seq: u64, name: &str) -> Asked {
        Asked::Change { session: 1, seq, change: create(name) }
    }

    fn list() -> Asked {
        Asked::List { directory: ROOT }
    }

    fn names(names: &[(&str, u64)]) -> Told {
        Told::Names(names.iter().map(|(name, inode)| ((*name).to_owned(), *inode)).collect())
    }

    /// What the log has, in this order.
    fn log(history: &mut History, changes: &[(u64, &str)]) {
        for (index, (seq, name)) in (1..).zip(changes) {
            let mutation = Some(Mutation { seq: *seq, change: Some(create(name)), ..Mutation::default() });
            let mutate = Mutate { session: 1, mutation, ..Mutate::default() };
            history.applied(1, log_id(1, 1, index), vec![Kind::Mutate(mutate)]);
        }
    }

    /// Calls that were made and answered one after another.
    fn one_by_one(calls: &[(Asked, Told)], changes: &[(u64, &str)]) -> Result<Model, String> {
        let mut history = History::default();
        for (asked, told) in calls {
            let call = history.begin(1, asked.clone(), 0);
            history.end(call, told.clone(), 0);
        }
        log(&mut history, changes);
        history.judge(first())
    }

    #[test]
    fn what_can_be_explained_is_right() {
        let calls = [
            (list(), names(&[])),
            (change(1, "a"), Told::Changed(Ok(3))),
            (list(), names(&[("a", 3)])),
            (change(2, "a"), Told::Changed(Err(libc_exist()))),
        ];
        // The first change was sent twice.
        one_by_one(&calls, &[(1, "a"), (1, "a"), (2, "a")]).unwrap();
    }

    #[test]
    fn what_cannot_be_explained_is_found() {
        let (a, b) = ((change(1, "a"), Told::Changed(Ok(3))), (change(2, "b"), Told::Changed(Ok(4))));
        let wrong = [
            ("an answer without an entry", vec![a.clone(), b.clone()], vec![(1, "a")]),
            ("another order than that of the log", vec![b.clone(), a.clone()], vec![(1, "a"), (2, "b")]),
            ("another answer", vec![(change(1, "a"), Told::Changed(Ok(4)))], vec![(1, "a")]),
            ("an entry that nobody asked for", vec![a.clone()], vec![(1, "a"), (2, "b")]),
            ("an outdated read", vec![a.clone(), (list(), names(&[]))], vec![(1, "a")]),
            ("a read of the future", vec![(list(), names(&[("a", 3)])), a.clone()], vec![(1, "a")]),
        ];
        for (what, calls, entries) in wrong {
            assert!(one_by_one(&calls, &entries).is_err(), "{what}");
        }
    }

    #[test]
    fn a_read_sees_nothing_older_than_an_earlier_read_did() {
        let mut history = History::default();
        let changing = history.begin(1, change(1, "a"), 0);
        for told in [names(&[("a", 3)]), names(&[])] {
            let read = history.begin(2, list(), 0);
            history.end(read, told, 0);
        }
        history.end(changing, Told::Changed(Ok(3)), 0);
        log(&mut history, &[(1, "a")]);
        assert!(history.judge(first()).unwrap_err().contains("must have seen"));
    }

    #[test]
    fn masters_that_apply_different_entries_are_found() {
        let mut history = History::default();
        history.applied(1, log_id(1, 1, 5), Vec::new());
        history.applied(2, log_id(1, 1, 5), Vec::new());
        assert!(history.violations.is_empty());
        history.applied(3, log_id(2, 3, 5), Vec::new());
        history.applied(4, log_id(1, 1, 5), vec![Kind::ReserveMasterId(1)]);
        assert!(history.violations[0].contains("master 3") && history.violations[1].contains("master 4"));
        assert!(history.judge(first()).is_err());
    }

    fn libc_exist() -> i32 {
        rustix::io::Errno::EXIST.raw_os_error()
    }
}

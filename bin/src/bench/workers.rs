//! Threads that begin together and share nothing while the clock runs.

use std::fs;
use std::sync::{PoisonError, RwLock};
use std::thread;

use tokio::time::Instant;

use super::tally::{Operation, Phase, Tally};
use crate::error::{CliError, Context as _};

/// What one worker has to say.
struct Done {
    started: Instant,
    ended: Instant,
    cpu_ns: Option<u64>,
    tally: Tally,
}

/// Has `threads` workers do their part: `work` gets the number of the worker, and counts in its tally.
///
/// # Errors
/// When a thread cannot be started, or panics.
pub fn run(
    operation: &'static Operation,
    threads: usize,
    work: impl Fn(usize, &mut Tally) + Sync,
) -> Result<Phase, CliError> {
    // Held for writing until all threads are there; then it says whether they are to begin.
    let gate = RwLock::new(false);
    let one = |worker: usize| {
        let begin = *gate.read().unwrap_or_else(PoisonError::into_inner);
        begin.then(|| {
            let mut tally = Tally::default();
            let (before, started) = (cpu_ns(), Instant::now());
            work(worker, &mut tally);
            let ended = Instant::now();
            let cpu_ns = cpu_ns().zip(before).map(|(after, before)| after.saturating_sub(before));
            Done { started, ended, cpu_ns, tally }
        })
    };
    let one = &one;
    let done: Vec<Done> = thread::scope(|scope| {
        let mut begin = gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut workers = Vec::with_capacity(threads);
        for worker in 0..threads {
            let thread = thread::Builder::new().name(format!("bench-{worker}"));
            let started = thread.spawn_scoped(scope, move || one(worker));
            // Without all of them, those that wait end at once.
            workers.push(started.context(format_args!("cannot start thread {worker} of {threads}"))?);
        }
        *begin = true;
        drop(begin);
        // All of them, also after one that panicked.
        let joined: Vec<_> = workers.into_iter().map(|worker| worker.join().ok().flatten()).collect();
        joined
            .into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| CliError::Failed("a thread of the benchmark panicked".to_owned()))
    })?;
    let (started, ended) = (done.iter().map(|done| done.started).min(), done.iter().map(|done| done.ended).max());
    let took = ended.zip(started).map(|(ended, started)| ended.duration_since(started)).unwrap_or_default();
    let cpu_ns = done.iter().try_fold(0, |sum, done| Some(sum + done.cpu_ns?));
    let mut tally = Tally::default();
    done.into_iter().for_each(|done| tally.merge(done.tally));
    Ok(Phase {
        operation,
        // A rate is never infinite.
        seconds: took.as_secs_f64().max(1e-9),
        cpu_seconds: cpu_ns.map(|ns| ns as f64 / 1e9),
        tally,
    })
}

/// Processor time of this thread, which the kernel counts at each of its ticks.
fn cpu_ns() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::tally::Unit;
    use super::*;

    static COUNT: Operation = Operation { name: "count", timed: "number", units: &[Unit::Operations("numbers/s")] };

    #[test]
    fn every_worker_does_its_part() {
        let phase = run(&COUNT, 5, |worker, tally| {
            for number in (worker..100).step_by(5) {
                tally.time(|| if number == 99 { Err("too much".to_owned()) } else { Ok(number as u64) });
            }
        })
        .unwrap();
        assert_eq!((phase.tally.operations, phase.tally.failures.count), (99, 1));
        assert_eq!((phase.tally.bytes, phase.tally.latency.count()), (4851, 99));
        assert!(phase.seconds > 0.0 && phase.rate(Unit::Operations("numbers/s")).is_finite());
    }

    #[test]
    fn a_worker_that_panics_is_an_error() {
        let result = run(&COUNT, 2, |worker, _| assert_ne!(worker, 1));
        assert!(result.is_err_and(|error| error.to_string().contains("panicked")));
    }
}

//! How long operations took, and how many there were.

use std::io;
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use serde_json::{Value, json};

use crate::Failure;

/// Repeats an operation in every task until the time is over, or until it says that there is nothing left to do; gives
/// operations per second and the times of single ones.
pub async fn measure<T: Send>(
    tasks: &mut [T],
    time: Duration,
    operation: impl AsyncFn(&mut T) -> Result<bool, Failure>,
) -> Result<Value, Failure> {
    let (start, operation) = (Instant::now(), &operation);
    let repeated = tasks.iter_mut().map(|task| async move {
        let mut times = Vec::new();
        while start.elapsed() < time {
            let begun = Instant::now();
            if !operation(task).await? {
                break;
            }
            times.push(begun.elapsed());
        }
        Ok::<_, Failure>(times)
    });
    let times: Vec<Duration> = try_join_all(repeated).await?.concat();
    Ok(report(times, start.elapsed()))
}

/// As [`measure`], with a thread for each task.
pub fn measure_threads<T: Send>(
    tasks: &mut [T],
    time: Duration,
    operation: impl Fn(&mut T) -> io::Result<bool> + Sync,
) -> Result<Value, Failure> {
    let (start, operation) = (Instant::now(), &operation);
    let repeat = |task: &mut T| {
        let mut times = Vec::new();
        while start.elapsed() < time {
            let begun = Instant::now();
            if !operation(task)? {
                break;
            }
            times.push(begun.elapsed());
        }
        Ok::<_, io::Error>(times)
    };
    let times = thread::scope(|scope| {
        let threads: Vec<_> = tasks.iter_mut().map(|task| scope.spawn(|| repeat(task))).collect();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.collect::<io::Result<Vec<_>>>()
    });
    Ok(report(times?.concat(), start.elapsed()))
}

fn report(mut times: Vec<Duration>, took: Duration) -> Value {
    times.sort_unstable();
    let at = |share: f64| {
        let time = times.get((times.len() as f64 * share) as usize).or(times.last());
        time.map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    json!({
        "count": times.len(),
        "per_second": times.len() as f64 / took.as_secs_f64(),
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
    })
}

//! Requests that took long of late, and what they waited for: what `.cv/trace` of the mount shows.
//!
//! Only a request that waits for something is followed at all: one that an event loop answers at once never comes here.
//! What takes less than `fuse.trace_above` leaves nothing behind. Of the others the slowest are kept one by one, and
//! all are summed up by the minute.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Node, Stage, StageTimes, Stages};
use cavern_conf::{Interval, counted, host};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::kernel::request_stats::RequestKind;

/// How long a request is remembered, in minutes.
const MINUTES: u64 = 10;
const MINUTE: Duration = Duration::from_secs(60);
const WINDOW: Duration = Duration::from_secs(MINUTES * 60);
/// Requests that are kept one by one.
const SLOWEST: usize = 64;

/// The slow requests of one mount.
#[derive(Debug)]
pub struct Trace {
    /// `fuse.trace_above`.
    above: Duration,
    began: Instant,
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    slowest: Vec<SlowRequest>,
    /// Oldest first.
    minutes: VecDeque<Minute>,
}

/// All slow requests that ended in one minute.
#[derive(Debug, Default)]
struct Minute {
    /// Counted from the beginning of the trace.
    number: u64,
    requests: u64,
    took: Duration,
    times: StageTimes,
}

/// What a request is about.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// Of the namespace.
    pub inode: u64,
    /// Its node, where that is known: it may be forgotten by the time somebody asks.
    pub node: Option<Arc<Node>>,
    /// Looked up in the inode; empty where that itself is meant.
    pub name: Vec<u8>,
    /// Offset and length, of a read.
    pub range: Option<(u64, usize)>,
}

/// A request that took long.
#[derive(Clone, Debug)]
struct SlowRequest {
    /// Since the epoch, in nanoseconds.
    ended_ns: i64,
    ended: Instant,
    kind: RequestKind,
    target: Target,
    took: Duration,
    times: StageTimes,
    errno: i32,
}

/// A request that is followed from the moment at which it has to wait.
#[derive(Debug)]
pub struct Traced {
    trace: Arc<Trace>,
    pub stages: Arc<Stages>,
    target: Target,
}

impl Traced {
    /// The request has its answer, or is given up; `errno` is 0 for success.
    pub fn ended(self, kind: RequestKind, took: Duration, errno: i32) {
        let Self { trace, stages, target } = self;
        if took >= trace.above {
            let (ended, times) = (Instant::now(), stages.times());
            trace.add(SlowRequest { ended_ns: host::wall_ns(), ended, kind, target, took, times, errno });
        }
    }
}

impl Trace {
    pub fn new(above: Duration) -> Self {
        Self { above, began: Instant::now(), recent: Mutex::default() }
    }

    /// Follows a request that came at `received`.
    pub fn follow(self: &Arc<Self>, received: Instant, target: Target) -> Traced {
        Traced { trace: Arc::clone(self), stages: Stages::queued(received), target }
    }

    fn minute(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_secs() / MINUTE.as_secs()
    }

    fn add(&self, request: SlowRequest) {
        let minute = self.minute(request.ended);
        let mut recent = self.recent.lock();
        recent.forget(request.ended, minute);
        if recent.minutes.back().is_none_or(|last| last.number < minute) {
            recent.minutes.push_back(Minute { number: minute, ..Minute::default() });
        }
        if let Some(last) = recent.minutes.back_mut() {
            last.add(1, request.took, &request.times);
        }
        if recent.slowest.len() < SLOWEST {
            recent.slowest.push(request);
            return;
        }
        let quickest = recent.slowest.iter_mut().min_by_key(|known| known.took);
        if let Some(quickest) = quickest.filter(|known| known.took < request.took) {
            *quickest = request;
        }
    }

    /// What is remembered now, for people. `path_of` names what a request was about.
    pub fn text(&self, path_of: impl Fn(&Target) -> String) -> String {
        let now = Instant::now();
        let (mut slowest, all) = {
            let mut recent = self.recent.lock();
            recent.forget(now, self.minute(now));
            let mut all = Minute::default();
            for minute in &recent.minutes {
                all.add(minute.requests, minute.took, &minute.times);
            }
            (recent.slowest.clone(), all)
        };
        let above = Interval::nanos(u64::try_from(self.above.as_nanos()).unwrap_or(u64::MAX));
        if all.requests == 0 {
            return format!("In the last {MINUTES} minutes no request took {above} or longer.\n");
        }
        slowest.sort_by_key(|request| std::cmp::Reverse(request.took));
        let mut text = format!(
            "In the last {MINUTES} minutes {} took {above} or longer. They waited for, in milliseconds:\n\n",
            counted(all.requests, "request")
        );
        for (name, time) in parts(all.took, &all.times) {
            let share = time.as_secs_f64() * 100.0 / all.took.as_secs_f64().max(f64::MIN_POSITIVE);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{name:<10} {:>12} {share:>5.1} %", milliseconds(time));
        }
        let _ =
            writeln!(text, "{:<10} {:>12}\n\nThe slowest of them, in milliseconds:\n", "total", milliseconds(all.took));
        let _ = write!(text, "{:<12} {:<9} {:>9}", "TIME (UTC)", "OPERATION", "TOTAL");
        for (name, _) in parts(Duration::ZERO, &StageTimes::default()) {
            let _ = write!(text, " {:>10}", name.to_uppercase());
        }
        let _ = writeln!(text, " {:>20} {:>5} PATH", "OFFSET+LENGTH", "ERRNO");
        for request in slowest {
            let (time, kind) = (time_of_day(request.ended_ns), request.kind.name());
            let _ = write!(text, "{time} {kind:<9} {:>9}", milliseconds(request.took));
            for (_, time) in parts(request.took, &request.times) {
                let _ = write!(text, " {:>10}", milliseconds(time));
            }
            let range = request.target.range.map_or_else(|| "-".to_owned(), |(at, length)| format!("{at}+{length}"));
            let errno = if request.errno == 0 { "-".to_owned() } else { request.errno.to_string() };
            let _ = writeln!(text, " {range:>20} {errno:>5} {}", one_line(&path_of(&request.target)));
        }
        text
    }
}

impl Minute {
    fn add(&mut self, requests: u64, took: Duration, times: &StageTimes) {
        self.requests += requests;
        self.took += took;
        for (sum, time) in self.times.iter_mut().zip(times) {
            *sum += *time;
        }
    }
}

impl Recent {
    fn forget(&mut self, now: Instant, minute: u64) {
        self.slowest.retain(|request| now.saturating_duration_since(request.ended) < WINDOW);
        while self.minutes.front().is_some_and(|oldest| oldest.number + MINUTES <= minute) {
            self.minutes.pop_front();
        }
    }
}

/// Each stage with its time, and last what was spent otherwise.
fn parts(took: Duration, times: &StageTimes) -> impl Iterator<Item = (&'static str, Duration)> {
    let other = took.saturating_sub(times.iter().sum());
    let stages = Stage::ALL.map(|stage| (stage.name(), times[stage as usize]));
    stages.into_iter().chain([("other", other)])
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}

/// Hours, minutes, seconds and milliseconds of a day in UTC.
fn time_of_day(ns: i64) -> String {
    let ms = ns.div_euclid(1_000_000).rem_euclid(86_400_000);
    let (seconds, ms) = (ms / 1000, ms % 1000);
    format!("{:02}:{:02}:{:02}.{ms:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// A path as part of a line.
fn one_line(path: &str) -> String {
    path.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, sleep};

    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn read(inode: u64) -> Target {
        Target { inode, range: Some((4096, 512)), ..Target::default() }
    }

    fn ended(trace: &Arc<Trace>, inode: u64, took: Duration) {
        trace.follow(Instant::now(), read(inode)).ended(RequestKind::Read, took, 0);
    }

    fn text(trace: &Trace) -> String {
        trace.text(|target| format!("/of {}", target.inode))
    }

    /// The lines of single requests.
    fn lines(text: &str) -> Vec<Vec<&str>> {
        let lines = text.lines().skip_while(|line| !line.starts_with("TIME")).skip(1);
        lines.map(|line| line.split_whitespace().collect()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_request_is_shown_with_the_parts_of_its_time() {
        let trace = Arc::new(Trace::new(ms(10)));
        assert_eq!(text(&trace), "In the last 10 minutes no request took 10ms or longer.\n");
        ended(&trace, 1, ms(9));
        assert!(text(&trace).starts_with("In the last 10 minutes no request"), "it was quick");

        let received = Instant::now();
        let traced = trace.follow(received, read(7));
        sleep(ms(5)).await;
        traced.stages.dequeued();
        sleep(ms(15)).await;
        traced.ended(RequestKind::Read, received.elapsed(), libc::EIO);
        let text = text(&trace);
        let sums: Vec<_> =
            text.lines().skip(2).take(9).map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(sums[0], ["queue", "5.0", "25.0", "%"], "{text}");
        assert_eq!(sums[7], ["other", "15.0", "75.0", "%"], "{text}");
        assert_eq!(sums[8], ["total", "20.0"], "{text}");
        let lines = lines(&text);
        assert_eq!(lines.len(), 1, "{text}");
        let expected =
            ["read", "20.0", "5.0", "0.0", "0.0", "0.0", "0.0", "0.0", "0.0", "15.0", "4096+512", "5", "/of", "7"];
        assert_eq!(lines[0][1..], expected, "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_stay_for_ten_minutes_and_all_are_summed_up() {
        let trace = Arc::new(Trace::new(ms(1)));
        for took in 1..=100 {
            ended(&trace, took, ms(took));
        }
        let shown = text(&trace);
        assert!(shown.starts_with("In the last 10 minutes 100 requests took 1ms or longer."), "{shown}");
        let totals: Vec<String> = lines(&shown).iter().map(|line| line[2].to_owned()).collect();
        let expected: Vec<String> = (37..=100).rev().map(|took| format!("{took}.0")).collect();
        assert_eq!(totals, expected);
        assert!(shown.contains("total            5050.0"), "{shown}");

        advance(MINUTE * 5).await;
        ended(&trace, 1000, ms(2));
        assert!(text(&trace).starts_with("In the last 10 minutes 101 requests"));
        advance(MINUTE * 5).await;
        let shown = text(&trace);
        assert!(shown.starts_with("In the last 10 minutes 1 request "), "{shown}");
        assert!(lines(&shown).is_empty(), "it was none of the slowest when it ended: {shown}");
        advance(MINUTE * 6).await;
        assert!(text(&trace).starts_with("In the last 10 minutes no request"));
    }

    #[test]
    fn a_path_stays_on_its_line_and_a_time_in_its_day() {
        assert_eq!(one_line("/a b/é\n/c"), "/a b/é\\n/c");
        assert_eq!(time_of_day(1_700_000_000_123_456_789), "22:13:20.123");
        assert_eq!(time_of_day(-1), "23:59:59.999");
    }
}

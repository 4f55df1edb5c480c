//! How many LIST requests of an index are under way at a time: as many as the store gives more for.
//!
//! The answers are looked at in rounds of about as many as requests are under way. Where a round with all of them busy
//! brought more keys a second than the best one before, there are a few more; where answers came late and brought no
//! more, a quarter less; and after a refusal half as many. That is the rule by which TCP shares a line: additive
//! increase, multiplicative decrease.

use std::time::Duration;

use tokio::time::Instant;

/// Requests at the beginning, and more after each round that gained.
const FIRST: usize = 8;
const MORE: usize = 4;
/// A round gains that is so much better than the best.
const GAIN: f64 = 1.05;
/// The best is forgotten so slowly: what a store gives changes.
const FADING: f64 = 0.98;
/// Answers are late that take so many times as long as the soonest rounds did.
const LATE: f64 = 2.0;
/// Answers of a round at least.
const ROUND: usize = 8;

#[derive(Debug)]
pub(super) struct StreamWidth {
    width: usize,
    most: usize,
    round: Round,
    /// Keys a second.
    best_rate: f64,
    /// Seconds until an answer, in the round in which they came soonest.
    soonest: f64,
    /// Answers to what was sent before the last refusal: more refusals among them say nothing new.
    sent_before: usize,
}

#[derive(Debug)]
struct Round {
    began: Instant,
    answers: usize,
    keys: u64,
    waited: f64,
    is_full: bool,
}

impl Round {
    fn begin(now: Instant) -> Self {
        Self { began: now, answers: 0, keys: 0, waited: 0.0, is_full: true }
    }
}

impl StreamWidth {
    /// For `most` requests at most, at least one.
    pub(super) fn new(most: usize, now: Instant) -> Self {
        let most = most.max(1);
        let round = Round::begin(now);
        Self { width: FIRST.min(most), most, round, best_rate: 0.0, soonest: f64::MAX, sent_before: 0 }
    }

    pub(super) fn current(&self) -> usize {
        self.width
    }

    /// There must be no more than this many any more.
    pub(super) fn limit(&mut self, most: usize) {
        self.most = most.max(1);
        self.width = self.width.min(self.most);
    }

    /// An answer of so many keys has come, after so long; `busy` requests are under way beside it.
    pub(super) fn answered(&mut self, keys: u64, waited: Duration, busy: usize, now: Instant) {
        self.sent_before = self.sent_before.saturating_sub(1);
        let round = &mut self.round;
        round.answers += 1;
        round.keys += keys;
        round.waited += waited.as_secs_f64();
        round.is_full &= busy + 1 >= self.width;
        if round.answers < self.width.max(ROUND) {
            return;
        }
        let took = now.saturating_duration_since(round.began).as_secs_f64().max(1e-6);
        let (rate, mean) = (round.keys as f64 / took, round.waited / round.answers as f64);
        let gains = rate > self.best_rate * GAIN;
        if gains && round.is_full {
            self.width = (self.width + MORE).min(self.most);
        } else if !gains && mean > self.soonest * LATE {
            self.width = (self.width - self.width / 4).max(1);
        }
        self.best_rate = rate.max(self.best_rate * FADING);
        self.soonest = self.soonest.min(mean);
        self.round = Round::begin(now);
    }

    /// The store has refused a request, or has not answered it, while `busy` others are under way.
    pub(super) fn refused(&mut self, busy: usize, now: Instant) {
        if self.sent_before > 0 {
            self.sent_before -= 1;
            return;
        }
        (self.width, self.sent_before) = ((self.width / 2).max(1), busy);
        // What it gave before, it gives no more.
        (self.best_rate, self.round) = (0.0, Round::begin(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds with a store that answers after `latency` seconds, by the number of requests under way.
    fn after_rounds(width: &mut StreamWidth, now: &mut Instant, rounds: usize, latency: impl Fn(usize) -> f64) {
        for _ in 0..rounds {
            let busy = width.current();
            let waited = Duration::from_secs_f64(latency(busy));
            let answers = busy.max(ROUND);
            *now += waited.mul_f64(answers as f64 / busy as f64);
            for _ in 0..answers {
                width.answered(1000, waited, busy, *now);
            }
        }
    }

    #[tokio::test]
    async fn there_are_more_while_the_store_gives_more_and_no_more_than_there_may_be() {
        let mut now = Instant::now();
        let mut width = StreamWidth::new(48, now);
        assert_eq!(width.current(), FIRST);
        after_rounds(&mut width, &mut now, 20, |_| 0.15);
        assert_eq!(width.current(), 48);
        width.limit(5);
        after_rounds(&mut width, &mut now, 20, |_| 0.15);
        assert_eq!(width.current(), 5);
        assert_eq!(StreamWidth::new(0, now).current(), 1);
    }

    #[tokio::test]
    async fn a_store_that_serves_one_after_the_other_is_not_sent_ever_more() {
        let mut now = Instant::now();
        let mut width = StreamWidth::new(1000, now);
        // Beyond sixteen at a time each waits for the others.
        after_rounds(&mut width, &mut now, 200, |busy| 0.01 * (busy as f64 / 16.0).max(1.0));
        assert!((12..=40).contains(&width.current()), "{}", width.current());
    }

    #[tokio::test]
    async fn a_refusal_halves_them_once_and_they_come_back() {
        let mut now = Instant::now();
        let mut width = StreamWidth::new(48, now);
        after_rounds(&mut width, &mut now, 20, |_| 0.15);
        for _ in 0..30 {
            width.refused(47, now);
        }
        assert_eq!(width.current(), 24);
        after_rounds(&mut width, &mut now, 4, |_| 0.15);
        assert!(width.current() > 24);
        for _ in 0..1000 {
            width.refused(0, now);
        }
        assert_eq!(width.current(), 1);
    }

    #[tokio::test]
    async fn idle_requests_are_no_reason_for_more() {
        let mut now = Instant::now();
        let mut width = StreamWidth::new(48, now);
        for _ in 0..200 {
            now += Duration::from_millis(10);
            width.answered(1000, Duration::from_millis(10), 2, now);
        }
        assert!(width.current() <= FIRST);
    }
}

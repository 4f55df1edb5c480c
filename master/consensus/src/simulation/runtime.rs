//! Time, chance and tasks of a simulation. All of it runs on one thread, on tokio's clock, which stands still while
//! anybody has something to do. Each simulated master is a [`Host`]: whatever runs on it runs in its scope, and so the
//! code of the master finds it. Code that runs elsewhere, that is in all other tests, has the real ones.
//!
//! Nothing of tokio that throws dice of its own is on the way: `select!` is biased, and a watch channel wakes its
//! receivers in the order in which they began to wait.

use std::fmt;
use std::future::{Future, poll_fn};
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use futures::FutureExt;
use openraft::OptionalSend;
use openraft::OptionalSync;
use openraft::async_runtime::watch::{RecvError, SendError, Watch, WatchReceiver, WatchSender};
use openraft::async_runtime::{AsyncRuntime, Instant};
use openraft_rt::deterministic_rng::DeterministicRng;
use openraft_rt_tokio::{TokioMpsc, TokioMutex, TokioOneshot, TokioRuntime};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::error::Elapsed;
use tokio::time::{Sleep, Timeout};

use super::world::Host;

/// Numbers that a seed gives (splitmix64).
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below this one, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True so often in a thousand times.
    pub fn permille(&mut self, often: u64) -> bool {
        self.below(1000) < often
    }

    pub fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }

    /// Between these, in milliseconds.
    pub fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(least + self.below(most - least + 1))
    }
}

/// What openraft runs on in tests.
pub struct SeededRuntime(TokioRuntime);

impl fmt::Debug for SeededRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

type Seeded = DeterministicRng<TokioRuntime>;

impl AsyncRuntime for SeededRuntime {
    type JoinError = tokio::task::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = JoinHandle<T>;
    type Sleep = Sleep;
    type Instant = HostInstant;
    type TimeoutError = Elapsed;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = Timeout<T>;
    type ThreadLocalRng = <Seeded as AsyncRuntime>::ThreadLocalRng;

    fn spawn<T>(future: T) -> JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        match Host::current() {
            Some(host) => host.spawn(future),
            None => tokio::spawn(future),
        }
    }

    fn sleep(duration: Duration) -> Sleep {
        Self::sleep_until(HostInstant::now() + duration)
    }

    fn sleep_until(deadline: HostInstant) -> Sleep {
        tokio::time::sleep_until(deadline.of_all())
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(duration: Duration, future: F) -> Timeout<F> {
        Self::timeout_at(HostInstant::now() + duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(deadline: HostInstant, future: F) -> Timeout<F> {
        tokio::time::timeout_at(deadline.of_all(), future)
    }

    fn is_panic(error: &Self::JoinError) -> bool {
        error.is_panic()
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        let seed = match Host::current() {
            Some(host) => host.world.chance.lock().next(),
            None => std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0),
        };
        Seeded::scope(seed, async { Seeded::thread_rng() }).now_or_never().expect("it waits for nothing")
    }

    type Mpsc = TokioMpsc;
    type Watch = OrderedWatch;
    type Oneshot = TokioOneshot;
    type Mutex<T: OptionalSend + 'static> = TokioMutex<T>;

    fn new(threads: usize) -> Self {
        Self(TokioRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }
}

/// A moment as the clock of a host has it, which may run faster or more slowly than time itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostInstant(tokio::time::Instant);

impl HostInstant {
    /// The moment of time itself.
    fn of_all(self) -> tokio::time::Instant {
        match Host::current() {
            Some(host) => host.begin + (self.0 - host.begin).mul_f64(1.0 / host.pace),
            None => self.0,
        }
    }
}

impl Instant for HostInstant {
    fn now() -> Self {
        let now = tokio::time::Instant::now();
        match Host::current() {
            Some(host) => Self(host.begin + (now - host.begin).mul_f64(host.pace)),
            None => Self(now),
        }
    }
}

impl Add<Duration> for HostInstant {
    type Output = Self;
    fn add(self, rhs: Duration) -> Self {
        Self(self.0 + rhs)
    }
}

impl AddAssign<Duration> for HostInstant {
    fn add_assign(&mut self, rhs: Duration) {
        self.0 += rhs;
    }
}

impl Sub<Duration> for HostInstant {
    type Output = Self;
    fn sub(self, rhs: Duration) -> Self {
        Self(self.0 - rhs)
    }
}

impl Sub for HostInstant {
    type Output = Duration;
    fn sub(self, rhs: Self) -> Duration {
        self.0 - rhs.0
    }
}

impl SubAssign<Duration> for HostInstant {
    fn sub_assign(&mut self, rhs: Duration) {
        self.0 -= rhs;
    }
}

/// Tokio's watch channel, which wakes in order where it was made on a [`Host`].
pub struct OrderedWatch;

/// Those who wait.
type Waiting = Arc<Mutex<Vec<Waker>>>;

pub struct OrderedSender<T> {
    inner: watch::Sender<T>,
    waiting: Option<Waiting>,
}

pub struct OrderedReceiver<T> {
    inner: watch::Receiver<T>,
    waiting: Option<Waiting>,
}

impl<T> OrderedSender<T> {
    fn wake(&self) {
        let waiting = self.waiting.as_ref().map(|waiting| std::mem::take(&mut *waiting.lock()));
        waiting.into_iter().flatten().for_each(Waker::wake);
    }
}

impl<T> Clone for OrderedSender<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), waiting: self.waiting.clone() }
    }
}

impl<T> Drop for OrderedSender<T> {
    fn drop(&mut self) {
        // If it is the last one: they look when this is over.
        self.wake();
    }
}

impl<T> Clone for OrderedReceiver<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), waiting: self.waiting.clone() }
    }
}

impl Watch for OrderedWatch {
    type Sender<T: OptionalSend + OptionalSync> = OrderedSender<T>;
    type Receiver<T: OptionalSend + OptionalSync> = OrderedReceiver<T>;
    type Ref<'a, T: OptionalSend + 'a> = watch::Ref<'a, T>;

    fn channel<T: OptionalSend + OptionalSync>(init: T) -> (OrderedSender<T>, OrderedReceiver<T>) {
        let (sender, receiver) = watch::channel(init);
        let waiting = Host::current().map(|_| Waiting::default());
        (OrderedSender { inner: sender, waiting: waiting.clone() }, OrderedReceiver { inner: receiver, waiting })
    }
}

impl<T: OptionalSend + OptionalSync> WatchSender<OrderedWatch, T> for OrderedSender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        self.inner.send(value).map_err(|unsent| SendError(unsent.0))?;
        self.wake();
        Ok(())
    }

    fn send_if_modified<F>(&self, modify: F) -> bool
    where
        F: FnOnce(&mut T) -> bool,
    {
        let is_modified = self.inner.send_if_modified(modify);
        if is_modified {
            self.wake();
        }
        is_modified
    }

    fn borrow_watched(&self) -> watch::Ref<'_, T> {
        self.inner.borrow()
    }

    fn subscribe(&self) -> OrderedReceiver<T> {
        OrderedReceiver { inner: self.inner.subscribe(), waiting: self.waiting.clone() }
    }
}

impl<T: OptionalSend + OptionalSync> WatchReceiver<OrderedWatch, T> for OrderedReceiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        let Some(waiting) = self.waiting.clone() else {
            return self.inner.changed().await.map_err(|_| RecvError(()));
        };
        poll_fn(|context| match self.inner.has_changed() {
            Ok(true) => {
                self.inner.mark_unchanged();
                Poll::Ready(Ok(()))
            }
            Ok(false) => {
                let mut waiting = waiting.lock();
                if !waiting.iter().any(|known| known.will_wake(context.waker())) {
                    waiting.push(context.waker().clone());
                }
                Poll::Pending
            }
            Err(_closed) => Poll::Ready(Err(RecvError(()))),
        })
        .await
    }

    fn borrow_watched(&self) -> watch::Ref<'_, T> {
        self.inner.borrow()
    }

    fn borrow_and_update(&mut self) -> watch::Ref<'_, T> {
        self.inner.borrow_and_update()
    }
}
